"""`clip_grad_norm_` for gradients in any layouts. Each element counts once; a single all-reduce gives the norm."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from weft.mesh import Partial, ProcessMesh, Shard
from weft.mesh.extension import is_number, parts_of_axes

from ..moving.dtensor import as_process_mesh, layout_of, local_of
from ..moving.waits import wait_for
from ..world.exact import marked_axes
from ..world.groups import device_mesh, device_type, group_of, group_over, this_rank
from .cut_models import refuse_cut_models
from .exact_norm import exact_norm
from .gradient_sync import refuse_before_wait


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    mesh: ProcessMesh | DeviceMesh | None = None,
    copies: Iterable[Tensor] = (),
) -> Tensor:
    """Scales gradients to a total norm of at most `max_norm`. Returns the norm before scaling, a scalar, on every rank.

    parameters: DTensors on any meshes, also with gradients in different layouts, and plain tensors, which count as
        replicated. A parameter given twice counts once.
    norm_type: p of the p-norm of all gradients as a single vector, above 0; inf takes the largest magnitude.
    mesh: the ranks over which the norm is taken. None takes the ranks of all parameters' meshes; every rank then gives
        parameters on the same meshes. In a pipeline, where each rank gives the parameters of the rank's stages, give
        the mesh of all stages, and frozen parameters too: a stage may have no others. Plain tensors then belong to this
        rank alone.
    copies: parameters with repeated gradients, as those of a weight tied across stages: scaled, not counted.

    Each element counts once, however many ranks hold the element's shard. Sums are taken in float32, with a float64
    parameter in float64. A norm of inf or NaN scales nothing. The host waits for no device.
    Inside `exact_sums`, and outside for parameters of a plan with `exact`, the norm and the scaled gradients have the
    same bits on every mesh and in any layouts. The norm is then rounded to float32 once: magnitudes whose squares are
    not float32 numbers count, too.
    Communication: an all-reduce of a number over the ranks of `mesh`, where any parameter is a DTensor or a mesh is
    given; inside `exact_sums`, as `exact_norm`. A rank outside takes no part, and gets the norm of local gradients.
    Raises ValueError for a max_norm below 0, a norm_type of 0 or less, inside `exact_sums` also for norms except 1, 2
    and inf, for a Partial gradient, which is only this rank's addend, and without `mesh` for parameters of a model cut
    into stages; RuntimeError for gradients before GradientSync's `wait()`.
    """
    if not (is_number(max_norm) and max_norm >= 0):
        raise ValueError(f"max_norm is {max_norm!r}; give a number >= 0")
    if not (is_number(norm_type) and norm_type > 0):
        raise ValueError(f"norm_type is {norm_type!r}; give a number > 0, or inf")
    unique = dict.fromkeys([parameters] if isinstance(parameters, Tensor) else parameters)
    refuse_before_wait(unique, "clip_grad_norm_()")
    if mesh is None:
        refuse_cut_models(unique, "clip_grad_norm_()")
    group, counts_plain = _group_and_counter(list(unique), mesh)
    counts_plain = counts_plain or mesh is not None
    with_grad = [parameter for parameter in unique if parameter.grad is not None]
    gradients: list[Tensor] = [parameter.grad for parameter in with_grad if parameter.grad is not None]
    uncounted, is_exact = set(copies), marked_axes(unique) is not None
    counted = [
        part
        for parameter, gradient in zip(with_grad, gradients, strict=True)
        if parameter not in uncounted
        and (part := _counted_part(gradient, counts_plain, splits=is_exact)) is not None
        and part.numel()
    ]
    device = next((each.device for each in gradients or unique), None)
    if device is None and group is not None:
        device = torch.device(device_type())  # a stage without parameters
    # Of the parameters: every rank has the same dtype for the all-reduce, also a rank without a gradient.
    dtype = torch.float64 if any(each.dtype == torch.float64 for each in unique) else torch.float32
    if is_exact:
        norm = exact_norm(counted, norm_type, group, device).to(dtype)
    else:
        norm = _norm(counted, norm_type, dtype, group, device)
    quotient = (max_norm / norm).nan_to_num(0.0)  # 0 for 0 / 0; torch adds 1e-6 to the norm instead
    scale = torch.where(norm.isfinite(), quotient.clamp(max=1), 1)
    if gradients:
        torch._foreach_mul_([local_of(gradient) for gradient in gradients], scale)
    return norm


def _group_and_counter(
    parameters: list[Tensor], mesh: ProcessMesh | DeviceMesh | None
) -> tuple[dist.ProcessGroup | None, bool]:
    """The group over which the norm is taken, None for no group, and whether this rank counts plain tensors."""
    device_meshes = {layout_of(each).mesh: each.device_mesh for each in parameters if isinstance(each, DTensor)}
    if mesh is not None:
        kind = parameters[0].device.type if parameters else device_type()
        device_meshes = {as_process_mesh(mesh): mesh if isinstance(mesh, DeviceMesh) else device_mesh(mesh, kind)}
    if not device_meshes:
        return None, True
    largest = max(device_meshes, key=lambda each: each.size)
    # Whether all meshes have the same ranks.
    if all(parts_of_axes(each, largest) or parts_of_axes(largest, each) for each in device_meshes):
        coordinate = largest.coordinate(this_rank())
        if coordinate is None or largest.size == 1:
            return None, True
        return group_over(device_meshes[largest], largest.axis_names), not any(coordinate.values())
    ranks = tuple(sorted({rank for each in device_meshes for rank in each}))
    return (group_of(ranks), this_rank() == ranks[0]) if this_rank() in ranks else (None, True)


def _counted_part(gradient: Tensor, counts_plain: bool, *, splits: bool) -> Tensor | None:
    """This rank's elements of the gradient to count: each element of the gradient counts on a single rank.

    Of the ranks with the same shard, the first counts the shard. splits: each counts some rows instead, for a norm
    whose sum is exact in any order. Returns None for nothing to count.
    """
    if not isinstance(gradient, DTensor):
        return gradient if counts_plain else None
    layout = layout_of(gradient)
    if any(isinstance(placement, Partial) for placement in layout.placements):
        raise ValueError(
            f"a gradient of shape {tuple(gradient.shape)} is ({layout}): this rank has only an addend; call wait() of "
            f"the GradientSync before clip_grad_norm_()"
        )
    coordinate = layout.mesh.coordinate(this_rank())
    if coordinate is None:
        return None
    part, parts = 0, 1
    for axis, index in coordinate.items():
        if not isinstance(layout[axis], Shard):
            size = layout.mesh.axis_size(axis)
            part, parts = part * size + index, parts * size
    local = local_of(gradient)
    if splits and parts > 1 and local.ndim:
        rows = local.shape[0]
        return local[rows * part // parts : rows * (part + 1) // parts]
    return None if part else local


def _norm(
    counted: list[Tensor],
    norm_type: float,
    dtype: torch.dtype,
    group: dist.ProcessGroup | None,
    device: torch.device | None,
) -> Tensor:
    """The norm of all elements on all ranks of `group`, with sums in `dtype`. Communication: an all-reduce."""
    takes_maximum = math.isinf(norm_type)
    if counted:
        norms = torch.stack(torch._foreach_norm(counted, norm_type, dtype=dtype))
        total = norms.max() if takes_maximum else norms.pow(norm_type).sum()
    else:
        total = torch.zeros((), dtype=dtype, device=device)
    if group is not None:
        op = dist.ReduceOp.MAX if takes_maximum else dist.ReduceOp.SUM
        wait_for(dist.all_reduce(total, op, group=group, async_op=True))
    return total if takes_maximum else total ** (1 / norm_type)
