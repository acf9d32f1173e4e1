"""Parts of a training run: mesh, data and optimizer."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from weft.mesh import Layout, ProcessMesh, Replicate, Shard
from weft.models import Llama, initialize, parallelize
from weft.models.cli.train import _complete_run
from weft.models.data.text import Corpus
from weft.models.families import make_model
from weft.models.parallel import ParallelPlan
from weft.models.rope_scaling import DynamicRopeScaling
from weft.models.step.find_gradients import clip_gradients
from weft.models.train.config import DataConfig, MeshConfig, OptimizerConfig, TrainConfig, learning_rate
from weft.models.train.folder import check_new, find_checkpoint
from weft.models.train.measure import CollectiveCount
from weft.models.train.recipes import RECIPES, recipe
from weft.models.train.report import opening_lines
from weft.models.train.results import Results
from weft.models.train.run import Run, mesh_sizes
from weft.reshard import distribute, to_global


@pytest.mark.parametrize(
    ("dp", "tp", "processes", "exact", "sizes"),
    [
        pytest.param(None, None, 1, False, (1, 1), id="one-gpu"),
        pytest.param(None, None, 4, False, (2, 2), id="four"),
        pytest.param(None, None, 3, False, (3, 1), id="odd"),
        pytest.param(4, None, 4, False, (4, 1), id="dp-alone"),
        pytest.param(None, 4, 8, False, (2, 4), id="tp-alone"),
        pytest.param(1, 2, 4, False, (1, 2), id="fewer-than-there-are"),
        pytest.param(1, 2, 2, True, (1, 2), id="launched"),
    ],
)
def test_the_mesh_follows_from_the_processes(
    dp: int | None, tp: int | None, processes: int, exact: bool, sizes: tuple[int, int]
) -> None:
    assert mesh_sizes(MeshConfig(dp=dp, tp=tp), processes, every_process=exact) == (sizes[0], 1, sizes[1])


@pytest.mark.parametrize(
    ("mesh", "processes", "sizes"),
    [
        pytest.param({"cp": 2}, 4, (1, 2, 2), id="tp-from-the-rest"),
        pytest.param({"cp": 4}, 4, (1, 4, 1), id="cp-alone"),
        pytest.param({"cp": 2, "tp": 1}, 4, (2, 2, 1), id="dp-from-the-rest"),
        pytest.param({"dp": 1, "cp": 3, "tp": 1}, 4, (1, 3, 1), id="fewer-than-there-are"),
    ],
)
def test_the_mesh_has_a_context_axis_where_it_is_asked_for(mesh, processes: int, sizes: tuple[int, int, int]) -> None:
    assert mesh_sizes(MeshConfig(**mesh), processes, every_process=False) == sizes


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        pytest.param({"cp": 3}, r"mesh cp=3 does not fit 4 processes; cp that fit: 1, 2, 4$", id="cp"),
        pytest.param({"cp": 8}, r"mesh cp=8 does not fit 4 processes; cp that fit: 1, 2, 4$", id="too-many"),
        pytest.param({"dp": 4, "cp": 2}, r"dp=4 x cp=2 .*; beside cp=2, dp x tp that fit: 2 x 1, 1 x 2$", id="dp"),
    ],
)
def test_a_context_axis_that_does_not_fit_names_what_does(mesh, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mesh_sizes(MeshConfig(**mesh), 4, every_process=False)


@pytest.mark.parametrize(
    ("dp", "tp", "processes", "exact"),
    [
        pytest.param(3, None, 4, False, id="does-not-divide"),
        pytest.param(8, None, 4, False, id="too-many"),
        pytest.param(4, 2, 4, False, id="product-too-large"),
        pytest.param(1, 2, 4, True, id="launched-with-others"),
    ],
)
def test_a_mesh_that_does_not_fit_names_those_that_do(dp: int, tp: int | None, processes: int, exact: bool) -> None:
    with pytest.raises(ValueError, match=r"does not fit 4 processes; dp x tp that fit: 4 x 1, 2 x 2, 1 x 4"):
        mesh_sizes(MeshConfig(dp=dp, tp=tp), processes, every_process=exact)


@pytest.mark.parametrize("name", RECIPES)
def test_the_number_of_parameters_is_the_models(name: str) -> None:
    config = recipe(name).model
    with torch.device("meta"):
        model = make_model(config)
    assert sum(p.numel() for p in model.parameters()) == config.num_parameters


@pytest.mark.parametrize(
    ("make", "message"),
    [
        pytest.param(lambda: MeshConfig(dp=0), r"mesh\.dp is 0; it must be 1 or more", id="mesh"),
        pytest.param(lambda: DataConfig(batch_size=0), r"data\.batch_size is 0", id="batch"),
        pytest.param(lambda: OptimizerConfig(lr=float("nan")), r"optimizer\.lr is nan", id="lr"),
        pytest.param(
            lambda: TrainConfig(model=recipe("gpt-tiny").model, data=DataConfig(sequence_length=257)),
            r"data\.sequence_length 257 is above model\.max_seq_len 256, "
            r"and a GPT-2 with a larger max_seq_len is another model",
            id="sequence",
        ),
        pytest.param(
            lambda: TrainConfig(
                model=replace(recipe("llama-tiny").model, rope_scaling=DynamicRopeScaling(factor=2.0)),
                data=DataConfig(sequence_length=257),
            ),
            r"data\.sequence_length 257 is above model\.max_seq_len 256, "
            r"and a Llama with a larger max_seq_len is another model",
            id="sequence-of-dynamic-rope",
        ),
    ],
)
def test_a_config_is_checked_when_it_is_made(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("name", ["llama-tiny", "qwen3-tiny", "llama3.2-1b"])
def test_a_rotary_model_states_the_length_of_training(name: str) -> None:
    """`generate`, and readers of config.json, then take contexts of this length."""
    config = recipe(name)
    longer = config.model.max_seq_len + 1
    made = replace(config, data=replace(config.data, sequence_length=longer))
    assert made.model == replace(config.model, max_seq_len=longer)
    assert replace(made, data=config.data).model.max_seq_len == longer, "one that was asked for stays"


@pytest.mark.exhaustive
def test_a_run_on_longer_sequences_says_that_its_model_is_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("warp and weft. " * 2000)
    run, _ = _complete_run(["--data.path", "text.txt", "--data.sequence-length", "512"], None)
    assert run.config.model.max_seq_len == 512
    assert run.notes == ("model.max_seq_len is 512, as data.sequence_length; llama-tiny has 256",)
    usual, _ = _complete_run(["--data.path", "text.txt"], None)
    assert usual.notes == ()


@pytest.mark.parametrize(
    ("pictures", "said"),
    [
        pytest.param("", [], id="none"),
        pytest.param("a", ["skipped 1 file, not UTF-8 text: a.png"], id="one"),
        pytest.param("abcd", ["skipped 4 files, not UTF-8 text: a.png, b.png, c.png, ..."], id="many"),
    ],
)
def test_left_out_files_are_said(pictures: str, said: list[str]) -> None:
    corpus = Corpus("a text", (), 10, skipped=tuple(Path(f"{name}.png") for name in pictures))
    run = Run(recipe="llama-tiny", config=recipe("llama-tiny"), corpus=corpus, dp=1, tp=1, folder=Path("out"))
    assert opening_lines(run, gpus=0).splitlines()[1:] == said


@pytest.mark.parametrize(
    ("folder", "wrong"),
    [
        pytest.param("new", None, id="new"),
        pytest.param("deep/er/new", None, id="with-those-above-it"),
        pytest.param("here/new", None, id="below-one-that-is-there"),
        pytest.param("here", "here exists; give another with --output, remove it", id="there"),
        pytest.param(
            "/proc/weft", "/proc/weft cannot be made: .*; give another with --output", id="nobody-writes-there"
        ),
        pytest.param("file/new", "file/new cannot be made: .*; give another with --output", id="below-a-file"),
    ],
)  # fmt: skip
def test_whether_a_folder_can_be_made_is_told_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, wrong: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    (tmp_path / "file").touch()
    with nullcontext() if wrong is None else pytest.raises(ValueError, match=f"the output folder {wrong}"):
        check_new(Path(folder))
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "here"]


def test_of_two_runs_that_begin_at_once_one_has_the_folder(tmp_path: Path) -> None:
    """Both have found that the folder can be made."""
    config, mesh = recipe("llama-tiny"), ProcessMesh.grid(dp=1)
    with Results(tmp_path / "run", writes=True) as first, Results(tmp_path / "run", writes=True) as second:
        first.begin("llama-tiny", config, ParallelPlan(), mesh, [])
        with pytest.raises(ValueError, match=f"the output folder {tmp_path}/run exists; give another with --output"):
            second.begin("llama-tiny", config, ParallelPlan(), mesh, [])


@pytest.mark.parametrize(
    ("there", "found"),
    [
        pytest.param(["config.json", "checkpoint", "checkpoint-5"], "checkpoint", id="a-run"),
        pytest.param(["config.json", "checkpoint-5", "checkpoint-10"], "checkpoint-10", id="a-run-that-stopped"),
        pytest.param(["config.json", "model.safetensors"], "", id="a-checkpoint"),
    ],
)
def test_the_last_checkpoint_of_a_run_is_found(tmp_path: Path, there: list[str], found: str) -> None:
    for name in there:
        (tmp_path / name).mkdir() if name.startswith("checkpoint") else (tmp_path / name).touch()
    assert find_checkpoint(tmp_path) == tmp_path / found


def test_the_learning_rate_warms_up_and_decays_to_a_tenth() -> None:
    config = OptimizerConfig(lr=1.0, warmup_steps=4)
    rates = [learning_rate(config, step, 20) for step in range(21)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert rates[20] == pytest.approx(0.1)


def clipped(max_norm: float) -> tuple[float, list[torch.Tensor]]:
    mesh = ProcessMesh.grid(dp=2, tp=2)
    model = Llama(recipe("llama-tiny").model)
    initialize(model, seed=0)
    model = parallelize(model, mesh, model.parallel_plan())
    gradients = whole_gradients(model)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        placements = {"tp": parameter.placements[1]}
        parameter.grad = distribute(gradient, Layout(mesh, {"dp": Replicate(), **placements}))
    norm = clip_gradients(model, max_norm)
    return norm, [to_global(parameter.grad) for parameter in model.parameters()]


def whole_gradients(model: nn.Module) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(p.shape, generator=generator) for p in model.parameters()]


@pytest.mark.exhaustive
@pytest.mark.parametrize("max_norm", [1.0, 1e9])
def test_the_gradients_norm_counts_every_element_once(max_norm: float, pool) -> None:
    model = Llama(recipe("llama-tiny").model)
    for parameter, gradient in zip(model.parameters(), whole_gradients(model), strict=True):
        parameter.grad = gradient
    expected = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    for norm, gradients in pool.run(clipped, max_norm, ranks=4):
        assert norm == pytest.approx(float(expected), rel=1e-5)
        for ours, parameter in zip(gradients, model.parameters(), strict=True):
            torch.testing.assert_close(ours, parameter.grad, rtol=1e-5, atol=0)


def hidden_collectives() -> list[Counter[str]]:
    mesh = ProcessMesh.grid(tp=2)
    rows, columns = (distribute(torch.ones(4, 4), Layout(mesh, {"tp": Shard(dim)})) for dim in (0, 1))
    counts = []
    for act in (lambda: rows + columns, lambda: rows.full_tensor(), lambda: rows + rows):
        with CollectiveCount() as count:
            act()
        counts.append(count.issued)
    return counts


def test_the_count_sees_what_dtensor_issues_unasked(pool) -> None:
    for hidden, gathered, none in pool.run(hidden_collectives, ranks=2):
        assert hidden.total() == 1
        assert gathered == Counter({"all-gather": 1})
        assert none == Counter()


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("options", "said"),
    [
        pytest.param(
            "--steps 5", "warmup_steps is 20, above steps 5: the learning rate reaches 0.00075 of 0.003", id="default"
        ),
        pytest.param("--steps 1", "warmup_steps is 20, above steps 1", id="one-step"),
        pytest.param(
            "--steps 30 --optimizer.warmup-steps 31 --optimizer.lr 0.31",
            "warmup_steps is 31, above steps 30: the learning rate reaches 0.3 of 0.31",
            id="one-too-many",
        ),
        pytest.param("--steps 20", None, id="ends-with-it"),
        pytest.param("--steps 1 --optimizer.warmup-steps 0", None, id="none"),
    ],
)  # fmt: skip
def test_a_warmup_that_is_longer_than_the_run_is_said(
    options: str, said: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("warp and weft. " * 2000)
    run, _ = _complete_run(["--data.path", "text.txt", *options.split()], None)
    assert len(run.notes) == (said is not None)
    assert said is None or said in run.notes[0]
