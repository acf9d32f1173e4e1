"""The state of a gradient on the way to the target layout, and the placeholder in `.grad` meanwhile.

`Leaf`: the state of a parameter's gradients, kept by GradientSync; `GradientForm`: a gradient's layout and dtype.

`GradPlaceholder`: the placeholder in a parameter's `.grad` while the gradient is being synchronized.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves
from weft.mesh import Layout, ProcessMesh

from ..moving.dtensor import dtensor_spec, layout_of, memory_of, wrap, wrap_with_spec
from ..moving.tree import stacked_shape
from ..planning.layouts import shard_replicated_axes
from ..world.exact import exact_axes, named_axes_key
from ..world.groups import this_rank
from .buckets import Bucket, Route
from .full_parameters import FullParameter


class GradientForm(NamedTuple):
    """The layout and dtype of a gradient; ranks compare forms in messages."""

    layout: Layout
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {self.layout}"

    @classmethod
    def parse(cls, text: str, mesh: ProcessMesh) -> GradientForm:
        """The form printed as `text`, from a peer's message (gradient_presence.py)."""
        dtype, _, layout = text.partition(" ")
        return cls(Layout(mesh, layout), getattr(torch, dtype))


Forms = tuple[GradientForm, ...]


@dataclass(slots=True, eq=False)
class Leaf:
    """A parameter and the state of its gradients.

    GradientSync makes a Leaf for each DTensor parameter, and `UsesOfStep` a Leaf for each separate use of a shared
    parameter. A parameter's gradients in a step may have several layouts; each layout and dtype is a GradientForm.
    A round ends at `GradientSync.wait()`, and under ZeRO 2 and 3 also at the end of `GradientSync.paused()`.
    """

    # The module's parameter, or a separate use's stand-in; gets the result in `.grad`. Under ZeRO a shard.
    parameter: DTensor
    # The tensor to whose `.grad` autograd adds: `parameter`, or under ZeRO the full copy. For a separate use under
    # ZeRO, a stand-in with the full copy's layout.
    accumulator: DTensor
    name: str
    mesh: ProcessMesh  # the parameter's mesh
    is_on_mesh: bool  # whether this rank is in the mesh
    target: Layout  # the result's layout
    sends_every_pass: bool  # ZeRO 2, 3: each backward pass sends a gradient, also inside `GradientSync.paused()`
    is_hooked: bool = False  # whether the hooks are set; not on frozen parameters
    # Earlier gradients moved out of `.grad`, not yet handled by `GradientBuckets.add`: see `_set_aside`.
    older_grads: list[DTensor] = field(default_factory=list)
    info_cache: tuple[object, Forms, bool] | None = None  # `grad_info` of the last gradient
    # Spec, named mesh and Route of the last gradient sent; see `route_of`.
    route_cache: tuple[object, object, Route | None] | None = None
    # This rank's part of an unsent gradient that skips `.grad`; see `local_grad_callback`.
    local_grad: Tensor | None = None
    local_grad_forms: tuple[object, Forms] = (None, ())  # spec and forms of `local_grad`
    # Whether backward came to the parameter in this round, also where a function returned no gradient.
    was_reached: bool = False
    ready_count: int = 0  # number of calls of `SendOrder.send_ready` in this round, of gradients not yet sent
    num_grads: int = 0  # number of calls of `SendOrder.send_ready` in this round, also of sent gradients
    # Number of gradients, or zeros for a missing gradient, that SendOrder and `_send_with_peers` gave to
    # GradientBuckets in this round. A gradient in the target layout counts, although no bucket takes the gradient.
    num_sent: int = 0
    # Forms of the gradients in this round sent by `GradientBuckets.add`, or found in the target layout.
    sent_forms: Forms = ()
    bucket: Bucket[Leaf] | None = None  # the bucket of this round's last gradient; may still be open
    # Forms of the gradients on all ranks, in the last round in which any rank had a gradient of this parameter.
    last_forms: Forms = ()
    reduced_grad: DTensor | None = None  # sum of the gradients already in the target layout, until the round ends
    earlier_grad: DTensor | None = None  # with `sums_each_pass`: `.grad` of earlier rounds, included in `reduced_grad`
    placeholder: GradPlaceholder | None = None  # in `parameter.grad` from sending until the round ends; reused

    @classmethod
    def of(cls, name: str, parameter: DTensor, full: FullParameter | None, axes: Sequence[str]) -> Leaf:
        """The state before the first step. Called by GradientSync, and for separate uses by `UsesOfStep`.

        full: the full copy of a sharded parameter, or None.
        axes: GradientSync's `shard_over`: the result is sharded over these too, where the parameter is replicated.
        """
        layout = layout_of(parameter)
        return cls(
            parameter=parameter,
            accumulator=parameter if full is None else as_dtensor(full.leaf),
            name=name,
            mesh=layout.mesh,
            is_on_mesh=this_rank() in layout.mesh,
            target=shard_replicated_axes(layout, parameter.shape, axes),
            sends_every_pass=full is not None and not full.accumulate_grad,
        )

    @property
    def grad(self) -> DTensor | None:
        """The gradient in `accumulator.grad`; None where `.grad` is None or a placeholder.

        Without ZeRO, the result of the last `wait()` counts too, until `zero_grad`.
        """
        return grad_of(self.accumulator)

    @property
    def expects_grad(self) -> bool:
        """Whether this rank should have a gradient of the parameter. Read by `send_remaining`."""
        return self.is_hooked and self.is_on_mesh and self.parameter.requires_grad

    @property
    def sums_each_pass(self) -> bool:
        """Whether the ranks sum the gradient of each backward pass separately: with ZeRO 2 and 3 inside `exact_sums`.

        Otherwise a rank may add up the gradients of several passes before the ranks sum.
        """
        return self.sends_every_pass and exact_axes() is not None

    @property
    def num_unsent(self) -> int:
        """How many calls of `GradientBuckets.add` the unsent gradients need. Read by `send_remaining`."""
        if not self.sums_each_pass or not self.is_hooked:
            return int(bool(self.unsent_forms()))
        return (self.local_grad is not None) + len(self.older_grads) + (self.grad is not None)

    def take_older_grads(self) -> list[DTensor]:
        """Removes and returns the gradients that were set aside; of a leaf with `sums_each_pass`, the oldest alone."""
        if not self.older_grads:
            return []
        number = 1 if self.sums_each_pass else len(self.older_grads)
        removed, self.older_grads = self.older_grads[:number], self.older_grads[number:]
        return removed

    def unsent_forms(self) -> Forms:
        """The forms of the gradients not yet handled by `GradientBuckets.add`, which moves forms to `sent_forms`.

        Called by `GradientBuckets.add`, SendOrder and `send_remaining`.
        A new gradient in `.grad` counts even in the target layout: no bucket takes the gradient, but the form tells
        peers of the gradient. In `older_grads`, gradients in the target layout do not count.
        """
        if not self.is_hooked:
            return ()
        if self.older_grads:
            older = [GradientForm(layout_of(each), each.dtype) for each in self.older_grads]
            local = self.local_grad_forms[1] if self.local_grad is not None else ()
            unsent = *local, *(form for form in older if form.layout != self.target), *self._forms_in_grad()
            return tuple(dict.fromkeys(unsent))
        return self._forms_in_grad() if self.local_grad is None else (*self.local_grad_forms[1], *self._forms_in_grad())

    def _forms_in_grad(self) -> Forms:
        """The form of the unsent gradient in `.grad`, as a tuple; () for none."""
        grad = self.grad
        if grad is None:
            return ()
        _, forms, in_target = self.grad_info(grad)
        # in its final place: the result of the last `wait()`, or a new gradient
        if in_target and self.accumulator is self.parameter:
            return forms if self.was_reached and forms[0] not in self.sent_forms else ()
        return forms

    def grad_info(self, grad: DTensor) -> tuple[object, Forms, bool]:
        """(spec, forms, whether the gradient is in the target layout). Cached for the last gradient's spec.

        forms: the gradient's GradientForm, as a tuple for `unsent_forms`.
        """
        spec = dtensor_spec(grad)
        if self.info_cache is None or self.info_cache[0] is not spec:
            layout = layout_of(grad)
            self.info_cache = spec, (GradientForm(layout, grad.dtype),), layout == self.target
        return self.info_cache

    def route_of(self, local: Tensor, spec: Any) -> Route | None:
        """The Route of a gradient, cached for the last gradient's spec. Without a Route, a reshard sends the gradient.

        local, spec: this rank's part of the gradient, and the gradient's `dtensor_spec`.
        """
        cache, named = self.route_cache, named_axes_key()
        if cache is None or cache[0] is not spec or cache[1] != named:
            cache = self.route_cache = spec, named, Route.of(wrap_with_spec(local, spec), self.target)
        return cache[2]

    def zeros(self, form: GradientForm) -> DTensor:
        """A gradient of zeros in the given form, which this rank gives in place of a missing gradient."""
        local = torch.zeros(
            stacked_shape(form.layout, self.parameter.shape, this_rank()),
            dtype=form.dtype,
            device=memory_of(self.accumulator).device,
        )
        return wrap(local, form.layout, self.parameter.shape)

    def reset(self) -> None:
        """Clears the round's counts, `sent_forms` and `bucket`, once all sums over ranks are in `reduced_grad`."""
        self.was_reached, self.sent_forms, self.bucket = False, (), None
        self.ready_count = self.num_grads = self.num_sent = 0

    def call_parameter_hooks(self) -> None:
        """Under ZeRO, calls the shard's post-accumulate-grad hooks: autograd calls the hooks of the full copy alone."""
        hooks = self.parameter._post_accumulate_grad_hooks if self.accumulator is not self.parameter else None
        for hook in list(hooks.values()) if hooks else ():
            hook(self.parameter)

    def put_placeholder(self) -> None:
        """Puts the placeholder into `parameter.grad`, until the gradient is synchronized."""
        if self.placeholder is None or not self.placeholder.fits(self.parameter):
            self.placeholder = GradPlaceholder(self.parameter, self.name)
        self.parameter.grad = self.placeholder

    def gradient_for_autograd(self, incoming: DTensor) -> DTensor | None:
        """The gradient which autograd is to add to `.grad` in place of `incoming`; None for `incoming` itself.

        Called by GradientSync's hook before autograd adds to `accumulator.grad`. May empty `.grad`: an older
        gradient is then in `older_grads`, or included in the returned gradient.
        A gradient with stacked addends is given as a new DTensor, which autograd puts into an empty `.grad` uncopied.
        If further code referred to the DTensor, autograd would copy the DTensor into memory of the layout's local
        shape, without room for stacked addends. The new DTensor may share memory with another tensor's gradient: a
        later gradient is added by `sum_of`, not in place.
        """
        if self.accumulator.grad is not None:
            self._set_aside(incoming)
        if exact_axes() is None or (local := memory_of(incoming)).ndim == incoming.ndim:
            return None
        older, self.accumulator.grad = self.grad, None
        return sum_of(older, wrap_with_spec(local, dtensor_spec(incoming)))

    def _set_aside(self, incoming: DTensor) -> None:
        """Moves the gradient in `.grad` to `older_grads`, if autograd must not add `incoming` to the gradient there.

        Drops a placeholder. There are two reasons to move a gradient. Where the layouts differ, DTensor would
        communicate to add. And where each pass sends a gradient inside `exact_sums`, the order of sums must not depend
        on when a gradient's turn to be sent comes.
        """
        older = self.grad
        if older is None:  # `.grad` is a placeholder
            self.accumulator.grad = None
            return
        if not self.sums_each_pass and dtensor_spec(older) is dtensor_spec(incoming):
            return
        layout = layout_of(older)
        if not self.sums_each_pass and layout == layout_of(incoming):
            return
        place = next((i for i, each in enumerate(self.older_grads) if layout_of(each) == layout), None)
        if self.sums_each_pass or place is None:
            self.older_grads.append(older)
        else:
            self.older_grads[place] = sum_of(self.older_grads[place], older)
        self.accumulator.grad = None

    def add_reduced(self, grad: DTensor) -> None:
        """Adds a gradient in the target layout to `reduced_grad`, in the dtype of the parameter's gradient.

        Called by GradientBuckets, with sums over ranks and gradients in the target layout, and by GradientSync at the
        end of a round.
        The ranks may have summed in another dtype. Of a leaf with `sums_each_pass`, the sum begins with the gradient
        left in `.grad` by earlier rounds: several passes in a round then add up as one pass in each of several rounds.
        """
        if self.reduced_grad is None and self.sums_each_pass:
            self.reduced_grad = self.earlier_grad = grad_of(self.parameter)
            self.put_placeholder()
        dtype = getattr(self.parameter, "grad_dtype", self.parameter.dtype)  # None takes any dtype
        self.reduced_grad = sum_of(self.reduced_grad, grad if dtype in (None, grad.dtype) else cast_grad(grad, dtype))

    @property
    def has_only_our_hooks(self) -> bool:
        """Whether no hooks but GradientSync's are called with the gradient."""
        before, after = self.accumulator._backward_hooks, self.accumulator._post_accumulate_grad_hooks
        return before is not None and after is not None and len(before) == len(after) == 1


