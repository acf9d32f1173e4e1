"""`apply` and `apply_many`: run an `Op` on plain tensors and on DTensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from weft.reshard.running.dynamo import in_graph

from ..backend import is_compiling, refuse_jit_trace
from ..op import OPS, Op
from .calls import Call, Flow
from .functions import FromLocal, Plain, Sharded, ToLocal, computed


def apply(op: Op, *tensors: Tensor | None, **options: Any) -> Tensor:
    """Run an op with a single output. The output is a DTensor if any operand is, otherwise a plain tensor.

    A plain tensor next to a DTensor counts as replicated. options: hashable values.
    Raises LayoutError for layouts the op's rule cannot take; RuntimeError under torch.jit.trace.
    """
    refuse_jit_trace(op.name)
    if not torch.is_grad_enabled() and _are_plain(tensors):
        output: Tensor = op.infer(*tensors, **options)
        return output
    found: Tensor = _run(op, tensors, options)[0]
    return found


def apply_many(op: Op, *tensors: Tensor | None, **options: Any) -> tuple[Tensor, ...]:
    """`apply`, for an op of several outputs."""
    refuse_jit_trace(op.name)
    if not torch.is_grad_enabled() and _are_plain(tensors):
        outputs: tuple[Tensor, ...] = op.infer(*tensors, **options)
        return outputs
    found: tuple[Tensor, ...] = _run(op, tensors, options)[:-1]
    return found


def _are_plain(tensors: tuple[Tensor | None, ...]) -> bool:
    """Whether no operand is a DTensor.

    Without gradients, an op on plain tensors is `Op.infer` alone: an autograd function would cost the host more than
    many an op.
    """
    for tensor in tensors:  # noqa: SIM110  a generator costs the host more
        if isinstance(tensor, DTensor):
            return False
    return True


def _run(op: Op, tensors: tuple[Tensor | None, ...], options: dict[str, Any]) -> Any:
    """Return the op's outputs and their `anchor`."""
    for tensor in tensors:
        if isinstance(tensor, DTensor):
            if is_compiling():
                return *_in_graph(op.name, tuple(options.items()), *tensors), None
            return _on_mesh(op, tensor.device_mesh, tensors, options)
    if op.backward is None:
        output = op.forward(*tensors, **options)
        return (*output, None) if isinstance(output, tuple) else (output, None)
    return recorded(Plain, op, options, *tensors)


def _on_mesh(op: Op, mesh: DeviceMesh, tensors: tuple[Tensor | None, ...], options: dict[str, Any]) -> Any:
    """`_run`, on DTensors."""
    call = Call.of(op, tensors, mesh, options)
    if not torch.is_grad_enabled():
        return *computed(call, options, tensors, recorded=False)[0], None
    if op.backward is not None or call.options is None:
        return recorded(Sharded, call, options, *tensors)
    flows: list[Flow] = []
    parts = ToLocal.apply(call, flows, *tensors)  # type: ignore[no-untyped-call]
    output = op.forward(*parts, **options, **call.options)
    outputs = (output,) if call.sharding.more is None else output
    return *FromLocal.apply(call, flows, *outputs), None  # type: ignore[no-untyped-call]


def recorded(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """Call an autograd function without torch's preparations for torch.func, as expensive as the rest of the call.

    Raises RuntimeError under a transform of torch.func: ops support none.
    """
    if is_compiling():
        return function.apply(*arguments)  # type: ignore[no-untyped-call]
    try:
        return super(torch.autograd.Function, function).apply(*arguments)  # type: ignore[misc]  # of torch's C
    except RuntimeError as error:
        if "functorch" not in str(error):
            raise
        raise RuntimeError(
            "the ops of weft.kernels take no transform of torch.func (vmap, grad, jvp); differentiate them "
            "with torch.autograd.grad"
        ) from None


@in_graph
def _in_graph(name: str, options: tuple[tuple[str, Any], ...], *tensors: Tensor | None) -> tuple[Tensor, ...]:
    """The outputs of an op on DTensors, while Dynamo traces."""
    mesh = next(tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor))
    return tuple(_on_mesh(OPS[name], mesh, tensors, dict(options))[:-1])
