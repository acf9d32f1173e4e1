"""experts against torch's functions in float64: values, gradients, and what has no data or no rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from weft.kernels import experts
from weft.kernels.launching.traffic import counted_traffic

from tests.kernels.matmul.cases import assert_as_good_as_eager, normal
from tests.kernels.matmul.test_gradients import gradients, kept
from tests.kernels.matmul.test_large_offsets import apart
from tests.kernels.matmul.test_tiles import WAYS
from tests.kernels.reads import NoReads

from .cases import Mixture, mixture, one_by_one

MIXTURES = {
    "two-of-four": mixture(20, 32, 48, 4, 2),
    "odd-sizes": mixture(13, 7, 5, 3, 2),
    "every-expert": mixture(9, 16, 33, 3, 3),
    "one-expert": mixture(9, 16, 8, 1, 1),
    "some-without-tokens": mixture(5, 16, 8, 9, 1),
    "all-to-one": mixture(40, 16, 8, 5, 1, among=1),
    "experts-of-other-ranks": mixture(21, 16, 24, 3, 2, first=2, among=8),
    "none-here": mixture(6, 16, 8, 2, 2, first=5, among=4),
    "no-tokens": mixture(0, 16, 8, 3, 2),
    "one-token": mixture(1, 16, 8, 3, 2),
    "nothing-to-sum": mixture(6, 16, 0, 3, 2),
}


def weft(of: Mixture, *floats: Tensor) -> Tensor:
    x, weights, *matrices = floats
    return experts(x, of.experts.to(x.device), weights, *matrices, first=of.first)


def torchs(of: Mixture, *floats: Tensor) -> Tensor:
    return one_by_one(of.experts.to(floats[0].device), *floats, first=of.first)


def assert_as_good(of: Mixture, floats: list[Tensor], run: Callable[..., Tensor]) -> None:
    """Output and gradients are at most twice as far from float64 as torch's own."""
    eager, wide = partial(torchs, of), [each.double() for each in floats]
    assert_as_good_as_eager(run(*floats), eager(*floats), eager(*wide))
    every = (gradients(run, *floats), gradients(eager, *floats), gradients(eager, *wide))
    for found, other, truth in zip(*every, strict=True):
        assert_as_good_as_eager(found, other, truth)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", MIXTURES)
def test_values_and_gradients(name: str, dtype: torch.dtype, device: str) -> None:
    of = MIXTURES[name]
    assert_as_good(of, [each.to(device, dtype) for each in of.floats], partial(weft, of))


@pytest.mark.parametrize("name", MIXTURES)
def test_float64_is_the_definition(name: str) -> None:
    of = MIXTURES[name]
    torch.testing.assert_close(weft(of, *of.floats), torchs(of, *of.floats))
    torch.testing.assert_close(gradients(partial(weft, of), *of.floats), gradients(partial(torchs, of), *of.floats))


@pytest.mark.exhaustive
def test_weights_in_float32_beside_16_bits(device: str) -> None:
    of = MIXTURES["two-of-four"]
    x, weights, *matrices = (each.to(device, torch.bfloat16) for each in of.floats)
    wide = weights.float() + 1e-3  # no numbers of 16 bits
    found = gradients(partial(weft, of), x, wide, *matrices)
    assert [each.dtype for each in found] == [torch.bfloat16, torch.float32, *[torch.bfloat16] * 3]
    truth = gradients(partial(torchs, of), *(each.double() for each in (x, wide, *matrices)))
    narrow = gradients(partial(torchs, of), x, wide.bfloat16(), *matrices)
    for each, other, true in zip(found, narrow, truth, strict=True):
        assert_as_good_as_eager(each, other, true)


def test_blocks_of_rows_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    from weft.kernels.experts import function

    of = MIXTURES["two-of-four"]
    whole = gradients(partial(weft, of), *of.floats)
    monkeypatch.setattr(function, "ROWS_AT_ONCE", 3)
    torch.testing.assert_close(gradients(partial(weft, of), *of.floats), whole)


def test_finite_differences() -> None:
    of = mixture(5, 4, 3, 3, 2, first=1, among=4)
    assert torch.autograd.gradcheck(partial(weft, of), [each.clone().requires_grad_() for each in of.floats])


@pytest.mark.exhaustive
@pytest.mark.parametrize("needed", range(5))
def test_one_gradient_alone(needed: int, device: str) -> None:
    of = MIXTURES["experts-of-other-ranks"]
    floats = [each.float().to(device).requires_grad_(i == needed) for i, each in enumerate(of.floats)]
    output = weft(of, *floats)
    upstream = normal(*output.shape, seed=3).to(output)
    alone = torch.autograd.grad(output, floats[needed], upstream)[0]
    assert torch.equal(alone, gradients(partial(weft, of), *floats)[needed])


