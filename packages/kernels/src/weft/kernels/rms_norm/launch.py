"""Launches the RMS norm kernels on rows [N, H], each contiguous."""

from __future__ import annotations

import torch
from torch import Tensor

from ..dispatch.backend import device_of
from ..launching.aot import Variant
from ..launching.launched import RowTile, contiguous_rows, programs_of, vector_of
from . import kernel

# Elements of a row a thread. Forward: 32 bytes of bf16, two 16-byte loads; a row too long for 16 warps has more a
# thread, and a program with short rows takes several. Backward also keeps the gradient, the weight and float32 sums,
# so half as many. Compiled without spills for sm_80 to sm_100 and gfx942; the speed is not measured yet.
FORWARD_ELEMENTS, BACKWARD_ELEMENTS = 16, 8
# Warps resident on a multiprocessor: at 32 registers a thread, and at 64.
WARPS_AT_WORK, BACKWARD_WARPS_AT_WORK = 64, 32


def forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    y: Tensor,
    total: Tensor | None,
    rrms: Tensor,
    H: int,
    eps: float,
) -> None:
    """Writes y; rrms, [N] in float32; and with a residual total = x + residual. H: the length of a row."""
    if not x.numel():
        return
    rows, residual = contiguous_rows(x, H), None if residual is None else contiguous_rows(residual, H)
    tile = RowTile.of(H, FORWARD_ELEMENTS)
    with device_of(x):
        kernel.forward[(programs_of(x, -(-len(rows) // tile.rows), tile.warps, WARPS_AT_WORK),)](
            rows, residual, vector_of(weight),
            y, total, rrms,
            *rows.shape, rows.stride(0), 0 if residual is None else residual.stride(0),
            eps,
            KEEP_WEIGHT=keeps_weight(tile, FORWARD_ELEMENTS), ROWS=tile.rows, BLOCK_H=tile.block, num_warps=tile.warps,
        )  # fmt: skip


def backward(
    grad: Tensor,
    grad_sum: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    rrms: Tensor,
    dx: Tensor | None,
    dweight: Tensor | None,
    H: int,
) -> None:
    """Writes dx and dweight [H], each unless None.

    grad: the gradient of y. grad_sum: of `total`, or None; added to dx. x: `total` where forward had a residual.
    dweight is the sum of the programs' addends, in the order of the programs.
    """
    if not x.numel():
        if dweight is not None:
            dweight.zero_()
        return
    tile = RowTile.of(H, BACKWARD_ELEMENTS)
    grad, x, grad_sum = (
        contiguous_rows(grad, H),
        contiguous_rows(x, H),
        None if grad_sum is None else contiguous_rows(grad_sum, H),
    )
    programs = programs_of(x, -(-len(x) // tile.rows), tile.warps, BACKWARD_WARPS_AT_WORK)
    addends = None if dweight is None else x.new_empty(programs, H, dtype=torch.float32)
    with device_of(x):
        kernel.backward[(programs,)](
            grad, grad_sum, x, vector_of(weight), rrms,
            dx, addends,
            *x.shape, grad.stride(0), 0 if grad_sum is None else grad_sum.stride(0), x.stride(0),
            KEEP_WEIGHT=keeps_weight(tile, BACKWARD_ELEMENTS), ROWS=tile.rows, BLOCK_H=tile.block, num_warps=tile.warps,
        )  # fmt: skip
    if dweight is not None and addends is not None:
        dweight.copy_(addends.sum(0))


def keeps_weight(tile: RowTile, elements: int) -> bool:
    """Whether a program keeps the weight in registers: where a thread has at most `elements` elements of a row."""
    return tile.block <= 32 * tile.warps * elements


def _variants(dtype: str, H: int, residual: bool) -> tuple[Variant, Variant]:
    name = f"{dtype}-{H}{'-residual' if residual else ''}"
    operands = {"x_ptr": f"*{dtype}:16", "weight_ptr": f"*{dtype}:16", "rrms_ptr": "*fp32:16"}
    sizes = {"N": "i32", "H": "i32:16"} | dict.fromkeys(("stride_xn", "stride_rn", "stride_gn", "stride_sn"), "i32:16")
    sum_type = f"*{dtype}:16" if residual else "None"
    kinds = operands | sizes | {"residual_ptr": sum_type, "sum_ptr": sum_type, "grad_sum_ptr": sum_type, "eps": "fp32"}
    kinds |= dict.fromkeys(("y_ptr", "grad_ptr", "dx_ptr"), f"*{dtype}:16") | {"dweight_ptr": "*fp32:16"}

    def variant(of: str, elements: int) -> Variant:
        function, tile = getattr(kernel, of), RowTile.of(H, elements)
        arguments = {each: kinds[each] for each in function.arg_names if each in kinds}
        constexprs = {"KEEP_WEIGHT": int(keeps_weight(tile, elements)), "ROWS": tile.rows, "BLOCK_H": tile.block}
        constexprs = {each: constexprs[each] for each in function.arg_names if each in constexprs}
        return Variant(f"rms_norm.{of}/{name}", function, arguments, constexprs, tile.warps)

    return variant("forward", FORWARD_ELEMENTS), variant("backward", BACKWARD_ELEMENTS)


VARIANTS = (
    *_variants("bf16", 128, False),
    *_variants("bf16", 16384, False),
    *_variants("fp32", 8192, True),
    *_variants("bf16", 4096, True),
)
