"""Files in the folder of a run. Nothing is written through a link in their place: others may be able to write there too."""

from __future__ import annotations

import os
from pathlib import Path


def write_anew(path: Path, content: bytes) -> None:
    """Makes the file aside, and then gives it its name, which a file or a link may have had; that one is whole until then.

    Raises OSError where it cannot be written.
    """
    aside = path.with_name(f".{path.name}")
    aside.unlink(missing_ok=True)  # of one that was killed
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    aside.replace(path)


def append(path: Path, content: bytes, *, sync: bool = False) -> None:
    """Adds to the end of a file, which is made where there is none. sync: return when the disk has all of the file.

    Raises OSError where it cannot be written, or is a link.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    with os.fdopen(descriptor, "ab") as file:
        file.write(content)
        file.flush()
        if sync:
            os.fsync(file.fileno())
