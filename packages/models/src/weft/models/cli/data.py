"""`weft data`: text to token shards, and tokenizers."""

from __future__ import annotations

import difflib
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from ..data.inputs import Columns
from ..terminal import PROGRAM, printable, wrapped
from .arguments import parse, refusing

MIB = 1 << 20
NAMED = 3  # files that are named of those that were left out
HELP = f"""\
usage: {PROGRAM} data COMMAND [ARGUMENTS]

Makes of a text what `{PROGRAM} train --data.path` reads fastest: tokens in files that are memory-mapped.

Commands
  prepare: text, JSONL or Parquet to token shards
  train-tokenizer: learn a tokenizer from a text
  verify: read a prepared folder, and compare its checksums

Examples
  {PROGRAM} data train-tokenizer books/ --vocab-size 4096 --output tokenizer
  {PROGRAM} data prepare books/ --tokenizer tokenizer --output prepared
  {PROGRAM} train --data.path prepared --model.vocab-size 4096

{PROGRAM} data COMMAND --help has examples, options and exit statuses.
"""
EXIT = """\
Exit status
  0: done; 2: input that cannot be used; 130: interrupted."""
INPUTS = """\
Inputs
  Text files in UTF-8, each a document; JSONL (.jsonl, .ndjson), JSON (.json: a list of objects, or an object in each line), CSV and TSV with a row of names, and Parquet (.parquet), where each record or row is a document; folders of such files. Under another suffix, records and compressed files are refused by name. Files of a folder without text, and documents without text, are left out and counted. A link to a file is followed; links to folders, pipes and the like are passed over and named."""
