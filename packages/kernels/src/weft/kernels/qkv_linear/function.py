"""Queries, keys and values of one input, on local tensors: three products, the first two turned; forward and backward."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..matmul.function import accumulate, linear, plain
from ..matmul.reference import rows_of, shaped
from ..op import Tensors
from ..rope import function as rope


def forward(
    input: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    v_weight: Tensor,
    q_bias: Tensor | None = None,
    k_bias: Tensor | None = None,
    v_bias: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    *,
    add_bias: bool = True,
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensors]:
    """input [..., K], the weights [M, K] and biases [M], an M for each -> [..., M] for each. add_bias: as of `linear`."""
    pairs = ((q_weight, q_bias), (k_weight, k_bias), (v_weight, v_bias))
    q, k, v = [linear(input, weight, bias, add_bias=add_bias, keep=False)[0] for weight, bias in pairs]
    if cos is not None and sin is not None:  # no backward of rope needs what it was given
        q, k = rope.inference(q, cos, sin, inplace=True), rope.inference(k, cos, sin, inplace=True)
    return (q, k, v), (input, q_weight, k_weight, v_weight, cos, sin)


def of_products(saved: Tensors, grads: Tensors, needed: Sequence[bool], *, add_bias: bool = True) -> Tensors:
    """The gradients of the three products: those of queries and keys are turned back."""
    cos, sin = saved[4:]
    if cos is None or sin is None:
        return grads
    *turned, dv = grads
    return *(None if each is None else rope.backward((cos, sin), each, (True,))[0] for each in turned), dv


def backward(saved: Tensors, grads: Tensors, needed: Sequence[bool], *, add_bias: bool = True) -> Tensors:
    """dinput, the sum of each gradient @ its weight, added up in the products; dweight = grad.T @ input and dbias for each."""
    input, *weights = saved[:4]
    assert input is not None, "forward saves it"
    given = [None if grad is None else rows_of(grad) for grad in grads]  # [N, M]
    dinput: Tensor | None = None
    rows = rows_of(input)
    dweights: list[Tensor | None] = [None] * 3
    dbiases: list[Tensor | None] = [None] * 3
    for i, (grad, weight) in enumerate(zip(given, weights, strict=True)):
        if grad is None:
            continue
        assert weight is not None, "forward saves it"
        if needed[0]:
            dinput = plain(grad, weight) if dinput is None else accumulate(grad, weight, dinput)
        if needed[1 + i]:
            dweights[i] = plain(grad.mT, rows)
        if needed[4 + i]:
            dbiases[i] = grad.sum(0)
    return None if dinput is None else shaped(dinput, input), *dweights, *dbiases, None, None
