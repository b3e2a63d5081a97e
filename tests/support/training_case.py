"""A fixed batch and three SAO steps on it, on real ranks: what the layout tests run and compare."""

import dataclasses
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_sao.algorithm.advantage import batch_advantages, batch_targets
from megatron_sao.config import LayoutConfig, OptimizerConfig
from megatron_sao.megatron.checkpoint import load_critic, load_policy
from megatron_sao.megatron.freeze import freeze
from megatron_sao.megatron.mapping.transfer import gather, hf_tensors, parameter_bindings
from megatron_sao.megatron.model import build_critic, build_policy
from megatron_sao.megatron.parallel import Parallel, initialize
from megatron_sao.megatron.platform import install
from megatron_sao.megatron.shard import Shard, take_shard
from megatron_sao.megatron.step import Trainer, logprobs, policy_update, value_update, values
from megatron_sao.metrics import Metric
from megatron_sao.types import Batch, MicroBatchPlan

VOCAB_SIZE = 320  # of tests.support.tiny_models, which ranks need not import
EPS_LOW, EPS_HIGH, ALPHA, VERSION = 0.3, 5.0, 1.5, 5
LOG_RATIOS = (-1.2, -0.25, -0.1, 0.0, 0.0, 0.1, 0.2, 0.9, 2.2)
"""What the rollout's log-probs differ by: inside the band, below it and above it, none near its edges."""

