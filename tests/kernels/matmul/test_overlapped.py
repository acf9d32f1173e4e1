"""all_gather_matmul and matmul_reduce_scatter against reshard and matmul: values, gradients, layouts, and transfers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from weft.kernels import all_gather_matmul, matmul, matmul_reduce_scatter
from weft.kernels.matmul.sharded import overlapped
from weft.mesh import Layout, LayoutError, ProcessMesh
from weft.reshard import distribute, layout_of, reshard, to_global

from tests.kernels.cases import FOUR, GRID, TWO, normal
from tests.support.pool import Pool

# mesh, layout of a [3, 5, 8] and of b [8, 12]
GATHERED = {
    "2": (TWO, "tp: S(1)", "tp: S(1)"),
    "4-uneven": (FOUR, "tp: S(1)", "tp: S(1)"),
    "4-empty": (FOUR, "tp: S(0)", "tp: S(1)"),
    "dp-and-tp": (GRID, "dp: S(0), tp: S(1)", "tp: S(1)"),
    "one-dim": (GRID, "dp: S(1), tp: S(1)", "tp: S(1)"),
}
SCATTERED = {
    "2": (TWO, "tp: S(2)", "tp: S(0)"),
    "4": (FOUR, "tp: S(2)", "tp: S(0)"),
    "dp-and-tp": (GRID, "dp: S(0), tp: S(2)", "tp: S(0)"),
    "one-dim": (GRID, "dp: S(1), tp: S(2)", "tp: S(0)"),
}


def told(run: Callable[..., Tensor], a: Tensor, b: Tensor, upstream: Layout | None) -> list[tuple[str, Tensor]]:
    a, b = a.detach().requires_grad_(), b.detach().requires_grad_()
    output = run(a, b)
    grad = distribute(normal(*output.shape, seed=7).to(output.device, output.dtype), upstream or layout_of(output))
    output.backward(grad)
    return [(str(layout_of(each)), to_global(each.detach())) for each in (output, a.grad, b.grad)]


def operands(
    mesh: ProcessMesh, of_a: str, of_b: str, dtype: torch.dtype, device: str = "cpu"
) -> tuple[DTensor, DTensor]:
    return (
        distribute(normal(3, 5, 8).to(device, dtype), Layout(mesh, of_a)),
        distribute(normal(8, 12).to(device, dtype), Layout(mesh, of_b)),
    )


def gathered(case: str, dtype: torch.dtype) -> None:
    is_the_gather_and_the_product(*operands(*GATHERED[case], dtype))


def is_the_gather_and_the_product(a: DTensor, b: DTensor) -> None:
    found = told(all_gather_matmul, a, b, None)

    def pair(a: Tensor, b: Tensor) -> Tensor:
        return matmul(reshard(a, placements=layout_of(a).replace(tp="R")), b)

    same(found, told(pair, a, b, None), a.dtype)


def scattered(case: str, dtype: torch.dtype) -> None:
    is_the_product_and_the_reduction(*operands(*SCATTERED[case], dtype))


def is_the_product_and_the_reduction(a: DTensor, b: DTensor) -> None:
    found = told(matmul_reduce_scatter, a, b, None)
    wanted = Layout(layout_of(a).mesh, found[0][0])

    def pair(a: Tensor, b: Tensor) -> Tensor:
        return reshard(matmul(a, b), placements=wanted)

    same(found, told(pair, a, b, None), a.dtype)


def same(found: list[tuple[str, Tensor]], expected: list[tuple[str, Tensor]], dtype: torch.dtype) -> None:
    close = {} if dtype == torch.float64 else {"rtol": 3e-2, "atol": 3e-2 * float(expected[1][1].abs().max())}
    for one, other in zip(found, expected, strict=True):
        assert one[0] == other[0]
        torch.testing.assert_close(one[1], other[1], **close)


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", GATHERED)
def test_a_gather_in_steps_is_the_gather_and_the_product(pool: Pool, case: str, dtype: torch.dtype) -> None:
    pool.run(gathered, case, dtype, ranks=GATHERED[case][0].size)


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", SCATTERED)
def test_a_reduction_in_steps_is_the_product_and_the_reduction(pool: Pool, case: str, dtype: torch.dtype) -> None:
    pool.run(scattered, case, dtype, ranks=SCATTERED[case][0].size)


class Observed:
    """Records this rank's events in order: a part sent, with its bytes, a part waited for, a product."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.sent_bytes = 0

    def start(self, operations: list[dist.P2POp]) -> list[Any]:
        for each in operations:
            if each.op is dist.isend:
                self.events.append("send")
                self.sent_bytes += each.tensor.nbytes
        return [Waited(work, self) for work in START(operations)]

    def multiply(self, a: Tensor, b: Tensor) -> Tensor:
        self.events.append("product")
        return PRODUCT(a, b)


class Waited:
    def __init__(self, work: dist.Work, observed: Observed) -> None:
        self.work, self.observed = work, observed

    def wait(self) -> None:
        self.work.wait()
        self.observed.events.append("wait")


START, PRODUCT = dist.batch_isend_irecv, overlapped._product


