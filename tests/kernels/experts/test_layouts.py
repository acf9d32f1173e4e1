"""experts on DTensors: refused layouts, delayed gradients; every layout that is taken: see test_sharded_ops.py."""

from __future__ import annotations

import pytest
import torch
from weft.kernels import experts
from weft.kernels.extension import delay_weight_gradients
from weft.mesh import Layout, LayoutError
from weft.reshard import distribute

from tests.kernels.cases import TWO
from tests.support.pool import Pool

from .cases import mixture

# The layouts of x, experts, weights, gate, up and down, and the error's words.
REFUSED = {
    "width": (("S(1)", "R", "R", "R", "R", "R"), "x is sharded on dim 1 over 'tp', and a rank computes whole tokens"),
    "by-expert": (
        ("R", "R", "R", "S(0)", "S(0)", "S(0)"),
        "gate is sharded on dim 0 over 'tp', and a token chooses from all experts; reshard gate to (tp: R), or call "
        "experts on local tensors with first=",
    ),
    "inner-size": (("R", "R", "R", "S(2)", "S(2)", "R"), "only the dim I may be sharded; reshard gate to (tp: R)"),
    "down-whole": (("R", "R", "R", "S(1)", "S(1)", "R"), "experts: on axis 'tp'"),
    "tokens-alone": (("S(0)", "R", "R", "R", "R", "R"), "experts: on axis 'tp'"),
    "addends": (("P(sum)", "R", "R", "R", "R", "R"), "x is (tp: P(sum)), and each rank needs its sum, not an addend"),
}


def refused_layouts() -> dict[str, str]:
    of, messages = mixture(6, 4, 8, 4, 2), {}
    for name, (layouts, _) in REFUSED.items():
        operands = zip((of.x, of.experts, *of.floats[1:]), layouts, strict=True)
        with pytest.raises(LayoutError) as caught:
            experts(*(distribute(each, Layout(TWO, f"tp: {layout}")) for each, layout in operands))
        messages[name] = str(caught.value)
    return messages


def test_other_layouts_name_the_remedy(pool: Pool) -> None:
    for messages in pool.run(refused_layouts, ranks=2):
        for name, (_, told) in REFUSED.items():
            assert messages[name].startswith("experts") and told in messages[name], messages[name]
            assert "operand " not in messages[name] and "einsum" not in messages[name]


@pytest.mark.exhaustive
def test_the_matrices_gradients_can_wait(device: str) -> None:
    of = mixture(9, 16, 8, 3, 2)
    leaves = [torch.nn.Parameter(each.float().to(device)) for each in of.floats]
    x, weights, *matrices = leaves
    output = experts(x, of.experts.to(device), weights, *matrices)
    expected = torch.autograd.grad(output.sum(), leaves, retain_graph=True)
    with delay_weight_gradients() as delayed:
        output.sum().backward()
    assert [each.grad is None for each in leaves] == [False, False, True, True, True]
    for compute in delayed:
        compute()
    for leaf, wanted in zip(leaves, expected, strict=True):
        torch.testing.assert_close(leaf.grad, wanted)
