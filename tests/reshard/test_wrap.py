"""DTensors made by `wrap`: equal to torch's own, with the same sharing, and bound to the current world."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from weft.mesh import Layout, ProcessMesh
from weft.reshard import distribute, to_global
from weft.reshard.moving.dtensor import torch_layout, wrap

from tests.support.pool import Pool

FORWARDS, BACKWARDS = ProcessMesh([0, 1], ["tp"]), ProcessMesh([1, 0], ["tp"])
# Neighbours differ in one property: dtype, shape, placement, mesh, shape.
KINDS = (
    (torch.float32, (4, 6), Layout(FORWARDS, "tp: S(0)")),
    (torch.float64, (4, 6), Layout(FORWARDS, "tp: S(0)")),
    (torch.float64, (3, 6), Layout(FORWARDS, "tp: S(0)")),
    (torch.float64, (3, 6), Layout(FORWARDS, "tp: P(sum)")),
    (torch.float64, (3, 6), Layout(BACKWARDS, "tp: P(sum)")),
    (torch.float64, (), Layout(BACKWARDS, "tp: P(sum)")),
)


def looks(dtensor: DTensor) -> tuple[Any, ...]:
    """A DTensor's metadata besides its local tensor, and the metadata of the result of one of torch's ops."""
    told = ((t.shape, t.stride(), t.dtype, t.__tensor_flatten__()[1]) for t in (dtensor, dtensor + dtensor))
    return *told, dtensor.device_mesh.mesh.tolist()


def each_kind() -> list[tuple[Any, Any]]:
    """Each kind twice, the second time from the cache, with torch's own DTensor beside."""
    pairs = []
    for dtype, shape, layout in KINDS * 2:
        local = torch.ones(layout.local_shape(shape, dist.get_rank()), dtype=dtype)
        stride = torch.empty(shape, device="meta").stride()
        mesh, placements = torch_layout(layout, "cpu")
        theirs = DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)
        pairs.append((looks(wrap(local, layout, shape)), looks(theirs)))
    return pairs


def test_wrapped_dtensors_equal_those_of_from_local(pool: Pool) -> None:
    for pairs in pool.run(each_kind, ranks=2):
        for ours, theirs in pairs:
            assert ours == theirs


IN_PLACE = {
    "squeeze_": lambda x: x.squeeze_(0),
    "add_": lambda x: x.add_(1),
    "requires_grad_": lambda x: x.requires_grad_(),
}


def changed_in_place(name: str) -> tuple[Any, ...]:
    layout = Layout(FORWARDS, "tp: S(1)")
    first, second = (wrap(torch.ones(1, 2), layout, (1, 4)) for _ in range(2))
    before = looks(second)
    IN_PLACE[name](first)
    return before, looks(second), looks(wrap(torch.ones(1, 2), layout, (1, 4))), second.to_local().tolist()


@pytest.mark.parametrize("name", IN_PLACE)
def test_a_dtensor_changed_in_place_leaves_equal_dtensors_unchanged(pool: Pool, name: str) -> None:
    for before, after, new, local in pool.run(changed_in_place, name, ranks=2):
        assert before == after == new
        assert local == [[1, 1]]


def in_two_worlds(store: str) -> tuple[bool, torch.Tensor]:
    """Whether a DTensor made in a second world has that world's mesh, and the tensor gathered."""
    layout = Layout(FORWARDS, "tp: S(0)")
    before, rank = distribute(torch.arange(4), layout).device_mesh, dist.get_rank()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    again = distribute(torch.arange(4), layout)
    return again.device_mesh is not before, to_global(again)


def test_cached_dtensors_belong_to_the_current_world(pool: Pool, tmp_path: Path) -> None:
    for new, whole in pool.run(in_two_worlds, str(tmp_path / "store"), ranks=2):
        assert new
        assert whole.tolist() == [0, 1, 2, 3]
