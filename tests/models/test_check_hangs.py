"""`weft check --hangs`: what it prints of runs and of golden files, and its exit statuses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from weft.models.cli import main
from weft.models.schedules.pipeline_plan import PipelinePlan
from weft.models.schedules.schedule import Action, Schedule

RUN = ("--mesh.pp", "2", "--mesh.dp", "1", "--mesh.tp", "1", "--plan.microbatches", "2", "--batch", "2,8")


def status(arguments: Sequence[str]) -> int:
    with pytest.raises(SystemExit) as end:
        main(list(arguments))
    return int(end.value.code or 0)


@pytest.mark.exhaustive
def test_a_run_that_does_not_hang(capsys: pytest.CaptureFixture[str]) -> None:
    assert status(["check", "--hangs", *RUN]) == 0
    out = capsys.readouterr().out
    assert out.startswith("no rank waits for another: 2 ranks, ") and out.endswith(" at most\n"), out


@pytest.mark.exhaustive
def test_a_golden_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    golden = str(tmp_path / "golden.json")
    assert status(["explain", *RUN, "--save", golden]) == 0
    capsys.readouterr()
    assert status(["check", "--hangs", golden]) == 0
    assert capsys.readouterr().out.startswith(f"{golden}: no rank waits for another: 2 ranks, ")


def test_a_run_that_hangs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def actions(text: str, stage: int) -> tuple[Action, ...]:
        return tuple(Action(each[0], stage, int(each[1])) for each in text.split())  # type: ignore[arg-type]

    orders = actions("F0 B0 F1 B1", 0), actions("F0 F1 B0 B1", 1)
    circle = Schedule(name="circle", microbatches=2, stages=((0,), (1,)), actions=orders)
    monkeypatch.setattr(PipelinePlan, "make_schedule", lambda *_: circle)
    assert status(["check", "--hangs", *RUN]) == 1
    assert capsys.readouterr().out.startswith("ranks 0, 1 wait for one another in a circle\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["absent.json"], "absent.json cannot be read"),
        (["llama-tinny"], "unknown recipe 'llama-tinny'; did you mean"),
        (["--batch", "4"], "--batch '4' is not rows and tokens"),
        (["absent.json", "llama-tiny"], "with golden files, --hangs takes no recipe and no other options"),
    ],
)
def test_input_that_cannot_be_used(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert status(["check", "--hangs", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and said in captured.err and captured.err.count("\n") == 1, captured.err
