"""Forward and backward of `experts` on local tensors, and the checks of the arguments.

Forward and backward are each a single torch op (`_forward`, `_backward`), because a tracer cannot know where an
expert's rows end. Inside, `use_triton` chooses between the Triton kernels and plain torch. Backward computes the
sorted inputs and the gated activations again, instead of saving them (SonicMoE, arXiv 2512.14080).

Plain torch (`plain_forward`, `plain_backward`) computes expert by expert: the definition of the op, and the computation
on a CPU and in float64. The host reads where each expert's rows end. An expert's rows are computed in blocks. A block's
inputs and gated activations are in a workspace, which the next block overwrites.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..dispatch.arguments import described, is_int
from ..dispatch.backend import TOKEN_DTYPES, can_read, check_floats, use_triton
from ..dispatch.op import Tensors
from ..launching.launched import launched
from ..matmul.checks import check_wide
from ..routing.function import sort_rows

OP = "experts"  # in error messages


def forward(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    *,
    first: int = 0,
    rows: int | None = None,
    keep: bool = True,
) -> tuple[Tensor, Tensors]:
    """The output, as of `plain_forward`, with the dtype and the leading dims of x; and the tensors saved for backward.

    On a GPU, a token's choices are added in the order of the choices. first, rows: as for `sharded.experts`.
    keep: whether to save tensors for backward: x, weights, the sorted order, gate, up, down and both pre-activations.
    """
    source, _, offsets = sort_rows(experts, len(gate), first)
    size = _count_rows(offsets, source, rows)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    z_gate, z_up = (x.new_empty((size, gate.shape[1])) if keep else None for _ in range(2))
    _forward(_rows(x), _rows(weights), source, offsets, gate, up, down, _rows(out), z_gate, z_up, size)
    return out, (x, weights, source, offsets, gate, up, down, z_gate, z_up) if keep else ()


def inference(*tensors: Tensor, **options: Any) -> Tensor:
    """The output of `forward`, without saved tensors."""
    return forward(*tensors, keep=False, **options)[0]


def backward(
    saved: Tensors, grad: Tensor, needed: Sequence[bool], *, first: int = 0, rows: int | None = None
) -> Tensors:
    """The gradients of `plain_backward`; None for the chosen experts, and where `needed` is false."""
    x, weights, source, offsets, gate, up, down, z_gate, z_up = saved
    assert x is not None and weights is not None and gate is not None, "forward saves all operands"
    of_operands = (x, None, weights, gate, up, down)
    gradients = tuple(
        torch.empty(each.shape, dtype=each.dtype, device=each.device) if each is not None and need else None
        for each, need in zip(of_operands, needed, strict=True)
    )
    dx, _, dweights, *of_experts = gradients
    operands = _rows(grad), _rows(x), _rows(weights), source, offsets, gate, up, down, z_gate, z_up
    _backward(*operands, *(None if each is None else _rows(each) for each in (dx, dweights)), *of_experts)
    return gradients


def _rows(x: Tensor) -> Tensor:
    """x as [N, H]."""
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])


@launched(
    "experts(Tensor x, Tensor weights, Tensor source, Tensor offsets, Tensor gate, Tensor up, Tensor down, "
    "Tensor(a!) out, Tensor(b!)? z_gate, Tensor(c!)? z_up, SymInt size)"
)
def _forward(x: Tensor, *operands: Any) -> None:
    if use_triton(x):
        from . import launch  # imports triton, which a CPU run may not have

        launch.forward(x, *operands)
    else:
        plain_forward(x, *operands)


@launched(
    "experts_backward(Tensor grad, Tensor x, Tensor weights, Tensor source, Tensor offsets, Tensor gate, Tensor up, "
    "Tensor down, Tensor z_gate, Tensor z_up, Tensor(a!)? dx, Tensor(b!)? dweights, Tensor(c!)? dgate, "
    "Tensor(d!)? dup, Tensor(e!)? ddown)"
)
def _backward(grad: Tensor, *operands: Any) -> None:
    if use_triton(grad):
        from . import launch

        launch.backward(grad, *operands)
    else:
        plain_backward(grad, *operands)


def _count_rows(offsets: Tensor, source: Tensor, rows: int | None) -> int:
    """The number of sorted rows to allocate: the experts' rows, if the host can read the offsets.

    Otherwise `rows`, but no more than all choices; all choices where `rows` is None.
    Raises ValueError if the host reads more than `rows`.
    """
    most = len(source) if rows is None else min(rows, len(source))
    if not can_read(offsets):
        return most
    counted = int(offsets[-1]) if len(offsets) else 0
    check_room(counted, most)
    return counted


def check(
    x: Tensor, experts: Tensor, weights: Tensor, gate: Tensor, up: Tensor, down: Tensor, first: int, rows: int | None
) -> None:
    """Raises ValueError for shapes, dtypes, `first` or `rows` that `experts` does not take."""
    given = x, experts, weights, gate, up, down
    x_shape, experts_shape, weights_shape, gate_shape, up_shape, down_shape = (tuple(each.shape) for each in given)
    if (
        not x_shape
        or (*x_shape[:-1], *experts_shape[-1:]) != experts_shape
        or experts_shape != weights_shape
        or len(experts_shape) != len(x_shape)
    ):
        raise ValueError(
            f"{OP} takes x [..., H], experts [..., k] and weights [..., k], got {x_shape}, {experts_shape} and "
            f"{weights_shape}; give each token of x a row of its k experts and a row of their weights"
        )
    if (
        len(gate_shape) != 3
        or gate_shape != up_shape
        or gate_shape[2] != x_shape[-1]
        or down_shape != (gate_shape[0], x_shape[-1], gate_shape[1])
    ):
        raise ValueError(
            f"{OP} takes gate and up [E, I, H] and down [E, H, I] beside x [..., H], got {gate_shape}, {up_shape} and "
            f"{down_shape} beside {x_shape}; stack the experts' matrices in their first dim, and transpose a stack "
            f"with .mT where this is meant"
        )
    if experts.dtype not in TOKEN_DTYPES:
        raise ValueError(
            f"{OP}: experts is {experts.dtype}; cast it with .to(), to one of {', '.join(map(str, TOKEN_DTYPES))}"
        )
    check_floats(OP, ("weights",), weights)
    check_wide(OP, x, gate, up, down)
    if not (is_int(first) and first >= 0):
        raise ValueError(f"{OP}: first is {described(first)}; give the number of the first of these experts, 0 or more")
    if rows is not None and not (is_int(rows) and rows >= 0):
        raise ValueError(
            f"{OP}: rows is {described(rows)}; give the number of sorted rows to allocate, 0 or more, or None"
        )


ROWS_AT_ONCE = 1024  # the most rows of a block: enough for a product's full speed


class _Block(NamedTuple):
    """A block of an expert's sorted rows."""

    expert: int
    rows: int  # how many
    is_first: bool  # whether the block is the expert's first


