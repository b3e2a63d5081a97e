"""The ranks of a role under one command: shards, agreement, failures that hang nobody. Real gloo ranks, a toy role."""

import asyncio
import contextlib
import multiprocessing
import os
import time
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_sao.channel import (
    ActorUpdate,
    Answer,
    Channel,
    ChannelServer,
    Command,
    CriticUpdate,
    CriticValues,
    Describe,
    DropBatch,
    Export,
    LoadBatch,
    PublishSend,
    RoleError,
    Score,
    Stop,
    Tensors,
    connect,
)
from megatron_sao.megatron.shard import Shard
from megatron_sao.roles.exchange import BrokenWorld, Exchange, deadlines
from megatron_sao.roles.shards import ShardMap, shard_of
from megatron_sao.roles.worker import Worker

KEY = b"k" * 32
GRACE_S = 1.5
pytestmark = pytest.mark.ranks

# Four trajectories of 3, 2, 4 and 3 tokens. Token ids are 10 * trajectory + place, so that they tell where they belong.
LENGTHS = (3, 2, 4, 3)
TOKENS = np.array([10 * n + t for n, length in enumerate(LENGTHS) for t in range(length)], np.int32)
IS_ACTION = np.array([t >= (2 if n == 2 else 1) for n, length in enumerate(LENGTHS) for t in range(length)])
ACTION_TOKENS = [1, 2, 11, 22, 23, 31, 32]
PLAN = (((3,), (0,)), ((2, 1), ()))  # data-parallel rank 0: rows [3] and [0]; rank 1: one row of two, one empty


class ToyRole:
    """A fake role: remembers shards, answers with token ids as values, fails where the test says."""

    def __init__(self, rank: int, data_rank: int) -> None:
        self.rank, self.data_rank = rank, data_rank
        self.shards: dict[int, Shard] = {}
        self.sums: list[float] = []

    def handle(self, command: Command, tensors: Tensors) -> Answer:
        match command:
            case LoadBatch():
                if command.batch_id == 13 and self.rank == 1:
                    raise MemoryError("no room for batch 13")
                self.shards[command.batch_id] = shard_of(command, tensors, self.data_rank)
            case DropBatch():
                self.shards.pop(command.batch_id, None)
            case CriticUpdate():
                # a target is that of the right token: both are looked up in this rank's shard
                shard = self.shards[command.batch_id]
                assert tensors["targets"].tolist() == shard.token_ids[shard.is_action].tolist()
            case CriticValues():
                shard = self.shards[command.batch_id]
                return Answer(tensors={"values": shard.token_ids[shard.is_action].astype(np.float32)})
            case Score():
                return self.score(tensors["token_ids"])
            case PublishSend():
                self.collective(command.bucket)
            case Export():
                if self.rank == 1:
                    os._exit(9)
                dist.all_reduce(torch.zeros(1))
        return Answer(data={"batches": sorted(self.shards)})

    def score(self, token_ids: np.ndarray) -> Answer:
        if token_ids[0] == 99 and self.rank == 1:
            raise ValueError("99 is no token")
        if token_ids[0] == 98:
            raise ValueError("98 is no token either")
        return Answer(tensors={"logprobs": token_ids[1:].astype(np.float32)})

    def collective(self, bucket: int) -> None:
        """Rank `bucket` fails before a collective that the others are in; in bucket 7 rank 1 hangs before it."""
        if bucket == 7 and self.rank == 1:
            time.sleep(60)
        if bucket == self.rank:
            raise ValueError(f"bucket {bucket} is broken")
        dist.all_reduce(torch.zeros(1))


def run_rank(rank: int, world_size: int, store: str, port: int, settings: tuple[int, float]) -> None:
    """One rank, as roles.main runs it; status 3 when the ranks lost each other."""
    torch.set_num_threads(1)
    tensor_size, command_s = settings
    times = deadlines(command_s, GRACE_S)
    model_timeout = timedelta(seconds=times.collective_s)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=model_timeout
    )
    data_rank = rank // tensor_size
    exchange = Exchange.create(data_rank=data_rank, timeout_s=times.control_s, grace_s=times.grace_s)
    connection = connect("127.0.0.1", port, role="critic", key=KEY, timeout_s=30) if rank == 0 else None
    try:
        Worker(ToyRole(rank, data_rank), exchange, connection, idle_s=0.2).run()
    except BrokenWorld:
        os._exit(3)


