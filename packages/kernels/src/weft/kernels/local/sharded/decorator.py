"""`on_local_tensors`: runs a user's function on plain tensors and on DTensors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from weft.mesh import Layout, LayoutError, Partial, ProcessMesh, infer
from weft.reshard import layout_of, reshard
from weft.reshard.extension import process_mesh, this_rank, world_cache, wrap

from ...dispatch.arguments import check_flag, described
from ...dispatch.op import Op
from ...dispatch.sharded import Shapes, Sharding, apply, apply_many
from .declaration import Declaration

P = ParamSpec("P")
Result = TypeVar("Result")
OutputShapes = tuple[tuple[int, ...], ...]  # a shape for each output


def on_local_tensors(
    *,
    in_layouts: Mapping[str, Mapping[str, Any]] | Sequence[Mapping[str, Any] | None],
    out_layouts: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    grad_layouts: Mapping[str, Mapping[str, Any]] | None = None,
    out_shapes: Callable[..., Any] | None = None,
    reshard_inputs: bool = False,
) -> Callable[[Callable[P, Result]], Callable[P, Result]]:
    """Decorator to call a function on local tensors, such as your own `torch.autograd.Function`, also with DTensors.

    Called with plain tensors, the function runs unchanged. Called with DTensors, the function receives this rank's
    local tensors, and the outputs are wrapped as DTensors.

    in_layouts: placement by mesh axis for each input, by parameter name or in order. An input is replicated over axes
        not named. A named axis missing from the mesh counts as an axis of size 1. Every DTensor argument must be
        declared. A plain tensor next to DTensors counts as replicated, and raises LayoutError if declared otherwise.
        Arguments which are no tensors are passed on. In a sequence, None leaves an argument undeclared.
    out_layouts: the same for the output. For a tuple of outputs, a sequence.
    grad_layouts: the same for gradients of inputs, by parameter name, where the default is wrong. By default (None)
        the gradient of a sharded input has the input's layout. If an input is replicated over an axis and another input
        is not, the gradient of the replicated input is Partial on this axis: each rank adds a share.
    out_shapes: a function with the same parameters, called with the global torch.Size in place of each tensor. Returns
        the output's global shape, or a tuple of shapes. Where None, the decorated function is called on meta
        tensors: once for inputs of the same shapes and dtypes and equal further arguments.
    reshard_inputs: reshard inputs with another layout to the declared layout, instead of raising LayoutError.

    Communication: only the reshards of `reshard_inputs`, and the function's own. If the function cannot be called on
    meta tensors, also an all-reduce of a number over the mesh in each call.

    Raises ValueError for a declaration which does not fit the function. A call raises LayoutError for an input with
    another layout; the message names the reshard to insert. A call also raises LayoutError, on every rank, if the local
    shapes of any rank's outputs are not as declared. For this check each rank calls the function on meta
    tensors with every rank's local shapes, once for inputs of the same shapes and dtypes and equal further arguments.

        @on_local_tensors(in_layouts={"x": {"dp": "S(0)", "tp": "S(-1)"}}, out_layouts={"dp": "S(0)", "tp": "S(-1)"})
        def softcap(x):
            return Softcap.apply(x)
    """

    check_flag("on_local_tensors", "reshard_inputs", reshard_inputs)
    if out_shapes is not None and not callable(out_shapes):
        raise ValueError(f"on_local_tensors: out_shapes is {described(out_shapes)}; give a function of shapes, or None")

    def decorator(function: Callable[P, Result]) -> Callable[P, Result]:
        declared = Declaration.from_function(function, in_layouts, out_layouts, grad_layouts)
        signature = inspect.signature(function)
        # Without `Op.backward`: torch differentiates the function, inside the op. The option "call" is varying: an
        # `_Invocation` belongs to one call, and is no part of the plan's cache key.
        op = Op(
            f"{function.__module__}.{declared.name}", partial(_forward, function, declared), None,
            partial(_rule, declared), dtype=lambda dtype, options: options["dtype"], varying=("call",),
        )  # fmt: skip

        @wraps(function)
        def call_with_any(*args: P.args, **kwargs: P.kwargs) -> Result:
            if not any(isinstance(each, DTensor) for each in (*args, *kwargs.values())):
                return function(*args, **kwargs)
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            tensors = _collect_inputs(declared, bound.arguments, reshard_inputs)
            shapes, dtype, is_checked = _find_outputs(function, declared, bound, tensors, out_shapes)
            call = _Invocation(bound, is_checked)
            options: dict[str, Any] = {"names": tuple(tensors), "shapes": shapes, "dtype": dtype, "call": call}
            run: Any = apply_many if declared.is_tuple else apply
            result: Result = run(op, *tensors.values(), **options)
            return result

        return call_with_any

    return decorator


def _collect_inputs(declared: Declaration, arguments: Mapping[str, Any], reshard_inputs: bool) -> dict[str, Tensor]:
    """Collect the declared tensor arguments by parameter name, and reshard them if `reshard_inputs`.

    Raises LayoutError for an undeclared DTensor, and for a plain tensor not declared replicated.
    """
    inputs: dict[str, Tensor] = {}
    mesh = next((process_mesh(each.device_mesh) for each in arguments.values() if isinstance(each, DTensor)), None)
    for name, each in arguments.items():
        if name in declared.inputs and isinstance(each, Tensor):
            if mesh is not None and not isinstance(each, DTensor):
                _check_replicated(declared, name, declared.input(name, mesh, each.shape))
            if reshard_inputs and isinstance(each, DTensor):
                wanted = declared.input(name, process_mesh(each.device_mesh), each.shape)
                is_as_declared = _without_unit_axes(layout_of(each)) == _without_unit_axes(wanted)
                each = each if is_as_declared else reshard(each, placements=wanted)
            inputs[name] = each
        elif any(isinstance(inner, DTensor) for inner in (each if isinstance(each, tuple | list) else (each,))):
            raise LayoutError(
                f"{declared.name} got a DTensor as {name!r}, which in_layouts does not declare; declare its layout"
            )
    return inputs


def _check_replicated(declared: Declaration, name: str, wanted: Layout) -> None:
    """Raise LayoutError for a plain tensor not declared replicated."""
    if _without_unit_axes(wanted) != wanted.replace(**dict.fromkeys(wanted.mesh.axis_names, "R")):
        raise LayoutError(
            f"{declared.name}: {name!r} is a plain tensor, which counts as replicated, but in_layouts declares "
            f"({wanted}); give a DTensor: distribute({name}, Layout(mesh, {str(wanted)!r})) of a global tensor, or "
            f"DTensor.from_local of this rank's part",
            (wanted,),
        )


@dataclass(frozen=True, slots=True)
class _Invocation:
    """A call of the function. Passed to `_forward` as an option."""

    bound: inspect.BoundArguments
    is_checked: bool  # whether the outputs' local shapes were checked for all ranks, on meta tensors


def _find_outputs(
    function: Callable[..., Any],
    declared: Declaration,
    bound: inspect.BoundArguments,
    tensors: Mapping[str, Tensor],
    out_shapes: Callable[..., Any] | None,
) -> tuple[OutputShapes, torch.dtype, bool]:
    """The outputs' global shapes, their dtype, and whether every rank's local shapes were checked.

    Cached for inputs of the same kinds.
    """
    mesh = next(process_mesh(each.device_mesh) for each in bound.arguments.values() if isinstance(each, DTensor))
    key: Any = (function, mesh, *((name, _kind(each)) for name, each in bound.arguments.items()))
    cache = world_cache()
    try:
        if key in cache:
            cached: tuple[OutputShapes, torch.dtype, bool] = cache[key]
            return cached
    except TypeError:  # an argument is not hashable
        key = None
    shapes, dtype = _find_global_outputs(function, declared, bound, tensors, out_shapes)
    outputs = shapes, dtype, _check_parts(function, declared, bound, tensors, shapes, mesh)
    if key is not None:
        cache[key] = outputs
    return outputs


def _kind(argument: Any) -> Any:
    """The cache key of an argument: whatever may decide the outputs' shapes."""
    return (argument.shape, argument.dtype) if isinstance(argument, Tensor) else (type(argument), argument)


