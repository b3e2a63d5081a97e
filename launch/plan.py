"""`sao plan`: what a run needs and what every GPU would hold, from the configuration and a `config.json` alone.

Needs neither GPU nor weights. Roles have GPUs of their own, one rank each; the plan is of the fullest GPU of a role.
"""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from launch.checks import how_to_get
from megatron_sao.config import Config, EngineConfig, RoleConfig, divisors, load
from megatron_sao.controller.model_file import check_sequence_length, max_exact_tokens
from megatron_sao.controller.report import write_atomically
from megatron_sao.data.routed_experts import RouterShape
from megatron_sao.megatron.mapping.architectures import read_hf_config
from megatron_sao.megatron.mapping.count import NumParameters, num_parameters
from megatron_sao.megatron.mapping.hf_config import HFConfig
from megatron_sao.megatron.memory import (
    StageMemory,
    advice,
    frozen_names,
    publish_bytes,
    role_memory,
    serving_memory,
)
from megatron_sao.megatron.sizes import check_sizes

GIB = 1024**3
GPU_BYTES = {  # what CUDA reports, not what the name says
    "A100-80GB": int(79.1 * GIB),
    "H100-80GB": int(79.1 * GIB),
    "H200-141GB": int(139.8 * GIB),
    "B200-180GB": int(178.3 * GIB),
}
RESERVED_BYTES = 6 * GIB
"""[choice] Of each GPU that trains: CUDA's context, NCCL's buffers, workspaces, fragments of the allocator."""
STATIC_FRACTION = 0.85
"""[choice] Of an engine's GPU, for weights and KV cache, where `--mem-fraction-static` is not given."""
MODELS = "models"  # beside a configuration: <model.path>/config.json of models that are not on this machine

