"""`weft convert`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from ..checkpoint.manifest import MANIFEST
from ..terminal import PROGRAM, printable
from ..train.folder import find_checkpoint, newest_complete
from .arguments import parse, refusing

ABOUT = f"""\
  Makes a checkpoint of a run into a folder for transformers, or such a folder into a checkpoint, from which a run begins by `{PROGRAM} train --resume`. The files of a tokenizer go along; code does not. A tensor is in memory at a time.

Examples
  {PROGRAM} convert \\
    outputs/RUN/checkpoint-100 for-transformers
  {PROGRAM} convert outputs/RUN for-transformers
  {PROGRAM} convert llama-of-transformers begin

Exit status
  0: done; 2: input that cannot be used.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertOptions:
    """Make a checkpoint into a folder for transformers, or back."""

    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="IN")]
    """A checkpoint of a run, a run, of which the newest is taken, or a folder for transformers."""
    target: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
    """The folder to make."""
    shard_bytes: Annotated[int, tyro.conf.arg(metavar="INT")] = 5_000_000_000
    """Bytes of a file, at most; a tensor that is larger has one of its own."""


def run(arguments: list[str]) -> int:
    options = parse(ConvertOptions, arguments, command="convert", about=ABOUT)
    with refusing("convert"):
        source = options.source
        if not (source / MANIFEST).exists():
            source = newest_complete(source)[0] or find_checkpoint(source)
        if not (source / "config.json").is_file():
            raise ValueError(f"{source} is neither a checkpoint nor a folder for transformers; give one of them")
        from ..checkpoint.convert import convert

        try:
            left_out = convert(source, options.target, shard_bytes=options.shard_bytes)
        except OSError as error:
            raise ValueError(f"{options.target} cannot be written: {error}") from None
        kind = f"a folder for transformers, from {source}" if (source / MANIFEST).is_file() else "a checkpoint"
    print(f"made {options.target}: {kind}")
    if left_out:
        print(f"left out {printable(', '.join(left_out))}: neither weights nor of a tokenizer")
    return 0
