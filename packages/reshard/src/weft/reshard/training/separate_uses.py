"""`Use`: a module's use of a parameter that other modules share. Each use has a gradient summed over ranks by itself.

Autograd adds the gradients of all uses of a parameter on each rank, before the ranks' sum. Where the uses are on two
stages of a pipeline, the ranks of each stage sum the gradient of their use, and these sums are added. With separate
uses one stage adds in the same order: a stand-in takes the gradient of a use, GradientSync synchronizes the stand-in
like a parameter, and `GradientSync.wait()` adds the result to the parameter's gradient.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from weft.mesh import Layout

from ..moving.dtensor import layout_of, memory_of, wrap
from ..world.groups import this_rank
from .full_parameters import FullParameter
from .hooks import with_mixin
from .pending_gradient import Leaf, as_dtensor, grad_of, sum_of

_USES = "_separate_uses"  # attribute of a module: its separate uses, by the parameter's name


class _Enter(torch.autograd.Function):
    """(parameter, stand-in, use) -> the parameter's values.

    The gradient goes to the stand-in; to the parameter if the GradientSync was closed since.
    """

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, stand_in: Tensor, use: Use) -> Tensor:
        ctx.use = use
        return parameter.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        return (None, grad, None) if ctx.use.is_held else (grad, None, None)


class Use:
    """The use of the shared parameter `module.name` in calls of `module`. Made by `separate_use`."""

    def __init__(self, module: nn.Module, name: str) -> None:
        self._module, self._name = module, name
        # The leaf that takes the gradient, and the GradientSync that synchronizes the leaf.
        self._stand_in: DTensor | None = None
        self._synchronized_by: weakref.ref[Any] | None = None

    def __getstate__(self) -> tuple[nn.Module, str]:
        """A copied or pickled module has no GradientSync yet."""
        return self._module, self._name

    def __setstate__(self, state: tuple[nn.Module, str]) -> None:
        Use.__init__(self, *state)

    @property
    def parameter(self) -> DTensor:
        """The parameter now in the module. While the module computes, the full copy stands for a sharded parameter."""
        parameter = self._slots[self._name]
        assert isinstance(parameter, DTensor), "a parallel model's parameters are DTensors"
        return parameter

    @property
    def _slots(self) -> dict[str, Any]:
        return self._module._parameters

    @property
    def is_held(self) -> bool:
        """Whether a GradientSync synchronizes the gradient of this use."""
        return self._stand_in is not None and self._synchronized_by is not None and self._synchronized_by() is not None

    def give_stand_in(self, stand_in: DTensor | None, sync: object) -> None:
        """From now on the gradient goes to `stand_in`, while `sync` is alive; None: to the parameter again."""
        self._stand_in, self._synchronized_by = stand_in, weakref.ref(sync)

    def enter(self) -> DTensor:
        """Put the parameter's values, with the stand-in's gradient, into the module; return the parameter.

        Raises RuntimeError for a parameter with hooks of the program's: these would see the other uses' gradient alone.
        """
        parameter = self.parameter
        if self._stand_in is not None and self.is_held and parameter.requires_grad and torch.is_grad_enabled():
            _refuse_hooks(parameter, self._name)
            self._stand_in.requires_grad_(True)  # the parameter may be unfrozen since the last `wait()`
            self._slots[self._name] = _Enter.apply(parameter, self._stand_in, self)  # type: ignore[no-untyped-call]
        return parameter

    def leave(self, parameter: DTensor) -> None:
        """Put the parameter back. parameter: the result of `enter`."""
        self._slots[self._name] = parameter


class _UseCall:
    """Mixin put before a module's class: the module computes with its separate uses."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        uses: list[Use] = [*self.__dict__[_USES].values()]
        entered = [use.enter() for use in uses]
        try:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        finally:
            for use, parameter in zip(uses, entered, strict=True):
                use.leave(parameter)


