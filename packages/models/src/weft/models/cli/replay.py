"""`weft train --replay RUN --step N`: the options for a run which takes a single step of an earlier run again."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from ..checkpoint.manifest import DamagedCheckpoint, Manifest
from ..terminal import PROGRAM
from ..train.folder import CONFIG, checkpoints
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
    arguments: the command's further arguments, as of the mesh.
    run, step, config: the values of --replay, --step and --config.
    Raises ValueError for a lone --replay or --step, for --config beside them, for a folder without a run, and for a
    step without digests.
    """
    if run is None and step is None:
        return None
    if run is None or step is None:
        raise ValueError(f"--replay RUN and --step N belong together, as in `{PROGRAM} train --replay run --step 40`")
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
