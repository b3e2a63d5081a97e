"""`sao plan --search`: layouts of actor and critic, and an engine, for the fewest GPUs or for as many as there are.

Whether something fits is asked of `plan.py`, how long it takes of `estimate.py`. Tried are, for each role by itself:
every tensor, context, pipeline, expert and expert-tensor size that divides the ranks and the model, up to
MAX_VIRTUAL_STAGES chunks on a pipeline rank, and no or full recomputation (Transformer Engine's attention never keeps
scores, so that "selective" is "none"). A role has up to a node's GPUs or whole nodes, and leaves no node in part but
for the next role; the engine is the smallest that fits and is not smaller than the configuration's.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from launch.estimate import Seconds, Workload
from launch.plan import GPU_BYTES, RESERVED_BYTES, RolePlan, engine_role, shares_rows, trained_role
from megatron_sao.config import Config, LayoutConfig, Recompute, RoleConfig
from megatron_sao.megatron.mapping.hf_config import HFConfig
from megatron_sao.megatron.sizes import check_sizes

MAX_VIRTUAL_STAGES = 4
"""[choice] Chunks of layers on a pipeline rank; more of them send more."""
MAX_ROLE_GPUS = 2048
NUM_KEPT = 5
"""Layouts of a role on so many GPUs, and shares of all GPUs between the roles: so many, best first."""
RECOMPUTE: tuple[Recompute, ...] = ("none", "full")


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A layout of one role that fits."""

    role: RoleConfig
    plan: RolePlan
    seconds: Seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """So many GPUs for each role, and layouts that fit on them, fastest first."""

    actor: tuple[Candidate, ...]
    critic: tuple[Candidate, ...]
    engine_tensor: int
    step_s: float  # of the first ones: one after the other; in the overlapped loop the slower one

    @property
    def num_gpus(self) -> int:
        return self.actor[0].plan.num_gpus + self.critic[0].plan.num_gpus + self.engine_tensor

    @property
    def order(self) -> tuple[float, float, int]:
        """Of those that take as long, the one whose roles work less, then on fewer GPUs."""
        return (self.step_s, self.actor[0].seconds.total + self.critic[0].seconds.total, self.num_gpus)

    def apply(self, config: Config) -> Config:
        """The configuration with the fastest of what was found."""
        engine = config.engine.model_copy(update={"tensor": self.engine_tensor})
        roles = {"actor": self.actor[0].role, "critic": self.critic[0].role}
        return config.model_copy(update={**roles, "engine": engine})


def search(config: Config, hf: HFConfig, *, num_gpus: int | None = None) -> tuple[Found, ...]:
    """What fits on the fewest GPUs, or on at most `num_gpus`: the best by the estimate, best first.

    Raises:
        ValueError: nothing fits on so many; or on any number, and what to change.
    """
    engine = smallest_engine(config, hf)
    actor = RoleSearch(config=config, role=config.actor, hf=dataclasses.replace(hf, role="policy"))
    critic = RoleSearch(config=config, role=config.critic, hf=dataclasses.replace(hf, role="critic"))
    fewest = engine + _fewest(actor, critic, engine)
    most = 2 * MAX_ROLE_GPUS + engine
    if num_gpus is not None and num_gpus > most:
        raise ValueError(f"--gpus {num_gpus}: two roles of up to {MAX_ROLE_GPUS} and the engine can use {most}")
    if num_gpus is not None and num_gpus < fewest:
        raise ValueError(f"--gpus {num_gpus}: the fewest that the run fits on are {fewest} {config.cluster.gpu}")
    step_s = max if config.run.loop == "overlapped" else _sum
    pairs = _pairs(actor, critic, engine, (num_gpus or fewest) - engine)
    least = {pair: step_s(actor.least_s(pair[0]), critic.least_s(pair[1])) for pair in pairs}
    best: list[Found] = []
    for pair in sorted(pairs, key=lambda each: least[each]):
        if len(best) == NUM_KEPT and least[pair] > best[-1].step_s:
            break  # whatever its layout: and so is every pair that follows
        actors, critics = actor.best(pair[0]), critic.best(pair[1])
        if actors and critics:
            slowest = step_s(actors[0].seconds.total, critics[0].seconds.total)
            best.append(Found(actor=actors, critic=critics, engine_tensor=engine, step_s=slowest))
            best = sorted(best, key=lambda each: each.order)[:NUM_KEPT]
    return tuple(best)


