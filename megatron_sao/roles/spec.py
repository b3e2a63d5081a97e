"""What one rank of a role is started with: JSON on its stdin, so that no key is in argv or in the environment."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from megatron_sao.channel.commands import explain
from megatron_sao.config import ActorConfig, CriticConfig, ModelConfig, NonNegativeInt, PositiveFloat, PositiveInt

Backend = Literal["gloo", "nccl"]


class Meeting(BaseModel):
    """Where the ranks find each other and the controller."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    init_method: str  # of torch.distributed: "file:///private/path", "tcp://host:port"
    host: str  # of the channel
    port: PositiveInt
    key: str = Field(pattern=r"^([0-9a-f]{2}){16,}$", repr=False)  # hex
    publish_host: str = "127.0.0.1"  # this machine, as the engines reach it
    timeout_s: PositiveFloat = 120.0  # to connect
    grace_s: PositiveFloat = 30.0  # how long a failed rank waits for the others to come out of the same command


class _RankSpec(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    rank: NonNegativeInt
    parent_pid: PositiveInt  # the rank ends when this process does
    meeting: Meeting
    model: ModelConfig
    seed: NonNegativeInt = 0


class ActorSpec(_RankSpec):
    role: Literal["actor"] = "actor"
    config: ActorConfig
    eps_low: PositiveFloat
    eps_high: PositiveFloat
    bucket_bytes: PositiveInt  # of a publish
    publish_backend: Backend | None = None  # of update groups; None: the world's own
    expert_directory: str | None = None  # of the recorded experts, where the actor replays them


class CriticSpec(_RankSpec):
    role: Literal["critic"] = "critic"
    config: CriticConfig


RankSpec = ActorSpec | CriticSpec
_SPECS: TypeAdapter[RankSpec] = TypeAdapter(Annotated[RankSpec, Field(discriminator="role")])


def parse_spec(text: str) -> RankSpec:
    """Raises ValueError naming what is wrong, without the key."""
    try:
        return _SPECS.validate_json(text)
    except ValidationError as error:
        raise ValueError(f"not the specification of a rank: {explain(error)}") from None
