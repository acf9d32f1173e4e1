"""A plan where torch.compile traces: what moves nothing is traced through, a plan that communicates is one custom op, or two.

Of two the first starts it, and the second waits: what the graph computes between them runs meanwhile.
"""

from __future__ import annotations

import base64
import itertools
import pickle
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor, library
from torch.distributed.device_mesh import DeviceMesh

from ..planning.plan import Plan
from ..planning.steps import Local
from .collectives import Pending
from .executor import execute, started
from .groups import device_mesh, this_rank


def traced(plan: Plan, local: Tensor, mesh: DeviceMesh) -> Pending:
    """`started` where it is traced: a node of the graph, waited for at once. Communication: when the graph runs, the plan's steps."""
    if all(isinstance(step, Local) for step in plan.steps):
        return started(plan, local, mesh)
    return Pending.finished(_reshard(local, _text(replace(plan)), this_rank()))


def begin(plan: Plan, local: Tensor) -> Tensor:
    """Starts a plan when the graph runs: the number of what is under way, a tensor of one float64, which has a gradient too."""
    number: Tensor = _begin(local, _text(replace(plan)), this_rank())
    return number


def finish(number: Tensor, local: Tensor, shape: Sequence[int]) -> Tensor:
    """Waits for what `begin` started of `local`, which is given again so that its memory is not used for anything meanwhile.

    shape: of the result.
    """
    result: Tensor = _finish(number, local, list(shape))
    return result


@lru_cache(maxsize=4096)
def _text(plan: Plan) -> str:
    """The plan as an argument of a custom op."""
    return base64.b64encode(pickle.dumps(plan)).decode()


@lru_cache(maxsize=4096)
def _plan(text: str) -> Plan:
    plan: Plan = pickle.loads(base64.b64decode(text))
    return plan


@library.custom_op("weft::reshard", mutates_args=())
def _reshard(local: Tensor, plan: str, rank: int) -> Tensor:
    """rank: this process's, for the compiler alone, which keeps graphs on disk and must not give one rank's to another."""
    made = _plan(plan)
    moved = execute(made, local, device_mesh(made.src.mesh, local.device.type)).contiguous()
    return moved.clone() if moved is local else moved  # an output may be no input


@_reshard.register_fake
def _(local: Tensor, plan: str, rank: int) -> Tensor:
    made = _plan(plan)
    return local.new_empty(made.dst.local_shape(made.shape, rank))


_under_way: dict[int, Pending] = {}
_numbers = itertools.count()


@library.custom_op("weft::begin_reshard", mutates_args=())
def _begin(local: Tensor, plan: str, rank: int) -> Tensor:
    made, number = _plan(plan), next(_numbers)
    _under_way[number] = started(made, local, device_mesh(made.src.mesh, local.device.type))
    return torch.tensor([number], dtype=torch.float64)


@_begin.register_fake
def _(local: Tensor, plan: str, rank: int) -> Tensor:
    return torch.empty(1, dtype=torch.float64)


@library.custom_op("weft::finish_reshard", mutates_args=())
def _finish(number: Tensor, local: Tensor, shape: list[int]) -> Tensor:
    moved = _under_way.pop(int(number)).wait().contiguous()
    return moved.clone() if moved is local else moved


@_finish.register_fake
def _(number: Tensor, local: Tensor, shape: list[int]) -> Tensor:
    return local.new_empty(shape)


COMMUNICATING = (
    torch.ops.weft.reshard.default,
    torch.ops.weft.begin_reshard.default,
    torch.ops.weft.finish_reshard.default,
)
