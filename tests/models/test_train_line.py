"""A step's line, its numbers, and the pictures of the numbers."""

from __future__ import annotations

import json
import math
import sys
import time
import types
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from weft.mesh import Layout, Partial, ProcessMesh, Shard
from weft.models.config import ModelConfig
from weft.models.families import make_model
from weft.models.train.measure import flops_per_token, peak_flops
from weft.models.train.metrics_file import Trackers, check_trackers, draw_curves, read_curves, save_picture
from weft.models.train.recipes import TINY, recipe
from weft.models.train.report import Report
from weft.reshard import distribute, reshard
from weft.reshard.moving.waits import WaitTimer, measure_waits

from tests.models.metrics import some_metrics
from tests.support.pool import Pool

BELOW = (
    "loss 3.2500  grad norm 1.500  lr 1.0e-01  3,036 tokens/s  "
    "8.2 GFLOP/s  memory 0.41 GiB (2%)  waiting 31%  1:23 left"
)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        pytest.param({}, BELOW, id="cpu"),
        pytest.param(
            {"tflops": 431.7, "mfu": 0.4365}, BELOW.replace("8.2 GFLOP/s", "432 TFLOP/s (44% of the peak)"), id="chip"
        ),
        pytest.param({"seconds_left": 3723.4}, BELOW.replace("1:23 left", "1:02:03 left"), id="hours"),
        pytest.param(
            {"held_out_loss": math.log(20)},
            BELOW.replace("  grad", "  held out 2.9957 (perplexity 20)  grad"),
            id="held-out",
        ),
        pytest.param(
            {"held_out_loss": 1e5},
            BELOW.replace("  grad", "  held out 100000.0000 (perplexity 1.014e+304)  grad"),
            id="far",
        ),
    ],
)  # fmt: skip
def test_the_line_of_a_step(changes: dict[str, Any], line: str) -> None:
    assert str(some_metrics(**changes)) == line


def test_a_line_is_shown_wherever_held_out_text_was_read(capsys: pytest.CaptureFixture[str]) -> None:
    """Besides the first line, the last, and lines at multiples of log_every."""
    with Report(enabled=True).show_steps(replace(recipe("llama-tiny"), steps=25, log_every=10)) as shown:
        for step in range(1, 26):
            shown.show(some_metrics(step=step, held_out_loss=2.0 if step % 7 == 0 else None))
    lines = capsys.readouterr().out.splitlines()
    assert [int(line[5:7]) for line in lines] == [1, 7, 10, 14, 20, 21, 25]
    assert [("held out 2.0000 (perplexity 7.389)" in line) for line in lines] == [
        n % 7 == 0 for n in (1, 7, 10, 14, 20, 21, 25)
    ]


@pytest.mark.parametrize(
    ("held_out_loss", "perplexity"),
    [
        pytest.param(None, None, id="not-taken"),
        pytest.param(math.log(20), pytest.approx(20), id="taken"),
        pytest.param(1e5, math.exp(700), id="far"),
        pytest.param(math.inf, math.exp(700), id="infinite"),
        pytest.param(math.nan, pytest.approx(math.nan, nan_ok=True), id="nan"),
    ],
)
def test_a_step_that_was_evaluated_has_its_perplexity(held_out_loss: float | None, perplexity: Any) -> None:
    """In metrics made at once, and in a step's metrics completed by the loop. exp(700) is the upper limit."""
    for metrics in (some_metrics(held_out_loss=held_out_loss), replace(some_metrics(), held_out_loss=held_out_loss)):
        assert asdict(metrics)["perplexity"] == perplexity


def test_the_loss_of_preferences_has_no_perplexity() -> None:
    rewards = {"rewards_chosen": 0.05, "rewards_rejected": -0.2, "rewards_margin": 0.25, "rewards_accuracy": 0.75}
    metrics = some_metrics(held_out_loss=0.5, **rewards)
    assert metrics.perplexity is None
    assert "held out 0.5000  grad norm" in str(metrics)
    assert "grad norm 1.500  rewards 0.0500/-0.2000  margin 0.2500 (accuracy 75%)  lr" in str(metrics)


