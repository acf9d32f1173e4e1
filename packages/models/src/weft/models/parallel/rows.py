"""Modules computed on local tensors, where a mesh divides nothing in them but the rows of a batch.

There a module is one op on DTensors: what it is given and its parameters are unwrapped once, and its output is wrapped, where
else each of its ops would do so. FSDP2 computes so, too.
"""

from __future__ import annotations

import copy
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
from weft.kernels.backend import is_compiling
from weft.kernels.sharded.calls import sliced, sliced_layout
from weft.kernels.sharded.derivatives import refusing
from weft.kernels.sharded.run import recorded
from weft.mesh import Layout, LayoutError, Partial, ProcessMesh, Shard
from weft.reshard import layout_of
from weft.reshard.running.dtensor import kind_of, layout_on, memory_of, of_kind, wrap
from weft.reshard.running.gradients import BUCKET_BYTES, takes_addends
from weft.reshard.running.groups import of_this_world, this_rank

from ..layers import ROWWISE, Dropout, hooks_of
from .axes import is_of_data


def hook_rows(model: nn.Module, mesh: ProcessMesh, *, by_block: bool) -> None:
    """Has a laid out model compute on local tensors, on the ranks of a mesh that has axes of data alone.

    by_block: its blocks, the `rowwise` modules of a ModuleList, and not all of it at once. So it is in any case where the gradients
    are more than a bucket: those of a module come together, and the blocks' are to travel while backward goes on.
    A module computes as before where it is compiled, where it drops elements, where it reads other rows, where one within it has a
    hook, another forward or a class that is not `rowwise`, and where what it is given lies otherwise. Communication: none.
    """
    axes = (axis for axis, size in zip(mesh.axis_names, mesh.shape, strict=True) if size > 1)
    if this_rank() not in mesh or not all(map(is_of_data, axes)):
        return
    nbytes = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    if is_rowwise(model) and not by_block and nbytes <= BUCKET_BYTES:
        model.forward = partial(_forward, _Unit(model, model.forward))
        return
    for blocks in model.modules():
        for block in blocks.children() if isinstance(blocks, nn.ModuleList) else ():
            if is_rowwise(block):
                block.forward = partial(_forward, _Unit(block, block.forward))


def is_rowwise(module: nn.Module) -> bool:
    """Whether a module computes each row of a batch by itself, whatever the other rows are."""
    return type(module) in ROWWISE and not getattr(module, "reads_other_rows", False)


