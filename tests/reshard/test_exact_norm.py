"""Inside `exact_sums`, the norm of gradients has the same bits for any cut of the elements, and is the true norm."""

from __future__ import annotations

import itertools
import math
import random
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from weft.mesh import Layout, ProcessMesh
from weft.reshard import clip_grad_norm_, distribute, exact_sums, to_global
from weft.reshard.training import exact_norm

from tests.support.collectives import Collectives
from tests.support.pool import Pool
from tests.support.search import searched

NAMED = {"dp": 4, "tp": 2}
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def norm_and_gradients(tensors: list[Tensor], norm_type: float = 2.0, max_norm: float = 1.0) -> tuple[float, Tensor]:
    """The norm inside `exact_sums`, and all scaled elements in one vector, in order."""
    parameters = [nn.Parameter(torch.zeros_like(each)) for each in tensors]
    for parameter, each in zip(parameters, tensors, strict=True):
        parameter.grad = each.clone()
    with exact_sums(NAMED):
        norm = clip_grad_norm_(parameters, max_norm, norm_type)
    return norm.item(), torch.cat([each.grad.flatten() for each in parameters if each.grad is not None])


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def true_norm(tensor: Tensor, norm_type: float = 2.0) -> float:
    """Of elements with magnitudes whose powers are float64 numbers."""
    values = [abs(Fraction(each)) for each in tensor.flatten().tolist()]
    if math.isinf(norm_type):
        return float(max(values))
    total = sum((each ** int(norm_type) for each in values), Fraction())
    if norm_type == 1 or not total:
        return float(total)
    return math.isqrt(int(total * 2**640)) / 2.0**320  # the squares of float32 numbers are multiples of 2**-298


finite = st.floats(-(2.0**100), 2.0**100, width=32).filter(lambda each: each == 0 or abs(each) >= 1e-30)
spread = st.tuples(st.integers(-30, 29), st.floats(-9, 9)).map(lambda pair: pair[1] * 10.0 ** pair[0])
element = st.one_of(finite, spread, st.sampled_from([0.0, -0.0, 1.0, 1e-30, -1e30, 1e-45]))


@searched(
    st.lists(element, min_size=1, max_size=90),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    st.sampled_from([1.0, 2.0, math.inf]),
    st.randoms(use_true_random=False),
    examples=1000,
)
def test_no_cut_and_no_order_changes_a_bit(
    values: list[float], dtype: torch.dtype, norm_type: float, chance: random.Random
) -> None:
    whole = torch.tensor(values, dtype=torch.float32).to(dtype)
    if dtype == torch.float64:
        whole /= 3
    norm, scaled = norm_and_gradients([whole], norm_type)
    n, order = len(values), list(range(len(values)))
    chance.shuffle(order)
    bounds = sorted({0, n, *(chance.randrange(n + 1) for _ in range(chance.randrange(6)))})
    parts = [whole[order][first:last] for first, last in itertools.pairwise(bounds)]
    found, found_scaled = norm_and_gradients([*parts, whole[:0]], norm_type)
    assert found == norm
    assert same_bits(found_scaled, scaled[order])
    truth = true_norm(whole, norm_type)
    allowed = 1e-14 * truth if dtype == torch.float64 else 2**-24 * truth + 2**-149  # one rounding to float32
    assert abs(norm - truth) <= allowed


