"""`weft explain`: show what `weft train` would do, without doing it."""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from pathlib import Path

from ..terminal import PROGRAM
from ..train.config import TrainConfig
from ..train.launch import processes_for
from ..train.memory_check import gpu_count
from ..train.run import axes_of, mesh_sizes, title_of
from .arguments import report_bad_input
from .settings import base_configuration, origin_of, read_configuration, with_complete_plan

ABOUT = f"""\
  Shows what a step of `{PROGRAM} train` would do on any mesh, computed from shapes alone: no process is started, and \
no weights are made. Takes the options of train.

Examples
  {PROGRAM} explain
  {PROGRAM} explain --mesh.dp 4 --plan.zero 2
  {PROGRAM} explain llama3-8b --mesh.dp 256 \\
    --mesh.tp 8 --mesh.pp 8 --plan.zero 1
  {PROGRAM} explain --mesh.pp 2 --rank 3

Recipes
{{recipes}}
  The options below show the defaults of the named recipe, or of {{default}} without a name.

Options of explain alone
  --rank N: the rank whose collectives and memory are shown. (default: 0)
  --batch ROWS,TOKENS: sequences in a step and tokens in each, as 2048,8192. (default: the recipe's, or a sequence for \
each data-parallel rank and pipeline stage if that is more)
  --config FILE: options from a TOML file, as `{PROGRAM} train --print-config` prints it.

Prints
  the operations of a step; the layout of each parameter; the schedule of a pipeline; the collectives, with the bytes \
that the rank receives; the rank's memory, without activations.

Exit status
  0: done; 2: input that cannot be used.
"""


def run(arguments: list[str]) -> int:
    with report_bad_input("explain"):
        own_options, run_arguments = _own_options().parse_known_args(arguments)
        name, config = read_configuration(run_arguments, own_options.config, command="explain", about=ABOUT)
        config, axes = _complete_configuration(
            config,
            base_configuration(
                name, origin_of(config), config.model if config.model_class is not None else None, config.task
            ),
            own_options.batch,
        )
        count = math.prod(axes.values())
        if not 0 <= own_options.rank < count:
            raise ValueError(
                f"--rank {own_options.rank} is not in the mesh; its {count:,} ranks are 0 to {count - 1:,}"
            )
        from ..train.explanation import explain  # imported here because torch takes seconds

        explain(title_of(name, config), config, axes, own_options.rank)
    return 0


def _own_options() -> argparse.ArgumentParser:
    """The parser of the options of `explain` alone."""
    parser = argparse.ArgumentParser(prog=f"{PROGRAM} explain", add_help=False, allow_abbrev=False)
    parser.add_argument("--config", type=Path)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--batch")
    return parser


def _complete_configuration(
    config: TrainConfig, base: TrainConfig, batch: str | None
) -> tuple[TrainConfig, dict[str, int]]:
    """The configuration with all sizes and plan options filled in, and the axes of the mesh.

    base: the configuration before the command's options, to see whether the batch size was changed. batch: of
    --batch.
    Raises ValueError if the run is impossible.
    """
    mesh = config.mesh
    dp, cp, tp = mesh_sizes(mesh, processes_for(mesh, gpus=gpu_count()), exact=False)
    config = replace(config, mesh=replace(mesh, dp=dp, cp=cp, tp=tp))
    if batch is not None:
        rows, tokens = _sizes(batch)
        config = replace(config, data=replace(config.data, batch_size=rows, sequence_length=tokens))
    elif config.data.batch_size == base.data.batch_size:
        fewest_rows = dp * (config.plan.microbatches or mesh.pp)
        config = replace(config, data=replace(config.data, batch_size=max(config.data.batch_size, fewest_rows)))
    config = with_complete_plan(config, dp=dp, cp=cp, tp=tp)
    return config, axes_of(pp=mesh.pp, dp=dp, cp=cp, tp=tp)


def _sizes(text: str) -> tuple[int, int]:
    """The rows and tokens of --batch, written as "2048,8192". Raises ValueError for another form."""
    sizes = text.split(",")
    if len(sizes) != 2 or not all(size.strip().isdecimal() and int(size) for size in sizes):
        raise ValueError(f"--batch {text!r} is not rows and tokens; write it like --batch 2048,8192")
    return int(sizes[0]), int(sizes[1])
