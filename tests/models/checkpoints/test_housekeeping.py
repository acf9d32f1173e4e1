"""A complete new checkpoint replaces older ones; a failure to remove one is reported, and the run goes on."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from weft.models.checkpoint.states import Snapshot
from weft.models.train.folder import checkpoints, newest_complete, remove, remove_old, replace_folder, tidy
from weft.models.train.loop import train
from weft.models.train.report import Report

from tests.models.checkpoints.test_saver import CONFIG, run_in
from tests.support.pool import Pool


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text("what was saved is whole. " * 40)
    (tmp_path / "run").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/file").touch()
    return tmp_path


def held_open(path: Path, *arguments: Any, ignore_errors: bool = False, **options: Any) -> None:
    """`shutil.rmtree` on a network disk, which keeps a file while a process has it open."""
    if not ignore_errors:
        raise OSError(39, "Directory not empty", str(path))


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("checkpoint-1", 1),
        ("checkpoint-10", 10),
        ("checkpoint-0001", None),
        ("checkpoint-01", None),
        ("checkpoint-١", None),
        ("checkpoint-1.damaged", None),
        ("checkpoint--1", None),
        ("checkpoint-", None),
    ],
)
def test_a_checkpoint_has_the_name_that_a_run_gives_it(name: str, step: int | None, folder: Path) -> None:
    (folder / "run" / name).mkdir()
    assert checkpoints(folder / "run") == ({} if step is None else {step: folder / "run" / name})
    assert remove_old(folder / "run", 1, 0) == []
    assert (folder / "run" / name).exists()


@pytest.mark.parametrize("old", ["folder", "link", "dangling"])
def test_a_link_is_removed_and_not_what_it_leads_to(old: str, folder: Path) -> None:
    path = folder / "run/checkpoint-2"
    if old == "folder":
        shutil.copytree(folder / "elsewhere", path)
    else:
        path.symlink_to(folder / ("elsewhere" if old == "link" else "nowhere"))
    assert remove(path) == []
    assert list((folder / "run").iterdir()) == []
    assert (folder / "elsewhere/file").exists()


def test_a_link_in_the_place_of_the_last_model_gives_way(folder: Path) -> None:
    (folder / "run/checkpoint").symlink_to(folder / "elsewhere")
    (folder / "run/new").mkdir()
    assert replace_folder(folder / "run/new", folder / "run/checkpoint") == []
    assert [path.is_symlink() for path in (folder / "run").iterdir()] == [False]
    assert (folder / "elsewhere/file").exists()


def test_a_folder_that_could_not_be_removed_blocks_no_later_save(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = folder / "run"
    for count in range(2):
        shutil.copytree(folder / "elsewhere", run / "checkpoint", dirs_exist_ok=True)
        (run / "new").mkdir()
        with monkeypatch.context() as patched:
            patched.setattr(shutil, "rmtree", held_open)
            (line,) = replace_folder(run / "new", run / "checkpoint")
        assert line.endswith("could not be removed: Directory not empty; remove it by hand")
        assert [path.name for path in run.glob("checkpoint")] == ["checkpoint"]
        assert len(list(run.glob(".checkpoint*.removed"))) == count + 1
        assert not list((run / "checkpoint").iterdir()), "it is the new one"
    tidy(run)  # as the next start, when nobody has the file open
    assert [path.name for path in run.iterdir()] == ["checkpoint"]


@pytest.mark.parametrize("name", [".checkpoint.new", ".checkpoint-2.removed", "checkpoint-2.partial"])
def test_links_that_lie_where_a_run_writes_aside_are_removed_as_it_begins(name: str, folder: Path) -> None:
    (folder / "run" / name).symlink_to(folder / "elsewhere")
    tidy(folder / "run")
    assert list((folder / "run").iterdir()) == [] and (folder / "elsewhere/file").exists()


def a_run_whose_old_checkpoint_stays(folder: Path, why: str) -> tuple[int, list[str]]:
    """Step 2's checkpoint stays after step 4's is complete. Returns the signal that ended the run, and its output."""
    run = run_in(folder, 1)
    run = replace(run, config=replace(CONFIG, keep=1))
    said: list[str] = []
    write: Callable[..., None] = Snapshot.write
    rename, rmtree = Path.rename, shutil.rmtree

    def written(copy: Snapshot, path: Path, *arguments: Any) -> None:
        write(copy, path, *arguments)
        if why == "link" and path.name == "checkpoint-2":
            path.rename(folder / "moved")
            path.symlink_to(folder / "moved")

    def removed(path: Path, *arguments: Any, **options: Any) -> None:
        (held_open if why == "held-open" and "checkpoint-2" in str(path) else rmtree)(path, *arguments, **options)

    def renamed(path: Path, to: Path) -> Path:
        if why == "no-rename" and path.name == "checkpoint-2":
            raise PermissionError(1, "Operation not permitted")
        return rename(path, to)

    with (
        patch.object(Snapshot, "write", written),
        patch.object(shutil, "rmtree", removed),
        patch.object(Path, "rename", renamed),
        patch.object(Report, "print_line", lambda self, text: said.append(text)),
    ):
        return train(run, torch.device("cpu")), said


@pytest.mark.exhaustive
@pytest.mark.parametrize("why", ["link", "held-open", "no-rename"])
def test_a_run_goes_on_when_an_old_checkpoint_cannot_be_removed(why: str, folder: Path, pool: Pool) -> None:
    ((status, said),) = pool.run(a_run_whose_old_checkpoint_stays, folder, why, ranks=1)
    assert status == 0
    assert newest_complete(folder / "run") == (folder / "run/checkpoint-6", [])
    assert (folder / "run/checkpoint/model.safetensors").exists()
    lines = [line for line in said if "could not be removed: " in line]
    assert len(lines) == (0 if why == "link" else 1), "once, though two checkpoints come after it"
    if why == "link":
        assert (folder / "moved/manifest.json").exists() and not (folder / "run/checkpoint-2").exists()
