"""A parameter's gradient on the way to its layout: the state kept for it, and the placeholder in `.grad`.

`Leaf`: what GradientSync keeps about a parameter and its gradients; `Form`: a gradient's layout and dtype.

`GradPlaceholder`: the placeholder in a parameter's `.grad` while the gradient is being synchronized.

`weakly`: hooks that do not keep objects alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves
from weft.mesh import Layout, ProcessMesh

from ..moving.dtensor import dtensor_spec, layout_of, memory_of, wrap
from ..world.groups import this_rank
from .buckets import Bucket, Route


class Form(NamedTuple):
    """The layout and dtype of a gradient; ranks compare forms in messages."""

    layout: Layout
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {self.layout}"

    @classmethod
    def parse(cls, text: str, mesh: ProcessMesh) -> Form:
        dtype, _, layout = text.partition(" ")
        return cls(Layout(mesh, layout), getattr(torch, dtype))


Forms = tuple[Form, ...]


@dataclass(slots=True, eq=False)
class Leaf:
    """What GradientSync keeps about one parameter; `end_step` clears what belongs to a step."""

    parameter: DTensor  # autograd accumulates into `parameter.grad`
    home: DTensor  # gets the result in `.grad`; under ZeRO the shard, while `parameter` is the full copy
    name: str
    mesh: ProcessMesh  # of home
    is_here: bool  # whether this rank is in the mesh
    target: Layout  # of the result
    sends_every_pass: bool  # ZeRO 2, 3: each backward pass sends its gradient, also inside `paused()`
    is_hooked: bool = False  # whether the hooks are set; not on frozen parameters
    older_grads: dict[Layout, DTensor] = field(default_factory=dict)  # older gradients, not in the layout of `.grad`
    layout_cache: tuple[object, Forms, bool] | None = None  # `layout_info` of the last gradient
    # Spec and route of the last gradient sent; a route of None means: by a reshard.
    route_cache: tuple[object, Route | None] | None = None
    local_grad: Tensor | None = None  # this rank's part of a gradient that bypassed `.grad`; see `local_grad_callback`
    local_grad_forms: tuple[object, Forms] = (None, ())  # spec and forms of `local_grad`
    has_new_grad: bool = False  # whether backward gave a gradient since `wait()`
    ready_count: int = 0  # number of gradients ready to send
    sent: Forms = ()  # of the gradients that `Sending.add` sent, or found in the target layout, since `wait()`
    bucket: Bucket[Leaf] | None = None  # of the gradient sent last
    last_forms: Forms = ()  # on all ranks, in the last step with a gradient
    synced: DTensor | None = None  # sum of the gradients in the target layout, until `wait()` ends
    placeholder: GradPlaceholder | None = None  # kept and reused; in `home.grad` from sending to the end of `wait()`

    @property
    def grad(self) -> DTensor | None:
        """The DTensor in `parameter.grad`; None for none or a placeholder.

        After `wait()`, without ZeRO: the result, until `zero_grad`.
        """
        return grad_of(self.parameter)

    @property
    def expects_grad(self) -> bool:
        """Whether this rank should have a gradient of this parameter."""
        return self.is_hooked and self.is_here and self.home.requires_grad

    def pending(self) -> Forms:
        """The forms of the gradients that `Sending.add` would take.

        Without ZeRO, a gradient in the target layout stays in `.grad`. It is listed once, if backward gave a gradient
        since `wait()`.
        """
        if not self.is_hooked:
            return ()
        if self.older_grads:
            older = [Form(layout, each.dtype) for layout, each in self.older_grads.items() if layout != self.target]
            return (*(self.local_grad_forms[1] if self.local_grad is not None else ()), *older, *self._forms_in_grad())
        return self._forms_in_grad() if self.local_grad is None else (*self.local_grad_forms[1], *self._forms_in_grad())

    def _forms_in_grad(self) -> Forms:
        grad = self.grad
        if grad is None:
            return ()
        _, forms, in_target = self.layout_info(grad)
        if in_target and self.parameter is self.home:  # stays in `.grad`, and counts once
            return forms if self.has_new_grad and forms[0] not in self.sent else ()
        return forms

    def layout_info(self, grad: DTensor) -> tuple[object, Forms, bool]:
        """The gradient's spec, its forms, and whether the gradient is in the target layout; see `layout_cache`."""
        spec = dtensor_spec(grad)
        if self.layout_cache is None or self.layout_cache[0] is not spec:
            layout = layout_of(grad)
            self.layout_cache = spec, (Form(layout, grad.dtype),), layout == self.target
        return self.layout_cache

    def zeros(self, form: Form) -> DTensor:
        """A gradient of zeros in the given form, from a rank without a gradient."""
        local = torch.zeros(
            form.layout.local_shape(self.home.shape, this_rank()),
            dtype=form.dtype,
            device=memory_of(self.parameter).device,
        )
        return wrap(local, form.layout, self.home.shape)

    def end_step(self) -> None:
        """Clears the state of a step, at the end of `wait()`."""
        self.has_new_grad, self.ready_count, self.sent, self.bucket = False, 0, (), None

    def call_hooks(self) -> None:
        """Calls the home parameter's post-accumulate-grad hooks, where autograd accumulates into another tensor."""
        hooks = self.home._post_accumulate_grad_hooks if self.parameter is not self.home else None
        for hook in list(hooks.values()) if hooks else ():
            hook(self.home)

    def put_placeholder(self) -> None:
        """Puts the placeholder into `home.grad`, until the gradient is synchronized."""
        if self.placeholder is None or not self.placeholder.fits(self.home):
            self.placeholder = GradPlaceholder(self.home, self.name)
        self.home.grad = self.placeholder

    def add_synced(self, grad: DTensor) -> None:
        """Adds a gradient in the target layout to `synced`."""
        self.synced = sum_of(self.synced, grad)

    @property
    def has_only_our_hooks(self) -> bool:
        """Whether no hooks but GradientSync's are called with the gradient."""
        before, after = self.parameter._backward_hooks, self.parameter._post_accumulate_grad_hooks
        return before is not None and after is not None and len(before) == len(after) == 1


