"""Forward guesses the upstream gradient and makes the gradient for it: bytes moved, and bits that no guess changes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from weft.kernels import cross_entropy
from weft.kernels.cross_entropy import function, guess
from weft.kernels.cross_entropy.options import Options
from weft.kernels.launching.traffic import counted_traffic
from weft.mesh import Layout, ProcessMesh
from weft.reshard import distribute, exact_sums, to_global

from tests.kernels.cross_entropy.cases import ASKED, given, make
from tests.support.pool import Pool

NAN = float("nan")
SOME = ({}, {"label_smoothing": 0.1, "z_loss": 0.01, "softcap": 5.0})


@pytest.fixture(autouse=True)
def nothing_arrived() -> Iterator[None]:
    guess._HISTORY.clear()
    yield
    guess._HISTORY.clear()


def step(logits: Tensor, target: Tensor, upstream: Tensor, **options: Any) -> Tensor:
    """The gradient."""
    leaf = logits.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(cross_entropy(leaf, target, **options), leaf, upstream)
    return gradient


def without_a_guess(logits: Tensor, target: Tensor, upstream: Tensor, **options: Any) -> Tensor:
    """The gradient, made in backward."""
    with patch.dict(guess._HISTORY, {logits.device: torch.full((2,), torch.nan, device=logits.device)}):
        return step(logits, target, upstream, **options)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="plain-of-two-blocks"),
        pytest.param({"reduction": "sum"}, id="sum-of-two-blocks"),
        *(pytest.param(*case.values, id=case.id, marks=pytest.mark.exhaustive) for case in ASKED[:-1]),
        ASKED[-1],  # all options
    ],
)
def test_whatever_was_guessed_the_bits_are_the_same(device, options):
    V = 9000 if set(options) <= {"reduction"} else 37
    options = given(options, V, device)
    logits, target, _ = make(3, V, device, torch.bfloat16)
    whole = cross_entropy(logits, target, **options)
    expected = {}
    for number in (1.0, -0.3, -0.3, -0.3, NAN, 0.0):
        upstream = torch.tensor(number, device=device)
        if number not in expected:
            expected[number] = without_a_guess(logits, target, upstream, **options)
        found = step(logits, target, upstream, **options)
        torch.testing.assert_close(found, expected[number], rtol=0, atol=0, equal_nan=True)
    assert torch.equal(cross_entropy(logits.requires_grad_(), target, **options).detach(), whole)


@pytest.mark.parametrize("numbers", [(0.5, 1.0, 0.25), (1.0, 1.0), (0.5, 0.5), (NAN, 1.0)], ids=str)
def test_a_backward_that_a_cuda_graph_plays_again_without_its_forward(device, numbers, monkeypatch):
    """Backward overwrites forward's guess, and so may the caller: a replay must not take the memory for a guess."""
    monkeypatch.setattr(function, "is_recorded", lambda tensor: True)
    logits, target, _ = make(3, 37, device, torch.bfloat16)
    options = Options()
    _, saved = function.forward(logits, target, options=options, backwards=[])
    for number in numbers:
        upstream = torch.tensor(number, device=device)
        # Played again, no host code runs: nothing is appended to the list.
        found, *_ = function.backward(saved, (upstream,), (True, False, False, False), options=options, backwards=[])
        expected = without_a_guess(logits, target, upstream)
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
        found.zero_()


def moved(numbers: list[float], **options: Any) -> list[tuple[float, float]]:
    """Bytes a bf16 logit in forward and in backward of steps whose upstream gradients are these."""
    logits, target = torch.randn(4, 8192).bfloat16().requires_grad_(), torch.tensor([0, 5, 4095, 8191])
    found = []
    for number in numbers:
        with counted_traffic() as forward:
            loss = cross_entropy(logits, target, **options)
        with counted_traffic() as backward:
            torch.autograd.grad(loss, logits, torch.tensor(number))
        found.append(tuple(round((each.loaded + each.stored) / logits.numel(), 1) for each in (forward, backward)))
    return found


def test_an_unchanged_upstream_gradient_costs_one_pass(interpreted):
    """6 bytes are counted, 2 of them for the second reading of a row, which is still in the L2."""
    assert moved([1.0] * 3) == [(6, 0)] * 3
    assert moved([0.25] * 4) == [(6, 4), (2, 4), (6, 0), (6, 0)]


def test_an_upstream_gradient_that_changes_every_time_costs_two_passes(interpreted):
    assert moved([1.0, 0.5, 0.3, 0.2, 0.1]) == [(6, 0), (6, 4), (2, 4), (2, 4), (2, 4)]


@pytest.mark.parametrize(
    "options",
    [{"reduction": "none"}, {"return_lse": True}],
    ids=["none", "lse"],
)
def test_where_nothing_can_be_guessed_forward_makes_no_gradient(interpreted, options):
    logits, target, _ = make(4, 8192, "cpu", torch.bfloat16)
    with counted_traffic() as forward:
        cross_entropy(logits.requires_grad_(), target, **options)
    assert forward.stored / logits.numel() < 0.1


@pytest.mark.parametrize("context", [torch.no_grad(), torch.enable_grad()], ids=["no-grad", "frozen-logits"])
def test_without_a_backward_forward_makes_no_gradient(interpreted, context):
    logits, target, _ = make(4, 8192, "cpu", torch.bfloat16)
    with counted_traffic() as forward, context:
        cross_entropy(logits.requires_grad_(not torch.is_grad_enabled()), target)
    assert forward.stored / logits.numel() < 0.1


