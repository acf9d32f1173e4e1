"""uniform and normal: functions of (key, global index), the same on every path and in every layout."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from weft import kernels
from weft.kernels.random import normal_, philox
from weft.kernels.random.philox import Part
from weft.kernels.random.sharded import _fill_normal, _fill_uniform
from weft.mesh import Layout, LayoutError, ProcessMesh
from weft.reshard import layout_of

from tests.support import philox as oracle
from tests.support.collectives import Collectives
from tests.support.sample import Portion
from tests.support.shards import every_layout, split

KEY = 0xFEDCBA9876543210
SHAPES = [(), (1,), (13,), (5, 7), (2, 3, 2, 3, 4), (0, 3), (3, 5000)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
MESHES = [ProcessMesh.grid(a=2), ProcessMesh.grid(a=3), ProcessMesh.grid(a=2, b=2), ProcessMesh.grid(a=2, b=3)]
FOUR, GRID = ProcessMesh.grid(tp=4), ProcessMesh.grid(dp=2, tp=2)


def index_of(shape: tuple[int, ...]) -> Tensor:
    return torch.arange(math.prod(shape)).reshape(shape)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_uniform_is_the_upper_24_bits(shape: tuple[int, ...], device: str) -> None:
    found = kernels.uniform(shape, KEY, device=device)
    assert found.dtype == torch.float32
    assert torch.equal(found.cpu(), oracle.uniform(index_of(shape), KEY))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_normal_agrees_with_float64_and_between_paths_to_2_ulp(shape: tuple[int, ...], device: str) -> None:
    found = kernels.normal(shape, KEY, device=device)
    assert oracle.ulps(found.cpu(), oracle.normal(index_of(shape), KEY)) <= 2
    on_a_cpu = torch.empty(shape)
    philox.fill(on_a_cpu, Part.of(shape), KEY, philox.as_normal)
    assert oracle.ulps(found.cpu(), on_a_cpu) <= 2


def at_corners() -> Tensor:
    """Pairs of words [N, 2] at and beside zeros of cosine, sine or logarithm; and random pairs."""
    quarters = [q * 2**30 + step for q in range(5) for step in range(-9, 10)]
    eighths = [2**29 + q * 2**30 + step for q in range(4) for step in (-1, 0, 1)]
    angles = [word for word in quarters + eighths if 0 <= word < 2**32]
    radii = [0, 1, 2, 2**31, 2**32 - 9, 2**32 - 2, 2**32 - 1]
    draw = random.Random(0)
    pairs = [[radius, angle] for radius in radii for angle in angles]
    return torch.tensor([*pairs, *([draw.getrandbits(32), draw.getrandbits(32)] for _ in range(20000))])


@pytest.mark.parametrize("device", ["interpreted", pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)
def test_box_muller_agrees_to_2_ulp_at_the_corners_too(device: str) -> None:
    words = at_corners()
    expected = philox.as_normal(words.repeat(1, 2).unbind(1))[:, :2]
    from tests.kernels import philox_kernels

    out = torch.empty(len(words), 2, device=device)
    philox_kernels.pairs[(-(-len(words) // 512),)](words.to(device), out, len(words), BLOCK=512)
    assert oracle.ulps(out.cpu(), expected) <= 2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("draw", [kernels.uniform, kernels.normal], ids=lambda draw: draw.__name__)
def test_lower_dtypes_are_the_float32_numbers_rounded(draw: Any, dtype: torch.dtype, device: str) -> None:
    found = draw((3, 1000), KEY, dtype=dtype, device=device)
    assert found.dtype == dtype
    assert torch.equal(found, draw((3, 1000), KEY, device=device).to(dtype))


@pytest.mark.parametrize("shape", [(), (7,), (5, 7), (4, 8), (3, 5, 4), (2, 0)], ids=str)
def test_every_rank_draws_its_part_in_every_layout(portion: Portion, shape: tuple[int, ...], device: str) -> None:
    wholes = {fill: torch.empty(shape, device=device) for fill in (_fill_uniform, _fill_normal)}
    for fill, whole in wholes.items():
        fill(whole, Part.of(shape), KEY)
    seen: set[Part] = set()
    for mesh in MESHES:
        for layout in portion.of(every_layout(mesh, len(shape), partials=()), every=4):
            cut = {fill: split(whole, layout) for fill, whole in wholes.items()}
            for rank in mesh.ranks:
                part = Part.of(shape, layout.local_slices(shape, rank))
                if part in seen:
                    continue
                seen.add(part)
                for fill in wholes:
                    local = torch.full(part.sizes, torch.nan, device=device)
                    fill(local, part, KEY)
                    assert torch.equal(local, cut[fill][rank]), (fill.__name__, str(layout), rank)


def test_numbers_depend_on_the_key_and_the_index_alone(device: str) -> None:
    for draw in (kernels.uniform, kernels.normal):
        first = draw((999,), KEY, device=device)
        torch.manual_seed(5)
        assert torch.equal(draw((999,), KEY, device=device), first)
        assert torch.equal(draw((37, 27), KEY, device=device).flatten(), first)
        assert torch.equal(draw((2000,), KEY, device=device)[:999], first)
        assert (draw((999,), KEY + 1, device=device) == first).sum() <= 1


def test_distributions() -> None:
    n = 200_000
    uniform, normal = kernels.uniform((n,), KEY).double(), kernels.normal((n,), KEY).double()
    assert uniform.min() >= 0
    assert uniform.max() < 1
    # Five standard errors of each estimate.
    assert abs(uniform.mean() - 0.5) < 5 * (1 / 12 / n) ** 0.5
    assert abs(normal.mean()) < 5 * n**-0.5
    assert abs(normal.var() - 1) < 5 * (2 / n) ** 0.5
    assert abs((normal**4).mean() - 3) < 5 * (96 / n) ** 0.5
    for lag in (1, 2, 3, 4):
        assert abs((normal[lag:] * normal[:-lag]).mean()) < 5 * n**-0.5


# In place


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_normal_in_place_is_scaled_in_float32(dtype: torch.dtype, device: str) -> None:
    tensor = torch.nn.Parameter(torch.empty(5, 333, dtype=dtype, device=device))
    assert normal_(tensor, KEY, std=0.02) is tensor
    assert torch.equal(tensor.detach(), (kernels.normal((5, 333), KEY, device=device) * 0.02).to(dtype))


def test_normal_in_place_fills_any_strides(device: str) -> None:
    storage = torch.zeros(8, 12, device=device)
    normal_(storage.mT[2:7, ::2], KEY)
    assert torch.equal(storage.mT[2:7, ::2], kernels.normal((5, 4), KEY, device=device))
    assert storage.count_nonzero() == 20


# Refusals


@pytest.mark.parametrize(
    ("shape", "key", "dtype", "message"),
    [
        pytest.param((3,), -1, torch.float32, "int of 64 bits, got -1; make it with weft.mesh.derive_key", id="below"),
        pytest.param((3,), 2**64, torch.float32, "64 bits, got 18446744073709551616", id="above"),
        pytest.param((3,), 1.0, torch.float32, "64 bits, got 1.0", id="float-key"),
        pytest.param((3,), True, torch.float32, "64 bits, got True", id="bool-key"),
        pytest.param((3, -1), KEY, torch.float32, r"the shape is \(3, -1\)", id="negative"),
        pytest.param((2.0,), KEY, torch.float32, r"the shape is \(2.0,\)", id="float-size"),
        pytest.param((3,), KEY, torch.int64, "the dtype is torch.int64; choose one of torch.bfloat16", id="int"),
        pytest.param(
            Layout(FOUR, "tp: S(0)"),
            KEY,
            torch.float32,
            r"\(tp: S\(0\)\) is a layout.*give the global shape, and layout=",
            id="layout",
        ),
        pytest.param((2**40, 2**40), KEY, torch.float32, r"more than 2\*\*62 elements", id="too-many"),
    ],
)
@pytest.mark.parametrize("draw", [kernels.uniform, kernels.normal], ids=lambda draw: draw.__name__)
def test_bad_arguments(draw: Any, shape: Any, key: Any, dtype: torch.dtype, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        draw(shape, key, dtype=dtype, device="meta")


def test_normal_in_place_of_what_is_saved_for_backward_is_an_error(device: str) -> None:
    leaf = torch.ones(3, device=device, requires_grad=True)
    saved = torch.ones(3, device=device)
    product = leaf * saved
    normal_(saved, KEY)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_normal_in_place_fills_tensors_of_inference() -> None:
    with torch.inference_mode():
        assert torch.equal(normal_(torch.empty(3), KEY), kernels.normal((3,), KEY))


def test_normal_in_place_refuses_what_normal_does() -> None:
    with pytest.raises(ValueError, match=r"normal_: the dtype is torch.int64"):
        normal_(torch.zeros(3, dtype=torch.int64), KEY)
    with pytest.raises(ValueError, match="64 bits, got -1"):
        normal_(torch.zeros(3), -1)


# On processes


def distributed(shape: tuple[int, ...], text: str, mesh: ProcessMesh) -> list[Tensor]:
    layout = Layout(mesh, text)
    with Collectives() as seen:
        drawn = [draw(shape, KEY, layout=layout, dtype=torch.bfloat16) for draw in (kernels.uniform, kernels.normal)]
        filled = normal_(kernels.uniform(shape, 0, layout=layout), KEY, std=0.5)
    assert seen.kinds == []
    for tensor in (*drawn, filled):
        assert isinstance(tensor, DTensor)
        assert str(layout_of(tensor)) == str(layout)  # where the minor axis comes first its mesh is permuted
        assert tensor.shape == shape
    return [tensor.to_local() for tensor in (*drawn, filled)]


@pytest.mark.parametrize(
    ("mesh", "text"),
    [
        pytest.param(FOUR, "tp: S(0)", id="uneven"),
        pytest.param(FOUR, "tp: S(1)", id="empty-last"),
        pytest.param(GRID, "dp: S(0), tp: S(1)", id="2x2"),
        pytest.param(GRID, "tp: S(0), dp: S(0)", id="minor-first"),
        pytest.param(GRID, "tp: S(1)", id="replicated"),
        pytest.param(ProcessMesh([2, 0, 1], ["tp"]), "tp: S(0)", id="a-rank-outside"),
    ],
)
def test_dtensors_hold_their_part_of_the_one_tensor(pool: Any, mesh: ProcessMesh, text: str) -> None:
    shape, layout = (7, 5), Layout(mesh, text)
    wholes = [draw(shape, KEY, dtype=torch.bfloat16) for draw in (kernels.uniform, kernels.normal)]
    wholes.append(kernels.normal(shape, KEY) * 0.5)
    results = pool.run(distributed, shape, text, mesh)
    for whole, *locals_ in zip(wholes, *results, strict=True):
        for rank, part in split(whole, layout).items():
            assert torch.equal(locals_[rank], part)
        for rank in set(range(4)) - set(mesh.ranks):
            assert locals_[rank].shape == (0,)
            assert locals_[rank].dtype == whole.dtype


def refused() -> list[str]:
    messages = []
    for draw in (kernels.uniform, kernels.normal):
        for shape, text in (((7, 5), "tp: P(sum)"), ((7,), "tp: S(1)")):
            with pytest.raises(LayoutError) as caught:
                draw(shape, KEY, layout=Layout(FOUR, text))
            messages.append(str(caught.value))
    return messages


def test_layouts_that_cannot_be_drawn(pool: Any) -> None:
    for partial, beyond, *_ in pool.run(refused):
        assert "uniform: the layout is (tp: P(sum))" in partial
        assert "draw them with Replicate() in place of Partial, then reshard() the tensor" in partial
        assert "axis 'tp' shards dim 1 of a tensor of shape (7,)" in beyond
