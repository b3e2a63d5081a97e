"""One rank of a role, as a process: `python -m megatron_sao.roles.main`, its RankSpec as JSON on stdin.

It ends with status 0 after Stop or when the controller is gone, 2 when its specification is wrong, 3 when its ranks
lost each other, 1 on anything else; by SIGTERM at once; and when its parent process ends.
"""

import ctypes
import logging
import os
import signal
import sys

import torch

from megatron_sao.channel import RoleConnection, connect
from megatron_sao.megatron.parallel import Parallel, initialize
from megatron_sao.megatron.platform import Platform, install
from megatron_sao.roles.actor import build_actor
from megatron_sao.roles.critic import build_critic
from megatron_sao.roles.exchange import BrokenWorld, Exchange, deadlines
from megatron_sao.roles.spec import ActorSpec, RankSpec, parse_spec
from megatron_sao.roles.trained import Building
from megatron_sao.roles.worker import Role, Worker

LOG = logging.getLogger(__name__)
_PR_SET_PDEATHSIG = 1


def main() -> None:
    status = 1
    try:
        spec = parse_spec(sys.stdin.read())
        die_with(spec.parent_pid)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        logging.basicConfig(
            level=logging.INFO, format=f"%(asctime)s {spec.role}[{spec.rank}] %(levelname)s %(message)s"
        )
        run(spec)
        status = 0
    except ValueError as error:
        LOG.error("%s", error)
        status = 2
    except BrokenWorld as error:
        LOG.error("%s", error)
        status = 3
    except Exception:
        LOG.exception("this rank ends")
    # Groups with a lost peer would wait for it in their destructors: no interpreter shutdown.
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def run(spec: RankSpec) -> None:
    """Join the role's world, then execute commands until the end."""
    config, meeting = spec.config, spec.meeting
    times = deadlines(config.command_timeout_s, meeting.grace_s)
    torch.set_num_threads(config.num_threads)
    torch.manual_seed(spec.seed)
    platform = install()
    parallel = initialize(
        config.layout,
        rank=spec.rank,
        init_method=meeting.init_method,
        timeout_s=times.collective_s,
        platform=platform,
        seed=spec.seed,
    )
    exchange = Exchange.create(data_rank=parallel.data_rank, timeout_s=times.control_s, grace_s=times.grace_s)
    connection = _connect(spec)
    role = Building(lambda: build(spec, parallel, platform, connection))
    Worker(role, exchange, connection).run()


def build(spec: RankSpec, parallel: Parallel, platform: Platform, connection: RoleConnection | None) -> Role:
    if isinstance(spec, ActorSpec):
        cancelled = connection.interrupted if connection is not None else _never
        return build_actor(spec, parallel, platform, cancelled)
    return build_critic(spec, parallel, platform)


def die_with(parent_pid: int) -> None:
    """Be killed when the process that started this one ends, however that comes."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl failed")
    if os.getppid() != parent_pid:
        raise RuntimeError(f"the process {parent_pid} that started this rank is gone")


def _connect(spec: RankSpec) -> RoleConnection | None:
    if spec.rank:
        return None
    meeting = spec.meeting
    key = bytes.fromhex(meeting.key)
    return connect(meeting.host, meeting.port, role=spec.role, key=key, timeout_s=meeting.timeout_s)


def _never() -> bool:
    return False


if __name__ == "__main__":
    main()
