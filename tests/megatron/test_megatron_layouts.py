"""Megatron models against HF transformers, in every layout: the same log-probs, values, gradients and files."""

import json
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_sao.megatron.installed import SPARSE_ATTENTION
from tests.support.megatron_ranks import CRITIC_FREEZE, SEQUENCES, bfloat16_round_trip, row_of, story
from tests.support.ranks import run_ranks
from tests.support.te_cpu import needs_te
from tests.support.tiny_models import (
    MOONLIGHT,
    ODD_VOCABULARY,
    Arch,
    load_hf,
    make_tiny_critic,
    make_tiny_model,
)

pytestmark = pytest.mark.ranks

SQUARE = {  # a transposed or exchanged tensor has the right shape, and no q or k norm would tell
    "use_qk_norm": False,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "intermediate_size": 64,
    "moe_intermediate_size": 64,
}
SHARED_INDEXERS = {  # two equal stages would take layer 2 from the layer whose choice it shares
    "num_hidden_layers": 4,
    "indexer_types": ["full", "full", "shared", "full"],
    "num_nextn_predict_layers": 1,
}
SAVED = {"num_nextn_predict_layers": 1, "as_transformers_saves": True}  # promised layers that are not there
TOP_K = 4 if SPARSE_ATTENTION else 64  # below the sequences' lengths where Megatron-core computes sparse attention
TOLERANCES = {"glm5": 1e-4}  # transformers norms its latents with 1e-6, SGLang and Megatron with rms_norm_eps
MODELS: dict[str, tuple[Arch, dict[str, Any]]] = {
    "moe": ("qwen3_moe", {}),
    "moe_with_a_dense_layer": ("qwen3_moe", {"mlp_only_layers": [0], "norm_topk_prob": False}),
    "dense": ("qwen3", {}),
    "dense_tied": ("qwen3", {"tie_word_embeddings": True} | ODD_VOCABULARY),
    "glm4": ("glm4_moe", {"use_qk_norm": True, "n_shared_experts": 2} | SAVED),
    "glm4_all_sizes_equal": ("glm4_moe", SQUARE),
    "deepseek": ("deepseek_v3", {}),
    "moonlight": ("deepseek_v3", MOONLIGHT | ODD_VOCABULARY | SAVED),
    "glm5": ("glm_moe_dsa", {"rms_norm_eps": 1e-5, "index_topk": TOP_K}),
    "glm5_shared_indexers": ("glm_moe_dsa", {**SHARED_INDEXERS, "index_topk": TOP_K}),
    "deep_tied": ("qwen3_moe", {"num_hidden_layers": 5, "mlp_only_layers": [0], "tie_word_embeddings": True}),
}
STORIES = [
    ("moe", {"num_ranks": 1}),
    ("moe", {"num_ranks": 2, "tensor": 2}),
    ("moe", {"num_ranks": 2, "expert": 2}),
    ("moe", {"num_ranks": 2, "tensor": 2, "expert": 2}),
    ("moe", {"num_ranks": 4, "tensor": 2, "expert": 4}),
    ("moe_with_a_dense_layer", {"num_ranks": 2, "tensor": 2, "expert": 2}),
    ("dense", {"num_ranks": 2, "pipeline": 2}),
    ("dense", {"num_ranks": 4, "tensor": 4}),  # more tensor ranks than key-value heads
    ("dense_tied", {"num_ranks": 4, "tensor": 4}),
    ("glm4", {"num_ranks": 2, "tensor": 2, "expert": 2}),
    ("glm4", {"num_ranks": 2, "tensor": 2, "expert_tensor": 2}),
    ("glm4_all_sizes_equal", {"num_ranks": 1}),
    ("deepseek", {"num_ranks": 1}),
    ("deepseek", {"num_ranks": 4, "tensor": 2, "expert": 2}),
    ("deepseek", {"num_ranks": 4, "pipeline": 2, "tensor": 2}),
    ("moonlight", {"num_ranks": 1}),
    ("moonlight", {"num_ranks": 2, "tensor": 2, "expert": 2}),
    ("moonlight", {"num_ranks": 4, "pipeline": 2, "tensor": 2}),
    ("glm5", {"num_ranks": 1}),
    ("glm5_shared_indexers", {"num_ranks": 2, "tensor": 2, "expert": 2}),
    ("glm5_shared_indexers", {"num_ranks": 2, "pipeline": 2}),
    ("moe", {"num_ranks": 2, "tensor": 2, "expert_tensor": 2}),
    ("moe", {"num_ranks": 4, "pipeline": 2, "tensor": 2, "expert_tensor": 2}),
    ("deep_tied", {"num_ranks": 2, "pipeline": 2, "virtual_stages": 2}),
    ("deep_tied", {"num_ranks": 4, "pipeline": 2, "tensor": 2, "expert": 2}),
    ("dense_tied", {"num_ranks": 2, "context": 2}),
    ("glm4", {"num_ranks": 4, "context": 2, "tensor": 2, "expert": 2}),
    ("deepseek", {"num_ranks": 4, "context": 2, "pipeline": 2}),
    ("moe", {"num_ranks": 4, "context": 4}),
    ("glm5", {"num_ranks": 2, "context": 2}),
]


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for name, (arch, overrides) in MODELS.items():
        make_tiny_model(root / name / "policy", arch=arch, seed=1, **overrides)
        make_tiny_critic(root / name / "critic", root / name / "policy", seed=2)
    return root


