"""The directory of one run: made, locked, and cleaned of what was never finished.

A previous run is moved aside to `<directory>.<n>`, whole: nothing is lost, and the same command can be given again. A
directory with anything else in it is refused, and so is one whose run is still going on.
"""

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from megatron_sao.config import Config

CONFIG_FILE = "config.json"  # the resolved configuration; its presence marks a directory as a run's
LOCK_FILE = ".lock"
LOG_DIRECTORY = "logs"


@contextlib.contextmanager
def run_directory(config: Config) -> Iterator[Path]:
    """The run's directory, empty but for its configuration and `logs/`, locked for this process.

    On the way out, whatever was being written when the run was stopped is removed: a file or a directory under its
    final name is complete.

    Raises:
        ValueError: the directory holds other files, a run that is going on, or a model that this run starts from; or
            it cannot be made.
    """
    directory = Path(config.run.directory)
    _check_models_stay(config, directory)
    try:
        moved = _move_aside(directory)
        (directory / LOG_DIRECTORY).mkdir(parents=True)
        lock = _lock(directory)
        (directory / CONFIG_FILE).write_text(config.model_dump_json(indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ValueError(f"run.directory = {str(directory)!r} cannot be used: {error}") from error
    if moved is not None:
        (directory / LOG_DIRECTORY / "previous.txt").write_text(f"the previous run is in {moved}\n", encoding="utf-8")
    try:
        yield directory
    finally:
        remove_unfinished(directory)
        lock.close()


def remove_unfinished(directory: Path) -> None:
    """Temporary names of the writers: `.<name>-<random>/` (exports), `.routed-experts/` and `<name>.partial`."""
    for path in directory.iterdir():
        if path.is_dir() and path.name.startswith("."):
            shutil.rmtree(path, ignore_errors=True)
        elif path.name.endswith(".partial"):
            path.unlink(missing_ok=True)


def _check_models_stay(config: Config, directory: Path) -> None:
    for key, path in (("model.path", config.model.path), ("critic.init", config.critic.init)):
        if Path(path).resolve().is_relative_to(directory.resolve()):
            raise ValueError(
                f"{key} = {path!r} lies in run.directory = {str(directory)!r}, which is moved aside when a run starts: "
                "give another run.directory"
            )


def _move_aside(directory: Path) -> Path | None:
    if not directory.exists() or (directory.is_dir() and not any(directory.iterdir())):
        return None
    if not _is_a_run(directory):
        raise ValueError(
            f"run.directory = {str(directory)!r} holds files that are no run's: give a new or empty directory"
        )
    _lock(directory).close()
    remove_unfinished(directory)  # of a run that was killed
    target = next(
        path for n in range(1, 1_000_000) if not (path := directory.with_name(f"{directory.name}.{n}")).exists()
    )
    os.rename(directory, target)
    return target


def _is_a_run(directory: Path) -> bool:
    try:
        recorded = json.loads((directory / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(recorded, dict) and "run" in recorded and (directory / LOG_DIRECTORY).is_dir()


def _lock(directory: Path) -> TextIO:
    """Held until the file is closed, or the process ends, however that comes."""
    lock = (directory / LOCK_FILE).open("w", encoding="utf-8")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise ValueError(f"run.directory = {str(directory)!r}: a run is going on in it; give another one") from None
    return lock
