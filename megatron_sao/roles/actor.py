"""The policy on one rank: DIS updates, log-probs of one sequence, publishing."""

from dataclasses import asdict
from pathlib import Path

import torch

from megatron_sao.channel import (
    ActorUpdate,
    Answer,
    Command,
    PublishJoin,
    PublishLeave,
    PublishListen,
    PublishPlanning,
    PublishPrepare,
    PublishSend,
    Score,
    Tensors,
    publish_plan_data,
)
from megatron_sao.megatron.checkpoint import load_policy
from megatron_sao.megatron.freeze import freeze
from megatron_sao.megatron.model import build_policy
from megatron_sao.megatron.parallel import Parallel
from megatron_sao.megatron.platform import Platform
from megatron_sao.megatron.step import Trainer, policy_update, score
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
            case _ if command.name.startswith("publish_"):
                return self._publish(command)
            case _:
                return self._trained.handle(command, tensors)

    def _publish(self, command: Command) -> Answer:
        sender = self._sender
        match command:
            case PublishPlanning(full=full, bucket_bytes=bucket_bytes, direct=direct):
                return Answer(data=publish_plan_data(sender.plan(full=full, bucket_bytes=bucket_bytes, direct=direct)))
            case PublishListen():
                endpoint = sender.listen()
                return Answer(data=asdict(endpoint) if endpoint else {})
            case PublishJoin(groups=groups, world_size=world_size, address=address, port=port, timeout_s=timeout_s):
                sender.join(groups, world_size, timeout_s, endpoint=(address, port), cancelled=self._cancelled)
            case PublishPrepare(bucket=bucket, timeout_s=timeout_s):
                sender.prepare(bucket, timeout_s)
            case PublishSend(bucket=bucket, timeout_s=timeout_s):
                report = sender.send(bucket, timeout_s, self._cancelled)
                return Answer(data=asdict(report) if report else {})
            case PublishLeave():
                sender.leave()
        return Answer()


def build_actor(spec: ActorSpec, parallel: Parallel, platform: Platform, cancelled: Cancelled) -> Actor:
    """Model, weights, freezing, optimizer, sender.

    Raises:
        ValueError: what a person wrote does not fit: the model directory, the layout, a freeze pattern.
    """
    config, directory = spec.config, Path(spec.model.path)
    dtype = getattr(torch, spec.model.dtype)
    model = build_policy(directory, parallel, platform, dtype=dtype, recompute=config.recompute)
    load_policy(model, directory, parallel)
    frozen = freeze(model, parallel, config.freeze)
    trainer = Trainer.of(model, parallel, platform, config.optimizer)
    trained = TrainedRole(trainer, frozen, role="policy", source_directory=directory)
    trained.log_description()
    source = MegatronSource(model, parallel)
    sender = WeightSender(source, rank=parallel.rank, backend=platform.backend, host=spec.meeting.publish_host)
    return Actor(trained, sender, cancelled, eps_low=spec.eps_low, eps_high=spec.eps_high)
