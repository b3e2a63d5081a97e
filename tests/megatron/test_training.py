"""Training on real ranks: no layout, packing or memory option changes what is learned; what is frozen stays."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from megatron_sao.megatron.shard import Shard, take_shard
from tests.support.ranks import RankError, run_ranks
from tests.support.te_cpu import TRANSFORMER_ENGINE, needs_te
from tests.support.tiny_models import VOCAB_SIZE, load_hf, make_tiny_model
from tests.support.training_bodies import (
    all_frozen,
    clipped_update,
    decayed_update,
    device_reads,
    poisoned_update,
    refused_inputs,
    scored,
    three_bfloat16_updates,
    three_value_updates,
    values_of_altered_tokens,
    warming_updates,
)
from tests.support.training_case import (
    FUSIONS,
    Case,
    disturbed,
    make_batch,
    start_logprobs,
    three_steps,
    with_trainer,
)

pytestmark = pytest.mark.ranks

ONE_EACH = (((5,), (3, 1), (0, 2), (4,)),)  # another packing, another order
UNEVEN = (((5, 3), (0, 4, 1)), ((2,), ()))  # of two data-parallel ranks; the second ends with an empty micro-batch
THREE = ((5, 3), (0, 2), (1, 4))
EVEN = (((0, 3), (5,)), ((4,), (1, 2)))

LAYOUTS = {
    "other packing": Case(plan=ONE_EACH),
    "tensor 2": Case(num_ranks=2, tensor=2, plan=ONE_EACH),
    "data 2, an empty micro-batch": Case(num_ranks=2, plan=UNEVEN),
    "data 2, plain optimizer, overlap": Case(num_ranks=2, plan=EVEN, distributed=False, overlap=True),
    "expert 2, an empty micro-batch": Case(num_ranks=2, expert=2, plan=UNEVEN),
    "tensor 2, plain optimizer, recompute": Case(num_ranks=2, tensor=2, distributed=False, recompute="full"),
    "tensor 2 x data 2 x expert 2": Case(num_ranks=4, tensor=2, expert=2, plan=UNEVEN),
    "tensor 2 x expert tensor 2": Case(num_ranks=2, tensor=2, expert_tensor=2, plan=ONE_EACH, recompute="selective"),
    "pipeline 2": Case(num_ranks=2, pipeline=2, plan=ONE_EACH),
    "pipeline 2 x tensor 2": Case(num_ranks=4, pipeline=2, tensor=2, plan=ONE_EACH),
    "pipeline 2 x expert 2, overlap": Case(num_ranks=4, pipeline=2, expert=2, plan=UNEVEN, overlap=True),
}
if TRANSFORMER_ENGINE:  # the others run with every kernel that can be fused
    LAYOUTS |= {
        "without fused kernels": Case(plan=ONE_EACH, unfused=FUSIONS),
        "tensor 2 x expert 2 without fused kernels": Case(num_ranks=2, tensor=2, expert=2, unfused=FUSIONS),
    }
DEEP_LAYOUTS = {
    "pipeline 2, plain optimizer, selective recompute": Case(
        num_ranks=2, pipeline=2, plan=ONE_EACH, distributed=False, recompute="selective"
    ),
    "pipeline 4, full recompute": Case(num_ranks=4, pipeline=4, plan=ONE_EACH, recompute="full"),
    "pipeline 2 x virtual 2, 3 micro-batches": Case(num_ranks=2, pipeline=2, virtual_stages=2, plan=(THREE,)),
    "pipeline 2 x virtual 2 x data 2, overlap": Case(
        num_ranks=4, pipeline=2, virtual_stages=2, plan=UNEVEN, overlap=True
    ),
    "pipeline 2 x tensor 2": Case(num_ranks=4, pipeline=2, tensor=2, plan=ONE_EACH),
}
"""Of a model with five layers, which no number of stages here divides, the first one dense, tied embeddings, and a
vocabulary that two tensor ranks do not divide."""
CONTEXT_LAYOUTS = {
    "context 2": Case(num_ranks=2, context=2, plan=ONE_EACH),
    "context 2, plain optimizer, recompute": Case(
        num_ranks=2, context=2, plan=ONE_EACH, distributed=False, recompute="full"
    ),
    "context 2 x expert 2, overlap": Case(num_ranks=2, context=2, expert=2, plan=ONE_EACH, overlap=True),
    "context 2 x data 2, an empty micro-batch": Case(num_ranks=4, context=2, plan=UNEVEN),
    "context 2 x tensor 2": Case(num_ranks=4, context=2, tensor=2, plan=ONE_EACH),
    "context 2 x pipeline 2": Case(num_ranks=4, context=2, pipeline=2, plan=ONE_EACH),
    "context 4": Case(num_ranks=4, context=4, plan=ONE_EACH),
}
LATENT_CONTEXT_LAYOUT = Case(num_ranks=2, context=2, expert=2, plan=(((1, 0), (2, 5, 4, 3)),))
LATENT_LAYOUT = Case(num_ranks=2, tensor=2, expert=2, plan=(((1, 0), (2, 5, 4, 3)),))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("model"), seed=1))


Told = tuple[str, NDArray[np.float32], Any]
"""A model's directory, the rollout's log-probs [A], and what one rank learns from them."""


def on_one_rank(directory: str) -> Told:
    case = Case(logits_tokens=1000)  # all of a row
    rollout = disturbed(run_ranks(1, start_logprobs, directory, case)[0])
    return directory, rollout, run_ranks(1, three_steps, directory, case, rollout)[0]


@pytest.fixture(scope="module")
def plain(directory: str) -> Told:
    return on_one_rank(directory)


@pytest.fixture(scope="module")
def reference(plain: Told) -> Any:
    return plain[-1]


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Told:
    fields = {"num_hidden_layers": 5, "mlp_only_layers": [0], "tie_word_embeddings": True, "vocab_size": 321}
    return on_one_rank(str(make_tiny_model(tmp_path_factory.mktemp("deep"), seed=2, **fields)))


@pytest.fixture(scope="module")
def latent(tmp_path_factory: pytest.TempPathFactory) -> Told:
    return on_one_rank(str(make_tiny_model(tmp_path_factory.mktemp("latent"), arch="deepseek_v3", seed=2)))


def test_the_fixed_batch_has_what_the_comparison_needs(reference: Any) -> None:
    for update in reference["metrics"][2::3]:  # policy updates
        assert 0.02 < update["policy/rejected_low_fraction"] < 0.5
        assert 0.02 < update["policy/rejected_high_fraction"] < 0.5
    for role in ("actor", "critic"):
        for name, start in reference["before"][role].items():
            frozen = role == "critic" and ".self_attn." in name
            assert np.array_equal(start, reference["after"][role][name]) == frozen, name


@pytest.mark.parametrize("name", LAYOUTS)
def test_three_steps_learn_the_same_in_every_layout(name: str, plain: Told) -> None:
    assert_learns_the_same(LAYOUTS[name], *plain)


@needs_te
@pytest.mark.parametrize("name", CONTEXT_LAYOUTS)
def test_three_steps_learn_the_same_where_context_ranks_share_each_row(name: str, plain: Told) -> None:
    assert_learns_the_same(CONTEXT_LAYOUTS[name], *plain)


@pytest.mark.parametrize("name", DEEP_LAYOUTS)
def test_three_steps_learn_the_same_on_uneven_stages_with_tied_embeddings(name: str, deep: Told) -> None:
    assert_learns_the_same(DEEP_LAYOUTS[name], *deep)


def test_three_steps_learn_the_same_where_ranks_have_projections_whole(latent: Told) -> None:
    """Of latent attention: their gradients count once in the norm, whatever Megatron's linears say of themselves."""
    assert_learns_the_same(LATENT_LAYOUT, *latent)


