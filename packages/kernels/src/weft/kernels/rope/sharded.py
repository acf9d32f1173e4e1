"""Rotary position embedding on plain tensors and DTensors."""

from __future__ import annotations

from string import ascii_lowercase
from typing import Any

import torch
from torch import Tensor
from weft.mesh import Layout, infer
from weft.mesh.extension import terms

from ..dispatch.arguments import check_flag, check_number, holds_ints
from ..dispatch.backend import check_floats
from ..dispatch.op import Op
from ..dispatch.sharded import Shapes, Sharding, apply, autocasts, check_operands, infer_gradient_layouts
from ..dispatch.sharded.rules import check_heads
from . import function


@autocasts("rope")
def rope(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False, inplace: bool = False) -> Tensor:
    """Rotary position embedding (Su et al., 2021): rotates pair (i, i + D/2) of each head by the angle of (token, i).

    x: [..., T, heads * D].
    cos, sin: float32 tables from `rope_tables`, [T, D / 2]; or [..., T, D / 2] where sequences differ in their
    positions.
    Returns a tensor of the shape of x.
    interleaved: the pairs are (2 * i, 2 * i + 1), as in the paper and in GPT-J.
    inplace: allows x to be overwritten. A kernel overwrites and returns a contiguous plain tensor; in all other cases x
    stays unchanged. If autograd has saved x elsewhere, backward raises, as for torch's own in-place ops.

    Layouts: any without Partial, with shards of complete heads; the tables are sharded on rows and tokens as x is. The
    output has x's layout.
    Communication: none.
    Raises LayoutError for any other layouts; ValueError for tables that do not fit x, for options unlike the above, and
    for inplace with a leaf which requires a gradient.
    """
    check_operands("rope", ("x", "cos", "sin"), 3, x, cos, sin)
    check_flag("rope", "interleaved", interleaved)
    check_flag("rope", "inplace", inplace)
    check_tables("rope", x.shape, cos, sin)
    check_floats("rope", ("x",), x)
    if inplace and x.is_leaf and x.requires_grad and torch.is_grad_enabled():
        raise ValueError("rope: x is a leaf that needs a gradient, and must keep its values; leave inplace at False")
    if inplace and type(x) is Tensor:
        return apply(ROPE, x, cos, sin, interleaved=interleaved, inplace=True)
    return apply(ROPE, x, cos, sin, interleaved=interleaved)


@autocasts("rms_norm_rope")
def rms_norm_rope(
    x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float = 1e-6, *, interleaved: bool = False
) -> Tensor:
    """`rope` of the `rms_norm` of each head, in one pass, as Qwen 3 applies to queries and keys.

    x: [..., T, heads * D].
    weight: [D], shared by all heads.
    cos, sin, interleaved: as in `rope`.
    eps: as in `rms_norm`.
    Returns a tensor of the shape of x.

    Layouts: those of `rope`, with the weight replicated. The weight's gradient is Partial(sum) on each axis that
    shards x.
    Communication: none.
    Raises LayoutError for any other layouts; ValueError for tables or a weight that do not fit x, and for options
    unlike the above.
    """
    check_operands("rms_norm_rope", ("x", "weight", "cos", "sin"), 4, x, weight, cos, sin)
    check_number("rms_norm_rope", "eps", eps, 0)
    check_flag("rms_norm_rope", "interleaved", interleaved)
    check_tables("rms_norm_rope", x.shape, cos, sin)
    check_floats("rms_norm_rope", ("x", "the weight"), x, weight)
    if weight.shape != (2 * cos.shape[-1],):
        raise ValueError(
            f"rms_norm_rope takes a weight [D] beside tables [T, D / 2], got {tuple(weight.shape)} and "
            f"{tuple(cos.shape)}; give a weight of shape {(2 * cos.shape[-1],)}, for all heads"
        )
    return apply(RMS_NORM_ROPE, x, weight, cos, sin, eps=eps, interleaved=interleaved)


def check_tables(name: str, shape: tuple[int, ...], cos: Tensor, sin: Tensor) -> None:
    """Raises ValueError for tables that do not fit x of `shape`, or have no floating-point values. name: the op."""
    rows = cos.shape[:-1]
    fits = cos.ndim >= 2 and cos.shape == sin.shape and len(shape) >= 2 and len(rows) in (1, len(shape) - 1)
    if not fits or tuple(shape[-1 - len(rows) : -1]) != rows or not cos.shape[-1] or shape[-1] % (2 * cos.shape[-1]):
        raise ValueError(
            f"{name} takes x [..., T, heads * D] and cos, sin [T, D / 2] or [..., T, D / 2], got {tuple(shape)}, "
            f"{tuple(cos.shape)} and {tuple(sin.shape)}; give both tables a row of D / 2 numbers for each "
            f"token, as rope_tables makes them"
        )
    check_floats(name, ("cos", "sin"), cos, sin)


