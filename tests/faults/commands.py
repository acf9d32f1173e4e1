"""Runs of the command `weft train`, begun as a user begins them; the tests kill a rank from outside."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from weft.models.train.folder import checkpoints

from tests.faults.attempts import CONFIG, MODEL, Tally, Victim, Way
from tests.faults.elastic import count_survived
from tests.support.limits import PATIENCE

LOOK_SECONDS = 0.002
TICKS = os.sysconf("SC_CLK_TCK")


def train(way: Way, folder: Path) -> list[str]:
    """The arguments of `weft` for the first start and for every restart."""
    model = {
        "hidden-size": MODEL.hidden_size,
        "intermediate-size": MODEL.intermediate_size,
        "num-layers": MODEL.num_layers,
        "num-heads": MODEL.num_heads,
        "num-kv-heads": MODEL.num_kv_heads,
        "dropout": MODEL.dropout,
    }
    data = {"path": folder.parent / "text.txt", "batch-size": 4, "sequence-length": 8}
    given = {
        "output": folder,
        "steps": way.steps,
        "save-every": CONFIG.save_every,
        **{f"model.{name}": value for name, value in model.items()},
        **{f"data.{name}": value for name, value in data.items()},
        **{f"mesh.{name}": size for name, size in way.sizes.items()},
        **{f"plan.{name}": value for name, value in way.plan.items()},
    }
    typed = [f"--{name}" if value is True else f"--{name}={value}" for name, value in given.items()]
    return ["train", "--no-check", "--resume", *typed]


def complete_by_command(way: Way, folder: Path) -> None:
    """A run that is not killed."""
    with _started(_python("-m", "weft.models.cli", *train(way, folder)), folder) as run:
        assert run.wait(PATIENCE) == 0, _said(folder)


def survive_by_command(way: Way, folder: Path, victims: Sequence[Victim], truth: Path) -> Tally:
    """Runs to the end, begun again by the same command for each victim, and compares it with `truth`."""
    command = _python("-m", "weft.models.cli", *train(way, folder))
    starts, kills = list[int](), 0
    for victim in [*victims, None]:
        starts.append(max(checkpoints(folder), default=0))
        with _started(command, folder) as run:
            killed = [] if victim is None else _kill(victim, folder, partial(_ranks, run, way), run)
            status = run.wait(PATIENCE)
        if not killed or status == 0:  # it had ended already
            assert status == 0, _said(folder)
            break
        assert status == 1 and "killed by SIGKILL; the other processes were ended" in _said(folder)
        kills += 1
    return count_survived(way, folder, truth, starts, kills)


def survive_by_torchrun(way: Way, folder: Path, victims: Sequence[Victim], truth: Path) -> Tally:
    """The same, but one `torchrun --max-restarts` begins all ranks anew each time."""
    options = ["--standalone", "--nproc-per-node", str(way.ranks), "--max-restarts", str(len(victims))]
    command = _python("-m", "torch.distributed.run", *options, "-m", "weft.models.cli", *train(way, folder))
    starts, ended = [0], list[int]()
    with _started(command, folder) as agent:
        for victim in victims:
            killed = _kill(victim, folder, partial(_restarted, agent, way, tuple(ended)), agent)
            if not killed:
                break
            ended += killed
            starts.append(max(checkpoints(folder), default=0))
        assert agent.wait(PATIENCE) == 0, _said(folder)
    return count_survived(way, folder, truth, starts, len(starts) - 1)


def _kill(victim: Victim, folder: Path, ranks: Callable[[], list[int]], run: subprocess.Popen[bytes]) -> list[int]:
    """Kill the victim at its moment; returns the process ids of all ranks, or none if the run completed before.

    ranks: a function that gives the ids once all ranks are there, and none before.
    """
    found: list[int] = []
    while not found and run.poll() is None:
        time.sleep(LOOK_SECONDS)
        found = ranks()
    end: float | None = None
    while found and run.poll() is None and (work := _work(found[victim.rank])) is not None:
        if end is None and max(checkpoints(folder), default=0) >= victim.after:
            end = work + victim.work
        if end is not None and work >= end:
            time.sleep(victim.pause)
            with suppress(ProcessLookupError):
                os.kill(found[victim.rank], signal.SIGKILL)
                return found
        time.sleep(LOOK_SECONDS)
    return []


@contextmanager
def _started(command: Sequence[str], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (
        _log(folder).open("wb") as log,
        subprocess.Popen(command, env=environment, stdout=log, stderr=log) as process,
    ):
        try:
            yield process
        finally:
            process.kill()


def _python(*arguments: str) -> list[str]:
    return [sys.executable, *arguments]


def _log(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.log")


def _said(folder: Path) -> str:
    """The end of the log of the run's commands."""
    return _log(folder).read_text()[-4000:]


def _ranks(run: subprocess.Popen[bytes], way: Way) -> list[int]:
    """Process ids of the ranks, in order: the children of the fork server, a child of the command."""
    for child in _children(run.pid):
        if len(found := _children(child)) == way.ranks:
            return found
    return []


def _restarted(agent: subprocess.Popen[bytes], way: Way, ended: Sequence[int]) -> list[int]:
    """The process ids of the ranks that torchrun's agent started last, once all are there."""
    found = [each for each in _children(agent.pid) if each not in ended]
    return found if len(found) == way.ranks else []


def _children(parent: int) -> list[int]:
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):
            state, of, *_ = status.read_text().rpartition(")")[2].split()
            if int(of) == parent and state != "Z":
                found.append(int(status.parent.name))
    return sorted(found)


def _work(process: int) -> float | None:
    """Seconds of processor time that a process has taken; None if it has ended."""
    with suppress(FileNotFoundError, ProcessLookupError):
        state, *fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return None if state == "Z" else (int(fields[10]) + int(fields[11])) / TICKS
    return None
