"""`on_local_tensors`: functions of users, on plain tensors and on DTensors."""

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
from weft.reshard.running.dtensor import wrap
from weft.reshard.running.groups import of_this_world, process_mesh, this_rank

from ...op import Op
from ...sharded import Shapes, Sharding, apply, apply_many
from .declaration import Declaration

P = ParamSpec("P")
Result = TypeVar("Result")
Sizes = tuple[tuple[int, ...], ...]


def on_local_tensors(
    *,
    in_layouts: Mapping[str, Mapping[str, Any]] | Sequence[Mapping[str, Any] | None],
    out_layouts: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    grad_layouts: Mapping[str, Mapping[str, Any]] | None = None,
    out_shapes: Callable[..., Any] | None = None,
    reshard_inputs: bool = False,
) -> Callable[[Callable[P, Result]], Callable[P, Result]]:
    """A decorator of a function on local tensors, such as one that calls your own `torch.autograd.Function`: it takes DTensors then.

    On plain tensors it is the function itself. On DTensors it is called with this rank's parts, and what it returns is wrapped.

    in_layouts: by the name of a parameter, or in order, the placement on each axis that is named; on the others the input
        replicates, and axes that a mesh has not have size 1. Every DTensor that is given must be declared; a plain tensor
        beside DTensors counts as replicated, and is refused where another placement is declared; what is no tensor is passed on.
    out_layouts: of its output likewise; of several, which are a tuple, in order.
    grad_layouts: of the gradients of inputs, by parameter, where they are others than follow: a sharded input's gradient lies as the
        input does; that of an input which replicates on an axis on which another one does not is Partial there, as each
        rank adds its own share.
    out_shapes: called as the function is, with a torch.Size of the whole tensor for each tensor, it returns the whole shape of the output,
        or a tuple of them. Without it the function is called once for each kind of inputs on tensors of the meta device.
    reshard_inputs: bring inputs that lie otherwise to what is declared.
    Communication: none, but for that of `reshard_inputs` and of the function itself; where it cannot be called on tensors of the meta
    device, the sum of a number over the mesh each time.
    Raises ValueError for a declaration that does not fit the function; when called LayoutError for an input that lies otherwise,
    naming the reshard, and on every rank for outputs whose local shapes on one are not those declared. Each rank finds out for all
    ranks, on tensors of the meta device, once for each kind of inputs.

        @on_local_tensors(in_layouts={"x": {"dp": "S(0)", "tp": "S(-1)"}}, out_layouts={"dp": "S(0)", "tp": "S(-1)"})
        def softcap(x):
            return Softcap.apply(x)
    """

    def decorator(function: Callable[P, Result]) -> Callable[P, Result]:
        declared = Declaration.of(function, in_layouts, out_layouts, grad_layouts)
        signature = inspect.signature(function)
        op = Op(
            f"{function.__module__}.{declared.name}", partial(_forward, function, declared), None,
            partial(_rule, declared), dtype=lambda dtype, options: options["dtype"], varying=("call",),
        )  # fmt: skip

        @wraps(function)
        def on_any(*args: P.args, **kwargs: P.kwargs) -> Result:
            if not any(isinstance(each, DTensor) for each in (*args, *kwargs.values())):
                return function(*args, **kwargs)
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            tensors = _inputs(declared, bound.arguments, reshard_inputs)
            shapes, dtype, is_checked = _outputs(function, declared, bound, tensors, out_shapes)
            call = _Calling(bound, is_checked)
            options: dict[str, Any] = {"names": tuple(tensors), "shapes": shapes, "dtype": dtype, "call": call}
            run: Any = apply_many if declared.many else apply
            result: Result = run(op, *tensors.values(), **options)
            return result

        return on_any

    return decorator


def _inputs(declared: Declaration, arguments: Mapping[str, Any], brings: bool) -> dict[str, Tensor]:
    """The tensors among the arguments that are declared, by parameter, brought to their layouts where that is asked for.

    Raises LayoutError for a DTensor that is not declared, and for a plain tensor that is declared otherwise than replicated.
    """
    found: dict[str, Tensor] = {}
    mesh = next((process_mesh(each.device_mesh) for each in arguments.values() if isinstance(each, DTensor)), None)
    for name, each in arguments.items():
        if name in declared.inputs and isinstance(each, Tensor):
            if mesh is not None and not isinstance(each, DTensor):
                _check_replicated(declared, name, declared.input(name, mesh, each.shape))
            if brings and isinstance(each, DTensor):
                wanted = declared.input(name, process_mesh(each.device_mesh), each.shape)
                lies_so = _in_effect(layout_of(each)) == _in_effect(wanted)
                each = each if lies_so else reshard(each, placements=wanted)
            found[name] = each
        elif any(isinstance(inner, DTensor) for inner in (each if isinstance(each, tuple | list) else (each,))):
            raise LayoutError(
                f"{declared.name} was given a DTensor as {name!r}, of which in_layouts says nothing; declare how it lies"
            )
    return found


