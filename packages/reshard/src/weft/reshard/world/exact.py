"""The named mesh of an exact step: the mesh whose sums every smaller mesh repeats, to the bit.

`exact_sums({"dp": 4, "tp": 2})` names a mesh for a block of code. Where the real mesh is smaller, each rank stands for
several coordinates of the named mesh. The fold of an axis is the named size over the real size. The rank's local
tensor then holds the local tensors of all these coordinates: the shards of a dim in order, a replica once, and the
addends of a Partial value stacked, in a leading dim for each folded axis.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

from weft.mesh import ProcessMesh

_ATTRIBUTE = "_weft_exact"  # of a parameter: the axes of `mark_exact`


class _Named:
    """The sizes of the named mesh's axes; None outside `exact_sums`. Read without a function call by every op."""

    axes: Mapping[str, int] | None = None
    key: tuple[tuple[str, int], ...] | None = None  # the same sizes, hashable


NAMED = _Named()  # of all threads: the backward of a GPU runs on a thread of autograd


@contextmanager
def exact_sums(axes: Mapping[str, int] | None) -> Iterator[None]:
    """Context manager: all code in the block computes and adds as on a mesh with these sizes of axes.

    Results in the block have the same bits on every mesh whose axes divide `axes`: of ops, layout changes, gradients,
    `clip_grad_norm_`, and the updates of torch's elementwise optimizers and of Muon. Some of torch's optimizers round
    two-byte parameters by their place in a shard: with a GradientSync, their steps are refused. `forward_backward`
    enters the block by itself, with the plan's `exact`, and clipping and optimizers treat this model's parameters as
    in a block. Use a block of your own for further DTensors, and for a loop without `forward_backward`: around the
    model's call, backward and `GradientSync.wait()`.
    axes: the size of each axis, as {"dp": 4, "tp": 2}; an axis left out keeps the real mesh's size. None: no named
        mesh, and each mesh adds in its own order. Of nested blocks, the innermost counts.
    Shapes: the local tensor of a Partial DTensor is [*folds, *local shape], with a leading dim for each Partial axis
        with a fold above 1. All further local tensors have the ordinary shapes.
    Threads: the block holds for all threads of the process, since backward may run on threads of autograd.
    Communication: none here. In the block, an all-reduce over more than two ranks is an exchange, an addition and a
        gather: the same bytes, but for padding.
    Raises ValueError for a size that is no int of at least 1. Code in the block raises ValueError for a mesh with an
    axis that does not divide the named size, and LayoutError for a fold that is no power of two on a Partial axis of
    several ranks, and for a tensor whose shards on the named mesh do not add up to the shards on the real mesh.
    """
    if not (axes is None or isinstance(axes, Mapping)):
        raise ValueError(f"exact is {axes!r}; give the size of each axis by the axis' name, as {{'dp': 4}}, or None")
    for axis, size in {} if axes is None else axes.items():
        if not isinstance(axis, str) or isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"exact names {axis}={size!r}; give the size of an axis, an int of at least 1")
    previous = NAMED.axes, NAMED.key
    NAMED.axes, NAMED.key = (None, None) if axes is None else (MappingProxyType(dict(axes)), tuple(axes.items()))
    try:
        yield
    finally:
        NAMED.axes, NAMED.key = previous


def exact_axes() -> Mapping[str, int] | None:
    """The sizes of the named mesh's axes inside `exact_sums`; None outside."""
    return NAMED.axes


def mark_exact(parameter: Any, axes: Mapping[str, int]) -> None:
    """Notes a plan's named mesh on a parameter: clipping and optimizers, which run after the block, read the mark."""
    setattr(parameter, _ATTRIBUTE, dict(axes))  # can be copied and pickled with the parameter


def marked_axes(parameters: Iterable[Any]) -> Mapping[str, int] | None:
    """The sizes of the named mesh's axes for an optimizer or a norm of `parameters`; None without a named mesh.

    Inside `exact_sums` the answer is `exact_axes()`, outside the mark of the first marked parameter (`mark_exact`).
    """
    marks = (getattr(each, _ATTRIBUTE, None) for each in parameters)
    return NAMED.axes if NAMED.axes is not None else next((mark for mark in marks if mark is not None), None)


def named_axes_key() -> tuple[tuple[str, int], ...] | None:
    """`exact_axes()` as a hashable key of caches; None outside `exact_sums`."""
    return NAMED.key


def folds(mesh: ProcessMesh) -> tuple[int, ...]:
    """The fold of each axis of `mesh`: the named size over the size; 1 outside `exact_sums`.

    Raises ValueError for an axis whose named size is no multiple of the mesh's.
    """
    if NAMED.axes is None:
        return (1,) * mesh.ndim
    return tuple(
        _fold(axis, NAMED.axes.get(axis, size), size) for axis, size in zip(mesh.axis_names, mesh.shape, strict=True)
    )


def fold_of(mesh: ProcessMesh, axis: str) -> int:
    """The fold of an axis: how many named coordinates an own coordinate stands for; 1 outside `exact_sums`."""
    return folds(mesh)[mesh.axis_names.index(axis)]


def named_size(mesh: ProcessMesh, axis: str) -> int:
    """The size of an axis of `mesh` on the named mesh; the axis's own size outside `exact_sums`."""
    return mesh.axis_size(axis) * fold_of(mesh, axis)


def _fold(axis: str, named: int, size: int) -> int:
    if named % size:
        raise ValueError(
            f"exact names {axis}={named}, and {axis}={size} of the mesh does not divide {named}; choose a divisor"
        )
    return named // size
