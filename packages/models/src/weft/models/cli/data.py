"""`weft data`: turn text and examples into token shards, train tokenizers, and show and verify data."""

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
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from ..data.examples.example import Task
from ..data.examples.template import find_template
from ..data.inputs import Columns
from ..terminal import PROGRAM, printable, wrap_lines
from .arguments import parse, renamed_options, report_bad_input
from .data_show import RENAMED, show

if TYPE_CHECKING:
    from ..data.manifest import DataManifest

MIB = 1 << 20
NAMED = 3  # the most names of left-out files or entries to print
HELP = f"""\
usage: {PROGRAM} data COMMAND [ARGUMENTS]

Turns text, and examples for fine-tuning, into what `{PROGRAM} train --data.path` reads fastest: tokens in \
memory-mapped files.

Commands
  prepare: turn text, JSONL or Parquet into token shards
  show: print the first documents or examples, and which tokens of them are learned
  train-tokenizer: train a tokenizer on a text
  verify: compare a prepared folder with its checksums

Examples
  {PROGRAM} data train-tokenizer books/ --vocab-size 4096 --output tokenizer
  {PROGRAM} data prepare books/ --tokenizer tokenizer --output prepared
  {PROGRAM} train --data.path prepared --model.vocab-size 4096

{PROGRAM} data COMMAND --help shows examples, options and exit statuses.
"""
EXIT = """\
Exit status
  0: done; 2: input that cannot be used; 130: interrupted."""
