"""Shared by all commands: parsing arguments with tyro, and one-line reports of unusable input."""

from __future__ import annotations

import argparse
import difflib
import io
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import NoReturn, TypeVar

import tyro

from ..processes import is_launched
from ..terminal import PROGRAM, one_line, wrap_lines

T = TypeVar("T")
_NO_NUMBER = re.compile(
    r"Error parsing (--\S+): .*(?:invalid literal for (int)\(\) with base 10|could not convert string to float): (.*); "
    r"Argument helptext: .*"
)
_NO_NUMBER_IN_OWN = re.compile(r"argument (--\S+): invalid (?:(int)|float) value: (.*)")  # argparse's words
# A field at the beginning of a config's error: "train.steps is -5", "mesh.dp is 0", "LlamaConfig: num_layers is 0".
_FIELD = re.compile(r"(?:train\.|(\w+): )?([a-z]\w*(?:\.\w+)*)(?= is )")
_NEGATED = re.compile(r"^--no-((?:[a-z-]+\.)+)([a-z-]+)$")  # --no-data.pack, accepted in place of --data.no-pack
HELP_OPTIONS = ("-h", "--help", "--help-verbose")
SILENT_SECONDS = 15.0  # ten times the spread of the start of a launcher's processes on busy cores


def parse(
    kind: type[T],
    arguments: Sequence[str],
    *,
    command: str,
    about: str,
    default: T | None = None,
    compact_below: int = 0,
    file: Path | None = None,
) -> T:
    """Parse the arguments as a `kind`, a dataclass.

    --help exits the program with status 0, a mistake found by tyro with a line and status 2.
    command: the command as shown in the usage, as "train [RECIPE]".
    about: the text of --help above the options: headings, and indented lines, which are wrapped.
    default: the values of options that are not given; None: the defaults of the fields of `kind`.
    compact_below: terminals with fewer columns get options without descriptions; --help-verbose has the descriptions.
    file: the file with the arguments, where a mistake raises a ValueError of one line; None: the command line.
    """
    arguments = [_NEGATED.sub(r"--\1no-\2", each) for each in arguments]
    if file is not None:
        return _parse_file(kind, arguments, default, file)
    width = shutil.get_terminal_size().columns
    asks_for_help = not {*HELP_OPTIONS}.isdisjoint(arguments)
    # tyro looks at stdout only, and writes to both.
    on_terminal = asks_for_help and sys.stdout.isatty() and sys.stderr.isatty()
    tyro._experimental_options["utf8_boxes"] = on_terminal
    tyro._experimental_options["ansi_codes"] = on_terminal and not os.environ.get("NO_COLOR")
    mistakes = io.StringIO()
    try:
        with redirect_stderr(mistakes), nullcontext() if asks_for_help else _unwrapped():
            return tyro.cli(
                kind,
                default=tyro.MISSING_NONPROP if default is None else default,
                args=arguments,
                prog=f"{PROGRAM} {command}",
                description=wrap_lines(about, width),
                compact_help=width < compact_below,
                console_outputs=is_printing_rank() or not asks_for_help,
                # A recipe without a rope scaling gets no subcommand to choose one.
                config=(tyro.conf.AvoidSubcommands,),
            )
    except SystemExit as end:
        if end.code:
            with report_bad_input(command.partition(" [")[0]):
                message = _name_option(_one_line(mistakes.getvalue()), kind, default)
                raise ValueError(_with_remedy(message, kind, default)) from None
        raise


def _name_option(message: str, kind: type[T], default: T | None) -> str:
    """tyro's message of a single line about a value, as "--steps is -5; it must be 1 or more".

    Further messages are returned unchanged.
    """
    if no_number := _NO_NUMBER.fullmatch(message):
        return _describe_no_number(no_number)
    group, colon, text = message.removeprefix("Error parsing ").partition(": ")
    if not message.startswith("Error parsing ") or not colon or group.startswith("--"):
        return message
    if field := _FIELD.match(text):
        config_class, name = field.groups()
        option = f"--{group}.{name}" if config_class else f"--{name}"
        if (option := option.replace("_", "-")) in _find_options(kind, default):
            return option + text[field.end() :]
    return text


def _describe_no_number(found: re.Match[str]) -> str:
    """The error for text in place of a number. found: a match of `_NO_NUMBER` or `_NO_NUMBER_IN_OWN`."""
    option, is_whole, value = found.groups()
    return f"{option} is {value}; it must be a {'whole ' if is_whole else ''}number"


def _find_options(kind: type[T], default: T | None) -> list[str]:
    """The options of a `kind`, in the order of the help."""
    text = io.StringIO()
    with suppress(SystemExit), redirect_stdout(text), _unwrapped():
        default_or_none = tyro.MISSING_NONPROP if default is None else default
        tyro.cli(kind, default=default_or_none, args=["--help"], config=(tyro.conf.AvoidSubcommands,))
    return list(dict.fromkeys(re.findall(r"--[a-z][\w.-]*", text.getvalue())))


