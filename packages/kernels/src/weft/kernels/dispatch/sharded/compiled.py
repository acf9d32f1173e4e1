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
from .calls import Call, wrap_gradient

try:
    VERSION = version("weft-kernels")
except PackageNotFoundError:  # run from source, not installed
    VERSION = "unknown"


@dataclass(frozen=True, slots=True)
class Placed:
    """The operands of a traced op, global and local, on this rank. Made by `Placed.of`."""

    tensors: Sequence[Tensor | None]
    call: Call
    locals: tuple[Tensor | None, ...]
    options: dict[str, Any]  # from the op's rule, for this rank

    @classmethod
    def of(cls, op: Op, tensors: Sequence[Tensor | None], **options: Any) -> Placed:
        """Unwrap the operands. Raises LayoutError if the rule cannot take their layouts or this rank is outside the
        mesh.
        """
        guard_shapes()
        mesh = next(tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor))
        call = Call.of(op, tensors, mesh, options)
        if call.options is None:
            raise LayoutError(
                f"{op.name} is compiled on rank {this_rank()}, which is not in {call.sharding.output.mesh}; compile it "
                f"on the ranks of the mesh alone"
            )
        return cls(tensors, call, tuple(map(to_local, tensors)), call.options)

    def wrapped(self, outputs: Sequence[Tensor]) -> tuple[DTensor, ...]:
        """Wrap the local outputs of an op of several outputs."""
        layouts = self.call.outputs
        return tuple(wrap(part, layout, shape) for part, (layout, shape) in zip(outputs, layouts, strict=True))

    def gradients(self, *grads: DTensor | None) -> tuple[Layout | None, ...]:
        """The layouts of the operands' gradients, from the gradients of the outputs."""
        return self.call.gradients(*(None if grad is None else layout_of(grad) for grad in grads))

    def as_operand(self, i: int, gradient: Tensor, layout: Layout | None) -> Tensor:
        """Wrap the local gradient of operand i as the operand is. Raises as `wrap_gradient`."""
        operand = self.tensors[i]
        assert operand is not None and layout is not None, "an operand that was left out has no gradient"
        return wrap_gradient(self.call.op, gradient, layout, operand.shape, not isinstance(operand, DTensor))


def groups_of(*tensors: Tensor | None) -> list[str] | None:
    """The names of the DTensors' process groups, this rank, and this version, to put into the traced graph.

    None without a DTensor. The compiler caches compiled graphs on disk, and all it knows of a DTensor is the same on
    every rank. Without these strings a cached graph, which contains one rank's part and groups, could be run on
    another rank or by another program.
    """
    for tensor in tensors:
        if isinstance(tensor, DTensor):
            groups = [tensor.device_mesh.get_group(axis).group_name for axis in range(tensor.device_mesh.ndim)]
            return [*groups, f"rank {dist.get_rank()}, weft-kernels {VERSION}"]
    return None


def to_local(tensor: Tensor | None) -> Tensor | None:
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
    """Sum all ranks' parts over each of the named groups in turn."""
    for name in names:
        part = _sum_over(part, name)
    return part
