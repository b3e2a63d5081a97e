"""How the ranks of one role move bytes among themselves: no pickle, every wait with a deadline.

A group of its own, always gloo (also where the models use NCCL), so that control never mixes with training collectives.
Data-parallel rank d has a leader, its lowest global rank; the ranks that share its data (tensor, context and pipeline
peers) follow it.
"""

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from megatron_sao.channel import Failure

LOG = logging.getLogger(__name__)


class BrokenWorld(RuntimeError):
    """The ranks of a role cannot talk to each other any more: this process must end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Deadlines:
    """Of a command, from the inside out, so that whoever can say more gives up first: collectives of the model; control
    among the ranks, which reports them; the controller, which would only know that no answer came.
    """

    collective_s: float
    control_s: float
    grace_s: float  # how long a failed rank waits for the others


def deadlines(command_timeout_s: float, grace_s: float) -> Deadlines:
    return Deadlines(
        collective_s=0.8 * command_timeout_s,
        control_s=0.9 * command_timeout_s,
        grace_s=min(grace_s, 0.1 * command_timeout_s),
    )


@dataclass(frozen=True, slots=True)
class RankFailure:
    rank: int
    failure: Failure


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """This rank's place, and the groups. Made by `create`, on every rank at the same time."""

    rank: int
    world_size: int
    data_rank: int
    peers: tuple[tuple[int, ...], ...]  # [data-parallel rank] global ranks that hold the same data, leader first
    world: Any
    peer_group: Any  # this rank's peers
    timeout_s: float  # of the control group: a little less than the longest command
    grace_s: float  # how long a failed rank waits for the others to finish the same command
    board: Any  # a torch Store, where a failed rank leaves its reason before it may have to end

    @classmethod
    def create(cls, *, data_rank: int, timeout_s: float, grace_s: float) -> Self:
        """Collective over the default group's ranks, which must exist."""
        rank, world_size = dist.get_rank(), dist.get_world_size()
        timeout = timedelta(seconds=timeout_s)
        world = dist.new_group(backend="gloo", timeout=timeout)
        data_ranks = [int(r) for r in _all_gather(torch.tensor([data_rank]), world_size, world)]
        peers = tuple(tuple(r for r in range(world_size) if data_ranks[r] == d) for d in range(max(data_ranks) + 1))
        assert peers[0][0] == 0, "global rank 0 leads the first data-parallel rank"
        groups = [dist.new_group(list(ranks), backend="gloo", timeout=timeout) for ranks in peers]
        return cls(
            rank=rank,
            world_size=world_size,
            data_rank=data_rank,
            peers=peers,
            world=world,
            peer_group=groups[data_rank],
            timeout_s=timeout_s,
            grace_s=grace_s,
            board=PrefixStore("failures", dist.distributed_c10d._get_default_store()),
        )

    @property
    def leads(self) -> bool:
        return self.peers[self.data_rank][0] == self.rank

    def share(self, data: bytes | None) -> bytes:
        """Rank 0's bytes, on every rank."""
        return self._broadcast(data, source=0, group=self.world)

    def scatter(self, parts: Sequence[bytes] | None) -> bytes:
        """Rank 0's `parts[d]`, on every rank of data-parallel rank d. Only the leaders get it from rank 0."""
        mine: bytes | None = None
        if self.rank == 0:
            assert parts is not None, "rank 0 has the parts"
            mine = parts[0]
            for ranks, part in zip(self.peers[1:], parts[1:], strict=True):
                self._send(part, ranks[0])
        elif self.leads:
            mine = self._receive(0)
        if len(self.peers[self.data_rank]) == 1:
            assert mine is not None
            return mine
        return self._broadcast(mine, source=self.peers[self.data_rank][0], group=self.peer_group)

    def collect(self, part: bytes) -> list[bytes]:
        """On rank 0 the leaders' parts by data-parallel rank; elsewhere nothing."""
        if self.rank == 0:
            return [part, *(self._receive(ranks[0]) for ranks in self.peers[1:])]
        if self.leads:
            self._send(part, 0)
        return []

    def agree(self, failure: Failure | None) -> tuple[RankFailure, ...]:
        """Every rank's failure of the command just run, the same on all ranks; empty when all succeeded.

        Raises:
            BrokenWorld: a rank is gone, or does not come out of the command (a failed rank waits `grace_s` only).
        """
        if failure is not None:
            self._post(failure)
        flag = torch.tensor([int(failure is not None)])
        wait_s = self.timeout_s if failure is None else min(self.grace_s, self.timeout_s)
        try:
            work = dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self.world, async_op=True)
            assert work is not None
            work.wait(timedelta(seconds=wait_s))
        except RuntimeError as error:
            raise BrokenWorld(f"the ranks could not agree within {wait_s:g} s: {error}") from error
        if not flag.item():
            return ()
        failures = self._gather_failures(failure)
        if failure is not None:
            self.board.delete_key(str(self.rank))  # dealt with
        return failures

    def posted(self) -> tuple[RankFailure, ...]:
        """What failed ranks left on the board, for when the group itself is broken."""
        keys = [str(rank) for rank in range(self.world_size)]
        try:
            found = [(rank, self.board.get(key)) for rank, key in enumerate(keys) if self.board.check([key])]
        except RuntimeError as error:
            LOG.warning("the board of failures cannot be read any more: %s", error)
            return ()
        return tuple(RankFailure(rank, Failure.model_validate_json(text)) for rank, text in found)

    def _post(self, failure: Failure) -> None:
        try:
            self.board.set(str(self.rank), failure.model_dump_json())
        except RuntimeError as error:
            LOG.warning("the board of failures cannot be written any more: %s", error)

    def _gather_failures(self, failure: Failure | None) -> tuple[RankFailure, ...]:
        own = b"null" if failure is None else failure.model_dump_json().encode()
        lengths = _all_gather(torch.tensor([len(own)]), self.world_size, self.world)
        padded = np.zeros(int(lengths.max()), np.uint8)
        padded[: len(own)] = np.frombuffer(own, np.uint8)
        texts = _all_gather(torch.from_numpy(padded), self.world_size, self.world).view(self.world_size, -1)
        found = [json.loads(bytes(texts[r, : lengths[r]].numpy())) for r in range(self.world_size)]
        return tuple(RankFailure(r, Failure(**fields)) for r, fields in enumerate(found) if fields is not None)

    def _broadcast(self, data: bytes | None, *, source: int, group: Any) -> bytes:
        length = torch.tensor([0 if data is None else len(data)])
        dist.broadcast(length, src=source, group=group)
        tensor = torch.empty(int(length), dtype=torch.uint8) if data is None else _as_tensor(data)
        if len(tensor):
            dist.broadcast(tensor, src=source, group=group)
        return bytes(tensor.numpy()) if data is None else data

    def _send(self, data: bytes, target: int) -> None:
        dist.send(torch.tensor([len(data)]), target, group=self.world)
        if data:
            dist.send(_as_tensor(data), target, group=self.world)

    def _receive(self, source: int) -> bytes:
        length = torch.zeros(1, dtype=torch.int64)
        dist.recv(length, source, group=self.world)
        tensor = torch.empty(int(length), dtype=torch.uint8)
        if len(tensor):
            dist.recv(tensor, source, group=self.world)
        return bytes(tensor.numpy())


def _as_tensor(data: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(bytearray(data), np.uint8))


def _all_gather(tensor: torch.Tensor, world_size: int, group: Any) -> torch.Tensor:
    parts = [torch.empty_like(tensor) for _ in range(world_size)]
    dist.all_gather(parts, tensor, group=group)
    return torch.cat(parts)
