"""`parallelize` frees the parameters of the single-device model at once, without the garbage collector."""

from __future__ import annotations

import gc
import math
import weakref
from dataclasses import replace
from typing import Any

import pytest
from weft.mesh import ProcessMesh
from weft.models import ExpertPlan, PipelinePlan, lora, parallelize
from weft.models.families import make_model

from tests.models.test_every_mesh import FAMILIES
from tests.support.pool import Pool


def held(axes: dict[str, int], family: str, plan: dict[str, Any], adapters: bool) -> list[str]:
    """The names of the model's first parameters which are alive after parallelize, and not of the parallel model."""
    model = make_model(FAMILIES[family])
    if adapters:
        lora(model, 2, 4.0, ["layers.*.mlp.up_proj"])
    first = {name: weakref.ref(parameter) for name, parameter in model.named_parameters()}
    gc.collect()
    gc.disable()
    try:
        pipeline = PipelinePlan(microbatches=2) if "pp" in axes else None
        parallelize(model, ProcessMesh.grid(**axes), replace(model.parallel_plan(), **plan, pipeline=pipeline))
        kept = {id(parameter) for parameter in model.parameters()}
        return [name for name, each in first.items() if each() is not None and id(each()) not in kept]
    finally:
        gc.enable()


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("axes", "family", "plan", "adapters"),
    [
        pytest.param({"dp": 2}, "llama", {}, False, id="dp"),
        pytest.param({"dp": 2}, "llama", {"zero": 3, "recompute": "full"}, False, id="zero3"),
        pytest.param({"tp": 2}, "llama", {"sequence": True}, True, id="tp-adapters"),
        pytest.param({"cp": 2}, "llama", {"context": "all_gather", "recompute": "selective"}, False, id="cp"),
        pytest.param({"dp": 2}, "llama", {"exact": {"dp": 2}}, False, id="exact"),
        pytest.param({"pp": 2}, "llama", {}, False, id="pp"),
        pytest.param({"pp": 2, "dp": 2}, "qwen2", {"zero": 2}, False, id="pp-tied"),
        pytest.param({"dp": 2}, "mixtral", {"experts": ExpertPlan(size=2)}, False, id="experts"),
    ],
)
def test_nothing_holds_the_model_before(
    axes: dict[str, int], family: str, plan: dict[str, Any], adapters: bool, pool: Pool
) -> None:
    for names in pool.run(held, axes, family, plan, adapters, ranks=math.prod(axes.values())):
        assert not names
