"""`weft generate`: continue a text with a trained model."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from itertools import chain, takewhile
from pathlib import Path
from typing import Annotated

import tyro

from ..checkpoint.manifest import find_manifest
from ..checks import check_drawing
from ..data.tokenizer import TOKENIZER_FILE, Tokenizer, byte_tokenizer, find_tokenizer
from ..documents import as_type, read_json
from ..terminal import PROGRAM, printable
from ..train.folder import find_checkpoint
from .arguments import parse, report_bad_input

ABOUT = f"""\
  Continues a text with a trained model, on one process, and prints the text and each token as it is drawn. The prompt \
is tokenized as by transformers' AutoTokenizer: the name of a special token gives this token, and BOS is added if the \
tokenizer adds it. Ends at an end token of the model (eos_token_id of generation_config.json or config.json, or of the \
tokenizer), or after --tokens.

Examples
  {PROGRAM} generate \\
    outputs/RUN --prompt 'def '
  {PROGRAM} generate \\
    outputs/RUN --prompt 'I ' \\
    --tokens 500 --temperature 0.3
  {PROGRAM} generate \\
    outputs/RUN --prompt 'I ' \\
    --top-k 50 --top-p 0.9

Exit status
  0: done; 1: the model's output is not finite; 2: input that cannot be used.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateOptions:
    """Continue a text with a trained model."""

    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """A run of `weft train`, whose last checkpoint is taken, or a checkpoint."""
    prompt: Annotated[str, tyro.conf.arg(metavar="TEXT")]
    """The text to continue."""
    tokens: Annotated[int, tyro.conf.arg(metavar="INT")] = 200
    """Tokens to draw at most. For a model trained on a text's bytes, these are bytes."""
    temperature: Annotated[float, tyro.conf.arg(metavar="T")] = 0.7
    """Sampling temperature: 0 takes the likeliest token, 1 draws as the model predicts."""
    top_k: Annotated[int | None, tyro.conf.arg(metavar="K", help_behavior_hint="(default: all)")] = None
    """Draw only among the K likeliest tokens."""
    top_p: Annotated[float | None, tyro.conf.arg(metavar="P", help_behavior_hint="(default: all)")] = None
    """Draw only among the likeliest tokens that together reach probability P: above 0, at most 1."""
    seed: int = 0
    """Seed of the sampling. The same seed gives the same text."""


def run(arguments: list[str]) -> int:
    options = parse(GenerateOptions, arguments, command="generate", about=ABOUT)
    with report_bad_input("generate"):
        _check(options)
        folder = find_checkpoint(options.folder)
        tokenizer = _find_tokenizer(folder)
        import torch

        from ..checkpoint.huggingface import from_pretrained
        from ..generation import LogitsNotFinite, end_ids, stream

        ends, prompt = end_ids(folder, default=[tokenizer.end]), tokenizer.encode(options.prompt)
        new_tokens = stream(
            from_pretrained(folder).eval(),
            torch.tensor([prompt], dtype=torch.int64),
            max_new_tokens=options.tokens,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            seed=options.seed,
            ends=ends,
        )
    shown = printable if sys.stdout.isatty() else str
    new = takewhile(lambda token: token not in ends, (int(tokens) for tokens in new_tokens))
    try:
        for text in chain([options.prompt], tokenizer.decode_each(new, after=prompt)):
            print(shown(text), end="", flush=True)
    except LogitsNotFinite as error:
        print(f"\n{PROGRAM} generate: {error}", file=sys.stderr)
        return 1
    print()
    return 0


def _check(options: GenerateOptions) -> None:
    """Raise ValueError for an option out of range, and for a prompt that is empty or not UTF-8."""
    if not options.prompt:
        raise ValueError("--prompt is empty; give a text to continue")
    try:
        options.prompt.encode()
    except UnicodeEncodeError as error:
        # Python keeps an invalid byte of the shell as half a surrogate pair
        byte = ord(options.prompt[error.start]) & 0xFF
        raise ValueError(f"--prompt is not UTF-8: byte 0x{byte:02x} at character {error.start}; convert it") from None
    check_drawing(
        max_new_tokens=options.tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        names={"max_new_tokens": "--tokens", "temperature": "--temperature", "top_k": "--top-k", "top_p": "--top-p"},
    )


def _find_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer in a checkpoint's folder; without one the byte tokenizer, if the vocabulary has the same size.

    Raises ValueError for a folder without a model, and for a tokenizer that does not fit the model's vocabulary.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; give the folder of a run of `weft train`, or of a checkpoint")
    config = folder / "config.json"
    if not config.exists():
        raise ValueError(f"{folder} has no checkpoint; give the folder of a run of `weft train`, or of a checkpoint")
    found = read_json(config, "save or fetch it again")
    vocab_size = as_type(int, found.get("vocab_size"), f"{config}: vocab_size")
    manifest = find_manifest(folder)
    if manifest is not None:
        manifest.check_documents(folder)
    has_tokenizer = (folder / TOKENIZER_FILE).is_file()
    tokenizer = find_tokenizer(folder) if has_tokenizer else byte_tokenizer()
    if vocab_size < tokenizer.vocab_size or (not has_tokenizer and vocab_size != tokenizer.vocab_size):
        raise ValueError(
            f"{folder} has {vocab_size} tokens, but {'its tokenizer' if has_tokenizer else 'the tokenizer of bytes'} "
            f"has {tokenizer.vocab_size}; put the model's own {TOKENIZER_FILE} into the folder"
        )
    return tokenizer
