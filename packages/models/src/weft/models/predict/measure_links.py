"""`measure_links`: times collectives between all ranks of this machine, and products slowed by a collective."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from weft.mesh import Layout, ProcessMesh
from weft.reshard import GradientSync, Topology, distribute, reshard

from .chip import Level, Rate
from .fitting import fit_line
from .rounds import FEWEST, MOST

AXIS = "ranks"
ELEMENTS = tuple(2**k for k in (6, 10, 14, 17, 20, 22))  # of a tensor in float32
PRODUCT = 512  # rows and columns of the product computed beside a collective
GRADIENTS = "all-reduce of gradients"  # on a CPU in memory that processes share, and so faster than an all-reduce
COPY = "copy"  # into a bucket: a part of the sum of gradients that a trace has as an op


@dataclass(frozen=True, slots=True)
class MeasuredLinks:
    """The links between all ranks of this machine, for the fields of `Chip`."""

    levels: tuple[Level, ...]
    collectives: dict[str, Rate]
    collective_host_seconds: float


def measure_links(device: torch.device, seconds: float) -> MeasuredLinks:
    """Measure the level of this machine's links, and the rate of each kind of collective by a rank's received bytes.

    On a CPU, the calling thread first works for the collective, and meanwhile can run no op. The seconds of this work
    are `collective_host_seconds`, equal for all kinds: the median over kinds, each with the fewest bytes. The rates in
    `collectives` are of the time after this work. All-reduced gradients have a rate of their own on a CPU, which
    `transfer` in price.py prefers.
    seconds: how long to measure, roughly. The results are equal on all ranks, because the slowest rank counts. A world
    of a single rank has links without cost.
    Communication: called by all ranks of the world together.
    """
    ranks = dist.get_world_size()
    if ranks == 1:
        return MeasuredLinks((Level(name="one process", ranks=1, bandwidth=1e12, reachable=1.0, latency=0.0),), {}, 0.0)
    mesh = ProcessMesh.grid(**{AXIS: ranks})
    calls: list[tuple[str, int, Callable[[], object]]] = []
    for count in ELEMENTS:
        calls += _calls(mesh, torch.zeros(ranks * max(1, count // ranks), device=device))
    times, in_thread = _timed([call for *_, call in calls], seconds / 2, device)
    of_kinds: dict[str, list[tuple[int, float]]] = {}  # received bytes and seconds of each call
    shortest: dict[str, float] = {}  # the thread's seconds in the call of the fewest bytes
    for (kind, nbytes, _), whole, of_thread in zip(calls, times, in_thread, strict=True):
        of_kinds.setdefault(kind, []).append((nbytes, whole))
        shortest.setdefault(kind, of_thread)
    if copies := of_kinds.pop(COPY, None):
        sums = zip(of_kinds[GRADIENTS], copies, strict=True)
        of_kinds[GRADIENTS] = [(nbytes, max(0.0, whole - copy)) for (nbytes, whole), (_, copy) in sums]
    own = [shortest[kind] for kind in of_kinds if kind != GRADIENTS]
    host = statistics.median(own) if device.type == "cpu" else 0.0
    found: dict[str, Rate] = {}
    for kind, of_kind in of_kinds.items():
        line = fit_line([nbytes for nbytes, _ in of_kind], [each for _, each in of_kind])
        found[kind] = replace(line, seconds=max(0.0, line.seconds - host))
    link = Topology.measure(mesh, device.type).link(AXIS)
    level = Level(
        name="NVLink or PCIe of this machine" if device.type == "cuda" else "gloo on this machine",
        bandwidth=min(link.bandwidth, 1e12),
        reachable=1.0,
        latency=link.latency,
        slowdown=_slowdown(device, seconds / 4),
    )
    return MeasuredLinks((level,), found, host)


def _calls(mesh: ProcessMesh, whole: Tensor) -> list[tuple[str, int, Callable[[], object]]]:
    """(kind, a rank's received bytes, the call) of each kind of collective on `whole`, a tensor of a single dim.

    The kind `COPY`, on a CPU, is the copy into a bucket that the sum of gradients begins with.
    """
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
    calls: list[tuple[str, int, Callable[[], object]]] = [
        ("all-gather", received, lambda: reshard(sharded, layouts["R"]).to_local()),
        ("reduce-scatter", received, lambda: reshard(summed, layouts["S(0)"]).to_local()),
        ("all-reduce", 2 * received, lambda: reshard(summed, layouts["R"]).to_local()),
        ("all-to-all", received // ranks, lambda: reshard(square, across).to_local()),
        ("recv", nbytes, message),
    ]
    if whole.is_cpu:
        trained = nn.ParameterList([nn.Parameter(distribute(whole, layouts["R"]))])
        sync = GradientSync(trained)

        def sum_gradients() -> None:
            trained[0].grad = summed
            sync.wait()

        calls += [
            (GRADIENTS, 2 * received, sum_gradients),
            (COPY, 2 * received, lambda: torch.cat([whole])),
        ]
    return calls


def _timed(calls: list[Callable[[], object]], seconds: float, device: torch.device) -> tuple[list[float], list[float]]:
    """The median of each call's seconds, and of the calling thread's seconds on a core, on the slowest rank.

    A barrier comes before each call. Not a lower quartile, as for ops: a rank wakes up late now and then, and a step
    waits for each of its collectives.
    """
    start, found, in_thread = time.monotonic(), [list[float]() for _ in calls], [list[float]() for _ in calls]
    ends = torch.zeros(1, device=device)
    for turn in range(MOST + 1):
        for times, of_thread, call in zip(found, in_thread, calls, strict=True):
            dist.barrier()
            _wait(device)
            begin, begin_of_thread = time.perf_counter(), time.thread_time()
            call()
            _wait(device)
            if turn:
                times.append(time.perf_counter() - begin)
                of_thread.append(time.thread_time() - begin_of_thread)
        ends.fill_(float(turn >= FEWEST and time.monotonic() - start > seconds))
        dist.all_reduce(ends, dist.ReduceOp.MAX)
        if ends.item():
            break
    medians = torch.tensor([[statistics.median(each) for each in times] for times in (found, in_thread)], device=device)
    dist.all_reduce(medians, dist.ReduceOp.MAX)
    whole, of_threads = medians.tolist()
    return whole, of_threads


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

    (of_product, of_collective, of_both), _ = _timed([product, collective, both], seconds, device)
    return min(1.0, max(0.0, (of_both - of_product) / of_collective))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
