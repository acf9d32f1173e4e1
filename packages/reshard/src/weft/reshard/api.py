"""`reshard`: a DTensor brought to another layout, with autograd."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from weft.mesh import Layout, LayoutError, Placement, ProcessMesh, Replicate

from .dtensor import as_process_mesh, layout_of, wrap
from .executor import execute
from .plan import cotangent, plan

Placements = Mapping[str, Placement] | Sequence[Placement] | str


def reshard(
    dtensor: DTensor, mesh: ProcessMesh | DeviceMesh | None = None, placements: Placements | Layout | None = None
) -> DTensor:
    """`dtensor` in the layout of `placements` on `mesh` (absent: its own mesh; absent axes replicate).

    Differentiable, twice as well: the gradient is brought to the layout of `dtensor`, Replicate where that is Partial,
    also where the forward moves nothing. Where this rank receives nothing, the result may share memory with `dtensor`.
    Communication: the steps of `plan(layout_of(dtensor), target, shape, dtype)`.
    Raises LayoutError for a target that no plan leads to, or on a mesh of other ranks.
    """
    if not isinstance(dtensor, DTensor):
        raise LayoutError(f"reshard takes a DTensor, got {type(dtensor).__name__}; give it a layout with distribute()")
    own = layout_of(dtensor).mesh
    if isinstance(placements, Layout):
        if mesh is not None and as_process_mesh(mesh) != placements.mesh:
            raise LayoutError(f"the target is a layout on {placements.mesh}, and the mesh given is {mesh}; give one")
        target = placements
    else:
        target = Layout(own if mesh is None else as_process_mesh(mesh), () if placements is None else placements)
    names = own.axis_names
    if target.mesh != own and (set(target.mesh.axis_names) != set(names) or target.mesh.permute(*names) != own):
        raise LayoutError(f"the tensor lies on {own}, the target on {target.mesh}; both must be one mesh")
    result: DTensor = _Reshard.apply(dtensor, target)  # type: ignore[no-untyped-call]
    return result


def to_global(dtensor: DTensor) -> Tensor:
    """The whole tensor, on every rank of its mesh. Communication: a reshard to Replicate on every axis."""
    return reshard(dtensor, placements=[Replicate()] * dtensor.device_mesh.ndim).to_local()


class _Reshard(torch.autograd.Function):
    """Its dual is itself: layout of the gradient -> layout of the input."""

    @staticmethod
    def forward(ctx: Any, dtensor: DTensor, target: Layout) -> DTensor:
        src = layout_of(dtensor)
        ctx.cotangent = cotangent(src)
        dst = target if target.mesh == src.mesh else Layout(src.mesh, str(target))  # its axes in another order
        local = execute(plan(src, dst, dtensor.shape, dtensor.dtype), dtensor.to_local(), dtensor.device_mesh)
        return wrap(local, target, dtensor.shape)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[DTensor, None]:
        return grad if layout_of(grad) == ctx.cotangent else reshard(grad, placements=ctx.cotangent), None
