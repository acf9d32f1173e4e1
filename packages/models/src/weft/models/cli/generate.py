"""`weft generate`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from itertools import chain, takewhile
from pathlib import Path
from typing import Annotated

import tyro

from ..checkpoint.manifest import find_manifest
from ..checks import MOST_NEW_TOKENS
from ..data.tokenizer import TOKENIZER_FILE, Tokenizer, byte_tokenizer, find_tokenizer
from ..documents import as_type, read_json
from ..terminal import PROGRAM, printable
from ..train.folder import find_checkpoint
from .arguments import parse, refusing

ABOUT = f"""\
  Lets a trained model go on with a text, on one process, and prints both, each token as it is drawn. The prompt's tokens are those of transformers' AutoTokenizer: names of special tokens count as these tokens, and BOS is added where the tokenizer adds one. The text ends with an end token of the model (eos_token_id of generation_config.json or config.json, or the tokenizer's), or after --tokens.

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
  0: done; 1: the model gives no numbers (NaN); 2: input that cannot be used.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateOptions:
    """Let a trained model go on with a text."""

    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """Of a run of `weft train`, of which the last checkpoint is taken; or of a checkpoint."""
    prompt: Annotated[str, tyro.conf.arg(metavar="TEXT")]
    """What to go on with."""
    tokens: Annotated[int, tyro.conf.arg(metavar="INT")] = 200
    """Tokens to draw at most; bytes, where the model was trained on a text's own."""
    temperature: Annotated[float, tyro.conf.arg(metavar="T")] = 0.7
    """Of the draw: 0 takes the likeliest token, 1 draws as the model predicts."""
    top_k: Annotated[int | None, tyro.conf.arg(metavar="K", help_behavior_hint="(default: all)")] = None
    """Draw among the K likeliest tokens alone."""
    top_p: Annotated[float | None, tyro.conf.arg(metavar="P", help_behavior_hint="(default: all)")] = None
    """Draw among the likeliest tokens alone whose probabilities reach P in sum: above 0, and at most 1."""
    seed: int = 0
    """Of the draw: the same seed gives the same text."""


def run(arguments: list[str]) -> int:
    options = parse(GenerateOptions, arguments, command="generate", about=ABOUT)
    with refusing("generate"):
        if not options.prompt:
            raise ValueError("--prompt is empty; give a text to go on with")
        _check(options)
        folder = find_checkpoint(options.folder)
        tokenizer = _find_tokenizer(folder)
        import torch

        from ..checkpoint.huggingface import from_pretrained
        from ..generation import LogitsNotFinite, end_ids, stream

        ends, prompt = end_ids(folder, default=[tokenizer.end]), tokenizer.encode(options.prompt)
        drawn = stream(
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
    new = takewhile(lambda token: token not in ends, (int(tokens) for tokens in drawn))
    try:
        for text in chain([options.prompt], tokenizer.decode_each(new, after=prompt)):
            print(shown(text), end="", flush=True)
    except LogitsNotFinite as error:
        print(f"\n{PROGRAM} generate: {error}", file=sys.stderr)
        return 1
    print()
    return 0


def _check(options: GenerateOptions) -> None:
    if not options.prompt:
        raise ValueError("--prompt is empty; give a text to go on with")
    try:
        options.prompt.encode()
    except UnicodeEncodeError as error:
        byte = ord(options.prompt[error.start]) & 0xFF  # the shell's byte, which Python keeps as half a surrogate pair
        raise ValueError(f"--prompt is not UTF-8: byte 0x{byte:02x} at character {error.start}; convert it") from None
    if not 0 <= options.tokens <= MOST_NEW_TOKENS:
        raise ValueError(f"--tokens is {options.tokens}; it must be 0 or more, and at most {MOST_NEW_TOKENS:,}")
    if not 0 <= options.temperature < float("inf"):
        raise ValueError(f"--temperature is {options.temperature}; it must be >= 0, and 0 takes the likeliest token")
    if options.top_k is not None and options.top_k < 1:
        raise ValueError(f"--top-k is {options.top_k}; it must be 1 or more")
    if options.top_p is not None and not 0 < options.top_p <= 1:
        raise ValueError(f"--top-p is {options.top_p}; it must be above 0, and at most 1")


def _find_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a checkpoint's folder, or that of bytes where there is none and the model has as many tokens.

    Raises ValueError for a folder without a model, and for one with other tokens than its tokenizer's.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; give that of a run of `weft train`, or of one of its checkpoints")
    config = folder / "config.json"
    if not config.exists():
        raise ValueError(f"{folder} has no checkpoint; give the folder of a run of `weft train`, or one of its own")
    found = read_json(config, "save or fetch it again")
    vocab_size = as_type(int, found.get("vocab_size"), f"{config}: vocab_size")
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
