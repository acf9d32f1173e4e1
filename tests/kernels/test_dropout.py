"""dropout: one mask by (key, global index) on every path, in every layout and again in backward."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from weft import kernels
from weft.kernels.dropout import function
from weft.kernels.launching.traffic import Traffic, counted_traffic
from weft.kernels.random.philox import Part
from weft.mesh import Layout, LayoutError, ProcessMesh, derive_key
from weft.reshard import distribute, layout_of
from weft.reshard.world.groups import world_cache

from tests.support import philox as oracle
from tests.support.collectives import Collectives
from tests.support.sample import Portion
from tests.support.shards import addends, every_layout, split

KEY = derive_key(3, "layers.0.mlp_dropout", 7)
SHAPES = [(), (1,), (13,), (5, 7), (2, 3, 2, 3, 4), (0, 3), (3, 5000), (4, 2048)]
MESHES = [ProcessMesh.grid(a=2), ProcessMesh.grid(a=3), ProcessMesh.grid(a=2, b=2), ProcessMesh.grid(a=2, b=3)]
FOUR, GRID = ProcessMesh.grid(tp=4), ProcessMesh.grid(dp=2, tp=2)
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def normal(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).to(device)


def kept(shape: tuple[int, ...], p: float, key: int = KEY) -> Tensor:
    """Where an element survives, by the oracle's bits."""
    return oracle.kept(torch.arange(math.prod(shape)).reshape(shape), p, key)


