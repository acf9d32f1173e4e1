"""`reshard`: a DTensor brought to another layout, on its mesh or another, with autograd."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from weft.mesh import Layout, LayoutError, Placement, ProcessMesh, Replicate

from ..planning.layouts import cotangent
from ..planning.plan import plan
from .collectives import Pending
from .dtensor import as_process_mesh, layout_of, layout_on, wrap
from .executor import started
from .groups import this_rank
from .topology import Topology

Placements = Mapping[str, Placement] | Sequence[Placement] | str


def reshard(
    dtensor: DTensor,
    mesh: ProcessMesh | DeviceMesh | None = None,
    placements: Placements | Layout | None = None,
    *,
    topology: Topology | None = None,
    memory_limit: int | None = None,
) -> DTensor:
    """`dtensor` in the layout of `placements` on `mesh` (absent: its own mesh; absent axes replicate).

    mesh: of the same ranks or of others; ranks outside it then hold an empty local part with the metadata.
    topology, memory_limit: see `plan`.
    Differentiable, twice as well: the gradient is brought to the layout of `dtensor`, Replicate where that is Partial,
    also where the forward moves nothing. Where this rank receives nothing, the result may share memory with `dtensor`.
    Communication: the steps of `plan(layout_of(dtensor), target, shape, dtype)`, started by the ranks of both meshes. Where
    the target's mesh is new to this process group world, its ranks make its groups.
    Raises LayoutError for a target that no plan leads to, or where this rank's part has not the shape of its layout.
    """
    return start_reshard(dtensor, mesh, placements, topology=topology, memory_limit=memory_limit).wait()


def start_reshard(
    dtensor: DTensor,
    mesh: ProcessMesh | DeviceMesh | None = None,
    placements: Placements | Layout | None = None,
    *,
    topology: Topology | None = None,
    memory_limit: int | None = None,
) -> StartedReshard:
    """`reshard` whose first collective is started, and waited for by `wait()`; see there for the rest."""
    if not isinstance(dtensor, DTensor):
        raise LayoutError(f"reshard takes a DTensor, got {type(dtensor).__name__}; give it a layout with distribute()")
    src = layout_of(dtensor)
    target = _target(src, mesh, placements)
    with torch.no_grad():
        local = dtensor.to_local()
    _check_local(local, src, dtensor.shape)
    made = plan(src, target, dtensor.shape, dtensor.dtype, topology=topology, memory_limit=memory_limit)
    with torch.no_grad():
        pending = started(made, local, dtensor.device_mesh)
    return StartedReshard(dtensor, target, pending, _Options(topology, memory_limit))


class _Options(NamedTuple):
    topology: Topology | None = None
    memory_limit: int | None = None


class StartedReshard:
    """A reshard under way; made by `start_reshard`."""

    def __init__(self, dtensor: DTensor, target: Layout, pending: Pending, options: _Options) -> None:
        self._arguments = dtensor, target, pending, options

    def wait(self) -> DTensor:
        """The resharded tensor. Communication: the collectives of the plan after the first."""
        result: DTensor = _Reshard.apply(*self._arguments)  # type: ignore[no-untyped-call]
        return result


def _check_local(local: Tensor, src: Layout, shape: torch.Size) -> None:
    """A part of another size would be sent as if it were right, and the ranks that receive it would wait for the rest."""
    rank = this_rank()
    if rank in src.mesh and tuple(local.shape) != src.local_shape(shape, rank):
        raise LayoutError(
            f"rank {rank} holds {tuple(local.shape)}, but ({src}) of {tuple(shape)} gives it "
            f"{src.local_shape(shape, rank)}; make the DTensor by distribute(), or give from_local the global shape= and "
            "stride="
        )


def _target(src: Layout, mesh: ProcessMesh | DeviceMesh | None, placements: Placements | Layout | None) -> Layout:
    if not isinstance(placements, Layout):
        if isinstance(mesh, DeviceMesh) and isinstance(placements, list | tuple) and len(placements) == mesh.ndim:
            return layout_on(mesh, placements)  # in the order of its own axes
        return Layout(src.mesh if mesh is None else as_process_mesh(mesh), () if placements is None else placements)
    if mesh is not None and as_process_mesh(mesh) != placements.mesh:
        raise LayoutError(f"the target is a layout on {placements.mesh}, and the mesh given is {mesh}; give one")
    return placements


def to_global(dtensor: DTensor) -> Tensor:
    """The whole tensor, on every rank of its mesh. Communication: a reshard to Replicate on every axis."""
    return reshard(dtensor, placements=[Replicate()] * dtensor.device_mesh.ndim).to_local()


class _Reshard(torch.autograd.Function):
    """Its dual is itself: layout of the gradient -> layout of the input."""

    @staticmethod
    def forward(ctx: Any, dtensor: DTensor, target: Layout, pending: Pending, options: _Options) -> DTensor:
        ctx.cotangent, ctx.options = cotangent(layout_of(dtensor)), options
        return wrap(pending.wait(), target, dtensor.shape)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[DTensor, None, None, None]:
        if layout_of(grad) != ctx.cotangent:
            grad = reshard(grad, placements=ctx.cotangent, **ctx.options._asdict())
        elif this_rank() not in ctx.cotangent.mesh:
            # One that nobody else holds, so that autograd keeps it: it would copy another, which DTensor cannot do here.
            grad = wrap(grad.to_local(), ctx.cotangent, grad.shape)
        return grad, None, None, None
