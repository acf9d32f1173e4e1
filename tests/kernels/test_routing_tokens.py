"""Tokens sorted by expert and back, and the router's sums, against float64; their bytes and rows beyond 32 bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from weft.kernels import combine, dispatch, route, router_statistics, sequence_load
from weft.kernels.extension import sort_by_expert
from weft.kernels.launching.traffic import counted_traffic
from weft.kernels.routing import reference

from tests.kernels.cases import ints, normal
from tests.kernels.matmul.cases import assert_as_good_as_eager
from tests.kernels.matmul.test_large_offsets import apart

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
H = 20
EXPERTS = {
    "some": (5, ints(5, 7, 3)),
    "two-dims": (4, ints(4, 3, 5, 2)),
    "none": (8, ints(8, 0, 2)),
    "one-token": (8, ints(8, 1, 2)),
    "one-expert": (1, ints(1, 6, 1)),
    "all-to-one": (8, torch.full((150, 2), 3)),
    "blocks": (40, ints(40, 150, 3)),
    "not-a-power": (37, ints(37, 70, 2)),
    "int32": (5, ints(5, 7, 3).int()),
}
CASES = pytest.mark.parametrize(("E", "experts"), [pytest.param(*case, id=name) for name, case in EXPERTS.items()])


def order_of(experts: Tensor) -> list[int]:
    """The choices sorted by expert: Python's sort is stable."""
    ids = experts.flatten().tolist()
    return sorted(range(len(ids)), key=ids.__getitem__)


@CASES
def test_choices_are_sorted_by_expert_in_their_order(E: int, experts: Tensor, device: str) -> None:
    source, offsets = sort_by_expert(experts.to(device), E)
    assert source.dtype == offsets.dtype == torch.int32
    assert source.tolist() == order_of(experts)
    assert offsets.tolist() == [int((experts <= e).sum()) for e in range(E)]


@pytest.mark.parametrize(("first", "count"), [(0, 2), (2, 3), (4, 1), (3, 9)])
def test_choices_of_experts_outside_are_the_last(first: int, count: int, device: str) -> None:
    experts = ints(6, 90, 2)
    source, offsets = sort_by_expert(experts.to(device), count, first)
    ids = experts.flatten() - first
    ids[(ids < 0) | (ids >= count)] = count
    assert source.tolist() == order_of(ids)
    assert offsets.tolist() == [int((ids <= e).sum()) for e in range(count)]


