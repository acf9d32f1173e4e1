"""What a run suggests to type next."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from weft.models.cli import train as train_command
from weft.models.data.text import Corpus
from weft.models.train.config import DataConfig, MeshConfig, OptimizerConfig, PlanConfig, Run, TrainConfig
from weft.models.train.recipes import recipe
from weft.models.train.suggestions import suggestions

TINY = recipe("llama-tiny")
OTHER = replace(
    TINY,
    steps=7,
    plan=PlanConfig(sequence=True, recompute="selective"),
    check=False,
    output=Path("a run"),
    data=DataConfig(path=Path("my book.txt"), batch_size=3),
    optimizer=OptimizerConfig(lr=1e-3),
    mesh=MeshConfig(tp=2),
    model=replace(TINY.model, dropout=0.1, tie_embeddings=True),
)
LAUNCHED = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}


def suggested(config: TrainConfig = TINY, dp: int = 2, tp: int = 2, *, on_cpu: bool = True) -> list[str]:
    corpus = Corpus("a text", (), 10, prompt="It's the ")
    run = Run(recipe="llama-tiny", config=config, corpus=corpus, dp=dp, tp=tp, folder=Path("outputs/a run"))
    return suggestions(run, on_cpu=on_cpu)


@pytest.fixture(autouse=True)
def not_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*LAUNCHED, "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)


def test_the_texts_own_words_are_the_prompt() -> None:
    assert shlex.split(suggested()[0]) == ["weft", "generate", "outputs/a run", "--prompt", "It's the "]


@pytest.mark.parametrize(
    ("dp", "tp", "on_cpu", "mesh"),
    [
        pytest.param(2, 2, True, "--mesh.dp 4 --mesh.tp 1", id="four"),
        pytest.param(4, 1, True, "--mesh.dp 2 --mesh.tp 2", id="four-by-data"),
        pytest.param(1, 2, False, "--mesh.dp 2 --mesh.tp 1", id="two"),
        pytest.param(3, 1, True, None, id="three-that-no-layer-is-cut-in"),
        pytest.param(1, 1, True, "--mesh.dp 2 --mesh.tp 1", id="one"),
        pytest.param(1, 1, False, None, id="one-gpu"),
    ],
)
def test_another_mesh_has_the_same_processes(dp: int, tp: int, on_cpu: bool, mesh: str | None) -> None:
    commands = [line for line in suggested(dp=dp, tp=tp, on_cpu=on_cpu) if "another mesh" in line]
    assert commands == ([] if mesh is None else [f"weft train llama-tiny {mesh}    the same loss on another mesh"])


def test_the_options_are_those_of_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "my book.txt").write_text("weft and warp " * 20)
    monkeypatch.chdir(tmp_path)
    (line,) = [line for line in suggested(OTHER) if "another mesh" in line]
    _, _, *arguments = shlex.split(line.partition("    ")[0])
    settled, _ = train_command._settle(arguments, None)
    assert settled.config == replace(OTHER, output=None, mesh=MeshConfig(dp=4, tp=1))


def test_who_has_given_a_text_is_not_told_to() -> None:
    assert "--data.path FILE_OR_FOLDER" in suggested()[-1]
    assert "FILE_OR_FOLDER" not in "".join(suggested(OTHER))


def test_what_torchrun_has_started_is_started_by_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    assert len(suggested()) == 1, "of another launcher the arguments are not known"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    assert suggested()[1].startswith("torchrun --nproc-per-node 4 -m weft.models.cli train llama-tiny --mesh.dp 4 ")
