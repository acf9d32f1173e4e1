"""grouped_matmul against one product a group in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from weft.kernels import grouped_matmul
from weft.kernels.launching.traffic import counted_traffic
from weft.mesh import Layout, LayoutError
from weft.reshard import distribute

from tests.kernels.cases import TWO
from tests.kernels.reads import NoReads
from tests.support.pool import Pool

from .cases import assert_as_good_as_eager, expected, normal
from .test_gradients import gradients
from .test_tiles import WAYS


def eager(a: Tensor, b: Tensor, sizes: list[int]) -> Tensor:
    parts = a.split([*sizes, len(a) - sum(sizes)])
    products = [part @ each for part, each in zip(parts, b, strict=False)]
    return torch.cat([*products, parts[-1].new_zeros(len(parts[-1]), b.shape[-1])])


def of_experts(a: Tensor, b: Tensor, bias: Tensor, sizes: list[int], activation: str | None) -> Tensor:
    parts = a.split([*sizes, len(a) - sum(sizes)])
    found = [expected(part, each, row, activation) for part, each, row in zip(parts, b, bias, strict=False)]
    return torch.cat([*found, a.new_zeros(len(parts[-1]), b.shape[-1])])


def ends(sizes: list[int], device: str = "cpu") -> Tensor:
    return torch.tensor(sizes, dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("sizes", "rows", "K", "M"),
    [
        pytest.param([5, 0, 20, 1], 26, 24, 40, id="uneven"),
        pytest.param([3, 2], 9, 7, 5, id="rows-behind-the-last"),
        pytest.param([0, 0], 0, 4, 4, id="no-rows"),
        pytest.param([0, 0, 4], 4, 3, 33, id="empty-first"),
        pytest.param([4], 4, 0, 3, id="nothing-to-sum"),
    ],
)
def test_values_and_gradients(sizes: list[int], rows: int, K: int, M: int, dtype: torch.dtype, device: str) -> None:
    tensors = [normal(*shape, dtype=dtype).to(device) for shape in ((rows, K), (len(sizes), K, M))]
    wide = [each.double() for each in tensors]

    def grouped(a: Tensor, b: Tensor) -> Tensor:
        return grouped_matmul(a, b, ends(sizes, device))

    def one_by_one(a: Tensor, b: Tensor) -> Tensor:
        return eager(a, b, sizes)

    assert_as_good_as_eager(grouped(*tensors), one_by_one(*tensors), one_by_one(*wide))
    for found, other, truth in zip(
        *(gradients(grouped, *tensors), gradients(one_by_one, *tensors)), gradients(one_by_one, *wide), strict=True
    ):
        assert_as_good_as_eager(found, other, truth)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", [None, "silu", "relu", "gelu"], ids=str)
def test_bias_and_activation_follow_the_product_of_each_group(
    activation: str | None, dtype: torch.dtype, device: str
) -> None:
    sizes = [5, 0, 20, 1]
    tensors = [
        normal(*shape, dtype=dtype, seed=i).to(device) for i, shape in enumerate(((28, 24), (4, 24, 40), (4, 40)))
    ]
    wide = [each.double() for each in tensors]

    def grouped(a: Tensor, b: Tensor, bias: Tensor) -> Tensor:
        return grouped_matmul(a, b, ends(sizes, device), bias=bias, activation=activation)

    def one_by_one(a: Tensor, b: Tensor, bias: Tensor) -> Tensor:
        return of_experts(a, b, bias, sizes, activation)

    assert_as_good_as_eager(grouped(*tensors), one_by_one(*tensors), one_by_one(*wide))
    for found, other, truth in zip(
        *(gradients(grouped, *tensors), gradients(one_by_one, *tensors)), gradients(one_by_one, *wide), strict=True
    ):
        assert_as_good_as_eager(found, other, truth)


def test_bias_and_activation_have_the_gradients_of_their_values() -> None:
    tensors = [normal(*shape).requires_grad_() for shape in ((9, 4), (3, 4, 5), (3, 5))]
    run = lambda a, b, bias: grouped_matmul(a, b, ends([2, 0, 6]), bias=bias, activation="silu")  # noqa: E731
    assert torch.autograd.gradcheck(run, tensors)


def test_sums_of_16_bits_are_given_in_32(device: str) -> None:
    a, b = (normal(*shape, dtype=torch.bfloat16).to(device) for shape in ((9, 24), (2, 24, 8)))
    found = grouped_matmul(a, b, ends([4, 5], device), out_dtype=torch.float32)
    assert found.dtype == torch.float32
    assert_as_good_as_eager(found, eager(a.float(), b.float(), [4, 5]), eager(a.double(), b.double(), [4, 5]))


def test_gradients_of_experts_add_up_in_float32_over_microbatches(device: str) -> None:
    sizes = [5, 0, 10]
    total = torch.zeros(3, 8, 24, device=device)
    truth = torch.zeros(3, 8, 24, dtype=torch.float64)
    for microbatch in range(3):
        x, grad = (normal(16, size, dtype=torch.bfloat16, seed=microbatch).to(device) for size in (8, 24))
        assert grouped_matmul(x.mT, grad, ends(sizes, device), accumulate_into=total) is total
        parts = (each.double().cpu().split([*sizes, 1]) for each in (x, grad))
        truth += torch.stack([rows.mT @ of_grad for rows, of_grad in zip(*parts, strict=True)][:-1])
    assert_as_good_as_eager(total.cpu(), truth.float(), truth)


def test_gradients_of_experts_are_not_added_where_they_are_one_in_memory(device: str) -> None:
    total = torch.zeros(1, 8, 24, device=device).expand(3, 8, 24)
    a, grad = torch.ones(8, 16, device=device), torch.ones(16, 24, device=device)
    with pytest.raises(
        ValueError, match=r"grouped_matmul: accumulate_into of shape .* share their memory; give it contiguous"
    ):
        grouped_matmul(a, grad, ends([5, 0, 10], device), accumulate_into=total)
    assert not total.any()


@pytest.mark.few(1)
@pytest.mark.parametrize("way", ["descriptors", "pointers", "in-parts"])
def test_each_way_to_cut_a_product(interpreted: None, way: str) -> None:
    """A tile of a group reads its rows and columns once, whichever groups there are."""
    from weft.kernels.grouped_matmul import launch

    sizes, K, M = [17, 0, 16, 3], 48, 72
    a, b, bias = (normal(*shape, dtype=torch.bfloat16) for shape in ((40, K), (4, K, M), (4, M)))
    out, z = torch.zeros(40, M, dtype=torch.bfloat16), torch.zeros(40, M, dtype=torch.bfloat16)
    with counted_traffic() as traffic:
        launch.forward(a, b, ends(sizes), bias, None, None, None, out, z, "silu", configuration=WAYS[way])
    truth = of_experts(a.double(), b.double(), bias.double(), sizes, "silu")
    assert_as_good_as_eager(out, of_experts(a, b, bias, sizes, "silu"), truth)
    assert_as_good_as_eager(
        z, of_experts(a, b, bias, sizes, None), of_experts(*map(Tensor.double, (a, b, bias)), sizes, None)
    )
    assert traffic.stored == 2 * 36 * M * 2
    down = [-(-size // 16) for size in sizes]
    rows_read = 36 if way == "pointers" else sum(min(16, 40 - start) for start in (0, 16, 17, 33))
    assert 3 * K * rows_read * 2 + sum(down) * K * M * 2 <= traffic.loaded
    assert traffic.loaded <= 3 * K * rows_read * 2 + sum(down) * (K * M + M) * 2 + 3 * 5 * 4  # each bias, and ends


@pytest.mark.parametrize("lying", ["apart", "expanded"])
def test_offsets_of_any_strides(lying: str, device: str) -> None:
    """Offsets from a column of a table, or a single number for all groups, which leaves all but the first empty."""
    sizes = [5, 0, 10] if lying == "apart" else [5, 0, 0]
    given = ends(sizes, device)
    laid = torch.stack((given, given + 1), -1)[:, 0] if lying == "apart" else given[:1].expand(3)
    a, b = (normal(*shape, dtype=torch.float32).to(device) for shape in ((16, 8), (3, 8, 24)))
    found = gradients(lambda a, b: grouped_matmul(a, b, laid), a, b)
    assert torch.equal(grouped_matmul(a, b, laid), grouped_matmul(a, b, given))
    for one, other in zip(found, gradients(lambda a, b: grouped_matmul(a, b, given), a, b), strict=True):
        assert torch.equal(one, other)


def test_rows_of_no_group_are_zeros(device: str) -> None:
    found = grouped_matmul(torch.ones(4, 3, device=device), torch.ones(0, 3, 5, device=device), ends([], device))
    assert torch.equal(found.cpu(), torch.zeros(4, 5))


def test_gradients_by_finite_differences() -> None:
    a, b = normal(9, 4).requires_grad_(), normal(3, 4, 5).requires_grad_()
    assert torch.autograd.gradcheck(lambda a, b: grouped_matmul(a, b, ends([2, 0, 6])), (a, b))


def test_transposed_matrices_are_not_copied(device: str) -> None:
    a, b = normal(9, 24, dtype=torch.float32).to(device), normal(2, 40, 24, dtype=torch.float32).to(device).mT
    truth = eager(a.double(), b.double(), [4, 5])
    assert_as_good_as_eager(grouped_matmul(a, b, ends([4, 5], device)), eager(a, b, [4, 5]), truth)


def test_the_host_reads_no_offset(interpreted: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the path of a GPU, on which the kernels find the groups themselves."""
    from weft.kernels.grouped_matmul import function, kernel

    class Launched:
        def __getitem__(self, grid: Any) -> Any:
            return lambda *arguments, **constexprs: None

    monkeypatch.setattr(function, "can_read", lambda tensor: False)
    monkeypatch.setattr(kernel, "rows_by_group", Launched())
    monkeypatch.setattr(kernel, "weights_by_group", Launched())
    a, b, residual = (normal(*shape, dtype=torch.float32).requires_grad_() for shape in ((9, 4), (3, 4, 5), (9, 5)))
    offsets = ends([2, 0, 6])
    with NoReads():
        grouped_matmul(a, b, offsets, residual=residual).sum().backward()


