"""Both sides prove that they know the run's key, without sending it (HMAC-SHA256 over both nonces and the role name).

    controller -> role   hello {nonce}
    role -> controller   claim {role, nonce, mac}
    controller -> role   welcome {mac}            or the connection is closed

This keeps other users and other runs of the machine out; it does not encrypt.
"""

import hashlib
import hmac
import secrets
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megatron_sao.channel.commands import explain
from megatron_sao.channel.errors import HandshakeError

MIN_KEY_BYTES = 16
_HEX = r"^[0-9a-f]{64}$"


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Hello(_Part):
    nonce: str = Field(pattern=_HEX)


class Claim(_Part):
    role: str = Field(pattern=r"^[a-z][a-z0-9_]{0,31}$")
    nonce: str = Field(pattern=_HEX)
    mac: str = Field(pattern=_HEX)


class Welcome(_Part):
    mac: str = Field(pattern=_HEX)


PartT = TypeVar("PartT", bound=_Part)


def new_nonce() -> str:
    return secrets.token_hex(32)


def check_key(key: bytes) -> bytes:
    if len(key) < MIN_KEY_BYTES:
        raise ValueError(f"a channel key has at least {MIN_KEY_BYTES} random bytes, this one has {len(key)}")
    return key


def parse(part: type[PartT], header: bytes) -> PartT:
    try:
        return part.model_validate_json(header)
    except ValidationError as error:
        raise HandshakeError(f"not a {part.__name__.lower()} of this channel: {explain(error)}") from None


def claim(key: bytes, role: str, hello: Hello) -> Claim:
    nonce = new_nonce()
    return Claim(role=role, nonce=nonce, mac=_mac(key, "role", role, hello.nonce, nonce))


def welcome(key: bytes, hello: Hello, claimed: Claim) -> Welcome:
    """The controller's proof. Raises HandshakeError when the role's own proof is wrong."""
    expected = _mac(key, "role", claimed.role, hello.nonce, claimed.nonce)
    if not hmac.compare_digest(expected, claimed.mac):
        raise HandshakeError(f"a peer that calls itself {claimed.role} does not know this run's key")
    return Welcome(mac=_mac(key, "controller", claimed.role, hello.nonce, claimed.nonce))


def check_welcome(key: bytes, hello: Hello, claimed: Claim, answer: Welcome) -> None:
    expected = _mac(key, "controller", claimed.role, hello.nonce, claimed.nonce)
    if not hmac.compare_digest(expected, answer.mac):
        raise HandshakeError("the controller does not know this run's key")


def _mac(key: bytes, side: str, role: str, *nonces: str) -> str:
    return hmac.new(key, "|".join((side, role, *nonces)).encode(), hashlib.sha256).hexdigest()