def cast_grad(grad: DTensor, dtype: torch.dtype) -> DTensor:
    """The gradient in a given dtype, in the same layout."""
    with torch.no_grad():
        return wrap(grad.to_local().to(dtype), layout_of(grad), grad.shape)


def sum_of(first: DTensor | None, second: DTensor) -> DTensor:
    """The sum of two gradients in the same layout; the first may be None. Called by Leaf and separate_uses.py."""
    if first is None:
        return second
    with torch.no_grad():
        return as_dtensor(first + second)


def grad_of(parameter: DTensor) -> DTensor | None:
    """The gradient in the parameter's `.grad`; None where `.grad` is None or a placeholder."""
    grad = parameter.grad
    return None if grad is None or isinstance(grad, GradPlaceholder) else as_dtensor(grad)


def as_dtensor(tensor: Tensor) -> DTensor:
    """The same tensor, for type checkers."""
    assert isinstance(tensor, DTensor), "GradientSync hooks only DTensors, whose gradients are DTensors"
    return tensor


class GradPlaceholder(Tensor):
    """A placeholder with the gradient's shape, dtype and device, but no memory. Any op raises RuntimeError.

    Made by `Leaf.put_placeholder`. The error tells the user to call `sync.wait()`.
    With None in `.grad` instead, an update by hand would skip the parameter, torch's `clip_grad_norm_` would find a
    norm of 0, and a GradScaler would find nothing to unscale.
    """

    parameter_name: str
    properties: tuple[object, ...]  # shape, dtype and device

    @staticmethod
    def __new__(cls, parameter: Tensor, name: str) -> GradPlaceholder:
        """name: of the parameter, for the error."""
        shape, dtype, device = properties = _grad_properties(parameter)
        placeholder: GradPlaceholder = Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=device, storage_size=0
        )
        placeholder.parameter_name, placeholder.properties = name, properties
        return placeholder

    def fits(self, parameter: Tensor) -> bool:
        """Whether this can still be the parameter's `.grad`: the parameter may have another dtype by now."""
        return self.properties == _grad_properties(parameter)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # An op on several tensors is refused here: a DTensor among the tensors would raise an error about tensor
        # classes before `__torch_dispatch__` is called. `__torch_dispatch__` refuses an op on the placeholder alone.
        # Reading the shape or dtype is no op, and works.
        if sum(isinstance(each, Tensor) for each in tree_leaves((args, kwargs))) > 1:
            _raise_not_ready(args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        _raise_not_ready(args, kwargs)

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


def _grad_properties(parameter: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    """The shape, dtype and device that torch requires of a parameter's gradient."""
    dtype = getattr(parameter, "grad_dtype", None) or parameter.dtype  # grad_dtype None takes any dtype
    return parameter.shape, dtype, parameter.device


def _raise_not_ready(args: Any, kwargs: Any) -> NoReturn:
    """Raises the RuntimeError of the first placeholder among an op's arguments."""
    placeholder = next(each for each in tree_leaves((args, kwargs)) if isinstance(each, GradPlaceholder))
    raise RuntimeError(placeholder._message())
