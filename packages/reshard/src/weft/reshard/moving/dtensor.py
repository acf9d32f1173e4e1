"""Layouts and DTensors: `layout_of` a DTensor, DTensors of a local part (`wrap`) or of a whole tensor (`distribute`).

Ops of weft.kernels and weft.models call `wrap` and `dtensor_spec` too. Only `dtensor_spec`, `wrap_with_spec`, `_spec`
and `STRIDED` depend on private parts of DTensor.
"""

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

from ..planning.layouts import identity
from ..world.exact import exact_axes
from ..world.groups import axis_names, device_mesh, device_type, process_mesh, this_rank, world_cache
from .tree import addends_of

Placements = Mapping[Any, Placement] | Sequence[Placement] | str
STRIDED = "_StridedShard"  # a private placement of torch, recognized by name


def layout_of(dtensor: DTensor) -> Layout:
    """The layout of a DTensor.

    A DTensor that FSDP2 shards on top of tensor parallelism is cut by tp first: "tp: S(0), dp: S(0)".
    Raises LayoutError for placements beyond Shard, Replicate and Partial, and for strided shards of any other origin.
    """
    try:
        mesh, placements = dtensor.device_mesh, dtensor.placements
    except AttributeError:
        raise ValueError(
            f"layout_of takes a DTensor, got a {type(dtensor).__name__}; make a DTensor with distribute()"
        ) from None
    return layout_on(mesh, placements)


def is_strided(dtensor: DTensor) -> bool:
    """Whether the DTensor states an order of shards by torch's `_StridedShard`, as FSDP2 does.

    Weft states the order by a permuted mesh instead. For a strided DTensor, `reshard` gives the gradient the DTensor's
    own placements.
    """
    return any(type(placement).__name__ == STRIDED for placement in dtensor.placements)


def layout_on(mesh: DeviceMesh, placements: Sequence[Any]) -> Layout:
    """The layout given by `placements` on a DeviceMesh. Of the axes that shard a dim, earlier axes are major.

    Called by `layout_of` and `layout_from_arguments`, and by weft.models' parallel/local_modules.py for gradients.
    placements: torch's or Weft's, for each axis in the DeviceMesh's order.
    Where a layout's shards are not in the order of the mesh's axes, `torch_layout` permutes the axes. For a permuted
    DeviceMesh, the result is a layout on the ProcessMesh before the permutation, with the same order of shards.
    """
    return _layout(process_mesh(mesh), axis_names(mesh), tuple(placements))


@lru_cache(maxsize=65536)
def _layout(mesh: ProcessMesh, names: tuple[str, ...], placements: tuple[Any, ...]) -> Layout:
    placement_of = dict(zip(names, placements, strict=True))
    placed: dict[str, Placement] = {}
    for name in reversed(names):
        placement = placement_of[name]
        if type(placement).__name__ == STRIDED:
            placed = _with_strided_shard(mesh, name, placement, placed)
        else:
            placed = {name: _as_weft_placement(name, placement)} | placed
    return Layout.in_order(mesh, placed)


def _as_weft_placement(axis: str, placement: Any) -> Placement:
    try:
        return as_placement(placement)
    except ValueError:
        raise LayoutError(
            f"axis {axis!r} has the placement {placement!r}, but a layout takes Shard, Replicate and Partial alone; "
            f"bring the DTensor to one of these by its redistribute() first"
        ) from None


def _with_strided_shard(
    mesh: ProcessMesh, axis: str, placement: Any, later: dict[str, Placement]
) -> dict[str, Placement]:
    """Inserts `axis`, with a strided shard, into `later`, the placements of the axes after `axis`.

    FSDP2 makes a strided shard where tensor parallelism has cut dim 0: FSDP2's axis comes first in the mesh and cuts
    last. So `axis` goes behind the axes that cut the dim before, into `placement.split_factor` parts.
    Raises LayoutError where the axes after `axis` do not cut the dim into this number of parts.
    """
    majors, parts = [], 1
    for later_axis, later_placement in later.items():
        if parts == placement.split_factor:
            break
        if isinstance(later_placement, Shard) and later_placement.dim == placement.dim:
            parts *= mesh.axis_size(later_axis)
        majors.append(later_axis)
    if parts != placement.split_factor:
        raise LayoutError(
            f"axis {axis!r} has the placement {placement!r}, which cuts every {placement.split_factor}th part of dim "
            f"{placement.dim}, and no axes after {axis!r} cut that dim into so many; bring the DTensor to Shard or "
            f"Replicate there by its redistribute() first"
        )
    first = {later_axis: later[later_axis] for later_axis in majors}
    return first | {axis: Shard(placement.dim)} | later


