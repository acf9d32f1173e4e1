"""Checkpoints saved under one plan and read under another: tensors have the same bits, and nothing else is read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from weft.models import load_checkpoint, save_checkpoint

from tests.models.checkpoints.states import CASES, Case, fill_state, held, make
from tests.support.pool import Pool
from tests.support.sample import together

VARIANTS: dict[str, dict[str, Any]] = {"untied": {}, "tied": {"tie_embeddings": True}, "adapters": {"adapters": True}}


def save(case: Case, folder: Path, options: dict[str, Any]) -> None:
    model, optimizer = make(case, seed=1, **options)
    fill_state(model, optimizer, seed=1)
    save_checkpoint(model, folder, optimizer, run={"step": 7})


Saved = tuple[Path, dict[str, Any]]  # a folder, and the options of the model saved there


def differences(case: Case, saved: list[Saved]) -> list[str]:
    """Load each folder into a model with other values; the names of the tensors that differ from the saved model's."""
    found = []
    for folder, options in saved:
        model, optimizer = make(case, seed=1, **options)
        fill_state(model, optimizer, seed=1)
        truth = held(model, optimizer)
        model, optimizer = make(case, seed=2, **options)
        load_checkpoint(model, folder, optimizer)
        loaded = held(model, optimizer)
        assert loaded.keys() == truth.keys()
        found += [f"{folder}: {name}" for name in truth if not torch.equal(truth[name], loaded[name])]
    return found


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory, pool: Pool) -> Callable[[str, str], Path]:
    """Where a checkpoint of a plan is, saved when first asked for."""
    saved = tmp_path_factory.mktemp("saved")

    def folder_of(src: str, variant: str) -> Path:
        folder = saved / variant / src
        if not folder.exists():
            folder.parent.mkdir(exist_ok=True)
            pool.run(save, CASES[src], folder, VARIANTS[variant], ranks=CASES[src].ranks)
        return folder

    return folder_of


EACH = [pytest.param(name, id=name) for name in CASES]


@pytest.mark.parametrize(("dst", "cases"), together(EACH, EACH, [pytest.param(name, id=name) for name in VARIANTS]))
def test_paddlenlp_9412_checkpoints_of_every_plan_are_read_under_every_other(
    dst: str, cases: list[tuple[str, str]], folder_of: Callable[[str, str], Path], pool: Pool
) -> None:
    saved = [(folder_of(src, variant), VARIANTS[variant]) for src, variant in cases]
    for found in pool.run(differences, CASES[dst], saved, ranks=CASES[dst].ranks):
        assert found == []


@pytest.mark.exhaustive
def test_a_part_held_by_several_ranks_is_written_once(tmp_path: Path, pool: Pool) -> None:
    case = CASES["zero1-dp2-tp2"]
    pool.run(save, case, tmp_path / "saved", {}, ranks=4)
    written = [path.stat().st_size for path in sorted((tmp_path / "saved").glob("part-*"))]
    model, optimizer = make(Case(), seed=1)
    fill_state(model, optimizer, seed=1)
    nbytes = sum(tensor.nbytes for tensor in held(model, optimizer).values())
    manifest = json.loads((tmp_path / "saved/manifest.json").read_text())
    keys = [(name, *part["offsets"]) for name, each in manifest["holds"]["tensors"].items() for part in each["parts"]]
    table = 120 * len(keys)  # bytes in a file for each entry of its table, beside the tensors
    assert nbytes <= sum(written) <= nbytes + table
    assert max(written) < 1.5 * min(written), "each writes its share"