def test_a_step_of_kto_with_one_label_has_no_margin() -> None:
    metrics = some_metrics(held_out_loss=0.5, rewards_chosen=0.05, kl=0.0)
    assert metrics.perplexity is None
    assert "grad norm 1.500  rewards 0.0500/none  lr" in str(metrics)


def multiplied(model: ModelConfig, T: int) -> int:
    """Operations of a forward's products for one sequence, counted as they run, attention's separately."""
    from torch.utils.flop_counter import FlopCounterMode

    def of_experts(x: torch.Size, weights: torch.Size, source: torch.Size, *shapes: Any, **_: Any) -> int:
        """Three products of each sorted row with an expert's matrix [I, H], inside of the op."""
        I, H = shapes[1][1:]
        return 2 * 3 * source.numel() * I * H

    module = make_model(replace(model, vocab_size=64))
    formulas = {torch.ops.weft.experts: of_experts}
    with FlopCounterMode(display=False, custom_mapping=formulas) as counter, torch.no_grad():
        module(torch.zeros(1, T, dtype=torch.int64))
    counts = counter.get_flop_counts()["Global"]
    return sum(n for op, n in counts.items() if "attention" not in str(op) and "bmm" not in str(op))


@pytest.mark.parametrize("name", TINY)
def test_the_operations_of_a_token_are_three_times_those_of_the_products_that_run(name: str) -> None:
    model, T = replace(recipe(name).model, vocab_size=64, num_layers=2), 16
    attention = 12 * model.num_layers * model.attention_width * T
    products = (flops_per_token(model, T) - attention) * T
    assert products == pytest.approx(3 * multiplied(model, T), rel=0.01)  # biases and norms are counted as weights


def test_the_operations_of_a_published_size() -> None:
    """Llama 3 8B at 8192 tokens: 6 x 7.504e9 weights that multiply, and 12 x 32 x 4096 x 8192 of attention."""
    llama = recipe("llama3-8b").model
    assert flops_per_token(llama, 8192) == pytest.approx(6 * 7.504e9 + 12 * 32 * 4096 * 8192, rel=1e-3)


def test_the_peak_is_known_by_the_chips_name() -> None:
    assert peak_flops(torch.device("cpu"), "bfloat16") is None
    names = {"NVIDIA H200": 989e12, "NVIDIA H100 PCIe": 756e12, "NVIDIA H100 80GB HBM3": 989e12, "Unknown": None}
    for name, peak in names.items():
        with patch("torch.cuda.get_device_name", return_value=name):
            assert peak_flops(torch.device("cuda"), "bfloat16") == peak
            assert peak_flops(torch.device("cuda"), "float32") is None


def late(rank_late: int, seconds: float) -> list[float]:
    """Each rank's wait for a rank late to an all-reduce, and for a second all-reduce outside the measurement."""
    mesh = ProcessMesh.grid(tp=2)
    part = distribute(torch.ones(4, 4), Layout(mesh, {"tp": Shard(0)}))
    addend = reshard(part, None, {"tp": Partial("sum")})
    reshard(addend)
    waits = WaitTimer(torch.device("cpu"))
    with measure_waits(waits):
        dist.barrier()
        if dist.get_rank() == rank_late:
            time.sleep(seconds)
        reshard(addend)
    first = waits.pop_seconds()
    reshard(addend)
    return [first, waits.pop_seconds()]


def test_the_rank_that_is_not_late_waits(pool: Pool) -> None:
    waited = pool.run(late, 1, 0.5, ranks=2)
    assert waited[0][0] > 0.4
    assert waited[1][0] < waited[0][0] / 2
    assert [after for _, after in waited] == [0.0, 0.0]


def lines(folder: Path) -> Path:
    path = folder / "metrics.jsonl"
    each = (some_metrics(step=n, loss=6 - n / 10, held_out_loss=5.0 if n == 20 else None) for n in range(1, 41))
    path.write_text("".join(json.dumps(asdict(metrics)) + "\n" for metrics in each))
    return path


