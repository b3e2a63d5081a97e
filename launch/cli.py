"""The command `sao`. Exit status: 0 done; 2 something a person must change; 130, 143 by a signal; 1 the run failed, a
benchmark missed a bar, or what was planned does not fit.

Starts fast: a command imports what it needs when it is known to be wanted.
"""

import argparse
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from launch import bounded

_DESCRIPTION = "Single-rollout asynchronous optimization of language models on Megatron-core and SGLang."
_EPILOG = """\
examples:
  sao train configs/quickstart.toml
  sao train configs/quickstart.toml run.directory=runs/lag0 rollout.max_lag=0 actor.optimizer.learning_rate=1e-4
  sao plan configs/glm-5.2.toml
  sao plan configs/glm-5.2.toml --search --gpus 528
  sao bench publish --json publish.json

A value is TOML; a bare word is a string. A previous run in run.directory is moved to run.directory.<n>.
"""
_CONFIG = """
CONFIG is a TOML file: which model, how GPUs are shared, prompts, episodes, rewards; docs/config.md lists every key.
  configs/quickstart.toml            a tiny model on two CPU cores
  configs/qwen3-30b-a3b-math.toml    a model on 8-GPU nodes; others are beside it
More: sao {command} --help
"""


class _Parser(argparse.ArgumentParser):
    """An error says what the missing file would be; exit status 2."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        command = self.prog.partition(" ")[2]
        explained = _CONFIG.format(command=command) if "CONFIG" in message else "\n"
        self.exit(2, f"{self.prog}: error: {message}{explained}")


def main() -> NoReturn:
    """The entry point. Nothing waits for threads that user code has left behind."""
    bounded.leave(command(sys.argv[1:]))


def command(arguments: Sequence[str]) -> int:
    """One command; its exit status."""
    options = parse_arguments(arguments)
    run = {"train": _train, "plan": _plan, "bench": _bench}[options.command]
    try:
        return run(options)
    except ValueError as error:
        return _fail(str(error), 2)
    except RuntimeError as error:
        return _fail(str(error), 1)
    except KeyboardInterrupt:  # nothing is started yet
        return _fail("stopped by SIGINT", 128 + signal.SIGINT)
    except bounded.Interrupted as error:
        return _fail(f"{error}; every process of the run has ended", 128 + error.number)


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(
        prog="sao", description=_DESCRIPTION, epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action=_Version, help="show versions, of the libraries too, and exit")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    train = commands.add_parser("train", help="train by a TOML file, all processes on this machine")
    plan = commands.add_parser("plan", help="GPUs, nodes and memory that a TOML file needs; nothing is started")
    for each in (train, plan):
        each.add_argument("config", type=Path, metavar="CONFIG", help="TOML file, see configs/")
        each.add_argument(
            "overrides", nargs="*", default=(), metavar="key.path=value", help="replaces what the file says"
        )
    plan.add_argument("--json", type=_new_file, metavar="FILE", help="write the plan there")
    plan.add_argument("--search", action="store_true", help="find layouts: for the fewest GPUs, or for --gpus")
    plan.add_argument("--gpus", type=int, metavar="N", help="with --search: how many there are")
    bench = commands.add_parser("bench", help="measure this machine; exit status 1 when a bar is missed")
    if arguments and arguments[0] == "bench":
        _add_benches(bench, arguments)
    options, others = parser.parse_known_args(arguments)
    if options.command == "bench" or any(other.startswith("-") for other in others):
        parser.parse_args(arguments)  # says which it does not know
    else:
        options.overrides = [*options.overrides, *others]  # argparse takes none that follows an option
    return options


def _new_file(text: str) -> Path:
    """What takes minutes is not lost at its end for want of a directory."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a directory: give a file")
    if not os.access(path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"cannot write {text}: {path.parent} is no directory that can be written to")
    return path


class _Version(argparse.Action):
    def __init__(self, option_strings: Sequence[str], dest: str, help: str) -> None:
        super().__init__(option_strings, dest, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from launch.versions import versions

        print(versions())
        parser.exit()


def _add_benches(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """Every bench by name; the arguments of the one that is called."""
    from launch.benches import bench, benches

    subparsers = parser.add_subparsers(dest="bench", required=True, metavar="NAME")
    for name, summary in benches().items():
        each = subparsers.add_parser(name, help=summary)
        each.add_argument("--json", type=_new_file, metavar="FILE", help="write every case there")
        if name in arguments:
            bench(name).add_arguments(each)


def _train(options: argparse.Namespace) -> int:
    from launch.checks import check
    from megatron_sao.config import load

    config = load(options.config, options.overrides)
    sys.path.insert(0, os.getcwd())  # import paths of the configuration may name a user's own module
    check(config)
    from launch.train import train  # takes seconds: after what can fail before it

    train(config)
    return 0


def _plan(options: argparse.Namespace) -> int:
    """Show the tables, write the JSON. What a search finds fits."""
    if options.gpus is not None and not options.search:
        raise ValueError("--gpus goes with --search: a plan alone is of the layouts in the file")
    if options.search:
        from launch.search_table import search_and_show

        search_and_show(options.config, options.overrides, options.gpus, options.json)
        return 0
    from launch.plan_table import plan_and_show

    return 0 if plan_and_show(options.config, options.overrides, options.json) else 1


def _bench(options: argparse.Namespace) -> int:
    """Measure, show the table, write the JSON."""
    from launch.benches import bench

    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    report = bench(options.bench).run(options)
    report.show()
    if options.json is not None:
        report.write(options.json)
    return 1 if report.num_missed else 0


def _fail(message: str, status: int) -> int:
    sys.stderr.write(f"sao: error: {message}\n")
    return status


if __name__ == "__main__":
    main()
