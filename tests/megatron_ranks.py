"""What the ranks of the Megatron tests run. No transformers here: a rank must start fast."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from torch import Tensor

from megatron_sao.config import LayoutConfig
from megatron_sao.megatron import checkpoint, parallel, platform
from megatron_sao.megatron.freeze import freeze
from megatron_sao.megatron.layer_specs import attention_inputs
from megatron_sao.megatron.mapping import gather, hf_tensors
from megatron_sao.megatron.model import build_critic, build_policy

SEQUENCES = (tuple(range(3, 300, 43)), tuple(range(310, 30, -35)))  # 7 and 8 tokens
CRITIC_FREEZE = ("*.self_attn.*", "model.embed_tokens.weight")


@dataclass(frozen=True)
class Row:
    """A packed row [1, T]; segment ids [T]."""

    ids: Tensor
    positions: Tensor
    segments: Tensor
    labels: Tensor
    weights: Tensor


def row_of(sequences: tuple[tuple[int, ...], ...], multiple: int) -> Row:
    """The sequences end to end, padded to a multiple by a sequence of its own; weight 0 on padding."""
    padding = -sum(map(len, sequences)) % multiple
    parts = [torch.tensor(sequence) for sequence in sequences] + ([torch.full((padding,), 5)] if padding else [])
    weights = [torch.arange(1.0, 1 + len(part)) for part in parts]
    if padding:
        weights[-1] = torch.zeros(padding)
    return Row(
        ids=torch.cat(parts)[None],
        positions=torch.cat([torch.arange(len(part)) for part in parts])[None],
        segments=torch.cat([torch.full((len(part),), i) for i, part in enumerate(parts)]),
        labels=torch.cat([(part * 7 + 1) % 320 for part in parts])[None],
        weights=torch.cat(weights)[None],
    )


def join(rank: int, layout: dict[str, int]) -> tuple[parallel.Parallel, platform.Platform]:
    machine = platform.install()
    place = parallel.initialize(LayoutConfig(**layout), rank=rank, init_method=None, timeout_s=60, platform=machine)
    return place, machine


def forward(model: Any, row: Row, machine: platform.Platform, **kwargs: Any) -> Tensor:
    mask, packed = attention_inputs(row.segments, machine)
    return model(row.ids, row.positions, mask, packed_seq_params=packed, **kwargs)  # type: ignore[no-any-return]


def gradients(model: Any, place: parallel.Parallel, row: Row, machine: platform.Platform) -> dict[str, Tensor]:
    """Gradients of the weighted sum of losses (policy) or values (critic) under HF names, through Megatron's DDP.

    Every data-parallel rank has the same row, so the sum over ranks is divided by their number.
    """
    ddp = DistributedDataParallel(model.config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)
    ddp.zero_grad_buffer()
    labels = {} if model.hf_config.role == "critic" else {"labels": row.labels}
    (forward(ddp, row, machine, **labels) * row.weights).sum().backward()
    finalize_model_grads([ddp])
    with torch.no_grad():
        for parameter in model.parameters():
            gradient = parameter.main_grad if parameter.requires_grad else torch.zeros_like(parameter)
            parameter.copy_(gradient / place.data_size)
    names = [tensor.name for tensor in hf_tensors(model, place) if not tensor.is_buffer]
    return gather(model, place, names)


def story(rank: int, layout: dict[str, int], policy_dir: Path, critic_dir: Path, out: Path) -> dict[str, Any]:
    """Everything that a layout must show, in one start of its ranks."""
    place, machine = join(rank, layout)
    multiple = place.tensor_size
    packed = row_of(SEQUENCES, multiple)
    policy = build_policy(policy_dir, place, machine, dtype=torch.float32)
    checkpoint.load_policy(policy, policy_dir, place)
    checkpoint.export(policy, policy_dir, out / "policy", place, role="policy", max_file_bytes=50_000)
    critic = build_critic(critic_dir, place, machine, dtype=torch.float32, recompute="full")
    checkpoint.load_critic(critic, critic_dir, place)
    checkpoint.export(critic, critic_dir, out / "critic", place, role="critic")
    with torch.no_grad():
        answer = {
            "logits": forward(policy, packed, machine)[0],
            "alone": [forward(policy, row_of((s,), multiple), machine)[0, : len(s)] for s in SEQUENCES],
            "values": forward(critic, packed, machine)[0],
        }
    freeze(critic, place, CRITIC_FREEZE)
    answer["policy_gradients"] = gradients(policy, place, packed, machine)
    answer["critic_gradients"] = gradients(critic, place, packed, machine)
    return answer


def bfloat16_round_trip(rank: int, layout: dict[str, int], policy_dir: Path, out: Path) -> tuple[str, str, bool]:
    """A bfloat16 policy and a critic started from it, exported; types of the critic's values and head."""
    place, machine = join(rank, layout)
    policy = build_policy(policy_dir, place, machine, dtype=torch.bfloat16)
    checkpoint.load_policy(policy, policy_dir, place)
    checkpoint.export(policy, policy_dir, out / "policy", place, role="policy")
    critic = build_critic(policy_dir, place, machine, dtype=torch.bfloat16)
    checkpoint.load_critic(critic, policy_dir, place)
    checkpoint.export(critic, policy_dir, out / "critic", place, role="critic")
    values = forward(critic, row_of(SEQUENCES, place.tensor_size), machine)
    return str(values.dtype), str(critic.value_head.weight.dtype), bool((values == 0).all())


def load_errors(rank: int, cases: dict[str, tuple[str, Path, Path]]) -> dict[str, str]:
    """For each case (role, directory to build from, directory to load): the ValueError, or "loaded"."""
    place, machine = join(rank, {})
    return {name: _load_error(place, machine, *case) for name, case in cases.items()}


def _load_error(place: Any, machine: Any, role: str, build_dir: Path, load_dir: Path) -> str:
    build, load = {
        "policy": (build_policy, checkpoint.load_policy),
        "critic": (build_critic, checkpoint.load_critic),
    }[role]
    try:
        load(build(build_dir, place, machine, dtype=torch.float32), load_dir, place)
    except ValueError as error:
        return str(error)
    return "loaded"


def freeze_reports(rank: int, directory: Path, patterns: dict[str, tuple[str, ...]]) -> dict[str, Any]:
    """For each case: the report and the Megatron names that are frozen, or the ValueError."""
    place, machine = join(rank, {})
    answers: dict[str, Any] = {}
    for case, globs in patterns.items():
        model = build_critic(directory, place, machine, dtype=torch.float32)
        try:
            report = freeze(model, place, globs)
        except ValueError as error:
            answers[case] = str(error)
            continue
        answers[case] = report, {name for name, p in model.named_parameters() if not p.requires_grad}
        untrained = {tensor.name for tensor in hf_tensors(model, place) if not tensor.trained}
        assert untrained == model.frozen_hf_names
    return answers
