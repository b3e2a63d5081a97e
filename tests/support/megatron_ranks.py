"""What the ranks of the Megatron tests run. No transformers here: a rank must start fast."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_sao.config import LayoutConfig, OptimizerConfig
from megatron_sao.megatron import checkpoint, parallel, platform
from megatron_sao.megatron.forward import MicroBatch, run_scoring, run_training
from megatron_sao.megatron.freeze import freeze
from megatron_sao.megatron.logprobs import vocab_parallel_logprobs
from megatron_sao.megatron.mapping import gather, hf_tensors
from megatron_sao.megatron.model import Model, build_critic, build_policy
from megatron_sao.megatron.optimizer import wrap
from megatron_sao.megatron.weight_files import carried_tensors
from megatron_sao.sync.plan import make_plan
from megatron_sao.sync.source import MegatronSource

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

    def to(self, device: torch.device) -> "Row":
        return Row(**{name: tensor.to(device) for name, tensor in vars(self).items()})


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


def micro_batch(row: Row, *, counts: bool = True) -> MicroBatch:
    """The whole row as states, counted as one action token, or as nothing."""
    return MicroBatch(
        token_ids_B=row.ids[0],
        position_ids_B=row.positions[0],
        lengths=tuple(torch.unique_consecutive(row.segments, return_counts=True)[1].tolist()),
        state_index_a=torch.arange(row.ids.shape[1], device=row.ids.device),
        targets_a=row.labels[0],
        places_a=torch.zeros(int(counts), dtype=torch.int64, device=row.ids.device),
        columns={"weights": row.weights[0] * counts},
    )


def forward(model: Model, row: Row, machine: platform.Platform) -> Tensor | None:
    """Output [T, ...] of the row through Megatron's schedule, on the last pipeline stage; None on the others."""
    model.wrapped = model.wrapped or model.chunks  # type: ignore[assignment]
    rows = [micro_batch(row.to(machine.device))] * len(
        model.chunks
    )  # as many as the interleaved schedule of two pipeline ranks wants
    found = run_scoring(model, rows, lambda output, _: output[0].clone(), machine)
    return found[0] if found else None


def gradients(model: Model, place: parallel.Parallel, row: Row, machine: platform.Platform) -> dict[str, Tensor]:
    """Gradients of the weighted sum of losses (policy) or values (critic) under HF names, as a role makes them.

    Every data-parallel rank has the same row as one action token: Megatron divides the sum over ranks by their number.
    """

    def loss(output: Tensor, row: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        if model.hf_config.role == "critic":
            return (output[0] * row.columns["weights"]).sum(), {}
        return -(
            vocab_parallel_logprobs(output[0], row.targets_a, place.tensor_group) * row.columns["weights"]
        ).sum(), {}

    wrap(model, OptimizerConfig(learning_rate=1e-3, clip_norm=1.0, distributed=False))
    row = row.to(machine.device)
    others = [micro_batch(row, counts=False)] * (len(model.chunks) - 1)
    run_training(model, [micro_batch(row), *others], loss, machine)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.main_grad if parameter.requires_grad else torch.zeros_like(parameter))
    names = [tensor.name for tensor in hf_tensors(model, place) if not tensor.is_buffer]
    return gather(model, place, names)


def published(model: Model, place: parallel.Parallel, directory: Path, *, direct: bool) -> dict[str, Tensor]:
    """What this rank would send in a full publish of the policy that was loaded from `directory`."""
    source = MegatronSource(model, place, carried_tensors(directory))
    sent: dict[str, Tensor] = {}
    for bucket in make_plan(source.tensors(), bucket_bytes=20_000, full=True, direct=direct).buckets:
        places = {spec.name: torch.full(spec.shape, torch.nan) for spec in bucket.tensors}
        mine = bucket.source == place.rank
        num_bytes = source.gather(bucket.tensors, places if mine else None, target=bucket.source, timeout_s=20)
        if mine:
            assert num_bytes + source.flatten(bucket.tensors, places) == bucket.num_bytes
            sent |= places
    return sent


def gathered_onto_another_device(model: Model, place: parallel.Parallel) -> bool:
    """Whether rank 0 counts every byte where the places are not on the model's device, which has the messages."""
    source = MegatronSource(model, place)
    (bucket,) = make_plan(source.tensors(), bucket_bytes=2**30, full=True).buckets
    places = {spec.name: torch.empty(spec.shape, device="meta") for spec in bucket.tensors} if place.rank == 0 else None
    num_bytes = source.gather(bucket.tensors, places, target=0, timeout_s=20)
    return places is None or num_bytes + source.flatten(bucket.tensors, places) == bucket.num_bytes


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
    alone = [(forward(policy, row_of((s,), multiple), machine), len(s)) for s in SEQUENCES]
    answer = {
        "logits": forward(policy, packed, machine),
        "alone": [logits[:length] for logits, length in alone if logits is not None],
        "values": forward(critic, packed, machine),
        "published": {
            sender: published(policy, place, policy_dir, direct=sender == "direct") for sender in ("gather", "direct")
        },
        "gathered_onto_another_device": gathered_onto_another_device(policy, place),
    }
    freeze(critic, place, CRITIC_FREEZE)
    answer["policy_gradients"] = gradients(policy, place, packed, machine)
    answer["critic_gradients"] = gradients(critic, place, packed, machine)
    return answer


def packed_and_alone(rank: int, layout: dict[str, int], directory: Path, dtype: str) -> dict[str, Any]:
    """Logits of a packed row (this rank's part of the vocabulary), and of each of its sequences in a row of its own."""
    place, machine = join(rank, layout)
    policy = build_policy(directory, place, machine, dtype=getattr(torch, dtype))
    checkpoint.load_policy(policy, directory, place)
    packed, *alone = (
        forward(policy, row_of(sequences, place.tensor_size), machine)
        for sequences in (SEQUENCES, *((sequence,) for sequence in SEQUENCES))
    )
    return {"packed": packed, "alone": alone, "sparse_kernels": machine.sparse_kernels}


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
    assert values is not None
    head = dict(critic.named_parameters())["value_head.weight"]
    return str(values.dtype), str(head.dtype), bool((values == 0).all())


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
