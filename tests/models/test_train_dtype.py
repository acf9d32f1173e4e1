"""Training with layers that compute in bfloat16, and losses kept to the last bit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from weft.kernels import cross_entropy
from weft.mesh import ProcessMesh
from weft.models import LlamaConfig
from weft.models.data.batches import Batches
from weft.models.data.text import find_corpus
from weft.models.families import make_model
from weft.models.initialization import initialize
from weft.models.parallel import ParallelPlan
from weft.models.step.communication import Communication, Phase
from weft.models.train.config import DataConfig, OptimizerConfig, PlanConfig, TrainConfig
from weft.models.train.report import ROUNDING, Report
from weft.models.train.results import Results
from weft.models.train.run import Run
from weft.models.train.trainer import Trainer

from tests.models.metrics import some_metrics
from tests.support.pool import Pool

CONFIG = TrainConfig(
    model=LlamaConfig(
        vocab_size=257, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, initializer_range=0.2
    ),
    steps=2,
    data=DataConfig(batch_size=4, sequence_length=16),
    dtype="bfloat16",
)
NORM = 4  # bytes of the gradients' norm, which is all-reduced too
AFTER: tuple[Phase, ...] = ("backward", "gradients")  # the phases in which gradients travel


@pytest.fixture
def text(tmp_path: Path) -> str:
    (tmp_path / "text.txt").write_text("products in sixteen bits, sums in thirty-two " * 40)
    return str(tmp_path / "text.txt")


def first_step(text: str, plan: PlanConfig) -> dict[str, object]:
    run = Run(
        recipe="small",
        config=replace(CONFIG, plan=plan),
        corpus=find_corpus(Path(text)),
        dp=2,
        tp=2,
        folder=Path(text).parent,
    )
    made, said, computed = Trainer(run, torch.device("cpu")), [], set()
    made.report.print_line = said.append
    for layer in made.model.blocks:
        layer.mlp.up_proj.register_forward_hook(lambda module, args, output: computed.add(output.dtype))
    before = [parameter.detach().to_local().clone() for parameter in made.model.parameters()]
    made.first_step()
    if made.prediction is not None:
        assert Communication.of(made.issued_collectives) == made.prediction
    assert made._unread_steps[0].result.loss.dtype == torch.float32
    kept = {each.dtype for state in made.optimizer.state.values() for each in state.values() if each.ndim}
    after = [parameter.to_local() for parameter in made.model.parameters()]
    assert any(not torch.equal(one, other) for one, other in zip(before, after, strict=True))
    return {
        "computed": computed,
        "parameters": {each.dtype for each in after},
        "kept": kept,
        "loss": made._unread_steps[0].result.loss.item(),
        "said": said,
    }


def reduced(text: str, dtype: Any, zero: Any) -> tuple[list[int], list[Tensor]]:
    """The bytes of gradients that a rank receives, predicted and issued, and the gradients that the optimizer gets."""
    uncut = OptimizerConfig(clip_norm=1e9)
    config = replace(CONFIG, dtype="float32", reduce_dtype=dtype, plan=PlanConfig(zero=zero), optimizer=uncut)
    run = Run(recipe="small", config=config, corpus=find_corpus(Path(text)), dp=2, tp=1, folder=Path(text).parent)
    made, given = Trainer(run, torch.device("cpu")), []
    made.report.print_line = lambda line: None  # type: ignore[method-assign]
    made.optimizer.register_step_pre_hook(
        lambda optimizer, *_: given.extend(each.grad.to_local() for each in made.model.parameters())
    )
    made.first_step()
    kind, issued = "reduce-scatter" if zero else "all-reduce", Communication.of(made.issued_collectives)
    told = [
        sum(each.select(phase=phase, kind=kind).nbytes for phase in AFTER) for each in (made.prediction, issued) if each
    ]
    return told, given


@pytest.mark.parametrize("zero", [0, pytest.param(2, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_are_added_up_over_ranks_in_the_dtype_that_is_asked_for(
    pool: Pool, text: str, dtype: str, zero: int
) -> None:
    """The bytes sent are `dtype`'s, as predicted; the optimizer gets float32, rounded where bfloat16 was asked for."""
    parameters = sum(each.numel() for each in make_model(CONFIG.model).parameters())
    nbytes = parameters * getattr(torch, dtype).itemsize // (2 if zero else 1)
    for told, given in pool.run(reduced, text, dtype, zero, ranks=2):
        assert set(told) == {nbytes + (0 if zero else NORM)}
        assert {each.dtype for each in given} == {torch.float32}
        assert all(torch.equal(each, each.bfloat16().float()) for each in given) == (dtype == "bfloat16")


def alone(text: str, dtype: torch.dtype) -> float:
    """The first step's loss on one process."""
    model = make_model(CONFIG.model)
    initialize(model, CONFIG.seed)
    batches = Batches(find_corpus(Path(text)), sequence_length=16, batch_size=4, seed=CONFIG.seed)
    rows = batches.batch(0, slice(None))
    with torch.no_grad(), torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
        return cross_entropy(model(rows.tokens), rows.targets).item()


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(PlanConfig(), id="tensor", marks=pytest.mark.exhaustive),
        pytest.param(PlanConfig(sequence=True, recompute="selective"), id="sequence-recomputed"),
    ],
)
def test_layers_compute_in_bfloat16_and_parameters_are_float32(pool: Pool, text: str, plan: PlanConfig) -> None:
    lower, full = alone(text, torch.bfloat16), alone(text, torch.float32)
    found = pool.run(first_step, text, plan, ranks=4)
    for each in found:
        assert each["computed"] == {torch.bfloat16}
        assert each["parameters"] == each["kept"] == {torch.float32}
        assert each["loss"] == pytest.approx(lower, rel=ROUNDING["bfloat16"])
        assert each["loss"] != full
    (check,) = [line for line in found[0]["said"] if line.startswith("check")]
    assert f"{lower:.7f} on one: within 1e-03, as bfloat16 rounds; relative difference " in check


@pytest.mark.parametrize(("dtype", "words"), [("float32", "NOT within 1e-06"), ("bfloat16", "within 1e-03")])
def test_how_near_two_losses_must_be_follows_the_dtype(dtype: str, words: str) -> None:
    report, said = Report(enabled=True), []
    report.print_line = said.append  # type: ignore[method-assign]
    report.check_loss(5.0001, 5.0, 4, dtype)
    assert said == [
        f"check  loss of step 1: 5.0001000 on 4 processes, 5.0000000 on one: {words}, as {dtype} rounds; "
        "relative difference 2.0e-05"
    ]


def test_metrics_keep_losses_to_the_last_bit(tmp_path: Path) -> None:
    losses = torch.rand(50, generator=torch.Generator().manual_seed(0)) * 8
    results = Results(tmp_path / "run", writes=True)
    results.begin("llama-tiny", CONFIG, ParallelPlan(), ProcessMesh.grid(dp=1), {})
    for step, loss in enumerate(losses.tolist(), 1):
        results.add(some_metrics(step=step, loss=loss, grad_norm=loss / 3))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    read: Tensor = torch.tensor([line["loss"] for line in lines])
    assert torch.equal(read, losses)
    assert [line["grad_norm"] for line in lines] == [loss / 3 for loss in losses.tolist()]