Rank = tuple[MicroBatchPlan, ...]
FUSIONS = ("apply_rope_fusion", "bias_activation_fusion", "moe_permute_fusion", "gradient_accumulation_fusion")
"""Options of Megatron's that the product switches on where there are kernels for them."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """How a run is laid out. Nothing here may change what is learned."""

    num_ranks: int = 1
    tensor: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    pipeline: int = 1
    virtual_stages: int = 1
    plan: tuple[Rank, ...] = (((0, 1, 2, 3, 4, 5),),)  # [data-parallel rank][micro-batch]
    distributed: bool = True
    overlap: bool = False
    recompute: Literal["none", "selective", "full"] = "none"
    dtype: str = "float32"
    logits_tokens: int = 5
    critic_freeze: tuple[str, ...] = ("*.self_attn.*",)
    actor_freeze: tuple[str, ...] = ()
    unfused: tuple[str, ...] = ()  # of FUSIONS

    @property
    def layout(self) -> LayoutConfig:
        names = ("num_ranks", "tensor", "context", "expert", "expert_tensor", "pipeline", "virtual_stages")
        return LayoutConfig(**{name: getattr(self, name) for name in names})


def make_batch(seed: int = 0, rollout_A: NDArray[np.float32] | None = None) -> Batch:
    """Six trajectories of several turns, mixed lengths, rewards and versions."""
    rng = np.random.default_rng(seed)
    turns = [
        [(6, 9), (4, 5)],
        [(3, 14)],
        [(12, 2), (1, 1), (5, 7)],
        [(2, 1), (9, 3)],
        [(5, 21)],
        [(7, 4), (2, 6), (3, 2)],
    ]
    is_action = [np.concatenate([np.repeat([False, True], pair) for pair in parts]) for parts in turns]
    rewards = [np.zeros(len(action), dtype=np.float32) for action in is_action]
    for reward, value in zip(rewards, (1.0, 0.0, 0.5, 0.0, 1.0, 0.25), strict=True):
        reward[-1] = value
    action = np.concatenate(is_action)
    rollout = np.zeros(len(action), dtype=np.float32)
    if rollout_A is not None:
        rollout[action] = rollout_A
    return Batch(
        id=seed,
        trajectory_ids=tuple(f"{n:032x}" for n in range(len(turns))),
        offsets=np.cumsum([0, *(len(a) for a in is_action)]).astype(np.int64),
        token_ids=rng.integers(0, VOCAB_SIZE, len(action)).astype(np.int32),
        is_action=action,
        rollout_logprobs=rollout,
        version=np.where(action, rng.integers(VERSION - 2, VERSION + 1, len(action)), -1).astype(np.int32),
        reward=np.concatenate(rewards),
    )


def disturbed(logprobs_A: NDArray[np.float32]) -> NDArray[np.float32]:
    """Rollout log-probs such that the ratios cover both sides of the band."""
    shift = np.random.default_rng(7).choice(LOG_RATIOS, len(logprobs_A))
    return np.minimum(logprobs_A - shift, -1e-4).astype(np.float32)


def optimizer_config(case: Case, **fields: Any) -> OptimizerConfig:
    """Learning rate 1e-3 from the first update. eps 1e-6 instead of 1e-8, or the comparison would measure rounding:

    Adam's first update of an element is lr * g / (|g| + eps). Rounding moves a gradient by about 1e-8 here. Where the
    true gradient is that small, eps = 1e-8 turns rounding into an update of +-lr: a single element of 6,144 carried
    99.99 % of the difference of its tensor, 3e-3. With 1e-6 it is at most 1e-2 of an ordinary update.
    """
    defaults = {"learning_rate": 1e-3, "clip_norm": 1.0, "warmup_updates": 0, "eps": 1e-6}
    return OptimizerConfig(**{**defaults, **fields}, distributed=case.distributed, overlap=case.overlap)


def make_trainer(
    directory: str, case: Case, parallel: Parallel, role: Literal["actor", "critic"], **fields: Any
) -> Trainer:
    platform = install()
    if "gradient_accumulation_fusion" in case.unfused:  # linear layers ask for it when they are built
        platform = dataclasses.replace(platform, fused_weight_gradients=False)
    options: dict[str, Any] = {"dtype": getattr(torch, case.dtype), "recompute": case.recompute}
    if role == "actor":
        model: Any = build_policy(directory, parallel, platform, logits_tokens=case.logits_tokens, **options)
        load_policy(model, directory, parallel)
    else:
        model = build_critic(directory, parallel, platform, **options)
        load_critic(model, directory, parallel)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name == "value_head.weight":
                    parameter.copy_(
                        torch.empty(parameter.shape).normal_(0, 0.1, generator=torch.Generator().manual_seed(3))
                    )
    for option in case.unfused:
        setattr(model.config, option, False)
    for name, parameter in model.named_parameters():
        if "_down_proj.weight" in name:  # of latent attention, whole on every rank; Transformer Engine says:
            parameter.tensor_model_parallel = True
    patterns = case.actor_freeze if role == "actor" else case.critic_freeze
    if patterns:
        freeze(model, parallel, patterns)
    return Trainer.of(model, parallel, platform, optimizer_config(case, **fields))


def whole_model(trainer: Trainer) -> dict[str, NDArray[np.float32]]:
    names = [tensor.name for tensor in hf_tensors(trainer.model, trainer.parallel)]
    found = gather(trainer.model, trainer.parallel, names, torch.float32)
    return {name: tensor.cpu().numpy().copy() for name, tensor in found.items()}


def digests(trainer: Trainer) -> dict[str, str]:
    """Of every local parameter, so that copies on other ranks can be compared: 'cut' ones by tensor rank and so on.

    After `whole_model`, which brings in what an overlapped optimizer has not gathered yet.
    """
    parallel = trainer.parallel
    bindings, result = parameter_bindings(trainer.model, parallel), {}
    for name, parameter in trainer.model.named_parameters():
        if ".mlp.experts." in name:
            place = f"expert{parallel.expert_rank}, shard{parallel.expert_tensor_rank}"
        else:
            place = "all" if bindings[name].layout.dim is None else f"tensor{parallel.tensor_rank}"
        result[f"{place}/{name}"] = hashlib.sha256(parameter.detach().float().cpu().numpy().tobytes()).hexdigest()
    return result


def shard_of(batch: Batch, case: Case, parallel: Parallel) -> tuple[Shard, NDArray[np.int64]]:
    return take_shard(batch, case.plan[parallel.data_rank])


def joined(parts_A: NDArray[np.float32], places: NDArray[np.int64], batch: Batch, parallel: Parallel) -> Any:
    """[A] of the whole batch on every rank, from each rank's shard: what the controller does between the roles."""
    whole = torch.zeros(batch.num_action_tokens, device=install().device)
    if parallel.tensor_rank == parallel.context_rank == parallel.pipeline_rank == 0:
        whole[torch.from_numpy(places)] = torch.from_numpy(parts_A)
    torch.distributed.all_reduce(whole, group=parallel.world_group)
    return whole.cpu().numpy()


