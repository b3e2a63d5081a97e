"""The ranks of actor and critic as processes of this machine, and the channels to them."""

import asyncio
import json
import logging
import os
import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from launch.placement import Placement
from launch.processes import Process, Supervisor
from megatron_sao.channel import Channel, ChannelError, ChannelServer, Describe, RoleError, Stop
from megatron_sao.config import Config, LayoutConfig
from megatron_sao.data.routed_experts import expert_directory
from megatron_sao.roles.spec import ActorSpec, Backend, CriticSpec, Meeting, RankSpec
from megatron_sao.rollout.server import EXACT_FLOAT32, NOT_INHERITED

LOG = logging.getLogger(__name__)
HOST = "127.0.0.1"
KEY_BYTES = 32
RANK_COMMAND = (sys.executable, "-P", "-m", "megatron_sao.roles.main")
STOP_S = 10.0  # for a role to end by itself after Stop


@dataclass(frozen=True, kw_only=True, slots=True)
class Roles:
    """Channels to the two roles, whose models are built."""

    actor: Channel
    critic: Channel


async def start_roles(
    config: Config, *, server: ChannelServer, supervisor: Supervisor, placement: Placement, private: Path, logs: Path
) -> Roles:
    """Start every rank, and return when both models are built.

    Args:
        server: not started yet; the caller closes it.
        private: a directory that only this user can enter, for the ranks' rendezvous.
        logs: directory of the ranks' logs.

    Raises:
        ValueError: a role refused what a person wrote (model directory, layout, freeze pattern).
        ChannelError: a role did not come up in time, or failed while it built its model.
    """
    key = secrets.token_bytes(KEY_BYTES)
    port = await server.start(HOST, key)
    for spec in rank_specs(config, port=port, key=key, private=private, publish_backend=placement.publish_backend):
        start_rank(spec, supervisor=supervisor, environment=placement.environment(spec.role, spec.rank), logs=logs)
    start_s = config.engine.start_timeout_s
    actor, critic = await asyncio.gather(server.accept("actor", start_s), server.accept("critic", start_s))
    await asyncio.gather(built(actor, config.actor.command_timeout_s), built(critic, config.critic.command_timeout_s))
    return Roles(actor=actor, critic=critic)


def start_rank(
    spec: RankSpec, *, supervisor: Supervisor, environment: Mapping[str, str], logs: Path, interface: str = "lo"
) -> Process:
    """One rank, with `environment` added to its own."""
    own = rank_environment(os.environ, num_threads=spec.config.num_threads, interface=interface)
    gpu = gpu_environment(own, spec.config.layout)
    return supervisor.start(
        f"{spec.role} rank {spec.rank}",
        RANK_COMMAND,
        log_path=logs / f"{spec.role}-{spec.rank}.log",
        stdin=spec_text(spec),
        environment={**own, **gpu, **environment},
    )


async def stop_roles(roles: Roles, supervisor: Supervisor) -> None:
    """Ask both to stop and wait for their processes; whoever does not end is left to `Supervisor.stop`."""
    try:
        await asyncio.gather(*(channel.call(Stop(), timeout_s=STOP_S) for channel in (roles.actor, roles.critic)))
    except ChannelError as error:  # the run's results are complete by now
        LOG.warning("%s", error)
    if not await supervisor.join(STOP_S):
        LOG.warning("some ranks did not end within %.0f s of their stop command", STOP_S)


def rank_specs(
    config: Config, *, port: int, key: bytes, private: Path, publish_backend: Backend | None = None
) -> list[RankSpec]:
    """One for each rank of each role. Each role has a world, and so a rendezvous file, of its own."""
    pid, seed, algorithm = os.getpid(), config.run.seed, config.algorithm
    experts = str(expert_directory(Path(config.run.directory)))

    def meeting(role: str) -> Meeting:
        return Meeting(init_method=f"file://{private / role}", host=HOST, port=port, key=key.hex())

    actors = [
        ActorSpec(
            rank=rank,
            parent_pid=pid,
            meeting=meeting("actor"),
            model=config.model,
            seed=seed,
            config=config.actor,
            eps_low=algorithm.eps_low,
            eps_high=algorithm.eps_high,
            bucket_bytes=config.publish.bucket_bytes,
            publish_backend=publish_backend,
            expert_directory=experts if config.actor.router_replay else None,
        )
        for rank in range(config.actor.layout.num_ranks)
    ]
    critics = [
        CriticSpec(
            rank=rank, parent_pid=pid, meeting=meeting("critic"), model=config.model, seed=seed, config=config.critic
        )
        for rank in range(config.critic.layout.num_ranks)
    ]
    return [*actors, *critics]


def spec_text(spec: RankSpec) -> str:
    return json.dumps(spec.model_dump(mode="json"))


def rank_environment(parent: Mapping[str, str], *, num_threads: int, interface: str = "lo") -> dict[str, str]:
    """`parent` with what must be set before a rank starts, and without another launcher's ranks and proxies.

    `interface`: where gloo meets the other ranks and the engines.
    """
    kept = {k: v for k, v in parent.items() if k not in NOT_INHERITED and not k.lower().endswith("_proxy")}
    fixed = {
        "OMP_NUM_THREADS": str(num_threads),
        "MKL_NUM_THREADS": str(num_threads),
        "GLOO_SOCKET_IFNAME": interface,
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONWARNINGS": "ignore::FutureWarning,ignore::DeprecationWarning",  # the end of a log is for what failed
    }
    return kept | fixed


def gpu_environment(parent: Mapping[str, str], layout: LayoutConfig) -> dict[str, str]:
    """What CUDA's libraries read as they start, where a person has not set it; without a GPU nobody reads it.

    NCCL: what SGLang sets in its own processes, since both sides of an update group must choose the same transport.
    One queue of kernels where tensor or context ranks talk during a product: Megatron-core counts on it that a message
    is on its way before the product takes the whole GPU.
    """
    nccl = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
    overlap = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if layout.tensor > 1 or layout.context > 1 else {}
    return {name: value for name, value in {**EXACT_FLOAT32, **nccl, **overlap}.items() if name not in parent}


async def built(channel: Channel, timeout_s: float) -> None:
    """Return when the role's model is built. Raises ValueError for what a person wrote, ChannelError for the rest."""
    try:
        facts = (await channel.call(Describe(), timeout_s=timeout_s)).data
    except RoleError as error:
        if error.kind == "ValueError":
            raise ValueError(f"{channel.role}: {error.message}") from error
        raise
    LOG.info("%s: %s", channel.role, ", ".join(f"{key} {value}" for key, value in facts.items()))
