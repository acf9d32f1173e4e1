"""Damaged checkpoints: one line names the file, and no part of the checkpoint is used."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from weft.models import load_checkpoint, read_run, save_checkpoint
from weft.models.checkpoint import shards
from weft.models.checkpoint.manifest import DamagedCheckpoint, Manifest
from weft.models.cli.generate import find_tokenizer_of
from weft.models.data.tokenizer import byte_tokenizer
from weft.models.train.folder import (
    check_resumable,
    checkpoints,
    find_to_resume,
    lock,
    newest_complete,
    remove_old,
    rename_damaged_checkpoints,
)

from tests.faults.attempts import Way, assert_same, complete, train_from
from tests.models.checkpoints.states import Case, fill_state, make
from tests.support.pool import Pool

FILES = [
    "config.json",
    "manifest.json",
    "part-00000.safetensors",
    "run.json",
    "tokenizer.json",
    "tokenizer_config.json",
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "checkpoint-4"
    model, optimizer = make(Case(), seed=1)
    fill_state(model, optimizer, 1)
    save_checkpoint(model, folder, optimizer, run={"step": 4}, tokenizer=byte_tokenizer())
    assert sorted(path.name for path in folder.iterdir()) == FILES
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / whole.name))


def read_all(folder: Path) -> None:
    """Reads every file of it."""
    Manifest.read(folder).check_documents(folder)
    model, optimizer = make(Case(), seed=2)
    load_checkpoint(model, folder, optimizer)


def refused(folder: Path) -> str:
    with pytest.raises(ValueError) as refusal:
        read_all(folder)
    said = str(refusal.value)
    assert "\n" not in said and str(folder) in said
    return said


def test_an_unchanged_checkpoint_is_read(folder: Path) -> None:
    read_all(folder)
    assert read_run(folder) == {"step": 4}


@pytest.mark.parametrize("at", [0.0, 0.01, 0.3, 0.7, 0.9999])
@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_is_found(name: str, at: float, folder: Path) -> None:
    path = folder / name
    content = bytearray(path.read_bytes())
    content[int(at * len(content))] ^= 4
    path.write_bytes(content)
    said = refused(folder)
    assert name in said
    assert "changed" in said or "cannot be read" in said


def test_text_is_not_generated_with_a_tokenizer_that_was_changed(folder: Path) -> None:
    content = (folder / "tokenizer_config.json").read_text()
    (folder / "tokenizer_config.json").write_text(content.replace("Fast", "Past"))
    with pytest.raises(DamagedCheckpoint, match=r"tokenizer_config\.json was changed after it was written"):
        find_tokenizer_of(folder)


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_was_cut_short_is_found(name: str, folder: Path) -> None:
    os.truncate(folder / name, (folder / name).stat().st_size - 5)
    assert name in refused(folder)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_found(name: str, folder: Path) -> None:
    (folder / name).unlink()
    assert name in refused(folder)


def test_a_newer_version_is_refused(folder: Path) -> None:
    value = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**value, "version": 7}, indent=1) + "\n")
    assert "has version 7, and this Weft reads up to version 1; install a newer Weft" in refused(folder)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"num_layers": 2}, r"has layers\.2\..* and \d+ more, of the checkpoint"),
        ({"num_layers": 4}, r"lacks layers\.3\..* and \d+ more, of this model"),
        ({"hidden_size": 32}, r"has shape \(33, 16\), and \(33, 32\) here"),
    ],
    ids=["fewer-layers", "more-layers", "wider"],
)
def test_a_checkpoint_of_another_model_is_refused(other: dict[str, int], said: str, folder: Path) -> None:
    model, optimizer = make(Case(), seed=2, **other)
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(ValueError, match=f"is of another model: .*{said}"):
        load_checkpoint(model, folder, optimizer)
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
    assert not optimizer.state


def test_a_folder_that_is_there_is_not_written_over(folder: Path) -> None:
    with pytest.raises(ValueError, match="exists"):
        save_checkpoint(make(Case())[0], folder)
    read_all(folder)


@pytest.mark.few(1)
@pytest.mark.parametrize("full_after", [0, 1, 2])
def test_a_full_disk_leaves_nothing_and_what_was_there(
    full_after: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done, sync = [], os.fsync

    def fsync(descriptor: int) -> None:
        done.append(descriptor)
        if len(done) > full_after:
            raise OSError(28, "No space left on device")
        sync(descriptor)

    monkeypatch.setattr(shards.os, "fsync", fsync)
    with pytest.raises(OSError, match="No space left on device"):
        save_checkpoint(make(Case())[0], folder.with_name("checkpoint-6"))
    monkeypatch.undo()
    assert [path.name for path in folder.parent.iterdir()] == ["checkpoint-4"]
    read_all(folder)


def test_a_folder_that_nobody_may_write_is_said(folder: Path) -> None:
    with pytest.raises(OSError, match="/proc"):
        save_checkpoint(make(Case())[0], Path("/proc/checkpoint-6"))


def test_the_newest_that_is_whole_is_resumed(folder: Path) -> None:
    newer = Path(shutil.copytree(folder, folder.with_name("checkpoint-16")))
    assert newest_complete(folder.parent) == (newer, [])
    assert find_to_resume(folder.parent) == newer
    os.truncate(newer / FILES[2], 100)
    found, wrong = newest_complete(folder.parent)
    assert found == folder
    assert len(wrong) == 1 and "checkpoint-16/part-00000.safetensors has 100 bytes instead of " in wrong[0]
    with pytest.raises(DamagedCheckpoint):
        find_to_resume(newer)
    with pytest.raises(ValueError, match="has no checkpoint to resume from"):
        find_to_resume(folder.parent.parent)


@pytest.mark.exhaustive
@pytest.mark.parametrize("missing", [False, True], ids=["cut-short", "without-manifest"])
def test_a_run_goes_on_past_damaged_checkpoints_to_its_end(missing: bool, tmp_path: Path, pool: Pool) -> None:
    (tmp_path / "text.txt").write_text("what was saved is whole. " * 40)
    truth, run, way = tmp_path / "truth", tmp_path / "run", Way(sizes={"dp": 1, "tp": 1})
    complete(pool, way, truth)
    shutil.copytree(truth, run, ignore=shutil.ignore_patterns("checkpoint"))
    for step in (6, 8):
        if missing:
            (run / f"checkpoint-{step}/manifest.json").unlink()
        else:
            os.truncate(run / f"checkpoint-{step}/part-00000.safetensors", 100)
    damaged = {path: path.read_bytes() for path in run.glob("checkpoint-[68]/*")}
    found, wrong = newest_complete(run)
    assert found == run / "checkpoint-4" and len(wrong) == 2
    assert pool.run(train_from, found, way, run, ranks=1) == [0]
    assert_same(run, truth)
    assert sorted(checkpoints(run)) == [4, 6, 8] and newest_complete(run) == (run / "checkpoint-8", [])
    for path, content in damaged.items():
        assert (run / f"{path.parent.name}.damaged" / path.name).read_bytes() == content


def test_a_checkpoint_renamed_before_stays(tmp_path: Path) -> None:
    for name in ("checkpoint-2", "checkpoint-4", "checkpoint-4.damaged"):
        (tmp_path / name).mkdir()
    assert rename_damaged_checkpoints(tmp_path, after=2) == [tmp_path / "checkpoint-4.damaged-1"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "checkpoint-2",
        "checkpoint-4.damaged",
        "checkpoint-4.damaged-1",
    ]


def test_a_newer_checkpoint_that_is_whole_is_not_set_aside(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"checkpoint-4 is newer than the checkpoint that this run resumed from"):
        rename_damaged_checkpoints(folder.parent, after=2)
    read_all(folder)


def test_the_last_are_kept_and_every_nth(tmp_path: Path) -> None:
    for step in range(1, 12):
        (tmp_path / f"checkpoint-{step}").mkdir()
    remove_old(tmp_path, last=2, every=4)
    assert sorted(int(path.name[11:]) for path in tmp_path.iterdir()) == [4, 8, 10, 11]
    remove_old(tmp_path, last=0, every=0)
    assert len(list(tmp_path.iterdir())) == 4


def test_a_folder_has_one_run(tmp_path: Path) -> None:
    held = lock(tmp_path)
    with pytest.raises(
        ValueError, match=r"another run is writing to .*; wait until it ends, or give another folder with --output"
    ):
        check_resumable(tmp_path)
    os.close(held)
    check_resumable(tmp_path)
