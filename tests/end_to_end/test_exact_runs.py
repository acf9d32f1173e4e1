"""Runs of the command with `--plan.exact`: losses, norms and exported weights are the same bytes on every mesh.

WEFT_EXACT_STEPS is the number of steps of the exhaustive cases, 200 by default.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

STEPS = int(os.environ.get("WEFT_EXACT_STEPS", "200"))
NAMED = "dp=4,tp=2"
# Options of the mesh and the plan; all take the sums of dp=4, tp=2.
MESHES = {
    "1x1": "--mesh.dp 1 --mesh.tp 1",
    "2x1": "--mesh.dp 2 --mesh.tp 1",
    "1x2": "--mesh.dp 1 --mesh.tp 2",
    "4x1": "--mesh.dp 4 --mesh.tp 1",
    "2x2": "--mesh.dp 2 --mesh.tp 2",
    "4x2": "--mesh.dp 4 --mesh.tp 2",
    "recompute": "--mesh.dp 2 --mesh.tp 1 --plan.recompute full --plan.zero 3",
}
# Runs in two microbatches: with zero 2 and 3 the ranks' sum of each microbatch, with 0 and 1 the ranks' sum of all.
STAGES = {
    "pp2-dp2-zero2": "--mesh.pp 2 --mesh.dp 2 --mesh.tp 1 --plan.zero 2 --plan.microbatches 2",
    "dp1-zero2": "--mesh.dp 1 --mesh.tp 1 --plan.zero 2 --plan.microbatches 2",
}
CONTEXT = {
    "cp2": "--mesh.dp 1 --mesh.cp 2 --mesh.tp 1",
    "dp2-cp2": "--mesh.dp 2 --mesh.cp 2 --mesh.tp 1",
}
RECIPES = ("llama-tiny", "qwen2-tiny", "qwen3-tiny", "gpt-tiny")


def bits_of(folder: Path) -> tuple[list[tuple[float, float]], str]:
    """The losses and norms of a run's steps, and the checksum of the exported weights."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    weights = (folder / "checkpoint" / "model.safetensors").read_bytes()
    return [(line["loss"], line["grad_norm"]) for line in lines], hashlib.sha256(weights).hexdigest()


def run(recipe: str, options: str, exact: str, steps: int, folder: Path) -> tuple[list[tuple[float, float]], str]:
    arguments = [recipe, *options.split(), "--plan.exact", exact, "--steps", str(steps), "--output", str(folder)]
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    command = [sys.executable, "-m", "weft.models.cli", "train", *arguments, "--log-every", "1", "--no-check"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return bits_of(folder)


def all_equal(recipe: str, options: dict[str, str], exact: str, steps: int, folder: Path) -> None:
    (first, *further) = options
    truth = run(recipe, options[first], exact, steps, folder / first)
    assert len(truth[0]) == steps
    for name in further:
        found = run(recipe, options[name], exact, steps, folder / name)
        assert found[0] == truth[0], f"losses and norms on {name}, beside {first}"
        assert found[1] == truth[1], f"weights on {name}, beside {first}"


@pytest.mark.exhaustive
def test_a_run_on_two_processes_has_the_bytes_of_a_run_on_one(tmp_path: Path) -> None:
    all_equal("llama-tiny", {name: MESHES[name] for name in ("1x1", "2x1")}, NAMED, 3, tmp_path)


@pytest.mark.exhaustive
def test_held_out_rows_that_meshes_would_cut_elsewhere_are_read_in_parts(tmp_path: Path) -> None:
    """18 held-out rows in batches of 12: of the last 6, dp=4 cuts off 2, and dp=2 would cut off 3."""
    text, file = " ".join(str(number / 7) for number in range(1400)), tmp_path / "text.txt"
    assert len(text) // 64 // 20 == 18, "a sequence in 20 is held out"
    file.write_text(text)
    options = f"--data.path {file} --data.batch-size 12 --data.sequence-length 64 --eval-every 1 --mesh.tp 1"
    losses = []
    for dp in (1, 2):
        run("llama-tiny", f"{options} --mesh.dp {dp}", "dp=4", 1, tmp_path / f"{dp}")
        lines = (tmp_path / f"{dp}" / "metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(line)["held_out_loss"] for line in lines])
    assert losses[0] == losses[1]


@pytest.mark.exhaustive
@pytest.mark.table
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    ("options", "exact"),
    [
        pytest.param(MESHES, NAMED, id="meshes"),
        pytest.param(STAGES, NAMED, id="stages"),
        pytest.param(CONTEXT, "dp=2,cp=2", id="context"),
    ],
)
def test_runs_have_the_same_bytes(recipe: str, options: dict[str, str], exact: str, tmp_path: Path) -> None:
    all_equal(recipe, options, exact, STEPS, tmp_path)
