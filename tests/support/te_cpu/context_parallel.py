"""Fakes of Transformer Engine's kernels for packed rows (thd): a fused attention, and what context parallelism needs.

They keep the contract of the C++ extension in plain torch, float32 inside, and raise on what they do not know.
`register` puts them into the fake extension. Around them runs Transformer Engine's own code: its choice of a backend,
its `FusedAttention`, the ring of its context parallelism.
Axis letters: t tokens of a rank's packed row, h heads, g groups of heads that share keys, d size of a head.
`boundaries` [n+1] of n sequences in t; with context parallelism a rank has two chunks of equal length of each sequence,
as far from its start as from its end. Their log-sum-exp of scores (lse) is [t, h, 1] at the fused attention and [h, t]
between the steps of the ring.
"""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

_FORWARD = (
    "max_seqlen_q", "max_seqlen_kv", "is_training", "attn_scale", "dropout", "fast_zero_fill", "qkv_layout",
    "o_format", "qkv_scale_inv_format", "bias_type", "mask_type", "softmax_type", "window_size",
    "bottom_right_diagonal", "cu_seqlens_q", "cu_seqlens_kv", "q", "k", "v", "fake_dtype", "cu_seqlens_q_padded",
    "cu_seqlens_kv_padded", "page_table_k", "page_table_v", "s_quantizer", "o_quantizer", "bias", "softmax_offset",
    "rng_gen", "rng_elements", "return_max_logit", "cuda_graph",
)  # fmt: skip
_BACKWARD = (
    "max_seqlen_q", "max_seqlen_kv", "attn_scale", "dropout", "fast_zero_fill", "qkv_layout", "o_format",
    "do_format", "dqkv_layout", "qkv_scale_inv_format", "do_scale_inv_format", "bias_type", "mask_type",
    "softmax_type", "window_size", "bottom_right_diagonal", "deterministic", "cu_seqlens_q", "cu_seqlens_kv", "q",
    "k", "v", "out", "d_out", "fake_dtype", "saved", "cu_seqlens_q_padded", "cu_seqlens_kv_padded", "s_quantizer",
    "dp_quantizer", "dqkv_quantizer", "cuda_graph",
)  # fmt: skip
_OFF = (
    "dropout",
    "page_table_k",
    "page_table_v",
    "s_quantizer",
    "o_quantizer",
    "dp_quantizer",
    "dqkv_quantizer",
    "bias",
    "softmax_offset",
    "rng_gen",
    "return_max_logit",
    "cuda_graph",
    "bottom_right_diagonal",
)  # fmt: skip; what the fake attention has not
_INTO: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"add": Tensor.add_, "copy": Tensor.copy_}


def register(ext: Any) -> None:
    """Put the fakes into the fake extension `ext`, before Transformer Engine is imported."""
    for function in (
        thd_get_partitioned_indices,
        thd_read_half_tensor,
        thd_second_half_lse_correction,
        thd_read_second_half_lse,
        thd_out_correction,
        thd_grad_correction,
    ):
        setattr(ext, function.__name__, function)
    fused = FusedAttention(ext)
    ext.get_fused_attn_backend, ext.fused_attn_fwd, ext.fused_attn_bwd = fused.choose, fused.forward, fused.backward


def finish() -> None:
    """After Transformer Engine is imported, give it what it takes for granted on a GPU.

    Its fused attention wants half precision: float32 passes for it, or nothing could be compared to 1e-5. Its ring
    waits for messages twice: NCCL allows it, gloo would wait for ever.
    """
    from transformer_engine.pytorch.attention.dot_product_attention import backends, context_parallel, utils

    for module in (backends, utils):
        module.torch = _HalfIsFloat32()
    communicate = context_parallel.flash_attn_p2p_communicate
    context_parallel.flash_attn_p2p_communicate = lambda *args: [_WaitedOnce(work) for work in communicate(*args)]


