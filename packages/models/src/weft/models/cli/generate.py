"""`weft generate`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from ..terminal import PROGRAM, printable
from .arguments import parse, refusing

ABOUT = f"""\
  Lets a trained model go on with a text, on one process, and prints both.

Examples
  {PROGRAM} generate \\
    outputs/RUN/checkpoint --prompt 'def '
  {PROGRAM} generate \\
    outputs/RUN/checkpoint --prompt 'I ' \\
    --tokens 500 --temperature 0.3

Exit status
  0: done; 2: input that cannot be used.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateOptions:
    """Let a trained model go on with a text."""

    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """A checkpoint whose tokens are bytes, as `weft train` saves it."""
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
    import torch

    from ..checkpoint import from_pretrained
    from ..generation import generate
    from ..train.data import VOCAB_SIZE, decode, encode

    with refusing("generate"):
        if not options.prompt:
            raise ValueError("--prompt is empty; give a text to go on with")
        model = from_pretrained(options.folder)
        vocab_size = model.get_parameter("embed_tokens.weight").shape[0]
        if vocab_size != VOCAB_SIZE:
            raise ValueError(
                f"{options.folder} has {vocab_size} tokens; this command speaks bytes, which are {VOCAB_SIZE}: use "
                f"weft.models.generate with the model's own tokenizer"
            )
        tokens = generate(
            model,
            torch.tensor([encode(options.prompt)]),
            max_new_tokens=options.tokens,
            temperature=options.temperature,
            seed=options.seed,
        )
    text = decode(tokens[0].tolist())
    print(printable(text) if sys.stdout.isatty() else text)
    return 0
