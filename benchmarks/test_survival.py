"""Measures saved and resumed runs: waits for saves and for data, bytes read from a checkpoint, and survived kills.

`./run benchmark -k "survival or recipe"` shows these results beside the speed of the default recipe. WEFT_KILLS is the
number of ranks to kill. `./run test_faults` kills a hundred ranks, and also restarts runs by torchrun.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp

pytest.importorskip("safetensors", reason="checkpoints are written with safetensors")

from weft.models import save_checkpoint
from weft.models.checkpoint.states import snapshot
from weft.models.train.recipes import recipe

from benchmarks.conftest import Tell
from benchmarks.timing import Timed
from tests.faults.attempts import WAYS, Tally, Victim, complete
from tests.faults.test_kills import survive
from tests.models.checkpoints.states import CASES, Case, fill_state, make
from tests.models.checkpoints.test_saving import bytes_read, save_wide
from tests.support.pool import Pool

SAVES = 6  # of each way; the first save allocates memory, and is not counted
SIZES = {
    "vocab_size": 8192,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_kv_heads": 4,
}  # 28 MB with AdamW's state
KILLS = int(os.environ.get("WEFT_KILLS", "6"))
KILLS_A_RUN = 3
RECIPE = recipe("llama-tiny")
STEPS = 40  # steps of the default recipe
MOST_FOR_DATA = 0.01  # the largest share of a step spent waiting for data


def waited(folder: Path) -> dict[str, list[float]]:
    """The seconds for which training waits for a save, for three ways in turn."""
    model, optimizer = make(Case(), seed=1, **SIZES)
    fill_state(model, optimizer, 1)
    copy, found = None, {"Weft": [], "Weft, synchronous": [], "torch's async_save": []}
    for number in range(SAVES):
        start = time.perf_counter()
        copy = snapshot(model, optimizer).copy_to_cpu(copy)
        found["Weft"].append(time.perf_counter() - start)
        start = time.perf_counter()
        save_checkpoint(model, folder / f"weft-{number}", optimizer)
        found["Weft, synchronous"].append(time.perf_counter() - start)
        states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        start = time.perf_counter()
        saving = dcp.async_save(states, checkpoint_id=folder / f"torch-{number}")
        found["torch's async_save"].append(time.perf_counter() - start)
        saving.result()
        for each in folder.iterdir():
            shutil.rmtree(each)
    return {way: seconds[1:] for way, seconds in found.items()}


def test_how_long_training_waits_for_a_save(tmp_path: Path, pool: Pool, tell: Tell) -> None:
    (found,) = tell.measuring(pool.run, waited, tmp_path, ranks=1)
    timed = {way: Timed(tuple(seconds)) for way, seconds in found.items()}
    share = timed["Weft"].median / timed["Weft, synchronous"].median
    print(f"\ntraining waits for {share:.1%} of a synchronous save's time")
    for way, each in timed.items():
        tell("a save of 28 MB", way, "host_time", **each.figures)


@pytest.mark.timeout(900)
def test_how_long_the_default_recipe_waits_for_its_data(tmp_path: Path, tell: Tell) -> None:
    """Trains on four processes, on the source of the standard library. The run itself counts the waits."""
    train = [sys.executable, "-m", "weft.models.cli", "train", "--steps", str(STEPS), "--log-every", "1"]
    tell.measuring(subprocess.run, [*train, "--output", "run"], cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)
    metrics = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    data, later = RECIPE.data, metrics[3:]  # the first steps include work done only once
    shares = [each["data_share"] for each in later]
    tokens = data.batch_size * data.sequence_length
    waits = Timed(tuple(each["data_share"] * tokens / each["tokens_per_second"] for each in later))
    median, most = statistics.median(shares), max(shares)
    print(
        f"\na step of the default recipe waits for its data for {median:.3%} of it, at most {most:.3%}; "
        f"{MOST_FOR_DATA:.0%} may be"
    )
    figures = {**waits.figures, "step_share_median": median, "step_share_most": most}
    tell("the wait for the data of a step of the default recipe", "Weft", "host_time", **figures)
    assert median < MOST_FOR_DATA


@pytest.mark.parametrize("dst", ["tp2", "zero3-dp4", "pp2-other-sizes-dp2"])
def test_how_much_of_a_checkpoint_a_rank_reads(dst: str, tmp_path: Path, pool: Pool, tell: Tell) -> None:
    src = "zero1-dp2-tp2"
    pool.run(save_wide, CASES[src], tmp_path / "saved", ranks=CASES[src].ranks)
    read = tell.measuring(pool.run, bytes_read, CASES[dst], tmp_path / "saved", ranks=CASES[dst].ranks)
    most = max(nbytes / own for nbytes, own in read)
    print(f"\n{src} read as {dst}: at most {most:.3f} of what a rank holds")
    tell(f"a checkpoint of {src} read as {dst}", "Weft", "count", bytes_over_held=most)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", WAYS)
def test_how_many_kills_are_survived(name: str, tmp_path: Path, pool: Pool, tell: Tell) -> None:
    """Restarts killed runs by the same call. Every run must end with the same bits as a run which was never killed."""
    (tmp_path / "text.txt").write_text("what was saved is whole. " * 40)
    way, draw = replace(WAYS[name], steps=12), random.Random(name)
    work = min(complete(pool, way, tmp_path / "truth"))

    def kill() -> Tally:
        found, runs = Tally(), 0
        while found.kills < KILLS:
            victims = [Victim(draw.randrange(way.ranks), draw.uniform(0, 0.5) * work) for _ in range(KILLS_A_RUN)]
            chosen = victims[: KILLS - found.kills]
            found += survive(pool, way, tmp_path / f"run-{runs}", chosen, tmp_path / "truth")
            runs += 1
        return found

    found = tell.measuring(kill)
    print(f"\n{name}: {found}")
    tell(f"kills of a rank, {name}", "Weft", "count", survived=found.survived, kills=found.kills)
    assert found.survived == found.kills
