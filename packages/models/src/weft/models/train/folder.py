"""The folder of a run: where one can be made, and the checkpoints in it. It is asked before torch is imported."""

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
from .logged import METRICS, last_line

CHECKPOINT = "checkpoint"  # the last one, for transformers; those on the way are checkpoint-STEP
NEW = f".{CHECKPOINT}.new"  # one that is whole, and takes the place of the last
CONFIG = "config.toml"  # of the run: what a folder begins with


def check_new(folder: Path) -> None:
    """Raises ValueError where `folder` is there, or cannot be made: one like it is, and removed, since nothing else tells."""
    try:
        if folder.exists():
            raise FileExistsError
        there = next(path for path in folder.absolute().parents if path.exists())
        # Under a name of its own: another run may be made there at the same time.
        with TemporaryDirectory(prefix=".weft-", dir=there) as trial:
            (trial / folder.absolute().relative_to(there)).mkdir(parents=True)
    except OSError as error:
        raise _not_made(folder, error) from None


def make_new(folder: Path) -> None:
    """Makes the folder. Raises ValueError where it is there, as when another run has made it just now, or cannot be made."""
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise _not_made(folder, error) from None


def _not_made(folder: Path, error: OSError) -> ValueError:
    if isinstance(error, FileExistsError):
        return ValueError(
            f"the output folder {folder} exists; give another with --output, or remove it; with --resume its run goes on"
        )
    return ValueError(f"the output folder {folder} cannot be made: {error.strerror}; give another with --output")


def check_again(folder: Path) -> None:
    """Raises ValueError where `folder` is of no run that can go on: of none, of one that goes on now, or not to be written."""
    if not folder.is_dir() or not ((folder / CONFIG).is_file() or all(_is_hidden(path) for path in folder.iterdir())):
        raise ValueError(f"{folder} is the folder of no run; give another with --output")
    if not os.access(folder, os.W_OK):
        raise ValueError(f"{folder} cannot be written; give another with --output")
    if (folder / CHECKPOINT).exists() and not checkpoints(folder):
        raise ValueError(
            f"the run in {folder} is done, and has kept no checkpoint to go on with; give another with --output"
        )
    os.close(lock(folder))


def _is_hidden(path: Path) -> bool:
    """As what is written aside."""
    return path.name.startswith(".")


def lock(folder: Path) -> int:
    """Keeps other runs out of a folder while the descriptor that it returns is open; it ends with this process.

    Raises ValueError where another run is in it.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise ValueError(
            f"another run writes into {folder}; wait until it ends, or give another with --output"
        ) from None
    return descriptor


def checkpoints(folder: Path) -> dict[int, Path]:
    """The checkpoints of a run by their steps, ascending."""
    found = {
        int(match[1]): path
        for path in folder.glob("*")
        if (match := re.fullmatch(rf"{CHECKPOINT}-(0|[1-9][0-9]*)", path.name)) and path.is_dir()
    }
    return dict(sorted(found.items()))


def find_checkpoint(folder: Path) -> Path:
    """The last checkpoint of the run whose folder that is; `folder` itself where it is none, as a checkpoint is.

    The folder for transformers is the last where the run came to its end and kept no checkpoint of its last step.
    """
    saved, (newest, _) = checkpoints(folder), newest_complete(folder)
    if not (folder / CHECKPOINT).is_dir():
        return newest or next(reversed(saved.values()), folder)
    last = last_line(folder / METRICS)
    is_newer = newest is not None and last is not None and (last["done"] < 1 or saved.get(last["step"]) == newest)
    return newest if newest is not None and is_newer else folder / CHECKPOINT


def newest_complete(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint of a run that is whole, as far as its files' sizes tell, and what is wrong with newer ones."""
    wrong = []
    for path in reversed(checkpoints(folder).values()):
        try:
            Manifest.read(path)
        except DamagedCheckpoint as error:
            wrong.append(str(error))
            continue
        return path, wrong
    return None, wrong


def set_aside(folder: Path, after: int) -> list[Path]:
    """Gives damaged checkpoints of steps after `after` another name, so that the run can save these steps; their new paths.

    Raises ValueError where one of them is whole, as when another run has written it meanwhile.
    """
    newer = {step: path for step, path in checkpoints(folder).items() if step > after}
    for path in newer.values():
        with suppress(DamagedCheckpoint):
            Manifest.read(path)
            raise ValueError(f"{path} is newer than what this run goes on from; start it again with --resume")
    return [_renamed(path) for path in newer.values()]


def _renamed(path: Path) -> Path:
    names = (f"{path.name}.damaged{f'-{count}' if count else ''}" for count in itertools.count())
    return path.rename(next(free for name in names if not (free := path.with_name(name)).exists()))


def find_to_resume(path: Path) -> Path:
    """The checkpoint that `path` is, or the newest of the run whose folder that is. Raises ValueError for none."""
    if (path / MANIFEST).exists() or not path.is_dir():
        Manifest.read(path)
        return path
    found, wrong = newest_complete(path)
    if found is None:
        raise ValueError("; ".join([f"{path} has no checkpoint to go on with", *wrong]))
    return found


def keep(folder: Path, last: int, every: int) -> list[str]:
    """Removes the checkpoints of a run but for the `last`, all where 0, and those at multiples of `every` steps.

    Returns a line for each that could not be removed.
    """
    steps = list(checkpoints(folder))
    old = [step for step in (steps[:-last] if last else []) if not every or step % every]
    return [line for step in old for line in remove(folder / f"{CHECKPOINT}-{step}")]


def remove(path: Path) -> list[str]:
    """Removes a folder, which is gone under its name before any of its files is; a line where it cannot be removed."""
    gone = _gone(path)
    try:
        path.rename(gone)
    except OSError as error:
        return [_not_removed(path, error)]
    return _discard(gone)


def exchange(new: Path, folder: Path) -> list[str]:
    """Puts a whole folder in the place of another, which is removed; `tidy` ends what a kill interrupts.

    Returns a line where the other one could not be removed. Raises OSError where the new one could not be put there.
    """
    gone = _gone(folder)
    folder.rename(gone)
    new.rename(folder)
    return _discard(gone)


def _gone(path: Path) -> Path:
    """A name for what is to be removed, that nothing has: not what an earlier one could not remove, either."""
    names = (f".{path.name}{f'.{count}' if count else ''}.removed" for count in itertools.count())
    return next(free for name in names if not os.path.lexists(free := path.with_name(name)))


def _discard(path: Path) -> list[str]:
    """Removes a folder, or the link or the file in its place; a line where it cannot be removed."""
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    except OSError as error:
        shutil.rmtree(path, ignore_errors=True)  # of the rest
        return [_not_removed(path, error)]
    return []


def _not_removed(path: Path, error: OSError) -> str:
    return f"{path} could not be removed, and may be by hand: {error.strerror}"


def tidy(folder: Path) -> None:
    """Removes what a run has left that was killed while it wrote, exchanged or removed a checkpoint."""
    new = folder / NEW
    if new.is_dir() and not new.is_symlink() and not (folder / CHECKPOINT).exists():
        new.rename(folder / CHECKPOINT)
    for pattern in (NEW, f"*{CHECKPOINT}*.partial*", f".{CHECKPOINT}*.removed"):
        for path in folder.glob(pattern):
            _discard(path)