def in_dtype(grad: DTensor, dtype: torch.dtype) -> DTensor:
    with torch.no_grad():
        return wrap(grad.to_local().to(dtype), layout_of(grad), grad.shape)


def sum_of(first: DTensor | None, second: DTensor) -> DTensor:
    """The sum of two gradients in one layout; the first may be None."""
    if first is None:
        return second
    with torch.no_grad():
        return as_dtensor(first + second)


def grad_of(parameter: DTensor) -> DTensor | None:
    """The parameter's `.grad`; None for none or a placeholder."""
    grad = parameter.grad
    return None if grad is None or isinstance(grad, GradPlaceholder) else as_dtensor(grad)


def as_dtensor(tensor: Tensor) -> DTensor:
    assert isinstance(tensor, DTensor), "GradientSync hooks only DTensors, whose gradients are DTensors"
    return tensor


class GradPlaceholder(Tensor):
    """A placeholder with the gradient's shape, dtype and device, but no memory. Any op on it raises RuntimeError.

    The error tells to call `sync.wait()`. With None in `.grad`, an update by hand would skip the parameter, torch's
    `clip_grad_norm_` would find a norm of 0, and a GradScaler would find nothing to unscale.
    """

    parameter_name: str
    like: tuple[object, ...]

    @staticmethod
    def __new__(cls, parameter: Tensor, name: str) -> GradPlaceholder:
        """name: of the parameter, for the error."""
        shape, dtype, device = like = _like(parameter)
        placeholder: GradPlaceholder = Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=device, storage_size=0
        )
        placeholder.parameter_name, placeholder.like = name, like
        return placeholder

    def fits(self, parameter: Tensor) -> bool:
        """Whether this can still be the parameter's `.grad`: the parameter may have another dtype by now."""
        return self.like == _like(parameter)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # With other tensors: raised before a DTensor among them raises its own error about tensors of another class.
        if sum(isinstance(each, Tensor) for each in tree_leaves((args, kwargs))) > 1:
            _refuse(args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        _refuse(args, kwargs)

    def __getattr__(self, attribute: str) -> NoReturn:
        raise AttributeError(f"{attribute!r} of a gradient that is not there yet: {self._message()}")

    def __deepcopy__(self, memo: object) -> None:
        """None: a copy of the parameter has no GradientSync, and no gradient to wait for."""

    def __repr__(self) -> str:  # type: ignore[override]
        return f"<{self._message()}>"

    def _message(self) -> str:
        return (
            f"the gradient of {self.parameter_name} is still on its way; call sync.wait() between loss.backward() and "
            f"the code that reads it"
        )


def _like(parameter: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    """The shape, dtype and device that torch requires of a parameter's gradient."""
    dtype = getattr(parameter, "grad_dtype", None) or parameter.dtype  # grad_dtype None takes any dtype
    return parameter.shape, dtype, parameter.device


def _refuse(args: Any, kwargs: Any) -> NoReturn:
    found = next(each for each in tree_leaves((args, kwargs)) if isinstance(each, GradPlaceholder))
    raise RuntimeError(found._message())


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """A hook that calls `method` while the method's object is alive.

    A strong reference from a torch hook could keep the object alive for good: the garbage collector does not see such
    references.
    """
    found = weakref.WeakMethod(method)

    def call(*arguments: Any) -> None:
        alive = found()
        if alive is not None:
            alive(*arguments)

    return call
