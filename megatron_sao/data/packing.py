"""Trajectories into packed rows, one list of rows per data-parallel rank. Pure and deterministic."""

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence

from megatron_sao.metrics import Metric, Reduction
from megatron_sao.types import BatchPlan

Row = list[int]
"""Indices of the trajectories in one row."""


def pack(lengths: Sequence[int], *, num_ranks: int, max_tokens: int) -> BatchPlan:
    """Share trajectories of `lengths` tokens out over ranks, no row above `max_tokens`, equally many rows on each rank.

    Longest first into the emptiest row, with as few rows per rank as that allows; where filling rows to the brim (best
    fit) needs fewer, that is taken. Rows of about the same length meet at the same place of every rank, since ranks
    wait for each other at each micro-batch. O(N log N) for a fixed number of tries. A row may be empty (padding).

    Raises:
        ValueError: no trajectory, one without tokens or over the budget, or no rank.

    >>> pack([3, 4, 5, 6], num_ranks=2, max_tokens=9).ranks
    (((0, 3),), ((1, 2),))
    """
    _check(lengths, num_ranks, max_tokens)
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    fullest = _best_fit(lengths, order, max_tokens)
    rows_per_rank = max(1, -(-sum(lengths) // (num_ranks * max_tokens)))
    most_rows_per_rank = -(-len(fullest) // num_ranks)
    rows: list[Row] | None = None
    while rows is None and rows_per_rank <= most_rows_per_rank:
        rows = _emptiest_first(lengths, order, rows_per_rank * num_ranks, max_tokens)
        rows_per_rank += 1
    return BatchPlan(ranks=_share_out(rows or fullest, lengths, num_ranks))


def packing_metrics(plan: BatchPlan, lengths: Sequence[int], max_tokens: int) -> dict[str, Metric]:
    """`packing/waste_fraction`: part of the rows' budget that holds no token; `packing/imbalance`: tokens of the
    busiest rank over those of the average rank (1 is perfect); `packing/num_micro_batches` per rank."""
    loads = [sum(lengths[i] for row in rank for i in row) for rank in plan.ranks]
    budget = len(plan.ranks) * plan.num_micro_batches * max_tokens
    return {
        "packing/waste_fraction": Metric(1 - sum(loads) / budget, budget),
        "packing/imbalance": Metric(max(loads) * len(loads) / sum(loads)),
        "packing/num_micro_batches": Metric(plan.num_micro_batches, reduction=Reduction.MAX),
    }


def _check(lengths: Sequence[int], num_ranks: int, max_tokens: int) -> None:
    if num_ranks < 1:
        raise ValueError(f"a batch is packed for at least one data-parallel rank, not {num_ranks}")
    if not lengths:
        raise ValueError("there is no trajectory to pack")
    for index, length in enumerate(lengths):
        if not 1 <= length <= max_tokens:
            raise ValueError(
                f"trajectory {index} of the batch has {length} tokens, a micro-batch takes 1 to {max_tokens}: "
                "raise max_tokens_per_micro_batch or lower max_episode_tokens"
            )


def _emptiest_first(lengths: Sequence[int], order: Sequence[int], num_rows: int, max_tokens: int) -> list[Row] | None:
    """Longest first into the emptiest of `num_rows` rows; None when one does not fit there (so it fits nowhere)."""
    rows: list[Row] = [[] for _ in range(num_rows)]
    loads = [(0, row) for row in range(num_rows)]
    for index in order:
        load, row = loads[0]
        if load + lengths[index] > max_tokens:
            return None
        rows[row].append(index)
        heapq.heapreplace(loads, (load + lengths[index], row))
    return rows


def _best_fit(lengths: Sequence[int], order: Sequence[int], max_tokens: int) -> list[Row]:
    """Longest first into the fullest row that still takes it, a new row when none does."""
    rows: list[Row] = []
    room: list[tuple[int, int]] = []  # (tokens left, row), ascending
    for index in order:
        place = bisect_left(room, (lengths[index], -1))
        if place == len(room):
            left, row = max_tokens, len(rows)
            rows.append([])
        else:
            left, row = room.pop(place)
        rows[row].append(index)
        insort(room, (left - lengths[index], row))
    return rows


def _share_out(rows: Sequence[Row], lengths: Sequence[int], num_ranks: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Rows by falling length, dealt to the ranks in turn, there and back, so that sums are even as well."""
    dealt: list[list[tuple[int, ...]]] = [[] for _ in range(num_ranks)]
    padded = [*rows, *([] for _ in range(-len(rows) % num_ranks))]
    by_length = sorted(padded, key=lambda row: (-sum(lengths[i] for i in row), row))
    for place, row in enumerate(by_length):
        lap, seat = divmod(place, num_ranks)
        dealt[seat if lap % 2 == 0 else num_ranks - 1 - seat].append(tuple(sorted(row)))
    return tuple(tuple(rank) for rank in dealt)
