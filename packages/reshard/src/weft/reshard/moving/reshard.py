"""`reshard`, `start_reshard`, `to_global`: bring a DTensor to another layout, on any mesh, with autograd.

A call gets the `LayoutChange` to the target (layout_change.py), and runs its plan's steps: by `PreparedPlan.start`, or
as custom ops (compiled.py) while torch.compile traces. The autograd functions at the end of the file reshard gradients
back.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from weft.mesh import Layout, LayoutError, ProcessMesh, Replicate, as_placement

from ..planning.plan import check_limits
from ..world.dynamo import in_graph, is_compiling
from ..world.groups import this_rank
from .collectives import Pending
from .compiled import add_plan_node, add_start_node, add_wait_node, graph_arguments
from .dtensor import Placements, layout_of, mesh_argument, shape_of, wrap
from .layout_change import LayoutChange, cached_change, plan_change
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

    mesh: of the same ranks, or of different ranks; None is the mesh of `dtensor`. Ranks outside `mesh` get an empty
        local part with the result's metadata. A Layout gives mesh and placements at once.
    placements: as for `Layout`: a placement for each mesh axis in order, a mapping from axes, or text like "dp: S(0)".
        Axes without a placement replicate; None replicates on all axes.
    device_mesh: torch's name for `mesh`; None where `mesh` is given, or neither.
    topology: the links by which `plan` chooses the steps; None: the fewest bytes.
    memory_limit: bytes that may be alive at the same time on a rank, see `plan`; None: no limit.

    Differentiable, and so is the backward. Even where the forward moves nothing, the backward brings the gradient to
    the layout of `dtensor`, with Replicate on axes where `dtensor` is Partial. Where this rank receives nothing, the
    result may share memory with `dtensor`.
    Communication: the steps of `plan(layout_of(dtensor), target, shape, dtype)`, on the ranks of both meshes. Where the
    target's mesh is new to this world of process groups, the ranks of this mesh also make the mesh's groups.
    Raises LayoutError for a target without a plan, or a local part whose shape is not the layout's; ValueError
    where two meshes are given, and in compiled code for a mesh, a Layout, a topology or a memory_limit, as compiled
    code can give placements alone.
    """
    if torch.compiler.is_dynamo_compiling():
        on_mesh, placements = _mesh_and_placements(mesh, device_mesh, placements)
        if on_mesh is not None or isinstance(placements, Layout) or topology is not None or memory_limit is not None:
            # ValueError: Dynamo cannot construct a LayoutError.
            raise ValueError(
                "compiled code reshards by placements, on the tensor's mesh; call reshard outside the compiled "
                "function to give a mesh, a Layout, a topology or a memory_limit"
            )
        return _graph_node(dtensor, *graph_arguments(placements))
    result: DTensor = _Reshard.apply(*_start(dtensor, mesh, placements, device_mesh, topology, memory_limit))  # type: ignore[no-untyped-call]
    return result