def magnitudes(n: int, spread: float, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    exponents = spread * torch.randn(n, generator=generator, dtype=torch.float64)
    values = torch.randn(n, generator=generator, dtype=torch.float64) * exponents.exp2()
    limit = torch.finfo(dtype).max / 4
    return values.clamp(-limit, limit).to(dtype)


@pytest.mark.few(1)
@pytest.mark.parametrize("spread", [0.0, 4.0, 30.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_large_gradients_are_added_in_chunks(dtype: torch.dtype, spread: float, monkeypatch: Any) -> None:
    whole = magnitudes(300_001, spread, dtype)
    truth = math.sqrt(math.fsum(each * each for each in whole.tolist()))
    results = []
    for chunk in (2**17, 1000, 2**18 + 1):
        monkeypatch.setattr(exact_norm, "CPU_CHUNK", chunk)
        results.append(norm_and_gradients([whole]))
        results.append(norm_and_gradients(list(whole.split([100_000, 7, 1, 199_993]))))
    for norm, scaled in results:
        assert norm == results[0][0]
        assert same_bits(scaled, results[0][1])
    assert abs(results[0][0] - truth) <= (2**-52 if dtype == torch.float64 else 2**-24) * truth


def test_one_large_element_hides_no_small_ones() -> None:
    """A large element and very many small ones, whose squares a float32 sum loses."""
    small = 2.0**-20
    whole = torch.full((2**18,), small)
    whole[5] = 1.0
    norm, _ = norm_and_gradients([whole], max_norm=1e9)
    assert norm == torch.tensor(math.sqrt(1 + (2**18 - 1) * small**2)).item()


@pytest.mark.exhaustive
@pytest.mark.parametrize("norm_type", [1.0, 2.0])
def test_layouts_in_memory_do_not_matter(norm_type: float, monkeypatch: Any) -> None:
    whole = magnitudes(24 * 50, 3.0, torch.float32).view(24, 50)
    norm, _ = norm_and_gradients([whole], norm_type)
    padded = torch.full((25, 60, 2), math.nan)
    gappy = padded[1:, 3:53, 0].copy_(whole)
    for chunk in (2**17, 70, 50, 7, 1):
        monkeypatch.setattr(exact_norm, "CPU_CHUNK", chunk)
        for tensor in (whole, whole.t().contiguous().t(), gappy, gappy.t(), whole.view(2, 12, 50).transpose(0, 2)):
            parameter = nn.Parameter(torch.zeros_like(tensor))
            parameter.grad = tensor.detach()
            with exact_sums(NAMED):
                assert clip_grad_norm_(parameter, math.inf, norm_type).item() == norm


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
@pytest.mark.parametrize(
    ("values", "expected"),
    [
        pytest.param([1.0, math.nan, 2.0], math.nan, id="nan"),
        pytest.param([1.0, -math.nan, math.inf], math.nan, id="nan-and-infinity"),
        pytest.param([1.0, -math.inf], math.inf, id="infinity"),
        pytest.param([0.0, -0.0], 0.0, id="zeros"),
        pytest.param([], 0.0, id="empty"),
    ],
)
def test_special_values(values: list[float], expected: float, norm_type: float, dtype: torch.dtype) -> None:
    gradient = torch.tensor(values, dtype=dtype)
    norm, scaled = norm_and_gradients([gradient], norm_type)
    assert norm == expected or (math.isnan(norm) and math.isnan(expected))
    assert torch.equal(scaled.isnan(), gradient.isnan())
    assert torch.equal(scaled.nan_to_num(), gradient.nan_to_num())


def test_the_largest_float64_numbers_have_an_infinite_norm() -> None:
    assert norm_and_gradients([torch.tensor([1e300, 1e300], dtype=torch.float64)])[0] == math.hypot(1e300, 1e300)
    assert norm_and_gradients([torch.tensor([1.7e308], dtype=torch.float64)])[0] == math.inf


def test_without_exact_sums_nothing_changes() -> None:
    """Squares that float32 does not hold: zero, as torch has them."""
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([1e-30, 1e-30])
    assert clip_grad_norm_(parameter, 1.0).item() == 0.0
    with exact_sums(NAMED):
        assert clip_grad_norm_(parameter, 1.0).item() == torch.tensor(math.sqrt(2) * 1e-30).item()
    with exact_sums(None):
        assert clip_grad_norm_(parameter, 1.0).item() == 0.0


def test_gradients_without_data_have_a_norm_without_data() -> None:
    parameter = nn.Parameter(torch.zeros(5, 3, device="meta"))
    parameter.grad = torch.zeros(5, 3, device="meta")
    for norm_type in (1.0, 2.0, math.inf):
        with exact_sums(NAMED):
            assert clip_grad_norm_(parameter, 1.0, norm_type).is_meta


def test_norms_of_other_types_are_refused() -> None:
    with (
        exact_sums(NAMED),
        pytest.raises(ValueError, match=r"norm_type is 3.0, .* 1, 2 and inf only.*give norm_type 2"),
    ):
        clip_grad_norm_(nn.Parameter(torch.zeros(2)), 1.0, 3.0)


SHAPES = [(37, 19), (5,), (1, 3), (64, 2), (), (0, 4)]
MESHES: list[tuple[dict[str, int], str]] = [
    ({"dp": 1}, ""),
    ({"dp": 2}, ""),
    ({"dp": 2}, "dp: S(0)"),
    ({"dp": 2}, "dp: S(1)"),
    ({"dp": 4}, "dp: S(0)"),
    ({"dp": 2, "tp": 2}, "tp: S(0), dp: S(1)"),
    ({"dp": 2, "tp": 2}, "dp: S(0), tp: S(0)"),
    ({"dp": 2, "tp": 2}, "tp: S(1)"),
]


def gradients() -> list[Tensor]:
    return [magnitudes(math.prod(shape), 6.0, DTYPES[i % 3], i).reshape(shape) for i, shape in enumerate(SHAPES)]


def on_meshes(norm_type: float, size: int) -> list[tuple[float, list[Tensor], list[str], list[int]]]:
    """On each mesh of `size` ranks: the norm, the whole scaled gradients, and the collectives' kinds and bytes."""
    found = []
    for axes, layout in MESHES:
        mesh, parameters = ProcessMesh.grid(**axes), []
        if mesh.size != size:
            continue
        for gradient in gradients():
            named = Layout(mesh, layout if gradient.ndim > 1 else "")
            parameters.append(nn.Parameter(distribute(torch.zeros_like(gradient), named)))
            parameters[-1].grad = distribute(gradient, named)
        with exact_sums(NAMED), Collectives() as seen:
            norm = clip_grad_norm_(parameters, 0.5, norm_type)
        scaled = [to_global(each.grad) for each in parameters]  # type: ignore[arg-type]
        found.append((norm.item(), scaled, seen.kinds, seen.nbytes))
    return found


@pytest.mark.few(1)
@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_every_mesh_has_the_bits_of_one_process(norm_type: float, pool: Pool) -> None:
    norm, scaled = norm_and_gradients(gradients(), norm_type, 0.5)
    scaled_parts = scaled.split([math.prod(shape) for shape in SHAPES])
    for size in (1, 2, 4):
        for found, parts, kinds, _ in itertools.chain(*pool.run(on_meshes, norm_type, size, ranks=size)):
            assert found == norm
            assert all(same_bits(a.flatten(), b.to(a.dtype)) for a, b in zip(parts, scaled_parts, strict=True))
            assert kinds == ["all-reduce"] * (0 if size == 1 else 1 if math.isinf(norm_type) else 2)


def test_the_sum_is_four_numbers(pool: Pool) -> None:
    for rank in pool.run(on_meshes, 2.0, 4, ranks=4):
        for _, _, kinds, nbytes in rank:
            assert kinds == ["all-reduce", "all-reduce"]
            assert nbytes == [
                2 * 8,
                2 * 3 * 8,
            ]  # of 8 bytes, which four ranks cannot share evenly, and of 32: 3/4 twice


STAGES = [ProcessMesh.grid(tp=2), ProcessMesh.grid(tp=2, first_rank=2)]


def on_stages() -> tuple[float, Tensor]:
    """A table on both stages and a weight on each; a rank gives its own stage's tensors."""
    rank, table = torch.distributed.get_rank(), magnitudes(90, 5.0, torch.float32).view(9, 10)
    stage = rank // 2
    parameters = []
    for number, tensor in enumerate((table, magnitudes(70, 5.0, torch.float32, 1 + stage))):
        layout = Layout(STAGES[stage], "tp: S(0)" if number == 0 else "")
        parameters.append(nn.Parameter(distribute(torch.zeros_like(tensor), layout)))
        parameters[-1].grad = distribute(tensor, layout)
    with exact_sums(NAMED):
        norm = clip_grad_norm_(
            parameters, 0.5, mesh=ProcessMesh.grid(pp=2, tp=2), copies=parameters[: 1 if stage else 0]
        )
    return norm.item(), to_global(parameters[0].grad)  # type: ignore[arg-type]


def test_stages_have_the_bits_of_one_process(pool: Pool) -> None:
    whole = [magnitudes(90, 5.0, torch.float32), *(magnitudes(70, 5.0, torch.float32, 1 + stage) for stage in (0, 1))]
    norm, scaled = norm_and_gradients(whole, max_norm=0.5)
    for found, table in pool.run(on_stages, ranks=4):
        assert found == norm
        assert same_bits(table.flatten(), scaled[:90])
