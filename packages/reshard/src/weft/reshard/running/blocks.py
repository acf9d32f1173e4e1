"""Parts of a tensor as a collective stacks them, and as the tensor holds them: padded, put side by side, taken apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from ..planning.steps import AllGather, ReduceScatter, axes_of, dims_of


def padded(local: Tensor, shape: Sequence[int]) -> Tensor:
    """`local`, contiguous, with zeros behind it up to `shape`."""
    if list(local.shape) == list(shape):
        return local.contiguous()
    larger = local.new_zeros(shape)
    larger[tuple(slice(size) for size in local.shape)] = local
    return larger


def cut_to(part: Tensor, shape: Sequence[int]) -> Tensor:
    """The first elements of a padded part, up to `shape`."""
    return part[tuple(slice(size) for size in shape)].contiguous()


def assembled(stacked: Tensor, leading: Sequence[str], step: AllGather) -> Tensor:
    """Parts stacked along `leading` axes, put side by side in the dims that the axes shard."""
    count = len(leading)
    order: list[int] = []
    shape: list[int] = []
    for dim, size in enumerate(stacked.shape[count:]):
        of_dim = [leading.index(axis) for axis in _axes_over(step, dim)]
        order += [*of_dim, count + dim]
        for position in of_dim:
            size *= stacked.shape[position]
        shape.append(size)
    return stacked.permute(order).reshape(shape)


def taken_apart(
    local: Tensor, part: Sequence[int], leading: Sequence[str], sizes: Mapping[str, int], step: ReduceScatter
) -> Tensor:
    """The reverse of `assembled`: padded to whole parts of shape `part`, and those stacked along `leading`."""
    view: list[int] = []
    where: dict[str, int] = {}
    inner: list[int] = []
    whole: list[int] = []
    for dim, size in enumerate(part):
        over = _axes_over(step, dim)
        for axis in over:
            where[axis] = len(view)
            view.append(sizes[axis])
        inner.append(len(view))
        view.append(size)
        for axis in over:
            size *= sizes[axis]
        whole.append(size)
    return padded(local, whole).reshape(view).permute(*(where[axis] for axis in leading), *inner).contiguous()


def _axes_over(step: AllGather | ReduceScatter, dim: int) -> list[str]:
    return [axis for axis, over in zip(axes_of(step), dims_of(step), strict=True) if over == dim]
