"""Judged completions with the same label: kto trains, and no reward or margin is told that no completion has."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models.tuning.runs import make_run, read_metrics, records, save_model, train_to_the_end, write
from tests.support.pool import Pool

NAMES = {True: ("rewards_chosen", "rewards_rejected"), False: ("rewards_rejected", "rewards_chosen")}


@pytest.mark.exhaustive
@pytest.mark.parametrize("label", [True, False], ids=["desirable", "undesirable"])
def test_a_step_with_one_label_has_one_reward_and_no_margin(label: bool, tmp_path: Path, pool: Pool) -> None:
    """Of a dp mesh, on whose ranks an example may be missing altogether, too."""
    model = save_model(tmp_path / "model", 1)
    data = write(tmp_path / "kto.jsonl", [{**each, "label": label} for each in records("kto", messages=True, count=22)])
    for name, axes in (("one", ("1", "1")), ("dp2", ("2", "1"))):
        sizes = ("--mesh.dp", axes[0], "--mesh.tp", axes[1], "--log-every", "1", "--optimizer.lr", "1e-3")
        run = make_run(model, data, "kto", *sizes, "--eval-every", "1", output=tmp_path / name, batch=2, steps=3)
        assert run.corpus.describe().startswith(f"22 judged completions ({22 if label else 0} desirable), ")
        pool.run(train_to_the_end, run, ranks=int(axes[0]))
        for metrics in read_metrics(tmp_path / name):
            given, missing = (metrics[each] for each in NAMES[label])
            assert given is not None and (missing, metrics["rewards_margin"]) == (None, None)
            assert metrics["kl"] >= 0 and metrics["perplexity"] is None
        assert metrics["loss"] != 0.5  # which is the loss of equal models


@pytest.mark.exhaustive
def test_the_margin_is_of_steps_with_both_labels(tmp_path: Path, pool: Pool) -> None:
    model = save_model(tmp_path / "model", 1)
    judged = records("kto", messages=True, count=8)
    data = write(tmp_path / "kto.jsonl", [{**each, "label": place > 0} for place, each in enumerate(judged)])
    sizes = ("--mesh.dp", "1", "--mesh.tp", "1", "--data.no-pack", "--log-every", "1")
    pool.run(train_to_the_end, make_run(model, data, "kto", *sizes, output=tmp_path / "run", batch=2, steps=4), ranks=1)
    found = read_metrics(tmp_path / "run")  # an epoch of 4 steps
    assert sorted(each["rewards_margin"] is None for each in found) == [False, True, True, True]
    assert [each["rewards_rejected"] is None for each in found] == [each["rewards_margin"] is None for each in found]