class Ranks:
    """The processes of a toy role. (`tests.support.ranks` ends all at the first failure; here others' ends matter.)"""

    def __init__(self, world_size: int, store: Path, port: int, settings: tuple[int, float]) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch.distributed", "tests.support.ranks_preload"])
        self.processes = [
            context.Process(target=run_rank, args=(rank, world_size, str(store), port, settings))
            for rank in range(world_size)
        ]
        for process in self.processes:
            process.start()

    async def statuses(self) -> list[int | None]:
        """Exit statuses, of those that end by themselves."""
        for process in self.processes:
            await asyncio.to_thread(process.join, 30)
        return [process.exitcode for process in self.processes]

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


@contextlib.asynccontextmanager
async def role(
    store: Path, world_size: int, *, tensor_size: int = 1, command_s: float = 60.0
) -> AsyncIterator[tuple[Channel, Ranks]]:
    server = ChannelServer()
    port = await server.start("127.0.0.1", KEY)
    ranks = Ranks(world_size, store / "store", port, (tensor_size, command_s))
    try:
        yield await server.accept("critic", timeout_s=60), ranks
    finally:
        await server.close()
        ranks.kill()


def batch(batch_id: int = 0) -> tuple[LoadBatch, dict[str, np.ndarray]]:
    command = LoadBatch(batch_id=batch_id, trajectory_ids=("a", "b", "c", "d"), plan=PLAN)
    return command, {
        "offsets": np.concatenate([[0], np.cumsum(LENGTHS)]).astype(np.int64),
        "token_ids": TOKENS,
        "is_action": IS_ACTION,
        "rollout_logprobs": np.zeros(len(TOKENS), np.float32),
        "version": np.zeros(len(TOKENS), np.int32),
    }


@pytest.mark.parametrize(("world_size", "tensor_size"), [(2, 1), (4, 2)])
async def test_every_data_parallel_rank_sees_its_shard_and_values_return_in_the_batchs_order(
    world_size: int, tensor_size: int, tmp_path: Path
) -> None:
    async with role(tmp_path, world_size, tensor_size=tensor_size) as (channel, ranks):
        await channel.call(*batch(), timeout_s=30)
        await channel.call(CriticUpdate(batch_id=0), {"targets": np.array(ACTION_TOKENS, np.float32)}, timeout_s=30)
        values = (await channel.call(CriticValues(batch_id=0), timeout_s=30)).tensors["values"]
        assert values.tolist() == ACTION_TOKENS
        answer = await channel.call(Score(), {"token_ids": np.array([4, 5, 6], np.int32)}, timeout_s=30)
        assert answer.tensors["logprobs"].tolist() == [5, 6]
        await channel.call(Stop(), timeout_s=30)
        assert await ranks.statuses() == [0] * world_size


async def test_failures_are_answered_by_rank_and_the_role_goes_on(tmp_path: Path) -> None:
    async with role(tmp_path, 2) as (channel, ranks):
        with pytest.raises(RoleError, match=r"critic failed in score: ValueError: rank 1 of 2: ValueError: 99 is no"):
            await channel.call(Score(), {"token_ids": np.array([99, 1], np.int32)}, timeout_s=30)
        with pytest.raises(RoleError, match=r"all ranks: ValueError: 98 is no token either"):
            await channel.call(Score(), {"token_ids": np.array([98, 1], np.int32)}, timeout_s=30)
        await check_batches(channel)
        assert (await channel.call(Describe(), timeout_s=30)).data == {"batches": []}
        await channel.call(Stop(), timeout_s=30)
        assert await ranks.statuses() == [0] * 2


