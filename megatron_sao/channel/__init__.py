"""Request and reply between the controller and the roles: typed commands, arrays as safetensors, deadlines, a key.

Nothing is unpickled. `ChannelServer` is the controller's side, `connect` a role's, `LocalChannel` the twin in memory.
"""

from megatron_sao.channel.client import RoleConnection, connect, failure_of
from megatron_sao.channel.commands import (
    ActorUpdate,
    Answer,
    AnyCommand,
    Command,
    CriticUpdate,
    CriticValues,
    Describe,
    DropBatch,
    Export,
    LoadBatch,
    PublishJoin,
    PublishLeave,
    PublishListen,
    PublishPlanning,
    PublishPrepare,
    PublishSend,
    Score,
    Stop,
    Tensors,
    parse_command,
    publish_plan_data,
    publish_plan_from,
)
from megatron_sao.channel.errors import (
    ChannelError,
    ControllerGone,
    HandshakeError,
    ProtocolError,
    RoleDied,
    RoleError,
    RoleTimeout,
)
from megatron_sao.channel.frames import Failure, FrameLimits
from megatron_sao.channel.local import LocalChannel
from megatron_sao.channel.server import Channel, ChannelServer, TcpChannel

__all__ = [
    "ActorUpdate",
    "Answer",
    "AnyCommand",
    "Channel",
    "ChannelError",
    "ChannelServer",
    "Command",
    "ControllerGone",
    "CriticUpdate",
    "CriticValues",
    "Describe",
    "DropBatch",
    "Export",
    "Failure",
    "FrameLimits",
    "HandshakeError",
    "LoadBatch",
    "LocalChannel",
    "ProtocolError",
    "PublishJoin",
    "PublishLeave",
    "PublishListen",
    "PublishPlanning",
    "PublishPrepare",
    "PublishSend",
    "RoleConnection",
    "RoleDied",
    "RoleError",
    "RoleTimeout",
    "Score",
    "Stop",
    "TcpChannel",
    "Tensors",
    "connect",
    "failure_of",
    "parse_command",
    "publish_plan_data",
    "publish_plan_from",
]
