"""A run's final model replaces an older one: whatever kills the run, the folder holds the older or the new model."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from weft.models import from_pretrained
from weft.models.families import make_model
from weft.models.train.folder import CHECKPOINT, tidy
from weft.models.train.results import Results

from tests.models.checkpoints.test_saver import MODEL
from tests.support.pool import Pool, RanksFailed
from tests.support.sample import Portion


def model_of(value: float) -> torch.nn.Module:
    model = make_model(MODEL)
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, value)
    return model


def value_in(folder: Path) -> float:
    """The value of the whole model in a folder."""
    (value,) = {value for each in from_pretrained(folder).parameters() for value in each.unique().tolist()}
    return value


def export(folder: Path, value: float, killed_at: int | None = None) -> int:
    """Save a model; returns how often folders were renamed or removed. killed_at: SIGKILL comes before that call."""
    count = 0
    rename, rmtree = Path.rename, shutil.rmtree

    def counted() -> None:
        nonlocal count
        if count == killed_at:
            os.kill(os.getpid(), signal.SIGKILL)
        count += 1

    def renamed(path: Path, to: Path) -> Path:
        counted()
        return rename(path, to)

    def removed(path: Path, *arguments: Any, **options: Any) -> None:
        counted()
        rmtree(path, *arguments, **options)

    with patch.object(Path, "rename", renamed), patch.object(shutil, "rmtree", removed):
        Results(folder, writes=True).save(model_of(value))
    return count


def test_a_model_is_removed_when_the_next_one_is_whole(portion: Portion, tmp_path: Path, pool: Pool) -> None:
    (first,) = pool.run(export, tmp_path, 1.0, ranks=1)
    (count,) = pool.run(export, tmp_path, 2.0, ranks=1)
    assert [path.name for path in tmp_path.iterdir()] == [CHECKPOINT] and value_in(tmp_path / CHECKPOINT) == 2.0
    assert count > first > 0
    last = 2.0
    for number in portion.of(range(count), every=3):
        value = 3.0 + number
        with pytest.raises(RanksFailed, match="SIGKILL"):
            pool.run(export, tmp_path, value, number, ranks=1)
        tidy(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == [CHECKPOINT]
        assert value_in(tmp_path / CHECKPOINT) in (last, value)
        last = value_in(tmp_path / CHECKPOINT)
