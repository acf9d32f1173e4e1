"""Plans under torch.compile: local steps are traced through; a plan with communication becomes custom ops.

`add_plan_node` adds a single op for a plan. `add_start_node` and `add_wait_node` add an op each, to start the plan and
to wait: the graph's ops between the two overlap with the communication. reshard.py calls these while a graph is traced.
"""

from __future__ import annotations

import base64
import itertools
import pickle
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, library
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from weft.mesh import Partial, Replicate, Shard

from ..planning.plan import Plan
from ..planning.steps import Local
from ..world.groups import device_mesh, this_rank
from .collectives import Pending
from .executor import execute, start_plan


def add_plan_node(plan: Plan, local: Tensor, mesh: DeviceMesh) -> Pending:
    """`executor.start_plan` while a graph is traced: adds a node for the whole plan.

    Called by `_start` in reshard.py. Communication: the plan's steps, whenever the graph runs.
    """
    if all(isinstance(step, Local) for step in plan.steps):
        return start_plan(plan, local, mesh)
    return Pending.finished(_reshard(local, _text(plan), this_rank()))


def add_start_node(plan: Plan, local: Tensor) -> Tensor:
    """Adds a node which starts a plan, each time the graph runs. Called by `begin_in_graph`.

    In backward called by `_FinishInGraph`, for the gradient's plan.

    Returns the number of the started plan as a float64 tensor of shape [1]: a tensor of floats can have a gradient.
    """
    number: Tensor = _begin(local, _text(plan), this_rank())
    return number


def add_wait_node(number: Tensor, local: Tensor, shape: Sequence[int]) -> Tensor:
    """Adds a node that waits for the plan started by `add_start_node`. Called by `finish_in_graph`.

    In backward called by `_BeginInGraph`. number: from `add_start_node`, of shape [1].
    local: the same tensor as for `add_start_node`; a use here keeps the compiler from reusing the memory in between.
    shape: the result's shape.
    """
    result: Tensor = _finish(number, local, list(shape))
    return result


def graph_arguments(placements: Any) -> tuple[tuple[str, ...] | None, str | tuple[str, ...]]:
    """The placements of a `reshard` as arguments of Dynamo's node: mesh axes and texts.

    Called by `reshard` while Dynamo traces. A mapping of placements gives the mesh axes, and a text for each axis. A
    sequence gives None, and the texts in the mesh's order. A text like "dp: S(0)" gives None, and the same text.
    Without placements, None and no texts.
    """
    if placements is None or isinstance(placements, str):
        return None, placements or ()
    if isinstance(placements, Mapping):
        return tuple(placements), tuple([_placement_text(each) for each in placements.values()])
    return None, tuple([_placement_text(each) for each in placements])


def _placement_text(placement: Any) -> str:
    """`str(placement)`, in code that Dynamo can trace; also for torch's placements."""
    if isinstance(placement, Shard | TorchShard):
        return f"S({placement.dim})"
    if isinstance(placement, Replicate | TorchReplicate):
        return "R"
    return f"P({placement.op if isinstance(placement, Partial) else placement.reduce_op})"


@lru_cache(maxsize=4096)
def _text(plan: Plan) -> str:
    """The plan as a string, which a custom op can take."""
    return base64.b64encode(pickle.dumps(plan)).decode()


@lru_cache(maxsize=4096)
def _plan(text: str) -> Plan:
    plan: Plan = pickle.loads(base64.b64decode(text))
    return plan


@library.custom_op("weft::reshard", mutates_args=())
def _reshard(local: Tensor, plan: str, rank: int) -> Tensor:
    """Runs a plan when the graph runs.

    rank: this process's. Only a part of the key of the compiler's disk cache, which must not give a rank another rank's
        graph.
    """
    plan_value = _plan(plan)
    result = execute(plan_value, local, device_mesh(plan_value.src.mesh, local.device.type)).contiguous()
    return result.clone() if result is local else result  # a custom op must not return its input


@_reshard.register_fake
def _(local: Tensor, plan: str, rank: int) -> Tensor:
    plan_value = _plan(plan)
    return local.new_empty(plan_value.dst.local_shape(plan_value.shape, rank))


_pending: dict[int, Pending] = {}  # by number, the plans that are started and not finished
_numbers = itertools.count()


@library.custom_op("weft::begin_reshard", mutates_args=())
def _begin(local: Tensor, plan: str, rank: int) -> Tensor:
    plan_value, number = _plan(plan), next(_numbers)
    _pending[number] = start_plan(plan_value, local, device_mesh(plan_value.src.mesh, local.device.type))
    return torch.tensor([number], dtype=torch.float64)


@_begin.register_fake
def _(local: Tensor, plan: str, rank: int) -> Tensor:
    return torch.empty(1, dtype=torch.float64)


@library.custom_op("weft::finish_reshard", mutates_args=())
def _finish(number: Tensor, local: Tensor, shape: list[int]) -> Tensor:
    result = _pending.pop(int(number)).wait().contiguous()
    return result.clone() if result is local else result


@_finish.register_fake
def _(number: Tensor, local: Tensor, shape: list[int]) -> Tensor:
    return local.new_empty(shape)


# The ops with communication. Selective recomputation in a compiled model (weft.models' parallel/recompute.py) keeps
# the outputs: the repeated forward, in backward, does not communicate again.
COMMUNICATING = (
    torch.ops.weft.reshard.default,
    torch.ops.weft.begin_reshard.default,
    torch.ops.weft.finish_reshard.default,
)
