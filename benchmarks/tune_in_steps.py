"""`torchrun --nproc-per-node 8 -m benchmarks.tune_in_steps`: measures which products of sequence parallelism are faster in steps.

Each product and its gradients, in steps and as a collective and a product, in turn on all ranks; what the slowest of them took goes into
the table that `weft.kernels` reads, by which models choose. What was measured before stays in it, and what the same version measured on
these devices is not measured again. On each count of ranks a run of its own.
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
from weft.kernels.matmul.configurations import write
from weft.kernels.matmul.sharded.choice import TABLE, Form, Product, Timed, chip_of, read
from weft.mesh import Layout, ProcessMesh
from weft.reshard import distribute, layout_of, reshard

from benchmarks.products import LLAMA_8B, LLAMA_70B, TOKENS
from benchmarks.timing import Clock, Device, in_turn

VOCABULARY = 128256
# Rows of a weight and its columns, of the layers whose products may travel: those that reduce their output, and the head.
PRODUCTS: tuple[tuple[Form, int, int], ...] = (
    *(("matmul_reduce_scatter", *sizes[name]) for sizes in (LLAMA_8B, LLAMA_70B) for name in ("o", "down")),
    *(("all_gather_matmul", VOCABULARY, sizes["o"][1]) for sizes in (LLAMA_8B, LLAMA_70B)),
)
STEPS, PAIR = "in steps", "a collective and a product"


def timed(
    form: Form, M: int, N: int, K: int, device: str, dtype: torch.dtype, clock: Clock, where: str, rounds: int = 10
) -> Timed:
    """Of x [1, M, K] and a weight [N, K], over all ranks. Called on each. Raises AssertionError where the two differ."""
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
        assert error < 2**-6, f"{form}: in steps it differs by {error:.3g} of the largest"
    found = in_turn(ways, clock, rounds=rounds, replayed=())
    slowest = torch.tensor([found[STEPS].median, found[PAIR].median], device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    of = Product.of(form, chip_of(slowest.device), dtype, dist.get_world_size(), M, N, K)
    return Timed(of=of, seconds=float(slowest[0]), pair_seconds=float(slowest[1]), where=where)


def tune(table: Path = TABLE) -> None:
    """Raises RuntimeError without a GPU."""
    if not torch.cuda.is_available():
        raise RuntimeError("there is no GPU to measure on; run this where there are several")
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
    products: Iterable[tuple[Form, int, int]] = PRODUCTS,
) -> None:
    """Adds what is found to the table, at once. Called on each rank."""
    rows, chip = read(table), chip_of(torch.device(device))
    for M, (form, N, K) in itertools.product(tokens, products):
        known = rows.get(Product.of(form, chip, dtype, dist.get_world_size(), M, N, K))
        if (
            known is not None and known.where == where
        ):  # on all ranks alike: they have read one table, and add the same rows
            continue
        row = timed(form, M, N, K, device, dtype, clock, where)
        rows[row.of] = row
        if dist.get_rank() == 0:
            write(rows, table)
            print(f"{row.pair_seconds / row.seconds:6.1%} of the pair's speed: {row.of}", flush=True)


if __name__ == "__main__":
    tune()
