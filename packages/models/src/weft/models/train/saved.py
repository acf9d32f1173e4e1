"""What a checkpoint says of its run, as JSON: written, read back, and compared with the run that goes on."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..checkpoint.manifest import RUN, Manifest
from ..documents import as_type
from ..versions import versions
from .bounds import LARGEST
from .config import Run, TrainConfig
from .folder import CHECKPOINT
from .logged import METRICS

_DEEPEST = 8  # dots in a name; those of a config have three at most
# What may not change: the numbers of the run would be those of neither.
FIXED = ("seed", "model", "model_class", "from", "data.batch_size", "data.sequence_length", "data.pack", "data.mixture")
# What says nothing of the numbers.
FREE = (
    *("output", "resume", "save_every", "keep", "keep_every", "log_every", "eval_every", "check", "timeout", "profile"),
    *("data.path", "data.verify"),
)


def describe_run(run: Run, step: int, held_out_loss: float, logged: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What is to be known to go on from `step`. The random numbers and the order of the data follow from the seed and the step.

    held_out_loss: before the first step. logged: what is known of the lines of metrics.jsonl, as `Sum.as_json`.
    """
    return {
        "step": step,
        "samples": step * run.config.data.batch_size,
        "held_out_loss": held_out_loss,
        "recipe": run.recipe,
        "config": as_json(run.resolved),
        "data": _data_of(run),
        "mesh": run.axes,
        "versions": versions(),
        **({} if logged is None else {METRICS: logged}),
    }


def read_saved(checkpoint: Path) -> dict[str, Any]:
    """What a checkpoint says of its run, each value of its type; a checkpoint that no run saved may say less.

    Raises ValueError for a value that no run writes, and as `Manifest.read`.
    """
    saved = Manifest.read(checkpoint).document(checkpoint, RUN)
    try:
        for name, kind in _TYPES.items():
            if name in saved:
                as_type(kind, saved[name], name)
        step = saved.get("step", 0)
        if not 0 <= step <= LARGEST:
            raise ValueError(
                f"step is {step if abs(step) < 10**20 else 'a number of many digits'}; steps are 0 to {LARGEST:,}"
            )
        named = re.fullmatch(rf"{CHECKPOINT}-([0-9]+)", checkpoint.resolve().name)
        if "config" in saved and named is not None and int(named[1]) != step:
            raise ValueError(f"step is {step}, and the folder is named {named[0]}")
        if "config" in saved and not {"step", "data"} <= saved.keys():
            raise ValueError("it has the config of a run, and no step or no data of it")
        if METRICS in saved:
            logged = as_type(_Logged, saved[METRICS], METRICS)
            if min(logged.lines, logged.bytes) < 0:
                raise ValueError(f"{METRICS} has {logged.lines} lines of {logged.bytes} bytes")
    except ValueError as error:
        raise ValueError(
            f"{checkpoint / RUN} is not as a run writes it: {error}; resume from another checkpoint"
        ) from None
    return saved


@dataclasses.dataclass(frozen=True, slots=True)
class _Logged:
    """What `Sum.as_json` says."""

    lines: int
    bytes: int
    sha256: str


@dataclasses.dataclass(frozen=True, slots=True)
class _Data:
    """What `_data_of` says."""

    tokens: int
    sha256: str


_TYPES: Mapping[str, Any] = {
    "step": int,
    "held_out_loss": float,
    "config": dict[str, Any],
    "data": _Data,
}


def logged_of(saved: Mapping[str, Any], checkpoint: Path, folder: Path) -> Mapping[str, Any] | None:
    """What a checkpoint says of the metrics in `folder`, where that is of its own run; None where it says nothing."""
    logged: Mapping[str, Any] | None = saved.get(METRICS)
    return logged if checkpoint.parent.resolve() == folder.resolve() else None


def as_json(config: TrainConfig) -> dict[str, Any]:
    """The config in what JSON has; the model's says of which kind it is."""
    value = {name.rstrip("_"): each for name, each in dataclasses.asdict(config).items()}
    value["model"] = {"kind": type(config.model).__name__}
    value["model"] |= dataclasses.asdict(config.model)
    plain = _plain(value)
    assert isinstance(plain, dict), "as it was"
    return plain


def check_same_run(saved: Mapping[str, Any], run: Run) -> list[str]:
    """What is otherwise than in the run that saved the checkpoint, a line each.

    Raises ValueError where it is what the run would be another by: its model, its data, its seed.
    """
    if "config" not in saved:  # it was converted from what knows of no run
        return []
    before, now = dict(_flat(saved["config"])), dict(_flat(as_json(run.resolved)))
    changed = [name for name in {**before, **now} if before.get(name) != now.get(name) and not _within(name, FREE)]
    for name in changed:
        if _within(name, FIXED):
            raise ValueError(
                f"the checkpoint was saved with {name} {before.get(name)!s:.200}, and this run has {now.get(name)}; give it as it "
                f"was, or start a new run"
            )
    data = _data_of(run)
    for name, value in saved["data"].items():
        if value != data[name]:
            raise ValueError(
                f"the checkpoint was saved by a run on data of {name} {value!s:.200}, and {run.corpus.name} has {data[name]}; give the "
                f"same data, or start a new run"
            )
    return [f"{name} is {now.get(name)}, and was {before.get(name)!s:.200}" for name in changed]


def _data_of(run: Run) -> dict[str, Any]:
    """What tells the data of a run from others, wherever it lies."""
    return {"tokens": run.corpus.num_tokens, "sha256": run.corpus.sha256}


def _within(name: str, names: tuple[str, ...]) -> bool:
    return any(f"{name}.".startswith(f"{each}.") for each in names)


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, each in value.items():
        if isinstance(each, Mapping) and prefix.count(".") < _DEEPEST:
            yield from _flat(each, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", each


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
