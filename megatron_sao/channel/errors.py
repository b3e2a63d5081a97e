"""What can go wrong on a channel, each with the role and the command it happened to."""


class ProtocolError(RuntimeError):
    """Bytes or fields that are not the channel's: oversize, torn, of an unknown kind, with the wrong tensors."""


class HandshakeError(RuntimeError):
    """The other side did not prove that it knows this run's key."""


class ControllerGone(RuntimeError):
    """Seen by a role: the controller closed the channel. A reason to stop, not a failure of the role."""


class ChannelError(RuntimeError):
    """Base of what a call can raise. `role` and `command` say where."""

    def __init__(self, role: str, command: str, message: str) -> None:
        super().__init__(message)
        self.role = role
        self.command = command


class RoleError(ChannelError):
    """The role answered with an error. It is alive and waits for the next command."""

    def __init__(self, role: str, command: str, *, kind: str, message: str, traceback: str = "") -> None:
        super().__init__(role, command, f"{role} failed in {command}: {kind}: {message}")
        self.kind = kind  # class name of the exception in the role
        self.message = message
        self.traceback = traceback  # text, of the failing rank


class RoleTimeout(ChannelError):
    """No answer before the deadline. The role may still be at work; a late answer is thrown away."""

    def __init__(self, role: str, command: str, timeout_s: float) -> None:
        super().__init__(role, command, f"{role} did not answer {command} within {timeout_s:g} s")
        self.timeout_s = timeout_s


class RoleDied(ChannelError):
    """The connection to the role is closed: its process ended, or was never there."""

    def __init__(self, role: str, command: str, reason: str = "its process ended or closed the channel") -> None:
        super().__init__(role, command, f"{role} is gone (in {command}): {reason}; see its log")
