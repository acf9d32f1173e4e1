"""Routing of local tensors: forward and backward of the four ops.

Triton kernels (`launch.py`) compute on a GPU and in Triton's interpreter; plain torch (`reference.py`) on a CPU, in
float64, and for more experts or choices than a kernel's registers hold. `use_kernels` chooses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..dispatch.backend import can_read
from ..dispatch.op import Tensors
from . import reference
from .reference import Router


def route(scores: Tensor, bias: Tensor | None, **options: Any) -> tuple[tuple[Tensor, Tensor], Tensors]:
    """`reference.route`. Saves the scores and the experts. options: the fields of `Router`."""
    weights, experts = reference.route(scores, bias, Router(**options))
    return (weights, experts), (scores, experts)


def route_backward(saved: Tensors, grads: Tensors, needed: Sequence[bool], **options: Any) -> Tensors:
    """`reference.route_backward`. The bias has no gradient."""
    scores, experts = saved
    assert scores is not None and experts is not None, "forward saves both"
    grad = grads[0]
    if not needed[0] or grad is None:
        return None, None
    return reference.route_backward(scores, experts, grad, Router(**options)), None


def sort_rows(experts: Tensor, num_experts: int, first: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """`reference.sort_by_expert`: source, positions, offsets."""
    return reference.sort_by_expert(experts, num_experts, first)


def dispatch(x: Tensor, experts: Tensor, *, num_experts: int) -> tuple[tuple[Tensor, Tensor], Tensors]:
    """x [..., H], experts [..., k] -> rows [N * k, H], offsets [num_experts]. Saves positions and experts.

    Raises ValueError for an expert outside 0 to num_experts - 1, where the host can read the experts.
    """
    if can_read(experts):
        check_experts("dispatch", experts, num_experts)
    _, positions, offsets = sort_rows(experts, num_experts)
    rows = reference.gather_rows(x.reshape(-1, x.shape[-1]), positions, experts.shape[-1])
    return (rows, offsets), (positions, experts)


def dispatch_backward(saved: Tensors, grads: Tensors, needed: Sequence[bool], *, num_experts: int) -> Tensors:
    """The gradient of x: the sum of its rows' gradients."""
    positions, experts = saved
    assert positions is not None and experts is not None, "forward saves both"
    grad = grads[0]
    if not needed[0] or grad is None:
        return None, None
    dx = reference.sum_rows(grad, positions, None, experts.shape[-1])
    return dx.view(*experts.shape[:-1], grad.shape[-1]), None


def combine(y: Tensor, experts: Tensor, weights: Tensor) -> tuple[Tensor, Tensors]:
    """y [N * k, H], experts and weights [..., k] -> [..., H]. Saves y, the positions and the weights."""
    positions = reference.invert(experts.reshape(-1).sort(stable=True).indices)
    k = weights.shape[-1]
    output = reference.sum_rows(y, positions, weights.reshape(-1, k), k)
    return output.view(*weights.shape[:-1], y.shape[-1]), (y, positions, weights)


def combine_backward(saved: Tensors, grad: Tensor, needed: Sequence[bool]) -> Tensors:
    """The gradients of y and the weights."""
    y, positions, weights = saved
    assert y is not None and positions is not None and weights is not None, "forward saves all"
    flat = weights.reshape(-1, weights.shape[-1])
    dy, dweights = reference.combine_backward(
        grad.reshape(-1, grad.shape[-1]), y, positions, flat, (needed[0], needed[2])
    )
    return dy, None, None if dweights is None else dweights.view(weights.shape)


def statistics(
    logits: Tensor, experts: Tensor, previous: Tensor | None, *, layer: int, layers: int
) -> tuple[Tensor, Tensors]:
    """The sums of `router_statistics`, added to row `layer` of a copy of `previous`. Saves the logits."""
    E = logits.shape[-1]
    row = reference.statistics(logits.reshape(-1, E), experts.reshape(-1, experts.shape[-1]))
    output = row.new_zeros(layers, 2 * E + 1) if previous is None else previous.clone()
    output[layer] += row
    return output, (logits,)


def statistics_backward(saved: Tensors, grad: Tensor, needed: Sequence[bool], *, layer: int, layers: int) -> Tensors:
    """The gradients of the logits and of the previous statistics, which is the upstream gradient itself."""
    (logits,) = saved
    assert logits is not None, "forward saves them"
    dlogits = None
    if needed[0]:
        dlogits = reference.statistics_backward(logits.reshape(-1, logits.shape[-1]), grad[layer]).view(logits.shape)
    return dlogits, None, grad if needed[2] else None


def check_experts(name: str, experts: Tensor, num_experts: int) -> None:
    """Raise ValueError for an expert outside 0 to num_experts - 1. name: of the op. Reads the values."""
    if not experts.numel():
        return
    low, high = (int(each) for each in experts.aminmax())
    if low >= 0 and high < num_experts:
        return
    position = ((experts < 0) | (experts >= num_experts)).nonzero()[0].tolist()
    raise ValueError(
        f"{name}: experts{position} is {int(experts[tuple(position)])}, outside the {num_experts} experts; experts "
        f"must be 0 to {num_experts - 1}: give the experts of route, and num_experts as the scores have"
    )