@pytest.fixture(scope="module")
def references(directories: Path) -> dict[str, dict[str, Any]]:
    return {name: _reference(directories / name) for name in MODELS}


def named(case: tuple[str, dict[str, int]]) -> Any:
    name, layout = case
    words = [f"context{size}" if key == "context" else str(size) for key, size in layout.items()]
    return pytest.param(case, id="-".join([name, *words]), marks=[needs_te] if "context" in layout else [])


@pytest.fixture(scope="module", params=[named(case) for case in STORIES])
def told(request: pytest.FixtureRequest, directories: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    name, layout = request.param
    out = tmp_path_factory.mktemp("out")
    answers = run_ranks(
        layout["num_ranks"], story, layout, directories / name / "policy", directories / name / "critic", out
    )
    return {"name": name, "layout": layout, "answers": answers, "out": out}


def test_logprobs_of_a_packed_row_are_those_of_transformers(told: dict[str, Any], references: Any) -> None:
    tensor_size = told["layout"].get("tensor", 1)
    on_last_stage = [answer["logits"] for answer in told["answers"] if answer["logits"] is not None]
    assert len(on_last_stage) * told["layout"].get("pipeline", 1) == told["layout"]["num_ranks"]
    logits = torch.cat(on_last_stage[:tensor_size], dim=-1)
    start = 0
    for sequence, expected in zip(SEQUENCES, references[told["name"]]["logits"], strict=True):
        found = logits[start : start + len(sequence)].log_softmax(-1)
        assert (found[:, expected.shape[-1] :] == -torch.inf).all()  # padding of the vocabulary
        difference = (found[:, : expected.shape[-1]] - expected.log_softmax(-1)).abs().max()
        assert difference <= TOLERANCES.get(told["name"], 2e-5)  # the bar is 1e-4
        start += len(sequence)


def test_pieces_of_chosen_states_are_what_full_logits_give(told: dict[str, Any]) -> None:
    for found in (answer["pieces"] for answer in told["answers"]):
        assert found["gradients"] <= 1e-5
        assert found.get("logprobs", 0) <= 1e-6
        assert found.get("entropy", 0) <= 1e-6
        assert found.get("calls", 1) == 1
    of_a_part = told["layout"].get("context", 1) > 1
    num_pieces = {2, 3} if of_a_part else {4}  # 10 states, or a context rank's part of them, then none
    assert {answer["pieces"].get("pieces") for answer in told["answers"]} <= {None, *num_pieces}


def test_packed_sequences_do_not_see_each_other(told: dict[str, Any]) -> None:
    for answer in told["answers"]:
        start = 0
        for alone in answer["alone"]:
            torch.testing.assert_close(answer["logits"][start : start + len(alone)], alone, rtol=0, atol=1e-5)
            start += len(alone)


def test_values_are_the_head_on_the_final_norm_on_every_rank(told: dict[str, Any], references: Any) -> None:
    """Of the last pipeline stage."""
    expected = references[told["name"]]["values"]
    for answer in (answer for answer in told["answers"] if answer["values"] is not None):
        assert answer["values"].dtype is torch.float32
        assert (answer["values"][: len(expected)] - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("role", ["policy", "critic"])
def test_gradients_are_those_of_transformers(told: dict[str, Any], references: Any, role: str) -> None:
    """The critic's with attention and embedding frozen, under full recomputation."""
    expected = references[told["name"]][f"{role}_gradients"]
    found = told["answers"][0][f"{role}_gradients"]
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient.abs().max() > 0 or _is_frozen(name, role) or ".experts." in name, name
        if _is_frozen(name, role):
            assert not found[name].any(), name
        else:
            assert (found[name] - gradient).norm() <= 1e-4 * gradient.norm(), name


@pytest.mark.parametrize("role", ["policy", "critic"])
def test_load_and_export_give_back_every_bit(told: dict[str, Any], directories: Path, role: str) -> None:
    _assert_same_tensors(directories / told["name"] / role, told["out"] / role)


@pytest.mark.parametrize("sender", ["gather", "direct"])
def test_a_publish_sends_every_tensor_once_and_every_bit(told: dict[str, Any], directories: Path, sender: str) -> None:
    sent = [answer["published"][sender] for answer in told["answers"]]
    expected = _tensors(directories / told["name"] / "policy")
    if told["name"] == "glm5_shared_indexers":  # an engine has no layer of multi-token prediction
        expected = {name: tensor for name, tensor in expected.items() if ".layers.4." not in name}
    assert sorted(name for of_rank in sent for name in of_rank) == sorted(expected)
    assert sender == "direct" or not any(sent[1:])
    for name, tensor in (item for of_rank in sent for item in of_rank.items()):
        assert torch.equal(tensor, expected[name]), name


def test_a_publish_may_fill_buckets_on_another_device_than_the_models(told: dict[str, Any]) -> None:
    """On the CPU, where actor and engine share a GPU and the update group is gloo."""
    assert all(answer["gathered_onto_another_device"] for answer in told["answers"])


def test_an_export_is_a_whole_hf_directory(told: dict[str, Any], directories: Path) -> None:
    out, source = told["out"], directories / told["name"]
    assert load_hf(out / "policy")(torch.tensor([SEQUENCES[0]])).logits.shape[:2] == (1, 7)
    for role in ("policy", "critic"):
        written, read = (json.loads((path / role / "config.json").read_text()) for path in (out, source))
        assert written == read
        names = {path.name for path in (out / role).iterdir()}
        assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"} <= names
    assert sorted(path.name for path in out.iterdir()) == ["critic", "policy"]  # nothing temporary is left


def test_bfloat16_round_trip_and_a_critic_from_a_policy(directories: Path, tmp_path: Path) -> None:
    source = make_tiny_model(
        tmp_path / "bf16", arch="glm_moe_dsa", seed=3, dtype=torch.bfloat16, num_nextn_predict_layers=1
    )
    layout = {"num_ranks": 2, "tensor": 2, "expert": 2}
    answers = run_ranks(2, bfloat16_round_trip, layout, source, tmp_path / "out")
    assert answers == [("torch.float32", "torch.float32", True)] * 2  # values and head; zero head, zero values
    _assert_same_tensors(source, tmp_path / "out" / "policy")
    critic = _tensors(tmp_path / "out" / "critic")
    differing = critic.keys() ^ _tensors(source).keys()
    assert {name for name in differing if ".indexer." not in name and ".layers.3." not in name} == {
        "lm_head.weight",
        "value_head.weight",
    }
    carried_in = {"3"} if SPARSE_ATTENTION else {"0", "1", "2", "3"}
    assert {name.split(".")[2] for name in differing if ".layers." in name} == carried_in
    assert critic["model.layers.1.mlp.gate.e_score_correction_bias"].dtype is torch.float32
    assert not critic["value_head.weight"].any()
    assert critic["value_head.weight"].dtype is torch.float32


def _is_frozen(name: str, role: str) -> bool:
    frozen = CRITIC_FREEZE if role == "critic" else ()
    return ".indexer." in name or any(fnmatchcase(name, pattern) for pattern in frozen)


def _tensors(directory: Path) -> dict[str, Tensor]:
    return {name: t for path in directory.glob("*.safetensors") for name, t in load_file(path).items()}


def _assert_same_tensors(expected_dir: Path, found_dir: Path) -> None:
    expected, found = _tensors(expected_dir), _tensors(found_dir)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype is tensor.dtype
        assert torch.equal(found[name], tensor), name


def _reference(directory: Path) -> dict[str, Any]:
    """Each sequence on its own through transformers; gradients of the same weighted sums as in the ranks."""
    head = load_file(directory / "critic" / "value_head.safetensors")["value_head.weight"].requires_grad_()
    rows = [row_of((sequence,), 1) for sequence in SEQUENCES]
    policy, critic = load_hf(directory / "policy"), load_hf(directory / "policy")
    logits = [policy(row.ids).logits[0] for row in rows]
    values = [critic.model(row.ids).last_hidden_state[0] @ head[0] for row in rows]
    losses = [
        torch.nn.functional.cross_entropy(of, row.labels[0], reduction="none")
        for of, row in zip(logits, rows, strict=True)
    ]
    sum((of * row.weights[0]).sum() for of, row in zip(losses, rows, strict=True)).backward()  # type: ignore[union-attr]
    sum((of * row.weights[0]).sum() for of, row in zip(values, rows, strict=True)).backward()  # type: ignore[union-attr]
    critic_gradients = {**_disk_gradients(critic), "value_head.weight": head.grad}
    critic_gradients.pop("lm_head.weight", None)
    return {
        "logits": [of.detach() for of in logits],
        "values": torch.cat(values).detach(),
        "policy_gradients": _disk_gradients(policy),
        "critic_gradients": critic_gradients,
    }


def _disk_gradients(model: Any) -> dict[str, Tensor]:
    """Gradients under the names on disk: transformers keeps all experts of a layer in one tensor."""
    gradients: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if ".indexer." in name and not SPARSE_ATTENTION:  # not in Megatron's model
            continue
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        prefix, _, last = name.rpartition(".experts.")
        if not prefix:
            gradients[name] = gradient
            continue
        for expert, of_expert in enumerate(gradient):
            parts = {"down_proj": of_expert}
            if last == "gate_up_proj":
                parts = dict(zip(("gate_proj", "up_proj"), of_expert.chunk(2), strict=True))
            gradients |= {f"{prefix}.experts.{expert}.{part}.weight": value for part, value in parts.items()}
    return gradients
