"""Routing of local tensors: forward and backward of `route`, `dispatch`, `combine`, `sequence_load`, `statistics`.

Triton kernels (`launch.py`) compute on a GPU and in Triton's interpreter; plain torch (`reference.py`) on a CPU and in
float64. `route` and `statistics` also use plain torch for more experts or choices than a kernel's registers hold: see
`_uses_kernels`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..dispatch.backend import can_read, use_triton
from ..dispatch.op import Tensors
from ..launching.launched import launched
from . import reference
from .reference import Router, wide_dtype

MOST_EXPERTS, MOST_CHOICES = 512, 16  # the most scores and choices of a token which a kernel's registers hold
MOST_ROWS = 2**31 - 1  # rows are numbered by int32


def _uses_kernels(scores: Tensor, k: int) -> bool:
    """Whether Triton kernels compute `route` and `statistics` for scores [..., E] and k choices."""
    return use_triton(scores) and scores.shape[-1] <= MOST_EXPERTS and k <= MOST_CHOICES


def route(
    scores: Tensor,
    bias: Tensor | None,
    *,
    k: int,
    score: str,
    softmax_after: bool,
    normalize: bool,
    scale: float,
    groups: tuple[int, ...],
) -> tuple[tuple[Tensor, Tensor], Tensors]:
    """The weights and experts of `reference.route`. Saves the scores and the experts. Options: fields of `Router`."""
    options = (k, score, softmax_after, normalize, scale, groups)
    if not _uses_kernels(scores, k):
        weights, experts = reference.route(scores, bias, Router(*options))
    else:
        weights = scores.new_empty(*scores.shape[:-1], k, dtype=torch.float32)
        experts = scores.new_empty(*scores.shape[:-1], k, dtype=torch.int32)
        _launch_route(scores, bias, weights, experts, *options)
    return (weights, experts), (scores, experts)


def route_backward(saved: Tensors, grads: Tensors, needed: Sequence[bool], **options: Any) -> Tensors:
    """The gradient of the scores, see `reference.route_backward`; None for the bias. grads: of weights and experts."""
    scores, experts = saved
    assert scores is not None and experts is not None, "forward saves both"
    grad = grads[0]
    if not needed[0] or grad is None:
        return None, None
    if not _uses_kernels(scores, options["k"]):
        return reference.route_backward(scores, experts, grad, Router(**options)), None
    dscores = scores.new_empty(scores.shape)
    fields = ("k", "score", "softmax_after", "normalize", "scale", "groups")
    _launch_route_backward(grad, scores, experts, dscores, *(options[each] for each in fields))
    return dscores, None


def sort_rows(experts: Tensor, num_experts: int, first: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Sort choices by expert -> source, positions, offsets, as `reference.sort_by_expert`, which describes the three.

    Called by `dispatch`, and by ops that compute with the experts first .. first + num_experts - 1 alone; the choices
    of further experts come last.
    Raises ValueError for more than `MOST_ROWS` choices.
    """
    if experts.numel() > MOST_ROWS:
        raise ValueError(
            f"{experts.numel()} choices of experts are more than the {MOST_ROWS} that int32 numbers; give fewer tokens"
        )
    if not use_triton(experts):
        return reference.sort_by_expert(experts, num_experts, first)
    source, positions = (experts.new_empty(experts.numel(), dtype=torch.int32) for _ in range(2))
    offsets = experts.new_empty(num_experts, dtype=torch.int32)
    _launch_sort(experts, source, positions, offsets, first)
    return source, positions, offsets


def dispatch(x: Tensor, experts: Tensor, *, num_experts: int) -> tuple[tuple[Tensor, Tensor], Tensors]:
    """x [..., H], experts [..., k] -> rows [N * k, H], offsets [num_experts]. Saves positions and experts.

    Raises ValueError for an expert outside 0 to num_experts - 1, where the host can read the experts: see `can_read`.
    """
    if can_read(experts):
        _check_range("dispatch", experts, num_experts)
    _, positions, offsets = sort_rows(experts, num_experts)
    k = experts.shape[-1]
    if use_triton(x):
        rows = x.new_empty(experts.numel(), x.shape[-1])
        _launch_gather(x, positions, rows, k)
    else:
        rows = reference.gather_rows(_as_rows(x), positions, k)
    return (rows, offsets), (positions, experts)


