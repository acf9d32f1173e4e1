"""`weft generate`."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated

import tyro

from ..terminal import PROGRAM, printable
from ..train.data import VOCAB_SIZE, decode_each, encode
from ..train.folder import find_checkpoint
from .arguments import parse, refusing

ABOUT = f"""\
  Lets a trained model go on with a text, on one process, and prints both, each byte as it is drawn.

Examples
  {PROGRAM} generate \\
    outputs/RUN --prompt 'def '
  {PROGRAM} generate \\
    outputs/RUN --prompt 'I ' \\
    --tokens 500 --temperature 0.3

Exit status
  0: done; 2: input that cannot be used.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateOptions:
    """Let a trained model go on with a text."""

    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """Of a run of `weft train`, of which the last checkpoint is taken; or of a checkpoint."""
    prompt: Annotated[str, tyro.conf.arg(metavar="TEXT")]
    """What to go on with."""
    tokens: Annotated[int, tyro.conf.arg(metavar="INT")] = 200
    """Bytes to draw."""
    temperature: Annotated[float, tyro.conf.arg(metavar="T")] = 0.7
    """Of the draw: 0 takes the likeliest byte, 1 draws as the model predicts."""
    seed: int = 0
    """Of the draw: the same seed gives the same text."""


def run(arguments: list[str]) -> int:
    options = parse(GenerateOptions, arguments, command="generate", about=ABOUT)
    with refusing("generate"):
        if not options.prompt:
            raise ValueError("--prompt is empty; give a text to go on with")
        folder = find_checkpoint(options.folder)
        _check_bytes(folder)
        import torch

        from ..checkpoint.huggingface import from_pretrained
        from ..generation import stream

        drawn = stream(
            from_pretrained(folder).eval(),
            torch.tensor([encode(options.prompt)]),
            max_new_tokens=options.tokens,
            temperature=options.temperature,
            seed=options.seed,
        )
    shown = printable if sys.stdout.isatty() else str
    for text in chain([options.prompt], decode_each(int(tokens) for tokens in drawn)):
        print(shown(text), end="", flush=True)
    print()
    return 0


def _check_bytes(folder: Path) -> None:
    """Raises ValueError for a folder without a model, or with one whose tokens are no bytes; the rest is for the reader."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; give that of a run of `weft train`, or of one of its checkpoints")
    config = folder / "config.json"
    try:
        vocab_size = json.loads(config.read_text(encoding="utf-8")).get("vocab_size")
    except (OSError, ValueError, AttributeError):
        raise ValueError(
            f"{folder} has no checkpoint; give the folder of a run of `weft train`, or one of its own"
        ) from None
    if vocab_size != VOCAB_SIZE:
        raise ValueError(
            f"{folder} has {vocab_size} tokens; this command speaks bytes, which are {VOCAB_SIZE}: use "
            f"weft.models.generate with the model's own tokenizer"
        )
