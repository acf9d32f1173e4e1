"""Plans and runs layout changes of DTensors, within a mesh and between meshes, with autograd."""

from typing import TYPE_CHECKING

from weft.mesh.extension import version_of

from .moving.dtensor import distribute, layout_of
from .moving.order_check import OrderError, check_order
from .moving.reshard import reshard, start_reshard, to_global
from .moving.topology import Topology
from .planning.moves import Link
from .planning.plan import Plan, plan
from .planning.simulate import simulate
from .planning.steps import (
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
from .training.clip import clip_grad_norm_
from .training.gathered_modules import drop_gathered, fixed_parameters
from .training.gradient_sync import GradientSync
from .training.muon import Muon
from .world.exact import exact_sums

__all__ = [
    "AllGather",
    "AllReduce",
    "AllToAll",
    "Exchange",
    "GradientSync",
    "Link",
    "MakePartial",
    "Muon",
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
    "clip_grad_norm_",
    "distribute",
    "drop_gathered",
    "exact_sums",
    "fixed_parameters",
    "layout_of",
    "plan",
    "reshard",
    "simulate",
    "start_reshard",
    "to_global",
]

__version__: str
if not TYPE_CHECKING:  # a type checker would take a module `__getattr__` to define every name
    __getattr__ = version_of(__name__)
