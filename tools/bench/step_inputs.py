"""What both sides of the step benchmark are given: model directories and a batch."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from megatron_sao.types import Batch, StopReason, Trajectory

NUM_EXPERTS, TOP_K = 8, 2
GROUP_SIZE = 4  # trajectories of one prompt, for GRPO


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """Of the model and of the batch."""

    num_tokens: int
    num_layers: int
    hidden: int
    vocab_size: int
    max_tokens_per_micro_batch: int


def write_models(directory: Path, size: Size, *, seed: int = 0) -> tuple[Path, Path]:
    """A random Qwen3-MoE policy, and a critic with its backbone and a random value head, as HF directories.

    The head is not zero, so that the critic's backbone has gradients from its first update on.
    """
    policy, critic = directory / "policy", directory / "critic"
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=size.vocab_size,
        hidden_size=size.hidden,
        num_hidden_layers=size.num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=size.hidden // 4,
        intermediate_size=2 * size.hidden,
        moe_intermediate_size=size.hidden,
        num_experts=NUM_EXPERTS,
        num_experts_per_tok=TOP_K,
        norm_topk_prob=True,
        mlp_only_layers=[],
        tie_word_embeddings=False,
        max_position_embeddings=size.max_tokens_per_micro_batch,
        dtype="float32",
    )
    Qwen3MoeForCausalLM(config).save_pretrained(policy)
    shutil.copytree(policy, critic)
    tensors = load_file(policy / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, critic / "model.safetensors", metadata={"format": "pt"})
    save_file({"value_head.weight": 0.02 * torch.randn(1, size.hidden)}, critic / "value_head.safetensors")
    fields = json.loads((policy / "config.json").read_text(encoding="utf-8"))
    (critic / "config.json").write_text(json.dumps({**fields, "role": "critic"}), encoding="utf-8")
    return policy, critic


def make_batch(size: Size, *, seed: int = 0) -> tuple[Batch, tuple[str, ...]]:
    """`num_tokens` tokens in trajectories of two turns, an eighth to a half of a row long, and each one's prompt id.

    Half of a trajectory is sampled: a quarter prompt, turn, a quarter observation, turn. Rewards are 0 or 1.
    """
    rng = np.random.default_rng(seed)
    shortest, longest = size.max_tokens_per_micro_batch // 8, size.max_tokens_per_micro_batch // 2
    lengths: list[int] = []
    while (left := size.num_tokens - sum(lengths)) >= 2 * shortest:
        lengths.append(int(rng.integers(shortest, min(longest, left - shortest) + 1)))
    lengths.append(left)
    trajectories = tuple(_trajectory(index, length, size, rng) for index, length in enumerate(lengths))
    return Batch.of(0, trajectories), tuple(trajectory.prompt_id for trajectory in trajectories)


def _trajectory(index: int, length: int, size: Size, rng: np.random.Generator) -> Trajectory:
    quarter = length // 4
    turns = ((quarter, 2 * quarter), (3 * quarter, length))
    is_action = np.zeros(length, dtype=bool)
    for start, end in turns:
        is_action[start:end] = True
    name = f"{index:032x}"
    reward = np.zeros(length, dtype=np.float32)
    reward[-1] = rng.integers(0, 2)
    return Trajectory(
        id=name,
        episode_id=name,
        prompt_id=f"prompt/{index // GROUP_SIZE}",
        position=index // GROUP_SIZE,
        token_ids=rng.integers(0, size.vocab_size, length).astype(np.int32),
        is_action=is_action,
        rollout_logprobs=np.where(is_action, -np.log(size.vocab_size), 0.0).astype(np.float32),
        version=np.where(is_action, 0, -1).astype(np.int32),
        reward=reward,
        turns=turns,
        stop_reason=StopReason.STOP,
        engine="none",
        started_s=0.0,
        finished_s=0.0,
    )