def dispatch_backward(saved: Tensors, grads: Tensors, needed: Sequence[bool], *, num_experts: int) -> Tensors:
    """The gradient of x: for each token, the sum of the gradients of the token's rows. grads: of rows and offsets."""
    positions, experts = saved
    assert positions is not None and experts is not None, "forward saves both"
    grad = grads[0]
    if not needed[0] or grad is None:
        return None, None
    return sum_rows(grad, positions, None, tuple(experts.shape)), None


def sum_rows(y: Tensor, positions: Tensor, weights: Tensor | None, choices: tuple[int, ...]) -> Tensor:
    """Sum each token's rows, see `reference.sum_rows` -> [..., H]. choices: (..., k), the shape of the weights."""
    k = choices[-1]
    if use_triton(y) and (weights is None or weights.dtype != torch.float64):
        output = y.new_empty(*choices[:-1], y.shape[-1])
        _launch_sum(y, positions, weights, output, k)
        return output
    flat = None if weights is None else weights.reshape(-1, k)
    return reference.sum_rows(y, positions, flat, k).view(*choices[:-1], y.shape[-1])


def combine(y: Tensor, experts: Tensor, weights: Tensor) -> tuple[Tensor, Tensors]:
    """y [N * k, H], experts and weights [..., k] -> [..., H]. Saves y, the positions and the weights."""
    # `sort_rows` needs the number of experts, which the caller of `combine` does not give.
    positions = reference.invert(experts.reshape(-1).sort(stable=True).indices)
    return sum_rows(y, positions, weights, tuple(weights.shape)), (y, positions, weights)


def combine_backward(saved: Tensors, grad: Tensor, needed: Sequence[bool]) -> Tensors:
    """The gradients of y and the weights, see `reference.sum_rows_backward`; None for the experts."""
    y, positions, weights = saved
    assert y is not None and positions is not None and weights is not None, "forward saves all"
    dy = torch.empty(y.shape, dtype=y.dtype, device=y.device) if needed[0] else None
    dweights = torch.empty(weights.shape, dtype=weights.dtype, device=y.device) if needed[2] else None
    if use_triton(y) and weights.dtype != torch.float64:
        _launch_sum_backward(grad, y, positions, weights, dy, dweights)
    else:
        k = weights.shape[-1]
        of_choices = None if dweights is None else dweights.view(-1, k)
        reference.sum_rows_backward(_as_rows(grad), y, positions, weights.reshape(-1, k), dy, of_choices)
    return dy, None, dweights


def sequence_load(experts: Tensor, *, num_experts: int) -> tuple[Tensor, Tensors]:
    """The output of `reference.sequence_load`. Saves nothing.

    Raises ValueError for an expert outside 0 to num_experts - 1, where the host can read the experts.
    """
    if can_read(experts):
        _check_range("sequence_load", experts, num_experts)
    return reference.sequence_load(experts, num_experts), ()


def sequence_load_backward(saved: Tensors, grad: Tensor, needed: Sequence[bool], **options: Any) -> Tensors:
    """No gradient: the experts are integers."""
    return (None,)


def statistics(
    logits: Tensor,
    experts: Tensor,
    previous: Tensor | None,
    load: Tensor | None,
    *,
    layer: int,
    layers: int,
    length: int,
) -> tuple[Tensor, Tensors]:
    """The output of `router_statistics`: a copy of `previous` (None: zeros), with sums added to row `layer`.

    length: of a sequence, over all ranks; 0 without load. Saves the logits and the load.
    Raises ValueError for an expert outside 0 to E - 1, where the host can read the experts.
    """
    E, k = logits.shape[-1], experts.shape[-1]
    sums = 2 * E + 1  # without the load's
    if previous is None:
        output = logits.new_zeros(layers, sums + (load is not None), dtype=wide_dtype(logits))
    else:
        output = previous.clone()
    if _uses_kernels(logits, k):
        _launch_statistics(logits, experts, output[layer, :sums])
    else:
        try:
            output[layer, :sums] += reference.statistics(logits.reshape(-1, E), experts.reshape(-1, k))
        except RuntimeError:  # torch found an expert out of range; a check before would take long
            if can_read(experts):
                _check_range("router_statistics", experts, E)
            raise
    if load is not None:
        output[layer, sums:] += reference.sequence_balance(logits, load, length)
    return output, (logits, load)


