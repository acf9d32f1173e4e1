"""The input of a vocab-parallel matrix product: every rank of the group needs all of the input.

`SharedInput`: the ranks have all of the input already. `GatheredInput`: each rank has some of the tokens.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, library
from weft.mesh.extension import largest_part
from weft.reshard.extension import Pending, group_named, reduce_scatter, start_all_gather, wait_for

from ...dispatch.backend import is_compiling
from ...dispatch.op import Tensors
from ...dispatch.sharded.functions import refuse_second_derivative


class SharedInput(torch.autograd.Function):
    """Replicate -> Replicate: forward does nothing. The dual sums the gradients of all ranks by an all-reduce."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, group: str) -> Tensor:
        ctx.group = group
        return input.view_as(input)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous()
        run = _traced_all_reduce if is_compiling() else _all_reduce
        # In place: the only op to use the output has just computed this gradient, and nothing else reads it.
        run(grad, ctx.group)
        return grad, None


class GatheredInput(torch.autograd.Function):
    """Shard(0) -> Replicate: an all-gather. The dual is a reduce-scatter. Dim 0 is padded to equal parts for both.

    tokens: the size of dim 0 over all ranks.
    after: the scalar by which the ranks have compared their sizes. The gather does not read it; as an argument it makes
        a compiled graph finish the comparison before the gather.
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor, tokens: int, group: str, after: Tensor) -> Tensor:
        ctx.group, ctx.rows = group, input.shape[0]
        run = _traced_all_gather if is_compiling() else _all_gather
        return run(input, tokens, group, after)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensors:
        if is_compiling():
            return _traced_reduce_scatter(grad, ctx.rows, ctx.group), None, None, None
        with torch.no_grad():
            part = _reduce_scatter(grad, ctx.rows, ctx.group)
        gradients = refuse_second_derivative((part,), grad) if torch.is_grad_enabled() else (part,)
        return *gradients, None, None, None


def _all_reduce(whole: Tensor, group: str) -> None:
    wait_for(dist.all_reduce(whole, group=group_named(group), async_op=True))


def _all_gather(part: Tensor, tokens: int, group: str, after: Tensor) -> Tensor:
    ranks = group_named(group)
    share = largest_part(tokens, ranks.size())
    whole = part.new_empty(share * ranks.size(), *part.shape[1:])
    wait_for(start_all_gather(whole, _pad(part, share), ranks))
    return whole[:tokens]


def _reduce_scatter(whole: Tensor, rows: int, group: str) -> Tensor:
    ranks = group_named(group)
    share = largest_part(whole.shape[0], ranks.size())
    stacked = _pad(whole, share * ranks.size())
    part = Pending(reduce_scatter(stacked, "sum", [(ranks, range(ranks.size()))])).wait()
    return part.view(share, *whole.shape[1:])[:rows]


def _pad(x: Tensor, rows: int) -> Tensor:
    return torch.cat((x, x.new_zeros(rows - len(x), *x.shape[1:]))) if len(x) < rows else x.contiguous()


# Called only while tracing: in eager mode custom ops would hide their collectives from modes that count them.
_traced_all_reduce = library.custom_op("weft::all_reduce_", _all_reduce, mutates_args=("whole",))
_traced_all_gather = library.custom_op("weft::all_gather_tokens", _all_gather, mutates_args=())
_traced_reduce_scatter = library.custom_op("weft::reduce_scatter_tokens", _reduce_scatter, mutates_args=())


@_traced_all_gather.register_fake
def _(part: Tensor, tokens: int, group: str, after: Tensor) -> Tensor:
    return part.new_empty(tokens, *part.shape[1:])


@_traced_reduce_scatter.register_fake
def _(whole: Tensor, rows: int, group: str) -> Tensor:
    return whole.new_empty(rows, *whole.shape[1:])
