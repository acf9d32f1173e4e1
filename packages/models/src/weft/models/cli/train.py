"""`weft train`."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from ..checkpoint.manifest import RUN, Manifest
from ..checks import check_tensor_parallel
from ..terminal import PROGRAM
from ..train.config import Run, TrainConfig, mesh_sizes, settled_plan
from ..train.data import check_enough, check_vocabulary, find_corpus
from ..train.folder import check_again, check_new, checkpoints, find_to_resume, newest_complete
from ..train.launch import CPU_PROCESSES, gpu_count, launch, launched_processes
from ..train.recipes import RECIPES, recipe, size_in_words
from ..train.report import describe
from ..train.saved import check_same_run
from .arguments import parse, refusing, speaks

DEFAULT_RECIPE = "llama-tiny"
NEWEST = "newest"  # what --resume without a path stands for
ABOUT = f"""\
  Trains a model on the bytes of a text, on a mesh of processes: one for each GPU, or 4 on a CPU, unless a launcher such as torchrun has started them.

Examples
  {PROGRAM} train
  {PROGRAM} train --data.path book.txt
  {PROGRAM} train --mesh.dp 4 --mesh.tp 1
  {PROGRAM} train --mesh.cp 2 --plan.sequence
  {PROGRAM} train --mesh.pp 2 --mesh.dp 2
  {PROGRAM} train llama-tiny-tied --steps 500
  {PROGRAM} train --output run --save-every 50 --resume

Recipes
{{recipes}}
  The options show the defaults of the one that is named; of {DEFAULT_RECIPE} where none is.

Prints
  the layout of each parameter; the collectives of a step, predicted and issued; the loss of step 1 beside that of one process; the steps; a sample; the loss on held-out text, before and after.

Saves
  metrics.jsonl, config.json, plan.txt, versions.json, and checkpoint/, which transformers loads; on the way checkpoint-STEP/, with which --resume goes on, on any mesh. SIGTERM and Ctrl-C save one more.

Exit status
  0: done; 1: the run stopped; 2: input that cannot be used; 130: interrupted; 143: ended by SIGTERM.
"""


def run(arguments: list[str]) -> int:
    with refusing("train"):
        settled, gpus = _settle(arguments)
    if speaks():
        print("\n".join([describe(settled, gpus=gpus), *settled.notes]), flush=True)
    return launch(settled, gpus=gpus)


def _settle(arguments: list[str]) -> tuple[Run, int]:
    """The run that the arguments ask for, everything checked, and the number of GPUs. Raises ValueError."""
    name = arguments.pop(0) if arguments and not arguments[0].startswith("-") else DEFAULT_RECIPE
    recipes = "\n".join(f"  {known}: {size_in_words(RECIPES[known].model)}" for known in RECIPES)
    config = parse(
        TrainConfig,
        _with_resume(arguments),
        command="train [RECIPE]",
        about=ABOUT.format(recipes=recipes),
        default=recipe(name),
        compact_below=60,
    )
    gpus, world = gpu_count(), launched_processes()
    dp, cp, tp = mesh_sizes(config.mesh, world or gpus or CPU_PROCESSES, exact=world is not None)
    check_tensor_parallel(config.model, tp)
    config = replace(config, plan=settled_plan(config.plan, config, dp=dp, cp=cp, tp=tp))
    processes = config.mesh.pp * dp * cp * tp
    if config.compile and config.plan.recompute != "none" and processes > 1:
        raise ValueError(
            f"blocks that are recomputed do not compile on a mesh of {processes} processes; leave --compile out, or "
            f"--plan.recompute {config.plan.recompute}"
        )
    check_vocabulary(config.model.vocab_size)
    corpus = find_corpus(config.data.path)
    check_enough(corpus, config.data.sequence_length)
    folder, resume, notes = _where(config, name)
    settled = Run(
        recipe=name, config=config, corpus=corpus, pp=config.mesh.pp, dp=dp, cp=cp, tp=tp, folder=folder, resume=resume
    )
    if resume is not None:
        saved = Manifest.read(resume).document(resume, RUN)
        notes = [*notes, f"goes on from {resume}", *check_same_run(saved, settled)]
    return replace(settled, notes=tuple(notes)), gpus


def _with_resume(arguments: list[str]) -> list[str]:
    """The arguments, where `--resume` without a path has one that stands for it."""
    ended = [*arguments, "--"]
    return [
        f"{each}={NEWEST}" if each == "--resume" and ended[i + 1].startswith("-") else each
        for i, each in enumerate(arguments)
    ]


def _where(config: TrainConfig, name: str) -> tuple[Path, Path | None, list[str]]:
    """The run's folder, the checkpoint that it goes on with, and what is to be said of others. Raises ValueError."""
    folder = config.output
    if config.resume is None:
        folder = folder or Path("outputs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    elif config.resume == NEWEST:
        if folder is None:
            raise ValueError("--resume goes on with the run in --output, which is not given; give it, or --resume PATH")
        if folder.exists():
            if speaks():
                check_again(folder)
            return (folder, *newest_complete(folder))
    else:
        found = find_to_resume(Path(config.resume))
        if folder is None or folder.resolve() == found.parent.resolve():
            newest = next(reversed(checkpoints(found.parent).values()), found)
            if not newest.samefile(found):
                raise ValueError(
                    f"{newest} is newer than {found}, and would be written anew; give another --output, or remove it"
                )
            if speaks():
                check_again(found.parent)
            return found.parent, found, []
        if speaks():
            check_new(folder)
        return folder, found, []
    if speaks():  # of several at once, the others would meet what it makes
        check_new(folder)
    return folder, None, []
