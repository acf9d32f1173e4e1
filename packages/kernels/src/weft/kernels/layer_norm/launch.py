"""Launches the layer norm kernels on rows [N, H], each contiguous."""

from __future__ import annotations

import torch
from torch import Tensor

from ..dispatch.backend import device_of
from ..launching.aot import Variant
from ..launching.launched import RowTile, contiguous_rows, programs_of, vector_of
from ..rms_norm.launch import BACKWARD_ELEMENTS, BACKWARD_WARPS_AT_WORK, FORWARD_ELEMENTS, WARPS_AT_WORK, keeps_weight
from . import kernel

# itemsize -> the most elements a thread for which dweight's and dbias' sums fit in registers beside the computation
# of dx.
MOST_ELEMENTS = {2: 16, 4: 8}


def forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    y: Tensor,
    total: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    eps: float,
) -> None:
    """Writes y; mean and rstd, [N] in float32; and with a residual total = x + residual."""
    if not x.numel():
        return
    rows, residual = (
        contiguous_rows(x, x.shape[-1]),
        None if residual is None else contiguous_rows(residual, x.shape[-1]),
    )
    tile = RowTile.of(x.shape[-1], FORWARD_ELEMENTS)
    with device_of(x):
        kernel.forward[(programs_of(x, -(-len(rows) // tile.rows), tile.warps, WARPS_AT_WORK),)](
            rows, residual, vector_of(weight), vector_of(bias),
            y, total, mean, rstd,
            *rows.shape, rows.stride(0), 0 if residual is None else residual.stride(0),
            eps,
            KEEP_WEIGHT=keeps_weight(tile, FORWARD_ELEMENTS), ROWS=tile.rows, BLOCK_H=tile.block, num_warps=tile.warps,
        )  # fmt: skip


def backward(
    grad: Tensor,
    grad_sum: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    dx: Tensor | None,
    dweight: Tensor | None,
    dbias: Tensor | None,
) -> None:
    """Writes dx, dweight [H] and dbias [H], each where it is not None.

    dweight and dbias are sums of the programs' addends, in the order of the programs.
    """
    if not x.numel():
        for each in (dweight, dbias):
            if each is not None:
                each.zero_()
        return
    tile = RowTile.of(x.shape[-1], BACKWARD_ELEMENTS)
    operands = (grad, grad_sum, x, weight, mean, rstd, tile)
    if keeps_weight(tile, MOST_ELEMENTS[x.itemsize]):
        _backward(*operands, dx, dweight, dbias)
    else:  # too few registers for both sums and dx in one launch
        _backward(*operands, dx, None, None)
        _backward(*operands, None, dweight, dbias)


def _backward(
    grad: Tensor,
    grad_sum: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    tile: RowTile,
    dx: Tensor | None,
    dweight: Tensor | None,
    dbias: Tensor | None,
) -> None:
    """`backward` in one launch."""
    if dx is None and dweight is None and dbias is None:
        return
    H = x.shape[-1]
    grad, x, grad_sum = (
        contiguous_rows(grad, H),
        contiguous_rows(x, H),
        None if grad_sum is None else contiguous_rows(grad_sum, H),
    )
    programs = programs_of(x, -(-len(x) // tile.rows), tile.warps, BACKWARD_WARPS_AT_WORK)
    sums = (dweight, dbias)
    addends = [None if each is None else x.new_empty(programs, H, dtype=torch.float32) for each in sums]
    with device_of(x):
        kernel.backward[(programs,)](
            grad, grad_sum, x, vector_of(weight), mean, rstd,
            dx, *addends,
            *x.shape, grad.stride(0), 0 if grad_sum is None else grad_sum.stride(0), x.stride(0),
            KEEP_WEIGHT=keeps_weight(tile, BACKWARD_ELEMENTS), ROWS=tile.rows, BLOCK_H=tile.block, num_warps=tile.warps,
        )  # fmt: skip
    for out, program_sums in zip(sums, addends, strict=True):
        if out is not None and program_sums is not None:
            out.copy_(program_sums.sum(0))


def _variant(of: str, dtype: str, H: int, *features: str) -> Variant:
    """features: "residual" for add_layer_norm; "dx" or "sums" for a backward launch that computes only these."""
    function, elements = getattr(kernel, of), FORWARD_ELEMENTS if of == "forward" else BACKWARD_ELEMENTS
    tile = RowTile.of(H, elements)
    kinds = dict.fromkeys(("x_ptr", "weight_ptr", "bias_ptr", "y_ptr", "grad_ptr", "dx_ptr"), f"*{dtype}:16")
    kinds |= dict.fromkeys(("mean_ptr", "rstd_ptr", "dweight_ptr", "dbias_ptr"), "*fp32:16")
    kinds |= dict.fromkeys(
        ("residual_ptr", "sum_ptr", "grad_sum_ptr"), f"*{dtype}:16" if "residual" in features else "None"
    )
    kinds |= dict.fromkeys(("H", "stride_xn", "stride_rn", "stride_gn", "stride_sn"), "i32:16") | {
        "N": "i32",
        "eps": "fp32",
    }
    if "dx" in features:
        kinds |= {"dweight_ptr": "None", "dbias_ptr": "None"}
    if "sums" in features:
        kinds["dx_ptr"] = "None"
    constexprs = {"KEEP_WEIGHT": int(keeps_weight(tile, elements)), "ROWS": tile.rows, "BLOCK_H": tile.block}
    return Variant(
        "-".join((f"layer_norm.{of}/{dtype}-{H}", *features)),
        function,
        {each: kinds[each] for each in function.arg_names if each in kinds},
        {each: constexprs[each] for each in function.arg_names if each in constexprs},
        tile.warps,
    )


VARIANTS = (
    _variant("forward", "bf16", 4096, "residual"),
    _variant("backward", "bf16", 8192, "residual"),
    _variant("backward", "fp32", 8192, "sums"),
    _variant("forward", "bf16", 16384),
    _variant("backward", "bf16", 16384, "dx"),
    _variant("backward", "bf16", 16384, "sums"),
)
