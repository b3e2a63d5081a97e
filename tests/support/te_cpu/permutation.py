"""The Triton kernels under Transformer Engine's MoE permutation, by its own maps of rows.

A token's line of the map [tokens, 2 * experts + 1]: the rows of its copies, behind `experts` numbers the experts of
these copies, last their number n. Here copies stand in the order of their experts; the kernels leave that open.
"""

from typing import Any

import torch
from torch import Tensor


def register(kernels: Any) -> None:
    """Into the module `transformer_engine.pytorch.triton.permutation`."""
    for function in (
        make_row_id_map,
        permute_with_mask_map,
        unpermute_with_mask_map,
        unpermute_with_mask_map_bwd_with_merging_probs,
        make_chunk_sort_map,
        sort_chunks_by_map,
    ):
        setattr(kernels, function.__name__, function)


def make_row_id_map(routing_map: Tensor, num_tokens: int, num_experts: int) -> Tensor:
    """Rows are sorted by expert, then by token. What the map does not use is -1."""
    row_map = torch.full((num_tokens, 2 * num_experts + 1), -1, dtype=torch.int32)
    chosen = routing_map.bool()
    order = chosen.t().flatten().cumsum(0).reshape(num_experts, num_tokens).t() - 1  # [tokens, experts]
    row_map[:, -1] = chosen.sum(1)
    slots = chosen.cumsum(1) - 1
    token, expert = chosen.nonzero(as_tuple=True)
    slot = slots[token, expert]
    row_map[token, slot] = order[token, expert].to(torch.int32)
    row_map[token, num_experts + slot] = expert.to(torch.int32)
    return row_map


def _copies(row_map: Tensor, num_experts: int, pad_offsets: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Token, expert and row of each copy."""
    slots = torch.arange(num_experts)
    token, slot = (slots < row_map[:, -1:]).nonzero(as_tuple=True)
    expert, row = row_map[token, num_experts + slot].long(), row_map[token, slot].long()
    return token, expert, row if pad_offsets is None else row + pad_offsets[expert]


def permute_with_mask_map(  # the kernel's signature
    inp: Tensor,
    row_id_map: Tensor,
    probs: Tensor | None,
    scale: Tensor | None,
    pad_offsets: Tensor | None,
    num_tokens: int,
    num_experts: int,
    num_out_tokens: int,
    hidden_size: int,
    scale_hidden_dim: int,
) -> tuple[Tensor, None, Tensor | None]:
    """[tokens, hidden] to [copies, hidden], and chances [tokens, experts] to [copies]. Rows between are 0."""
    if scale is not None:
        raise NotImplementedError(f"a permutation of {tuple(inp.shape)} with FP8 scales {tuple(scale.shape)}")
    token, expert, row = _copies(row_id_map, num_experts, pad_offsets)
    output = inp.new_zeros((num_out_tokens, hidden_size))
    output[row] = inp[token]
    if probs is None:
        return output, None, None
    permuted_probs = probs.new_zeros(num_out_tokens)
    permuted_probs[row] = probs[token, expert]
    return output, None, permuted_probs


def unpermute_with_mask_map(  # the kernel's signature
    inp: Tensor,
    row_id_map: Tensor,
    merging_probs: Tensor | None,
    permuted_probs: Tensor | None,
    pad_offsets: Tensor | None,
    num_tokens: int,
    num_experts: int,
    hidden_size: int,
) -> tuple[Tensor, Tensor | None]:
    """The sum of a token's copies, weighted where there are chances; chances [copies] back to [tokens, experts]."""
    token, expert, row = _copies(row_id_map, num_experts, pad_offsets)
    copies = inp[row].float()
    if merging_probs is not None:
        copies = copies * merging_probs[token, expert].float()[:, None]
    output = torch.zeros((num_tokens, hidden_size)).index_add_(0, token, copies).to(inp.dtype)
    if permuted_probs is None:
        return output, None
    unpermuted_probs = permuted_probs.new_zeros((num_tokens, num_experts))
    unpermuted_probs[token, expert] = permuted_probs[row]
    return output, unpermuted_probs


def unpermute_with_mask_map_bwd_with_merging_probs(  # the kernel's signature
    fwd_output_grad: Tensor,
    row_id_map: Tensor,
    fwd_input: Tensor,
    merging_probs: Tensor,
    pad_offsets: Tensor | None,
    num_tokens: int,
    num_experts: int,
    num_out_tokens: int,
    hidden_size: int,
) -> tuple[Tensor, Tensor]:
    """Gradients of the copies and of the chances."""
    token, expert, row = _copies(row_id_map, num_experts, pad_offsets)
    gradient = fwd_output_grad[token].float()
    act_grad = fwd_output_grad.new_zeros((num_out_tokens, hidden_size))
    act_grad[row] = (gradient * merging_probs[token, expert].float()[:, None]).to(act_grad.dtype)
    probs_grad = merging_probs.new_zeros((num_tokens, num_experts))
    probs_grad[token, expert] = (gradient * fwd_input[row].float()).sum(-1).to(probs_grad.dtype)
    return act_grad, probs_grad


def make_chunk_sort_map(split_sizes: Tensor, sorted_indices: Tensor, num_tokens: int, num_splits: int) -> Tensor:
    """[tokens]: where each row goes when the chunks stand in the order of `sorted_indices`."""
    chunks = torch.arange(num_tokens).split(split_sizes.tolist())
    sources = torch.cat([chunks[index] for index in sorted_indices.tolist()])
    targets = torch.empty(num_tokens, dtype=torch.int32)
    targets[sources] = torch.arange(num_tokens, dtype=torch.int32)
    return targets


def sort_chunks_by_map(
    inp: Tensor, row_id_map: Tensor, probs: Tensor | None, num_tokens: int, hidden_size: int, is_forward: bool
) -> tuple[Tensor, Tensor | None]:
    def sort(values: Tensor) -> Tensor:
        if not is_forward:
            return values[row_id_map.long()]
        result = torch.empty_like(values)
        result[row_id_map.long()] = values
        return result

    return sort(inp), None if probs is None else sort(probs)
