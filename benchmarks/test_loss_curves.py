"""Compares the loss of llama-tiny at every step of a short training, on one process and on meshes of four processes.

The runs use `weft.models.train.loop.train` with gloo on a CPU. Sums round in a different order on every mesh. No time
is measured.
"""

from __future__ import annotations

import contextlib
import io
import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from weft.models.data.text import Corpus
from weft.models.train.config import DataConfig, PlanConfig
from weft.models.train.recipes import recipe
from weft.models.train.run import Run

from benchmarks.conftest import Tell
from tests.support.pool import Pool

STEPS = 60
TEXT = Path(__file__).parents[1] / "LICENSE"  # no commit changes this text, on which the growth of rounding depends
FIRST = 1e-6  # the largest relative difference allowed at step 1
ALL = 1e-4  # the largest at any step: differences grow during training
# Independent of the recipe, so that curves of several commits are comparable
DATA = DataConfig(batch_size=8, sequence_length=64)


@dataclass(frozen=True, slots=True)
class Mesh:
    dp: int
    tp: int
    sequence_parallel: bool = False

    def __str__(self) -> str:
        if self.dp * self.tp == 1:
            return "one process"
        return f"dp={self.dp} x tp={self.tp}{', sequence parallel' if self.sequence_parallel else ''}"


MESHES = (Mesh(1, 1), Mesh(4, 1), Mesh(2, 2), Mesh(1, 4), Mesh(2, 2, sequence_parallel=True))


def quietly(run: Run) -> None:
    """Trains without output. Runs on every rank."""
    from weft.models.train.loop import train

    with contextlib.redirect_stdout(io.StringIO()):
        train(run, torch.device("cpu"))


def trained(pool: Pool, folder: Path) -> dict[Mesh, list[float]]:
    """The losses of all steps, for each mesh."""
    corpus = Corpus("the licence", (TEXT,), TEXT.stat().st_size)
    losses = {}
    for mesh in MESHES:
        config = replace(
            recipe("llama-tiny"), steps=STEPS, check=False, plan=PlanConfig(sequence=mesh.sequence_parallel), data=DATA
        )
        run = Run(recipe="llama-tiny", config=config, corpus=corpus, dp=mesh.dp, tp=mesh.tp, folder=folder / str(mesh))
        pool.run(quietly, run, ranks=mesh.dp * mesh.tp, timeout=200)
        metrics = (run.folder / "metrics.jsonl").read_text().splitlines()
        losses[mesh] = [json.loads(line)["loss"] for line in metrics]
    return losses


@pytest.mark.timeout(600)
def test_loss_curves(pool: Pool, tell: Tell, tmp_path: Path) -> None:
    for needed in ("rich", "safetensors"):  # needed by training, which prints steps and saves weights
        pytest.importorskip(needed)
    losses = tell.measuring(trained, pool, tmp_path)
    alone = losses[MESHES[0]]
    print(f"\nloss of llama-tiny on the licence's text, {STEPS} steps; difference to one process, relative")
    print(f"{'':32}{'step 1':>10}{f'step {STEPS}':>10}{'of step 1':>12}{'the largest':>13}")
    for mesh, curve in losses.items():
        apart = [abs(loss - other) / other for loss, other in zip(curve, alone, strict=True)]
        print(f"{mesh!s:32}{curve[0]:10.5f}{curve[-1]:10.5f}{apart[0]:12.1e}{max(apart):13.1e}")
        steps = {f"step_{step:03}": loss for step, loss in enumerate(curve, 1)}
        tell(f"llama-tiny, {STEPS} steps", f"Weft, {mesh}", "count", largest_relative_difference=max(apart), **steps)
        assert apart[0] <= FIRST
        assert max(apart) <= ALL
    assert alone[-1] < alone[0] - 1, "the steps train"
