"""Where a collective is issued: the module and the line, forward and backward, under every kind of plan."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from weft.mesh import ProcessMesh
from weft.models import Llama, LlamaConfig, ParallelPlan, record
from weft.models.cli.explain import complete_configuration
from weft.models.predict.golden import SitedCollectives, split_names
from weft.models.predict.rank_record import record_sites
from weft.models.step.record import StepShape
from weft.models.train.config import MeshConfig, PlanConfig
from weft.models.train.explanation import Outline
from weft.models.train.recipes import recipe
from weft.reshard import reshard

CONFIG = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2, max_seq_len=32
)


def issued(
    model: nn.Module, axes: dict[str, int], plan: ParallelPlan | None = None, **options: Any
) -> list[SitedCollectives]:
    plan = plan or model.parallel_plan()  # type: ignore[operator]
    shape = StepShape(batch=(4, 16), **options)
    return list(record_sites(model, ProcessMesh.grid(**axes), plan, shape).collectives)


def sums(collectives: list[SitedCollectives]) -> Counter[tuple[str, str, tuple[str, ...], str]]:
    """Collectives and bytes by phase, kind and axes."""
    found: Counter[tuple[str, str, tuple[str, ...], str]] = Counter()
    for each in collectives:
        number = 1 if each.modules is None else len([*split_names(each.modules)])
        found[each.phase, each.kind, each.axes, "count"] += each.count * number
        found[each.phase, each.kind, each.axes, "bytes"] += each.bytes * number
    return found


@pytest.mark.exhaustive
@pytest.mark.every_value
@pytest.mark.parametrize(
    ("mesh", "plan", "rank"),
    [
        pytest.param(MeshConfig(dp=2, tp=2), PlanConfig(), 0, id="tp"),
        pytest.param(MeshConfig(dp=2, tp=2), PlanConfig(sequence=True), 3, id="sequence"),
        pytest.param(MeshConfig(dp=2, tp=2), PlanConfig(zero=1), 1, id="zero1"),
        pytest.param(MeshConfig(dp=2, tp=2), PlanConfig(zero=3), 1, id="zero3"),
        pytest.param(MeshConfig(dp=2, tp=2), PlanConfig(zero=3, recompute="full"), 1, id="zero3-recompute"),
        pytest.param(MeshConfig(dp=2, tp=2), PlanConfig(recompute="selective", microbatches=2), 0, id="selective"),
        pytest.param(MeshConfig(dp=1, tp=2, cp=2), PlanConfig(), 1, id="context"),
        pytest.param(MeshConfig(dp=1, tp=1, cp=2), PlanConfig(context="ulysses"), 1, id="ulysses"),
        pytest.param(MeshConfig(dp=2, tp=1, pp=2), PlanConfig(schedule="zero_bubble"), 3, id="pipeline"),
    ],
)
def test_the_collectives_are_those_of_a_step_without_sites(mesh: MeshConfig, plan: PlanConfig, rank: int) -> None:
    config = recipe("llama-tiny")
    config, axes = complete_configuration("llama-tiny", replace(config, mesh=mesh, plan=plan), None)
    outline = Outline.of(config, axes)
    found = record_sites(outline.make_model(), outline.mesh, outline.plan, outline.step_shape(rank), clip_norm=1.0)
    expected: Counter[tuple[str, str, tuple[str, ...], str]] = Counter()
    for each in outline.record_step(rank, "cpu").communication.entries:
        expected[each.phase, each.kind, each.axes, "count"] += each.count
        expected[each.phase, each.kind, each.axes, "bytes"] += each.nbytes
    assert sums(list(found.collectives)) == +expected
    for each in found.collectives:
        assert each.file and each.line and each.code, each
        if not set(each.axes) & {"pp", "dp"} and each.phase == "backward":
            assert each.modules is not None, each
    assert not re.search(r"predict/|step/record", "".join(each.file for each in found.collectives))


def test_lines_of_weft_are_those_of_its_models() -> None:
    with torch.device("meta"):
        model = Llama(CONFIG)
    found = {(each.phase, each.modules): each for each in issued(model, {"tp": 2})}
    down = found["forward", "layers.[0-1].mlp.down_proj"]
    assert (down.kind, down.axes, down.count) == ("all-reduce", ("tp",), 1)
    assert down.file.endswith("weft/models/blocks.py") and "self.down_proj(" in down.code
    assert found["backward", "layers.[0-1].mlp"].code.startswith("return cast(Tensor, self.mlp_dropout(self.mlp(")


class Layer(nn.Module):
    """gathers: whether its forward gathers the input, whose backward then cuts. sums: in its own backward."""

    def __init__(self, gathers: bool = False, sums: bool = False) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.gathers, self.sums = gathers, sums

    def forward(self, x: Tensor) -> Tensor:
        if self.gathers:
            x = reshard(reshard(x, placements="dp: S(0), tp: S(1)"), placements="dp: S(0)")  # gathers
        x = self.inner(x)
        return _Sum.apply(x) if self.sums else x


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        assert isinstance(grad, DTensor)
        dist.all_reduce(grad.to_local(), group=grad.device_mesh.get_group("tp"))  # sums
        return grad


class Own(nn.Module):
    def __init__(self, *layers: Layer) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(layers)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for layer in self.layers:
            x = layer(x)
        return x


def over_tp(model: nn.Module, **options: Any) -> list[tuple[str, str, str | None, str]]:
    found = issued(model, {"dp": 2, "tp": 2}, ParallelPlan(), **options)
    return [
        (each.phase, each.kind, each.modules, each.code.rpartition("# ")[2])
        for each in found
        if each.axes == ("tp",) and "/test_site.py" in f"/{each.file}"
    ]


def test_a_users_line_is_named_in_forward_and_in_the_backward_of_that_line() -> None:
    found = over_tp(Own(Layer(), Layer(gathers=True), Layer()))
    assert found[0] == ("forward", "all-gather", "layers.1", "gathers")
    assert set(found[1:]) == {("backward", "all-gather", "layers.1", "gathers")}


def test_a_line_of_a_users_own_backward_is_named_with_the_module_of_its_forward() -> None:
    found = over_tp(Own(Layer(), Layer(sums=True), Layer(sums=True)))
    assert found == [("backward", "all-reduce", "layers.[1-2]", "sums")]


def test_a_users_criterion_is_named_without_a_module() -> None:
    def criterion(output: Tensor, targets: Tensor) -> Tensor:
        whole = reshard(reshard(output, placements="dp: S(0), tp: S(1)"), placements="dp: S(0)")  # criterion
        return whole.float().square().mean()

    found = over_tp(Own(Layer()), criterion=criterion)
    assert ("forward", "all-gather", None, "criterion") in found


def test_the_model_itself_has_the_name_of_its_class() -> None:
    class Whole(Own):
        def forward(self, tokens: Tensor) -> Tensor:
            x = super().forward(tokens)
            return reshard(reshard(x, placements="dp: S(0), tp: S(1)"), placements="dp: S(0)")  # whole

    assert ("forward", "all-gather", "Whole", "whole") in over_tp(Whole(Layer()))


def test_nothing_stays_changed_in_torch() -> None:
    before = torch.fx.traceback.format_stack
    issued(Own(Layer()), {"dp": 2}, ParallelPlan())
    with pytest.raises(ZeroDivisionError):
        issued(Own(Layer()), {"dp": 2}, ParallelPlan(), criterion=lambda output, targets: 1 / 0)
    assert torch.fx.traceback.format_stack is before
    assert not torch.is_anomaly_enabled()


def test_the_record_of_a_model_is_the_same_afterwards() -> None:
    model, mesh = Own(Layer(gathers=True)), ProcessMesh.grid(dp=2, tp=2)
    before = record(model, mesh, ParallelPlan(), batch=(4, 16))
    issued(model, {"dp": 2, "tp": 2}, ParallelPlan())
    assert record(model, mesh, ParallelPlan(), batch=(4, 16)) == before
