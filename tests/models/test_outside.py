"""`weft train --model MODULE:CLASS`: a user's model, configured by options; its parameters are counted in the model."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from weft.models import load_checkpoint
from weft.models.checkpoint.manifest import Manifest
from weft.models.cli import main
from weft.models.cli import train as train_command
from weft.models.train.model_class import find_class, parameters_of
from weft.models.train.run import Run

from tests.support.limits import PATIENCE

MODULE = '''
from dataclasses import dataclass

import torch
from weft import kernels
from weft.models import ColwiseParallel, Llama, LlamaConfig, ParallelPlan, RowwiseParallel, VocabParallel
from weft.models.config import ModelConfig, RotaryConfig
from weft.models.decoder import Decoder
from weft.models.initialization import Constant, Normal
from weft.models.layers import Embedding, Linear, RMSNorm


@dataclass(frozen=True, kw_only=True)
class BigramConfig(ModelConfig):
    num_layers: int = 1
    num_heads: int = 1
    inside: int = 24


class MLP(torch.nn.Module):
    def __init__(self, width, inside):
        super().__init__()
        self.gate_proj = Linear(width, inside, bias=False)
        self.up_proj = Linear(width, inside, bias=False)
        self.down_proj = Linear(inside, width, bias=False)

    def forward(self, x):
        return self.down_proj(kernels.swiglu(self.gate_proj(x), self.up_proj(x)))


class Bigram(torch.nn.Module):
    def __init__(self, config: BigramConfig):
        super().__init__()
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.norm = RMSNorm(config.hidden_size, eps=1e-6)
        self.mlp = MLP(config.hidden_size, config.inside)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, tokens):
        x = self.embed_tokens(tokens)
        return self.lm_head(kernels.add(x, self.mlp(self.norm(x))))

    def initial_value(self, name):
        return Constant(1.0) if name == "norm.weight" else Normal(0.06)

    def parallel_plan(self):
        styles = {"embed_tokens": VocabParallel(), "mlp.down_proj": RowwiseParallel()}
        columns = ("mlp.gate_proj", "mlp.up_proj", "lm_head")
        return ParallelPlan(tensor=styles | dict.fromkeys(columns, ColwiseParallel()))


@dataclass(frozen=True, kw_only=True)
class ThinConfig(LlamaConfig):
    narrow: int = 2


class Thin(Llama):
    """Its config inherits the parameters of a Llama, of which its MLPs have half."""

    def __init__(self, config: ThinConfig):
        super().__init__(config)
        for layer in self.layers:
            layer.mlp = MLP(config.hidden_size, config.intermediate_size // config.narrow)


@dataclass(frozen=True, kw_only=True)
class PlainConfig(RotaryConfig):
    def block(self, index):
        from weft.models.config import BlockOptions

        return BlockOptions()


class Plain(Decoder[PlainConfig]):
    """Its __init__ is inherited, and annotated with a type variable."""

    def parallel_plan(self):
        return Llama.parallel_plan(self)


class Own(torch.nn.Module):
    def __init__(self, config: int):
        super().__init__()

    initial_value = parallel_plan = lambda self: None


class Bare(Own):
    def __init__(self, config):
        super().__init__(config)


class NoPlan(torch.nn.Module):
    pass


number = 3
'''
BIGRAM = ("--model", "my_models:Bigram", "--model.vocab-size", "257", "--model.hidden-size", "16")
TEXT = ("--data.path", "text.txt", "--data.sequence-length", "16", "--data.batch-size", "4")
SIZES = ("--model.vocab-size", "257", "--model.hidden-size", "32", "--model.num-layers", "2", "--model.num-heads", "4")
ROTARY = (*SIZES, "--model.intermediate-size", "48")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with the user's module and a text. The tests' own folder is not on sys.path."""
    (tmp_path / "my_models.py").write_text(MODULE)
    (tmp_path / "text.txt").write_text("a model of one's own, and what it is trained on; " * 40)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each])
    monkeypatch.delitem(sys.modules, "my_models", raising=False)
    find_class.cache_clear()
    return tmp_path


