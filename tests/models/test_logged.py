"""metrics.jsonl, read back: whole, cut short, and with flipped bits."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from weft.mesh import ProcessMesh
from weft.models.parallel import ParallelPlan
from weft.models.train.metrics_file import METRICS, RunningChecksum, check_logged, read_logged
from weft.models.train.recipes import recipe
from weft.models.train.results import Results

from tests.models.metrics import some_metrics
from tests.support.sample import Portion


def write(folder: Path, steps: range, end: str = "") -> Path:
    """A file with the lines of these steps, followed by the given text."""
    lines = [json.dumps(asdict(some_metrics(step=step, loss=float(step)))) + "\n" for step in steps]
    (folder / METRICS).write_text("".join(lines) + end)
    return folder / METRICS


@pytest.mark.parametrize("until", [None, 0, 1, 4, 5])
def test_the_lines_up_to_a_step_are_read_as_they_stand(until: int | None, tmp_path: Path) -> None:
    path = write(tmp_path, range(1, 6), end='{"step": 6, "lo')
    found = read_logged(path, until)
    assert [each.step for each in found] == [each.loss for each in found] == [*range(1, 6)][:until]
    assert path.read_text().startswith("".join(each.text for each in found))


def test_a_run_that_has_written_none_yet_has_none(tmp_path: Path) -> None:
    assert read_logged(tmp_path / METRICS, 3) == []
    assert read_logged(write(tmp_path, range(0)), 3) == []
    assert read_logged(write(tmp_path, range(4, 6)), 3) == []  # the run went on in a new folder


def test_lines_after_the_step_are_not_read(tmp_path: Path) -> None:
    assert len(read_logged(write(tmp_path, range(1, 5), end="\0\0\0\0\n\0\n"), 4)) == 4


@pytest.mark.exhaustive
def test_lines_that_are_missing_are_told_of(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"metrics\.jsonl ends with line 3, of step 3, before step 4; copy the file again"
    ):
        read_logged(write(tmp_path, range(1, 4)), 4)
    path = write(tmp_path, range(1, 6))
    path.write_text("".join(path.read_text().splitlines(keepends=True)[::2]))
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2 is of step 3, but follows 1;"):
        read_logged(path, 4)


def test_a_flipped_bit_is_told_of_with_its_line_or_is_in_a_number_of_it(portion: Portion, tmp_path: Path) -> None:
    """Flips each bit of the second of three lines, its end too. Without checksums a changed digit cannot be told."""
    path = write(tmp_path, range(1, 4))
    whole = path.read_bytes()
    first, second, _ = whole.splitlines(keepends=True)
    read = refused = 0
    for bit in portion.of(range(8 * len(first), 8 * len(first + second)), every=24):
        content = bytearray(whole)
        content[bit // 8] ^= 1 << bit % 8
        path.write_bytes(content)
        try:
            found = read_logged(path, 3)
        except ValueError as error:
            assert f"{path}, line 2 " in str(error) or "line 3 is of step 3, but follows" in str(error)
            refused += 1
        else:
            assert [each.step for each in found] == [1, 2, 3]
            read += 1
    assert read and refused


def of_first(path: Path, lines: int) -> dict[str, Any]:
    """The record that a checkpoint keeps of a file's first lines."""
    total = RunningChecksum()
    for line in path.read_text().splitlines(keepends=True)[:lines]:
        total.add(line)
    return total.as_json()


@pytest.mark.exhaustive
def test_with_its_sum_each_flipped_bit_is_told(portion: Portion, tmp_path: Path) -> None:
    """Flips bits of the first two of three lines; bytes after them are not checked."""
    path = write(tmp_path, range(1, 4))
    saved, whole = of_first(path, 2), path.read_bytes()
    for bit in portion.of(range(8 * saved["bytes"]), every=24):
        content = bytearray(whole)
        content[bit // 8] ^= 1 << bit % 8
        path.write_bytes(content)
        with pytest.raises(ValueError, match="was changed in its first 2 lines after they were written; copy the file"):
            check_logged(path, saved)
    for after in (whole, whole[: saved["bytes"]], whole[: saved["bytes"] + 5], whole + b"\0"):
        path.write_bytes(after)
        check_logged(path, saved)


@pytest.mark.parametrize("left", [0, 5, 400, None], ids=["empty", "in-line-1", "in-line-2", "missing"])
def test_with_its_sum_a_file_that_is_cut_short_is_told(left: int | None, tmp_path: Path) -> None:
    path = write(tmp_path, range(1, 4))
    saved = of_first(path, 3)
    path.unlink() if left is None else os.truncate(path, left)
    with pytest.raises(
        ValueError, match=rf"metrics\.jsonl has {left or 0} bytes, but its 3 lines had {saved['bytes']} "
    ):
        check_logged(path, saved)


def test_none_of_no_lines_are_missing(tmp_path: Path) -> None:
    check_logged(tmp_path / METRICS, RunningChecksum().as_json())


def test_a_run_that_cannot_go_on_leaves_them_as_they_are(tmp_path: Path) -> None:
    path = write(tmp_path, range(1, 4))
    path.write_text(path.read_text().replace('"step": 2', '"stem": 2'))
    before = path.read_bytes()
    results, config = Results(tmp_path, writes=True), replace(recipe("llama-tiny"), resume="newest")
    with results, pytest.raises(ValueError, match=r"line 2 is not as it was written"):
        results.begin("llama-tiny", config, ParallelPlan(), ProcessMesh.grid(dp=1), [], step=3)
    assert path.read_bytes() == before
    assert "no curves are drawn: " in results.picture(80) and "line 2" in results.picture(80)
