"""Commands to try after a run, printed as the last lines.

The commands fit the run's data, options and number of processes, and the way the processes were started.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ..checks import check_tensor_parallel
from ..exact import check_exact, parse_exact
from ..processes import is_launched
from ..terminal import PROGRAM
from .config import MeshConfig, TrainConfig
from .memory_check import check_room
from .recipes import recipe
from .run import Run
from .toml import OPTIONS


def suggestions(run: Run, *, on_cpu: bool) -> list[str]:
    """Commands to try after a run: generate text, repeat the run on another mesh, train on the user's own text.

    on_cpu: whether the run is on a CPU, where a further process can always be started.
    Every returned command would be accepted.
    """
    arguments = [str(run.folder), *_option("prompt", run.corpus.prompt)]
    if run.config.task != "pretrain" and run.corpus.tokenizer.chat_templates:
        arguments = [str(run.folder), "--chat"]
    lines = [f"{PROGRAM} generate {shlex.join(arguments)}"]
    if run.config.model_class is not None:
        lines = []  # `weft generate` does not load a model class of the user
    train = _train_command(run.processes)
    if train is None:
        return lines
    commands = []
    try:
        mesh = _alternative_mesh(run, on_cpu)
        if mesh is not None:
            # the new mesh has neither cp nor pp nor ep
            without: dict[str, Any] = {"context": None, "schedule": None, "split": None, "experts_tokens": None}
            plan = dataclasses.replace(run.config.plan, experts_over_tp=False, **without)
            alternative = dataclasses.replace(run.config, mesh=mesh, plan=plan)
            if run.config.digests:
                alternative = dataclasses.replace(alternative, digests=0, against=run.folder)
            equal = "loss" if plan.exact is None else "bits"
            commands.append(f"{train} {_arguments(run, alternative)}    the same {equal} on another mesh")
        if run.config.data.path is None and not run.config.data.mixture:
            commands.append(f"{train} {_arguments(run, run.config)} --data.path FILE_OR_FOLDER    your own text")
    except NoOption:
        return lines
    return [*lines, *commands]


class NoOption(ValueError):
    """A config value that no option of the command can set."""


def _train_command(processes: int) -> str | None:
    """The command to start `weft train` like this run; None under a launcher whose arguments are unknown."""
    if not is_launched(os.environ):
        return f"{PROGRAM} train"
    if "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("LOCAL_WORLD_SIZE") == str(processes):
        return f"torchrun --nproc-per-node {processes} -m weft.models.cli train"
    return None


def _alternative_mesh(run: Run, on_cpu: bool) -> MeshConfig | None:
    """Another mesh for the run, of dp and tp only; None if no such mesh fits the model and the memory.

    The number of processes is the run's, except for a single process on a CPU without a launcher: then two.
    """
    processes = run.processes
    if processes == 1 and on_cpu and not is_launched(os.environ):
        processes = 2
    for tp in range(1, processes + 1):
        if processes % tp == 0 and (1, processes // tp, 1, tp) != (run.pp, run.dp, run.cp, run.tp):
            dp = processes // tp
            try:
                check_tensor_parallel(run.config.model, tp)
                if run.config.plan.exact is not None:
                    check_exact({"dp": dp, "tp": tp}, parse_exact(run.config.plan.exact))
                config = dataclasses.replace(run.config, mesh=MeshConfig(dp=dp, tp=tp))
                alternative = dataclasses.replace(run, config=config, pp=1, dp=dp, cp=1, tp=tp, resume=None)
                check_room(alternative, gpus=0 if on_cpu else processes)
            except ValueError:
                continue
            return MeshConfig(dp=dp, tp=tp)
    return None


def _arguments(run: Run, config: TrainConfig) -> str:
    """The arguments of `weft train` for `config`, without the output folder."""
    base = run.base or recipe(run.recipe or "")
    options = options_between(dataclasses.replace(config, output=None, resume=None), base, "")
    # for a model class of the user, no recipe has the sizes: all but the class's defaults are given
    if config.model_class is not None:
        defaults = {field.name: field.default for field in dataclasses.fields(config.model)}
        options += options_between(config.model, SimpleNamespace(**defaults), "model.")
    return shlex.join([*([] if run.recipe is None else [run.recipe]), *options])


def options_between(config: object, default: object, prefix: str) -> list[str]:
    """The options to turn `default` into `config`. prefix: of the options' names, as "model.".

    config: a dataclass. default: of the same class, or any object with the fields as attributes.
    Raises NoOption for a difference without an option.
    """
    options = []
    for field in dataclasses.fields(config):  # type: ignore[arg-type]
        value, unchanged = getattr(config, field.name), getattr(default, field.name, None)
        option = OPTIONS.get(field.name, field.name).rstrip("_").replace("_", "-")
        name = f"{prefix}{option}"
        if value == unchanged:
            continue
        if dataclasses.is_dataclass(value) and type(value) is type(unchanged):
            options += options_between(value, unchanged, f"{name}.")
        elif isinstance(value, bool):
            options.append(f"--{name}" if value else f"--{prefix}no-{option}")
        elif isinstance(value, tuple):
            options += [f"--{name}", *map(str, value)]
        elif isinstance(value, int | float | str | Path):
            options += _option(name, str(value))
        else:
            raise NoOption(f"{name} is {value!r}, but {unchanged!r} in the recipe")
    return options


def _option(name: str, value: str) -> list[str]:
    """An option with a value: two arguments, or --name=value if the value begins with a dash."""
    return [f"--{name}={value}"] if value.startswith("-") else [f"--{name}", value]