@needs_te
def test_three_steps_of_latent_attention_learn_the_same_on_context_ranks(latent: Told) -> None:
    """Keys and values have heads of unequal size; the row's other half is on another rank."""
    assert_learns_the_same(LATENT_CONTEXT_LAYOUT, *latent)


def assert_learns_the_same(case: Case, directory: str, rollout_A: NDArray[np.float32], reference: Any) -> None:
    results = run_ranks(case.num_ranks, three_steps, directory, case, rollout_A)
    for role in ("actor", "critic"):
        for tensor, start in reference["before"][role].items():
            np.testing.assert_array_equal(results[0]["before"][role][tensor], start)
            want = reference["after"][role][tensor].astype(np.float64) - start
            got = results[0]["after"][role][tensor].astype(np.float64) - start
            assert np.linalg.norm(got - want) <= 1e-3 * np.linalg.norm(want), f"{role} {tensor}"
    for want, got in zip(reference["metrics"], results[0]["metrics"], strict=True):
        assert_same_metrics(want, got)
    for other in results[1:]:
        assert other["metrics"] == results[0]["metrics"]
    assert_copies_agree([result["digests"] for result in results])


def assert_same_metrics(want: Mapping[str, float], got: Mapping[str, float]) -> None:
    """To 1e-5 relative; the policy's loss, a sum of signed terms, of the sum of their absolute values; an explained
    variance, 1 less a ratio, of 1."""
    assert want.keys() == got.keys()
    scales = {"policy/loss": want.get("policy/abs_loss"), "critic/explained_variance": 1.0}
    for key, value in want.items():
        scale = scales.get(key) or abs(value)
        tolerance = 1e-4 if key.startswith(("policy/mismatch", "policy/drift")) else 1e-5
        assert abs(got[key] - value) <= tolerance * scale, key