def test_leading_dims_strides_and_int32(device: str) -> None:
    of = MIXTURES["two-of-four"]
    x, weights, gate, up, down = (each.float().to(device) for each in of.floats)
    chosen = of.experts.to(device)
    apart = (
        x.T.contiguous().T.reshape(4, 5, -1), chosen.int().reshape(4, 5, -1), weights.reshape(4, 5, -1),
        gate.mT.contiguous().mT, up, down.mT.contiguous().mT,
    )  # fmt: skip
    found = experts(*apart)
    assert found.shape == (4, 5, x.shape[1])
    assert_as_good_as_eager(found.flatten(0, 1), torchs(of, x, weights, gate, up, down), torchs(of, *of.floats))


@pytest.mark.exhaustive
def test_two_runs_are_equal_to_the_bit(device: str) -> None:
    of = MIXTURES["every-expert"]
    floats = [each.to(device, torch.bfloat16) for each in of.floats]
    first, second = (gradients(partial(weft, of), *floats) for _ in range(2))
    assert all(map(torch.equal, first, second))


@pytest.mark.exhaustive
def test_rows_bound_the_memory(device: str) -> None:
    of = MIXTURES["experts-of-other-ranks"]
    here = int(((of.experts >= of.first) & (of.experts < of.first + 3)).sum())
    floats = [each.float().to(device) for each in of.floats]

    def bounded(x: Tensor, weights: Tensor, *matrices: Tensor) -> Tensor:
        return experts(x, of.experts.to(device), weights, *matrices, first=of.first, rows=here)

    assert all(map(torch.equal, gradients(bounded, *floats), gradients(partial(weft, of), *floats)))


def test_more_choices_than_rows_are_refused_where_the_host_counts() -> None:
    of = MIXTURES["two-of-four"]
    x, weights, *matrices = of.floats
    with pytest.raises(ValueError, match=r"40 choices are of the experts here, and rows=7 .* give rows=40 or more"):
        experts(x, of.experts, weights, *matrices, rows=7)
    compiled = torch.compile(partial(experts, rows=7), backend="eager", fullgraph=True)
    with pytest.raises(ValueError, match=r"40 choices are of the experts here, and rows=7"):
        compiled(x, of.experts, weights, *matrices)


@pytest.mark.exhaustive
@pytest.mark.parametrize("way", ["pointers", "in-parts"])
def test_each_way_to_cut_the_tiles(interpreted: None, way: str) -> None:
    """Each tile of the first product reads its tokens' rows once, for both matrices, and stores three tiles."""
    from weft.kernels.experts import launch
    from weft.kernels.extension import sort_by_expert

    of = mixture(20, 48, 72, 4, 2)
    x, weights, gate, up, down = (each.to(torch.bfloat16) for each in of.floats)
    source, offsets = sort_by_expert(of.experts, 4)
    out, (z_gate, z_up) = torch.empty_like(x), (x.new_empty(40, 72) for _ in range(2))
    operands = x, weights, source, offsets, gate, up, down
    with counted_traffic() as traffic:
        launch.forward(*operands, out, z_gate, z_up, 40, configuration=WAYS[way])
    floats = [each.to(torch.bfloat16) for each in of.floats]
    assert_as_good_as_eager(out, torchs(of, *floats), torchs(of, *(each.double() for each in floats)))
    assert traffic.stored == 2 * (3 * 40 * 72 + 40 * 48 + 20 * 48)
    grad = normal(20, 48, seed=3).to(torch.bfloat16)
    found = [torch.empty_like(each) for each in (x, weights, gate, up, down)]
    launch.backward(grad, *operands, z_gate, z_up, *found, configuration=WAYS[way])
    eager, wide = partial(torchs, of), [each.double() for each in floats]
    for each, other, truth in zip(found, gradients(eager, *floats), gradients(eager, *wide), strict=True):
        assert_as_good_as_eager(each, other, truth)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("operand", "dim"), [(0, 0), (0, 1), (2, 0), (4, 0), (4, 1)])
def test_offsets_beyond_32_bits(interpreted: None, operand: int, dim: int) -> None:
    """x by token and by column; gate and up, or down, by expert; down by row. The memory between is not touched."""
    of = mixture(3, 3, 16, 3, 2)
    floats = [each.to(torch.bfloat16) for each in of.floats]
    far = [apart(each, dim) if i in ((2, 3) if operand == 2 else (operand,)) else each for i, each in enumerate(floats)]
    leaves = [each.requires_grad_() for each in far]
    output = weft(of, *leaves)
    upstream = normal(3, 3, seed=3).to(output)
    found = [output, *torch.autograd.grad(output, [leaf for leaf in leaves if leaf.is_contiguous()], upstream)]
    near = [each.detach().requires_grad_() for each in floats]
    wanted = weft(of, *near)
    kept = [each for each, leaf in zip(near, leaves, strict=True) if leaf.is_contiguous()]
    assert all(map(torch.equal, found, [wanted, *torch.autograd.grad(wanted, kept, upstream)]))


