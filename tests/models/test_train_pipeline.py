"""`weft train` on stages: the losses of a mesh without stages, and refusals before any process starts."""

from __future__ import annotations

import contextlib
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from weft.models import LlamaConfig, PipelinePlan
from weft.models.cli import main
from weft.models.data.text import find_corpus
from weft.models.losses import local_value
from weft.models.step.memory import predict_memory
from weft.models.train.config import DataConfig, MeshConfig, PlanConfig, TrainConfig
from weft.models.train.loop import find_parameter_layouts, train
from weft.models.train.report import ParameterLayout, Report
from weft.models.train.run import Run, complete_plan, mesh_sizes
from weft.models.train.trainer import Trainer

MODEL = LlamaConfig(
    vocab_size=257, hidden_size=16, intermediate_size=24, num_layers=4, num_heads=4, dropout=0.1, tie_embeddings=True
)


def config(mesh: dict[str, int], plan: dict[str, Any], **options: Any) -> TrainConfig:
    settled: dict[str, Any] = {"model": MODEL, "steps": 4, "check": False, **options}
    data = DataConfig(batch_size=8, sequence_length=8)
    whole = TrainConfig(**settled, data=data, mesh=MeshConfig(**mesh), plan=PlanConfig(**plan))
    dp, cp, tp = mesh_sizes(whole.mesh, 8, every_process=False)
    return replace(whole, plan=complete_plan(whole.plan, whole, dp=dp, cp=cp, tp=tp))


FEW_LAYERS = replace(MODEL, num_layers=2)
# A shard and a whole of it differ in hundredths of a MiB.
WIDE = replace(FEW_LAYERS, hidden_size=64, intermediate_size=96)


def made_run(text: str, mesh: dict[str, int], plan: dict[str, Any], **options: Any) -> Run:
    folder, sizes = Path(text).parent / "run", {"dp": 1, "tp": 1, **mesh}
    settled = config(mesh, plan, model=options.pop("model", FEW_LAYERS), **options)
    return Run(recipe="llama-tiny-tied", config=settled, corpus=find_corpus(Path(text)), folder=folder, **sizes)


def trained(text: str, mesh: dict[str, int], plan: dict[str, Any], options: dict[str, Any]) -> list[float]:
    """The held-out loss, the losses of two steps, and the held-out loss again."""
    made = Trainer(made_run(text, mesh, plan, **options), torch.device("cpu"))
    lines: list[str] = []
    made.report.print_line = lines.append  # type: ignore[method-assign]
    first = made.held_out_loss()
    made.first_step()
    made.step(1)
    if made.pipeline is not None:
        title, heads, *rows = lines[-1].splitlines()
        assert title.startswith("held by each rank") and len(rows) == made.mesh.size
        assert heads.split("  ")[-4:] == ["parameters", "gradients", "optimizer state", "in flight"]
        parts = find_parameter_layouts(made)
        assert {part.name for part in parts} == {name for name, _ in made._outline.make_model().named_parameters()}
        assert [part.stage_rank for part in parts] == sorted(int(part.stage_rank or 0) for part in parts)
        said = predict_memory(made._outline.make_model(), made.mesh, made.plan, rank=made.rank)
        states = [each for state in made.optimizer.state.values() for each in state.values() if each.numel() > 1]
        assert said.parameters == sum(local_value(each).nbytes for each in made.model.parameters())
        assert said.states == sum(local_value(each).nbytes for each in states)
        in_mib = [f"{nbytes / 2**20:.2f}" for nbytes in (said.parameters, said.gradients, said.states)]
        stage = made.rank // (made.mesh.size // 2)
        in_flight = 2 - stage if made.plan.pipeline.schedule == "1f1b" else 2
        assert rows[made.rank].split() == ["rank", str(made.rank), *in_mib, str(in_flight)]
    if made.rank == 0:
        assert [line.split()[-2:] for line in lines if line.endswith("as predicted")] == [["as", "predicted"]] * 3
        assert not any("NOT as predicted" in line for line in lines)
    losses = [metrics.loss for metrics in made.read_metrics()]
    return [first, *losses, made.held_out_loss()]