class _Unit:
    """A module, its forward, what is within it, and its last call."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self.module, self.forward = module, forward
        self.within: _Within | None = None
        self.last: Callable[[], _Call | None] = lambda: None

    def __deepcopy__(self, memo: dict[int, Any]) -> _Unit:
        """Without what was found within the module, whose parameters may have no memory between calls."""
        memo[id(self)] = copied = _Unit(copy.deepcopy(self.module, memo), self.forward)
        copied.forward = copy.deepcopy(self.forward, memo)
        return copied


class _Within:
    """The modules within a unit, and its parameters, as they were when they were looked at: to look takes as long as several ops.

    users: of each parameter, the modules that have it, and its name there. locals: their local tensors. is_whole: whether each
    lies whole on the mesh, and no module does more than its class says.
    """

    def __init__(self, unit: nn.Module, mesh: DeviceMesh, ndim: int) -> None:
        self.mesh, whole = mesh, (Replicate(),) * ndim
        self.users: dict[DTensor, list[tuple[nn.Module, str]]] = {}
        modules = [unit]
        for module in modules:  # which grows
            modules += filter(None, module._modules.values())
        for module in modules:
            for name, parameter in module._parameters.items():
                if isinstance(parameter, DTensor):
                    self.users.setdefault(parameter, []).append((module, name))
        self._modules = modules[1:]
        self._classes = [*map(type, self._modules)]
        self._drops = [module for module in self._modules if isinstance(module, Dropout)]
        self._hooks = [hooks for module in self._modules for hooks in hooks_of(module)]
        self._tables: list[list[dict[str, Any]]] = [[m._modules for m in modules], [m._parameters for m in modules]]
        self._held = [*map(_values, self._tables)]
        self.locals = [*map(memory_of, self.users)]
        plain = [each for each in self._held[1] if each is not None and not isinstance(each, DTensor)]
        alike = all(_lies(parameter, mesh, whole) for parameter in self.users)
        known = all(type(module) is nn.ModuleList or is_rowwise(module) for module in self._modules)
        self.is_whole = known and alike and not plain and self._is_bare()

    def _is_bare(self) -> bool:
        """Whether no module has a hook or another forward, is compiled, or drops elements."""
        if any(self._hooks) or any(module.drops for module in self._drops):
            return False
        return all(vars(module).keys().isdisjoint(("forward", "_compiled_call_impl")) for module in self._modules)

    def is_so_still(self, mesh: DeviceMesh) -> bool:
        """Whether another look would find the same. Every call asks, so it is done in few steps."""
        if not self.is_whole or mesh is not self.mesh:
            return False
        now = [*map(_values, self._tables)]
        if not all(
            len(one) == len(other) and all(map(is_, one, other)) for one, other in zip(now, self._held, strict=True)
        ):
            return False
        same = all(map(is_, map(type, self._modules), self._classes))
        return same and all(map(is_, map(memory_of, self.users), self.locals)) and self._is_bare()


def _values(tables: list[dict[str, Any]]) -> list[Any]:
    return [*chain.from_iterable(map(dict.values, tables))]


def _lies(tensor: DTensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> bool:
    on = tensor.device_mesh
    return (on is mesh or on == mesh) and tensor.placements == placements


class _Call:
    """A call of a unit, and what is unwrapped for it.

    mesh, placements: of the input. places: of the other tensors that it is given, a position in args or a name in kwargs.
    users: as of `_Within`. operands: the input, the other tensors, the parameters; locals: the local ones of the parameters.
    lone: whether no other call of the unit waits for its backward.
    """

    def __init__(self, unit: _Unit, args: tuple[Any, ...], kwargs: dict[str, Any], x: DTensor) -> None:
        self.unit, self.args, self.kwargs = unit, args, kwargs
        self.mesh, self.placements, self.kind = x.device_mesh, x.placements, kind_of(x)
        self.places: list[int | str] = []
        self.users: dict[DTensor, list[tuple[nn.Module, str]]] = {}
        self.operands: list[Tensor] = [x]
        self.locals: list[Tensor] = []
        self.lone, self.is_over = True, False

    def is_of_rows(self) -> bool:
        """Whether local tensors would do, of which it takes note."""
        if not self._take_others():
            return False
        within = self.unit.within
        if within is None or not within.is_so_still(self.mesh):
            within = self.unit.within = _Within(self.unit.module, self.mesh, len(self.placements))
        self.users, self.locals = within.users, within.locals
        self.operands += self.users
        return within.is_whole

    def _take_others(self) -> bool:
        B_T = self.operands[0].shape[:2]
        given: list[tuple[int | str, Any]] = [*enumerate(self.args[1:], 1), *self.kwargs.items()]
        for place, each in given:
            if isinstance(each, Tensor):
                # A plain tensor of the batch [B, T] is of all its rows, of which each rank would take its own.
                alike = _lies(each, self.mesh, self.placements) if isinstance(each, DTensor) else each.shape[:2] != B_T
                if each.requires_grad or not alike:
                    return False
                self.places.append(place)
                self.operands.append(each)
            elif each is not None and not isinstance(each, int):  # a cache
                return False
        return True

    def unwrapped(self) -> tuple[Tensor, ...]:
        """The operands' local tensors, without their graph."""
        given = self.operands[: 1 + len(self.places)]
        locals_ = [each.to_local() if isinstance(each, DTensor) else each for each in given]
        return tuple([each.detach() for each in (*locals_, *self.locals)])

    def run(self, x: Tensor, *locals_: Tensor) -> Tensor:
        """The forward on local tensors in the places of the operands, which backward does not keep alive."""
        args, kwargs = [x, *self.args[1:]], dict(self.kwargs)
        self.args, self.kwargs = (), {}
        self.operands.clear()
        for place, local in zip(self.places, locals_, strict=False):
            if isinstance(place, int):
                args[place] = local
            else:
                kwargs[place] = local
        try:
            self._place(locals_[len(self.places) :])
            output: Tensor = self.unit.forward(*args, **kwargs)
            return output
        finally:
            self._place(self.users)

    def _place(self, tensors: Iterable[Any]) -> None:
        """Puts a tensor in the places of each parameter."""
        for tensor, users in zip(tensors, self.users.values(), strict=True):
            for module, name in users:
                module._parameters[name] = tensor

    def gradients(self, parts: Sequence[Tensor | None], nodes: Sequence[Any]) -> list[Tensor | None]:
        """Those of the operands: each rank has the input's own rows, and an addend of a parameter's, where it had rows of its own.

        nodes: autograd's of each operand; none where the gradients are differentiated. What a GradientSync takes at once is left out.
        """
        first, *_ = parts
        found: list[Tensor | None] = [None] * len(parts)
        if first is not None:
            found[0] = of_kind(first, self.kind)
        kinds: dict[Any, Any] = of_this_world().setdefault(("addends", self.mesh, self.placements), {})
        take = takes_addends(next(iter(self.users), None)) if self.lone and nodes else None
        for i, parameter in enumerate(self.users, 1 + len(self.places)):
            part = parts[i]
            if part is None:
                continue
            kind = kinds.get((kind_of(parameter), part.dtype))
            if kind is None:
                kind = kind_of(wrap(part, _layout_of_addends(layout_on(self.mesh, self.placements)), parameter.shape))
                kinds[kind_of(parameter), part.dtype] = kind
            if take is None or not _is_added_up(nodes[i]) or not take(parameter, part, kind):
                found[i] = of_kind(part, kind)
        return found


