"""Packing is pure: the same lengths give the same plan, whatever the order of work, within the budget."""

import random
import time

import pytest

from megatron_sao.data.packing import pack, packing_metrics


def loads(plan, lengths):
    return [[sum(lengths[i] for i in row) for row in rank] for rank in plan.ranks]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("seed", range(5))
def test_every_trajectory_is_packed_once_within_the_budget_and_all_ranks_run_as_many_rows(num_ranks, seed) -> None:
    rng = random.Random(seed)
    lengths = [rng.randint(1, 512) for _ in range(rng.randint(1, 200))]
    plan = pack(lengths, num_ranks=num_ranks, max_tokens=512)  # BatchPlan itself checks "once" and "as many"
    assert sorted(i for rank in plan.ranks for row in rank for i in row) == list(range(len(lengths)))
    assert max(load for rank in loads(plan, lengths) for load in rank) <= 512


def test_rows_that_meet_at_one_place_are_about_equally_long() -> None:
    rng = random.Random(0)
    lengths = [rng.randint(30, 60) for _ in range(64)]
    plan = pack(lengths, num_ranks=2, max_tokens=512)
    for one, other in zip(*loads(plan, lengths), strict=True):
        assert abs(one - other) <= 30
    assert packing_metrics(plan, lengths, 512)["packing/imbalance"].value < 1.01


def test_as_few_rows_as_filling_to_the_brim_needs() -> None:
    # emptiest-first cannot place these in two rows of 10 (5+4, then 5+3, then 3); best fit can: 5+5, 4+3+3
    lengths = [5, 5, 4, 3, 3]
    assert pack(lengths, num_ranks=1, max_tokens=10).num_micro_batches == 2


def test_a_rank_without_a_trajectory_gets_an_empty_row() -> None:
    assert pack([7], num_ranks=3, max_tokens=8).ranks == (((0,),), ((),), ((),))


def test_packing_is_deterministic_and_does_not_ask_for_a_sorted_batch() -> None:
    lengths = [3, 4, 5, 6, 6, 5, 4, 3]
    assert pack(lengths, num_ranks=2, max_tokens=9) == pack(list(lengths), num_ranks=2, max_tokens=9)


@pytest.mark.parametrize(
    ("lengths", "num_ranks", "message"),
    [
        ([3, 9], 1, "trajectory 1 of the batch has 9 tokens, a micro-batch takes 1 to 8"),
        ([0], 1, "trajectory 0 of the batch has 0 tokens"),
        ([], 1, "no trajectory"),
        ([1], 0, "at least one data-parallel rank, not 0"),
    ],
)
def test_what_cannot_be_packed_is_an_error_that_says_why(lengths, num_ranks, message) -> None:
    with pytest.raises(ValueError, match=message):
        pack(lengths, num_ranks=num_ranks, max_tokens=8)


def test_waste_is_the_part_of_the_budget_without_a_token() -> None:
    metrics = packing_metrics(pack([6, 2, 4], num_ranks=2, max_tokens=8), [6, 2, 4], 8)  # 12 of 16
    assert metrics["packing/waste_fraction"].value == pytest.approx(0.25)
    assert metrics["packing/imbalance"].value == pytest.approx(1.0)


def test_imbalance_is_the_tokens_of_the_busiest_rank_over_those_of_the_average_one() -> None:
    metrics = packing_metrics(pack([6, 2], num_ranks=2, max_tokens=8), [6, 2], 8)  # 6 tokens against 4
    assert metrics["packing/imbalance"].value == pytest.approx(1.5)
    assert metrics["packing/waste_fraction"].value == pytest.approx(0.5)


def test_many_trajectories_pack_in_a_moment() -> None:
    rng = random.Random(0)
    lengths = [rng.randint(1, 4096) for _ in range(20_000)]
    start_s = time.process_time()
    pack(lengths, num_ranks=8, max_tokens=8192)
    assert time.process_time() - start_s < 5
