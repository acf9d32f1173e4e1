"""Several backward passes inside one `paused()`, each of which sends, with ranks that lack gradients."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from weft.mesh import Layout, ProcessMesh
from weft.reshard import GradientSync, distribute, exact_sums, to_global
from weft.reshard.extension import ParameterSlot, exact_axes, gather_when_called, keep_gathered
from weft.reshard.moving.dtensor import wrap

SIZES = (4, 6, 2, 300, 8)  # of the parameters
Passes = Sequence[Sequence[Sequence[int]]]  # for each pass and rank, the parameters with a gradient


class Give(torch.autograd.Function):
    """A function of a parameter with a given gradient."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        return torch.ones(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.gradient, None


class Weights(nn.Module):
    """Sharded parameters. zero: 2 or 3."""

    def __init__(self, mesh: ProcessMesh, zero: int) -> None:
        super().__init__()
        self.mesh, slots = mesh, []
        for i, size in enumerate(SIZES):
            shard = distribute(torch.zeros(size, dtype=torch.float64), Layout(mesh, "dp: S(0)"))
            self.register_parameter(f"w{i}", nn.Parameter(shard))
            slots.append(
                ParameterSlot(
                    module=self,
                    name=f"w{i}",
                    layout=Layout(mesh),
                    keep_between_calls=zero == 2,
                    accumulate_grad=False,
                )
            )
        gather_when_called(self, {self: slots}, keep_for_backward=lambda _: True)

    def forward(self, used: Sequence[int], seed: int) -> Tensor:
        given = [Give.apply(getattr(self, f"w{i}"), self.gradient(i, seed)) for i in used]  # type: ignore[no-untyped-call]
        return sum(given, torch.zeros((), requires_grad=True))

    def gradient(self, i: int, seed: int) -> Tensor:
        part = addend(i, dist.get_rank(), seed)
        if exact_axes() is not None:  # an addend for each of the rank's two coordinates on the named mesh
            part = torch.stack([part - 1, torch.ones_like(part)])
        return wrap(part, Layout(self.mesh, "dp: P"), (SIZES[i],))


def addend(i: int, rank: int, seed: int) -> Tensor:
    """A rank's addend: integers in float64, whose sums are exact in any order."""
    generator = torch.Generator().manual_seed(1000 * seed + 10 * i + rank)
    return torch.randint(-9, 10, (SIZES[i],), generator=generator).double()


def truth(i: int, passes: Passes, seed: int) -> Tensor | None:
    found = [addend(i, r, seed + n) for n, ranks in enumerate(passes) for r, used in enumerate(ranks) if i in used]
    return torch.stack(found).sum(0) if found else None


def step(model: Weights, sync: GradientSync, passes: Passes, seed: int, paused: bool) -> None:
    # As in a pipeline, parameters are gathered once for all passes.
    with keep_gathered(model), sync.paused() if paused else nullcontext():
        for number, used in enumerate(passes):
            model(used[dist.get_rank()], seed + number).backward()
    sync.wait()
    for i in range(len(SIZES)):
        grad, expected = getattr(model, f"w{i}").grad, truth(i, passes, seed)
        assert (grad is None) == (expected is None), (seed, i)
        assert expected is None or torch.equal(to_global(grad), expected), (seed, i)
    model.zero_grad()


ALL = range(5)
# Two steps each.
STORIES: dict[str, list[Passes]] = {
    "one-parameter": [[(ALL, ALL), ([0, 1, 3, 4], ALL), (ALL, ALL)]] * 2,
    "another-on-each-rank": [[([0, 2, 3], ALL), (ALL, [1, 2, 3, 4])], [([4], [0]), ([0], [4])]],
    "a-skipped-pass": [[(ALL, []), (ALL, ALL), ([], ALL)], [([], ALL), ([], ALL), (ALL, ALL)]],
    "a-skipped-pass-later": [[(ALL, ALL), (ALL, ALL)], [(ALL, []), (ALL, ALL)], [([], []), (ALL, [])]],
    "every-pass-skipped": [[(ALL, []), (ALL, [])], [([], ALL), ([], ALL)]],
    "in-no-step-before": [[([3], [3]), ([3], [3])], [([3, 0], [3]), ([3, 0], [3, 0, 1])], [([3], [3]), ([3], [3])]],
}


def story(steps: Sequence[Passes], exact: bool) -> None:
    with exact_sums({"dp": 4}) if exact else nullcontext():
        for zero, paused, bucket_bytes in itertools.product((2, 3), (True, False), (1, 64, 2**20)):
            model = Weights(ProcessMesh.grid(dp=2), zero)
            sync = GradientSync(model, bucket_bytes=bucket_bytes)
            for number, passes in enumerate(steps):
                step(model, sync, passes, 100 * number, paused)
            sync.close()


@pytest.mark.few(1)
@pytest.mark.parametrize("name", STORIES)
@pytest.mark.parametrize("exact", [True, False], ids=["exact", "ordinary"])
def test_ranks_that_lack_gradients_of_some_passes(pool: Any, name: str, exact: bool) -> None:
    pool.run(story, STORIES[name], exact, ranks=2, timeout=12)


class Growing(Weights):
    """Gradients of 256 in the first pass, and of 1 in the second: 257 is no number of bfloat16."""

    def gradient(self, i: int, seed: int) -> Tensor:
        part = torch.full((SIZES[i],), (128.0, 0.5)[seed], dtype=torch.float64)
        if exact_axes() is not None:
            part = torch.stack([part, torch.zeros_like(part)])
        return wrap(part, Layout(self.mesh, "dp: P"), (SIZES[i],))


def passes_summed_in_bfloat16(zero: int, paused: bool) -> list[Tensor]:
    with exact_sums({"dp": 4}):
        model = Growing(ProcessMesh.grid(dp=2), zero)
        sync = GradientSync(model, dtype=torch.bfloat16)
        with keep_gathered(model), sync.paused() if paused else nullcontext():
            for number in range(2):
                model(ALL, number).backward()
                if not paused:
                    sync.wait()
        sync.wait()
    return [to_global(getattr(model, f"w{i}").grad) for i in range(len(SIZES))]


@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize("paused", [False, True], ids=["a-round-each", "one-round"])
def test_ranks_sum_in_bfloat16_and_passes_are_added_in_the_gradients_dtype(pool: Any, paused: bool, zero: int) -> None:
    """A pipeline has one round for all passes, a step without a pipeline a round for each: the bits must agree."""
    for gradients in pool.run(passes_summed_in_bfloat16, zero, paused, ranks=2):
        assert all(each.eq(257.0).all() for each in gradients), gradients[0]