def expected(x: Tensor, p: float, key: int = KEY) -> Tensor:
    """The input times the oracle's mask; scale and product are rounded to float32, or float64 for float64."""
    wide = torch.promote_types(x.dtype, torch.float32)
    scaled = (x.cpu().to(wide) * torch.tensor(2**16 / (2**16 - round(p * 2**16)), dtype=wide)).to(x.dtype)
    return torch.where(kept(x.shape, p, key), scaled, torch.zeros((), dtype=x.dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_survivors_are_scaled_and_the_others_are_zero(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    x = normal(shape, dtype, device)
    y = kernels.dropout(x, 0.3, KEY)
    assert y.dtype == dtype
    assert torch.equal(y.cpu(), expected(x, 0.3))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(5, 7), (2, 3, 2, 3, 4), (0, 3), (2, 2048)], ids=str)
def test_a_residual_is_added_to_what_survives(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    x, residual = normal(shape, dtype, device), normal(shape, dtype, device, seed=1).mT.contiguous().mT
    leaves = [each.requires_grad_() for each in (x, residual)]
    y = kernels.dropout(leaves[0], 0.3, KEY, residual=leaves[1])
    dropped = torch.where(kept(shape, 0.3), x.detach().cpu().double() / (1 - round(0.3 * 2**16) / 2**16), 0)
    tolerance = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(
        y.detach().cpu().double(), residual.detach().cpu().double() + dropped, rtol=tolerance, atol=tolerance
    )
    upstream = normal(shape, dtype, device, seed=2)
    dx, dresidual = torch.autograd.grad(y, leaves, upstream)
    assert torch.equal(dx.cpu(), expected(upstream, 0.3)) and torch.equal(dresidual, upstream)


def test_a_residual_of_another_shape_or_dtype() -> None:
    x = normal((4, 6))
    with pytest.raises(ValueError, match=r"a residual of the shape of x, got \(6,\) and \(4, 6\); expand one"):
        kernels.dropout(x, 0.3, KEY, residual=normal((6,)))
    wide = kernels.dropout(x.bfloat16(), 0.3, KEY, residual=x)
    assert wide.dtype == torch.float32
    assert torch.equal(wide, kernels.dropout(x.bfloat16(), 0.3, KEY) + x)


def strided(kind: str, device: str) -> Tensor:
    base = normal((6, 8, 10), torch.bfloat16, device)
    return {
        "transposed": lambda: base[0].mT,
        "transposed-batch": lambda: base.transpose(0, 1),
        "reversed-dims": lambda: base.permute(2, 1, 0),
        "padded": lambda: base[..., :7],
        "every-other": lambda: base[..., 1::2],
        "one-column": lambda: base[..., 3:4],
        "expanded": lambda: base[:, :1].expand(6, 5, 10),
        "one-number": lambda: base[0, 0, 0].expand(4, 9),
        "five-dims": lambda: base.view(2, 3, 4, 2, 10).permute(4, 1, 3, 0, 2)[1:, :, :, :, 1:],
    }[kind]()


@pytest.mark.parametrize(
    "kind",
    ["transposed", "transposed-batch", "reversed-dims", "padded", "every-other", "one-column", "expanded"]
    + ["one-number", "five-dims"],
)
def test_any_strides(kind: str, device: str) -> None:
    x = strided(kind, device)
    y = kernels.dropout(x, 0.3, KEY)
    assert torch.equal(y.cpu(), expected(x, 0.3))
    assert y.is_contiguous()


@pytest.mark.parametrize("shape", [(), (7,), (5, 7), (4, 8), (3, 5, 4), (2, 0)], ids=str)
def test_a_ranks_mask_is_its_part_of_the_one_mask_in_every_layout(
    portion: Portion, shape: tuple[int, ...], device: str
) -> None:
    x = normal(shape, device=device)
    whole = expected(x, 0.4)
    seen: set[Part] = set()
    for mesh in MESHES:
        for layout in portion.of(every_layout(mesh, len(shape), partials=()), every=4):
            wanted = split(whole, layout)
            for rank, local in split(x, layout).items():  # views: padded rows too
                part = Part.of(shape, layout.local_slices(shape, rank))
                if part in seen:
                    continue
                seen.add(part)
                for held in (None, []):
                    y, saved = function.forward(local, p=0.4, number=KEY, part=part, saved_mask=held)
                    assert torch.equal(y.cpu(), wanted[rank]), (str(layout), rank)
                    assert saved == ()
                    (of_x,) = function.backward(saved, local, (True,), p=0.4, number=KEY, part=part, saved_mask=held)
                    assert of_x is not None and torch.equal(of_x.cpu(), wanted[rank]), (str(layout), rank)


def test_indices_beyond_32_bits(device: str) -> None:
    shape = (5, 2**33 + 1)
    part = Part.of(shape, [slice(1, 5), slice(2**32 - 1, 2**32 + 40)])
    x = normal(part.sizes, torch.bfloat16, device)
    index = (torch.arange(1, 5) * shape[1])[:, None] + torch.arange(2**32 - 1, 2**32 + 40)
    y, _ = function.forward(x, p=0.5, number=KEY, part=part)
    assert torch.equal(y.cpu(), torch.where(oracle.kept(index, 0.5, KEY), x.cpu() * 2, 0))


# The probability


def test_an_element_is_dropped_where_its_bits_are_below_p(device: str) -> None:
    x = torch.ones(16, device=device)
    bits = oracle.halves(torch.arange(16), KEY)
    for i in range(16):
        at, above = int(bits[i]) / 2**16, (int(bits[i]) + 1) / 2**16
        assert kernels.dropout(x, at, KEY)[i] > 0
        assert kernels.dropout(x, above, KEY)[i] == 0


def test_the_ends_of_the_range(device: str) -> None:
    x = normal((5, 7), device=device).requires_grad_()
    assert kernels.dropout(x, 0, KEY) is x
    for p in (1, 1.0, 1 - 2**-18):  # the last is 1 in 16 bits
        y = kernels.dropout(x, p, KEY)
        assert torch.equal(y, torch.zeros_like(x))
        (gradient,) = torch.autograd.grad(y.sum(), x)
        assert torch.equal(gradient, torch.zeros_like(x))
    almost = kernels.dropout(x, 2**-18, KEY)  # 0 in 16 bits
    assert torch.equal(almost, x)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_share_that_is_kept(p: float) -> None:
    n = 200_000
    y = kernels.dropout(torch.ones(n), p, KEY)
    sigma = (p * (1 - p) / n) ** 0.5
    assert abs(float((y != 0).double().mean()) - (1 - p)) < 5 * sigma
    assert abs(float(y.double().mean()) - 1) < 5 * sigma / (1 - p)


def test_a_dropped_infinity_or_nan_is_zero(device: str) -> None:
    x = torch.tensor([torch.inf, -torch.inf, torch.nan], device=device).repeat(50)
    y = kernels.dropout(x, 0.5, KEY).cpu()
    keep = kept((150,), 0.5)
    assert (y[~keep] == 0).all()
    assert not y[keep].isfinite().any()


def test_masks_of_two_keys_are_independent() -> None:
    n = 100_000
    first, second = kept((n,), 0.5, KEY), kept((n,), 0.5, derive_key(3, "layers.0.mlp_dropout", 8))
    found = kernels.dropout(torch.ones(n), 0.5, KEY) > 0
    assert torch.equal(found, first)
    assert abs(float((first == second).double().mean()) - 0.5) < 5 * (0.25 / n) ** 0.5


# Gradients


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_gradient_has_the_mask_of_the_output(dtype: torch.dtype, device: str) -> None:
    x, upstream = normal((5, 333), dtype, device).requires_grad_(), normal((5, 333), dtype, device, seed=1)
    kernels.dropout(x, 0.3, KEY).backward(upstream)
    assert x.grad is not None
    assert torch.equal(x.grad.cpu(), expected(upstream, 0.3))
    (of_a_sum,) = torch.autograd.grad(kernels.dropout(x, 0.3, KEY).sum(), x)  # a gradient of strides 0
    assert torch.equal(of_a_sum.cpu(), expected(torch.ones(5, 333, dtype=dtype), 0.3))


def test_float64_gradcheck() -> None:
    assert torch.autograd.gradcheck(
        lambda x: kernels.dropout(x, 0.4, KEY), normal((3, 5), torch.float64).requires_grad_()
    )


def test_nothing_is_saved(device: str) -> None:
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = kernels.dropout(normal((5, 7), device=device).requires_grad_(), 0.3, KEY)
    assert y.requires_grad
    assert saved == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_on_a_cpu_backward_has_the_mask_of_forward_once(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Part] = []

    def seen(part: Part, *arguments: Any) -> Tensor:
        drawn.append(part)
        return draw(part, *arguments)

    draw = function.plain_mask
    monkeypatch.setattr(function, "plain_mask", seen)
    x, upstream = normal((5, 333), dtype).requires_grad_(), normal((5, 333), dtype, seed=1)
    y = kernels.dropout(x, 0.3, KEY)
    for draws in (1, 2):  # then it is given up, and drawn again where a graph is kept and gone through twice
        (gradient,) = torch.autograd.grad(y, x, upstream, retain_graph=True)
        assert torch.equal(gradient, expected(upstream, 0.3))
        assert len(drawn) == draws


def test_recomputation_draws_the_mask_again(device: str) -> None:
    def block(x: Tensor) -> Tensor:
        return kernels.dropout(torch.tanh(kernels.dropout(x, 0.3, KEY)), 0.5, KEY + 1)

    x = normal((5, 333), device=device).requires_grad_()
    results = []
    for function_of_x in (block, lambda x: checkpoint(block, x, use_reentrant=False)):
        y = function_of_x(x)
        results.append((y.detach(), *torch.autograd.grad(y.square().sum(), x)))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.exhaustive
def test_an_element_is_read_once_and_written_once(interpreted: None) -> None:
    x = normal((5, 5000), torch.bfloat16).requires_grad_()
    each = Traffic(loaded=2 * x.numel(), stored=2 * x.numel())
    with counted_traffic() as forward:
        y = kernels.dropout(x, 0.1, KEY)
    with counted_traffic() as backward:
        y.backward(torch.ones_like(x))
    assert (forward, backward) == (each, each)
    with counted_traffic() as forward:
        kernels.dropout(x, 0.1, KEY, residual=y.detach())
    assert forward == Traffic(loaded=2 * each.loaded, stored=each.stored)


# Refusals


@pytest.mark.parametrize(
    ("p", "key", "dtype", "message"),
    [
        pytest.param(-0.1, KEY, torch.float32, "p is -0.1; give a probability, 0 to 1", id="below"),
        pytest.param(1.5, KEY, torch.float32, "p is 1.5", id="above"),
        pytest.param(float("nan"), KEY, torch.float32, "p is nan", id="nan"),
        pytest.param(0.1, -1, torch.float32, "64 bits, got -1; make it with weft.mesh.derive_key", id="key"),
        pytest.param(0.0, None, torch.float32, "dropout needs a key, and key is None; give derive_key", id="no-key"),
        pytest.param(0.1, KEY, torch.int64, "x is torch.int64; give one of torch.bfloat16", id="int"),
    ],
)
def test_bad_arguments(p: float, key: Any, dtype: torch.dtype, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kernels.dropout(torch.zeros(3, dtype=dtype), p, key)


# On processes


def distributed(shape: tuple[int, ...], mesh: ProcessMesh, texts: list[str], key: int) -> list[tuple[Tensor, Tensor]]:
    results = []
    for text in texts:
        layout = Layout(mesh, text)
        x = distribute(normal(shape), layout).requires_grad_()
        with Collectives() as seen:
            y = kernels.dropout(x, 0.4, key)
            whole = {axis: "R" for axis in mesh.axis_names if str(layout[axis]).startswith("P")}
            y.backward(distribute(normal(shape, seed=1), layout.replace(**whole)))
        assert seen.kinds == []
        assert str(layout_of(y)) == text
        results.append((y.detach().to_local(), x.grad.to_local()))
    return results


def test_the_values_and_gradients_of_dtensors_are_those_of_one_process(pool: Any) -> None:
    shape, texts = (5, 7), [str(layout) for layout in every_layout(GRID, 2, partials=())]
    x = normal(shape).requires_grad_()
    y = kernels.dropout(x, 0.4, KEY)
    y.backward(normal(shape, seed=1))
    results = pool.run(distributed, shape, GRID, texts, KEY)
    for i, text in enumerate(texts):
        parts, gradients = split(y.detach(), Layout(GRID, text)), split(x.grad, Layout(GRID, text))
        for rank, found in enumerate(results):
            assert torch.equal(found[i][0], parts[rank]), text
            assert torch.equal(found[i][1], gradients[rank]), text


def addend_masks(shape: tuple[int, ...], op: str) -> tuple[Tensor, Tensor]:
    """Where a rank's addend of a Partial survives, and where its part of a Partial(sum) gradient does."""
    import torch.distributed as dist
    from weft.reshard.moving.dtensor import wrap

    partial, whole = Layout(FOUR, f"tp: P({op})"), Layout(FOUR)
    mine = addends(torch.full(shape, 1000.0), "sum", 4)[dist.get_rank()]
    y = kernels.dropout(wrap(mine, partial, shape), 0.4, KEY)
    assert layout_of(y) == partial
    x = distribute(normal(shape), whole).requires_grad_()
    sums = Layout(FOUR, "tp: P(sum)")
    kernels.dropout(x, 0.4, KEY).backward(wrap(mine, sums, shape))
    assert layout_of(x.grad) == sums
    return y.to_local(), x.grad.to_local()


@pytest.mark.parametrize("op", ["sum", "avg"])
def test_every_addend_of_a_partial_has_the_one_mask(pool: Any, op: str) -> None:
    shape = (5, 7)
    for rank, found in enumerate(pool.run(addend_masks, shape, op)):
        mine = addends(torch.full(shape, 1000.0), "sum", 4)[rank]
        for tensor in found:
            assert torch.equal(tensor, expected(mine, 0.4))


def nonlinear() -> str:
    with pytest.raises(LayoutError) as caught:
        kernels.dropout(distribute(torch.ones(3), Layout(FOUR, "tp: P(max)")), 0.1, KEY)
    return str(caught.value)


def test_a_partial_that_is_no_sum_or_average_is_refused(pool: Any) -> None:
    for message in pool.run(nonlinear):
        assert "dropout" in message
        assert "P(max)" in message
        assert "reshard x to (tp: R)" in message


def rules_kept() -> int:
    """How many answers of rules, and calls, a step more adds."""
    from weft.kernels.dispatch.sharded.rules import sharding_of

    x = distribute(torch.ones(4, 4), Layout(FOUR, "tp: S(0)"))
    kernels.dropout(x, 0.1, KEY)
    before = sharding_of.cache_info().currsize + len(world_cache())
    for step in range(5):
        kernels.dropout(x, 0.1, derive_key(0, "dropout", step))
    return sharding_of.cache_info().currsize + len(world_cache()) - before


def test_a_new_key_is_no_new_layout(pool: Any) -> None:
    assert pool.run(rules_kept) == [0] * 4


def test_each_row_may_have_an_order(device: str) -> None:
    x, dropout = normal((2, 7, 5), device=device), kernels.dropout
    orders = (((4, 7), (0, 4)), ((2, 3), (0, 2), (3, 7)))
    places = [[token for run in order for token in range(*run)] for order in orders]

    def stored(y: Tensor) -> Tensor:
        return torch.stack([row[at] for row, at in zip(y, places, strict=True)])

    operand = stored(x).requires_grad_()
    found = dropout(operand, 0.4, 11, "name", orders=orders)
    assert torch.equal(found, stored(dropout(x, 0.4, 11, "name")))
    found.backward(torch.ones_like(found))
    assert operand.grad is not None
    assert torch.equal(operand.grad, stored(dropout(torch.ones_like(x), 0.4, 11, "name")))
    with pytest.raises(ValueError, match=r"orders needs x of shape \[B, T, H\] and no order; got \(7, 5\)"):
        dropout(x[0], 0.4, 11, orders=orders)
