"""Step 1 of every task has the loss and the gradients of trl's trainers, for a batch of whole small data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from weft.models.train.run import Run

from tests.models.cases import gradients_off
from tests.models.tuning.runs import ALPHA, LORA, RANK, TARGETS, first_step, make_run, records, save_model, write
from tests.models.tuning.trl_steps import trl_step
from tests.support.pool import Pool

PACKINGS = [pytest.param((), id="packed"), pytest.param(("--data.no-pack",), id="not-packed")]
WEIGHTS = [pytest.param(False, id="all-weights"), pytest.param(True, id="adapters")]
FORMS = [pytest.param(False, id="text"), pytest.param(True, id="messages")]
DPO: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "sigmoid": (("--dpo.beta", "0.3"), {"beta": 0.3}),
    "smoothed": (("--dpo.beta", "0.3", "--dpo.label-smoothing", "0.1"), {"beta": 0.3, "label_smoothing": 0.1}),
    "ipo": (("--dpo.loss", "ipo", "--dpo.beta", "0.2"), {"loss_type": "ipo", "beta": 0.2}),
}
KTO: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "even": (("--kto.beta", "0.3"), {"beta": 0.3}),
    "weighted": (
        ("--kto.beta", "0.3", "--kto.desirable-weight", "1.5", "--kto.undesirable-weight", "0.7"),
        {"beta": 0.3, "desirable_weight": 1.5, "undesirable_weight": 0.7},
    ),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of the model and of another, the reference."""
    path = tmp_path_factory.mktemp("folders")
    save_model(path / "model", 1)
    save_model(path / "reference", 2)
    return path


def initial_adapters(run: Run) -> dict[str, Tensor]:
    """The adapters' values at the beginning of `first_step`, by name."""
    found: dict[str, Tensor] = {}

    def keep(trainer: Any) -> None:
        found.update({n: p.detach().clone() for n, p in trainer.model.named_parameters() if p.requires_grad})

    return {**first_step(run, True, keep), "values": found}


def compare(
    pool: Pool,
    folders: Path,
    path: Path,
    task: Any,
    rows: list[dict[str, Any]],
    options: tuple[str, ...],
    trl_options: dict[str, Any],
    adapted: bool,
) -> dict[str, Any]:
    """Check that Weft's step is trl's; returns Weft's metrics and trl's."""
    reference = None
    if task != "sft" and not adapted:  # with adapters the reference is the model without them
        reference, options = folders / "reference", (*options, "--reference-from", str(folders / "reference"))
    data = write(path / "data.jsonl", rows)
    run = make_run(folders / "model", data, task, *options, *(LORA if adapted else ()), output=path / "run", batch=None)
    (found,) = pool.run(initial_adapters if adapted else first_step, run, ranks=1)
    adapters = {"r": RANK, "lora_alpha": ALPHA, "target_modules": list(TARGETS)} if adapted else None
    loss, gradients, metrics = trl_step(
        task, folders / "model", reference, rows, path / "trl", trl_options, adapters, found.get("values")
    )
    assert found["loss"] == pytest.approx(loss, rel=1e-5)
    assert found["gradients"].keys() == gradients.keys()
    assert not gradients_off(found["gradients"], gradients)
    assert all(each.abs().max() > 0 for each in gradients.values())
    assert not [line for line in found["lines"] if "NOT" in line]
    return {"weft": found["metrics"], "sums": found["sums"], "trl": metrics}


@pytest.mark.exhaustive
@pytest.mark.parametrize("adapted", WEIGHTS)
@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("messages", FORMS)
def test_answers(
    messages: bool, packing: tuple[str, ...], adapted: bool, folders: Path, tmp_path: Path, pool: Pool
) -> None:
    """Messages learn the assistant's words alone, and prompts with completions the completions."""
    options = {"max_length": None, "assistant_only_loss": messages}
    compare(pool, folders, tmp_path, "sft", records("sft", messages=messages), packing, options, adapted)


@pytest.mark.parametrize("adapted", WEIGHTS)
@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("messages", FORMS)
@pytest.mark.parametrize("loss", DPO)
def test_pairs(
    loss: str, messages: bool, packing: tuple[str, ...], adapted: bool, folders: Path, tmp_path: Path, pool: Pool
) -> None:
    options, trl_options = DPO[loss]
    trl_options = {"max_length": None, "max_prompt_length": None, **trl_options}
    rows = records("dpo", messages=messages)
    found = compare(pool, folders, tmp_path, "dpo", rows, (*options, *packing), trl_options, adapted)
    margin = torch.tensor(found["trl"]["rewards/margins"]).mean().item()
    assert margin != 0
    if loss != "ipo":  # whose margins Weft divides by the answers' lengths
        assert found["weft"].rewards_margin == pytest.approx(margin, rel=1e-4)


@pytest.mark.parametrize("adapted", WEIGHTS)
@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("messages", FORMS)
@pytest.mark.parametrize("weights", KTO)
def test_judged_completions(
    weights: str, messages: bool, packing: tuple[str, ...], adapted: bool, folders: Path, tmp_path: Path, pool: Pool
) -> None:
    options, trl_options = KTO[weights]
    rows = records("kto", messages=messages)
    found = compare(pool, folders, tmp_path, "kto", rows, (*options, *packing), trl_options, adapted)
    kl = torch.tensor(found["trl"]["kl"]).mean().item()
    assert found["sums"][2] == pytest.approx(kl, rel=1e-4, abs=1e-6)