def separate_use(module: nn.Module, name: str) -> None:
    """Let the gradient of the shared parameter `module.name` by calls of `module` be synchronized by itself.

    Without a GradientSync, autograd adds the gradients of all uses. Call `separate_use` before `gather_when_called`.
    """
    if _USES not in module.__dict__:
        module.__dict__[_USES] = {}
        module.__class__ = with_mixin(_UseCall, type(module))
    module.__dict__[_USES][name] = Use(module, name)


class UsesOfStep:
    """The separate uses in a module, and the states of their gradients. A part of GradientSync.

    full_copies: of each sharded parameter. sync: the GradientSync. axes: as `shard_over` of the GradientSync.
    """

    def __init__(
        self, module: nn.Module, full_copies: Mapping[DTensor, FullParameter], axes: Sequence[str], sync: object
    ) -> None:
        self._by_use: dict[Use, Leaf] = {}
        self._held_elsewhere: list[Use] = []  # by a GradientSync made earlier
        for prefix, each in module.named_modules():
            for name, use in each.__dict__.get(_USES, {}).items():
                parameter = use.parameter
                if use.is_held:  # the parameter is frozen: no two GradientSyncs have a trainable parameter
                    self._held_elsewhere.append(use)
                    continue
                leaf = Leaf.of(f"{prefix}.{name}".lstrip("."), parameter, full_copies.get(parameter), axes)
                own = _stand_in(parameter, layout_of(parameter))
                is_full = leaf.accumulator is not parameter
                leaf.accumulator = _stand_in(parameter, layout_of(leaf.accumulator)) if is_full else own
                leaf.parameter = own
                use.give_stand_in(leaf.accumulator, sync)
                self._by_use[use] = leaf

    @property
    def leaves(self) -> list[Leaf]:
        """The states, in an order that is equal on every rank."""
        return list(self._by_use.values())

    def is_elsewhere(self, parameter: DTensor) -> bool:
        """Whether an earlier GradientSync synchronizes a use of the parameter, and therefore the parameter."""
        return any(use.parameter is parameter and use.is_held for use in self._held_elsewhere)

    def update_requires_grad(self) -> None:
        """Make the stand-ins require a gradient exactly where the parameters do, in the same dtype."""
        for use, leaf in self._by_use.items():
            for stand_in in (leaf.parameter, leaf.accumulator):
                stand_in.requires_grad_(use.parameter.requires_grad)
                if stand_in.grad is None and hasattr(stand_in, "grad_dtype"):
                    stand_in.grad_dtype = use.parameter.grad_dtype

    def add_to_parameters(self) -> None:
        """Add the synchronized gradients of the stand-ins to the parameters' gradients."""
        for use, leaf in self._by_use.items():
            grad = grad_of(leaf.parameter)
            if grad is not None:
                use.parameter.grad, leaf.parameter.grad = sum_of(grad_of(use.parameter), grad), None

    def close(self) -> None:
        """Let autograd add the gradients of all uses again."""
        for use in self._by_use:
            use.give_stand_in(None, self)
        self._by_use.clear()


def _refuse_hooks(parameter: Tensor, name: str) -> None:
    hooks = [*(parameter._backward_hooks or {}).values(), *(parameter._post_accumulate_grad_hooks or {}).values()]
    own = [hook for hook in hooks if not str(getattr(hook, "__module__", "")).startswith("weft.")]
    if own:
        raise RuntimeError(
            f"{len(own)} hooks are on {name}, a parameter of several uses whose gradients are summed one by one inside "
            f"exact_sums, and a hook would see a single use; remove the hooks, and change .grad after wait()"
        )


def _stand_in(parameter: DTensor, layout: Layout) -> DTensor:
    """A leaf with the parameter's shape and dtype in a layout, without memory."""
    memory = memory_of(parameter)
    local = torch.empty(layout.local_shape(parameter.shape, this_rank()), dtype=memory.dtype, device=memory.device)
    local.untyped_storage().resize_(0)
    return as_dtensor(nn.Parameter(wrap(local, layout, parameter.shape)))
