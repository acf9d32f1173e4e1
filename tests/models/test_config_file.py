"""A run's configuration as a file, and back."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from weft.models.cli import main
from weft.models.cli.settings import read_configuration
from weft.models.rope_scaling import LinearRopeScaling
from weft.models.train.config import DataConfig, MeshConfig, OptimizerConfig, PlanConfig, TrainConfig
from weft.models.train.recipes import RECIPES, recipe
from weft.models.train.toml import as_toml

from tests.architecture.rules import ROOT
from tests.models.asked import LLAMA, save

OTHER = replace(
    recipe("llama-tiny"),
    steps=7,
    check=False,
    track=("tensorboard",),
    data=DataConfig(path=Path("my book.txt")),
    mesh=MeshConfig(dp=2, tp=1),
    plan=PlanConfig(sequence=True, recompute="full", zero=2),
    optimizer=OptimizerConfig(schedule="wsd", decay_steps=3, lr=1e-3),
    model=replace(recipe("llama-tiny").model, dropout=0.1),
)


def parsed(arguments: list[str], file: Path | None) -> tuple[str, TrainConfig]:
    return read_configuration(arguments, file, command="train", about="")


@pytest.mark.few(1)
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_what_its_file_says(name: str, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(as_toml(name, recipe(name)))
    assert parsed([], file) == (name, recipe(name))


def test_every_option_comes_back(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(as_toml("llama-tiny", OTHER))
    assert parsed([], file) == ("llama-tiny", OTHER)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("data", "read"),
    [
        pytest.param(DataConfig(path=Path("-book.txt")), DataConfig(path=Path("./-book.txt")), id="path"),
        pytest.param(DataConfig(path=Path("--profile=x")), DataConfig(path=Path("./--profile=x")), id="an-option"),
        pytest.param(DataConfig(mixture=("-a=1", "b=2")), DataConfig(mixture=("./-a=1", "b=2")), id="mixture"),
    ],
)
def test_names_that_begin_as_options_do_come_back(data: DataConfig, read: DataConfig, tmp_path: Path) -> None:
    """A run in such a folder can be resumed."""
    file = tmp_path / "run.toml"
    file.write_text(as_toml("llama-tiny", replace(OTHER, data=data)))
    assert parsed([], file) == ("llama-tiny", replace(OTHER, data=read))


def test_given_options_override_the_file(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(as_toml("llama-tiny", OTHER))
    _, config = parsed(["--steps", "9", "--plan.no-sequence", "--optimizer.lr", "0.5"], file)
    assert config == replace(
        OTHER,
        steps=9,
        plan=replace(OTHER.plan, sequence=False),
        optimizer=replace(OTHER.optimizer, lr=0.5),
    )


def test_a_part_of_a_file_is_enough(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("steps = 3\n[optimizer]\nlr = 0.125\n")
    assert parsed(["qwen3-tiny"], file)[1] == replace(
        recipe("qwen3-tiny"), steps=3, optimizer=replace(recipe("qwen3-tiny").optimizer, lr=0.125)
    )


def test_where_results_go_is_not_taken_over(tmp_path: Path) -> None:
    assert "output" not in as_toml("llama-tiny", replace(OTHER, output=Path("somewhere")))


@pytest.mark.exhaustive
def test_print_config_prints_what_would_run_and_ends(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["train", "--print-config", "--mesh.tp", "4", "--steps", "5"])
    assert ended.value.code == 0
    file = tmp_path / "run.toml"
    file.write_text(capsys.readouterr().out)
    _, config = parsed([], file)
    assert (config.steps, config.mesh) == (5, MeshConfig(pp=1, dp=1, cp=1, tp=4))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("steps = ", "run.toml is not TOML: Invalid value", id="not-toml"),
        pytest.param(None, "run.toml cannot be read: No such file", id="missing"),
        pytest.param("recipe = 3", "recipe = 3; give a recipe's name", id="recipe-a-number"),
        pytest.param('recipe = "lama-tiny"', "did you mean 'llama-tiny'", id="recipe-unknown"),
    ],
)
def test_a_file_that_cannot_be_used(text: str | None, message: str, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ValueError, match=message):
        parsed([], file)


def test_a_file_of_another_recipe(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(as_toml("llama-tiny", recipe("llama-tiny")))
    with pytest.raises(ValueError, match="is of the recipe llama-tiny, but gpt-tiny is asked for"):
        parsed(["gpt-tiny"], file)


def test_an_option_that_there_is_not(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[optimizer]\nlearning_rate = 3\n")
    with pytest.raises(ValueError, match=r"run\.toml: .*--optimizer\.learning-rate"):
        parsed([], file)


def commands() -> list[str]:
    """The `weft train` commands that the documentation shows.

    tests/end_to_end/test_fine_tune.py has those of tasks, and test_compare.py those with an earlier run.
    """
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    shown = (re.findall(r"^(?:weft|\./run) (train\b.*)$", page.read_text(), re.MULTILINE) for page in pages)
    elsewhere = ("--task", "--against", "--replay")
    found = {command for of_page in shown for command in of_page}
    return sorted(command for command in found if not any(option in command for option in elsewhere))


@pytest.mark.few(1)
@pytest.mark.parametrize("command", commands())
def test_a_command_that_is_shown_is_taken(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("weft.models.cli.settings.gpu_count", lambda: 8)
    (tmp_path / "book.txt").write_text("Call me Weft. " * 500)
    for folder in ("books", "code", "prepared"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "book.txt").write_text("Call me Weft. " * 500)
    (tmp_path / "run.toml").write_text(as_toml("llama-tiny", recipe("llama-tiny")))
    for folder in {"FOLDER", "Llama-3.2-1B"} & set(shlex.split(command)):  # a model of the tokens that `prepared` has
        save(replace(LLAMA, max_seq_len=1024), tmp_path / folder)
    if "bigram:Bigram" in command:
        blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/guides/model.md").read_text(), re.DOTALL)
        (tmp_path / "bigram.py").write_text("\n".join(blocks[:2]))  # the model, and its plan
    _, *arguments = shlex.split(command.partition(">")[0].removesuffix(" &"), comments=True)
    with pytest.raises(SystemExit) as ended:
        main(["train", *arguments, "--print-config"])
    assert ended.value.code == 0, capsys.readouterr().err


def test_a_rope_scaling_is_written() -> None:
    model = replace(recipe("llama-tiny").model, rope_scaling=LinearRopeScaling(factor=2.0))
    text = as_toml("llama-tiny", replace(OTHER, model=model))
    assert "[model.rope_scaling]\nfactor = 2.0" in text
