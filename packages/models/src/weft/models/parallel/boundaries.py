"""Forward hooks that reshard activations.

`hook_tensor_parallel` registers the hooks at the boundaries of tensor-parallel layers, and `hook_prepared` the hooks of
`PrepareInput` and `PrepareOutput`.
"""

from __future__ import annotations

import copy
import inspect
from collections import Counter
from collections.abc import Callable, MutableMapping
from functools import lru_cache, partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from weft.kernels.extension import cast_for
from weft.mesh import Layout, ProcessMesh
from weft.mesh.extension import axes_of
from weft.reshard import layout_of, reshard
from weft.reshard.extension import in_graph, torch_layout, wrap

from . import overlapped_sequence
from .plan import ParallelPlan
from .resolve import Part
from .styles import (
    TENSOR_AXIS,
    TOKENS_DIM,
    ColwiseParallel,
    Placed,
    PositionParallel,
    PrepareInput,
    PrepareOutput,
    RowwiseParallel,
    Style,
    VocabParallel,
    check_named,
)

Axes = tuple[str, ...]
Words = tuple[str, ...]  # the text of a placement for each axis

Called = tuple[tuple[Any, ...], dict[str, Any]]  # args and kwargs of a module's call


def column_siblings(styles: dict[str, Style]) -> dict[str, list[str]]:
    """The names of column-parallel modules, grouped by their parent's name. Siblings reshard a common input once."""
    siblings: dict[str, list[str]] = {}
    for name, style in styles.items():
        if isinstance(style, ColwiseParallel):
            siblings.setdefault(name.rpartition(".")[0], []).append(name)
    return siblings


def hook_tensor_parallel(
    model: nn.Module,
    styles: dict[str, Style],
    plan: ParallelPlan,
    *,
    name: str = "",
    prepared: frozenset[str] = frozenset(),
) -> None:
    """Register hooks to reshard activations where tensor-parallel layers of a model, or of a submodule, meet.

    styles: by module name in the whole model.
    plan: the submodule's plan, without parts.
    name: the submodule's name; "" for the whole model.
    prepared: modules whose output a PrepareOutput places on the tensor axis; no hook here reshards their output.
    """
    modules = dict(model.named_modules())
    places = Counter(module for _, module in model.named_modules(remove_duplicate=False))
    for parent, names in column_siblings(styles).items():
        sharing = {f"{parent}.{each}".lstrip(".") for each in getattr(modules[parent], "sharing_input", ())}
        if sharing == {*names}:  # the parent's input is the input of all siblings
            _before(modules[parent], _enter)
            continue
        if len(names) == 1 and places[modules[names[0]]] == 1:
            layer = modules[names[0]]
            if overlapped_sequence.may_run_in_steps(layer, plan):
                overlapped_sequence.gather_columns(layer)
                _before(layer, partial(_enter_or_leave, layer))
            else:
                _before(layer, _enter)
            continue
        entrance = _Entrance()
        for each in names:
            _before(modules[each], entrance.enter)
        modules[parent].register_forward_hook(entrance.close, always_call=True)
    stream = f"S({TOKENS_DIM})" if plan.sequence else "R"
    for each, style in styles.items():
        if isinstance(style, RowwiseParallel | VocabParallel) and each not in prepared:
            if isinstance(style, RowwiseParallel) and overlapped_sequence.may_run_in_steps(modules[each], plan):
                overlapped_sequence.reduce_rows(modules[each])
            modules[each].register_forward_hook(_leave(stream))
        if isinstance(style, PositionParallel) and plan.sequence:
            _before(modules[each], partial(_cut_positions, modules[each]))
    if not plan.loss_parallel:
        modules[name].register_forward_hook(_leave("R"))


def _before(module: nn.Module, enter: Callable[[Any], Any]) -> None:
    """Register a pre-hook replacing the module's first argument x, passed by position or by keyword, by `enter(x)`."""
    name = next(iter(inspect.signature(module.forward).parameters), "input")

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Called:
        if args:
            return (enter(args[0]), *args[1:]), kwargs
        return (args, {**kwargs, name: enter(kwargs[name])}) if name in kwargs else (args, kwargs)

    module.register_forward_pre_hook(hook, with_kwargs=True)