INPUTS = """\
Inputs
  Text files in UTF-8, each a document; JSONL (.jsonl, .ndjson), JSON (.json: a list of objects, or an object per \
line), CSV and TSV with a header row, and Parquet (.parquet), each record or row a document; and folders of such \
files. Records and compressed files with another suffix are refused by name. Files of a folder that are not UTF-8 \
text, and empty documents, are left out and counted. Links to files are followed; links to folders, pipes and the \
like are passed over and named."""
PREPARE = f"""\
  Makes a folder of token shards for {PROGRAM} train --data.path. After an interruption, the same command continues; \
the result has the same bytes.

Examples
  {PROGRAM} data prepare books/ \\
    --output prepared
  {PROGRAM} data prepare web.jsonl \\
    --field content --output web
  {PROGRAM} data prepare chats.jsonl \\
    --task sft --tokenizer llama --output chats

{INPUTS}

Examples of a task
  --task sft reads records with messages (role, content), with prompt and completion, or with instruction and output; \
dpo with prompt, chosen and rejected; kto with prompt, completion and label. Prompts and completions are text or lists \
of messages; messages need a chat template.

Saves
  tokens-N.bin, uint16 or uint32, with an end token after each document; documents-N.bin, where each document ends; \
of a task masks-N.bin, the learned tokens, and labels-N.bin of kto; tokenizer/; and, last, manifest.json with checksums.

{EXIT}
"""
LEARN = f"""\
  Trains a byte-level BPE tokenizer on a text, and saves it as a folder that transformers loads.

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
  Reads every file of a prepared folder, and compares its checksum with the manifest's. {PROGRAM} train compares \
the checksums of the shards as it starts, unless --data.no-verify is given.

Examples
  {PROGRAM} data verify prepared
  {PROGRAM} data verify web

{EXIT}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareOptions:
    """Turn text into token shards."""

    inputs: Annotated[
        tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="INPUT", help_behavior_hint="(required)")
    ] = ()
    """Files, or folders of files."""
    output: Annotated[Path, tyro.conf.arg(metavar="FOLDER")]
    """The folder to make, or to continue after an interruption."""
    tokenizer: Annotated[Path | None, tyro.conf.arg(metavar="PATH", help_behavior_hint="(default: bytes)")] = None
    """A tokenizer.json, or a folder that contains one."""
    task: Task = "pretrain"
    """What the data is for. sft, dpo, kto: records of examples."""
    template: Annotated[
        Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="(default: the tokenizer's own)")
    ] = None
    """A Jinja file, the chat template of messages."""
    end: Annotated[
        str | None, tyro.conf.arg(metavar="TOKEN", help_behavior_hint="(default: the tokenizer's eos_token)")
    ] = None
    """The token to put after each document."""
    bos: Annotated[
        bool,
        tyro.conf.FlagCreatePairsOff,
        tyro.conf.arg(help_behavior_hint="(default: what the tokenizer puts before a prompt, if anything)"),
    ] = False
    """Put the tokenizer's bos_token before each document."""
    no_bos: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Put nothing before documents."""
    eos: bool = True
    """Put an end token after each document."""
    field: Annotated[str, tyro.conf.arg(metavar="NAME")] = "text"
    """The field of a JSON record that holds the text."""
    column: Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="(default: as --field)")] = None
    """The column of Parquet, CSV or TSV that holds the text."""
    skip_bad: bool = False
    """Leave out and count malformed records, records without the field, files without the column, and bad examples."""
    workers: Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="(default: one per CPU)")] = None
    """Number of processes. The result is the same with any number."""
    shard_mib: Annotated[int, tyro.conf.arg(metavar="INT")] = 64
    """MiB of input per shard."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnOptions:
    """Train a tokenizer on a text."""

    inputs: Annotated[
        tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="INPUT", help_behavior_hint="(required)")
    ] = ()
    """Files, or folders of files."""
    output: Annotated[Path, tyro.conf.arg(metavar="FOLDER")]
    """The folder to make."""
    vocab_size: Annotated[int, tyro.conf.arg(metavar="INT")]
    """Size of the vocabulary, with the 256 bytes and the end token of documents."""
    field: Annotated[str, tyro.conf.arg(metavar="NAME")] = "text"
    """The field of a JSON record that holds the text."""
    column: Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="(default: as --field)")] = None
    """The column of Parquet, CSV or TSV that holds the text."""
    skip_bad: bool = False
    """Leave out malformed records, records without the field, and files without the column."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOptions:
    """Compare a prepared folder with its checksums."""

    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """A folder made by prepare."""


def run(arguments: list[str]) -> int:
    """Runs `weft data` with the arguments after `data`. Returns the exit status."""
    command, *command_arguments = arguments or ["--help"]
    if command in ("-h", "--help", "help"):
        print(wrap_lines(HELP, shutil.get_terminal_size().columns))
        return 0
    if command not in COMMANDS:
        near = difflib.get_close_matches(command, COMMANDS, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        known = ", ".join(COMMANDS)
        print(f"{PROGRAM} data: unknown command {command!r}; {hint}the commands are {known}", file=sys.stderr)
        return 2
    return COMMANDS[command](command_arguments)


def _prepare(arguments: list[str]) -> int:
    """`weft data prepare`."""
    options = parse(PrepareOptions, arguments, command="data prepare", about=PREPARE)
    with report_bad_input("data prepare"):
        from ..data.prepare import prepare
        from ..data.tokenizer import find_tokenizer, with_template

        _check_inputs(options.inputs)
        workers = len(os.sched_getaffinity(0)) if options.workers is None else options.workers
        for name, value in (("workers", workers), ("shard-mib", options.shard_mib)):
            if value < 1:
                raise ValueError(f"--{name} is {value}; it must be 1 or more")
        if options.bos and options.no_bos:
            raise ValueError("--bos and --no-bos are both given; give only one")
        tokenizer = find_tokenizer(options.tokenizer, options.end)
        _check_task(options)
        with renamed_options(RENAMED):
            template = None if options.task == "pretrain" else find_template(tokenizer, options.template)
        if options.template is not None and template is not None:
            tokenizer = with_template(tokenizer, template.source)  # to be saved with the model
        with _progress() as progress, renamed_options(RENAMED):
            manifest = prepare(
                options.inputs,
                options.output,
                tokenizer=tokenizer,
                columns=Columns(field=options.field, column=options.column, skip_bad=options.skip_bad),
                bos=True if options.bos else False if options.no_bos else None,
                eos=options.eos,
                task=options.task,
                template=template,
                workers=workers,
                part_bytes=options.shard_mib * MIB,
                progress=progress,
            )
    shards = manifest.shards
    empty, bad = (sum(getattr(shard, name) for shard in shards) for name in ("empty", "bad"))
    print(
        f"prepared {options.output}: {_describe_contents(options.output, manifest)} of "
        f"{manifest.vocab_size:,} kinds, {manifest.dtype}, in {_count(len(shards), 'shard')}"
        + (f"; {_describe_boundary_tokens(manifest.request)}" if options.task == "pretrain" else "")
    )
    is_text = options.task == "pretrain"
    skipped = [name for shard in shards for name in shard.skipped]
    if empty or bad or skipped:
        named = f": {printable(', '.join(skipped[:NAMED]))}{', ...' if len(skipped) > NAMED else ''}" if skipped else ""
        print(
            f"left out {_count(empty, 'empty document' if is_text else 'blank line')}, "
            f"{_count(bad, 'bad line' if is_text else 'bad record')}, "
            f"{_count(len(skipped), 'file')} {'not in UTF-8' if is_text else 'without records'}{named}"
        )
    passed = [entry for shard in shards for entry in shard.passed]
    if passed:
        named = printable(", ".join(passed[:NAMED])) + (", ..." if len(passed) > NAMED else "")
        print(f"passed over {len(passed)} {'entry' if len(passed) == 1 else 'entries'}: {named}")
    output = shlex.quote(str(options.output))
    if is_text:
        size = "" if tokenizer.is_bytes else f" --model.vocab-size {manifest.vocab_size}"
        print(f"next  {PROGRAM} train --data.path {output}{size}")
    else:
        print(f"next  {PROGRAM} data show {output}")
        print(f"      {PROGRAM} train --from FOLDER --task {options.task} --data.path {output}")
    return 0


def _check_task(options: PrepareOptions) -> None:
    """Raises ValueError for options of texts with a task of examples, and for options of examples with texts."""
    if options.task == "pretrain":
        if options.template is not None:
            raise ValueError(f"--template {options.template} is for examples; give --task sft, dpo or kto")
        return
    text_options = {
        "--bos": options.bos,
        "--no-bos": options.no_bos,
        "--no-eos": not options.eos,
        f"--field {options.field}": options.field != "text",
        f"--column {options.column}": options.column is not None,
    }
    for name, is_set in text_options.items():
        if is_set:
            raise ValueError(f"{name} is for texts, and --task {options.task} reads records of examples; leave it out")


def _describe_contents(folder: Path, manifest: DataManifest) -> str:
    """The number of documents or examples, and of tokens, in words."""
    documents, tokens = (sum(getattr(shard, name) for shard in manifest.shards) for name in ("documents", "tokens"))
    if manifest.task == "pretrain":
        return f"{_count(documents, 'document')}, {_count(tokens, 'token')}"
    from ..data.examples.source import open_prepared

    return open_prepared(folder, manifest.task).describe()


def _train_tokenizer(arguments: list[str]) -> int:
    """`weft data train-tokenizer`."""
    options = parse(LearnOptions, arguments, command="data train-tokenizer", about=LEARN)
    with report_bad_input("data train-tokenizer"):
        from ..data.learn import train_tokenizer

        _check_inputs(options.inputs)
        tokenizer = train_tokenizer(
            options.inputs,
            options.output,
            vocab_size=options.vocab_size,
            columns=Columns(field=options.field, column=options.column, skip_bad=options.skip_bad),
        )
    print(
        f"saved {options.output}: a tokenizer of {tokenizer.vocab_size:,} tokens; each document ends with "
        f"token {tokenizer.end}"
    )
    print(f"next  {PROGRAM} data prepare INPUT --tokenizer {shlex.quote(str(options.output))} --output FOLDER")
    return 0


def _verify(arguments: list[str]) -> int:
    """`weft data verify`."""
    options = parse(VerifyOptions, arguments, command="data verify", about=VERIFY)
    with report_bad_input("data verify"):
        from ..data.shards import verify

        manifest = verify(options.folder)
    print(
        f"{options.folder} is unchanged since it was prepared: {_count(len(manifest.shards), 'shard')}, every checksum "
        f"as in the manifest"
    )
    return 0


def _describe_boundary_tokens(request: dict[str, Any]) -> str:
    """The tokens before and after each document, in words."""
    begin, end = (", ".join(map(str, request[name])) for name in ("before_each", "after_each"))
    parts = [f"begins with token {begin}"] * bool(begin) + [f"ends with token {end}" if end else "has no end"]
    return f"each document {' and '.join(parts)}"


COMMANDS = {"prepare": _prepare, "show": show, "train-tokenizer": _train_tokenizer, "verify": _verify}


def _check_inputs(inputs: tuple[Path, ...]) -> None:
    if not inputs:
        raise ValueError("no INPUT is given; give files, or folders of them: text, JSONL or Parquet")


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """Context whose value is a function (bytes read, bytes in all) that updates a bar on a terminal."""
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
