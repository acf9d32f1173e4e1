"""Norms, rotary positions and gates against torch in float64: values, gradients, and bytes moved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from weft import kernels
from weft.kernels.launching.traffic import counted_traffic

from tests.kernels.cases import normal

HEAD = 6
Outputs = tuple[Tensor, ...]


def mean_square_norm(x: Tensor, weight: Tensor) -> Tensor:
    return torch.rms_norm(x, weight.shape, weight, 1e-6)


def of_heads(x: Tensor, weight: Tensor) -> Tensor:
    return mean_square_norm(x.unflatten(-1, (-1, HEAD)), weight).flatten(-2)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """By complex numbers: element i is the real part, element i + D / 2 the imaginary part."""
    first, second = x.unflatten(-1, (-1, 2, HEAD // 2)).unbind(-2)  # [..., T, heads, D / 2] each
    wide = torch.promote_types(x.dtype, torch.float32)
    found = torch.complex(first.to(wide), second.to(wide)) * torch.complex(cos.to(wide), sin.to(wide)).unsqueeze(-2)
    return torch.stack((found.real, found.imag), -2).flatten(-3).to(x.dtype)


def turned_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    apart = x.unflatten(-1, (-1, HEAD // 2, 2)).transpose(-1, -2).flatten(-3)
    return turned(apart, cos, sin).unflatten(-1, (-1, 2, HEAD // 2)).transpose(-1, -2).flatten(-3)


# The op, its meaning, and the names of its operands, of x [*rows, T, width] or [*rows, T, 2 * HEAD].
LAYERS: dict[str, tuple[Callable[..., Any], Callable[..., Any], str]] = {
    "rms_norm": (kernels.rms_norm, mean_square_norm, "x weight"),
    "rms_norm-plain": (kernels.rms_norm, lambda x: torch.rms_norm(x, x.shape[-1:], None, 1e-6), "x"),
    "rms_norm-heads": (lambda x, w: kernels.rms_norm(x, w, head_dim=HEAD), of_heads, "heads of_head"),
    "add_rms_norm": (kernels.add_rms_norm, lambda x, r, w: (x + r, mean_square_norm(x + r, w)), "x y weight"),
    "layer_norm": (kernels.layer_norm, lambda x, w, b: F.layer_norm(x, w.shape, w, b), "x weight bias"),
    "add_layer_norm": (
        kernels.add_layer_norm, lambda x, r, w, b: (x + r, F.layer_norm(x + r, w.shape, w, b)), "x y weight bias"
    ),
    "rope": (kernels.rope, turned, "heads cos sin"),
    "rope-interleaved": (
        lambda *tensors: kernels.rope(*tensors, interleaved=True), turned_interleaved, "heads cos sin"
    ),
    "rms_norm_rope": (
        kernels.rms_norm_rope, lambda x, w, cos, sin: turned(of_heads(x, w), cos, sin), "heads of_head cos sin"
    ),
    "swiglu": (kernels.swiglu, lambda gate, up: F.silu(gate) * up, "x y"),
    "geglu": (kernels.geglu, lambda gate, up: F.gelu(gate) * up, "x y"),
    "geglu-tanh": (
        lambda *tensors: kernels.geglu(*tensors, approximate="tanh"),
        lambda gate, up: F.gelu(gate, approximate="tanh") * up,
        "x y",
    ),
    "gelu": (kernels.gelu, F.gelu, "x"),
}  # fmt: skip
ROWS = [pytest.param((2, 5), id="rows"), pytest.param((0, 3), id="none"), pytest.param((1,), id="one")]


def operands(names: str, rows: tuple[int, ...], width: int) -> list[Tensor]:
    """Float64 operands whose numbers bf16 represents exactly."""
    made = {
        "x": normal(*rows, width), "y": normal(*rows, width, seed=1),
        "weight": normal(width, seed=2), "bias": normal(width, seed=3),
        "heads": normal(*rows, 2 * HEAD), "of_head": normal(HEAD, seed=2),
        "cos": normal(rows[-1], HEAD // 2), "sin": normal(rows[-1], HEAD // 2, seed=1),
    }  # fmt: skip
    return [made[name].bfloat16().double() for name in names.split()]


def run(op: Callable[..., Any], names: str, given: Sequence[Tensor]) -> Outputs:
    """The outputs, and the gradients of all but the tables."""
    return outputs_and_gradients(op, names, [each.clone() for each in given])


def outputs_and_gradients(op: Callable[..., Any], names: str, given: Sequence[Tensor]) -> Outputs:
    """Like `run`, with operands in their own memory."""
    leaves = [
        each.detach().requires_grad_(name not in ("cos", "sin"))
        for name, each in zip(names.split(), given, strict=True)
    ]
    found = op(*leaves)
    outputs = found if isinstance(found, tuple) else (found,)
    upstream = [normal(*each.shape, seed=7 + i).bfloat16().to(each) for i, each in enumerate(outputs)]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    return *(each.detach() for each in outputs), *torch.autograd.grad(outputs, wanted, upstream)


def error(found: Tensor, truth: Tensor) -> float:
    return float((found.cpu().double() - truth).abs().max()) if truth.numel() else 0.0


@pytest.mark.parametrize("width", [7, 16, 130])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_errs_no_more_than_torch(
    name: str, dtype: torch.dtype, rows: tuple[int, ...], width: int, device: str
) -> None:
    errs_no_more_than_torch(name, dtype, rows, width, device)


def errs_no_more_than_torch(name: str, dtype: torch.dtype, rows: tuple[int, ...], width: int, device: str) -> None:
    op, meaning, names = LAYERS[name]
    wide = operands(names, rows, width)
    truths = run(meaning, names, wide)
    narrow = [
        each.to(dtype if of not in ("cos", "sin") else torch.float32)
        for of, each in zip(names.split(), wide, strict=True)
    ]
    eager = run(meaning, names, narrow)
    found = run(op, names, [each.to(device) for each in narrow])
    for one, other, truth in zip(found, eager, truths, strict=True):
        assert one.dtype == other.dtype and one.shape == truth.shape
        scale = float(truth.abs().max()) if truth.numel() else 0.0
        assert error(one, truth) <= 2 * error(other, truth) + 4 * torch.finfo(dtype).eps * scale


# By width, long rows: a program has no registers to keep the weight in backward, or in both passes. In float32
# layer_norm's two sums do not fit either: its backward is launched twice.
LONG = {
    "reads-the-weight-again-in-backward": (torch.bfloat16, 5000, (True, False), 1),
    "reads-the-weight-again": (torch.bfloat16, 8200, (False, False), 2),
    "two-launches": (torch.float32, 4200, (True, False), 2),
}


@pytest.mark.parametrize("of", LONG)
@pytest.mark.parametrize("name", ["rms_norm", "add_rms_norm", "layer_norm", "add_layer_norm"])
def test_long_rows(name: str, of: str, interpreted: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from weft.kernels.launching.launched import RowTile
    from weft.kernels.layer_norm import launch as of_layer
    from weft.kernels.rms_norm import launch

    dtype, width, keeps, launches = LONG[of]
    tiles = ((RowTile.of(width, each), each) for each in (launch.FORWARD_ELEMENTS, launch.BACKWARD_ELEMENTS))
    assert tuple(launch.keeps_weight(*tile) for tile in tiles) == keeps
    launched: list[int] = []
    backward = of_layer._backward
    monkeypatch.setattr(of_layer, "_backward", lambda *given: (launched.append(1), backward(*given))[1])
    errs_no_more_than_torch(name, dtype, (2,), width, "cpu")
    assert len(launched) == ("layer_norm" in name) * launches


@pytest.mark.parametrize("name", LAYERS)
def test_the_torch_path_has_the_gradients_of_its_values(name: str) -> None:
    op, _, names = LAYERS[name]
    given = operands(names, (2, 3), 4)
    fixed = {i for i, of in enumerate(names.split()) if of in ("cos", "sin")}
    leaves = [each.requires_grad_(i not in fixed) for i, each in enumerate(given)]
    torch.autograd.gradcheck(op, leaves)


@pytest.mark.parametrize("name", ["add_rms_norm", "add_layer_norm", "rms_norm_rope"])
def test_a_sum_over_rows_is_the_same_to_the_bit_each_time(name: str, device: str) -> None:
    op, _, names = LAYERS[name]
    given = [each.float().to(device) for each in operands(names, (3, 3), 16)]
    for one, other in zip(run(op, names, given), run(op, names, given), strict=True):
        assert torch.equal(one, other)


def rows_apart(x: Tensor) -> Tensor:
    return F.pad(x, (0, 3))[..., :-3]


def elements_apart(x: Tensor) -> Tensor:
    return x.mT.contiguous().mT if x.ndim > 1 else torch.stack((x, x + 1), -1)[:, 0]


def expanded(x: Tensor) -> Tensor:
    """The same number, or row, at each place, once in memory."""
    return x[..., :1, :].expand(x.shape) if x.ndim > 1 else x[:1].expand(x.shape)


# The memory layouts of an op's first operand and of the rest: slices of wider tensors, or expanded ones.
STRIDED: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "apart": (rows_apart, elements_apart),
    "expanded": (elements_apart, expanded),
}


@pytest.mark.parametrize("lying", STRIDED)
@pytest.mark.parametrize("name", LAYERS)
def test_any_strides(name: str, lying: str, device: str) -> None:
    op, _, names = LAYERS[name]
    first, *others = [each.float().to(device) for each in operands(names, (4, 3), 16)]
    of_first, of_others = STRIDED[lying]
    given = [of_first(first), *map(of_others, others)]
    whole = [each.clone(memory_format=torch.contiguous_format) for each in given]
    for one, other in zip(outputs_and_gradients(op, names, given), run(op, names, whole), strict=True):
        torch.testing.assert_close(one, other)


# Traffic of a forward and of a backward: passes over x (each a read or a write of x), and bytes beside. There are N
# rows of H, or of 32 heads of D. Three programs each read the weight, and write float32 addends of its gradient; a
# row has float32 statistics.
N, H, D = 24, 512, 16
NORM = (6 * H + 4 * N, (2 + 4) * 3 * H + 4 * N)
OF_LAYER = (2 * 6 * H + 8 * N, (2 + 4 + 4) * 3 * H + 8 * N)
ANGLES = 4 * D * N
MOVED: dict[str, tuple[tuple[int, int], tuple[int, int]]] = {
    "rms_norm": ((2, 3), NORM),
    "add_rms_norm": ((4, 4), NORM),
    "layer_norm": ((2, 3), OF_LAYER),
    "add_layer_norm": ((4, 4), OF_LAYER),
    "rope": ((2, 2), (ANGLES, ANGLES)),
    "rope-interleaved": ((2, 2), (ANGLES, ANGLES)),
    "rms_norm_rope": ((2, 3), (ANGLES + 2 * 3 * D + 4 * N * 32, ANGLES + (2 + 4) * 3 * D + 4 * N * 32)),
    "swiglu": ((3, 5), (0, 0)),
    "geglu": ((3, 5), (0, 0)),
    "gelu": ((2, 3), (0, 0)),
}


@pytest.mark.parametrize("name", MOVED)
def test_bytes_moved(name: str, interpreted: None) -> None:
    op, _, names = LAYERS[name]
    made = {"x": normal(N, H), "heads": normal(N, 32 * D), "of_head": normal(D), "weight": normal(H), "bias": normal(H)}
    made |= {"y": made["x"], "cos": normal(N, D // 2), "sin": normal(N, D // 2)}
    leaves = [
        made[each].float() if each in ("cos", "sin") else made[each].bfloat16().requires_grad_()
        for each in names.split()
    ]
    with counted_traffic() as forward:
        outputs = op(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    upstream = [torch.ones_like(each) for each in outputs]
    with counted_traffic() as backward:
        torch.autograd.grad(outputs, [leaf for leaf in leaves if leaf.requires_grad], upstream)
    passes, beside = MOVED[name]
    found = [traffic.loaded + traffic.stored for traffic in (forward, backward)]
    assert found == [count * leaves[0].nbytes + more for count, more in zip(passes, beside, strict=True)]


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
def test_rope_in_place_moves_two_passes_in_the_memory_of_x(interpreted: None, interleaved: bool) -> None:
    x, cos, sin = normal(N, 32 * D).bfloat16(), normal(N, D // 2).float(), normal(N, D // 2).float()
    own = x.clone().requires_grad_()
    given = own * 1
    expected = kernels.rope(x, cos, sin, interleaved=interleaved)
    with counted_traffic() as traffic:
        turned = kernels.rope(given, cos, sin, interleaved=interleaved, inplace=True)
    assert turned is given and torch.equal(turned, expected)
    assert traffic.loaded + traffic.stored == 2 * x.nbytes + ANGLES
    other = x.clone().requires_grad_()
    upstream = normal(N, 32 * D, seed=1).bfloat16()
    (found,) = torch.autograd.grad(turned, own, upstream)
    assert torch.equal(
        found, torch.autograd.grad(kernels.rope(other, cos, sin, interleaved=interleaved), other, upstream)[0]
    )


LYING: dict[str, Callable[[Tensor], Tensor]] = {
    "behind-an-odd-number": lambda x: torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape),
    "every-second": lambda x: x.repeat_interleave(2, -1)[:, ::2],
    "transposed": lambda x: x.mT.contiguous().mT,
    "one-row": lambda x: x[:1].expand(x.shape),
}


@pytest.mark.parametrize("lying", LYING)
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
def test_rope_turns_what_lies_anyhow(interleaved: bool, lying: str, device: str) -> None:
    cos, sin = (normal(6, 2, seed=seed).float().to(device) for seed in (1, 2))
    x = LYING[lying](normal(6, 8).float().to(device))
    found = kernels.rope(x, cos, sin, interleaved=interleaved)
    assert torch.equal(
        found, kernels.rope(x.clone(memory_format=torch.contiguous_format), cos, sin, interleaved=interleaved)
    )


def test_rope_overwrites_nothing_that_is_needed(device: str) -> None:
    x, cos, sin = (normal(*shape).float().to(device) for shape in ((6, 8), (6, 2), (6, 2)))
    with pytest.raises(ValueError, match="x is a leaf that needs a gradient"):
        kernels.rope(x.clone().requires_grad_(), cos, sin, inplace=True)
    apart = x.mT.contiguous().mT
    assert torch.equal(kernels.rope(apart, cos, sin, inplace=True), kernels.rope(x, cos, sin)) and torch.equal(apart, x)
    leaf = x.clone().requires_grad_()
    given = leaf * 1
    squared = given.square()  # saves `given`
    turned = kernels.rope(given, cos, sin, inplace=True)
    if turned is given:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            (squared.sum() + turned.sum()).backward()
    else:
        assert torch.equal(given, x)
