"""Philox 4x32-10 on every path: published answers, bits by (key, global index) alone, no excess work for a part."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from weft.kernels.random import philox
from weft.kernels.random.philox import Part, merge
from weft.mesh import ProcessMesh

from tests.support import philox as oracle
from tests.support.shards import every_layout

KEY = 0x0123456789ABCDEF
KEYS = [pytest.param(KEY, id="key"), pytest.param(0, id="zero"), pytest.param(2**64 - 1, id="ones")]
MESHES = [ProcessMesh.grid(a=2), ProcessMesh.grid(a=3), ProcessMesh.grid(a=2, b=2), ProcessMesh.grid(a=2, b=3)]
SHAPES = [(), (1,), (7,), (5, 7), (4, 8), (6, 1), (1, 6), (3, 5, 4), (0, 3)]


def drawn(part: Part, key: int, device: str, path: str) -> Tensor:
    """The bits of a part's elements, as int64, by the torch path or by a kernel."""
    out = torch.full(part.sizes, -1, dtype=torch.int64, device=device)
    if path == "torch":
        philox.fill(out, part, key, lambda words: torch.stack(words, -1))
    else:
        from weft.kernels.random import launch

        from tests.kernels import philox_kernels

        launch._fill(philox_kernels.bits, launch.UNIFORM, out, part, launch.signed(key))
    return out.cpu()


@pytest.fixture
def path(request: pytest.FixtureRequest, device: str) -> str:
    """Which code computes bits on the device of the test."""
    return "torch" if request.node.callspec.params["device"] == "reference" else "kernel"


def indices(part: Part) -> Tensor:
    """The global row-major index of every element of a part, int64."""
    steps = [torch.arange(size) * stride for size, stride in zip(part.sizes, part.strides, strict=True)]
    grid = torch.meshgrid(*steps, indexing="ij") if steps else [torch.zeros((), dtype=torch.int64)]
    return part.offset + sum(grid, torch.zeros((), dtype=torch.int64))


def local_parts(shape: tuple[int, ...]) -> list[Part]:
    """The distinct parts that ranks hold, over all layouts on all meshes."""
    found: dict[Part, None] = {}
    for mesh in MESHES:
        for layout in every_layout(mesh, len(shape), partials=()):
            for rank in mesh.ranks:
                found[Part.of(shape, layout.local_slices(shape, rank))] = None
    return list(found)


# Published answers


def signed(low: int, high: int) -> Tensor:
    word = low | high << 32
    return torch.tensor([word - 2**64 if word >= 2**63 else word])


@pytest.mark.parametrize("name", oracle.KNOWN_ANSWERS)
def test_known_answers(name: str, device: str, path: str) -> None:
    counter, key, answer = oracle.KNOWN_ANSWERS[name]
    assert [int(word) for word in oracle.words([np.array(word) for word in counter], key)] == answer
    if path == "torch":
        block = philox._blocks(tuple(torch.tensor([word]) for word in counter), key[0] | key[1] << 32)
        assert [int(word) for word in block] == answer
        return
    from tests.kernels import philox_kernels

    out = torch.empty(4, dtype=torch.int64, device=device)
    as_int32 = [word - 2**32 if word >= 2**31 else word for word in counter]
    philox_kernels.philox_words[(1,)](out, int(signed(*key)), *as_int32)
    assert out.tolist() == answer


