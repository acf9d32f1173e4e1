"""The losses of `weft evaluate` and of a run's held-out examples are trl's, and the same however rows are batched."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from weft.models.cli import evaluate
from weft.models.data.streams import even_middles
from weft.models.train.run import Run
from weft.models.train.trainer import Trainer

from tests.models.tuning.runs import make_run, records, save_model, write
from tests.models.tuning.test_against_trl import DPO, KTO
from tests.models.tuning.trl_steps import trl_step
from tests.support.pool import Pool

COUNT = 65  # of which 3 are held out
HELD_OUT = even_middles(COUNT // 20, COUNT)
LOSSES: dict[str, tuple[Any, tuple[str, ...]]] = {
    "sft": ("sft", ()),
    "sigmoid": ("dpo", ("--dpo.beta", "0.3", "--dpo.label-smoothing", "0.1")),
    "ipo": ("dpo", DPO["ipo"][0]),
    "length-normalized": ("dpo", ("--dpo.length-normalized",)),
    "kto": ("kto", KTO["weighted"][0]),
}
# Options of a run by which its held-out rows come in other batches, and the mesh.
WAYS: dict[str, tuple[int, tuple[str, ...], dict[str, int]]] = {
    "one-row": (1, (), {}),
    "two-rows-not-packed": (2, ("--data.no-pack",), {}),
    "eight-rows": (8, ("--data.no-pack",), {}),
    "dp2": (2, ("--data.no-pack",), {"dp": 2}),
    "tp2": (1, (), {"tp": 2}),
    "pp2": (2, ("--plan.microbatches", "2"), {"pp": 2}),
    "cp2": (2, ("--reference", "precomputed"), {"cp": 2}),
}
PREFERENCES = [name for name in LOSSES if name != "sft"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("folders")
    save_model(path / "model", 2)
    save_model(path / "reference", 1)
    for task in ("sft", "dpo", "kto"):
        rows = records(task, messages=True, count=COUNT)
        if task == "kto":
            # The mismatched completion is the previous record's: here the previous held-out record has the same.
            for number, place in enumerate(HELD_OUT):
                rows[place - 1]["completion"] = rows[HELD_OUT[number - 1]]["completion"]
        write(path / f"{task}.jsonl", rows)
        write(path / f"{task}-held-out.jsonl", [rows[place] for place in HELD_OUT])
    return path


def evaluated(capsys: pytest.CaptureFixture[str], folders: Path, data: Path, *options: str) -> dict[str, Any]:
    assert evaluate.run([str(folders / "model"), "--data", str(data), "--json", *options]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.few(2)
@pytest.mark.parametrize("messages", [True, False], ids=["messages", "text"])
@pytest.mark.parametrize("name", [*(f"dpo-{loss}" for loss in DPO), *(f"kto-{weights}" for weights in KTO)])
def test_losses_are_those_of_trl(
    name: str, messages: bool, folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task, _, loss = name.partition("-")
    options, trl_options = (DPO if task == "dpo" else KTO)[loss]
    if task == "dpo":
        trl_options = {"max_length": None, "max_prompt_length": None, **trl_options}
    rows, reference = records(task, messages=messages), folders / "reference"  # type: ignore[arg-type]
    theirs, _, metrics = trl_step(task, folders / "model", reference, rows, tmp_path / "trl", trl_options)
    data = write(tmp_path / "rows.jsonl", rows)
    found = evaluated(capsys, folders, data, "--reference", str(reference), "--batch-size", "3", *options)
    assert found[f"{task}_loss"] == pytest.approx(theirs, rel=1e-5)
    if task == "kto":
        assert found["kl"] == pytest.approx(torch.tensor(metrics["kl"]).mean().item(), rel=1e-4, abs=1e-6)


def held_out_loss(run: Run) -> float:
    """The held-out loss before step 1, on this rank."""
    run.folder.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(run, torch.device("cpu"))
    trainer._objective.begin(0, lambda line: None)
    found = trainer.held_out_loss()
    assert found is not None
    return found


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("way", WAYS)
def test_the_held_out_loss_of_a_run_is_that_of_evaluate(
    way: str, name: str, folders: Path, pool: Pool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """However rows are batched and packed, on every mesh: also kto, whose divergence is of all held-out examples."""
    (task, options), (batch, further, axes) = LOSSES[name], WAYS[way]
    meshed = [text for axis in ("pp", "dp", "cp", "tp") for text in (f"--mesh.{axis}", str(axes.get(axis, 1)))]
    if task == "sft":
        further = tuple(each for each in further if each not in ("--reference", "precomputed"))
    of_reference = () if task == "sft" else ("--reference-from", str(folders / "reference"))
    every = (*options, *further, *meshed, *of_reference)
    run = make_run(folders / "model", folders / f"{task}.jsonl", task, *every, output=tmp_path / "run", batch=batch)
    found = pool.run(held_out_loss, run, ranks=max(axes.values(), default=1))
    reference = () if task == "sft" else ("--reference", str(folders / "reference"))
    truth = evaluated(capsys, folders, folders / f"{task}-held-out.jsonl", *options, *reference)
    loss = truth["loss" if task == "sft" else f"{task}_loss"]
    assert found == pytest.approx([loss] * len(found), rel=1e-5)
    if task == "kto":
        assert truth["kl"] > 0  # else nothing would depend on it


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", PREFERENCES)
def test_figures_do_not_depend_on_the_batch_size(name: str, folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task, options = LOSSES[name]
    data, every = folders / f"{task}.jsonl", ("--reference", str(folders / "reference"), *options)
    one, many = (evaluated(capsys, folders, data, *every, "--batch-size", size) for size in ("1", "64"))
    assert one == pytest.approx(many, rel=1e-5)
