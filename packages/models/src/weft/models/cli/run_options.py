"""The options of a run which `weft evaluate` takes from the run's config.toml: of the losses of preferences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any

import tyro

from ..data.examples.example import Task
from ..train.folder import CONFIG
from ..train.metrics_file import METRICS
from ..train.task_config import DPOConfig, KTOConfig
from ..train.toml import check_sum, read_toml
from .arguments import parse


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
    run = _read(path)
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


def _read(path: Path) -> _RunOptions:
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