def observed(run: Callable[[], Any]) -> Observed:
    found = Observed()
    with (
        patch.object(dist, "batch_isend_irecv", found.start),
        patch.object(overlapped, "_product", found.multiply),
    ):
        run()
    return found


def what_travels() -> tuple[list[str], int, list[str], int, int]:
    a, b = distribute(normal(4, 8, 8), Layout(FOUR, "tp: S(1)")), distribute(normal(8, 12), Layout(FOUR, "tp: S(1)"))
    gather = observed(lambda: all_gather_matmul(a, b))
    c, d = distribute(normal(4, 8, 8), Layout(FOUR, "tp: S(2)")), distribute(normal(8, 12), Layout(FOUR, "tp: S(0)"))
    scatter = observed(lambda: matmul_reduce_scatter(c, d))
    a, b = a.detach().requires_grad_(), b.detach().requires_grad_()
    output = all_gather_matmul(a, b)
    backward = observed(lambda: output.sum().backward())
    return gather.events, gather.sent_bytes, scatter.events, scatter.sent_bytes, backward.sent_bytes


def test_transfers_run_beside_the_products_and_bring_the_bytes_of_the_collectives(pool: Pool) -> None:
    part, of_output = 4 * 2 * 8 * 8, 4 * 2 * 12 * 8  # bytes of a rank's rows, and of its part of the output
    for gather, gather_bytes, scatter, scatter_bytes, backward_bytes in pool.run(what_travels, ranks=4):
        assert gather == ["send"] * 3 + ["product", *["wait", "wait", "product"] * 3]
        assert gather_bytes == 3 * part
        assert scatter == [*["product", "send"] * 3, "product", *["wait"] * 6]
        assert scatter_bytes == 3 * of_output
        assert backward_bytes == 3 * part + 3 * part
        assert Counter(gather)["product"] == Counter(scatter)["product"] == 4


def refused() -> list[str]:
    swapped = Layout.from_spec(GRID, [(), ("tp", "dp"), ()])
    both = Layout(GRID, "dp: S(0), tp: S(1)"), Layout.from_spec(GRID, [(), ("dp", "tp")])
    b = distribute(normal(8, 12), Layout(GRID, "tp: S(1)"))
    messages = []
    for call in (
        lambda: all_gather_matmul(distribute(normal(3, 8, 8), swapped), b),
        lambda: all_gather_matmul(distribute(normal(3, 8, 8), both[0]), distribute(normal(8, 12), both[1])),
    ):
        with pytest.raises(LayoutError) as caught:
            call()
        messages.append(str(caught.value))
    return messages


def test_layouts_that_do_not_travel_in_steps_are_refused(pool: Pool) -> None:
    for order, several in pool.run(refused, ranks=4):
        assert "where 'tp' is not the innermost axis of its dim; reshard a to (" in order
        assert "would communicate over 'dp' and 'tp'; reshard one of them" in several


def test_plain_tensors_are_matmuls() -> None:
    a, b = normal(3, 5, 8), normal(8, 12)
    assert torch.equal(all_gather_matmul(a, b), matmul(a, b))
    assert torch.equal(matmul_reduce_scatter(a, b), matmul(a, b))
    with pytest.raises(ValueError, match="dim 2 is none of the rows of a 3-d output; give 0 to 1"):
        matmul_reduce_scatter(a, b, dim=2)


def compiled() -> None:
    torch._dynamo.reset()
    for run, case in ((all_gather_matmul, GATHERED["2"]), (matmul_reduce_scatter, SCATTERED["2"])):
        a, b = operands(*case, torch.float64)
        traced = torch.compile(run, fullgraph=True, backend="aot_eager")
        same(told(traced, a, b, None), told(run, a, b, None), torch.float64)


@pytest.mark.exhaustive  # the sample has the losses' custom ops
def test_each_is_one_node_of_a_compiled_graph(pool: Pool) -> None:
    pool.run(compiled, ranks=2)


def on_rank(rank: int, ranks: int, device: str, store: str) -> None:
    """Both ops over all ranks, each rank with its own GPU where `device` is "cuda"."""
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = {"cuda": "nccl", "cpu": "gloo"}[device]
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=ranks)
    try:
        mesh = ProcessMesh.grid(tp=ranks)
        for dtype in (torch.float64, torch.bfloat16):
            is_the_gather_and_the_product(*operands(mesh, "tp: S(1)", "tp: S(1)", dtype, device))
            is_the_product_and_the_reduction(*operands(mesh, "tp: S(2)", "tp: S(0)", dtype, device))
    finally:
        dist.destroy_process_group()


GPUS = torch.cuda.device_count()


@pytest.mark.gpu
@pytest.mark.skipif(GPUS < 2, reason=f"takes two GPUs or more, one for each rank; there are {GPUS}")
def test_on_every_gpu(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(on_rank, (GPUS, "cuda", str(tmp_path / "store")), nprocs=GPUS)


@pytest.mark.exhaustive  # the sample uses the pool's worker processes
def test_the_programs_of_gpus_run_on_two_processes(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(on_rank, (2, "cpu", str(tmp_path / "store")), nprocs=2)