def _check_replicated(declared: Declaration, name: str, wanted: Layout) -> None:
    """Raises LayoutError where a plain tensor, which counts as replicated, is declared otherwise."""
    if _in_effect(wanted) != wanted.replace(**dict.fromkeys(wanted.mesh.axis_names, "R")):
        raise LayoutError(
            f"{declared.name}: {name!r} is a plain tensor, which counts as replicated, and in_layouts declares ({wanted}); give a "
            f"DTensor: of a whole tensor distribute({name}, Layout(mesh, {str(wanted)!r})), of this rank's part DTensor.from_local",
            (wanted,),
        )


@dataclass(frozen=True, slots=True)
class _Calling:
    """How the function was called, and whether the shapes of its outputs are known to be as declared on all ranks."""

    bound: inspect.BoundArguments
    is_checked: bool


def _outputs(
    function: Callable[..., Any],
    declared: Declaration,
    bound: inspect.BoundArguments,
    tensors: Mapping[str, Tensor],
    out_shapes: Callable[..., Any] | None,
) -> tuple[Sizes, torch.dtype, bool]:
    """The whole shapes of the outputs, their dtype, and whether all ranks' parts were checked; found once for inputs of one kind."""
    mesh = next(process_mesh(each.device_mesh) for each in bound.arguments.values() if isinstance(each, DTensor))
    key: Any = (function, mesh, *((name, _kind(each)) for name, each in bound.arguments.items()))
    kept = of_this_world()
    try:
        if key in kept:
            found: tuple[Sizes, torch.dtype, bool] = kept[key]
            return found
    except TypeError:  # an argument that cannot be hashed
        key = None
    shapes, dtype = _asked(function, declared, bound, tensors, out_shapes)
    answer = shapes, dtype, _check_parts(function, declared, bound, tensors, shapes, mesh)
    if key is not None:
        kept[key] = answer
    return answer


def _kind(argument: Any) -> Any:
    """What of an argument the shapes of the outputs can depend on."""
    return (argument.shape, argument.dtype) if isinstance(argument, Tensor) else (type(argument), argument)


def _asked(
    function: Callable[..., Any],
    declared: Declaration,
    bound: inspect.BoundArguments,
    tensors: Mapping[str, Tensor],
    out_shapes: Callable[..., Any] | None,
) -> tuple[Sizes, torch.dtype]:
    if out_shapes is not None:
        answer = _called(out_shapes, bound, {name: each.shape for name, each in tensors.items()})
        shapes = tuple(tuple(shape) for shape in (answer if declared.many else [answer]))
        floating = (each.dtype for each in tensors.values() if each.is_floating_point())
        return shapes, next(floating, torch.get_default_dtype())
    try:
        outputs = _on_meta(function, declared, bound, {})
    except LayoutError:
        raise
    except Exception as error:
        raise ValueError(
            f"{declared.name} cannot be called on tensors of the meta device, which would tell the shapes of its outputs "
            f"({type(error).__name__}: {error}); give on_local_tensors out_shapes="
        ) from error
    return tuple(tuple(each.shape) for each in outputs), outputs[0].dtype


def _on_meta(
    function: Callable[..., Any],
    declared: Declaration,
    bound: inspect.BoundArguments,
    sizes: Mapping[str, Sequence[int]],
) -> tuple[Tensor, ...]:
    """The outputs on tensors without data. sizes: by parameter, where they are others than the whole tensor's."""
    given = (item for item in bound.arguments.items() if isinstance(item[1], Tensor))
    empty = {name: torch.empty(sizes.get(name, x.shape), dtype=x.dtype, device="meta") for name, x in given}
    with torch.no_grad():
        return _as_tuple(declared, _called(function, bound, empty))


def _check_parts(
    function: Callable[..., Any],
    declared: Declaration,
    bound: inspect.BoundArguments,
    tensors: Mapping[str, Tensor],
    shapes: Sizes,
    mesh: ProcessMesh,
) -> bool:
    """Whether the function's outputs could be looked at on every rank. No rank learns of another's by communication.

    Raises LayoutError, on all ranks, where those of one are not as declared.
    """
    inputs = {name: (declared.input(name, mesh, each.shape), tuple(each.shape)) for name, each in tensors.items()}
    outputs = [(declared.output(number, mesh, shape), shape) for number, shape in enumerate(shapes)]
    alike: dict[Any, int] = {}
    for rank in (*([this_rank()] if this_rank() in mesh else []), *mesh.ranks):
        sizes = tuple((name, layout.local_shape(shape, rank)) for name, (layout, shape) in inputs.items())
        alike.setdefault((sizes, tuple(layout.local_shape(shape, rank) for layout, shape in outputs)), rank)
    for (sizes, parts), rank in alike.items():
        try:
            found = _on_meta(function, declared, bound, dict(sizes))
        except LayoutError:
            raise
        except Exception:  # out_shapes was given
            return False
        where = "this rank" if rank == this_rank() else f"rank {rank}"
        wrong = _wrong_part(declared, found, parts, shapes, where)
        if wrong is not None:
            raise LayoutError(wrong)
    return True


