"""Lets modules compute on local tensors, on a mesh that divides nothing but the rows of a batch.

A whole module is then a single op on DTensors: inputs and parameters are unwrapped once and the output is wrapped once,
instead of in each op of the module. FSDP2 does the same.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from weft.kernels.extension import apply_function, find_slice_layout, refuse_second_derivative, slice_gradient
from weft.mesh import Layout, LayoutError, Partial, ProcessMesh, Shard
from weft.reshard import layout_of
from weft.reshard.extension import (
    BUCKET_BYTES,
    dtensor_spec,
    is_compiling,
    layout_on,
    local_grad_callback,
    memory_of,
    this_rank,
    world_cache,
    wrap,
    wrap_with_spec,
)

from ..layers import ROW_INDEPENDENT, Dropout, hooks_of
from .styles import is_data_axis


def hook_rows(model: nn.Module, mesh: ProcessMesh, *, by_block: bool) -> None:
    """Make a laid-out model compute on local tensors, on the ranks of a mesh with data axes only.

    Each block, a `row_independent` module in a ModuleList, is switched to local tensors by itself. The whole model is
    switched at once if the model is `row_independent`, `by_block` is False, and the gradients fit in a single bucket. A
    switched module's gradients become available all at once: a larger model goes block by block, so buckets are reduced
    while backward continues.
    A switched module still computes on DTensors if the module is compiled, drops elements or mixes rows; if a module
    within has a hook, a replaced forward, or a class that is not `row_independent`; and for inputs of another layout.
    Communication: none.
    """
    axes = (axis for axis, size in zip(mesh.axis_names, mesh.shape, strict=True) if size > 1)
    if this_rank() not in mesh or not all(map(is_data_axis, axes)):
        return
    nbytes = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    if is_row_independent(model) and not by_block and nbytes <= BUCKET_BYTES:
        model.forward = partial(_forward, _SwitchedModule(model, model.forward))
        return
    for blocks in model.modules():
        for block in blocks.children() if isinstance(blocks, nn.ModuleList) else ():
            if is_row_independent(block):
                block.forward = partial(_forward, _SwitchedModule(block, block.forward))


def is_row_independent(module: nn.Module) -> bool:
    """Whether a module computes each row of a batch from this row alone."""
    return type(module) in ROW_INDEPENDENT and not getattr(module, "reads_other_rows", False)


class _SwitchedModule:
    """A module that may compute on local tensors; kept with the module's replaced forward."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self.module, self.forward = module, forward  # forward: the module's own
        self.contents: _Contents | None = None  # of the latest inspection
        self.last: Callable[[], _LocalCall | None] = lambda: None  # a weak reference to the last call

    def __getstate__(self) -> tuple[nn.Module, Callable[..., Any]]:
        """Copied and pickled without `contents`, since the module's parameters may have no memory between calls."""
        return self.module, self.forward

    def __setstate__(self, state: tuple[nn.Module, Callable[..., Any]]) -> None:
        _SwitchedModule.__init__(self, *state)


class _Contents:
    """An inspection of a switched module: the modules and parameters within.

    Kept from call to call, since an inspection takes as long as several ops.
    """

    def __init__(self, switched: nn.Module, mesh: DeviceMesh, ndim: int) -> None:
        self.mesh, replicated = mesh, (Replicate(),) * ndim
        self.users: dict[DTensor, list[tuple[nn.Module, str]]] = {}  # parameter -> modules that hold it, names there
        modules = [switched]
        for module in modules:  # the list grows meanwhile
            modules += filter(None, module._modules.values())
        for module in modules:
            for name, parameter in module._parameters.items():
                if isinstance(parameter, DTensor):
                    self.users.setdefault(parameter, []).append((module, name))
        self._modules = modules[1:]
        self._classes = [*map(type, self._modules)]
        self._dropouts = [module for module in self._modules if isinstance(module, Dropout)]
        self._hooks = [hooks for module in self._modules for hooks in hooks_of(module)]
        self._tables: list[list[dict[str, Any]]] = [[m._modules for m in modules], [m._parameters for m in modules]]
        self._entries = [*map(_flatten, self._tables)]
        self.locals = [*map(memory_of, self.users)]  # the parameters' local tensors
        plain = [each for each in self._entries[1] if each is not None and not isinstance(each, DTensor)]
        all_replicated = all(_has_layout(parameter, mesh, replicated) for parameter in self.users)
        all_row_independent = all(
            type(module) is nn.ModuleList or is_row_independent(module) for module in self._modules
        )
        # Whether local tensors may be used: all parameters are replicated, and no module has been altered.
        self.is_eligible = all_row_independent and all_replicated and not plain and self._is_bare()

    def _is_bare(self) -> bool:
        """Whether no module has a hook or a replaced forward, is compiled, or drops elements."""
        if any(self._hooks) or any(module.is_active for module in self._dropouts):
            return False
        return all(vars(module).keys().isdisjoint(("forward", "_compiled_call_impl")) for module in self._modules)

    def is_current(self, mesh: DeviceMesh) -> bool:
        """Whether the module is eligible and a new inspection would find the same. Quick, since every call asks."""
        if not self.is_eligible or mesh is not self.mesh:
            return False
        entries = [*map(_flatten, self._tables)]
        if not all(
            len(new) == len(old) and all(map(is_, new, old)) for new, old in zip(entries, self._entries, strict=True)
        ):
            return False
        same_classes = all(map(is_, map(type, self._modules), self._classes))
        return same_classes and all(map(is_, map(memory_of, self.users), self.locals)) and self._is_bare()


