"""The axes of a mesh that a plan knows, by their names."""

from __future__ import annotations

from collections.abc import Iterable

from weft.mesh import ProcessMesh

from .styles import CONTEXT_AXIS, PIPELINE_AXIS, TENSOR_AXIS

DATA_AXES = ("dp", "data", "batch", "replica", "shard")


def check_axes(mesh: ProcessMesh, *, pipeline: bool = False) -> None:
    """Raises ValueError for an axis that a plan does not know: it would be taken for one that shards data.

    An axis of size 1 does nothing, whatever its name. pipeline: whether the plan says how a model is cut along "pp".
    """
    for axis, size in zip(mesh.axis_names, mesh.shape, strict=True):
        if size == 1 or _is_known(axis):
            continue
        if axis == PIPELINE_AXIS and pipeline:
            continue
        if axis == PIPELINE_AXIS:
            raise ValueError(
                f"{mesh} has an axis 'pp', and the plan has no pipeline; say how the model is cut, by "
                f"ParallelPlan(pipeline=PipelinePlan(...)), or lay out one stage alone, on mesh.get_mesh_with_dim('pp', 0)"
            )
        raise ValueError(
            f"{mesh} has an axis {axis!r}, which a plan does not know; {_names()}. Rename it, as by "
            f"mesh.rename({axis}={TENSOR_AXIS!r})"
        )


def check_named(mesh: ProcessMesh, axes: Iterable[str], where: str) -> None:
    """Raises ValueError for an axis that neither the mesh has nor any that a plan knows."""
    for axis in axes:
        if axis not in mesh.axis_names and not _is_known(axis):
            raise ValueError(
                f"{where} names axis {axis!r}; the mesh has {', '.join(mesh.axis_names)}, and {_names()}, of which those "
                f"that a mesh has not have size 1"
            )


def _is_known(axis: str) -> bool:
    return axis in (CONTEXT_AXIS, TENSOR_AXIS) or is_of_data(axis)


def is_of_data(axis: str) -> bool:
    """Whether an axis shards the rows of a batch alone."""
    return axis in DATA_AXES or axis.startswith(tuple(f"{name}_" for name in DATA_AXES))


def _names() -> str:
    return (
        f"the names are {TENSOR_AXIS} (tensor), {CONTEXT_AXIS} (context) and, for data, {', '.join(DATA_AXES)}, or parts of these, "
        f"as dp_replica"
    )
