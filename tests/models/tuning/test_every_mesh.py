"""Step 1 of every task, on every mesh and plan and with every kind of reference, equals step 1 of a process."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from weft.models.data.examples.example import Task

from tests.models.cases import gradients_off
from tests.models.tuning.runs import LORA, first_step, make_run, records, save_model, write
from tests.support.pool import Pool

pytestmark = pytest.mark.table

# Axes of the mesh, options of the plan, and further options. Missing axes are of size 1.
MESHES: dict[str, tuple[dict[str, int], str]] = {
    "dp2": ({"dp": 2}, ""),
    "tp2-sequence": ({"tp": 2}, "--plan.sequence"),
    "cp2": ({"cp": 2}, "--plan.recompute full"),
    "pp2": ({"pp": 2}, "--plan.microbatches 2"),
    "dp2-zero3": ({"dp": 2}, "--plan.zero 3 --plan.microbatches 2"),
    "dp2-tp2-zero1": ({"dp": 2, "tp": 2}, "--plan.zero 1 --plan.sequence"),
    "cp2-tp2": ({"cp": 2, "tp": 2}, "--plan.sequence --plan.microbatches 4"),
    "ulysses-dp2-zero2": ({"cp": 2, "dp": 2}, "--plan.context ulysses --plan.zero 2"),
    "pp2-dp2-zero3": ({"pp": 2, "dp": 2}, "--plan.microbatches 2 --plan.zero 3 --plan.schedule zero_bubble"),
    "dp4-zero2": ({"dp": 4}, "--plan.zero 2 --plan.recompute selective"),
    "dp8-zero3": ({"dp": 8}, "--plan.zero 3"),
    "tp4-dp2": ({"tp": 4, "dp": 2}, "--plan.sequence --plan.zero 3 --plan.recompute full"),
    "dp2-cp2-tp2": ({"dp": 2, "cp": 2, "tp": 2}, "--plan.zero 1 --plan.sequence --plan.microbatches 2"),
    "dp2-cp2-tp2-zero3": ({"dp": 2, "cp": 2, "tp": 2}, "--plan.zero 3 --plan.recompute selective"),
    "ulysses-tp2-dp2": ({"dp": 2, "cp": 2, "tp": 2}, "--plan.context ulysses --plan.sequence --plan.zero 2"),
    "pp2-dp2-tp2": ({"pp": 2, "dp": 2, "tp": 2}, "--plan.microbatches 4 --plan.sequence --plan.zero 1"),
    "pp2-cp2-tp2": ({"pp": 2, "cp": 2, "tp": 2}, "--plan.microbatches 2 --plan.schedule gpipe"),
    "pp2-dp4-zero2": ({"pp": 2, "dp": 4}, "--plan.microbatches 2 --plan.zero 2 --plan.recompute full"),
}
MIXTURES: dict[str, tuple[dict[str, int], str]] = {
    "ep2-dp2": ({"dp": 2}, "--mesh.ep 2"),
    "ep2-dp2-tp2": ({"dp": 2, "tp": 2}, "--mesh.ep 2 --plan.sequence --plan.zero 1"),
    "ep2-dp2-cp2": ({"dp": 2, "cp": 2}, "--mesh.ep 2 --plan.microbatches 2"),
    "ep4-dp4-tp2": ({"dp": 4, "tp": 2}, "--mesh.ep 4 --plan.zero 3 --plan.recompute full"),
    "ep2-pp2-dp2-tp2": ({"pp": 2, "dp": 2, "tp": 2}, "--mesh.ep 2 --plan.microbatches 2 --plan.zero 1"),
}
EACH_MESH = pytest.mark.parametrize(
    "mesh",
    [
        pytest.param(mesh, marks=[pytest.mark.exhaustive] if math.prod(axes.values()) > 4 else [])
        for mesh, (axes, _) in MESHES.items()
    ],
)
REFERENCES = ("model", "adapters", "precomputed")
TASKS: dict[str, tuple[Task, str]] = {
    "sft": ("sft", ""),
    "dpo": ("dpo", "--dpo.beta 0.3 --dpo.label-smoothing 0.1"),
    "ipo": ("dpo", "--dpo.beta 0.2 --dpo.loss ipo"),
    "kto": ("kto", "--kto.beta 0.3 --kto.desirable-weight 1.5"),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of models and of their references, and each task's data."""
    path = tmp_path_factory.mktemp("folders")
    for kind in ("llama", "mixture"):
        for seed, name in enumerate(("model", "reference"), start=1):
            save_model(path / kind / name, seed, experts=kind == "mixture")
    for task in ("sft", "dpo", "kto"):
        write(path / f"{task}.jsonl", records(task, messages=True, count=16))  # type: ignore[arg-type]
    return path


def step(
    pool: Pool, folders: Path, kind: str, name: str, axes: dict[str, int], plan: str, further: tuple[str, ...]
) -> list[dict[str, Any]]:
    """Step 1 on a mesh, by rank."""
    task, options = TASKS[name]
    meshes = [text for axis in ("pp", "dp", "cp", "tp") for text in (f"--mesh.{axis}", str(axes.get(axis, 1)))]
    every = (*meshes, *options.split(), *plan.split(), *further)
    output = folders / f"run-{len(list(folders.glob('run-*')))}"
    for kept in folders.glob(".reference-*"):  # a precomputed reference is computed on every mesh
        kept.unlink()
    run = make_run(folders / kind / "model", folders / f"{task}.jsonl", task, *every, output=output, batch=8)
    return pool.run(first_step, run, "--lora.rank" in further, ranks=math.prod(axes.values()))


