"""A run's configuration as a TOML file, and back as arguments of the command."""

from __future__ import annotations

import dataclasses
import hashlib
import tomllib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from .config import TrainConfig

_OF_ONE_RUN = ("output", "resume")  # where its results go, and what it goes on with, is not taken over by another

OPTIONS = {"model_class": "model"}  # in a file "model" is the table of the model's own options

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
        content = path.read_bytes()
    except OSError:  # which `read_toml` tells of
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
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"config {path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"config {path} is not TOML: {error}") from None
    recipe = values.pop("recipe", None)
    if recipe is not None and not isinstance(recipe, str):
        raise ValueError(f"config {path} has recipe = {recipe!r}; it is a name")
    kept = {name: value for name, value in values.items() if name.replace("-", "_") not in without}
    return recipe, list(_arguments(kept, ""))


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    """Without those that are None, which TOML has no word for."""
    given: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            given[name] = _given(value)
        elif isinstance(value, tuple):
            given[name] = list(value)
        elif value is not None:
            given[name] = str(value) if isinstance(value, Path) else value
    return given


def _arguments(values: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for name, value in values.items():
        option = OPTIONS.get(name, name).replace("_", "-")
        if isinstance(value, dict):
            yield from _arguments(value, f"{prefix}{option}.")
        elif isinstance(value, bool):
            yield f"--{prefix}{'' if value else 'no-'}{option}"
        elif isinstance(value, list):
            yield from (f"--{prefix}{option}", *map(str, value))
        else:
            yield from (f"--{prefix}{option}", str(value))