PREPARE = f"""\
  Makes a folder of token shards, which {PROGRAM} train --data.path takes. Interrupted, the same command goes on; the result is the same bytes.

Examples
  {PROGRAM} data prepare books/ \\
    --output prepared
  {PROGRAM} data prepare web.jsonl \\
    --field content --output web

{INPUTS}

Saves
  tokens-N.bin, uint16 or uint32, each document with its end; documents-N.bin, where each document ends; tokenizer/; and last manifest.json, with checksums.

{EXIT}
"""
LEARN = f"""\
  Learns byte-level BPE from a text, and saves it as a folder that transformers loads.

Examples
  {PROGRAM} data train-tokenizer books/ \\
    --vocab-size 4096 --output bpe
  {PROGRAM} data train-tokenizer a.jsonl \\
    --field content --vocab-size 512 \\
    --output small

{INPUTS}

{EXIT}
"""
VERIFY = f"""\
  Reads every file of a prepared folder, and compares its checksum with the manifest's. {PROGRAM} train compares sizes alone.

Examples
  {PROGRAM} data verify prepared
  {PROGRAM} data verify web

{EXIT}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareOptions:
    """Text to token shards."""

    inputs: Annotated[
        tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="INPUT", help_behavior_hint="(required)")
    ] = ()
    """Files, or folders of them."""
    output: Annotated[Path, tyro.conf.arg(metavar="FOLDER")]
    """To make, or to go on with."""
    tokenizer: Annotated[Path | None, tyro.conf.arg(metavar="PATH", help_behavior_hint="(default: bytes)")] = None
    """A tokenizer.json, or a folder that has one."""
    end: Annotated[
        str | None, tyro.conf.arg(metavar="TOKEN", help_behavior_hint="(default: the tokenizer's eos_token)")
    ] = None
    """The token that is put after each document."""
    bos: Annotated[
        bool,
        tyro.conf.FlagCreatePairsOff,
        tyro.conf.arg(help_behavior_hint="(default: what the tokenizer puts before a prompt, if anything)"),
    ] = False
    """Put the tokenizer's bos_token before each document."""
    no_bos: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Put nothing before a document."""
    eos: bool = True
    """Put an end after each document."""
    field: Annotated[str, tyro.conf.arg(metavar="NAME")] = "text"
    """Of a record of JSON: where its text is."""
    column: Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="(default: the one of field)")] = (
        None
    )
    """Of Parquet, CSV and TSV: the column of the texts."""
    skip_bad: bool = False
    """Leave out records that are none, or have no such field, and files of a folder that have no such column; count them."""
    workers: Annotated[
        int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="(default: as many as there are CPUs)")
    ] = None
    """Processes; the result is the same with any number."""
    shard_mib: Annotated[int, tyro.conf.arg(metavar="INT")] = 64
    """MiB of input to a shard."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnOptions:
    """A tokenizer from a text."""

    inputs: Annotated[
        tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="INPUT", help_behavior_hint="(required)")
    ] = ()
    """Files, or folders of them."""
    output: Annotated[Path, tyro.conf.arg(metavar="FOLDER")]
    """To make."""
    vocab_size: Annotated[int, tyro.conf.arg(metavar="INT")]
    """Tokens, those of single bytes and the end of a document among them."""
    field: Annotated[str, tyro.conf.arg(metavar="NAME")] = "text"
    """Of a record of JSON: where its text is."""
    column: Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="(default: the one of field)")] = (
        None
    )
    """Of Parquet, CSV and TSV: the column of the texts."""
    skip_bad: bool = False
    """Leave out records that are none, or have no such field, and files of a folder that have no such column."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOptions:
    """Checksums of a prepared folder."""

    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """Made by prepare."""


def run(arguments: list[str]) -> int:
    command, *rest = arguments or ["--help"]
    if command in ("-h", "--help", "help"):
        print(wrapped(HELP, shutil.get_terminal_size().columns))
        return 0
    if command not in COMMANDS:
        near = difflib.get_close_matches(command, COMMANDS, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        known = ", ".join(COMMANDS)
        print(f"{PROGRAM} data: unknown command {command!r}; {hint}the commands are {known}", file=sys.stderr)
        return 2
    return COMMANDS[command](rest)


def _prepare(arguments: list[str]) -> int:
    options = parse(PrepareOptions, arguments, command="data prepare", about=PREPARE)
    with refusing("data prepare"):
        from ..data.prepare import prepare
        from ..data.tokenizer import find_tokenizer

        _check_inputs(options.inputs)
        workers = len(os.sched_getaffinity(0)) if options.workers is None else options.workers
        for name, value in (("workers", workers), ("shard-mib", options.shard_mib)):
            if value < 1:
                raise ValueError(f"--{name} is {value}; it must be 1 or more")
        if options.bos and options.no_bos:
            raise ValueError("--bos and --no-bos are both given; give one of the two")
        tokenizer = find_tokenizer(options.tokenizer, options.end)
        with _progress() as progress:
            manifest = prepare(
                options.inputs,
                options.output,
                tokenizer=tokenizer,
                columns=Columns(field=options.field, column=options.column, skip_bad=options.skip_bad),
                bos=True if options.bos else False if options.no_bos else None,
                eos=options.eos,
                workers=workers,
                part_bytes=options.shard_mib * MIB,
                progress=progress,
            )
    shards = manifest.shards
    documents, tokens, empty, bad = (
        sum(getattr(shard, name) for shard in shards) for name in ("documents", "tokens", "empty", "bad")
    )
    print(
        f"prepared {options.output}: {_count(documents, 'document')}, {_count(tokens, 'token')} of {manifest.vocab_size:,} kinds, "
        f"{manifest.dtype}, in {_count(len(shards), 'shard')}; {_around(manifest.request)}"
    )
    skipped = [name for shard in shards for name in shard.skipped]
    if empty or bad or skipped:
        named = f": {printable(', '.join(skipped[:NAMED]))}{', ...' if len(skipped) > NAMED else ''}" if skipped else ""
        print(
            f"left out {_count(empty, 'empty document')}, {_count(bad, 'bad line')}, {_count(len(skipped), 'file')} not in UTF-8{named}"
        )
    passed = [entry for shard in shards for entry in shard.passed]
    if passed:
        named = printable(", ".join(passed[:NAMED])) + (", ..." if len(passed) > NAMED else "")
        print(f"passed over {len(passed)} {'entry' if len(passed) == 1 else 'entries'}: {named}")
    print(
        f"next  {PROGRAM} train --data.path {shlex.quote(str(options.output))}"
        + ("" if tokenizer.is_bytes else f" --model.vocab-size {manifest.vocab_size}")
    )
    return 0


def _train_tokenizer(arguments: list[str]) -> int:
    options = parse(LearnOptions, arguments, command="data train-tokenizer", about=LEARN)
    with refusing("data train-tokenizer"):
        from ..data.learn import train_tokenizer

        _check_inputs(options.inputs)
        made = train_tokenizer(
            options.inputs,
            options.output,
            vocab_size=options.vocab_size,
            columns=Columns(field=options.field, column=options.column, skip_bad=options.skip_bad),
        )
    print(
        f"saved {options.output}: a tokenizer of {made.vocab_size:,} tokens; each document ends with token {made.end}"
    )
    print(f"next  {PROGRAM} data prepare INPUT --tokenizer {shlex.quote(str(options.output))} --output FOLDER")
    return 0


def _verify(arguments: list[str]) -> int:
    options = parse(VerifyOptions, arguments, command="data verify", about=VERIFY)
    with refusing("data verify"):
        from ..data.verify import verify

        manifest = verify(options.folder)
    print(
        f"{options.folder} is what was prepared: {_count(len(manifest.shards), 'shard')}, every checksum as in the manifest"
    )
    return 0


def _around(request: dict[str, Any]) -> str:
    """What stands around each document."""
    begin, end = (", ".join(map(str, request[name])) for name in ("before_each", "after_each"))
    parts = [f"begins with token {begin}"] * bool(begin) + [f"ends with token {end}" if end else "has no end"]
    return f"each document {' and '.join(parts)}"


COMMANDS = {"prepare": _prepare, "train-tokenizer": _train_tokenizer, "verify": _verify}


def _check_inputs(inputs: tuple[Path, ...]) -> None:
    if not inputs:
        raise ValueError("no INPUT is given; give files, or folders of them: text, JSONL or Parquet")


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """A bar of the bytes that are read, where there is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    console = Console(stderr=True)
    if not console.is_terminal or not sys.stderr.isatty():
        yield lambda done, total: None
        return
    with Progress(
        BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn(), console=console
    ) as bar:
        task = bar.add_task("")
        yield lambda done, total: bar.update(task, completed=done, total=total)
