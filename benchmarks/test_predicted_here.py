"""Predicts steps on this machine and times them: three small models under eight plans each, on one and two processes.

The machine must be quiet. `weft measure` measures the machine first, for a minute; PREDICTED_CHIP names a file measured
before.
The plans' steps take turns, in two processes, and each plan is predicted as by `weft explain --chip FILE`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

import pytest

pytest.importorskip("rich", reason="the steps are of `weft train`, which prints with rich")
from weft.models.cli.prediction import Predictor
from weft.models.cli.train import _complete_run
from weft.models.predict.chip import load_chip
from weft.models.predict.forks import Forks
from weft.models.train.run import Run

from benchmarks import history, machine
from benchmarks.conftest import Tell
from benchmarks.record import keep_rows
from benchmarks.steps_here import time_steps
from tests.support.pool import Pool

ROUNDS = 15  # turns of each plan's steps
WITHIN = 0.15  # of the measured time, each
LEAST_TAU = 0.8
LONGEST = 900.0  # seconds for all steps
NEAR_FASTEST = 0.05  # the plan predicted to be fastest takes this much longer than the fastest, at most
WEFT = (sys.executable, "-m", "weft.models.cli")
ENVIRON = {**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}  # as `weft train` sets it for 2 processes on 2 cores
ON_ONE = ("--mesh.dp", "1", "--mesh.tp", "1")


def _model(hidden: int, layers: int, intermediate: int, vocabulary: int, rows: int, tokens: int) -> tuple[str, ...]:
    sizes = {
        "model.hidden-size": hidden,
        "model.num-layers": layers,
        "model.intermediate-size": intermediate,
        "model.vocab-size": vocabulary,
        "model.num-heads": 8,
        "model.num-kv-heads": 4,
        "data.batch-size": rows,
        "data.sequence-length": tokens,
    }
    return tuple(word for name, size in sizes.items() for word in (f"--{name}", str(size)))


MODELS = {
    "deep": _model(128, 8, 384, 257, 8, 128),
    "wide": _model(320, 4, 896, 2048, 4, 256),
    "vocabulary": _model(256, 2, 704, 8192, 4, 128),
}
PLANS = {
    "one": ON_ONE,
    "one, recompute": (*ON_ONE, "--plan.recompute", "full"),
    "one, 2 microbatches": (*ON_ONE, "--plan.microbatches", "2"),
    "dp": ("--mesh.dp", "2", "--mesh.tp", "1"),
    "dp, zero 3": ("--mesh.dp", "2", "--mesh.tp", "1", "--plan.zero", "3"),
    "tp": ("--mesh.dp", "1", "--mesh.tp", "2"),
    "tp, sequence": ("--mesh.dp", "1", "--mesh.tp", "2", "--plan.sequence"),
    "pp": ("--mesh.dp", "1", "--mesh.tp", "1", "--mesh.pp", "2", "--plan.microbatches", "4"),
}
Case = tuple[str, str]
CASES: list[Case] = [(model, plan) for model in MODELS for plan in PLANS]


def weft(*arguments: str, folder: Path) -> str:
    result = subprocess.run([*WEFT, *arguments], cwd=folder, env=ENVIRON, capture_output=True, text=True)
    assert result.returncode == 0, f"{arguments}: {result.stderr}"
    return result.stdout


def run_of(case: Case, folder: Path) -> Run:
    """The run of `weft train` under the case's model and plan."""
    length = ("--steps", "1000", "--no-check", "--output", str(folder / "-".join(case)))
    options = "llama-tiny", *MODELS[case[0]], *PLANS[case[1]], "--data.path", str(folder / "text.txt"), *length
    return _complete_run(list(options), None)[0]


def kendall_tau(a: Sequence[float], b: Sequence[float]) -> float:
    """Concordant less discordant pairs, over all pairs."""
    pairs = list(combinations(range(len(a)), 2))
    signs = [(a[i] > a[j]) - (a[i] < a[j]) for i, j in pairs], [(b[i] > b[j]) - (b[i] < b[j]) for i, j in pairs]
    return sum(x * y for x, y in zip(*signs, strict=True)) / len(pairs)


def test_kendall_tau() -> None:
    assert kendall_tau([1, 2, 3, 4], [10, 20, 30, 40]) == 1
    assert kendall_tau([1, 2, 3, 4], [4, 3, 2, 1]) == -1
    assert kendall_tau([1, 2, 3, 4], [1, 2, 4, 3]) == pytest.approx(4 / 6)


@pytest.mark.timeout(1800)
def test_predicted_beside_measured(tell: Tell, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("Call me by my layout, said the tensor to the mesh. " * 4000)
    file = os.environ.get("PREDICTED_CHIP", str(tmp_path / "here.toml"))
    if "PREDICTED_CHIP" not in os.environ:
        print(weft("measure", "--processes", "2", "--output", file, folder=tmp_path))
    chip, runs = load_chip(file), {case: run_of(case, tmp_path) for case in CASES}
    with Pool(None) as pool:
        timed, _ = tell.measuring(pool.run, time_steps, runs, ROUNDS, ranks=2, timeout=LONGEST)
    measured = {case: min(seconds) for case, seconds in timed.items()}  # disturbances only make a step longer
    with Forks(count=1) as here:
        predicted = {
            case: Predictor(run.config, run.axes, chip).predict(here).estimate.seconds for case, run in runs.items()
        }
    row = {"figure": "seconds", "machine": machine.in_words()}
    keep_rows(
        history.RESULTS / "predicted_seconds_here.json",
        [{"row": ", ".join(case), **row, "predicted": predicted[case], "measured": measured[case]} for case in CASES],
    )
    failures = []
    for case in CASES:
        ratio = predicted[case] / measured[case]
        name = f"{case[0]}, {case[1]}"
        print(f"{name:32} predicted {predicted[case]:.4f} s  measured {measured[case]:.4f} s  ratio {ratio:.3f}")
        tell(f"predicted step: {name}", "Weft", "count", ratio=ratio)
        if abs(ratio - 1) > WITHIN:
            failures.append(f"{name}: {ratio:.3f}")
    for model in MODELS:
        of_model = [case for case in CASES if case[0] == model]
        tau = kendall_tau([predicted[case] for case in of_model], [measured[case] for case in of_model])
        chosen = min(of_model, key=predicted.__getitem__)
        lost = measured[chosen] / min(measured[case] for case in of_model) - 1
        print(f"{model}: Kendall's tau {tau:.2f}; the plan chosen, {chosen[1]}, takes {lost:.1%} more than the fastest")
        tell(f"order of plans: {model}", "Weft", "count", tau=tau, lost=lost)
        failures += [f"{model}: tau {tau:.2f}"] if tau < LEAST_TAU else []
        failures += [f"{model}: {chosen[1]} loses {lost:.1%}"] if lost > NEAR_FASTEST else []
    assert not failures, "; ".join(failures)
