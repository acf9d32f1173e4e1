"""Runs on a disk that is full or read-only: they end with one line, and resume once there is room."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from weft.mesh import ProcessMesh
from weft.models.parallel import ParallelPlan
from weft.models.train.folder import check_new, check_resumable, checkpoints, newest_complete
from weft.models.train.results import NotWritten, Results

from tests.faults.attempts import CONFIG, WAYS, Way, assert_same, attempt, complete
from tests.models.metrics import some_metrics
from tests.support.pool import Pool, RanksFailed

TEXT = "what was saved is whole. " * 40


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 400 KiB in memory, room for two checkpoints of these tests' runs."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", folder], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"a file system cannot be mounted here: {made.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def remount(disk: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", disk], check=True)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "way",
    [
        pytest.param(Way(sizes={"dp": 1, "tp": 1}), id="one"),
        pytest.param(WAYS["tp2-zero3-dp2"], id="tp2-zero3-dp2", marks=pytest.mark.exhaustive),
    ],
)
def test_a_full_disk_ends_a_run_which_goes_on_where_there_is_room(
    way: Way, disk: Path, tmp_path: Path, pool: Pool
) -> None:
    for folder in (disk, tmp_path):
        (folder / "text.txt").write_text(TEXT)
    way = replace(way, steps=8)
    complete(pool, way, tmp_path / "truth")
    with pytest.raises(RanksFailed) as failed:
        pool.run(attempt, way, disk / "run", ranks=way.ranks)
    saved, wrong = newest_complete(disk / "run")
    assert saved is not None and not wrong
    for failure in failed.value.failures:  # at the checkpoint after the failed save every rank reports the same
        last = failure.what.strip().splitlines()[-1]
        assert last.startswith(
            "weft.models.train.trainer.TrainingError: a checkpoint could not be written: [Errno 28] No space"
        )
        assert last.endswith(f"; last checkpoint: {saved}")
    assert len(failed.value.failures) == way.ranks
    assert [path.name for path in (disk / "run").iterdir() if path.name.startswith(".checkpoint")] == []
    remount(disk, "size=16m")
    complete(pool, way, disk / "run")
    assert_same(disk / "run", tmp_path / "truth")


def test_metrics_that_cannot_be_written_end_the_run_where_it_would_save(disk: Path) -> None:
    results = Results(disk / "run", writes=True)
    results.begin("llama-tiny", CONFIG, ParallelPlan(), ProcessMesh.grid(dp=1), {})
    results.add(some_metrics(step=1))
    results.sync()
    (disk / "rest").write_bytes(b"0" * 4096)
    with pytest.raises(OSError, match="No space left"), (disk / "rest").open("ab", buffering=0) as file:
        while True:
            file.write(b"0" * 4096)
    for step in range(2, 30):
        results.add(some_metrics(step=step))
    with pytest.raises(NotWritten, match=r"metrics\.jsonl could not be written: \[Errno 28\] No space left"):
        results.sync()


def test_a_disk_that_nobody_may_write_is_said(disk: Path) -> None:
    (disk / "run").mkdir()
    remount(disk, "ro")
    with pytest.raises(ValueError, match=r"run is not writable; give another with --output"):
        check_resumable(disk / "run")
    with pytest.raises(ValueError, match=r"new cannot be made: .*Read-only file system.*; give another with --output"):
        check_new(disk / "new")
    assert not checkpoints(disk / "run")
