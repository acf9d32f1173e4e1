"""`weft explain --save` and `weft check`: a changed step is found, with the module and the line of the change."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from weft.models.cli import main
from weft.models.train.model_class import find_class

MODULE = """
from dataclasses import dataclass

import torch
from weft import kernels
from weft.models import ColwiseParallel, ParallelPlan, RowwiseParallel, VocabParallel
from weft.models.config import ModelConfig
from weft.models.initialization import Constant, Normal
from weft.models.layers import Embedding, Linear, RMSNorm


@dataclass(frozen=True, kw_only=True)
class NetConfig(ModelConfig):
    num_layers: int = 3
    num_heads: int = 1
    inside: int = 24


class Block(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, eps=1e-6)
        self.up_proj = Linear(config.hidden_size, config.inside, bias=False)
        self.down_proj = Linear(config.inside, config.hidden_size, bias=False)

    def forward(self, x):
        hidden = self.up_proj(self.norm(x))
        return kernels.add(x, self.down_proj(hidden))


class Net(torch.nn.Module):
    def __init__(self, config: NetConfig):
        super().__init__()
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = torch.nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, tokens):
        x = self.embed_tokens(tokens)
        for block in self.layers:
            x = block(x)
        return self.lm_head(x)

    def initial_value(self, name):
        return Constant(1.0) if name.endswith("norm.weight") else Normal(0.06)

    def parallel_plan(self):
        styles = {"embed_tokens": VocabParallel(), "layers.*.down_proj": RowwiseParallel()}
        columns = ("layers.*.up_proj", "lm_head")
        return ParallelPlan(tensor=styles | dict.fromkeys(columns, ColwiseParallel()))
"""
SLOWER = """
from weft.reshard import reshard

def gathered(x):
    x = reshard(x, placements="dp: S(0), tp: S(2)")
    return reshard(x, placements="dp: S(0)")
