"""Tensors that a product saves in place of a norm's or a gate's output, from which it recomputes the same output."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from weft import kernels
from weft.kernels.dispatch import backend

from tests.kernels.cases import normal


def storages(*tensors: Tensor) -> set[int]:
    return {each.untyped_storage().data_ptr() for each in tensors if each.numel()}


class Saved:
    """Collects the tensors saved inside this context."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda each: each)

    def _pack(self, tensor: Tensor) -> Tensor:
        self.tensors.append(tensor)
        return tensor

    def __enter__(self) -> Saved:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)


def leaves(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [normal(*shape, seed=i).requires_grad_() for i, shape in enumerate(shapes)]


@pytest.fixture(autouse=True)
def short_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory as short as a GPU's, or a CPU's in 16 bits: see the last test."""
    monkeypatch.setattr(backend, "PLAIN", frozenset())
    monkeypatch.setattr(backend, "is_short_of_memory", lambda output: True)


def test_a_product_keeps_what_makes_its_input() -> None:
    gate, up, weight = leaves((3, 8), (3, 8), (5, 8))
    hidden = kernels.swiglu(gate, up)
    with Saved() as saved:
        output = kernels.linear(hidden, weight)
    assert storages(*saved.tensors) == storages(gate, up, weight)
    found = torch.autograd.grad(output.sum(), [gate, up, weight])
    plain = torch.nn.functional.linear(torch.nn.functional.silu(gate) * up, weight)
    for one, other in zip(found, torch.autograd.grad(plain.sum(), [gate, up, weight]), strict=True):
        torch.testing.assert_close(one, other)


def test_an_activation_changed_in_place_is_kept() -> None:
    gate, up, weight = leaves((3, 8), (3, 8), (5, 8))
    hidden = kernels.swiglu(gate, up)
    with torch.no_grad():
        hidden.mul_(2)
    with Saved() as saved:
        output = kernels.linear(hidden, weight)
    assert storages(*saved.tensors) == storages(hidden, weight)
    (dweight,) = torch.autograd.grad(output.sum(), weight)
    torch.testing.assert_close(dweight, hidden.detach().sum(0).expand(5, 8))


def test_a_slice_of_a_gates_output_is_saved_as_it_is() -> None:
    gate, up, weight = leaves((3, 8), (3, 8), (5, 8))
    part = kernels.swiglu(gate, up)[1:]
    with Saved() as saved:
        kernels.linear(part, weight)
    assert storages(*saved.tensors) == storages(part, weight)


def test_the_inputs_of_a_recomputed_gate_may_not_change_before_backward() -> None:
    gate, up, weight = leaves((3, 8), (3, 8), (5, 8))
    gate_copy = gate * 1
    output = kernels.linear(kernels.swiglu(gate_copy, up), weight)
    with torch.no_grad():
        gate_copy.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


@pytest.mark.parametrize("position", [0, 1], ids=["first", "second"])
@pytest.mark.parametrize(
    ("op", "shapes"),
    [
        pytest.param(kernels.swiglu, ((3, 8), (3, 8)), id="swiglu"),
        pytest.param(kernels.geglu, ((3, 8), (3, 8)), id="geglu"),
        pytest.param(kernels.rms_norm, ((3, 8), (8,)), id="rms-norm"),
        pytest.param(
            lambda x, scale: kernels.layer_norm(x, scale, torch.zeros_like(scale)), ((3, 8), (8,)), id="layer-norm"
        ),
    ],
)
def test_an_operand_written_between_two_ops_leaves_the_weights_gradient_right(
    op: Callable[..., torch.Tensor], shapes: tuple[tuple[int, ...], ...], position: int
) -> None:
    """The product then saves the output itself: the changed operand would give another output in backward."""
    *operands, weight = leaves(*shapes, (5, 8))
    copies = [each * 1 for each in operands]
    output = op(*copies)
    with torch.no_grad():
        copies[position].mul_(-3)
    (found,) = torch.autograd.grad(kernels.linear(output, weight).sum(), weight)
    expected = output.detach().double().sum(0).expand(5, 8)
    allowed = 4 * torch.finfo(found.dtype).eps * expected.abs().max() + 1e-6
    assert (found.double() - expected).abs().max() <= allowed


def test_products_that_share_an_input_make_it_once_in_each_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    from weft.kernels.rms_norm import function

    made = []
    recompute = function.plain_recompute
    monkeypatch.setattr(function, "plain_recompute", lambda *given, **more: made.append(1) or recompute(*given, **more))
    x, scale, *weights = leaves((3, 8), (8,), (5, 8), (5, 8), (5, 8))
    shared = kernels.rms_norm(x, scale)
    output = sum(kernels.linear(shared, weight).square().sum() for weight in weights)
    made.clear()  # forward makes it, too
    first = torch.autograd.grad(output, [x, *weights], retain_graph=True)
    assert len(made) == 1
    (alone,) = torch.autograd.grad(output, weights[0], retain_graph=True)  # a single one of the three gradients
    second = torch.autograd.grad(output, [x, *weights])
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)
    assert torch.equal(alone, first[1])


def test_backward_through_some_of_the_products_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from weft.kernels.rms_norm import function

    made: list[weakref.ref[Tensor]] = []
    recompute = function.plain_recompute

    def noted(*given: Any, **more: Any) -> Any:
        output = recompute(*given, **more)
        made.append(weakref.ref(output))
        return output

    monkeypatch.setattr(function, "plain_recompute", noted)
    x, scale, *weights = leaves((3, 8), (8,), (5, 8), (5, 8), (5, 8))
    shared = kernels.rms_norm(x, scale)
    outputs = [kernels.linear(shared, weight).square().sum() for weight in weights]
    del shared
    expected = torch.autograd.grad(sum(outputs), [x, *weights], retain_graph=True)
    made.clear()
    torch.autograd.grad(outputs[0] + outputs[1], [x, *weights[:2]], retain_graph=True)
    assert len(made) == 1 and made[0]() is None  # though the third product's graph is alive
    made.clear()
    found = torch.autograd.grad(sum(outputs), [x, *weights], retain_graph=True)
    assert len(made) == 1 and made[0]() is None
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_nothing_is_kept_of_what_needs_no_gradient() -> None:
    gate, up = normal(3, 8), normal(3, 8, seed=1)
    (weight,) = leaves((5, 8))
    hidden = kernels.swiglu(gate, up)
    with Saved() as saved:
        kernels.linear(hidden, weight)
    assert storages(*saved.tensors) == storages(hidden, weight)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        pytest.param(
            lambda: kernels.add_rms_norm(normal(3, 8), normal(8)),
            r"residual of one shape, got \(3, 8\) and \(8,\)",
            id="rms",
        ),
        pytest.param(
            lambda: kernels.add_layer_norm(normal(3, 8), normal(8)), r"got \(3, 8\) and \(8,\); expand one", id="layer"
        ),
        pytest.param(
            lambda: kernels.add_rms_norm(normal(3, 8), normal(3, 8), normal(3)), r"weight \[H\], got", id="weight"
        ),
        pytest.param(
            lambda: kernels.rms_norm_rope(normal(3, 8), normal(8), normal(3, 2), normal(3, 2)),
            r"a weight \[D\] beside tables \[T, D / 2\], got \(8,\) and \(3, 2\)", id="head-weight",
        ),
        pytest.param(
            lambda: kernels.rms_norm_rope(normal(3, 9), normal(4), normal(3, 2), normal(3, 2)),
            r"rms_norm_rope takes x \[..., T, heads \* D\]", id="heads",
        ),
        pytest.param(
            lambda: kernels.geglu(normal(3, 8), normal(3, 4)), "geglu takes two tensors of one shape", id="gate"
        ),
        pytest.param(
            lambda: kernels.geglu(normal(3), normal(3), approximate="erf"),
            "geglu: approximate is 'erf'; give one",
            id="form",
        ),
    ],
)  # fmt: skip
def test_mismatched_operands_are_refused(call, message) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_cpu_keeps_a_gates_output_in_32_bits(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    gate, up, weight = (each.detach().to(dtype).requires_grad_() for each in leaves((3, 8), (3, 8), (5, 8)))
    hidden = kernels.swiglu(gate, up)
    with Saved() as saved:
        kernels.linear(hidden, weight)
    kept = (hidden, weight) if dtype == torch.float32 else (gate, up, weight)
    assert storages(*saved.tensors) == storages(*kept)