def _mesh_and_placements(
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
    return mesh_argument(mesh, device_mesh), placements


@in_graph
def _graph_node(dtensor: DTensor, axes: tuple[str, ...] | None, texts: str | tuple[str, ...]) -> DTensor:
    """`reshard` while Dynamo traces: a node of the graph. axes, texts: from `graph_arguments`."""
    placements = texts if isinstance(texts, str) else tuple(map(as_placement, texts))
    placements_argument: Any = placements if axes is None else dict(zip(axes, placements, strict=True))
    result: DTensor = _Reshard.apply(*_start(dtensor, None, placements_argument))  # type: ignore[no-untyped-call]
    return result


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

    Called by users; by weft.models, for keys and values (parallel/context.py) and exact sums of losses (losses.py);
    and by the backward of `wait()`.
    Arguments and LayoutErrors as `reshard`. In compiled code call `reshard`: torch.compile cannot trace this
    function. Until `wait()` returns, the memory of `dtensor` is being sent, and nothing may write to `dtensor`.
    In backward the order is reversed: the backward of `wait()` starts the gradient's first collective, and the backward
    of `start_reshard` waits for this collective. Computations between the two calls overlap with communication in both
    passes.
    """
    return StartedReshard(*_start(dtensor, mesh, placements, device_mesh, topology, memory_limit))


def _start(
    dtensor: DTensor,
    mesh: ProcessMesh | DeviceMesh | Layout | None,
    placements: Placements | Layout | None,
    device_mesh: ProcessMesh | DeviceMesh | None = None,
    topology: Topology | None = None,
    memory_limit: int | None = None,
) -> tuple[DTensor, LayoutChange, Pending]:
    """Plans a reshard and starts the first collective. Returns `dtensor`, the layout change, and the running plan."""
    if not isinstance(dtensor, DTensor):
        raise LayoutError(f"reshard takes a DTensor, got {type(dtensor).__name__}; give it a layout with distribute()")
    on_mesh, placements = _mesh_and_placements(mesh, device_mesh, placements)
    if topology is not None or memory_limit is not None:
        check_limits(topology, memory_limit)
    change = cached_change(dtensor, on_mesh, placements, topology, memory_limit)
    with torch.no_grad():
        local = dtensor.to_local()
        if local.shape != change.local_shape and this_rank() in change.src.mesh:
            raise change.wrong_local_shape(local, dtensor.shape)
        if change.prepared_plan.does_nothing:
            pending = Pending.finished(local)
        elif is_compiling():
            pending = add_plan_node(change.plan_in_graph, local, dtensor.device_mesh)
        else:
            pending = change.prepared_plan.start(local)
    return dtensor, change, pending


class StartedReshard:
    """A reshard under way; made by `start_reshard`, finished by `wait()`.

    _arguments: from `_start`: the input, the LayoutChange and the running plan.
    _gradient_reshard: the place where the backward of `wait()` leaves the gradient's reshard.
    _token: the output of `_StartFunction`, until the first `wait()`; None where the input needs no gradient.
    """

    def __init__(self, dtensor: DTensor, change: LayoutChange, pending: Pending) -> None:
        self._arguments = dtensor, change, pending
        self._gradient_reshard = _GradientReshard()
        self._token: Tensor | None = None
        if dtensor.requires_grad and torch.is_grad_enabled() and not is_compiling():
            self._token = _StartFunction.apply(dtensor, change, self._gradient_reshard)  # type: ignore[no-untyped-call]

    def wait(self) -> DTensor:
        """Returns the resharded tensor. Communication: the plan's collectives after the first.

        Called once, by the caller of `start_reshard` or by `_StartFunction.backward`. A second call returns a new
        DTensor with the same memory, and communicates nothing; in backward the gradient is resharded separately.
        """
        dtensor, change, pending = self._arguments
        token, self._token = self._token, None
        result: DTensor
        if token is None:  # no gradient is needed, or wait() was called before
            result = _Reshard.apply(dtensor, change, pending)  # type: ignore[no-untyped-call]
        else:
            result = _WaitFunction.apply(token, dtensor.shape, change, pending, self._gradient_reshard)  # type: ignore[no-untyped-call]
        return result


class _GradientReshard:
    """Hands the gradient's reshard from `_WaitFunction.backward` to `_StartFunction.backward`."""

    # Set by `_WaitFunction.backward`; taken out, and set to None, by `_StartFunction.backward`.
    started: StartedReshard | None = None


def to_global(dtensor: DTensor) -> Tensor:
    """The whole tensor, on every rank of the mesh. Communication: a reshard to Replicate on every axis.

    Called by users, and by weft.models for logits, class weights, and parameters read whole (checkpoints, pipeline).
    Raises ValueError for a plain tensor.
    """
    if not isinstance(dtensor, DTensor):
        raise ValueError(f"to_global takes a DTensor, got a {type(dtensor).__name__}; a plain tensor is whole already")
    return reshard(dtensor, placements=[Replicate()] * dtensor.device_mesh.ndim).to_local()


class _Reshard(torch.autograd.Function):
    """A reshard, for autograd. Its dual is a reshard of the gradient, from any layout to `change.cotangent`."""

    @staticmethod
    def forward(ctx: Any, dtensor: DTensor, change: LayoutChange, pending: Pending) -> DTensor:
        ctx.change = change
        return wrap(pending.wait(), change.target, dtensor.shape)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[DTensor, None, None]:
        change: LayoutChange = ctx.change
        cotangent_layout, options = change.cotangent, change.options
        if layout_of(grad) != cotangent_layout:
            grad = reshard(grad, placements=cotangent_layout, **options)
        elif this_rank() not in cotangent_layout.mesh:
            # Autograd copies a gradient before storing it in `.grad`, unless nothing else refers to the gradient. On a
            # rank outside the mesh DTensor cannot copy. So a new DTensor is returned.
            grad = wrap(grad.to_local(), cotangent_layout, grad.shape)
        return change.restate_as_input(grad), None, None


class _StartFunction(torch.autograd.Function):
    """The start of a reshard, for autograd. Returns an empty tensor, the token, which `_WaitFunction` takes.

    The token joins the two functions in autograd's graph. So autograd runs `_WaitFunction.backward` first, which starts
    the gradient's reshard; the backward here waits for it.
    """

    @staticmethod
    def forward(ctx: Any, dtensor: DTensor, change: LayoutChange, gradient_reshard: _GradientReshard) -> Tensor:
        ctx.change, ctx.gradient_reshard = change, gradient_reshard
        return dtensor.to_local().new_empty(0)

    @staticmethod
    def backward(ctx: Any, token: Tensor) -> tuple[DTensor, None, None]:
        started, ctx.gradient_reshard.started = ctx.gradient_reshard.started, None
        assert started is not None, "the backward of wait() ran first: only its token leads autograd here"
        return ctx.change.restate_as_input(started.wait()), None, None


class _WaitFunction(torch.autograd.Function):
    """The end of a started reshard, for autograd. Its backward starts the gradient's reshard."""

    @staticmethod
    def forward(
        ctx: Any,
        token: Tensor,
        shape: torch.Size,
        change: LayoutChange,
        pending: Pending,
        gradient_reshard: _GradientReshard,
    ) -> DTensor:
        ctx.change, ctx.gradient_reshard = change, gradient_reshard
        return wrap(pending.wait(), change.target, shape)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[Tensor, None, None, None, None]:
        started = start_reshard(grad, placements=ctx.change.cotangent, **ctx.change.options)
        ctx.gradient_reshard.started = started
        # The token's gradient, for `_StartFunction.backward`: an empty tensor. In a double backward, the token of the
        # gradient's own reshard, which links both functions in the graph of the second backward.
        token = grad.to_local().new_empty(0) if started._token is None else started._token
        return token, None, None, None, None


def begin_in_graph(dtensor: DTensor, placements: Layout) -> tuple[Tensor, Tensor]:
    """`start_reshard` inside an `in_graph` function. Called by weft.models' parallel/context.py, for keys and values.

    Returns two tensors, both given to `finish_in_graph`. First the number of the started plan (`add_start_node`), under
    which the wait finds the plan when the graph runs. Then an uninitialized tensor, of which forward reads the shape
    alone: the result's local shape. In backward the two tensors' gradients carry values (see `_BeginInGraph`).
    """
    change = plan_change(dtensor, None, placements, None, None)
    outputs: tuple[Tensor, Tensor] = _BeginInGraph.apply(dtensor, change)  # type: ignore[no-untyped-call]
    return outputs


def finish_in_graph(number: Tensor, uninitialized: Tensor, dtensor: DTensor, placements: Layout) -> DTensor:
    """Waits for the reshard started by `begin_in_graph`; returns the resharded DTensor. Called by parallel/context.py.

    number, uninitialized: from `begin_in_graph`. dtensor, placements: the same as for `begin_in_graph`.
    """
    change = plan_change(dtensor, None, placements, None, None)
    result: DTensor = _FinishInGraph.apply(number, uninitialized, dtensor.detach(), change)  # type: ignore[no-untyped-call]
    return result


class _BeginInGraph(torch.autograd.Function):
    """The start of a reshard in a graph. Returns the reshard's number (`add_start_node`) and an uninitialized tensor.

    In forward, `_FinishInGraph` reads the number, and the shape of the uninitialized tensor. In backward, the outputs'
    gradients carry two values from `_FinishInGraph.backward` to the backward here: the number of the gradient's
    reshard, and the local gradient that is being sent, of the result's local shape. The number is a float because only
    float tensors have gradients.
    """

    @staticmethod
    def forward(ctx: Any, dtensor: DTensor, change: LayoutChange) -> tuple[Tensor, Tensor]:
        ctx.change, ctx.shape, local = change, dtensor.shape, dtensor.to_local()
        result_shape = change.target.local_shape(shape_of(dtensor), this_rank())
        return add_start_node(change.plan_in_graph, local), local.new_empty(result_shape)

    @staticmethod
    def backward(ctx: Any, number: Tensor, sent_grad: Tensor) -> tuple[DTensor, None]:
        change: LayoutChange = ctx.change
        grad = wrap(add_wait_node(number, sent_grad, change.local_shape), change.cotangent, ctx.shape)
        return change.restate_as_input(grad), None


class _FinishInGraph(torch.autograd.Function):
    """The end of a reshard begun in a graph. Its backward starts the gradient's reshard."""

    @staticmethod
    def forward(ctx: Any, number: Tensor, uninitialized: Tensor, dtensor: DTensor, change: LayoutChange) -> DTensor:
        ctx.change = change
        return wrap(add_wait_node(number, dtensor.to_local(), uninitialized.shape), change.target, dtensor.shape)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[Tensor, Tensor, None, None]:
        change: LayoutChange = ctx.change
        dual, local = plan_change(grad, None, change.cotangent, change.topology, change.memory_limit), grad.to_local()
        return add_start_node(dual.plan_in_graph, local), local, None, None
