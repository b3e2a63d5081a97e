"""Random Qwen3-MoE checkpoints of a given size. From 256 MiB on their tensors have the shapes of Qwen3-30B-A3B's."""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedTokenizerBase, Qwen3MoeConfig

from tools.warm_start.model import build_config, build_tokenizer

ITEM_BYTES = 2  # bfloat16
MIN_VOCAB = 320  # of the tokenizer
VOCAB_STEP = 64  # the vocabulary is divided over tensor-parallel ranks
DEVIATION = 0.02
Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """What makes a model's size. Layers fill it up roughly, the vocabulary fills the rest."""

    hidden: int
    expert: int  # intermediate size of one
    num_experts: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_layers: int = 0
    vocab: int = MIN_VOCAB

    def tensors(self) -> Iterator[tuple[str, Shape]]:
        """HF names and shapes of the whole model."""
        yield "model.embed_tokens.weight", (self.vocab, self.hidden)
        for layer in range(self.num_layers):
            for name, shape in self.layer():
                yield f"model.layers.{layer}.{name}", shape
        yield "model.norm.weight", (self.hidden,)
        yield "lm_head.weight", (self.vocab, self.hidden)

    def layer(self) -> Iterator[tuple[str, Shape]]:
        query, key = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        yield "input_layernorm.weight", (self.hidden,)
        for name, rows in (("q", query), ("k", key), ("v", key)):
            yield f"self_attn.{name}_proj.weight", (rows, self.hidden)
        yield "self_attn.o_proj.weight", (self.hidden, query)
        yield "self_attn.q_norm.weight", (self.head_dim,)
        yield "self_attn.k_norm.weight", (self.head_dim,)
        yield "post_attention_layernorm.weight", (self.hidden,)
        yield "mlp.gate.weight", (self.num_experts, self.hidden)
        for expert in range(self.num_experts):
            yield f"mlp.experts.{expert}.gate_proj.weight", (self.expert, self.hidden)
            yield f"mlp.experts.{expert}.up_proj.weight", (self.expert, self.hidden)
            yield f"mlp.experts.{expert}.down_proj.weight", (self.hidden, self.expert)

    @property
    def num_bytes(self) -> int:
        return sum(_bytes(shape) for _, shape in self.tensors())


QWEN3_30B_A3B = Sizes(hidden=2048, expert=768, num_experts=8, num_heads=32, num_kv_heads=4, head_dim=128)
SHAPES = (
    (2**29, dataclasses.replace(QWEN3_30B_A3B, num_experts=16)),
    (0.98 * 2**28, QWEN3_30B_A3B),
    (2**26, Sizes(hidden=1024, expert=768, num_experts=8, num_heads=16, num_kv_heads=8, head_dim=64)),
    (0, Sizes(hidden=256, expert=128, num_experts=8, num_heads=4, num_kv_heads=2, head_dim=64)),
)
"""From this number of bytes on."""


def sizes_for(num_bytes: int) -> Sizes:
    """Within 2 % of `num_bytes`; ValueError where it is too small for a model."""
    without = next(sizes for least_bytes, sizes in SHAPES if num_bytes >= least_bytes)
    per_layer = sum(_bytes(shape) for _, shape in without.layer())
    num_layers = (num_bytes - without.num_bytes) // per_layer
    per_step = 2 * VOCAB_STEP * without.hidden * ITEM_BYTES
    left = num_bytes - without.num_bytes - num_layers * per_layer
    vocab = MIN_VOCAB + VOCAB_STEP * round(left / per_step)
    sizes = dataclasses.replace(without, num_layers=num_layers, vocab=vocab)
    if num_layers < 1 or abs(sizes.num_bytes - num_bytes) > 0.02 * num_bytes:
        raise ValueError(f"no model of {num_bytes} bytes can be made: the smallest has about {2 * per_layer}")
    return sizes


def config_of(sizes: Sizes, tokenizer: PreTrainedTokenizerBase, **changes: Any) -> Qwen3MoeConfig:
    """A Qwen3-MoE of these sizes; `changes` are fields of its config.json."""
    config = build_config(tokenizer)
    fields = {
        "vocab_size": sizes.vocab,
        "hidden_size": sizes.hidden,
        "num_hidden_layers": sizes.num_layers,
        "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": sizes.num_kv_heads,
        "head_dim": sizes.head_dim,
        "intermediate_size": 2 * sizes.hidden,
        "moe_intermediate_size": sizes.expert,
        "num_experts": sizes.num_experts,
        "architectures": ["Qwen3MoeForCausalLM"],
    }
    config.update({**fields, **changes})
    return config


def write_model(directory: Path, num_bytes: int) -> int:
    """Write config, tokenizer and random bfloat16 weights to `directory`; the exact number of their bytes."""
    sizes, tokenizer = sizes_for(num_bytes), build_tokenizer()
    config = config_of(sizes, tokenizer, dtype="bfloat16")
    directory.mkdir(parents=True)
    config.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    generator = torch.Generator().manual_seed(0)
    weights = {name: _random(name, shape, generator) for name, shape in sizes.tensors()}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return sum(tensor.nbytes for tensor in weights.values())


def _random(name: str, shape: Shape, generator: torch.Generator) -> torch.Tensor:
    if name.endswith("norm.weight"):
        return torch.ones(shape, dtype=torch.bfloat16)
    return torch.empty(shape, dtype=torch.bfloat16).normal_(0.0, DEVIATION, generator=generator)


def _bytes(shape: Shape) -> int:
    return ITEM_BYTES * math.prod(shape)
