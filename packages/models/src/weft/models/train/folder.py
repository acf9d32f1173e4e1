"""The folder of a run: making and locking; finding, keeping and removing checkpoints.

Used by the command before torch is imported, and by `Results` and `Saver` during the run.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from ..checkpoint.manifest import MANIFEST, DamagedCheckpoint, Manifest
from .metrics_file import METRICS, last_line

CHECKPOINT = "checkpoint"  # the final model, a folder for transformers; checkpoints during the run are checkpoint-STEP
NEW = f".{CHECKPOINT}.new"  # a complete final model about to replace CHECKPOINT
CONFIG = "config.toml"  # the run's configuration, the first file written into the folder


def check_new(folder: Path) -> None:
    """Raise ValueError if `folder` exists or cannot be made.

    The only reliable test is to make a folder: below a temporary folder in the nearest existing parent, this makes the
    missing part of the path, and removes all again.
    """
    try:
        if folder.exists():
            raise FileExistsError
        parent = next(path for path in folder.absolute().parents if path.exists())
        # A unique name, because another run may try the same folder at the same time.
        with TemporaryDirectory(prefix=".weft-", dir=parent) as trial:
            (trial / folder.absolute().relative_to(parent)).mkdir(parents=True)
    except OSError as error:
        raise _creation_error(folder, error) from None


def make_new(folder: Path) -> None:
    """Make the folder. Raises ValueError if the folder exists, perhaps just made by another run, or cannot be made."""
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise _creation_error(folder, error) from None


def _creation_error(folder: Path, error: OSError) -> ValueError:
    """The error for failing to make the output folder."""
    if isinstance(error, FileExistsError):
        return ValueError(
            f"the output folder {folder} exists; give another with --output, remove it, or resume its run with --resume"
        )
    return ValueError(f"the output folder {folder} cannot be made: {error.strerror}; give another with --output")


def check_resumable(folder: Path) -> None:
    """Raise ValueError unless the run in `folder` can be resumed.

    Refused: a folder without a run, a read-only folder, a complete run without checkpoints, and a run in progress.
    """
    if not folder.is_dir() or not ((folder / CONFIG).is_file() or all(_is_hidden(path) for path in folder.iterdir())):
        raise ValueError(f"{folder} is not the folder of a run; give another with --output")
    if not os.access(folder, os.W_OK):
        raise ValueError(f"{folder} is not writable; give another with --output")
    if (folder / CHECKPOINT).exists() and not checkpoints(folder):
        raise ValueError(
            f"the run in {folder} is complete, and kept no checkpoint to resume from; give another with --output"
        )
    os.close(lock(folder))


def _is_hidden(path: Path) -> bool:
    """Whether the name marks a temporary file or folder."""
    return path.name.startswith(".")


def lock(folder: Path) -> int:
    """Lock the folder for this run; return the open file descriptor that holds the lock.

    The lock ends when the descriptor is closed or the process ends.
    Raises ValueError if another run has the lock.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise ValueError(
            f"another run is writing to {folder}; wait until it ends, or give another folder with --output"
        ) from None
    return descriptor


def checkpoints(folder: Path) -> dict[int, Path]:
    """The checkpoints of a run by step, in ascending order."""
    steps = {
        int(match[1]): path
        for path in folder.glob("*")
        if (match := re.fullmatch(rf"{CHECKPOINT}-(0|[1-9][0-9]*)", path.name)) and path.is_dir()
    }
    return dict(sorted(steps.items()))


def find_checkpoint(folder: Path) -> Path:
    """The newest model in the folder of a run: a checkpoint, or the final model; `folder` if it holds neither.

    Commands call this function to accept the folder of a run or of a single checkpoint.
    Between a final model and a complete checkpoint, the last line of metrics.jsonl decides. The checkpoint is the
    newest if its step is the last, or if the run is not finished: a complete run may be resumed for more steps.
    A damaged checkpoint is returned only if there is no complete one and no final model.
    """
    saved, (newest, _) = checkpoints(folder), newest_complete(folder)
    if not (folder / CHECKPOINT).is_dir():
        return newest or next(reversed(saved.values()), folder)
    last = last_line(folder / METRICS)
    is_newer = newest is not None and last is not None and (last["done"] < 1 or saved.get(last["step"]) == newest)
    return newest if newest is not None and is_newer else folder / CHECKPOINT


