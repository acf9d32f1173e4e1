"""Inside `exact_sums` an op computes on any mesh what the ranks of the named mesh compute, to the bit.

Every op in every layout runs on the named mesh, a process for each rank, and on smaller meshes, whose ranks stand for
several of the named mesh's coordinates. Their local tensors are put together and taken apart here, by the definition:
shards one behind another, a replica once, the addends of a Partial value stacked in leading dims.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from weft.kernels import all_gather_matmul
from weft.mesh import Layout, Partial, ProcessMesh
from weft.reshard import distribute, exact_sums, layout_of
from weft.reshard.extension import wrap

from tests.kernels.cases import FOUR, GRID, TWO, upstream_of
from tests.kernels.sharded_cases import CASES
from tests.kernels.test_sharded_ops import attempt, every_layout_of, layouts_of, upstream_layouts
from tests.support.shards import split

Index = dict[str, int]


def coordinates_of(rank: int, mesh: ProcessMesh, named: ProcessMesh) -> list[tuple[int, Index]]:
    """The named mesh's ranks for which a rank of `mesh` stands, each with its index along every axis."""
    own = mesh.coordinate(rank)
    assert own is not None
    folds = {axis: named.axis_size(axis) // mesh.axis_size(axis) for axis in mesh.axis_names}
    found = []
    for place in itertools.product(*(range(fold) for fold in folds.values())):
        index = dict(zip(folds, place, strict=True))
        found.append((named.rank_at(**{axis: own[axis] * folds[axis] + index[axis] for axis in folds}), index))
    return found


def stacked_axes(layout: Layout, mesh: ProcessMesh) -> list[str]:
    return [
        axis
        for axis in mesh.axis_names
        if isinstance(layout[axis], Partial) and layout.mesh.axis_size(axis) > mesh.axis_size(axis)
    ]


def place(layout: Layout, mesh: ProcessMesh, shape: Any, rank: int, own: list[tuple[int, Index]]) -> Any:
    """The box of a rank's local tensor in the global tensor, or None where its coordinates' boxes make no box."""
    boxes = {str(each): each for each in (layout.local_slices(shape, rank) for rank, _ in own)}.values()
    box = Layout(mesh, str(layout)).local_slices(shape, rank)
    inside = all(b.start <= a.start and a.stop <= b.stop for each in boxes for a, b in zip(each, box, strict=True))
    volume = sum(np.prod([part.stop - part.start for part in each], dtype=int) for each in boxes)
    return box if inside and volume == np.prod([part.stop - part.start for part in box], dtype=int) else None


def views(local: Tensor, layout: Layout, mesh: ProcessMesh, shape: Any, rank: int) -> dict[int, Tensor]:
    """The local tensor of each of a rank's coordinates, by the named mesh's rank: views of the rank's local tensor."""
    own = coordinates_of(rank, mesh, layout.mesh)
    box = place(layout, mesh, shape, rank, own)
    assert box is not None
    found = {}
    for each, index in own:
        view = local[tuple(index[axis] for axis in stacked_axes(layout, mesh))]
        slices = layout.local_slices(shape, each)
        found[each] = view[tuple(slice(a.start - b.start, a.stop - b.start) for a, b in zip(slices, box, strict=True))]
    return found


def folded(whole: Tensor, layout: Layout, mesh: ProcessMesh) -> DTensor | None:
    """This rank's DTensor of the parts that `split` gives the named mesh's ranks; None where they make no part."""
    parts, rank = split(whole, layout), dist.get_rank()
    box = place(layout, mesh, whole.shape, rank, coordinates_of(rank, mesh, layout.mesh))
    if box is None:
        return None
    leading = [layout.mesh.axis_size(axis) // mesh.axis_size(axis) for axis in stacked_axes(layout, mesh)]
    local = whole.new_empty([*leading, *(part.stop - part.start for part in box)])
    for each, view in views(local, layout, mesh, whole.shape, rank).items():
        view.copy_(parts[each])
    return wrap(local, Layout(mesh, str(layout)), whole.shape)


def unfolded(tensor: DTensor, named: ProcessMesh, mesh: ProcessMesh) -> tuple[str, dict[int, Any]]:
    layout = layout_of(tensor)
    parts = views(tensor.detach().to_local(), Layout(named, str(layout)), mesh, tensor.shape, dist.get_rank())
    return str(layout), {rank: part.numpy().copy() for rank, part in parts.items()}


def every_layout_folded(name: str, named: ProcessMesh, mesh: ProcessMesh) -> dict[str, Any]:
    """As `every_layout_of`, on a smaller mesh: the local parts of outputs and gradients by the named mesh's rank."""
    case = CASES[name]
    results: dict[str, Any] = {}
    with exact_sums(dict(zip(named.axis_names, named.shape, strict=True))):
        inputs = [
            [(layout, folded(whole, layout, mesh)) for layout in layouts_of(named, whole.ndim)]
            for whole in case.tensors
        ]
        for given in itertools.product(*inputs):
            layouts = [layout for layout, _ in given]
            key = " | ".join(map(str, layouts))
            if any(tensor is None for _, tensor in given):
                continue
            tensors = [
                tensor.detach().requires_grad_(case.needs_grad(i))
                for i, (_, tensor) in enumerate(given)
                if tensor is not None
            ]
            output = attempt(lambda tensors=tensors: case.op(*tensors))
            results[key] = output
            if not isinstance(output, DTensor):
                continue
            wanted = [tensor for tensor in tensors if tensor.requires_grad]
            gradients: dict[str, Any] = {}
            for layout in upstream_layouts(Layout(named, str(layout_of(output))), output.ndim) if wanted else ():
                grad = folded(upstream_of(output.shape), layout, mesh)
                if grad is None:
                    continue
                found = attempt(lambda o=output, w=wanted, g=grad: torch.autograd.grad(o, w, g, retain_graph=True))
                gradients[str(layout)] = (
                    found if isinstance(found, str) else [unfolded(tensor, named, mesh) for tensor in found]
                )
            results[key] = unfolded(output, named, mesh), gradients
    return results


def same(found: tuple[str, dict[int, Any]], by_rank: list[tuple[str, Any]]) -> bool:
    text, parts = found
    return all(
        text == by_rank[rank][0]
        and part.shape == by_rank[rank][1].shape
        and part.tobytes() == np.ascontiguousarray(by_rank[rank][1]).tobytes()
        for rank, part in parts.items()
    )


FOLDS = [(TWO, {"tp": 1}), (FOUR, {"tp": 1}), (FOUR, {"tp": 2})]
FOLDS += [(GRID, sizes) for sizes in ({"dp": 1, "tp": 1}, {"dp": 2, "tp": 1}, {"dp": 1, "tp": 2})]
QUICK = ("cross_entropy-mean", "linear-bias", "rms_norm", "dropout-residual", "attention", "embedding")


def cases() -> list[Any]:
    found = []
    for name, (named, sizes) in itertools.product(CASES, FOLDS):
        text = "-".join(f"{axis}{size}" for axis, size in sizes.items())
        marks = [] if named is TWO else [pytest.mark.table]
        if name not in QUICK or named is not TWO:
            marks.append(pytest.mark.exhaustive)
        found.append(pytest.param(name, named, sizes, id=f"{name}-{named.size}-{text}", marks=marks))
    return found


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "named", "sizes"), cases())
def test_a_rank_computes_what_its_coordinates_compute_on_the_named_mesh(
    pool: Any, name: str, named: ProcessMesh, sizes: dict[str, int]
) -> None:
    mesh = ProcessMesh.grid(**sizes)
    expected = pool.run(every_layout_of, name, named, ranks=named.size)
    found_by_rank = pool.run(every_layout_folded, name, named, mesh, ranks=mesh.size)
    compared = 0
    for key in found_by_rank[0]:
        by_rank = [results[key] for results in expected]
        for found in (results[key] for results in found_by_rank):
            if isinstance(by_rank[0], str) or isinstance(found, str):
                assert isinstance(found, str), key
                assert isinstance(by_rank[0], str) or "no parts of" in found or "differentiated by torch" in found, (
                    found
                )
                continue
            compared += 1
            assert same(found[0], [each[0] for each in by_rank]), f"{key}: the output"
            for text, gradients in found[1].items():
                truths = [each[1][text] for each in by_rank]
                if isinstance(truths[0], str) or isinstance(gradients, str):
                    assert isinstance(gradients, str), (key, text)
                    assert isinstance(truths[0], str) or "no parts of" in gradients, gradients
                    continue
                for i, gradient in enumerate(gradients):
                    assert same(gradient, [each[i] for each in truths]), f"{key}, {text}: the gradient of operand {i}"
    assert compared, "some layout is taken"


def product_in_steps() -> str:
    mesh = ProcessMesh.grid(tp=1)
    with exact_sums({"tp": 2}):
        a = distribute(torch.zeros(4, 6), Layout(mesh, "tp: S(0)"))
        b = distribute(torch.zeros(6, 8), Layout(mesh, "tp: S(1)"))
        refusal = attempt(lambda: all_gather_matmul(a, b))
    assert isinstance(refusal, str)
    return refusal


def test_an_op_that_exchanges_operands_in_steps_is_refused(pool: Any) -> None:
    (refusal,) = pool.run(product_in_steps, ranks=1)
    assert "'tp' beside its product cannot run with exact; reshard the operand" in refusal
