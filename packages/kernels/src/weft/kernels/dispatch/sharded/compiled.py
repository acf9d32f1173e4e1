"""DTensors in custom ops under torch.compile: unwrap the operands, run the op on local tensors, wrap the outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch.distributed as dist
from torch import Tensor, library
from torch.distributed.tensor import DTensor
from weft.mesh import Layout, LayoutError
from weft.reshard import layout_of
from weft.reshard.extension import group_named, guard_shapes, this_rank, wait_for, wrap

from ..op import Op
from .call_plan import CallPlan, wrap_as_operand

try:
    VERSION = version("weft-kernels")
except PackageNotFoundError:  # run from source, not installed
    VERSION = "unknown"


@dataclass(frozen=True, slots=True)
class TracedOperands:
    """A custom op's operands with DTensors among them, global and local, and the plan to wrap the op's results.

    Made by `TracedOperands.unwrap` in the op's implementation for DTensors (`register_torch_dispatch`), which runs
    while the compiler traces. The implementation calls the op again, on `locals`.
    """

    tensors: Sequence[Tensor | None]  # as the op received them
    plan: CallPlan
    locals: tuple[Tensor | None, ...]  # the local tensors of this rank

    @classmethod
    def unwrap(cls, op: Op, tensors: Sequence[Tensor | None], **options: Any) -> TracedOperands:
        """Unwrap the operands of `op`. options: of the call.

        Raises LayoutError if the op's rule cannot take the layouts, or if this rank is outside the mesh.
        """
        guard_shapes()
        mesh = next(tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor))
        plan = CallPlan.find(op, tensors, mesh, options)
        if not plan.is_in_mesh:
            raise LayoutError(
                f"{op.name} is compiled on rank {this_rank()}, which is not in {plan.sharding.output.mesh}; compile it "
                f"on the ranks of the mesh alone"
            )
        return cls(tensors, plan, tuple(map(to_local, tensors)))

    @property
    def local_options(self) -> dict[str, Any]:
        """This rank's options, from the op's rule."""
        return self.plan.local_options

    def wrap_outputs(self, outputs: Sequence[Tensor]) -> tuple[DTensor, ...]:
        """Wrap the local outputs of an op of several outputs."""
        layouts = self.plan.outputs
        return tuple(wrap(local, layout, shape) for local, (layout, shape) in zip(outputs, layouts, strict=True))

    def gradient_layouts(self, *grads: DTensor | None) -> tuple[Layout | None, ...]:
        """The layouts of the operands' gradients, from the gradients of the outputs."""
        return self.plan.operand_gradient_layouts(*(None if grad is None else layout_of(grad) for grad in grads))

    def wrap_gradient(self, i: int, local: Tensor, layout: Layout | None) -> Tensor:
        """Wrap the local gradient of operand i as the operand is. Raises LayoutError as `wrap_as_operand`."""
        operand = self.tensors[i]
        assert operand is not None and layout is not None, "an operand that was left out has no gradient"
        return wrap_as_operand(self.plan.op, local, layout, operand.shape, not isinstance(operand, DTensor))


def groups_of(*tensors: Tensor | None) -> list[str] | None:
    """Strings that identify this rank's traced graph: the names of the DTensors' process groups, the rank, the version.

    None without a DTensor. A custom op gets the strings as an argument and does not read them. The strings keep apart
    the graphs which the compiler caches on disk: the compiler knows the same of a DTensor on every rank, but a graph
    has a single rank's part and groups. Without the strings a cached graph could run on another rank or in another
    program.
    """
    for tensor in tensors:
        if isinstance(tensor, DTensor):
            groups = [tensor.device_mesh.get_group(axis).group_name for axis in range(tensor.device_mesh.ndim)]
            return [*groups, f"rank {dist.get_rank()}, weft-kernels {VERSION}"]
    return None


def to_local(tensor: Tensor | None) -> Tensor | None:
    """The local tensor of a DTensor; a plain tensor or None itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@library.custom_op("weft::sum_over", mutates_args=())
def _sum_over(part: Tensor, group: str) -> Tensor:
    total = part.clone()
    wait_for(dist.all_reduce(total, group=group_named(group), async_op=True))
    return total


@_sum_over.register_fake
def _(part: Tensor, group: str) -> Tensor:
    return part.new_empty(part.shape)


def sum_over(part: Tensor, names: Sequence[str]) -> Tensor:
    """Sum all ranks' parts over each of the named groups in turn. Communication: an all-reduce for each group."""
    for name in names:
        part = _sum_over(part, name)
    return part
