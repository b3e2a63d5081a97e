"""Tiny random HF checkpoints: non-square shapes everywhere, every expert different, a byte-level tokenizer."""

import json
import shutil
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

Arch = Literal["qwen3_moe", "qwen3"]
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
_MOE = {"moe_intermediate_size": 40, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True}


def make_tiny_model(
    path: Path | str, *, arch: Arch = "qwen3_moe", seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any
) -> Path:
    """Write a random HF checkpoint with a tokenizer to `path`; `overrides` are fields of its config.json."""
    directory = Path(path)
    torch.manual_seed(seed)
    model: Any
    if arch == "qwen3_moe":
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**_COMMON, **_MOE, **overrides}))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**{**_COMMON, **overrides}))
    _randomize(model, seed)
    model.to(dtype).save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    return directory


def make_tiny_critic(path: Path | str, policy: Path | str, *, seed: int = 0) -> Path:
    """Write what an export of a critic with the policy's backbone and a random value head would be."""
    directory = Path(path)
    shutil.copytree(policy, directory)
    tensors = load_file(directory / "model.safetensors")
    tensors.pop("lm_head.weight", None)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "role": "critic"}))
    head = torch.randn(1, config["hidden_size"], generator=torch.Generator().manual_seed(seed))
    save_file({"value_head.weight": head}, directory / "value_head.safetensors")
    return directory


def load_hf(directory: Path | str) -> Any:
    """The checkpoint as transformers reads it, float32, ready for a forward."""
    cls = {"Qwen3MoeForCausalLM": Qwen3MoeForCausalLM, "Qwen3ForCausalLM": Qwen3ForCausalLM}
    config = json.loads((Path(directory) / "config.json").read_text())
    return cls[config["architectures"][0]].from_pretrained(directory, dtype=torch.float32).eval()


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
