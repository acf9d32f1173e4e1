"""`reshard`: a DTensor brought to another layout, on its mesh or another, with autograd."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from weft.mesh import Layout, LayoutError, Partial, ProcessMesh, Replicate, Shard
from weft.mesh.placement import as_placement

from ..planning.layouts import cotangent
from ..planning.plan import Plan, plan
from .collectives import Pending
from .dtensor import (
    Placements,
    as_process_mesh,
    is_strided,
    kind_of,
    layout_given,
    layout_of,
    of_kind,
    one_mesh,
    shape_of,
    wrap,
)
from .dynamo import in_graph, is_compiling
from .executor import started
from .groups import of_this_world, this_rank
from .topology import Topology
from .traced import begin, finish, traced


def reshard(
    dtensor: DTensor,
    mesh: ProcessMesh | DeviceMesh | Layout | None = None,
    placements: Placements | Layout | None = None,
    *,
    device_mesh: ProcessMesh | DeviceMesh | None = None,
    topology: Topology | None = None,
    memory_limit: int | None = None,
) -> DTensor:
    """`dtensor` in the layout of `placements` on `mesh` (absent: its own mesh; absent axes replicate).

    mesh: of the same ranks or of others; ranks outside it then hold an empty local part with the metadata. A Layout is both.
    device_mesh: torch's name for it; give one of the two.
    topology, memory_limit: see `plan`.
    Differentiable, twice as well: the gradient is brought to the layout of `dtensor`, Replicate where that is Partial,
    also where the forward moves nothing. Where this rank receives nothing, the result may share memory with `dtensor`.
    Communication: the steps of `plan(layout_of(dtensor), target, shape, dtype)`, started by the ranks of both meshes. Where
    the target's mesh is new to this process group world, its ranks make its groups.
    Raises LayoutError for a target that no plan leads to, or where this rank's part has not the shape of its layout;
    ValueError where two meshes are given, and in compiled code for a mesh, a Layout, a topology or a memory_limit: there it takes placements alone.
    """
    if torch.compiler.is_dynamo_compiling():
        where, placements = _asked(mesh, device_mesh, placements)
        if where is not None or isinstance(placements, Layout) or topology is not None or memory_limit is not None:
            # Dynamo cannot make a LayoutError.
            raise ValueError(
                "compiled code reshards by placements, on the tensor's mesh; call reshard outside for the rest"
            )
        return _in_graph(dtensor, *_in_words(placements))
    result: DTensor = _Reshard.apply(*_begun(dtensor, mesh, placements, device_mesh, topology, memory_limit))  # type: ignore[no-untyped-call]
    return result


def _asked(
    mesh: ProcessMesh | DeviceMesh | Layout | None,
    device_mesh: ProcessMesh | DeviceMesh | None,
    placements: Placements | Layout | None,
) -> tuple[ProcessMesh | DeviceMesh | None, Placements | Layout | None]:
    """The mesh and the placements that are meant."""
    if isinstance(mesh, Layout):
        if device_mesh is not None or placements is not None:
            raise ValueError(
                f"reshard was given the layout ({mesh}) and a mesh or placements beside it; give the layout alone"
            )
        return None, mesh
    return one_mesh(mesh, device_mesh), placements


@in_graph
def _in_graph(dtensor: DTensor, axes: tuple[str, ...] | None, words: str | tuple[str, ...]) -> DTensor:
    """`reshard` where Dynamo traces."""
    placements = words if isinstance(words, str) else tuple(map(as_placement, words))
    named: Any = placements if axes is None else dict(zip(axes, placements, strict=True))
    result: DTensor = _Reshard.apply(*_begun(dtensor, None, named))  # type: ignore[no-untyped-call]
    return result


def _in_words(placements: Any) -> tuple[tuple[str, ...] | None, str | tuple[str, ...]]:
    """The axes, where placements are named, and the placements: what Dynamo can put into its graph."""
    if placements is None or isinstance(placements, str):
        return None, placements or ()
    if isinstance(placements, Mapping):
        return tuple(placements), tuple([_word(each) for each in placements.values()])
    return None, tuple([_word(each) for each in placements])


def _word(placement: Any) -> str:
    """`str(placement)`, as Dynamo can trace it; of torch's placements as well."""
    if isinstance(placement, Shard | TorchShard):
        return f"S({placement.dim})"
    if isinstance(placement, Replicate | TorchReplicate):
        return "R"
    return f"P({placement.op if isinstance(placement, Partial) else placement.reduce_op})"


def start_reshard(
    dtensor: DTensor,
    mesh: ProcessMesh | DeviceMesh | Layout | None = None,
    placements: Placements | Layout | None = None,
    *,
    device_mesh: ProcessMesh | DeviceMesh | None = None,
    topology: Topology | None = None,
    memory_limit: int | None = None,
) -> StartedReshard:
    """`reshard` whose first collective is started, and waited for by `wait()`; see there for the rest. Until then `dtensor` is sent
    from its own memory: nothing may write to it.

    In the backward it is the other way round: that of `wait()` starts the gradient's first collective, and that of
    `start_reshard` waits for it. What was computed between the two has its backward between them.
    """
    return StartedReshard(*_begun(dtensor, mesh, placements, device_mesh, topology, memory_limit))


