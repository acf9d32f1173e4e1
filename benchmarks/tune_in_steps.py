"""Measures which products of sequence parallelism are faster in steps, and writes the table which the models use.

    torchrun --nproc-per-node 8 -m benchmarks.tune_in_steps

Each product and the gradients are computed in two ways, in turn on all ranks: in steps, and as a pair of a collective
and a product. The time of the slowest rank is added to the table of `weft.kernels`. Rows measured earlier stay in the
table. Rows measured by the same version on the same devices are not measured again. Run this once for each number of
ranks.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from weft.kernels import all_gather_matmul, linear, matmul_reduce_scatter
from weft.kernels.launching.launched import write_table
from weft.kernels.matmul.sharded.choice import TABLE, OverlappedOp, ShardedProduct, Timing, chip_name
from weft.mesh import Layout, ProcessMesh
from weft.reshard import distribute, layout_of, reshard

from benchmarks.products import LLAMA_8B, LLAMA_70B, TOKENS
from benchmarks.timing import Clock, Device, in_turn

VOCABULARY = 128256
# Rows and columns of the weights of layers which may run in steps: layers which reduce their output, and the head.
PRODUCTS: tuple[tuple[OverlappedOp, int, int], ...] = (
    *(("matmul_reduce_scatter", *sizes[name]) for sizes in (LLAMA_8B, LLAMA_70B) for name in ("o", "down")),
    *(("all_gather_matmul", VOCABULARY, sizes["o"][1]) for sizes in (LLAMA_8B, LLAMA_70B)),
)
STEPS, PAIR = "in steps", "a collective and a product"


def timed(
    form: OverlappedOp,
    M: int,
    N: int,
    K: int,
    device: str,
    dtype: torch.dtype,
    clock: Clock,
    where: str,
    rounds: int = 10,
) -> Timing:
    """Times a product of x [1, M, K] and a weight [N, K] in both ways. Every rank must call this.

    Raises AssertionError if the results of the two ways differ.
    """
    mesh = ProcessMesh.grid(tp=dist.get_world_size())
    generator = torch.Generator(device).manual_seed(0)
    x, weight = (torch.randn(*shape, device=device, generator=generator).to(dtype) for shape in ((1, M, K), (N, K)))
    cut = ("tp: S(1)", "tp: S(0)") if form == "all_gather_matmul" else ("tp: S(2)", "tp: S(1)")
    given = [distribute(each, Layout(mesh, how)).requires_grad_() for each, how in zip((x, weight), cut, strict=True)]
    whole, scattered = Layout(mesh), Layout(mesh, "tp: S(1)")

    def steps(x: DTensor, weight: DTensor) -> Tensor:
        return (
            all_gather_matmul(x, weight.mT)
            if form == "all_gather_matmul"
            else matmul_reduce_scatter(x, weight.mT, dim=1)
        )

    def pair(x: DTensor, weight: DTensor) -> Tensor:
        if form == "all_gather_matmul":
            return linear(reshard(x, placements=whole), weight)
        return reshard(linear(x, weight), placements=scattered)

    def both(run: Callable[[DTensor, DTensor], Tensor]) -> Callable[[], list[Tensor]]:
        output = run(*given)
        upstream = distribute(torch.ones(output.shape, dtype=dtype, device=device), layout_of(output))

        def way() -> list[Tensor]:
            output = run(*given)
            return [output, *torch.autograd.grad(output, given, upstream)]

        return way

    ways = {STEPS: both(steps), PAIR: both(pair)}
    for one, other in zip(*(way() for way in ways.values()), strict=True):
        error = (one.to_local() - other.to_local()).abs().max() / other.to_local().abs().max()
        assert error < 2**-6, f"{form}: in steps the result differs by {error:.3g} of the largest"
    found = in_turn(ways, clock, rounds=rounds, replayed=())
    slowest = torch.tensor([found[STEPS].median, found[PAIR].median], device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    of = ShardedProduct.of(form, chip_name(slowest.device), dtype, dist.get_world_size(), M, N, K)
    return Timing(of=of, seconds=float(slowest[0]), pair_seconds=float(slowest[1]), where=where)


def tune(table: Path = TABLE) -> None:
    """Measures all products on this machine's GPUs, and adds the rows to `table`. Raises RuntimeError without a GPU."""
    if not torch.cuda.is_available():
        raise RuntimeError("there is no GPU to measure on; run this on a machine with several GPUs")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    measure(table, "cuda", torch.bfloat16, Device(), f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    dist.destroy_process_group()


def measure(
    table: Path,
    device: str,
    dtype: torch.dtype,
    clock: Clock,
    where: str,
    tokens: Iterable[int] = TOKENS,
    products: Iterable[tuple[OverlappedOp, int, int]] = PRODUCTS,
) -> None:
    """Times the products, and adds each row to the table at once. Every rank must call this."""
    rows, chip = Timing.read(table), chip_name(torch.device(device))
    for M, (form, N, K) in itertools.product(tokens, products):
        known = rows.get(ShardedProduct.of(form, chip, dtype, dist.get_world_size(), M, N, K))
        # All ranks agree: all read the same table, and add the same rows.
        if known is not None and known.where == where:
            continue
        row = timed(form, M, N, K, device, dtype, clock, where)
        rows[row.of] = row
        if dist.get_rank() == 0:
            write_table(rows, table)
            print(f"{row.pair_seconds / row.seconds:6.1%} of the pair's speed: {row.of}", flush=True)


if __name__ == "__main__":
    tune()
