"""Forward hooks that reshard activations.

`hook_tensor_parallel` registers the hooks on tensor-parallel layers, and `hook_preparations` the hooks of
`PrepareInput` and `PrepareOutput`. Both are called by `parallelize`.
"""

from __future__ import annotations

import copy
import inspect
from collections import Counter
from collections.abc import Callable, MutableMapping, Set
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
from .resolve import ModulePlan
from .styles import (
    TENSOR_AXIS,
    TOKENS_DIM,
    ColwiseParallel,
    ExpertParallel,
    PlacementsByAxis,
    PositionParallel,
    PrepareInput,
    PrepareOutput,
    RowwiseParallel,
    Style,
    VocabParallel,
    check_style_axes,
)

AxisNames = tuple[str, ...]
PlacementTexts = tuple[str, ...]  # the text of a placement for each axis

CallArguments = tuple[tuple[Any, ...], dict[str, Any]]  # args and kwargs of a module's call


def _column_siblings(styles: dict[str, Style]) -> dict[str, list[str]]:
    """The names of column-parallel modules, grouped by their parent's name. Siblings reshard a common input once."""
    siblings: dict[str, list[str]] = {}
    for name, style in styles.items():
        if isinstance(style, ColwiseParallel):
            siblings.setdefault(name.rpartition(".")[0], []).append(name)
    return siblings


def hook_tensor_parallel(model: nn.Module, module_plan: ModulePlan, with_prepared_output: Set[str]) -> None:
    """Register hooks that reshard the inputs and outputs of a module's tensor-parallel layers.

    Called by `parallelize` for each `ModulePlan`, on a mesh with a tensor axis, before `hook_preparations`.
    An input of column-parallel layers becomes replicated, a Partial output is reduced, and without
    `ParallelPlan.loss_parallel` the module's output becomes replicated.
    model: the whole model; all names are names in the whole model.
    module_plan: the name of the module, the plan which lays the module out, and the styles of the layers.
    with_prepared_output: the names of the modules whose output a PrepareOutput places on the tensor axis;
        `hook_preparations` reshards their output instead.
    """
    plan, styles = module_plan.plan, module_plan.styles
    modules = dict(model.named_modules())
    name_counts = Counter(module for _, module in model.named_modules(remove_duplicate=False))
    for parent, names in _column_siblings(styles).items():
        # `sharing_input` of a module: the names of the submodules whose input is the module's own input.
        shared_by = {f"{parent}.{each}".lstrip(".") for each in getattr(modules[parent], "sharing_input", ())}
        if shared_by == {*names}:  # the parent's input is the input of all siblings
            _hook_first_argument(modules[parent], _replicate_input)
            continue
        # A module under two names may be called twice with the same input, and then reshards once, like siblings.
        if len(names) == 1 and name_counts[modules[names[0]]] == 1:
            layer = modules[names[0]]
            if overlapped_sequence.may_run_in_steps(layer, plan):
                overlapped_sequence.gather_columns(layer)
                _hook_first_argument(layer, partial(_replicate_unless_overlapped, layer))
            else:
                _hook_first_argument(layer, _replicate_input)
            continue
        shared_input = _SharedInput()
        for each in names:
            _hook_first_argument(modules[each], shared_input.replicate)
        modules[parent].register_forward_hook(shared_input.forget, always_call=True)
    stream_placement = f"S({TOKENS_DIM})" if plan.sequence else "R"
    for each, style in styles.items():
        if isinstance(style, ExpertParallel) and plan.experts is not None and plan.experts.folds_tensor_axis:
            continue  # experts are whole, and get tokens from all ranks along "tp", too
        if isinstance(style, ExpertParallel):
            modules[each].register_forward_pre_hook(_replicate_experts_inputs)
        reduced = isinstance(style, RowwiseParallel | VocabParallel | ExpertParallel)
        if reduced and each not in with_prepared_output:
            if isinstance(style, RowwiseParallel) and overlapped_sequence.may_run_in_steps(modules[each], plan):
                overlapped_sequence.reduce_rows(modules[each])
            modules[each].register_forward_hook(partial(_reshard_output, stream_placement))
        if isinstance(style, PositionParallel) and plan.sequence:
            _hook_first_argument(modules[each], partial(_shard_positions, modules[each]))
    if not plan.loss_parallel:
        modules[module_plan.name].register_forward_hook(partial(_reshard_output, "R"))


def _hook_first_argument(module: nn.Module, change: Callable[[Any], Any]) -> None:
    """Register a pre-hook that passes `change(x)` for the module's first argument x, given by position or keyword."""
    name = next(iter(inspect.signature(module.forward).parameters), "input")
    module.register_forward_pre_hook(partial(_change_first_argument, name, change), with_kwargs=True)