def rope_tables(positions: Tensor, frequencies: Tensor, *, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """The tables `cos` and `sin` of `rope` for tokens at any positions: scale * cos and sin of positions * frequencies.

    positions: [..., T] of ints below 2**24. Angles are computed in the dtype of the frequencies, and float32 rounds
        larger ints: neighbouring positions then get the same angle. The positions are not read on the host.
    frequencies: [D / 2] of float32, or of float64 for larger positions.
    Returns (cos, sin), each [..., T, D / 2], without gradients.
    scale: `rope` also multiplies each pair by it: YaRN's attention factor, whose square then scales every product of a
    query and a key (Peng et al., 2023, section 3.4).

    Layouts: any of the positions, without Partial; the frequencies are replicated. The tables are sharded as the
    positions.
    Communication: none.
    Raises ValueError for other shapes and dtypes, for tensors on two devices, and for a scale which is no finite
    number.
    """
    check_operands("rope_tables", ("positions", "frequencies"), 2, positions, frequencies)
    check_number("rope_tables", "scale", scale)
    if not holds_ints(positions) or frequencies.ndim != 1:
        raise ValueError(
            f"rope_tables takes positions [..., T] of ints and frequencies [D / 2], got {tuple(positions.shape)} of "
            f"{positions.dtype} and {tuple(frequencies.shape)}; cast the positions with .to(torch.int64), and flatten "
            f"the frequencies"
        )
    check_floats("rope_tables", ("frequencies",), frequencies)
    cos, sin = (apply(ROPE_TABLE, positions, frequencies, function=each, scale=float(scale)) for each in ("cos", "sin"))
    return cos, sin


def _rule(layouts: tuple[Layout | None, ...], shapes: Shapes, options: dict[str, Any]) -> Sharding:
    x, cos, sin = layouts
    shape, table, _ = shapes
    assert x is not None and cos is not None and sin is not None and shape and table, "all are given"
    output = rope_layout("rope", x, cos, sin, shape, table)
    return Sharding(output, shape, infer_gradient_layouts(output, layouts))


def _norm_rule(layouts: tuple[Layout | None, ...], shapes: Shapes, options: dict[str, Any]) -> Sharding:
    x, weight, cos, sin = layouts
    shape, _, table, _ = shapes
    assert x is not None and weight is not None and cos is not None and sin is not None and shape and table, (
        "all are given"
    )
    infer.whole("rms_norm_rope", "the weight", weight, 0)
    output = rope_layout("rms_norm_rope", x, cos, sin, shape, table)
    return Sharding(output, shape, infer_gradient_layouts(output, layouts))


def rope_layout(
    name: str, x: Layout, cos: Layout, sin: Layout, shape: tuple[int, ...], table: tuple[int, ...]
) -> Layout:
    """The output's layout, which is x's. Called by the layout rules of the ops here and of `qkv_linear`.

    shape: of x. table: the shape of a table. name: the op, for the message.
    Raises LayoutError for tables that are not sharded as x's rows and tokens are, and for shards with a part of a head.
    """
    tokens = ascii_lowercase[: len(shape) - 1]
    table_dims = tokens[1 - len(table) :] + "y"
    operation = terms.Operation(
        name, (tokens + "z", table_dims, table_dims), tokens + "z", terms.never, operands=("x", "cos", "sin"),
        whole="y", why_whole="rope needs all angles of a token",
    )  # fmt: skip
    output = terms.infer(operation, (x, cos, sin))
    check_heads(name, x, shape, 2 * table[-1])
    return output


def _table_rule(layouts: tuple[Layout | None, ...], shapes: Shapes, options: dict[str, Any]) -> Sharding:
    positions, frequencies = layouts
    shape, angles = shapes
    assert positions is not None and frequencies is not None and shape is not None and angles, "both are given"
    infer.whole("rope_tables", "the frequencies", frequencies, 0)
    output = infer.whole("rope_tables", "the positions", positions, ())
    return Sharding(output, (*shape, *angles), infer_gradient_layouts(output, layouts))


ROPE = Op("rope", function.forward, function.backward, _rule, inference=function.inference)
RMS_NORM_ROPE = Op("rms_norm_rope", function.norm_forward, function.norm_backward, _norm_rule)
ROPE_TABLE = Op("rope_table", function.plain_table, None, _table_rule)