def plain_forward(
    x: Tensor,
    weights: Tensor,
    source: Tensor,
    offsets: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    out: Tensor,
    z_gate: Tensor | None,
    z_up: Tensor | None,
    size: int,
) -> None:
    """out[n] = the sum over token n's choices of weight * down[e] @ (silu(gate[e] @ x[n]) * (up[e] @ x[n])).

    x: [N, H]. weights: [N, k]. out: [N, H]. The sum is in the order of the experts.
    source: int32 [N * k], token * k + choice of each sorted row.
    offsets: int32 [E], where each expert's rows end. The rows behind the last expert's add nothing.
    z_gate, z_up: [size, I], receive the pre-activations of the sorted rows; None to store neither.
    size: the most sorted rows to compute. Raises ValueError if the experts have more.
    """
    inner = down.shape[2]
    ends: list[int] = offsets.tolist()
    check_room(ends[-1] if ends else 0, size)
    row_weights = _row_weights(weights, source, ends)
    sums, is_out = _sums_for(out)
    # is_narrow: whether to multiply the gated activations by the weight, not the outputs: fewer numbers if I < H. In a
    # dtype of two bytes the outputs are always multiplied, in float32, to round once less.
    is_narrow = is_out and inner < x.shape[1]
    blocks = _blocks(ends)
    most = min(ROWS_AT_ONCE, len(row_weights))
    inputs, outputs = x.new_empty((most, x.shape[1])), x.new_empty((most, down.shape[1]))
    gates, ups, gated = (x.new_empty((most, inner)) for _ in range(3))
    matrices = tuple(zip(*(each.mT.unbind() for each in (gate, up, down)), strict=True))
    of_rows = _cut(blocks, _tokens(source, weights), row_weights, z_gate, z_up)
    for (expert, count, _), tokens, w, a, b in zip(blocks, *of_rows, strict=True):
        to_gate, to_up, to_output = matrices[expert]
        rows = torch.index_select(x, 0, tokens, out=inputs[:count])
        a = torch.mm(rows, to_gate, out=gates[:count] if a is None else a)
        h = torch.ops.aten.silu.out(a, out=gated[:count])  # while a is in the cache
        b = torch.mm(rows, to_up, out=ups[:count] if b is None else b)
        h.mul_(b)
        if is_narrow:
            h.mul_(w)
        y = torch.mm(h, to_output, out=outputs[:count])
        if not is_narrow:
            y = y.mul_(w) if is_out else y.to(sums.dtype) * w
        sums.index_add_(0, tokens, y)
    if not is_out:
        out.copy_(sums)


