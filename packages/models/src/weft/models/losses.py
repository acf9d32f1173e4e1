"""For a loss of which each rank has a part: the gradient that starts backward, and the sum over ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from weft.reshard import layout_of, plan, start_reshard
from weft.reshard.extension import (
    Pending,
    StartedReshard,
    cotangent,
    dtensor_spec,
    exact_axes,
    memory_of,
    start_plan,
    wrap,
    wrap_with_spec,
)

IGNORE_INDEX = -100  # torch's default `ignore_index`: the target of ignored tokens


def first_gradient(loss: Tensor) -> Tensor:
    """The gradient to start a loss's backward: ones, replicated on the axes over which the loss is Partial."""
    with torch.no_grad():
        if not isinstance(loss, DTensor):
            return torch.ones_like(loss)
        local = loss.to_local()  # empty on a rank outside the mesh; inside `exact_sums` perhaps a stack
        one = local.new_ones(()) if local.numel() else torch.ones_like(local)
        return wrap(one, cotangent(layout_of(loss)), loss.shape)


def local_value(scalar: Tensor) -> Tensor:
    """This rank's part of a scalar, as a plain tensor without graph.

    Inside `exact_sums`, a stack: an entry for each of this rank's coordinates on the named mesh.
    """
    return (memory_of(scalar) if isinstance(scalar, DTensor) else scalar).detach()


def without_graph(loss: Tensor) -> Tensor:
    """The loss detached from the graph, in the same layout. Faster than DTensor's own `detach`."""
    return wrap_with_spec(local_value(loss), dtensor_spec(loss)) if isinstance(loss, DTensor) else loss.detach()


def sum_of_microbatches(values: Sequence[Tensor]) -> Tensor:
    """The sum of the microbatches' tensors, of equal shapes.

    Inside `exact_sums` the tensors are added in turn. Tensors then have a leading dim for each folded axis, and torch's
    sum of a stack has an order that depends on the shape.
    """
    if exact_axes() is None:
        return torch.stack(list(values)).sum(0) if len(values) > 1 else values[0]
    total, *further = values
    for value in further:
        total = total + value
    return total


class LossSum:
    """The sum of the losses of a step's microbatches over all ranks. The constructor starts it, `wait` finishes it.

    losses: this rank's scalars, all in the same layout. Empty before the last pipeline stage: the sum is then 0, of the
        model's `dtype` widened to at least float32.
    addends: further numbers [n] of this rank, summed over the ranks together with the losses. Inside `exact_sums`
        stacked like the losses. None: no further numbers.
    local: the sum of the losses on this rank alone. Inside `exact_sums`, a stack as of `local_value`.
    Communication: a reshard of 1 + n numbers over the axes sharding the tokens; n = 0 without addends.
    Raises ValueError inside `exact_sums` for addends not stacked like the losses.
    """

    def __init__(
        self,
        losses: Sequence[Tensor],
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        addends: Tensor | None = None,
    ) -> None:
        wide = torch.promote_types(dtype, torch.float32)
        parts = [local_value(loss) for loss in losses] or [torch.zeros((), dtype=wide, device=device)]
        self.local = sum_of_microbatches(parts)
        self._pending: Pending | StartedReshard | None = None
        self._values = self.local
        if addends is not None and exact_axes() is not None:
            if addends.shape[:-1] != self.local.shape:
                raise ValueError(
                    f"a criterion returned sums of its own, {tuple(addends.shape)} on this rank, which exact cannot "
                    f"divide among the {self.local.numel()} coordinates of its mesh; leave out the sums, or exact"
                )
            self._values = torch.cat([self.local[..., None], addends.to(self.local.dtype)], -1)
        elif addends is not None:
            self._values = torch.cat([self.local[None], addends.to(self.local.dtype)])
        if losses and isinstance(losses[0], DTensor):
            layout = layout_of(losses[0])
            if exact_axes() is not None:  # the local value may be a stack, see `local_value`
                shape = self._values.shape[self.local.ndim :]
                self._pending = start_reshard(wrap(self._values, layout, shape), placements=cotangent(layout))
                return
            # Runs the plan on plain tensors: the autograd and DTensors of `reshard` take longer than the sum.
            summed = plan(layout, cotangent(layout), tuple(self._values.shape), self.local.dtype)
            self._pending = start_plan(summed, self._values, losses[0].device_mesh)

    def wait(self) -> Tensor:
        """The sum over all ranks, as a plain scalar; with addends, a vector [1 + n], the sum of losses first."""
        if self._pending is None:
            return self._values
        total = self._pending.wait()
        return total.to_local() if isinstance(total, DTensor) else total
