"""What both sides of the step benchmark are given: model directories and a batch."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from megatron_sao.types import StopReason, Trajectory
from tools.bench.bench_model import DEVIATION, Sizes, config_of
from tools.warm_start.model import build_tokenizer

NUM_EXPERTS, TOP_K = 8, 2
GROUP_SIZE = 4  # trajectories of one prompt, for GRPO
HEAD_DIM = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """Of the model and of the batch."""

    num_tokens: int
    num_layers: int
    hidden: int
    vocab_size: int
    max_tokens_per_micro_batch: int


def write_models(directory: Path, size: Size, *, seed: int = 0) -> tuple[Path, Path]:
    """A random float32 Qwen3-MoE policy, and a critic with its backbone and a random value head, as HF directories.

    The head is not zero, so that the critic's backbone has gradients from its first update on.

    Raises:
        ValueError: `hidden` does not divide into heads.
    """
    sizes = Sizes(
        hidden=size.hidden,
        expert=size.hidden,
        num_experts=NUM_EXPERTS,
        num_layers=size.num_layers,
        vocab=size.vocab_size,
        num_heads=size.hidden // HEAD_DIM,
        num_kv_heads=size.hidden // HEAD_DIM // 2,
        head_dim=HEAD_DIM,
    )
    if size.hidden % (2 * HEAD_DIM):
        raise ValueError(f"hidden = {size.hidden} is not a multiple of {2 * HEAD_DIM}, two heads")
    config = config_of(
        sizes,
        build_tokenizer(),
        num_experts_per_tok=TOP_K,
        max_position_embeddings=size.max_tokens_per_micro_batch,
    )
    rng = np.random.default_rng(seed)
    policy, critic = directory / "policy", directory / "critic"
    tensors = {name: _random(name, shape, rng) for name, shape in sizes.tensors()}
    head = {"value_head.weight": _random("head", (1, size.hidden), rng)}
    config.save_pretrained(policy)
    save_file(tensors, policy / "model.safetensors", metadata={"format": "pt"})
    config.update({"role": "critic"})
    config.save_pretrained(critic)
    backbone = {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    save_file(backbone, critic / "model.safetensors", metadata={"format": "pt"})
    save_file(head, critic / "value_head.safetensors")
    return policy, critic


def _random(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> NDArray[np.float32]:
    if name.endswith("norm.weight"):
        return np.ones(shape, dtype=np.float32)
    return DEVIATION * rng.standard_normal(shape, dtype=np.float32)


def make_trajectories(size: Size, *, seed: int = 0) -> tuple[Trajectory, ...]:
    """`num_tokens` tokens in trajectories of two turns, an eighth to a half of a row long.

    Half of a trajectory is sampled: a quarter prompt, turn, a quarter observation, turn. Rewards are 0 or 1.
    """
    rng = np.random.default_rng(seed)
    shortest, longest = size.max_tokens_per_micro_batch // 8, size.max_tokens_per_micro_batch // 2
    lengths: list[int] = []
    while (left := size.num_tokens - sum(lengths)) >= 2 * shortest:
        lengths.append(int(rng.integers(shortest, min(longest, left - shortest) + 1)))
    lengths.append(left)
    return tuple(_trajectory(index, length, size, rng) for index, length in enumerate(lengths))


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
