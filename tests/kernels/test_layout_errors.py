"""Layouts of any op's operands that do not fit together are refused, with the op, the operands and the remedy."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from weft import kernels
from weft.mesh import Layout, LayoutError
from weft.reshard import distribute, reshard, to_global

from tests.kernels.cases import TWO
from tests.kernels.test_errors import CALLS, tensors
from tests.support.pool import Pool

# The layouts of a call's operands, and the error's words.
LAID: dict[str, tuple[str, tuple[str, ...], str]] = {
    "add": ("add", ("tp: S(0)", "tp: R"), "the axis shards dim 0 of x, but not dim 0 of y; reshard y to (tp: S(0))"),
    "add_rms_norm": ("add_rms_norm", ("tp: R", "tp: S(0)", "tp: R"), "reshard x to (tp: S(0))"),
    "dropout": ("dropout", ("tp: S(0)", "tp: R"), "but not dim 0 of the residual; reshard the residual to (tp: S(0))"),
    "gelu": ("gelu", ("tp: P(sum)",), "reshard x to (tp: R)"),
    "swiglu": (
        "swiglu",
        ("tp: R", "tp: S(1)"),
        "the axis shards dim 1 of up, but not dim 1 of gate; reshard gate to (tp: S(1))",
    ),
    "linear": (
        "linear",
        ("tp: S(1)", "tp: R", "tp: R"),
        "the axis shards dim 1 of input, but not dim 1 of weight; reshard weight",
    ),
    "all_gather_matmul": ("all_gather_matmul", ("tp: S(1)", "tp: R"), "all_gather_matmul: on axis 'tp'"),
    "matmul_reduce_scatter": ("matmul_reduce_scatter", ("tp: R", "tp: S(0)"), "matmul_reduce_scatter: on axis 'tp'"),
    "qkv_linear": (
        "qkv_linear",
        ("tp: R", "tp: S(1)", *["tp: R"] * 3),
        "the axis shards dim 1 of q_weight, but not dim 1 of input",
    ),
    "grouped_matmul": (
        "grouped_matmul",
        ("tp: S(1)", *["tp: R"] * 4),
        "grouped_matmul: on axis 'tp' operands are S(1), R: the axis shards dim 1 of a, but not",
    ),
    "dispatch": ("dispatch", ("tp: S(0)", "tp: R"), "the axis shards dim 0 of x, but not dim 0 of the experts"),
    "combine": ("combine", ("tp: R", "tp: S(0)", "tp: S(0)"), "the rows of its tokens; reshard y to (tp: S(0))"),
    "swiglu_linear": ("swiglu_linear", ("tp: R", "tp: S(1)", "tp: S(1)"), "swiglu_linear: on axis 'tp'"),
    "swiglu_linear-weights": ("swiglu_linear", ("tp: R", "tp: S(0)", "tp: R"), "reshard up_weight to (tp: S(0))"),
    "swiglu_linear-inner": (
        "swiglu_linear", ("tp: S(1)", "tp: S(1)", "tp: S(1)"),
        "reshard the input to (tp: R) and the weights to (tp: R), or call linear for each weight, "
        "reshard both outputs to (tp: R), and "
        "call swiglu",
    ),
}  # fmt: skip


def told_of_layouts() -> dict[str, str]:
    messages = {}
    for name, (op, layouts, _) in LAID.items():
        call, operands = CALLS[op]
        made = [tensors()[each] for each in operands.split()]
        with pytest.raises(LayoutError) as caught:
            call(*(distribute(each, Layout(TWO, of)) for each, of in zip(made, layouts, strict=True)))
        messages[name] = str(caught.value)
    return messages


def test_layouts_that_do_not_go_together_name_the_op_and_its_operands(pool: Pool) -> None:
    for messages in pool.run(told_of_layouts, ranks=2):
        for name, (op, _, told) in LAID.items():
            assert messages[name].startswith(op) and told in messages[name], messages[name]
            assert "operand " not in messages[name] and "einsum" not in messages[name]


def follows_the_remedies_of_swiglu_linear() -> Tensor:
    """The remedies for weights sharded on K lead to the output."""
    op, layouts, _ = LAID["swiglu_linear-inner"]
    made = [tensors()[each] for each in CALLS[op][1].split()]
    x, gate, up = (distribute(each, Layout(TWO, of)) for each, of in zip(made, layouts, strict=True))
    with pytest.raises(LayoutError) as caught:
        kernels.swiglu_linear(x, gate, up)
    nearest = caught.value.nearest
    moved = kernels.swiglu_linear(
        *(reshard(each, placements=of) for each, of in zip((x, gate, up), nearest, strict=True))
    )
    whole = [reshard(kernels.linear(x, each), placements=Layout(TWO)) for each in (gate, up)]
    torch.testing.assert_close(to_global(kernels.swiglu(*whole)), to_global(moved))
    return to_global(moved)


def test_both_remedies_of_swiglu_linear_lead_to_its_output(pool: Pool) -> None:
    x, gate, up = (tensors()[each].double() for each in CALLS["swiglu_linear"][1].split())
    truth = torch.nn.functional.silu(x @ gate.mT) * (x @ up.mT)
    for found in pool.run(follows_the_remedies_of_swiglu_linear, ranks=2):
        torch.testing.assert_close(found.double(), truth, rtol=1e-5, atol=1e-5)
