"""`weft compare`: tell whether two runs differ by rounding, and if not, where they part."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import tyro

from ..terminal import PROGRAM, one_line
from ..train.folder import CONFIG
from ..train.metrics_file import compare_metrics
from .arguments import parse, report_bad_input

ABOUT = f"""\
  Compares two runs of one model, on any two meshes: their losses and norms, then the digests that `{PROGRAM} train \
--digests` writes. Where the runs differ by more than rounding explains, shows the first step, module and slice. \
`{PROGRAM} train --against RUN` compares while training; `{PROGRAM} train --replay RUN --step N` takes a step again.

Examples
  {PROGRAM} compare outputs/RUN outputs/OTHER
  {PROGRAM} compare outputs/RUN outputs/OTHER --json

Prints
  the first step whose loss or norm differs; then "the same bits", or "rounding" with the largest difference beside \
what rounding explains, or "not rounding" with the first tensor that it does not explain: the step, the module, \
forward or backward, by how much, in which slice, and a rank of each run that holds it.

Exit status
  0: the same bits, or rounding; 1: not rounding; 2: input that cannot be used.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareOptions:
    """Tell whether two runs differ by rounding."""

    first: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """The folder of a run with digests."""
    second: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OTHER")]
    """The folder of another run of the same model and data."""
    json: bool = False
    """Print the comparison as JSON."""


def run(arguments: list[str]) -> int:
    """Runs `weft compare` with the arguments after `compare`. Returns the exit status: see `ABOUT`."""
    options = parse(CompareOptions, arguments, command="compare", about=ABOUT)
    folders = [options.first, options.second]
    with report_bad_input("compare"):
        for folder in folders:
            check_run_folder(folder)
        # imported here because numpy takes a tenth of a second
        from ..compare.report import as_json, compare_digests, describe, describe_facts, differing_facts, read_runs

        metrics = compare_metrics(folders)
        runs = read_runs(folders)
        judge, facts = compare_digests(runs), differing_facts(runs)
    names = str(options.first), str(options.second)
    if options.json:
        print(json.dumps(as_json(judge) | {"metrics": asdict(metrics), "differing_facts": facts}, indent=2))
    else:
        lines = one_line(metrics.as_text()), describe_facts(facts, names), describe(judge, names)
        print("\n".join(line for line in lines if line))
    return int(judge.finding is not None)


def check_run_folder(folder: Path) -> None:
    """Raise ValueError unless `folder` is the folder of a run."""
    if not (folder / CONFIG).is_file():
        raise ValueError(f"{folder} is not the folder of a run: it has no {CONFIG}")