def _find_global_outputs(
    function: Callable[..., Any],
    declared: Declaration,
    bound: inspect.BoundArguments,
    tensors: Mapping[str, Tensor],
    out_shapes: Callable[..., Any] | None,
) -> tuple[OutputShapes, torch.dtype]:
    """The outputs' global shapes and dtype, from `out_shapes` or from a call on meta tensors."""
    if out_shapes is not None:
        result = _call_with(out_shapes, bound, {name: each.shape for name, each in tensors.items()})
        shapes = tuple(tuple(shape) for shape in (result if declared.is_tuple else [result]))
        floating = (each.dtype for each in tensors.values() if each.is_floating_point())
        return shapes, next(floating, torch.get_default_dtype())
    try:
        outputs = _call_on_meta(function, declared, bound, {})
    except LayoutError:
        raise
    except Exception as error:
        raise ValueError(
            f"{declared.name} cannot be called on meta tensors to find the shapes of its outputs "
            f"({type(error).__name__}: {error}); give on_local_tensors out_shapes="
        ) from error
    return tuple(tuple(each.shape) for each in outputs), outputs[0].dtype


def _call_on_meta(
    function: Callable[..., Any],
    declared: Declaration,
    bound: inspect.BoundArguments,
    sizes: Mapping[str, Sequence[int]],
) -> tuple[Tensor, ...]:
    """The outputs for meta tensors. sizes: by parameter, the input's shape, instead of the global shape."""
    tensors = (item for item in bound.arguments.items() if isinstance(item[1], Tensor))
    empty = {name: torch.empty(sizes.get(name, x.shape), dtype=x.dtype, device="meta") for name, x in tensors}
    with torch.no_grad():
        return _as_tuple(declared, _call_with(function, bound, empty))


