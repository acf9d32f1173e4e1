"""`weft explain`: show the steps of a run of `weft train`, without training."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path

from ..predict.chip import Chip, load_chip
from ..predict.golden import read_golden, write_golden
from ..terminal import PROGRAM
from ..train.config import TrainConfig
from ..train.launch import processes_for
from ..train.memory_check import gpu_count
from ..train.run import axes_of, mesh_sizes, title_of
from .arguments import OwnOptions, batch_sizes, report_bad_input
from .earlier_runs import command_of, describe_ranks
from .settings import base_of, read_configuration, with_complete_plan

ABOUT = f"""\
  Shows what a step of `{PROGRAM} train` would do on any mesh, computed from shapes alone: no process is started, and \
no weights are made. Takes the options of train.

Examples
  {PROGRAM} explain
  {PROGRAM} explain --mesh.dp 4 --plan.zero 2
  {PROGRAM} explain llama3-8b --mesh.dp 256 \\
    --mesh.tp 8 --mesh.pp 8 --plan.zero 1
  {PROGRAM} explain llama3-8b --mesh.dp 8 --plan.zero 3 \\
    --compile --chip h100
  {PROGRAM} explain --mesh.pp 2 --rank 3
  {PROGRAM} explain --mesh.dp 2 --save golden.json

Recipes
{{recipes}}
  The options below show the defaults of the named recipe, or of {{default}} without a name.

