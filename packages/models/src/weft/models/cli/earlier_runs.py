"""The options of an earlier run, read back for a command.

`plan_replay`: for `weft train --replay RUN --step N`, the options of a run which takes a single step again.
`with_options_of_run`: for `weft evaluate`, the options of the losses of preferences in a run's config.toml.
`command_of` and `arguments_of`: the command line of `weft explain` in a golden file, made for --save, and read by
`weft check`.
"""

from __future__ import annotations

import argparse
import math
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import tyro

from ..checkpoint.manifest import DamagedCheckpoint, Manifest
from ..data.examples.example import Task
from ..predict.golden import Command, Golden
from ..terminal import PROGRAM
from ..train.config import TrainConfig
from ..train.folder import CONFIG, checkpoints
from ..train.metrics_file import METRICS
from ..train.task_config import DPOConfig, KTOConfig
from ..train.toml import check_sum, read_toml
from .arguments import parse
from .compare import check_run_folder


@dataclass(frozen=True, slots=True)
class Replay:
    """The run asked for by `--replay` and `--step`, as `weft train` would be called without these two options."""

    arguments: list[str]  # of `weft train`
    config: Path | None  # the value of --config
    last: int  # the step after which the run ends
    notes: tuple[str, ...]  # lines to print


def plan_replay(arguments: Sequence[str], run: Path | None, step: int | None, config: Path | None) -> Replay | None:
    """The run which takes a step of an earlier run again; None without --replay and --step.

    The run begins at the newest checkpoint before the step, or without a checkpoint at step 0.
    arguments: the command's further arguments, such as those of the mesh.
    run, step, config: the values of --replay, --step and --config.
    Raises ValueError for a lone --replay or --step, for --config beside them, for a folder without a run, and for a
    step without digests.
    """
    if run is None and step is None:
        return None
    if run is None or step is None:
        number = "" if step is None else f"; --steps {step} gives the number of steps of a run"
        raise ValueError(
            f"--replay RUN and --step N belong together, as in `{PROGRAM} train --replay run --step 40`{number}"
        )
    if config is not None:
        raise ValueError("--replay takes the configuration of its run; leave out --config")
    check_run_folder(run)
    from ..compare.record_file import read_digests  # imported here because numpy takes a tenth of a second

    steps = read_digests(run).steps
    if step not in steps:
        near = sorted(steps, key=lambda each: abs(each - step))[:3]
        raise ValueError(
            f"{run} has no digests of step {step}, with which to compare; the nearest are of step "
            f"{', '.join(map(str, sorted(near))) or 'none'}"
        )
    checkpoint = _newest_before(run, step)
    output = [] if _has_output(arguments) else ["--output", str(_default_folder(run, step))]
    chosen = [*arguments, *output, "--against", str(run.resolve()), "--save-every", "0", "--eval-every", "0"]
    if checkpoint is None:
        note = f"begins at step 0: {run} has no checkpoint of a step before {step}"
        return Replay(chosen, run / CONFIG, step, (note,))
    return Replay([*chosen, "--resume", str(checkpoint)], None, step, ())


def _newest_before(run: Path, step: int) -> Path | None:
    """The newest undamaged checkpoint of a step before `step`; None without any."""
    for saved, path in reversed(checkpoints(run).items()):
        if saved < step:
            try:
                Manifest.read(path)
            except DamagedCheckpoint:
                continue
            return path
    return None


def _has_output(arguments: Sequence[str]) -> bool:
    """Whether the arguments give --output."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--output")
    return parser.parse_known_args(list(arguments))[0].output is not None


def _default_folder(run: Path, step: int) -> Path:
    """The replay's folder for arguments without --output."""
    return Path("outputs") / f"{run.resolve().name}-replay-{step}-{datetime.now():%Y%m%d-%H%M%S-%f}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """The options of the losses of preferences: those given, and for the remaining options the run's."""

    dpo: DPOConfig
    kto: KTOConfig
    notes: Sequence[str] = ()  # lines to print about the run
    of_run: Sequence[str] = ()  # the options which are the run's, as "dpo.beta 0.3"


@dataclass(frozen=True, slots=True, kw_only=True)
class _RunOptions:
    """Options in a run's config.toml."""

    task: Task = "pretrain"
    from_: Annotated[Path | None, tyro.conf.arg(name="from")] = None
    reference_from: Path | None = None
    dpo: DPOConfig = field(default_factory=DPOConfig)
    kto: KTOConfig = field(default_factory=KTOConfig)


def with_options_of_run(options: Any, arguments: Sequence[str], task: str) -> Merged:
    """The options of the task's loss, taken from the run to which a folder belongs, unless given.

    options: of `weft evaluate`, with the fields folder, reference, dpo and kto, parsed from the arguments alone. folder
        is a run's, or within a run's: a checkpoint or the final model. Without a reference, nothing is taken.
    Raises ValueError for a config.toml that cannot be used, and for options that contradict it.
    """
    alone = Merged(dpo=options.dpo, kto=options.kto)
    if task not in ("dpo", "kto") or (path := _find_config(options.folder)) is None:
        return alone
    run = _read_options(path)
    if run.task != task:
        return alone
    if options.reference is None:
        folder = run.reference_from or run.from_
        note = f"the run's reference was {folder}: give --reference for rewards and the loss of {task}"
        return alone if folder is None else replace(alone, notes=(note,))
    # --json, where given again, would turn a True around
    default = replace(options, dpo=run.dpo, kto=run.kto, json=False)
    merged = parse(type(options), arguments, command="evaluate", about="", default=default, file=path)
    loss, loss_of_run = getattr(merged, task), getattr(run, task)
    values = {each.name: getattr(loss, each.name) for each in fields(loss)}
    of_run = [
        f"{task}.{name} {str(value).lower()}" for name, value in values.items() if value == getattr(loss_of_run, name)
    ]
    notes = (f"options of {path}: {', '.join(of_run)}",) if of_run else ()
    return Merged(dpo=merged.dpo, kto=merged.kto, notes=notes, of_run=of_run)


def _find_config(folder: Path) -> Path | None:
    """The config.toml of the run to which a folder belongs."""
    around = (folder, folder.resolve().parent)
    return next((each / CONFIG for each in around if (each / CONFIG).is_file() and (each / METRICS).is_file()), None)


def _read_options(path: Path) -> _RunOptions:
    """The options in a run's config.toml. Raises ValueError for a file that cannot be used."""
    check_sum(path)
    _, arguments = read_toml(path)
    known = [each.name.rstrip("_").replace("_", "-") for each in fields(_RunOptions)]
    found, is_known = list[str](), False
    for each in arguments:
        if each.startswith("--"):
            is_known = each.removeprefix("--").partition(".")[0] in known
        if is_known:
            found.append(each)
    return parse(_RunOptions, found, command="evaluate", about="", file=path)


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