def assert_copies_agree(ranks: list[dict[str, str]]) -> None:
    """Copies of a parameter on several ranks are bit-identical: `gather` reads only the first of them."""
    seen: dict[str, str] = {}
    differing = {key for rank in ranks for key, digest in rank.items() if seen.setdefault(key, digest) != digest}
    assert not differing


FROZEN = ("*.self_attn.*", "model.embed_tokens.weight", "model.layers.0.mlp.experts.*")


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("distributed", [True, False])
def test_trained_tensors_move_and_frozen_ones_stay_bit_identical(
    distributed: bool, recompute: Any, directory: str
) -> None:
    case = Case(num_ranks=2, expert=2, plan=EVEN, distributed=distributed, recompute=recompute, critic_freeze=FROZEN)
    fields = {"weight_decay": 0.0}  # so that only a gradient moves a tensor
    results = run_ranks(2, with_trainer, directory, case, "critic", three_value_updates, fields)
    before, after, buffered, trained, _ = results[0]
    for name, start in before.items():
        frozen = ".self_attn." in name or "embed_tokens" in name or "layers.0.mlp.experts" in name
        assert np.array_equal(after[name], start) == frozen, name
    assert buffered == trained  # a frozen parameter has no gradient buffer
    assert_copies_agree([result[-1] for result in results])


@pytest.mark.parametrize("distributed", [True, False])
def test_a_stage_without_a_trained_parameter_takes_part_all_the_same(distributed: bool, directory: str) -> None:
    frozen = ("model.layers.*", "model.embed_tokens.weight")  # the first stage has nothing else
    case = Case(num_ranks=2, pipeline=2, plan=ONE_EACH, distributed=distributed, critic_freeze=frozen)
    results = run_ranks(2, with_trainer, directory, case, "critic", three_value_updates, {"weight_decay": 0.0})
    before, after, *_ = results[0]
    moved = {name for name, start in before.items() if not np.array_equal(after[name], start)}
    assert moved == {"model.norm.weight", "value_head.weight"}
    assert [trained for _, _, _, trained, _ in results] == [0, 2 * 64]


@pytest.mark.parametrize("pipeline", [1, 2])
def test_bfloat16_keeps_float32_main_parameters(pipeline: int, directory: str) -> None:
    """With the distributed optimizer over data ranks, and with the plain one over stages."""
    losses = {}
    plan = EVEN if pipeline == 1 else ((*EVEN[0], *EVEN[1]),)
    for dtype in ("float32", "bfloat16"):
        case = Case(num_ranks=2, pipeline=pipeline, plan=plan, distributed=pipeline == 1, dtype=dtype)
        results = run_ranks(2, with_trainer, directory, case, "critic", three_bfloat16_updates, {})
        losses[dtype], mains, num_finer, types, head = results[-1]
    assert (mains, types, head) == ({torch.float32}, {torch.bfloat16}, {torch.float32})
    assert num_finer > 0
    np.testing.assert_allclose(
        losses["bfloat16"], losses["float32"], rtol=0.25
    )  # bfloat16 rounds, and routes some tokens elsewhere


@pytest.mark.parametrize("pipeline", [1, 2])
def test_a_gradient_that_is_not_finite_steps_nothing_and_is_named_on_every_rank(pipeline: int, directory: str) -> None:
    """With the distributed optimizer over data ranks, and with the plain one over stages."""
    plan = EVEN if pipeline == 1 else ONE_EACH
    case = Case(num_ranks=2, pipeline=pipeline, plan=plan, distributed=pipeline == 1)
    first, second = run_ranks(2, with_trainer, directory, case, "critic", poisoned_update, {})
    assert first == second
    if pipeline == 2:
        assert "rank 1: model.layers.1." in first  # and not what the first stage has in its place


def test_no_micro_batch_waits_for_what_our_own_code_reads_of_the_device(directory: str) -> None:
    (reads,) = run_ranks(1, with_trainer, directory, Case(logits_tokens=7), "actor", device_reads, {})
    assert [each.partition(" in ")[0] for each in reads.pop("read")] == ["nonzero", "_local_scalar_dense"]
    assert reads == {"run_training": [], "run_scoring": []}


