"""A checkpoint saved under one plan and read under another: every tensor is the same, to the bit, and nothing else is read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from weft.models import load_checkpoint, save_checkpoint

from tests.models.checkpoints.states import CASES, Case, fill_state, held, make
from tests.support.pool import Pool
from tests.support.sample import Portion

VARIANTS: dict[str, dict[str, Any]] = {"untied": {}, "tied": {"tie_embeddings": True}, "adapters": {"adapters": True}}


def save(case: Case, folder: Path, options: dict[str, Any]) -> None:
    model, optimizer = make(case, seed=1, **options)
    fill_state(model, optimizer, seed=1)
    save_checkpoint(model, folder, optimizer, run={"step": 7})


def differences(case: Case, folders: list[Path], options: dict[str, Any]) -> list[str]:
    """Reads each folder into what has other values; the names of what is not as it was saved."""
    model, optimizer = make(case, seed=1, **options)
    fill_state(model, optimizer, seed=1)
    truth = held(model, optimizer)
    found = []
    for folder in folders:
        model, optimizer = make(case, seed=2, **options)
        load_checkpoint(model, folder, optimizer)
        loaded = held(model, optimizer)
        assert loaded.keys() == truth.keys()
        found += [f"{folder.name}: {name}" for name in truth if not torch.equal(truth[name], loaded[name])]
    return found


@pytest.fixture(scope="module", params=VARIANTS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, pool: Pool) -> Iterator[Any]:
    """Where a checkpoint of each plan is, saved when first asked for, and what the model is like."""
    options, folder = VARIANTS[request.param], tmp_path_factory.mktemp("saved")

    def folder_of(name: str) -> Path:
        if not (folder / name).exists():
            pool.run(save, CASES[name], folder / name, options, ranks=CASES[name].ranks)
        return folder / name

    yield folder_of, options


@pytest.mark.parametrize("dst", CASES)
def test_every_plan_reads_what_every_other_saved(dst: str, saved: Any, portion: Portion, pool: Pool) -> None:
    folder_of, options = saved
    chosen = [src for src, _, _ in portion.of([(src, dst, str(options)) for src in CASES], every=6)]
    folders = [folder_of(src) for src in chosen]
    if folders:
        assert not [
            each
            for rank in pool.run(differences, CASES[dst], folders, options, ranks=CASES[dst].ranks)
            for each in rank
        ]


def test_what_several_ranks_hold_is_written_once(tmp_path: Path, pool: Pool) -> None:
    case = CASES["zero1-dp2-tp2"]
    pool.run(save, case, tmp_path / "saved", {}, ranks=4)
    written = [path.stat().st_size for path in sorted((tmp_path / "saved").glob("part-*"))]
    model, optimizer = make(Case(), seed=1)
    fill_state(model, optimizer, seed=1)
    nbytes = sum(tensor.nbytes for tensor in held(model, optimizer).values())
    manifest = json.loads((tmp_path / "saved/manifest.json").read_text())
    keys = [(name, *part["offsets"]) for name, each in manifest["holds"]["tensors"].items() for part in each["parts"]]
    table = 120 * len(keys)  # bytes of a file for each of its entries, beside the tensors
    assert nbytes <= sum(written) <= nbytes + table
    assert max(written) < 1.5 * min(written), "each writes its share"