RoleName = Literal["actor", "critic", "engine"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RolePlan:
    """One role. `parts` are bytes of its fullest GPU."""

    name: RoleName
    num_gpus: int
    parts: dict[str, int]
    usable_bytes: int  # of a GPU
    stages: tuple[StageMemory, ...] = ()  # by pipeline rank; none for an engine
    kv_tokens: int = 0  # an engine's cache
    saved_bytes: int = 0  # of its fullest GPU, by what is frozen
    help: str = ""  # what would help, where it does not fit

    @property
    def bytes_per_gpu(self) -> int:
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        return not self.help


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    config: Config
    hf: HFConfig
    counts: NumParameters
    roles: tuple[RolePlan, ...]

    @property
    def num_gpus(self) -> int:
        return sum(role.num_gpus for role in self.roles)

    @property
    def recorded_bytes(self) -> int:
        """Of the experts that a router replay records, for the longest episode."""
        if not self.config.actor.router_replay:
            return 0
        return self.config.rollout.max_episode_tokens * RouterShape.of(self.hf.raw).bytes_per_token

    @property
    def num_nodes(self) -> int:
        return -(-self.num_gpus // self.config.cluster.gpus_per_node)

    @property
    def fits(self) -> bool:
        return all(role.fits for role in self.roles)


def load_plan(path: Path, overrides: Sequence[str]) -> Plan:
    """The plan of a configuration file.

    Raises:
        ValueError: as `load_model`, or a layout does not divide the model.
    """
    return make_plan(*load_model(path, overrides))


def load_model(path: Path, overrides: Sequence[str]) -> tuple[Config, HFConfig]:
    """A configuration file and what its model's `config.json` says.

    Raises:
        ValueError: what is wrong with either.
    """
    config = load(path, overrides)
    hf = read_hf_config(model_directory(config, path.parent))
    check_sequence_length(config, max_exact_tokens(hf.raw), computes_sparse=hf.computes_sparse)
    return config, hf


def model_directory(config: Config, beside: Path) -> Path:
    """Where the `config.json` is: in `model.path`, or in the copy that lies beside the configuration."""
    places = (Path(config.model.path), beside / MODELS / config.model.path)
    for place in places:
        if (place / "config.json").is_file():
            return place
    searched = " or in ".join(dict.fromkeys(map(str, places)))
    raise ValueError(
        f"model.path = {config.model.path!r}: there is no config.json in {searched}: set model.path to its directory"
        + how_to_get(config)
    )


def make_plan(config: Config, hf: HFConfig) -> Plan:
    """Raises ValueError for a layout that does not divide the model's sizes (those that would are named)."""
    policy, critic = (dataclasses.replace(hf, role=role) for role in ("policy", "critic"))
    return Plan(
        config=config,
        hf=policy,
        counts=num_parameters(policy),
        roles=(
            _with_savings(trained_role(config, config.actor, policy), config, config.actor, policy),
            _with_savings(trained_role(config, config.critic, critic), config, config.critic, critic),
            engine_role(config, policy),
        ),
    )


def trained_role(config: Config, role: RoleConfig, hf: HFConfig) -> RolePlan:
    """The actor or the critic, as `hf.role` says. The one place that says whether a layout fits.

    Raises:
        ValueError: the layout does not divide the model's sizes, or shares rows that cannot be shared.
    """
    layout, dtype = role.layout, config.model.dtype
    name: RoleName = "critic" if hf.role == "critic" else "actor"
    if layout.context > 1 and not shares_rows(config):
        raise ValueError(
            f"{name}.layout: context = {layout.context} with {dtype}: the attention that context ranks share takes "
            "half precision only: set model.dtype = bfloat16, or context = 1"
        )
    _check(
        f"{name}.layout",
        hf,
        tensor=layout.tensor,
        expert=layout.expert,
        expert_tensor=layout.expert_tensor,
        num_stages=layout.pipeline * layout.virtual_stages,
    )
    stages = role_memory(hf, role, dtype=dtype, frozen=frozen_names(hf, role.frozen_patterns))
    fullest = max(stages, key=lambda stage: stage.total_bytes)
    parts = fullest.parts
    if name == "actor":
        parts |= {"publish": publish_bytes(hf, dtype=dtype, bucket_bytes=config.publish.bucket_bytes)}
    usable = GPU_BYTES[config.cluster.gpu] - RESERVED_BYTES
    return RolePlan(
        name=name,
        num_gpus=layout.num_ranks,
        parts=parts,
        usable_bytes=usable,
        stages=stages,
        help=advice(parts, role) if sum(parts.values()) > usable else "",
    )


def shares_rows(config: Config) -> bool:
    """Whether context ranks may share rows on a GPU, as the run itself asks (`megatron/transformer_config.py`)."""
    return config.model.dtype != "float32"


def _with_savings(planned: RolePlan, config: Config, role: RoleConfig, hf: HFConfig) -> RolePlan:
    unfrozen = role_memory(hf, role, dtype=config.model.dtype)
    fullest = max(planned.stages, key=lambda stage: stage.total_bytes)
    saved = unfrozen[planned.stages.index(fullest)].total_bytes - fullest.total_bytes
    return dataclasses.replace(planned, saved_bytes=saved)


def _check(what: str, hf: HFConfig, **sizes: int) -> None:
    try:
        check_sizes(hf, **sizes)
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from None


def engine_role(config: Config, hf: HFConfig) -> RolePlan:
    """Raises ValueError as `trained_role`."""
    engine, rollout = config.engine, config.rollout
    _check("engine", hf, tensor=engine.tensor)
    _check_expert_cuts(hf, engine)
    memory = serving_memory(hf, dtype=config.model.dtype, tensor=engine.tensor)
    gpu_bytes = GPU_BYTES[config.cluster.gpu]
    static = int(gpu_bytes * _argument(engine, "--mem-fraction-static", default=STATIC_FRACTION))
    room = max(0, static - memory.weight_bytes) // memory.kv_bytes_per_token
    tokens = min(room, engine.max_total_tokens or room)
    wanted = engine.max_total_tokens or rollout.max_episode_tokens
    buckets = publish_bytes(hf, dtype=config.model.dtype, bucket_bytes=config.publish.bucket_bytes)
    parts = {
        "weights": memory.weight_bytes,
        "kv_cache": tokens * memory.kv_bytes_per_token,
        "publish": buckets // 2,  # one bucket is received at a time
    }
    shortage = (
        f"weights leave room for {room} tokens of KV cache, {wanted} are wanted: more engine.tensor ranks"
        if room < wanted
        else "the bucket of a publish does not fit beside weights and KV cache: a lower --mem-fraction-static"
        if sum(parts.values()) > gpu_bytes
        else ""
    )
    return RolePlan(
        name="engine", num_gpus=engine.tensor, parts=parts, usable_bytes=gpu_bytes, kv_tokens=tokens, help=shortage
    )


def _check_expert_cuts(hf: HFConfig, engine: EngineConfig) -> None:
    """SGLang cuts an expert over the ranks that do not hold different ones."""
    cuts = max(1, engine.tensor // int(_argument(engine, "--ep-size", "--ep", "--expert-parallel-size", default=1)))
    if hf.expert_ffn_size % cuts:
        raise ValueError(
            f"engine: tensor = {engine.tensor} cuts each expert in {cuts}, which does not divide its feed-forward "
            f"size, {hf.expert_ffn_size}: {divisors(hf.expert_ffn_size)} would"
        )


def _argument(engine: EngineConfig, *names: str, default: float) -> float:
    """Of the engine's command line, as `--name value` or `--name=value`; the last one counts."""
    words = [part for word in engine.extra_args for part in (word.split("=", 1) if word.startswith("--") else [word])]
    values = [value for name, value in zip(words, [*words[1:], ""], strict=True) if name in names]
    try:
        return float(values[-1]) if values else default
    except ValueError:
        raise ValueError(f"engine.extra_args: {names[0]} = {values[-1]!r} is not a number") from None


def write_json(plan: Plan, path: Path) -> None:
    """The whole file or none of it."""
    data = {
        "architecture": plan.hf.architecture,
        "params_total": plan.counts.total,
        "params_active": plan.counts.active,
        "params_mtp": plan.counts.mtp,
        "gpu": plan.config.cluster.gpu,
        "gpu_bytes": GPU_BYTES[plan.config.cluster.gpu],
        "gpus": plan.num_gpus,
        "nodes": plan.num_nodes,
        "fits": plan.fits,
        "recorded_experts_bytes_per_episode": plan.recorded_bytes,
        "recorded_experts_bytes": plan.recorded_bytes * plan.config.rollout.num_slots,
        "roles": {role.name: _role_json(role) for role in plan.roles},
    }
    write_atomically(path, json.dumps(data, indent=2) + "\n")


def _role_json(role: RolePlan) -> dict[str, object]:
    stages = [
        {
            "layers": [[chunk.start, chunk.stop] for chunk in stage.layers],
            "params_per_gpu": stage.num_parameters,
            "params_frozen_per_gpu": stage.num_frozen,
            **stage.parts,
        }
        for stage in role.stages
    ]
    shown = {"stages": stages} if stages else {"kv_tokens": role.kv_tokens}
    return {
        "gpus": role.num_gpus,
        "bytes_per_gpu": role.bytes_per_gpu,
        "usable_bytes": role.usable_bytes,
        "fits": role.fits,
        "parts": role.parts,
        "saved_by_freezing_bytes": role.saved_bytes,
        **shown,
    }