"""
NET = (
    *("--model", "my_models:Net", "--model.vocab-size", "32", "--model.hidden-size", "16"),
    *("--data.sequence-length", "16", "--data.batch-size", "4", "--mesh.dp", "2", "--mesh.tp", "2"),
)
SMALL = ("--model.num-layers", "2", "--batch", "4,32", "--mesh.dp", "2", "--mesh.tp", "2")
GITHUB = ("GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY", "GITHUB_WORKSPACE")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, where the module of a user is found. No variable of GitHub's is set."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each])
    monkeypatch.setattr("weft.models.cli.settings.gpu_count", lambda: 0)
    monkeypatch.setattr("weft.models.cli.explain.gpu_count", lambda: 0)
    for name in GITHUB:
        monkeypatch.delenv(name, raising=False)
    return tmp_path


Weft = Callable[..., tuple[int, str, str]]


@pytest.fixture
def weft(capsys: pytest.CaptureFixture[str]) -> Weft:
    """Runs a command: (exit status, stdout, stderr)."""

    def call(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            main(arguments)
        out, err = capsys.readouterr()
        return int(end.value.code or 0), out, err

    return call


def write_module(text: str) -> None:
    """The module of the user as of now, in this process, too."""
    Path("my_models.py").write_text(text)
    sys.modules.pop("my_models", None)
    find_class.cache_clear()
    stamp = hash(text) % 10**9
    os.utime("my_models.py", (stamp, stamp))  # a compiled file of another text of this size is not used


def line_of(text: str, part: str) -> int:
    (found,) = [i for i, line in enumerate(text.splitlines(), 1) if part in line]
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("before_and_after", "who", "count"),
    [
        pytest.param(
            ("self.up_proj(self.norm(x))", "self.up_proj(gathered(self.norm(x)))"), "layers.[0-2]", 3, id="all"
        ),
        pytest.param(("x = block(x)", "x = block(gathered(x) if block is self.layers[1] else x)"), "Net", 1, id="one"),
    ],
)
def test_trl_6076_a_right_loss_with_half_more_communication_fails_and_names_the_module_and_the_line(
    weft: Weft, folder: Path, before_and_after: tuple[str, str], who: str, count: int
) -> None:
    write_module(MODULE)
    status, out, err = weft("explain", *NET, "--save", "golden.json")
    assert (status, err) == (0, "")
    assert out.endswith("saved 1 rank of 4 in golden.json; compare with `weft check golden.json`\n")
    assert weft("check", "golden.json") == (
        *(0, "golden.json: unchanged: 1 rank of 4, 12 collectives, 23,628 bytes received\n", ""),
    )
    write_module("# a comment, by which all lines move\n\n" + MODULE)
    assert weft("check", "golden.json")[0] == 0
    slower = MODULE.replace(*before_and_after) + SLOWER
    write_module(slower)
    status, out, err = weft("check", "golden.json")
    assert (status, err) == (1, "")
    first, *lines = out.splitlines()
    assert first == "golden.json: the step has changed"
    line = line_of(slower, 'return reshard(x, placements="dp: S(0)")')
    gather = rf"  \+{count} all-gather over tp \([\d,]+ bytes\) in forward, issued by {re.escape(who)} at "
    assert re.fullmatch(rf"{gather}my_models.py:{line}", lines[0]), out
    assert lines[1] == '    return reshard(x, placements="dp: S(0)")'
    assert re.search(
        r"^  rank 0 in all: 12 -> \d+ collectives, 23,628 -> [\d,]+ bytes received \(\+", out, re.MULTILINE
    )
    (command,) = re.findall(r"^  if this is meant: weft (.*)$", out, re.MULTILINE)
    assert weft(*command.split())[0] == 0  # saves the file anew
    assert weft("check", "golden.json")[0] == 0
    write_module(MODULE)
    status, out, _ = weft("check", "golden.json")
    assert status == 1
    assert f"  -{count} all-gather over tp" in out and f"in forward, was issued by {who} at my_models.py:{line}" in out


@pytest.mark.exhaustive
def test_github_gets_annotations_and_a_table(weft: Weft, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_module(MODULE)
    weft("explain", *NET, "--save", "golden.json")
    slower = MODULE.replace(
        "x = block(x)", 'x = block(reshard(reshard(x, placements="dp: S(0), tp: S(2)"), placements="dp: S(0)"))'
    )
    slower += SLOWER
    write_module(slower)
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_WORKSPACE", str(folder))
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(folder / "summary.md"))
    status, out, err = weft("check", "golden.json")
    assert (status, err) == (1, "")
    line = line_of(slower, "x = block(")
    annotations = [each for each in out.splitlines() if each.startswith("::")]
    assert len(annotations) == len([each for each in out.splitlines() if each.startswith("  +")])
    assert annotations[0].startswith(
        f"::error file=my_models.py,line={line},title=weft check::+3 all-gather over tp (3,072 bytes) in forward, "
    )
    summary = (folder / "summary.md").read_text()
    assert f"| all-gather over tp in forward, Net | 0 (0 bytes) | 3 (3,072 bytes) | `my_models.py:{line}` |" in summary
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(folder / "no" / "summary.md"))
    status, _, err = weft("check", "golden.json")
    assert status == 1
    assert "GITHUB_STEP_SUMMARY" in err and err.count("\n") == 1


@pytest.mark.exhaustive
def test_a_pipeline_has_a_rank_of_each_stage(weft: Weft, folder: Path) -> None:
    options = ("--mesh.pp", "2", "--mesh.dp", "2", "--mesh.tp", "1", "--model.num-layers", "2", "--batch", "8,32")
    status, out, _ = weft("explain", *options, "--save", "golden.json")
    assert (status, out.splitlines()[-1].partition(";")[0]) == (
        *(0, "saved 2 ranks of 4, one of each pipeline stage in golden.json"),
    )
    values = json.loads(Path("golden.json").read_text())
    assert [each["rank"] for each in values["ranks"]] == [0, 2]
    assert {"embed_tokens.weight", "lm_head.weight"} <= set(values["parameters"])
    assert weft("check", "golden.json")[0] == 0
    (entry,) = [each for each in values["ranks"][1]["collectives"] if each["kind"] == "send"]
    entry["count"] += 1
    Path("golden.json").write_text(json.dumps(values))
    status, out, _ = weft("check", "golden.json")
    assert status == 1
    assert "\n  rank 2: -1 send over pp" in out


@pytest.mark.exhaustive
def test_options_of_a_file_are_read_anew_and_paths_are_relative_to_the_golden_file(
    weft: Weft, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "ci").mkdir()
    (folder / "run.toml").write_text("[mesh]\ndp = 2\ntp = 2\n[model]\nnum_layers = 2\n")
    weft("explain", "--config", "run.toml", "--batch", "4,32", "--save", "ci/golden.json")
    assert json.loads(Path("ci/golden.json").read_text())["command"]["config"] == "../run.toml"
    monkeypatch.chdir(folder / "ci")
    assert weft("check", "golden.json")[0] == 0
    (folder / "run.toml").write_text("[mesh]\ndp = 2\ntp = 2\n[model]\nnum_layers = 2\n[plan]\nzero = 1\n")
    status, out, _ = weft("check", "golden.json")
    assert status == 1
    assert re.search(r"^  memory of rank 0, states: [\d,]+ -> [\d,]+ bytes \(-50\.\d %\)$", out, re.MULTILINE)
    assert "  if this is meant: weft explain --config ../run.toml --batch 4,32 --save golden.json\n" in out
    (folder / "run.toml").unlink()
    status, out, err = weft("check", "golden.json")
    assert (status, out) == (2, "")
    assert err == (
        "weft check: golden.json: the step cannot be run again: config ../run.toml cannot be read: "
        "No such file or directory\n"
    )


@pytest.mark.exhaustive
def test_sizes_that_this_machine_chose_are_those_of_the_file(
    weft: Weft, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weft("explain", "--model.num-layers", "1", "--save", "golden.json")
    monkeypatch.setattr("weft.models.cli.explain.gpu_count", lambda: 8)
    assert weft("check", "golden.json")[0] == 0


@pytest.mark.exhaustive
def test_a_users_allowances_are_kept_when_the_file_is_saved_again(weft: Weft, folder: Path) -> None:
    weft("explain", *SMALL, "--save", "golden.json")
    path = Path("golden.json")
    path.write_text(path.read_text().replace('"memory_percent": 1.0', '"memory_percent": 60'))
    weft("explain", *SMALL, "--plan.zero", "1", "--save", "golden.json")
    assert json.loads(path.read_text())["allow"] == {"count": 0, "bytes_percent": 0.0, "memory_percent": 60.0}


@pytest.mark.exhaustive
def test_several_files_are_checked_and_one_of_them_fails(weft: Weft, folder: Path) -> None:
    for name in ("a", "b"):
        weft("explain", *SMALL, "--save", f"{name}.json")
    path = Path("a.json")
    path.write_text(re.sub(r'"gradients": \d+', '"gradients": 1', path.read_text()))
    status, out, err = weft("check", "a.json", "b.json")
    assert (status, err) == (1, "")
    assert "a.json: the step has changed\n  memory of rank 0, gradients: 1 -> " in out
    assert out.splitlines()[-1].startswith("b.json: unchanged: ")


@pytest.fixture(scope="module")
def saved() -> dict[str, Any]:
    """The content of a file without a rank's collectives, whose step runs in a moment."""
    command = {"recipe": "llama-tiny", "options": list(SMALL[:2])}
    record = {"rank": 0, "collectives": [], "memory": {}}
    return {
        "format": 1, "command": command, "device": "cpu", "mesh": {"dp": 1, "tp": 1}, "batch": [8, 128],
        "ranks": [record], "parameters": {},
    }  # fmt: skip


