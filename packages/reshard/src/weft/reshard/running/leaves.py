"""A parameter whose gradients are brought elsewhere, and what is known of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from weft.mesh import Layout, ProcessMesh

from .buckets import Bucket, Route
from .dtensor import kind_of, layout_of, memory_of, wrap
from .groups import this_rank
from .waiting import Waiting


class Form(NamedTuple):
    """How a gradient lies, and its dtype."""

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
    """One parameter's gradients between backward and `GradientSync.wait()`.

    parameter: the tensor that autograd accumulates into. home: the parameter that gets the result; under ZeRO the two differ.
    mesh: of home. is_here: whether this rank is in the mesh. target: the layout of the result. is_ours: whether hooks are set; a frozen
    parameter has no hooks. at_once: gradients are whole, and never add up before they are sent.
    aside: earlier gradients, in layouts unlike that of `.grad`. lies: kind and forms of the last gradient, and whether the layout is the
    target. travels: kind and route of the last gradient sent. addend: this rank's part of a gradient that bypassed `.grad`; taken: kind
    and forms of the addend.
    waits: whether backward gave a gradient since `wait()`. arrived: the number of gradients ready to send. sent: the forms sent since
    `wait()`; bucket: the bucket of the last gradient sent. known: the forms on all ranks in the last step with a gradient. held: the
    synchronized sum, until `wait()` ends. stand_in: the placeholder in `home.grad` until then.
    """

    parameter: DTensor
    home: DTensor
    name: str
    mesh: ProcessMesh
    is_here: bool
    target: Layout
    at_once: bool
    is_ours: bool = False
    aside: dict[Layout, DTensor] = field(default_factory=dict)
    lies: tuple[object, Forms, bool] | None = None
    travels: tuple[object, Route | None] | None = None
    addend: Tensor | None = None
    taken: tuple[object, Forms] = (None, ())
    waits: bool = False
    arrived: int = 0
    sent: Forms = ()
    bucket: Bucket[Leaf] | None = None
    known: Forms = ()
    held: DTensor | None = None
    stand_in: Waiting | None = None

    @property
    def grad(self) -> DTensor | None:
        """What backward passes gave it since the last was sent."""
        return grad_of(self.parameter)

    @property
    def learns(self) -> bool:
        """Whether this rank is to have a gradient."""
        return self.is_ours and self.is_here and self.home.requires_grad

    def pending(self) -> Forms:
        """The forms of the gradients not sent yet; a gradient in its target layout counts where backward gave it since `wait()`."""
        if not self.is_ours:
            return ()
        if self.aside:
            older = [Form(layout, each.dtype) for layout, each in self.aside.items() if layout != self.target]
            return (*(self.taken[1] if self.addend is not None else ()), *older, *self._in_grad())
        return self._in_grad() if self.addend is None else (*self.taken[1], *self._in_grad())

    def _in_grad(self) -> Forms:
        grad = self.grad
        if grad is None:
            return ()
        _, forms, is_there = self.find(grad)
        if is_there and self.parameter is self.home:  # it stays in `.grad`, and is no news after it was counted
            return forms if self.waits and forms[0] not in self.sent else ()
        return forms

    def find(self, grad: DTensor) -> tuple[object, Forms, bool]:
        """`lies` of a gradient."""
        kind = kind_of(grad)
        if self.lies is None or self.lies[0] is not kind:
            layout = layout_of(grad)
            self.lies = kind, (Form(layout, grad.dtype),), layout == self.target
        return self.lies

    def zeros(self, form: Form) -> DTensor:
        """A gradient of zeros in the given form: the addend of a rank without a gradient."""
        local = torch.zeros(
            form.layout.local_shape(self.home.shape, this_rank()),
            dtype=form.dtype,
            device=memory_of(self.parameter).device,
        )
        return wrap(local, form.layout, self.home.shape)

    def end(self) -> None:
        """The step is over."""
        self.waits, self.arrived, self.sent, self.bucket = False, 0, (), None

    def call_hooks(self) -> None:
        """Calls the post-accumulate hooks of a home parameter that autograd does not see."""
        hooks = self.home._post_accumulate_grad_hooks if self.parameter is not self.home else None
        for hook in list(hooks.values()) if hooks else ():
            hook(self.home)

    def stand(self) -> None:
        """Puts into `home.grad` what stands there while its gradient is on its way."""
        if self.stand_in is None or not self.stand_in.fits(self.home):
            self.stand_in = Waiting(self.home, self.name)
        self.home.grad = self.stand_in

    def hold(self, grad: DTensor) -> None:
        """Adds a synchronized gradient to what is held."""
        self.held = sum_of(self.held, grad)

    @property
    def is_seen_by_us_alone(self) -> bool:
        """Whether no hook but those of a GradientSync is called with a gradient."""
        before, after = self.parameter._backward_hooks, self.parameter._post_accumulate_grad_hooks
        return before is not None and after is not None and len(before) == len(after) == 1


def in_dtype(grad: DTensor, dtype: torch.dtype) -> DTensor:
    with torch.no_grad():
        return wrap(grad.to_local().to(dtype), layout_of(grad), grad.shape)


def sum_of(first: DTensor | None, second: DTensor) -> DTensor:
    """The sum of two gradients in one layout."""
    if first is None:
        return second
    with torch.no_grad():
        return as_dtensor(first + second)


def grad_of(parameter: DTensor) -> DTensor | None:
    """Its gradient, where there are numbers in it."""
    grad = parameter.grad
    return None if grad is None or isinstance(grad, Waiting) else as_dtensor(grad)


def as_dtensor(tensor: Tensor) -> DTensor:
    assert isinstance(tensor, DTensor), "parameters that are hooked are DTensors, and their gradients are"
    return tensor
