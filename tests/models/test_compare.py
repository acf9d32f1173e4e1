"""`weft compare`, `--against` and `--replay` on runs made here; the file of digests; bad input in one line."""

from __future__ import annotations

import json
import math
import re
import shlex
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from weft.models.cli import main
from weft.models.compare.record_file import DIGESTS, DigestFile, read_digests
from weft.models.train.config import OptimizerConfig
from weft.models.train.loop import train
from weft.models.train.trainer import TrainingError

from tests.architecture.rules import ROOT
from tests.models.planted import FAULTS
from tests.models.test_train_pipeline import FEW_LAYERS, made_run
from tests.support import preloaded
from tests.support.pool import Pool

TP2 = {"dp": 1, "tp": 2}
MODEL = replace(FEW_LAYERS, dropout=0.0)

ONE = {"dp": 1, "tp": 1}
# The runs by name: the mesh, changes of the configuration, and a planted fault. Run a keeps checkpoints.
RUNS: dict[str, tuple[Any, ...]] = {
    "a": (ONE, {"save_every": 1}),
    "b": (TP2, {}),
    "bug": (TP2, {}, "reduction-of-attention-missed"),
    "faster": (ONE, {"steps": 1, "optimizer": OptimizerConfig(lr=2e-3, weight_decay=0.5)}),
    "other": (ONE, {"model": replace(MODEL, num_layers=3), "steps": 1}),
    "bare": (ONE, {"digests": 0, "steps": 1}),
}


def trained(text: str, name: str, mesh: dict[str, int], options: dict[str, Any], fault: str = "") -> str:
    """Trains into the folder `name`; returns the error that ended the run, or "". fault: planted before step 1."""
    from weft.models.train import loop

    run = made_run(text, mesh, {}, **({"digests": 1, "steps": 3, "model": MODEL} | options))
    run = replace(run, folder=Path(text).parent / name)
    if run.config.against is not None:
        run = replace(run, digested_steps=tuple(read_digests(run.config.against).steps))
    with pytest.MonkeyPatch.context() as patch:
        if fault:
            make = loop.Trainer

            def planted(*arguments: Any) -> Any:
                trainer = make(*arguments)
                FAULTS[fault].plant(trainer, patch)
                return trainer

            patch.setattr(loop, "Trainer", planted)
        try:
            train(run, torch.device("cpu"))
        except TrainingError as error:
            return str(error)
    return ""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, pool: Pool) -> Path:
    """The folder of the runs, with run a. `weft` adds other runs when a command names them."""
    path = tmp_path_factory.mktemp("compare")
    (path / "text.txt").write_text("a stage gives what the next one takes " * 30)
    add_run(path, "a", pool)
    return path


def add_run(folder: Path, name: str, pool: Pool) -> None:
    """Trains run `name` of RUNS, unless it is there."""
    if not (folder / name).exists():
        mesh, *more = RUNS[name]
        pool.run(trained, str(folder / "text.txt"), name, mesh, *more, ranks=math.prod(mesh.values()))


