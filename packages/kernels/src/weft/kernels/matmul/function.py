"""Products of local tensors, forward and backward: by torch's GEMM or by the Triton kernel, whichever is faster.

`linear`, `matmul` and their backwards run on every device. These call `product`, `multiply`, `_multiply_by_slope`,
`accumulate` and `activate`, which launch Triton kernels if `use_triton` is true and, for products, also `uses_kernel`,
which reads the table of measurements. Otherwise plain torch runs: `reference.py`, which defines the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..dispatch.backend import chip_of, multiplies, runs_natively, use_triton
from ..dispatch.delayed_weight_gradients import is_delay_allowed
from ..dispatch.op import Tensors
from ..launching.launched import launched
from ..swiglu import function as gates
from . import reference
from .checks import rows_in_place
from .configurations import MEASURED, ONE_PASS, ProductKind, is_kernel_faster, kind_of
from .reference import flatten_to_rows, multiply_by_derivative, restore_leading_dims

# Activations computed by the kernel of swiglu, with their names in swiglu.function.
GATES = {
    "gelu": "none",
    "gelu_tanh": "tanh",
    "silu": "silu",
}


def linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    input_activation: str | None = None,
    add_bias: bool = True,
    keep: bool = True,
) -> tuple[Tensor, Tensors]:
    """act(input_act(input) @ weight.T + bias) by a single GEMM: input [..., K], weight [M, K], bias [M] -> [..., M].

    add_bias: whether this rank adds the bias. False if ranks' outputs are summed and another rank adds the bias. The
        bias' gradient is the same on every rank, since the sum is linear in the bias.
    keep: whether to save z for backward. Saved for backward: input, weight and, with an activation, the pre-activation
        z = input @ weight.T + bias; for relu, the output instead of z.
    """
    bias = bias if add_bias else None
    hidden = input if input_activation is None else activate(input, input_activation)
    if activation is None and not MEASURED:
        return torch.nn.functional.linear(hidden, weight, bias), (input, weight)
    keep_z = keep and activation not in (None, "relu")
    out, z = product(flatten_to_rows(hidden), weight.mT, bias, activation=activation, keep_z=keep_z)
    out = restore_leading_dims(out, input)
    return out, (input, weight) if activation is None else (
        input,
        weight,
        out if z is None else restore_leading_dims(z, input),
    )


def native_linear(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """input @ weight.T + bias by torch's function with torch's own gradient, where `runs_natively` allows; else None.

    Also None where the weight's gradient may be computed later than the input's (see `delayed_weight_gradients.py`).
    """
    if weight is None or is_delay_allowed() or not runs_natively(input, weight, bias):
        return None
    if weight.dim() != 2 or input.dim() < 1:
        return None
    M, K = weight.shape
    if input.shape[-1] != K or (bias is not None and bias.shape != (M,)):
        return None
    return torch.nn.functional.linear(input, weight, bias)


def linear_epilogue_backward(saved: Tensors, grad: Tensor, needed: Sequence[bool], **options: Any) -> Tensor:
    """dz = grad * act'(z), the gradient of the pre-activation."""
    _, _, *z = saved
    return multiply_by_derivative(grad, z[0], options.get("activation")) if z and z[0] is not None else grad


def linear_backward(
    saved: Tensors,
    dz: Tensor,
    needed: Sequence[bool],
    *,
    activation: str | None = None,
    input_activation: str | None = None,
    add_bias: bool = True,
) -> Tensors:
    """dinput = dz @ weight, dweight = dz.T @ input, dbias = dz.sum(0) over the rows; a GEMM for each of the first two.

    With an input_activation: dweight uses the recomputed input_act(input), and the epilogue of dinput's GEMM
    multiplies by input_act'(input).
    """
    input, weight = saved[:2]
    assert input is not None and weight is not None, "forward saves both"
    rows = flatten_to_rows(dz)  # [N, M]
    dinput = dweight = None
    if needed[0]:
        dinput = restore_leading_dims(
            multiply(rows, weight)
            if input_activation is None
            else _multiply_by_slope(rows, weight, input, input_activation),
            input,
        )
    if needed[1]:
        hidden = input if input_activation is None else activate(input, input_activation)
        dweight = multiply(rows.mT, flatten_to_rows(hidden))  # [M, K]
    dbias = rows.sum(0) if len(needed) > 2 and needed[2] else None
    return (dinput, dweight, dbias)[: len(needed)]