def run_of(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Run:
    """The run that `weft train` would launch."""
    runs: list[Run] = []
    monkeypatch.setattr(train_command, "launch", lambda run, gpus: runs.append(run) or 0)
    with pytest.raises(SystemExit) as end:
        main(["train", *arguments])
    assert not end.value.code
    return runs[0]


def ran(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "weft.models.cli", *arguments],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        pytest.param("Bigram", SIZES[:4], "Bigram, 0.02 M parameters, 1 layer", id="bigram"),
        pytest.param("Thin", ROTARY, "Thin, 0.03 M parameters, 2 layers", id="subclass-of-a-family"),
        pytest.param("Plain", ROTARY, "Plain, 0.03 M parameters, 2 layers", id="decoder"),
    ],
)
def test_parameters_are_counted_in_the_model(
    name: str, options: tuple[str, ...], words: str, folder: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    config = run_of(monkeypatch, "--model", f"my_models:{name}", *options, *TEXT).config
    model = find_class(f"my_models:{name}")(config.model)
    shapes = {key: each.numel() for key, each in model.named_parameters()}
    assert parameters_of(config.model, config.model_class) == (
        sum(shapes.values()),
        sum(shapes.values()) - shapes["embed_tokens.weight"],
    )
    out = capsys.readouterr().out
    assert out.startswith(f"{name}: ") and f" {words}, on text.txt" in out
    if name == "Thin":
        # An inherited num_parameters would count these, too.
        assert config.model.num_parameters - sum(shapes.values()) == 2 * 3 * 32 * 24


@pytest.mark.exhaustive
def test_a_run_of_a_model_from_outside(folder: Path) -> None:
    """In processes of its own, which import the module, too: trained, saved, resumed, and begun from."""
    elsewhere = folder / "modules"
    elsewhere.mkdir()
    (folder / "my_models.py").rename(elsewhere / "my_models.py")
    path = {"PYTHONPATH": os.pathsep.join([str(elsewhere), os.environ.get("PYTHONPATH", "")])}
    mesh = ("--mesh.dp", "1", "--mesh.tp", "2", "--optimizer.lr", "0.05", "--optimizer.warmup-steps", "1")
    done = ran(folder, "train", *BIGRAM, *TEXT, *mesh, "--steps", "6", "--output", "run", **path)
    assert done.returncode == 0, done.stderr
    assert "within 1e-06, as float32 rounds" in done.stdout and "NOT as predicted" not in done.stdout
    assert "checkpoint-6/ to resume from; a model from outside has no form for transformers\n" in done.stdout
    assert not (folder / "run/checkpoint").exists()
    assert "config.json" not in Manifest.read(folder / "run/checkpoint-6").files
    (suggested,) = re.findall(r"next  weft (train .*?)    the same loss on another mesh", done.stdout)
    assert "--model my_models:Bigram" in suggested and "--model.vocab-size 257" in suggested
    assert "weft generate" not in done.stdout
    settings = tomllib.loads((folder / "run/config.toml").read_text())
    assert (settings["model_class"], settings["model"]["inside"]) == ("my_models:Bigram", 24)
    went_on = ran(folder, "train", "--output", "run", "--resume", "--steps", "8", **path)
    assert went_on.returncode == 0, went_on.stderr
    losses = [json.loads(line)["loss"] for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    assert len(losses) == 8 and losses[-1] < losses[0] - 0.1
    begun = ran(
        folder, "train", *BIGRAM, *TEXT, *mesh, "--steps", "1", "--from", "run", "--output", "next", **path
    )  # fmt: skip
    assert begun.returncode == 0, begun.stderr
    assert "begins with the model of run/checkpoint-8\n" in begun.stdout and " on one: within 1e-06" in begun.stdout
    first = json.loads((folder / "next/metrics.jsonl").read_text().splitlines()[0])["loss"]
    assert abs(first - losses[-1]) < (losses[0] - losses[-1]) / 2


@pytest.mark.exhaustive
def test_a_users_models_checkpoint_is_loaded_by_a_program(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = ran(folder, "train", *BIGRAM, *TEXT, "--steps", "1", "--output", "run", "--mesh.dp", "1", "--mesh.tp", "1")
    assert done.returncode == 0, done.stderr
    model = find_class_of(monkeypatch, folder)(run_of(monkeypatch, *BIGRAM, *TEXT).config.model)
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    load_checkpoint(model, folder / "run/checkpoint-1")
    assert all(parameter.any() for parameter in model.parameters())


def find_class_of(monkeypatch: pytest.MonkeyPatch, folder: Path) -> type[torch.nn.Module]:
    monkeypatch.syspath_prepend(str(folder))
    return find_class("my_models:Bigram")


@pytest.mark.exhaustive
def test_a_recipe_gives_the_training_options(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(monkeypatch, "qwen2-tiny", *BIGRAM, *TEXT)
    assert (run.recipe, run.config.optimizer.beta2, run.config.model.hidden_size) == ("qwen2-tiny", 0.98, 16)
    alone = run_of(monkeypatch, *BIGRAM, *TEXT)
    assert (alone.recipe, alone.title, alone.config.optimizer.lr) == (None, "Bigram", 4e-3)


@pytest.mark.exhaustive
def test_a_users_model_is_read_back_from_the_printed_config(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["train", *BIGRAM, "--model.inside", "12", "--print-config", *TEXT])
    Path("run.toml").write_text(capsys.readouterr().out)
    assert (
        run_of(monkeypatch, "--config", "run.toml").config.model
        == run_of(monkeypatch, *BIGRAM, "--model.inside", "12", *TEXT).config.model
    )


def test_help_shows_the_options_of_its_config(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["train", "--model", "my_models:Bigram", "--help"])
    out = capsys.readouterr().out
    assert not end.value.code and "--model.inside INT" in out and "--model.hidden-size INT" in out


@pytest.mark.parametrize("command", ["train", "explain"])
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        pytest.param(("--model", "my_models"), "--model 'my_models' is not MODULE:CLASS; write it like", id="no-class"),
        pytest.param(
            ("--model", "nowhere:Net"), "there is no module 'nowhere'; start in its folder, or put", id="no-module"
        ),
        pytest.param(("--model", "my_models.deep:Net"), "there is no module 'my_models.deep'", id="no-submodule"),
        pytest.param(
            ("--model", "my_models:Bigramm"), "my_models has no model 'Bigramm'; did you mean Bigram?", id="typo"
        ),
        pytest.param(
            ("--model", "my_models:number"), "my_models has no model 'number'; give a class", id="no-module-class"
        ),
        pytest.param(
            ("--model", "my_models:NoPlan"),
            "the class has no initial_value and no parallel_plan; initial",
            id="no-plan",
        ),
        pytest.param(
            ("--model", "my_models:Own"), "the config that __init__ takes is a int; annotate it with", id="other-config"
        ),
        pytest.param(
            ("--model", "my_models:Bare"),
            "the config that __init__ takes is not annotated; annotate it",
            id="no-annotation",
        ),
    ],
)  # fmt: skip
def test_an_argument_that_is_no_model_is_refused(
    command: str, arguments: tuple[str, ...], said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([command, *arguments])
    out, err = capsys.readouterr()
    assert out == "" and said in err and len(err.splitlines()) == 1


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        pytest.param(
            ("--mesh.cp", "2", "--mesh.tp", "1"),
            "its forward takes no positions, but plan.context all_gather changes",
            id="context",
        ),
        pytest.param(("--compile",), "has no blocks, which --compile compiles one by one", id="compile"),
        pytest.param(
            ("--data.path", "prepared"), "its forward takes no positions and no documents, which keep", id="packed"
        ),
    ],
)  # fmt: skip
def test_options_that_a_users_forward_does_not_take_are_refused(
    arguments: tuple[str, ...], said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["data", "prepare", "text.txt", "--output", "prepared"])
    with pytest.raises(SystemExit, match="2"):
        main(["train", *BIGRAM, *TEXT, *arguments])
    assert said in capsys.readouterr().err


def test_a_fault_of_its_own_keeps_its_traceback(folder: Path) -> None:
    Path("broken.py").write_text("import nowhere_to_be_found\n")
    with pytest.raises(ModuleNotFoundError, match="nowhere_to_be_found"):
        main(["train", "--model", "broken:Net"])
