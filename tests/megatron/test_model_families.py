"""Real models' config.json files: read whole, counted to the unit, and refused where something would be ignored."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from megatron_sao.megatron.frozen_names import frozen_hf_names
from megatron_sao.megatron.installed import SPARSE_ATTENTION
from megatron_sao.megatron.layer_specs import Attention, attention_of
from megatron_sao.megatron.mapping.architectures import ARCHITECTURES
from megatron_sao.megatron.mapping.count import num_parameters
from megatron_sao.megatron.mapping.glm_moe_dsa import sharing_schedule
from megatron_sao.megatron.mapping.hf_config import HFConfig, parse
from megatron_sao.megatron.mapping.rope import Rope, Yarn
from megatron_sao.megatron.mapping.table import bind, carried

ROOT = Path(__file__).parent.parent.parent
FILES = {path.stem: path for path in (ROOT / "tests" / "support" / "model_configs").glob("*.json")}
FILES |= {path.parent.name: path for path in (ROOT / "configs" / "models").glob("*/*/config.json")}
COUNTS = {  # total without multi-token prediction, its layer, active in 10^9: of the published weights
    "Qwen3-30B-A3B": (30_532_122_624, 0, 3.35),
    "Qwen3-30B-A3B-Thinking-2507": (30_532_122_624, 0, 3.35),
    "Qwen3-235B-A22B-Thinking-2507": (235_093_634_560, 0, 22.19),
    "Qwen3-4B": (4_022_468_096, 0, 4.02),
    "GLM-4.5-Air": (106_852_251_264, 2_375_059_584, 13.42),
    "GLM-4.7": (352_797_829_024, 3_988_069_792, 33.63),
    "GLM-5": (743_911_218_432, 9_952_920_576, 41.78),
    "GLM-5.1": (743_911_218_432, 9_952_920_576, 41.78),
    "GLM-5.2": (743_377_019_904, 9_952_920_576, 41.25),
    "DeepSeek-V3": (671_026_419_200, 11_610_068_224, 37.55),
}


def read(model: str, **changes: Any) -> HFConfig:
    raw = {**json.loads(FILES[model].read_text()), **changes}
    raw = {name: value for name, value in raw.items() if value is not ...}
    return parse(raw, source=Path(model), fields=ARCHITECTURES[raw["architectures"][0]].fields)


@pytest.mark.parametrize("model", COUNTS)
def test_the_tables_count_what_was_published(model: str) -> None:
    counts = num_parameters(read(model))
    assert (counts.total, counts.mtp, round(counts.active / 1e9, 2)) == COUNTS[model]


def test_a_model_without_compressed_queries_is_counted_as_transformers_makes_it() -> None:
    """Moonlight's kind of DeepSeek-V3; of its own sizes only those that change a tensor's shape here."""
    fields = {"q_lora_rank": None, "rope_scaling": None, "n_group": 1, "topk_group": 1, "num_hidden_layers": 5}
    config = read("DeepSeek-V3", **fields, num_nextn_predict_layers=0, quantization_config=...)
    with torch.device("meta"):
        model = DeepseekV3ForCausalLM(DeepseekV3Config(**{**config.raw, "torch_dtype": None, "auto_map": None}))
    biases = sum(buffer.numel() for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias"))
    assert num_parameters(config).total == model.num_parameters() + biases


def test_every_tensor_of_a_model_has_a_name_of_its_own() -> None:
    config = read("GLM-5.2")
    architecture = ARCHITECTURES[config.architecture]
    names = [name for binding in bind(architecture, config, 8) for name in binding.hf_names]
    names += [tensor.name for tensor in carried(architecture, config)]
    assert len(set(names)) == len(names)
    indexers = {name.split(".")[2] for name in names if ".indexer.wk." in name}
    assert indexers == {"0", "1", "2", *map(str, range(6, 78, 4)), "78"}  # 21 own ones, and the last layer's


def test_what_the_files_say_of_the_computation() -> None:
    air, deepseek, glm5 = read("GLM-4.5-Air"), read("DeepSeek-V3"), read("GLM-5.2")
    assert (air.qkv_bias, air.qk_norm, air.head_dim * air.num_heads, air.is_moe_layer[:2]) == (
        (True, False, 12288, (False, True))
    )
    assert air.rope == Rope(theta=1e6, fraction=0.5)
    yarn = Yarn(factor=40, original_max_positions=4096, beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=1.0)
    assert deepseek.rope == Rope(theta=1e4, yarn=yarn)
    assert (deepseek.num_router_groups, deepseek.groups_per_token, deepseek.quantization) == (8, 4, "fp8")
    dense = dataclasses.replace(glm5, computes_sparse=False)
    assert attention_of(dense) == Attention(kind="latent, dense for sparse", max_exact_tokens=2048)
    sparse = dataclasses.replace(glm5, computes_sparse=True)
    assert attention_of(sparse) == Attention(kind="sparse (DSA)", max_exact_tokens=None)
    assert attention_of(glm5) == attention_of(sparse if SPARSE_ATTENTION else dense)
    assert [attention_of(each).max_exact_tokens for each in (air, deepseek)] == [None, None]


def test_an_indexer_is_in_the_model_or_carried_and_counts_the_same() -> None:
    """21 of GLM-5.2's layers have one: the file's own schedule, which Megatron takes as two numbers."""
    glm5 = read("GLM-5.2")
    dense, sparse = (dataclasses.replace(glm5, computes_sparse=computes) for computes in (False, True))
    counts = [num_parameters(each) for each in (dense, sparse)]
    assert counts[0] == counts[1]
    bindings = [binding for binding in bind(ARCHITECTURES[glm5.architecture], sparse, 8) if binding.is_constant]
    assert len(bindings) == 21 * 5
    held = {name: shape for b in bindings for name, shape in zip(b.hf_names, b.hf_shapes, strict=True)}
    architecture = ARCHITECTURES[glm5.architecture]
    beside = [{tensor.name: tensor.shape for tensor in carried(architecture, each)} for each in (dense, sparse)]
    assert held == {name: shape for name, shape in beside[0].items() if name not in beside[1]}
    assert frozen_hf_names(bindings, ()) == {name for binding in bindings for name in binding.hf_names}
    assert sharing_schedule(glm5.has_indexer) == (glm5.raw["index_topk_freq"], glm5.raw["index_skip_topk_offset"])
    assert sharing_schedule(read("GLM-5").has_indexer)[0] == 1
    with pytest.raises(ValueError, match=re.escape("the layers [0, 2, 5] have an indexer of their own")):
        sharing_schedule([True, False, True, False, False, True])


def test_forms_of_different_releases_are_the_same_model() -> None:
    scaling = {"rope_type": "yarn", "rope_theta": 10000.0, **read("DeepSeek-V3").raw["rope_scaling"]}
    new_form = {"rope_parameters": scaling, "rope_scaling": ..., "rope_theta": ...}
    assert read("DeepSeek-V3", **new_form) == read("DeepSeek-V3")
    rotary = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5}
    assert read("GLM-4.7", rope_parameters=rotary, rope_theta=...) == read("GLM-4.7")
    types = {"indexer_types": ["full"] * 78, "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 75}
    assert read("GLM-5", **types, layer_types=["indexed_attention"] * 78) == read("GLM-5.1")
    assert read("GLM-5", head_dim=192, qk_head_dim=1) == read("GLM-5")  # sizes that no model uses


@pytest.mark.parametrize(
    ("model", "changes", "words"),
    [
        ("GLM-5.2", {"index_kpool": 4, "sliding": 1}, "unknown config fields index_kpool, sliding"),
        ("GLM-5.2", {"indexer_types": ...}, "indexer_types = None must say full or shared for 78 layers"),
        ("GLM-5.2", {"indexer_types": ["full"] * 77}, "for 78 layers"),
        ("GLM-5", {"index_topk": ...}, "missing config fields index_topk"),
        ("GLM-5", {"mlp_layer_types": ["sparse"] * 78}, "not what first_k_dense_replace = 3 says"),
        ("GLM-5", {"num_key_value_heads": 8}, "latent attention has one per head, 64"),
        ("GLM-5", {"rope_interleave": False}, "rope_interleave = False is not implemented"),
        ("GLM-5", {"q_lora_rank": None}, "q_lora_rank = None must be a positive int"),
        ("GLM-4.7", {"norm_topk_prob": False}, "norm_topk_prob = False is not implemented"),
        ("GLM-4.7", {"scoring_func": "softmax"}, "scoring_func = 'softmax' is not implemented"),
        ("GLM-4.7", {"num_experts_per_tok": 1}, "num_experts_per_tok = 1 is not implemented"),
        ("GLM-4.7", {"first_k_dense_replace": -1}, "first_k_dense_replace = -1"),
        ("GLM-4.7", {"partial_rotary_factor": ...}, "RoPE scaling"),
        ("GLM-4.7", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "RoPE scaling"),
        ("GLM-4.7", {"mlp_only_layers": [0]}, "unknown config fields mlp_only_layers"),
        ("DeepSeek-V3", {"topk_group": 2}, "n_group = 8, topk_group = 2, num_experts_per_tok = 8"),
        (
            "DeepSeek-V3",
            {"rope_scaling": {"type": "linear", "factor": 2}},
            "implemented: rope_type yarn with rope_theta",
        ),
        ("DeepSeek-V3", {"q_lora_rank": 0}, "q_lora_rank = 0 must be a positive int, or null"),
        ("DeepSeek-V3", {"q_lora_rank": ...}, "missing config fields q_lora_rank"),
        ("DeepSeek-V3", {"attention_bias": True}, "attention_bias = True is not implemented"),
        ("Qwen3-4B", {"partial_rotary_factor": 0.5}, "unknown config fields partial_rotary_factor"),
    ],
)
def test_what_would_be_ignored_is_refused(model: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        read(model, **changes)
