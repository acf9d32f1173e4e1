"""Parts of hooks on tensors, modules and optimizers.

`weak_hook`: a hook on a method without keeping the object alive. `tensors_of`, `differentiable`: the tensors to hook in
a call's nested arguments or results. `backward_is_running`: whether a hook, or a forward, runs inside of backward.
`with_mixin`: the class of a module whose calls are changed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter


def weak_hook(method: Callable[..., None]) -> Callable[..., None]:
    """A hook that calls `method` while the method's object is alive.

    A strong reference from a torch hook, unseen by the garbage collector, could keep the object alive for good.
    """
    weak_method = weakref.WeakMethod(method)

    def call(*arguments: Any) -> None:
        alive = weak_method()
        if alive is not None:
            alive(*arguments)

    return call


def with_mixin(mixin: type, kind: type[nn.Module]) -> type[nn.Module]:
    """A subclass of `kind`, of the same name, with `mixin` before `kind`: the mixin's `__call__` runs first."""
    return type(kind.__name__, (mixin, kind), {"__module__": kind.__module__, "__qualname__": kind.__qualname__})


def backward_is_running() -> bool:
    """Whether autograd's backward runs in this thread. torch.utils.checkpoint asks in the same way."""
    return torch._C._current_graph_task_id() != -1


def tensors_of(tree: Any) -> list[Tensor]:
    """The tensors in a tree, in order.

    Most arguments are tensors and plain values. For these, torch's own tree functions take as much host time as an op.
    """
    found: list[Tensor] = []
    _append_tensors(tree, found)
    return found


def differentiable(tree: Any) -> list[Tensor]:
    """The tensors in a tree requiring grad, in order."""
    return [each for each in tensors_of(tree) if each.requires_grad]


def _append_tensors(tree: Any, found: list[Tensor]) -> None:
    if isinstance(tree, Tensor):
        found.append(tree)
    elif type(tree) in (tuple, list):
        for each in tree:
            _append_tensors(each, found)
    elif type(tree) is dict:
        for each in tree.values():
            _append_tensors(each, found)
    elif tree is not None and not isinstance(tree, bool | int | float | str):
        found += [each for each in tree_iter(tree) if isinstance(each, Tensor)]