def matmul(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    a_scale: Tensor | None = None,
    b_scale: Tensor | None = None,
    *,
    activation: str | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    out_dtype: torch.dtype | None = None,
    add_bias: bool = True,
    add_residual: bool = True,
    keep: bool = True,
) -> tuple[Tensor, Tensors]:
    """act(alpha * a @ b + bias) + beta * residual, and the saved tensors (a, b, z, the residual's shape).

    a: [..., K] and b: [K, N]; or [..., M, K] and [..., K, N] with the same leading dims. bias: [N]. residual:
    broadcast.
    a_scale: a number, or a number for each row of a. b_scale: a number or [N].
    add_bias, add_residual: as add_bias in `linear`.
    keep: whether to save the pre-activation z. For relu without a residual the output is saved instead; without an
        activation, None.
    """
    has_operands = bias is not None or residual is not None or a_scale is not None or b_scale is not None
    if (
        not (has_operands or activation or MEASURED)
        and alpha == 1
        and (out_dtype or a.dtype) == a.dtype
        and a.dtype.itemsize > 1
    ):
        return a @ b, (a, b, None, None)  # the shortest path: with few rows the host's time counts
    left, right = _flat(a, b)
    shape = (*a.shape[:-1], b.shape[-1])
    addend = residual if add_residual else None
    if addend is not None:
        addend = addend.expand(shape).reshape(*left.shape[:-1], shape[-1])
    row_scales = a_scale if a_scale is None or a_scale.numel() == 1 else a_scale.flatten()
    saves_output = activation == "relu" and addend is None
    out, z = product(
        left, right, bias if add_bias else None, addend, row_scales, b_scale,
        activation=activation, alpha=alpha, beta=beta, out_dtype=out_dtype,
        keep_z=keep and activation is not None and not saves_output,
    )  # fmt: skip
    out = out.view(shape)
    z = None if activation is None else out if saves_output else None if z is None else z.view(shape)
    # Backward needs only the residual's shape and dtype: save one element, expanded.
    residual_shape = None if residual is None else residual.new_empty(()).expand(residual.shape)
    return out, (a, b, z, residual_shape)


def native_matmul(a: Tensor, b: Tensor) -> Tensor | None:
    """a @ b by torch's function with torch's own gradient, where `runs_natively` allows; else None."""
    fits = (
        b is not None and runs_natively(a, b) and a.dim() > 1 and b.dim() in (2, a.dim()) and a.shape[-1] == b.shape[-2]
    )
    return a @ b if fits and (b.dim() == 2 or b.shape[:-2] == a.shape[:-2]) else None


def matmul_backward(
    saved: Tensors,
    grad: Tensor,
    needed: Sequence[bool],
    *,
    activation: str | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    out_dtype: torch.dtype | None = None,
    add_bias: bool = True,
    add_residual: bool = True,
) -> Tensors:
    """da = alpha * dz @ b.T, db = alpha * a.T @ dz, dbias = dz.sum(0) over the rows, dresidual = beta * grad.

    Here dz = grad * act'(z). Bias and residual have a gradient on every rank, whichever rank added both. Scales have
    no gradient.
    """
    a, b, z, residual = saved
    assert a is not None and b is not None, "forward saves both"
    dresidual = None
    if needed[3] and residual is not None:
        dresidual = (grad if beta == 1 else grad * beta).sum_to_size(residual.shape).to(residual.dtype)
    dz = grad if z is None else multiply_by_derivative(grad, z, activation)
    dbias = flatten_to_rows(dz).sum(0) if needed[2] else None
    da = db = None
    if needed[0] or needed[1]:
        dz = (dz if alpha == 1 else dz * alpha).to(a.dtype)
        left, right = _flat(a, b)
        rows = flatten_to_rows(dz) if b.ndim == 2 else dz.flatten(0, -3)
        da = multiply(rows, right.mT).view(a.shape) if needed[0] else None
        db = multiply(left.mT, rows).view(b.shape) if needed[1] else None
    return (da, db, dbias, dresidual, None, None)[: len(needed)]


