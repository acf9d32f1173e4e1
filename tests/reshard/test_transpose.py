"""Transposed plans: linear maps whose inner products agree, and which give the plan back when transposed again."""

import itertools

import pytest
import torch
from weft.mesh import Layout, LayoutError, ProcessMesh
from weft.reshard import plan, simulate

from tests.support.shards import every_layout

MESHES = [ProcessMesh.grid(tp=2), ProcessMesh.grid(tp=3), ProcessMesh.grid(dp=2, tp=2), ProcessMesh.grid(dp=1, tp=2)]


def arbitrary(layout, shape, seed):
    """A part for each rank: replicas alike, as a layout says, and everything else different."""
    parts, known = {}, {}
    for rank in layout.mesh.ranks:
        coordinate = layout.mesh.coordinate(rank)
        key = tuple(index for axis, index in coordinate.items() if str(layout[axis]) != "R")
        if key not in known:
            random = torch.Generator().manual_seed(seed + len(known))
            known[key] = torch.randint(-9, 9, layout.local_shape(shape, rank), generator=random)
        parts[rank] = known[key]
    return parts


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("shape", [(4, 4), (5, 3), (1, 2)], ids=str)
def test_the_dual_of_every_plan(mesh, shape):
    """<plan(x), y> == <x, transpose(y)> in integers, where y lies in the dual of the target: R and P change places.

    x may be Partial: then its dual is replicated, and the products are summed over the replicas of either side once.
    """
    for src, dst in itertools.product(every_layout(mesh, 2), repeat=2):
        forward = plan(src, dst, shape, torch.int64)
        backward = forward.transpose()
        assert backward.transpose() == forward
        assert (backward.dst.mesh, backward.src.mesh) == (src.mesh, dst.mesh)
        x, y = arbitrary(src, shape, 1), arbitrary(backward.src, shape, 100)
        there, back = simulate(forward, x), simulate(backward, y)
        assert pairing(dst, there, y) == pairing(src, x, back), str(forward)


def pairing(layout, parts, duals):
    """The product of a value in `layout` and a value in the dual layout, in which Replicate and Partial change places.

    It is summed over ranks: a replicated value multiplies each addend of the dual, so every rank counts.
    """
    return sum(int((parts[rank] * duals[rank]).sum()) for rank in layout.mesh.ranks)


def test_across_meshes():
    near, far = ProcessMesh.grid(tp=2), ProcessMesh.grid(dp=2, tp=2, first_rank=1)
    for src, dst in itertools.product(every_layout(near, 2), every_layout(far, 2)):
        forward = plan(src, dst, (5, 3), torch.int64)
        backward = forward.transpose()
        assert backward.transpose() == forward
        x, y = arbitrary(src, (5, 3), 1), arbitrary(backward.src, (5, 3), 100)
        assert pairing(dst, simulate(forward, x), y) == pairing(src, x, simulate(backward, y)), str(forward)


@pytest.mark.parametrize("op", ["max", "min", "product", "avg"])
def test_only_sums_have_a_dual(op):
    mesh = ProcessMesh.grid(tp=2)
    with pytest.raises(LayoutError, match=rf"has no dual: P\({op}\) on axis 'tp' is not a sum"):
        plan(Layout(mesh, f"tp: P({op})"), Layout(mesh), (4,), torch.float32).transpose()
