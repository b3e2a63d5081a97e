"""What the ranks of the Megatron tests run. No transformers here: a rank must start fast."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from megatron_sao.config import LayoutConfig, OptimizerConfig
from megatron_sao.megatron import checkpoint, parallel, platform
from megatron_sao.megatron.forward import MicroBatch, context_part, run_scoring, run_training
from megatron_sao.megatron.freeze import freeze
from megatron_sao.megatron.mapping.transfer import gather, hf_tensors
from megatron_sao.megatron.model import Model, build_critic, build_policy
from megatron_sao.megatron.optimizer import wrap
from megatron_sao.megatron.output_layer import Sums, loss_of_states
from megatron_sao.megatron.weight_files import carried_tensors
from megatron_sao.sync.plan import make_plan
from megatron_sao.sync.source import MegatronSource
from tests.support.full_logits import differences, full_logits, vocabulary

SEQUENCES = (tuple(range(3, 300, 43)), tuple(range(310, 30, -35)))  # 7 and 8 tokens
PLAIN = OptimizerConfig(learning_rate=1e-3, clip_norm=1.0, distributed=False)
CRITIC_FREEZE = ("*.self_attn.*", "model.embed_tokens.weight")


@dataclass(frozen=True)
class Row:
    """A packed row [1, T]; segment ids [T]."""

    ids: Tensor
    positions: Tensor
    segments: Tensor
    is_padding: Tensor
    labels: Tensor
    weights: Tensor

    def to(self, device: torch.device) -> "Row":
        return Row(**{name: tensor.to(device) for name, tensor in vars(self).items()})


def row_of(sequences: tuple[tuple[int, ...], ...], multiple: int, each: int = 1) -> Row:
    """The sequences end to end, each padded to a multiple of `each`, the row to `multiple * each` by a sequence of its
    own; weight 0 on padding."""
    padded = [(*sequence, *(5,) * (-len(sequence) % each)) for sequence in sequences]
    rest = -sum(map(len, padded)) % (multiple * each)
    parts = [torch.tensor(sequence) for sequence in padded] + ([torch.full((rest,), 5)] if rest else [])
    real = torch.cat([torch.arange(len(p)) < n for p, n in zip(parts, [*map(len, sequences), 0], strict=False)])
    return Row(
        ids=torch.cat(parts)[None],
        positions=torch.cat([torch.arange(len(part)) for part in parts])[None],
        segments=torch.cat([torch.full((len(part),), i) for i, part in enumerate(parts)]),
        is_padding=~real,
        labels=torch.cat([(part * 7 + 1) % 320 for part in parts])[None],
        weights=(torch.cat([torch.arange(1.0, 1 + len(part)) for part in parts]) * real)[None],
    )


def row_for(place: parallel.Parallel, *sequences: tuple[int, ...]) -> Row:
    """That the ranks of a layout can share."""
    return row_of(sequences, place.tensor_size, 2 * place.context_size if place.context_size > 1 else 1)


def join(rank: int, layout: dict[str, int]) -> tuple[parallel.Parallel, platform.Platform]:
    machine = platform.install()
    place = parallel.initialize(LayoutConfig(**layout), rank=rank, init_method=None, timeout_s=60, platform=machine)
    return place, machine


def micro_batch(row: Row, place: parallel.Parallel, *, counts: bool = True) -> MicroBatch:
    """This rank's part of the row as states; the whole row counts as one action token, or as nothing."""
    lengths = tuple(torch.unique_consecutive(row.segments, return_counts=True)[1].tolist())
    kept_B = kept(lengths, place)
    return MicroBatch(
        token_ids_B=row.ids[0, kept_B],
        position_ids_B=row.positions[0, kept_B],
        lengths=lengths,
        state_index_a=torch.arange(len(kept_B), device=row.ids.device),
        targets_a=row.labels[0, kept_B],
        places_a=torch.zeros(int(counts and place.context_rank == 0), dtype=torch.int64, device=row.ids.device),
        columns={"weights": row.weights[0, kept_B] * counts},
    )


def kept(lengths: tuple[int, ...], place: parallel.Parallel) -> Tensor:
    return torch.from_numpy(context_part(lengths, rank=place.context_rank, size=place.context_size))