@pytest.mark.exhaustive  # the sample has the losses' custom ops
def test_a_grouped_product_is_one_node_of_a_compiled_graph() -> None:
    torch._dynamo.reset()
    tensors = [normal(9, 4), normal(3, 4, 5)]
    compiled = torch.compile(
        lambda a, b: grouped_matmul(a, b, ends([2, 0, 6])) * 2, fullgraph=True, backend="aot_eager"
    )
    torch.testing.assert_close(
        gradients(compiled, *tensors), gradients(lambda a, b: eager(a, b, [2, 0, 6]) * 2, *tensors)
    )


@pytest.mark.parametrize(
    ("a", "b", "offsets", "told"),
    [
        pytest.param((9, 4), (3, 5, 6), [2, 2, 9], r"got \(9, 4\), \(3, 5, 6\) and \(3,\)", id="inner-sizes"),
        pytest.param((9, 4), (3, 4, 6), [2, 9], r"and offsets \[G\], got", id="groups"),
        pytest.param(
            (9, 4), (2, 4, 6), [5, 3], r"end at \[5, 3\], of 9 rows; give offsets that never decrease", id="falling"
        ),
        pytest.param((9, 4), (2, 4, 6), [5, 12], r"end at \[5, 12\], of 9 rows", id="behind-the-rows"),
    ],
)
def test_mismatched_operands_of_a_grouped_product_are_named(
    a: tuple[int, ...], b: tuple[int, ...], offsets: list[int], told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        grouped_matmul(normal(*a), normal(*b), torch.tensor(offsets, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"offsets in torch.int32, got torch.int64; cast them"):
        grouped_matmul(normal(9, 4), normal(1, 4, 5), torch.tensor([9]))


@pytest.mark.parametrize(
    ("more", "told"),
    [
        pytest.param(
            {"bias": normal(3, 6)}, r"a bias of shape \(2, 6\), a row for each group, got \(3, 6\)", id="bias"
        ),
        pytest.param({"activation": "elu"}, "activation is 'elu'; give one of 'gelu'", id="activation"),
        pytest.param({"out_dtype": torch.int32}, "out_dtype is torch.int32; give one of", id="dtype"),
        pytest.param({"accumulate_into": normal(2, 4, 6)}, r"give a \[K, N\], b \[N, M\] and offsets", id="sum"),
    ],
)
def test_mismatched_epilogues_of_a_grouped_product_are_named(more: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        grouped_matmul(normal(9, 4), normal(2, 4, 6), ends([3, 6]), **more)


def test_a_sum_in_place_has_no_gradient_and_nothing_after_it() -> None:
    x, grad, total = normal(9, 4), normal(9, 6), torch.zeros(2, 4, 6, dtype=torch.float64)
    with pytest.raises(ValueError, match="beside accumulate_into there is no bias"):
        grouped_matmul(x.mT, grad, ends([3, 6]), accumulate_into=total, activation="relu")
    with pytest.raises(ValueError, match="records no gradient"):
        grouped_matmul(x.requires_grad_().mT, grad, ends([3, 6]), accumulate_into=total)


def cut_rows() -> str:
    a, b = distribute(normal(8, 4), Layout(TWO, "tp: S(0)")), distribute(normal(2, 4, 5), Layout(TWO))
    with pytest.raises(LayoutError) as caught:
        grouped_matmul(a, b, ends([3, 5]))
    return str(caught.value)


def test_rows_that_are_cut_are_refused(pool: Pool) -> None:
    for message in pool.run(cut_rows, ranks=2):
        assert "the rows of a are sharded over 'tp', but the offsets count all rows; reshard a to (tp: R)" in message
