"""What a search found: as tables, as lines to paste into the configuration, as JSON."""

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from launch.estimate import Seconds
from launch.plan import GIB, load_model
from launch.rates import COMPUTE_EFFICIENCY, LINK_EFFICIENCY
from launch.search import Candidate, Found, search
from megatron_sao.config import Config, LayoutConfig
from megatron_sao.controller.report import write_atomically

MIN_WIDTH = 200  # in a file, where rich would take 80


def search_and_show(path: Path, overrides: Sequence[str], num_gpus: int | None, json_path: Path | None) -> None:
    """Raises ValueError as `load_model` and `search`."""
    config, hf = load_model(path, overrides)
    found = search(config, hf, num_gpus=num_gpus)
    show(config, found)
    if json_path is not None:
        write_atomically(json_path, json.dumps(as_json(config, found), indent=2) + "\n")


def show(config: Config, found: Sequence[Found], console: Console | None = None) -> None:
    console = console or Console()
    if not console.is_terminal:
        console.width = max(console.width, MIN_WIDTH)
    best = found[0]
    console.print(_shares_table(config, found))
    for name, candidates in (("actor", best.actor), ("critic", best.critic)):
        console.print(_layouts_table(f"{name} on {candidates[0].plan.num_gpus} GPUs, fastest first", candidates))
    for line in _assumptions(config):
        console.print(line, highlight=False, soft_wrap=True)
    console.print("\nThe first of each, in place of the lines of the same names:\n", highlight=False)
    console.print(toml_lines(best), highlight=False, markup=False, soft_wrap=True)


def toml_lines(found: Found) -> str:
    """The keys that a search chooses, by their tables."""
    lines = []
    for name, candidate in (("actor", found.actor[0]), ("critic", found.critic[0])):
        layout = layout_toml(candidate.role.layout)
        lines += [f"[{name}]", f"layout = {layout}", f'recompute = "{candidate.role.recompute}"', ""]
    return "\n".join([*lines, "[engine]", f"tensor = {found.engine_tensor}"])


def layout_toml(layout: LayoutConfig) -> str:
    """Without the sizes that are 1."""
    names = ("num_ranks", "tensor", "context", "pipeline", "virtual_stages", "expert", "expert_tensor")
    sizes = {name: getattr(layout, name) for name in names}
    written = [f"{name} = {size}" for name, size in sizes.items() if size > 1 or name == "num_ranks"]
    return f"{{ {', '.join(written)} }}"


def as_json(config: Config, found: Sequence[Found]) -> dict[str, object]:
    return {
        "gpu": config.cluster.gpu,
        "gpus_per_node": config.cluster.gpus_per_node,
        "loop": config.run.loop,
        "gpus": found[0].num_gpus,
        "toml": toml_lines(found[0]),
        "shares": [
            {
                "gpus": each.num_gpus,
                "step_s": each.step_s,
                "engine_tensor": each.engine_tensor,
                "actor": [_candidate_json(candidate) for candidate in each.actor],
                "critic": [_candidate_json(candidate) for candidate in each.critic],
            }
            for each in found
        ],
    }


def _candidate_json(candidate: Candidate) -> dict[str, object]:
    return {
        "layout": candidate.role.layout.model_dump(),
        "recompute": candidate.role.recompute,
        "bytes_per_gpu": candidate.plan.bytes_per_gpu,
        "total_s": candidate.seconds.total,
        "seconds": {part: getattr(candidate.seconds, part) for part in Seconds.__slots__},
    }


def _shares_table(config: Config, found: Sequence[Found]) -> Table:
    is_overlapped = config.run.loop == "overlapped"
    title = f"{config.cluster.gpu} for each role, fastest first; a step is {'the slower' if is_overlapped else 'both'}"
    table = Table(title=title, title_justify="left")
    for heading in ("GPUs", "actor", "critic", "engine", "actor s", "critic s", "step s"):
        table.add_column(heading, justify="right")
    for each in found:
        sizes = (each.num_gpus, each.actor[0].plan.num_gpus, each.critic[0].plan.num_gpus, each.engine_tensor)
        seconds = (each.actor[0].seconds.total, each.critic[0].seconds.total, each.step_s)
        table.add_row(*map(str, sizes), *(f"{number:.1f}" for number in seconds))
    return table


def _layouts_table(title: str, candidates: Sequence[Candidate]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("layout, but for num_ranks", no_wrap=True)
    table.add_column("recompute")
    for heading in ("GiB", "of", "s", *Seconds.__slots__):
        table.add_column(heading, justify="right")
    for each in candidates:
        layout = layout_toml(each.role.layout).strip("{ }").partition(", ")[2] or "-"
        gib = (f"{num_bytes / GIB:.1f}" for num_bytes in (each.plan.bytes_per_gpu, each.plan.usable_bytes))
        parts = (f"{getattr(each.seconds, part):.1f}" for part in Seconds.__slots__)
        table.add_row(layout, each.role.recompute, *gib, f"{each.seconds.total:.1f}", *parts)
    return table


def _assumptions(config: Config) -> list[str]:
    rollout = config.rollout
    return [
        f"estimated: {rollout.trajectories_per_step} trajectories of {rollout.max_episode_tokens} tokens, the longest "
        f"there are; {COMPUTE_EFFICIENCY} of the GPU's peak rate, {LINK_EFFICIENCY} of the links' (launch/rates.py); "
        "without generation. It orders layouts and promises nothing",
        f"the engine has {config.engine.tensor} GPUs or, where they do not hold it, the fewest that do: generation is "
        "not estimated",
    ]
