"""Forward and backward of `experts` on local tensors, and the checks of the arguments.

Forward and backward are each a single torch op (`_forward`, `_backward`), because a tracer cannot know where an
expert's rows end. Inside, `use_triton` chooses between the Triton kernels and `reference.py`. Backward computes the
sorted inputs and the gated activations again, instead of saving them (SonicMoE, arXiv 2512.14080).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..dispatch.arguments import described, is_int
from ..dispatch.backend import TOKEN_DTYPES, can_read, check_floats, use_triton
from ..dispatch.op import Tensors
from ..launching.launched import launched
from ..matmul.checks import check_wide
from ..routing.function import sort_rows
from .reference import check_room, plain_backward, plain_forward

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
    """The output of `plain_forward`, with the dtype and the leading dims of x. first, rows: as for `sharded.experts`.

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
    """The gradients of `plain_backward`; None for the chosen experts."""
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
    """The number of sorted rows to allocate: the experts' rows if the host can read the offsets, else `rows`, else all.

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
    """Raises ValueError for mismatched arguments of `experts`."""
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
