"""What a message and a byte cost on each mesh axis: the constants of the cost model, given or measured."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from weft.mesh import ProcessMesh
from weft.mesh.process_mesh import as_mesh

from .groups import axis_group, device_mesh, this_rank

# torch 2.13 renamed it; 2.11 and 2.12 have the old name only
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

# 64 KiB to 64 MiB gathered: a fit needs messages so small that latency decides and so large that bandwidth does.
SIZES = (2**16, 2**20, 2**23, 2**26)
REPEATS = 7


@dataclass(frozen=True, slots=True, repr=False)
class Link:
    """What joins the ranks of an axis. Sending takes `latency + bytes / bandwidth` seconds a message.

    latency: seconds a message, finite, >= 0. bandwidth: bytes per second that a rank receives, > 0, may be infinite.
    Raises ValueError for other numbers.
    """

    latency: float
    bandwidth: float

    def __post_init__(self) -> None:
        if not (_is_number(self.latency) and 0 <= self.latency < math.inf):
            raise ValueError(f"latency is {self.latency!r}; give seconds a message, finite and >= 0, such as 5e-6")
        if not (_is_number(self.bandwidth) and self.bandwidth > 0):
            raise ValueError(f"bandwidth is {self.bandwidth!r}; give bytes per second, > 0, such as 50e9")

    def __repr__(self) -> str:
        bandwidth = "float('inf')" if self.bandwidth == math.inf else repr(self.bandwidth)
        return f"Link({self.latency!r}, {bandwidth})"

    def seconds(self, messages: int, nbytes: int) -> float:
        """Time in which a rank receives `nbytes` bytes in all, in `messages` messages one after the other."""
        return messages * self.latency + nbytes / self.bandwidth

    @classmethod
    def fit(cls, samples: Iterable[tuple[int, int, float]]) -> Link:
        """The link that comes closest to measured (messages, bytes, seconds): non-negative least squares.

        The relative errors are squared, so that short times count like long ones. A latency that would be negative
        is 0, and the bandwidth fitted alone; a bandwidth that would be negative is infinite, and the latency fitted alone.
        Raises ValueError where the samples cannot tell latency and bandwidth apart.
        """
        samples = list(samples)
        # a sample says: u * latency + v / bandwidth = 1
        u = [messages / seconds for messages, _, seconds in samples]
        v = [nbytes / seconds for _, nbytes, seconds in samples]
        if len({nbytes / messages for messages, nbytes, _ in samples}) < 2:
            raise ValueError(f"samples {samples} have one message size; a fit takes two sizes that differ, or more")
        uu, uv, vv = _dot(u, u), _dot(u, v), _dot(v, v)
        u1, v1 = math.fsum(u), math.fsum(v)
        latency = u1 * vv - v1 * uv  # times the determinant, which is > 0
        seconds_a_byte = v1 * uu - u1 * uv
        determinant = uu * vv - uv * uv
        if latency <= 0 or determinant <= 0:
            return cls(0.0, vv / v1)
        if seconds_a_byte <= 0:
            return cls(u1 / uu, math.inf)
        return cls(latency / determinant, determinant / seconds_a_byte)


class Topology:
    """The links of mesh axes, by name: an immutable value, equal by content, printed as it is written.

    Topology({"dp": Link(5e-6, 50e9), "tp": Link(2e-6, 400e9)}, between=Link(1e-5, 25e9))
    between: the link that joins the ranks of two meshes; absent, the slowest of all links.
    """

    __slots__ = ("between", "links")
    links: Mapping[str, Link]
    between: Link

    def __init__(self, links: Mapping[str, Link], between: Link | None = None) -> None:
        for axis, link in [*links.items(), ("between", between)]:
            if not isinstance(link, Link) and link is not between:
                raise ValueError(f"axis {axis!r} has {link!r}; give it a Link(latency, bandwidth)")
        if between is None:
            if not links:
                raise ValueError("the topology has no link; give one for each axis, such as {'tp': Link(2e-6, 400e9)}")
            between = min(links.values(), key=_speed)
        if not isinstance(between, Link):
            raise ValueError(f"between is {between!r}; give it a Link(latency, bandwidth)")
        object.__setattr__(self, "links", MappingProxyType(dict(links)))
        object.__setattr__(self, "between", between)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a Topology is immutable; cannot set {name!r}")

    def __reduce__(self) -> tuple[Any, ...]:
        return Topology, (dict(self.links), self.between)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Topology):
            return NotImplemented
        return self.links == other.links and self.between == other.between

    def __hash__(self) -> int:
        return hash((frozenset(self.links.items()), self.between))

    def __repr__(self) -> str:
        links = ", ".join(f"{axis!r}: {link!r}" for axis, link in self.links.items())
        implied = self.links and self.between == min(self.links.values(), key=_speed)
        return f"Topology({{{links}}}{'' if implied else f', between={self.between!r}'})"

    def link(self, axis: str) -> Link:
        """The link of `axis`. Raises ValueError for an axis without one."""
        try:
            return self.links[axis]
        except KeyError:
            known = ", ".join(self.links) or "none"
            raise ValueError(
                f"the topology has no link for axis {axis!r}; its axes are {known}; give it a Link for {axis!r}"
            ) from None

    def slowest(self, axes: Iterable[str]) -> str:
        """The axis with the least bandwidth; of equal ones that with the greatest latency, then the first of `axes`."""
        axes = tuple(axes)
        if not axes:
            raise ValueError("slowest() got no axis; name at least one")
        return min(axes, key=lambda axis: _speed(self.link(axis)))

    def seconds(self, traffic: Mapping[str, tuple[int, int]]) -> float:
        """Time of {axis: (messages, bytes received)}, one axis after the other, in seconds."""
        return sum(self.link(axis).seconds(messages, nbytes) for axis, (messages, nbytes) in traffic.items())

    @classmethod
    def measure(
        cls,
        mesh: ProcessMesh | DeviceMesh,
        device_type: str | None = None,
        *,
        sizes: Sequence[int] = SIZES,
        repeats: int = REPEATS,
    ) -> Topology:
        """The links of the axes of `mesh`, fitted to the times of all-gathers; exactly the same on every rank.

        On each axis all groups gather at once; the slowest rank's median decides. An all-gather is taken as a ring:
        p - 1 messages, (p - 1) / p of the result received. Nothing is measured on an axis of size 1: Link(0, inf).
        device_type: where the gathered tensors are; absent, the DeviceMesh's, or what the world's backend is for.
        sizes: of the gathered results, in bytes, two or more. repeats: of each, after one to warm up.
        Communication: every rank of the world must call it, ranks outside the mesh too: the groups of the mesh, if it
        has none yet; for each axis of size > 1, 2 * len(sizes) * (repeats + 1) all-gathers, then a world all-reduce.
        Raises ValueError, on every rank alike, for fewer than two sizes that differ, and for repeats < 1.
        """
        this_rank()  # raises where there is no world
        if device_type is None:
            nccl = "nccl" in dist.get_backend()
            device_type = mesh.device_type if isinstance(mesh, DeviceMesh) else "cuda" if nccl else "cpu"
        ranks = as_mesh(mesh)
        if repeats < 1:
            raise ValueError(f"repeats is {repeats}; measure each size at least once")
        messages = {axis: [-(-size // ranks.axis_size(axis)) for size in sizes] for axis in ranks.axis_names}
        for axis, nbytes in messages.items():
            if min(sizes, default=0) < 1 or len(set(nbytes)) < 2:
                raise ValueError(
                    f"sizes {tuple(sizes)} make messages of {nbytes} bytes on axis {axis!r} of size "
                    f"{ranks.axis_size(axis)}; give two sizes or more, >= 1, whose messages differ"
                )
        made = device_mesh(ranks, device_type)
        links = {}
        for axis, size in zip(ranks.axis_names, ranks.shape, strict=True):
            if size == 1:
                links[axis] = Link(0.0, math.inf)
                continue
            seconds = torch.zeros(len(sizes), dtype=torch.float64, device=device_type)
            if this_rank() in ranks:
                mine = _all_gather_seconds(messages[axis], repeats, axis_group(made, axis), device_type)
                seconds.copy_(torch.tensor(mine, dtype=torch.float64))
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            samples = zip(messages[axis], seconds.tolist(), strict=True)
            links[axis] = Link.fit((size - 1, (size - 1) * nbytes, slowest) for nbytes, slowest in samples)
        return cls(links)


def _all_gather_seconds(messages: list[int], repeats: int, group: dist.ProcessGroup, device_type: str) -> list[float]:
    """This rank's median time of an all-gather of each message size, in bytes; the sizes take turns."""
    device = torch.get_device_module(device_type)
    largest = max(messages)
    mine = torch.zeros(largest, dtype=torch.uint8, device=device_type)
    whole = torch.empty(largest * group.size(), dtype=torch.uint8, device=device_type)
    times: list[list[float]] = [[] for _ in messages]
    for _ in range(repeats + 1):
        for nbytes, taken in zip(messages, times, strict=True):
            all_gather_single(whole[: group.size()], mine[:1], group)  # the ranks start together
            device.synchronize()
            start = time.perf_counter()
            all_gather_single(whole[: nbytes * group.size()], mine[:nbytes], group)
            device.synchronize()
            taken.append(time.perf_counter() - start)
    return [statistics.median(taken[1:]) for taken in times]  # the first makes connections and buffers


def _speed(link: Link) -> tuple[float, float]:
    """Less is slower."""
    return link.bandwidth, -link.latency


def _dot(a: list[float], b: list[float]) -> float:
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
