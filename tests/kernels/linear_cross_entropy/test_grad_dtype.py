"""Gradients in a parameter's `grad_dtype`: the float32 sum itself, without rounding to bf16 in between."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from weft.kernels import linear_cross_entropy, vocab_parallel_linear_cross_entropy
from weft.mesh import Layout, ProcessMesh
from weft.reshard import distribute

from tests.kernels.cross_entropy.cases import max_error
from tests.kernels.linear_cross_entropy.cases import Given, make, oracle
from tests.support.pool import Pool

CHUNKS = [pytest.param(None, id="one-chunk"), pytest.param(4, id="4-tokens")]
MESH = ProcessMesh.grid(tp=4)
REDUCTIONS = ["mean", "none"]  # gradients made in forward, and in backward


def asking(case: Given, dtype: torch.dtype | None) -> Given:
    """New leaves, whose weight and bias ask for gradients of `dtype`."""
    x, weight, bias = (leaf.detach().clone().requires_grad_() for leaf in case.leaves())
    weight.grad_dtype = bias.grad_dtype = dtype
    return case._replace(input=x, linear_weight=weight, linear_bias=bias)


def backward(case: Given, **options: Any) -> list[Tensor]:
    """The `.grad` of each leaf after another backward."""
    loss = linear_cross_entropy(case.input, case.linear_weight, case.target, linear_bias=case.linear_bias, **options)
    loss.backward(case.upstream)
    return [leaf.grad for leaf in case.leaves()]


@pytest.mark.parametrize("inplace_backward", [False, True], ids=["kept", "given-away"])
@pytest.mark.parametrize("chunk_tokens", CHUNKS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_gradient_that_is_to_be_float32_is_not_rounded(device, reduction, chunk_tokens, inplace_backward):
    case = make((9,), 37, device, torch.bfloat16, reduction, bias=True)
    options = {"reduction": reduction, "chunk_tokens": chunk_tokens, "inplace_backward": inplace_backward}
    rounded, exact = backward(asking(case, torch.bfloat16), **options), backward(asking(case, torch.float32), **options)
    assert [each.dtype for each in exact] == [torch.bfloat16, torch.float32, torch.float32]
    assert torch.equal(exact[0], rounded[0])
    _, truth = oracle(case, torch.float64, reduction=reduction)
    for ours, other, true in zip(exact[1:], rounded[1:], truth[1:], strict=True):
        assert not torch.equal(ours, ours.bfloat16().float())
        assert max_error(ours, true) <= max_error(other, true) * 1.01
        torch.testing.assert_close(ours.bfloat16(), other, rtol=2**-7, atol=0)  # an ulp


@pytest.mark.exhaustive
def test_an_upstream_gradient_multiplies_the_float32_sum(device):
    case = asking(make((9,), 37, device, torch.bfloat16, bias=True), torch.float32)
    exact = backward(case._replace(upstream=torch.ones((), device=device)), chunk_tokens=4)[1].clone()
    factor = torch.tensor(-1 / 3, device=device)
    found = backward(asking(case, torch.float32)._replace(upstream=factor), chunk_tokens=4)[1]
    torch.testing.assert_close(found, exact * factor, rtol=2**-22, atol=0)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_microbatches_add_up_in_float32(device, reduction):
    case = asking(make((9,), 37, device, torch.bfloat16, reduction, bias=True), torch.float32)
    once = backward(case, reduction=reduction, chunk_tokens=4)[1].clone()
    torch.testing.assert_close(backward(case, reduction=reduction, chunk_tokens=4)[1], 2 * once, rtol=0, atol=0)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_where_any_dtype_will_do_it_is_the_inputs(device, reduction):
    case = make((9,), 37, device, torch.bfloat16, reduction, bias=True)
    found, expected = backward(asking(case, None), reduction=reduction), backward(case, reduction=reduction)
    assert [each.dtype for each in found] == [torch.bfloat16] * 3
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_weight_that_an_op_has_made_gets_the_gradient_of_its_dtype(device, reduction):
    """torch keeps a grad_dtype for leaves alone."""
    case = asking(make((9,), 37, device, torch.bfloat16, reduction, bias=True), torch.float32)
    made = case._replace(linear_weight=case.linear_weight * 1)
    loss = linear_cross_entropy(made.input, made.linear_weight, made.target, reduction=reduction, chunk_tokens=4)
    (found,) = torch.autograd.grad(loss, made.linear_weight, made.upstream)
    assert found.dtype == torch.bfloat16


def test_the_gradient_given_away_is_the_sum_itself(device):
    """No second tensor of the weight's size."""
    case = asking(make((9,), 37, device, torch.bfloat16, bias=True), torch.float32)
    loss = linear_cross_entropy(case.input, case.linear_weight, case.target, chunk_tokens=4, inplace_backward=True)
    (total,) = [saved for saved in loss.grad_fn.saved_tensors if saved is not None and saved.shape == (37, 16)]
    loss.backward()
    assert case.linear_weight.grad.data_ptr() == total.data_ptr()


@pytest.mark.exhaustive  # the sample has the eager case
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_compiled_it_has_the_dtype(reduction):
    """The compiled gradient is rounded to the weight's dtype in between: torch's compiler knows no second dtype."""
    case = asking(make((9,), 37, "cpu", torch.bfloat16, reduction, bias=True), torch.float32)
    expected = [each.clone() for each in backward(case, reduction=reduction, chunk_tokens=4)]
    other = asking(case, torch.float32)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def loss(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        found: Tensor = linear_cross_entropy(
            x, weight, case.target, linear_bias=bias, reduction=reduction, chunk_tokens=4
        )
        return found

    loss(*other.leaves()).backward(case.upstream)
    found = [leaf.grad for leaf in other.leaves()]
    assert [each.dtype for each in found] == [torch.bfloat16, torch.float32, torch.float32]
    for ours, eager in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, eager.to(ours.dtype), rtol=2**-7, atol=0)


def of_shards() -> tuple[Tensor, Tensor]:
    """The gradient of this rank's rows of the weight, by the layout and by the group."""
    case = make((8,), 12, dtype=torch.bfloat16)
    weight = distribute(case.linear_weight.detach(), Layout(MESH, "tp: S(0)")).requires_grad_()
    local = weight.to_local().detach().clone().requires_grad_()
    weight.grad_dtype = local.grad_dtype = torch.float32
    x, target = (distribute(each.detach(), Layout(MESH)) for each in (case.input, case.target))
    linear_cross_entropy(x, weight, target, chunk_tokens=3).to_local().backward()
    vocab_parallel_linear_cross_entropy(
        case.input.detach(), local, case.target, group=dist.group.WORLD, vocab_start=3 * dist.get_rank(), vocab_size=12,
        chunk_tokens=3,
    ).backward()  # fmt: skip
    return weight.grad.to_local(), local.grad


def test_every_shards_gradient_is_float32(pool: Pool):
    case = asking(make((8,), 12, dtype=torch.bfloat16, bias=True), torch.float32)._replace(linear_bias=None)
    whole = backward(case._replace(upstream=torch.ones(())), chunk_tokens=3)[1]
    for rank, (by_layout, by_group) in enumerate(pool.run(of_shards, ranks=4)):
        assert by_layout.dtype == by_group.dtype == torch.float32
        assert torch.equal(by_layout, by_group)
        torch.testing.assert_close(by_group, whole[3 * rank : 3 * rank + 3], rtol=2**-7, atol=1e-5)
        assert not torch.equal(by_group, by_group.bfloat16().float())
