"""Forward hooks resharding activations at the boundaries of tensor-parallel layers."""

from __future__ import annotations

import copy
import inspect
from collections import Counter
from collections.abc import Callable, MutableMapping
from functools import lru_cache, partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from weft.kernels.sharded import cast_for
from weft.mesh import Layout
from weft.mesh.refinement import axes_of
from weft.reshard import layout_of, reshard
from weft.reshard.running.dtensor import wrap
from weft.reshard.running.dynamo import in_graph

from . import in_steps
from .plan import ParallelPlan
from .styles import TENSOR_AXIS, TOKENS_DIM, ColwiseParallel, PositionParallel, RowwiseParallel, Style, VocabParallel

Called = tuple[tuple[Any, ...], dict[str, Any]]  # args and kwargs of a module's call


def column_siblings(styles: dict[str, Style]) -> dict[str, list[str]]:
    """The names of column-parallel modules, grouped by their parent's name. Siblings reshard a common input once."""
    siblings: dict[str, list[str]] = {}
    for name, style in styles.items():
        if isinstance(style, ColwiseParallel):
            siblings.setdefault(name.rpartition(".")[0], []).append(name)
    return siblings


def hook(
    model: nn.Module,
    styles: dict[str, Style],
    plan: ParallelPlan,
    *,
    name: str = "",
    left: frozenset[str] = frozenset(),
) -> None:
    """Register hooks to reshard activations where tensor-parallel layers of a model, or of a submodule, meet.

    styles: by module name in the whole model.
    plan: the submodule's plan, without parts.
    name: the submodule's name; "" for the whole model.
    left: modules whose output a PrepareOutput places on the tensor axis; no hook here reshards their output.
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
            if in_steps.may_run_in_steps(layer, plan):
                in_steps.gather_columns(layer)
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
        if isinstance(style, RowwiseParallel | VocabParallel) and each not in left:
            if isinstance(style, RowwiseParallel) and in_steps.may_run_in_steps(modules[each], plan):
                in_steps.reduce_rows(modules[each])
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
    return x if in_steps.gathers_in_product(layer, x) else _along_tensor_axis(x, "R")


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
