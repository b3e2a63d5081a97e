"""Adam over Megatron's (distributed) optimizer: parameter groups, warm-up, gradient norms, clipping.

Megatron sorts parameters, keeps float32 main parameters and shards them over data-parallel ranks. This module gives it
the groups, and does between `prepare_grads` and `step_with_ready_grads` what the method wants: a norm over every
trained parameter counted once, in total and per group, before clipping; and no step at all on a gradient that is not
finite.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.optimizer_config import ParamKey, ParamWithNamePredicate
from torch import Tensor

from megatron_sao.config import OptimizerConfig
from megatron_sao.megatron.mapping.transfer import hf_tensors, parameter_bindings, parameter_hf_names
from megatron_sao.megatron.model import Model
from megatron_sao.megatron.parallel import Parallel

Part = Literal["head", "experts", "rest"]
PARTS: tuple[Part, ...] = ("head", "experts", "rest")


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateReport:
    """One optimizer update. Norms are of the gradients before clipping."""

    grad_norm: float
    grad_norms: dict[Part, float]  # a part without a trained parameter has norm 0
    learning_rate: float  # that this update used
    num_updates: int  # this one included


def part_of(name: str) -> Part:
    """The part of a model that a Megatron parameter belongs to. Shared experts, which every token visits, are rest."""
    if "value_head." in name:
        return "head"
    return "experts" if ".mlp.experts." in name else "rest"


def wrap(model: Model, config: OptimizerConfig) -> None:
    """Megatron's DDP around each chunk of a model whose `requires_grad` is set: float32 gradient buffers for what is
    trained. With `overlap`, gradients are reduced as soon as the last micro-batch's backward has them."""
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=config.overlap,
        overlap_param_gather=config.overlap and config.distributed,
        use_distributed_optimizer=config.distributed,
    )
    transformer: Any = model.config  # one for all chunks
    model.wrapped = tuple(
        DistributedDataParallel(transformer, settings, chunk, disable_bucketing=number > 0)
        for number, chunk in enumerate(model.chunks)
    )
    transformer.finalize_model_grads_func = finalize_model_grads
    if config.overlap:
        waits = [chunk.no_sync for chunk in model.wrapped]
        transformer.no_sync_func = waits if len(waits) > 1 else waits[0]


