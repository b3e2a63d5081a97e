"""The policy on one rank: DIS updates, log-probs of one sequence, publishing."""

from pathlib import Path

import torch

from megatron_sao.channel import ActorUpdate, Answer, Command, PublishCommand, Score, Tensors
from megatron_sao.data.routed_experts import ExpertReader, RouterShape
from megatron_sao.megatron.checkpoint import load_policy
from megatron_sao.megatron.freeze import freeze
from megatron_sao.megatron.memory import publish_bytes
from megatron_sao.megatron.model import Model, build_policy
from megatron_sao.megatron.parallel import Parallel
from megatron_sao.megatron.platform import Platform
from megatron_sao.megatron.probe import rehearse
from megatron_sao.megatron.router_replay import RouterReplay
from megatron_sao.megatron.step import Trainer, policy_update, score
from megatron_sao.megatron.weight_files import carried_tensors
from megatron_sao.roles import publishing
from megatron_sao.roles.spec import ActorSpec
from megatron_sao.roles.trained import TrainedRole
from megatron_sao.sync.group import Cancelled
from megatron_sao.sync.send import WeightSender
from megatron_sao.sync.source import MegatronSource


class Actor:
    """Executes the actor's commands on this rank."""

    def __init__(
        self, trained: TrainedRole, sender: WeightSender, cancelled: Cancelled, *, eps_low: float, eps_high: float
    ) -> None:
        self._trained, self._sender, self._cancelled = trained, sender, cancelled
        self._eps_low, self._eps_high = eps_low, eps_high

    def handle(self, command: Command, tensors: Tensors) -> Answer:
        match command:
            case ActorUpdate(batch_id=batch_id, version=version):
                metrics = policy_update(
                    self._trained.trainer,
                    self._trained.shard(batch_id),
                    tensors["advantages"],
                    eps_low=self._eps_low,
                    eps_high=self._eps_high,
                    version=version,
                )
                return Answer(metrics=metrics)
            case Score():
                return Answer(tensors={"logprobs": score(self._trained.trainer, tensors["token_ids"])})
            case PublishCommand():
                return publishing.execute(command, self._sender, self._cancelled)
            case _:
                return self._trained.handle(command, tensors)


def build_actor(spec: ActorSpec, parallel: Parallel, platform: Platform, cancelled: Cancelled) -> Actor:
    """Model, weights, freezing, optimizer, sender.

    Raises:
        ValueError: what a person wrote does not fit: the model directory, the layout, a freeze pattern.
    """
    config, directory = spec.config, Path(spec.model.path)
    dtype = getattr(torch, spec.model.dtype)
    model = build_policy(
        directory,
        parallel,
        platform,
        dtype=dtype,
        recompute=config.recompute,
        logits_tokens=config.logits_tokens,
        approximate_sparse_attention=spec.model.approximate_sparse_attention,
    )
    load_policy(model, directory, parallel)
    frozen = freeze(model, parallel, config.freeze)
    trainer = Trainer.of(model, parallel, platform, config.optimizer)
    experts = _replay(spec, model, parallel)  # a router that cannot be replaced is refused at once
    buckets = publish_bytes(model.hf_config, dtype=spec.model.dtype, bucket_bytes=spec.bucket_bytes)
    rehearse(trainer, config, publish_bytes=buckets)
    trained = TrainedRole(trainer, frozen, role="policy", source_directory=directory, experts=experts)
    trained.log_description()
    source = MegatronSource(model, parallel, carried_tensors(directory))
    backend = spec.publish_backend or platform.backend
    sender = WeightSender(source, rank=parallel.rank, backend=backend, host=spec.meeting.publish_host)
    return Actor(trained, sender, cancelled, eps_low=spec.eps_low, eps_high=spec.eps_high)


def _replay(spec: ActorSpec, model: Model, parallel: Parallel) -> ExpertReader | None:
    """Raises ValueError: the rank was given no directory of recorded experts."""
    if not spec.config.router_replay:
        return None
    if spec.expert_directory is None:
        raise ValueError("actor.router_replay = true, but this rank was not told where the recorded experts are")
    hf = model.hf_config
    shape = RouterShape(num_layers=hf.num_layers, top_k=hf.experts_per_token, num_experts=hf.num_experts)
    layers = RouterReplay(model.chunks, parallel).layers
    return ExpertReader(directory=Path(spec.expert_directory), shape=shape, layers=layers)
