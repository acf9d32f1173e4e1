"""The links of a mesh's axes, given by the caller or measured."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from weft.mesh import ProcessMesh

from ..planning.links import UNUSED, Link, Links
from .collectives import all_gather_single
from .dtensor import as_process_mesh
from .groups import device_mesh

MEASURED_BYTES = (2**12, 2**16, 2**20, 2**23)  # of a part: from what latency decides to what bandwidth decides
WARMUP, ROUNDS = 2, 7


class Topology(Links):
    """The links of a mesh's axes: Topology({"dp": Link(5e-6, 50e9), "tp": Link(2e-6, 400e9)}).

    between: the link that joins ranks of different meshes; absent: the slowest of the axes' links.
    """

    __slots__ = ()

    @classmethod
    def measure(
        cls, mesh: ProcessMesh | DeviceMesh, device_type: str | None = None, *, sizes: Sequence[int] = MEASURED_BYTES
    ) -> Topology:
        """The topology fitted to all-gathers of `sizes` bytes a part along each axis, all groups of an axis at once.

        The slowest group decides, by the median of its rounds; the fit is least squares in which no number is negative.
        Communication: all ranks of the world call it, and get equal topologies.
        Raises ValueError for fewer than two different sizes.
        """
        backend = "cuda" if dist.get_backend() == "nccl" else "cpu"
        device = device_type or str(getattr(mesh, "device_type", backend))
        mesh = as_process_mesh(mesh)
        if len(set(sizes)) < 2 or min(sizes) < 1:
            raise ValueError(f"sizes {tuple(sizes)} fit no line; give two different numbers of bytes at least")
        on = device_mesh(mesh, device)
        seconds = torch.zeros(mesh.ndim, len(sizes), dtype=torch.float64)
        if dist.get_rank() in mesh:
            for number, (_axis, size) in enumerate(zip(mesh.axis_names, mesh.shape, strict=True)):
                if size > 1:
                    seconds[number] = _time_all_gathers(on.get_group(number), size, sizes, device)
        seconds = seconds.to(device)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        return cls(
            {
                axis: _fitted([(size - 1) * nbytes for nbytes in sizes], times, size - 1) if size > 1 else UNUSED
                for axis, size, times in zip(mesh.axis_names, mesh.shape, seconds.tolist(), strict=True)
            }
        )


def _time_all_gathers(group: dist.ProcessGroup, ranks: int, sizes: Sequence[int], device_type: str) -> torch.Tensor:
    """Median seconds of an all-gather of each size, the sizes taken in turn."""
    parts = [torch.zeros(nbytes, dtype=torch.uint8, device=device_type) for nbytes in sizes]
    wholes = [part.new_empty(ranks * part.numel()) for part in parts]
    times: list[list[float]] = [[] for _ in sizes]
    for turn in range(WARMUP + ROUNDS):
        for taken, part, whole in zip(times, parts, wholes, strict=True):
            dist.barrier(group)
            _finish(device_type)
            start = time.perf_counter()
            all_gather_single(whole, part, group)
            _finish(device_type)
            if turn >= WARMUP:
                taken.append(time.perf_counter() - start)
    return torch.tensor([statistics.median(taken) for taken in times], dtype=torch.float64)


def _finish(device_type: str) -> None:
    if device_type == "cuda":
        torch.cuda.synchronize()


def _fitted(nbytes: Sequence[int], seconds: Sequence[float], messages: int) -> Link:
    """latency * messages + bytes / bandwidth through the times, by least squares of relative errors.

    Relative, as the longest times would decide alone otherwise. A negative number becomes 0, and the other is fitted again.
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