@pytest.mark.few(2)
@pytest.mark.every_value
@pytest.mark.parametrize(
    ("command", "message"),
    [
        pytest.param(
            {"recipe": "llama-gone"}, "golden.json: the step cannot be run again: unknown recipe", id="recipe"
        ),
        pytest.param({"from_folder": "gone"}, "gone", id="folder"),
        pytest.param({"options": ["--no-such", "3"]}, "command.options: Unrecognized options: --no-such", id="option"),
        pytest.param({"options": ["--steps", "three"]}, "command.options: ", id="value"),
        pytest.param({"options": ["--help"]}, "command.options: ", id="help"),
        pytest.param({"options": ["--model", "gone:Net"]}, "there is no module 'gone'", id="module"),
        pytest.param({"batch": "many"}, "--batch 'many' is not rows and tokens", id="batch"),
        pytest.param({"options": 3}, "golden.json: command.options is 3, and a list is needed", id="no-list"),
    ],
)
def test_a_step_that_cannot_run_again_is_a_line(
    weft: Weft, folder: Path, saved: dict[str, Any], command: dict[str, Any], message: str
) -> None:
    Path("golden.json").write_text(json.dumps({**saved, "command": command}))
    status, out, err = weft("check", "golden.json")
    assert (status, out) == (2, "")
    assert err.startswith("weft check: golden.json: ") and err.count("\n") == 1
    assert message in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param([], "no golden file is given; save one with `weft explain … --save golden.json`", id="none"),
        pytest.param(["gone.json"], "gone.json cannot be read: No such file or directory; save it again", id="missing"),
        pytest.param(["."], ". is no plain file", id="folder"),
        pytest.param(["--fix"], "'--fix' is not an option of check", id="option"),
    ],
)
def test_bad_input_is_one_line(weft: Weft, folder: Path, arguments: list[str], message: str) -> None:
    status, out, err = weft("check", *arguments)
    assert (status, out) == (2, "")
    assert err.startswith(f"weft check: {message}") and err.count("\n") == 1


@pytest.mark.parametrize(
    ("path", "message"),
    [
        pytest.param(
            "gone/golden.json", "--save gone/golden.json cannot be written: there is no folder gone", id="gone"
        ),
        pytest.param(".", "--save . is a folder; give a file", id="folder"),
        pytest.param("notes.txt", "notes.txt is not JSON", id="a-file-of-another-kind"),
    ],
)
def test_a_file_that_cannot_be_saved_is_refused_before_the_step_runs(
    weft: Weft, folder: Path, path: str, message: str
) -> None:
    Path("notes.txt").write_text("keep me")
    status, out, err = weft("explain", *SMALL, "--save", path)
    assert (status, out) == (2, "")
    assert err.startswith(f"weft explain: {message}") and err.count("\n") == 1
    assert Path("notes.txt").read_text() == "keep me"
