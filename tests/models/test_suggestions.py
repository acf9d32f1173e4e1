"""The commands that a run suggests to type next."""

from __future__ import annotations

import contextlib
import io
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from weft.models.cli import main
from weft.models.cli import train as train_command
from weft.models.cli.arguments import parse
from weft.models.cli.generate import GenerateOptions
from weft.models.data.text import Corpus
from weft.models.rope_scaling import LinearRopeScaling
from weft.models.train import memory_check
from weft.models.train.config import DataConfig, MeshConfig, OptimizerConfig, PlanConfig, TrainConfig
from weft.models.train.memory_check import MachineMemory
from weft.models.train.recipes import recipe
from weft.models.train.report import suggestions
from weft.models.train.run import Run

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
    settled, _ = train_command._complete_run(arguments, None)
    assert settled.config == replace(OTHER, output=None, mesh=MeshConfig(dp=4, tp=1))


def test_a_run_with_exact_is_compared_with_another_mesh() -> None:
    exact = replace(TINY, plan=PlanConfig(exact="dp=4,tp=2"))
    (line,) = [line for line in suggested(exact) if "another mesh" in line]
    assert line.endswith("--plan.exact dp=4,tp=2    the same bits on another mesh")
    (line,) = [line for line in suggested(replace(exact, digests=10)) if "another mesh" in line]
    command, _ = line.split("    ")
    assert "--digests" not in command
    assert " --against 'outputs/a run' " in command


def test_who_has_given_a_text_is_not_told_to() -> None:
    assert "--data.path FILE_OR_FOLDER" in suggested()[-1]
    assert "FILE_OR_FOLDER" not in "".join(suggested(OTHER))


def test_a_command_started_by_torchrun_is_suggested_with_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    assert len(suggested()) == 1, "of another launcher the arguments are not known"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    assert suggested()[1].startswith("torchrun --nproc-per-node 4 -m weft.models.cli train llama-tiny --mesh.dp 4 ")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with texts, a prepared folder and a configuration file."""
    folder = tmp_path_factory.mktemp("texts")
    with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()):
        Path("a folder").mkdir()
        for name in ("text.txt", "my book's $HOME.txt", "-dash.txt", "a folder/one.txt"):
            Path(name).write_text('- weft and warp, "woven". ' * 400)
        Path("lines.txt").write_text("--- it's\n" * 900)
        Path("run.toml").write_text('recipe = "gpt-tiny"\nsteps = 7\n[mesh]\ndp = 2\n[data]\npath = "text.txt"\n')
        with pytest.raises(SystemExit, match="0"):
            main(["data", "prepare", "a folder", "--output", "prepared data"])
    return folder


@pytest.fixture
def texts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes `folder` the current folder, on a machine without GPUs."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr("weft.models.cli.settings.gpu_count", lambda: 0)


TEXT = "--data.path text.txt"
RUNS = [
    pytest.param("", id="defaults"),
    pytest.param("--data.mixture text.txt=0.5 'prepared data=1.5'", id="mixture"),
    pytest.param("""--data.mixture "my book's $HOME.txt=1" """, id="mixture-of-one"),
    pytest.param("--data.path 'prepared data' --data.no-pack --data.no-verify", id="prepared"),
    pytest.param("--data.path 'a folder'", id="folder"),
    pytest.param("""--data.path "my book's $HOME.txt" """, id="quotes"),
    pytest.param("--data.path=-dash.txt", id="dash"),
    pytest.param("--data.path lines.txt", id="prompt-like-an-option"),
    pytest.param("--config run.toml --steps 9", id="config-file"),
    pytest.param(f"{TEXT} --mesh.dp 2 --mesh.cp 2 --mesh.tp 2 --plan.context ulysses", id="eight"),
    pytest.param(f"{TEXT} --mesh.dp 3", id="three"),
    pytest.param(f"{TEXT} --mesh.dp 1 --mesh.tp 1", id="one"),
    pytest.param(f"{TEXT} --mesh.dp 2 --mesh.tp 1 --plan.exact dp=4", id="exact"),
    pytest.param("--mesh.pp 2 --plan.schedule interleaved", id="stages"),
    pytest.param("--mesh.pp 3 --mesh.dp 1 --mesh.tp 1 --plan.split 1,2,1", id="split"),
    pytest.param(f"{TEXT} --data.batch-size 6 --plan.microbatches 3 --plan.zero 3 --plan.sequence", id="plan"),
    pytest.param("--track tensorboard --profile 'tr aces' --compile --no-check", id="flags"),
    pytest.param("--optimizer.schedule wsd --optimizer.decay-steps 4 --optimizer.lr 1e-05", id="optimizer"),
    pytest.param(
        "--output 'a run' --save-every 2 --keep 0 --timeout 5.5 --reduce-dtype bfloat16", id="folder-of-the-run"
    ),
    pytest.param("qwen3-tiny --dtype bfloat16 --model.tie-embeddings", id="qwen"),
    pytest.param("gpt-tiny --model.dropout 0.1 --seed 9", id="gpt"),
    pytest.param(f"llama3.2-1b {TEXT} --data.sequence-length 64 --model.num-layers 2", id="published"),
]  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.parametrize("launched", [False, True])
@pytest.mark.parametrize("typed", RUNS)
def test_each_command_is_one_that_is_not_refused(
    typed: str, launched: bool, texts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parsed by the shell and by the command's own parser, with the run's options."""
    files, rest = train_command._files().parse_known_args(shlex.split(typed))
    run, _ = train_command._complete_run(rest, files.config)
    if launched:
        world = {**LAUNCHED, "TORCHELASTIC_RUN_ID": "1"}
        for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            world[name] = str(run.processes)
        for name, value in world.items():
            monkeypatch.setenv(name, value)
    generate, *train = suggestions(run, on_cpu=True)
    _, command, *arguments = shlex.split(generate)
    asked = parse(GenerateOptions, arguments, command=command, about="")
    assert (asked.folder, asked.prompt) == (run.folder, run.corpus.prompt)
    has_text = run.config.data.path is not None or run.config.data.mixture
    assert any("FILE_OR_FOLDER" in line for line in train) != bool(has_text)
    for line in train:
        words = shlex.split(line.partition("    ")[0].replace("FILE_OR_FOLDER", "text.txt"))
        found, _ = train_command._complete_run(words[words.index("train") + 1 :], None)
        same = {"mesh": run.config.mesh, "plan": run.config.plan, "output": run.config.output}
        if "FILE_OR_FOLDER" in line:
            same["data"] = run.config.data
        assert replace(found.config, **same) == run.config
        assert found.processes == run.processes or run.processes == 1


def test_a_mesh_without_room_is_not_suggested(monkeypatch: pytest.MonkeyPatch) -> None:
    """Data parallel alone would hold the model on each of two processes."""
    assert any("--mesh.dp 2 --mesh.tp 1 " in line for line in suggested(dp=1, tp=2))
    size = 16 * TINY.model.num_parameters
    monkeypatch.setattr(memory_check, "cpu_memory", lambda: MachineMemory(size, size))
    assert not any("another mesh" in line for line in suggested(dp=1, tp=2))


def test_a_config_that_no_option_gives_is_not_suggested() -> None:
    config = replace(TINY, model=replace(TINY.model, rope_scaling=LinearRopeScaling(factor=2.0)))
    (line,) = suggested(config)
    assert line.startswith("weft generate ")
