"""How many of Weft's own Python functions a warm loss calls: the host's share of a step grows with each."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch
import weft
from weft.kernels import cross_entropy
from weft.mesh import Layout, ProcessMesh
from weft.reshard import distribute

from tests.support.pool import Pool

MOST_CALLS = 78  # comprehensions count up to Python 3.11


def calls_of_a_loss() -> list[str]:
    """The calls of a warm loss: the fewest of several, since the garbage collector may call finalizers between."""
    mesh = ProcessMesh.grid(tp=2)
    logits = distribute(torch.randn(8, 64), Layout(mesh, "tp: S(1)")).requires_grad_()
    target = distribute(torch.randint(0, 64, (8,)), Layout(mesh, "tp: R"))
    runs: list[list[str]] = []
    sources = tuple(weft.__path__)

    def record(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(sources):
            runs[-1].append(frame.f_code.co_name)

    for _ in range(3):
        cross_entropy(logits, target)
    for _ in range(3):
        runs.append([])
        sys.setprofile(record)
        try:
            cross_entropy(logits, target)
        finally:
            sys.setprofile(None)
    return min(runs, key=len)


def test_a_warm_vocab_parallel_loss_calls_few_functions(pool: Pool) -> None:
    for calls in pool.run(calls_of_a_loss, ranks=2):
        assert "cross_entropy" in calls
        assert "start_all_gather" in calls
        assert len(calls) <= MOST_CALLS, calls