@cache
def alone(pool: Pool, folders: Path, kind: str, name: str, further: tuple[str, ...]) -> dict[str, Any]:
    """Step 1 on a single process."""
    (found,) = step(pool, folders, kind, name, {"dp": 1}, "", further)
    return found


def compare(pool: Pool, folders: Path, kind: str, name: str, mesh: tuple[dict[str, int], str], *further: str) -> None:
    """Compare step 1 on a mesh with step 1 on a process, and with the prediction. further: options of the run."""
    axes, plan = mesh
    # A single process has no mesh for the reference.
    own = tuple(each for each in further if not each.startswith("--reference-mesh"))
    if kind == "mixture" and "--plan.microbatches" in plan:  # the balance loss is a mean over the microbatches
        own = (*own, "--plan.microbatches", plan.split("--plan.microbatches ")[1].split()[0])
    truth, seen = alone(pool, folders, kind, name, own), set[str]()
    for found in step(pool, folders, kind, name, axes, plan, further):
        torch.testing.assert_close(found["loss"], truth["loss"], rtol=1e-6, atol=1e-6)
        norm = truth["metrics"].grad_norm
        torch.testing.assert_close(found["metrics"].grad_norm, norm, rtol=1e-5, atol=0.0)
        torch.testing.assert_close(found["sums"], truth["sums"], rtol=1e-5, atol=2e-6)
        of_stage = {n: each for n, each in truth["gradients"].items() if n in found["gradients"]}
        assert not gradients_off(found["gradients"], truth["gradients"])
        assert found["gradients"].keys() == of_stage.keys()
        assert not [line for line in found["lines"] if "NOT" in line]
        seen |= of_stage.keys()
    assert seen == truth["gradients"].keys()


def of_reference(folders: Path, kind: str = "llama") -> tuple[str, str]:
    return "--reference-from", str(folders / kind / "reference")


@pytest.mark.parametrize("name", TASKS)
@EACH_MESH
def test_a_step_of_all_weights(mesh: str, name: str, folders: Path, pool: Pool) -> None:
    compare(pool, folders, "llama", name, MESHES[mesh], *(() if name == "sft" else of_reference(folders)))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", TASKS)
@EACH_MESH
def test_a_step_of_adapters(mesh: str, name: str, folders: Path, pool: Pool) -> None:
    """The reference is the model with the adapters switched off."""
    compare(pool, folders, "llama", name, MESHES[mesh], *LORA)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["dpo", "kto"])
@pytest.mark.parametrize("reference", ["precomputed", "model"])
@EACH_MESH
def test_adapters_beside_another_reference(mesh: str, reference: str, name: str, folders: Path, pool: Pool) -> None:
    further = (*LORA, "--reference", reference, *of_reference(folders))
    compare(pool, folders, "llama", name, MESHES[mesh], *further)


# Axes and options of the policy; axes and ZeRO level of the reference.
OWN_MESHES: dict[str, tuple[dict[str, int], str, dict[str, int], int]] = {
    "tp2-dp2": ({"tp": 2}, "", {"dp": 2, "tp": 1}, 0),
    "pp2-dp2-zero3": ({"pp": 2}, "--plan.microbatches 2", {"dp": 2, "pp": 1}, 3),
    "dp2-pp2": ({"dp": 2}, "", {"dp": 1, "pp": 2}, 0),
    "dp4-cp2-tp2": ({"dp": 4}, "--plan.zero 3", {"dp": 1, "cp": 2, "tp": 2}, 0),
    "all-dp8": ({"dp": 2, "cp": 2, "tp": 2}, "--plan.sequence --plan.zero 1", {"dp": 8, "cp": 1, "tp": 1}, 3),
    "dp8-pp2-tp2": ({"dp": 8}, "", {"dp": 2, "pp": 2, "tp": 2}, 3),
}  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["dpo", "kto"])
@pytest.mark.parametrize("mesh", OWN_MESHES)
def test_a_reference_on_a_mesh_of_its_own(mesh: str, name: str, folders: Path, pool: Pool) -> None:
    axes, plan, of_own, zero = OWN_MESHES[mesh]
    own = [f"--reference-mesh.{axis}={size}" for axis, size in of_own.items()]
    further = (*own, *of_reference(folders), "--reference-zero", str(zero))
    compare(pool, folders, "llama", name, (axes, plan), *further)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["dpo", "kto"])
def test_a_reference_with_experts_on_a_mesh_that_their_axis_does_not_divide(
    name: str, folders: Path, pool: Pool
) -> None:
    own = ("--reference-mesh.dp=1", "--reference-mesh.tp=2", *of_reference(folders, "mixture"))
    compare(pool, folders, "mixture", name, MIXTURES["ep2-dp2"], *own)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["sft", "dpo", "kto"])
@pytest.mark.parametrize("mesh", MIXTURES)
def test_a_step_of_a_mixture(mesh: str, name: str, folders: Path, pool: Pool) -> None:
    compare(
        pool, folders, "mixture", name, MIXTURES[mesh], *(() if name == "sft" else of_reference(folders, "mixture"))
    )
