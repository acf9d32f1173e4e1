"""Counts the bytes over the slow links between nodes, in an all-gather over 2 nodes of 4 ranks."""

from __future__ import annotations

import math

import torch
from weft.mesh import Layout, ProcessMesh
from weft.reshard import Link, Topology, plan

from benchmarks.conftest import Tell

SIZE = 8192


def test_reshard_bytes_over_a_slow_axis(tell: Tell) -> None:
    """S0S0 -> RR: a node receives the missing half of the tensor, and receives it once."""
    mesh = ProcessMesh.grid(node=2, gpu=4)
    links = Topology({"node": Link(0.0, 1.0), "gpu": Link(0.0, math.inf)})  # seconds are bytes over the slow axis
    src, dst = Layout(mesh, "node: S(0), gpu: S(0)"), Layout(mesh)
    lacked = 4 * SIZE * SIZE / 2  # bytes of the half on the other node
    into_node = 4 * tell.measuring(plan, src, dst, (SIZE, SIZE), torch.float32, topology=links).seconds
    inner_first = 4 * lacked  # every rank of the node receives the half
    print("\n2 nodes x 4, S0S0 -> RR, bytes into a node over what it lacks:")
    print(f"weft {into_node / lacked:.2f}, gathering the inner axis first, as DTensor does {inner_first / lacked:.2f}")
    for way, nbytes in (("Weft", into_node), ("gathering the inner axis first", inner_first)):
        tell("bytes into a node, S0S0 -> RR on 2 x 4", way, "count", bytes_over_bound_max=nbytes / lacked)
    assert into_node == lacked
