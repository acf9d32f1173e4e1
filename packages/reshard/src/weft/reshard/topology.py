"""What a message costs on each axis of a mesh: given by the caller, or measured."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from weft.mesh import ProcessMesh

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

MEASURED_BYTES = (2**12, 2**16, 2**20, 2**23)  # of a part: from what latency decides to what bandwidth decides
WARMUP, ROUNDS = 2, 7


@dataclass(frozen=True, slots=True)
class Link:
    """How a rank receives along an axis. latency: seconds a message; bandwidth: bytes a second."""

    latency: float
    bandwidth: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.latency) and self.latency >= 0):
            raise ValueError(f"a link's latency is {self.latency!r} s; give a finite number of seconds >= 0")
        if not self.bandwidth > 0:
            raise ValueError(f"a link's bandwidth is {self.bandwidth!r} bytes/s; give a number > 0")


UNUSED = Link(0.0, math.inf)  # of an axis of size 1: nothing travels on it


@dataclass(frozen=True, slots=True, init=False)
class Topology:
    """The links of a mesh's axes: Topology({"dp": Link(5e-6, 50e9), "tp": Link(2e-6, 400e9)}).

    between: the link that joins ranks of different meshes; absent: the slowest of the axes' links.
    """

    links: tuple[tuple[str, Link], ...]
    between: Link

    def __init__(self, links: Mapping[str, Link], between: Link | None = None) -> None:
        if not links:
            raise ValueError("a Topology without axes; give the link of each axis, as in {'tp': Link(2e-6, 400e9)}")
        for axis, link in links.items():
            if not isinstance(link, Link):
                raise ValueError(f"axis {axis!r} has {link!r} for a link; give Link(latency, bandwidth)")
        object.__setattr__(self, "links", tuple(sorted(links.items(), key=lambda named: named[0])))
        object.__setattr__(
            self, "between", between or min(links.values(), key=lambda link: (link.bandwidth, -link.latency))
        )

    def __reduce__(self) -> tuple[type[Topology], tuple[dict[str, Link], Link]]:
        return Topology, (dict(self.links), self.between)

    def __repr__(self) -> str:
        return f"Topology({dict(self.links)}, between={self.between})"

    def link(self, axis: str) -> Link:
        """The link of `axis`. Raises ValueError for an axis without one."""
        for name, link in self.links:
            if name == axis:
                return link
        known = ", ".join(name for name, _ in self.links)
        raise ValueError(f"the topology has no link for axis {axis!r}; it has {known}; give one for each axis")

    def seconds(self, traffic: Mapping[str, tuple[int, int]]) -> float:
        """Time of messages and bytes received along each axis, one after the other: {"tp": (messages, bytes)}."""
        links = ((self.link(axis), *moved) for axis, moved in traffic.items())
        return sum(messages * link.latency + nbytes / link.bandwidth for link, messages, nbytes in links)

    @classmethod
    def measure(
        cls, mesh: ProcessMesh | DeviceMesh, device_type: str | None = None, *, sizes: Sequence[int] = MEASURED_BYTES
    ) -> Topology:
        """The topology fitted to all-gathers of `sizes` bytes a part along each axis, all groups of an axis at once.

        The slowest group decides, by the median of its rounds; the fit is least squares in which no number is negative.
        Communication: all ranks of the world call it, and get equal topologies.
        Raises ValueError for fewer than two different sizes.
        """
        from .dtensor import as_process_mesh
        from .groups import device_mesh

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
    from .collectives import all_gather_single

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
