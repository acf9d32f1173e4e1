"""The program of each rank of two nodes: layout changes.

For each change rank 0 writes as JSON the seconds, the least of several; the most bytes that a node received over
the link; and its seconds of processor time.
"""

from __future__ import annotations

import json
import os
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from weft.mesh import Layout, ProcessMesh
from weft.reshard import Link, Topology, distribute, reshard

SHAPE = (2048, 2048)
TOPOLOGY = Topology({"node": Link(1e-4, 125e6), "gpu": Link(1e-5, 4e9)})
CHANGES = {
    "gathered": ("node: S(0), gpu: S(0)", ""),
    "exchanged": ("node: S(0), gpu: S(0)", "node: S(1), gpu: S(0)"),
    "moved": ("node: S(0)", "gpu: S(0)"),
    "summed": ("node: P(sum), gpu: P(sum)", ""),
    "summed-and-cut": ("node: P(sum), gpu: P(sum)", "node: S(0), gpu: S(0)"),
}
TIMES = 15


def main() -> None:
    dist.init_process_group("gloo")
    mesh, found = ProcessMesh.grid(node=2, gpu=2), {}
    for name, (src, dst) in CHANGES.items():
        whole = torch.arange(SHAPE[0] * SHAPE[1], dtype=torch.float32).reshape(SHAPE)
        wanted = distribute(whole, Layout(mesh, dst)).to_local()
        before = _laid_out(whole, mesh, src)
        seconds, came, work = [], [], []
        for _ in range(TIMES):
            dist.barrier()
            counted, worked, start = _came(), time.process_time(), time.perf_counter()
            after = reshard(before, Layout(mesh, dst), topology=TOPOLOGY).to_local()
            dist.barrier()
            seconds.append(time.perf_counter() - start)
            came.append(_came() - counted)
            work.append(time.process_time() - worked)
        torch.testing.assert_close(after, wanted)
        most = torch.tensor(min(came))
        dist.all_reduce(most, dist.ReduceOp.MAX)
        found[name] = (min(seconds), int(most), min(work))
    if dist.get_rank() == 0:
        with open(sys.argv[1], "w") as file:
            json.dump(found, file)
    dist.destroy_process_group()


def _came() -> int:
    """Bytes that this node has received over the link, with all headers."""
    with open(f"/sys/class/net/{os.environ['GLOO_SOCKET_IFNAME']}/statistics/rx_bytes") as file:
        return int(file.read())


def _laid_out(whole: torch.Tensor, mesh: ProcessMesh, src: str) -> DTensor:
    """`whole` in layout `src`; if Partial, each rank holds a quarter as its addend."""
    layout = Layout(mesh, src)
    if "P" in src:
        from torch.distributed.tensor import Partial
        from weft.reshard.world.groups import device_mesh

        return DTensor.from_local(whole / 4, device_mesh(mesh, "cpu"), [Partial("sum"), Partial("sum")])
    return distribute(whole, layout)


if __name__ == "__main__":
    assert int(os.environ["WORLD_SIZE"]) == 4, "two nodes of two"
    main()
