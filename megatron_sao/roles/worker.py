"""The main loop of one rank: rank 0 receives a command, every rank executes it, rank 0 answers.

    controller ──channel──> rank 0 ──command──> all ranks            tensors: each data-parallel rank only its shard
                              │  handle   ...   handle  │
                              └──── agree on failures ──┘ ──> rank 0 answers with the result, or names the failed ranks

Consumes commands, produces answers. Rank 0 waits for the channel and sends the others a sign of life every `idle_s`;
they wait for rank 0, at most the control group's deadline. A failure on any rank becomes the answer of all, and the
role waits for the next command; a rank that does not come out of a command ends the process.
"""

import json
import logging
from typing import Protocol

from megatron_sao.channel import (
    Answer,
    Command,
    ControllerGone,
    CriticValues,
    DropBatch,
    Failure,
    LoadBatch,
    ProtocolError,
    RoleConnection,
    Stop,
    Tensors,
    failure_of,
    parse_command,
)
from megatron_sao.channel.commands import NO_TENSORS
from megatron_sao.channel.frames import pack, unpack
from megatron_sao.roles.exchange import BrokenWorld, Exchange, RankFailure
from megatron_sao.roles.shards import ShardMap

LOG = logging.getLogger(__name__)


class Role(Protocol):
    """What actor and critic are to the loop."""

    def handle(self, command: Command, tensors: Tensors) -> Answer:
        """Run `command` on this rank, with this rank's tensors. Called on all ranks, in the same order.

        Rank 0's data and metrics are the answer's. Values come from every data-parallel rank, in its shard's order.
        """
        ...


class Worker:
    """One rank. `connection` on rank 0 only."""

    def __init__(
        self, role: Role, exchange: Exchange, connection: RoleConnection | None, *, idle_s: float = 10.0
    ) -> None:
        assert (connection is not None) == (exchange.rank == 0), "rank 0 has the channel"
        self._role, self._exchange, self._connection = role, exchange, connection
        self._idle_s = min(idle_s, exchange.timeout_s / 4)
        self._shards = ShardMap(len(exchange.peers))  # filled on rank 0
        self._gone = False  # the controller: its place was taken by a Stop of our own

    def run(self) -> None:
        """Execute commands until Stop, or until the controller is gone.

        Raises:
            BrokenWorld: the ranks lost each other. Rank 0 has told the controller, if it could.
        """
        while True:
            command, parts = self._next()
            try:
                self._execute(command, parts)
            except BrokenWorld as error:
                self._report_broken(command, error)
                raise
            if isinstance(command, Stop):
                return

    def _next(self) -> tuple[Command, list[bytes] | None]:
        """The next command on every rank; on rank 0 also the packed tensors of each data-parallel rank."""
        while True:
            order, parts = self._order() if self._connection is not None else (None, None)
            try:
                order = self._exchange.share(order)
            except RuntimeError as error:
                raise BrokenWorld(f"rank {self._exchange.rank} lost rank 0 between commands: {error}") from error
            if order:
                return parse_command(order), parts

    def _order(self) -> tuple[bytes, list[bytes] | None]:
        """Rank 0: the next command as JSON, or b"" as a sign of life."""
        assert self._connection is not None
        try:
            request = self._connection.receive(timeout_s=self._idle_s)
        except (ControllerGone, ProtocolError) as error:
            LOG.warning("stopping: %s", error)
            self._gone = True
            return Stop().model_dump_json().encode(), None
        if request is None:
            return b"", None
        command, tensors = request
        try:
            parts = [pack(part) for part in self._shards.split(command, tensors)]
        except ValueError as error:
            self._connection.fail(error)
            return b"", None
        return json.dumps(command.model_dump(mode="json")).encode(), parts

    def _execute(self, command: Command, parts: list[bytes] | None) -> None:
        answer, failure = Answer(), None
        tensors = self._scatter(parts) if command.inputs else NO_TENSORS
        try:
            if not isinstance(command, Stop):
                answer = self._role.handle(command, tensors)
        except Exception as error:  # noqa: BLE001  (a named border: a rank's failure becomes the role's answer)
            LOG.exception("rank %d failed in %s", self._exchange.rank, command.name)
            failure = failure_of(error)
        failures = self._exchange.agree(failure)
        if isinstance(command, CriticValues) and not failures:
            answer = self._join(command, answer)
        self._forget(command, failed=bool(failures))
        if self._connection is not None and not self._gone:
            self._answer(command, answer, failures)

    def _scatter(self, parts: list[bytes] | None) -> Tensors:
        try:
            return unpack(self._exchange.scatter(parts))
        except RuntimeError as error:
            raise BrokenWorld(f"the tensors did not reach rank {self._exchange.rank}: {error}") from error

    def _join(self, command: CriticValues, answer: Answer) -> Answer:
        try:
            parts = self._exchange.collect(pack(answer.tensors))
        except RuntimeError as error:
            raise BrokenWorld(f"the values did not reach rank 0: {error}") from error
        return Answer(
            data=answer.data,
            metrics=answer.metrics,
            tensors=self._shards.join(command, [unpack(part) for part in parts]) if parts else NO_TENSORS,
        )

    def _forget(self, command: Command, *, failed: bool) -> None:
        """Rank 0's map follows the ranks: a dropped batch, and one that some rank could not load, are gone on all."""
        if isinstance(command, DropBatch):
            self._shards.forget(command.batch_id)
        if isinstance(command, LoadBatch) and failed:
            self._shards.forget(command.batch_id)
            self._role.handle(DropBatch(batch_id=command.batch_id), NO_TENSORS)

    def _answer(self, command: Command, answer: Answer, failures: tuple[RankFailure, ...]) -> None:
        assert self._connection is not None
        try:
            if failures:
                self._connection.fail(merged(failures, self._exchange.world_size))
            else:
                self._connection.reply(answer)
        except ProtocolError as error:  # the handler's answer is not what the command declares
            LOG.exception("the answer to %s is refused", command.name)
            self._connection.fail(error)
        except ControllerGone as error:
            LOG.warning("nobody takes the answer to %s: %s", command.name, error)

    def _report_broken(self, command: Command, error: BrokenWorld) -> None:
        LOG.error("rank %d ends: %s: %s", self._exchange.rank, command.name, error)
        if self._connection is None:
            return
        known = merged(self._exchange.posted(), self._exchange.world_size)
        reason = f"{known.message}; " if known.message else ""
        failure = Failure(kind="BrokenWorld", message=f"{reason}{error}", traceback=known.traceback)
        try:
            self._connection.fail(failure)
        except ControllerGone:
            LOG.warning("nobody takes the report that the role is broken")


def merged(failures: tuple[RankFailure, ...], world_size: int) -> Failure:
    """One failure that names the ranks, and what each said if they differ."""
    if not failures:
        return Failure(kind="RuntimeError", message="")
    by_text: dict[str, list[int]] = {}
    for item in failures:
        by_text.setdefault(f"{item.failure.kind}: {item.failure.message}", []).append(item.rank)
    lines = [f"{_ranks(ranks, world_size)}: {text}" for text, ranks in by_text.items()]
    first = failures[0].failure
    return Failure(kind=first.kind, message="; ".join(lines), traceback=first.traceback)


def _ranks(ranks: list[int], world_size: int) -> str:
    if len(ranks) == world_size:
        return "all ranks" if world_size > 1 else "rank 0"
    return f"rank {', '.join(map(str, ranks))} of {world_size}"