@pytest.mark.parametrize("options", [{"reduction": "none"}, {"return_lse": True}], ids=["none", "lse"])
def test_where_nothing_can_be_guessed_nothing_is_kept_on_the_device(interpreted, options):
    """A tensor in the memory of torch.compile's CUDA graphs may not outlive their step."""
    logits, target, _ = make(4, 31, "cpu", torch.bfloat16)
    outputs = cross_entropy(logits.requires_grad_(), target, **options)
    sum(each.sum() for each in (outputs if isinstance(outputs, tuple) else [outputs])).backward()
    assert guess._HISTORY == {}


def test_the_guess_is_float32_whatever_torchs_default():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert guess.guess(torch.device("cpu")).dtype == torch.float32
    finally:
        torch.set_default_dtype(before)


def test_float16_is_not_made_ahead(interpreted):
    """In float16 the gradient of an unscaled loss may underflow to 0."""
    logits, target, _ = make(4, 8192, "cpu", torch.float16)
    with counted_traffic() as forward:
        cross_entropy(logits.requires_grad_(), target)
    assert forward.stored / logits.numel() < 0.1


@pytest.mark.parametrize("numbers", [(1.0, 1.0), (1.0, 3.0), (3.0, 1.0)], ids=str)
def test_a_second_backward_gets_a_gradient_of_its_own(device, numbers):
    logits, target, _ = make(5, 37, device, torch.bfloat16)
    loss = cross_entropy(logits.requires_grad_(), target)
    for number in numbers:
        upstream = torch.tensor(number, device=device)
        (found,) = torch.autograd.grad(loss, logits, upstream, retain_graph=True)
        assert torch.equal(found, without_a_guess(logits, target, upstream))
        found.zero_()  # callers may overwrite the gradient


def asked_for_four_coordinates() -> tuple[int, bool]:
    """How many coordinates look for the gradient made in forward; whether the gradient is that of a plain loss."""
    logits, target, _ = make(8, 37, "cpu", torch.float32)
    layout = Layout(ProcessMesh.grid(dp=1), "dp: S(0)")
    with exact_sums({"dp": 4}), patch.object(guess, "was_right", side_effect=guess.was_right) as was_right:
        leaf = distribute(logits, layout).requires_grad_()
        loss = to_global(cross_entropy(leaf, distribute(target, layout), reduction="sum"))
        (found,) = torch.autograd.grad(loss, leaf)
    return was_right.call_count, torch.equal(to_global(found), step(logits, target, torch.ones(()), reduction="sum"))


def test_each_coordinate_of_a_named_mesh_takes_the_gradient_made_in_forward(pool: Pool) -> None:
    assert pool.run(asked_for_four_coordinates, ranks=1) == [(4, True)]


@pytest.mark.exhaustive
def test_losses_whose_backwards_come_later(device):
    """Each loss keeps the guess that its forward made."""
    logits, target, _ = make(5, 37, device, torch.bfloat16)
    losses = [cross_entropy(logits.requires_grad_(), target) for _ in range(3)]
    for loss, number in zip(losses, (2.0, 1.0, 2.0), strict=True):
        upstream = torch.tensor(number, device=device)
        (found,) = torch.autograd.grad(loss, logits, upstream)
        assert torch.equal(found, without_a_guess(logits, target, upstream))


@pytest.mark.parametrize("number", [1.0, 3.0])
def test_recomputed_by_a_checkpoint(device, number):
    logits, target, _ = make(5, 37, device, torch.bfloat16)
    loss = checkpoint(cross_entropy, logits.requires_grad_(), target, use_reentrant=False)
    upstream = torch.tensor(number, device=device)
    (found,) = torch.autograd.grad(loss, logits, upstream)
    assert torch.equal(found, without_a_guess(logits, target, upstream))


def test_the_guessed_gradient_is_a_saved_tensor_that_a_checkpoint_frees(interpreted):
    """The guessed gradient takes no memory between a checkpointed forward and its backward."""
    logits, target, _ = make(5, 37, "cpu", torch.bfloat16)
    seen: list[tuple[int, ...]] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: seen.append(tuple(x.shape)) or x, lambda x: x):
        cross_entropy(logits.requires_grad_(), target)
    assert seen.count((5, 37)) == 2, "the logits and their gradient"


@pytest.mark.parametrize("options", SOME, ids=["plain", "options"])
@pytest.mark.parametrize("ignored", [slice(0, 0), slice(0, 3), slice(None)], ids=["none", "some", "all"])
def test_ignored_tokens(device, ignored, options):
    logits, target, _ = make(5, 37, device, torch.bfloat16)
    target[ignored] = -100
    for number in (1.0, 1.0, 3.0):
        upstream = torch.tensor(number, device=device)
        found = step(logits, target, upstream, **options)
        assert torch.equal(found, without_a_guess(logits, target, upstream, **options))
        assert (found[ignored] == 0).all()


def test_a_denominator_that_is_no_number_makes_the_gradient_none(device):
    logits, target, _ = make(5, 37, device, torch.bfloat16)
    target[0] = -100
    nothing = torch.zeros((), device=device)
    for _ in range(2):
        found = step(logits, target, torch.ones((), device=device), denominator=nothing)
        assert (found[0] == 0).all()
        assert not found[1:].isfinite().any()


def test_an_upstream_gradient_in_float64_is_not_taken_for_a_guess_in_float32():
    logits, target, _ = make(3, 37, "cpu", torch.float64)
    upstream = torch.tensor(0.1, dtype=torch.float64)
    expected = without_a_guess(logits, target, upstream)
    for _ in range(4):  # guessed from the third step on
        assert torch.equal(step(logits, target, upstream), expected)
