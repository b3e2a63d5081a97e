"""Packed rows as ranks have them: parts of a row by context rank, padding, and where each action token lies."""

import dataclasses

import numpy as np
import pytest
import torch

from megatron_sao.megatron.forward import context_part, lay_out, make_micro_batches
from megatron_sao.megatron.parallel import Parallel
from megatron_sao.megatron.platform import Platform
from megatron_sao.megatron.shard import Shard
from megatron_sao.megatron.stages import stage_layers, stage_of
from megatron_sao.types import NOT_RECORDED

CPU = Platform(device=torch.device("cpu"), backend="gloo", transformer_engine=False, fused_weight_gradients=False)
LENGTHS = (5, 9, 3)


@pytest.fixture
def shard() -> Shard:
    """Three trajectories of unequal tokens, so that a token names its place."""
    num_tokens = sum(LENGTHS)
    is_action = np.concatenate([np.arange(length) % 3 > 0 for length in LENGTHS])
    return Shard(
        offsets=np.cumsum([0, *LENGTHS]),
        token_ids=np.arange(100, 100 + num_tokens, dtype=np.int32),
        is_action=is_action,
        rollout_logprobs=np.zeros(num_tokens, dtype=np.float32),
        version=np.zeros(num_tokens, dtype=np.int32),
        micro_batches=((1, 0), (2,), ()),
        num_action_tokens=int(is_action.sum()),
    )


@pytest.mark.parametrize("size", [1, 2, 4])
def test_context_ranks_share_every_segment_evenly_from_both_ends(size: int) -> None:
    lengths = [2 * size * n for n in (1, 3, 2)]
    parts = [context_part(lengths, rank=rank, size=size) for rank in range(size)]
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(sum(lengths)))
    for part in parts:
        assert len(part) == sum(lengths) // size
        within = part[: lengths[0] // size]
        np.testing.assert_array_equal(within, lengths[0] - 1 - within[::-1])  # as far from the start as from the end


@pytest.mark.parametrize("place", [(1, 1), (1, 4), (2, 1), (2, 2), (4, 1)])
def test_every_action_token_is_on_the_one_rank_that_has_its_state(shard: Shard, place: tuple[int, int]) -> None:
    context, tensor = place
    tokens_A = shard.token_ids[shard.is_action]
    starts_A = np.concatenate([[0], np.cumsum(shard.is_action)])[shard.offsets]
    seen: list[int] = []
    for trajectories in shard.micro_batches:
        places = [Parallel(context_rank=r, context_size=context, tensor_size=tensor) for r in range(context)]
        rows = [lay_out(shard, trajectories, starts_A, {}, parallel=each, device=CPU.device) for each in places]
        assert len({row.lengths for row in rows}) == 1
        for row in rows:
            assert len(row.token_ids_B) * context == sum(row.lengths)
            assert len(row.token_ids_B) % tensor == 0
            assert all(length % (2 * context) == 0 for length in row.lengths if context > 1)
            np.testing.assert_array_equal(row.token_ids_B[row.state_index_a] + 1, row.targets_a)
            np.testing.assert_array_equal(tokens_A[row.places_a], row.targets_a)
            starts = (row.token_ids_B - row.position_ids_B)[row.token_ids_B > 0]
            assert set(starts.tolist()) <= {100 + shard.offsets[i] for i in trajectories}
            seen += row.places_a.tolist()
    assert sorted(seen) == list(range(len(tokens_A)))


def test_recorded_experts_go_with_their_tokens(shard: Shard) -> None:
    experts = np.stack([shard.token_ids, shard.token_ids + 500], axis=-1)[:, None].astype(np.int16)  # [T, 1, 2]
    replayed = dataclasses.replace(shard, routed_experts=experts)
    for rank in range(2):
        for row in make_micro_batches(replayed, {}, parallel=Parallel(context_rank=rank, context_size=2), platform=CPU):
            assert row.routed_experts_B is not None
            first, second = row.routed_experts_B[:, 0].T
            is_padding = row.token_ids_B == 0
            torch.testing.assert_close(first, row.token_ids_B.masked_fill(is_padding, NOT_RECORDED).to(torch.int16))
            assert (second[is_padding] == NOT_RECORDED).all()
            assert (second[~is_padding] == first[~is_padding] + 500).all()


def test_the_interleaved_schedule_gets_a_multiple_of_the_pipeline_size(shard: Shard) -> None:
    for virtual_stages, number in ((1, 3), (2, 4)):
        place = Parallel(pipeline_size=2, virtual_stages=virtual_stages, tensor_size=2)
        rows = make_micro_batches(shard, {}, parallel=place, platform=CPU)
        assert len(rows) == number
        assert rows[-1].lengths == (2,)
        assert len(rows[-1].places_a) == 0


@pytest.mark.parametrize(("num_layers", "num_stages"), [(61, 4), (94, 8), (2, 2), (7, 1), (5, 3)])
def test_stages_share_the_layers_out_as_evenly_as_they_can(num_layers: int, num_stages: int) -> None:
    may_start = (True,) * num_layers
    stages = stage_layers(may_start, num_stages)
    assert [layer for stage in stages for layer in stage] == list(range(num_layers))
    assert len(stages) == num_stages
    sizes = [len(stage) for stage in stages]
    assert max(sizes) - min(sizes) <= 1
    assert sizes[-1] == min(sizes)
    assert all(layer in stages[stage_of(layer, may_start, num_stages)] for layer in range(num_layers))


@pytest.mark.parametrize(("num_stages", "longest"), [(1, 78), (4, 20), (8, 12), (16, 8), (21, 4)])
def test_stages_start_only_where_they_may(num_stages: int, longest: int) -> None:
    """GLM-5.2's layers with an indexer of their own: 0, 1, 2, 6, 10, ... 74."""
    may_start = tuple(layer < 2 or layer % 4 == 2 for layer in range(78))
    stages = stage_layers(may_start, num_stages)
    assert [layer for stage in stages for layer in stage] == list(range(78))
    assert len(stages) == num_stages
    assert all(may_start[stage.start] for stage in stages)
    assert max(map(len, stages)) == longest


def test_more_stages_than_layers_that_one_may_start_with_are_refused() -> None:
    with pytest.raises(ValueError, match=r"= 8 stages, but the model has 6 layers.*at most 6"):
        stage_layers((True,) * 6, 8)
    with pytest.raises(ValueError, match=r"= 3 stages, but the model has 4 layers.*at most 2 stages"):
        stage_layers((True, False, True, False), 3)