def _check_parts(
    function: Callable[..., Any],
    declared: Declaration,
    bound: inspect.BoundArguments,
    tensors: Mapping[str, Tensor],
    shapes: OutputShapes,
    mesh: ProcessMesh,
) -> bool:
    """Check the outputs' local shapes on every rank, by calls on meta tensors without communication.

    Returns False if the function cannot be called on meta tensors. Raises LayoutError, on every rank, if any rank's
    shapes are not as declared.
    """
    inputs = {name: (declared.input(name, mesh, each.shape), tuple(each.shape)) for name, each in tensors.items()}
    outputs = [(declared.output(number, mesh, shape), shape) for number, shape in enumerate(shapes)]
    ranks_by_shapes: dict[Any, int] = {}
    for rank in (*([this_rank()] if this_rank() in mesh else []), *mesh.ranks):
        sizes = tuple((name, layout.local_shape(shape, rank)) for name, (layout, shape) in inputs.items())
        ranks_by_shapes.setdefault((sizes, tuple(layout.local_shape(shape, rank) for layout, shape in outputs)), rank)
    for (sizes, parts), rank in ranks_by_shapes.items():
        try:
            part_outputs = _call_on_meta(function, declared, bound, dict(sizes))
        except LayoutError:
            raise
        except Exception:  # the function does not run on meta tensors, and out_shapes was given
            return False
        where = "this rank" if rank == this_rank() else f"rank {rank}"
        wrong = _describe_wrong_part(declared, part_outputs, parts, shapes, where)
        if wrong is not None:
            raise LayoutError(wrong)
    return True


def _describe_wrong_part(
    declared: Declaration, outputs: tuple[Tensor, ...], parts: OutputShapes, shapes: OutputShapes, where: str
) -> str | None:
    """The error message for a rank's outputs whose shapes are not as declared; None if all are."""
    for number, (output, part) in enumerate(zip(outputs, parts, strict=True)):
        if tuple(output.shape) != part:
            return (
                f"{declared.name} returned {tuple(output.shape)} as output {number} on {where}; declared as "
                f"{_format_placements(declared.outputs[number])}, of global shape {shapes[number]}, it must have {part}"
            )
    return None


def _call_with(function: Callable[..., Any], bound: inspect.BoundArguments, replacements: Mapping[str, Any]) -> Any:
    """Call the function with the arguments of `bound`, some of them replaced."""
    call = inspect.BoundArguments(bound.signature, {**bound.arguments, **replacements})
    return function(*call.args, **call.kwargs)


