"""What a run that goes on takes from the folder of the run before."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..train.config import MeshConfig, TrainConfig, mesh_sizes
from ..train.folder import CONFIG, find_to_resume, newest_complete
from ..train.launch import CPU_PROCESSES, gpu_count, launched_processes, processes_for

NEWEST = "newest"  # what --resume without a path stands for


def with_resume(arguments: Sequence[str]) -> list[str]:
    """The arguments, where `--resume` without a path has one that stands for it."""
    ended = [*arguments, "--"]
    return [
        f"{each}={NEWEST}" if each == "--resume" and ended[i + 1].startswith("-") else each
        for i, each in enumerate(arguments)
    ]


def config_to_resume(arguments: Sequence[str]) -> Path | None:
    """The config.toml of the run that the arguments go on with, where there is one."""
    given, _ = resume_options().parse_known_args(arguments)
    if given.resume is None:
        return None
    path = Path(given.resume)
    folders = [given.output] if given.resume == NEWEST else [path, path.parent]
    return next((folder / CONFIG for folder in folders if folder is not None and (folder / CONFIG).is_file()), None)


def resume_options() -> argparse.ArgumentParser:
    """The options that say which run goes on."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--resume", nargs="?", const=NEWEST)
    return parser


def checkpoint_to_resume(output: Path | None, resume: str | None) -> Path | None:
    """The checkpoint that a run goes on with; None where there is none, as when the run begins. Raises as `find_to_resume`."""
    if resume == NEWEST:
        return None if output is None else newest_complete(output)[0]
    return None if resume is None else find_to_resume(Path(resume))


def names_not_taken(arguments: Sequence[str]) -> tuple[str, ...]:
    """Options that are not taken from the run before: what names a place to write, or to send to.

    The folder of that run may be a stranger's. Where it is --output itself, the run is tracked as it was.
    """
    given, _ = resume_options().parse_known_args(arguments)
    return ("output", "resume", "profile", *(() if given.resume == NEWEST else ("track",)))


def sizes_for_processes(config: TrainConfig) -> tuple[int, int, int]:
    """(dp, cp, tp) for the processes of a launcher; without one for those of this machine, and with mesh.dp for `processes_for`.

    Raises as `mesh_sizes`, and for more processes than this machine has GPUs.
    """
    mesh, world, gpus = config.mesh, launched_processes(), gpu_count()
    if world is not None:
        return mesh_sizes(mesh, world, exact=True)
    count = gpus or CPU_PROCESSES
    if mesh.dp is not None:
        count = min(processes_for(mesh, gpus=gpus), gpus or sys.maxsize)
    return mesh_sizes(mesh, count, exact=False)


def on_a_mesh_that_fits(config: TrainConfig, given: Sequence[str]) -> TrainConfig:
    """The config of a run that goes on, without its mesh where another is given, or there are not the processes for it."""
    try:
        sizes_for_processes(config)
        fits = not any(each.startswith("--mesh.") for each in given)
    except ValueError:
        fits = False
    if fits:
        return config
    plan = config.plan
    if not any(each.startswith("--mesh.pp") for each in given):
        plan = replace(plan, schedule=None, split=None)  # which are of a pipeline
    return replace(config, mesh=MeshConfig(), plan=plan)
