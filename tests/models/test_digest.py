"""A tensor's digest is the same for every cut of it, tells every bit apart, and estimates the size of a difference."""

from __future__ import annotations

import math

import pytest
import torch
from weft.models.compare.digest import Digest, digest_part, place_of
from weft.models.compare.record_file import block_slices, count_blocks

CPU = torch.device("cpu")
SHAPES = [
    pytest.param((), id="scalar"),
    pytest.param((1,), id="one"),
    pytest.param((7,), id="vector"),
    pytest.param((0, 5), id="empty"),
    pytest.param((5, 9), id="odd"),
    pytest.param((3, 255), id="wide"),
    pytest.param((2, 6, 8), id="activations"),
    pytest.param((1, 1, 1), id="ones"),
    pytest.param((4, 3, 2, 5), id="heads"),
]


def whole(x: torch.Tensor) -> Digest:
    return digest_part(x, place_of(x.shape, [slice(0, size) for size in x.shape], CPU))


def cut(x: torch.Tensor, dim: int, pieces: int) -> Digest:
    """The sum of the digests of the parts that torch.chunk cuts."""
    found, start = Digest.zeros(count_blocks(x.shape), CPU), 0
    for piece in x.chunk(pieces, dim):
        slices = [slice(0, size) for size in x.shape]
        slices[dim] = slice(start, start + piece.shape[dim])
        start += piece.shape[dim]
        found.add(digest_part(piece, place_of(x.shape, slices, CPU)))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_digest_does_not_depend_on_the_cut(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = whole(x)
    assert expected.squares.item() == pytest.approx(x.double().square().sum().item(), rel=1e-14)
    for dim in range(x.ndim):
        for pieces in (1, 2, 3, 4):
            found = cut(x, dim, pieces)
            assert torch.equal(found.hashes, expected.hashes)
            torch.testing.assert_close(found.sketches, expected.sketches, rtol=1e-13, atol=1e-13)
            assert found.largest == expected.largest


def test_each_bit_and_each_place_of_an_element_counts() -> None:
    x = torch.randn(6, 10)
    expected = whole(x).hashes
    for i in range(6):
        for j in range(10):
            changed = x.clone()
            changed[i, j] = torch.nextafter(changed[i, j], torch.tensor(9.0))
            assert not torch.equal(whole(changed).hashes, expected)
    for other in (x.flip(0), x.flip(1), x.roll(1, 1), x[torch.tensor([1, 0, 2, 3, 4, 5])]):
        assert not torch.equal(whole(other).hashes, expected)


def test_a_difference_is_in_the_block_that_holds_it() -> None:
    x = torch.randn(8, 12, 16)
    before = whole(x)
    for number, slices in enumerate(block_slices(x.shape)):
        changed = x.clone()
        changed[slices] += 1e-3
        after = whole(changed)
        assert (after.hashes != before.hashes).nonzero().flatten().tolist() == [number]
        moved = (after.sketches - before.sketches).abs().amax(1)
        assert moved.nonzero().flatten().tolist() == [number]


def test_blocks_cover_the_tensor_once() -> None:
    for shape in [(), (1,), (7,), (5, 9), (2, 6, 8), (4, 3, 2, 5), (1, 130)]:
        count = torch.zeros(shape)
        slices = block_slices(shape)
        assert len(slices) == count_blocks(shape) <= 16
        for each in slices:
            count[each] += 1
        assert torch.equal(count, torch.ones(shape))


@pytest.mark.exhaustive
def test_the_sketch_estimates_the_norm_of_a_difference() -> None:
    """Without bias, and within a factor of two for nearly all of 200 differences, of one element up to all."""
    generator, ratios = torch.Generator().manual_seed(3), []
    for trial in range(200):
        x = torch.randn(16, 32, 64, generator=generator)
        difference = torch.randn(x.shape, generator=generator) * 10.0 ** -(trial % 7)
        if trial % 4 == 1:
            difference *= torch.rand(x.shape, generator=generator) < 0.01
        elif trial % 4 == 2:
            difference[1:] = 0
        sketched = whole((x + difference).double()).sketches - whole(x.double()).sketches
        estimate = sketched.square().mean(1).sum().sqrt().item()
        ratios.append(estimate / (x + difference).sub(x).double().norm().item())
    assert 0.9 < math.fsum(each**2 for each in ratios) / len(ratios) < 1.1
    assert sum(0.5 < each < 2 for each in ratios) >= 198


def test_rows_of_microbatches_and_tokens_in_another_order_make_the_same_digest() -> None:
    x = torch.randn(4, 10, 6)
    expected, found = whole(x), Digest.zeros(count_blocks(x.shape), CPU)
    order = torch.tensor([0, 1, 2, 7, 8, 9, 3, 4, 5, 6])
    for first in (0, 2):
        for places in (slice(0, 5), slice(5, 10)):  # of two ranks
            part = x[first : first + 2, order[places]]
            tokens = order[places][None] if first else order[places].expand(2, 5)
            slices = [slice(0, 2), places, slice(0, 6)]
            found.add(digest_part(part, place_of(x.shape, slices, CPU, first_row=first, tokens=tokens)))
    assert torch.equal(found.hashes, expected.hashes)
    torch.testing.assert_close(found.sketches, expected.sketches)


def test_a_replica_that_differs_is_seen() -> None:
    x = torch.randn(9, 5)
    place = place_of(x.shape, [slice(0, 9), slice(0, 5)], CPU)

    def replicated(*values: torch.Tensor) -> Digest:
        found = Digest.zeros(count_blocks(x.shape), CPU)
        for rank, value in enumerate(values):
            found.add(digest_part(value, place, replicas=len(values), is_first=rank == 0))
        return found

    same = replicated(x, x, x, x)
    assert torch.equal(same.hashes, whole(x).hashes) and not same.disagreement.any()
    torch.testing.assert_close(same.sketches, whole(x).sketches)
    stale = replicated(x, x, x * 0.5, x)
    assert torch.equal(stale.hashes, whole(x).hashes) and stale.disagreement.any()
    assert (stale.sketches - same.sketches).norm() > 0.05 * same.sketches.norm()
