"""Which accelerators a run's processes get: the actor's ranks first, then the critic's, then the engine's.

Without an accelerator everything runs on the CPU. Pure; which devices there are says `rollout/devices.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_sao.config import Config
from megatron_sao.rollout.devices import visible_devices

__all__ = ["Placement", "place", "visible_devices"]


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


def place(config: Config, devices: Sequence[str]) -> Placement:
    """One device for each rank and for each tensor-parallel part of the engine.

    Raises:
        ValueError: there are devices, but too few (NCCL takes a device once in a group).
    """
    if not devices:
        return Placement()
    sizes = (config.actor.layout.num_ranks, config.critic.layout.num_ranks, config.engine.tensor)
    if len(devices) < sum(sizes):
        raise ValueError(
            f"the run needs {sum(sizes)} GPUs (actor.layout.num_ranks = {sizes[0]}, critic.layout.num_ranks = "
            f'{sizes[1]}, engine.tensor = {sizes[2]}), {len(devices)} are visible; CUDA_VISIBLE_DEVICES="" uses the CPU'
        )
    first, second, third = sizes[0], sizes[0] + sizes[1], sum(sizes)
    return Placement(
        actor=tuple(devices[:first]),
        critic=tuple(devices[first:second]),
        engine=tuple(devices[second:third]),
        engine_base=second,
    )
