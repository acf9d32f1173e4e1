"""Write the files of a run's folder, never through a symbolic link.

Other users of the machine may be able to plant links in the folder.
"""

from __future__ import annotations

import os
from pathlib import Path


def write_anew(path: Path, content: bytes) -> None:
    """Write a hidden temporary file beside `path`, then rename it to `path`, replacing any file or link there.

    Until the rename the old file is untouched.
    Raises OSError if the file cannot be written.
    """
    aside = path.with_name(f".{path.name}")
    aside.unlink(missing_ok=True)  # left by a killed process
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    aside.replace(path)


def append(path: Path, content: bytes, *, sync: bool = False) -> None:
    """Append to a file, which is made if missing. sync: return only when the whole file is on the disk.

    Raises OSError if the file cannot be written, or is a link.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    with os.fdopen(descriptor, "ab") as file:
        file.write(content)
        file.flush()
        if sync:
            os.fsync(file.fileno())
