"""Networks between a trainer and its engines: loopback, or two network namespaces and a shaped link between them.

A shaped link is a veth pair with a token bucket (`tc ... tbf`) on the egress of both ends, which is what a cluster's
network looks like: it, and not the copying of memory, bounds a transfer. It exists as root on Linux only. Both ends lie
inside the namespaces, so that removing these removes everything; they carry the id of the process that made them, and
those of a process that is gone are removed at the next start.
"""

import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel, ConfigDict

NAMESPACES = Path("/run/netns")
NAME = re.compile(r"sao-bench-(\d+)-[te]")
SHAPED = re.compile(r"shaped-(\d+)gbit")
INTERFACE = "sao0"  # the same name at both ends
HOSTS = ("192.0.2.1", "192.0.2.2")  # of trainer and engine; seen inside the namespaces only
BURST_BYTES = 2**20
LATENCY = "50ms"  # of a full queue
COMMAND_S = 30.0
POLL_S = 0.05
SLACK = 1.05  # a rate this much above the shaped one shows that nothing is shaped


class Unavailable(RuntimeError):
    """This machine cannot have what a case needs; the message says why."""


class Side(BaseModel):
    """Where processes of one side are started and meet."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    host: str = "127.0.0.1"
    interface: str = "lo"
    namespace: str | None = None  # None: that of the benchmark itself

    @property
    def prefix(self) -> tuple[str, ...]:
        """Of a command that is to run on this side."""
        return ("ip", "netns", "exec", self.namespace) if self.namespace else ()


class Link(BaseModel):
    """Both sides of one network."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    trainer: Side = Side()
    engine: Side = Side()

    def shape(self, network: str) -> None:
        """Give both directions the rate of `network`, while processes use them; nothing on loopback."""
        rate = bits_per_s(network)
        if rate is None:
            return
        for side in (self.trainer, self.engine):
            assert side.namespace is not None, "only a link between namespaces is shaped"
            limits = ("rate", f"{rate}bit", "burst", str(BURST_BYTES), "latency", LATENCY)
            _run("tc", "-n", side.namespace, "qdisc", "replace", "dev", INTERFACE, "root", "tbf", *limits)


def bits_per_s(network: str) -> int | None:
    """The rate of `shaped-<N>gbit`; None of `loopback`. ValueError for another name."""
    if network == "loopback":
        return None
    if match := SHAPED.fullmatch(network):
        return int(match[1]) * 10**9
    raise ValueError(f"network {network!r} is neither loopback nor shaped-<N>gbit")


def check_rate(network: str, num_bytes: int, seconds: float) -> None:
    """RuntimeError when `num_bytes` went through faster than the network allows: it is not shaped."""
    rate = bits_per_s(network)
    if rate is not None and num_bytes - BURST_BYTES > SLACK * rate / 8 * seconds:
        raise RuntimeError(
            f"{num_bytes} bytes in {seconds:.4f} s are {8e-9 * num_bytes / seconds:.2f} Gbit/s on {network}: the "
            "network is not shaped"
        )


@contextlib.contextmanager
def link(network: str) -> Iterator[Link]:
    """The network, removed at the end whatever happens.

    Raises:
        Unavailable: a shaped network cannot be had here.
    """
    if bits_per_s(network) is None:
        yield Link()
        return
    check_available()
    remove_leftovers()
    sides = tuple(
        Side(host=host, interface=INTERFACE, namespace=f"sao-bench-{os.getpid()}-{letter}")
        for host, letter in zip(HOSTS, "te", strict=True)
    )
    made = Link(trainer=sides[0], engine=sides[1])
    try:
        _make(made, network)
        yield made
    finally:
        for side in sides:
            _remove(str(side.namespace))


def check_available() -> None:
    """Raises Unavailable."""
    if sys.platform != "linux":
        raise Unavailable(f"shaped networks need Linux, this is {sys.platform}")
    if os.geteuid() != 0:
        raise Unavailable("shaped networks need root, for network namespaces")
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise Unavailable(f"shaped networks need {' and '.join(missing)} (package iproute2)")


def remove_leftovers() -> None:
    """Remove the namespaces of benchmarks that were killed."""
    for name in namespaces():
        match = NAME.fullmatch(name)
        if match and not Path(f"/proc/{match[1]}").exists():
            _remove(name)


def namespaces() -> list[str]:
    """Names of all namespaces that benchmarks have made and not removed yet."""
    names = [path.name for path in NAMESPACES.iterdir()] if NAMESPACES.is_dir() else []
    return [name for name in names if NAME.fullmatch(name)]


def _make(made: Link, network: str) -> None:
    sides = (made.trainer, made.engine)
    trainer, engine = (str(side.namespace) for side in sides)
    try:
        for name in (trainer, engine):
            _run("ip", "netns", "add", name)
        _run(*f"ip link add {INTERFACE} netns {trainer} type veth peer name {INTERFACE} netns {engine}".split())
        for side in sides:
            name = str(side.namespace)
            _run("ip", "-n", name, "link", "set", "lo", "up")
            _run("ip", "-n", name, "addr", "add", f"{side.host}/30", "dev", INTERFACE)
            _run(*f"ip -n {name} link set {INTERFACE} addrgenmode none up".split())  # no IPv6: gloo takes what is first
        _wait_for_carrier(trainer, engine)
        made.shape(network)
    except (RuntimeError, OSError) as error:
        raise Unavailable(f"shaped networks cannot be made here: {error}") from error


def _wait_for_carrier(*names: str) -> None:
    end_s = time.monotonic() + COMMAND_S
    while not all("LOWER_UP" in _run("ip", "-n", name, "link", "show", INTERFACE) for name in names):
        if time.monotonic() > end_s:
            raise RuntimeError(f"the link between {' and '.join(names)} did not come up within {COMMAND_S:g} s")
        time.sleep(POLL_S)


def _remove(name: str) -> None:
    if (NAMESPACES / name).exists():
        _run("ip", "netns", "del", name)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S, check=False)
    if done.returncode:
        raise RuntimeError(f"`{' '.join(command)}` ended with status {done.returncode}: {done.stderr.strip()}")
    return done.stdout
