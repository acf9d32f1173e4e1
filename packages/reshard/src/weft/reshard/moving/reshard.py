"""`reshard`, `start_reshard`, `to_global`: bring a DTensor to another layout, on any mesh, with autograd.

A call resolves the target layout, gets the plan (`planning.plan`), and runs the plan's steps: by
`PreparedPlan.start`, or as custom ops (compiled.py) while torch.compile traces. The autograd functions at the end of
the file reshard gradients back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from weft.mesh import Layout, LayoutError, Partial, ProcessMesh, Replicate, Shard, as_placement

from ..planning.layouts import cotangent
from ..planning.plan import Plan, plan
from ..world.dynamo import in_graph, is_compiling
from ..world.groups import this_rank, world_cache
from .collectives import Pending
from .compiled import begin, finish, traced
from .dtensor import (
    Placements,
    as_process_mesh,
    dtensor_spec,
    is_strided,
    layout_given,
    layout_of,
    one_mesh,
    shape_of,
    wrap,
    wrap_with_spec,
)
from .executor import PreparedPlan, prepared
from .topology import Topology


def reshard(
    dtensor: DTensor,
    mesh: ProcessMesh | DeviceMesh | Layout | None = None,
    placements: Placements | Layout | None = None,
    *,
    device_mesh: ProcessMesh | DeviceMesh | None = None,
    topology: Topology | None = None,
    memory_limit: int | None = None,
) -> DTensor:
    """Brings `dtensor` to the layout of `placements` on `mesh`, and returns the result as a new DTensor.

    mesh: of the same ranks or any others; None is the mesh of `dtensor`. Ranks outside `mesh` get an empty local part
        with the result's metadata. A Layout gives mesh and placements at once.
    placements: mesh axes without a placement replicate.
    device_mesh: torch's name for `mesh`; do not give both.
    topology, memory_limit: see `plan`.

    Differentiable, also twice: the backward brings the gradient to the layout of `dtensor`, or to Replicate where
    `dtensor` is Partial, even where the forward moves nothing. Where this rank receives nothing, the result may share
    memory with `dtensor`.
    Communication: the steps of `plan(layout_of(dtensor), target, shape, dtype)`, on the ranks of both meshes. Where the
    target's mesh is new to this world of process groups, its ranks also make its groups.
    Raises LayoutError for a target without a plan, or a local part of another shape than its layout gives; ValueError
    where two meshes are given, and in compiled code for a mesh, a Layout, a topology or a memory_limit, as compiled
    code can give placements alone.
    """
    if torch.compiler.is_dynamo_compiling():
        on_mesh, placements = _one_target(mesh, device_mesh, placements)
        if on_mesh is not None or isinstance(placements, Layout) or topology is not None or memory_limit is not None:
            # ValueError: Dynamo cannot construct a LayoutError.
            raise ValueError(
                "compiled code reshards by placements, on the tensor's mesh; call reshard outside the compiled "
                "function to give a mesh, a Layout, a topology or a memory_limit"
            )
        return _in_graph(dtensor, *_graph_arguments(placements))
    result: DTensor = _Reshard.apply(*_start(dtensor, mesh, placements, device_mesh, topology, memory_limit))  # type: ignore[no-untyped-call]
    return result


def _one_target(
    mesh: ProcessMesh | DeviceMesh | Layout | None,
    device_mesh: ProcessMesh | DeviceMesh | None,
    placements: Placements | Layout | None,
) -> tuple[ProcessMesh | DeviceMesh | None, Placements | Layout | None]:
    """The mesh and the placements in reshard's arguments; a Layout comes back as the placements.

    Raises ValueError for a Layout beside a mesh or placements, and for two meshes.
    """
    if isinstance(mesh, Layout):
        if device_mesh is not None or placements is not None:
            raise ValueError(
                f"reshard was given the layout ({mesh}) and a mesh or placements beside it; give the layout alone"
            )
        return None, mesh
    return one_mesh(mesh, device_mesh), placements


@in_graph
def _in_graph(dtensor: DTensor, axes: tuple[str, ...] | None, texts: str | tuple[str, ...]) -> DTensor:
    """`reshard` while Dynamo traces: a node of the graph. axes, texts: from `_graph_arguments`."""
    placements = texts if isinstance(texts, str) else tuple(map(as_placement, texts))
    named: Any = placements if axes is None else dict(zip(axes, placements, strict=True))
    result: DTensor = _Reshard.apply(*_start(dtensor, None, named))  # type: ignore[no-untyped-call]
    return result


def _graph_arguments(placements: Any) -> tuple[tuple[str, ...] | None, str | tuple[str, ...]]:
    """The mesh axes, if placements are given by axis, and the placements as strings: arguments for Dynamo's graph."""
    if placements is None or isinstance(placements, str):
        return None, placements or ()
    if isinstance(placements, Mapping):
        return tuple(placements), tuple([_placement_text(each) for each in placements.values()])
    return None, tuple([_placement_text(each) for each in placements])


