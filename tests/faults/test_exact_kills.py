"""With `exact`, a run whose ranks are killed goes on on another mesh, and ends with the bytes of a run on one process.

WEFT_EXACT_STEPS is the number of steps of the exhaustive cases, 24 by default.
"""

from __future__ import annotations

import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from weft.models.checkpoint.manifest import Manifest
from weft.models.train.config import DataConfig
from weft.models.train.folder import checkpoints
from weft.models.train.metrics_file import METRICS

from tests.faults.attempts import CONFIG, Victim, Way, assert_same, complete, is_killed
from tests.support.pool import Pool

STEPS = int(os.environ.get("WEFT_EXACT_STEPS", "24"))
EXACT = "dp=4,tp=2"
SAVE_EVERY = 3  # kills lose steps
Mesh = tuple[dict[str, int], dict[str, Any]]  # sizes, and options of the plan which change no bits
MESHES: dict[str, Mesh] = {
    "4x2": ({"dp": 4, "tp": 2}, {}),
    "2x1": ({"dp": 2, "tp": 1}, {"recompute": "full"}),
    "pp2-2x2": ({"pp": 2, "dp": 2, "tp": 2}, {"schedule": "1f1b", "split": "layers"}),
}
SMALL: dict[str, Mesh] = {"4x1": ({"dp": 4, "tp": 1}, {"zero": 1}), "1x2": ({"dp": 1, "tp": 2}, {"zero": 3})}
ALONE: Mesh = ({"dp": 1, "tp": 1}, {})


def way_of(mesh: Mesh, steps: int, plan: dict[str, Any], options: dict[str, Any]) -> Way:
    data = DataConfig(batch_size=8, sequence_length=8)
    further = {"data": data, "save_every": SAVE_EVERY, "log_every": 1, **options}
    return Way(steps=steps, sizes=mesh[0], plan={"exact": EXACT, **plan, **mesh[1]}, options=further)


def tensors_of(checkpoint: Path) -> dict[str, Tensor]:
    """The whole tensors of a checkpoint, of the model and the optimizer."""
    found: dict[str, Tensor] = {}
    manifest = Manifest.read(checkpoint)
    parts = {file: load_file(checkpoint / file) for file in manifest.files if file.endswith(".safetensors")}
    for name, tensor in manifest.tensors.items():
        for part in tensor.parts:
            value = parts[part.file][part.key(name)]
            whole = found.setdefault(name, value.new_empty(tensor.shape))
            whole[tuple(slice(at, at + size) for at, size in zip(part.offsets, part.shape, strict=True))] = value
    return found


def survive_on(pool: Pool, ways: list[Way], folder: Path, truth: Path, seed: int) -> int:
    """Start the run on each mesh in turn, kill a rank of each at a random moment, complete the run on the last mesh.

    A kill comes after the mesh's share of the steps, and up to 0.2 seconds of work. Returns the lost steps' number.
    """
    draw, lost, steps = random.Random(seed), 0, ways[0].steps
    for number, way in enumerate(ways):
        after = max(SAVE_EVERY, steps * (number + 1) // (len(ways) + 1) // SAVE_EVERY * SAVE_EVERY)
        victim = Victim(draw.randrange(way.ranks), draw.uniform(0, 0.2), after=after)
        assert is_killed(pool, way, folder, victim), f"the run on {way.sizes} ended before the kill"
        lost += len((folder / METRICS).read_text().splitlines()) - max(checkpoints(folder))
    complete(pool, ways[-1], folder)
    assert_same(folder, truth)
    last = f"checkpoint-{max(checkpoints(truth))}"
    found, wanted = tensors_of(folder / last), tensors_of(truth / last)
    assert found.keys() == wanted.keys() and any(name.startswith("optimizer.") for name in wanted)
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []
    exported = "checkpoint/model.safetensors"
    assert (folder / exported).read_bytes() == (truth / exported).read_bytes()
    return lost


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text("what was saved is whole. " * 40)
    return tmp_path


def check(pool: Pool, folder: Path, meshes: dict[str, Mesh], steps: int, plan: dict[str, Any], options: Any) -> None:
    *ways, truth = [way_of(each, steps, plan, options) for each in (*meshes.values(), ALONE)]
    complete(pool, truth, folder / "truth")
    lost = survive_on(pool, ways, folder / "killed", folder / "truth", seed=46)
    print(f"{steps} steps on {', '.join(meshes)}: {len(ways)} kills, {lost} steps done again")


@pytest.mark.exhaustive
def test_a_run_killed_on_each_mesh_ends_with_the_bytes_of_one_process(pool: Pool, folder: Path) -> None:
    """The plans' zero differs, too: with a single microbatch all levels agree."""
    check(pool, folder, SMALL, 12, {"microbatches": 1}, {})


def options_of(name: str, dtype: str) -> dict[str, Any]:
    return {"dtype": dtype, "optimizer": replace(CONFIG.optimizer, name=name)}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("zero", "options"),
    [
        pytest.param(0, options_of("adamw", "float32"), id="float32"),
        pytest.param(0, options_of("adamw", "bfloat16"), id="bfloat16"),
        pytest.param(1, options_of("adamw", "float32"), id="zero-1"),
        pytest.param(3, options_of("adamw", "float32"), id="zero-3"),
        pytest.param(3, options_of("adamw", "bfloat16"), id="zero-3-bfloat16"),
        pytest.param(1, options_of("muon", "float32"), id="muon"),
        pytest.param(3, options_of("muon", "bfloat16"), id="muon-zero-3-bfloat16"),
    ],
)
def test_a_run_killed_from_eight_processes_to_two_to_eight_ends_with_the_bytes_of_one_process(
    zero: int, options: dict[str, Any], pool: Pool, folder: Path
) -> None:
    check(pool, folder, MESHES, STEPS, {"microbatches": 2, "zero": zero}, options)