@pytest.fixture
def weft(folder: Path, pool: Pool, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Calls `weft` in the folder of the runs: its status, and its output to both streams."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "120")

    def call(*arguments: str) -> tuple[Any, str, str]:
        for name in RUNS.keys() & set(arguments):
            add_run(folder, name, pool)
        with pytest.raises(SystemExit) as end:
            main(list(arguments))
        return (end.value.code, *capfd.readouterr())

    return call


@pytest.mark.exhaustive
def test_runs_on_two_meshes_differ_by_rounding(weft: Any) -> None:
    status, out, err = weft("compare", "a", "b")
    assert (status, err) == (0, "")
    metrics, verdict = out.splitlines()
    assert re.match(
        r"metrics: the same in \d of 3 steps; first apart at step \d: loss [\d.]+ and [\d.]+, norm ", metrics
    )
    assert re.match(
        r"rounding, in 3 steps of \d+ tensors each, of which 0 have the same bits: at most .*e-0[67] ", verdict
    )


@pytest.mark.exhaustive
def test_a_run_has_the_bits_of_itself(weft: Any) -> None:
    status, out, _ = weft("compare", "a", "a")
    assert status == 0
    assert re.fullmatch(
        r"metrics: the same loss and norm in all 3 steps\nthe same bits in 3 steps, \d+ tensors each\n", out
    )


@pytest.mark.exhaustive
def test_a_bug_is_shown_with_its_place(weft: Any) -> None:
    status, out, _ = weft("compare", "a", "bug")
    assert status == 1
    _, first, size, where, *_ = out.splitlines()
    assert first == "not rounding: step 1, forward: the output of layers.0.self_attn"
    assert re.match(r"  differs by \S+ \(\S+ ulps of float32\); rounding explains \S+, since all before", size)
    assert re.match(
        r"  \d+% of it is in \[\d+:\d+, \d+:\d+, \d+:\d+\], on rank 0 of a and rank 0 of bug \(dp: S", where
    )
    status, out, _ = weft("compare", "a", "bug", "--json")
    found = json.loads(out)
    assert (status, found["verdict"], found["finding"]["name"]) == (1, "not rounding", "layers.0.self_attn")
    assert found["metrics"]["first"] == 1 and found["finding"]["difference"] > found["finding"]["allowed"]


def edited(folder: Path, name: str, change: Callable[[bytes], bytes]) -> None:
    """A copy of run a whose digests are changed."""
    shutil.rmtree(folder / name, ignore_errors=True)
    shutil.copytree(folder / "a", folder / name)
    path = folder / name / DIGESTS
    path.write_bytes(change(path.read_bytes()))


@pytest.mark.exhaustive
@pytest.mark.every_value
@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(
            lambda text: text.replace(b'"digests": 1', b'"digests": 9'), "line 1 .* another version", id="version"
        ),
        pytest.param(lambda text: b"[1]\n" + text, "line 1 holds a list", id="list"),
        pytest.param(lambda text: text.replace(b'"hashes": "', b'"hashes": "AAAA'), "line 3 is not as", id="hashes"),
        pytest.param(lambda text: text.split(b"\n", 1)[1], "line 1 .*|line 2 .*before its header", id="no-header"),
        pytest.param(lambda text: text.replace(b'"step": 2', b'"step": 1'), "of step 1, but follows 1", id="order"),
        pytest.param(lambda text: text.replace(b'"output"', b'"input"'), "of the kind 'input'", id="kind"),
        pytest.param(lambda text: b"", "has no header", id="empty"),
    ],
)
def test_damaged_digests_are_refused_in_one_line(
    change: Callable[[bytes], bytes], message: str, weft: Any, folder: Path
) -> None:
    edited(folder, "damaged", change)
    status, out, err = weft("compare", "a", "damaged")
    assert (status, out) == (2, "")
    assert len(err.splitlines()) == 1 and re.search(message, err), err


def test_a_file_that_is_being_written_is_read_up_to_its_last_line(weft: Any, folder: Path) -> None:
    edited(folder, "growing", lambda text: text[: text.rindex(b'"largest"')])
    assert "in 2 steps" in weft("compare", "a", "growing")[1]


@pytest.mark.every_value
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(["compare", "a", "nowhere"], "nowhere is not the folder of a run", id="no-run"),
        pytest.param(["compare", "a", "bare"], "bare has no digests.jsonl; train with --digests", id="no-digests"),
        pytest.param(["compare", "a", "other"], "the runs train two models: layers.2", id="models"),
        pytest.param(["train", "--against", "nowhere"], "nowhere is not the folder of a run", id="against-no-run"),
        pytest.param(["train", "--against", "bare"], "bare has no digests.jsonl", id="against-no-digests"),
        pytest.param(["train", "--replay", "nowhere", "--step", "2"], "is not the folder of a run", id="replay-no-run"),
        pytest.param(
            ["train", "--replay", "a", "--step", "9"], "no digests of step 9, .* nearest are of step 1, 2, 3", id="step"
        ),
        pytest.param(
            ["train", "--replay", "a"], "--replay RUN and --step N belong together, .* --step 40`$", id="no-step"
        ),
        pytest.param(
            ["train", "--step", "2"],
            "--replay RUN and --step N belong together, .*; --steps 2 gives the number of steps of a run$",
            id="no-replay",
        ),
        pytest.param(["train", "--digests", "--compile"], "--digests looks into blocks", id="compile"),
        pytest.param(["train", "--digests=-1"], "digests is -1", id="negative"),
    ],
)
def test_bad_input_is_refused_in_one_line(arguments: list[str], message: str, weft: Any) -> None:
    status, out, err = weft(*arguments)
    assert (status, out) == (2, "")
    assert re.search(message, err), err