def _placement_text(placement: Any) -> str:
    """`str(placement)`, in code that Dynamo can trace; also for torch's placements."""
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
    """Starts the first collective of a `reshard`; `wait()` of the result finishes the reshard and returns the DTensor.

    Arguments as `reshard`, and its LayoutErrors. In compiled code call `reshard`: torch.compile cannot trace this
    function. Until `wait()` returns, the memory of `dtensor` is being sent, and nothing may write to `dtensor`.
    In backward the order is reversed: the backward of `wait()` starts the gradient's first collective, and the backward
    of `start_reshard` waits for it. So computations between the two calls overlap with communication in both passes.
    """
    return StartedReshard(*_start(dtensor, mesh, placements, device_mesh, topology, memory_limit))


def _start(
    dtensor: DTensor,
    mesh: ProcessMesh | DeviceMesh | Layout | None,
    placements: Placements | Layout | None,
    device_mesh: ProcessMesh | DeviceMesh | None = None,
    topology: Topology | None = None,
    memory_limit: int | None = None,
) -> tuple[DTensor, _Change, Pending]:
    """Plans a reshard and starts the first collective. Returns `dtensor`, the plan with its layouts, and the run."""
    if not isinstance(dtensor, DTensor):
        raise LayoutError(f"reshard takes a DTensor, got {type(dtensor).__name__}; give it a layout with distribute()")
    on_mesh, placements = _one_target(mesh, device_mesh, placements)
    change = _cached_change(dtensor, on_mesh, placements, topology, memory_limit)
    with torch.no_grad():
        local = dtensor.to_local()
        if local.shape != change.local_shape and this_rank() in change.src.mesh:
            raise _wrong_local_shape(local, change.src, dtensor.shape)
        if not change.plan.steps:
            pending = Pending.finished(local)
        else:
            traces = is_compiling()
            pending = traced(change.plan, local, dtensor.device_mesh) if traces else change.prepared.start(local)
    return dtensor, change, pending


class _Change(NamedTuple):
    """A reshard's plan and layouts, the same for all DTensors of a kind; see `_cached_change`."""

    src: Layout  # of the input
    target: Layout  # of the result
    cotangent: Layout  # of the input's gradient
    plan: Plan
    prepared: PreparedPlan
    local_shape: tuple[int, ...]  # of this rank's part of the input
    # The spec of an input whose layout torch states by a `_StridedShard`: the gradient must have this spec; else None.
    strided_spec: Any
    topology: Topology | None
    memory_limit: int | None

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments for the reshard of the gradient."""
        return {"topology": self.topology, "memory_limit": self.memory_limit}

    def as_input(self, grad: DTensor) -> DTensor:
        """The gradient, with its layout stated by torch's placements of the input."""
        return grad if self.strided_spec is None else wrap_with_spec(grad.to_local(), self.strided_spec)


