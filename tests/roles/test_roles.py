"""Actor and critic as real processes over the real channel: two actor ranks that share the experts, one critic rank."""

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file

from launch.placement import Placement
from launch.processes import ProcessDied, Supervisor
from launch.role_processes import (
    Roles,
    gpu_environment,
    rank_environment,
    rank_specs,
    spec_text,
    start_roles,
    stop_roles,
)
from launch.watch import Watch
from megatron_sao.channel import (
    ActorUpdate,
    ChannelServer,
    CriticUpdate,
    CriticValues,
    Describe,
    DropBatch,
    Export,
    LoadBatch,
    PublishPlanning,
    RoleDied,
    RoleError,
    Score,
    publish_plan_from,
)
from megatron_sao.config import Config, LayoutConfig, parse
from megatron_sao.controller.buckets import ANSWER_S
from megatron_sao.roles.critic import source_directory
from megatron_sao.roles.spec import Meeting, parse_spec
from tests.support.te_cpu import TRANSFORMER_ENGINE
from tests.support.tiny_models import load_hf, make_tiny_critic, make_tiny_model

pytestmark = pytest.mark.ranks
LENGTHS = (9, 14, 6, 11)
PROMPT = np.array([3, 141, 59, 26, 53, 58, 97, 93, 23, 84, 62, 64], np.int32)


def config_of(model: Path, **changes: Mapping[str, Any]) -> Config:
    data: dict[str, Any] = {
        "run": {"directory": "unused", "num_steps": 1},
        "model": {"path": str(model), "dtype": "float32"},
        "actor": {
            "layout": {"num_ranks": 2, "expert": 2},
            "optimizer": {"learning_rate": 1e-3, "clip_norm": 1.0, "warmup_updates": 0},
            "max_tokens_per_micro_batch": 64,
        },
        "critic": {
            "optimizer": {"learning_rate": 1e-3, "clip_norm": 10.0, "warmup_updates": 0},
            "max_tokens_per_micro_batch": 64,
        },
        "algorithm": {"eps_low": 0.3, "eps_high": 5.0},
        "rollout": {
            "prompts": "x:y",
            "episode": "x:y",
            "reward": "x:y",
            "max_episode_tokens": 64,
            "max_turn_tokens": 32,
        },
    }
    for part, values in changes.items():
        data[part] = {**data[part], **values}
    return parse(data, source="test")


@contextlib.asynccontextmanager
async def roles(config: Config, tmp_path: Path) -> AsyncIterator[tuple[Roles, Supervisor]]:
    server, supervisor = ChannelServer(), Supervisor()
    private = tmp_path / "private"
    private.mkdir()
    try:
        started = await start_roles(
            config, server=server, supervisor=supervisor, placement=Placement(), private=private, logs=tmp_path
        )
        yield started, supervisor
    finally:
        await server.close()
        await asyncio.to_thread(supervisor.stop, 5.0)


def batch(num_ranks: int) -> tuple[LoadBatch, dict[str, np.ndarray]]:
    """Four trajectories of a prompt of two tokens and an answer, sampled by version 0 at about the model's rate."""
    rng = np.random.default_rng(0)
    plan = {1: (((0, 1, 2, 3),),), 2: (((1, 2),), ((3, 0),))}[num_ranks]
    is_action = np.concatenate([np.arange(n) >= 2 for n in LENGTHS])
    tensors = {
        "offsets": np.concatenate([[0], np.cumsum(LENGTHS)]).astype(np.int64),
        "token_ids": rng.integers(0, 256, sum(LENGTHS)).astype(np.int32),
        "is_action": is_action,
        "rollout_logprobs": np.where(is_action, -5.5, 0).astype(np.float32),
        "version": np.where(is_action, 0, -1).astype(np.int32),
    }
    ids = tuple(f"{n:032x}" for n in range(len(LENGTHS)))
    return LoadBatch(batch_id=0, trajectory_ids=ids, plan=plan), tensors


