"""A plan as tables that a person can read."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from launch.plan import GIB, GPU_BYTES, RESERVED_BYTES, Plan, RolePlan, load_plan, write_json
from megatron_sao.config import LayoutConfig
from megatron_sao.megatron.activations import EXPERT_IMBALANCE
from megatron_sao.megatron.mapping.table import padded_vocabulary

MIN_WIDTH = 140  # in a file, where rich would take 80
_PARTS = ("parameters", "gradients", "optimizer", "activations", "weights", "kv_cache", "publish")


def plan_and_show(config: Path, overrides: Sequence[str], json_path: Path | None) -> bool:
    """Whether all roles fit. Raises ValueError as `load_plan`."""
    plan = load_plan(config, overrides)
    show(plan)
    if json_path is not None:
        write_json(plan, json_path)
    return plan.fits


def show(plan: Plan, console: Console | None = None) -> None:
    console = console or Console()
    if not console.is_terminal:
        console.width = max(console.width, MIN_WIDTH)
    cluster = plan.config.cluster
    console.print(
        f"{plan.hf.architecture}: {_count(plan.counts.total)} parameters, {_count(plan.counts.active)} active for a "
        f"token, {plan.config.model.dtype}. {plan.num_gpus} {cluster.gpu} in {plan.num_nodes} nodes of "
        f"{cluster.gpus_per_node}.",
        highlight=False,
    )
    console.print(_bytes_table(plan))
    console.print(_holdings_table(plan))
    for line in [*_assumptions(plan), *_verdicts(plan)]:
        console.print(line, highlight=False, soft_wrap=True)


def _bytes_table(plan: Plan) -> Table:
    table = Table(title="GiB on the fullest GPU of each role", title_justify="left")
    for heading in ("role", "GPUs", *(part.replace("_", " ") for part in _PARTS), "total", "of", "fits"):
        table.add_column(heading, justify="left" if heading in ("role", "fits") else "right")
    for role in plan.roles:
        cells = [_gib(role.parts[part]) if part in role.parts else "-" for part in _PARTS]
        total = [_gib(role.bytes_per_gpu), _gib(role.usable_bytes), "yes" if role.fits else "NO"]
        table.add_row(role.name, str(role.num_gpus), *cells, *total, style=None if role.fits else "red")
    return table


def _holdings_table(plan: Plan) -> Table:
    table = Table(title="Which rank holds what", title_justify="left")
    for heading in ("role", "ranks", "layers", "besides", "parameters on a GPU", "of these frozen", "GiB"):
        table.add_column(
            heading, justify="right" if heading in ("parameters on a GPU", "of these frozen", "GiB") else "left"
        )
    for role in plan.roles:
        for rank, stage in enumerate(role.stages):
            each = role.num_gpus // len(role.stages)
            table.add_row(
                role.name,
                f"{rank * each}-{(rank + 1) * each - 1}",
                ", ".join(f"{chunk.start}-{chunk.stop - 1}" for chunk in stage.layers),
                _besides(role, rank),
                _count(stage.num_parameters),
                f"{stage.num_frozen / stage.num_parameters:.1%}",
                _gib(stage.total_bytes),
            )
    return table


def _besides(role: RolePlan, rank: int) -> str:
    first = ["embedding"] if rank == 0 else []
    head = "value head" if role.name == "critic" else "output layer"
    return ", ".join(first + ([f"final norm, {head}"] if rank == len(role.stages) - 1 else []))


def _assumptions(plan: Plan) -> list[str]:
    config, hf = plan.config, plan.hf
    engine = plan.roles[-1]
    lines = [
        _shards(plan, name, layout)
        for name, layout in (("actor", config.actor.layout), ("critic", config.critic.layout))
    ]
    lines += [_frozen(role) for role in plan.roles if role.saved_bytes]
    lines.append(
        f"engine: {engine.kv_tokens:,} tokens of KV cache, {engine.kv_tokens / config.rollout.max_episode_tokens:.1f} "
        "episodes of the greatest length at once"
    )
    if config.actor.router_replay:
        slots = config.rollout.num_slots
        lines.append(
            f"router replay: the controller's host records up to {plan.recorded_bytes / 1e6:.0f} MB of experts for an "
            f"episode, {_gib(plan.recorded_bytes * slots)} GiB for {slots} slots: in memory while an episode runs, "
            "then in files below run.directory"
        )
    if hf.num_experts:
        lines.append(f"assumed: the busiest expert rank sees {EXPERT_IMBALANCE} x the average number of tokens")
    lines.append(
        f"assumed: Transformer Engine; {RESERVED_BYTES // GIB} of {GPU_BYTES[config.cluster.gpu] / GIB:.1f} GiB are "
        "left to CUDA, NCCL and the allocator of a GPU that trains"
    )
    return lines


def _shards(plan: Plan, name: str, layout: LayoutConfig) -> str:
    """How the ranks of one pipeline stage divide it."""
    hf, vocabulary = plan.hf, padded_vocabulary(plan.hf.vocab_size, layout.tensor) // layout.tensor
    parts = [
        f"{name}: tensor rank t holds 1/{layout.tensor} of each layer ({hf.num_heads // layout.tensor} of "
        f"{hf.num_heads} heads) and of the vocabulary ({vocabulary} of {hf.vocab_size})"
    ]
    if hf.num_experts:
        each = hf.num_experts // layout.expert
        cut = f", 1/{layout.expert_tensor} of each" if layout.expert_tensor > 1 else ""
        parts.append(f"expert rank e holds experts {each}e to {each}e+{each - 1} of {hf.num_experts}{cut}")
    copies = f"dense tensors have {layout.data * layout.context} copies"
    parts.append(f"{copies}, experts {layout.expert_data}" if hf.num_experts else copies)
    return "; ".join(parts)


def _frozen(role: RolePlan) -> str:
    frozen, held = (sum(getattr(s, name) for s in role.stages) for name in ("num_frozen", "num_parameters"))
    return (
        f"{role.name}: {frozen / held:.1%} of its parameters are frozen; without their gradients and Adam's state the "
        f"fullest GPU holds {_gib(role.saved_bytes)} GiB less"
    )


def _verdicts(plan: Plan) -> list[str]:
    return [
        f"{role.name} does not fit: {_gib(role.bytes_per_gpu)} GiB on a GPU with {_gib(role.usable_bytes)}; {role.help}"
        for role in plan.roles
        if not role.fits
    ]


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f}"


def _count(number: int) -> str:
    return f"{number / 1e9:.2f} B" if number >= 10**9 else f"{number / 1e6:.2f} M"
