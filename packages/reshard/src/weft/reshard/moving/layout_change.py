"""`LayoutChange`: the part of a reshard that depends on layouts and shape alone, computed once and cached."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from weft.mesh import Layout, LayoutError, ProcessMesh

from ..planning.layouts import cotangent
from ..planning.plan import Plan, plan
from ..world.dynamo import is_compiling
from ..world.exact import named_axes_key
from ..world.groups import this_rank, world_cache
from .dtensor import (
    Placements,
    as_process_mesh,
    dtensor_spec,
    is_strided,
    layout_from_arguments,
    layout_of,
    shape_of,
    wrap_with_spec,
)
from .executor import PreparedPlan
from .stacked_plan import StackedPlan, prepare_exact
from .topology import Topology
from .tree import stacked_shape


class LayoutChange(NamedTuple):
    """A reshard's plan and layouts, the same for all DTensors with equal specs and targets. Made by `plan_change`."""

    src: Layout  # the input's layout
    target: Layout  # the result's layout
    cotangent: Layout  # the layout of the input's gradient
    plan: Plan  # from src to target
    prepared_plan: PreparedPlan | StackedPlan  # the plan ready to run on this rank
    local_shape: tuple[int, ...]  # shape of this rank's part of the input, with stacked addends (tree.py)
    strided_spec: Any  # the spec of an input with a `_StridedShard`, if cotangent == src; else None
    topology: Topology | None  # as given to `reshard`
    memory_limit: int | None  # as given to `reshard`

    @property
    def options(self) -> dict[str, Any]:
        """The caller's options of `reshard`, as keyword arguments for the gradient's reshard, in backward."""
        return {"topology": self.topology, "memory_limit": self.memory_limit}

    @property
    def plan_in_graph(self) -> Plan:
        """The plan, for a graph of torch.compile; read by reshard.py while a graph is traced.

        Raises LayoutError where a StackedPlan must run in place of the plan.
        """
        if isinstance(self.prepared_plan, StackedPlan):
            raise LayoutError(
                f"exact sums of ({self.src}) on {self.src.mesh} add stacked addends, which compiled code cannot; run "
                f"this module without torch.compile, or on the mesh that exact names"
            )
        return self.plan

    def restate_as_input(self, grad: DTensor) -> DTensor:
        """`grad` with the input's own spec, as autograd needs. The last act of a reshard's backward, in reshard.py.

        grad: the input's gradient, in the layout `cotangent`. The layout of an input with a `_StridedShard` has two
        specs: torch's, and Weft's, which permutes the mesh's axes. The result has torch's.
        """
        return grad if self.strided_spec is None else wrap_with_spec(grad.to_local(), self.strided_spec)

    def wrong_local_shape(self, local: Tensor, shape: torch.Size) -> LayoutError:
        """The error for an input whose local tensor has another shape than `local_shape`; raised by `_start`.

        local: the local tensor. shape: the input's global shape.
        The error comes before anything is sent: from a rank with too few elements, the receivers would wait for more.
        """
        rank = this_rank()
        return LayoutError(
            f"rank {rank} holds {tuple(local.shape)}, but ({self.src}) of {tuple(shape)} gives it "
            f"{self.local_shape}; make the DTensor by distribute(), or give from_local the global shape= and "
            f"stride="
        )


def cached_change(
    dtensor: DTensor,
    mesh: ProcessMesh | DeviceMesh | None,
    placements: Placements | Layout | None,
    topology: Topology | None,
    memory_limit: int | None,
) -> LayoutChange:
    """`plan_change`, cached by the DTensor's spec, the arguments and the named mesh. Called by `_start` in reshard.py.

    In a traced graph nothing is cached.
    """
    if is_compiling():
        return plan_change(dtensor, mesh, placements, topology, memory_limit)
    target: Any = tuple(placements.items()) if isinstance(placements, Mapping) else placements
    target = tuple(target) if isinstance(target, list) else target
    cache = world_cache()
    key = (dtensor_spec(dtensor), mesh, target, topology, memory_limit, named_axes_key())
    change: LayoutChange | None = cache.get(key)
    if change is None:
        change = cache[key] = plan_change(dtensor, mesh, placements, topology, memory_limit)
    return change


def plan_change(
    dtensor: DTensor,
    mesh: ProcessMesh | DeviceMesh | None,
    placements: Placements | Layout | None,
    topology: Topology | None,
    memory_limit: int | None,
) -> LayoutChange:
    """The LayoutChange for a `reshard` with these arguments. Meanings and errors of the arguments: as in `reshard`.

    Called by `cached_change`; in a traced graph also by `begin_in_graph`, `finish_in_graph` and the latter's backward.
    """
    src, shape = layout_of(dtensor), shape_of(dtensor)
    target = _target(src, mesh, placements).resolved(shape)
    reshard_plan = plan(src, target, shape, dtensor.dtype, topology=topology, memory_limit=memory_limit)
    strided_spec = dtensor_spec(dtensor) if is_strided(dtensor) and cotangent(src) == src else None
    return LayoutChange(
        src=src,
        target=target,
        cotangent=cotangent(src),
        plan=reshard_plan,
        prepared_plan=prepare_exact(reshard_plan, target, dtensor.device_mesh),
        local_shape=stacked_shape(src, shape, this_rank()),
        strided_spec=strided_spec,
        topology=topology,
        memory_limit=memory_limit,
    )


def _target(src: Layout, mesh: ProcessMesh | DeviceMesh | None, placements: Placements | Layout | None) -> Layout:
    """The result's layout, from the arguments of `reshard`. src: the layout of the input."""
    if not isinstance(placements, Layout):
        return layout_from_arguments(src.mesh if mesh is None else mesh, () if placements is None else placements)
    if mesh is not None and as_process_mesh(mesh) != placements.mesh:
        raise LayoutError(
            f"the target is a layout on {placements.mesh}, but mesh={mesh} was given too; give the layout alone"
        )
    return placements
