"""Between Weft's layouts and torch's DTensor, through its public API but for one thing: see `_spec`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Partial as TorchPartial
from torch.distributed.tensor import Placement as TorchPlacement
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from weft.mesh import Layout, LayoutError, Partial, Placement, ProcessMesh, Replicate, Shard, as_placement

from ..planning.identities import identity
from .groups import axis_names, device_mesh, device_type, of_this_world, process_mesh, this_rank

Placements = Mapping[Any, Placement] | Sequence[Placement] | str
STRIDED = "_StridedShard"  # torch's name of what has no public one


def layout_of(dtensor: DTensor) -> Layout:
    """The layout of a DTensor; what FSDP2 shards after tensor parallelism did is cut by tp first: "tp: S(0), dp: S(0)".

    Raises LayoutError for placements beyond Shard, Replicate and Partial, and for other strided shards.
    """
    return layout_on(dtensor.device_mesh, dtensor.placements)


def is_strided(dtensor: DTensor) -> bool:
    """Whether torch says the order of its shards by a placement, where we permute the axes of a mesh."""
    return any(type(placement).__name__ == STRIDED for placement in dtensor.placements)


def layout_on(mesh: DeviceMesh, placements: Sequence[Any]) -> Layout:
    """What `placements` mean on a DeviceMesh: the first of its axes is the major one.

    On one that was made to permute a mesh of ours it is the layout of that mesh, with the axes in that order.
    """
    return _layout(process_mesh(mesh), axis_names(mesh), tuple(placements))


@lru_cache(maxsize=65536)
def _layout(mesh: ProcessMesh, names: tuple[str, ...], placements: tuple[Any, ...]) -> Layout:
    given = dict(zip(names, placements, strict=True))
    placed: dict[str, Placement] = {}
    for name in reversed(names):
        placement = given[name]
        if type(placement).__name__ == STRIDED:
            placed = _after_its_majors(mesh, name, placement, placed)
        else:
            placed = {name: _known(name, placement)} | placed
    return Layout.in_order(mesh, placed)


def _known(axis: str, placement: Any) -> Placement:
    try:
        return as_placement(placement)
    except ValueError:
        raise LayoutError(
            f"axis {axis!r} has the placement {placement!r}, and a layout has Shard, Replicate and Partial alone; bring "
            f"the DTensor to one of those by its redistribute() first"
        ) from None


def _after_its_majors(
    mesh: ProcessMesh, axis: str, placement: Any, later: dict[str, Placement]
) -> dict[str, Placement]:
    """`later`, the placements of the axes after it, with a strided shard put behind those that cut its dim before it does.

    FSDP2 makes it where tensor parallelism has cut dim 0: its axis comes first and cuts last. split_factor: in how many
    parts the dim is cut by then.
    """
    majors, parts = [], 1
    for other, its in later.items():
        if parts == placement.split_factor:
            break
        if isinstance(its, Shard) and its.dim == placement.dim:
            parts *= mesh.axis_size(other)
        majors.append(other)
    if parts != placement.split_factor:
        raise LayoutError(
            f"axis {axis!r} has the placement {placement!r}: it cuts every {placement.split_factor}th part of dim "
            f"{placement.dim}, and no axes after it cut that dim into so many; bring the DTensor to Shard or Replicate there "
            f"by its redistribute() first"
        )
    first = {other: later[other] for other in majors}
    return first | {axis: Shard(placement.dim)} | later


def wrap(local: Tensor, layout: Layout, shape: Sequence[int]) -> DTensor:
    """The DTensor of global `shape` whose local part on this rank is `local`; nothing is checked or moved.

    No gradient flows through it: autograd functions wrap what they return, and say themselves how gradients go back.
    """
    kept, key = of_this_world(), (layout, tuple(shape), local.dtype, local.device)
    try:
        spec = kept.get(key)
    except TypeError:  # a graph is traced, in which sizes are symbols: they become the numbers that they are now
        return wrap(local, layout, tuple(map(int, shape)))
    if spec is None:
        spec = kept[key] = _spec(local, layout, tuple(shape))
    return of_kind(local, spec)


def shape_of(dtensor: Tensor) -> tuple[int, ...]:
    """The whole shape, in numbers where a graph is traced, too."""
    return tuple(map(int, dtensor.shape))


def of_kind(local: Tensor, kind: Any) -> DTensor:
    """The DTensor with that `kind_of` whose local part is `local`; see `wrap`."""
    # Not DTensor(...): that goes on to an __init__ that does nothing, by wrappers that take twice as long as the rest.
    made: DTensor = DTensor.__new__(DTensor, local, kind, requires_grad=False)
    return made


def kind_of(dtensor: DTensor) -> Any:
    """A value that is equal for DTensors of one layout, shape and dtype, and quickly found."""
    return dtensor._spec


_names_of_memory: dict[type[DTensor], str] = {}  # by the class of what has it


def memory_of(dtensor: DTensor) -> Tensor:
    """The very tensor that a DTensor has, not a view of it: whoever gives it other memory gives it to the DTensor.

    Of a parameter `to_local()` makes a new one each time (torch 2.13). This asks by the protocol that subclasses of torch.Tensor that
    hold tensors follow, once for each class, as it takes 5 us. As long as a DTensor has weak references, it has this tensor.
    """
    name = _names_of_memory.get(type(dtensor))
    if name is None:
        (name, *_), _ = dtensor.__tensor_flatten__()  # type: ignore[no-untyped-call]  # torch has no types for it
        _names_of_memory[type(dtensor)] = name
    local: Tensor = getattr(dtensor, name)
    return local


def _spec(local: Tensor, layout: Layout, shape: tuple[int, ...]) -> Any:
    """What DTensors of one kind have in common: all but the local tensor.

    No public call makes a DTensor of a spec that there is, as torch's own ops and FSDP2 do; with one made anew it takes
    14 us where it takes 3 (torch 2.13, one CPU core). A spec is not changed: an op in place gives its DTensor another.
    """
    mesh, placements = torch_layout(layout, _device_type(local))
    size, stride = torch.Size(shape), _contiguous_stride(shape)
    part = local.new_empty(0 if shape else ())  # of a scalar from_local takes the shape from the local tensor
    with torch.no_grad():
        return DTensor.from_local(part, mesh, placements, run_check=False, shape=size, stride=stride)._spec


def torch_layout(layout: Layout, device_type: str) -> tuple[DeviceMesh, tuple[TorchPlacement, ...]]:
    """DeviceMesh and placements that say `layout`."""
    mesh, placements = _spelled(layout)
    return device_mesh(mesh, device_type, layout.mesh if mesh != layout.mesh else None), placements


@lru_cache(maxsize=65536)
def _spelled(layout: Layout) -> tuple[ProcessMesh, tuple[TorchPlacement, ...]]:
    """The mesh with its axes in an order in which torch's placements say `layout`.

    DTensor lets the first axis of its mesh be the major one; another order is said by permuting the mesh.
    """
    names = [item.partition(":")[0] for item in str(layout).split(", ")]
    return layout.mesh.permute(*names), tuple(_to_torch(layout[name]) for name in names)


def _device_type(local: Tensor) -> str:
    """The device type of the mesh a local tensor belongs to; a meta tensor will live where the backend's do."""
    return device_type() if local.is_meta else local.device.type


