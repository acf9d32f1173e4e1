"""The folder of a run: where one can be made, and the checkpoints in it. It is asked before torch is imported."""

from __future__ import annotations

import re
from pathlib import Path

CHECKPOINT = "checkpoint"  # the last one; those on the way are checkpoint-STEP


def check_new(folder: Path) -> None:
    """Raises ValueError where `folder` is there, or cannot be made: it is made and removed, since nothing else tells."""
    made: list[Path] = []
    try:
        if folder.exists():
            raise ValueError(f"the output folder {folder} exists; give another with --output, or remove it")
        for path in [*reversed(folder.parents), folder]:
            if not path.exists():
                path.mkdir()
                made.append(path)
    except OSError as error:
        raise ValueError(f"the output folder {folder} cannot be made: {error}; give another with --output") from None
    finally:
        for path in reversed(made):
            path.rmdir()


def find_checkpoint(folder: Path) -> Path:
    """The last checkpoint of the run whose folder that is; `folder` itself where it is none, as a checkpoint is."""
    if (folder / CHECKPOINT).is_dir():
        return folder / CHECKPOINT
    steps = [int(match[1]) for path in folder.glob("*") if (match := re.fullmatch(rf"{CHECKPOINT}-(\d+)", path.name))]
    return folder / f"{CHECKPOINT}-{max(steps)}" if steps else folder
