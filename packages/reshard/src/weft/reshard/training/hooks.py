"""Helpers for hooks on tensors, modules and optimizers.

`takes_none`: the mark of a gradient hook that a pipeline may call without a gradient.
`weak_hook`: a hook on a method without keeping the object alive. `StepHooks`: methods called before or after every
optimizer's step. `tensors_of`, `differentiable`: the tensors in a call's nested arguments or results.
`backward_is_running`: whether a hook, or a forward, runs inside of backward.
`with_mixin`: a class for a module's `__class__`, which changes the module's calls.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, SupportsIndex, TypeVar

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_iter
from torch.utils.hooks import RemovableHandle

GradientHook = TypeVar("GradientHook", bound=Callable[..., Any])


def takes_none(hook: GradientHook) -> GradientHook:
    """Marks a gradient hook that may be called with None, and twice, where weight gradients are delayed.

    `weft.kernels` delays the gradients of parameters all of whose hooks have the mark.
    """
    hook.takes_none = True  # type: ignore[attr-defined]
    return hook


def weak_hook(method: Callable[..., None]) -> Callable[..., None]:
    """A hook that calls `method` while the method's object is alive.

    torch may hold a hook where Python's garbage collector does not see the hook. A strong reference in the hook could
    then keep the object alive forever.
    """
    weak_method = weakref.WeakMethod(method)

    def call(*arguments: Any) -> None:
        alive = weak_method()
        if alive is not None:
            alive(*arguments)

    return call


class StepHooks:
    """Methods to call at every optimizer's step, each while the method's object is alive.

    torch calls its hooks in a loop, and the garbage collector may free a model in this loop. If the model's end removed
    a hook, torch would raise "OrderedDict mutated during iteration". So torch holds one hook for all methods,
    registered with the first method and never removed.
    """

    def __init__(self, register: Callable[[Callable[..., None]], object]) -> None:
        """register: a function of torch which registers a hook for every optimizer."""
        self._register = register
        self._is_registered = False
        self._methods: OrderedDict[int, weakref.WeakMethod[Callable[[Optimizer], None]]] = OrderedDict()

    def add(self, method: Callable[[Optimizer], None]) -> RemovableHandle:
        """Calls `method` with the optimizer at every step from now on. Returns a handle that removes the method.

        Called by the constructors of GradientSync and ModelGathering, and by cut_models.py.
        """
        if not self._is_registered:
            self._register(self._call)
            self._is_registered = True
        handle = RemovableHandle(self._methods)
        self._methods[handle.id] = weakref.WeakMethod(method)
        return handle

    def _call(self, optimizer: Optimizer, *_: object) -> None:
        for number, weak_method in list(self._methods.items()):
            method = weak_method()
            if method is None:
                self._methods.pop(number, None)
            else:
                method(optimizer)


# methods called before, and after, the step of every optimizer of the process
before_step = StepHooks(register_optimizer_step_pre_hook)
after_step = StepHooks(register_optimizer_step_post_hook)

_subclasses: dict[tuple[type, type], type[nn.Module]] = {}  # of `with_mixin`: one for each mixin and class


def with_mixin(mixin: type, kind: type[nn.Module]) -> type[nn.Module]:
    """The subclass of `kind`, of the same name, with `mixin` before `kind`: the mixin's `__call__` runs first.

    Called for modules that gather parameters or have separate uses, and for parallel models by weft.models.
    Modules of the subclass can be copied and pickled.
    """
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__reduce_ex__": _reduce}
    if (mixin, kind) not in _subclasses:
        _subclasses[mixin, kind] = type(kind.__name__, (mixin, kind), names)
    return _subclasses[mixin, kind]


def _reduce(module: nn.Module, protocol: SupportsIndex) -> tuple[Any, ...]:
    """`__reduce_ex__` of a module with mixins: pickle finds the mixins and the class below them by name."""
    classes: list[type] = [type(module)]
    while classes[-1].__dict__.get("__reduce_ex__") is _reduce:
        classes[-1:] = classes[-1].__bases__
    reduced = object.__reduce_ex__(module, 2)
    assert isinstance(reduced, tuple), "as a name, only constants are reduced"
    return _new_module, tuple(classes), *reduced[2:]


def _new_module(*mixins_and_kind: type) -> nn.Module:
    """A module without state, of the class `mixins_and_kind[-1]` with the mixins before it, outermost first."""
    *mixins, kind = mixins_and_kind
    for mixin in reversed(mixins):
        kind = with_mixin(mixin, kind)
    module: nn.Module = nn.Module.__new__(kind)
    return module


def backward_is_running() -> bool:
    """Whether autograd's backward runs in this thread. torch.utils.checkpoint asks in the same way."""
    return torch._C._current_graph_task_id() != -1


def tensors_of(tree: Any) -> list[Tensor]:
    """The tensors in a tree of arguments or results, in order. Called by `differentiable` and in weft.models.

    Most arguments are tensors and plain values. For these, torch's own tree functions take as much host time as an op.
    """
    found: list[Tensor] = []
    _append_tensors(tree, found)
    return found


def differentiable(tree: Any) -> list[Tensor]:
    """The tensors in a tree that require grad, in order. Called by `Unit` and in weft.models, to set hooks."""
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
