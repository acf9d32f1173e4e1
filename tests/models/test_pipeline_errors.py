"""Invalid pipelines: one clear error, before any process group is used."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from weft.kernels import cross_entropy
from weft.mesh import ProcessMesh
from weft.models import ParallelPlan, PipelinePlan, forward_backward, generate, lora, parallelize
from weft.models.cli import main

from tests.models.test_pipeline import batch, make
from tests.models.test_pipeline_own_model import Pair, Residual


class Skips(Residual):
    def forward(self, tokens: Tensor) -> Tensor:
        x, side = self.table(tokens), self.side(torch.arange(tokens.shape[1]))
        first, _ = self.blocks[0](x, side=side, seen=None)
        for block in self.blocks[1:]:
            x, _ = block(first + x, side=side, seen=None)
        return self.head(x)


EVEN = {"pp": 2}


@pytest.mark.parametrize(
    ("build", "axes", "pipeline", "message"),
    [
        pytest.param(
            Residual,
            {"pp": 5},
            {},
            "Residual has 4 layers, blocks.0 to blocks.3, and they cannot be cut into 5",
            id="stages",
        ),
        pytest.param(
            Residual,
            EVEN,
            {"split": (1, 2)},
            "split gives the stages 1, 2 layers, 3 in all; Residual has 4",
            id="counts",
        ),
        pytest.param(
            Residual, EVEN, {"split": (1, 2, 1)}, "split cuts Residual into 3 stages, and there are 2", id="many"
        ),
        pytest.param(
            Residual, EVEN, {"split": ("blocks.9",)}, "'blocks.9', which is no layer .* nearest names are", id="point"
        ),
        pytest.param(
            Residual, EVEN, {"split": ("blocks.0",)}, "the stages after the first begin at them", id="first-point"
        ),
        pytest.param(
            Residual, EVEN, {"split": "towers"}, "'towers', which is no list of layers of Residual", id="list"
        ),
        pytest.param(Pair, EVEN, {}, "by its list of layers, and Pair has no nn.ModuleList", id="no-list"),
        pytest.param(
            Skips, EVEN, {}, "cannot be cut between its layers: blocks.2 reads the output of blocks.0", id="skips"
        ),
        pytest.param(
            Residual,
            EVEN,
            {"schedule": "interleaved", "microbatches": 5},
            "5 cannot be divided into 2 rounds",
            id="rounds",
        ),
        pytest.param(
            Residual,
            EVEN,
            {"schedule": "zero_bubble", "chunks": 2},
            "has one stage on a rank, and chunks is 2",
            id="chunks",
        ),
    ],
)
def test_bad_input_is_one_clear_error(build: Any, axes: dict[str, int], pipeline: dict[str, Any], message: str) -> None:
    """Without any process group."""
    model = build()
    names = [name for name, _ in model.named_parameters()]
    with pytest.raises(ValueError, match=message):
        parallelize(model, ProcessMesh.grid(**axes), ParallelPlan(pipeline=PipelinePlan(**pipeline)))
    assert [name for name, _ in model.named_parameters()] == names


@pytest.mark.parametrize(
    ("axes", "plan", "message"),
    [
        pytest.param({"pp": 2}, {"zero": 1}, "shards over the axes of data, dp and cp, and .* has pp", id="no-data"),
        pytest.param(
            {"pp": 2, "dp": 2}, {"zero": 1, "zero_over": ("cp",)}, "over 'cp', which is not there", id="absent"
        ),
        pytest.param({"pp": 2, "dp": 2}, {"zero": 1, "zero_over": ("pp",)}, "over 'pp', which has the stages", id="pp"),
    ],
)
def test_sharding_over_an_axis_without_data(axes: dict[str, int], plan: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parallelize(Residual(), ProcessMesh.grid(**axes), ParallelPlan(pipeline=PipelinePlan(), **plan))


def test_microbatches_that_do_not_divide_the_batch() -> None:
    with pytest.raises(
        ValueError, match="3 microbatches do not divide the batch of 8 rows; numbers that do: 1, 2, 4, 8"
    ):
        forward_backward(make("llama"), cross_entropy, *batch(), microbatches=3)
    with pytest.raises(ValueError, match=r"has an axis 'pp', and the plan has no pipeline"):
        parallelize(make("llama"), ProcessMesh.grid(pp=2, dp=2))
    for wrong in ({"split": ()}, {"split": 3}, {"schedule": "2f2b"}, {"microbatches": 0}):
        with pytest.raises(ValueError, match="PipelinePlan: "):
            PipelinePlan(**wrong)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param("--mesh.pp 3 --mesh.tp 1", "mesh pp=3 x tp=1 does not fit", id="mesh"),
        pytest.param(
            "--mesh.pp 2 --model.num-layers 1", "has 1 layers, which cannot be cut into 2 stages", id="layers"
        ),
        pytest.param("--mesh.pp 2 --plan.split 1,2", "gives 2 stages 3 layers; there are 2 stages and 4", id="counts"),
        pytest.param("--mesh.pp 2 --plan.split layers.9", "names 'layers.9', which is no layer in a list", id="point"),
        pytest.param("--mesh.pp 2 --plan.split layers.1,2", "names '2', which is no layer in a list", id="mixed"),
        pytest.param("--mesh.pp 2 --plan.microbatches 3", "3 does not divide data.batch_size 8", id="microbatches"),
        pytest.param(
            "--mesh.pp 2 --plan.schedule interleaved --data.batch-size 10 --plan.microbatches 5",
            "5 cannot be divided into 2 rounds",
            id="rounds",
        ),
        pytest.param("--plan.schedule gpipe", "which needs a pipeline; set --mesh.pp above 1", id="no-pp"),
    ],
)
def test_the_command_ends_with_status_2(arguments: str, message: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["train", "llama-tiny", *arguments.split()])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def on_stages() -> str:
    """Calls that need the whole model are refused when the model is cut into stages."""
    model = parallelize(make("llama"), ProcessMesh.grid(pp=2), ParallelPlan(pipeline=PipelinePlan()))
    prompts = batch()[0]
    for act, kind, message in (
        (partial(model, prompts), RuntimeError, "the model is cut into 2 stages, of which this rank holds"),
        (partial(generate, model, prompts, max_new_tokens=1), ValueError, r"cut into stages.*save_pretrained\("),
        (partial(lora, model, 2, 4.0, ["layers.*.mlp.up_proj"]), ValueError, "add adapters before parallelize"),
    ):
        with pytest.raises(kind, match=message):
            act()
    return "raised"


def test_functions_of_the_whole_model_refuse_stages(pool: Any) -> None:
    assert pool.run(on_stages, ranks=2) == ["raised", "raised"]
