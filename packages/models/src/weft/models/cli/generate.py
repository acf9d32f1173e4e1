"""`weft generate`."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated

import tyro

from ..checkpoint.manifest import find_manifest
from ..data.tokenizer import TOKENIZER_FILE, Tokenizer, byte_tokenizer, find_tokenizer
from ..terminal import PROGRAM, printable
from ..train.folder import find_checkpoint
from .arguments import parse, refusing

ABOUT = f"""\
  Lets a trained model go on with a text, on one process, and prints both, each token as it is drawn.

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
    """Tokens to draw; bytes, where the model was trained on a text's own."""
    temperature: Annotated[float, tyro.conf.arg(metavar="T")] = 0.7
    """Of the draw: 0 takes the likeliest token, 1 draws as the model predicts."""
    seed: int = 0
    """Of the draw: the same seed gives the same text."""


def run(arguments: list[str]) -> int:
    options = parse(GenerateOptions, arguments, command="generate", about=ABOUT)
    with refusing("generate"):
        if not options.prompt:
            raise ValueError("--prompt is empty; give a text to go on with")
        if options.tokens < 0:
            raise ValueError(f"--tokens is {options.tokens}; it must be 0 or more")
        if not 0 <= options.temperature < float("inf"):
            raise ValueError(
                f"--temperature is {options.temperature}; it must be >= 0, and 0 takes the likeliest token"
            )
        folder = find_checkpoint(options.folder)
        tokenizer = _find_tokenizer(folder)
        import torch

        from ..checkpoint.huggingface import from_pretrained
        from ..generation import stream

        drawn = stream(
            from_pretrained(folder).eval(),
            torch.tensor([tokenizer.encode(options.prompt)]),
            max_new_tokens=options.tokens,
            temperature=options.temperature,
            seed=options.seed,
        )
    shown = printable if sys.stdout.isatty() else str
    for text in chain([options.prompt], tokenizer.decode_each(int(tokens) for tokens in drawn)):
        print(shown(text), end="", flush=True)
    print()
    return 0


def _find_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a checkpoint's folder, or that of bytes where there is none and the model has as many tokens.

    Raises ValueError for a folder without a model, and for one with other tokens than its tokenizer's.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; give that of a run of `weft train`, or of one of its checkpoints")
    config = folder / "config.json"
    try:
        vocab_size = int(json.loads(config.read_text(encoding="utf-8"))["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError):
        if config.exists():
            raise ValueError(f"{config} is not the config of a model; save or fetch it again") from None
        raise ValueError(
            f"{folder} has no checkpoint; give the folder of a run of `weft train`, or one of its own"
        ) from None
    manifest = find_manifest(folder)
    if manifest is not None:
        manifest.check_documents(folder)
    has_one = (folder / TOKENIZER_FILE).is_file()
    tokenizer = find_tokenizer(folder) if has_one else byte_tokenizer()
    if vocab_size < tokenizer.vocab_size or (not has_one and vocab_size != tokenizer.vocab_size):
        raise ValueError(
            f"{folder} has {vocab_size} tokens, and {'its tokenizer' if has_one else 'a tokenizer of bytes'} has "
            f"{tokenizer.vocab_size}; put the model's own {TOKENIZER_FILE} into the folder"
        )
    return tokenizer