def _wrong_part(
    declared: Declaration, outputs: tuple[Tensor, ...], parts: Sizes, shapes: Sizes, where: str
) -> str | None:
    """What is wrong with the shapes of a rank's outputs; None where they are as declared."""
    for number, (output, part) in enumerate(zip(outputs, parts, strict=True)):
        if tuple(output.shape) != part:
            return (
                f"{declared.name} returned {tuple(output.shape)} as output {number} on {where}; declared as "
                f"{_told(declared.outputs[number])}, of {shapes[number]} in all, it has {part}"
            )
    return None


def _called(function: Callable[..., Any], bound: inspect.BoundArguments, instead: Mapping[str, Any]) -> Any:
    """The function, called as it was, but for some arguments."""
    call = inspect.BoundArguments(bound.signature, {**bound.arguments, **instead})
    return function(*call.args, **call.kwargs)


def _as_tuple(declared: Declaration, returned: Any) -> tuple[Tensor, ...]:
    """What the function returned. Raises LayoutError for anything else than the tensors that were declared."""
    outputs = tuple(returned) if declared.many and isinstance(returned, tuple | list) else (returned,)
    if len(outputs) != len(declared.outputs) or not all(isinstance(each, Tensor) for each in outputs):
        told = ", ".join(type(each).__name__ for each in outputs)
        raise LayoutError(
            f"{declared.name} returned {told}; out_layouts declares {len(declared.outputs)} tensor"
            f"{'s, as a tuple' if declared.many else ''}"
        )
    return outputs


def _forward(
    function: Callable[..., Any],
    declared: Declaration,
    *locals_: Tensor,
    names: tuple[str, ...],
    shapes: Sizes,
    dtype: torch.dtype,
    call: _Calling,
    parts: Sizes,
    mesh: ProcessMesh,
) -> Any:
    """parts: the shapes of this rank's outputs."""
    outputs = _as_tuple(declared, _called(function, call.bound, dict(zip(names, locals_, strict=True))))
    wrong = _wrong_part(declared, outputs, parts, shapes, "this rank")
    if not call.is_checked:
        failed = torch.tensor(float(wrong is not None), device=outputs[0].device)
        layout = Layout(mesh, dict.fromkeys(mesh.axis_names, Partial()))
        if reshard(wrap(failed, layout, ())).to_local() and wrong is None:
            raise LayoutError(f"{declared.name} returned another shape than is declared; see the error of another rank")
    if wrong is not None:
        raise LayoutError(wrong)
    return outputs if declared.many else outputs[0]


def _rule(
    declared: Declaration, layouts: tuple[Layout | None, ...], shapes: Shapes, options: dict[str, Any]
) -> Sharding:
    names: tuple[str, ...] = options["names"]
    mesh = next(layout.mesh for layout in layouts if layout is not None)
    for name, layout, shape in zip(names, layouts, shapes, strict=True):
        assert layout is not None and shape is not None, "all are given"
        wanted = declared.input(name, mesh, shape)
        if _in_effect(layout) != _in_effect(wanted):
            raise LayoutError(
                f"{declared.name}: {name!r} lies as ({layout}), and in_layouts declares ({wanted}); reshard it before, by "
                f"reshard({name}, placements={str(wanted)!r}), or give on_local_tensors reshard_inputs=True",
                (wanted,),
            )
    outputs = [declared.output(number, mesh, shape) for number, shape in enumerate(options["shapes"])]
    lying = tuple(zip(outputs, options["shapes"], strict=True))
    operands = tuple(layout for layout in layouts if layout is not None)

    def gradients(*arrived: Layout | None) -> tuple[Layout | None, ...]:
        found = []
        for name, layout, shape in zip(names, operands, shapes, strict=True):
            assert shape is not None, "all are given"
            each = {
                infer.gradient(output, grad, layout, operands)
                for output, grad in zip(outputs, arrived, strict=True)
                if grad is not None
            }
            stated = declared.gradient(name, mesh, shape)
            if stated is None and len(each) > 1:
                raise LayoutError(
                    f"{declared.name}: by the gradients of its outputs, that of {name!r} would be "
                    f"{' and '.join(f'({layout})' for layout in each)}; reshard the outputs before they are used, or give grad_layouts"
                )
            found.append(stated or each.pop())
        return tuple(found)

    def local(rank: int, _: Any) -> dict[str, Any]:
        return {"parts": tuple(layout.local_shape(shape, rank) for layout, shape in lying), "mesh": mesh}

    return Sharding(*lying[0], gradients, local, lying[1:] if declared.many else None)


def _in_effect(layout: Layout) -> Layout:
    """The layout without what it says of axes of size 1, which do nothing."""
    mesh = layout.mesh
    return layout.replace(**{axis: "R" for axis, size in zip(mesh.axis_names, mesh.shape, strict=True) if size == 1})


def _told(placed: Mapping[str, Any]) -> str:
    return "{" + ", ".join(f"{axis}: {placement}" for axis, placement in placed.items()) + "}"
