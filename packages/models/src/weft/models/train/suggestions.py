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
from .toml import OPTIONS


def suggestions(run: Run, *, on_cpu: bool) -> list[str]:
    """Generation from the run's checkpoint; the same run on another mesh, where there is one; and on the user's own text.

    on_cpu: then one process more can always be started.
    """
    lines = [f"{PROGRAM} generate {shlex.quote(str(run.folder))} --prompt {shlex.quote(run.corpus.prompt)}"]
    if run.config.model_class is not None:
        lines = []  # the command makes models of the families alone
    train = _train_command(run.processes)
    if train is None:
        return lines
    mesh = _other_mesh(run, on_cpu and "RANK" not in os.environ)
    if mesh is not None:
        plan = dataclasses.replace(run.config.plan, context=None, schedule=None, split=None)  # no axis there
        other = dataclasses.replace(run.config, mesh=mesh, plan=plan)
        lines.append(f"{train} {_arguments(run, other)}    the same loss on another mesh")
    if run.config.data.path is None:
        lines.append(f"{train} {_arguments(run, run.config)} --data.path FILE_OR_FOLDER    your own text")
    return lines


def _train_command(processes: int) -> str | None:
    """How `weft train` is started as it was now; None by a launcher whose own arguments are not known."""
    if "RANK" not in os.environ:
        return f"{PROGRAM} train"
    if "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("LOCAL_WORLD_SIZE") == str(processes):
        return f"torchrun --nproc-per-node {processes} -m weft.models.cli train"
    return None


def _other_mesh(run: Run, may_grow: bool) -> MeshConfig | None:
    """Another mesh of as many processes, of two where there was one; data parallel alone where it was not. None where
    there is none."""
    processes = run.processes
    if processes == 1 and may_grow:
        processes = 2
    for tp in range(1, processes + 1):
        if processes % tp == 0 and (1, processes // tp, 1, tp) != (run.pp, run.dp, run.cp, run.tp):
            try:
                check_tensor_parallel(run.config.model, tp)
            except ValueError:
                continue
            return MeshConfig(dp=processes // tp, tp=tp)
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
    """The options that make `config` of `default`, two values of one dataclass."""
    options = []
    for field in dataclasses.fields(config):  # type: ignore[arg-type]
        value, usual = getattr(config, field.name), getattr(default, field.name)
        name = OPTIONS.get(field.name, field.name).rstrip("_").replace("_", "-")
        if dataclasses.is_dataclass(value):
            options += _options(value, usual, f"{prefix}{name}.")
        elif isinstance(value, bool) and value != usual:
            options.append(f"--{prefix}{name}" if value else f"--{prefix}no-{name}")
        elif isinstance(value, tuple) and value != usual:
            options += [f"--{prefix}{name}", *map(str, value)]
        elif value != usual:
            assert isinstance(value, int | float | str | Path), f"{prefix}{name} is {value!r}"
            options += [f"--{prefix}{name}", str(value)]
    return options
