"""Ranks with gradients of different parameters.

Every rank gets the sum over ranks, in which a rank without a gradient counts as zeros. Where no rank has a gradient
the result is None.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from weft.mesh import Layout, ProcessMesh
from weft.reshard import GradientSync, clip_grad_norm_, distribute, layout_of, to_global
from weft.reshard.extension import Call, recording
from weft.reshard.moving.dtensor import wrap
from weft.reshard.training.gradient_buckets import MOST_IN_FLIGHT

from tests.reshard.test_gradients import Scale
from tests.support.collectives import Collectives

SIZES = (4, 7, 1, 300, 6)  # of the parameters
ROWS = 5  # uneven over 2 and over 3
LARGE = 2**20
DATA = ProcessMesh.grid(dp=2)
Used = Sequence[Sequence[int]]  # for each rank, the numbers of the parameters in use


class Weights(nn.Module):
    """Parameters of unequal sizes, each of which may be left out."""

    def __init__(self, mesh: ProcessMesh, sizes: Sequence[int] = SIZES, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.all = nn.ParameterList(
            [nn.Parameter(distribute(torch.ones(size, dtype=dtype), Layout(mesh))) for size in sizes]
        )


def whole_of(seed: int, size: int) -> Tensor:
    """Integers [ROWS, 2, size] in float64, whose sums are exact in any order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-9, 10, (ROWS, 2, size), generator=generator).double()


def backward(model: Weights, mesh: ProcessMesh, used: Iterable[int], seed: int) -> None:
    """A backward pass through the used parameters, with a different input for each."""
    layout = Layout(mesh, "dp: S(0)")
    outputs, grads = [], []
    for i in used:
        weight = model.all[i]
        outputs.append(Scale.apply(distribute(whole_of(seed + i, len(weight)).to(weight.dtype), layout), weight))
        grads.append(distribute(whole_of(seed + 50 + i, len(weight)).to(weight.dtype), layout))
    if outputs:
        torch.autograd.backward(outputs, grads)


def addend(i: int, rank: int, ranks: int, seed: int, sizes: Sequence[int] = SIZES) -> Tensor:
    """A rank's addend of a parameter's gradient, from the rows on the rank."""
    x, grad = (whole_of(each + i, sizes[i]).chunk(ranks)[rank] for each in (seed, seed + 50))
    return (x * grad).sum((0, 1))


def right(i: int, used: Used, seed: int, sizes: Sequence[int] = SIZES) -> Tensor | None:
    """The true gradient of a parameter: the sum over the ranks with the parameter in use; None if unused."""
    found = [addend(i, rank, len(used), seed, sizes) for rank, each in enumerate(used) if i in each]
    return torch.stack(found).sum(0) if found else None


def assert_right(model: Weights, sums: Sequence[Tensor | None], said: Any) -> None:
    for i, (parameter, truth) in enumerate(zip(model.all, sums, strict=True)):
        assert (parameter.grad is None) == (truth is None), (said, i)
        if truth is not None:
            assert layout_of(parameter.grad).mesh == layout_of(parameter).mesh
            assert torch.equal(to_global(parameter.grad).double(), truth), (said, i)


def steps(mesh: ProcessMesh, each_step: Sequence[Used], options: dict[str, Any]) -> list[int]:
    """Takes steps with the same GradientSync; returns the number of collectives on this rank in each step."""
    model = Weights(mesh)
    sync = GradientSync(model, **options)
    counts = []
    for number, used in enumerate(each_step):
        with Collectives() as seen:
            backward(model, mesh, used[dist.get_rank()], 100 * number)
            sync.wait()
        counts.append(len(seen.kinds))
        assert_right(model, [right(i, used, 100 * number) for i in range(len(SIZES))], (options, number))
        for parameter in model.all:
            parameter.grad = None
    return counts


