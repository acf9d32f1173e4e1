"""`Topology`: the bandwidth and latency of each mesh axis, given or measured; `plan` prices steps by them."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from weft.mesh import ProcessMesh

from ..planning.moves import UNUSED, Link, Links
from ..world.groups import device_mesh
from .collectives import all_gather_single
from .dtensor import as_process_mesh

MEASURED_BYTES = (2**12, 2**16, 2**20, 2**23)  # a rank's part of an all-gather: latency-bound to bandwidth-bound
WARMUP, ROUNDS = 2, 7  # rounds before timing, and timed rounds


class Topology(Links):
    """The links of a mesh's axes: Topology({"dp": Link(5e-6, 50e9), "tp": Link(2e-6, 400e9)}).

    The second argument, `between`, is the link between ranks of different meshes; by default the slowest axis's link.
    Made by users, by `measure`, and by weft.models for a chip (predict/chip.py).
    """

    __slots__ = ()

    @classmethod
    def measure(
        cls, mesh: ProcessMesh | DeviceMesh, device_type: str | None = None, *, sizes: Sequence[int] = MEASURED_BYTES
    ) -> Topology:
        """Times all-gathers along each axis and fits a Link to the times; all groups of an axis run at once.

        device_type: where the gathered tensors are. None means the DeviceMesh's device; for a ProcessMesh, "cuda" with
            NCCL and "cpu" otherwise.
        sizes: bytes of each rank's part; every size is timed in an all-gather of its own.
        For each size, every group takes the median time of several rounds, and the slowest group's median counts. The
        link is fitted by least squares; a negative latency or time per byte counts as 0.
        Communication: all ranks of the world call `measure`, as `weft measure` does, and get equal topologies.
        Raises ValueError for fewer than two different sizes, or a size below 1 byte.
        """
        backend = "cuda" if dist.get_backend() == "nccl" else "cpu"
        device = device_type or str(getattr(mesh, "device_type", backend))
        mesh = as_process_mesh(mesh)
        if len(set(sizes)) < 2 or min(sizes) < 1:
            raise ValueError(
                f"sizes is {tuple(sizes)}; give two different numbers of bytes at least, each 1 or more, to fit a link"
            )
        torch_mesh = device_mesh(mesh, device)
        seconds = torch.zeros(mesh.ndim, len(sizes), dtype=torch.float64)
        if dist.get_rank() in mesh:
            for number, (_axis, size) in enumerate(zip(mesh.axis_names, mesh.shape, strict=True)):
                if size > 1:
                    seconds[number] = _time_all_gathers(torch_mesh.get_group(number), size, sizes, device)
        seconds = seconds.to(device)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        return cls(
            {
                axis: _fit_link([(size - 1) * nbytes for nbytes in sizes], times, size - 1) if size > 1 else UNUSED
                for axis, size, times in zip(mesh.axis_names, mesh.shape, seconds.tolist(), strict=True)
            }
        )


def _time_all_gathers(group: dist.ProcessGroup, ranks: int, sizes: Sequence[int], device_type: str) -> torch.Tensor:
    """Median seconds of an all-gather of each size. Each round times all sizes, so a disturbance hits all alike."""
    parts = [torch.zeros(nbytes, dtype=torch.uint8, device=device_type) for nbytes in sizes]
    outputs = [part.new_empty(ranks * part.numel()) for part in parts]
    times: list[list[float]] = [[] for _ in sizes]
    for turn in range(WARMUP + ROUNDS):
        for samples, part, gathered in zip(times, parts, outputs, strict=True):
            dist.barrier(group)
            _synchronize(device_type)
            start = time.perf_counter()
            all_gather_single(gathered, part, group)
            _synchronize(device_type)
            if turn >= WARMUP:
                samples.append(time.perf_counter() - start)
    return torch.tensor([statistics.median(samples) for samples in times], dtype=torch.float64)


def _synchronize(device_type: str) -> None:
    if device_type == "cuda":
        torch.cuda.synchronize()


def _fit_link(nbytes: Sequence[int], seconds: Sequence[float], messages: int) -> Link:
    """The link with seconds = latency * messages + bytes / bandwidth, by least squares of relative errors.

    Absolute errors would let the longest times decide alone. A negative latency or time per byte is set to 0, and the
    remaining number is fitted again.
    """
    rows = [(messages / t, n / t) for n, t in zip(nbytes, seconds, strict=True)]
    aa, ab, bb = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    a, b = sum(row[0] for row in rows), sum(row[1] for row in rows)
    determinant = aa * bb - ab * ab
    latency, per_byte = (a * bb - b * ab) / determinant, (b * aa - a * ab) / determinant
    if latency < 0:
        latency, per_byte = 0.0, b / bb
    if per_byte <= 0:
        return Link(a / aa, math.inf)
    return Link(latency, 1 / per_byte)
