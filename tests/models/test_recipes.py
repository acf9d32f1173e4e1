"""The recipes train such that rounding does not grow: one loss on every mesh, step by step.

All of their 200 steps, by the command itself: `tests/end_to_end/test_train.py`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from weft.models.data.text import find_corpus
from weft.models.train.config import DataConfig, Run
from weft.models.train.recipes import TINY, recipe
from weft.models.train.report import Metrics
from weft.models.train.trainer import Trainer

from tests.support.pool import Pool

STEPS = 45  # with initial weights of a scale that does not fit, they are 0.6% apart by then
SMALLER = DataConfig(batch_size=4, sequence_length=64)  # which is noisier, and quicker


def trained(name: str, dp: int, tp: int) -> list[Metrics]:
    """On every rank: the first steps of the recipe on its own text."""
    config = replace(recipe(name), check=False, data=SMALLER)
    run = Run(recipe=name, config=config, corpus=find_corpus(None), dp=dp, tp=tp, folder=Path("nowhere"))
    trainer = Trainer(run, torch.device("cpu"))
    trainer.report.line = lambda line: None  # type: ignore[method-assign]
    trainer.first_step()
    for step in range(1, STEPS):
        trainer.step(step)
    return trainer.read(None)


@pytest.mark.parametrize(
    "name", [name if name == "llama-tiny" else pytest.param(name, marks=pytest.mark.exhaustive) for name in TINY]
)
def test_rounding_does_not_grow(name: str, pool: Pool) -> None:
    (alone,) = pool.run(trained, name, 1, 1, ranks=1)
    for metrics in pool.run(trained, name, 1, 2, ranks=2):
        assert [each.loss for each in metrics] == pytest.approx([each.loss for each in alone], rel=1e-4)
    assert alone[-1].loss < alone[0].loss - 2, "it trains"
