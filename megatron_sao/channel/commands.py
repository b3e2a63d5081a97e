"""Commands from the controller to a role, and what a role answers: typed records, checked at birth on both sides.

Axis letters: T all tokens, A action tokens, N trajectories. Arrays of A run trajectory by trajectory, in the order of
the batch's `trajectory_ids`, whatever the packing. A log-prob or value of token t is the one read before t is emitted.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, JsonValue, TypeAdapter, ValidationError, model_validator

from megatron_sao.channel.errors import ProtocolError
from megatron_sao.metrics import Metric
from megatron_sao.types import BatchPlan, PublishPlan

Tensors = Mapping[str, NDArray[Any]]
NO_TENSORS: Tensors = MappingProxyType({})
NonNegative = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True, slots=True)
class TensorRule:
    """One dimension of one dtype. Tensors whose rules share an axis letter have the same length."""

    dtype: str
    axis: str


Rules = Mapping[str, TensorRule]


class Command(BaseModel):
    """Base of all commands. `inputs` and `outputs` say which tensors travel with it and come back."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    inputs: ClassVar[Rules] = {}
    outputs: ClassVar[Rules] = {}

    @property
    def name(self) -> str:
        return str(getattr(self, "kind"))  # noqa: B009  (declared by every subclass)

    def check_inputs(self, tensors: Tensors) -> None:
        """Raises ProtocolError when `tensors` are not exactly those of `inputs`."""
        _check(f"{self.name} takes", self.inputs, tensors)

    def check_outputs(self, tensors: Tensors) -> None:
        """Raises ProtocolError when `tensors` are not exactly those of `outputs`."""
        _check(f"the answer to {self.name} has", self.outputs, tensors)


class Describe(Command):
    """Answers when the role is built. data: what it runs on (layer spec, attention, optimizer, sizes, freezing)."""

    kind: Literal["describe"] = "describe"


class LoadBatch(Command):
    """Tokens of one batch, once. A role keeps at most two batches."""

    kind: Literal["load_batch"] = "load_batch"
    batch_id: NonNegative
    trajectory_ids: tuple[str, ...]  # [N]
    plan: tuple[tuple[tuple[int, ...], ...], ...]  # BatchPlan.ranks, for this role's layout
    inputs: ClassVar[Rules] = {
        "offsets": TensorRule("int64", "N+1"),
        "token_ids": TensorRule("int32", "T"),
        "is_action": TensorRule("bool", "T"),
        "rollout_logprobs": TensorRule("float32", "T"),
        "version": TensorRule("int32", "T"),
    }

    @model_validator(mode="after")
    def the_plan_holds_every_trajectory_once(self) -> "LoadBatch":
        BatchPlan(ranks=self.plan)
        planned = sum(len(row) for rank in self.plan for row in rank)
        if planned != len(self.trajectory_ids) or len(set(self.trajectory_ids)) != planned:
            raise ValueError(f"{planned} planned trajectories for {len(set(self.trajectory_ids))} distinct ids")
        return self

    def check_inputs(self, tensors: Tensors) -> None:
        Command.check_inputs(self, tensors)
        offsets, num_tokens = tensors["offsets"], len(tensors["token_ids"])
        if len(offsets) != len(self.trajectory_ids) + 1:
            raise ProtocolError(f"load_batch: {len(offsets)} offsets for {len(self.trajectory_ids)} trajectories")
        if offsets[0] != 0 or offsets[-1] != num_tokens or (np.diff(offsets) < 2).any():
            raise ProtocolError(
                f"load_batch: offsets must rise by at least 2 from 0 to the {num_tokens} tokens, not {offsets}"
            )


class DropBatch(Command):
    """Forget a batch. One that is not there is no error: a drop may be repeated."""

    kind: Literal["drop_batch"] = "drop_batch"
    batch_id: NonNegative


class CriticUpdate(Command):
    """One optimizer update of the value model. metrics: critic/*."""

    kind: Literal["critic_update"] = "critic_update"
    batch_id: NonNegative
    inputs: ClassVar[Rules] = {"targets": TensorRule("float32", "A")}


class CriticValues(Command):
    """Values of the batch's action tokens under the current critic."""

    kind: Literal["critic_values"] = "critic_values"
    batch_id: NonNegative
    outputs: ClassVar[Rules] = {"values": TensorRule("float32", "A")}


class ActorUpdate(Command):
    """One optimizer update of the policy. metrics: policy/*, lag/*."""

    kind: Literal["actor_update"] = "actor_update"
    batch_id: NonNegative
    version: NonNegative  # being trained from
    inputs: ClassVar[Rules] = {"advantages": TensorRule("float32", "A")}


