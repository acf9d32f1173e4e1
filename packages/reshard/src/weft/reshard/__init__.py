"""Planning and running layout changes of DTensors, with autograd."""

from .api import reshard, to_global
from .dtensor import distribute, layout_of
from .gradients import GradientSync
from .plan import Plan, plan
from .simulate import simulate
from .steps import AllGather, AllReduce, AllToAll, MakePartial, ReduceScatter, Slice, Step

__all__ = [
    "AllGather",
    "AllReduce",
    "AllToAll",
    "GradientSync",
    "MakePartial",
    "Plan",
    "ReduceScatter",
    "Slice",
    "Step",
    "distribute",
    "layout_of",
    "plan",
    "reshard",
    "simulate",
    "to_global",
]
