"""`sao train CONFIG`, after the configuration was found to be right: work that somebody else wrote, logs, the run.

Its imports take seconds (transformers, an HTTP client); `cli.py` imports it when nothing cheaper can fail any more.
"""

import logging
import sys
import traceback
from pathlib import Path

from rich.console import Console

from launch import bounded
from launch.local import run_locally
from launch.run_directory import LOG_DIRECTORY, run_directory
from megatron_sao.config import Config
from megatron_sao.controller.report import summary_table
from megatron_sao.controller.run import Work, load_work

LOG = logging.getLogger(__name__)
CONTROLLER_LOG = "controller.log"
FORCE_SHARE = 0.8  # of the shutdown timeout; the rest is for the processes to be killed


def train(config: Config) -> None:
    """Run to the end and show the summary.

    Raises:
        ValueError: what a person must change.
        RuntimeError: the run failed; its traceback is in the controller's log.
        Interrupted: a signal ended it, in order.
    """
    work = _load(config)
    with run_directory(config) as directory:
        _log_to(directory / LOG_DIRECTORY / CONTROLLER_LOG)
        _train(config, directory, work)


def _load(config: Config) -> Work:
    try:
        return load_work(config)
    except ValueError:
        raise
    except Exception as error:  # a border: modules that somebody else wrote
        traceback.print_exc()
        raise ValueError(f"loading prompts, episode and reward: {type(error).__name__}: {error}") from error


def _train(config: Config, directory: Path, work: Work) -> None:
    running = run_locally(config, directory, work)
    try:
        summary = bounded.run(running, force_after_s=config.run.shutdown_timeout_s * FORCE_SHARE)
    except bounded.Interrupted as error:
        LOG.info("%s", error)
        raise
    except ValueError:
        LOG.debug("the run ends", exc_info=True)
        raise
    except Exception as error:  # the outermost border: what a person sees of a failed run
        LOG.debug("the run ends", exc_info=True)
        log = directory / LOG_DIRECTORY / CONTROLLER_LOG
        message = f"{type(error).__name__}: {error}\nEverything is stopped. More is in {log}"
        raise RuntimeError(message) from error
    Console().print(summary_table(summary))


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