async def test_one_step_of_the_method_and_an_export_over_the_channel(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", seed=1)
    config = config_of(model, critic={"layout": {"num_ranks": 2, "pipeline": 2}})
    async with roles(config, tmp_path) as (channels, supervisor):
        facts = (await channels.actor.call(Describe(), timeout_s=60)).data
        spec = "transformer_engine" if TRANSFORMER_ENGINE else "local"
        assert (facts["layer_spec"], facts["dispatcher"], facts["num_frozen"]) == (spec, "alltoall", 0)
        sizes = "tensor 1, context 1, expert 2, expert_tensor 1, expert_data 1, pipeline 1, data 2, virtual_stages 1"
        assert facts["layout"] == f"2 ranks: {sizes}"
        await check_score(channels, model)
        await check_critic(channels)
        await check_actor(channels)
        await check_exports(channels, model, tmp_path)
        await check_values(channels, tmp_path / "critic")
        await stop_roles(channels, supervisor)
        assert [status for _, status in supervisor.ended()] == [0, 0, 0, 0]
    log = (tmp_path / "critic-0.log").read_text()
    adam = "transformer_engine FusedAdam" if TRANSFORMER_ENGINE else "torch Adam"
    assert f"optimizer distributed {adam}" in log
    assert "num_frozen_tensors 12" in log  # q, k, v, o and two norms in each of two layers


async def check_score(channels: Roles, model: Path) -> None:
    """The actor's log-probs are those of transformers on the same checkpoint."""
    scored = (await channels.actor.call(Score(), {"token_ids": PROMPT}, timeout_s=60)).tensors["logprobs"]
    with torch.no_grad():
        logits = load_hf(model)(torch.from_numpy(PROMPT.astype(np.int64))[None]).logits[0]
    expected = torch.log_softmax(logits, -1)[torch.arange(len(PROMPT) - 1), torch.from_numpy(PROMPT[1:]).long()]
    assert np.abs(scored - expected.numpy()).max() < 1e-4


async def check_critic(channels: Roles) -> None:
    command, tensors = batch(num_ranks=1)
    targets = np.repeat([1.0, 0.0, 1.0, 0.0], [n - 2 for n in LENGTHS]).astype(np.float32)
    await channels.critic.call(command, tensors, timeout_s=60)
    before = (await channels.critic.call(CriticValues(batch_id=0), timeout_s=60)).tensors["values"]
    assert not before.any()  # a zero head
    losses = []
    for _ in range(2):
        metrics = (await channels.critic.call(CriticUpdate(batch_id=0), {"targets": targets}, timeout_s=60)).metrics
        losses.append(metrics["critic/loss"].value)
    assert losses[1] < losses[0]
    assert metrics["critic/num_updates"].value == 2
    values = (await channels.critic.call(CriticValues(batch_id=0), timeout_s=60)).tensors["values"]
    assert len(values) == len(targets)
    assert values.std() > 0
    await channels.critic.call(DropBatch(batch_id=0), timeout_s=60)


async def check_values(channels: Roles, directory: Path) -> None:
    """What the critic's last stage computes reaches the controller: the values of transformers on its export."""
    command, tensors = batch(num_ranks=1)
    await channels.critic.call(command, tensors, timeout_s=60)
    values = (await channels.critic.call(CriticValues(batch_id=0), timeout_s=60)).tensors["values"]
    head = load_file(directory / "value_head.safetensors")["value_head.weight"][0]
    starts, tokens = tensors["offsets"], torch.from_numpy(tensors["token_ids"].astype(np.int64))
    backbone = load_hf(directory).model
    with torch.no_grad():
        rows = [tokens[start:end][None] for start, end in zip(starts[:-1], starts[1:], strict=True)]
        hidden = [backbone(row).last_hidden_state[0] for row in rows]
    expected = torch.cat([of @ head for of in hidden])[np.flatnonzero(tensors["is_action"]) - 1]
    assert np.abs(values - expected.numpy()).max() < 1e-4 * expected.abs().max()


async def check_actor(channels: Roles) -> None:
    command, tensors = batch(num_ranks=2)
    num_actions = int(tensors["is_action"].sum())
    await channels.actor.call(command, tensors, timeout_s=60)
    before = (await channels.actor.call(Score(), {"token_ids": PROMPT}, timeout_s=60)).tensors["logprobs"]
    bad = np.where(np.arange(num_actions) == 3, np.nan, 1).astype(np.float32)
    with pytest.raises(RoleError, match=r"1 of \d+ advantages of batch 0 are not finite"):
        await channels.actor.call(ActorUpdate(batch_id=0, version=0), {"advantages": bad}, timeout_s=60)
    advantages = {"advantages": np.linspace(-1, 1, num_actions).astype(np.float32)}
    metrics = (await channels.actor.call(ActorUpdate(batch_id=0, version=0), advantages, timeout_s=60)).metrics
    assert metrics["policy/num_updates"].value == 1
    assert metrics["policy/grad_norm"].value > 0
    after = (await channels.actor.call(Score(), {"token_ids": PROMPT}, timeout_s=60)).tensors["logprobs"]
    assert np.abs(after - before).max() > 1e-6


async def check_exports(channels: Roles, model: Path, tmp_path: Path) -> None:
    """The exported policy is what the actor scores with; the plan names its tensors and their bytes."""
    plan = publish_plan_from(
        (await channels.actor.call(PublishPlanning(full=True, bucket_bytes=1 << 20), timeout_s=60)).data
    )
    await channels.actor.call(Export(directory=str(tmp_path / "hf")), timeout_s=60)
    await channels.critic.call(Export(directory=str(tmp_path / "critic")), timeout_s=60)
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    assert {t.name for bucket in plan.buckets for t in bucket.tensors} == set(tensors)
    assert plan.num_bytes == sum(tensor.nbytes for tensor in tensors.values())
    await check_score(channels, tmp_path / "hf")
    assert json.loads((tmp_path / "critic" / "config.json").read_text())["role"] == "critic"
    source, trained = (load_file(path / "model.safetensors") for path in (model, tmp_path / "critic"))
    name = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(source[name], trained[name])  # frozen attention


async def test_the_death_of_one_rank_is_seen_by_the_call_and_named_by_the_supervisor(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", seed=1)
    async with roles(config_of(model), tmp_path) as (channels, supervisor):
        victim = next(process for process in supervisor.processes if process.name == "actor rank 1")
        psutil.Process(victim.popen.pid).kill()
        with pytest.raises(ProcessDied, match="actor rank 1 was killed by SIGKILL"):
            await asyncio.wait_for(Watch(supervisor).until_one_dies(), 20)
        with pytest.raises((RoleError, RoleDied), match="actor"):
            await channels.actor.call(Score(), {"token_ids": PROMPT}, timeout_s=60)


async def test_what_a_role_refuses_is_a_value_error_with_its_words(tmp_path: Path) -> None:
    config = config_of(make_tiny_model(tmp_path / "model", seed=1), actor={"freeze": ["*.attention.*"]})
    with pytest.raises(ValueError, match=r"actor: all ranks: ValueError: freeze patterns that match no"):
        async with roles(config, tmp_path):
            pass


def test_a_critic_starts_from_a_critic_of_the_same_sizes_only(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")

    def source(init: Path | str) -> Path:
        config = config_of(model, critic={"init": str(init)})
        spec = next(s for s in rank_specs(config, port=1, key=b"k" * 32, private=tmp_path) if s.role == "critic")
        return source_directory(spec)

    assert source("policy") == model
    critic = make_tiny_critic(tmp_path / "critic", model)
    assert source(critic) == critic
    with pytest.raises(ValueError, match=r'critic.init = .*model.* holds a policy.*critic.init = "policy"'):
        source(model)
    raw = json.loads((critic / "config.json").read_text())
    (critic / "config.json").write_text(json.dumps({**raw, "vocab_size": 512, "hidden_size": 32}))
    with pytest.raises(ValueError, match=r"vocab_size = 512 \(model.path: 320\), hidden_size = 32 \(model.path: 64\)"):
        source(critic)


def test_a_rank_starts_without_keys_in_its_environment_and_without_proxies(tmp_path: Path) -> None:
    environment = rank_environment({"HTTP_PROXY": "x", "https_proxy": "y", "RANK": "3", "HOME": "/h"}, num_threads=2)
    assert environment["OMP_NUM_THREADS"] == "2"
    assert environment["HOME"] == "/h"
    assert not {"HTTP_PROXY", "https_proxy", "RANK"} & set(environment)


def test_a_rank_tells_cuda_what_megatron_and_the_engine_count_on_and_a_person_has_the_last_word() -> None:
    tensor, context = (LayoutConfig(num_ranks=2, **{axis: 2}) for axis in ("tensor", "context"))
    alone = {"NVIDIA_TF32_OVERRIDE": "0", "NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
    ordered = alone | {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    assert gpu_environment({}, LayoutConfig()) == alone
    assert gpu_environment({}, tensor) == gpu_environment({}, context) == ordered
    assert gpu_environment(dict.fromkeys(ordered, "8"), tensor) == {}


def test_a_specification_survives_the_way_through_stdin_and_a_wrong_one_is_named(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    specs = rank_specs(config, port=1, key=b"k" * 32, private=tmp_path)
    assert [(spec.role, spec.rank) for spec in specs] == [("actor", 0), ("actor", 1), ("critic", 0)]
    assert [parse_spec(spec_text(spec)) for spec in specs] == specs
    assert (b"k" * 32).hex() not in repr(specs[0])
    assert specs[0].parent_pid == os.getpid()
    with pytest.raises(ValueError, match="not the specification of a rank: .*'judge'"):
        parse_spec(spec_text(specs[0]).replace('"role": "actor"', '"role": "judge"'))


def test_the_controller_hears_what_a_failed_rank_waits_for_its_peers_to_say() -> None:
    assert Meeting.model_fields["grace_s"].default < ANSWER_S
