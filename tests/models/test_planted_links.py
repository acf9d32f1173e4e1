"""Who can write into the folder of a run cannot have it write elsewhere."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from weft.mesh import ProcessMesh
from weft.models.parallel import ParallelPlan
from weft.models.safe_files import append, write_anew
from weft.models.train.metrics_file import Trackers
from weft.models.train.recipes import recipe
from weft.models.train.results import NotWritten, Results

from tests.models.metrics import some_metrics

OTHERS = "not of this run\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a run that is resumed, beside a stranger's file."""
    (tmp_path / "run").mkdir()
    (tmp_path / "file").write_text(OTHERS)
    return tmp_path / "run"


def taken_up(folder: Path) -> Results:
    """The results of a run that resumes there, at its beginning."""
    results = Results(folder, writes=True)
    config = replace(recipe("llama-tiny"), resume="newest")
    results.begin("llama-tiny", config, ParallelPlan(), ProcessMesh.grid(dp=1), [])
    return results


NAMES = ("config.toml", "plan.txt", "versions.json", "metrics.jsonl", "curves.svg")


@pytest.mark.exhaustive
@pytest.mark.parametrize("is_there", [True, False])
@pytest.mark.parametrize("name", [*NAMES, *(f".{name}" for name in NAMES)])
def test_nothing_is_written_through_a_link(name: str, is_there: bool, folder: Path) -> None:
    planted, target = folder / name, folder.parent / ("file" if is_there else "nothing")
    planted.symlink_to(target)
    with taken_up(folder) as results:
        results.add(some_metrics(step=1))
        results.sync()
        assert "could not be written" not in results.picture(80)
    assert (folder.parent / "file").read_text() == OTHERS
    assert not (folder.parent / "nothing").exists()
    assert {path.name for path in folder.iterdir() if not path.is_symlink()} == set(NAMES)
    (line,) = (folder / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["step"] == 1


def test_a_hard_link_is_not_written_through(folder: Path) -> None:
    for name in (".plan.txt", "plan.txt", "metrics.jsonl"):
        (folder / name).hardlink_to(folder.parent / "file")
    with taken_up(folder) as results:
        results.add(some_metrics(step=1))
    assert (folder.parent / "file").read_text() == OTHERS


def test_a_link_that_is_planted_while_a_run_writes_ends_it(folder: Path) -> None:
    with taken_up(folder) as results:
        results.add(some_metrics(step=1))
        (folder / "metrics.jsonl").unlink()
        (folder / "metrics.jsonl").symlink_to(folder.parent / "file")
        results.add(some_metrics(step=2))
        with pytest.raises(NotWritten, match=r"metrics\.jsonl could not be written: "):
            results.sync()
    assert (folder.parent / "file").read_text() == OTHERS


def test_the_name_of_a_run_at_a_tracker_is_not_written_through_a_link(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **options: None))
    (folder / "wandb-id").symlink_to(folder.parent / "nothing")
    Trackers(("wandb",), folder, recipe("llama-tiny"))
    assert not (folder.parent / "nothing").exists() and not (folder / "wandb-id").is_symlink()


def test_files_are_made_as_others_are(folder: Path) -> None:
    write_anew(folder / "made", b"1")
    append(folder / "added", b"1", sync=True)
    append(folder / "added", b"2")
    (folder / "usual").touch()
    assert (folder / "made").read_bytes() == b"1" and (folder / "added").read_bytes() == b"12"
    assert len({(folder / name).stat().st_mode for name in ("made", "added", "usual")}) == 1