def test_a_layout_says_on_which_stages_a_parameter_lies(capsys: pytest.CaptureFixture[str]) -> None:
    names = {0: ("embed.weight", "layers.0.up.weight"), 1: ("layers.1.up.weight", "embed.weight", "norm.weight")}
    parts = [
        ParameterLayout(name=name, shape=(4, 2), layout=None, stage_rank=at)
        for at, held in names.items()
        for name in held
    ]
    Report(enabled=True).print_layout(parts)
    rows = [line.split("  ") for line in capsys.readouterr().out.splitlines()[1:]]
    assert [row[1] for row in rows] == ["embed.weight", "layers.*.up.weight", "norm.weight"]
    assert [row[-1] for row in rows] == ["on pp=0, 1", "on pp=0, 1", "on pp=1"]
    assert "[4, 2] x 2" in rows[1]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("dp", "plan", "model"),
    [
        pytest.param(2, {"split": "1,3", "zero": 2}, MODEL, id="dp2-zero2", marks=pytest.mark.exhaustive),
        pytest.param(2, {"zero": 1}, WIDE, id="dp2-zero1", marks=pytest.mark.exhaustive),
        pytest.param(2, {"zero": 3}, WIDE, id="dp2-zero3", marks=pytest.mark.exhaustive),
        pytest.param(1, {"schedule": "zero_bubble"}, WIDE, id="zero-bubble"),
    ],
)
def test_one_loss_with_stages_and_without(
    dp: int, plan: dict[str, Any], model: LlamaConfig, pool, tmp_path: Path
) -> None:
    (tmp_path / "text.txt").write_text("a stage gives what the next one takes " * 30)
    text = str(tmp_path / "text.txt")
    options, axes = {"model": model}, {"pp": 2, "dp": dp, "tp": 1}
    (alone,) = pool.run(trained, text, {"dp": 1, "tp": 1}, {"microbatches": 4}, options, ranks=1)
    for found in pool.run(trained, text, axes, {"microbatches": 4, **plan}, options, ranks=2 * dp):
        assert found == pytest.approx(alone, rel=1e-5)


@pytest.mark.exhaustive  # the sample has the float32 loss
def test_one_loss_in_bfloat16(pool, tmp_path: Path) -> None:
    """Within bfloat16's 8 bits, of losses in which tokens' errors average out."""
    (tmp_path / "text.txt").write_text("a stage gives what the next one takes " * 30)
    text, plan, options = str(tmp_path / "text.txt"), {"microbatches": 4}, {"dtype": "bfloat16"}
    (alone,) = pool.run(trained, text, {"dp": 1, "tp": 1}, plan, options, ranks=1)
    for found in pool.run(trained, text, {"pp": 2, "dp": 1, "tp": 1}, plan, options, ranks=2):
        assert found == pytest.approx(alone, rel=1e-3)


def ran(text: str) -> tuple[int, str]:
    """The exit status of a run, and its output."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        ended = train(made_run(text, {"pp": 2, "dp": 1, "tp": 1}, {"zero": 0}, steps=2), torch.device("cpu"))
    return ended, printed.getvalue()


@pytest.mark.exhaustive
def test_a_run_prints_its_schedule_and_saves_what_generate_reads(pool, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "text.txt").write_text("a stage gives what the next one takes " * 30)
    (ended, printed), other = pool.run(ran, str(tmp_path / "text.txt"), ranks=2)
    assert ended == 0 and other == (0, "")
    assert "layout of the parameters" in printed
    assert f"W gradients of weights, · idle\n{PipelinePlan(schedule='1f1b').make_schedule(2)}\n" in printed
    with pytest.raises(SystemExit, match="0"):
        main(["generate", str(tmp_path / "run"), "--prompt", "a stage", "--tokens", "3"])
    assert capsys.readouterr().out.startswith("a stage")


@pytest.mark.parametrize(
    ("mesh", "plan", "message"),
    [
        pytest.param({"pp": 5, "dp": 1, "tp": 1}, {}, "has 4 layers, which cannot be cut into 5 stages", id="stages"),
        pytest.param(
            {"pp": 4, "dp": 1, "tp": 1}, {"schedule": "interleaved"}, "into 8 stages; .* another schedule", id="chunks"
        ),
        pytest.param(
            {"pp": 2, "dp": 1, "tp": 1},
            {"microbatches": 3},
            "3 does not divide data.batch_size 8; .* 1, 2, 4, 8",
            id="rows",
        ),
        pytest.param(
            {"pp": 2, "dp": 1, "tp": 1},
            {"split": "1,2"},
            "gives 2 stages 3 layers; there are 2 stages and 4",
            id="counts",
        ),
        pytest.param(
            {"pp": 2, "dp": 1, "tp": 1}, {"split": "h.2"}, "names 'h.2', which is no layer .* nearest", id="split"
        ),
        pytest.param(
            {"dp": 2, "tp": 1}, {"schedule": "gpipe"}, "plan.schedule is gpipe, .* set --mesh.pp above 1", id="no-pp"
        ),
        pytest.param(
            {"pp": 3, "tp": 1}, {}, "mesh pp=3 x tp=1 does not fit 8 processes; pp that fit: 1, 2, 4, 8", id="mesh"
        ),
    ],
)
def test_bad_input_before_any_process(mesh: dict[str, int], plan: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(mesh, plan)


def test_schedule_and_microbatches_follow_from_the_mesh() -> None:
    assert config({"dp": 1, "tp": 1}, {}).plan.pipeline(1) is None
    found = config({"pp": 2, "dp": 2, "tp": 1}, {}).plan
    assert found.pipeline(2) == PipelinePlan(schedule="1f1b", microbatches=4)
    assert config({"pp": 2, "dp": 1, "tp": 1}, {"split": "3,1"}).plan.pipeline(2).split == (3, 1)
