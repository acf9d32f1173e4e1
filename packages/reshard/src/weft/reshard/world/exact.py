"""The named mesh of an exact step: sums are taken as on this mesh, whatever mesh the step runs on.

`exact_sums({"dp": 4, "tp": 2})` names the mesh E for a block of code. A rank of a smaller mesh M stands for several
coordinates of E: the fold of an axis is E's size over M's. A DTensor on M then holds E's local tensors: shards of a dim
one behind another, a replica once, and the addends of a Partial value stacked, in a leading dim for each folded axis.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

from weft.mesh import ProcessMesh

_named: Mapping[str, int] | None = None  # no thread's own: the backward of a GPU runs on a thread of autograd


@contextmanager
def exact_sums(axes: Mapping[str, int] | None) -> Iterator[None]:
    """Context manager: in the block, sums are taken as on a mesh with these sizes of axes. None: as on the mesh itself.

    Blocks may be nested; the innermost counts. Communication: none.
    """
    global _named
    previous, _named = _named, None if axes is None else MappingProxyType(dict(axes))
    try:
        yield
    finally:
        _named = previous


def exact_axes() -> Mapping[str, int] | None:
    """The sizes of the named mesh's axes, in a block of `exact_sums`; else None."""
    return _named


def folds(mesh: ProcessMesh) -> tuple[int, ...]:
    """For each axis of `mesh`, how many coordinates of the named mesh a coordinate stands for: 1 without `exact_sums`.

    Raises ValueError for an axis whose named size is no multiple of the mesh's.
    """
    if _named is None:
        return (1,) * mesh.ndim
    return tuple(
        _fold(axis, _named.get(axis, size), size) for axis, size in zip(mesh.axis_names, mesh.shape, strict=True)
    )


def _fold(axis: str, named: int, size: int) -> int:
    if named % size:
        raise ValueError(
            f"exact names {axis}={named}, which {axis}={size} of the mesh does not divide; choose a divisor"
        )
    return named // size