def plain_backward(
    grad: Tensor,
    x: Tensor,
    weights: Tensor,
    source: Tensor,
    offsets: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    z_gate: Tensor,
    z_up: Tensor,
    dx: Tensor | None,
    dweights: Tensor | None,
    dgate: Tensor | None,
    dup: Tensor | None,
    ddown: Tensor | None,
) -> None:
    """Writes the gradients which are not None. grad: [N, H], of the output. Further arguments: as `plain_forward`.

    For a sorted row with weight w and upstream gradient dy: h = silu(z_gate) * z_up and dh = dy @ down[e] give
    dw = dh . h and ddown[e] = (w * dy).T @ h, without computing down's product again. The gradients of the
    pre-activations follow from w * dh.
    """
    inner = down.shape[2]
    ends: list[int] = offsets.tolist()
    _zero_gradients_of_empty(ends, dgate, dup, ddown)
    row_weights = _row_weights(weights, source, ends)
    row_dweights = None if dweights is None else torch.empty_like(row_weights)
    sums, is_out = (None, True) if dx is None else _sums_for(dx)
    # is_narrow: whether to multiply the gated activations by the weight, not the upstream gradient: fewer numbers
    # if I < H
    is_narrow = inner < x.shape[1]
    blocks = _blocks(ends)
    most = min(ROWS_AT_ONCE, len(row_weights))
    inputs, upstream = x.new_empty((most, x.shape[1])), x.new_empty((most, down.shape[1]))
    space = [x.new_empty((most, inner)) for _ in range(4)]
    matrices = tuple(zip(gate.unbind(), up.unbind(), down.unbind(), strict=True))
    gradients = [None if each is None else each.unbind() for each in (dgate, dup, ddown)]
    of_rows = _cut(blocks, _tokens(source, weights), row_weights, row_dweights, z_gate, z_up)
    for (expert, count, is_first), tokens, w, dw, a, b in zip(blocks, *of_rows, strict=True):
        assert tokens is not None and w is not None and a is not None and b is not None, "only dw may be left out"
        of_gate, of_up, of_down = matrices[expert]
        dgate_e, dup_e, ddown_e = (None if each is None else each[expert] for each in gradients)
        dh, h, da, db = (each[:count] for each in space)
        dy = torch.index_select(grad, 0, tokens, out=upstream[:count])
        torch.mm(dy, of_down, out=dh)
        _write_gated(a, b, dh, w, h, da, db, dw)
        if ddown_e is not None:
            (h if is_narrow else dy).mul_(w)
            _add_product(dy.mT, h, ddown_e, is_first)
        if dgate_e is not None or dup_e is not None:
            rows = torch.index_select(x, 0, tokens, out=inputs[:count])
            for dz, total in ((da, dgate_e), (db, dup_e)):
                if total is not None:
                    _add_product(dz.mT, rows, total, is_first)
        if sums is not None:
            y = torch.mm(da, of_gate, out=dy).addmm_(db, of_up)
            sums.index_add_(0, tokens, y if is_out else y.to(sums.dtype))
    if dx is not None and sums is not None and not is_out:
        dx.copy_(sums)
    if dweights is not None and row_dweights is not None:
        chosen = source[: len(row_dweights)].long()
        dweights.zero_().view(-1).index_copy_(0, chosen, row_dweights.view(-1).to(dweights.dtype))