def test_the_oracle_in_pythons_own_integers() -> None:
    def by_hand(index: int) -> int:
        counter, (k0, k1) = [index // 4 % 2**32, index // 4 >> 32, 0, 0], (KEY % 2**32, KEY >> 32)
        for _ in range(10):
            p0, p1 = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
            counter = [p1 >> 32 ^ counter[1] ^ k0, p1 % 2**32, p0 >> 32 ^ counter[3] ^ k1, p0 % 2**32]
            k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
        return counter[index % 4]

    index = [0, 1, 2, 3, 4, 7, 1023, 2**34 + 5, 2**62 - 3]
    assert oracle.bits(torch.tensor(index), KEY).tolist() == [by_hand(i) for i in index]


# Bits of any part


PARTS = {
    "one": Part.of((1,)),
    "0-dim": Part.of(()),
    "a-block": Part.of((4,)),
    "long": Part.of((5000,)),
    "long-shifted": Part.of((6000,), [slice(3, 5003)]),
    "rows": Part.of((7, 4096)),
    "row-ends": Part.of((9, 4100), [slice(2, 5), slice(1, 4099)]),
    "columns": Part.of((300, 7), [slice(0, 300), slice(3, 4)]),
    "two-columns": Part.of((50, 9), [slice(3, 50), slice(6, 8)]),
    "aligned-columns": Part.of((30, 16), [slice(1, 30), slice(4, 12)]),
    "3-dims-cut": Part.of((5, 6, 7), [slice(1, 4), slice(2, 5), slice(3, 6)]),
    "4-dims-cut": Part.of((3, 5, 6, 7), [slice(1, 3), slice(1, 4), slice(2, 5), slice(3, 6)]),
    "5-dims": Part.of((2, 3, 2, 3, 4)),
    "5-dims-cut": Part.of((3, 4, 3, 4, 5), [slice(1, 3), slice(1, 3), slice(0, 2), slice(2, 4), slice(1, 4)]),
    "6-dims-cut": Part.of((3,) * 6, [slice(1, 3)] * 6),
    "empty": Part.of((4, 6), [slice(4, 4), slice(0, 6)]),
    "empty-columns": Part.of((4, 6), [slice(0, 4), slice(6, 6)]),
    "past-2**31": Part.of((2**20, 2**13), [slice(2**18 - 1, 2**18 + 2), slice(2**13 - 3, 2**13)]),
    "a-run-past-2**31": Part.of((2**40,), [slice(2**31 - 5, 2**31 + 6)]),
    "a-run-past-2**34": Part.of((2**40,), [slice(2**34 - 5, 2**34 + 2000)]),
    "wide-rows": Part.of((5, 2**33 + 1), [slice(0, 5), slice(2**32 - 1, 2**32 + 4)]),
    "up-to-2**62": Part.of((2**62,), [slice(2**62 - 13, 2**62)]),
}


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("name", PARTS)
def test_bits_are_the_oracles(name: str, key: int, device: str, path: str) -> None:
    part = PARTS[name]
    assert torch.equal(drawn(part, key, device, path), oracle.bits(indices(part), key))


@pytest.mark.few(2)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_ranks_bits_are_its_part_of_the_whole_in_every_layout(shape: tuple[int, ...], device: str, path: str) -> None:
    for part in local_parts(shape):
        assert torch.equal(drawn(part, KEY, device, path), oracle.bits(indices(part), KEY)), part


@pytest.mark.parametrize("name", PARTS)
def test_pieces_join_without_a_seam_and_bound_the_scratch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    part, at_once, sizes = PARTS[name], 16, []
    blocks = philox._blocks

    def seen(counter: Any, key: int) -> philox.Words:
        sizes.append(counter[0].numel())
        return blocks(counter, key)

    monkeypatch.setattr(philox, "_BLOCKS_A_THREAD", at_once)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(philox, "_blocks", seen)
    assert torch.equal(drawn(part, KEY, "cpu", "torch"), oracle.bits(indices(part), KEY))
    assert max(sizes, default=0) <= at_once + 1


ON_KERNELS = pytest.mark.parametrize(
    "device", ["interpreted", pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True
)


@ON_KERNELS
@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("length", [1, 7, 2048, 2**31 - 1, 2**31, 2**40], ids=str)
def test_tiles_cover_runs_of_any_length(length: int, shifted: bool, device: str) -> None:
    from tests.kernels import philox_kernels

    programs, width = 5, 2048
    out = torch.empty(programs, 2, dtype=torch.int64, device=device)
    philox_kernels.tiles[(programs,)](out, length, SHIFTED=shifted, GROUPS=width // 4)
    across = -(-(length + 3 * shifted) // width)
    assert out.tolist() == [[i // across, i % across * width] for i in range(programs)]


@ON_KERNELS
def test_runs_beyond_32_bits_are_unravelled(device: str) -> None:
    from tests.kernels import philox_kernels

    R1, R2, strides = 2**16, 2**16 + 1, (2**50, 2**31 + 7, 3)
    rows = [0, 1, R2, R1 * R2 - 1, R1 * R2, 5 * R1 * R2 + 7 * R2 + 11, 2**40, 3]
    out = torch.empty(len(rows), dtype=torch.int64, device=device)
    philox_kernels.run_starts[(1,)](torch.tensor(rows, device=device), out, R1, R2, *strides, COUNT=len(rows))
    places = [(row // R2 // R1, row // R2 % R1, row % R2) for row in rows]
    assert out.tolist() == [sum(i * stride for i, stride in zip(place, strides, strict=True)) for place in places]


# No more than a part needs


def blocks_computed(part: Part, monkeypatch: pytest.MonkeyPatch, draw: Callable[[Part], Any] | None = None) -> int:
    """Blocks of bits that `draw` computes for a part; without `draw`, those of philox.fill."""
    count = 0
    blocks = philox._blocks

    def counted(counter: Any, key: int) -> philox.Words:
        nonlocal count
        count += counter[0].numel()
        return blocks(counter, key)

    with monkeypatch.context() as patch:
        patch.setattr(philox, "_blocks", counted)
        if draw is None:
            drawn(part, KEY, "cpu", "torch")
        else:
            draw(part)
    return count


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_no_rank_computes_more_blocks_than_it_holds_elements(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    for part in local_parts(shape):
        assert blocks_computed(part, monkeypatch) <= part.numel, part


def test_a_run_of_neighbours_computes_a_block_for_four(monkeypatch: pytest.MonkeyPatch) -> None:
    for part in (Part.of((64, 1024)), Part.of((64, 1024), [slice(16, 32), slice(0, 1024)])):
        assert blocks_computed(part, monkeypatch) == part.numel // 4
    columns = Part.of((64, 1024), [slice(0, 64), slice(256, 512)])
    assert blocks_computed(columns, monkeypatch) == columns.numel // 4
    shifted = Part.of((64, 1023), [slice(0, 64), slice(256, 512)])
    assert blocks_computed(shifted, monkeypatch) == 65 * 64  # a block more for each run


def test_a_mask_computes_a_block_for_eight(monkeypatch: pytest.MonkeyPatch) -> None:
    def mask(part: Part) -> None:
        philox.fill(torch.empty(part.sizes, dtype=torch.int16), part, KEY, philox.as_halves, philox.HALVES)

    whole = Part.of((64, 1024))
    assert blocks_computed(whole, monkeypatch, mask) == whole.numel // 8
    shifted = Part.of((64, 1023), [slice(0, 64), slice(256, 512)])
    assert blocks_computed(shifted, monkeypatch, mask) == 33 * 64  # a block more for each run


@pytest.mark.parametrize("lanes", [philox.WORDS, philox.HALVES])
@pytest.mark.parametrize("name", PARTS)
def test_the_tiles_of_a_launch_hold_a_part_and_little_more(name: str, lanes: int, interpreted: None) -> None:
    from weft.kernels.random import launch

    part = PARTS[name].runs()
    if part.numel == 0 or len(part.sizes) > launch.OUTER_DIMS + 1:
        return
    rows, length, shifted = math.prod(part.sizes[:-1]), part.sizes[-1], launch.is_shifted(part, lanes)
    most = dataclasses.replace(launch.UNIFORM, lanes=lanes)
    chosen = launch.fitted(most, length, shifted)
    (programs,) = launch.grid(chosen, rows, length, shifted)
    of_a_program = lanes * chosen.rows * chosen.groups
    assert of_a_program == lanes * launch.UNIFORM.groups
    assert part.numel <= programs * of_a_program < 2 * rows * (length + 2 * (lanes - 1)) + of_a_program


# Parts


@pytest.mark.parametrize(
    ("part", "sizes", "strides"),
    [
        pytest.param(Part.of((3, 4, 5)), (60,), (1,), id="whole"),
        pytest.param(Part.of((3, 4, 5), [slice(1, 3), slice(0, 4), slice(0, 5)]), (40,), (1,), id="rows"),
        pytest.param(Part.of((3, 4, 5), [slice(1, 2), slice(1, 3), slice(0, 5)]), (10,), (1,), id="one-outer"),
        pytest.param(Part.of((3, 4, 5), [slice(0, 3), slice(1, 3), slice(0, 5)]), (3, 10), (20, 1), id="middle"),
        pytest.param(Part.of((3, 4, 5), [slice(0, 3), slice(0, 4), slice(2, 4)]), (12, 2), (5, 1), id="columns"),
        pytest.param(Part.of((3, 4, 5), [slice(0, 3), slice(0, 4), slice(2, 3)]), (12, 1), (5, 1), id="one-column"),
        pytest.param(Part.of((3, 1, 1, 5)), (15,), (1,), id="ones-inside"),
        pytest.param(Part.of(()), (1,), (1,), id="0-dim"),
        pytest.param(Part.of((3, 0)), (0,), (1,), id="empty"),
    ],
)
def test_dims_merge(part: Part, sizes: tuple[int, ...], strides: tuple[int, ...]) -> None:
    assert (part.runs().sizes, part.runs().strides) == (sizes, strides)
    assert torch.equal(indices(part.runs()).flatten(), indices(part).flatten())


def test_dims_merge_only_where_they_do_in_memory_too() -> None:
    whole = Part.of((3, 4, 5))
    assert merge(whole.sizes, whole.strides, (20, 5, 1)) == ((60,), (1,), (1,))
    assert merge(whole.sizes, whole.strides, (24, 6, 1)) == ((12, 5), (5, 1), (6, 1))
    assert merge(whole.sizes, whole.strides, (1, 3, 12)) == ((3, 4, 5), (20, 5, 1), (1, 3, 12))
    assert merge(whole.sizes, whole.strides, (0, 0, 0)) == ((60,), (1,), (0,))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_part_is_the_slice_of_the_whole(shape: tuple[int, ...]) -> None:
    whole = torch.arange(math.prod(shape)).reshape(shape)
    starts = [[(0, n), (n // 2, n), (n // 3, n - n // 3), (n, n)] for n in shape]
    for bounds in itertools.product(*starts):
        slices = tuple(slice(*bound) for bound in bounds)
        assert torch.equal(indices(Part.of(shape, slices)), whole[slices])


def test_a_shape_beyond_62_bits_is_refused() -> None:
    assert Part.of((2**31, 2**31)).strides == (2**31, 1)
    with pytest.raises(ValueError, match=r"\(2147483648, 2147483649\) has more than 2\*\*62 elements"):
        Part.of((2**31, 2**31 + 1))