@pytest.mark.exhaustive
def test_the_curves_are_drawn_on_a_terminal_and_saved(tmp_path: Path) -> None:
    curves = read_curves(lines(tmp_path))
    assert (curves.steps[0], curves.losses[-1], curves.held_out) == (1, 2.0, [(20, 5.0)])
    for width in (60, 120):
        picture = draw_curves(curves, width)
        assert max(map(len, picture.splitlines())) <= width
        assert "(loss)" in picture and "(tokens/s)" in picture and "\x1b" not in picture
    for name, beginning in (("curves.svg", b"<?xml"), ("curves.png", b"\x89PNG")):
        save_picture(curves, tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(beginning)


@pytest.mark.few(1)
@pytest.mark.parametrize("values", [[2.5], [float(2)] * 3], ids=["one-step", "flat"])
def test_a_curve_without_extent_is_drawn(values: list[float], tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(asdict(some_metrics(step=i, loss=x))) + "\n" for i, x in enumerate(values, 1)))
    assert "(loss)" in draw_curves(read_curves(path), 80)
    save_picture(read_curves(path), tmp_path / "curves.svg")


def test_tensorboard_has_the_numbers_of_each_step(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trackers = Trackers(("tensorboard",), tmp_path, recipe("llama-tiny"))
    trackers.add(some_metrics(step=1, loss=3.0))
    trackers.add(some_metrics(step=2, loss=2.0, held_out_loss=math.log(8)))
    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert [(event.step, event.value) for event in found.Scalars("loss")] == [(1, 3.0), (2, 2.0)]
    assert [(event.step, event.value) for event in found.Scalars("perplexity")] == [(2, pytest.approx(8))]
    assert "mfu" not in found.Tags()["scalars"]


def test_a_run_that_goes_on_has_each_step_once_in_tensorboard(tmp_path: Path) -> None:
    """Killed at step 5, it goes on from step 3, where an evaluation far off takes another turn."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for begins, ends, loss in ((1, 5, 3.0), (4, 6, 2.0)):
        trackers = Trackers(("tensorboard",), tmp_path, recipe("llama-tiny"))
        for step in range(begins, ends + 1):
            trackers.add(some_metrics(step=step, loss=loss, held_out_loss=1e5 if step == 5 else None))
    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert [(each.step, each.value) for each in found.Scalars("loss")] == [
        (1, 3.0), (2, 3.0), (3, 3.0), (4, 2.0), (5, 2.0), (6, 2.0),
    ]  # fmt: skip
    assert [each.step for each in found.Scalars("held_out_loss")] == [5]


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Weights & Biases' init calls, each with the numbers logged afterwards under "sent"."""
    begun: list[dict[str, Any]] = []

    class Run:
        def log(self, numbers: dict[str, float], step: int) -> None:
            begun[-1]["sent"].append((step, numbers))

    def init(**options: Any) -> Run:
        begun.append({**options, "sent": []})
        return Run()

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))  # type: ignore[arg-type]
    return begun


def test_weights_and_biases_is_sent_the_same(wandb: list[dict[str, Any]], tmp_path: Path) -> None:
    trackers = Trackers(("wandb",), tmp_path, recipe("llama-tiny"))
    trackers.add(some_metrics(step=7, loss=3.0))
    trackers.add(some_metrics(step=8, held_out_loss=1e5))
    (begun,) = wandb
    assert begun["config"]["optimizer"]["lr"] == recipe("llama-tiny").optimizer.lr
    assert [(step, numbers["loss"]) for step, numbers in begun["sent"]] == [(7, 3.0), (8, 3.25)]
    assert begun["sent"][1][1]["perplexity"] == math.exp(700)
    assert "perplexity" not in begun["sent"][0][1]


def test_a_run_that_goes_on_is_the_same_at_weights_and_biases(wandb: list[dict[str, Any]], tmp_path: Path) -> None:
    """And one in another folder is another."""
    for name in ("one", "one", "two"):
        (tmp_path / name).mkdir(exist_ok=True)
        Trackers(("wandb",), tmp_path / name, recipe("llama-tiny"))
    assert all(each["resume"] == "allow" for each in wandb)
    first, again, other = (each["id"] for each in wandb)
    assert first == again != other
    assert len(first) >= 8 and first.isalnum()


def test_a_tracker_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    check_trackers(())
    monkeypatch.setattr("weft.models.train.metrics_file.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"track is wandb, which is not installed; .*pip install wandb$"):
        check_trackers(("wandb",))
