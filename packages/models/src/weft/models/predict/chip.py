"""`Chip`: a machine as numbers, for predictions of a step. Imports no torch, except in `Chip.topology`.

`load_chip` reads a chip of `chips.toml` by name, or a file of `weft measure` by path.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.mesh import ProcessMesh

from .chip_file import ATTENTION, UNLIMITED, as_toml, read_chip, read_values

if TYPE_CHECKING:
    from weft.reshard import Topology

CHIPS = Path(__file__).with_name("chips.toml")

ATTENTION_SIZES = 6  # numbers in an item of `Compute.sizes` for attention; a product has 4
NEAREST = 4  # measured products to interpolate between in `Chip.product_seconds`


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """Measured time of an op or a collective, as a linear function of bytes and operations."""

    seconds: float = 0.0  # of every call
    seconds_per_byte: float = 0.0
    seconds_per_flop: float = 0.0
    seconds_per_score: float = 0.0  # of attention, for the softmax: times flops / head_dim
    adds_products: bool = False  # whether to add the measured seconds of the op's products

    def time(self, nbytes: float, flops: float = 0.0) -> float:
        """Seconds of a call, without scores and products.

        nbytes: of all operands read and results written. flops: of products and attention.
        """
        return self.seconds + self.seconds_per_byte * nbytes + self.seconds_per_flop * flops


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """Measured time of a product [M, K] @ [K, N]."""

    dtype: str
    M: int
    N: int
    K: int
    seconds: float

    @property
    def flops(self) -> int:
        return 2 * self.M * self.N * self.K


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """Links between ranks: within a node, or between nodes."""

    name: str
    ranks: int = UNLIMITED  # consecutive ranks connected by the links
    bandwidth: float  # bytes/s of a rank, one way, to all peers together
    reachable: float  # share of the bandwidth reached in long collectives
    latency: float  # seconds of a message
    peer_bandwidth: float = math.inf  # bytes/s between two ranks, one way
    slowdown: float = 0.0  # share of a device's speed lost during communication here

    def speed(self, ranks: int) -> float:
        """Bytes/s received by each rank in a long collective of `ranks` ranks."""
        return self.reachable * min(self.bandwidth, self.peer_bandwidth * max(1, ranks - 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """A machine: equal devices, a device for each rank, and the links between devices."""

    name: str
    peaks: Mapping[str, float]  # dense FLOP/s of products by dtype: "bfloat16", "float16", "float32", "tf32", "float8"
    reachable: float  # share of the peak reached by the fastest product of a benchmark
    sustained: float = 1.0  # share of `reachable` kept by products in whole steps of training
    reachable_by_dtype: Mapping[str, float] = field(default_factory=dict)  # in place of `reachable`
    multiprocessors: int
    tiles: tuple[tuple[int, int], ...]  # (M, N) of a product's tiles, from which a product takes the best
    memory_bytes: int  # of a device, as torch reports
    memory_bandwidth: float  # bytes/s, reads and writes counted
    memory_reachable: float  # share of the bandwidth in long copies
    levels: tuple[Level, ...]  # innermost first
    host_seconds: float  # of the host, to issue an op of torch that is not compiled
    launch_seconds: float = 0.0  # of the device, to start and to drain a kernel
    attention_reachable: Mapping[str, float] = field(default_factory=ATTENTION.copy)  # share of the peak, by part
    ops: Mapping[str, Rate] = field(default_factory=dict)  # by "rms_norm.forward", or "rms_norm.forward.bfloat16"
    products: tuple[Product, ...] = ()  # measured; () for a chip whose products are priced by tiles
    # Measured, by kind, for a rank's received bytes; on a CPU beyond `collective_host_seconds`.
    collectives: Mapping[str, Rate] = field(default_factory=dict)
    collective_host_seconds: float = 0.0  # of the thread that computes, on a measured CPU, to issue a collective
    crowding: float = 1.0  # factor on computing times in a run of several ranks
    # On a measured CPU, ranks drift apart: t seconds after a collective, a rank waits drift * sqrt(t) for the others.
    drift: float = 0.0
    threads: int | None = None  # of a process, on a measured CPU; None for a GPU
    source: str = ""

    def __hash__(self) -> int:
        return hash((self.name, self.source))

    def peak(self, dtype: str) -> float:
        """Dense FLOP/s of the data sheet. Raises ValueError for a dtype without a peak."""
        if dtype not in self.peaks:
            known = ", ".join(self.peaks)
            raise ValueError(f"chip {self.name} has no peak for {dtype}; it has {known}; train in one of them")
        return self.peaks[dtype]

    def reachable_peak(self, dtype: str) -> float:
        """FLOP/s of the fastest product of a benchmark. Raises ValueError for a dtype without a peak."""
        return self.peak(dtype) * self.reachable_by_dtype.get(dtype, self.reachable)

    def sustained_peak(self, dtype: str) -> float:
        """FLOP/s of large products in whole steps of training. Raises ValueError for a dtype without a peak."""
        return self.reachable_peak(dtype) * self.sustained

    @property
    def reachable_bandwidth(self) -> float:
        """Bytes/s of memory in long copies, reads and writes counted."""
        return self.memory_bandwidth * self.memory_reachable

    def rate(self, name: str, part: str, dtype: str = "") -> Rate | None:
        """The measured rate of an op's part, such as ("rms_norm", "forward", "bfloat16"); None where not measured.

        The parts "recompute" and "repeat", and every part of an op of torch such as "aten.add", fall back on the rate
        of forward.
        """
        parts = (part, "forward") if part in ("recompute", "repeat") or name.startswith("aten.") else (part,)
        keys = (f"{name}.{each}{suffix}" for each in parts for suffix in (f".{dtype}", ""))
        return next((self.ops[key] for key in keys if key in self.ops), None)

    def measured_seconds(
        self, name: str, part: str, dtype: str, nbytes: float, flops: float, sizes: Iterable[tuple[int, ...]] = ()
    ) -> float | None:
        """Seconds of a call of an op's part by the measured rate; None without a rate.

        nbytes, flops, sizes: of the call, as in `Compute`.
        """
        rate = self.rate(name, part, dtype)
        if rate is None:
            return None
        seconds = rate.time(nbytes, flops)
        for size in sizes:
            if len(size) == ATTENTION_SIZES:
                seconds += rate.seconds_per_score * flops / size[-1]
            elif rate.adds_products:
                batch, M, N, K = size
                seconds += batch * (self.product_seconds(dtype, M, N, K) or 0.0)
        return seconds

    def product_seconds(self, dtype: str, M: int, N: int, K: int) -> float | None:
        """Seconds of a product [M, K] @ [K, N], from the measured products; None without products in `dtype`.

        FLOP/s are interpolated between the nearest measured shapes, by the logarithms of M, N and K.
        """
        measured = [each for each in self.products if each.dtype == dtype]
        if not measured:
            return None
        sizes = [math.log2(max(1, size)) for size in (M, N, K)]
        weighted = []
        for each in measured:
            distance = sum((math.log2(b) - a) ** 2 for a, b in zip(sizes, (each.M, each.N, each.K), strict=True))
            if distance == 0:
                return each.seconds
            weighted.append((distance, each))
        nearest = sorted(weighted, key=lambda pair: pair[0])[:NEAREST]
        total = sum(1 / distance for distance, _ in nearest)
        log_speed = sum(math.log(each.flops / each.seconds) / distance for distance, each in nearest) / total
        return 2 * M * N * K / math.exp(log_speed)

    def levels_of(self, size: int, stride: int, *, world: int | None = None) -> tuple[tuple[Level, int], ...]:
        """The levels used by a group, innermost first: (level, members or subgroups connected there).

        size: ranks in the group. stride: distance in ranks of the group's neighbours. Ranks are numbered consecutively
        in each level. world: ranks in the run: a run within a level uses no outer level. None: a run of any size.
        A group of 16 neighbours on nodes of 8: ((NVLink, 8), (InfiniBand, 2)). Raises ValueError for a group larger
        than the machine.
        """
        found: list[tuple[Level, int]] = []
        remaining, stride = size, max(1, stride)  # subgroups still to be connected, and the distance between them
        for level in self.levels:
            if remaining == 1:
                break
            extent = remaining * stride
            if extent <= level.ranks and (level.ranks % extent == 0 or (world or UNLIMITED) <= level.ranks):
                inside = remaining
            else:
                inside = math.gcd(remaining, max(1, level.ranks // stride))
            if inside > 1:
                found.append((level, inside))
            remaining //= inside
            stride *= inside
        if remaining > 1:
            name, most = self.levels[-1].name, self.levels[-1].ranks
            raise ValueError(
                f"chip {self.name} connects {most:,} ranks by {name}, its outermost level, and a group of "
                f"{size} with stride {stride} has more; add a level to the chip's file"
            )
        return tuple(found)

    def link(self, size: int, stride: int, *, world: int | None = None) -> tuple[float, float]:
        """(seconds of a message, bytes/s received by a rank) in a group; (0, inf) for a single rank.

        size, stride, world: as for `levels_of`. Over nodes, the g members in a node have g adapters, and pass the
        received bytes on by the inner link. Of the size - 1 messages of a ring, as many as nodes less 1 go over the
        outer link, as in NCCL's tuning.
        """
        levels = self.levels_of(size, stride, world=world)
        if not levels:
            return 0.0, math.inf
        speed, inside = math.inf, 1
        for level, members in levels:
            speed = min(speed, inside * level.speed(members))
            inside *= members
        seconds, groups = 0.0, 1
        for level, members in reversed(levels):
            seconds += groups * (members - 1) * level.latency
            groups *= members
        return seconds / (size - 1), speed

    def as_toml(self, comment: str = "") -> str:
        """The chip as a file for `load_chip`. comment: lines for the head of the file."""
        return as_toml(asdict(self), comment)

    def topology(self, mesh: ProcessMesh) -> Topology:
        """The link of each mesh axis, by the axis's size and stride, for plans of layout changes.

        Raises ValueError for a mesh whose ranks have no strides, and for a mesh larger than the machine.
        """
        from weft.reshard import Link, Topology  # imported here because torch takes seconds

        if mesh.strides is None:
            raise ValueError(
                f"{mesh!r} has ranks without strides, so that no level of {self.name} fits its axes; "
                f"make the mesh by ProcessMesh.grid"
            )
        axes = zip(mesh.axis_names, mesh.shape, mesh.strides, strict=True)
        return Topology({name: Link(*self.link(size, stride, world=mesh.size)) for name, size, stride in axes})


def load_chip(name_or_path: str | Path) -> Chip:
    """Load the chip with this name in `chips.toml`, or from a file as written by `weft measure`.

    Raises ValueError with a message of a single line for an unknown name, and for a file that cannot be used.
    """
    if str(name_or_path) in known_chips():
        return _chip(read_chip(CHIPS, table=str(name_or_path)))
    path, name = Path(name_or_path), str(name_or_path)
    if path.suffix != ".toml" and "/" not in name and not (name and os.path.exists(name)):  # False for a long name
        raise ValueError(
            f"chip {name[:60]!r} is not known; the chips are {', '.join(known_chips())}; "
            f"or give a file written by `weft measure`"
        )
    return _chip(read_chip(path))


def _chip(values: dict[str, Any]) -> Chip:
    """The chip of values from `read_chip`."""
    values["levels"] = tuple(Level(**each) for each in values["levels"])
    values["products"] = tuple(Product(**each) for each in values["products"])
    for table in ("ops", "collectives"):
        values[table] = {name: Rate(**each) for name, each in values[table].items()}
    return Chip(**values)


@cache
def known_chips() -> tuple[str, ...]:
    """The names of the chips in `chips.toml`."""
    return tuple(read_values(CHIPS))
