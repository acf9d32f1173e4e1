"""A run begins with the weights of a folder on every mesh, and the check of step 1 compares with these weights."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from weft.models import from_pretrained
from weft.models.checkpoint.configs import config_of
from weft.models.checkpoint.convert import convert
from weft.models.data.batches import Batches
from weft.models.data.text import find_corpus
from weft.models.train.checkpoints import Saver
from weft.models.train.config import DataConfig, PlanConfig, TrainConfig
from weft.models.train.report import ROUNDING, Report
from weft.models.train.run import Run
from weft.models.train.trainer import Trainer, TrainingError

from tests.models.folders import their_model, their_saved
from tests.support.pool import Pool

DATA = DataConfig(batch_size=4, sequence_length=16)
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-stretched": (
        "llama",
        {
            "rope_theta": 500000.0,
            "rope_scaling": {"rope_type": "linear", "factor": 4.0},
            "rms_norm_eps": 1e-3,
        },
    ),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "gpt2": ("gpt2", {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}),
}
PLANS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "one": ({"dp": 1, "tp": 1}, {}),
    "tensor": ({"dp": 2, "tp": 2}, {"sequence": True}),
    "zero3": ({"dp": 2, "tp": 2}, {"zero": 3}),
    "stages": ({"pp": 2, "dp": 1, "tp": 2}, {"schedule": "1f1b", "microbatches": 2, "split": "layers"}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text, and for each kind a folder of transformers and the checkpoint converted from it."""
    path = tmp_path_factory.mktemp("begun")
    (path / "text.txt").write_text("what is trained, and what it is compared with; " * 20)
    for name, (kind, options) in KINDS.items():
        their_model(kind, vocab_size=257, **options).save_pretrained(path / name)
        convert(path / name, path / f"{name}-converted")
    return path


def run_of(folder: Path, name: str, axes: dict[str, int], plan: dict[str, Any], **options: Any) -> Run:
    model = config_of(folder / name)
    assert model is not None
    config = TrainConfig(model=model, data=DATA, plan=PlanConfig(**plan), **options)
    return Run(recipe=None, config=config, corpus=find_corpus(folder / "text.txt"), folder=folder / "run", **axes)


def first_step(run: Run, change: float = 0.0) -> tuple[float, list[str], str]:
    """The loss of step 1, its printed lines, and the error that ends it. change: added to the weights on the mesh."""
    trainer, said = Trainer(run, torch.device("cpu")), list[str]()
    trainer.report.print_line = said.append  # type: ignore[method-assign]
    if run.resume is not None:
        assert Saver(run, trainer.model, trainer.optimizer).resume() == 0
    assert {parameter.dtype for parameter in trainer.model.parameters()} == {torch.float32}
    if change:
        with torch.no_grad():
            for parameter in trainer.model.parameters():
                parameter.add_(change)
    error = ""
    try:
        trainer.first_step()
    except TrainingError as stopped:
        error = str(stopped)
    return float(trainer._unread_steps[0].result.loss), [line for line in said if line.startswith("check")], error


def their_loss(folder: Path, name: str) -> float:
    """transformers' loss for the batch of step 1."""
    batches = Batches(find_corpus(folder / "text.txt"), sequence_length=16, batch_size=4, seed=0)
    rows = batches.batch(0, slice(None))
    with torch.no_grad():
        logits = their_saved(folder / name)(rows.tokens).logits
    return F.cross_entropy(logits.flatten(0, 1).double(), rows.targets.flatten()).item()


@pytest.mark.exhaustive
@pytest.mark.parametrize("source", ["folder", "checkpoint", "resumed"])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", KINDS)
def test_step_1_has_the_loss_of_the_folders_model(name: str, plan: str, source: str, folder: Path, pool: Pool) -> None:
    axes, options = PLANS[plan]
    run = run_of(folder, name, axes, options)
    path = folder / (name if source == "folder" else f"{name}-converted")
    run = replace(run, **{"resume" if source == "resumed" else "origin": path})
    for loss, said, error in pool.run(first_step, run, ranks=math.prod(axes.values())):
        assert loss == pytest.approx(their_loss(folder, name), rel=2e-6)
        assert not error
        assert all(" on one: within 1e-06" in line for line in said)


@pytest.mark.exhaustive
@pytest.mark.parametrize("source", ["seed", "origin", "resume"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_another_loss_than_on_one_process_ends_the_run(source: str, ranks: int, folder: Path, pool: Pool) -> None:
    """On every rank, with both losses, where the weights are from, and the remedy."""
    run = run_of(folder, "gpt2", {"dp": ranks, "tp": 1}, {})
    if source != "seed":
        run = replace(run, **{source: folder / "gpt2-converted"})
    for rank, (loss, said, error) in enumerate(pool.run(first_step, run, 0.02, ranks=ranks)):
        assert len(said) == (rank == 0)
        assert all("NOT within 1e-06" in line for line in said)
        assert error.startswith(f"the loss of step 1 is {loss:.7f} on {ranks} process")
        assert f"with the weights of {'the seed' if source == 'seed' else folder / 'gpt2-converted'}" in error
        assert error.endswith("or --no-check to train anyway")


def test_without_the_check_it_is_trained_all_the_same(folder: Path, pool: Pool) -> None:
    run = replace(run_of(folder, "gpt2", {"dp": 1, "tp": 1}, {}, check=False), origin=folder / "gpt2")
    ((_, said, error),) = pool.run(first_step, run, 0.02, ranks=1)
    assert (said, error) == ([], "")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("factor", "within"), [pytest.param(0.5, True, id="half-of-it"), pytest.param(2.0, False, id="twice")]
)
@pytest.mark.parametrize("alone", [11.0, 2.0, 1.0, 1e-3, 0.0])
def test_how_near_the_losses_must_be(alone: float, factor: float, within: bool, dtype: str) -> None:
    """Relative to the loss; a loss below 1 has the rounding of logits, which are not as small."""
    report = Report(enabled=False)
    assert report.check_loss(alone + factor * ROUNDING[dtype] * max(alone, 1.0), alone, 2, dtype) is within


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_not_within(loss: float) -> None:
    assert not Report(enabled=False).check_loss(loss, 5.0, 2, "float32")
    assert not Report(enabled=False).check_loss(5.0, loss, 2, "float32")


@pytest.mark.exhaustive
def test_a_folder_in_16_bits_is_trained_in_32(tmp_path: Path, folder: Path, pool: Pool) -> None:
    their_model("llama", vocab_size=257).to(torch.bfloat16).save_pretrained(tmp_path / "half")
    (tmp_path / "text.txt").write_bytes((folder / "text.txt").read_bytes())
    assert {each.dtype for each in from_pretrained(tmp_path / "half").parameters()} == {torch.bfloat16}
    run = replace(run_of(tmp_path, "half", {"dp": 1, "tp": 2}, {}), origin=tmp_path / "half")
    for _, said, error in pool.run(first_step, run, ranks=2):
        assert not error and all("within 1e-06" in line for line in said)