def _as_tuple(declared: Declaration, result: Any) -> tuple[Tensor, ...]:
    """The function's outputs as a tuple. Raises LayoutError if they are not the declared number of tensors."""
    outputs = tuple(result) if declared.is_tuple and isinstance(result, tuple | list) else (result,)
    if len(outputs) != len(declared.outputs) or not all(isinstance(each, Tensor) for each in outputs):
        types = ", ".join(type(each).__name__ for each in outputs)
        raise LayoutError(
            f"{declared.name} returned {types}; out_layouts declares {len(declared.outputs)} tensor"
            f"{'s, as a tuple' if declared.is_tuple else ''}"
        )
    return outputs


def _forward(
    function: Callable[..., Any],
    declared: Declaration,
    *locals_: Tensor,
    names: tuple[str, ...],
    shapes: OutputShapes,
    dtype: torch.dtype,
    call: _Invocation,
    parts: OutputShapes,
    mesh: ProcessMesh,
) -> Any:
    """`Op.forward` of the decorated function. parts: the declared shapes of this rank's outputs."""
    outputs = _as_tuple(declared, _call_with(function, call.bound, dict(zip(names, locals_, strict=True))))
    wrong = _describe_wrong_part(declared, outputs, parts, shapes, "this rank")
    if not call.is_checked:
        failed = torch.tensor(float(wrong is not None), device=outputs[0].device)
        layout = Layout(mesh, dict.fromkeys(mesh.axis_names, Partial()))
        if reshard(wrap(failed, layout, ())).to_local() and wrong is None:
            raise LayoutError(
                f"{declared.name} returned another shape than declared on another rank; see the error of that rank"
            )
    if wrong is not None:
        raise LayoutError(wrong)
    return outputs if declared.is_tuple else outputs[0]


def _rule(
    declared: Declaration, layouts: tuple[Layout | None, ...], shapes: Shapes, options: dict[str, Any]
) -> Sharding:
    names: tuple[str, ...] = options["names"]
    mesh = next(layout.mesh for layout in layouts if layout is not None)
    for name, layout, shape in zip(names, layouts, shapes, strict=True):
        assert layout is not None and shape is not None, "all are given"
        wanted = declared.input(name, mesh, shape)
        if _without_unit_axes(layout) != _without_unit_axes(wanted):
            raise LayoutError(
                f"{declared.name}: {name!r} has layout ({layout}), but in_layouts declares ({wanted}); call "
                f"reshard({name}, placements={str(wanted)!r}) first, or give on_local_tensors reshard_inputs=True",
                (wanted,),
            )
    outputs = [declared.output(number, mesh, shape) for number, shape in enumerate(options["shapes"])]
    layouts_and_shapes = tuple(zip(outputs, options["shapes"], strict=True))
    operands = tuple(layout for layout in layouts if layout is not None)

    def gradient_layouts(*grads: Layout | None) -> tuple[Layout | None, ...]:
        gradients = []
        for name, layout, shape in zip(names, operands, shapes, strict=True):
            assert shape is not None, "all are given"
            inferred = {
                infer.gradient(output, grad, layout, operands)
                for output, grad in zip(outputs, grads, strict=True)
                if grad is not None
            }
            declared_layout = declared.gradient(name, mesh, shape)
            if declared_layout is None and len(inferred) > 1:
                raise LayoutError(
                    f"{declared.name}: the gradients of its outputs imply different layouts for the gradient of "
                    f"{name!r}: {' and '.join(f'({layout})' for layout in inferred)}; reshard the outputs after the "
                    f"call, or give grad_layouts"
                )
            gradients.append(declared_layout or inferred.pop())
        return tuple(gradients)

    def local_options(rank: int, _: Any) -> dict[str, Any]:
        return {"parts": tuple(layout.local_shape(shape, rank) for layout, shape in layouts_and_shapes), "mesh": mesh}

    further = layouts_and_shapes[1:] if declared.is_tuple else None
    return Sharding(*layouts_and_shapes[0], gradient_layouts, local_options, further)


def _without_unit_axes(layout: Layout) -> Layout:
    """The layout with Replicate() on axes of size 1, where all placements are the same."""
    mesh = layout.mesh
    return layout.replace(**{axis: "R" for axis, size in zip(mesh.axis_names, mesh.shape, strict=True) if size == 1})


def _format_placements(placements: Mapping[str, Any]) -> str:
    return "{" + ", ".join(f"{axis}: {placement}" for axis, placement in placements.items()) + "}"