def _begun(
    dtensor: DTensor,
    mesh: ProcessMesh | DeviceMesh | Layout | None,
    placements: Placements | Layout | None,
    device_mesh: ProcessMesh | DeviceMesh | None = None,
    topology: Topology | None = None,
    memory_limit: int | None = None,
) -> tuple[DTensor, _Change, Pending]:
    """The tensor, what is done to it, and that under way."""
    if not isinstance(dtensor, DTensor):
        raise LayoutError(f"reshard takes a DTensor, got {type(dtensor).__name__}; give it a layout with distribute()")
    where, placements = _asked(mesh, device_mesh, placements)
    change = _change_of(dtensor, where, placements, topology, memory_limit)
    with torch.no_grad():
        local = dtensor.to_local()
        if local.shape != change.part and this_rank() in change.src.mesh:
            raise _misshapen(local, change.src, dtensor.shape)
        if not change.plan.steps:
            pending = Pending.finished(local)
        else:
            run = traced if is_compiling() else started
            pending = run(change.plan, local, dtensor.device_mesh)
    return dtensor, change, pending


class _Change(NamedTuple):
    """What reshards of one kind of DTensor have in common.

    part: the shape of this rank's local tensor.
    strided: the kind of the DTensor where torch spells its layout in a way of its own, in which its gradient has to lie.
    """

    src: Layout
    target: Layout
    cotangent: Layout
    plan: Plan
    part: tuple[int, ...]
    strided: Any
    topology: Topology | None
    memory_limit: int | None

    @property
    def options(self) -> dict[str, Any]:
        """For the reshard of the gradient."""
        return {"topology": self.topology, "memory_limit": self.memory_limit}

    def as_input(self, grad: DTensor) -> DTensor:
        """The gradient, in the layout of the input, as torch spells that."""
        return grad if self.strided is None else of_kind(grad.to_local(), self.strided)


def _change_of(
    dtensor: DTensor,
    mesh: ProcessMesh | DeviceMesh | None,
    placements: Placements | Layout | None,
    topology: Topology | None,
    memory_limit: int | None,
) -> _Change:
    """Found once for DTensors that lie alike, where the placements are given as a value that is quickly compared."""
    if is_compiling() or not isinstance(placements, Layout | str | tuple | None):
        return _change(dtensor, mesh, placements, topology, memory_limit)
    kept, key = of_this_world(), (kind_of(dtensor), mesh, placements, topology, memory_limit)
    change = kept.get(key)
    if change is None:
        change = kept[key] = _change(dtensor, mesh, placements, topology, memory_limit)
    found: _Change = change
    return found


def _change(
    dtensor: DTensor,
    mesh: ProcessMesh | DeviceMesh | None,
    placements: Placements | Layout | None,
    topology: Topology | None,
    memory_limit: int | None,
) -> _Change:
    src, shape = layout_of(dtensor), shape_of(dtensor)
    target = _target(src, mesh, placements).resolved(shape)
    made = plan(src, target, shape, dtensor.dtype, topology=topology, memory_limit=memory_limit)
    part = src.local_shape(shape, this_rank())
    strided = kind_of(dtensor) if is_strided(dtensor) and cotangent(src) == src else None
    return _Change(src, target, cotangent(src), made, part, strided, topology, memory_limit)


class StartedReshard:
    """A reshard under way; made by `start_reshard`."""

    def __init__(self, dtensor: DTensor, change: _Change, pending: Pending) -> None:
        self._arguments = dtensor, change, pending
        self._backward = _Backward()
        self._token: Tensor | None = None
        if dtensor.requires_grad and torch.is_grad_enabled() and not is_compiling():
            self._token = _Started.apply(dtensor, change, self._backward)  # type: ignore[no-untyped-call]

    def wait(self) -> DTensor:
        """The resharded tensor. Communication: the collectives of the plan after the first."""
        dtensor, change, pending = self._arguments
        token, self._token = self._token, None
        result: DTensor
        if token is None:  # no gradient, or not the first time
            result = _Reshard.apply(dtensor, change, pending)  # type: ignore[no-untyped-call]
        else:
            result = _Waited.apply(token, dtensor.shape, change, pending, self._backward)  # type: ignore[no-untyped-call]
        return result

    def token(self, grad: DTensor) -> Tensor:
        """What autograd hands from the backward of `wait()` to that of `start_reshard`, which looks elsewhere for the gradient."""
        return grad.to_local().new_empty(0) if self._token is None else self._token


class _Backward:
    """Of a reshard that was started: that of its gradient, from the backward of `wait()` to that of the start."""

    started: StartedReshard | None = None


def _misshapen(local: Tensor, src: Layout, shape: torch.Size) -> LayoutError:
    """A part of another size would be sent as if it were right, and the ranks that receive it would wait for the rest."""
    rank = this_rank()
    return LayoutError(
        f"rank {rank} holds {tuple(local.shape)}, but ({src}) of {tuple(shape)} gives it {src.local_shape(shape, rank)}; "
        "make the DTensor by distribute(), or give from_local the global shape= and stride="
    )