def _enter(x: Any) -> Any:
    """Reshard the input of a column-parallel layer to replicated over the tensor axis.

    Forward all-gathers a sequence-parallel input and moves nothing otherwise. Backward reduces the gradient. Under
    autocast the input is first cast to the dtype of the products, once for all siblings; both directions then move
    fewer bytes.
    """
    if not isinstance(x, DTensor):  # a plain tensor counts as replicated
        return x
    return _along_tensor_axis(cast_for("linear", x), "R")


def _enter_or_leave(layer: nn.Module, x: Any) -> Any:
    """As `_enter`, but an input whose tokens the layer's product gathers itself stays sharded."""
    if not isinstance(x, DTensor):
        return x
    x = cast_for("linear", x)
    return x if overlapped_sequence.gathers_in_product(layer, x) else _along_tensor_axis(x, "R")


class _Entrance:
    """The common input of column-parallel siblings: the first sibling called reshards the tensor, the rest reuse
    the result.
    """

    def __init__(self) -> None:
        self._outside: Tensor | None = None  # the siblings' common input, as passed to them
        self._entered: Any = None  # the same input, resharded

    def enter(self, x: Any) -> Any:
        if x is not self._outside or self._entered is None:
            self._outside, self._entered = x, _enter(x)
        return self._entered

    def close(self, *_: object) -> None:
        """Forget the input. Called when the parent returns, to keep no activation longer."""
        self._outside = self._entered = None


def _cut_positions(module: nn.Module, positions: Any) -> Any:
    """Shard the input of a position embedding along the tokens, as the sequence-parallel activations are.

    Communication: none, for replicated positions.
    """
    weight = module.weight
    return _along_tokens(positions, weight) if isinstance(weight, DTensor) else positions


@in_graph
def _along_tokens(positions: Tensor, weight: DTensor) -> DTensor:
    """positions [..., T], sharded along T over the tensor axis of the mesh of `weight`."""
    if not isinstance(positions, DTensor):  # a plain tensor counts as replicated
        positions = wrap(positions, Layout(layout_of(weight).mesh), positions.shape)
    return reshard(positions, placements=_replaced(layout_of(positions), f"S({positions.ndim - 1})"))


@in_graph
def _along_tensor_axis(x: DTensor, placement: str) -> DTensor:
    """x with another placement on the tensor axis."""
    return reshard(x, placements=_replaced(layout_of(x), placement))


@lru_cache(maxsize=1024)  # few layouts, looked up at every boundary in every step
def _replaced(layout: Layout, placement: str) -> Layout:
    return layout.replace(**dict.fromkeys(axes_of(layout.mesh, TENSOR_AXIS), placement))


def _leave(placement: str) -> Callable[[nn.Module, Any, Any], Any]:
    """A forward hook resharding a module's outputs to `placement` on the tensor axis."""

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        return _map_dtensors(output, lambda x: _along_tensor_axis(x, placement))

    return hook


def _map_dtensors(output: Any, change: Callable[[DTensor], DTensor]) -> Any:
    """A module's output with `change` applied to each DTensor: a tensor, or a nest of tuples, lists and mappings."""
    if isinstance(output, DTensor):
        return change(output)
    if isinstance(output, tuple | list):
        entries = [_map_dtensors(each, change) for each in output]
        return output._make(entries) if hasattr(output, "_make") else type(output)(entries)
    if isinstance(output, MutableMapping):
        changed = copy.copy(output)
        for key, each in output.items():
            changed[key] = _map_dtensors(each, change)
        return changed
    return output


def check_prepared(model: nn.Module, parts: list[Part], mesh: ProcessMesh) -> None:
    """Check the plan's PrepareInput and PrepareOutput styles against the mesh and the model.

    Raises ValueError for an axis unknown to the mesh and to plans, and for an input unknown to forward.
    """
    for part in parts:
        for name, inputs in part.inputs.items():
            for where, placed in inputs.layouts.items():
                check_named(mesh, placed, f"PrepareInput of {name!r}")
                _parameter(model.get_submodule(name), name, where)
        for name, outputs in part.outputs.items():
            for placed in outputs.by_output.values():
                check_named(mesh, placed, f"PrepareOutput of {name!r}")


