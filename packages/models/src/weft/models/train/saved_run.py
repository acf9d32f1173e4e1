"""The JSON document about the run in each checkpoint: written, read back, and compared with a resumed run.

`Saver` writes the document; `Saver.resume` and `weft train --resume` read the document. Nothing here needs torch.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..checkpoint.manifest import RUN, Manifest
from ..checks import LARGEST
from ..safe_files import as_type
from ..versions import versions
from .config import TrainConfig
from .folder import CHECKPOINT
from .metrics_file import METRICS
from .run import Run

_DEEPEST = 8  # dots in an option's name; real options have at most three
# Options that a resumed run cannot change: the losses after the change would not continue the losses before.
FIXED = (
    *("seed", "model", "model_class", "from", "task", "lora", "dpo", "kto", "reference", "reference_from"),
    *("data.batch_size", "data.sequence_length", "data.pack", "data.mixture", "data.template"),
)
# Options that checkpoints of version 0.1.0 may lack.
_LATER = ("task", "lora", "dpo", "kto", "reference", "reference_from", "reference_zero", "reference_mesh")
ARITHMETIC = "arithmetic"  # the entry with what the bits of a run with `plan.exact` depend on
# Options without effect on the losses: a resumed run may change these without a note.
FREE = (
    *("output", "resume", "save_every", "keep", "keep_every", "log_every", "eval_every", "check", "timeout", "profile"),
    *("digests", "against", "data.path", "data.verify", "reference_zero", "reference_mesh"),
)


def describe_run(
    run: Run,
    step: int,
    held_out_loss: float | None,
    logged: Mapping[str, Any] | None = None,
    arithmetic: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The JSON document for a checkpoint saved after `step` steps: enough to resume from there.

    No random state is saved: random numbers and the order of the data are functions of the seed and the step.
    held_out_loss: the held-out loss before the run's first step; None if nothing is held out.
    logged: the length and checksum of metrics.jsonl, from `RunningChecksum.as_json`; None: not saved.
    arithmetic: from `arithmetic_of`; None without `plan.exact`.
    """
    return {
        "step": step,
        "samples": step * run.config.data.batch_size,
        "recipe": run.recipe,
        "config": as_json(run.resolved),
        "data": _data_of(run),
        "mesh": run.axes,
        "versions": versions(),
        **({} if run.reference_sha256 is None else {"reference": run.reference_sha256}),
        **({} if held_out_loss is None else {"held_out_loss": held_out_loss}),
        **({} if logged is None else {METRICS: logged}),
        **({} if arithmetic is None else {ARITHMETIC: arithmetic}),
    }


def read_saved(checkpoint: Path) -> dict[str, Any]:
    """Read a checkpoint's JSON document about the run, checking the type of each value.

    A converted checkpoint, saved by no run, may lack entries.
    Raises ValueError for an invalid value, and as `Manifest.read`.
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
        name_match = re.fullmatch(rf"{CHECKPOINT}-([0-9]+)", checkpoint.resolve().name)
        if "config" in saved and name_match is not None and int(name_match[1]) != step:
            raise ValueError(f"step is {step}, but the folder is named {name_match[0]}")
        if "config" in saved and not {"step", "data"} <= saved.keys():
            raise ValueError("the config of a run is there, but its step or its data is missing")
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
    """The types of `RunningChecksum.as_json`'s values."""

    lines: int
    bytes: int
    sha256: str


@dataclasses.dataclass(frozen=True, slots=True)
class _Data:
    """The types of `_data_of`'s values."""

    tokens: int
    sha256: str


_TYPES: Mapping[str, Any] = {
    "step": int,
    "held_out_loss": float,
    "reference": str,
    "config": dict[str, Any],
    "data": _Data,
    ARITHMETIC: dict[str, Any],
}


def logged_of(saved: Mapping[str, Any], checkpoint: Path, folder: Path) -> Mapping[str, Any] | None:
    """The length and checksum of metrics.jsonl in `saved`, a checkpoint's document; None if absent.

    Also None for a checkpoint outside `folder`, which belongs to another run.
    """
    logged: Mapping[str, Any] | None = saved.get(METRICS)
    return logged if checkpoint.parent.resolve() == folder.resolve() else None


