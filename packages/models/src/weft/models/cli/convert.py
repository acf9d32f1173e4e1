"""`weft convert`: checkpoints to folders for transformers, and back."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from ..checkpoint.configs import is_adapter_folder
from ..checkpoint.manifest import CONFIG, MANIFEST
from ..terminal import PROGRAM, printable
from ..train.folder import find_checkpoint
from ..train.from_folder import is_model_folder
from .arguments import parse, report_bad_input

ABOUT = f"""\
  Converts a run, or a checkpoint of a run, to a folder for transformers; or a folder for transformers to a \
checkpoint. `{PROGRAM} train --from` takes either. LoRA adapters, of a run or of peft, are folded into the weights of \
their base model, which fit in memory. The direction follows from IN, and is printed first. Tokenizer \
files are copied, code is not. Without adapters, only one tensor is in memory at a time.

Examples
  {PROGRAM} convert outputs/RUN for-transformers
  {PROGRAM} convert \\
    outputs/RUN/checkpoint-100 for-transformers
  {PROGRAM} convert llama-of-transformers begin

Prints
  what OUT will be, and from which folder, before it is made; at the end, the files of IN that were left out.

Exit status
  0: done; 2: input that cannot be used.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertOptions:
    """Convert a run or a checkpoint to a folder for transformers, or such a folder to a checkpoint."""

    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="IN")]
    """A run (its last model is taken), a checkpoint of a run, LoRA adapters, or a folder for transformers."""
    target: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
    """The folder to make."""
    shard_bytes: Annotated[int, tyro.conf.arg(metavar="INT")] = 5_000_000_000
    """Largest size of a weight file, in bytes; a larger tensor gets a file of its own."""


def run(arguments: list[str]) -> int:
    options = parse(ConvertOptions, arguments, command="convert", about=ABOUT)
    with report_bad_input("convert"):
        source, target = options.source, options.target
        found = source if is_model_folder(source) else find_checkpoint(source)
        is_checkpoint, is_adapters = (found / MANIFEST).is_file(), is_adapter_folder(found)
        if not is_model_folder(found):
            raise ValueError(f"{source} is neither a checkpoint nor a folder for transformers; give one of them")
        if target.exists():
            raise ValueError(f"{target} exists; give another folder, or remove it")
        is_of_run = found != source
        kind = "a folder for transformers" if is_checkpoint or is_adapters or is_of_run else "a checkpoint"
        print(f"{target} will be {kind}, from {found}", flush=True)
        if kind != "a checkpoint" and _is_for_weft_alone(found):
            print("its model has options of experts that transformers lacks: Weft alone reads the folder", flush=True)
        from ..checkpoint.convert import convert, copy_folder

        left_out: list[str] = []
        try:
            # The final model of a run is a folder for transformers already.
            if is_of_run and not is_checkpoint and not is_adapters:
                copy_folder(found, target)
            else:
                left_out = convert(found, target, shard_bytes=options.shard_bytes)
        except OSError as error:
            raise ValueError(f"{target} cannot be written: {error}") from None
    if left_out:
        print(f"left out {printable(', '.join(left_out))}: neither weights nor of a tokenizer in this folder")
    return 0


def _is_for_weft_alone(folder: Path) -> bool:
    """Whether a model has model_type weft_moe, unknown to transformers. False for a damaged config.json, which
    `convert` refuses.
    """
    try:
        config = json.loads((folder / CONFIG).read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and config.get("model_type") == "weft_moe"