@DTYPES
@CASES
def test_dispatch(E: int, experts: Tensor, dtype: torch.dtype, device: str) -> None:
    k = experts.shape[-1]
    x = normal(*experts.shape[:-1], H).to(device, dtype).requires_grad_()
    rows, offsets = dispatch(x, experts.to(device), num_experts=E)
    index = torch.tensor(order_of(experts), dtype=torch.int64) // k
    assert torch.equal(rows.detach().cpu(), x.detach().cpu().reshape(-1, H)[index])
    assert torch.equal(offsets, sort_by_expert(experts.to(device), E)[1])
    upstream = normal(*rows.shape, seed=1).to(dtype)
    (gradient,) = torch.autograd.grad(rows, x, upstream.to(device))
    eager, truth = (
        torch.zeros(len(index) // k, H, dtype=wide).index_add_(0, index, upstream.to(wide)).view(x.shape)
        for wide in (torch.float32, torch.float64)
    )
    assert_as_good_as_eager(gradient.cpu(), eager.to(dtype), truth)


def combined(y: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    positions = torch.tensor(order_of(experts), dtype=torch.int64).argsort()
    rows = y[positions].view(*experts.shape, y.shape[-1])
    return (rows * weights.unsqueeze(-1).to(y.dtype)).sum(-2)


@DTYPES
@CASES
def test_combine(E: int, experts: Tensor, dtype: torch.dtype, device: str) -> None:
    y, weights = normal(experts.numel(), H).to(dtype), normal(*experts.shape, seed=2).float()
    upstream = normal(*experts.shape[:-1], H, seed=1).to(dtype)
    found = []
    for wide in (None, dtype, torch.float64):
        leaves = [(y if wide is None else y.to(wide)), (weights if wide is None else weights.to(wide))]
        leaves = [each.to(device if wide is None else "cpu").detach().requires_grad_() for each in leaves]
        if wide is None:
            output = combine(leaves[0], experts.to(device), leaves[1])
            assert output.dtype == dtype
        else:
            output = combined(leaves[0], experts, leaves[1])
        gradients = torch.autograd.grad(output, leaves, upstream.to(output.device, output.dtype))
        found.append([output.detach().cpu(), *(each.cpu() for each in gradients)])
    assert [each.dtype for each in found[0]] == [dtype, dtype, torch.float32]
    for mine, eager, truth in zip(*found, strict=True):
        assert_as_good_as_eager(mine, eager, truth)


def test_a_layer_of_no_experts_computation_gives_the_tokens_back(device: str) -> None:
    x, scores = normal(3, 7, H).float().to(device), normal(3, 7, 8).float().to(device)
    experts, weights = route(scores, 3)
    rows, _ = dispatch(x, experts, num_experts=8)
    torch.testing.assert_close(combine(rows, experts, weights), x)


@pytest.mark.exhaustive
def test_every_run_gives_the_same_bits(device: str) -> None:
    experts, weights = ints(5, 60, 3).to(device), normal(60, 3).float().to(device)
    y = normal(180, H).bfloat16().to(device)
    logits = normal(60, 5).float().to(device)
    for run in (lambda: combine(y, experts, weights), lambda: router_statistics(logits, experts)):
        assert torch.equal(run(), run())


def test_only_one_of_the_gradients_of_combine(device: str) -> None:
    experts = ints(5, 6, 2).to(device)
    tensors = [normal(12, H).float().to(device), normal(6, 2).float().to(device)]
    y, weights = (each.requires_grad_() for each in tensors)
    both = torch.autograd.grad(combine(y, experts, weights).sum(), [y, weights])
    for i, leaf in enumerate((y, weights)):
        operands = [each if each is leaf else each.detach() for each in (y, weights)]
        (alone,) = torch.autograd.grad(combine(operands[0], experts, operands[1]).sum(), leaf)
        assert torch.equal(alone, both[i])


def sums(logits: Tensor, experts: Tensor) -> Tensor:
    flat = logits.reshape(-1, logits.shape[-1])
    counts = experts.flatten().bincount(minlength=logits.shape[-1])
    return torch.cat([counts, flat.softmax(-1).sum(0), flat.logsumexp(-1).square().sum().view(1)])


@DTYPES
@CASES
def test_statistics(E: int, experts: Tensor, dtype: torch.dtype, device: str) -> None:
    logits = (3 * normal(*experts.shape[:-1], E)).to(dtype)
    before = normal(3, 2 * E + 1).float()
    upstream = normal(3, 2 * E + 1, seed=1).float()
    leaf, state = logits.to(device).requires_grad_(), before.to(device).requires_grad_()
    found = router_statistics(leaf, experts.to(device), state, layer=1, layers=3)
    gradients = torch.autograd.grad(found, [leaf, state], upstream.to(device))
    assert found.dtype == torch.float32 and torch.equal(gradients[1].cpu(), upstream)
    results = []
    for wide in (torch.float32, torch.float64):
        plain = logits.to(wide).requires_grad_()
        row = sums(plain, experts)
        gradient = torch.autograd.grad(row, plain, upstream[1].to(wide))[0]
        results.append((torch.stack([before[0].to(wide), before[1].to(wide) + row, before[2].to(wide)]), gradient))
    (eager, eager_gradient), (truth, true_gradient) = results
    assert_as_good_as_eager(found.detach().cpu(), eager.detach(), truth.detach())
    assert_as_good_as_eager(gradients[0].cpu(), eager_gradient.to(dtype), true_gradient)


def test_statistics_without_earlier_ones_begin_at_zero(device: str) -> None:
    logits, experts = normal(6, 8).float().to(device), ints(8, 6, 2).to(device)
    found = router_statistics(logits, experts, layer=1, layers=2)
    assert not found[0].any()
    assert found[1, :8].tolist() == experts.flatten().cpu().bincount(minlength=8).tolist()
    assert torch.equal(found[1], router_statistics(logits, experts)[0])


@pytest.mark.parametrize("shape", [(3, 7, 2), (1, 1, 1), (2, 130, 5), (0, 4, 2), (2, 0, 2)], ids=str)
def test_choices_are_counted_in_each_sequence(shape: tuple[int, ...], device: str) -> None:
    experts = ints(6, *shape).int()
    found = sequence_load(experts.to(device), 6)
    expected = [row.flatten().bincount(minlength=6).tolist() for row in experts]
    assert found.dtype == torch.float32 and found.shape == (shape[0], 6)
    assert found.tolist() == expected


@DTYPES
def test_statistics_of_sequences(dtype: torch.dtype, device: str) -> None:
    logits, experts = (3 * normal(3, 7, 6)).to(dtype), ints(6, 3, 7, 2)
    load, upstream = sequence_load(experts, 6), normal(2, 14, seed=1).float()
    leaf = logits.to(device).requires_grad_()
    found = router_statistics(leaf, experts.to(device), load=load.to(device), layer=1, layers=2)
    (gradient,) = torch.autograd.grad(found, leaf, upstream.to(device))
    assert not found[0].any()
    results = []
    for wide in (torch.float32, torch.float64):
        plain = logits.to(wide).requires_grad_()
        of_sequences = (load.to(wide)[:, None] / 7 * plain.softmax(-1)).sum().view(1)
        row = torch.cat([sums(plain, experts), of_sequences])
        results.append((row.detach(), torch.autograd.grad(row, plain, upstream[1].to(wide))[0]))
    (eager, eager_gradient), (truth, true_gradient) = results
    assert_as_good_as_eager(found[1].detach().cpu(), eager, truth)
    assert_as_good_as_eager(gradient.cpu(), eager_gradient.to(dtype), true_gradient)


def test_a_load_of_other_sequences_and_experts_outside_are_refused() -> None:
    logits, experts = normal(2, 4, 5), ints(5, 2, 4, 2)
    with pytest.raises(ValueError, match=r"load \[B, E\] for logits \[B, T, E\], got \(3, 5\) and \(2, 4, 5\)"):
        router_statistics(logits, experts, load=torch.zeros(3, 5))
    with pytest.raises(ValueError, match=r"experts \[B, T, k\], got \(4, 2\)"):
        sequence_load(experts[0], 5)
    with pytest.raises(ValueError, match="outside the 3 experts"):
        sequence_load(experts.clamp(min=4), 3)


def test_float64_is_differentiated_exactly() -> None:
    experts = ints(5, 4, 2)
    x, y, weights = (normal(*shape).requires_grad_() for shape in ((4, 3), (8, 3), (4, 2)))
    check = torch.autograd.gradcheck
    assert check(lambda x: dispatch(x, experts, num_experts=5)[0], (x,))
    assert check(lambda y, weights: combine(y, experts, weights), (y, weights))
    logits, before = normal(4, 5).requires_grad_(), normal(2, 11).requires_grad_()
    assert check(lambda *t: router_statistics(t[0], experts, t[1], layer=1, layers=2), (logits, before))
    load = sequence_load(experts[None], 5).double()
    assert check(lambda each: router_statistics(each, experts[None], load=load), (logits[None],))


@pytest.mark.exhaustive
def test_bytes_of_rows_sorted_and_back(interpreted: None) -> None:
    N, k, E, H = 160, 4, 64, 256
    R, blocks = N * k, N * k // 128
    experts = ints(E, N, k).int()
    x, y = normal(N, H).bfloat16().requires_grad_(), normal(R, H).bfloat16().requires_grad_()
    weights = normal(N, k).float().requires_grad_()
    with counted_traffic() as sort:
        sort_by_expert(experts, E)
    # Ids: counted, placed, and compared with their block; per choice a base, a total, a rank; counts by blocks.
    assert sort.loaded == R * (4 + 4 + 4) + R * 3 * 4 + blocks * (E + 1) * 4
    assert sort.stored == 2 * R * 4 + (2 * blocks + 1) * (E + 1) * 4
    row, positions = H * 2, R * 4
    with counted_traffic() as forward:
        rows, _ = dispatch(x, experts, num_experts=E)
    assert forward.loaded - sort.loaded == N * row + positions
    assert forward.stored - sort.stored == R * row
    with counted_traffic() as backward:
        rows.sum().backward()
    assert (backward.loaded, backward.stored) == (R * row + positions, N * row)
    with counted_traffic() as forward:
        output = combine(y, experts, weights)
    assert (forward.loaded, forward.stored) == (R * row + positions + R * 4, N * row)
    with counted_traffic() as backward:
        output.sum().backward()
    assert (backward.loaded, backward.stored) == (N * row + R * row + positions + R * 4, R * row + R * 4)


def test_bytes_of_the_statistics(interpreted: None) -> None:
    N, k, E = 64, 2, 32
    logits, experts = normal(N, E).float().requires_grad_(), ints(E, N, k).int()
    with counted_traffic() as forward:
        found = router_statistics(logits, experts)
    assert (forward.loaded, forward.stored) == (N * E * 4 + N * k * 4, 3 * (2 * E + 1) * 4)  # three programs' sums
    with counted_traffic() as backward:
        found.sum().backward()
    programs = N // 8
    assert (backward.loaded, backward.stored) == (N * E * 4 + programs * (E + 1) * 4, N * E * 4)


def test_the_bytes_that_routing_saves_for_backward() -> None:
    experts, H = ints(8, 6, 2), 16
    calls: dict[str, tuple[Any, int]] = {
        "dispatch": (lambda: dispatch(normal(6, H).requires_grad_(), experts, num_experts=8), 12 * 4 + experts.nbytes),
        "combine": (
            lambda: combine(normal(12, H).requires_grad_(), experts, normal(6, 2).requires_grad_()),
            12 * H * 8 + 12 * 8 + 12 * 4,
        ),
        "statistics": (lambda: router_statistics(normal(6, 8).requires_grad_(), experts), 6 * 8 * 8),
    }
    for name, (call, expected) in calls.items():
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, sizes=sizes: sizes.append(x.nbytes) or x, lambda x: x):
            call()
        assert sum(sizes) == expected, name


def test_rows_beyond_32_bit_offsets(interpreted: None) -> None:
    experts, weights = torch.tensor([[2, 0], [1, 2], [0, 1]]), normal(3, 2).float()
    x = normal(3, 16).bfloat16()
    assert apart(x, 0).stride(0) * 2 > 2**31
    assert torch.equal(*(dispatch(each, experts, num_experts=3)[0] for each in (x, apart(x, 0))))
    assert torch.equal(*(combine(each, experts[:, :1], weights[:, :1]) for each in (x, apart(x, 0))))
    scores = normal(3, 16).bfloat16()
    for one, other in zip(route(scores, 2), route(apart(scores, 0), 2), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(*(router_statistics(each, experts) for each in (scores, apart(scores, 0))))


@pytest.mark.parametrize("name", ["dispatch", "combine", "router_statistics", "sort_by_expert"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int16], ids=["fp32", "int16"])
def test_experts_of_another_dtype_are_refused(name: str, dtype: torch.dtype) -> None:
    experts = torch.zeros(3, 2, dtype=dtype)
    calls = {
        "dispatch": lambda: dispatch(normal(3, H), experts, num_experts=2),
        "combine": lambda: combine(normal(6, H), experts, normal(3, 2)),
        "router_statistics": lambda: router_statistics(normal(3, 2), experts),
        "sort_by_expert": lambda: sort_by_expert(experts, 2),
    }
    with pytest.raises(ValueError, match=f"{name} takes int experts, got {dtype}; give the experts of route"):
        calls[name]()


def test_bad_numbers_are_named() -> None:
    x, experts = normal(3, H), torch.tensor([[0, 1], [1, 4], [0, -1]])
    with pytest.raises(ValueError, match=r"experts\[1, 1\] is 4, outside the 2 experts; experts must be 0 to 1"):
        dispatch(x, experts, num_experts=2)
    for call in (lambda: dispatch(x, experts, num_experts=0), lambda: sort_by_expert(experts, 0)):
        with pytest.raises(ValueError, match="num_experts is 0; give the number of experts, 1 or more"):
            call()
    with pytest.raises(ValueError, match="layer is 2 of 2 layers; give 0 to 1"):
        router_statistics(normal(3, 5), experts, layer=2, layers=2)
    with pytest.raises(ValueError, match=r"with k of 1 or more, got \(3, 0\)"):
        dispatch(x, experts[:, :0], num_experts=2)


def test_a_permutation_is_inverted() -> None:
    source = torch.tensor([2, 0, 3, 1])
    assert reference.invert(source).tolist() == source.argsort().tolist()


X = normal(4, 8).float()
SHAPES: dict[str, tuple[Callable[[], Any], str]] = {
    "route": (lambda: route(torch.tensor(1.0), 1), "got a number; give the router's logits"),
    "route-bias": (lambda: route(X, 2, bias=X[0, :3]), r"shape \(3,\), .* give a number for each expert"),
    "dispatch": (
        lambda: dispatch(X, ints(8, 3, 2), num_experts=8),
        r"of the same tokens, got \(4, 8\) and \(3, 2\); reshape one",
    ),
    "combine": (
        lambda: combine(X, ints(8, 4, 2), normal(4, 2)),
        "give the rows of dispatch, and route's outputs",
    ),
    "router_statistics": (
        lambda: router_statistics(X, ints(8, 3, 2)),
        r"of the same tokens, got \(4, 8\) and \(3, 2\); reshape one",
    ),
    "router_statistics-sums": (
        lambda: router_statistics(X, ints(8, 4, 2), normal(1, 9).float()),
        r"are \(1, 9\) of torch.float32; give \(1, 17\) of torch.float32, for 1 layers of 8 experts",
    ),
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_that_do_not_go_together_name_the_remedy(name: str) -> None:
    call, message = SHAPES[name]
    with pytest.raises(ValueError, match=message):
        call()
