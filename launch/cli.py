"""The command `sao`. Exit status: 0 done; 2 something a person must change; 130, 143 by a signal; 1 the run failed, a
benchmark missed a bar, or what was planned does not fit."""

import argparse
import logging
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from rich.console import Console

from launch import bounded
from launch.local import check, run_locally
from launch.run_directory import LOG_DIRECTORY, run_directory
from megatron_sao.config import Config, load
from megatron_sao.controller.report import summary_table
from megatron_sao.controller.run import Work, load_work
from tools.bench import publish, step

BENCHES = {"publish": publish, "step": step}
LOG = logging.getLogger(__name__)
CONTROLLER_LOG = "controller.log"
FORCE_SHARE = 0.8  # of the shutdown timeout; the rest is for the processes to be killed
_EPILOG = """\
examples:
  sao train configs/quickstart.toml
  sao train configs/quickstart.toml run.directory=runs/lag0 rollout.max_lag=0 actor.optimizer.learning_rate=1e-4
  sao plan configs/glm-5.2.toml
  sao bench publish --json publish.json

A value is TOML; a bare word is a string. A previous run in run.directory is moved to run.directory.<n>.
"""


def main() -> NoReturn:
    """The entry point. Nothing waits for threads that user code has left behind."""
    bounded.leave(command(sys.argv[1:]))


def command(arguments: Sequence[str]) -> int:
    """One command; its exit status."""
    options = parse_arguments(arguments)
    if options.command == "bench":
        return _bench(options)
    if options.command == "plan":
        return _plan(options)
    try:
        config = load(options.config, options.overrides)
        sys.path.insert(0, os.getcwd())  # import paths of the configuration may name a user's own module
        check(config)
        work = _load(config)
        with run_directory(config) as directory:
            _log_to(directory / LOG_DIRECTORY / CONTROLLER_LOG)
            return _train(config, directory, work)
    except ValueError as error:
        return _fail(str(error), 2)
    except KeyboardInterrupt:  # nothing is started yet
        return _fail("stopped by SIGINT", 128 + signal.SIGINT)
    except bounded.Interrupted as error:
        return _fail(f"{error}; every process of the run has ended", 128 + error.number)


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="sao",
        description="Single-rollout asynchronous optimization of language models on Megatron-core and SGLang.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    train = commands.add_parser("train", help="train by a TOML file, all processes on this machine")
    plan = commands.add_parser("plan", help="GPUs, nodes and memory that a TOML file needs; nothing is started")
    for each in (train, plan):
        each.add_argument("config", type=Path, metavar="CONFIG", help="TOML file, see configs/")
        each.add_argument("overrides", nargs="*", metavar="key.path=value", help="replaces what the file says")
    plan.add_argument("--json", type=Path, metavar="FILE", help="write the plan there")
    bench = commands.add_parser("bench", help="measure this machine; exit status 1 when a bar is missed")
    benches = bench.add_subparsers(dest="bench", required=True, metavar="NAME")
    for name, module in BENCHES.items():
        each = benches.add_parser(name, help=(module.__doc__ or "").splitlines()[0])
        each.add_argument("--json", type=Path, metavar="FILE", help="write every case there")
        module.add_arguments(each)
    return parser.parse_args(arguments)


def _plan(options: argparse.Namespace) -> int:
    """Show the tables, write the JSON. Megatron-core is imported for this command alone: other ones start without it,
    and its warnings are about this machine, not about those that are planned for."""
    with warnings.catch_warnings(action="ignore"):
        from launch.plan_table import plan_and_show
    try:
        fits = plan_and_show(options.config, options.overrides, options.json)
    except ValueError as error:
        return _fail(str(error), 2)
    return 0 if fits else 1


def _bench(options: argparse.Namespace) -> int:
    """Measure, show the table, write the JSON."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    try:
        report = BENCHES[options.bench].run(options)
    except ValueError as error:
        return _fail(str(error), 2)
    except RuntimeError as error:
        return _fail(str(error), 1)
    except bounded.Interrupted as error:
        return _fail(f"{error}; every process of the benchmark has ended", 128 + error.number)
    except KeyboardInterrupt:
        return _fail("stopped by SIGINT", 128 + signal.SIGINT)
    report.show()
    if options.json is not None:
        report.write(options.json)
    return 1 if report.num_missed else 0


def _load(config: Config) -> Work:
    try:
        return load_work(config)
    except ValueError:
        raise
    except Exception as error:  # a border: modules that somebody else wrote
        traceback.print_exc()
        raise ValueError(f"loading prompts, episode and reward: {type(error).__name__}: {error}") from error


def _train(config: Config, directory: Path, work: Work) -> int:
    """Run to the end; the error of a run in one paragraph, its traceback in the controller's log."""
    running = run_locally(config, directory, work)
    try:
        summary = bounded.run(running, force_after_s=config.run.shutdown_timeout_s * FORCE_SHARE)
    except bounded.Interrupted as error:
        LOG.info("%s", error)
        raise
    except ValueError:
        LOG.debug("the run ends", exc_info=True)
        raise
    except Exception as error:  # noqa: BLE001  (the outermost border: what a person sees of a failed run)
        LOG.debug("the run ends", exc_info=True)
        log = directory / LOG_DIRECTORY / CONTROLLER_LOG
        return _fail(f"{type(error).__name__}: {error}\nEverything is stopped. More is in {log}", 1)
    Console().print(summary_table(summary))
    return 0


class _StandardError(logging.StreamHandler):  # type: ignore[type-arg]
    """Whatever stderr is at the moment: a live progress display puts itself in its place."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> object:
        return sys.stderr

    @stream.setter
    def stream(self, value: object) -> None:
        raise AssertionError("stderr is what it is")


def _log_to(path: Path) -> None:
    """Everything into the controller's log; to a terminal what is started and warnings, the display says the rest."""
    to_file = logging.FileHandler(path, encoding="utf-8")
    to_file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    to_stderr = _StandardError()
    to_stderr.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    to_stderr.setLevel(logging.INFO)
    if sys.stderr.isatty():
        to_stderr.addFilter(lambda record: record.levelno >= logging.WARNING or ".controller." not in record.name)
    for name in ("megatron_sao", "launch"):
        logger = logging.getLogger(name)
        logger.handlers = [to_file, to_stderr]
        logger.setLevel(logging.DEBUG)
        logger.propagate = False


def _fail(message: str, status: int) -> int:
    sys.stderr.write(f"sao: error: {message}\n")
    return status


if __name__ == "__main__":
    main()
