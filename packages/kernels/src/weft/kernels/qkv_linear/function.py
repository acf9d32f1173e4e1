"""Query, key and value projections of local tensors, with rope on queries and keys: forward and backward.

All functions call those of `matmul` and `rope`, which choose between Triton kernels and plain torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..dispatch.op import Tensors
from ..matmul.function import accumulate, linear, multiply
from ..matmul.reference import flatten_to_rows, restore_leading_dims
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
    """input [..., K], weights [M, K] and biases [M] -> queries, keys and values [..., M]; M may differ among the three.

    add_bias: as in `linear`. Saved for backward: the input, the weights and the tables.
    """
    pairs = ((q_weight, q_bias), (k_weight, k_bias), (v_weight, v_bias))
    q, k, v = [linear(input, weight, bias, add_bias=add_bias, keep=False)[0] for weight, bias in pairs]
    if cos is not None and sin is not None:  # rope's backward reads only the tables: rope may overwrite q and k
        q, k = rope.inference(q, cos, sin, inplace=True), rope.inference(k, cos, sin, inplace=True)
    return (q, k, v), (input, q_weight, k_weight, v_weight, cos, sin)


def epilogue_backward(saved: Tensors, grads: Tensors, needed: Sequence[bool], *, add_bias: bool = True) -> Tensors:
    """The gradients of the three products: rope's backward of the gradients of queries and keys, and that of values."""
    cos, sin = saved[4:]
    if cos is None or sin is None:
        return grads
    *rope_grads, dv = grads
    return *(None if each is None else rope.backward((cos, sin), each, (True,))[0] for each in rope_grads), dv


def backward(saved: Tensors, grads: Tensors, needed: Sequence[bool], *, add_bias: bool = True) -> Tensors:
    """The gradients of all operands but the tables.

    dinput = the sum of grad @ weight over queries, keys and values, accumulated by the GEMMs. For each of the three,
    dweight = grad.T @ input and dbias = grad.sum(0).
    """
    input, *weights = saved[:4]
    assert input is not None, "forward saves the input"
    grads_of_rows = [None if grad is None else flatten_to_rows(grad) for grad in grads]  # [N, M]
    dinput: Tensor | None = None
    rows = flatten_to_rows(input)
    dweights: list[Tensor | None] = [None] * 3
    dbiases: list[Tensor | None] = [None] * 3
    for i, (grad, weight) in enumerate(zip(grads_of_rows, weights, strict=True)):
        if grad is None:
            continue
        assert weight is not None, "forward saves the weights"
        if needed[0]:
            dinput = multiply(grad, weight) if dinput is None else accumulate(grad, weight, dinput)
        if needed[1 + i]:
            dweights[i] = multiply(grad.mT, rows)
        if needed[4 + i]:
            dbiases[i] = grad.sum(0)
    return None if dinput is None else restore_leading_dims(dinput, input), *dweights, *dbiases, None, None
