"""`weft data show`: prints the first documents or examples of data, with marks around learned tokens."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from os.path import lexists
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from ..data.examples.example import Task
from ..data.examples.template import ChatTemplate, find_template
from ..terminal import PROGRAM, can_show, printable
from .arguments import parse, renamed_options, report_bad_input

if TYPE_CHECKING:
    from ..data.tokenizer import Tokenizer

RENAMED = {"data.template": "template"}  # in errors: {option of `weft train`: the same option of `weft data`}
MOST_TOKENS = 2000  # of a document or segment are shown
LEARNED, PROMPT, NORMAL = "\033[32m", "\033[2m", "\033[0m"  # green, dim
SEGMENT_NAMES = {
    "sft": ("conversation",),
    "dpo": ("chosen", "rejected"),
    "kto": ("completion", "with the completion of another example"),
}
SHOW = f"""\
  Prints the first documents or examples of a file or folder as a run would read them. Of examples, the learned text \
is green and the rest dim; without a terminal, or with NO_COLOR set, the learned text is between ⟦ and ⟧.

Examples
  {PROGRAM} data show chats.jsonl \\
    --task sft --tokenizer llama
  {PROGRAM} data show prepared --rows 1

Exit status
  0: done; 2: input that cannot be used; 130: interrupted.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShowOptions:
    """Print the first documents or examples."""

    path: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="PATH")]
    """A file or folder of text or records, or a folder made by prepare."""
    task: Annotated[
        Task | None,
        tyro.conf.arg(metavar="{pretrain,sft,dpo,kto}", help_behavior_hint="(default: of the folder, or pretrain)"),
    ] = None
    """What the data is for."""
    tokenizer: Annotated[Path | None, tyro.conf.arg(metavar="PATH", help_behavior_hint="(default: bytes)")] = None
    """A tokenizer.json, or a folder that contains one. A prepared folder has its own."""
    template: Annotated[
        Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="(default: the tokenizer's own)")
    ] = None
    """A Jinja file, the chat template of messages."""
    rows: Annotated[int, tyro.conf.arg(metavar="INT")] = 3
    """Number of documents or examples."""


@dataclass(frozen=True, slots=True)
class _Shown:
    """A document or segment to print."""

    title: str
    tokens: Sequence[int]
    learned: Sequence[bool] | None  # None for documents, all of whose tokens are learned


def show(arguments: list[str]) -> int:
    """`weft data show`."""
    options = parse(ShowOptions, arguments, command="data show", about=SHOW)
    with report_bad_input("data show"), renamed_options(RENAMED):
        from ..data.manifest import MANIFEST, read_manifest
        from ..data.tokenizer import find_tokenizer

        if options.rows < 1:
            raise ValueError(f"--rows is {options.rows}; it must be 1 or more")
        is_prepared = lexists(options.path / MANIFEST)
        task = options.task or (read_manifest(options.path).task if is_prepared else "pretrain")
        if task == "pretrain":
            if not is_prepared and options.tokenizer is not None:
                raise ValueError(f"--tokenizer {options.tokenizer} is for examples; give --task sft, dpo or kto")
            tokenizer, shown = _find_documents(options.path, options.rows)
        elif is_prepared:
            tokenizer, shown = _find_prepared_examples(options.path, task, options.rows)
        else:
            tokenizer = find_tokenizer(options.tokenizer)
            shown = _find_records(
                options.path, task, tokenizer, find_template(tokenizer, options.template), options.rows
            )
        for each in shown:
            print(printable(each.title))
            print(_text(each, tokenizer))
    return 0