def _cached_change(
    dtensor: DTensor,
    mesh: ProcessMesh | DeviceMesh | None,
    placements: Placements | Layout | None,
    topology: Topology | None,
    memory_limit: int | None,
) -> _Change:
    """`_change`, computed once for each kind of DTensor and target, except while a graph is traced."""
    if is_compiling():
        return _change(dtensor, mesh, placements, topology, memory_limit)
    target: Any = tuple(placements.items()) if isinstance(placements, Mapping) else placements
    target = tuple(target) if isinstance(target, list) else target
    cache, key = world_cache(), (dtensor_spec(dtensor), mesh, target, topology, memory_limit)
    change = cache.get(key)
    if change is None:
        change = cache[key] = _change(dtensor, mesh, placements, topology, memory_limit)
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
    local_shape = src.local_shape(shape, this_rank())
    strided_spec = dtensor_spec(dtensor) if is_strided(dtensor) and cotangent(src) == src else None
    run = prepared(made, dtensor.device_mesh)
    return _Change(src, target, cotangent(src), made, run, local_shape, strided_spec, topology, memory_limit)


class StartedReshard:
    """A reshard under way; made by `start_reshard`, finished by `wait()`."""

    def __init__(self, dtensor: DTensor, change: _Change, pending: Pending) -> None:
        self._arguments = dtensor, change, pending
        self._gradient_reshard = _GradientReshard()
        self._token: Tensor | None = None
        if dtensor.requires_grad and torch.is_grad_enabled() and not is_compiling():
            self._token = _Started.apply(dtensor, change, self._gradient_reshard)  # type: ignore[no-untyped-call]

    def wait(self) -> DTensor:
        """Returns the resharded tensor. Communication: the plan's collectives after the first."""
        dtensor, change, pending = self._arguments
        token, self._token = self._token, None
        result: DTensor
        if token is None:  # no gradient is needed, or wait() was called before
            result = _Reshard.apply(dtensor, change, pending)  # type: ignore[no-untyped-call]
        else:
            result = _Waited.apply(token, dtensor.shape, change, pending, self._gradient_reshard)  # type: ignore[no-untyped-call]
        return result

    def token(self, grad: DTensor) -> Tensor:
        """An empty tensor that `_Waited.backward` returns, so that autograd calls `_Started.backward`.

        The gradient itself is in `_GradientReshard`.
        """
        return grad.to_local().new_empty(0) if self._token is None else self._token


class _GradientReshard:
    """Hands the gradient's reshard from `_Waited.backward` to `_Started.backward`."""

    started: StartedReshard | None = None  # None before and after


def _wrong_local_shape(local: Tensor, src: Layout, shape: torch.Size) -> LayoutError:
    """The error for a local part of another shape than its layout gives.

    If such a part were sent, the receiving ranks would wait for the missing elements.
    """
    rank = this_rank()
    return LayoutError(
        f"rank {rank} holds {tuple(local.shape)}, but ({src}) of {tuple(shape)} gives it "
        f"{src.local_shape(shape, rank)}; make the DTensor by distribute(), or give from_local the global shape= and "
        f"stride="
    )


def _target(src: Layout, mesh: ProcessMesh | DeviceMesh | None, placements: Placements | Layout | None) -> Layout:
    if not isinstance(placements, Layout):
        return layout_given(src.mesh if mesh is None else mesh, () if placements is None else placements)
    if mesh is not None and as_process_mesh(mesh) != placements.mesh:
        raise LayoutError(
            f"the target is a layout on {placements.mesh}, but mesh={mesh} was given too; give the layout alone"
        )
    return placements


def to_global(dtensor: DTensor) -> Tensor:
    """The whole tensor, on every rank of its mesh. Communication: a reshard to Replicate on every axis."""
    return reshard(dtensor, placements=[Replicate()] * dtensor.device_mesh.ndim).to_local()


class _Reshard(torch.autograd.Function):
    """A reshard, for autograd. Its dual is a reshard of the gradient, from any layout to `change.cotangent`."""

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
            # A new DTensor, with a single reference, is stored by autograd without a copy; on a rank outside the mesh
            # DTensor cannot copy.
            grad = wrap(grad.to_local(), wanted, grad.shape)
        return change.as_input(grad), None, None


