"""`--compile`: the first step is eager, later steps compile each block; the values are an eager run's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from weft.models.data.text import find_corpus
from weft.models.train.config import PlanConfig
from weft.models.train.run import Run
from weft.models.train.trainer import Trainer

from tests.models.test_train_steps import CONFIG
from tests.support.pool import Pool

STEPS = 4


def trained(text: str, sizes: dict[str, Any], plan: dict[str, Any], compiles: bool) -> tuple[list[float], list[int]]:
    """Loss and gradient norm of each step, and the number of graphs after the first and after the last step."""
    torch.compiler.reset()
    counters.clear()
    config = replace(CONFIG, compile=compiles, steps=STEPS, plan=PlanConfig(**plan))
    run = Run(
        recipe="small",
        config=config,
        corpus=find_corpus(Path(text)),
        folder=Path(text).parent,
        **{"dp": 1, "tp": 1, **sizes},
    )
    made = Trainer(run, torch.device("cpu"))
    made.report.print_line = lambda text: None  # type: ignore[method-assign]
    made.first_step()
    graphs = [counters["stats"]["unique_graphs"]]
    for step in range(1, STEPS):
        made.step(step)
    graphs.append(counters["stats"]["unique_graphs"])
    taken = made.read_metrics()
    return [number for each in taken for number in (each.loss, each.grad_norm or 0.0)], graphs


@pytest.mark.exhaustive  # the sample compiles single blocks and models, in tests/models/test_compiled.py
@pytest.mark.parametrize(
    ("sizes", "plan"),
    [
        pytest.param({}, {}, id="one-process"),
        pytest.param({"dp": 2}, {}, id="data"),
        pytest.param({"tp": 2}, {"sequence": True}, id="tensor-sequence"),
    ],
)
def test_a_compiled_run_has_the_numbers_of_an_eager_one(
    sizes: dict[str, int], plan: dict[str, Any], tmp_path: Path, pool: Pool
) -> None:
    (tmp_path / "text.txt").write_text("each block is compiled from step 2 on " * 30)
    text, ranks = str(tmp_path / "text.txt"), torch.Size(sizes.values()).numel()
    eager = pool.run(trained, text, sizes, plan, False, ranks=ranks)
    compiled = pool.run(trained, text, sizes, plan, True, ranks=ranks)
    for (wanted, none), (found, graphs) in zip(eager, compiled, strict=True):
        assert none == [0, 0]
        assert graphs[0] == 0 < graphs[1]
        assert found[:2] == wanted[:2]
        assert found == pytest.approx(wanted, rel=2e-5)
