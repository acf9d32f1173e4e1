"""The end of a `weft train` run when a rank dies or a user interrupts: at once, on all ranks, with one line."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from weft.models import read_run
from weft.models.processes import GRACE_SECONDS
from weft.models.train.agreement import ANSWER_SECONDS, STORE_SECONDS
from weft.models.train.folder import newest_complete
from weft.models.train.launch import STOP_SECONDS, STOPPED

from tests.end_to_end.test_train import SMALL, WEFT
from tests.support import preloaded
from tests.support.limits import PATIENCE

BUSY = 10.0  # seconds allowed for programs that share the cores
SILENCE = 4  # seconds until a silent rank is given up
TEXT = "weft and warp. " * 40
TINY = ("--model.num-layers=1", "--data.path=text.txt")
DP2 = ("--mesh.dp=2", "--mesh.tp=1")


@pytest.mark.exhaustive  # the sample has a failing process in tests/models/test_processes.py
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
    assert seconds < STOP_SECONDS
    assert "Traceback" not in "".join(said)
    saved, wrong = newest_complete(tmp_path / "run")
    assert not wrong
    if how == signal.SIGKILL:
        assert saved is None
    else:  # the step under way was
        lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
        assert saved is not None and read_run(saved)["step"] == len(lines) >= 3


MESHES = {"tp": ("--mesh.dp=1", "--mesh.tp=2"), "dp": DP2, "zero": (*DP2, "--plan.zero=3")}


@pytest.mark.exhaustive
@pytest.mark.parametrize("victim", [1, pytest.param(0, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("mesh", ["dp", *(pytest.param(each, marks=pytest.mark.exhaustive) for each in ("tp", "zero"))])
def test_a_rank_that_is_stopped_ends_the_run_in_time_and_is_named(mesh: str, victim: int, tmp_path: Path) -> None:
    status, said, seconds = _disturb(
        tmp_path, 2, lambda parent, workers: os.kill(workers[victim], signal.SIGSTOP), f"--timeout={SILENCE}",
        mesh=MESHES[mesh],
    )  # fmt: skip
    assert status == 1
    (line,) = said
    assert re.fullmatch(
        rf"weft train: rank {victim} did not answer for {SILENCE} s, while the others waited in step \d+, \w+( \w+)?",
        line,
    )
    assert seconds < SILENCE + ANSWER_SECONDS + 2 * GRACE_SECONDS + BUSY


@pytest.mark.exhaustive  # the sample has the case above, with ranks started by `weft train`
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_of_mpirun_that_is_stopped_is_named_by_the_other(victim: int, tmp_path: Path) -> None:
    """Rank 0, too, whose process hosts the store."""
    (tmp_path / "text.txt").write_text(TEXT)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [*WEFT, "train", "--steps=100000", "--log-every=1", "--output=run", *SMALL, *DP2, *TINY]
    ranks = list[subprocess.Popen[str]]()
    for rank in ("0", "1"):
        said = {"SIZE": "2", "LOCAL_SIZE": "2", "RANK": rank, "LOCAL_RANK": rank}
        world = {"MASTER_PORT": port, **{f"OMPI_COMM_WORLD_{name}": value for name, value in said.items()}}
        with (tmp_path / f"out-{rank}").open("w") as out, (tmp_path / f"error-{rank}").open("w") as error:
            options = [*command, f"--timeout={SILENCE}"]
            ranks.append(
                subprocess.Popen(
                    options, cwd=tmp_path, env={**os.environ, **world}, stdout=out, stderr=error, text=True
                )
            )
    try:
        end = time.monotonic() + PATIENCE
        while "step      3/" not in (tmp_path / "out-0").read_text():
            assert time.monotonic() < end and all(each.poll() is None for each in ranks)
            time.sleep(0.1)
        ranks[victim].send_signal(signal.SIGSTOP)
        stopped = time.monotonic()
        assert ranks[1 - victim].wait(PATIENCE) == STOPPED
        assert time.monotonic() - stopped < SILENCE + ANSWER_SECONDS + 2 * STORE_SECONDS + BUSY
    finally:
        for each in ranks:
            each.kill()
            each.wait()
    said = (tmp_path / f"error-{1 - victim}").read_text()
    assert f"\nweft train: rank {victim} did not answer for {SILENCE} s, while " in said and "Traceback" not in said


@pytest.mark.exhaustive  # the sample has a launcher's process in tests/models/test_processes.py
def test_the_ranks_of_torchrun_end_with_torchrun(tmp_path: Path) -> None:
    """A torchrun killed by SIGKILL cannot end the ranks, so each rank has to end by itself."""
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    status, _, seconds = _disturb(
        tmp_path, 2, lambda parent, workers: os.kill(parent, signal.SIGKILL), program=(*torchrun, *WEFT[1:])
    )
    assert status == -signal.SIGKILL
    assert seconds < GRACE_SECONDS + BUSY
    lines = (tmp_path / "run/metrics.jsonl").read_text()
    time.sleep(1.0)
    assert (tmp_path / "run/metrics.jsonl").read_text() == lines


@pytest.mark.exhaustive
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
        said = process.stderr.read()  # until the last process has ended
    assert process.returncode == 130
    (line,) = said.strip().splitlines()
    assert line == "weft train: interrupted; nothing was saved"
    assert not (tmp_path / "outputs").exists()


@pytest.mark.exhaustive  # tests/models/test_train_pieces.py has two runs at once in the sample
@pytest.mark.parametrize("named", [True, False])
def test_two_runs_that_begin_at_once_write_into_two_folders_or_one_is_refused(named: bool, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    command = [*WEFT, "train", "--steps=1", "--mesh.dp=1", "--mesh.tp=1", *SMALL, *TINY]
    started = [
        subprocess.Popen(
            [*command, "--output=run"] if named else command,
            cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )
        for _ in range(2)
    ]  # fmt: skip
    said = {run.returncode: run.stderr for run in map(_ended, started)}
    if named:
        # The second run is refused at the start (2), or after the first run has made the folder (1).
        assert sorted(said) in ([0, 1], [0, 2])
        assert re.fullmatch(r"\s*weft train: the output folder run exists; give another .*\n", said[max(said)])
    else:
        assert said == {0: ""}
        assert len(list(tmp_path.glob("outputs/*/checkpoint/model.safetensors"))) == 2


def _ended(run: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    """Wait for the end of a run; returns the status and the output."""
    out, error = run.communicate(timeout=PATIENCE)
    return subprocess.CompletedProcess(run.args, run.returncode, out, error)


def _disturb(
    folder: Path,
    ranks: int,
    disturb: Callable[[int, list[int]], None],
    *options: str,
    program: tuple[str, ...] = WEFT,
    mesh: Sequence[str] = (),
) -> tuple[int, list[str], float]:
    """Start a long run, call `disturb` at step 3, and wait for the end.

    Returns the exit status, the lines of standard error, and the seconds from the call to the end. Fails unless all
    processes of the run end.
    """
    (folder / "text.txt").write_text(TEXT)
    arguments = ("train", "--steps", "100000", "--log-every", "1", "--output", "run", *SMALL)
    arguments += (*(mesh or ("--mesh.dp=1", f"--mesh.tp={ranks}")), *TINY, *options)
    new = partial(subprocess.Popen, text=True, preexec_fn=_heeds_interrupts)
    start: Callable[..., Any] = preloaded.Popen if program == WEFT else new
    with start([*program, *arguments], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            assert any(line.startswith("step      3/") for line in process.stdout)
            workers = _workers(process.pid, ranks)
            disturb(process.pid, workers)
            disturbed = time.monotonic()
            _, said = process.communicate(timeout=PATIENCE)  # read on: the run prints where a checkpoint was saved
            while any(Path(f"/proc/{worker}").exists() for worker in workers):
                assert time.monotonic() - disturbed < PATIENCE
                time.sleep(0.1)
            return process.wait(), said.strip().splitlines(), time.monotonic() - disturbed
        finally:
            process.kill()


def _heeds_interrupts() -> None:
    """Restore the default handler of SIGINT: a shell that starts the tests in the background sets SIG_IGN."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _workers(parent: int, ranks: int) -> list[int]:
    """The process ids of the ranks, in order: children of `parent`, or of the fork server below `parent`."""

    def children(pid: int) -> list[int]:
        found = []
        for status in Path("/proc").glob("[0-9]*/stat"):
            fields = status.read_text().rpartition(")")[2].split()
            if int(fields[1]) == pid:
                found.append(int(status.parent.name))
        return sorted(found)

    return next(workers for each in (*children(parent), parent) if len(workers := children(each)) == ranks)
