"""How a run of `weft train` ends where a rank dies or somebody interrupts it: at once, all of it, and with one line."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from weft.models import read_run
from weft.models.train.folder import newest_complete
from weft.models.train.launch import STOP_SECONDS

from tests.end_to_end.test_train import SMALL, WEFT
from tests.support.limits import PATIENCE

MARGIN = 60.0  # seconds, for what other programs take of the cores


@pytest.mark.exhaustive  # its sister is tests/models/test_processes.py's one that fails
@pytest.mark.parametrize(("victim", "ranks"), [(1, 2), (3, 4)])
def test_one_dead_rank_ends_all(victim: int, ranks: int, tmp_path: Path) -> None:
    status, said, _ = _disturb(tmp_path, ranks, lambda parent, workers: os.kill(workers[victim], signal.SIGKILL))
    assert status == 1
    assert said[0] == f"rank {victim} killed by SIGKILL; the other processes were ended"


@pytest.mark.parametrize(
    ("how", "status"),
    [
        (signal.SIGINT, 130),
        pytest.param(signal.SIGTERM, 143, marks=pytest.mark.exhaustive),
        pytest.param(signal.SIGKILL, -signal.SIGKILL, marks=pytest.mark.exhaustive),
    ],
)
def test_an_interrupted_run_leaves_no_process(how: signal.Signals, status: int, tmp_path: Path) -> None:
    ended, said, seconds = _disturb(tmp_path, 2, lambda parent, workers: os.kill(parent, how))
    assert ended == status
    assert seconds < STOP_SECONDS + MARGIN  # the parent kills whoever takes longer than the first
    assert "Traceback" not in "".join(said)
    saved, wrong = newest_complete(tmp_path / "run")
    assert not wrong
    if how == signal.SIGKILL:
        assert saved is None
    else:  # the step under way was
        lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
        assert saved is not None and read_run(saved)["step"] == len(lines) >= 3


@pytest.mark.exhaustive
def test_a_rank_that_is_stopped_ends_the_run_in_time_and_is_named(tmp_path: Path) -> None:
    status, said, seconds = _disturb(
        tmp_path, 2, lambda parent, workers: os.kill(workers[1], signal.SIGSTOP), "--timeout", "3"
    )
    assert status == 1
    (line,) = said
    assert re.fullmatch(
        r"weft train: rank 1 answered no more for 3 s, while the others waited in step \d+, \w+( \w+)?", line
    )
    assert seconds < 3 + MARGIN


@pytest.mark.exhaustive  # its sister is tests/models/test_processes.py's one that a launcher has started
def test_the_ranks_of_torchrun_end_with_it(tmp_path: Path) -> None:
    """By SIGKILL it can end none of them."""
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    status, _, seconds = _disturb(
        tmp_path, 2, lambda parent, workers: os.kill(parent, signal.SIGKILL), program=(*torchrun, *WEFT[1:])
    )
    assert status == -signal.SIGKILL
    assert seconds < MARGIN
    lines = (tmp_path / "run/metrics.jsonl").read_text()
    time.sleep(1.0)
    assert (tmp_path / "run/metrics.jsonl").read_text() == lines


@pytest.mark.parametrize("seconds", [0.5, *(pytest.param(s, marks=pytest.mark.exhaustive) for s in (0.0, 2.0))])
def test_ctrl_c_while_torch_is_imported_is_one_line(seconds: float, tmp_path: Path) -> None:
    with subprocess.Popen(
        [*WEFT, "train"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=_heeds_interrupts, start_new_session=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline().startswith("llama-tiny: ")
        time.sleep(seconds)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        said = process.stderr.read()  # until the last of them has ended
    assert process.returncode == 130
    (line,) = said.strip().splitlines()
    assert line == "weft train: interrupted; what was saved is whole"
    assert not (tmp_path / "outputs").exists()


def _disturb(
    folder: Path,
    ranks: int,
    disturb: Callable[[int, list[int]], None],
    *options: str,
    program: tuple[str, ...] = WEFT,
) -> tuple[int, list[str], float]:
    """Starts a long run of a few ranks, does something to it at step 3, and gives its exit status, what it said of it, and
    the seconds that it went on.

    Fails unless all its processes end.
    """
    (folder / "text.txt").write_text("weft and warp. " * 40)
    arguments = ("train", "--steps", "100000", "--log-every", "1", "--output", "run", *SMALL)
    arguments += (
        "--mesh.dp",
        "1",
        "--mesh.tp",
        str(ranks),
        "--model.num-layers",
        "1",
        "--data.path",
        "text.txt",
        *options,
    )
    with subprocess.Popen(
        [*program, *arguments], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=_heeds_interrupts,
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            assert any(line.startswith("step      3/") for line in process.stdout)
            workers = _workers(process.pid, ranks)
            disturb(process.pid, workers)
            disturbed = time.monotonic()
            _, said = process.communicate(timeout=PATIENCE)  # what it prints is read: it says where it has saved
            while any(Path(f"/proc/{worker}").exists() for worker in workers):
                assert time.monotonic() - disturbed < PATIENCE
                time.sleep(0.1)
            return process.returncode, said.strip().splitlines(), time.monotonic() - disturbed
        finally:
            process.kill()


def _heeds_interrupts() -> None:
    """Whether or not these tests do: a shell that starts them in the background has them ignore SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _workers(parent: int, ranks: int) -> list[int]:
    """Process ids of the ranks, in order: the children of `parent`, or of the fork server, which is one."""

    def children(pid: int) -> list[int]:
        found = []
        for status in Path("/proc").glob("[0-9]*/stat"):
            fields = status.read_text().rpartition(")")[2].split()
            if int(fields[1]) == pid:
                found.append(int(status.parent.name))
        return sorted(found)

    return next(workers for each in (*children(parent), parent) if len(workers := children(each)) == ranks)
