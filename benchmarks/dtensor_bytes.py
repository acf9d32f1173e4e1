"""Counts the bytes which a rank receives in `DTensor.redistribute`, on meshes larger than the machine.

A separate process uses torch's fake process group of 64 ranks and meta tensors, and acts as rank 0 of each mesh.
Nothing is sent: a dispatch mode sees the collectives of DTensor. Shapes divide evenly, so all ranks receive as many
bytes as rank 0.

On a mesh of CPUs, DTensor replaces an all-to-all by an all-gather and a slice. On other devices, and with meta tensors,
DTensor issues the all-to-all. Both counts are taken; the plans are the same.
"""

from __future__ import annotations

import logging
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.reshard_cases import Case, Pair, Placements, slices
from benchmarks.timing import Timed

RANKS = 64


@dataclass(frozen=True, slots=True)
class Counted:
    """The bytes received in DTensor's layout changes of a case, for each pair of layouts."""

    received: tuple[int, ...]
    on_cpu: tuple[int, ...]  # if each all-to-all is an all-gather and a slice
    planning: Timed  # host time of DTensor's planning


def counted(work: Sequence[tuple[Case, list[Pair]]], *, min_cost: bool = False) -> list[Counted]:
    """Counts `DTensor.redistribute` for each pair. min_cost: use the min-cost search, a private switch of torch."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(_count_all, list(work), min_cost).result()


def placements(layout: Placements) -> list[Placement]:
    words = {"R": Replicate(), "P": Partial()}
    return [words[word] if word in words else Shard(int(word[1:])) for word in layout]


class _Received(TorchDispatchMode):
    """Adds up the bytes received from other ranks by ring or direct collectives, within the context."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.bytes_on_cpu = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor then unwraps the tensors, and its collectives reach this mode
        result = func(*args, **(kwargs or {}))
        namespace, name = func.name().partition(".")[0].split("::")
        if namespace not in ("_c10d_functional", "_dtensor") or name in ("wait_tensor", "_wrap_tensor_autograd"):
            return result
        local = args[0].numel() * args[0].element_size()
        if name == "all_gather_into_tensor":  # (input, ranks, group)
            self.bytes += (args[1] - 1) * local
            self.bytes_on_cpu += (args[1] - 1) * local
        elif name == "shard_dim_alltoall":  # (input, gather_dim, shard_dim, group): one of p parts stays
            ranks = dist.distributed_c10d._resolve_process_group(args[3]).size()
            self.bytes += (ranks - 1) * local // ranks
            self.bytes_on_cpu += (ranks - 1) * local
        else:
            raise AssertionError(f"DTensor issued {name}, which is not counted; add its bytes to _Received")
        return result


def _count_all(work: list[tuple[Case, list[Pair]]], min_cost: bool) -> list[Counted]:
    # Silences an advice to flatten axes, given for each mesh
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    with _fake_world(), _planner(min_cost) as seconds:
        return [_count(case, pairs, seconds) for case, pairs in work]


def _count(case: Case, pairs: list[Pair], seconds: list[float]) -> Counted:
    """Counts the pairs of a case. seconds: the list to which `_planner` appends the planning times."""
    received, on_cpu = [], []
    ranks = torch.arange(torch.Size(case.mesh).numel()).view(case.mesh)
    mesh = DeviceMesh("meta", ranks, mesh_dim_names=tuple("abcd"[: len(case.mesh)]))
    first = (0,) * len(case.mesh)
    seconds.clear()
    for src, dst in pairs:
        held, wanted = ([stop - start for start, stop in slices(case, way, first)] for way in (src, dst))
        tensor = DTensor.from_local(torch.empty(held, device="meta"), mesh, placements(src), run_check=False)
        with _Received() as seen:
            result = tensor.redistribute(mesh, placements(dst)).to_local()
        assert list(result.shape) == wanted, f"{src} -> {dst} of {case.shape} on {case}: {result.shape}"
        received.append(seen.bytes)
        on_cpu.append(seen.bytes_on_cpu)
    return Counted(tuple(received), tuple(on_cpu), Timed(tuple(seconds)))


@contextmanager
def _fake_world() -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _planner(min_cost: bool) -> Iterator[list[float]]:
    """Times DTensor's planning within the context, with or without the min-cost search. Yields the list of seconds.

    The search prices links by the number of devices on a host. Here all ranks are on one host, so all links are equal,
    as in Weft's figures.
    """
    from torch.distributed.device_mesh import _mesh_resources
    from torch.distributed.tensor import _redistribute

    seconds: list[float] = []
    planned = _redistribute._gen_transform_infos_non_cached

    def timed(*arguments: Any) -> Any:
        start = time.perf_counter()
        transforms = planned(*arguments)
        seconds.append(time.perf_counter() - start)
        return transforms

    with (
        patch.object(_mesh_resources, "num_devices_per_host", lambda device_type: RANKS),
        patch.object(_redistribute, "_gen_transform_infos_non_cached", timed),
        _redistribute.use_min_cost_redistribution_plan() if min_cost else nullcontext(),
    ):
        yield seconds
