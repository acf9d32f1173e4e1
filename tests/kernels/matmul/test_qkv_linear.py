"""qkv_linear against three products and two rotations in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from weft.kernels import qkv_linear

from tests.kernels.cases import rotate

from .cases import assert_as_good_as_eager, normal
from .test_gradients import gradients, kept

T, D = 5, 4
ANGLES = normal(T, D // 2)


def tables(dtype: torch.dtype, device: str = "cpu") -> dict[str, Tensor]:
    wide = dtype if dtype == torch.float64 else torch.float32
    return {"cos": ANGLES.cos().to(device, wide), "sin": ANGLES.sin().to(device, wide)}


def eager(turned: bool, x: Tensor, *parameters: Tensor) -> Tensor:
    """Queries, keys and values beside one another."""
    weights, biases = parameters[:3], parameters[3:] or (None,) * 3
    q, k, v = (F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True))
    if turned:
        wide = torch.promote_types(x.dtype, torch.float32)
        q, k = (
            rotate(each.to(wide), *(t.to(wide) for t in (ANGLES.cos(), ANGLES.sin()))).to(x.dtype) for each in (q, k)
        )
    return torch.cat([q, k, v], -1)


def joined(turned: bool, *tensors: Tensor) -> Tensor:
    options = tables(tensors[0].dtype, tensors[0].device.type) if turned else {}
    return torch.cat(qkv_linear(*tensors, **options), -1)


def operands(K: int, dtype: torch.dtype, biases: bool) -> list[Tensor]:
    shapes = [(2, T, K), (4 * D, K), (2 * D, K), (2 * D, K), *(((4 * D,), (2 * D,), (2 * D,)) if biases else ())]
    return [normal(*shape, dtype=dtype, seed=seed) for seed, shape in enumerate(shapes)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("turned", [False, True], ids=["as-they-are", "turned"])
@pytest.mark.parametrize("biases", [False, True], ids=["weights", "biases"])
@pytest.mark.parametrize("K", [0, 1, 24])
def test_values_and_gradients(K: int, biases: bool, turned: bool, dtype: torch.dtype, device: str) -> None:
    given = operands(K, dtype, biases)
    wide = [each.double() for each in given]
    there = [each.to(device) for each in given]
    found = joined(turned, *there)
    assert_as_good_as_eager(found.cpu(), eager(turned, *given), eager(turned, *wide))
    with torch.no_grad():
        assert torch.equal(joined(turned, *there), found)
    for mine, other, truth in zip(
        gradients(lambda *t: joined(turned, *t), *there),
        gradients(lambda *t: eager(turned, *t), *given),
        gradients(lambda *t: eager(turned, *t), *wide),
        strict=True,
    ):
        assert_as_good_as_eager(mine.cpu(), other, truth)


@pytest.mark.few(1)
@pytest.mark.parametrize("turned", [False, True], ids=["as-they-are", "turned"])
def test_gradients_by_finite_differences(turned: bool) -> None:
    given = [each.requires_grad_() for each in operands(3, torch.float64, True)]
    assert torch.autograd.gradcheck(lambda *t: joined(turned, *t), given)


@pytest.mark.parametrize("asked", [(0,), (1,), (2,), (0, 2)], ids=str)
def test_outputs_that_nobody_uses_have_no_part_in_gradients(asked: tuple[int, ...]) -> None:
    given = [each.requires_grad_() for each in operands(3, torch.float64, False)]
    sizes = (4 * D, 2 * D, 2 * D)

    def used(*outputs: Tensor) -> Tensor:
        return torch.stack([outputs[i].square().sum() for i in asked]).sum()

    found = torch.autograd.grad(used(*qkv_linear(*given, **tables(torch.float64))), given, allow_unused=True)
    wanted = torch.autograd.grad(used(*eager(True, *given).split(sizes, -1)), given)
    for i, (mine, truth) in enumerate(zip(found, wanted, strict=True)):
        if i == 0 or i - 1 in asked:
            torch.testing.assert_close(mine, truth)
        else:
            assert mine is None
            assert not truth.any()


def test_the_operands_alone_are_kept(device: str) -> None:
    given = [each.to(device).requires_grad_() for each in operands(8, torch.float32, True)]
    angles = tables(torch.float32, device)
    outputs = sum((2 * T * each.shape[0] for each in given[1:4]), 0)

    def run(*tensors: Tensor) -> Tensor:
        q, k, v = qkv_linear(*tensors, **angles)
        return q.sum() + k.sum() + v.sum()

    assert kept(run, *given) <= sum(each.numel() for each in angles.values()) < outputs


class Additions(TorchDispatchMode):
    """The ops that add tensors up."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names += [name for name in [func.__name__.partition(".")[0]] if name in ("add", "add_", "addmm")]
        return func(*args, **(kwargs or {}))


def test_the_gradients_of_the_input_are_added_up_in_their_products() -> None:
    given = [each.requires_grad_() for each in operands(8, torch.float32, False)]
    outputs = qkv_linear(*given)
    with Additions() as seen:
        torch.autograd.grad(outputs, given, [torch.ones_like(each) for each in outputs])
    assert seen.names == ["addmm", "addmm"]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        pytest.param(
            {"k_weight": normal(8, 5)}, r"qkv_linear takes input .* got \(2, 5, 3\) and \(8, 5\)", id="weight"
        ),
        pytest.param({"v_bias": normal(7)}, r"qkv_linear takes a bias of shape \(8,\), got \(7,\)", id="bias"),
        pytest.param({"cos": ANGLES}, r"both cos and sin, or neither; give both", id="one-table"),
        pytest.param(
            {"cos": normal(4, 2), "sin": normal(4, 2)}, r"got \(2, 5, 16\), \(4, 2\) and \(4, 2\)", id="tokens"
        ),
        pytest.param({"k_weight": normal(6, 3), "cos": ANGLES, "sin": ANGLES}, r"got \(2, 5, 6\), ", id="half-a-head"),
    ],
)  # fmt: skip
def test_sizes_that_differ_are_named(change: dict[str, Tensor], told: str) -> None:
    names = ("input", "q_weight", "k_weight", "v_weight")
    with pytest.raises(ValueError, match=told):
        qkv_linear(**{**dict(zip(names, operands(3, torch.float64, False), strict=True)), **change})
