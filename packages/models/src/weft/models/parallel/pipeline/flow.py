"""Which modules and parameters each layer of a model reads.

Found by running the model's own forward on shapes, and following the autograd graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves, tree_map

TOKENS = (2, 2)  # [B, T] of the tokens on whose shape the forward runs
END = -1  # as a reader: the rest of the model, after the last layer


@dataclass(frozen=True, slots=True)
class Flow:
    """The data flow between a model's list of layers and the modules around the list. Made by `follow`."""

    layers: tuple[str, ...]  # the names of the listed layers, in the order of their calls
    # Each unit, a largest module outside the list, and the layers reading the unit's outputs, END included. There is no
    # entry if autograd follows none of the outputs; integers, for example, cannot be followed.
    units: dict[str, set[int]] = field(default_factory=dict)
    # Each parameter of a module around the list, and the layers that read the parameter, END included.
    parameters: dict[str, set[int]] = field(default_factory=dict)


def units_of(model: nn.Module, layers: Sequence[str]) -> list[str]:
    """The names of the largest modules that neither contain nor are contained in a listed layer."""
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
    """Find what each listed layer reads, by running the model's forward in eval mode on the shapes of a few tokens.

    Nothing is computed, and the model is unchanged. The model can be cut between layers called once each, in order,
    each reading the output of the previous layer and of no other layer.
    Raises ValueError for any other model.
    """
    found = Flow(tuple(layers))
    called: list[int] = []
    leaves: dict[int, int] = {}  # id of a tensor returned by a layer -> the layer
    alive: list[Any] = []  # keeps these tensors alive, and their ids unique

    def enter(index: int) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            called.append(index)
            _read(index, tree_leaves((args, kwargs)), index - 1)

        return hook

    def leave(index: int) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            def as_leaf(x: Any) -> Any:
                if not isinstance(x, Tensor) or not x.is_floating_point():
                    return x
                cut = x.detach().requires_grad_()
                leaves[id(cut)] = index
                alive.append(cut)
                return cut

            return tree_map(as_leaf, output)

        return hook

    def mark(unit: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            return tree_map(lambda x: _marked(x, unit), output)

        return hook

    def _read(reader: int, tensors: Sequence[Any], before: int) -> None:
        for node in _history(tensors):
            unit, leaf = getattr(node, "unit", None), getattr(node, "variable", None)
            if unit is not None:
                found.units.setdefault(unit, set()).add(reader)
            elif leaf is not None and id(leaf) in leaves and leaves[id(leaf)] != before:
                who = "the end of the model" if reader == END else layers[reader]
                raise ValueError(
                    f"{type(model).__name__} cannot be cut between its layers: {who} reads the output of "
                    f"{layers[leaves[id(leaf)]]}, and may read only that of the layer before it"
                )
            elif leaf is not None and id(leaf) in names:
                found.parameters.setdefault(names[id(leaf)], set()).add(reader)

    modules = {name: model.get_submodule(name) for name in layers}
    handles = [
        each
        for i, name in enumerate(layers)
        for each in (
            modules[name].register_forward_pre_hook(enter(i), with_kwargs=True),
            modules[name].register_forward_hook(leave(i)),
        )
    ]
    handles += [model.get_submodule(unit).register_forward_hook(mark(unit)) for unit in units_of(model, layers)]
    try:
        with torch.device("meta"), _evaluating(model), torch.enable_grad():
            state = {name: _without_data(value) for name, value in _state(model)}
            names = {id(value): name for name, value in state.items()}
            output = functional_call(model, state, (torch.zeros(TOKENS, dtype=torch.int64),))
            _read(END, tree_leaves(output if not hasattr(output, "to_tuple") else output.to_tuple()), len(layers) - 1)
    finally:
        for handle in handles:
            handle.remove()
    if called != list(range(len(layers))):
        order = ", ".join(layers[i] for i in called[:8]) or "none of them"
        raise ValueError(
            f"{type(model).__name__} cannot be cut by these layers: its forward calls {order}, and must call each of "
            f"{layers[0]} to {layers[-1]} once, in this order"
        )
    return found


def _state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The model's parameters and buffers, by name."""
    yield from model.named_parameters(remove_duplicate=True)
    yield from model.named_buffers(remove_duplicate=True)


def _without_data(value: Tensor) -> Tensor:
    """A meta tensor like `value`; requires grad if floating-point, for autograd to follow the tensor's uses."""
    shape = torch.empty(value.shape, dtype=value.dtype, device="meta")
    return shape.requires_grad_(value.is_floating_point())


class _Marked(torch.autograd.Function):
    """The identity. Its node in the autograd graph has an attribute `unit`: the name of the unit whose output x is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, unit: str) -> Tensor:
        ctx.unit = unit
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        raise AssertionError("shapes are not differentiated")


def _marked(x: Any, unit: str) -> Any:
    """x, if autograd follows x, marked as an output of the unit."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return x
    return _Marked.apply(x if x.requires_grad else x.detach().requires_grad_(), unit)  # type: ignore[no-untyped-call]


def _history(tensors: Sequence[Any]) -> Iterator[Any]:
    """The nodes of the autograd graph from which the tensors come."""
    pending: list[Any] = []
    for x in tensors:
        if isinstance(x, Tensor) and x.requires_grad:
            pending.append(x.grad_fn if x.grad_fn is not None else torch.autograd.graph.get_gradient_edge(x).node)
    seen = set(pending)
    while pending:
        node = pending.pop()
        yield node
        for source, _ in node.next_functions:
            if source is not None and source not in seen:
                seen.add(source)
                pending.append(source)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Inside, all modules are in eval mode."""
    training = [module for module in model.modules() if module.training]
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True
