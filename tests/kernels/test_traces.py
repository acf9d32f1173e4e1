"""Graphs recorded from one call: `torch.jit.trace` is refused, as it would freeze the host's decisions.

Other recorders give a right graph, or are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from weft import kernels

from tests.kernels.test_errors import CALLS, tensors

MORE: dict[str, tuple[Callable[..., Any], str]] = {
    "normal": (lambda x: x + kernels.normal(tuple(x.shape), 7), "x"),
    "uniform": (lambda x: x + kernels.uniform(tuple(x.shape), 7), "x"),
    "rope_tables": (lambda tokens, vector: kernels.rope_tables(tokens, vector), "tokens vector"),
    "cross_entropy-options": (
        lambda x, tokens: kernels.cross_entropy(x, tokens, label_smoothing=0.1, reduction="none"),
        "x tokens",
    ),
}
ALL = CALLS | MORE
pytestmark = [
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit.trace:DeprecationWarning"),
]


@pytest.mark.parametrize("recorded", [False, True], ids=["no-grad", "grad"])
@pytest.mark.parametrize("name", sorted(ALL))
def test_jit_trace_is_refused(name, recorded):
    call, operands = ALL[name]
    made = tensors()
    given = tuple(made[each] for each in operands.split())
    with torch.set_grad_enabled(recorded):
        with pytest.raises(RuntimeError, match=r"torch\.jit\.trace.*use torch\.compile, or torch\.export\.export"):
            torch.jit.trace(lambda *operands: call(*operands), given, check_trace=False)  # which takes no `partial`
        call(*given)  # afterwards an eager call still works


@pytest.mark.parametrize("recorded", [False, True], ids=["no-grad", "grad"])
def test_a_trace_of_a_module_is_refused(recorded):
    class Head(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.eye(8))

        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            return kernels.linear_cross_entropy(torch.tanh(x), self.weight, target)

    made = tensors()
    with torch.set_grad_enabled(recorded), pytest.raises(RuntimeError, match="linear_cross_entropy is recorded by"):
        torch.jit.trace(Head(), (made["x"], made["tokens"]))


OTHERS: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "an-ignored-row": lambda x, target: (x, torch.where(torch.arange(4) == 1, -100, target)),
    "all-rows-ignored-but-one": lambda x, target: (x, torch.where(torch.arange(4) > 0, -100, target)),
    "large-logits": lambda x, target: (x * 3000, target),
    "a-nan": lambda x, target: (torch.where(torch.arange(8) == 2, torch.nan, x), target),
}


def losses(x: Tensor, target: Tensor) -> tuple[Tensor, ...]:
    eye = torch.eye(8)
    return (
        kernels.cross_entropy(x, target),
        kernels.cross_entropy(x, target, reduction="none", label_smoothing=0.1),
        kernels.linear_cross_entropy(x, eye, target, reduction="sum"),
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("change", OTHERS)
@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_make_fx_of_tensors_without_data_decides_nothing_by_values(mode, change):
    made = tensors()
    x, target = made["x"], made["tokens"]
    other = OTHERS[change](x, target)
    with torch.no_grad():
        graph = make_fx(losses, tracing_mode=mode)(x, target)
        torch.testing.assert_close(graph(*other), losses(*other), equal_nan=True)


def test_make_fx_of_values_and_symbolic_trace_raise():
    """The first raises torch's error for code that needs a value; the second has no tensors at all."""
    made = tensors()
    with torch.no_grad():
        with pytest.raises(RuntimeError, match="get value out of a tracing tensor"):
            make_fx(losses, tracing_mode="real")(made["x"], made["tokens"])
        with pytest.raises(ValueError, match=r"cross_entropy takes logits as a tensor, got Proxy\(x\)"):
            torch.fx.symbolic_trace(losses)


@pytest.mark.parametrize("change", OTHERS)
def test_the_name_in_the_refusal_is_right(change):
    class Losses(torch.nn.Module):
        def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, ...]:
            return losses(x, target)

    made = tensors()
    x, target = made["x"], made["tokens"]
    other = OTHERS[change](x, target)
    with torch.no_grad():
        exported = torch.export.export(Losses(), (x, target)).module()
        torch.testing.assert_close(exported(*other), losses(*other), equal_nan=True)
