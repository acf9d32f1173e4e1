"""The experts in plain torch, one after another: the path on a CPU and in float64, and the definition of the result.

The host reads where each expert's rows end. An expert's rows are computed in blocks. A block's inputs and gated
activations are in a workspace, which the next block overwrites.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

ROWS_AT_ONCE = 1024  # of a block: enough for a product's full speed
ELEMENTS_AT_ONCE = 2**16  # of a gate's elementwise work: 256 KB in float32, so a core's cache holds all operands


class _Block(NamedTuple):
    """A block of one expert's sorted rows."""

    expert: int
    rows: slice
    tokens: Tensor  # the token of each row
    is_first: bool  # of the expert


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
    z_gate, z_up: [size, I], receive the pre-activations of the sorted rows; None where they are not wanted.
    size: the sorted rows to compute at most. Raises ValueError where the experts have more.
    """
    inner = down.shape[2]
    ends: list[int] = offsets.tolist()
    check_room(ends[-1] if ends else 0, size)
    row_weights = _row_weights(weights, source, ends)
    sums, is_sum = _sums_for(out)
    most = min(ROWS_AT_ONCE, len(row_weights))
    inputs, outputs = x.new_empty((most, x.shape[1])), x.new_empty((most, down.shape[1]))
    gates, ups, gated = (x.new_empty((most, inner)) for _ in range(3))
    for expert, rows, tokens, _ in _blocks(ends, source, weights.shape[1]):
        count = len(tokens)
        torch.index_select(x, 0, tokens, out=inputs[:count])
        a = gates[:count] if z_gate is None else z_gate[rows]
        b = ups[:count] if z_up is None else z_up[rows]
        torch.mm(inputs[:count], gate[expert].mT, out=a)
        torch.mm(inputs[:count], up[expert].mT, out=b)
        for part in _parts(count, inner):
            torch.mul(F.silu(a[part]), b[part], out=gated[part])
        y = torch.mm(gated[:count], down[expert].mT, out=outputs[:count])
        sums.index_add_(0, tokens, y.mul_(row_weights[rows]) if is_sum else y.to(sums.dtype) * row_weights[rows])
    if not is_sum:
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
    """Writes the gradients that are not None. grad: [N, H], of the output.

    For a sorted row with weight w and upstream gradient dy: h = silu(z_gate) * z_up and dh = dy @ down[e] give
    dw = dh . h and ddown[e] = (w * dy).T @ h, so down's product is not needed again. The gradients of the
    pre-activations follow from w * dh.
    """
    inner = down.shape[2]
    ends: list[int] = offsets.tolist()
    _zero_gradients_of_empty(ends, dgate, dup, ddown)
    row_weights = _row_weights(weights, source, ends)
    row_dweights = None if dweights is None else torch.empty_like(row_weights)
    sums, is_sum = (None, True) if dx is None else _sums_for(dx)
    most = min(ROWS_AT_ONCE, len(row_weights))
    inputs, upstream = x.new_empty((most, x.shape[1])), x.new_empty((most, down.shape[1]))
    of_hidden, hidden, of_gate, of_up = (x.new_empty((most, inner)) for _ in range(4))
    for expert, rows, tokens, is_first in _blocks(ends, source, weights.shape[1]):
        count, w = len(tokens), row_weights[rows]
        dy = torch.index_select(grad, 0, tokens, out=upstream[:count])
        dh, h, da, db = (each[:count] for each in (of_hidden, hidden, of_gate, of_up))
        torch.mm(dy, down[expert], out=dh)
        dw = None if row_dweights is None else row_dweights[rows]
        for part in _parts(count, inner):
            of_part = None if dw is None else dw[part]
            _write_gated(z_gate[rows][part], z_up[rows][part], dh[part], w[part], h[part], da[part], db[part], of_part)
        if ddown is not None:
            _add_product((dy * w.to(dy.dtype)).mT, h, ddown[expert], is_first)
        if dgate is not None or dup is not None:
            torch.index_select(x, 0, tokens, out=inputs[:count])
        if dgate is not None:
            _add_product(da.mT, inputs[:count], dgate[expert], is_first)
        if dup is not None:
            _add_product(db.mT, inputs[:count], dup[expert], is_first)
        if sums is not None:
            y = torch.mm(da, gate[expert], out=upstream[:count]).addmm_(db, up[expert])
            sums.index_add_(0, tokens, y if is_sum else y.to(sums.dtype))
    if dx is not None and sums is not None and not is_sum:
        dx.copy_(sums)
    if dweights is not None and row_dweights is not None:
        chosen = source[: len(row_dweights)].long()
        dweights.zero_().view(-1).index_copy_(0, chosen, row_dweights.view(-1).to(dweights.dtype))


def check_room(rows: int, size: int) -> None:
    """Raises ValueError where the experts' sorted rows are more than the caller allowed. size: the rows allocated."""
    if rows > size:
        raise ValueError(
            f"experts: {rows} choices are of the experts here, and rows={size} leaves no room for them; give "
            f"rows={rows} or more, or leave rows out to allocate for all choices"
        )


def _write_gated(
    gate: Tensor, up: Tensor, dh: Tensor, w: Tensor, h: Tensor, dgate: Tensor, dup: Tensor, dw: Tensor | None
) -> None:
    """Writes h = silu(gate) * up, dw = dh . h, and the gradients of gate and up for the gradient w * dh of h.

    Overwrites dh.
    """
    activation = F.silu(gate)
    torch.mul(activation, up, out=h)
    if dw is not None:
        torch.sum(h * dh, -1, keepdim=True, dtype=dw.dtype, out=dw)
    dh.mul_(w)
    torch.mul(dh, activation, out=dup)
    torch.ops.aten.silu_backward.grad_input(dh.mul_(up), gate, grad_input=dgate)


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


def _row_weights(weights: Tensor, source: Tensor, ends: list[int]) -> Tensor:
    """The weight of each sorted row of an expert, [rows, 1], in float32 at least."""
    rows = ends[-1] if ends else 0
    chosen = weights.reshape(-1, 1).index_select(0, source[:rows])
    return chosen.to(torch.promote_types(weights.dtype, torch.float32))


def _sums_for(out: Tensor) -> tuple[Tensor, bool]:
    """Zeros to add a token's choices to, in float32 at least; and whether these are `out` itself."""
    if out.dtype.itemsize > 2:
        return out.zero_(), True
    return torch.zeros(out.shape, dtype=torch.float32, device=out.device), False


def _blocks(ends: list[int], source: Tensor, choices: int) -> Iterator[_Block]:
    """The blocks of each expert's rows, in order. choices: of a token."""
    tokens = source // choices
    for expert, (start, stop) in enumerate(zip([0, *ends], ends, strict=False)):
        for first in range(start, stop, ROWS_AT_ONCE):
            rows = slice(first, min(first + ROWS_AT_ONCE, stop))
            yield _Block(expert, rows, tokens[rows], first == start)


def _parts(count: int, inner: int) -> Iterator[slice]:
    """The rows of a block in parts of about ELEMENTS_AT_ONCE elements, of `inner` elements a row."""
    step = max(1, ELEMENTS_AT_ONCE // max(1, inner))
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))
