"""What `DTensor.redistribute` receives, counted on a pretended world: `python -m benchmarks.redistribute 4 4 4`.

Prints JSON: for every pair of layouts of {R, S0, S1} of a square matrix, the elements that rank 0 receives and the
seconds that the call took. The collectives are not run: torch's fake process group takes them and returns at once. Even
sizes, so every rank receives as much. On a CPU DTensor's all-to-all is an all-gather and a slice; it is counted as the
all-to-all that it is on a GPU.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, placement_types
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

SIZE = 64  # of each dim; for sizes that divide evenly the ratio to the bound does not depend on it
PLACEMENTS = {"R": Replicate(), "S(0)": Shard(0), "S(1)": Shard(1)}


class Received(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """`elements`: those that arrive from other ranks, by rings of p ranks."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements = 0
        self._stopped = False

    @contextmanager
    def all_to_all(self, local: torch.Tensor, ranks: int) -> Iterator[None]:
        """Counts an all-to-all of `local`, and nothing of what it is made of inside."""
        self.elements += local.numel() * (ranks - 1) // ranks
        self._stopped = True
        yield
        self._stopped = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        namespace, name = func.name().split("::")
        if namespace == "_c10d_functional" and not self._stopped:
            assert not name.startswith(("all_reduce", "reduce_scatter")), f"{name} between layouts without Partial"
            if name.startswith("all_gather_into_tensor"):
                self.elements += args[0].numel() * (args[1] - 1)
        return func(*args, **(kwargs or {}))


def main(sizes: list[int]) -> None:
    """Counts every pair on the mesh of these sizes."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=math.prod(sizes))
    mesh = init_device_mesh("cpu", tuple(sizes))
    whole = torch.zeros(SIZE, SIZE)
    counted: list[Received] = []
    run_all_to_all = placement_types.shard_dim_alltoall

    def all_to_all(local: torch.Tensor, gather_dim: int, shard_dim: int, mesh: Any, mesh_dim: int) -> torch.Tensor:
        with counted[-1].all_to_all(local, mesh.size(mesh_dim)):
            result: torch.Tensor = run_all_to_all(local, gather_dim, shard_dim, mesh, mesh_dim)
        return result

    placement_types.shard_dim_alltoall = all_to_all
    layouts = list(itertools.product(PLACEMENTS, repeat=len(sizes)))
    rows = []
    for src in layouts:
        shape = list(whole.shape)
        for axis, name in enumerate(src):
            if isinstance(placement := PLACEMENTS[name], Shard):
                shape[placement.dim] //= sizes[axis]
        x = DTensor.from_local(whole.new_zeros(shape), mesh, [PLACEMENTS[name] for name in src], run_check=False)
        for dst in layouts:
            with Received() as received:
                counted.append(received)
                start = time.perf_counter()
                x.redistribute(placements=[PLACEMENTS[name] for name in dst])
                seconds = time.perf_counter() - start
            rows.append([src, dst, received.elements, seconds])
    json.dump(rows, sys.stdout)


if __name__ == "__main__":
    main([int(size) for size in sys.argv[1:]])
