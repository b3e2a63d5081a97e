"""What a wrong model directory or layout says: always a ValueError that names the fault, before anything is trained."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_sao.config import LayoutConfig
from megatron_sao.megatron.installed import SPARSE_ATTENTION
from megatron_sao.megatron.model import build_critic, build_policy, read_hf_config
from megatron_sao.megatron.parallel import Parallel, initialize
from megatron_sao.megatron.platform import Platform
from tests.support.megatron_ranks import load_errors
from tests.support.ranks import run_ranks
from tests.support.tiny_models import make_tiny_critic, make_tiny_model

CPU = Platform(device=torch.device("cpu"), backend="gloo", transformer_engine=False, fused_weight_gradients=False)
Change = Callable[[Path], None]
MTP = {"num_nextn_predict_layers": 1}
MTP_COPIES = ("model.layers.3.embed_tokens.weight", "model.layers.3.shared_head.head.weight")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    make_tiny_model(root / "policy", seed=1)
    make_tiny_model(root / "tied", arch="qwen3", tie_word_embeddings=True, seed=1)
    make_tiny_model(root / "glm5", arch="glm_moe_dsa", seed=1, indexer_types=["full", "shared", "full"], **MTP)
    make_tiny_critic(root / "critic", root / "policy")
    return root


def _with_tensors(edit: Callable[[dict[str, torch.Tensor]], Any]) -> Change:
    def change(directory: Path) -> None:
        tensors = load_file(directory / "model.safetensors")
        edit(tensors)
        save_file(tensors, directory / "model.safetensors")

    return change


def _with_config(**fields: Any) -> Change:
    def change(directory: Path) -> None:
        path = directory / "config.json"
        data = {**json.loads(path.read_text()), **fields}
        path.write_text(json.dumps({name: value for name, value in data.items() if value is not ...}))

    return change


def _truncate(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def _index_of_absent_files(directory: Path) -> None:
    index = {"weight_map": {"lm_head.weight": "model-00002-of-00002.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def _nothing(_: Path) -> None:
    pass


WEIGHT_CASES: dict[str, tuple[str, str, Change, str]] = {
    # case: (role to load as, model, what is done to its copy, words of the error)
    "as it is": ("policy", "policy", _nothing, "loaded"),
    "policy as critic": ("critic", "policy", _nothing, "loaded"),
    "critic as critic": ("critic", "critic", _nothing, "loaded"),
    "critic as policy": ("policy", "critic", _nothing, "holds a critic"),
    "tied with a copy": (
        "policy",
        "tied",
        _with_tensors(lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()})),
        "loaded",
    ),
    "tied with another head": (
        "policy",
        "tied",
        _with_tensors(lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1})),
        "ties the embeddings",
    ),
    "truncated": ("policy", "policy", _truncate, "model.safetensors is truncated"),
    "no weights": ("policy", "policy", lambda d: (d / "model.safetensors").unlink(), "lacks the weight files"),
    "missing shard": ("policy", "policy", _index_of_absent_files, "lacks the weight files model-00002-of-00002"),
    "missing expert": (
        "policy",
        "policy",
        _with_tensors(lambda t: t.pop("model.layers.1.mlp.experts.7.up_proj.weight")),
        "missing: model.layers.1.mlp.experts.7.up_proj.weight;",
    ),
    "missing norm in a policy loaded as critic": (
        "critic",
        "policy",
        _with_tensors(lambda t: t.pop("model.norm.weight")),
        "missing: model.norm.weight;",
    ),
    "foreign tensor": (
        "policy",
        "policy",
        _with_tensors(lambda t: t.update({"model.layers.2.input_layernorm.weight": torch.ones(64)})),
        "does not have: model.layers.2.input_layernorm.weight",
    ),
    "transposed expert": (
        "policy",
        "policy",
        _with_tensors(
            lambda t: t.update(
                {"model.layers.0.mlp.experts.0.down_proj.weight": torch.ones(40, 64)},
            )
        ),
        "experts.0.down_proj.weight is F32 [40, 64]; config.json says [64, 40]",
    ),
    "quantised": (
        "policy",
        "policy",
        _with_tensors(lambda t: t.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)})),
        "is I8",
    ),
    "critic without its head": (
        "critic",
        "critic",
        lambda d: (d / "value_head.safetensors").unlink(),
        "lacks the weight files value_head.safetensors",
    ),
    "critic's weights said to be a policy's": ("policy", "critic", _with_config(role=...), "missing: lm_head.weight"),
    "policy said to be a critic": (
        "critic",
        "policy",
        _with_config(role="critic"),
        "lacks the weight files value_head",
    ),
    **{
        f"glm5 without {name}": (
            "policy",
            "glm5",
            _with_tensors(lambda tensors, name=name: tensors.pop(f"model.layers.{name}")),  # type: ignore[misc]
            message.format(f"model.layers.{name}"),
        )
        for name, message in {
            "2.mlp.gate.e_score_correction_bias": "missing: {};",
            "0.self_attn.indexer.wk.weight": "missing: {};"
            if SPARSE_ATTENTION
            else "lacks {}, which its config.json promises: copy the whole model directory",
            "3.eh_proj.weight": "lacks {}, which its config.json promises: copy the whole model directory (layers of "
            "multi-token prediction are there as a whole or not at all)",
        }.items()
    },
    "glm5 with its indexers and a layer to predict more": ("policy", "glm5", _nothing, "loaded"),
    "glm5 as transformers saves it, without the layer to predict more": (
        "policy",
        "glm5",
        _with_tensors(lambda t: [t.pop(name) for name in list(t) if name.startswith("model.layers.3.")]),
        "loaded",
    ),
    "glm5 as critic": ("critic", "glm5", _nothing, "loaded"),
    "glm5 with copies of embedding and head": (
        "policy",
        "glm5",
        _with_tensors(lambda t: t.update({name: t["lm_head.weight"].clone() for name in MTP_COPIES})),
        "loaded",
    ),
    "glm5 with an indexer where it is shared": (
        "policy",
        "glm5",
        _with_tensors(lambda t: t.update({"model.layers.1.self_attn.indexer.wk.weight": torch.ones(24, 64)})),
        "does not have: model.layers.1.self_attn.indexer.wk.weight",
    ),
    "glm5 with an indexer of another shape": (
        "policy",
        "glm5",
        _with_tensors(lambda t: t.update({"model.layers.0.self_attn.indexer.wk.weight": torch.ones(64, 24)})),
        "indexer.wk.weight is F32 [64, 24]; config.json says [24, 64]",
    ),
    "glm5 with scales of float8 blocks": (
        "policy",
        "glm5",
        _with_tensors(lambda t: t.update({"model.layers.0.self_attn.o_proj.weight_scale_inv": torch.ones(1, 1)})),
        "does not have: model.layers.0.self_attn.o_proj.weight_scale_inv",
    ),
    "glm5 that says it is quantised": (
        "policy",
        "glm5",
        _with_config(quantization_config={"quant_method": "fp8"}),
        "are quantised (fp8): convert them to bfloat16",
    ),
    "dropout": ("policy", "policy", _with_config(attention_dropout=0.5), "loaded"),
}


@pytest.fixture(scope="module")
def loaded(models: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("cases")
    cases = {}
    for i, (case, (role, model, change, _)) in enumerate(WEIGHT_CASES.items()):
        directory = root / str(i)
        shutil.copytree(models / model, directory)
        change(directory)
        cases[case] = (role, directory, directory)
    cases["other model"] = ("policy", models / "policy", models / "tied")
    return run_ranks(1, load_errors, cases)[0]  # type: ignore[no-any-return]


@pytest.mark.ranks
@pytest.mark.parametrize("case", WEIGHT_CASES)
def test_weights_are_loaded_or_the_fault_is_named(loaded: dict[str, str], case: str) -> None:
    assert WEIGHT_CASES[case][3] in loaded[case]


@pytest.mark.ranks
def test_another_models_directory_is_refused_field_by_field(loaded: dict[str, str]) -> None:
    assert "of another model: architecture = Qwen3ForCausalLM (model: Qwen3MoeForCausalLM)" in loaded["other model"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: shutil.rmtree(d), "is no model directory"),
        (lambda d: (d / "config.json").write_text("{"), "is not JSON"),
        (lambda d: (d / "config.json").write_text("[]"), "holds a list"),
        (_with_config(architectures=["LlamaForCausalLM"]), "supported: DeepseekV3ForCausalLM, Glm4MoeForCausalLM"),
        (_with_config(architectures=...), "supported: DeepseekV3ForCausalLM"),
        (_with_config(sliding_layers=3, partial_rotary_factor=0.5), "partial_rotary_factor, sliding_layers"),
        (_with_config(hidden_size=..., head_dim=...), "missing config fields head_dim, hidden_size"),
        (_with_config(hidden_size="64"), "hidden_size = '64' must be a positive int"),
        (_with_config(num_hidden_layers=0), "num_hidden_layers = 0"),
        (_with_config(attention_bias=True), "attention_bias = True is not implemented"),
        (_with_config(hidden_act="gelu"), "hidden_act = 'gelu'"),
        (_with_config(use_sliding_window=True), "use_sliding_window = True"),
        (_with_config(layer_types=["full_attention", "sliding_attention"]), "only full_attention"),
        (_with_config(rope_parameters={"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e5}), "RoPE scaling"),
        (_with_config(rope_scaling={"type": "linear", "factor": 2.0}), "RoPE scaling"),
        (_with_config(rope_parameters=None), "one rope_theta is needed"),
        (_with_config(rope_theta=1e4), "one rope_theta is needed"),
        (_with_config(role="teacher"), "role = 'teacher'"),
    ],
)
def test_a_config_that_cannot_be_honoured_is_refused(models: Path, tmp_path: Path, change: Change, words: str) -> None:
    directory = tmp_path / "model"
    shutil.copytree(models / "policy", directory)
    change(directory)
    with pytest.raises(ValueError, match=re.escape(words)):
        read_hf_config(directory)


def test_old_and_new_spellings_of_a_config_are_the_same_model(models: Path, tmp_path: Path) -> None:
    directory = tmp_path / "model"
    shutil.copytree(models / "policy", directory)
    _with_config(
        rope_parameters=..., rope_theta=100000, num_local_experts=..., num_experts=8, dtype=..., torch_dtype="float32"
    )(directory)
    assert read_hf_config(directory) == read_hf_config(models / "policy")


@pytest.mark.parametrize(
    ("model", "sizes", "words"),
    [
        ("policy", {"tensor_size": 3}, "tensor = 3 does not divide the attention heads, 4: 1, 2, 4 would"),
        ("policy", {"expert_size": 3}, "expert = 3 does not divide the experts, 8: 1, 2, 4, 8 would"),
        (
            "policy",
            {"expert_tensor_size": 3},
            "expert_tensor = 3 does not divide the experts' feed-forward size, 40: 1, 2",
        ),
        ("policy", {"pipeline_size": 2, "virtual_stages": 2}, "= 4 stages, but the model has 2 layers"),
        ("tied", {"expert_size": 2}, "Qwen3ForCausalLM has no experts: expert = 1"),
        ("tied", {"expert_tensor_size": 2}, "Qwen3ForCausalLM has no experts: expert_tensor = 1"),
        ("small vocabulary", {"tensor_size": 4}, "tensor = 4 leaves a rank without one of the vocabulary's 5 ids"),
        ("odd feed-forward", {"tensor_size": 2}, "tensor = 2 does not divide the feed-forward size, 97"),
        ("three heads", {"tensor_size": 2}, "neither a divisor nor a multiple of the 3 key-value heads"),
    ],
)
def test_a_layout_that_does_not_divide_the_model_is_refused(
    models: Path, tmp_path: Path, model: str, sizes: dict[str, int], words: str
) -> None:
    changes = {
        "small vocabulary": _with_config(vocab_size=5),
        "odd feed-forward": _with_config(intermediate_size=97),
        "three heads": _with_config(num_attention_heads=6, num_key_value_heads=3),
    }
    directory = tmp_path / "model"
    shutil.copytree(models / (model if model in ("policy", "tied") else "tied"), directory)
    changes.get(model, _nothing)(directory)
    with pytest.raises(ValueError, match=re.escape(words)):
        build_critic(directory, Parallel(**sizes), CPU, dtype=torch.float32)


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (
            {"num_ranks": 2, "context": 2},
            "layout.context = 2: context parallelism needs Transformer Engine's attention on",
        ),
        ({"num_ranks": 4, "expert": 2, "expert_tensor": 2}, "give expert_tensor = 1, or expert = 1 and tensor >= 2"),
    ],
)
def test_a_layout_that_a_cpu_cannot_run_is_refused_before_anything_is_built(layout: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        initialize(LayoutConfig(**layout), rank=0, init_method=None, timeout_s=1, platform=CPU)


def test_a_critics_directory_builds_no_policy(models: Path) -> None:
    with pytest.raises(ValueError, match="holds a critic, not a policy"):
        build_policy(models / "critic", Parallel(), CPU, dtype=torch.float32)