def as_json(config: TrainConfig) -> dict[str, Any]:
    """The config as nested dicts of JSON types. The entry "model" also has the config's class, as "kind"."""
    value = {name.rstrip("_"): each for name, each in dataclasses.asdict(config).items()}
    value["model"] = {"kind": type(config.model).__name__}
    value["model"] |= dataclasses.asdict(config.model)
    plain = _as_json_types(value)
    assert isinstance(plain, dict), "_as_json_types returns a dict for a dict"
    return plain


def options_of_losses(run: Run) -> dict[str, str]:
    """The options on which a run's losses depend beside the mesh and the plan, as text, by dotted name."""
    options = _flatten(as_json(run.config))
    return {name: str(value) for name, value in options if not _is_under(name, (*FREE, "mesh", "plan", "track"))}


def check_steps(saved: Mapping[str, Any], checkpoint: Path, steps: int) -> list[str]:
    """A line to print if the checkpoint was saved after the last of the run's steps; otherwise an empty list.

    saved: the checkpoint's document. Raises ValueError for a checkpoint of a later step than the run's last.
    """
    step = saved.get("step", 0)
    if step > steps:
        raise ValueError(
            f"--steps is {steps}, but {checkpoint} was saved after step {step}; give --steps above {step}, or resume "
            f"an earlier checkpoint into a folder of its own with --resume PATH --output FOLDER"
        )
    if step < steps:
        return []
    return [f"all {steps} steps are done; give --steps above {steps} to go on; the final model is saved again"]


def check_same_run(saved: Mapping[str, Any], run: Run) -> list[str]:
    """Compare a resumed run with the checkpoint's run; return a line for each changed option.

    saved: the checkpoint's document. Options in FREE do not count, because losses do not depend on these.
    Raises ValueError where an option in FIXED (the model, the seed, ...) or the data differs.
    """
    if "config" not in saved:  # a converted checkpoint, saved by no run
        return []
    # a checkpoint of an earlier version lacks the options added since, which then had their defaults
    defaults = as_json(TrainConfig(model=run.config.model))
    saved_options = dict(_flatten({name: defaults[name] for name in _LATER} | saved["config"]))
    run_options = dict(_flatten(as_json(run.resolved)))
    changed = [
        name
        for name in {**saved_options, **run_options}
        if saved_options.get(name) != run_options.get(name) and not _is_under(name, FREE)
    ]
    for name in changed:
        if _is_under(name, FIXED):
            raise ValueError(
                f"the checkpoint was saved with {name} {saved_options.get(name)!s:.200}, but this run has "
                f"{run_options.get(name)}; give the saved value, or start a new run"
            )
    if run.config.reference != "precomputed" and saved.get("reference", run.reference_sha256) != run.reference_sha256:
        raise ValueError(
            f"the weights of the reference {run.reference} have changed since the checkpoint was saved; put the "
            f"earlier ones back, or start a new run"
        )
    data = _data_of(run)
    for name, value in saved["data"].items():
        if value != data[name]:
            raise ValueError(
                f"the checkpoint was saved by a run on data with {name} {value!s:.200}, but {run.corpus.name} has "
                f"{data[name]}; give the same data, or start a new run"
            )
    return [f"{name} is {run_options.get(name)}, and was {saved_options.get(name)!s:.200}" for name in changed]


def _data_of(run: Run) -> dict[str, Any]:
    """The identity of the run's data, independent of the path."""
    return {"tokens": run.corpus.num_tokens, "sha256": run.corpus.sha256}


def _is_under(name: str, names: tuple[str, ...]) -> bool:
    """Whether `name` equals an entry of `names` or is a field below: "data.pack" is within "data"."""
    return any(f"{name}.".startswith(f"{each}.") for each in names)


def _flatten(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested options as (dotted name, value) pairs. Below _DEEPEST dots a dict is returned as a value."""
    for name, each in value.items():
        if isinstance(each, Mapping) and prefix.count(".") < _DEEPEST:
            yield from _flatten(each, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", each


def _as_json_types(value: object) -> object:
    """The value in JSON types: tuples as lists, anything unknown by str()."""
    if isinstance(value, Mapping):
        return {str(name): _as_json_types(each) for name, each in value.items()}
    if isinstance(value, tuple | list):
        return [_as_json_types(each) for each in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