def _change_first_argument(
    name: str, change: Callable[[Any], Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> CallArguments:
    """The pre-hook of `_hook_first_argument`. name: of the first argument."""
    if args:
        return (change(args[0]), *args[1:]), kwargs
    return (args, {**kwargs, name: change(kwargs[name])}) if name in kwargs else (args, kwargs)


def _replicate_input(x: Any) -> Any:
    """Reshard the input of a column-parallel layer to replicated over the tensor axis.

    Forward all-gathers a sequence-parallel input and moves nothing otherwise. Backward reduces the gradient. Under
    autocast the input is first cast to autocast's dtype, once for all siblings; both directions then move fewer bytes.
    """
    if not isinstance(x, DTensor):  # a plain tensor counts as replicated
        return x
    return _reshard_on_tensor_axis(cast_for("linear", x), "R")


def _replicate_experts_inputs(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Pre-hook of `Experts`: reshard the tokens, their experts and the experts' weights to replicated over "tp".

    Each rank computes a part of each expert's features, so backward reduces the gradients of tokens and weights.
    """
    x, experts, weights = args
    if not isinstance(x, DTensor):
        return args
    return _replicate_input(x), _reshard_on_tensor_axis(experts, "R"), _reshard_on_tensor_axis(weights, "R")


def _replicate_unless_overlapped(layer: nn.Module, x: Any) -> Any:
    """As `_replicate_input`, except where the layer's op itself all-gathers the tokens, overlapped with its product.

    The input then stays sharded; see `overlapped_sequence.gathers_in_product`.
    """
    if not isinstance(x, DTensor):
        return x
    x = cast_for("linear", x)
    return x if overlapped_sequence.gathers_in_product(layer, x) else _reshard_on_tensor_axis(x, "R")


class _SharedInput:
    """The common input of column-parallel siblings: the first sibling called reshards the tensor, and the siblings
    called later reuse the result.

    Made by `hook_tensor_parallel` for the siblings under a parent, unless the parent's `sharing_input` names the
    siblings: the input of the parent is then resharded.
    """

    def __init__(self) -> None:
        self._input: Tensor | None = None  # the siblings' common input, before the reshard
        self._replicated: Any = None  # the same input, replicated over the tensor axis

    def replicate(self, x: Any) -> Any:
        """The input x, replicated over the tensor axis. Called by the pre-hook of each sibling, with the sibling's x.

        Communication: as `_replicate_input`, for the first sibling with a new x.
        """
        if x is not self._input or self._replicated is None:
            self._input, self._replicated = x, _replicate_input(x)
        return self._replicated

    def forget(self, *_: object) -> None:
        """Forget the input, to keep no activation longer. Hook of the parent: called when the parent's forward ends."""
        self._input = self._replicated = None


def _shard_positions(module: nn.Module, positions: Any) -> Any:
    """Shard the input of a position embedding along the tokens, as the sequence-parallel activations are.

    Communication: none, for replicated positions.
    """
    weight = module.weight
    return _shard_tokens(positions, weight) if isinstance(weight, DTensor) else positions


@in_graph
def _shard_tokens(positions: Tensor, weight: DTensor) -> DTensor:
    """positions [..., T], sharded along T over the tensor axis of the mesh of `weight`."""
    if not isinstance(positions, DTensor):  # a plain tensor counts as replicated
        positions = wrap(positions, Layout(layout_of(weight).mesh), positions.shape)
    return reshard(positions, placements=_with_tensor_placement(layout_of(positions), f"S({positions.ndim - 1})"))


@in_graph
def _reshard_on_tensor_axis(x: DTensor, placement: str) -> DTensor:
    """x with another placement on the tensor axis."""
    return reshard(x, placements=_with_tensor_placement(layout_of(x), placement))


@lru_cache(maxsize=1024)  # few layouts, looked up by every hook in every step
def _with_tensor_placement(layout: Layout, placement: str) -> Layout:
    """The layout with another placement on the tensor axis."""
    return layout.replace(**dict.fromkeys(axes_of(layout.mesh, TENSOR_AXIS), placement))


def _reshard_output(placement: str, module: nn.Module, args: Any, output: Any) -> Any:
    """Forward hook: reshards a module's outputs to `placement` on the tensor axis."""
    return _map_dtensors(output, lambda x: _reshard_on_tensor_axis(x, placement))


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


def check_preparations(model: nn.Module, module_plans: list[ModulePlan], mesh: ProcessMesh) -> None:
    """Check the plans' PrepareInput and PrepareOutput styles against the mesh and the model.

    Called by `parallelize` before the model is changed. Raises ValueError for an axis neither on the mesh nor known to
    plans, and for an input unknown to forward.
    """
    for module_plan in module_plans:
        for name, inputs in module_plan.inputs.items():
            for parameter, placements in inputs.layouts.items():
                check_style_axes(mesh, placements, f"PrepareInput of {name!r}")
                _find_parameter(model.get_submodule(name), name, parameter)
        for name, outputs in module_plan.outputs.items():
            for placements in outputs.placements_by_output.values():
                check_style_axes(mesh, placements, f"PrepareOutput of {name!r}")


def hook_preparations(model: nn.Module, module_plans: list[ModulePlan], mesh: ProcessMesh) -> None:
    """Register the hooks of the plans' PrepareInput and PrepareOutput styles.

    Called by `parallelize` after `hook_tensor_parallel`, `hook_experts` and `hook_context`.
    A hook that reshards inputs runs before all pre-hooks registered earlier, and a hook that reshards outputs after
    all hooks registered earlier.
    """
    for module_plan in module_plans:
        for name, inputs in module_plan.inputs.items():
            _hook_inputs(model.get_submodule(name), name, inputs, mesh)
        for name, outputs in module_plan.outputs.items():
            _hook_outputs(model.get_submodule(name), name, outputs, mesh)


def _hook_inputs(module: nn.Module, name: str, style: PrepareInput, mesh: ProcessMesh) -> None:
    targets = {
        _find_parameter(module, name, parameter): _axes_and_texts(placements, mesh)
        for parameter, placements in style.layouts.items()
    }

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        positional, named = list(args), dict(kwargs)
        for (position, parameter), (axes, texts) in targets.items():
            if parameter in named:
                named[parameter] = _prepare(named[parameter], axes, texts, mesh)
            elif position is not None and position < len(positional):
                positional[position] = _prepare(positional[position], axes, texts, mesh)
        return tuple(positional), named

    module.register_forward_pre_hook(hook, with_kwargs=True, prepend=True)


def _hook_outputs(module: nn.Module, name: str, style: PrepareOutput, mesh: ProcessMesh) -> None:
    targets = {key: _axes_and_texts(placements, mesh) for key, placements in style.placements_by_output.items()}

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        if None in targets:
            return _prepare(output, *targets[None], mesh)
        changed: Any = list(output) if isinstance(output, tuple | list) else copy.copy(output)
        if not isinstance(changed, list | MutableMapping):
            raise ValueError(
                f"{name!r} returned a {type(output).__name__}, and its plan prepares several outputs; write "
                f'PrepareOutput({{"tp": …}}) for a single output'
            )
        outputs: Any = changed
        for key, (axes, texts) in targets.items():
            try:
                value = outputs[key]
            except (KeyError, IndexError, TypeError):
                raise ValueError(f"{name!r} returned no output {key!r}, which its plan prepares") from None
            outputs[key] = _prepare(value, axes, texts, mesh)
        if isinstance(output, tuple):
            return output._make(changed) if hasattr(output, "_make") else tuple(changed)
        return changed

    module.register_forward_hook(hook)


def _find_parameter(module: nn.Module, name: str, parameter: str | int) -> tuple[int | None, str]:
    """Position and name of a parameter of the module's forward; the position is None for a keyword-only parameter.

    name: the module's name, for the error. parameter: the parameter's name or position.
    Raises ValueError where forward lacks the parameter.
    """
    signature = inspect.signature(module.forward)
    parameters = list(signature.parameters.values())
    kinds = {each.kind for each in parameters}
    by_position = [each.name for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    if isinstance(parameter, int):
        if 0 <= parameter < len(by_position):
            return parameter, by_position[parameter]
        if parameter >= 0 and inspect.Parameter.VAR_POSITIONAL in kinds:
            return parameter, ""
    elif parameter in signature.parameters:
        return (by_position.index(parameter) if parameter in by_position else None), parameter
    elif inspect.Parameter.VAR_KEYWORD in kinds:
        return None, parameter
    raise ValueError(
        f"PrepareInput of {name!r} names the input {parameter!r}, but {type(module).__name__}.forward takes {signature}"
    )


def _axes_and_texts(placements: PlacementsByAxis, mesh: ProcessMesh) -> tuple[AxisNames, PlacementTexts]:
    """The declared axes present in the mesh, and their placements as text. Absent axes have size 1."""
    axes = [axis for axis in placements if axes_of(mesh, axis)]
    return tuple(axes), tuple(str(placements[axis]) for axis in axes)


def _prepare(x: Any, axes: AxisNames, texts: PlacementTexts, mesh: ProcessMesh) -> Any:
    """x resharded to the declared placements.

    Returned unchanged: values that are no tensors, and plain tensors declared replicated.
    """
    if not isinstance(x, Tensor) or (set(texts) <= {"R"} and not isinstance(x, DTensor)):
        return x
    if not isinstance(x, DTensor):
        device_mesh, placements = torch_layout(Layout(mesh), x.device.type)
        x = DTensor.from_local(x, device_mesh, placements, run_check=False)
    return _reshard_on_axes(x, axes, texts)


@in_graph
def _reshard_on_axes(x: DTensor, axes: AxisNames, texts: PlacementTexts) -> DTensor:
    return reshard(x, placements=_with_placements(layout_of(x), axes, texts))


@lru_cache(maxsize=1024)  # few layouts, looked up at every call
def _with_placements(layout: Layout, axes: AxisNames, texts: PlacementTexts) -> Layout:
    """The layout with the placement `texts[i]` on `axes[i]`, or on the axes of the mesh into which it is split."""
    placements = {own: text for axis, text in zip(axes, texts, strict=True) for own in axes_of(layout.mesh, axis)}
    return layout.replace(**placements)
