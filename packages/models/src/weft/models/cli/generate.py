"""`weft generate`: continue a text with a trained model."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from itertools import chain, takewhile
from pathlib import Path
from typing import Annotated, Any

import tyro

from ..checkpoint.configs import base_folder, is_adapter_folder
from ..checkpoint.manifest import find_manifest
from ..checks import check_drawing
from ..data.tokenizer import TOKENIZER_FILE, Tokenizer, byte_tokenizer, find_tokenizer
from ..safe_files import as_type, read_json
from ..terminal import PROGRAM, printable
from ..train.folder import find_checkpoint
from ..train.from_folder import check_adapters
from .arguments import parse, report_bad_input
from .chat import ChatOptions, chat, check_unicode

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
  {PROGRAM} generate \\
    outputs/RUN --chat \\
    --system 'Be brief.'
  {PROGRAM} generate \\
    outputs/RUN --chat < questions.txt

Chat
  --chat answers messages by the chat template of the tokenizer, and also ends at the token that the template writes \
after an answer. On a terminal, type a message after the prompt: /reset begins anew, /exit or Ctrl-D ends, Ctrl-C \
stops an answer. Otherwise each line of standard input is a message, and each answer is followed by a line break; \
blank lines are skipped. With --prompt, answers this message alone. When a conversation becomes longer than the \
model's context, its oldest turns are left out.

Exit status
  0: done; 1: the model's output is not finite; 2: input that cannot be used.
"""


TOKENS, CHAT_TOKENS = 200, 2000  # the defaults of --tokens
PROMPT_HINT = "none; required without --chat"
TOKENS_HINT = f"{TOKENS}; with --chat {CHAT_TOKENS}"
OWN = "the tokenizer's"


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateOptions:
    """Continue a text with a trained model."""

    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """A run of `weft train`, whose last checkpoint is taken; a checkpoint; or LoRA adapters."""
    prompt: Annotated[str | None, tyro.conf.arg(metavar="TEXT", help_behavior_hint=f"(default: {PROMPT_HINT})")] = None
    """The text to continue; with --chat, the only message to answer."""
    chat: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Answer messages by a chat template."""
    system: Annotated[str | None, tyro.conf.arg(metavar="TEXT", help_behavior_hint="(default: no message)")] = None
    """The system message of --chat."""
    template: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint=f"(default: {OWN})")] = None
    """A Jinja file with the chat template of --chat."""
    tokens: Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint=f"(default: {TOKENS_HINT})")] = None
    """Tokens to draw at most, of each answer with --chat. For a model trained on a text's bytes, these are bytes."""
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
        tokenizer, base = find_tokenizer_of(folder), base_of(folder)
        check_adapters(folder)
        drawing: dict[str, Any] = {
            "temperature": options.temperature,
            "top_k": options.top_k,
            "top_p": options.top_p,
            "seed": options.seed,
        }
        if options.chat:
            chosen = ChatOptions(
                template=options.template,
                system=options.system,
                prompt=options.prompt,
                tokens=_tokens_of(options),
                drawing=drawing,
            )
            return chat(folder, base, tokenizer, chosen)
        assert options.prompt is not None, "_check demands it without --chat"
        import torch

        from ..checkpoint.huggingface import from_pretrained
        from ..generation import LogitsNotFinite, end_ids, stream

        ends, prompt = end_ids(folder, default=end_ids(base, default=[tokenizer.end])), tokenizer.encode(options.prompt)
        new_tokens = stream(
            from_pretrained(folder).eval(),
            torch.tensor([prompt], dtype=torch.int64),
            max_new_tokens=_tokens_of(options),
            ends=ends,
            **drawing,
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
    """Raise ValueError for an option out of range, an empty or invalid text, and an option that needs --chat."""
    of_chat = {"--system": options.system, "--template": options.template}
    if misplaced := [name for name, value in of_chat.items() if value is not None and not options.chat]:
        raise ValueError(f"{misplaced[0]} is an option of --chat; add --chat, or leave {misplaced[0]} out")
    if options.prompt is None and not options.chat:
        raise ValueError("--prompt is missing; give a text to continue, or --chat to answer messages")
    for name, text in (("--prompt", options.prompt), ("--system", options.system)):
        if text is None:
            continue
        if not text:
            remedy = "a message" if options.chat else "a text to continue"
            raise ValueError(f"{name} is empty; give {remedy}")
        check_unicode(text, name)
    tokens = _tokens_of(options)
    if options.chat and tokens == 0:
        raise ValueError("--tokens is 0; an answer needs 1 or more")
    check_drawing(
        max_new_tokens=tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        names={"max_new_tokens": "--tokens", "temperature": "--temperature", "top_k": "--top-k", "top_p": "--top-p"},
    )


def _tokens_of(options: GenerateOptions) -> int:
    """The most tokens of a text or an answer: --tokens or the default."""
    return (CHAT_TOKENS if options.chat else TOKENS) if options.tokens is None else options.tokens


def base_of(folder: Path) -> Path:
    """The folder of the model, which is `folder` itself except for a folder of adapters."""
    return base_folder(folder) if is_adapter_folder(folder) else folder


def find_tokenizer_of(folder: Path) -> Tokenizer:
    """The tokenizer in a checkpoint's folder, or else the byte tokenizer, if the model's vocabulary has the same size.

    Raises ValueError for a folder without a model, and for a tokenizer larger than the model's vocabulary.
    """
    base = base_of(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; give the folder of a run of `weft train`, or of a checkpoint")
    config = base / "config.json"
    if not config.exists():
        raise ValueError(f"{base} has no checkpoint; give the folder of a run of `weft train`, or of a checkpoint")
    found = read_json(config, "save or fetch it again")
    vocab_size = as_type(int, found.get("vocab_size"), f"{config}: vocab_size")
    manifest = find_manifest(base)
    if manifest is not None:
        manifest.check_documents(base)
    with_tokenizer = next((each for each in (folder, base) if (each / TOKENIZER_FILE).is_file()), None)
    tokenizer = byte_tokenizer() if with_tokenizer is None else find_tokenizer(with_tokenizer)
    if vocab_size < tokenizer.vocab_size or (with_tokenizer is None and vocab_size != tokenizer.vocab_size):
        owner = "the tokenizer of bytes" if with_tokenizer is None else "its tokenizer"
        if with_tokenizer is not None and with_tokenizer != base:
            owner = f"the tokenizer of the adapters in {folder}"
        raise ValueError(
            f"{base} has {vocab_size} tokens, but {owner} has {tokenizer.vocab_size}; put the model's own "
            f"{TOKENIZER_FILE} into the folder"
        )
    return tokenizer