def test_the_host_reads_nothing(interpreted: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the path of a GPU, on which the kernels find the experts' rows themselves."""
    from weft.kernels.experts import function, kernel
    from weft.kernels.grouped_matmul import kernel as grouped
    from weft.kernels.routing import kernel as routing

    class Launched:
        def __getitem__(self, grid: object) -> Callable[..., None]:
            return lambda *arguments, **constexprs: None

    monkeypatch.setattr(function, "can_read", lambda tensor: False)
    for name in ("gated_rows", "gated_rows_backward", "weights_by_expert"):
        monkeypatch.setattr(kernel, name, Launched())
    monkeypatch.setattr(routing, "sum_rows", Launched())
    monkeypatch.setattr(grouped, "rows_by_group", Launched())
    of = MIXTURES["two-of-four"]
    floats = [each.float().requires_grad_() for each in of.floats]
    with NoReads():
        weft(of, *floats).sum().backward()


@pytest.mark.parametrize("choices", [2, 8])
def test_kept_for_backward_are_two_numbers_an_inner_element_and_the_order(choices: int, device: str) -> None:
    of = mixture(32, 16, 24, 8, choices)
    floats = [each.float().to(device).requires_grad_() for each in of.floats]
    rows = 32 * choices
    # Both pre-activations in 4 bytes, the sorted order, and where experts end.
    assert kept(partial(weft, of), *floats) == 2 * rows * 24 + rows + 8


@pytest.mark.few(1)
def test_a_compiled_graph_has_one_op_forward_and_one_backward(device: str) -> None:
    torch._dynamo.reset()
    of = MIXTURES["experts-of-other-ranks"]
    floats = [each.float().to(device) for each in of.floats]
    compiled = torch.compile(lambda *t: weft(of, *t) * 2, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(
        gradients(compiled, *floats), gradients(lambda *t: weft(of, *t) * 2, *floats), rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("kind", ["meta", "fake"])
def test_without_data(kind: str) -> None:
    of = MIXTURES["two-of-four"]
    with FakeTensorMode() if kind == "fake" else torch.device("meta"):
        floats = [torch.empty(each.shape, requires_grad=True) for each in of.floats]
        chosen = torch.empty(of.experts.shape, dtype=torch.int64)
        output = experts(floats[0], chosen, *floats[1:])
        found = torch.autograd.grad(output.sum(), floats)
    assert output.shape == of.x.shape and [each.shape for each in found] == [each.shape for each in of.floats]


def test_a_second_derivative_is_refused() -> None:
    of = MIXTURES["odd-sizes"]
    x, *others = (each.clone().requires_grad_() for each in of.floats)
    (first,) = torch.autograd.grad(weft(of, x, *others).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(first.sum(), x)


X, CHOSEN, WEIGHTS, GATE, DOWN = (
    torch.ones(6, 4), torch.zeros(6, 2, dtype=torch.int64), torch.ones(6, 2), torch.ones(3, 5, 4), torch.ones(3, 4, 5)
)  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        pytest.param({0: X[:5]}, r"got \(5, 4\), \(6, 2\) and \(6, 2\); give each token of x a row", id="tokens"),
        pytest.param({2: WEIGHTS[:, :1]}, r"got \(6, 4\), \(6, 2\) and \(6, 1\); give each", id="choices"),
        pytest.param({3: GATE.mT}, r"got \(3, 4, 5\), \(3, 5, 4\) and \(3, 4, 5\) .* transpose a stack", id="gate"),
        pytest.param({5: DOWN[:2]}, r"\(2, 4, 5\) beside \(6, 4\); stack the experts' matrices", id="experts"),
        pytest.param({1: CHOSEN.float()}, r"experts is torch.float32; cast it with .to\(\)", id="ids"),
        pytest.param({2: CHOSEN}, r"weights is torch.int64; cast it", id="weights"),
        pytest.param({4: GATE.double()}, r"torch.float32 and torch.float64 cannot be multiplied", id="dtypes"),
    ],
)
def test_operands_that_do_not_go_together_are_named(changed: dict[int, Tensor], told: str) -> None:
    operands = [changed.get(i, each) for i, each in enumerate((X, CHOSEN, WEIGHTS, GATE, GATE, DOWN))]
    with pytest.raises(ValueError, match=told):
        experts(*operands)


def test_a_negative_number_of_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="rows is -1; give the number of sorted rows"):
        experts(X, CHOSEN, WEIGHTS, GATE, GATE, DOWN, rows=-1)