class Optimizer:
    """One wrapped model's Adam. `num_updates` is its own counter: the warm-up reads nothing else."""

    def __init__(self, model: Model, parallel: Parallel, config: OptimizerConfig) -> None:
        self.num_updates = 0
        self._model, self._parallel, self._config = model, parallel, config
        dtype = model.config.params_dtype
        settings = MegatronOptimizerConfig(
            optimizer="adam",
            lr=config.learning_rate,
            weight_decay=config.weight_decay,
            adam_beta1=config.betas[0],
            adam_beta2=config.betas[1],
            adam_eps=config.eps,
            clip_grad=0.0,  # `step` clips
            bf16=dtype is torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=config.distributed,
            overlap_param_gather=config.overlap and config.distributed,
        )
        overrides = _group_overrides(_cut_parameters(model, parallel))
        self._megatron = get_megatron_optimizer(settings, list(model.wrapped), config_overrides=overrides)

    @property
    def kind(self) -> str:
        """Which Adam is in use: torch's, or a fused one of Apex or Transformer Engine."""
        kinds = sorted({f"{type(adam).__module__.partition('.')[0]} {type(adam).__name__}" for adam in self._adams()})
        return " ".join([*(["distributed"] if self._config.distributed else []), *(kinds or ["nothing trained here"])])

    def missing_state(self) -> list[Tensor]:
        """Memory of the size of what Adam will make at its first step, so that others see how much they have left."""
        groups = ((adam, group) for adam in self._adams() for group in adam.param_groups)
        stateless = [p for adam, group in groups for p in group["params"] if p not in adam.state]
        return [torch.empty_like(p, dtype=torch.float32) for p in stateless for _ in ("exp_avg", "exp_avg_sq")]

    def _adams(self) -> list[Any]:
        return [each.optimizer for each in self._megatron.chained_optimizers if each.optimizer is not None]

    def learning_rate(self, update: int) -> float:
        """Rate of the update with this number, from 1: linear over the first `warmup_updates`, then constant."""
        warmup = self._config.warmup_updates
        return self._config.learning_rate * (min(1.0, update / warmup) if warmup else 1.0)

    def step(self) -> UpdateReport:
        """Update the parameters from the gradients that `run_training` left. Every rank calls it.

        Raises:
            RuntimeError: a gradient is not finite (the tensor and its rank are named); nothing has been stepped.
        """
        self._megatron.prepare_grads()
        norms = self._grad_norms()
        total = math.hypot(*norms.values())
        if not math.isfinite(total):
            raise RuntimeError(self._blame())
        rate = self.learning_rate(self.num_updates + 1)
        for group in self._megatron.param_groups:
            group["lr"] = rate
            group["weight_decay"] = self._config.weight_decay * group["wd_mult"]
        for optimizer in self._megatron.chained_optimizers:
            if optimizer.get_parameters():
                clip_grad_by_total_norm_fp32(optimizer.get_parameters(), self._config.clip_norm, total)
        self._megatron.step_with_ready_grads()
        self._megatron.zero_grad()
        self._model.is_complete = not (self._config.overlap and self._config.distributed)
        self.num_updates += 1
        return UpdateReport(grad_norm=total, grad_norms=norms, learning_rate=rate, num_updates=self.num_updates)

    def _grad_norms(self) -> dict[Part, float]:
        """Norm of each part over the whole model: every rank adds the squares it owns, float64, one all-reduce."""
        squares = {part: torch.zeros((), dtype=torch.float64) for part in PARTS}
        for group, gradient in self._owned_gradients():
            norm = torch.linalg.vector_norm(gradient, dtype=torch.float64)
            squares[group["part"]] = squares[group["part"]].to(norm.device) + norm * norm
        device = next(self._model.parameters()).device
        total = torch.stack([squares[part].to(device) for part in PARTS])
        dist.all_reduce(total, group=self._parallel.world_group)
        return dict(zip(PARTS, total.sqrt().tolist(), strict=True))

    def _owned_gradients(self) -> Iterator[tuple[dict[str, Any], Tensor]]:
        """Gradients that this rank adds to a sum over all ranks, so that each element of the model counts once.

        Copies lie on the tensor ranks (norms, router), on the data and context ranks, and a tied embedding's on the
        last stage; experts lie on expert and expert-tensor ranks, their copies on expert-data ranks. The distributed
        optimizer has cut the copies over data and context ranks into shards: all count.
        """
        parallel, distributed = self._parallel, self._config.distributed
        is_first = parallel.data_rank == parallel.context_rank == 0
        for group in self._megatron.param_groups:
            if group["part"] == "experts":
                owned = distributed or parallel.expert_data_rank == 0
            else:
                owned = (distributed or is_first) and (group["cut"] or parallel.tensor_rank == 0)
            if owned and not group["tied_copy"]:
                yield from ((group, parameter.grad) for parameter in group["params"] if parameter.grad is not None)

    def _blame(self) -> str:
        """Which gradients are not finite: the first on each rank, by name. Every rank says the same."""
        names = [tensor.name for tensor in hf_tensors(self._model, self._parallel)]  # the same on all stages
        parameters: dict[str, Any] = dict(self._model.named_parameters())
        bad = [
            names.index(hf_names[0])
            for name, hf_names in parameter_hf_names(self._model, self._parallel).items()
            if parameters[name].requires_grad and not bool(torch.isfinite(parameters[name].main_grad).all())
        ]
        first = torch.tensor([bad[0] if bad else -1, len(bad)], device=next(self._model.parameters()).device)
        found = [torch.empty_like(first) for _ in range(self._parallel.world_size)]
        dist.all_gather(found, first, group=self._parallel.world_group)
        seen = [(rank, *pair.tolist()) for rank, pair in enumerate(found)]
        lines = [f"rank {rank}: {names[index]} (and {count - 1} more)" for rank, index, count in seen if index >= 0]
        return (
            f"update {self.num_updates + 1}: gradients are not finite, nothing was stepped: {'; '.join(lines)}. "
            "Look at the batch's log-probs, advantages or targets, and at the last metrics before this"
        )


def _cut_parameters(model: Model, parallel: Parallel) -> frozenset[int]:
    """Ids of the parameters that tensor-parallel ranks cut, by the table: Transformer Engine says so
    (`tensor_model_parallel`) of linears too that every rank has whole."""
    bindings = parameter_bindings(model, parallel)
    return frozenset(id(p) for name, p in model.named_parameters() if bindings[name].layout.dim is not None)


def _group_overrides(cut: frozenset[int]) -> dict[ParamKey, Any]:
    """Label every parameter: its part, whether tensor-parallel ranks cut it (`cut`: ids), whether it is a last stage's
    copy of the tied embedding, and no decay on norms, biases, head."""

    def key(name: str, matches: Any) -> ParamKey:
        return ParamKey(with_name_predicate=ParamWithNamePredicate(name=name, fn=matches))

    def is_part(part: Part) -> Any:
        return lambda parameter, name: part_of(name) == part

    overrides: dict[ParamKey, Any] = {key(part, is_part(part)): {"part": part} for part in PARTS}
    overrides[key("cut", lambda parameter, name: id(parameter) in cut)] = {"cut": True}
    overrides[key("copied", lambda parameter, name: id(parameter) not in cut)] = {"cut": False}
    overrides[key("tied", lambda parameter, name: _is_tied_copy(parameter))] = {"tied_copy": True}
    overrides[key("own", lambda parameter, name: not _is_tied_copy(parameter))] = {"tied_copy": False}
    overrides[key("no decay", lambda parameter, name: not _decays(parameter, name))] = {"wd_mult": 0.0}
    return overrides


def _is_tied_copy(parameter: Tensor) -> bool:
    return bool(getattr(parameter, "shared", False))


def _decays(parameter: Tensor, name: str) -> bool:
    return parameter.ndim > 1 and not name.endswith(".bias") and part_of(name) != "head"