def _to_torch(placement: Any) -> TorchPlacement:
    match placement:
        case Shard(dim=dim):
            return TorchShard(dim)
        case Replicate():
            return TorchReplicate()
        case Partial(op=op):
            return TorchPartial(op)
    raise LayoutError(f"{placement!r} is not a placement")


@lru_cache(maxsize=65536)
def _contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(max(1, size) for size in shape[dim + 1 :]) for dim in range(len(shape)))


def _number(
    cls: type, func: Any, types: Sequence[type], args: tuple[DTensor, ...], kwargs: dict[str, Any]
) -> bool | int | float | complex:
    """`x.item()`, and what is made of it: float(x), bool(x), `if x:`. DTensor itself gives the local number, whatever it means.

    Raises LayoutError for a Partial DTensor, where that is this rank's addend.
    """
    (x,) = args
    axes = zip(axis_names(x.device_mesh), x.device_mesh.shape, x.placements, strict=True)
    partial = ", ".join(repr(name) for name, size, placement in axes if size > 1 and placement.is_partial())
    if partial:
        raise LayoutError(
            f"a number was asked of a DTensor that is Partial over {partial}, and this rank holds an addend of it alone: ask "
            f"reshard(x), which is whole on every rank; or x.to_local(), if the addend is meant"
        )
    number: bool | int | float | complex = func(x.to_local())
    return number