def test_a_resumed_run_goes_on_in_the_same_file(folder: Path) -> None:
    """Steps after the resumed one are cut off; a header follows."""
    edited(folder, "resumed", lambda text: text)
    before = read_digests(folder / "resumed")
    file = DigestFile(folder / "resumed", replace(before.header, mesh={"dp": 2, "tp": 1}), step=2)
    for step in (3, 4):
        file.add(replace(before.steps[3], step=step))
    after = read_digests(folder / "resumed")
    assert list(after.steps) == [1, 2, 3, 4] and after.header_of(2) == before.header
    assert after.header_of(3).mesh == after.header.mesh == {"dp": 2, "tp": 1}
    for step in (1, 2, 3):
        assert after.steps[step].entries == before.steps[step].entries
        assert (after.steps[step].hashes == before.steps[step].hashes).all()
        assert (after.steps[step].sketches == before.steps[step].sketches).all()


def with_turned_matrix(text: bytes) -> bytes:
    """A file of digests in which a matrix has the other shape, with as many blocks."""
    lines = text.splitlines(keepends=True)
    number = next(i for i, line in enumerate(lines) if line.startswith(b'{"tensors": '))
    table = json.loads(lines[number])
    shape = next(entry[3] for entry in table["tensors"] if len(set(entry[3])) == 2 and len(entry[3]) == 2)
    shape.reverse()
    lines[number] = (json.dumps(table) + "\n").encode()
    return b"".join(lines)


def test_a_run_against_tensors_of_another_shape_ends_with_an_error(folder: Path, pool: Pool) -> None:
    edited(folder, "turned", with_turned_matrix)
    options = {"against": folder / "turned", "digests": 0}
    (error,) = pool.run(trained, str(folder / "text.txt"), "square", {"dp": 1, "tp": 1}, options, ranks=1)
    assert re.search(r" has the shape \(.*\) in one run and \(.*\) in the other; compare two runs of one model$", error)


def test_options_that_differ_are_named_beside_a_difference(weft: Any) -> None:
    status, out, _ = weft("compare", "a", "faster")
    assert status == 1 and "not rounding: step 1, update: " in out, out
    differing = "steps is 3 and 1; optimizer.lr is 0.004 and 0.002; optimizer.weight_decay is 0.1 and 0.5"
    assert out.endswith(f"  options of the two runs differ: {differing}\n")


@pytest.mark.exhaustive
def test_a_run_against_another_stops_at_a_bug(folder: Path, pool: Pool) -> None:
    against = {"against": folder / "a", "digests": 0}
    text = str(folder / "text.txt")
    assert pool.run(trained, text, "healthy", TP2, against, ranks=2) == ["", ""]
    errors = pool.run(trained, text, "ill", TP2, against, "reduction-of-attention-missed", ranks=2)
    assert errors[0] == errors[1]
    assert errors[0].startswith("not rounding: step 1, forward: the output of layers.0.self_attn\n")
    assert list(read_digests(folder / "ill").steps) == [1]


@pytest.mark.exhaustive  # starts processes four times
def test_the_commands_of_the_guide_run(tmp_path: Path) -> None:
    page = (ROOT / "docs/guides/compare.md").read_text()
    (tmp_path / "book.txt").write_text("Call me by my layout. " * 400)
    options = "--data.path book.txt --data.sequence-length 32 --no-check --save-every 2"
    commands = [
        line
        for block in re.findall(r"^```sh\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
        for line in block.splitlines()
    ]
    assert len(commands) == 5
    for command in commands:
        _, name, *arguments = shlex.split(command)
        more = shlex.split(options) if name == "train" and "--replay" not in arguments else []
        done = preloaded.run((sys.executable, "-m", "weft.models.cli", name, *arguments, *more), cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        if name == "compare" or "--against" in arguments or "--replay" in arguments:
            assert "rounding, in " in done.stdout and "not rounding" not in done.stdout, done.stdout
