"""Launches the routing kernels. Tensors written are contiguous and allocated by the caller."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from ..dispatch.backend import device_of
from ..launching.aot import Variant
from ..launching.launched import RowTile, block_length, contiguous_rows, programs_of
from . import kernel
from .reference import Router

# Scores in the registers of a thread: a row of 512 has two warps, and a warp has four rows of 64. Compiled without
# spills for sm_80 to sm_100 and gfx942; the speed is not measured yet.
ELEMENTS = 8
WARPS_AT_WORK = 32  # warps of `kernel.statistics` on a multiprocessor; more would only give more addends
# A program of the sort has BLOCK choices. At a time, `count` compares with BLOCK_E experts, `scan` sums BLOCK_B blocks
# of BLOCK_E experts, and `place` compares CHUNK choices for equality. WARPS: of these programs.
BLOCK, BLOCK_E, BLOCK_B, CHUNK, WARPS = 128, 32, 32, 32, 4
MOST_H = 1024  # columns of a program which gathers or sums rows: 16 bytes of bf16 a thread
SUM_BACKWARD_WARPS = 8  # with 4 warps, Triton 3.6 spills on sm_90


def route(scores: Tensor, bias: Tensor | None, weights: Tensor, experts: Tensor, *options: Any) -> None:
    """Writes the weights and experts of `reference.route` for scores [..., E]. options: of `Router`, in order."""
    router = Router(*options)
    if not experts.numel():
        return
    E = scores.shape[-1]
    scores = contiguous_rows(scores, E)
    groups, chosen_groups = router.groups or (1, 1)
    block_groups = triton.next_power_of_2(groups)
    members = max(triton.next_power_of_2(E // groups), 16 // block_groups)
    tile = RowTile.of(block_groups * members, ELEMENTS)
    with device_of(scores):
        kernel.route[(-(-len(scores) // tile.rows),)](
            scores, None if bias is None else bias.contiguous(),
            weights, experts,
            len(scores), E, router.k, scores.stride(0), groups, E // groups, chosen_groups,
            router.scale,
            **_flags(router), GROUPED=bool(router.groups),
            ROWS=tile.rows, GROUPS=block_groups, MEMBERS=members, BLOCK_K=triton.next_power_of_2(router.k),
            num_warps=tile.warps,
        )  # fmt: skip


def route_backward(grad: Tensor, scores: Tensor, experts: Tensor, dscores: Tensor, *options: Any) -> None:
    """Writes the gradient of the scores, see `reference.route_backward`. options: as for `route`."""
    router = Router(*options)
    if not dscores.numel():
        return
    E = scores.shape[-1]
    scores, tile = contiguous_rows(scores, E), RowTile.of(E, ELEMENTS)
    with device_of(scores):
        kernel.route_backward[(-(-len(scores) // tile.rows),)](
            grad.contiguous(), scores, experts.contiguous(),
            dscores,
            len(scores), E, router.k, scores.stride(0),
            router.scale,
            **_flags(router), ROWS=tile.rows, BLOCK_E=tile.block, num_warps=tile.warps,
        )  # fmt: skip


def _flags(router: Router) -> dict[str, bool]:
    """The kernels' constants for the router's options."""
    return {
        "SIGMOID": router.score == "sigmoid",
        "AFTER": router.softmax_after,
        "NORMALIZE": router.normalize,
    }


def statistics(logits: Tensor, experts: Tensor, row: Tensor) -> None:
    """Adds the sums of `router_statistics` to `row` [2 * E + 1], for logits [..., E] and experts [..., k]."""
    if not logits.numel():
        return
    E, k = logits.shape[-1], experts.shape[-1]
    logits, tile = contiguous_rows(logits, E), RowTile.of(E, ELEMENTS)
    programs = programs_of(logits, -(-len(logits) // tile.rows), tile.warps, WARPS_AT_WORK)
    addends = row.new_empty(programs, len(row))
    with device_of(logits):
        kernel.statistics[(programs,)](
            logits, experts.contiguous(),
            addends,
            len(logits), E, k, logits.stride(0),
            ROWS=tile.rows, BLOCK_E=tile.block, num_warps=tile.warps,
        )  # fmt: skip
    row += addends.sum(0)


def statistics_backward(grad: Tensor, logits: Tensor, dlogits: Tensor) -> None:
    """Writes the gradient of the logits [..., E]. grad: of the row, [2 * E + 1]."""
    if not dlogits.numel():
        return
    E = logits.shape[-1]
    logits, tile = contiguous_rows(logits, E), RowTile.of(E, ELEMENTS)
    with device_of(logits):
        kernel.statistics_backward[(-(-len(logits) // tile.rows),)](
            grad.contiguous(), logits,
            dlogits,
            len(logits), E, logits.stride(0),
            ROWS=tile.rows, BLOCK_E=tile.block, num_warps=tile.warps,
        )  # fmt: skip


def sort_by_expert(experts: Tensor, source: Tensor, positions: Tensor, offsets: Tensor, first: int) -> None:
    """Writes source, positions and offsets of `reference.sort_by_expert`."""
    R, E = experts.numel(), len(offsets)
    if not R:
        offsets.zero_()
        return
    experts, blocks = experts.contiguous(), -(-R // BLOCK)
    counts = offsets.new_empty(blocks, E + 1)
    totals, ends = offsets.new_empty(E + 1), offsets.new_empty(E + 1)
    with device_of(experts):
        kernel.count[(blocks,)](experts, counts, R, first, E, BLOCK=BLOCK, BLOCK_E=BLOCK_E, num_warps=WARPS)
        kernel.scan[(-(-(E + 1) // BLOCK_E),)](
            counts, totals, blocks, E, BLOCK_B=BLOCK_B, BLOCK_E=BLOCK_E, num_warps=WARPS
        )
        torch.cumsum(totals, 0, dtype=totals.dtype, out=ends)
        kernel.place[(blocks,)](
            experts, counts, totals, ends,
            source, positions,
            R, first, E,
            BLOCK=BLOCK, CHUNK=CHUNK, num_warps=WARPS,
        )  # fmt: skip
    offsets.copy_(ends[:E])


def gather_rows(x: Tensor, positions: Tensor, rows: Tensor, k: int) -> None:
    """Writes the rows of `reference.gather_rows` for x [..., H]."""
    if not rows.numel():
        return
    H = rows.shape[-1]
    x, block = contiguous_rows(x, H), min(MOST_H, block_length(H))
    with device_of(x):
        kernel.gather_rows[(len(x) * -(-H // block),)](
            x, positions, rows, H, k, x.stride(0), BLOCK_H=block, num_warps=WARPS
        )


def sum_rows(
    y: Tensor, positions: Tensor, weights: Tensor | None, output: Tensor, k: int, ends: Tensor | None = None
) -> None:
    """Writes the sums of `reference.sum_rows` into output [..., H].

    ends: int32 [E], where the rows of each expert end. Choices of rows behind the last expert's add nothing, and y may
        lack these rows. None: y has a row for each choice.
    """
    if not output.numel():
        return
    H = y.shape[-1]
    y, block = contiguous_rows(y, H), min(MOST_H, block_length(H))
    with device_of(y):
        kernel.sum_rows[(output.numel() // H * -(-H // block),)](
            y, positions, None if weights is None else weights.contiguous(), ends, output,
            H, 0 if ends is None else len(ends), k, y.stride(0),
            BLOCK_H=block, num_warps=WARPS,
        )  # fmt: skip


def sum_rows_backward(
    grad: Tensor, y: Tensor, positions: Tensor, weights: Tensor, dy: Tensor | None, dweights: Tensor | None
) -> None:
    """Writes dy and dweights of `reference.sum_rows_backward`; not a gradient which is None."""
    k, H = weights.shape[-1], y.shape[-1]
    if not y.numel():
        if dweights is not None:
            dweights.zero_()
        return
    grad, y, block = contiguous_rows(grad, H), contiguous_rows(y, H), min(MOST_H, block_length(H))
    with device_of(y):
        kernel.sum_rows_backward[(len(grad),)](
            grad, y, positions, weights.contiguous(),
            dy, dweights,
            H, k, grad.stride(0), y.stride(0),
            BLOCK_H=block, BLOCK_K=triton.next_power_of_2(k), num_warps=SUM_BACKWARD_WARPS,
        )  # fmt: skip


_TYPES = {
    **dict.fromkeys(("scores_ptr", "logits_ptr", "dscores_ptr", "dlogits_ptr"), "*bf16:16"),
    **dict.fromkeys(("x_ptr", "y_ptr", "rows_ptr", "output_ptr", "dy_ptr"), "*bf16:16"),
    **dict.fromkeys(("bias_ptr", "weights_ptr", "dweights_ptr", "addends_ptr"), "*fp32:16"),
    **dict.fromkeys(("experts_ptr", "source_ptr", "positions_ptr"), "*i32:16"),
    **dict.fromkeys(("counts_ptr", "before_ptr", "totals_ptr", "ends_ptr"), "*i32:16"),
    **dict.fromkeys(("H", "E", "stride_xn", "stride_yn", "stride_gn", "stride_sn", "stride_ln"), "i32:16"),
    **dict.fromkeys(("N", "R", "k", "first", "blocks", "groups", "members", "chosen_groups"), "i32"),
    "scale": "fp32",
}
_ROWS = {"BLOCK_H": MOST_H, "BLOCK_K": 8}
_SORT = {"BLOCK": BLOCK, "BLOCK_E": BLOCK_E, "BLOCK_B": BLOCK_B, "CHUNK": CHUNK}


def _variant(of: str, form: str, constexprs: dict[str, int], warps: int, **types: str) -> Variant:
    """The variant `routing.OF/FORM` of the kernel named `of`. types: argument types which differ from `_TYPES`."""
    function = getattr(kernel, of)
    kinds = _TYPES | types
    return Variant(
        f"routing.{of}/{form}",
        function,
        {each: kinds[each] for each in function.arg_names if each in kinds},
        {each: constexprs[each] for each in function.arg_names if each in constexprs},
        warps,
    )


def _variants_of_scores(E: int, k: int) -> tuple[Variant, ...]:
    """The kernels which keep rows of E scores: with softmax, as Qwen3-MoE; with sigmoid and groups, as DeepSeek-V3."""
    tile = RowTile.of(E, ELEMENTS)
    sizes = {"ROWS": tile.rows, "BLOCK_E": tile.block, "BLOCK_K": k}
    softmax = sizes | {"SIGMOID": 0, "AFTER": 0, "NORMALIZE": 1, "GROUPED": 0, "GROUPS": 1, "MEMBERS": E}
    sigmoid = softmax | {"SIGMOID": 1, "GROUPED": 1, "GROUPS": 8, "MEMBERS": E // 8}
    return (
        _variant("route", f"softmax-{E}", softmax, tile.warps, bias_ptr="None"),
        _variant("route", f"sigmoid-groups-{E}", sigmoid, tile.warps),
        _variant("route_backward", f"softmax-{E}", softmax, tile.warps, grad_ptr="*fp32:16"),
        _variant("route_backward", f"sigmoid-{E}", sigmoid, tile.warps, grad_ptr="*fp32:16"),
        _variant("statistics", str(E), sizes, tile.warps),
        _variant("statistics_backward", str(E), sizes, tile.warps, grad_ptr="*fp32:16"),
    )


VARIANTS = (
    *_variants_of_scores(128, 8),
    *_variants_of_scores(512, 16),
    *(_variant(each, "int32", _SORT, WARPS) for each in ("count", "scan", "place")),
    _variant("gather_rows", "bf16", _ROWS, WARPS),
    _variant("sum_rows", "bf16", _ROWS, WARPS, ends_ptr="None"),
    _variant("sum_rows", "bf16-unweighted", _ROWS, WARPS, weights_ptr="None", ends_ptr="None"),
    _variant("sum_rows", "bf16-of-experts", _ROWS, WARPS, E="i32"),
    _variant("sum_rows", "bf16-of-experts-unweighted", _ROWS, WARPS, weights_ptr="None", E="i32"),
    _variant("sum_rows_backward", "bf16", _ROWS, SUM_BACKWARD_WARPS, grad_ptr="*bf16:16"),
)