def _sum(actor_s: float, critic_s: float) -> float:
    return actor_s + critic_s


def _fewest(actor: "RoleSearch", critic: "RoleSearch", engine: int) -> int:
    """Ranks of both roles. Raises ValueError: none are enough."""
    for most in range(actor.fewest + critic.fewest, 2 * MAX_ROLE_GPUS, actor.config.cluster.gpus_per_node):
        pairs = sorted(_pairs(actor, critic, engine, most), key=sum)
        found = next((sum(pair) for pair in pairs if actor.fits(pair[0]) and critic.fits(pair[1])), None)
        if found is not None:
            return found
    raise ValueError("actor and critic fit, but on no whole nodes: give another cluster.gpus_per_node")


def _pairs(actor: "RoleSearch", critic: "RoleSearch", engine: int, most: int) -> list[tuple[int, int]]:
    """Sizes of the two that may fit, up to `most` together, and leave no node in part but for the next role."""
    per_node = actor.config.cluster.gpus_per_node
    actors, critics = ([n for n in role_sizes(per_node) if role.fewest <= n < most] for role in (actor, critic))
    pairs = itertools.product(actors, critics)
    return [pair for pair in pairs if sum(pair) <= most and is_aligned((*pair, engine), per_node)]


def role_sizes(per_node: int) -> list[int]:
    return [*range(1, per_node), *range(per_node, MAX_ROLE_GPUS + 1, per_node)]


def is_aligned(sizes: Sequence[int], per_node: int) -> bool:
    """Of roles one after another: each one begins a node, or lies in one with those before it."""
    firsts = itertools.accumulate(sizes[:-1], initial=0)
    offsets = [(first % per_node, size) for first, size in zip(firsts, sizes, strict=True)]
    return all(offset == 0 or offset + size <= per_node for offset, size in offsets)


def smallest_engine(config: Config, hf: HFConfig) -> int:
    """Tensor size of the smallest engine that fits, from the configuration's upwards.

    Raises:
        ValueError: none does.
    """
    per_node, shortage = config.cluster.gpus_per_node, ""
    for size in range(config.engine.tensor, hf.num_heads + 1):
        engine = config.engine.model_copy(update={"tensor": size})
        if hf.num_heads % size or (size > per_node and size % per_node):
            continue
        try:
            check_sizes(hf, tensor=size)
            planned = engine_role(config.model_copy(update={"engine": engine}), hf)
        except ValueError as error:
            shortage = shortage or str(error)
            continue
        if planned.fits:
            return size
        shortage = planned.help
    heads = f"none divides the attention heads, {hf.num_heads}, and is up to or of whole nodes of {per_node}"
    raise ValueError(f"no engine of {config.engine.tensor} or more {config.cluster.gpu} fits: {shortage or heads}")


