"""Gradients on ranks outside of the mesh, which hold nothing of the tensors: held, added up, and asked for twice."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from weft.mesh import Layout, Partial, Placement, ProcessMesh, Replicate, Shard
from weft.reshard import distribute, reshard, to_global

from tests.support.pool import Pool
from tests.support.sample import Portion

MESHES = (ProcessMesh([1, 2], ["tp"]), ProcessMesh([[2, 1]], ["dp", "tp"]))
SHAPES = ((), (4,), (5, 3), (3, 0, 2))


def held(x: DTensor, target: Layout, grad: DTensor) -> int:
    """Backward with a gradient that the caller keeps, so that autograd may not reuse its memory."""
    reshard(x, placements=target).backward(grad)
    return 1


def in_microbatches(x: DTensor, target: Layout, grad: DTensor) -> int:
    for _ in range(2):
        reshard(x, placements=target).backward(grad)
    return 2


def retained(x: DTensor, target: Layout, grad: DTensor) -> int:
    y = reshard(x, placements=target)
    y.backward(grad, retain_graph=True)
    y.backward(grad)
    return 2


def used_twice(x: DTensor, target: Layout, grad: DTensor) -> int:
    y = reshard(x, placements=target)
    z = [reshard(y, placements=target), reshard(y, placements=target), y]
    torch.autograd.backward(z, [grad] * 3)
    return 3


Case = tuple[ProcessMesh, tuple[int, ...], Placement, Placement]


def cases() -> Iterator[Case]:
    for mesh, shape in itertools.product(MESHES, SHAPES):
        placements = [Replicate(), Partial(), *map(Shard, range(len(shape)))]
        for src, dst in itertools.product(placements, repeat=2):
            yield mesh, shape, src, dst


def outside(program: Callable[[DTensor, Layout, DTensor], int], chosen: list[Case]) -> None:
    for mesh, shape, src, dst in chosen:
        whole = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
        source, target = Layout(mesh, {"tp": src}), Layout(mesh, {"tp": dst})
        x = distribute(whole, source).requires_grad_()
        grad = distribute(whole, Layout(mesh, {"tp": Replicate() if dst == Partial() else dst}))
        uses = program(x, target, grad)
        assert isinstance(x.grad, DTensor)
        assert x.grad.shape == x.shape
        if dist.get_rank() in mesh:
            assert torch.equal(to_global(x.grad), uses * whole)
        else:
            assert x.grad.to_local().numel() == 0 or not shape  # torch's own ops give scalars a zero there
            assert x.to_local().shape == source.local_shape(shape, dist.get_rank())


@pytest.mark.few(1)
@pytest.mark.parametrize("program", [held, in_microbatches, retained, used_twice])
def test_gradients_on_ranks_outside_of_the_mesh(pool: Pool, portion: Portion, program) -> None:
    assert len(list(cases())) == sum((2 + len(shape)) ** 2 for shape in SHAPES) * len(MESHES)
    chosen = list(portion.of(cases(), every=4))
    assert {shape for _, shape, _, _ in chosen} == set(SHAPES)
    pool.run(outside, program, chosen, ranks=4)
