"""The mesh axes known to parallel plans, by name."""

from __future__ import annotations

from collections.abc import Iterable

from weft.mesh import ProcessMesh

from .styles import CONTEXT_AXIS, PIPELINE_AXIS, TENSOR_AXIS

DATA_AXES = ("dp", "data", "batch", "replica", "shard")


def check_axes(mesh: ProcessMesh, *, pipeline: bool = False) -> None:
    """Raise ValueError for a mesh axis unknown to plans, which would otherwise be taken for a data axis.

    An axis of size 1 does nothing and may have any name.
    pipeline: whether the plan cuts the model along "pp".
    """
    for axis, size in zip(mesh.axis_names, mesh.shape, strict=True):
        if size == 1 or _is_known(axis):
            continue
        if axis == PIPELINE_AXIS and pipeline:
            continue
        if axis == PIPELINE_AXIS:
            raise ValueError(
                f"{mesh} has an axis 'pp', and the plan has no pipeline; say how the model is cut, by "
                f"ParallelPlan(pipeline=PipelinePlan(...)), or lay out one stage alone, on "
                f"mesh.get_mesh_with_dim('pp', 0)"
            )
        raise ValueError(
            f"{mesh} has an axis {axis!r}, which a plan does not know; {_names()}. Rename it, as by "
            f"mesh.rename({axis}={TENSOR_AXIS!r})"
        )


def check_named(mesh: ProcessMesh, axes: Iterable[str], where: str) -> None:
    """Raise ValueError for an axis neither on the mesh nor known to plans. where: the style naming the axes."""
    for axis in axes:
        if axis not in mesh.axis_names and not _is_known(axis):
            raise ValueError(
                f"{where} names axis {axis!r}; the mesh has {', '.join(mesh.axis_names)}, and {_names()}; "
                f"a known axis that the mesh lacks counts as size 1"
            )


def _is_known(axis: str) -> bool:
    return axis in (CONTEXT_AXIS, TENSOR_AXIS) or is_of_data(axis)


def is_of_data(axis: str) -> bool:
    """Whether an axis of this name shards the rows of a batch and nothing else."""
    return axis in DATA_AXES or axis.startswith(tuple(f"{name}_" for name in DATA_AXES))


def _names() -> str:
    return (
        f"the names are {TENSOR_AXIS} (tensor), {CONTEXT_AXIS} (context) and, for data, {', '.join(DATA_AXES)}, "
        f"or parts of the data axes such as dp_replica"
    )