ALL = range(5)
STORIES = {
    "another-expert-on-each-rank": [([0], [1]), ([1], [0]), ([0], [0]), ([2, 3], [3, 4])],
    "a-conditional-adapter": [([0, 1], [0, 1]), ([0, 1, 3], [0, 1]), ([0, 1], [0, 1, 3]), ([0, 1, 3], [0, 1, 3])],
    "a-skipped-batch": [(ALL, []), ([], ALL), (ALL, ALL), ([], ALL), ([], []), (ALL, [])],
    "a-skipped-batch-later": [(ALL, ALL), (ALL, []), ([], []), ([], ALL)],
    "one-more-from-the-second-step": [([3], [3]), ([3, 0], [3]), ([3], [3])],
    "all-but-one": [([i for i in ALL if i != left], ALL) for left in ALL] + [(ALL, ALL)],
    "none-has-it-for-a-while": [(ALL, ALL), ([1, 2], [1, 2]), ([1], [2]), (ALL, [4])],
}
OPTIONS = [{"bucket_bytes": 1}, {"bucket_bytes": 64}, {"bucket_bytes": LARGE}, {"shard_over": "dp", "bucket_bytes": 64}]


def story(each_step: Sequence[Used]) -> list[list[int]]:
    return [steps(DATA, each_step, options) for options in OPTIONS]


@pytest.mark.few(1)
@pytest.mark.parametrize("name", STORIES)
def test_the_sum_over_the_ranks_that_have_a_gradient_is_on_all_ranks(name: str, pool: Any) -> None:
    first, second = pool.run(story, STORIES[name], ranks=2)
    assert first == second  # every rank starts the same collectives
    for counts in first:
        for used, count in zip(STORIES[name], counts, strict=True):
            assert bool(count) == any(used)


def drawn(mesh: ProcessMesh, ranks: int, portion: Sequence[int]) -> None:
    """Steps whose used parameters are drawn at random, for all ranks from the same seed."""
    for seed in portion:
        generator = torch.Generator().manual_seed(seed)
        chances = torch.tensor([0.2, 0.5, 0.9])[torch.randint(3, (4,), generator=generator)]
        each_step = [
            [
                torch.nonzero(torch.rand(len(SIZES), generator=generator) < chance).flatten().tolist()
                for _ in range(ranks)
            ]
            for chance in chances
        ]
        steps(mesh, each_step, OPTIONS[seed % len(OPTIONS)])


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", [2, 3])
def test_whatever_each_rank_uses(ranks: int, pool: Any, portion: Any) -> None:
    pool.run(drawn, ProcessMesh.grid(dp=ranks), ranks, list(portion.of(range(40), every=4)), ranks=ranks)


def large_buckets() -> None:
    """More buckets than may be in flight: ranks with all gradients wait for the rest within backward."""
    sizes = [50] * 20
    for each_step in (
        [(range(20), range(20)), (range(20), []), ([], range(20)), (range(20), [0, 19])],
        [(range(20), []), ([4], range(20))],
        [([19], range(20)), (range(20), range(20)), ([], range(20))],
    ):
        model = Weights(DATA, sizes)
        sync = GradientSync(model, bucket_bytes=1)
        for number, used in enumerate(each_step):
            backward(model, DATA, used[dist.get_rank()], 100 * number)
            sync.wait()
            assert_right(model, [right(i, used, 100 * number, sizes) for i in range(20)], number)
            for parameter in model.all:
                parameter.grad = None


def test_eight_buckets_are_under_way_at_most() -> None:
    """A wait in backward stops the device: a decoder block's seven matrices are summed beside the next block."""
    numbers, under_way, most = list[int](), set[int](), 0
    with recording(DATA, 0) as recorded, torch.device("meta"):
        model = Weights(DATA, [50] * 20)
        sync = GradientSync(model, bucket_bytes=1)

        def listen(call: Call) -> Callable[[], None]:
            nonlocal most
            number = len(numbers)
            numbers.append(number)
            under_way.add(number)
            most = max(most, len(under_way))
            return lambda: under_way.remove(number)

        recorded.listener = listen
        rows = Layout(DATA, "dp: S(0)")
        inputs = [distribute(torch.empty(ROWS, 2, 50, dtype=torch.float64), rows) for _ in range(40)]
        outputs = [Scale.apply(each, weight) for each, weight in zip(inputs[:20], model.all, strict=True)]
        torch.autograd.backward(outputs, inputs[20:])
        assert len(under_way) == most == MOST_IN_FLIGHT == 8
        sync.wait()
        assert len(numbers) == 20 and not under_way