def _target(src: Layout, mesh: ProcessMesh | DeviceMesh | None, placements: Placements | Layout | None) -> Layout:
    if not isinstance(placements, Layout):
        return layout_given(src.mesh if mesh is None else mesh, () if placements is None else placements)
    if mesh is not None and as_process_mesh(mesh) != placements.mesh:
        raise LayoutError(f"the target is a layout on {placements.mesh}, and the mesh given is {mesh}; give one")
    return placements


def to_global(dtensor: DTensor) -> Tensor:
    """The whole tensor, on every rank of its mesh. Communication: a reshard to Replicate on every axis."""
    return reshard(dtensor, placements=[Replicate()] * dtensor.device_mesh.ndim).to_local()


class _Reshard(torch.autograd.Function):
    """Its dual is itself: layout of the gradient -> layout of the input."""

    @staticmethod
    def forward(ctx: Any, dtensor: DTensor, change: _Change, pending: Pending) -> DTensor:
        ctx.change = change
        return wrap(pending.wait(), change.target, dtensor.shape)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[DTensor, None, None]:
        change: _Change = ctx.change
        wanted, options = change.cotangent, change.options
        if layout_of(grad) != wanted:
            grad = reshard(grad, placements=wanted, **options)
        elif this_rank() not in wanted.mesh:
            # One that nobody else holds, so that autograd keeps it: it would copy another, which DTensor cannot do here.
            grad = wrap(grad.to_local(), wanted, grad.shape)
        return change.as_input(grad), None, None


class _Started(torch.autograd.Function):
    """The start of a reshard, for autograd: an empty token, which `_Waited` takes. Its dual is `_Waited` of the gradient."""

    @staticmethod
    def forward(ctx: Any, dtensor: DTensor, change: _Change, backward: _Backward) -> Tensor:
        ctx.change, ctx.backward_of = change, backward
        return dtensor.to_local().new_empty(0)

    @staticmethod
    def backward(ctx: Any, token: Tensor) -> tuple[DTensor, None, None]:
        started, ctx.backward_of.started = ctx.backward_of.started, None
        assert started is not None, "the backward of wait() has come before, as only it leads here"
        return ctx.change.as_input(started.wait()), None, None


class _Waited(torch.autograd.Function):
    """The end of a reshard that was started. Its dual is `_Started` of the gradient."""

    @staticmethod
    def forward(
        ctx: Any, token: Tensor, shape: torch.Size, change: _Change, pending: Pending, backward: _Backward
    ) -> DTensor:
        ctx.change, ctx.backward_of = change, backward
        return wrap(pending.wait(), change.target, shape)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[Tensor, None, None, None, None]:
        started = start_reshard(grad, placements=ctx.change.cotangent, **ctx.change.options)
        ctx.backward_of.started = started
        return started.token(grad), None, None, None, None


def begin_in_graph(dtensor: DTensor, placements: Layout) -> tuple[Tensor, Tensor]:
    """`start_reshard` as two tensors, for a function that Dynamo takes as one node; `finish_in_graph` takes them."""
    made: tuple[Tensor, Tensor] = _Begun.apply(dtensor, _change(dtensor, None, placements, None, None))  # type: ignore[no-untyped-call]
    return made


def finish_in_graph(number: Tensor, unfilled: Tensor, dtensor: DTensor, placements: Layout) -> DTensor:
    """What `begin_in_graph` started of the same tensor."""
    change = _change(dtensor, None, placements, None, None)
    result: DTensor = _Finished.apply(number, unfilled, dtensor.detach(), change)  # type: ignore[no-untyped-call]
    return result


class _Begun(torch.autograd.Function):
    """The start of a reshard in a graph: its number, and a tensor like the result, which is never filled or read.

    Their gradients are the number of the gradient's reshard, and the gradient that it is of.
    """

    @staticmethod
    def forward(ctx: Any, dtensor: DTensor, change: _Change) -> tuple[Tensor, Tensor]:
        ctx.change, ctx.shape, local = change, dtensor.shape, dtensor.to_local()
        return begin(change.plan, local), local.new_empty(change.target.local_shape(shape_of(dtensor), this_rank()))

    @staticmethod
    def backward(ctx: Any, number: Tensor, grad: Tensor) -> tuple[DTensor, None]:
        change: _Change = ctx.change
        return change.as_input(wrap(finish(number, grad, change.part), change.cotangent, ctx.shape)), None


class _Finished(torch.autograd.Function):
    """The end of a reshard that was begun in a graph. Its dual is `_Begun` of the gradient."""

    @staticmethod
    def forward(ctx: Any, number: Tensor, unfilled: Tensor, dtensor: DTensor, change: _Change) -> DTensor:
        ctx.change = change
        return wrap(finish(number, dtensor.to_local(), unfilled.shape), change.target, dtensor.shape)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[Tensor, Tensor, None, None]:
        change: _Change = ctx.change
        back, local = _change(grad, None, change.cotangent, change.topology, change.memory_limit), grad.to_local()
        return begin(back.plan, local), local, None, None
