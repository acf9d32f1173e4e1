"""Planning and running layout changes of DTensors, within a mesh and across meshes, with autograd."""

from .api import reshard, start_reshard, to_global
from .dtensor import distribute, layout_of
from .gradients import GradientSync
from .order import OrderError, check_order
from .plan import Plan, plan
from .simulate import simulate
from .steps import (
    AllGather,
    AllReduce,
    AllToAll,
    Exchange,
    MakePartial,
    Permute,
    ReduceExchange,
    ReduceScatter,
    Relabel,
    Slice,
    Step,
)
from .topology import Link, Topology

__all__ = [
    "AllGather",
    "AllReduce",
    "AllToAll",
    "Exchange",
    "GradientSync",
    "Link",
    "MakePartial",
    "OrderError",
    "Permute",
    "Plan",
    "ReduceExchange",
    "ReduceScatter",
    "Relabel",
    "Slice",
    "Step",
    "Topology",
    "check_order",
    "distribute",
    "layout_of",
    "plan",
    "reshard",
    "simulate",
    "start_reshard",
    "to_global",
]
