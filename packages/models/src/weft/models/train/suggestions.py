"""The commands to type after a run: they fit its text, its options, its processes and how those were started."""

from __future__ import annotations

import dataclasses
import os
import shlex
from pathlib import Path
from types import SimpleNamespace

from ..checks import check_tensor_parallel
from ..terminal import PROGRAM
from .config import MeshConfig, Run, TrainConfig
from .recipes import recipe
from .room import check_room
from .toml import OPTIONS


def suggestions(run: Run, *, on_cpu: bool) -> list[str]:
    """Generation from the run's checkpoint; the same run on another mesh, where there is one; and on the user's own text.

    on_cpu: then one process more can always be started. Each command is one that is not refused.
    """
    lines = [f"{PROGRAM} generate {shlex.join([str(run.folder), *_option('prompt', run.corpus.prompt)])}"]
    if run.config.model_class is not None:
        lines = []  # the command makes models of the families alone
    train = _train_command(run.processes)
    if train is None:
        return lines
    others = []
    try:
        mesh = _other_mesh(run, on_cpu)
        if mesh is not None:
            plan = dataclasses.replace(run.config.plan, context=None, schedule=None, split=None)  # no axis there
            other = dataclasses.replace(run.config, mesh=mesh, plan=plan)
            others.append(f"{train} {_arguments(run, other)}    the same loss on another mesh")
        if run.config.data.path is None and not run.config.data.mixture:
            others.append(f"{train} {_arguments(run, run.config)} --data.path FILE_OR_FOLDER    your own text")
    except _NoOption:
        return lines
    return [*lines, *others]


class _NoOption(ValueError):
    """A value that no option of the command gives."""


def _train_command(processes: int) -> str | None:
    """How `weft train` is started as it was now; None by a launcher whose own arguments are not known."""
    if "RANK" not in os.environ:
        return f"{PROGRAM} train"
    if "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("LOCAL_WORLD_SIZE") == str(processes):
        return f"torchrun --nproc-per-node {processes} -m weft.models.cli train"
    return None


def _other_mesh(run: Run, on_cpu: bool) -> MeshConfig | None:
    """Another mesh of as many processes, of two where there was one; data parallel alone where it was not. None where
    there is none that has room."""
    processes = run.processes
    if processes == 1 and on_cpu and "RANK" not in os.environ:
        processes = 2
    for tp in range(1, processes + 1):
        if processes % tp == 0 and (1, processes // tp, 1, tp) != (run.pp, run.dp, run.cp, run.tp):
            dp = processes // tp
            try:
                check_tensor_parallel(run.config.model, tp)
                check_room(
                    dataclasses.replace(run, pp=1, dp=dp, cp=1, tp=tp, resume=None), gpus=0 if on_cpu else processes
                )
            except ValueError:
                continue
            return MeshConfig(dp=dp, tp=tp)
    return None


def _arguments(run: Run, config: TrainConfig) -> str:
    """The arguments of `weft train` that make `config`, but for its output."""
    base = run.base or recipe(run.recipe or "")
    options = _options(dataclasses.replace(config, output=None, resume=None), base, "")
    if config.model_class is not None:  # no recipe says its sizes: what the class itself does not say is given
        usual = {field.name: field.default for field in dataclasses.fields(config.model)}
        options += _options(config.model, SimpleNamespace(**usual), "model.")
    return shlex.join([*([] if run.recipe is None else [run.recipe]), *options])


def _options(config: object, default: object, prefix: str) -> list[str]:
    """The options that make `config` of `default`, two values of one dataclass. Raises _NoOption where none do."""
    options = []
    for field in dataclasses.fields(config):  # type: ignore[arg-type]
        value, usual = getattr(config, field.name), getattr(default, field.name, None)
        option = OPTIONS.get(field.name, field.name).rstrip("_").replace("_", "-")
        name = f"{prefix}{option}"
        if value == usual:
            continue
        if dataclasses.is_dataclass(value) and type(value) is type(usual):
            options += _options(value, usual, f"{name}.")
        elif isinstance(value, bool):
            options.append(f"--{name}" if value else f"--{prefix}no-{option}")
        elif isinstance(value, tuple):
            options += [f"--{name}", *map(str, value)]
        elif isinstance(value, int | float | str | Path):
            options += _option(name, str(value))
        else:
            raise _NoOption(f"{name} is {value!r}, and {usual!r} in the recipe")
    return options


def _option(name: str, value: str) -> list[str]:
    """An option and its value, in one word where the value would be taken for an option."""
    return [f"--{name}={value}"] if value.startswith("-") else [f"--{name}", value]