def wrap(local: Tensor, layout: Layout, shape: Sequence[int]) -> DTensor:
    """The DTensor of global `shape` whose local part on this rank is `local`; checks and moves nothing.

    No gradient flows through. Autograd functions wrap their outputs and define how gradients go back.
    """
    cache, key = world_cache(), (layout, tuple(shape), local.dtype, local.device)
    try:
        spec = cache.get(key)
    except TypeError:  # unhashable symbolic sizes, while a graph is traced: replaced by their values
        return wrap(local, layout, tuple(map(int, shape)))
    if spec is None:
        spec = cache[key] = _spec(local, layout, tuple(shape))
    return wrap_with_spec(local, spec)


def local_of(tensor: Tensor) -> Tensor:
    """The local tensor of a DTensor; a plain tensor as it is. Differentiable, as `to_local()` is.

    Called by clip.py, and by weft.models for gradients, adapters and targets.
    """
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shape_of(dtensor: Tensor) -> tuple[int, ...]:
    """The global shape as ints, also while a graph is traced: torch.Size may then hold symbolic sizes.

    Called where a shape goes into a plan or a cache: here, by Muon, weft.kernels' dispatch and weft.models.
    """
    return tuple(map(int, dtensor.shape))


def wrap_with_spec(local: Tensor, spec: Any) -> DTensor:
    """The DTensor of the spec, from `dtensor_spec`, with the local part `local`; as `wrap`, but faster.

    Called by `wrap`, and where the spec is cached: gradients, weft.kernels' outputs, the pipeline's messages.
    """
    # Not DTensor(...), which also calls, through slow wrappers, an __init__ that does nothing: three times the time.
    dtensor: DTensor = DTensor.__new__(DTensor, local, spec, requires_grad=False)
    return dtensor


def dtensor_spec(dtensor: DTensor) -> Any:
    """torch's spec of a DTensor: equal for DTensors of the same layout, shape and dtype, and fast to read.

    Called for keys of caches (`cached_change`, weft.kernels' dispatch), and to make DTensors by `wrap_with_spec`.
    """
    return dtensor._spec


_names_of_memory: dict[type[DTensor], str] = {}  # by class, the attribute that holds the local tensor


def memory_of(dtensor: DTensor) -> Tensor:
    """The tensor inside a DTensor that holds the local part: new memory for this tensor is new memory for the DTensor.

    Called by ZeRO, the optimizers and weft.models, to fill or to read memory without autograd. `to_local()` of a
    parameter returns a new view instead (torch 2.13). The tensor is an attribute, whose name comes from torch's
    protocol for tensor subclasses that hold tensors (`__tensor_flatten__`): 5 us, once for each class.
    A DTensor keeps this tensor while a weak reference to the DTensor exists: torch swaps no tensor that has weak
    references (`torch.utils.swap_tensors`).
    """
    name = _names_of_memory.get(type(dtensor))
    if name is None:
        (name, *_), _ = dtensor.__tensor_flatten__()  # type: ignore[no-untyped-call]  # torch has no types for it
        _names_of_memory[type(dtensor)] = name
    local: Tensor = getattr(dtensor, name)
    return local


def _spec(local: Tensor, layout: Layout, shape: tuple[int, ...]) -> Any:
    """The spec of a DTensor: mesh, placements, global shape and dtype, shared by all DTensors of a kind.

    torch's own ops and FSDP2 make a DTensor from an existing spec; no public call does. Through `from_local` each
    DTensor would take 14 us, from a spec 3 us (torch 2.13, one CPU core). A spec is never changed: an in-place op gives
    the DTensor a new spec.
    """
    mesh, placements = torch_layout(layout, _device_type(local))
    size, stride = torch.Size(shape), _contiguous_stride(shape)
    part = local.new_empty(0 if shape else ())  # for a scalar, from_local takes the shape of the local tensor
    with torch.no_grad():
        return DTensor.from_local(part, mesh, placements, run_check=False, shape=size, stride=stride)._spec


def torch_layout(layout: Layout, device_type: str) -> tuple[DeviceMesh, tuple[TorchPlacement, ...]]:
    """The DeviceMesh and torch's placements for `layout`, as DTensor.from_local takes both.

    Called by `_spec`, and by weft.models' parallel/boundaries.py. The DeviceMesh has permuted axes where earlier axes
    of the mesh are not major in `layout`. Communication: the mesh's groups, where new.
    """
    mesh, placements = _as_torch_order(layout)
    return device_mesh(mesh, device_type, layout.mesh if mesh != layout.mesh else None), placements


