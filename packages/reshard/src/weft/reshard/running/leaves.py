"""A parameter whose gradients are brought elsewhere, and what is known of them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from weft.mesh import Layout

from .buckets import Route
from .dtensor import layout_of, wrap
from .waiting import Waiting


@dataclass(slots=True, eq=False)
class Leaf:
    """A parameter that autograd gives gradients to, and what is known of those: what belongs to a tensor is slow to find by it.

    home: the parameter that they are for. target: the layout that they end in. at_once: whole gradients, which never add up.
    aside: earlier gradients, in other layouts than `.grad`. lies: of the last gradient its kind, its layout, and whether that is
    the target. travels: of one that was sent its kind, and how it travels.
    addend: one that did not come by `.grad`, this rank's part.
    waits: whether a backward pass gave a gradient since `wait()`; came: also one that is to be sent; arrived: how often, and was not
    sent. held: synchronized before, waiting for what is on its way. stand_in: in `home.grad` until then.
    """

    parameter: DTensor
    home: DTensor
    name: str
    target: Layout
    at_once: bool
    aside: dict[Layout, DTensor] = field(default_factory=dict)
    lies: tuple[object, Layout, bool] | None = None
    travels: tuple[object, Route | None] | None = None
    addend: Tensor | None = None
    waits: bool = False
    came: bool = False
    arrived: int = 0
    held: DTensor | None = None
    stand_in: Waiting | None = None

    @property
    def grad(self) -> DTensor | None:
        """What backward passes gave it since the last was sent."""
        return grad_of(self.parameter)

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
