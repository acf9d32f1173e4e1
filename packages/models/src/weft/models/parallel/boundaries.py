"""The reshards at the boundaries of a parallel model's layers, which are hooks of its modules."""

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

Called = tuple[tuple[Any, ...], dict[str, Any]]  # the arguments that a module is called with


def column_siblings(styles: dict[str, Style]) -> dict[str, list[str]]:
    """Column-parallel modules by the name of their parent: those that share an entrance."""
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
    """Puts the reshards where the layers of a model, or of one within it, meet.

    styles: by the names of modules in the whole model. plan: without parts. name: of the module within the model that the
    plan is of. left: modules whose outputs are prepared along the tensor axis, and left as they come until then.
    """
    modules = dict(model.named_modules())
    places = Counter(module for _, module in model.named_modules(remove_duplicate=False))
    for parent, names in column_siblings(styles).items():
        sharing = {f"{parent}.{each}".lstrip(".") for each in getattr(modules[parent], "sharing_input", ())}
        if sharing == {*names}:  # what the parent is given enters with it
            _before(modules[parent], _enter)
            continue
        if len(names) == 1 and places[modules[names[0]]] == 1:
            layer = modules[names[0]]
            if in_steps.may_travel(layer, plan):
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
            if isinstance(style, RowwiseParallel) and in_steps.may_travel(modules[each], plan):
                in_steps.reduce_rows(modules[each])
            modules[each].register_forward_hook(_leave(stream))
        if isinstance(style, PositionParallel) and plan.sequence:
            _before(modules[each], partial(_cut_positions, modules[each]))
    if not plan.loss_parallel:
        modules[name].register_forward_hook(_leave("R"))


def _before(module: nn.Module, enter: Callable[[Any], Any]) -> None:
    """Has `enter` bring what the module is called with, by position or by the name of forward's first parameter."""
    name = next(iter(inspect.signature(module.forward).parameters), "input")

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Called:
        if args:
            return (enter(args[0]), *args[1:]), kwargs
        return (args, {**kwargs, name: enter(kwargs[name])}) if name in kwargs else (args, kwargs)

    module.register_forward_pre_hook(hook, with_kwargs=True)


def _enter(x: Any) -> Any:
    """A tensor enters a column-parallel layer: it is made whole.

    The forward gathers a sequence-parallel input and moves nothing otherwise; the backward reduces the gradient. Under autocast
    both travel in the dtype of the products, to which each of them would cast it.
    """
    if not isinstance(x, DTensor):  # it counts as replicated
        return x
    return _along_tensor_axis(cast_for("linear", x), "R")


def _enter_or_leave(layer: nn.Module, x: Any) -> Any:
    """As `_enter`, but for tokens that the layer's product gathers, which are left where they are."""
    if not isinstance(x, DTensor):
        return x
    x = cast_for("linear", x)
    return x if in_steps.is_left(layer, x) else _along_tensor_axis(x, "R")


class _Entrance:
    """Where a tensor enters column-parallel siblings: as `_enter`, once, whichever of them come for it."""

    def __init__(self) -> None:
        self._outside: Tensor | None = None
        self._entered: Any = None

    def enter(self, x: Any) -> Any:
        if x is not self._outside or self._entered is None:
            self._outside, self._entered = x, _enter(x)
        return self._entered

    def close(self, *_: object) -> None:
        """Called when the parent returns, so that no activation outlives it."""
        self._outside = self._entered = None


def _cut_positions(module: nn.Module, positions: Any) -> Any:
    """Positions enter an embedding whose output is added to a sequence-parallel stream. Nothing moves."""
    weight = module.weight
    return _along_tokens(positions, weight) if isinstance(weight, DTensor) else positions


@in_graph
def _along_tokens(positions: Tensor, beside: DTensor) -> DTensor:
    """positions [..., T], cut on the tokens over the tensor axis of `beside`'s mesh."""
    if not isinstance(positions, DTensor):  # a plain one counts as replicated
        positions = wrap(positions, Layout(layout_of(beside).mesh), positions.shape)
    return reshard(positions, placements=_replaced(layout_of(positions), f"S({positions.ndim - 1})"))


@in_graph
def _along_tensor_axis(x: DTensor, placement: str) -> DTensor:
    """x with another placement on the tensor axis."""
    return reshard(x, placements=_replaced(layout_of(x), placement))


@lru_cache(maxsize=1024)  # a few layouts, asked for at every boundary of every step
def _replaced(layout: Layout, placement: str) -> Layout:
    return layout.replace(**dict.fromkeys(axes_of(layout.mesh, TENSOR_AXIS), placement))


def _leave(placement: str) -> Callable[[nn.Module, Any, Any], Any]:
    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        return _each(output, lambda x: _along_tensor_axis(x, placement))

    return hook


def _each(output: Any, bring: Callable[[DTensor], DTensor]) -> Any:
    """What a module returned, its DTensors brought elsewhere: one, or those of a tuple, a list or a mapping."""
    if isinstance(output, DTensor):
        return bring(output)
    if isinstance(output, tuple | list):
        brought = [_each(each, bring) for each in output]
        return output._make(brought) if hasattr(output, "_make") else type(output)(brought)
    if isinstance(output, MutableMapping):
        changed = copy.copy(output)
        for key, each in output.items():
            changed[key] = _each(each, bring)
        return changed
    return output
