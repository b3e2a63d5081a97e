"""What can be seen of a run before anything is written, started or imported that takes seconds."""

import re
from pathlib import Path

from launch.placement import Placement, place, visible_devices
from megatron_sao.config import Config
from megatron_sao.controller.model_file import check_sequence_length, hf_fields, max_exact_tokens
from megatron_sao.data.routed_experts import RouterShape
from megatron_sao.megatron.installed import SPARSE_ATTENTION


def check(config: Config) -> Placement:
    """Which devices the run gets. Raises ValueError."""
    path = config.model.path
    if not (Path(path) / "config.json").is_file():
        raise ValueError(f"model.path = {path!r} is not a model directory: it has no config.json{how_to_get(config)}")
    check_sequence_length(config, max_exact_tokens(hf_fields(Path(path))), computes_sparse=SPARSE_ATTENTION)
    router_shape(config)
    return place(config, visible_devices())


def router_shape(config: Config) -> RouterShape | None:
    """What the engine records for a replay. Raises ValueError: a model without experts."""
    if not config.actor.router_replay:
        return None
    return RouterShape.of(hf_fields(Path(config.model.path)))


def how_to_get(config: Config) -> str:
    """The remedy where `model.path` is no directory but may be a name on the Hugging Face hub; else empty."""
    path = config.model.path
    owner, _, name = path.partition("/")
    is_local = Path(owner).is_dir() or owner in Path(config.run.directory).parts[:1]
    if is_local or not re.fullmatch(r"[\w.-]*\w/\w[\w.-]*", path):
        return ""
    directory = f"models/{name}"
    return (
        f". If it is a name on the Hugging Face hub, fetch it with `hf download {path} --local-dir {directory}` "
        f"and give model.path={directory}"
    )