# For every DTensor of this process, whoever made it: torch has one place for an operator of a subclass.
torch.library.register_torch_dispatch(torch.ops.aten._local_scalar_dense.default, DTensor, _number)


def distribute(
    tensor: Tensor,
    layout: Layout | ProcessMesh | DeviceMesh | None = None,
    placements: Placements = (),
    *,
    device_mesh: ProcessMesh | DeviceMesh | None = None,
) -> DTensor:
    """A global tensor, whole on every rank, as a DTensor: each rank keeps its part.

    layout: or a mesh with `placements` on it, as torch's `distribute_tensor` takes them; device_mesh is its name for the mesh.
    Where the layout is Partial the value stays at index 0 and the other ranks hold the operation's identity.
    Communication: none, but for the mesh's process groups where they are new.
    Raises LayoutError where the layout does not fit the shape; ValueError where two layouts are given, or none.
    """
    rank = this_rank()
    if not isinstance(layout, Layout):
        mesh = one_mesh(layout, device_mesh)
        if mesh is None:
            raise ValueError("distribute needs a layout, or a mesh and placements on it")
        layout = layout_given(mesh, placements)
    elif placements or device_mesh is not None:
        raise ValueError(
            f"distribute got the layout ({layout}) and a mesh or placements beside it; give one of the two"
        )
    layout = layout.resolved(tensor.shape)
    coordinate = layout.mesh.coordinate(rank)
    with torch.no_grad():
        if coordinate is None:
            local = tensor.new_empty(0)
        else:
            local = tensor[layout.local_slices(tensor.shape, rank)].clone(memory_format=torch.contiguous_format)
            for axis, placement in zip(layout.mesh.axis_names, layout.placements, strict=True):
                if isinstance(placement, Partial) and placement.op != "avg" and coordinate[axis]:
                    local.fill_(identity(placement.op, local.dtype))
        result = wrap(local, layout, tensor.shape)
    result.requires_grad_(tensor.requires_grad)
    return result


def layout_given(mesh: ProcessMesh | DeviceMesh, placements: Placements) -> Layout:
    """The layout of placements as a caller gives them; one for each axis of a DeviceMesh are in the order of its own axes."""
    if isinstance(mesh, DeviceMesh) and isinstance(placements, list | tuple) and len(placements) == mesh.ndim:
        return layout_on(mesh, placements)
    return Layout(as_process_mesh(mesh), placements)


def one_mesh(
    mesh: ProcessMesh | DeviceMesh | None, device_mesh: ProcessMesh | DeviceMesh | None
) -> ProcessMesh | DeviceMesh | None:
    """The mesh that is given as `mesh`, or as torch calls that argument. Raises ValueError where both are."""
    if mesh is not None and device_mesh is not None:
        raise ValueError("mesh= and device_mesh= are two names of one argument; give one of them")
    return device_mesh if mesh is None else mesh


def as_process_mesh(mesh: ProcessMesh | DeviceMesh) -> ProcessMesh:
    """A mesh of ours, from ours or torch's."""
    return process_mesh(mesh) if isinstance(mesh, DeviceMesh) else mesh
