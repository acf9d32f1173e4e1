"""Forms that DTensor's users write: negative dims, `device_mesh=`, and FSDP2's layouts beside tensor parallelism."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard
from weft.mesh import Layout, LayoutError, ProcessMesh, Shard
from weft.reshard import distribute, layout_of, plan, reshard, start_reshard, to_global
from weft.reshard.moving.dtensor import layout_on

from tests.support.pool import Pool

GRID = ProcessMesh.grid(dp=2, tp=2)
WHOLE = torch.arange(35.0).reshape(5, 7)


def named_as_torch_names() -> list[tuple[str, torch.Tensor]]:
    """Layouts and values of DTensors requested in torch's terms."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    theirs = distribute_tensor(WHOLE, mesh, [TorchShard(0), TorchReplicate()])
    ours = distribute(WHOLE, device_mesh=mesh, placements=[TorchReplicate(), TorchShard(-1)])
    made = [
        ours,
        distribute(WHOLE, mesh, [TorchShard(-1), TorchShard(-2)]),
        distribute(WHOLE, Layout(GRID, "tp: S(-1)")),
        reshard(theirs, device_mesh=mesh, placements=[TorchShard(-1), TorchReplicate()]),
        reshard(theirs, placements={"tp": Shard(-1)}),
        reshard(theirs, device_mesh=ProcessMesh.grid(tp=4), placements="tp: S(-2)"),
        start_reshard(theirs, device_mesh=mesh, placements=(TorchShard(-1), TorchShard(-1))).wait(),
        reshard(theirs, Layout(GRID, "tp: S(-1)")),
    ]
    return [(str(layout_of(each)), to_global(each)) for each in made]


def test_dims_from_the_end_and_the_name_of_the_mesh(pool: Pool) -> None:
    layouts = [
        "dp: R, tp: S(1)",
        "dp: S(1), tp: S(0)",
        "dp: R, tp: S(1)",
        "dp: S(1), tp: R",
        "dp: R, tp: S(1)",
        "tp: S(0)",
        "dp: S(1), tp: S(1)",
        "dp: R, tp: S(1)",
    ]
    for found in pool.run(named_as_torch_names, ranks=4):
        assert [layout for layout, _ in found] == layouts
        assert all(torch.equal(values, WHOLE) for _, values in found)


def test_a_plan_counts_its_dims() -> None:
    last, counted = Layout(GRID, "tp: S(-1)"), Layout(GRID, "tp: S(1)")
    made = plan(last, Layout(GRID), (5, 7), torch.float32)
    assert (made.src, made.steps) == (counted, plan(counted, Layout(GRID), (5, 7), torch.float32).steps)


def two_meshes() -> list[str]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    x = distribute(WHOLE, Layout(ProcessMesh.grid(tp=2)))
    calls: list[Any] = [
        lambda: reshard(x, mesh, device_mesh=mesh),
        lambda: reshard(x, layout_of(x), placements="tp: S(0)"),
        lambda: distribute(WHOLE, mesh, device_mesh=mesh),
        lambda: distribute(WHOLE, layout_of(x), device_mesh=mesh),
        lambda: distribute(WHOLE),
    ]
    told = []
    for call in calls:
        with pytest.raises(ValueError, match=r"give|needs") as error:
            call()
        told.append(str(error.value))
    return told


def test_of_two_meshes_one_is_asked_for(pool: Pool) -> None:
    for both, layout_beside, again, beside, none in pool.run(two_meshes, ranks=2):
        assert both == again == "mesh= and device_mesh= are two names of one argument; give one of them"
        assert layout_beside.startswith("reshard was given the layout (tp: R) and a mesh or placements beside it")
        assert beside.startswith("distribute got the layout (tp: R) and a mesh or placements beside it")
        assert none == "distribute needs a layout, or a mesh and placements on it"


class Block(nn.Module):
    """Two layers whose first dims, 10 and 6, no four ranks share evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


def beside_tensor_parallelism() -> list[tuple[Any, ...]]:
    """For each parameter sharded by tp, then FSDP2: its layout, and the errors of its values and of its gradient."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model, alone = Block(), Block()
    alone.load_state_dict(model.state_dict())
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    x = torch.randn(4, 6)
    rows = x.chunk(2)[mesh.get_local_rank("dp")]
    model(rows).square().mean().backward()
    alone(x).square().mean().backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: list[tuple[Any, ...]] = []
    for (name, parameter), its in zip(model.named_parameters(), alone.parameters(), strict=True):
        layout, gradient = layout_of(parameter.detach()), layout_of(parameter.grad)
        moved = reshard(parameter.detach(), placements="dp: S(0)")
        found.append(
            (
                name,
                str(layout),
                gradient == layout,
                torch.equal(to_global(parameter.detach()), its),
                torch.equal(moved.to_local(), its[Layout(GRID, "dp: S(0)").local_slices(its.shape, dist.get_rank())]),
                float((to_global(parameter.grad) - its.grad).abs().max()),
                torch.equal(reshard(moved, placements=layout).to_local(), parameter.to_local()),
            )
        )
    optimizer.step()
    return found


@pytest.mark.exhaustive
def test_parameters_of_fsdp2_beside_tensor_parallelism(pool: Pool) -> None:
    layouts = {
        "up.weight": "tp: S(0), dp: S(0)",
        "up.bias": "tp: S(0), dp: S(0)",
        "down.weight": "dp: S(0), tp: S(1)",
        "down.bias": "dp: S(0), tp: R",
    }
    for found in pool.run(beside_tensor_parallelism, ranks=4):
        assert {name: layout for name, layout, *_ in found} == layouts
        for name, _, gradient_alike, values, part, error, back in found:
            assert (name, gradient_alike, values, part, back) == (name, True, True, True, True)
            assert error < 1e-6


def with_strided_placements() -> list[Any]:
    """Gradients of a leaf with FSDP2's strided placements, and an optimizer step on the leaf."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    placements = [_StridedShard(0, split_factor=2), TorchShard(0)]
    rank = dist.get_rank()
    mine = WHOLE[Layout(mesh, "tp: S(0), dp: S(0)").local_slices((5, 7), rank)].contiguous()
    leaf = DTensor.from_local(mine, mesh, placements, run_check=False, shape=WHOLE.shape, stride=WHOLE.stride())
    leaf.requires_grad_()
    (to_global(leaf) * WHOLE).sum().backward()
    told = [leaf.grad.placements == leaf.placements, leaf.grad.device_mesh == mesh]
    torch.optim.SGD([leaf], lr=1.0).step()
    return [*told, torch.equal(leaf.to_local(), mine - mine)]


def test_a_gradient_lies_as_its_strided_leaf(pool: Pool) -> None:
    assert pool.run(with_strided_placements, ranks=4) == [[True, True, True]] * 4


def refused() -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    told = []
    for placements in (
        [_StridedShard(0, split_factor=3), TorchShard(0)],
        [_StridedShard(0, split_factor=2), TorchShard(1)],
        [TorchShard(0), _StridedShard(0, split_factor=2)],
    ):
        with pytest.raises(LayoutError) as error:
            layout_on(mesh, placements)
        told.append(str(error.value))
    return told


def test_other_strided_shards_are_refused(pool: Pool) -> None:
    told, *_ = pool.run(refused, ranks=4)
    for axis, factor, line in zip(("dp", "dp", "tp"), (3, 2, 2), told, strict=True):
        assert line.startswith(f"axis '{axis}' has the placement _StridedShard(dim=0, sf={factor})")
        assert "bring the DTensor to Shard or Replicate there by its redistribute() first" in line
