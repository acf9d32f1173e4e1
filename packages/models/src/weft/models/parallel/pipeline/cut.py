"""Cuts a model into stages: which layers, and which modules and parameters around the layers, each stage holds.

`cut` makes the stages. `follow` finds which modules and parameters each layer reads, by running the model's own forward
on shapes and following the autograd graph.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves, tree_map

from ...schedules.pipeline_plan import PipelinePlan, Split
from ...schedules.schedule import Schedule

TOKENS = (2, 2)  # [B, T] of the tokens with which `follow` runs the forward on shapes
END = -1  # in place of a layer's number: the rest of the model, after the last layer


@dataclass(frozen=True, slots=True)
class Cut:
    """A model cut into stages; an equal value on every rank. Made by `cut`."""

    layers: tuple[str, ...]  # the names of the listed layers, in order
    ranges: tuple[tuple[int, int], ...]  # the layers of each stage, [start, stop)
    outer_modules: dict[str, frozenset[int]]  # {module outside the list of layers: the stages using the output}
    parameters: dict[str, frozenset[int]]  # {parameter, by the first of tied names: the stages with the parameter}

    def shared(self, rank_of: Callable[[int], int]) -> dict[str, tuple[int, ...]]:
        """{parameter held by several ranks along "pp": the ranks' coordinates on "pp", ascending}.

        rank_of: maps a stage to the coordinate on "pp" of the rank with the stage.
        """
        ranks = {name: tuple(sorted(set(map(rank_of, stages)))) for name, stages in self.parameters.items()}
        return {name: each for name, each in ranks.items() if len(each) > 1}

    def stages_of(self, module: str) -> frozenset[int]:
        """The stages that call the named module; all stages if outside of `layers` and `outer_modules`."""
        layer = next((i for i, each in enumerate(self.layers) if f"{module}.".startswith(f"{each}.")), None)
        if layer is not None:
            return frozenset({_stage_of(layer, self.ranges)})
        outer = (stages for name, stages in self.outer_modules.items() if f"{module}.".startswith(f"{name}."))
        return next(outer, frozenset(range(len(self.ranges))))


def cut(
    model: nn.Module,
    plan: PipelinePlan,
    schedule: Schedule,
    find_flow: Callable[[nn.Module, Sequence[str]], Flow] | None = None,
) -> Cut:
    """Cut a model as the plan says. The model is not changed, and no data is computed.

    find_flow: finds the `Flow` of the model and the names of the layers. None: `follow`, which runs all layers.
    Raises ValueError for a model without a list of layers, for more stages than layers, for layer counts with a
    wrong sum, for a split point outside the layers, and as `follow` does.
    """
    layers, ranges = ranges_of(model, plan, schedule)
    flow = (find_flow or follow)(model, layers)
    everywhere = frozenset(range(len(ranges)))

    def stages(readers: set[int]) -> frozenset[int]:
        last = len(ranges) - 1
        return frozenset(last if reader == END else _stage_of(reader, ranges) for reader in readers)

    outer_modules = {
        name: stages(flow.outer_modules[name]) if name in flow.outer_modules else everywhere
        for name in _modules_around(model, layers)
    }
    inside = {name: frozenset({_stage_of(i, ranges)}) for i, name in enumerate(layers)} | outer_modules
    stages_of: dict[nn.Parameter, frozenset[int]] = {}
    first: dict[nn.Parameter, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        enclosing = next((each for each in inside if name.startswith(f"{each}.")), None)
        first.setdefault(parameter, name)
        around = stages(flow.parameters[first[parameter]]) if first[parameter] in flow.parameters else everywhere
        stages_of[parameter] = stages_of.get(parameter, frozenset()) | (
            around if enclosing is None else inside[enclosing]
        )
    return Cut(
        tuple(layers), ranges, outer_modules, {first[parameter]: stages for parameter, stages in stages_of.items()}
    )


def ranges_of(
    model: nn.Module, plan: PipelinePlan, schedule: Schedule
) -> tuple[list[str], tuple[tuple[int, int], ...]]:
    """The names of the listed layers, and each stage's layers as [start, stop). Raises ValueError as `cut` does."""
    layers, points = _layers_of(model, plan.split)
    return layers, _ranges(model, plan.split, layers, points, schedule)


def _layers_of(model: nn.Module, split: Split) -> tuple[list[str], list[str]]:
    """The names of the listed layers; and the first layers of the second and later stages, if `split` names them."""
    lists = {name: list(module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    if isinstance(split, tuple) and isinstance(split[0], str):
        points = [str(each) for each in split]
        parents = {point.rpartition(".")[0] for point in points}
        known = [f"{name}.{i}" for name, entries in lists.items() for i in range(len(entries))]
        for point in points:
            if point not in known:
                near = difflib.get_close_matches(point, known, n=3, cutoff=0.3) or known[:3]
                raise ValueError(
                    f"split names {point!r}, which is no layer in a list of {type(model).__name__}; "
                    + (f"the nearest names are {', '.join(near)}" if near else "it has no nn.ModuleList")
                )
        if len(parents) > 1:
            raise ValueError(
                f"split names layers of the lists {', '.join(sorted(parents))}; stages are cut from one list"
            )
        chosen = parents.pop()
    else:
        points = []
        outermost = [
            name for name in lists if not any(name.startswith(f"{other}.") for other in lists if other != name)
        ]
        if isinstance(split, str) and split in lists:
            chosen = split
        elif isinstance(split, str) and split != "layers":
            raise ValueError(
                f"split is {split!r}, which is no list of layers of {type(model).__name__}; "
                + (f"there are {', '.join(lists)}" if lists else "it has no nn.ModuleList")
            )
        elif len(outermost) != 1:
            raise ValueError(
                f"a pipeline cuts a model by its list of layers, and {type(model).__name__} has "
                + (f"several: {', '.join(outermost)}; name one by split=" if outermost else "no nn.ModuleList")
            )
        else:
            chosen = outermost[0]
    return [f"{chosen}.{i}" for i in range(len(lists[chosen]))], points


def _ranges(
    model: nn.Module, split: Split, layers: list[str], points: list[str], schedule: Schedule
) -> tuple[tuple[int, int], ...]:
    """Each stage's layers as [start, stop).

    points: the first layer of each stage after the first, if `split` names these layers; else empty.
    """
    stages, count = schedule.num_stages, len(layers)
    of_ranks = f"{schedule.ranks} ranks" + (f" with {schedule.chunks} each" if schedule.chunks > 1 else "")
    if stages > count:
        raise ValueError(
            f"{type(model).__name__} has {count} layers, {layers[0]} to {layers[-1]}, and they cannot be cut into "
            f"{stages} stages, on {of_ranks}: each stage needs a layer or more; lower pp or chunks"
        )
    if points:
        starts = [layers.index(point) for point in points]
        if starts != sorted(set(starts)) or starts[0] == 0:
            raise ValueError(f"split names {', '.join(points)}; the stages after the first begin at them, in order")
        bounds = [0, *starts, count]
    elif isinstance(split, tuple):
        counts = [int(each) for each in split]
        if sum(counts) != count or min(counts) < 1:
            raise ValueError(
                f"split gives the stages {', '.join(map(str, counts))} layers, {sum(counts)} in all; "
                f"{type(model).__name__} has {count}, and each stage needs one or more"
            )
        bounds = [0, *accumulate(counts)]
    else:
        counts = [count // stages + (stage < count % stages) for stage in range(stages)]
        bounds = [0, *accumulate(counts)]
    if len(bounds) != stages + 1:
        raise ValueError(
            f"split cuts {type(model).__name__} into {len(bounds) - 1} stages, and there are {stages}, on {of_ranks}"
        )
    return tuple(pairwise(bounds))


def _stage_of(layer: int, ranges: tuple[tuple[int, int], ...]) -> int:
    return next(stage for stage, (start, stop) in enumerate(ranges) if start <= layer < stop)


@dataclass(frozen=True, slots=True)
class Flow:
    """The data flow between a model's list of layers and the modules around the list. Made by `follow`."""

    layers: tuple[str, ...]  # the names of the listed layers, in the order of their calls
    # {module: the layers reading the module's outputs}; END may be among the readers. The modules are the names of
    # `_modules_around`. A module whose outputs autograd cannot follow, as integers, has no entry.
    outer_modules: dict[str, set[int]] = field(default_factory=dict)
    # {parameter of a module around the list of layers: the layers reading the parameter}; END may be a reader.
    parameters: dict[str, set[int]] = field(default_factory=dict)


def _modules_around(model: nn.Module, layers: Sequence[str]) -> list[str]:
    """The largest modules that neither contain a listed layer nor lie within a listed layer, by name."""
    around = {name.rpartition(".")[0] for name in layers}
    for name in list(around):
        while name:
            name = name.rpartition(".")[0]
            around.add(name)
    return [
        f"{parent}.{child}".lstrip(".")
        for parent in sorted(around)
        for child, _ in model.get_submodule(parent).named_children()
        if f"{parent}.{child}".lstrip(".") not in around and f"{parent}.{child}".lstrip(".") not in layers
    ]


def follow(model: nn.Module, layers: Sequence[str]) -> Flow:
    """Find the readers of parameters and of the modules around the layers, by a forward in eval mode on meta tensors.

    The model is unchanged. Raises ValueError for a model that cannot be cut between the listed layers: each layer must
    be called once, in order, and may read the output of the previous layer only.
    """
    flow = Flow(tuple(layers))
    call_order: list[int] = []
    leaves: dict[int, int] = {}  # id of a tensor returned by a layer -> the layer
    layer_outputs: list[Any] = []  # keeps these tensors alive, and their ids unique

    def enter(index: int) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            call_order.append(index)
            _record_reads(index, tree_leaves((args, kwargs)), index - 1)

        return hook

    def leave(index: int) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            def as_leaf(x: Any) -> Any:
                if not isinstance(x, Tensor) or not x.is_floating_point():
                    return x
                cut = x.detach().requires_grad_()
                leaves[id(cut)] = index
                layer_outputs.append(cut)
                return cut

            return tree_map(as_leaf, output)

        return hook

    def mark(module_name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            return tree_map(lambda x: _mark(x, module_name), output)

        return hook

    def _record_reads(reader: int, tensors: Sequence[Any], before: int) -> None:
        for node in _history(tensors):
            module_name, leaf = getattr(node, "module_name", None), getattr(node, "variable", None)
            if module_name is not None:
                flow.outer_modules.setdefault(module_name, set()).add(reader)
            elif leaf is not None and id(leaf) in leaves and leaves[id(leaf)] != before:
                who = "the end of the model" if reader == END else layers[reader]
                raise ValueError(
                    f"{type(model).__name__} cannot be cut between its layers: {who} reads the output of "
                    f"{layers[leaves[id(leaf)]]}, and may read only that of the layer before it"
                )
            elif leaf is not None and id(leaf) in names:
                flow.parameters.setdefault(names[id(leaf)], set()).add(reader)

    modules = {name: model.get_submodule(name) for name in layers}
    handles = [
        each
        for i, name in enumerate(layers)
        for each in (
            modules[name].register_forward_pre_hook(enter(i), with_kwargs=True),
            modules[name].register_forward_hook(leave(i)),
        )
    ]
    handles += [model.get_submodule(name).register_forward_hook(mark(name)) for name in _modules_around(model, layers)]
    try:
        with torch.device("meta"), _in_eval_mode(model), torch.enable_grad():
            state = {name: _meta_like(value) for name, value in _state(model)}
            names = {id(value): name for name, value in state.items()}
            output = functional_call(model, state, (torch.zeros(TOKENS, dtype=torch.int64),))
            _record_reads(
                END, tree_leaves(output if not hasattr(output, "to_tuple") else output.to_tuple()), len(layers) - 1
            )
    finally:
        for handle in handles:
            handle.remove()
    if call_order != list(range(len(layers))):
        order = ", ".join(layers[i] for i in call_order[:8]) or "none of them"
        raise ValueError(
            f"{type(model).__name__} cannot be cut by these layers: its forward calls {order}, and must call each of "
            f"{layers[0]} to {layers[-1]} once, in this order"
        )
    return flow


def _state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The model's parameters and buffers, by name."""
    yield from model.named_parameters(remove_duplicate=True)
    yield from model.named_buffers(remove_duplicate=True)


def _meta_like(value: Tensor) -> Tensor:
    """A meta tensor like `value`; requires grad if floating-point, for autograd to follow the uses."""
    shape = torch.empty(value.shape, dtype=value.dtype, device="meta")
    return shape.requires_grad_(value.is_floating_point())


class _Mark(torch.autograd.Function):
    """The identity. The node in the autograd graph gets the attribute `module_name`, of the module with output x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module_name: str) -> Tensor:
        ctx.module_name = module_name
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        raise AssertionError("shapes are not differentiated")


def _mark(x: Any, module_name: str) -> Any:
    """Mark x as an output of a module, if autograd follows x."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return x
    return _Mark.apply(x if x.requires_grad else x.detach().requires_grad_(), module_name)  # type: ignore[no-untyped-call]


def _history(tensors: Sequence[Any]) -> Iterator[Any]:
    """The nodes of the autograd graph from which the tensors come."""
    pending: list[Any] = []
    for x in tensors:
        if isinstance(x, Tensor) and x.requires_grad:
            pending.append(x.grad_fn if x.grad_fn is not None else torch.autograd.graph.get_gradient_edge(x).node)
    visited = set(pending)
    while pending:
        node = pending.pop()
        yield node
        for source, _ in node.next_functions:
            if source is not None and source not in visited:
                visited.add(source)
                pending.append(source)


@contextmanager
def _in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Inside, all modules are in eval mode."""
    training = [module for module in model.modules() if module.training]
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True
