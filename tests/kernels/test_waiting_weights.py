"""Gradients of weights that wait: the same bits, no product twice, and nothing of them before they are asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from weft.kernels import linear, rms_norm
from weft.kernels.weights import waiting_weights


class Products(TorchDispatchMode):
    """Counts products of matrices."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return func(*args, **(kwargs or {}))


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((4, 3), (5, 4), (5,), (4,))]


def output(x: Tensor, first: Tensor, second: Tensor, bias: Tensor, norm: Tensor) -> Tensor:
    return linear(rms_norm(linear(x, first), norm, 1e-5), second, bias)


@pytest.mark.parametrize("inputs_too", [True, False], ids=["inputs", "weights-alone"])
def test_what_waits_is_the_same_and_is_computed_once(inputs_too: bool) -> None:
    x = torch.arange(6.0).reshape(2, 3).requires_grad_(inputs_too)
    given = torch.arange(10.0).reshape(2, 5)
    together = parameters()
    with Products() as whole:
        output(x, *together).backward(given)
    wanted, x.grad = x.grad, None
    apart = parameters()
    hooked: list[bool] = []
    apart[1].register_post_accumulate_grad_hook(lambda parameter: hooked.append(parameter.grad is not None))
    with Products() as halves:
        made = output(x, *apart)
        with waiting_weights() as later:
            made.backward(given)
        assert [each.grad is None for each in apart] == [True, True, True, False]  # a norm's is no product
        assert hooked == [False]  # torch calls it also where a function gave no gradient
        for add in later:
            add()
    assert hooked == [False, True]
    assert halves.count == whole.count
    assert inputs_too == (wanted is not None) == (x.grad is not None)
    assert wanted is None or torch.equal(x.grad, wanted)
    for each, other in zip(apart, together, strict=True):
        assert torch.equal(each.grad, other.grad)


def test_outside_nothing_waits_and_what_is_no_parameter_never_does() -> None:
    x, weight = torch.ones(2, 3), nn.Parameter(torch.ones(4, 3))
    linear(x, weight).sum().backward()
    assert weight.grad is not None
    weight.grad = None
    made = linear(x, weight * 2)
    with waiting_weights() as later:
        made.sum().backward()
    assert later == []
    assert weight.grad is not None
