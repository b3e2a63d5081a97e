"""Random Qwen3-MoE checkpoints of a given size, with tensors as large as those of a real one."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from tools.warm_start.model import build_config, build_tokenizer

ITEM_BYTES = 2  # bfloat16
MIN_VOCAB = 320  # of the tokenizer
VOCAB_STEP = 64  # the vocabulary is divided over tensor-parallel ranks
HEAD_DIM = 64
DEVIATION = 0.02
Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """What makes a model's size. Layers fill it up roughly, the vocabulary fills the rest."""

    hidden: int
    expert: int  # intermediate size of one
    num_experts: int
    num_layers: int = 0
    vocab: int = MIN_VOCAB

    @property
    def num_heads(self) -> int:
        return self.hidden // HEAD_DIM

    @property
    def num_kv_heads(self) -> int:
        return self.num_heads // 2

    def tensors(self) -> Iterator[tuple[str, Shape]]:
        """HF names and shapes of the whole model."""
        yield "model.embed_tokens.weight", (self.vocab, self.hidden)
        for layer in range(self.num_layers):
            for name, shape in self.layer():
                yield f"model.layers.{layer}.{name}", shape
        yield "model.norm.weight", (self.hidden,)
        yield "lm_head.weight", (self.vocab, self.hidden)

    def layer(self) -> Iterator[tuple[str, Shape]]:
        query, key = self.num_heads * HEAD_DIM, self.num_kv_heads * HEAD_DIM
        yield "input_layernorm.weight", (self.hidden,)
        for name, rows in (("q", query), ("k", key), ("v", key)):
            yield f"self_attn.{name}_proj.weight", (rows, self.hidden)
        yield "self_attn.o_proj.weight", (self.hidden, query)
        yield "self_attn.q_norm.weight", (HEAD_DIM,)
        yield "self_attn.k_norm.weight", (HEAD_DIM,)
        yield "post_attention_layernorm.weight", (self.hidden,)
        yield "mlp.gate.weight", (self.num_experts, self.hidden)
        for expert in range(self.num_experts):
            yield f"mlp.experts.{expert}.gate_proj.weight", (self.expert, self.hidden)
            yield f"mlp.experts.{expert}.up_proj.weight", (self.expert, self.hidden)
            yield f"mlp.experts.{expert}.down_proj.weight", (self.hidden, self.expert)

    @property
    def num_bytes(self) -> int:
        return sum(_bytes(shape) for _, shape in self.tensors())


def sizes_for(num_bytes: int) -> Sizes:
    """Within 2 % of `num_bytes`; ValueError where it is too small for a model."""
    hidden, expert, num_experts = (1024, 768, 8) if num_bytes >= 2**26 else (256, 128, 8)
    if num_bytes >= 2**29:
        num_experts = 16
    without = Sizes(hidden=hidden, expert=expert, num_experts=num_experts)
    per_layer = sum(_bytes(shape) for _, shape in without.layer())
    num_layers = (num_bytes - without.num_bytes) // per_layer
    per_step = 2 * VOCAB_STEP * hidden * ITEM_BYTES
    left = num_bytes - without.num_bytes - num_layers * per_layer
    sizes = Sizes(
        hidden=hidden,
        expert=expert,
        num_experts=num_experts,
        num_layers=num_layers,
        vocab=MIN_VOCAB + VOCAB_STEP * round(left / per_step),
    )
    if num_layers < 1 or abs(sizes.num_bytes - num_bytes) > 0.02 * num_bytes:
        raise ValueError(f"no model of {num_bytes} bytes can be made: the smallest has about {2 * per_layer}")
    return sizes


def write_model(directory: Path, num_bytes: int) -> int:
    """Write config, tokenizer and random bfloat16 weights to `directory`; the exact number of their bytes."""
    sizes = sizes_for(num_bytes)
    tokenizer = build_tokenizer()
    config = build_config(tokenizer)
    config.update(
        {
            "vocab_size": sizes.vocab,
            "hidden_size": sizes.hidden,
            "num_hidden_layers": sizes.num_layers,
            "num_attention_heads": sizes.num_heads,
            "num_key_value_heads": sizes.num_kv_heads,
            "head_dim": HEAD_DIM,
            "intermediate_size": 2 * sizes.hidden,
            "moe_intermediate_size": sizes.expert,
            "num_experts": sizes.num_experts,
            "architectures": ["Qwen3MoeForCausalLM"],
            "dtype": "bfloat16",
        }
    )
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