def absolute_loss(actor: Trainer, shard: Shard, advantages_A: NDArray[np.float32]) -> float:
    """Mean of |f(r) A log p|: the scale of the policy loss, whose terms have both signs."""
    logprobs_A = logprobs(actor, shard).astype(np.float64)
    ratio = np.exp(logprobs_A - shard.rollout_logprobs[shard.is_action])
    trusted = (ratio > 1 - EPS_LOW) & (ratio < 1 + EPS_HIGH)
    total = torch.tensor(np.abs(ratio * advantages_A * logprobs_A)[trusted].sum(), device=install().device)
    torch.distributed.all_reduce(total, group=actor.parallel.data_group)  # context ranks have the same log-probs
    return float(total) / actor.parallel.context_size / shard.num_action_tokens


def three_steps(rank: int, directory: str, case: Case, rollout_A: NDArray[np.float32]) -> dict[str, Any]:
    """K = 2 critic updates, values, GAE, one DIS update; three times. Whole models come back from rank 0."""
    parallel = initialize(case.layout, rank=rank, init_method=None, timeout_s=100, platform=install())
    batch = make_batch(rollout_A=rollout_A)
    actor, critic = (make_trainer(directory, case, parallel, role) for role in ("actor", "critic"))
    before = {"actor": whole_model(actor), "critic": whole_model(critic)}
    shard, places = shard_of(batch, case, parallel)
    metrics: list[Mapping[str, Metric]] = []
    for _ in range(3):
        targets_A = batch_targets(batch, None, gamma=1.0, lam=1.0)
        metrics += [value_update(critic, shard, targets_A[places]) for _ in range(2)]
        values_A = joined(values(critic, shard), places, batch, parallel)
        advantages_A = batch_advantages(batch, values_A, gamma=1.0, alpha=ALPHA)[places]
        size = {"policy/abs_loss": Metric(absolute_loss(actor, shard, advantages_A))}
        update = policy_update(actor, shard, advantages_A, eps_low=EPS_LOW, eps_high=EPS_HIGH, version=VERSION)
        metrics.append(update | size)
        after = {"actor": whole_model(actor)}  # as a publish, between two steps
    after["critic"] = whole_model(critic)
    local = {f"actor/{key}": value for key, value in digests(actor).items()}
    local |= {f"critic/{key}": value for key, value in digests(critic).items()}
    numbers = [{key: metric.value for key, metric in update.items()} for update in metrics]
    return {"before": before, "after": after, "metrics": numbers, "digests": local}


def start_logprobs(rank: int, directory: str, case: Case) -> NDArray[np.float32]:
    """[A] of the whole batch under the start policy."""
    parallel = initialize(case.layout, rank=rank, init_method=None, timeout_s=100, platform=install())
    batch = make_batch()
    shard, places = shard_of(batch, case, parallel)
    trainer = make_trainer(directory, case, parallel, "actor")
    return joined(logprobs(trainer, shard), places, batch, parallel)


def with_trainer(
    rank: int,
    directory: str,
    case: Case,
    role: Literal["actor", "critic"],
    body: Callable[[Trainer, Shard], Any],
    fields: Mapping[str, Any],
) -> Any:
    """Run `body(trainer, shard)` on this rank; `fields` are of the optimizer's config."""
    parallel = initialize(case.layout, rank=rank, init_method=None, timeout_s=100, platform=install())
    shard, _ = shard_of(make_batch(), case, parallel)
    trainer = make_trainer(directory, case, parallel, role, **fields)
    return body(trainer, shard)