Options of explain alone
  --rank N: the rank whose collectives and memory are shown. (default: 0)
  --batch ROWS,TOKENS: sequences in a step and tokens in each, as 2048,8192. (default: the recipe's, or a sequence for \
each data-parallel rank and pipeline stage if that is more)
  --config FILE: options from a TOML file, as `{PROGRAM} train --print-config` prints it.
  --chip NAME|FILE: predict the time and the memory of a step on a chip, as h100, or on the machine of a file \
by `{PROGRAM} measure`.
  --timeline FILE: with --chip, write the step's timeline: .svg as a picture, .json for Perfetto.
  --json: print the prediction of --chip as JSON, and nothing else.
  --save FILE: also save the collectives, memory and layouts of a rank of each pipeline stage, for `{PROGRAM} check`.

Prints
  the operations of a step; the layout of each parameter; the schedule of a pipeline; the collectives, with the bytes \
that the rank receives; the rank's memory, from step to step and at the peak of a step.

Exit status
  0: done; 2: input that cannot be used.
"""


def run(arguments: list[str]) -> int:
    with report_bad_input("explain"):
        own_options, run_arguments = _own_options().parse_known_args(arguments)
        if own_options.save is not None:
            _check_save(own_options.save)
        chip = _read_chip(own_options)
        name, config = read_configuration(run_arguments, own_options.config, command="explain", about=ABOUT)
        config, axes = complete_configuration(name, config, own_options.batch)
        count = math.prod(axes.values())
        if not 0 <= own_options.rank < count:
            raise ValueError(
                f"--rank {own_options.rank} is not in the mesh; its {count:,} ranks are 0 to {count - 1:,}"
            )
        _print_step(own_options, name, config, axes, chip)
        if own_options.save is not None:
            _save(own_options, run_arguments, config, axes)
    return 0


def _read_chip(options: argparse.Namespace) -> Chip | None:
    """The chip of --chip; None without --chip.

    Raises ValueError for an unknown chip, for a --timeline that cannot be written, and for --json or --timeline alone.
    """
    if options.chip is None:
        for name in ("json", "timeline"):
            if getattr(options, name):
                raise ValueError(f"--{name} needs a prediction on a chip; add --chip, as --chip h100")
        return None
    if options.timeline is not None:
        if options.timeline.suffix not in (".svg", ".json"):
            raise ValueError(f"--timeline {options.timeline} is neither .svg nor .json; name it .svg or .json")
        if not options.timeline.parent.is_dir():
            raise ValueError(f"--timeline {options.timeline}: there is no folder {options.timeline.parent}")
    return load_chip(options.chip)


def _print_step(
    options: argparse.Namespace, name: str | None, config: TrainConfig, axes: dict[str, int], chip: Chip | None
) -> None:
    """Print the step and the prediction of --chip, and write the timeline of --timeline.

    name: of the recipe; None without. chip: None without --chip.
    """
    from ..predict.forks import Forks, count_cores  # imported here because torch takes seconds
    from ..train.explained_step import ExplainedStep
    from .prediction import Predictor, as_values, lines_of, plan_command, write_timeline

    title = title_of(name, config)
    step = None if options.json else ExplainedStep(config, axes, options.rank)
    predictor = None if chip is None else Predictor(config, axes, chip)
    runs = () if step is None else step.runs
    with Forks(*runs, *(() if predictor is None else predictor.runs), count=count_cores()) as forks:
        for run in runs:
            forks.start(run)
        if predictor is not None:
            predictor.start(forks, has_parts=step is not None and options.rank == 0)
        parts = None if step is None else step.print(title, forks)
        if predictor is None:
            return
        found = predictor.predict(forks, parts)
        if options.json:
            print(json.dumps(as_values(found), indent=2))
        else:
            for line in lines_of(found, plan_command(found, options.chip, name, base_of(name, config))):
                print(line, flush=True)
        if options.timeline is not None:
            write_timeline(found, options.timeline, title)


def _check_save(path: Path) -> None:
    """Raise ValueError for a --save without a folder, or of another kind of file, before a step runs."""
    if not path.parent.is_dir():
        raise ValueError(f"--save {path} cannot be written: there is no folder {path.parent}; make it first")
    if path.is_dir():
        raise ValueError(f"--save {path} is a folder; give a file, as --save {path / 'golden.json'}")
    if path.exists():
        read_golden(path)  # raises for a file of another kind


def _save(options: argparse.Namespace, run_arguments: list[str], config: TrainConfig, axes: dict[str, int]) -> None:
    """Write the golden file of --save, and print a line about the file."""
    from ..train.explained_step import make_golden, ranks_of_stages

    path: Path = options.save
    command = command_of(run_arguments, folder=path.parent, config=options.config, batch=options.batch)
    allow = read_golden(path).allow if path.exists() else None
    ranks = dict.fromkeys((*ranks_of_stages(axes), options.rank))
    golden = make_golden(
        config, axes, command, device_type="cuda" if gpu_count() else "cpu", ranks=tuple(ranks), allow=allow
    )
    write_golden(path, golden)
    print(f"saved {describe_ranks(golden)} in {path}; compare with `{PROGRAM} check {path}`")


def _own_options() -> OwnOptions:
    """The parser of the options of `explain` alone."""
    parser = OwnOptions()
    parser.add_argument("--config", type=Path)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--batch")
    parser.add_argument("--save", type=Path)
    parser.add_argument("--chip")
    parser.add_argument("--timeline", type=Path)
    parser.add_argument("--json", action="store_true")
    return parser


def complete_configuration(
    name: str | None, config: TrainConfig, batch: str | None
) -> tuple[TrainConfig, dict[str, int]]:
    """Fill in all sizes and plan options of a configuration. Returns the configuration, and the mesh's sizes by axis.

    name: of the recipe; None without. batch: of --batch; None keeps the configuration's, enlarged to a row for each
    data-parallel rank and microbatch where the user chose no size. Called by explain and check.
    Raises ValueError for a run that cannot start.
    """
    base = base_of(name, config)  # to see whether the batch size was changed
    mesh = config.mesh
    dp, cp, tp = mesh_sizes(mesh, processes_for(mesh, gpus=gpu_count()), every_process=False)
    config = replace(config, mesh=replace(mesh, dp=dp, cp=cp, tp=tp))
    if batch is not None:
        rows, tokens = batch_sizes(batch)
        config = replace(config, data=replace(config.data, batch_size=rows, sequence_length=tokens))
    elif config.data.batch_size == base.data.batch_size:
        fewest_rows = dp * (config.plan.microbatches or mesh.pp)
        config = replace(config, data=replace(config.data, batch_size=max(config.data.batch_size, fewest_rows)))
    config = with_complete_plan(config, dp=dp, cp=cp, tp=tp)
    return config, axes_of(pp=mesh.pp, dp=dp, cp=cp, tp=tp)
