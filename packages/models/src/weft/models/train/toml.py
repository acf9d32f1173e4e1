"""A run's configuration as a TOML file, and back as arguments of the command."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..documents import read_plain
from .config import TrainConfig

_OF_ONE_RUN = ("output", "resume")  # where its results go, and what it goes on with, is not taken over by another

OPTIONS = {"model_class": "model"}  # in a file "model" is the table of the model's own options
LARGEST = 2**20  # bytes of a file; a run writes about a thousand
_NAME = re.compile(r"[A-Za-z0-9_-]+")
_DEEPEST = 8  # dots in a name; options have three at most

_SUM = "# sha256 of all above: "


def as_toml(recipe: str | None, config: TrainConfig) -> str:
    """The recipe's name, where there is one, and every option that has a value; `weft train --config` takes it."""
    import tomlkit  # where configurations are only read there need be none

    values = {name.rstrip("_"): value for name, value in dataclasses.asdict(config).items() if name not in _OF_ONE_RUN}
    return tomlkit.dumps(_given({"recipe": recipe, **values}))


def with_sum(text: str) -> str:
    """The text of a TOML file, and below it a comment by which `check_sum` knows it."""
    return f"{text}{_SUM}{hashlib.sha256(text.encode()).hexdigest()}\n"


def check_sum(path: Path) -> None:
    """Raises ValueError where a file of `with_sum` is not as it was written. One without that comment is passed by."""
    try:
        content = read_plain(path, limit=LARGEST)
    except (OSError, ValueError):  # which `read_toml` tells of
        return
    text, found, total = content.rpartition(_SUM.encode())
    if found and total != f"{hashlib.sha256(text).hexdigest()}\n".encode():
        raise ValueError(
            f"config {path} was changed after it was written; copy it again, or, where that is meant, remove its last line"
        )


def read_toml(path: Path, *, without: Collection[str] = ()) -> tuple[str | None, list[str]]:
    """The recipe that the file names, None where it names none, and its options as arguments of the command.

    without: names of options that are left out. Raises ValueError for a file that cannot be read, or is not TOML.
    """
    try:
        content = read_plain(path, limit=LARGEST)
    except OSError as error:
        raise ValueError(f"config {path} cannot be read: {error.strerror}") from None
    try:
        text = content.decode("utf-8")
        if any(
            line.partition("=")[0].count(".") > _DEEPEST for line in text.splitlines()
        ):  # which take tomllib minutes
            raise RecursionError
        values = tomllib.loads(text)
    except RecursionError:
        raise ValueError(f"config {path} nests too deeply to be read; no option has so many dots or brackets") from None
    except ValueError as error:  # not TOML, not UTF-8, or a number of more digits than Python reads
        raise ValueError(f"config {path} is not TOML: {error}") from None
    recipe = values.pop("recipe", None)
    if recipe is not None and not isinstance(recipe, str):
        raise ValueError(f"config {path} has recipe = {recipe!r:.60}; it is a name")
    known = [field.name.rstrip("_") for field in dataclasses.fields(TrainConfig)]
    if unknown := next((name for name in values if name.replace("-", "_") not in known), None):
        near = difflib.get_close_matches(unknown[:60], known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; the options are {', '.join(known)}"
        raise ValueError(f"config {path} has {unknown[:60]!r}, which is no option{hint}")
    kept = {name: value for name, value in values.items() if name.replace("-", "_") not in without}
    try:
        return recipe, list(_arguments(kept, ""))
    except ValueError as error:
        raise ValueError(f"config {path}: {error}") from None


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    """Without those that are None, which TOML has no word for."""
    given: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            given[name] = _given(value)
        elif isinstance(value, tuple):
            given[name] = [_written(each) for each in value]
        elif value is not None:
            given[name] = _written(value)
    return given


def _written(value: Any) -> Any:
    """A value of an option as the file has it. A path or a mixture that begins with "-" gets "./" before, which `_text` accepts."""
    if not isinstance(value, str | Path):
        return value
    return f"./{value}" if str(value).startswith("-") else str(value)


def _arguments(values: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for name, value in values.items():
        if not _NAME.fullmatch(name):
            raise ValueError(f"{prefix}{name[:60]!r} is no option; take it out")
        option = OPTIONS.get(name, name).replace("_", "-")
        if isinstance(value, dict):
            yield from _arguments(value, f"{prefix}{option}.")
        elif isinstance(value, bool):
            yield f"--{prefix}{'' if value else 'no-'}{option}"
        elif isinstance(value, list):
            yield from (f"--{prefix}{option}", *(_text(f"{prefix}{name}", each) for each in value))
        else:
            yield from (f"--{prefix}{option}", _text(f"{prefix}{name}", value))


def _text(name: str, value: object) -> str:
    """A value as an argument. Raises ValueError for a text that the command would take for an option of its own."""
    if isinstance(value, list | dict):
        raise ValueError(
            f"{name} is a list with lists or tables in it, which no option takes; write its values one after another"
        )
    if isinstance(value, str) and value.startswith("-"):
        raise ValueError(f"{name} is {value[:60]!r}, which begins as an option does; write a path as './-name'")
    return str(value)
