"""Repeated backward passes: gradients made in forward are copied if a later pass may need them, else handed out."""

from __future__ import annotations

import pytest
import torch
from weft.kernels import linear_cross_entropy
from weft.kernels.linear_cross_entropy import gradients

from tests.kernels.linear_cross_entropy.cases import CHUNKS, make, run


@pytest.mark.exhaustive
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_two_backwards_and_two_losses_of_one_input(device, reduction):
    case = make((9,), 31, device, torch.bfloat16, reduction, bias=True)
    _, expected = run(case, reduction=reduction, chunk_tokens=4)
    losses = [
        linear_cross_entropy(
            case.input,
            case.linear_weight,
            case.target,
            linear_bias=case.linear_bias,
            reduction=reduction,
            chunk_tokens=4,
        )
        for _ in range(2)
    ]
    for loss in (losses[0], losses[0], losses[1]):
        found = torch.autograd.grad(loss, case.leaves(), case.upstream, retain_graph=True)
        assert all(map(torch.equal, found, expected))
        found[1].zero_()  # callers may overwrite the gradient


@pytest.mark.parametrize("chunk_tokens", CHUNKS)
@pytest.mark.parametrize("upstream", [1.0, -2.5])
def test_given_away_it_is_the_same_gradient_and_a_second_backward_an_error(device, chunk_tokens, upstream):
    case = make((9,), 31, device, torch.bfloat16, bias=True)._replace(upstream=torch.tensor(upstream, device=device))
    _, expected = run(case, chunk_tokens=chunk_tokens)
    loss = linear_cross_entropy(
        case.input, case.linear_weight, case.target, linear_bias=case.linear_bias, chunk_tokens=chunk_tokens,
        inplace_backward=True,
    )  # fmt: skip
    found = torch.autograd.grad(loss, case.leaves(), case.upstream, retain_graph=True)
    assert all(map(torch.equal, found, expected))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, case.leaves(), case.upstream)


@pytest.mark.parametrize("chunk_tokens", CHUNKS)
@pytest.mark.parametrize("kept", [False, True], ids=["freed", "kept"])
def test_the_last_backward_gives_away_the_gradient_made_in_forward(device, chunk_tokens, kept):
    """A graph that is not retained allows no second backward, so no copy of the weight's size is made."""
    case = make((9,), 31, device, torch.bfloat16, bias=True)
    loss = linear_cross_entropy(case.input, case.linear_weight, case.target, chunk_tokens=chunk_tokens)
    (made,) = [saved for saved in loss.grad_fn.saved_tensors if saved is not None and saved.shape == (31, 16)]
    before = made.clone()
    first, second = (
        torch.autograd.grad(loss, case.linear_weight, case.upstream, retain_graph=kept)[0],
        torch.autograd.grad(loss, case.linear_weight, case.upstream)[0] if kept else None,
    )
    assert (first.data_ptr() == made.data_ptr()) is not kept
    if second is not None:
        assert second.data_ptr() == made.data_ptr() and torch.equal(first, second)
    torch.testing.assert_close(first, before * case.upstream.to(before.dtype), rtol=2**-6, atol=0)


def test_recorded_in_a_cuda_graph_nothing_is_given_away(device, monkeypatch):
    """A replay may have another upstream gradient, and under recording saved tensors have no versions."""
    monkeypatch.setattr(gradients, "is_recorded", lambda tensor: True)
    case = make((9,), 31, device, torch.bfloat16)
    _, expected = run(case, chunk_tokens=4)
    loss = linear_cross_entropy(case.input, case.linear_weight, case.target, chunk_tokens=4)
    made = [saved.data_ptr() for saved in loss.grad_fn.saved_tensors if saved is not None]
    found = torch.autograd.grad(loss, case.leaves(), case.upstream)
    assert all(map(torch.equal, found, expected))
    assert not {each.data_ptr() for each in found} & set(made)


def test_a_graph_kept_to_be_differentiated_keeps_what_forward_made(device):
    case = make((9,), 31, device)
    loss = linear_cross_entropy(case.input, case.linear_weight, case.target)
    first = torch.autograd.grad(loss, case.leaves(), create_graph=True)
    kept = [each.detach().clone() for each in first]
    for each in torch.autograd.grad(loss, case.leaves()):
        each.zero_()
    assert all(map(torch.equal, first, kept))


def test_an_upstream_gradient_of_1_is_not_multiplied_with(interpreted):
    from weft.kernels.launching.traffic import Traffic, counted_traffic
    from weft.kernels.linear_cross_entropy.launch import scale

    x = torch.randn(3, 5000).bfloat16()
    before = x.clone()
    with counted_traffic() as traffic:
        scale(x, torch.tensor(1.0), x)
    assert traffic == Traffic(loaded=4 * 4, stored=0)  # the factor, by each of four programs
    assert torch.equal(x, before)
    with counted_traffic() as traffic:
        scale(x, torch.tensor(-2.5), x)
    assert traffic == Traffic(loaded=4 * 4 + 2 * x.numel(), stored=2 * x.numel())
    torch.testing.assert_close(x, before * -2.5)


def test_an_upstream_gradient_is_not_rounded_to_bf16(interpreted):
    from weft.kernels.linear_cross_entropy.launch import scale

    x, factor = torch.randn(5000).bfloat16(), torch.tensor(1 / 3)
    assert torch.equal(scale(x, factor, torch.empty_like(x)), (x.float() * factor).bfloat16())
    assert torch.equal(scale(x.float(), factor, torch.empty_like(x)), (x.float() * factor).bfloat16())
