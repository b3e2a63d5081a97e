"""The value model on one rank: updates towards returns, values."""

from pathlib import Path

import torch

from megatron_sao.channel import Answer, Command, CriticUpdate, CriticValues, Tensors
from megatron_sao.megatron.checkpoint import load_critic
from megatron_sao.megatron.freeze import freeze
from megatron_sao.megatron.mapping.architectures import read_hf_config
from megatron_sao.megatron.model import build_critic as build_model
from megatron_sao.megatron.parallel import Parallel
from megatron_sao.megatron.platform import Platform
from megatron_sao.megatron.probe import rehearse
from megatron_sao.megatron.step import Trainer, value_update, values
from megatron_sao.roles.spec import CriticSpec
from megatron_sao.roles.trained import TrainedRole

SAME_AS_POLICY = ("architecture", "vocab_size", "hidden_size")


class Critic:
    """Executes the critic's commands on this rank."""

    def __init__(self, trained: TrainedRole) -> None:
        self._trained = trained

    def handle(self, command: Command, tensors: Tensors) -> Answer:
        trainer = self._trained.trainer
        match command:
            case CriticUpdate(batch_id=batch_id):
                return Answer(metrics=value_update(trainer, self._trained.shard(batch_id), tensors["targets"]))
            case CriticValues(batch_id=batch_id):
                return Answer(tensors={"values": values(trainer, self._trained.shard(batch_id))})
            case _:
                return self._trained.handle(command, tensors)


def source_directory(spec: CriticSpec) -> Path:
    """What the critic starts from: the policy, by that word only, or an exported critic of the policy's sizes.

    Raises:
        ValueError: `critic.init` holds a policy (its value head would be zero), or a critic of another model.
    """
    if spec.config.init == "policy":
        return Path(spec.model.path)
    directory = Path(spec.config.init)
    critic, policy = read_hf_config(directory), read_hf_config(spec.model.path)
    if critic.role != "critic":
        raise ValueError(
            f'critic.init = {spec.config.init!r} holds a policy: give an exported critic, or critic.init = "policy" to '
            "start from model.path with a zero value head"
        )
    differing = [
        f"{name} = {getattr(critic, name)} (model.path: {getattr(policy, name)})"
        for name in SAME_AS_POLICY
        if getattr(critic, name) != getattr(policy, name)
    ]
    if differing:
        raise ValueError(f"critic.init = {spec.config.init!r} is of another model: {', '.join(differing)}")
    return directory


def build_critic(spec: CriticSpec, parallel: Parallel, platform: Platform) -> Critic:
    """Model, weights, freezing, optimizer.

    Raises:
        ValueError: what a person wrote does not fit: the model directory, the layout, a freeze pattern.
    """
    config, directory = spec.config, source_directory(spec)
    dtype = getattr(torch, spec.model.dtype)
    model = build_model(
        directory,
        parallel,
        platform,
        dtype=dtype,
        recompute=config.recompute,
        approximate_sparse_attention=spec.model.approximate_sparse_attention,
    )
    load_critic(model, directory, parallel)
    frozen = freeze(model, parallel, config.frozen_patterns)
    trainer = Trainer.of(model, parallel, platform, config.optimizer)
    rehearse(trainer, config)
    trained = TrainedRole(trainer, frozen, role="critic", source_directory=directory)
    trained.log_description()
    return Critic(trained)