class _WaitedOnce:
    """A message under way."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
        self._work = None


class _HalfIsFloat32:
    """The `torch` that two modules of Transformer Engine see."""

    float16 = torch.float32

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """Of one sequence: output [t, h, d of v] and lse [t, h], float32. The keys [t', g, d] may be fewer than queries."""
    scores = _scores(q, k, scale=scale, causal=causal)
    lse = scores.logsumexp(-1)  # [h, t]
    return torch.einsum("hqk,khd->qhd", (scores - lse[..., None]).exp(), _of_heads(v, q.shape[1])), lse.t()


def attention_gradients(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, d_out: Tensor, lse: Tensor, *, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of one sequence, float32. `out` and `lse` [t, h] may be those of more keys than are given here."""
    weights = (_scores(q, k, scale=scale, causal=causal) - lse.t()[..., None]).exp()  # [h, t, t']
    d_out = d_out.float()
    d_weights = torch.einsum("qhd,khd->hqk", d_out, _of_heads(v, q.shape[1]))
    d_scores = weights * (d_weights - (out.float() * d_out).sum(-1).t()[..., None]) * scale
    dq = torch.einsum("hqk,khd->qhd", d_scores, _of_heads(k, q.shape[1]))
    dk, dv = torch.einsum("hqk,qhd->khd", d_scores, q.float()), torch.einsum("hqk,qhd->khd", weights, d_out)
    return dq, *(each.unflatten(1, (k.shape[1], -1)).sum(2) for each in (dk, dv))


def _scores(q: Tensor, k: Tensor, *, scale: float, causal: bool) -> Tensor:
    """[h, t, t'], -inf at the keys that lie after a query."""
    scores = torch.einsum("qhd,khd->hqk", q.float(), _of_heads(k, q.shape[1])) * scale
    return scores.masked_fill(torch.ones_like(scores[0], dtype=torch.bool).triu(1), -torch.inf) if causal else scores


def _of_heads(grouped: Tensor, num_heads: int) -> Tensor:
    return grouped.float().repeat_interleave(num_heads // grouped.shape[1], dim=1)


class FusedAttention:
    """cuDNN's fused attention over packed rows, by the extension's positional arguments.

    `cu_seqlens` says how long sequences are, `cu_seqlens_padded` where they start. What lies between is padding:
    output, lse and gradients are 0 there.
    """

    def __init__(self, ext: Any) -> None:
        self._chosen = ext.NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen
        self._none = ext.NVTE_Fused_Attn_Backend.NVTE_No_Backend
        self._known = {
            "qkv_layout": ext.NVTE_QKV_Layout.NVTE_THD_THD_THD,
            "dqkv_layout": ext.NVTE_QKV_Layout.NVTE_THD_THD_THD,
            "o_format": ext.NVTE_QKV_Format.NVTE_THD,
            "do_format": ext.NVTE_QKV_Format.NVTE_THD,
            "bias_type": ext.NVTE_Bias_Type.NVTE_NO_BIAS,
            "softmax_type": ext.NVTE_Softmax_Type.NVTE_VANILLA_SOFTMAX,
        }
        padding, causal = ext.NVTE_Mask_Type.NVTE_PADDING_MASK, ext.NVTE_Mask_Type.NVTE_PADDING_CAUSAL_MASK
        self._windows = {padding: ((-1, -1),), causal: ((-1, -1), (-1, 0))}
        self._causal = causal

    def choose(self, wanted: Any) -> tuple[Any, str]:
        """The backend for Transformer Engine's `FusedAttentionParams`, or none and why."""
        try:
            self._check(
                SimpleNamespace(
                    qkv_layout=wanted.qkv_layout,
                    mask_type=wanted.attn_mask_type,
                    window_size=(wanted.window_size_left, wanted.window_size_right),
                    dropout=wanted.dropout,
                    bottom_right_diagonal=wanted.bottom_right_diagonal,
                )
            )
        except NotImplementedError as error:
            return self._none, str(error)
        return self._chosen, ""

    def forward(self, *args: Any) -> list[Tensor]:
        """[output [t, h, d of v], lse [t, h, 1], state of the random generator]."""
        given = SimpleNamespace(**dict(zip(_FORWARD, args, strict=True)))
        self._check(given)
        out, lse = given.q.new_zeros(*given.q.shape[:-1], given.v.shape[-1]), torch.zeros(given.q.shape[:-1])
        for of_q, of_k in _sequences(given):
            parts = given.q[of_q], given.k[of_k], given.v[of_k]
            out[of_q], lse[of_q] = attention(*parts, scale=given.attn_scale, causal=given.mask_type == self._causal)
        return [out, lse[..., None], torch.zeros(2, dtype=torch.int64)]

    def backward(self, *args: Any) -> list[Tensor | None]:
        """[dq, dk, dv, None, None]: no gradients of a bias and of a softmax's offset."""
        given = SimpleNamespace(**dict(zip(_BACKWARD, args, strict=True)))
        self._check(given)
        lse = given.saved[0].squeeze(-1)
        gradients = [torch.zeros_like(each) for each in (given.q, given.k, given.v)]
        for of_q, of_k in _sequences(given):
            found = attention_gradients(
                given.q[of_q],
                given.k[of_k],
                given.v[of_k],
                given.out[of_q],
                given.d_out[of_q],
                lse[of_q],
                scale=given.attn_scale,
                causal=given.mask_type == self._causal,
            )
            for gradient, place, part in zip(gradients, (of_q, of_k, of_k), found, strict=True):
                gradient[place] = part
        return [*gradients, None, None]

    def _check(self, given: SimpleNamespace) -> None:
        for name, value in vars(given).items():
            if (name in _OFF and value) or (name in self._known and value != self._known[name]):
                raise NotImplementedError(f"the fake fused attention does not know {name} = {value}")
        if tuple(given.window_size) not in self._windows.get(given.mask_type, ()):
            raise NotImplementedError(
                f"the fake fused attention does not know mask {given.mask_type} with window {given.window_size}"
            )


def _sequences(given: SimpleNamespace) -> Iterator[tuple[slice, slice]]:
    """Where each sequence's queries and its keys lie; none that lacks either."""
    queries = _slices(given.cu_seqlens_q, given.cu_seqlens_q_padded, given.max_seqlen_q)
    keys = _slices(given.cu_seqlens_kv, given.cu_seqlens_kv_padded, given.max_seqlen_kv)
    for of_q, of_k in zip(queries, keys, strict=True):
        if of_q.stop > of_q.start and of_k.stop > of_k.start:
            yield of_q, of_k


def _slices(boundaries: Tensor, padded: Tensor | None, longest: int) -> list[slice]:
    starts = (boundaries if padded is None else padded).tolist()
    lengths = boundaries.diff().tolist()
    assert max(lengths) <= longest, f"a sequence of {max(lengths)} tokens where at most {longest} were announced"
    ends = [start + length for start, length in zip(starts[:-1], lengths, strict=True)]
    assert all(end <= start for end, start in zip(ends, starts[1:], strict=True)), f"{lengths} tokens from {starts}"
    return [slice(start, end) for start, end in zip(starts[:-1], ends, strict=True)]


def _half(boundaries: Tensor, which: int) -> Tensor:
    """Places in t of the first or second half of every sequence, in order."""
    starts, lengths = boundaries[:-1].tolist(), boundaries.diff().tolist()
    assert not any(length % 2 for length in lengths), f"sequences of {lengths} tokens have no two halves"
    halves = [
        start + which * (length // 2) + torch.arange(length // 2) for start, length in zip(starts, lengths, strict=True)
    ]
    return torch.cat(halves)


def thd_get_partitioned_indices(boundaries: Tensor, num_tokens: int, size: int, rank: int) -> Tensor:
    """[num_tokens / size] places of a rank's tokens: of each sequence's 2 * size chunks those `rank` from its ends."""
    assert num_tokens == boundaries[-1], f"{num_tokens} tokens, but sequences up to {boundaries[-1]}"
    places = []
    for start, length in zip(boundaries[:-1].tolist(), boundaries.diff().tolist(), strict=True):
        chunk = length // (2 * size)
        assert chunk * 2 * size == length, f"a sequence of {length} tokens has no {2 * size} equal chunks"
        places += [start + number * chunk + torch.arange(chunk) for number in (rank, 2 * size - 1 - rank)]
    return torch.cat(places).to(torch.int32)


def thd_read_half_tensor(tensor: Tensor, boundaries: Tensor, which: int) -> Tensor:
    """[t/2, ...] the first (0) or second half of every sequence of [t, ...]."""
    return tensor[_half(boundaries, which)]


def thd_second_half_lse_correction(lse: Tensor, lse_of_step: Tensor, boundaries: Tensor, packed: bool) -> None:
    """In place: to lse [h, t] come the keys of a step in which only the second halves [h, t/2] took part."""
    _check_packed(packed)
    places = _half(boundaries, 1)
    lse[:, places] = torch.logaddexp(lse[:, places], lse_of_step)


def thd_read_second_half_lse(lse: Tensor, boundaries: Tensor, packed: bool, num_tokens: int) -> Tensor:
    """[h, t/2] of the second halves."""
    _check_packed(packed)
    found = lse[:, _half(boundaries, 1)]
    assert found.shape[1] == num_tokens, f"second halves have {found.shape[1]} tokens, not {num_tokens}"
    return found


def thd_out_correction(
    out: Tensor,
    out_of_step: Tensor,
    old_lse: Tensor,
    lse: Tensor,
    lse_of_step: Tensor,
    boundaries: Tensor,
    only_second_half: bool,
    packed: bool,
) -> None:
    """In place: to the output [t, h, d] under `old_lse` comes that of a step, so that it is the one under `lse`."""
    _check_packed(packed)
    places = _half(boundaries, 1) if only_second_half else torch.arange(lse.shape[1])
    keeps = (old_lse[:, places] - lse[:, places]).exp().t()[..., None]
    takes = (lse_of_step - lse[:, places]).exp().t()[..., None]
    out[places] = (out[places] * keeps + out_of_step.view(-1, *out.shape[1:]) * takes).to(out.dtype)


def thd_grad_correction(grad: Tensor, grad_of_step: Tensor, boundaries: Tensor, first: str, second: str) -> None:
    """In place: a step's gradient into [t, h, d], "add" or "copy" in each half; "none": the step has not this half."""
    halves = [(_half(boundaries, which), mode) for which, mode in enumerate((first, second)) if mode != "none"]
    parts = [grad_of_step[places] for places, _ in halves] if len(halves) == 2 else [grad_of_step]
    for (places, mode), part in zip(halves, parts, strict=True):
        if mode not in _INTO:
            raise NotImplementedError(f"the fake correction of gradients does not know {mode!r}")
        grad[places] = _INTO[mode](grad[places], part)


def _check_packed(packed: bool) -> None:
    if not packed:
        raise NotImplementedError("the fakes know the packed lse [h, t] only")