def test_a_rank_that_waits_within_backward_is_met(pool: Any) -> None:
    pool.run(large_buckets, ranks=2)


def accumulated() -> None:
    """Several passes a step, some skipped by some ranks; earlier gradients are kept."""
    rank = dist.get_rank()
    for pause, bucket_bytes in itertools.product((True, False), (64, LARGE)):
        model = Weights(DATA)
        sync = GradientSync(model, bucket_bytes=bucket_bytes)
        passes: list[Used] = [([0, 1], [1, 4]), ([2], []), ([0], [2, 3])]
        truth: list[Tensor | None] = [None] * len(SIZES)
        for step in range(2):  # without zeroing in between
            for number, used in enumerate(passes):
                seed = 1000 * step + 100 * number
                with sync.paused() if pause else nullcontext():
                    backward(model, DATA, used[rank], seed)
                for i in range(len(SIZES)):
                    more = right(i, used, seed)
                    if more is not None:
                        truth[i] = more if truth[i] is None else truth[i] + more
            sync.wait()
            assert_right(model, truth, (pause, bucket_bytes, step))
        norm = torch.cat([each for each in truth if each is not None]).norm()
        assert abs(clip_grad_norm_(model.parameters(), 1e9) - norm) < 1e-3 * norm


def test_passes_add_up(pool: Any) -> None:
    pool.run(accumulated, ranks=2)


def on_a_grid() -> None:
    """Addends over two axes, of sharded and replicated parameters, in two dtypes."""
    mesh = ProcessMesh.grid(dp=2, cp=2)
    rank = dist.get_rank()
    values = [
        torch.ones(4, dtype=torch.float64),
        torch.ones(6, dtype=torch.float32),
        torch.ones(3, dtype=torch.float64),
    ]
    layouts = ["", "", "cp: S(0)"]
    addends = ["dp: P, cp: P", "dp: P", "dp: P, cp: S(0)"]
    for seed in range(8):
        chosen = torch.rand(2, 3, generator=torch.Generator().manual_seed(seed)) < 0.5  # of the indices along dp
        model = nn.ParameterList(
            [nn.Parameter(distribute(v, Layout(mesh, lay))) for v, lay in zip(values, layouts, strict=True)]
        )
        sync = GradientSync(model)
        coordinate = mesh.coordinate(rank)
        for i, parameter in enumerate(model):
            if chosen[coordinate["dp"], i]:
                own = Layout(mesh, addends[i])
                local = torch.full(own.local_shape(parameter.shape, rank), 1.0 + rank, dtype=parameter.dtype)
                parameter.backward(wrap(local, own, parameter.shape))
        sync.wait()
        for i, parameter in enumerate(model):
            givers = [r for r in range(4) if chosen[mesh.coordinate(r)["dp"], i]]
            if not givers:
                assert parameter.grad is None
                continue
            if i:  # whole along cp, or a shard
                givers = [r for r in givers if mesh.coordinate(r)["cp"] == coordinate["cp"]]
            assert layout_of(parameter.grad) == Layout(mesh, layouts[i])
            assert (parameter.grad.to_local() == sum(1.0 + r for r in givers)).all(), (seed, i)


def test_addends_over_several_axes(pool: Any) -> None:
    pool.run(on_a_grid, ranks=4)


def another_dtype() -> None:
    """Gradients are summed in float32; a rank without an addend gives float32 zeros."""
    model = Weights(DATA, dtype=torch.bfloat16)
    sync = GradientSync(model, dtype=torch.float32)
    for number, used in enumerate([([0, 1, 2], [2]), ([3], [0])]):
        backward(model, DATA, used[dist.get_rank()], 100 * number)
        sync.wait()
        for i, parameter in enumerate(model.all):
            truth = right(i, used, 100 * number)
            assert (parameter.grad is None) == (truth is None)
            if truth is not None:
                assert parameter.grad.dtype == torch.bfloat16
                torch.testing.assert_close(to_global(parameter.grad).double(), truth, rtol=2e-2, atol=1.0)
            parameter.grad = None


