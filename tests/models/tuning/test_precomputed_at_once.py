"""Runs that compute the same reference at once, on different meshes, all take the numbers of the first that wrote."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from weft.models import safe_files
from weft.models.safe_files import write_first
from weft.models.train.reference import PrecomputedReference
from weft.models.train.reference_table import read_table, share_table, write_table
from weft.models.train.run import Run

from tests.models.tuning.runs import make_run, read_metrics, records, save_model, train_to_the_end, write
from tests.support.limits import PATIENCE
from tests.support.pool import Pool

MESHES = {"alone": ("--mesh.dp", "1", "--mesh.tp", "1"), "tp2": ("--mesh.dp", "1", "--mesh.tp", "2")}


def computes_while_another_does(run: Run) -> None:
    """The run on this rank, which keeps its numbers only when the run on the second mesh has computed numbers, too."""
    compute, flags = PrecomputedReference._compute, run.folder.parent

    def computing(self: PrecomputedReference, *arguments: Any) -> None:
        compute(self, *arguments)
        torch.save(self._table, flags / f"{run.folder.name}.part{os.getpid()}")
        (flags / f"{run.folder.name}.part{os.getpid()}").replace(flags / f"{run.folder.name}.computed")
        end = time.monotonic() + PATIENCE
        while not all((flags / f"{name}.computed").exists() for name in MESHES):
            assert time.monotonic() < end, "the second run has computed nothing"
            time.sleep(0.01)

    PrecomputedReference._compute = computing  # type: ignore[method-assign]
    try:
        train_to_the_end(run)
    finally:
        PrecomputedReference._compute = compute  # type: ignore[method-assign]


@pytest.mark.exhaustive
@pytest.mark.parametrize("damaged", [False, True], ids=["nothing-before", "a-damaged-file-before"])
@pytest.mark.parametrize("task", ["dpo", "kto"])
def test_two_runs_on_different_meshes(task: Any, damaged: bool, tmp_path: Path, pool: Pool) -> None:
    model = save_model(tmp_path / "model", 1)
    (tmp_path / "data").mkdir()
    write(tmp_path / f"data/{task}.jsonl", records(task, messages=True, count=22))

    def made(name: str, *options: str) -> Run:
        every = ("--reference", "precomputed", "--log-every", "1", *MESHES[name], *options)
        return make_run(model, tmp_path / "data", task, *every, output=tmp_path / name, batch=4, steps=2)

    if damaged:
        pool.run(train_to_the_end, made("alone", "--output", str(tmp_path / "before")), ranks=1)
        (file,) = (tmp_path / "data").glob(".reference-*")
        file.write_bytes(file.read_bytes()[:-9])
    failures = list[BaseException]()

    def run(pool: Pool, made_run: Run, ranks: int) -> None:
        try:
            pool.run(computes_while_another_does, made_run, ranks=ranks)
        except BaseException as error:
            failures.append(error)

    with Pool() as second:
        at_once = ((pool, made("alone"), 1), (second, made("tp2"), 2))
        threads = [threading.Thread(target=run, args=each) for each in at_once]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    assert not failures
    computed = [torch.load(tmp_path / f"{name}.computed") for name in MESHES]
    torch.testing.assert_close(*computed)
    assert not computed[0].equal(computed[1]), "the meshes round alike: the test would prove nothing"
    alone, tp2 = ((tmp_path / name / "reference.npy").read_bytes() for name in MESHES)
    assert alone == tp2
    (file,) = (tmp_path / "data").glob(".reference-*")
    assert file.read_bytes().split(b"\n", 1)[1] == alone.split(b"\n", 1)[1]  # behind the identities
    first = [read_metrics(tmp_path / name)[0]["loss"] for name in MESHES]
    assert first[0] == pytest.approx(first[1], rel=1e-6)


def test_the_numbers_of_the_first_are_taken(tmp_path: Path) -> None:
    path, table = tmp_path / ".reference-0.npy", torch.full((5, 2), 2.0)
    assert share_table(path, "a", torch.ones(5, 2))
    whole = path.read_bytes()
    assert not share_table(path, "a", table)
    assert table.equal(torch.ones(5, 2))
    assert (list(tmp_path.iterdir()), path.read_bytes()) == ([path], whole)
    assert share_table(path, "a", table)  # equal numbers are equal, whoever wrote them


def test_a_damaged_file_and_a_stranger_are_replaced(tmp_path: Path) -> None:
    path, table = tmp_path / ".reference-0.npy", torch.empty(5, 2)
    write_table(path, "a", torch.ones(5, 2))
    whole = path.read_bytes()
    for size in range(len(whole)):  # as a writer without care would leave it at each moment
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match="changed after"):
            read_table(path, "a", table)
    assert share_table(path, "a", torch.ones(5, 2)) and path.read_bytes() == whole
    write_table(path, "b", torch.zeros(5, 2))
    assert share_table(path, "a", torch.ones(5, 2)) and path.read_bytes() == whole
    write_table(path, "a", torch.zeros(1, 2))
    with pytest.raises(ValueError, match=r"it has \[1, 2\] numbers, and the data \[5, 2\]"):
        read_table(path, "a", table)


@pytest.mark.parametrize("links", [True, False], ids=["with-hard-links", "without-hard-links"])
def test_of_writers_at_once_the_first_is_kept(links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not links:

        def refuse(*_: object, **__: object) -> None:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

        monkeypatch.setattr(safe_files.os, "link", refuse)
    for name in ("file", "link"):
        path = tmp_path / name
        if name == "link":
            path.symlink_to(tmp_path / "nowhere")
        else:
            write_first(path, b"first")
        with pytest.raises(FileExistsError):
            write_first(path, b"second")
    assert (tmp_path / "file").read_bytes() == b"first"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["file", "link"]
