"""`weft explain --chip`: seconds, memory and changes of a run on a chip, as text, as JSON and as a picture."""

from __future__ import annotations

import json
import os
import re
import shlex
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
from weft.models.cli import main
from weft.models.cli.explain import ABOUT, complete_configuration
from weft.models.cli.prediction import plan_command
from weft.models.cli.settings import base_of, read_configuration
from weft.models.predict import forks
from weft.models.predict.plans import Candidate
from weft.models.train.config import MeshConfig, PlanConfig
from weft.models.train.explanation import Outline

_VALUES: dict[tuple[str, ...], dict[str, Any]] = {}
TINY = ("--mesh.dp", "2", "--mesh.tp", "2")


def weft(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> tuple[str, str]:
    with pytest.raises(SystemExit, match=str(status)):
        main(["explain", *arguments])
    out, err = capsys.readouterr()
    return out, err


def values(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    if arguments not in _VALUES:  # each takes seconds
        _VALUES[arguments] = json.loads(weft(capsys, *arguments, "--json")[0])
    return _VALUES[arguments]


@pytest.mark.exhaustive
def test_the_parts_add_up_to_the_step(capsys: pytest.CaptureFixture[str]) -> None:
    found = values(capsys, *TINY, "--chip", "h100")
    assert {"seconds", "tokens_per_second", "mfu", "memory_bytes", "parts"} <= found.keys()
    assert sum(found["parts"].values()) == pytest.approx(found["seconds"])
    assert found["tokens_per_second"] == pytest.approx(8 * 128 / found["seconds"])
    assert found["processes"] == 4 and found["fits"]


@pytest.mark.exhaustive
def test_the_lines_say_what_the_json_says(capsys: pytest.CaptureFixture[str]) -> None:
    found = values(capsys, *TINY, "--chip", "h100")
    out, _ = weft(capsys, *TINY, "--chip", "h100")
    assert f"on 4 x h100, predicted: {found['seconds']:.4g} s a step" in out
    assert f"{found['tokens_per_second']:,.0f} tokens/s" in out and f"MFU {found['mfu']:.1%}" in out
    assert f"memory of the fullest rank: {found['memory_bytes'] / 2**30:,.2f} GiB" in out
    shown = {part: seconds for part, seconds in found["parts"].items() if seconds >= 0.0005 * found["seconds"]}
    lines = re.findall(r"^  (\w[\w ]+?) +([\d.e-]+) s +([\d.]+)%$", out, re.MULTILINE)
    assert {name.replace(" ", "_"): float(seconds) for name, seconds, _ in lines} == {
        part: float(f"{seconds:.4g}") for part, seconds in shown.items()
    }
    for number, change in enumerate(found["changes"], 1):
        assert f"  {number}  {change['options']}: {change['seconds']:.4g} s" in out


@pytest.mark.exhaustive
def test_changes_are_faster_and_are_options_of_train(capsys: pytest.CaptureFixture[str]) -> None:
    """A tiny model on a large chip waits for the host, so compiled blocks are faster."""
    found = values(capsys, *TINY, "--chip", "h100")
    seconds = [each["seconds"] for each in found["changes"]]
    assert seconds and seconds == sorted(seconds) and seconds[0] < found["seconds"]
    best = found["changes"][0]
    again = values(capsys, *_with(TINY, shlex.split(best["options"])), "--chip", "h100")
    assert again["seconds"] == pytest.approx(best["seconds"])
    assert again["memory_bytes"] == pytest.approx(best["memory_bytes"], rel=0.01)


@pytest.mark.exhaustive
def test_one_process_and_two_print_the_same(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    printed, children, fork = [], list[int](), os.fork

    def counted_fork() -> int:
        children.append(fork())
        return children[-1]

    monkeypatch.setattr(os, "fork", counted_fork)
    for count, expected in ((1, 0), (2, 2)):
        monkeypatch.setattr(forks, "count_cores", lambda count=count: count)
        printed.append(weft(capsys, *TINY, "--mesh.pp", "2", "--chip", "h100"))
        assert len(children) == expected
    assert printed[0] == printed[1]
    assert "predicted: " in printed[0][0]


@pytest.mark.few(1)
@pytest.mark.parametrize("count", [1, 2])
def test_an_error_of_a_run_on_shapes_is_a_line(
    count: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise ValueError("the model cannot be laid out")

    monkeypatch.setattr(forks, "count_cores", lambda: count)
    monkeypatch.setattr(Outline, "record_step", refuse)
    assert weft(capsys, *TINY, "--chip", "h100", status=2) == ("", "weft explain: the model cannot be laid out\n")


def _with(arguments: tuple[str, ...], options: list[str]) -> list[str]:
    """The arguments, with the options in place of those of the same name."""
    names = {each for each in options if each.startswith("--")}
    unchanged = [
        word
        for i, word in enumerate(arguments)
        if word not in names and not (i and arguments[i - 1] in names and not word.startswith("--"))
    ]
    return [*unchanged, *options]


@pytest.mark.exhaustive
def test_a_plan_that_does_not_fit_says_what_fits(capsys: pytest.CaptureFixture[str]) -> None:
    run = ("llama3-8b", "--mesh.dp", "8", "--mesh.tp", "1", "--batch", "8,8192", "--chip", "h100")
    found = values(capsys, *run)
    assert not found["fits"] and found["memory_bytes"] > found["memory_limit_bytes"]
    assert all(each["memory_bytes"] <= found["memory_limit_bytes"] for each in found["changes"])
    assert found["changes"]


@pytest.mark.parametrize("options", [[], ["--compile", "--optimizer.name", "muon", "--data.path", "my text.txt"]])
def test_the_command_of_the_search_is_of_the_same_run(options: list[str]) -> None:
    name, config = read_configuration(["llama3-8b", *options], None, command="explain", about=ABOUT)
    config, _ = complete_configuration(name, config, "16,4096")
    run: Any = SimpleNamespace(config=replace(config, mesh=MeshConfig(), plan=PlanConfig()), candidate=Candidate(dp=8))
    command = shlex.split(plan_command(run, "my chip.toml", name, base_of(name, config)))
    assert command[:7] == ["weft", "plan", "llama3-8b", "--processes", "8", "--chip", "my chip.toml"]
    name, found = read_configuration(["llama3-8b", *command[7:]], None, command="plan", about=ABOUT)
    assert replace(found, mesh=config.mesh, plan=config.plan) == config


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", [(), ("--mesh.pp", "2")], ids=["a-device", "stages"])
def test_the_timeline_is_a_picture_or_a_trace(
    options: tuple[str, ...], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Both show every part of the step but the times without work, inside the step, and a stream's work in turn."""
    run = (*TINY, *options, "--chip", "h100")
    found = values(capsys, *run)
    for name in ("step.svg", "step.json"):
        weft(capsys, *run, "--timeline", str(tmp_path / name))
    parts = {part for part, seconds in found["parts"].items() if seconds > 0}
    picture = ElementTree.parse(tmp_path / "step.svg").getroot()
    titles = [each.text or "" for each in picture.iter("{http://www.w3.org/2000/svg}title")]
    for part in parts:
        share = found["parts"][part] / found["seconds"]
        assert any(each.endswith(f"{part.replace('_', '-')} {share:.1%}") for each in titles), part
    width = float(picture.get("width", 0))
    boxes = list(picture.iter("{http://www.w3.org/2000/svg}rect"))[1:]
    assert all(0 <= float(each.get("x", 0)) <= width - float(each.get("width", 0)) + 0.1 for each in boxes)
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    streams: dict[int, list[tuple[float, float]]] = {}
    for each in events:
        if each["ph"] == "X":
            streams.setdefault(each["tid"], []).append((each["ts"], each["ts"] + each["dur"]))
    names = {each["tid"] for each in events if each["name"] == "thread_name"}
    assert names == streams.keys() and len(streams) >= 2
    of_work = {"products", "communication", "optimizer"} if options else parts - {"host", "bubble"}
    assert of_work <= {each["cat"] for each in events if each["ph"] == "X"}
    for times in streams.values():
        assert min(times)[0] >= 0
        assert max(end for _, end in times) <= found["seconds"] * 1e6 + 0.01
        assert all(end <= begin + 0.002 for (_, end), (begin, _) in pairwise(sorted(times)))  # rounded to 0.001


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--chip", "h1000"), r"h1000.*h100"),
        (("--chip",), r"argument --chip: expected one argument"),
        (("--from",), r"argument --from: expected one argument"),
        (("--rank", "x"), r"--rank is 'x'; it must be a whole number"),
        (("--json",), r"--json needs a prediction on a chip; add --chip"),
        (("--timeline", "step.svg"), r"--timeline needs a prediction on a chip"),
        (("--chip", "h100", "--timeline", "step.png"), r"step\.png is neither \.svg nor \.json"),
        (("--chip", "h100", "--timeline", "no-folder/step.svg"), r"there is no folder no-folder"),
        (("--chip", "h100", "--mesh.pp", "2", "--plan.split", "layers.1"), r"stages of equally many layers"),
        (
            ("--chip", "h100", "--plan.exact", "dp=2,tp=2"),
            r"no sums in the order of a named mesh; leave out --plan",
        ),
    ],
)
def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str) -> None:
    _, err = weft(capsys, *TINY, *arguments, status=2)
    assert re.search(message, err) and len(err.splitlines()) == 1, err
