"""`measure_links`: times collectives between all ranks of this machine, and products slowed by a collective."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from weft.mesh import Layout, ProcessMesh
from weft.reshard import Topology, distribute, reshard

from .chip import Level, Rate
from .fitting import fit_line
from .rounds import FEWEST, MOST

AXIS = "ranks"
ELEMENTS = tuple(2**k for k in (6, 10, 14, 17, 20, 22))  # of a tensor in float32
PRODUCT = 512  # rows and columns of the product computed beside a collective


def measure_links(device: torch.device, seconds: float) -> tuple[tuple[Level, ...], dict[str, Rate]]:
    """Measure the level of this machine's links, and the rate of each kind of collective by a rank's received bytes.

    seconds: how long to measure, roughly. The results are equal on all ranks, because the slowest rank counts. A world
    of a single rank has links without cost.
    Communication: called by all ranks of the world together.
    """
    ranks = dist.get_world_size()
    if ranks == 1:
        return (Level(name="one process", ranks=1, bandwidth=1e12, reachable=1.0, latency=0.0),), {}
    mesh = ProcessMesh.grid(**{AXIS: ranks})
    calls: list[tuple[str, int, Callable[[], object]]] = []
    for count in ELEMENTS:
        calls += _calls(mesh, torch.zeros(ranks * max(1, count // ranks), device=device))
    times = _timed([call for *_, call in calls], seconds / 2, device)
    found: dict[str, Rate] = {}
    for kind in dict.fromkeys(kind for kind, *_ in calls):
        of_kind = [(nbytes, each) for (name, nbytes, _), each in zip(calls, times, strict=True) if name == kind]
        found[kind] = fit_line([nbytes for nbytes, _ in of_kind], [each for _, each in of_kind])
    link = Topology.measure(mesh, device.type).link(AXIS)
    level = Level(
        name="NVLink or PCIe of this machine" if device.type == "cuda" else "gloo on this machine",
        bandwidth=min(link.bandwidth, 1e12),
        reachable=1.0,
        latency=link.latency,
        slowdown=_slowdown(device, seconds / 4),
    )
    return (level,), found


def _calls(mesh: ProcessMesh, whole: Tensor) -> list[tuple[str, int, Callable[[], object]]]:
    """(kind, a rank's received bytes, the call) of each kind of collective on `whole`, a tensor of a single dim."""
    ranks, nbytes = mesh.size, whole.nbytes
    layouts = {name: Layout(mesh, f"{AXIS}: {name}") for name in ("R", "S(0)", "P(sum)")}
    sharded, summed = (distribute(whole, layouts[name]) for name in ("S(0)", "P(sum)"))
    square = distribute(whole.view(ranks, -1), layouts["S(0)"])
    across = Layout(mesh, f"{AXIS}: S(1)")
    rank = dist.get_rank()

    def message() -> None:
        if rank == 0:
            dist.send(whole, 1)
        elif rank == 1:
            dist.recv(whole, 0)

    received = nbytes * (ranks - 1) // ranks
    return [
        ("all-gather", received, lambda: reshard(sharded, layouts["R"]).to_local()),
        ("reduce-scatter", received, lambda: reshard(summed, layouts["S(0)"]).to_local()),
        ("all-reduce", 2 * received, lambda: reshard(summed, layouts["R"]).to_local()),
        ("all-to-all", received // ranks, lambda: reshard(square, across).to_local()),
        ("recv", nbytes, message),
    ]


def _timed(calls: list[Callable[[], object]], seconds: float, device: torch.device) -> list[float]:
    """The lower quartile of each call's seconds, on the slowest rank. A barrier comes before each call."""
    start, found = time.monotonic(), [list[float]() for _ in calls]
    ends = torch.zeros(1, device=device)
    for turn in range(MOST + 1):
        for times, call in zip(found, calls, strict=True):
            dist.barrier()
            _wait(device)
            begin = time.perf_counter()
            call()
            _wait(device)
            if turn:
                times.append(time.perf_counter() - begin)
        ends.fill_(float(turn >= FEWEST and time.monotonic() - start > seconds))
        dist.all_reduce(ends, dist.ReduceOp.MAX)
        if ends.item():
            break
    quartiles = torch.tensor(
        [statistics.quantiles(times, n=4, method="inclusive")[0] for times in found], device=device
    )
    dist.all_reduce(quartiles, dist.ReduceOp.MAX)
    return quartiles.tolist()


def _slowdown(device: torch.device, seconds: float) -> float:
    """The share of a product's speed lost while an all-reduce runs beside the product."""
    a = torch.randn(PRODUCT, PRODUCT, device=device)
    whole = torch.zeros(2**20, device=device)

    def product() -> None:
        for _ in range(4):
            a @ a

    def both() -> None:
        work = dist.all_reduce(whole, async_op=True)
        product()
        work.wait()

    def collective() -> None:
        dist.all_reduce(whole)

    of_product, of_collective, of_both = _timed([product, collective, both], seconds, device)
    return min(1.0, max(0.0, (of_both - of_product) / of_collective))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