def _with_remedy(message: str, kind: type[T], default: T | None) -> str:
    """A message of a single line with a remedy where tyro gives none.

    For unknown options, the nearest; for --mesh.dp=2,tp=2 and --mesh dp=2,tp=2, the options to write.
    """
    if several := re.match(r"(--[a-z-]+\.)([a-z-]+) is '(\d+(?:,[a-z-]+=\d+)+)'; it must be a whole number$", message):
        group, first, values = several.groups()
        return f"{message}: write {_write_apart(group, f'{first}={values}')}"
    unknown = message.removeprefix("Unrecognized options: ")
    if unknown == message:
        return message
    unknown = unknown.partition("; ")[0]  # tyro's suggestions follow, with the help of each
    word, _, value = re.sub(r"^(--[\w.-]+)=", r"\1, ", unknown).partition(", ")
    option, options = f"--{word.lstrip('-')}", _find_options(kind, default)
    near = difflib.get_close_matches(option, options, n=3, cutoff=0.75)
    if re.fullmatch(r"[a-z-]+=\w+(,[a-z-]+=\w+)*", value) and any(each.startswith(f"{option}.") for each in options):
        remedy = f"write {_write_apart(f'{option}.', value)}"
    else:
        remedy = f"perhaps you meant {', '.join(near)}" if near else "--help lists the options"
    if not word.startswith("-"):
        remedy += ". Of the words without dashes, the first may be a recipe, and the rest are options' values"
    return f"Unrecognized options: {unknown}; {remedy}"


def _write_apart(group: str, values: str) -> str:
    """The options for values given together. group: as "--mesh."; values: as "dp=2,tp=2"."""
    return " ".join(f"{group}{name} {value}" for name, value in (each.split("=") for each in values.split(",")))


def _parse_file(kind: type[T], arguments: Sequence[str], default: T | None, file: Path) -> T:
    """Parse the arguments read from `file`. Raises ValueError with tyro's message for a mistake."""

    def name_key(message: str) -> str:
        named = _name_option(message, kind, default)
        return re.sub(r"^--([\w.-]+)(?= is )", lambda option: option[1].replace("-", "_"), named)

    tyro._experimental_options["utf8_boxes"] = tyro._experimental_options["ansi_codes"] = False
    with raising_mistakes(f"config {file}", name_key):
        return tyro.cli(
            kind,
            default=tyro.MISSING_NONPROP if default is None else default,
            args=arguments,
            config=(tyro.conf.AvoidSubcommands,),
        )


@contextmanager
def raising_mistakes(where: str, describe: Callable[[str], str] = str) -> Iterator[None]:
    """Context in which a mistake found by tyro raises a ValueError with tyro's message in a single line.

    where: the beginning of the line. describe: edits the message. Nothing is printed inside.
    """
    output = io.StringIO()
    try:
        with redirect_stdout(output), redirect_stderr(output), _unwrapped():
            yield
    except SystemExit:
        raise ValueError(f"{where}: {describe(_one_line(output.getvalue()))}") from None


@contextmanager
def _unwrapped() -> Iterator[None]:
    """Context with a terminal width at which tyro wraps no line.

    Joining wrapped lines could not restore a number cut in two.
    """
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "100000"
    try:
        yield
    finally:
        os.environ.pop("COLUMNS")
        os.environ.update({} if before is None else {"COLUMNS": before})


def _one_line(text: str) -> str:
    """tyro's message in a single line, without heading and help, which lines of dashes separate from the message.

    A line printed by `parse`: without the command's name.
    """
    parts = re.split(r"^\W*-{10,}\W*$", text, flags=re.MULTILINE)
    if len(parts) == 1:
        return re.sub(rf"^{PROGRAM} [a-z -]+: ", "", " ".join(text.split()))
    return "; ".join(" ".join(each.split()) for each in parts[1:-1] or parts[1:])


def batch_sizes(text: str) -> tuple[int, int]:
    """The rows and tokens of --batch, written as "2048,8192". Raises ValueError for another form."""
    sizes = text.split(",")
    if len(sizes) != 2 or not all(size.strip().isdecimal() and int(size) for size in sizes):
        raise ValueError(f"--batch {text!r} is not rows and tokens; write it like --batch 2048,8192")
    return int(sizes[0]), int(sizes[1])


class OwnOptions(argparse.ArgumentParser):
    """A parser, without --help, of the options that a command has beside the options of a run's configuration.

    `parse_known_args` returns the remaining arguments, too. A mistake raises ValueError, for `report_bad_input`.
    """

    def __init__(self) -> None:
        super().__init__(add_help=False, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        no_number = _NO_NUMBER_IN_OWN.fullmatch(message)
        raise ValueError(message if no_number is None else _describe_no_number(no_number))


@contextmanager
def report_bad_input(command: str) -> Iterator[None]:
    """Context that reports unusable input (a ValueError) in one line and exits with status 2.

    Further exceptions keep the traceback.
    Of a launcher's processes, rank 0 prints the line. Higher ranks wait for the launcher to end every process. A higher
    rank that still runs after SILENT_SECONDS has a different error, and prints a line.
    """
    try:
        yield
    except ValueError as error:
        _wait_for_rank_0()
        print(f"{PROGRAM} {command}: {one_line(str(error))}", file=sys.stderr)
        sys.exit(2)


@contextmanager
def renamed_options(names: Mapping[str, str]) -> Iterator[None]:
    """Context that renames options of `weft train` in the text of a ValueError, for a command with other names.

    names: a field of the run's configuration -> a field of the command's options, as data.path -> data.
    """
    try:
        yield
    except ValueError as error:
        text = str(error)
        for name, own in names.items():
            pattern = f"(--)?{re.escape(name).replace('_', '[-_]')}\\b"
            text = re.sub(pattern, f"--{own.replace('_', '-')}", text)
        raise ValueError(text) from None


def is_printing_rank() -> bool:
    """Whether this process prints for all of a launcher's processes. True for rank 0, and without a launcher."""
    return not is_launched(os.environ) or os.environ["RANK"] == "0"


def _wait_for_rank_0() -> None:
    """Wait on ranks above 0 until rank 0 has printed the same error and the launcher has ended this process."""
    if not is_printing_rank():
        time.sleep(SILENT_SECONDS)
