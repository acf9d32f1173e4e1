"""`weft convert`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from ..checkpoint.manifest import CONFIG, MANIFEST
from ..terminal import PROGRAM, printable
from ..train.folder import find_checkpoint
from .arguments import parse, refusing

ABOUT = f"""\
  Makes a run, or a checkpoint of a run, into a folder for transformers, or such a folder into a checkpoint, from which a run begins by `{PROGRAM} train --from`, as it does from the folder itself. What is made follows from IN, and is said first. The files of a tokenizer go along; code does not. A tensor is in memory at a time.

Examples
  {PROGRAM} convert outputs/RUN for-transformers
  {PROGRAM} convert \\
    outputs/RUN/checkpoint-100 for-transformers
  {PROGRAM} convert llama-of-transformers begin

Prints
  what OUT will be, and of what, before it is made; then what of IN is left out.

Exit status
  0: done; 2: input that cannot be used.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertOptions:
    """Make a run or a checkpoint into a folder for transformers, or such a folder into a checkpoint."""

    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="IN")]
    """A run, of which the last model is taken, or a checkpoint of a run: both become a folder for transformers. Or a folder for transformers, which becomes a checkpoint."""
    target: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
    """The folder to make."""
    shard_bytes: Annotated[int, tyro.conf.arg(metavar="INT")] = 5_000_000_000
    """Bytes of a file, at most; a tensor that is larger has one of its own."""


def run(arguments: list[str]) -> int:
    options = parse(ConvertOptions, arguments, command="convert", about=ABOUT)
    with refusing("convert"):
        source, target = options.source, options.target
        is_model = (source / MANIFEST).is_file() or (source / CONFIG).is_file()
        found = source if is_model else find_checkpoint(source)
        is_checkpoint = (found / MANIFEST).is_file()
        if not (found / CONFIG).is_file() and not is_checkpoint:
            raise ValueError(f"{source} is neither a checkpoint nor a folder for transformers; give one of them")
        if target.exists():
            raise ValueError(f"{target} exists; give another folder, or remove it")
        is_of_run = found != source
        kind = "a folder for transformers" if is_checkpoint or is_of_run else "a checkpoint"
        print(f"{target} will be {kind}, from {found}", flush=True)
        from ..checkpoint.convert import convert, copy_folder

        left_out: list[str] = []
        try:
            if is_of_run and not is_checkpoint:  # the last model of a run is such a folder already
                copy_folder(found, target)
            else:
                left_out = convert(found, target, shard_bytes=options.shard_bytes)
        except OSError as error:
            raise ValueError(f"{target} cannot be written: {error}") from None
    if left_out:
        print(f"left out {printable(', '.join(left_out))}: neither weights nor of a tokenizer in this folder")
    return 0
