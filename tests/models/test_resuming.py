"""`weft train --output run --resume`: options taken from the run that is resumed, and options that must not differ."""

from __future__ import annotations

import json
import os
import platform
import shutil
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import torch
from weft.mesh import ProcessMesh
from weft.models import read_run, save_checkpoint
from weft.models.cli import main
from weft.models.cli.settings import read_configuration
from weft.models.data.text import find_corpus
from weft.models.families import make_model
from weft.models.parallel import ParallelPlan
from weft.models.train.config import DataConfig, MeshConfig, OptimizerConfig, PlanConfig, TrainConfig
from weft.models.train.folder import check_resumable
from weft.models.train.loop import check_profile
from weft.models.train.recipes import recipe
from weft.models.train.results import Results
from weft.models.train.run import Run
from weft.models.train.saved_run import check_same_run, describe_run
from weft.models.train.toml import add_checksum, as_toml, check_sum
from weft.models.train.trainer import TrainingError

from tests.models.metrics import some_metrics
from tests.support.sample import Portion

RECIPE = "qwen3-tiny"
SMALL = replace(recipe(RECIPE).model, hidden_size=16, intermediate_size=24, num_layers=2)
TEXT = "what was saved is whole. " * 40


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrainConfig:
    """The config of a run in the folder `run`, which has a checkpoint of step 4; its parent is the working folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("weft.models.cli.settings.gpu_count", lambda: 0)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    Path("text.txt").write_text(TEXT)
    config = replace(
        recipe(RECIPE),
        steps=12,
        save_every=2,
        seed=3,
        data=DataConfig(path=Path("text.txt"), batch_size=4, sequence_length=8),
        mesh=MeshConfig(pp=2, dp=2, cp=1, tp=1),
        plan=PlanConfig(schedule="gpipe", split="layers", microbatches=2),
        optimizer=OptimizerConfig(lr=1e-3),
        model=SMALL,
    )
    run = Run(recipe=RECIPE, config=config, corpus=find_corpus(Path("text.txt")), pp=2, dp=2, tp=1, folder=Path("run"))
    Path("run").mkdir()
    Path("run/config.toml").write_text(as_toml(RECIPE, config))
    torch.manual_seed(0)
    save_checkpoint(make_model(SMALL), "run/checkpoint-4", run=describe_run(run, 4, 5.5))
    return config


def asked(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[str, TrainConfig]:
    """The output of `--print-config`, and the config in it."""
    with pytest.raises(SystemExit) as ended:
        main(["train", *arguments, "--print-config"])
    out, error = capsys.readouterr()
    assert ended.value.code == 0, error
    Path("asked.toml").write_text(out)
    return read_configuration([], Path("asked.toml"), command="train", about="")


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "what", [["--output", "run", "--resume"], ["--resume", "run"], ["--resume", "run/checkpoint-4"]]
)
def test_a_run_goes_on_with_its_own_recipe_and_options(
    what: list[str], config: TrainConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    assert asked(capsys, *what) == (RECIPE, config)


@pytest.mark.exhaustive
def test_given_options_override_the_runs_options(config: TrainConfig, capsys: pytest.CaptureFixture[str]) -> None:
    Path("more.toml").write_text("steps = 20\nkeep = 7\n")
    given = ["--config", "more.toml", "--output=run", "--resume", "--steps", "30", "--optimizer.lr", "0.5"]
    wanted = replace(config, steps=30, keep=7, optimizer=replace(config.optimizer, lr=0.5))
    assert asked(capsys, *given) == (RECIPE, wanted)


@pytest.mark.exhaustive
def test_a_mesh_that_is_given_takes_the_place_of_the_whole_mesh(
    config: TrainConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    _, found = asked(capsys, "--output", "run", "--resume", "--mesh.tp", "4")
    assert found.mesh == MeshConfig(pp=1, dp=1, cp=1, tp=4)
    assert found.plan == PlanConfig(microbatches=2)


@pytest.mark.exhaustive
def test_a_mesh_for_which_there_are_no_processes_gives_way(
    config: TrainConfig, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert asked(capsys, "--output", "run", "--resume")[1].mesh == MeshConfig(pp=1, dp=1, cp=1, tp=2)


PLACES = 'output = "elsewhere"\nprofile = "elsewhere/traces"\nresume = "elsewhere"\n'


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "what",
    [
        ["--resume", "run"],
        ["--resume=run/checkpoint-4"],
        ["--resume", "run", "--output", "new"],
        ["--output", "run", "--resume"],
    ],
    ids=" ".join,
)
def test_no_place_to_write_is_taken_from_a_checkpoints_folder(
    what: list[str], config: TrainConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    """The checkpoint may be a stranger's. Tracking is kept where the run's own folder is the output."""
    own = as_toml(RECIPE, replace(config, track=("tensorboard",)))
    Path("run/config.toml").write_text(PLACES + own)
    found = asked(capsys, *what)[1]
    tracked = what[-1] == "--resume"
    assert found == replace(config, track=("tensorboard",) if tracked else ())
    assert (found.profile, found.output, found.resume) == (None, None, None)
    given = ["--profile", "mine", "--track", "tensorboard"]
    assert asked(capsys, *what, *given)[1] == replace(config, track=("tensorboard",), profile=Path("mine"))
    Path("run/config.toml").write_text(PLACES.replace("profile", "'profile'") + own)  # as TOML may write a name
    assert asked(capsys, *what)[1].profile is None


@pytest.mark.exhaustive
def test_places_of_a_file_that_the_user_names_are_taken(
    config: TrainConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("mine.toml").write_text('profile = "mine"\ntrack = ["tensorboard"]\n')
    _, found = asked(capsys, "--resume", "run", "--config", "mine.toml")
    assert (found.profile, found.track) == (Path("mine"), ("tensorboard",))


def test_a_resumed_run_without_its_tracker_says_so(config: TrainConfig) -> None:
    corpus = find_corpus(Path("text.txt"))
    before = Run(
        recipe=RECIPE,
        config=replace(config, track=("tensorboard",)),
        corpus=corpus,
        pp=2,
        dp=2,
        tp=1,
        folder=Path("run"),
    )
    saved = json.loads(json.dumps(describe_run(before, 4, 5.5)))
    assert check_same_run(saved, replace(before, config=config)) == ["track is [], and was ['tensorboard']"]


@pytest.mark.exhaustive
def test_where_there_is_no_run_yet_one_begins(config: TrainConfig, capsys: pytest.CaptureFixture[str]) -> None:
    found = asked(capsys, "--output", "new", "--resume", "--data.path", "text.txt")
    assert found[0] == "llama-tiny" and found[1].steps == recipe("llama-tiny").steps


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--seed", "5"], "saved with seed 3, but this run has 5;"),
        (["--model.num-layers", "4"], "saved with model.num_layers 2, but this run has 4;"),
        (["--data.batch-size", "8"], "saved with data.batch_size 4, but this run has 8;"),
        (["--data.path", "longer.txt"], "data with tokens 1001, but longer.txt has 1005;"),
        (["--data.path", "other.txt"], "data with sha256 "),
        (["llama-tiny"], "config run/config.toml is of the recipe qwen3-tiny, but llama-tiny is asked for;"),
    ],
    ids=["seed", "model", "batch", "more-text", "other-text", "recipe"],
)
def test_options_that_make_another_run_are_refused(
    given: list[str], said: str, config: TrainConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("longer.txt").write_text(f"{TEXT}more")
    Path("other.txt").write_text(TEXT.upper())
    recipes, options = (given, []) if given == ["llama-tiny"] else ([], given)
    with pytest.raises(SystemExit) as ended:
        main(["train", *recipes, "--output", "run", "--resume", *options])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("weft train: ") and said in line


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ('"step": 3,', '"stdp": 3,', "metrics.jsonl, line 3 is not as it was written;"),
        ('"step": 3,', '"step": 3.', "metrics.jsonl, line 3 is not as it was written;"),
        ('"step": 3,', '"step": 7,', "metrics.jsonl, line 3 is of step 7, but follows 2;"),
    ],
    ids=["key", "comma", "number"],
)
def test_metrics_with_a_flipped_bit_are_refused_and_left(
    before: str, after: str, said: str, config: TrainConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    written = "".join(f"{json.dumps(asdict(some_metrics(step=step)))}\n" for step in range(1, 7)).replace(before, after)
    Path("run/metrics.jsonl").write_text(written)
    with pytest.raises(SystemExit) as ended:
        main(["train", "--output", "run", "--resume"])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"weft train: run/{said}")
    assert Path("run/metrics.jsonl").read_text() == written


@pytest.mark.exhaustive
@pytest.mark.parametrize("left", [0, 40, None], ids=["empty", "in-line-1", "missing"])
def test_metrics_that_are_lost_are_not_taken_for_none_yet(
    left: int | None, config: TrainConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    results = Results(Path("run"), writes=True)
    for step in range(1, 7):
        results.add(some_metrics(step=step))
    run = Run(recipe=RECIPE, config=config, corpus=find_corpus(Path("text.txt")), dp=2, tp=1, folder=Path("run"))
    save_checkpoint(make_model(SMALL), "run/checkpoint-6", run=describe_run(run, 6, 5.5, results.logged))
    asked(capsys, "--output", "run", "--resume")
    Path("run/metrics.jsonl").unlink() if left is None else os.truncate("run/metrics.jsonl", left)
    with pytest.raises(SystemExit) as ended:
        main(["train", "--output", "run", "--resume"])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"weft train: run/metrics.jsonl has {left or 0} bytes, but its 6 lines had ")
    assert line.endswith("; copy the file again, or resume into a new folder with --resume PATH --output FOLDER")
    asked(capsys, "--resume", "run/checkpoint-6", "--output", "other")


@pytest.mark.exhaustive
def test_a_flipped_bit_in_the_options_of_the_run_is_refused(
    config: TrainConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path("run/config.toml")
    with Results(Path("run"), writes=True) as results:
        results.begin(RECIPE, replace(config, resume="newest"), ParallelPlan(), ProcessMesh.grid(dp=1), [], step=4)
    assert asked(capsys, "--output", "run", "--resume") == (RECIPE, config)
    written = path.read_text()
    path.write_text(written.replace("lr = 0.001", "lr = 0.005"))
    with pytest.raises(SystemExit) as ended:
        main(["train", "--output", "run", "--resume"])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        "weft train: config run/config.toml was changed after it was written; copy it again, or remove its last "
        "line if the change is meant"
    )
    path.write_text(path.read_text().partition("# sha256")[0])
    assert asked(capsys, "--output", "run", "--resume")[1].optimizer.lr == 0.005


@pytest.mark.exhaustive
def test_each_flipped_bit_in_the_options_is_found_or_changes_none(
    portion: Portion, config: TrainConfig, tmp_path: Path
) -> None:
    path, options = tmp_path / "config.toml", as_toml(RECIPE, config)
    whole = add_checksum(options).encode()
    path.write_bytes(whole)
    check_sum(path)
    for place in portion.of(range(len(whole)), every=8):
        content = bytearray(whole)
        content[place] ^= 1 << place % 8
        path.write_bytes(content)
        try:
            check_sum(path)
        except ValueError as error:
            assert f"config {path} was changed after it was written" in str(error)
        else:
            assert content.startswith(options.encode())


def test_a_checkpoint_has_the_versions_of_what_saved_it(config: TrainConfig) -> None:
    found = read_run("run/checkpoint-4")["versions"]
    assert found["python"] == platform.python_version() and found["torch"] == torch.__version__
    assert found.keys() >= {"weft-mesh", "weft-reshard", "weft-kernels", "weft-models", "triton"}
    for package in found.keys() - {"python", "torch"}:
        try:
            assert found[package] == version(package)
        except PackageNotFoundError:
            assert found[package] is None


@pytest.mark.exhaustive
def test_a_checkpoint_goes_on_in_a_folder_of_its_own(config: TrainConfig, capsys: pytest.CaptureFixture[str]) -> None:
    assert asked(capsys, "--resume", "run/checkpoint-4", "--output", "other") == (RECIPE, config)


@pytest.mark.exhaustive
def test_no_checkpoint_is_written_anew(config: TrainConfig, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree("run/checkpoint-4", "run/checkpoint-6")
    with pytest.raises(SystemExit):
        main(["train", "--resume", "run/checkpoint-4"])
    assert "run/checkpoint-6 is newer than run/checkpoint-4" in capsys.readouterr().err


@pytest.mark.few(1)
@pytest.mark.parametrize("damaged", ["part-00000.safetensors", "manifest.json"])
def test_a_damaged_checkpoint_is_passed_by_and_named(
    damaged: str, config: TrainConfig, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree("run/checkpoint-4", "run/checkpoint-6")
    Path(f"run/checkpoint-6/{damaged}").unlink()
    launched = list[Run]()
    monkeypatch.setattr("weft.models.cli.train.launch", lambda run, gpus: launched.append(run))
    with pytest.raises(SystemExit):
        main(["train", "--output", "run", "--resume"])
    assert launched[0].resume == Path("run/checkpoint-4")
    said = capsys.readouterr().out
    assert f"run/checkpoint-6/{damaged} is missing" in said or "checkpoint-6 is no complete checkpoint" in said
    assert "goes on from run/checkpoint-4\n" in said


@pytest.mark.exhaustive
def test_a_text_that_was_moved_is_the_same(config: TrainConfig, capsys: pytest.CaptureFixture[str]) -> None:
    Path("text.txt").rename("moved.txt")
    asked(capsys, "--output", "run", "--resume", "--data.path", "moved.txt")


def test_a_run_that_was_killed_before_it_had_its_config_begins(tmp_path: Path) -> None:
    (tmp_path / ".config.toml").write_text("rec")
    check_resumable(tmp_path)
    (tmp_path / "notes.txt").write_text("of somebody")
    with pytest.raises(ValueError, match="is not the folder of a run"):
        check_resumable(tmp_path)


def test_a_mesh_that_is_another_is_said_with_the_sizes_of_both(config: TrainConfig) -> None:
    """Also where neither run was given sizes."""
    corpus = find_corpus(Path("text.txt"))
    before = replace(config, mesh=MeshConfig(), plan=PlanConfig(microbatches=2))
    runs = [
        Run(recipe=RECIPE, config=before, corpus=corpus, dp=dp, tp=tp, folder=Path("run"))
        for dp, tp in ((2, 2), (4, 1))
    ]
    assert check_same_run(describe_run(runs[0], 4, 5.5), runs[1]) == [
        "mesh.dp is 4, and was 2",
        "mesh.tp is 1, and was 2",
    ]
    assert check_same_run(describe_run(runs[0], 4, 5.5), runs[0]) == []


@pytest.mark.parametrize(("first_step", "fits"), [(0, True), (7, True), (8, False), (12, False)])
def test_a_profile_needs_five_steps_after_the_checkpoint(config: TrainConfig, first_step: int, fits: bool) -> None:
    config = replace(config, profile=Path("traces"))
    corpus = find_corpus(Path("text.txt"))
    run = Run(recipe=RECIPE, config=config, corpus=corpus, pp=2, dp=2, tp=1, folder=Path("run"))
    if fits:
        check_profile(run, first_step)
        return
    with pytest.raises(TrainingError) as caught:
        check_profile(run, first_step)
    assert str(caught.value) == (
        f"--profile traces steps 3 to 5 of this process, and {12 - first_step} of 12 steps are left after step "
        f"{first_step}; raise --steps to {first_step + 5}, or leave out --profile"
    )


@pytest.mark.parametrize(
    "what", [["--resume", "run"], ["--output", "run", "--resume"], ["--resume", "run/checkpoint-4", "--output", "new"]]
)
def test_fewer_steps_than_the_checkpoint_has_are_refused_before_anything_is_written(
    what: list[str], config: TrainConfig, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.models.cli.train.launch", lambda *_, **__: pytest.fail("a run was started"))
    before = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    with pytest.raises(SystemExit) as ended:
        main(["train", *what, "--steps", "3"])
    assert ended.value.code == 2
    assert capsys.readouterr().err == (
        "weft train: --steps is 3, but run/checkpoint-4 was saved after step 4; give --steps above 4, or resume an "
        "earlier checkpoint into a folder of its own with --resume PATH --output FOLDER\n"
    )
    assert {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(("steps", "done"), [("4", True), ("5", False)])
def test_a_run_without_steps_left_says_so_first(
    steps: str, done: bool, config: TrainConfig, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.models.cli.train.launch", lambda *_, **__: 0)
    with pytest.raises(SystemExit):
        main(["train", "--resume", "run", "--steps", steps])
    said = "all 4 steps are done; give --steps above 4 to go on; the final model is saved again\n"
    assert (said in capsys.readouterr().out) is done