def statistics_backward(
    saved: Tensors, grad: Tensor, needed: Sequence[bool], *, layer: int, layers: int, length: int
) -> Tensors:
    """The gradients of the logits and of `previous`, which gets `grad` itself; None for the experts and the load."""
    logits, load = saved
    assert logits is not None, "forward saves them"
    dlogits, row = None, grad[layer, : 2 * logits.shape[-1] + 1]
    if needed[0] and _uses_kernels(logits, 1):  # backward reads no choices, of which any number would do
        dlogits = logits.new_empty(logits.shape)
        _launch_statistics_backward(row, logits, dlogits)
    elif needed[0]:
        dlogits = reference.statistics_backward(logits.reshape(-1, logits.shape[-1]), row).view(logits.shape)
    if dlogits is not None and load is not None:
        dlogits += reference.sequence_balance_backward(logits, load, length, grad[layer, -1])
    return dlogits, None, grad if needed[2] else None, None


def _as_rows(x: Tensor) -> Tensor:
    """x [..., H] as [N, H], also for H = 0, for which reshape(-1, H) fails."""
    return x.reshape(prod(x.shape[:-1]), x.shape[-1])


def _check_range(name: str, experts: Tensor, num_experts: int) -> None:
    """Raise ValueError for an expert outside 0 to num_experts - 1. Reads values. name: of the op."""
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


@launched(
    "route(Tensor scores, Tensor? bias, Tensor(a!) weights, Tensor(b!) experts, int k, str score, bool "
    "softmax_after, bool normalize, float scale, int[] groups)"
)
def _launch_route(*arguments: Any) -> None:
    from . import launch  # imports triton, which a CPU run may not have

    launch.route(*arguments)


@launched(
    "route_backward(Tensor grad, Tensor scores, Tensor experts, Tensor(a!) dscores, int k, str score, "
    "bool softmax_after, bool normalize, float scale, int[] groups)"
)
def _launch_route_backward(*arguments: Any) -> None:
    from . import launch

    launch.route_backward(*arguments)


@launched("sort_by_expert(Tensor experts, Tensor(a!) source, Tensor(b!) positions, Tensor(c!) offsets, SymInt first)")
def _launch_sort(*arguments: Any) -> None:
    from . import launch

    launch.sort_by_expert(*arguments)


@launched("gather_rows(Tensor x, Tensor positions, Tensor(a!) rows, SymInt k)")
def _launch_gather(*arguments: Any) -> None:
    from . import launch

    launch.gather_rows(*arguments)


@launched("sum_rows(Tensor y, Tensor positions, Tensor? weights, Tensor(a!) output, SymInt k)")
def _launch_sum(*arguments: Any) -> None:
    from . import launch

    launch.sum_rows(*arguments)


@launched(
    "sum_rows_backward(Tensor grad, Tensor y, Tensor positions, Tensor weights, Tensor(a!)? dy, Tensor(b!)? dweights)"
)
def _launch_sum_backward(*arguments: Any) -> None:
    from . import launch

    launch.sum_rows_backward(*arguments)


@launched("router_statistics(Tensor logits, Tensor experts, Tensor(a!) row)")
def _launch_statistics(*arguments: Any) -> None:
    from . import launch

    launch.statistics(*arguments)


@launched("router_statistics_backward(Tensor grad, Tensor logits, Tensor(a!) dlogits)")
def _launch_statistics_backward(*arguments: Any) -> None:
    from . import launch

    launch.statistics_backward(*arguments)
