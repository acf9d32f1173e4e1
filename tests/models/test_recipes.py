"""The recipes train without amplifying rounding: one loss on every mesh, step by step.

`tests/end_to_end/test_train.py` runs all their 200 steps with the command.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from weft.mesh import ProcessMesh
from weft.models import ParallelPlan
from weft.models.data.text import find_corpus
from weft.models.parallel.batch import cuts_by_documents
from weft.models.train.config import DataConfig
from weft.models.train.recipes import RECIPES, TINY, recipe
from weft.models.train.report import Metrics
from weft.models.train.run import Run, complete_plan
from weft.models.train.trainer import Trainer

from tests.support.pool import Pool

STEPS = 45  # initial weights of a wrong scale make the losses differ by 0.6% by then
FEW = 8  # enough to show that both take the same steps
SMALLER = DataConfig(batch_size=4, sequence_length=64)  # noisier and faster


def trained(name: str, dp: int, tp: int, steps: int) -> list[Metrics]:
    """On every rank: the first steps of the recipe on its own text."""
    config = replace(recipe(name), check=False, data=SMALLER)
    run = Run(recipe=name, config=config, corpus=find_corpus(None), dp=dp, tp=tp, folder=Path("nowhere"))
    trainer = Trainer(run, torch.device("cpu"))
    trainer.report.print_line = lambda line: None  # type: ignore[method-assign]
    trainer.first_step()
    for step in range(1, steps):
        trainer.step(step)
    return trainer.read_metrics()


def test_every_recipe_attends_by_documents_by_default() -> None:
    """Documents are packed and do not see each other, and mesh.cp above 1 exchanges the keys of the rows' documents."""
    for name in RECIPES:
        config = recipe(name)
        assert config.data.pack, name
        plan = complete_plan(config.plan, config, dp=1, cp=2, tp=1)
        assert cuts_by_documents(ProcessMesh([0, 1], ["cp"]), ParallelPlan(**plan.options(pp=1, ep=1))), name


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", TINY)
def test_rounding_does_not_grow(name: str, pool: Pool) -> None:
    alone = same_losses(name, STEPS, 1e-4, pool)
    assert alone[-1] < alone[0] - 2, "it trains"


@pytest.mark.exhaustive
def test_paddlenlp_9412_training_by_one_command_has_one_loss(pool: Pool) -> None:
    alone = same_losses("llama-tiny", FEW, 1e-5, pool)
    assert alone[-1] < alone[0] - 0.3, "it trains"


def same_losses(name: str, steps: int, rel: float, pool: Pool) -> list[float]:
    """The losses of one process, after a comparison with two processes'."""
    (alone,) = ([each.loss for each in found] for found in pool.run(trained, name, 1, 1, steps, ranks=1))
    for metrics in pool.run(trained, name, 1, 2, steps, ranks=2):
        assert [each.loss for each in metrics] == pytest.approx(alone, rel=rel)
    return alone
