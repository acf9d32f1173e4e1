"""Sums that losses take over ranks and over documents.

For a loss of which each rank has a part: the gradient that starts backward, and the sum over ranks. `document_sums`
sums per-token values over the documents of packed rows, for log-probabilities of answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from weft.kernels.extension import Op, Sharding, apply, infer_gradient_layouts
from weft.mesh import Layout, LayoutError, Partial
from weft.reshard import layout_of, plan, reshard, start_reshard
from weft.reshard.extension import (
    Pending,
    StartedReshard,
    cotangent,
    dtensor_spec,
    exact_axes,
    memory_of,
    partial_axes,
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


def document_sums(values: Tensor, documents: Tensor, num_documents: int) -> Tensor:
    """Sums of the tokens' values by document: values [B, T] -> [B, num_documents].

    documents: [B, T] ints, the number of each token's document in its row, from 0. Tokens with a number of
        num_documents or more, such as padding, are left out. On a mesh laid out like `values`: `Batch.numbers` of
        `lay_out_batch`.
    Differentiable in `values`. The order of the sums is fixed: equal inputs give equal bits.
    On a mesh the result is sharded like the rows, and replicated over the axes sharding the tokens of a row.
    Communication: an all-reduce of [B, num_documents] over the axes sharding the tokens of a row; none in backward.
    Raises ValueError for different shapes, documents other than ints, and a negative number; LayoutError for different
    layouts, and for values that are partial sums.
    """
    if values.ndim != 2 or documents.shape != values.shape:
        raise ValueError(
            f"document_sums takes values [B, T] and documents of equal shape, got {tuple(values.shape)} and "
            f"{tuple(documents.shape)}"
        )
    if documents.is_floating_point() or documents.is_complex() or documents.dtype == torch.bool:
        raise ValueError(f"document_sums: documents are {documents.dtype}; give ints, the number of a token's document")
    if num_documents < 0:
        raise ValueError(f"document_sums: num_documents is {num_documents}; give 0 or more")
    sums: Tensor = apply(DOCUMENT_SUMS, values, documents, num_documents=num_documents)
    if not isinstance(sums, DTensor):
        return sums
    layout = layout_of(sums)
    return reshard(sums, placements=layout.replace(**dict.fromkeys(partial_axes(layout), "R")))


def _forward(values: Tensor, documents: Tensor, *, num_documents: int) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    numbers = torch.arange(num_documents, device=documents.device)
    chosen = documents[:, None] == numbers[:, None]  # [B, D, T]
    return torch.where(chosen, values[:, None], 0).sum(-1), (documents,)


def _backward(saved: Any, grad: Tensor, needed: Any, *, num_documents: int) -> tuple[Tensor | None, ...]:
    """The gradient of a token's value: the gradient of the document's sum; 0 for a token left out."""
    (documents,) = saved
    if not needed[0]:
        return None, None
    if not num_documents:
        return grad.new_zeros(documents.shape), None
    inside = (documents >= 0) & (documents < num_documents)
    return torch.where(inside, grad.gather(1, torch.where(inside, documents, 0).long()), 0), None


def _rule(
    layouts: tuple[Layout | None, ...], shapes: tuple[tuple[int, ...] | None, ...], options: dict[str, Any]
) -> Sharding:
    values, documents = layouts
    assert values is not None and documents is not None and shapes[0], "apply passes both"
    if partial_axes(values):
        raise LayoutError(f"document_sums has values ({values}), which are partial sums; reshard the values first")
    if documents != values:
        raise LayoutError(
            f"document_sums has values ({values}) and documents ({documents}); reshard the documents to ({values})",
            (values,),
        )
    output = values.replace(**dict.fromkeys(values.shard_order.get(1, ()), Partial("sum")))
    return Sharding(output, (shapes[0][0], options["num_documents"]), infer_gradient_layouts(output, layouts))


DOCUMENT_SUMS = Op("document sums", _forward, _backward, _rule)
