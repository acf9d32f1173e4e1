"""`python -m benchmarks.measure_gpu`: runs the GPU tests, measures the tables of products, runs the benchmarks.

    python -m benchmarks.measure_gpu                  # all pieces in order: 33 minutes on one GPU
    python -m benchmarks.measure_gpu --seconds 560    # the pieces which fit; repeat until "all pieces are done"
    python -m benchmarks.measure_gpu tune-bf16        # only this piece, even if done already
    python -m benchmarks.measure_gpu --dry-run        # list the pieces

Needs torch, triton, pytest and the four packages, installed or in PYTHONPATH. Benchmark pieces also need
pytest-benchmark.
The state of each piece is kept in outputs/measure_gpu, by device, and the next call continues with the remaining
pieces; `--anew` deletes this state. A tuning which runs out of time keeps the measured rows in the table, and
continues there in the next call. The tables of `weft.kernels` and the folder benchmarks/results are changed: commit
both.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import history
from benchmarks.record import folder_name

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "outputs" / "measure_gpu"
KERNELS = ROOT / "packages/kernels/src/weft/kernels"
# The tables of `weft.kernels`, and the name of each in a folder of all.
TABLES = {
    KERNELS / "matmul/measured.json": "measured.json",
    KERNELS / "matmul/in_steps.json": "in_steps.json",
    KERNELS / "attention/measured.json": "attention.json",
}
UNFINISHED = 75  # exit status of a command to be called again: EX_TEMPFAIL of sysexits.h
MARGIN = 30  # seconds to end a piece: it stops after the product being measured
DONE, OUT_OF_TIME, FAILED = "done", "out of time", "failed"
WORKERS = min(8, os.cpu_count() or 1)  # test processes compiling kernels in parallel, if pytest-xdist is installed


@dataclass(frozen=True, slots=True)
class Piece:
    """A command of the measurement: tests, a tuning, or benchmarks."""

    name: str
    command: tuple[str, ...]  # arguments of python
    seconds: int  # the time limit, after which the command is killed
    needs: tuple[str, ...] = ()  # required modules
    gpus: int = 1  # the fewest GPUs needed
    goes_on: bool = False  # whether a second call continues where the first ran out of time
    run: str | None = None  # the file for pytest-benchmark's JSON

    def left_out(self, gpus: int) -> str | None:
        """The reason why the piece cannot run on this machine; None if it can."""
        absent = [name for name in self.needs if importlib.util.find_spec(name) is None]
        if absent:
            return f"{', '.join(absent)} not installed"
        return f"it takes {self.gpus} GPUs, and there are {gpus}" if gpus < self.gpus else None

    def arguments(self, kept: Path) -> tuple[str, ...]:
        return (*self.command, *(() if self.run is None else (f"--benchmark-json={kept / self.run}",)))


def _tests(name: str, seconds: int, *paths: str, gpus: int = 1) -> Piece:
    workers = ("-n", str(WORKERS), "--dist", "load") if importlib.util.find_spec("xdist") and gpus == 1 else ()
    return Piece(f"test-{name}", ("-m", "pytest", "-m", "gpu", "-q", *workers, *paths), seconds, ("pytest",), gpus)


def _tuning(name: str, seconds: int, *formats: str, of: str = "matmul") -> Piece:
    dtypes = (word for each in formats for word in ("--dtype", each))
    within = ("--seconds", str(seconds - MARGIN))
    return Piece(f"tune-{name}", ("-m", f"benchmarks.tune_{of}", *dtypes, *within), seconds, goes_on=True)


def _in_steps(ranks: int) -> Piece:
    launch = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
    command = (*launch, "-m", "benchmarks.tune_in_steps")
    return Piece(f"tune-in-steps-{ranks}", command, 240, gpus=ranks, goes_on=True)


def _benchmark(name: str, seconds: int, *arguments: str) -> Piece:
    command = ("-m", "pytest", "-q", "--capture=no", f"--within={seconds - MARGIN}", *arguments)
    return Piece(f"benchmark-{name}", command, seconds, ("pytest", "pytest_benchmark"), run=f"{name}.json")


LOSSES = ("tests/kernels/cross_entropy", "tests/kernels/linear_cross_entropy")
ON_RANKS = ("tests/kernels/matmul/test_overlapped.py", "tests/models/test_context_on_gpus.py")
# In the order of running: tests, then tuning of the tables, then benchmarks, which use the tables.
PIECES = (
    _tests("products", 150, "tests/kernels/matmul"),
    _tests("losses", 120, *LOSSES),
    _tests(
        "layers",
        120,
        "tests/kernels",
        "tests/models/test_room.py",
        *(f"--ignore={path}" for path in ("tests/kernels/attention", "tests/kernels/matmul", *LOSSES)),
    ),
    _tests("attention", 150, "tests/kernels/attention"),
    _tests("on-ranks", 120, *ON_RANKS, gpus=2),
    _tuning("attention", 120, "bf16", of="attention"),
    _tuning("fp8", 130, "fp8"),
    _tuning("bf16", 240, "bf16"),
    *map(_in_steps, (2, 4, 8)),
    _benchmark("products", 240, "benchmarks/test_matmul_speed.py", "-k", "not tries_many"),
    _benchmark("layers", 160, "benchmarks/test_layers_speed.py"),
    _benchmark("losses", 100, "benchmarks/test_cross_entropy_speed.py"),
    _benchmark("step", 60, "benchmarks/test_step_speed.py"),
    _benchmark("attention", 230, "benchmarks/test_attention_speed.py"),
    _tuning("others", 80, "fp16", "tf32", "fp32"),
    _benchmark("autotuned", 80, "benchmarks/test_matmul_speed.py", "-k", "tries_many"),
)


def due(pieces: Iterable[Piece], states: Mapping[str, str], gpus: int) -> list[Piece]:
    """The pieces to run: all which can run here and are not done, and pieces never started come first.

    A piece which ran out of time is run again only if it can continue (`goes_on`).
    """
    had = (DONE, OUT_OF_TIME)
    waiting = [
        each
        for each in pieces
        if not each.left_out(gpus) and states.get(each.name) not in (had if not each.goes_on else (DONE,))
    ]
    return sorted(waiting, key=lambda each: each.name in states)


def run(piece: Piece, kept: Path) -> dict[str, Any]:
    """Runs a piece, shows the output, and writes the output to a log in the folder `kept`.

    Returns the piece's state, exit status and seconds.
    """
    kept.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, *piece.arguments(kept)],
        cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    end = threading.Timer(piece.seconds, _end, (process.pid,))
    end.start()
    assert process.stdout is not None, "stdout is a pipe"
    try:
        with (kept / f"{piece.name}.log").open("wb") as log:
            for line in process.stdout:
                sys.stdout.write(line.decode(errors="replace"))
                sys.stdout.flush()
                log.write(line)
        status = process.wait()
    finally:
        end.cancel()
        _end(process.pid)
    state = {0: DONE, UNFINISHED: OUT_OF_TIME, -signal.SIGKILL: OUT_OF_TIME}.get(status, FAILED)
    return {"state": state, "status": status, "seconds": round(time.monotonic() - start, 1)}


def _end(process: int) -> None:
    """Kills a process and the processes started by it."""
    with suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)


def merge(kept: Path) -> Path | None:
    """Merges all pieces' benchmark results into run.json, a file like pytest-benchmark's. None without results."""
    files = [kept / each.run for each in PIECES if each.run is not None]
    runs: list[dict[str, Any]] = [json.loads(file.read_text()) for file in files if file.exists()]
    if not runs:
        return None
    whole = runs[0] | {"benchmarks": [each for one in runs for each in one["benchmarks"]]}
    (kept / "run.json").write_text(json.dumps(whole))
    return kept / "run.json"


def measure(
    pieces: Sequence[Piece], kept: Path, seconds: float | None = None, out: Path | None = None
) -> dict[str, Any]:
    """Runs the pieces which fit into the time, and writes states to pieces.json after each piece. Returns the states.

    seconds: the time for all pieces. out: a folder to copy the tables, results and logs to.
    """
    start, file = time.monotonic(), kept / "pieces.json"
    told: dict[str, Any] = read(file)
    for piece in pieces:
        if seconds is not None and time.monotonic() - start + piece.seconds > seconds:
            break
        print(f"\n== {piece.name}: {piece.seconds} seconds at the most", flush=True)
        told[piece.name] = run(piece, kept)
        print(f"== {piece.name}: {told[piece.name]['state']} after {told[piece.name]['seconds']} seconds", flush=True)
        file.write_text(json.dumps(told, indent=1))
        merge(kept)
        if out is not None:
            copy_to(out, kept)
    return told


def read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text()) if file.exists() else {}


def copy_to(out: Path, kept: Path) -> None:
    """Copies the tables, the results, the states of the pieces and the logs to the folder `out`: at most six files."""
    out.mkdir(parents=True, exist_ok=True)
    logs = sorted(kept.glob("*.log"))
    (out / "log.txt").write_text("\n".join(f"== {each.stem}\n{each.read_text(errors='replace')}" for each in logs))
    for file, name in {**TABLES, kept / "pieces.json": "pieces.json", kept / "run.json": "run.json"}.items():
        if file.exists():
            shutil.copy(file, out / name)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.measure_gpu",
        description="Measures everything on a GPU: tests, tables of products, benchmarks.",
    )
    names = [each.name for each in PIECES]
    parser.add_argument("piece", nargs="*", help=f"of {', '.join(names)}; by default all pieces not done yet")
    parser.add_argument("--seconds", type=float, help="time for all pieces; the next call runs the pieces left")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="also copy tables, results and logs to this folder")
    parser.add_argument("--commit", help="the measured commit, if there is no repository")
    parser.add_argument("--anew", action="store_true", help="run all pieces again")
    parser.add_argument("--dry-run", action="store_true", help="list the pieces without running them")
    options = parser.parse_args(arguments)
    if unknown := {*options.piece} - {*names}:
        parser.error(f"no piece is named {', '.join(sorted(unknown))}; give one of {', '.join(names)}")
    import torch

    gpus = torch.cuda.device_count()
    if not gpus and not options.dry_run:
        sys.exit("there is no GPU to measure on: torch.cuda.is_available() is False; --dry-run lists the pieces")
    kept = KEPT / folder_name(torch.cuda.get_device_name() if gpus else "none")
    if options.anew and not options.dry_run:
        shutil.rmtree(kept, ignore_errors=True)
    states = {name: told["state"] for name, told in read(kept / "pieces.json").items()}
    asked = [each for each in PIECES if not options.piece or each.name in options.piece]
    for each in asked:
        if why := each.left_out(max(gpus, 1)):
            print(f"{each.name} is left out: {why}")
    chosen = (
        [each for each in asked if not each.left_out(max(gpus, 1))]
        if options.piece
        else due(asked, states, max(gpus, 1))
    )
    if options.dry_run:
        for each in chosen:
            print(f"{each.name:20}{each.seconds:4} s  {' '.join(('python', *each.arguments(kept)))}")
        return
    told = measure(chosen, kept, options.seconds, options.out)
    left = due(PIECES, {name: each["state"] for name, each in told.items()}, gpus)
    run = merge(kept)
    if run is not None and not any(each.run for each in left):
        print(f"\nthe run is kept in {history.add(run, commit=options.commit)}")
    print(f"\ncall again for: {', '.join(each.name for each in left)}" if left else "\nall pieces are done")
    failed = [name for name, each in told.items() if each["state"] == FAILED]
    if failed:
        sys.exit(f"failed: {', '.join(failed)}; see {kept}")


if __name__ == "__main__":
    main()