async def test_ranks_wait_for_the_next_command_longer_than_their_deadline(tmp_path: Path) -> None:
    async with role(tmp_path, 2, command_s=3.0) as (channel, _):
        await asyncio.sleep(5.0)  # rank 0 gives the other a sign of life
        assert (await channel.call(Describe(), timeout_s=30)).data == {"batches": []}


async def check_batches(channel: Channel) -> None:
    """At most two batches; one that a rank could not load is gone everywhere; unknown ones are named."""
    with pytest.raises(RoleError, match=r"rank 1 of 2: MemoryError: no room for batch 13"):
        await channel.call(*batch(13), timeout_s=30)
    assert (await channel.call(*batch(1), timeout_s=30)).data == {"batches": [1]}
    await channel.call(*batch(2), timeout_s=30)
    with pytest.raises(RoleError, match=r"batch 3 cannot be loaded: batches \[1, 2\] are held, at most 2"):
        await channel.call(*batch(3), timeout_s=30)
    with pytest.raises(RoleError, match=r"batch 3 is not loaded; loaded are \[1, 2\]"):
        await channel.call(CriticValues(batch_id=3), timeout_s=30)
    with pytest.raises(RoleError, match=r"2 advantages for the 7 action tokens of batch 1"):
        await channel.call(ActorUpdate(batch_id=1, version=0), {"advantages": np.zeros(2, np.float32)}, timeout_s=30)
    for batch_id in (1, 2, 2):
        await channel.call(DropBatch(batch_id=batch_id), timeout_s=30)


@pytest.mark.parametrize("failing", [0, 1])
async def test_a_rank_that_fails_before_a_collective_ends_the_role_within_the_grace_and_is_named(
    failing: int, tmp_path: Path
) -> None:
    async with role(tmp_path, 2) as (channel, ranks):
        start_s = time.monotonic()
        with pytest.raises(RoleError, match=rf"rank {failing} of 2: ValueError: bucket {failing} is broken"):
            await channel.call(PublishSend(bucket=failing, timeout_s=50), timeout_s=50)
        assert time.monotonic() - start_s < GRACE_S + 10
        assert await ranks.statuses() == [3, 3]


async def test_a_rank_that_hangs_is_reported_before_the_controllers_deadline(tmp_path: Path) -> None:
    async with role(tmp_path, 2, command_s=5.0) as (channel, _):
        with pytest.raises(RoleError, match="critic failed in publish_send: .*[Tt]imed out"):
            await channel.call(PublishSend(bucket=7, timeout_s=5), timeout_s=5.0)


async def test_the_death_of_a_rank_ends_the_others(tmp_path: Path) -> None:
    async with role(tmp_path, 2) as (channel, ranks):
        with pytest.raises(RoleError, match="critic failed in export: .*Connection closed by peer"):
            await channel.call(Export(directory="/nowhere"), timeout_s=30)
        assert await ranks.statuses() == [3, 9]


async def test_all_ranks_stop_when_the_controller_is_gone(tmp_path: Path) -> None:
    async with role(tmp_path, 2) as (channel, ranks):
        await channel.close()
        assert await ranks.statuses() == [0] * 2


def test_a_plan_for_another_layout_is_refused() -> None:
    with pytest.raises(ValueError, match="planned for 2 data-parallel ranks, this role has 4"):
        ShardMap(4).split(*batch())


def test_a_shard_lies_in_the_order_of_its_rows() -> None:
    command, tensors = batch()
    parts = ShardMap(2).split(command, tensors)
    first, second = (shard_of(command, parts[rank], rank) for rank in (0, 1))
    assert first.token_ids.tolist() == [30, 31, 32, 0, 1, 2]
    assert first.micro_batches == ((0,), (1,))
    assert second.token_ids.tolist() == [20, 21, 22, 23, 10, 11]
    assert second.micro_batches == ((0, 1), ())
    assert second.offsets.tolist() == [0, 4, 6]
    assert first.num_action_tokens == second.num_action_tokens == len(ACTION_TOKENS)
