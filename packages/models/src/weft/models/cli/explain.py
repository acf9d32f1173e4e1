"""`weft explain`: what `weft train` would do, without doing it."""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from pathlib import Path

from ..terminal import PROGRAM
from ..train.config import MeshConfig, TrainConfig, axes_of, mesh_sizes, title_of
from ..train.launch import gpu_count, processes_for
from .arguments import refusing
from .settings import base_of, configured, origin_of, settled

ABOUT = f"""\
  Says what a step of `{PROGRAM} train` would do on any mesh, from shapes alone: no process is started, and no weights are made. Takes what train takes.

Examples
  {PROGRAM} explain
  {PROGRAM} explain --mesh.dp 4 --plan.zero 2
  {PROGRAM} explain llama3-8b --mesh.dp 256 \\
    --mesh.tp 8 --mesh.pp 8 --plan.zero 1
  {PROGRAM} explain --mesh.pp 2 --rank 3

Recipes
{{recipes}}
  The options show the defaults of the one that is named; of {{default}} where none is.

Of its own
  --rank N: whose bytes are counted; 0 where it is not given.
  --batch ROWS,TOKENS: the sequences of a step and the tokens in each, as 2048,8192; those of the recipe, or a sequence for each data-parallel rank and stage, where that is more.
  --config FILE: options from a TOML file, as `{PROGRAM} train --print-config` prints it.

Prints
  the operations of a step; the layout of each parameter; the schedule of a pipeline; the collectives, and the bytes that the rank receives; the bytes that it holds.

Exit status
  0: done; 2: input that cannot be used.
"""


def run(arguments: list[str]) -> int:
    with refusing("explain"):
        own, rest = _own().parse_known_args(arguments)
        name, config = configured(rest, own.config, command="explain", about=ABOUT)
        config, axes = _settle(
            config,
            base_of(name, origin_of(config), config.model if config.model_class is not None else None),
            own.batch,
        )
        count = math.prod(axes.values())
        if not 0 <= own.rank < count:
            raise ValueError(f"--rank {own.rank} is not of the mesh; its {count:,} ranks are 0 to {count - 1:,}")
        from ..train.explanation import explain  # not sooner, as torch takes seconds

        explain(title_of(name, config), config, axes, own.rank)
    return 0


def _own() -> argparse.ArgumentParser:
    """Of the arguments, those that are no options of a run."""
    parser = argparse.ArgumentParser(prog=f"{PROGRAM} explain", add_help=False, allow_abbrev=False)
    parser.add_argument("--config", type=Path)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--batch")
    return parser


def _settle(config: TrainConfig, base: TrainConfig, batch: str | None) -> tuple[TrainConfig, dict[str, int]]:
    """The configuration as it would run, and the axes of the mesh. Raises ValueError."""
    mesh = config.mesh
    dp, cp, tp = mesh_sizes(mesh, processes_for(mesh, gpus=gpu_count()), exact=False)
    config = replace(config, mesh=MeshConfig(pp=mesh.pp, dp=dp, cp=cp, tp=tp))
    if batch is not None:
        rows, tokens = _sizes(batch)
        config = replace(config, data=replace(config.data, batch_size=rows, sequence_length=tokens))
    elif config.data.batch_size == base.data.batch_size:
        least = dp * (config.plan.microbatches or mesh.pp)
        config = replace(config, data=replace(config.data, batch_size=max(config.data.batch_size, least)))
    config = settled(config, dp=dp, cp=cp, tp=tp)
    return config, axes_of(pp=mesh.pp, dp=dp, cp=cp, tp=tp)


def _sizes(text: str) -> tuple[int, int]:
    """The batch written as "2048,8192"."""
    sizes = text.split(",")
    if len(sizes) != 2 or not all(size.strip().isdecimal() and int(size) for size in sizes):
        raise ValueError(f"--batch {text!r} is not rows and tokens; write it like --batch 2048,8192")
    return int(sizes[0]), int(sizes[1])