def newest_complete(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest complete checkpoint of a run, or None; and the errors of all newer, damaged checkpoints.

    A checkpoint counts as complete if all files have the sizes stated in the manifest.
    """
    errors = []
    for path in reversed(checkpoints(folder).values()):
        try:
            Manifest.read(path)
        except DamagedCheckpoint as error:
            errors.append(str(error))
            continue
        return path, errors
    return None, errors


def rename_damaged_checkpoints(folder: Path, after: int) -> list[Path]:
    """Rename damaged checkpoints of steps after `after`, where this run starts, and return their new paths.

    Called at the start of every run, which can then save these steps again.
    Raises ValueError for a complete checkpoint among them, perhaps just written by another run.
    """
    newer = {step: path for step, path in checkpoints(folder).items() if step > after}
    for path in newer.values():
        with suppress(DamagedCheckpoint):
            Manifest.read(path)
            raise ValueError(
                f"{path} is newer than the checkpoint that this run resumed from; start it again with --resume"
            )
    return [_rename_damaged(path) for path in newer.values()]


def _rename_damaged(path: Path) -> Path:
    """Rename to the first free name PATH.damaged, PATH.damaged-1, ...; return the new path."""
    names = (f"{path.name}.damaged{f'-{count}' if count else ''}" for count in itertools.count())
    return path.rename(next(free for name in names if not (free := path.with_name(name)).exists()))


def find_to_resume(path: Path) -> Path:
    """The checkpoint to resume from: `path` itself, or the newest complete checkpoint of the run in `path`.

    Raises ValueError for a path that does not exist, for a run without a complete checkpoint, and as `Manifest.read`.
    """
    if not path.exists():
        raise ValueError(f"--resume {path} does not exist; give the folder of a run, or of a checkpoint")
    if (path / MANIFEST).exists() or not path.is_dir():
        Manifest.read(path)
        return path
    newest, errors = newest_complete(path)
    if newest is None:
        raise ValueError("; ".join([f"{path} has no checkpoint to resume from", *errors]))
    return newest


def remove_old(folder: Path, last: int, every: int) -> list[str]:
    """Remove the checkpoints of a run, except the `last` newest and every checkpoint at a multiple of `every` steps.

    last: 0 keeps all. every: 0 keeps no more than the newest.
    Returns a line for each failed removal.
    """
    steps = list(checkpoints(folder))
    old = [step for step in (steps[:-last] if last else []) if not every or step % every]
    return [line for step in old for line in remove(folder / f"{CHECKPOINT}-{step}")]


def remove(path: Path) -> list[str]:
    """Remove a folder; on failure return a line.

    The folder is renamed first: a half-removed folder never has the old name.
    """
    removed = _removed_name(path)
    try:
        path.rename(removed)
    except OSError as error:
        return [_removal_failure(path, error)]
    return _discard(removed)


def replace_folder(new: Path, folder: Path) -> list[str]:
    """Put the complete folder `new` in the place of `folder`, and remove the old folder.

    `tidy` finishes an exchange interrupted by a kill.
    Returns a line if the old folder could not be removed. Raises OSError if `new` could not be moved into place.
    """
    removed = _removed_name(folder)
    folder.rename(removed)
    new.rename(folder)
    return _discard(removed)


def _removed_name(path: Path) -> Path:
    """A free hidden name beside `path`, for a folder being removed. Leftovers of failed removals keep their names."""
    names = (f".{path.name}{f'.{count}' if count else ''}.removed" for count in itertools.count())
    return next(free for name in names if not os.path.lexists(free := path.with_name(name)))


def _discard(path: Path) -> list[str]:
    """Remove a folder, a file, or a link (not the target); on failure return a line."""
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    except OSError as error:
        shutil.rmtree(path, ignore_errors=True)  # remove as much as possible
        return [_removal_failure(path, error)]
    return []


def _removal_failure(path: Path, error: OSError) -> str:
    """The line about a failed removal."""
    return f"{path} could not be removed: {error.strerror}; remove it by hand"


def tidy(folder: Path) -> None:
    """Remove temporary folders left by a killed run, and finish an interrupted `replace_folder`.

    Called at the start of every run, new or resumed, under the folder's lock.
    """
    new = folder / NEW
    if new.is_dir() and not new.is_symlink() and not (folder / CHECKPOINT).exists():
        new.rename(folder / CHECKPOINT)
    for pattern in (NEW, f"*{CHECKPOINT}*.partial*", f".{CHECKPOINT}*.removed"):
        for path in folder.glob(pattern):
            _discard(path)