def _is_added_up(node: Any) -> bool:
    """Whether the backward pass that runs adds to a leaf's `.grad`: not where it is for other leaves, or for autograd.grad.

    torch.autograd.graph asks so for its hooks of several tensors.
    """
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # autograd.grad, of this leaf
        return False


def _layout_of_addends(rows: Layout) -> Layout:
    """How a parameter's gradient lies where the rows lie so."""
    axes = zip(rows.mesh.axis_names, rows.mesh.shape, strict=True)
    return Layout(rows.mesh, {axis: Partial() for axis, size in axes if size > 1 and rows[axis] == Shard(0)})


def _forward(unit: _Unit, *args: Any, **kwargs: Any) -> Any:
    x = args[0] if args else None
    if (
        isinstance(x, DTensor)
        and not is_compiling()
        and all(each.is_replicate() or each.is_shard(0) for each in x.placements)
    ):
        call = _Call(unit, args, kwargs, x)
        if call.is_of_rows():
            return _computed(call, x)
    return unit.forward(*args, **kwargs)


def _computed(call: _Call, x: DTensor) -> DTensor:
    """What the unit gives, from local tensors."""
    if not torch.is_grad_enabled():
        return _wrapped(call.run(*call.unwrapped()), x)
    previous, call.unit.last = call.unit.last(), weakref.ref(call)
    if previous is not None and not previous.is_over:
        previous.lone = call.lone = False
    output: DTensor = recorded(_Leave, x, call.run(*recorded(_Enter, call, *call.operands)))
    return output


def _wrapped(output: Tensor, x: DTensor) -> DTensor:
    return wrap(output, layout_of(x), (x.shape[0], *output.shape[1:]))


class _Enter(torch.autograd.Function):
    """A call's operands as local tensors."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *operands: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        locals_ = call.unwrapped()
        needed = zip(locals_, ctx.needs_input_grad[1:], strict=True)
        ctx.mark_non_differentiable(*[local for local, need in needed if not need])
        return locals_

    @staticmethod
    def backward(ctx: Any, *parts: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.call.is_over = True
        if not torch.is_grad_enabled():
            return None, *ctx.call.gradients(parts, [node for node, _ in ctx.next_functions])
        with torch.no_grad():
            gradients = ctx.call.gradients([None if part is None else part.detach() for part in parts], ())
        return None, *refusing(gradients, *parts)


class _Leave(torch.autograd.Function):
    """What a call gave, as a DTensor of the rows of its input."""

    @staticmethod
    def forward(ctx: Any, x: DTensor, output: Tensor) -> DTensor:
        wrapped = _wrapped(output.detach(), x)
        ctx.layout, ctx.shape = layout_of(wrapped), tuple(wrapped.shape)
        return wrapped

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[None, Tensor | None]:
        with torch.no_grad():
            arrived = layout_of(grad)
            cut = sliced_layout(arrived, ctx.layout, ctx.shape, grad.dtype)
            if cut is None and arrived != ctx.layout:
                raise LayoutError(
                    f"the gradient of rows that lie ({ctx.layout}) is ({arrived}); reshard what was computed of them before it is "
                    f"used"
                )
            part = sliced(grad, cut).to_local()
        return None, refusing([part], grad)[0] if torch.is_grad_enabled() else part
