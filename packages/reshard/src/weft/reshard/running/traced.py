"""A plan where torch.compile traces: what moves nothing is traced through, a plan that communicates is one custom op."""

from __future__ import annotations

import base64
import pickle
from dataclasses import replace
from functools import lru_cache

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
