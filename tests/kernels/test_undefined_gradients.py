"""A loss whose upstream gradient is undefined, autograd's zero: a caller returned None for its gradient."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from weft.kernels import cross_entropy, linear_cross_entropy
from weft.kernels.cross_entropy.options import Options
from weft.kernels.cross_entropy.sharded.custom_ops import VocabShard
from weft.kernels.cross_entropy.sharded.custom_ops import apply_custom_op as of_logits_compiled
from weft.kernels.linear_cross_entropy.sharded.custom_ops import apply_custom_op as of_products_compiled
from weft.mesh import Layout
from weft.reshard import distribute, to_global

from tests.kernels.cases import TWO, ints, normal
from tests.support.pool import Pool

LAYOUTS = {"replicated": "", "tokens": "tp: S(0)"}


class Ignore(torch.autograd.Function):
    """1, of which the inputs' gradients are undefined."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        return inputs[0].new_ones(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        return (None,) * len(ctx.needs_input_grad)


def of_logits(leaves, target, **options):
    return cross_entropy(leaves[0], target, **options)


def of_products(leaves, target, **options):
    return linear_cross_entropy(*leaves, target, **options)


LOSSES = {"cross_entropy": (of_logits, [(4, 7)]), "linear_cross_entropy": (of_products, [(4, 3), (7, 3)])}


def leaves_of(shapes):
    return [normal(*shape).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("return_lse", [False, True], ids=["loss", "loss-and-lse"])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("name", LOSSES)
def test_no_gradient_gives_none(name, reduction, return_lse):
    run, shapes = LOSSES[name]
    leaves = leaves_of(shapes)
    outputs = run(leaves, ints(7, 4), reduction=reduction, return_lse=return_lse)
    outputs = outputs if return_lse else (outputs,)
    assert torch.autograd.grad(Ignore.apply(*outputs), leaves, allow_unused=True) == (None,) * len(leaves)


@pytest.mark.parametrize("used", [0, 1], ids=["loss", "lse"])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("name", LOSSES)
def test_one_output_alone_gives_its_gradient(name, reduction, used):
    run, shapes = LOSSES[name]
    leaves, target = leaves_of(shapes), ints(7, 4)
    outputs = run(leaves, target, reduction=reduction, return_lse=True)
    loss = outputs[used].sum() + Ignore.apply(outputs[1 - used])
    logits = leaves[0] if len(leaves) == 1 else leaves[0] @ leaves[1].T
    truth = logits.logsumexp(-1) if used else torch.nn.functional.cross_entropy(logits, target, reduction=reduction)
    torch.testing.assert_close(torch.autograd.grad(loss, leaves), torch.autograd.grad(truth.sum(), leaves))


def on_ranks() -> None:
    for (run, shapes), tokens, return_lse in itertools.product(LOSSES.values(), LAYOUTS.values(), (False, True)):
        layout = Layout(TWO, tokens)
        leaves = [distribute(leaf.detach(), layout).requires_grad_() for leaf in leaves_of(shapes[:1])]
        leaves += [distribute(leaf.detach(), Layout(TWO)).requires_grad_() for leaf in leaves_of(shapes)[1:]]
        target = distribute(ints(7, 4), layout)
        for reduction in ("none", "mean", "sum"):
            outputs = run(leaves, target, reduction=reduction, return_lse=return_lse)
            outputs = outputs if return_lse else (outputs,)
            assert torch.autograd.grad(Ignore.apply(*outputs), leaves, allow_unused=True) == (None,) * len(leaves)
        if return_lse:
            outputs = run(leaves, target, return_lse=True)
            used = outputs[1].to_local().sum() + Ignore.apply(outputs[0]).to_local()
            (gradient,) = torch.autograd.grad(used, leaves[:1])
            whole = leaves_of(shapes)
            logits = whole[0] if len(whole) == 1 else whole[0] @ whole[1].T
            (truth,) = torch.autograd.grad(logits.logsumexp(-1).sum(), whole[:1])
            torch.testing.assert_close(to_global(gradient), truth)


def test_of_dtensors(pool: Pool):
    pool.run(on_ranks, ranks=2)


def test_of_the_custom_op_of_cross_entropy():
    (logits,), options = leaves_of([(4, 7)]), Options()
    loss, _ = of_logits_compiled(logits, ints(7, 4), None, None, options=options, shard=VocabShard())
    assert torch.autograd.grad(Ignore.apply(loss), logits, allow_unused=True) == (None,)


def test_of_the_custom_op_of_linear_cross_entropy():
    leaves, wide = leaves_of([(4, 3), (7, 3)]), torch.float64
    (loss,) = of_products_compiled(
        *leaves, ints(7, 4), None, None, None,
        options=Options(), wanted=(wide, wide, None), chunk_tokens=None,
        compute_dtype=None, shard=VocabShard(), disagreement=None,
    )  # fmt: skip
    assert torch.autograd.grad(Ignore.apply(loss), leaves, allow_unused=True) == (None, None)