@lru_cache(maxsize=65536)
def _as_torch_order(layout: Layout) -> tuple[ProcessMesh, tuple[TorchPlacement, ...]]:
    """The permuted mesh and torch's placements, in the order of the permuted axes, that together state `layout`.

    In DTensor, earlier axes of the mesh are major. Permuted meshes state the further orders of shards.
    """
    names = [item.partition(":")[0] for item in str(layout).split(", ")]
    return layout.mesh.permute(*names), tuple(_to_torch(layout[name]) for name in names)


def _device_type(local: Tensor) -> str:
    """The device type of a local tensor's mesh; for a meta tensor, the device type of the world's tensors."""
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
    """`x.item()` and callers: float(x), bool(x), `if x:`.

    DTensor itself returns the local number, whatever the placements.
    Raises LayoutError for a Partial DTensor, whose local number is only this rank's addend.
    """
    (x,) = args
    axes = zip(axis_names(x.device_mesh), x.device_mesh.shape, x.placements, strict=True)
    stacked = addends_of(layout_of(x)).axes if exact_axes() is not None else ()
    partial = ", ".join(
        repr(name) for name, size, placement in axes if placement.is_partial() and (size > 1 or name in stacked)
    )
    if partial:
        raise LayoutError(
            f"a number was asked of a DTensor that is Partial over {partial}, and this rank holds only an addend; read "
            f"reshard(x), which is whole on every rank, or x.to_local(), if this rank's addend is meant"
        )
    number: bool | int | float | complex = func(x.to_local())
    return number


# Applies to every DTensor of this process, also outside Weft: torch keeps one implementation of an op for a subclass.
torch.library.register_torch_dispatch(torch.ops.aten._local_scalar_dense.default, DTensor, _number)


def distribute(
    tensor: Tensor,
    layout: Layout | ProcessMesh | DeviceMesh | None = None,
    placements: Placements = (),
    *,
    device_mesh: ProcessMesh | DeviceMesh | None = None,
) -> DTensor:
    """Makes a DTensor of a global tensor, whole on every rank: each rank keeps its part.

    layout: a Layout; or a mesh, to which `placements` belongs, as in torch's `distribute_tensor`.
    device_mesh: the mesh by torch's name for the argument; None: `layout` has the mesh.

    Where the layout is Partial over an axis, the value stays at index 0 of the axis, and the other ranks hold the
    operation's identity. For Partial("avg"), all ranks of the axis keep the value. Inside `exact_sums`, indices
    are counted on the named mesh. A rank with several indices holds a stack: an addend for each index (tree.py).
    Communication: none, except to make the mesh's process groups where these are new.
    Raises LayoutError where the layout does not fit the shape; ValueError where two layouts are given, or none.
    """
    if not isinstance(tensor, Tensor):
        raise ValueError(f"distribute takes a tensor, got a {type(tensor).__name__}; give torch.tensor() of it")
    rank = this_rank()
    if not isinstance(layout, Layout):
        mesh = mesh_argument(layout, device_mesh)
        if mesh is None:
            raise ValueError("distribute needs a layout, or a mesh and placements on it")
        layout = layout_from_arguments(mesh, placements)
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
            local = addends_of(layout).stack_value(local, layout)
        result = wrap(local, layout, tensor.shape)
    result.requires_grad_(tensor.requires_grad)
    return result


def layout_from_arguments(mesh: ProcessMesh | DeviceMesh, placements: Placements) -> Layout:
    """The Layout of a mesh and placements as a caller gives them to `reshard` or `distribute`.

    A sequence with a placement for each axis of a DeviceMesh is in the DeviceMesh's axis order.
    """
    if isinstance(mesh, DeviceMesh) and isinstance(placements, list | tuple) and len(placements) == mesh.ndim:
        return layout_on(mesh, placements)
    return Layout(as_process_mesh(mesh), placements)


def mesh_argument(
    mesh: ProcessMesh | DeviceMesh | None, device_mesh: ProcessMesh | DeviceMesh | None
) -> ProcessMesh | DeviceMesh | None:
    """The mesh given as `mesh` or, by torch's name, as `device_mesh`; None for neither. Raises ValueError for both.

    Called by `reshard` and `distribute`, and by weft.models' parallelize() and from_pretrained().
    """
    if mesh is not None and device_mesh is not None:
        raise ValueError("mesh= and device_mesh= are two names of one argument; give one of them")
    return device_mesh if mesh is None else mesh


def as_process_mesh(mesh: ProcessMesh | DeviceMesh) -> ProcessMesh:
    """The ProcessMesh of a ProcessMesh or DeviceMesh: called by public functions that take either."""
    return process_mesh(mesh) if isinstance(mesh, DeviceMesh) else mesh