def _flatten(tables: list[dict[str, Any]]) -> list[Any]:
    return [*chain.from_iterable(map(dict.values, tables))]


def _has_layout(tensor: DTensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> bool:
    device_mesh = tensor.device_mesh
    return (device_mesh is mesh or device_mesh == mesh) and tensor.placements == placements


class _LocalCall:
    """A call of a switched module, and the tensors to unwrap for the call."""

    def __init__(self, switched: _SwitchedModule, args: tuple[Any, ...], kwargs: dict[str, Any], x: DTensor) -> None:
        self.switched, self.args, self.kwargs = switched, args, kwargs
        self.mesh, self.placements, self.kind = x.device_mesh, x.placements, dtensor_spec(x)
        self.tensor_keys: list[int | str] = []  # of tensor arguments besides x: positions in args, names in kwargs
        self.users: dict[DTensor, list[tuple[nn.Module, str]]] = {}  # as in `_Contents`
        self.operands: list[Tensor] = [x]  # x, the tensors at `tensor_keys`, the parameters
        self.locals: list[Tensor] = []  # the parameters' local tensors
        # lone: no second call of the module awaits backward. is_over: backward has reached the call's beginning.
        self.lone, self.is_over = True, False

    def prepare(self) -> bool:
        """Find the operands. Returns whether the call may run on local tensors."""
        if not self._add_arguments():
            return False
        contents = self.switched.contents
        if contents is None or not contents.is_current(self.mesh):
            contents = self.switched.contents = _Contents(self.switched.module, self.mesh, len(self.placements))
        self.users, self.locals = contents.users, contents.locals
        self.operands += self.users
        return contents.is_eligible

    def _add_arguments(self) -> bool:
        """Add tensor arguments besides x to the operands. Returns whether all arguments allow local tensors."""
        B_T = self.operands[0].shape[:2]
        arguments: list[tuple[int | str, Any]] = [*enumerate(self.args[1:], 1), *self.kwargs.items()]
        for key, each in arguments:
            if isinstance(each, Tensor):
                # A plain tensor [B, T] holds all rows of the batch; each rank would need only the rank's rows.
                all_replicated = (
                    _has_layout(each, self.mesh, self.placements)
                    if isinstance(each, DTensor)
                    else each.shape[:2] != B_T
                )
                if each.requires_grad or not all_replicated:
                    return False
                self.tensor_keys.append(key)
                self.operands.append(each)
            elif each is not None and not isinstance(each, int):  # a cache, for example
                return False
        return True

    def unwrap(self) -> tuple[Tensor, ...]:
        """The operands' local tensors, detached."""
        arguments = self.operands[: 1 + len(self.tensor_keys)]
        locals_ = [each.to_local() if isinstance(each, DTensor) else each for each in arguments]
        return tuple([each.detach() for each in (*locals_, *self.locals)])

    def run(self, x: Tensor, *locals_: Tensor) -> Tensor:
        """Run the module's forward on local tensors: x and the remaining operands.

        Drops the references to the operands, which backward must not keep alive.
        """
        args, kwargs = [x, *self.args[1:]], dict(self.kwargs)
        self.args, self.kwargs = (), {}
        self.operands.clear()
        for key, local in zip(self.tensor_keys, locals_, strict=False):
            if isinstance(key, int):
                args[key] = local
            else:
                kwargs[key] = local
        try:
            self._place(locals_[len(self.tensor_keys) :])
            output: Tensor = self.switched.forward(*args, **kwargs)
            return output
        finally:
            self._place(self.users)

    def _place(self, tensors: Iterable[Any]) -> None:
        """Put an entry of `tensors` in place of each parameter, in all modules holding the parameter."""
        for tensor, users in zip(tensors, self.users.values(), strict=True):
            for module, name in users:
                module._parameters[name] = tensor

    def gradients(self, local_gradients: Sequence[Tensor | None], nodes: Sequence[Any]) -> list[Tensor | None]:
        """The operands' gradients as DTensors, given the local gradients.

        The input's gradient has the input's layout. A parameter's gradient is Partial over the axes sharding the
        rows. A gradient that a GradientSync takes at once is None in the result.
        local_gradients: the local gradient of each operand.
        nodes: the autograd node of each operand; empty where the gradients are differentiated.
        """
        first, *_ = local_gradients
        found: list[Tensor | None] = [None] * len(local_gradients)
        if first is not None:
            found[0] = wrap_with_spec(first, self.kind)
        kinds: dict[Any, Any] = world_cache().setdefault(("addends", self.mesh, self.placements), {})
        take = local_grad_callback(next(iter(self.users), None)) if self.lone and nodes else None
        for i, parameter in enumerate(self.users, 1 + len(self.tensor_keys)):
            local = local_gradients[i]
            if local is None:
                continue
            kind = kinds.get((dtensor_spec(parameter), local.dtype))
            if kind is None:
                kind = dtensor_spec(
                    wrap(local, _gradient_layout(layout_on(self.mesh, self.placements)), parameter.shape)
                )
                kinds[dtensor_spec(parameter), local.dtype] = kind
            if take is None or not _is_added_up(nodes[i]) or not take(parameter, local, kind):
                found[i] = wrap_with_spec(local, kind)
        return found


def _is_added_up(node: Any) -> bool:
    """Whether the running backward pass adds to the `.grad` of the leaf with this node.

    False in autograd.grad, and in a backward pass restricted to different leaves. torch.autograd.graph asks in this way
    for hooks of several tensors.
    """
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # raised in autograd.grad for this leaf
        return False


def _gradient_layout(rows: Layout) -> Layout:
    """The layout of a parameter's gradient, given the layout of the rows: Partial over the axes sharding the rows."""
    axes = zip(rows.mesh.axis_names, rows.mesh.shape, strict=True)
    return Layout(rows.mesh, {axis: Partial() for axis, size in axes if size > 1 and rows[axis] == Shard(0)})


def _forward(switched: _SwitchedModule, *args: Any, **kwargs: Any) -> Any:
    """The new forward of a module: on local tensors if the call allows, else the module's own forward."""
    x = args[0] if args else None
    if (
        isinstance(x, DTensor)
        and not is_compiling()
        and all(each.is_replicate() or each.is_shard(0) for each in x.placements)
    ):
        call = _LocalCall(switched, args, kwargs, x)
        if call.prepare():
            return _compute_locally(call, x)
    return switched.forward(*args, **kwargs)


def _compute_locally(call: _LocalCall, x: DTensor) -> DTensor:
    """The module's output as a DTensor, computed on local tensors."""
    if not torch.is_grad_enabled():
        return _wrap_output(call.run(*call.unwrap()), x)
    previous, call.switched.last = call.switched.last(), weakref.ref(call)
    if previous is not None and not previous.is_over:
        previous.lone = call.lone = False
    output: DTensor = apply_function(_Wrap, x, call.run(*apply_function(_Unwrap, call, *call.operands)))
    return output


def _wrap_output(output: Tensor, x: DTensor) -> DTensor:
    return wrap(output, layout_of(x), (x.shape[0], *output.shape[1:]))


class _Unwrap(torch.autograd.Function):
    """A call's operands as local tensors; backward gives the operands' gradients as DTensors."""

    @staticmethod
    def forward(ctx: Any, call: _LocalCall, *operands: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        locals_ = call.unwrap()
        needed = zip(locals_, ctx.needs_input_grad[1:], strict=True)
        ctx.mark_non_differentiable(*[local for local, need in needed if not need])
        return locals_

    @staticmethod
    def backward(ctx: Any, *local_gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.call.is_over = True
        if not torch.is_grad_enabled():
            return None, *ctx.call.gradients(local_gradients, [node for node, _ in ctx.next_functions])
        with torch.no_grad():
            gradients = ctx.call.gradients([None if each is None else each.detach() for each in local_gradients], ())
        return None, *refuse_second_derivative(gradients, *local_gradients)


class _Wrap(torch.autograd.Function):
    """A call's local output as a DTensor with the rows of the input; backward gives the local part of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: DTensor, output: Tensor) -> DTensor:
        wrapped = _wrap_output(output.detach(), x)
        ctx.layout, ctx.shape = layout_of(wrapped), tuple(wrapped.shape)
        return wrapped

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[None, Tensor | None]:
        with torch.no_grad():
            grad_layout = layout_of(grad)
            cut = find_slice_layout(grad_layout, ctx.layout, ctx.shape, grad.dtype)
            if cut is None and grad_layout != ctx.layout:
                raise LayoutError(
                    f"the gradient of rows laid out as ({ctx.layout}) came as ({grad_layout}); reshard the result "
                    f"computed from these rows before it is used"
                )
            part = slice_gradient(grad, cut).to_local()
        return None, refuse_second_derivative([part], grad)[0] if torch.is_grad_enabled() else part
