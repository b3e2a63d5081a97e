"""Which accelerators a run's processes get: the actor's ranks first, then the critic's, then the engine's.

Where there are fewer than processes, they share (`cluster.share_gpus`). Without an accelerator everything runs on the
CPU. Pure; which devices there are says `rollout/devices.py`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from megatron_sao.config import Config
from megatron_sao.rollout.devices import visible_devices

__all__ = ["MEMORY_FLAG", "SHARED_ENGINE_FRACTION", "Placement", "place", "visible_devices"]

MEMORY_FLAG = "--mem-fraction-static"
SHARED_ENGINE_FRACTION = 0.25
"""[choice] Of a shared GPU, for the engine's weights and KV cache: a role that trains holds many times its weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Device names as CUDA_VISIBLE_DEVICES takes them; empty on a CPU."""

    actor: tuple[str, ...] = ()
    critic: tuple[str, ...] = ()
    engine: tuple[str, ...] = ()
    engine_base: int = 0  # place of the engine's first device among all that are visible

    def environment(self, role: str, rank: int) -> dict[str, str]:
        """What a rank's process must see before it starts."""
        devices: tuple[str, ...] = getattr(self, role)
        return {"CUDA_VISIBLE_DEVICES": devices[rank]} if devices else {}

    @property
    def engine_shares(self) -> bool:
        return not set(self.engine).isdisjoint(self.actor + self.critic)

    @property
    def publish_backend(self) -> Literal["gloo"] | None:
        """Of update groups, in which a sending rank meets the engine. None: that of the actor's own world."""
        return None if set(self.engine).isdisjoint(self.actor) else "gloo"

    def engine_args(self, given: Sequence[str]) -> tuple[str, ...]:
        """Flags of the engine's devices and memory, before those that a person has `given`."""
        if not self.engine:
            return ()
        names = {argument.split("=")[0] for argument in given}
        memory = (MEMORY_FLAG, str(SHARED_ENGINE_FRACTION)) if self.engine_shares and MEMORY_FLAG not in names else ()
        return ("--base-gpu-id", str(self.engine_base), *memory)

    def describe_shared(self, given: Sequence[str]) -> Iterator[str]:
        """A sentence for each shared GPU: who is on it, and who may take how much of its memory."""
        flags = " ".join((*self.engine_args(given), *given))
        for device in dict.fromkeys(self.actor + self.critic + self.engine):
            ranks = [
                f"{role} rank {rank}"
                for role, devices in (("actor", self.actor), ("critic", self.critic))
                for rank, name in enumerate(devices)
                if name == device
            ]
            if device in self.engine and ranks:
                yield (
                    f"GPU {device} is shared by {', '.join(ranks)} and the engine, which starts first ({flags}) and "
                    "takes this part of what is free; the ranks share the rest, without a limit for each"
                )
            elif len(ranks) > 1:
                yield f"GPU {device} is shared by {', '.join(ranks)}, without a limit of its memory for each"
        if self.publish_backend:
            yield f"a publish goes through {self.publish_backend}, by way of the CPU: NCCL takes a GPU once in a group"


def place(config: Config, devices: Sequence[str]) -> Placement:
    """A device for each rank and for each tensor-parallel part of the engine; of its own where there are enough.

    Raises:
        ValueError: there are devices, but too few: to share them was not asked for, or is impossible.
    """
    if not devices:
        return Placement()
    sizes = {
        "actor.layout.num_ranks": config.actor.layout.num_ranks,
        "critic.layout.num_ranks": config.critic.layout.num_ranks,
        "engine.tensor": config.engine.tensor,
    }
    if len(devices) < sum(sizes.values()):
        _check_sharing(config, sizes, num_devices=len(devices))
    actor, critic, engine = _windows(list(sizes.values()), len(devices))
    return Placement(
        actor=tuple(devices[i] for i in actor),
        critic=tuple(devices[i] for i in critic),
        engine=tuple(devices[i] for i in engine),
        engine_base=engine.start,
    )


def _check_sharing(config: Config, sizes: dict[str, int], *, num_devices: int) -> None:
    wanted, num_ranks = config.cluster.share_gpus, max(config.actor.layout.num_ranks, config.critic.layout.num_ranks)
    listed = ", ".join(f"{name} = {size}" for name, size in sizes.items())
    seen = f"the run needs {sum(sizes.values())} GPUs ({listed}), {num_devices} are visible"
    on_cpu = 'CUDA_VISIBLE_DEVICES="" uses the CPU'
    if too_large := [name for name, size in sizes.items() if size > num_devices]:
        raise ValueError(
            f"{seen}, and they cannot be shared: NCCL takes a device once in a group, so each of "
            f"{', '.join(too_large)} must be at most {num_devices}; {on_cpu}"
        )
    if wanted is False:
        raise ValueError(f"{seen}; cluster.share_gpus = true lets roles and engine share them; {on_cpu}")
    if wanted is None and num_ranks > 1:
        raise ValueError(
            f"{seen}; they are shared by themselves only where each role has one rank: cluster.share_gpus = true "
            f"shares them all the same; {on_cpu}"
        )


def _windows(sizes: Sequence[int], num_devices: int) -> list[range]:
    """For each world neighbouring devices: the least taken ones, rather the critic's than the actor's, from the first.

    Example: one device each on 2 devices: the actor has the first alone, critic and engine share the second.
    """
    windows: list[range] = []
    for size in sizes:
        starts = (range(start, start + size) for start in range(num_devices - size + 1))
        windows.append(min(starts, key=lambda window: (_overlap(window, windows), _overlap(window, windows[:1]))))
    return windows


def _overlap(window: range, others: Sequence[range]) -> int:
    return sum(device in other for other in others for device in window)