def test_in_the_dtype_of_the_sums(pool: Any) -> None:
    pool.run(another_dtype, ranks=2)


def two_models() -> None:
    """Two models with the same parameter names in a program, whose ranks differ in their own ways."""
    models = [Weights(DATA) for _ in range(2)]
    syncs = [GradientSync(model) for model in models]
    for number in range(3):
        used = [([0, number], [1]), ([2], [number, 4])]
        for turn, model in enumerate(models):
            backward(model, DATA, dict.fromkeys(used[turn][dist.get_rank()]), 100 * number + 7 * turn)
        for sync in syncs[:: -1 if number % 2 else 1]:
            sync.wait()
        for turn, model in enumerate(models):
            truth = [right(i, used[turn], 100 * number + 7 * turn) for i in range(len(SIZES))]
            assert_right(model, truth, (number, turn))
            for parameter in model.all:
                parameter.grad = None


def test_two_models_with_the_same_names(pool: Any) -> None:
    pool.run(two_models, ranks=2)


def more_passes_on_one_rank() -> str:
    """Rank 0 makes a second pass after the gradients of the first were sent; rank 1 makes a single pass."""
    model = Weights(DATA)
    sync = GradientSync(model, bucket_bytes=1)
    for number in range(2 - dist.get_rank()):
        backward(model, DATA, ALL, number)
    try:
        sync.wait()
    except RuntimeError as error:
        return str(error)
    return ""


def other_addends_on_one_rank() -> str:
    """Rank 1 has an addend of a gradient, rank 0 the whole; and each rank has a gradient that the second lacks."""
    model = Weights(DATA)
    sync = GradientSync(model)
    rank = dist.get_rank()
    backward(model, DATA, [rank], 0)
    layout = Layout(DATA, "dp: P") if rank else Layout(DATA)
    model.all[2].backward(wrap(torch.ones(1, dtype=torch.float64), layout, (1,)))
    try:
        sync.wait()
    except RuntimeError as error:
        return str(error)
    return ""


def whole_on_one_rank() -> str:
    """Rank 0 has a whole gradient, which is no addend: zeros of rank 1 would be no share of the same gradient."""
    model = Weights(DATA)
    sync = GradientSync(model)
    if dist.get_rank() == 0:
        model.all[1].backward(distribute(torch.ones(7, dtype=torch.float64), Layout(DATA)))
    try:
        sync.wait()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("function", "rank", "message"),
    [
        pytest.param(
            more_passes_on_one_rank,
            0,
            "the gradient of all.4 came in more backward passes on rank 0 than on rank 1.*sync.paused()",
            id="more-passes",
        ),
        pytest.param(
            other_addends_on_one_rank, 0, "the gradient of all.2 is .* on rank 0, and .* on rank 1", id="other-addends"
        ),
        pytest.param(
            whole_on_one_rank,
            1,
            r"rank 1 has no gradient of all.1. On rank 0 the gradient is complete",
            id="whole-on-one-rank",
        ),
    ],
)
def test_gradients_without_a_common_sum_are_refused(function: Any, rank: int, message: str, pool: Any) -> None:
    assert re.search(message, pool.run(function, ranks=2)[rank])


def shards_of_their_own() -> None:
    """A parameter whose gradient needs no reduction: the shard of a rank without a gradient is zero."""
    model = nn.ParameterList([nn.Parameter(distribute(torch.ones(4), Layout(DATA, "dp: S(0)")))])
    sync = GradientSync(model)
    if dist.get_rank():
        model[0].backward(distribute(torch.arange(4.0), Layout(DATA, "dp: S(0)")))
    sync.wait()
    assert torch.equal(to_global(model[0].grad), torch.tensor([0.0, 0.0, 2.0, 3.0]))


def test_shards_of_other_ranks(pool: Any) -> None:
    pool.run(shards_of_their_own, ranks=2)