def _flat(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Both factors with a single batch dim for all leading dims; if b has two dims, a as rows [N, K] and b."""
    return (flatten_to_rows(a), b) if b.ndim == 2 else (a.flatten(0, -3), b.flatten(0, -3))


def product(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    a_scale: Tensor | None = None,
    b_scale: Tensor | None = None,
    *,
    activation: str | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    out_dtype: torch.dtype | None = None,
    keep_z: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """`reference.product` by the kernel or by torch's GEMM: see `uses_kernel`. Arguments and results as there."""
    if use_triton(a) and uses_kernel(a, b, kind_of(a, activation, alpha, residual, a_scale, b_scale)):
        out = torch.empty((*a.shape[:-1], b.shape[-1]), dtype=out_dtype or a.dtype, device=a.device)
        z = torch.empty_like(out) if keep_z else None
        _launch(a, b, bias, residual, a_scale, b_scale, out, z, activation, None, alpha, beta, False)
        return out, z
    return reference.product(
        a, b, bias, residual, a_scale, b_scale,
        activation=activation, alpha=alpha, beta=beta, out_dtype=out_dtype, keep_z=keep_z,
    )  # fmt: skip


@launched(
    "matmul(Tensor a, Tensor b, Tensor? bias, Tensor? residual, Tensor? a_scale, Tensor? b_scale, Tensor(a!) out, "
    "Tensor(b!)? z, str? activation, str? slope, float alpha, float beta, bool accumulate)"
)
def _launch(*arguments: Any) -> None:
    from . import launch  # imports triton, which a CPU run may not have

    launch.product(*arguments)


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """a @ b without an epilogue, by the kernel or by torch's GEMM. Two dims, or three with equal batch dims."""
    return a @ b if not MEASURED else product(a, b)[0]


def activate(x: Tensor, activation: str) -> Tensor:
    """Return the activation of x, by a kernel for activations in GATES, otherwise by torch."""
    gate_name = GATES.get(activation)
    return (
        reference.activate(x, activation)
        if gate_name is None or not use_triton(x)
        else gates.kernel_forward(x, None, gate_name)
    )


def _multiply_by_slope(a: Tensor, b: Tensor, z: Tensor, activation: str) -> Tensor:
    """Return (a @ b) * act'(z), where z has a row for each row of a. The kernel multiplies before storing."""
    z = flatten_to_rows(z)
    if not use_triton(a) or not uses_kernel(a, b, "fused"):
        return multiply_by_derivative(multiply(a, b), z, activation)
    out = torch.empty((len(a), b.shape[-1]), dtype=a.dtype, device=a.device)
    _launch(a, b, None, z, None, None, out, None, None, activation, 1.0, 1.0, False)
    return out


def accumulate_into(a: Tensor, b: Tensor, total: Tensor) -> tuple[Tensor, Tensors]:
    """Adds a @ b to total in place, in the dtype of total. The forward of the op `ACCUMULATE`, without a gradient.

    a: [..., K]. b: [K, N]. total: [..., N]. Raises ValueError as `rows_in_place`.
    """
    accumulate(flatten_to_rows(a), b, rows_in_place("matmul", total))
    return total, ()


def accumulate(a: Tensor, b: Tensor, total: Tensor) -> Tensor:
    """Adds a @ b to total in place, for tensors of two dims. Elements of total must not share memory.

    The strides of total are not checked, because a trace of backward does not know strides.
    """
    if use_triton(a) and uses_kernel(a, b, "plain"):
        _launch(a, b, None, None, None, None, total, None, None, None, 1.0, 1.0, True)
    else:
        reference.accumulate(a, b, total)
    return total


def uses_kernel(a: Tensor, b: Tensor, kind: ProductKind) -> bool:
    """Whether the Triton kernel computes a @ b, if `use_triton(a)` is true: see `is_kernel_faster`.

    a: [..., M, K]. If b has no leading dims, the leading dims of a count as rows. The interpreter, without
    measurements, runs the kernel for every kind but "plain".
    """
    if not a.is_cuda:
        return kind != "plain"
    if not MEASURED and kind not in ONE_PASS:
        return False
    if a.dtype.itemsize == 1 and not compiles(a, b):
        return False
    if not MEASURED:
        return True
    from .launch import class_of

    return is_kernel_faster(class_of(a, b, kind))


def compiles(a: Tensor, b: Tensor) -> bool:
    """Whether Triton compiles a @ b for the factors' chip: see `multiplies`."""
    if not a.is_cuda:
        return True
    chip = chip_of(a.device)[0]
    return multiplies(chip, a.dtype) and multiplies(chip, b.dtype)