def check_room(rows: int, size: int) -> None:
    """Raises ValueError if the experts have more sorted rows (`rows`) than are allocated (`size`)."""
    if rows > size:
        raise ValueError(
            f"experts: {rows} choices are of the experts here, and rows={size} leaves no room for them; give "
            f"rows={rows} or more, or leave rows out to allocate for all choices"
        )


def _write_gated(
    z_gate: Tensor, z_up: Tensor, dh: Tensor, w: Tensor, h: Tensor, z_dgate: Tensor, z_dup: Tensor, dw: Tensor | None
) -> None:
    """Writes h = silu(z_gate) * z_up, dw = dh . h, and the gradients of z_gate and z_up for the gradient w * dh of h.

    Overwrites dh. Allocates nothing: z_dup holds silu(z_gate) at first, and z_dgate the products whose sum is dw.
    """
    torch.ops.aten.silu.out(z_gate, out=z_dup)
    torch.mul(z_dup, z_up, out=h)
    if dw is not None:
        torch.sum(torch.mul(h, dh, out=z_dgate), -1, keepdim=True, dtype=dw.dtype, out=dw)
    z_dup.mul_(dh.mul_(w))
    torch.ops.aten.silu_backward.grad_input(dh.mul_(z_up), z_gate, grad_input=z_dgate)


def _add_product(a: Tensor, b: Tensor, total: Tensor, is_first: bool) -> None:
    """total = a @ b for the first block of an expert, total += a @ b for the next blocks."""
    if is_first:
        torch.mm(a, b, out=total)
    else:
        total.addmm_(a, b)


def _zero_gradients_of_empty(ends: list[int], *gradients: Tensor | None) -> None:
    """Writes zeros into the gradients of experts without rows."""
    for expert, (start, stop) in enumerate(zip([0, *ends], ends, strict=False)):
        if start == stop:
            for gradient in gradients:
                if gradient is not None:
                    gradient[expert].zero_()


def _tokens(source: Tensor, weights: Tensor) -> Tensor:
    """The tokens of the sorted rows. int64: `index_add_` takes twice as long by int32."""
    return source.long() // weights.shape[1]


def _row_weights(weights: Tensor, source: Tensor, ends: list[int]) -> Tensor:
    """The weights of the experts' sorted rows, [rows, 1], in float32 at least."""
    rows = ends[-1] if ends else 0
    chosen = weights.reshape(-1, 1).index_select(0, source[:rows])
    return chosen.to(torch.promote_types(weights.dtype, torch.float32))


def _sums_for(out: Tensor) -> tuple[Tensor, bool]:
    """Zeros like `out`, in float32 at least, to which choices are added; and whether the zeros are `out` itself."""
    if out.dtype.itemsize > 2:
        return out.zero_(), True
    return torch.zeros(out.shape, dtype=torch.float32, device=out.device), False


def _blocks(ends: list[int]) -> list[_Block]:
    """The blocks of all experts' rows, in order. ends: where each expert's rows end."""
    return [
        _Block(expert, min(ROWS_AT_ONCE, stop - first), first == start)
        for expert, (start, stop) in enumerate(zip([0, *ends], ends, strict=False))
        for first in range(start, stop, ROWS_AT_ONCE)
    ]


def _cut(blocks: list[_Block], *tensors: Tensor | None) -> Iterator[Sequence[Tensor | None]]:
    """Cuts each tensor's rows into the blocks; None gives None for each block.

    torch.split is a single call: slicing in Python would take as long as small products.
    """
    counts = [block.rows for block in blocks]
    for each in tensors:
        yield [None] * len(blocks) if each is None else torch.split(each[: sum(counts)], counts)
