"""Several projections of one input in one op, of local tensors: forward and backward.

`qkv_forward`: the query, key and value projections, with rope on queries and keys. `swiglu_forward`:
silu(input @ gate_weight.T) * (input @ up_weight.T) (Shazeer 2020, eq. 6), by one Triton kernel (`_launch`, the kernel
of `matmul`) where `use_triton` and `uses_kernel` hold. All else calls the functions of `matmul`, `rope` and `swiglu`,
which choose between Triton kernels and plain torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..dispatch.backend import use_triton
from ..dispatch.op import Tensors
from ..launching.launched import launched
from ..matmul.function import accumulate, linear, multiply, uses_kernel
from ..matmul.reference import flatten_to_rows, restore_leading_dims
from ..rope import function as rope
from ..swiglu import function as swiglu


def qkv_forward(
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


def qkv_epilogue_backward(saved: Tensors, grads: Tensors, needed: Sequence[bool], *, add_bias: bool = True) -> Tensors:
    """The gradients of the three products: rope's backward of the gradients of queries and keys, and that of values."""
    cos, sin = saved[4:]
    if cos is None or sin is None:
        return grads
    *rope_grads, dv = grads
    return *(None if each is None else rope.backward((cos, sin), each, (True,))[0] for each in rope_grads), dv


def qkv_backward(saved: Tensors, grads: Tensors, needed: Sequence[bool], *, add_bias: bool = True) -> Tensors:
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


def swiglu_forward(
    input: Tensor, gate_weight: Tensor, up_weight: Tensor, *, keep: bool = True
) -> tuple[Tensor, Tensors]:
    """input [..., K], both weights [M, K] -> [..., M], by one kernel, or by two products and a gate: see `uses_kernel`.

    keep: whether to save tensors for backward: the operands, and the saved tensors of `swiglu` for the two products.
    """
    if not use_triton(input) or not uses_kernel(input, gate_weight.mT, "gated"):
        products = linear(input, gate_weight)[0], linear(input, up_weight)[0]
        if not keep:
            return swiglu.inference(*products), ()
        out, saved = swiglu.forward(*products)
        return out, (input, gate_weight, up_weight, *saved)
    rows, gate, up = flatten_to_rows(input), gate_weight.mT, up_weight.mT
    out = torch.empty((*input.shape[:-1], gate.shape[1]), dtype=input.dtype, device=input.device)
    saved_products = [torch.empty_like(out) if keep else None for _ in range(2)]
    _launch(
        rows,
        *_with_equal_strides(gate, up),
        *(None if each is None else flatten_to_rows(each) for each in (out, *saved_products)),
    )
    return out, (input, gate_weight, up_weight, *saved_products)


def swiglu_epilogue_backward(saved: Tensors, grad: Tensor, needed: Sequence[bool]) -> Tensors:
    """The gradients of input @ gate_weight.T and input @ up_weight.T, from the output's gradient."""
    return swiglu.backward(saved[3:], grad, (needed[0] or needed[1], needed[0] or needed[2]))


def swiglu_backward(saved: Tensors, grads: Tensors, needed: Sequence[bool]) -> Tensors:
    """dinput = dgate @ gate_weight + dup @ up_weight; dgate_weight = dgate.T @ input, dup_weight = dup.T @ input.

    grads: (dgate, dup), from `swiglu_epilogue_backward`.
    """
    input, gate_weight, up_weight = saved[:3]
    assert input is not None and gate_weight is not None and up_weight is not None, "forward saves the operands"
    dgate, dup = (None if each is None else flatten_to_rows(each) for each in grads)
    dinput, rows = None, flatten_to_rows(input)
    if needed[0]:
        assert dgate is not None and dup is not None, "epilogue_backward computes both where dinput is needed"
        dinput = restore_leading_dims(accumulate(dup, up_weight, multiply(dgate, gate_weight)), input)
    return (
        dinput,
        multiply(dgate.mT, rows) if needed[1] and dgate is not None else None,
        multiply(dup.mT, rows) if needed[2] and dup is not None else None,
    )


def _with_equal_strides(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Both weights with equal strides, which the kernel needs: as they are, or as contiguous copies."""
    return (gate, up) if gate.stride() == up.stride() else (gate.contiguous(), up.contiguous())


@launched("swiglu_linear(Tensor x, Tensor gate, Tensor up, Tensor(a!) out, Tensor(b!)? z, Tensor(c!)? z_up)")
def _launch(*arguments: Any) -> None:
    from ..matmul import launch  # imports triton, which a CPU run may not have

    launch.gated(*arguments)
