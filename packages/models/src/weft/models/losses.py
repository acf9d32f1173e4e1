"""A loss computed in parts by the ranks: where backward starts, and the sum over ranks, overlapped with backward."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from weft.reshard import layout_of, plan
from weft.reshard.extension import Pending, cotangent, dtensor_spec, memory_of, start_plan, wrap, wrap_with_spec

IGNORE_INDEX = -100  # torch's default `ignore_index`: the target of tokens that do not count


def first_gradient(loss: Tensor) -> Tensor:
    """The gradient at which a loss's backward starts: ones, replicated on the axes over which the loss is Partial."""
    with torch.no_grad():
        if not isinstance(loss, DTensor):
            return torch.ones_like(loss)
        return wrap(torch.ones_like(loss.to_local()), cotangent(layout_of(loss)), loss.shape)


def local_value(scalar: Tensor) -> Tensor:
    """This rank's value of a scalar, as a plain tensor."""
    return (memory_of(scalar) if isinstance(scalar, DTensor) else scalar).detach()


def without_graph(loss: Tensor) -> Tensor:
    """The loss detached from the graph, in the same layout; skips the dispatch of DTensor's own `detach`."""
    return wrap_with_spec(local_value(loss), dtensor_spec(loss)) if isinstance(loss, DTensor) else loss.detach()


class LossSum:
    """The sum of the losses of a step's microbatches over all ranks, started when made and finished by `wait`.

    losses: this rank's scalars, all in the same layout. Empty on a pipeline stage other than the last; the sum is
    then 0, of the model's `dtype` widened to at least float32.
    addends: further numbers [n] of this rank, summed over the ranks with the losses.
    local: the sum of the losses on this rank alone.
    Communication: a reshard of one number, or 1 + n, over the axes that shard the tokens.
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
        self.local = torch.stack(parts).sum() if len(parts) > 1 else parts[0]
        self._pending: Pending | None = None
        self._values = self.local
        if addends is not None:
            self._values = torch.cat([self.local[None], addends.to(self.local.dtype)])
        if losses and isinstance(losses[0], DTensor):
            layout = layout_of(losses[0])
            # Runs the plan on plain tensors: the autograd and DTensors of `reshard` take longer than the sum.
            summed = plan(layout, cotangent(layout), tuple(self._values.shape), self.local.dtype)
            self._pending = start_plan(summed, self._values, losses[0].device_mesh)

    def wait(self) -> Tensor:
        """The sum over all ranks, as a plain scalar; with addends, a vector of the loss's and the addends' sums."""
        return self._values if self._pending is None else self._pending.wait()