class _Started(torch.autograd.Function):
    """The start of a reshard, for autograd; returns a token for `_Waited`. Its dual is `_Waited` of the gradient."""

    @staticmethod
    def forward(ctx: Any, dtensor: DTensor, change: _Change, gradient_reshard: _GradientReshard) -> Tensor:
        ctx.change, ctx.gradient_reshard = change, gradient_reshard
        return dtensor.to_local().new_empty(0)

    @staticmethod
    def backward(ctx: Any, token: Tensor) -> tuple[DTensor, None, None]:
        started, ctx.gradient_reshard.started = ctx.gradient_reshard.started, None
        assert started is not None, "the backward of wait() has run: only the token from wait() leads here"
        return ctx.change.as_input(started.wait()), None, None


class _Waited(torch.autograd.Function):
    """The end of a started reshard, for autograd. Its dual is `_Started` of the gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        token: Tensor,
        shape: torch.Size,
        change: _Change,
        pending: Pending,
        gradient_reshard: _GradientReshard,
    ) -> DTensor:
        ctx.change, ctx.gradient_reshard = change, gradient_reshard
        return wrap(pending.wait(), change.target, shape)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[Tensor, None, None, None, None]:
        started = start_reshard(grad, placements=ctx.change.cotangent, **ctx.change.options)
        ctx.gradient_reshard.started = started
        return started.token(grad), None, None, None, None


def begin_in_graph(dtensor: DTensor, placements: Layout) -> tuple[Tensor, Tensor]:
    """`start_reshard` inside an `in_graph` function.

    Returns two tensors, both for `finish_in_graph`: the reshard's number and an unfilled tensor.
    """
    made: tuple[Tensor, Tensor] = _Begun.apply(dtensor, _change(dtensor, None, placements, None, None))  # type: ignore[no-untyped-call]
    return made


def finish_in_graph(number: Tensor, unfilled: Tensor, dtensor: DTensor, placements: Layout) -> DTensor:
    """Waits for the reshard started by `begin_in_graph` with the same `dtensor`; returns the resharded DTensor."""
    change = _change(dtensor, None, placements, None, None)
    result: DTensor = _Finished.apply(number, unfilled, dtensor.detach(), change)  # type: ignore[no-untyped-call]
    return result


class _Begun(torch.autograd.Function):
    """The start of a reshard in a graph: returns the reshard's number (`compiled.begin`) and an unfilled tensor.

    The unfilled tensor is never read; autograd needs a tensor of the result's local shape. In backward the two outputs
    receive, in place of gradients, the number of the gradient's reshard and the local gradient being sent. The number
    is a float tensor, as only these have gradients.
    """

    @staticmethod
    def forward(ctx: Any, dtensor: DTensor, change: _Change) -> tuple[Tensor, Tensor]:
        ctx.change, ctx.shape, local = change, dtensor.shape, dtensor.to_local()
        return begin(change.plan, local), local.new_empty(change.target.local_shape(shape_of(dtensor), this_rank()))

    @staticmethod
    def backward(ctx: Any, number: Tensor, grad: Tensor) -> tuple[DTensor, None]:
        change: _Change = ctx.change
        return change.as_input(wrap(finish(number, grad, change.local_shape), change.cotangent, ctx.shape)), None


class _Finished(torch.autograd.Function):
    """The end of a reshard begun in a graph. Its dual is `_Begun` of the gradient."""

    @staticmethod
    def forward(ctx: Any, number: Tensor, unfilled: Tensor, dtensor: DTensor, change: _Change) -> DTensor:
        ctx.change = change
        return wrap(finish(number, dtensor.to_local(), unfilled.shape), change.target, dtensor.shape)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[Tensor, Tensor, None, None]:
        change: _Change = ctx.change
        back, local = _change(grad, None, change.cotangent, change.topology, change.memory_limit), grad.to_local()
        return begin(back.plan, local), local, None, None