def hook_prepared(model: nn.Module, parts: list[Part], mesh: ProcessMesh) -> None:
    """Register the hooks: prepared inputs before all registered pre-hooks, prepared outputs after all registered
    hooks.
    """
    for part in parts:
        for name, inputs in part.inputs.items():
            _hook_inputs(model.get_submodule(name), name, inputs, mesh)
        for name, outputs in part.outputs.items():
            _hook_outputs(model.get_submodule(name), name, outputs, mesh)


def _hook_inputs(module: nn.Module, name: str, style: PrepareInput, mesh: ProcessMesh) -> None:
    wanted = {_parameter(module, name, where): _on_mesh(placed, mesh) for where, placed in style.layouts.items()}

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        positional, named = list(args), dict(kwargs)
        for (position, parameter), (axes, words) in wanted.items():
            if parameter in named:
                named[parameter] = _prepared(named[parameter], axes, words, mesh)
            elif position is not None and position < len(positional):
                positional[position] = _prepared(positional[position], axes, words, mesh)
        return tuple(positional), named

    module.register_forward_pre_hook(hook, with_kwargs=True, prepend=True)


def _hook_outputs(module: nn.Module, name: str, style: PrepareOutput, mesh: ProcessMesh) -> None:
    wanted = {where: _on_mesh(placed, mesh) for where, placed in style.by_output.items()}

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        if None in wanted:
            return _prepared(output, *wanted[None], mesh)
        changed: Any = list(output) if isinstance(output, tuple | list) else copy.copy(output)
        if not isinstance(changed, list | MutableMapping):
            raise ValueError(
                f"{name!r} returned a {type(output).__name__}, and its plan prepares several outputs; write "
                f'PrepareOutput({{"tp": …}}) for a single output'
            )
        outputs: Any = changed
        for where, (axes, words) in wanted.items():
            try:
                found = outputs[where]
            except (KeyError, IndexError, TypeError):
                raise ValueError(f"{name!r} returned no output {where!r}, which its plan prepares") from None
            outputs[where] = _prepared(found, axes, words, mesh)
        if isinstance(output, tuple):
            return output._make(changed) if hasattr(output, "_make") else tuple(changed)
        return changed

    module.register_forward_hook(hook)


def _parameter(module: nn.Module, name: str, where: str | int) -> tuple[int | None, str]:
    """Position and name of the parameter of forward named by `where`; the position is None for keyword-only
    parameters.

    Raises ValueError where forward lacks the parameter.
    """
    signature = inspect.signature(module.forward)
    parameters = list(signature.parameters.values())
    kinds = {each.kind for each in parameters}
    by_position = [each.name for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    if isinstance(where, int):
        if 0 <= where < len(by_position):
            return where, by_position[where]
        if where >= 0 and inspect.Parameter.VAR_POSITIONAL in kinds:
            return where, ""
    elif where in signature.parameters:
        return (by_position.index(where) if where in by_position else None), where
    elif inspect.Parameter.VAR_KEYWORD in kinds:
        return None, where
    raise ValueError(
        f"PrepareInput of {name!r} names the input {where!r}, but {type(module).__name__}.forward takes {signature}"
    )


def _on_mesh(placed: Placed, mesh: ProcessMesh) -> tuple[Axes, Words]:
    """The declared axes present in the mesh, and their placements as text. Absent axes have size 1."""
    axes = [axis for axis in placed if axes_of(mesh, axis)]
    return tuple(axes), tuple(str(placed[axis]) for axis in axes)


def _prepared(x: Any, axes: Axes, words: Words, mesh: ProcessMesh) -> Any:
    """x resharded to the declared placements. Plain tensors declared replicated, and other values, are returned
    unchanged.
    """
    if not isinstance(x, Tensor) or (set(words) <= {"R"} and not isinstance(x, DTensor)):
        return x
    if not isinstance(x, DTensor):
        on, placements = torch_layout(Layout(mesh), x.device.type)
        x = DTensor.from_local(x, on, placements, run_check=False)
    return _resharded(x, axes, words)


@in_graph
def _resharded(x: DTensor, axes: Axes, words: Words) -> DTensor:
    return reshard(x, placements=_placed(layout_of(x), axes, words))


@lru_cache(maxsize=1024)  # few layouts, looked up at every call
def _placed(layout: Layout, axes: Axes, words: Words) -> Layout:
    wanted = {own: word for axis, word in zip(axes, words, strict=True) for own in axes_of(layout.mesh, axis)}
    return layout.replace(**wanted)