def forward(model: Model, row: Row, place: parallel.Parallel, machine: platform.Platform) -> Tensor | None:
    """Output [T, ...] at the row's tokens without padding, on the last pipeline stage; None on others."""
    model.wrapped = model.wrapped or model.chunks  # type: ignore[assignment]
    row = row.to(machine.device)
    part = micro_batch(row, place)
    rows = [part] * len(model.chunks)  # as many as the interleaved schedule of two pipeline ranks wants

    def read(output: Tensor, _: MicroBatch) -> Tensor:
        if model.hf_config.role == "critic":
            return output[0].clone()
        return full_logits(model.chunks[-1], output, model.hf_config.vocab_size)

    found = run_scoring(model, rows, read, machine)
    if not found:
        return None
    whole = found[0].new_zeros(row.ids.shape[1], *found[0].shape[1:])
    whole[kept(part.lengths, place)] = found[0]
    torch.distributed.all_reduce(whole, group=place.context_group)
    return whole[~row.is_padding]


def gradients(model: Model, place: parallel.Parallel, row: Row, machine: platform.Platform) -> dict[str, Tensor]:
    """Gradients of the weighted sum of losses (policy) or values (critic) under HF names, as a role makes them.

    Every data-parallel rank has the same row, one action token of it: Megatron divides the sum over ranks by their
    number.
    """

    def loss(output: Tensor, row: MicroBatch) -> tuple[Tensor, list[Sums]]:
        def of_piece(logprobs: Tensor, _: Tensor, piece: slice) -> tuple[Tensor, Sums]:
            return -(logprobs * row.columns["weights"][piece]).sum(), {}

        if model.hf_config.role == "critic":
            return (output[0] * row.columns["weights"]).sum(), []
        return loss_of_states(output, row, of_piece, vocabulary(model, place))

    if not any(isinstance(chunk, DistributedDataParallel) for chunk in model.wrapped):
        wrap(model, PLAIN)
    row = row.to(machine.device)
    others = [micro_batch(row, place, counts=False)] * (len(model.chunks) - 1)
    run_training(model, [micro_batch(row, place), *others], loss, machine)
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
    packed = row_for(place, *SEQUENCES)
    policy = build_policy(policy_dir, place, machine, dtype=torch.float32)
    checkpoint.load_policy(policy, policy_dir, place)
    checkpoint.export(policy, policy_dir, out / "policy", place, role="policy", max_file_bytes=50_000)
    critic = build_critic(critic_dir, place, machine, dtype=torch.float32, recompute="full")
    checkpoint.load_critic(critic, critic_dir, place)
    checkpoint.export(critic, critic_dir, out / "critic", place, role="critic")
    alone = [forward(policy, row_for(place, sequence), place, machine) for sequence in SEQUENCES]
    answer = {
        "logits": forward(policy, packed, place, machine),
        "alone": [logits for logits in alone if logits is not None],
        "values": forward(critic, packed, place, machine),
        "published": {
            sender: published(policy, place, policy_dir, direct=sender == "direct") for sender in ("gather", "direct")
        },
        "gathered_onto_another_device": gathered_onto_another_device(policy, place),
    }
    freeze(critic, place, CRITIC_FREEZE)
    wrap(policy, PLAIN)
    answer["pieces"] = differences(policy, place, micro_batch(packed.to(machine.device), place), machine)
    answer["policy_gradients"] = gradients(policy, place, packed, machine)
    answer["critic_gradients"] = gradients(critic, place, packed, machine)
    return answer


def packed_and_alone(rank: int, layout: dict[str, int], directory: Path, dtype: str) -> dict[str, Any]:
    """Logits of a packed row (this rank's part of the vocabulary), and of each of its sequences in a row of its own."""
    place, machine = join(rank, layout)
    policy = build_policy(directory, place, machine, dtype=getattr(torch, dtype))
    checkpoint.load_policy(policy, directory, place)
    packed, *alone = (
        forward(policy, row_for(place, *sequences), place, machine)
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
    values = forward(critic, row_for(place, *SEQUENCES), place, machine)
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