def _find_documents(path: Path, count: int) -> tuple[Tokenizer, Iterator[_Shown]]:
    """The first documents of texts, of records with a text, or of a prepared folder; and the tokenizer."""
    from ..data.sources import Mixture, find_data

    source = find_data(path)
    assert not isinstance(source, Mixture), "no mixture is given"
    stream = source.open()

    def documents() -> Iterator[_Shown]:
        start = number = 0
        while start < stream.num_tokens and number < count:
            end = int(stream.document_ends(start, start + 1)[-1])
            number += 1
            tokens = stream.read(start, min(end, start + MOST_TOKENS)).tolist()
            yield _Shown(f"document {number}: {end - start:,} tokens{_cut(end - start)}", tokens, None)
            start = end

    return source.tokenizer, documents()


def _find_prepared_examples(path: Path, task: Task, count: int) -> tuple[Tokenizer, Iterator[_Shown]]:
    from ..data.examples.source import open_prepared

    found = open_prepared(path, task)
    examples = (found.read(number) for number in range(min(count, len(found))))
    segments = ([(each.tokens.tolist(), each.learned.tolist()) for each in example.segments] for example in examples)
    labels = found.labels.tolist() if task == "kto" else [None] * len(found)
    return found.tokenizer, _titled(task, zip(segments, labels, strict=False))


def _find_records(
    path: Path, task: Task, tokenizer: Tokenizer, template: ChatTemplate | None, count: int
) -> Iterator[_Shown]:
    """The first `count` examples of records. Reads no further parts of the records than needed."""
    from ..data.examples.encode import ExampleRecords
    from ..data.inputs import LeftOut
    from ..data.prepare import PART_BYTES

    records, left_out = ExampleRecords(task, tokenizer, template), LeftOut(empty=0, skipped=[], bad=0, passed=[])
    parts = records.find_parts([path], PART_BYTES, None)
    entries = islice((entry for part in parts for entry in records.entries(part, left_out)), count)
    segments = [
        (
            [(tokens.tolist(), mask.tolist()) for tokens, mask in zip(each.documents, each.masks, strict=True)],
            each.label,
        )
        for each in entries
    ]
    return _titled(task, segments)


def _titled(task: Task, examples: Iterable[tuple[list[tuple[list[int], list[bool]]], bool | None]]) -> Iterator[_Shown]:
    for number, (segments, label) in enumerate(examples, 1):
        for name, (tokens, learned) in zip(SEGMENT_NAMES[task], segments, strict=True):
            is_judged = label is not None and name == SEGMENT_NAMES[task][0]
            judged = f", {'desirable' if label else 'undesirable'}" if is_judged else ""
            title = f"example {number}, {name}{judged}: {len(tokens):,} tokens, {sum(learned[1:]):,} learned"
            yield _Shown(title + _cut(len(tokens)), tokens[:MOST_TOKENS], learned[:MOST_TOKENS])


def _cut(count: int) -> str:
    return f", the first {MOST_TOKENS:,} shown" if count > MOST_TOKENS else ""


def _text(shown: _Shown, tokenizer: Tokenizer) -> str:
    """The text of the tokens, with marks around learned runs."""
    pieces = [printable(piece) for piece in tokenizer.decode_each(shown.tokens)]
    last = pieces.pop() if len(pieces) > len(shown.tokens) else ""  # bytes of an unfinished character
    if tokenizer.is_bytes:
        pieces = [
            tokenizer.end_name if token == tokenizer.end else piece
            for token, piece in zip(shown.tokens, pieces, strict=True)
        ]
    if shown.learned is None:
        return "".join(pieces) + last
    has_colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    opening, closing = ("⟦", "⟧") if can_show("⟦⟧") else ("[[", "]]")
    text = ""
    edges = [0, *(i for i in range(1, len(pieces)) if shown.learned[i] != shown.learned[i - 1]), len(pieces)]
    for start, stop in pairwise(edges):
        run = "".join(pieces[start:stop]) + (last if stop == len(pieces) else "")
        if has_colour:
            text += f"{LEARNED if shown.learned[start] else PROMPT}{run}{NORMAL}"
        else:
            text += f"{opening}{run}{closing}" if shown.learned[start] else run
    return text