class Score(Command):
    """Log-prob of token t+1 given tokens 0..t, under the actor's current weights, for one sequence."""

    kind: Literal["score"] = "score"
    inputs: ClassVar[Rules] = {"token_ids": TensorRule("int32", "T")}
    outputs: ClassVar[Rules] = {"logprobs": TensorRule("float32", "T-1")}


class PublishCommand(Command):
    """Base of what the actor's sender executes."""


class PublishPlanning(PublishCommand):
    """data: the PublishPlan (for `publish_plan_from`). `full`: frozen tensors too; `direct`: each from its owner."""

    kind: Literal["publish_plan"] = "publish_plan"
    full: bool
    bucket_bytes: Positive
    direct: bool = False


class PublishListen(PublishCommand):
    """Rank 0 opens the store at which the update groups meet. data: {address, port, backend}."""

    kind: Literal["publish_listen"] = "publish_listen"


class PublishJoin(PublishCommand):
    """Rank r joins the update group `groups[r]` as its rank 0; the engines join all of them at the same time."""

    kind: Literal["publish_join"] = "publish_join"
    groups: dict[NonNegative, str]  # by source: a rank of the actor that broadcasts
    world_size: Annotated[int, Field(ge=2)]
    address: str
    port: Positive
    timeout_s: Seconds


class PublishPrepare(PublishCommand):
    """Gather and flatten bucket number `bucket` of the plan on its source."""

    kind: Literal["publish_prepare"] = "publish_prepare"
    bucket: NonNegative
    timeout_s: Seconds


class PublishSend(PublishCommand):
    """Broadcast the prepared bucket, prepare the next one meanwhile. data: {num_bytes, gather_s, flatten_s, send_s}."""

    kind: Literal["publish_send"] = "publish_send"
    bucket: NonNegative
    timeout_s: Seconds


class PublishLeave(PublishCommand):
    """Destroy the update groups, in whatever state they are. Also the way to cancel a publish."""

    kind: Literal["publish_leave"] = "publish_leave"


class Export(Command):
    """Write an HF directory: complete or not there at all."""

    kind: Literal["export"] = "export"
    directory: str


class Stop(Command):
    """Answered, then the role ends with exit status 0."""

    kind: Literal["stop"] = "stop"


AnyCommand = Annotated[
    Describe
    | LoadBatch
    | DropBatch
    | CriticUpdate
    | CriticValues
    | ActorUpdate
    | Score
    | PublishPlanning
    | PublishListen
    | PublishJoin
    | PublishPrepare
    | PublishSend
    | PublishLeave
    | Export
    | Stop,
    Field(discriminator="kind"),
]
_COMMANDS: TypeAdapter[Command] = TypeAdapter(AnyCommand)
_PLANS: TypeAdapter[PublishPlan] = TypeAdapter(PublishPlan)


def parse_command(text: str | bytes) -> Command:
    """A command from its JSON. Raises ProtocolError on an unknown kind, field or value."""
    try:
        return _COMMANDS.validate_json(text)
    except ValidationError as error:
        raise ProtocolError(f"not a command of this channel: {explain(error)}") from None


def explain(error: ValidationError) -> str:
    """A validation error on one line."""
    return "; ".join(f"{'.'.join(map(str, e['loc'])) or 'value'}: {e['msg']}" for e in error.errors())


def publish_plan_data(plan: PublishPlan) -> dict[str, JsonValue]:
    """The plan as the `data` of an answer."""
    data: dict[str, JsonValue] = _PLANS.dump_python(plan, mode="json")
    return data


def publish_plan_from(data: Mapping[str, JsonValue]) -> PublishPlan:
    """The plan in the `data` of the answer to PublishPlanning. Raises ProtocolError when it is none."""
    try:
        return _PLANS.validate_python(dict(data))
    except ValidationError as error:
        raise ProtocolError(f"not a publish plan: {explain(error)}") from None


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What a role returns from a command."""

    data: Mapping[str, JsonValue] = field(default_factory=dict)
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    tensors: Tensors = field(default_factory=dict)


def _check(what: str, rules: Rules, tensors: Tensors) -> None:
    if set(rules) != set(tensors):
        raise ProtocolError(f"{what} tensors {sorted(rules)}, not {sorted(tensors)}")
    lengths: dict[str, tuple[str, int]] = {}
    for name, rule in rules.items():
        tensor = tensors[name]
        if tensor.dtype.name != rule.dtype or tensor.ndim != 1:
            raise ProtocolError(
                f"{what} {name} as {rule.dtype}[{rule.axis}], not {tensor.dtype.name}{list(tensor.shape)}"
            )
        first, length = lengths.setdefault(rule.axis, (name, len(tensor)))
        if len(tensor) != length:
            raise ProtocolError(f"{what} {name}[{rule.axis}] as long as {first}: {len(tensor)} against {length}")
