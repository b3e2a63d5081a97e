"""Rotary embedding of whole rows and of packed ones, whose positions start again at each sequence."""

import torch
from torch import Tensor

from tests.support.te_cpu.extension import Extension


def register(extension: Extension) -> None:
    def forward(*args: object) -> Tensor:
        return _fused_rope(extension, False, *args)

    def backward(*args: object) -> Tensor:
        return _fused_rope(extension, True, *args)

    extension.fused_rope_forward, extension.fused_rope_backward = forward, backward


def _fused_rope(  # the extension's signature
    extension: Extension,
    backward: bool,
    values: Tensor,
    freqs: Tensor,
    start_positions: Tensor | None,
    qkv_format: object,
    interleaved: bool,
    cu_seqlens: Tensor | None,
    cp_size: int,
    cp_rank: int,
) -> Tensor:
    """`values` [T, heads, d] (thd), [s, b, heads, d] or [b, s, heads, d]; angles [positions, 1, 1, r], r <= d."""
    if start_positions is not None:
        raise NotImplementedError(f"a fused rotary embedding of {tuple(values.shape)} with start positions")
    formats = extension.NVTE_QKV_Format
    if qkv_format == formats.NVTE_THD:
        assert cu_seqlens is not None, "a packed row without its sequences' boundaries"
        positions = _packed_positions(cu_seqlens.tolist(), cp_size, cp_rank, num_tokens=len(values))
        angles = freqs.reshape(len(freqs), -1)[positions][:, None]
    elif cp_size > 1:
        raise NotImplementedError(f"a fused rotary embedding of {tuple(values.shape)} over {cp_size} context ranks")
    elif qkv_format == formats.NVTE_SBHD:
        angles = freqs[: values.shape[0]]
    else:
        angles = freqs[: values.shape[1]].transpose(0, 1)
    return _rotate(values, angles, backward, interleaved)


def _packed_positions(boundaries: list[int], cp_size: int, cp_rank: int, *, num_tokens: int) -> Tensor:
    """Position in its sequence of each token that a context rank holds: of each sequence two of 2 * `cp_size` pieces,
    one from the front and its mirror from the back. Boundaries are those of the whole row."""
    positions = []
    for start, end in zip(boundaries, boundaries[1:], strict=False):
        pieces = torch.arange(end - start).chunk(2 * cp_size) if cp_size > 1 else (torch.arange(end - start),)
        mine = (cp_rank, 2 * cp_size - 1 - cp_rank) if cp_size > 1 else (0,)
        positions += [pieces[piece] for piece in mine]
    found = torch.cat(positions)
    assert len(found) == num_tokens, f"boundaries of {len(found)} tokens for a row of {num_tokens}"
    return found


def _rotate(values: Tensor, angles: Tensor, backward: bool, interleaved: bool) -> Tensor:
    """The rotation, or its transpose, of the first numbers of each head; those behind pass."""
    turned, rest = values[..., : angles.shape[-1]].float(), values[..., angles.shape[-1] :]
    cos, sin = angles.cos(), angles.sin()
    if backward:
        turned = turned * cos - _quarter(turned * sin, interleaved)
    else:
        turned = turned * cos + _quarter(turned, interleaved) * sin
    return torch.cat((turned.to(values.dtype), rest), dim=-1)


def _quarter(values: Tensor, interleaved: bool) -> Tensor:
    """A quarter of a turn of each pair: neighbours, or numbers half a head apart."""
    if interleaved:
        return torch.stack((-values[..., 1::2], values[..., ::2]), dim=-1).flatten(-2)
    first, second = values.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)
