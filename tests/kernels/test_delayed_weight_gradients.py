"""Delayed weight gradients: the same bits, no product twice, and no work before they are asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from weft.kernels import grouped_matmul, linear, rms_norm, swiglu_linear
from weft.kernels.dispatch.delayed_weight_gradients import allow_delayed_weight_gradients, delay_weight_gradients
from weft.reshard.training.hooks import takes_none


class Ran(TorchDispatchMode):
    """Counts ops by name."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops[func._opname] += 1
        return func(*args, **(kwargs or {}))

    @property
    def products(self) -> int:
        """Counts products of matrices."""
        return self.ops["mm"] + self.ops["addmm"]


COPIES = ("clone", "copy_")  # torch's ops on a gradient that a second reference keeps alive


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((4, 3), (5, 4), (5,), (4,))]


def output(x: Tensor, first: Tensor, second: Tensor, bias: Tensor, norm: Tensor) -> Tensor:
    return linear(rms_norm(linear(x, first), norm, 1e-5), second, bias)


@pytest.mark.parametrize("inputs_too", [True, False], ids=["inputs", "weights-alone"])
def test_a_delayed_gradient_is_the_same_and_is_computed_once(inputs_too: bool) -> None:
    x = torch.arange(6.0).reshape(2, 3).requires_grad_(inputs_too)
    given = torch.arange(10.0).reshape(2, 5)
    together = parameters()
    with Ran() as whole:
        output(x, *together).backward(given)
    wanted, x.grad = x.grad, None
    apart = parameters()
    hooked: list[bool] = []
    hook = takes_none(lambda parameter: hooked.append(parameter.grad is not None))
    apart[1].register_post_accumulate_grad_hook(hook)
    with Ran() as halves:
        with allow_delayed_weight_gradients():
            made = output(x, *apart)
        with delay_weight_gradients() as later:
            made.backward(given)
        assert [each.grad is None for each in apart] == [True, True, True, False]  # a norm's is no product
        assert hooked == [False]  # torch calls it also where a function gave no gradient
        for add in later:
            add()
    assert hooked == [False, True]
    assert halves.products == whole.products
    assert {copy: halves.ops[copy] for copy in COPIES} == {copy: whole.ops[copy] for copy in COPIES}
    assert inputs_too == (wanted is not None) == (x.grad is not None)
    assert wanted is None or torch.equal(x.grad, wanted)
    for each, other in zip(apart, together, strict=True):
        assert torch.equal(each.grad, other.grad)


@pytest.mark.parametrize("post", [False, True])
def test_a_parameter_with_a_hook_of_the_program_never_waits(post: bool) -> None:
    x, weight, calls = torch.ones(2, 3), nn.Parameter(torch.ones(4, 3)), list[Tensor | None]()
    register = weight.register_post_accumulate_grad_hook if post else weight.register_hook
    register(lambda given: calls.append(given.grad if post else given))
    with allow_delayed_weight_gradients():
        made = linear(x, weight)
    with delay_weight_gradients() as later:
        made.sum().backward()
    assert later == []
    assert len(calls) == 1
    assert calls[0] is not None


def test_outside_nothing_waits_and_what_is_no_parameter_never_does() -> None:
    x, weight = torch.ones(2, 3), nn.Parameter(torch.ones(4, 3))
    linear(x, weight).sum().backward()
    assert weight.grad is not None
    weight.grad = None
    with allow_delayed_weight_gradients():
        made = linear(x, weight * 2)
    with delay_weight_gradients() as later:
        made.sum().backward()
    assert later == []
    assert weight.grad is not None


ACTIVATED: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "linear": (lambda x, weight: linear(x, weight, activation="gelu"), [(4, 3)]),
    "gated": (swiglu_linear, [(4, 3), (4, 3)]),
    "grouped": (
        lambda x, b: grouped_matmul(x, b, torch.tensor([2, 6], dtype=torch.int32), activation="gelu"),
        [(2, 3, 4)],
    ),
}


@pytest.mark.parametrize("form", ACTIVATED)
def test_an_activations_derivative_is_computed_once(form: str) -> None:
    op, shapes = ACTIVATED[form]
    generator = torch.Generator().manual_seed(0)
    operands = [torch.randn(shape, generator=generator, requires_grad=True) for shape in ((6, 3), *shapes)]
    made = op(*operands)
    given = torch.randn(made.shape, generator=generator)
    with Ran() as whole:
        wanted = torch.autograd.grad(made, operands, given)
    made = op(*operands)
    with Ran() as halves:
        with delay_weight_gradients() as later:
            made.backward(given)
        for add in later:
            add()
    assert len(later) == 1
    derivatives = [
        name for name in whole.ops if name in ("gelu_backward", "silu_backward", "sigmoid", "silu", "erf", "exp")
    ]
    assert derivatives
    for name in derivatives:
        assert halves.ops[name] == whole.ops[name], name
    for operand, gradient in zip(operands, wanted, strict=True):
        assert operand.grad is not None
        assert torch.equal(operand.grad, gradient)