@dataclass(frozen=True, kw_only=True)
class RoleSearch:
    """The layouts of one role; what was asked once is remembered."""

    config: Config
    role: RoleConfig
    hf: HFConfig

    @cached_property
    def _work(self) -> Workload:
        return Workload.of(self.config, self.role, self.hf)

    @cached_property
    def _fits(self) -> dict[int, bool]:
        return {}

    @cached_property
    def _best(self) -> dict[int, tuple[Candidate, ...]]:
        return {}

    @cached_property
    def fewest(self) -> int:
        """Ranks. Raises ValueError: none are enough."""
        sizes = role_sizes(self.config.cluster.gpus_per_node)
        found = next((size for size in sizes if self.fits(size)), None)
        if found is None:
            raise ValueError(
                f"no layout of the {self.hf.role} fits on up to {MAX_ROLE_GPUS} {self.config.cluster.gpu}: lower "
                f"max_tokens_per_micro_batch (now {self.role.max_tokens_per_micro_batch})"
            )
        return found

    def least_s(self, num_ranks: int) -> float:
        """Less than a step takes in any layout: computation alone, of even parts."""
        return self._alone_s / num_ranks

    @cached_property
    def _alone_s(self) -> float:
        return self._work.seconds(_with(self.role, LayoutConfig(), 1, "none")).compute

    def fits(self, num_ranks: int) -> bool:
        """Whether some layout does."""
        if num_ranks not in self._fits:
            self._fits[num_ranks] = any(True for _ in self.fitting(self.divisions(num_ranks)))
        return self._fits[num_ranks]

    def best(self, num_ranks: int) -> tuple[Candidate, ...]:
        """The fastest that fit, fastest first."""
        if num_ranks not in self._best:
            timed = [(self._work.seconds(role), role) for role in self.divisions(num_ranks)]
            timed.sort(key=lambda each: each[0].total)
            fitting = self.fitting(role for _, role in timed)
            kept = itertools.islice(fitting, NUM_KEPT)
            self._best[num_ranks] = tuple(
                Candidate(role=role, plan=plan, seconds=self._work.seconds(role)) for role, plan in kept
            )
        return self._best[num_ranks]

    def fitting(self, roles: Iterator[RoleConfig]) -> Iterator[tuple[RoleConfig, RolePlan]]:
        for role in roles:
            plan = trained_role(self.config, role, self.hf)
            if plan.fits:
                yield role, plan

    def divisions(self, num_ranks: int) -> Iterator[RoleConfig]:
        """Every layout whose states may fit: memory is asked with the fewest activations first."""
        for layout in layouts(self.hf, num_ranks):
            if self._least_bytes(layout) > GPU_BYTES[self.config.cluster.gpu] - RESERVED_BYTES:
                continue
            contexts = divisors(layout.data) if shares_rows(self.config) else [1]
            sparing = _with(self.role, layout, contexts[-1], "full")
            if not trained_role(self.config, sparing, self.hf).fits:
                continue
            for context, recompute in itertools.product(contexts, RECOMPUTE):
                yield _with(self.role, layout, context, recompute)

    def _least_bytes(self, layout: LayoutConfig) -> float:
        """Less than a GPU holds of any: as if all were cut as dense layers or experts are, whichever are cut more."""
        cuts = max(layout.tensor, layout.expert * layout.expert_tensor) * layout.pipeline
        return (self._alone["parameters"] + self._alone["gradients"]) / cuts + self._alone[
            "optimizer"
        ] / layout.num_ranks

    @cached_property
    def _alone(self) -> dict[str, int]:
        """Bytes of one rank that has the whole model."""
        return trained_role(self.config, _with(self.role, LayoutConfig(), 1, "full"), self.hf).parts


def _with(role: RoleConfig, layout: LayoutConfig, context: int, recompute: Recompute) -> RoleConfig:
    cut = layout.model_copy(update={"context": context})
    return role.model_copy(update={"layout": cut, "recompute": recompute})


def layouts(hf: HFConfig, num_ranks: int) -> Iterator[LayoutConfig]:
    """Every one of so many ranks, without context parallelism, that divides the model's sizes."""
    tensors = [size for size in divisors(num_ranks) if _divides(hf, tensor=size)]
    experts = [size for size in divisors(num_ranks) if _divides(hf, expert=size)]
    expert_tensors = [size for size in divisors(num_ranks) if _divides(hf, expert_tensor=size)]
    for pipeline, virtual_stages in _pipelines(hf, num_ranks):
        stage = num_ranks // pipeline
        for tensor, expert, expert_tensor in itertools.product(tensors, experts, expert_tensors):
            if stage % tensor == 0 and stage % (expert * expert_tensor) == 0:
                yield LayoutConfig(
                    num_ranks=num_ranks,
                    tensor=tensor,
                    expert=expert,
                    expert_tensor=expert_tensor,
                    pipeline=pipeline,
                    virtual_stages=virtual_stages,
                )


def _pipelines(hf: HFConfig, num_ranks: int) -> Iterator[tuple[int, int]]:
    for pipeline in divisors(num_ranks):
        for virtual_stages in range(1, MAX_VIRTUAL_STAGES + 1 if pipeline > 1 else 2):
            if _divides(hf, num_stages=pipeline * virtual_stages):
                yield pipeline, virtual_stages


def _divides(hf: HFConfig, *, tensor: int = 1, **sizes: int) -> bool:
    try:
        check_sizes(hf, tensor=tensor, **sizes)
    except ValueError:
        return False
    return True


def divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
