"""The command line of `weft explain` in a golden file: made for --save, and read by `weft check`."""

from __future__ import annotations

import argparse
import math
import os
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..predict.golden import Command, Golden
from ..terminal import PROGRAM
from ..train.config import TrainConfig


def command_of(arguments: Sequence[str], *, folder: Path, config: Path | None, batch: str | None) -> Command:
    """The `Command` to save in a golden file in `folder`. Called by `weft explain --save`.

    arguments: of `weft explain`, without the options of explain alone. config, batch: the values of --config and
    --batch; None where not given.
    """
    run_arguments = list(arguments)
    recipe = run_arguments.pop(0) if run_arguments and not run_arguments[0].startswith("-") else None
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--from", dest="from_folder", type=Path)
    own, options = parser.parse_known_args(run_arguments)
    return Command(
        recipe=recipe,
        config=None if config is None else _relative(config, folder),
        from_folder=None if own.from_folder is None else _relative(own.from_folder, folder),
        batch=batch,
        options=tuple(options),
    )


def _relative(path: Path, folder: Path) -> str:
    return Path(os.path.relpath(path.resolve(), folder.resolve())).as_posix()


def arguments_of(command: Command, folder: Path) -> tuple[list[str], Path | None]:
    """The inverse of `command_of`: the arguments of `weft explain` common to train, and the path of --config.

    folder: of the golden file.
    """
    arguments = [] if command.recipe is None else [command.recipe]
    if command.from_folder is not None:
        arguments += ["--from", _absolute(command.from_folder, folder)]
    config = None if command.config is None else Path(_absolute(command.config, folder))
    return [*arguments, *command.options], config


def _absolute(path: str, folder: Path) -> str:
    return os.path.relpath(folder / path)


def command_line(golden: Golden, path: Path) -> str:
    """The `weft explain` command to save the golden file at `path` again."""
    arguments, config = arguments_of(golden.command, path.parent)
    own = [] if config is None else ["--config", str(config)]
    own += [] if golden.command.batch is None else ["--batch", golden.command.batch]
    return shlex.join([PROGRAM, "explain", *arguments, *own, "--save", str(path)])


def with_mesh_of(config: TrainConfig, golden: Golden) -> TrainConfig:
    """The configuration with the golden file's dp and tp where the options leave these to this machine's GPUs."""
    sizes = {axis: golden.mesh.get(axis, 1) for axis in ("dp", "tp") if getattr(config.mesh, axis) is None}
    return replace(config, mesh=replace(config.mesh, **sizes))


def describe_ranks(golden: Golden) -> str:
    """The number of recorded ranks in words: "2 ranks of 16, one of each pipeline stage"."""
    count, processes = len(golden.ranks), math.prod(golden.mesh.values())
    stages = golden.mesh.get("pp", 1)
    kinds = ", one of each pipeline stage" if count == stages > 1 else ""
    return f"{count} rank{'s' * (count > 1)} of {processes:,}{kinds}"
