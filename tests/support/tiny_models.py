"""Tiny random HF checkpoints: non-square shapes everywhere, every expert different, a byte-level tokenizer."""

import json
import shutil
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GlmMoeDsaConfig,
    GlmMoeDsaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from megatron_sao.megatron.installed import SPARSE_ATTENTION

Arch = Literal["qwen3_moe", "qwen3", "glm4_moe", "deepseek_v3", "glm_moe_dsa"]
VOCAB_SIZE = 320
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 100000.0,
    "tie_word_embeddings": False,
    "use_cache": True,
    "bos_token_id": 256,
    "eos_token_id": 258,
}
_SHARED_EXPERTS = {
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 40,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 0,
}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 40,
    "kv_lora_rank": 48,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "head_dim": 8,
    # SGLang asks for these; transformers does not write them by itself
    "moe_layer_freq": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}
_YARN = {
    "type": "yarn",
    "factor": 8,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
MOONLIGHT = {  # of deepseek_v3: queries are not compressed, no YaRN, one group of experts
    "q_lora_rank": None,
    "n_group": 1,
    "topk_group": 1,
    "rope_scaling": None,
    "n_shared_experts": 2,
}
ODD_VOCABULARY = {"vocab_size": VOCAB_SIZE + 1}  # which 2 and 4 ranks do not divide; the tokenizer has not all of it
_DSA = {"index_topk": 64, "index_n_heads": 32, "index_head_dim": 24}
_MOE = {"moe_intermediate_size": 40, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True}


_MODELS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM, _MOE),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {}),
    "glm4_moe": (Glm4MoeConfig, Glm4MoeForCausalLM, {**_SHARED_EXPERTS, "attention_bias": True, "use_qk_norm": True}),
    "deepseek_v3": (
        DeepseekV3Config,
        DeepseekV3ForCausalLM,
        {**_SHARED_EXPERTS, **_LATENT, "n_group": 4, "topk_group": 2, "rope_theta": 10000.0, "rope_scaling": _YARN},
    ),
    "glm_moe_dsa": (GlmMoeDsaConfig, GlmMoeDsaForCausalLM, {**_SHARED_EXPERTS, **_LATENT, **_DSA}),
}


def make_tiny_model(
    path: Path | str,
    *,
    arch: Arch = "qwen3_moe",
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    as_transformers_saves: bool = False,
    **overrides: Any,
) -> Path:
    """Write a random HF checkpoint with a tokenizer to `path`; `overrides` are fields of its config.json.

    With `num_nextn_predict_layers` it has the tensors of those layers, in bfloat16; `as_transformers_saves` it has not.
    """
    directory = Path(path)
    torch.manual_seed(seed)
    config, cls, fields = _MODELS[arch]
    model = cls(config(**{**_COMMON, **fields, **overrides}))
    model.to(dtype)
    _randomize(model, seed)
    model.save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    for i in range(0 if as_transformers_saves else overrides.get("num_nextn_predict_layers", 0)):
        _add_mtp_layer(directory, model.config.num_hidden_layers + i)
    return directory


def _add_mtp_layer(directory: Path, layer: int) -> None:
    """What transformers leaves out when it saves: a layer like the last one, and what only such a layer has."""
    tensors = load_file(directory / "model.safetensors")
    generator = torch.Generator().manual_seed(layer)
    hidden = tensors["model.norm.weight"].shape[0]
    shapes = {"enorm": (hidden,), "hnorm": (hidden,), "eh_proj": (hidden, 2 * hidden), "shared_head.norm": (hidden,)}
    last, own = f"model.layers.{layer - 1}.", f"model.layers.{layer}."
    first_indexer = {name: t for name, t in tensors.items() if name.startswith("model.layers.0.self_attn.indexer.")}
    made = {name.replace(last, own): t.shape for name, t in tensors.items() if name.startswith(last)}
    made |= {name.replace("layers.0.", f"layers.{layer}."): t.shape for name, t in first_indexer.items()}
    made |= {f"{own}{name}.weight": torch.Size(shape) for name, shape in shapes.items()}
    tensors |= {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in made.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def make_tiny_critic(path: Path | str, policy: Path | str, *, seed: int = 0) -> Path:
    """Write what an export of a critic with the policy's backbone and a random value head would be."""
    directory = Path(path)
    shutil.copytree(policy, directory)
    tensors = load_file(directory / "model.safetensors")
    tensors.pop("lm_head.weight", None)
    num_layers = json.loads((directory / "config.json").read_text())["num_hidden_layers"]
    beside = [name for name in tensors if f".layers.{num_layers}." in name]
    beside += [name for name in tensors if ".indexer." in name and name not in beside and not SPARSE_ATTENTION]
    for name in beside:
        del tensors[name]
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "role": "critic"}))
    head = torch.randn(1, config["hidden_size"], generator=torch.Generator().manual_seed(seed))
    save_file({"value_head.weight": head}, directory / "value_head.safetensors")
    return directory


def load_hf(directory: Path | str) -> Any:
    """The checkpoint as transformers reads it, float32, ready for a forward."""
    name = json.loads((Path(directory) / "config.json").read_text())["architectures"][0]
    cls = next(cls for _, cls, _ in _MODELS.values() if cls.__name__ == name)
    return cls.from_pretrained(directory, dtype=torch.float32).eval()


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte (ids 0-255, in the order of the byte-level alphabet); the special tokens follow."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = CHAT_TEMPLATE
    return fast


def _randomize(model: Any, seed: int) -> None:
    """Values large enough that a wrong layout is seen: norms away from 1, weights away from 0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if name.endswith("norm.weight") else 0.08 * noise)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.data = 0.2 * torch.randn(buffer.shape, generator=generator)  # float32 in every checkpoint
