"""Which parts of a model its layers read: found by running its own forward on shapes, and following what came of what."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves, tree_map

TOKENS = (2, 2)  # rows and tokens of the batch of shapes
END = -1  # what reads the last layer's output: the rest of the model


@dataclass(frozen=True, slots=True)
class Flow:
    """What reads what, by data.

    layers: the names of the listed layers, in the order in which they are called. units: the modules outside of the list, as
    large as can be, that were called, and the layers that read what they give, END included; of a unit whose outputs lead to
    nothing that could be followed, as whole numbers do, there is no entry. parameters: those of modules around the list.
    """

    layers: tuple[str, ...]
    units: dict[str, set[int]] = field(default_factory=dict)
    parameters: dict[str, set[int]] = field(default_factory=dict)


def units_of(model: nn.Module, layers: Sequence[str]) -> list[str]:
    """The largest modules that neither hold a listed layer nor are in one."""
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
    """Runs the model's forward on the shapes of a few tokens, in eval mode; nothing is computed, and nothing changed.

    Raises ValueError where the layers are not called once each, in their order, each reading the output of the one before and
    of no other: such a model cannot be cut there.
    """
    found = Flow(tuple(layers))
    called: list[int] = []
    leaves: dict[int, int] = {}  # of the tensors that a layer gave, by identity
    kept: list[Any] = []

    def enter(index: int) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            called.append(index)
            _read(index, tree_leaves((args, kwargs)), index - 1)

        return hook

    def leave(index: int) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            def fresh(x: Any) -> Any:
                if not isinstance(x, Tensor) or not x.is_floating_point():
                    return x
                cut = x.detach().requires_grad_()
                leaves[id(cut)] = index
                kept.append(cut)
                return cut

            return tree_map(fresh, output)

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
                    f"{type(model).__name__} cannot be cut between its layers: {who} reads what {layers[leaves[id(leaf)]]} "
                    f"gives, and not the layer before it alone"
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
            state = {name: _shape_of(value) for name, value in _state(model)}
            names = {id(value): name for name, value in state.items()}
            output = functional_call(model, state, (torch.zeros(TOKENS, dtype=torch.int64),))
            _read(END, tree_leaves(output if not hasattr(output, "to_tuple") else output.to_tuple()), len(layers) - 1)
    finally:
        for handle in handles:
            handle.remove()
    if called != list(range(len(layers))):
        order = ", ".join(layers[i] for i in called[:8]) or "none of them"
        raise ValueError(
            f"{type(model).__name__} cannot be cut by these layers: its forward calls {order}, and not each of "
            f"{layers[0]} to {layers[-1]} once, in this order"
        )
    return found


def _state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=True)
    yield from model.named_buffers(remove_duplicate=True)


def _shape_of(value: Tensor) -> Tensor:
    """The same without data; differentiable where it can be, so that what comes of it can be followed."""
    shape = torch.empty(value.shape, dtype=value.dtype, device="meta")
    return shape.requires_grad_(value.is_floating_point())


class _Marked(torch.autograd.Function):
    """The identity, which says in the history of what comes of it which unit it is the output of."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, unit: str) -> Tensor:
        ctx.unit = unit
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        raise AssertionError("shapes are not differentiated")


def _marked(x: Any, unit: str) -> Any:
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return x
    return _Marked.apply(x if x.requires_grad else x.detach().requires_grad_(), unit)  # type: ignore[no-untyped-call]


def _history(tensors: Sequence[Any]) -> Iterator[Any]:
    """The autograd nodes that the tensors came of."""
    left: list[Any] = []
    for x in tensors:
        if isinstance(x, Tensor) and x.requires_grad:
            left.append(x.grad_fn if x.grad_fn is not None else torch.autograd.graph.get_gradient_edge(x).node)
    seen = set(left)
    while left:
        node = left.pop()
        yield node
        for other, _ in node.next_functions:
            if other is not None and other not in seen:
                seen.add(other)
                left.append(other)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True
