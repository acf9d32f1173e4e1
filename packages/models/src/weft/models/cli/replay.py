"""`weft train --replay RUN --step N`: the options by which a run takes one step of an earlier run again."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from ..checkpoint.manifest import DamagedCheckpoint, Manifest
from ..terminal import PROGRAM
from ..train.folder import CONFIG, checkpoints
from .compare import check_run


@dataclass(frozen=True, slots=True)
class Replay:
    """What `--replay` and `--step` mean for the run."""

    arguments: list[str]  # of `weft train`, without --replay and --step
    config: Path | None  # the value of --config
    last: int  # the step after which the run ends
    notes: tuple[str, ...]  # lines to print


def plan_replay(arguments: Sequence[str], run: Path | None, step: int | None, config: Path | None) -> Replay | None:
    """The run that takes `step` of `run` again, beginning at the newest checkpoint before; None without --replay.

    arguments: further ones of the command, as the mesh. Where there is no such checkpoint, the run begins at step 0.
    Raises ValueError for one of the options without the other, for a folder that is no run, and for a step without
    digests.
    """
    if run is None and step is None:
        return None
    if run is None or step is None:
        raise ValueError(f"--replay RUN and --step N belong together, as in `{PROGRAM} train --replay run --step 40`")
    if config is not None:
        raise ValueError("--replay takes the configuration of its run; leave out --config")
    check_run(run)
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
    """The newest complete checkpoint of a step before `step`."""
    for saved, path in reversed(checkpoints(run).items()):
        if saved < step:
            try:
                Manifest.read(path)
            except DamagedCheckpoint:
                continue
            return path
    return None


def _has_output(arguments: Sequence[str]) -> bool:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--output")
    return parser.parse_known_args(list(arguments))[0].output is not None


def _default_folder(run: Path, step: int) -> Path:
    return Path("outputs") / f"{run.resolve().name}-replay-{step}-{datetime.now():%Y%m%d-%H%M%S-%f}"
