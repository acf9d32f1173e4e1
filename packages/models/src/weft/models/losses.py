"""A loss of which each rank has a part: where its backward begins, and its sum over the ranks, which travels meanwhile."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from weft.reshard import layout_of, plan
from weft.reshard.planning.layouts import cotangent
from weft.reshard.running.collectives import Pending
from weft.reshard.running.dtensor import kind_of, memory_of, of_kind, wrap
from weft.reshard.running.executor import started


def first_gradient(loss: Tensor) -> Tensor:
    """With what the backward of a loss begins that is summed over the ranks: 1, as it lies where a reshard gives it back."""
    with torch.no_grad():
        if not isinstance(loss, DTensor):
            return torch.ones_like(loss)
        return wrap(torch.ones_like(loss.to_local()), cotangent(layout_of(loss)), loss.shape)


def local_value(scalar: Tensor) -> Tensor:
    """A number as a plain tensor: this rank's."""
    return (memory_of(scalar) if isinstance(scalar, DTensor) else scalar).detach()


def without_graph(loss: Tensor) -> Tensor:
    """The loss as it lies, which keeps nothing for backward alive. A DTensor's own `detach` goes through its dispatch."""
    return of_kind(local_value(loss), kind_of(loss)) if isinstance(loss, DTensor) else loss.detach()


class LossSum:
    """The sum of the losses of a rank's microbatches, on its way over all ranks.

    losses: scalars that lie alike; none on a stage that is not the last, whose sum is 0, of a model of that dtype. local: the sum
    of this rank's parts.
    Communication: a reshard of a number, over the axes that shard the tokens.
    """

    def __init__(self, losses: Sequence[Tensor], device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        wide = torch.promote_types(dtype, torch.float32)
        parts = [local_value(loss) for loss in losses] or [torch.zeros((), dtype=wide, device=device)]
        self.local = torch.stack(parts).sum() if len(parts) > 1 else parts[0]
        self._pending: Pending | None = None
        if losses and isinstance(losses[0], DTensor):
            layout = layout_of(losses[0])
            # A reshard without its autograd and its DTensors, which take longer than the sum.
            summed = plan(layout, cotangent(layout), (), self.local.dtype)
            self._pending = started(summed, self.local, losses[0].device_mesh)

    def wait(self) -> Tensor:
        """The sum over all ranks, a plain number."""
        return self.local if self._pending is None else self._pending.wait()