def test_the_rate_warms_up_with_the_optimizers_own_counter(directory: str) -> None:
    (got,) = run_ranks(1, with_trainer, directory, Case(), "critic", warming_updates, {"warmup_updates": 4})
    assert got == [(pytest.approx(1e-3 * min(n, 4) / 4), n) for n in range(1, 6)]


def test_gradients_are_clipped_after_their_norm_is_taken(directory: str) -> None:
    # eps = 1 makes Adam's first update lr * g / (|g| + 1), so the length of the update shows the clipped gradient's
    fields = {"eps": 1.0, "clip_norm": 1e-2, "learning_rate": 1.0, "weight_decay": 0.0}
    ((moved, norm, parts),) = run_ranks(1, with_trainer, directory, Case(), "critic", clipped_update, fields)
    assert moved == pytest.approx(1e-2, rel=0.02)
    assert norm > 1
    assert norm == pytest.approx(parts)


def test_weight_decay_leaves_norms_and_head_alone(directory: str) -> None:
    ((before, after),) = run_ranks(1, with_trainer, directory, Case(), "critic", decayed_update, {"weight_decay": 0.5})
    for name, start in before.items():
        kept = name.endswith("norm.weight") or name == "value_head.weight" or ".self_attn." in name
        want = start if kept else start * (1 - 1e-3 * 0.5)
        np.testing.assert_allclose(after[name], want, rtol=1e-6, atol=1e-7, err_msg=name)


@pytest.mark.parametrize("case", [Case(), LAYOUTS["tensor 2 x data 2 x expert 2"]], ids=["one rank", "four ranks"])
def test_scores_of_a_sequence_equal_transformers(case: Case, directory: str) -> None:
    results = run_ranks(case.num_ranks, with_trainer, directory, case, "actor", scored, {})
    tokens = torch.from_numpy(np.random.default_rng(5).integers(0, VOCAB_SIZE, 33))
    with torch.no_grad():
        logits = load_hf(directory)(tokens[None]).logits[0].float()
    want = torch.log_softmax(logits, -1)[:-1].gather(-1, tokens[1:, None]).squeeze(-1)
    for result in results:
        np.testing.assert_allclose(result, want.numpy(), rtol=0, atol=1e-4)


def test_a_value_is_read_before_its_own_token(directory: str) -> None:
    """The last action token is in no state that is read; the one before it is in one."""
    (found,) = run_ranks(1, with_trainer, directory, Case(), "critic", values_of_altered_tokens, {})
    plain, other_last, other_before = found
    np.testing.assert_allclose(other_last, plain, rtol=0, atol=1e-5)  # experts see other groups of tokens: rounding
    batch = make_batch()
    num_actions = np.add.reduceat(batch.is_action.astype(int), batch.offsets[:-1])
    last_action = np.zeros(len(plain), dtype=bool)
    last_action[np.cumsum(num_actions) - 1] = True
    assert (np.abs(other_before - plain)[last_action] > 1e-3).all()
    np.testing.assert_allclose(other_before[~last_action], plain[~last_action], rtol=0, atol=1e-5)


def test_inputs_that_do_not_fit_are_refused(directory: str) -> None:
    run_ranks(1, with_trainer, directory, Case(), "actor", refused_inputs, {})


def test_a_model_without_a_trained_parameter_is_refused(directory: str) -> None:
    with pytest.raises(RankError, match="nothing to train"):
        run_ranks(1, with_trainer, directory, Case(critic_freeze=("*",)), "critic", all_frozen, {})


def test_a_step_without_an_action_token_is_refused_before_any_collective() -> None:
    batch = make_batch()
    with pytest.raises(ValueError, match="no action token on any rank"):
        Shard(
            offsets=batch.offsets[:2],
            token_ids=batch.token_ids[:3],
            is_action=np.zeros(3, dtype=bool),
            rollout_logprobs=np.zeros(3, dtype=np.float32),
            version=np.full(3, -1, dtype=np.int32),
            micro_batches=((0,),),
            num_action_tokens=0,
        )


def test_a_shard_finds_its_action_tokens_in_the_batch() -> None:
    batch = make_batch()
    ids_A = batch.token_ids[batch.is_action]
    found = []
    for rank in UNEVEN:
        shard, places = take_shard(batch, rank)
        np.testing.assert_array_equal(ids_A[places], shard.token_ids[shard.is_action])
        assert shard.num_action_tokens == batch.num_action_tokens
        found += places.tolist()
    assert sorted(found) == list(range(batch.num_action_tokens))
