"""Dtypes between stages: of the loss, computed on the last stage only, and of parameters on a single stage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from weft.kernels import cross_entropy
from weft.mesh import ProcessMesh
from weft.models import PipelinePlan, forward_backward, parallelize
from weft.models.parallel.parallelize import pipeline_of

from tests.models.cases import SMALL, make, some_tokens
from tests.support.pool import Pool


def torchs(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())


def in_half(output: Tensor, targets: Tensor, denominator: Tensor | None = None) -> Tensor:
    return cross_entropy(output, targets, denominator=denominator).half()


def in_double(output: Tensor, targets: Tensor) -> Tensor:
    return torchs(output.double(), targets)


CASES = [
    pytest.param(torch.float32, torchs, torch.float32, id="as-the-model"),
    pytest.param(torch.float64, cross_entropy, torch.float64, id="float64"),
    pytest.param(torch.bfloat16, cross_entropy, torch.float32, id="wider-than-the-model"),
    pytest.param(torch.bfloat16, torchs, torch.float32, id="bfloat16"),
    pytest.param(torch.float32, in_half, torch.float32, id="narrower-than-the-model"),
    pytest.param(torch.float32, in_double, torch.float32, id="float64-of-a-criterion"),
]


def stepped(axes: dict[str, int], dtype: torch.dtype, criterion: Callable[..., Tensor], microbatches: int) -> Tensor:
    model, ids = make(SMALL).to(dtype), some_tokens(SMALL, 4, 9)
    if axes:
        plan = replace(model.parallel_plan(), pipeline=PipelinePlan(microbatches=microbatches))
        parallelize(model, ProcessMesh.grid(**axes), plan)
    return forward_backward(model, criterion, ids[:, :-1], ids[:, 1:], microbatches=microbatches).detach()


@pytest.mark.exhaustive
@pytest.mark.parametrize("axes", [{"pp": 2}, {"pp": 2, "dp": 2}], ids=str)
@pytest.mark.parametrize(("dtype", "criterion", "elsewhere"), CASES)
def test_a_loss_of_any_dtype_reaches_every_stage(
    dtype: torch.dtype, criterion: Callable[..., Tensor], elsewhere: torch.dtype, axes: dict[str, int], pool: Pool
) -> None:
    alone = stepped({}, dtype, criterion, 2)
    found = pool.run(stepped, axes, dtype, criterion, 2, ranks=ProcessMesh.grid(**axes).size)
    for loss in found:
        assert loss.item() == pytest.approx(alone.item(), rel=4 * torch.finfo(min(dtype, alone.dtype, key=_digits)).eps)
    assert found[-1].dtype == alone.dtype
    assert found[0].dtype == elsewhere  # where no loss is computed


def _digits(dtype: torch.dtype) -> float:
    return -torch.finfo(dtype).eps


def parameters_of_all_stages() -> dict[str, torch.dtype]:
    """The dtype of each parameter on a rank, for a bfloat16 model with a float32 last norm and head."""
    model = make(SMALL).bfloat16()
    model.norm.float()
    model.lm_head.float()
    parallelize(model, ProcessMesh.grid(pp=2), replace(model.parallel_plan(), pipeline=PipelinePlan(microbatches=2)))
    pipeline, truth = pipeline_of(model), make(SMALL)
    assert pipeline is not None, "the plan has one"

    def read(its: nn.Module, name: str) -> Tensor:
        return its.get_parameter(name)

    found = {}
    for name, expected in truth.named_parameters():
        whole = pipeline.whole_parameter(model, name, read)
        torch.testing.assert_close(whole, expected.detach().bfloat16().to(whole.dtype))
        found[name] = whole.dtype
    return found


def test_a_parameter_has_its_own_dtype_on_every_stage(pool: Pool) -> None:
    for found in pool.run(parameters_of_all_stages, ranks=2):
        assert found.pop("norm.weight") == torch.float32
        assert found.pop("lm_head.weight") == torch.float32
        assert set(found.values()) == {torch.bfloat16}
