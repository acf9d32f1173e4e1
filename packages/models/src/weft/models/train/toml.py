"""A run's configuration as a TOML file (config.toml, `--print-config`), and a TOML file as arguments of the command."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..safe_files import parse_toml, read_plain
from .config import TrainConfig

_OF_ONE_RUN = ("output", "resume", "against")  # paths of a single run, left out of the file

# Fields of TrainConfig whose option on the command line has another name. A file has the field's own name: there the
# key "model" is the table of the fields of TrainConfig.model.
OPTIONS = {"model_class": "model"}
LARGEST = 2**20  # bytes of a file; a run's config.toml has about a thousand
_NAME = re.compile(r"[A-Za-z0-9_-]+")

_SUM = "# sha256 of all above: "


def as_toml(recipe: str | None, config: TrainConfig) -> str:
    """The recipe's name, if any, and every option with a value, as a file for `weft train --config`."""
    import tomlkit  # imported here: not needed for reading a configuration

    values = {name.rstrip("_"): value for name, value in dataclasses.asdict(config).items() if name not in _OF_ONE_RUN}
    return tomlkit.dumps(_toml_values({"recipe": recipe, **values}))


def add_checksum(text: str) -> str:
    """The TOML text with a last line added: a comment with the text's SHA-256, for `check_sum`."""
    return f"{text}{_SUM}{hashlib.sha256(text.encode()).hexdigest()}\n"


def check_sum(path: Path) -> None:
    """Raise ValueError if a file with the comment of `add_checksum` was changed since. Other files are accepted."""
    try:
        content = read_plain(path, limit=LARGEST)
    except (OSError, ValueError):  # reported by `read_toml`
        return
    text, comment, checksum = content.rpartition(_SUM.encode())
    if comment and checksum != f"{hashlib.sha256(text).hexdigest()}\n".encode():
        raise ValueError(
            f"config {path} was changed after it was written; copy it again, or remove its last "
            f"line if the change is meant"
        )


def read_toml(path: Path, *, without: Collection[str] = ()) -> tuple[str | None, list[str]]:
    """Read a configuration file: (the recipe's name or None, the options as arguments of the command).

    without: names of options to leave out.
    Raises ValueError for an unreadable file, invalid TOML, or an unknown option.
    """
    try:
        content = read_plain(path, limit=LARGEST)
    except OSError as error:
        raise ValueError(f"config {path} cannot be read: {error.strerror}") from None
    values = parse_toml(content, f"config {path}", "no option has so many dots or brackets")
    recipe = values.pop("recipe", None)
    if recipe is not None and not isinstance(recipe, str):
        raise ValueError(f"config {path} has recipe = {recipe!r:.60}; give a recipe's name")
    known = [field.name.rstrip("_") for field in dataclasses.fields(TrainConfig)]
    if unknown := next((name for name in values if name.replace("-", "_") not in known), None):
        matches = difflib.get_close_matches(unknown[:60], known, n=1)
        hint = f"; did you mean {matches[0]!r}?" if matches else f"; the options are {', '.join(known)}"
        raise ValueError(f"config {path} has {unknown[:60]!r}, which is not an option{hint}")
    included = {name: value for name, value in values.items() if name.replace("-", "_") not in without}
    try:
        return recipe, list(_arguments(included, ""))
    except ValueError as error:
        raise ValueError(f"config {path}: {error}") from None


def _toml_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values for TOML: None and tables without values are left out, tuples become lists, paths become strings."""
    result: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            if table := _toml_values(value):
                result[name] = table
        elif isinstance(value, tuple):
            result[name] = [_toml_value(each) for each in value]
        elif value is not None:
            result[name] = _toml_value(value)
    return result


def _toml_value(value: Any) -> Any:
    """A value as written to the file.

    A path or mixture beginning with "-" gets "./" in front: `_text` refuses a leading dash when the file is read.
    """
    if not isinstance(value, str | Path):
        return value
    return f"./{value}" if str(value).startswith("-") else str(value)


def _arguments(values: Mapping[str, Any], prefix: str) -> Iterator[str]:
    """Yield the arguments for a table of options. Raises ValueError for a name that no option can have."""
    for name, value in values.items():
        if not _NAME.fullmatch(name):
            raise ValueError(f"{prefix}{name[:60]!r} is not an option; remove it")
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
    """A value as an argument. Raises ValueError for a value that the command would misread."""
    if isinstance(value, list | dict):
        raise ValueError(
            f"{name} is a list that contains lists or tables, which no option takes; write a list of plain values"
        )
    if isinstance(value, str) and value.startswith("-"):
        raise ValueError(f"{name} is {value[:60]!r}, which looks like an option; write a path as './-name'")
    return str(value)
