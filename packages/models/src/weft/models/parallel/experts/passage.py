"""`Passage`: a call of experts sharded over "ep", as autograd functions that move tokens out and sums back."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from weft.kernels.extension import apply_function, find_slice_layout, slice_gradient
from weft.mesh import Layout, LayoutError, Partial, Replicate
from weft.reshard import layout_of
from weft.reshard.extension import Pending, cotangent, memory_of, run_or_replay, wrap

from ..styles import EXPERT_AXIS
from .transport import NO_EXPERT, ExpertRanks, Transport, pack_choices, unpack_choices

# The module's own forward on local tensors. (tokens [n, H], experts [n, k] numbered from this rank's first, weights
# [n, k], number of choices of local experts or None) -> sums [n, H]
ComputeExperts = Callable[[Tensor, Tensor, Tensor, "int | None"], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLayouts:
    """The layouts of a call's tensors on the model's mesh."""

    tokens: Layout  # of tokens, choices and weights: no token is on two ranks along any of `folded_axes`
    output: Layout  # of the experts' output: Partial over "tp" where "tp" splits each expert
    gradient: Layout  # of the gradients of tokens and weights: Partial like `output`


class Passage:
    """The state of a call of a layer's experts: collectives under way, shared by the call's autograd functions.

    Forward: tokens start outward; this rank's own tokens are computed meanwhile, then the received tokens; the sums of
    received tokens go homeward. Backward is the reverse: gradients of outputs go outward; gradients of received tokens
    go homeward while this rank's own tokens are computed. outward, homeward: see transport.py.
    Communication: in forward, choices and tokens outward, sums homeward. In backward, the output's gradient outward,
    the needed gradients of tokens and weights homeward.
    """

    def __init__(self, transport: Transport, members: ExpertRanks, layouts: TokenLayouts, shape: Sequence[int]) -> None:
        self._transport, self._members, self._layouts, self._shape = transport, members, layouts, tuple(shape)
        self._tokens: Pending | None = None  # outward
        self._choices: Pending | None = None  # outward
        self._sums: Pending | None = None  # homeward
        self._gradients: Pending | None = None  # of the output, outward
        self._returning: list[Pending | None] = [None, None]  # gradients of tokens and of weights, homeward
        self._needed = (False, False)  # whether tokens and weights need gradients
        self._weights_dtype = torch.float32

    def run(self, x: DTensor, experts: Tensor, weights: DTensor, compute: ComputeExperts) -> DTensor:
        """Compute the experts: x [..., H], weights [..., k] -> [..., H] in `TokenLayouts.output`.

        experts: [n, k], the choices of this rank's n tokens. compute: see `ComputeExperts`; called twice.
        """
        own_x, own_weights, departed = apply_function(_Depart, self, experts, x, weights)
        transport = self._transport
        own = compute(own_x, _from_first(experts, self._members), own_weights, transport.own_choices)
        received_x, received_weights = apply_function(_Arrive, self, departed)
        received = compute(received_x, self._received_experts, received_weights, transport.received_choices)
        left = apply_function(_Leave, self, received)
        output: DTensor = apply_function(_ComeHome, self, own, left)
        return output

    def depart(self, x: Tensor, experts: Tensor, weights: Tensor) -> None:
        """Start this rank's tokens and choices outward."""
        self._weights_dtype = weights.dtype
        packed = pack_choices(experts, weights)
        self._choices = run_or_replay(self._transport.outward, packed)
        self._tokens = run_or_replay(self._transport.outward, x)
        self._experts_dtype = experts.dtype

    def arrive(self) -> tuple[Tensor, Tensor]:
        """Wait for the received tokens and weights. Sets `_received_experts`."""
        assert self._choices is not None and self._tokens is not None, "they departed"
        choices, tokens = self._choices.wait(), self._tokens.wait()
        self._choices = self._tokens = None
        experts, weights = unpack_choices(choices, self._experts_dtype, self._weights_dtype)
        self._received_experts = _from_first(self._transport.without_own(experts), self._members)
        return tokens, weights

    def leave(self, received: Tensor) -> None:
        """Start the sums of received tokens homeward."""
        self._sums = run_or_replay(self._transport.homeward, received)

    def come_home(self, own: Tensor) -> DTensor:
        """Wait for the sums of this rank's tokens from all ranks, and add `own`. Returns the output."""
        assert self._sums is not None, "the sums left"
        total = own + self._sums.wait()
        self._sums = None
        return self._wrap(total, self._layouts.output, total.shape[-1])

    def leave_gradients(self, gradient: DTensor) -> Tensor:
        """Start the output's gradient outward, and return the gradient of this rank's tokens [n, H]."""
        layout, expected = layout_of(gradient), cotangent(self._layouts.output)
        sliced = slice_gradient(gradient, find_slice_layout(layout, expected, tuple(gradient.shape), gradient.dtype))
        if layout_of(sliced) != expected:
            raise LayoutError(
                f"the gradient of experts' outputs laid out as ({self._layouts.output}) came as ({layout}); reshard "
                f"the result computed from these outputs before it is used"
            )
        local = as_rows(memory_of(sliced))
        self._gradients = Pending(self._transport.outward(local))
        return local

    def take_gradients(self) -> Tensor:
        """Wait for the output's gradient of received tokens."""
        pending, self._gradients = self._gradients, None
        assert pending is not None, "the output's gradient left"
        return pending.wait()

    def return_gradients(self, gradients: Sequence[Tensor | None], forms: Sequence[Tensor]) -> None:
        """Start the gradients of received tokens and weights homeward. forms: the received tokens and weights."""
        for i, (gradient, form) in enumerate(zip(gradients, forms, strict=True)):
            if self._needed[i]:
                rows = torch.zeros_like(form) if gradient is None else gradient
                self._returning[i] = Pending(self._transport.homeward(rows))

    def finish_gradients(self, own: Sequence[Tensor | None]) -> list[DTensor | None]:
        """Wait for the returned gradients, and add `own`, from this rank's own computation. For tokens and weights."""
        found: list[DTensor | None] = [None, None]
        for i, pending in enumerate(self._returning):
            if pending is not None:
                total, addend = pending.wait(), own[i]
                total = total if addend is None else total + addend
                found[i] = self._wrap(total, self._layouts.gradient, total.shape[-1])
        self._returning = [None, None]
        return found

    def need_gradients(self, tokens: bool, weights: bool) -> None:
        """Record in forward whether tokens and weights need gradients."""
        self._needed = tokens, weights

    def _wrap(self, rows: Tensor, layout: Layout, width: int) -> DTensor:
        leading = layout.local_shape(self._shape, self._members.ranks[self._members.position])[:-1]
        return wrap(rows.reshape(*leading, width), layout, (*self._shape[:-1], width))


def as_rows(local: Tensor) -> Tensor:
    """[..., W] -> [n, W]"""
    return local.reshape(math.prod(local.shape[:-1]), local.shape[-1])


def _from_first(experts: Tensor, members: ExpertRanks) -> Tensor:
    """The experts numbered from this rank's first; `NO_EXPERT` for experts of other ranks."""
    first = members.first
    here = (experts >= first) & (experts < first + members.experts)
    return torch.where(here, experts - first, NO_EXPERT)


class _Depart(torch.autograd.Function):
    """Start this rank's tokens outward; returns tokens and weights as local rows. The dual adds returned gradients.

    The last output is empty: through it backward comes here only once `_Arrive` has started the gradients homeward.
    """

    @staticmethod
    def forward(
        ctx: Any, passage: Passage, experts: Tensor, x: DTensor, weights: DTensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.passage = passage
        ctx.set_materialize_grads(False)
        passage.need_gradients(*ctx.needs_input_grad[2:])
        rows, own_weights = (as_rows(memory_of(each)).detach() for each in (x, weights))
        passage.depart(rows, experts, own_weights)
        ctx.mark_non_differentiable(
            *[each for each, need in zip((rows, own_weights), ctx.needs_input_grad[2:], strict=True) if not need]
        )
        return rows, own_weights, rows.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor | None, dweights: Tensor | None, _: Tensor | None) -> tuple[Any, ...]:
        return None, None, *ctx.passage.finish_gradients((dx, dweights))


class _Arrive(torch.autograd.Function):
    """Wait for the received tokens and weights. The dual starts the gradients of both homeward."""

    @staticmethod
    def forward(ctx: Any, passage: Passage, departed: Tensor) -> tuple[Tensor, Tensor]:
        ctx.passage, ctx.departed = passage, departed.detach()
        ctx.set_materialize_grads(False)
        tokens, weights = passage.arrive()
        ctx.forms = [each.new_empty(()).expand(each.shape) for each in (tokens, weights)]
        return tokens, weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dtokens: Tensor | None, dweights: Tensor | None) -> tuple[None, Tensor]:
        ctx.passage.return_gradients((dtokens, dweights), ctx.forms)
        return None, torch.zeros_like(ctx.departed)


class _Leave(torch.autograd.Function):
    """Start the sums of received tokens homeward. The dual waits for the gradients of these sums."""

    @staticmethod
    def forward(ctx: Any, passage: Passage, received: Tensor) -> Tensor:
        ctx.passage = passage
        passage.leave(received)
        return received.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[None, Tensor]:
        return None, ctx.passage.take_gradients()


class _ComeHome(torch.autograd.Function):
    """Add this rank's own sums and the returned sums into the output. The dual starts the output's gradient outward."""

    @staticmethod
    def forward(ctx: Any, passage: Passage, own: Tensor, left: Tensor) -> DTensor:
        ctx.passage, ctx.left = passage, left.detach()
        return passage.come_home(own)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: DTensor) -> tuple[None, Tensor, Tensor]:
        return None, ctx.passage.leave_gradients(gradient), torch.zeros_like(ctx.left)


class LocalParameters(torch.autograd.Function):
    """Parameters as local tensors. The dual makes DTensors of gradients, Partial over ranks with the same experts.

    A parameter replicated over "tp", as A of an adapter beside `gate_proj`, has a gradient that is Partial over "tp",
    too: each rank computes a part of each expert's features.
    """

    @staticmethod
    def forward(ctx: Any, *parameters: DTensor) -> tuple[Tensor, ...]:
        ctx.forms = [(_gradient_layout(layout_of(each)), tuple(each.shape)) for each in parameters]
        ctx.set_materialize_grads(False)
        locals_ = tuple([memory_of(each).detach() for each in parameters])
        needed = zip(locals_, ctx.needs_input_grad, strict=True)
        ctx.mark_non_differentiable(*[local for local, need in needed if not need])
        return locals_

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        pairs = zip(gradients, ctx.forms, strict=True)
        return tuple([None if each is None else wrap(each, *form) for each, form in pairs])


@lru_cache(maxsize=1024)
def _gradient_layout(parameter: Layout) -> Layout:
    """The layout of a parameter's gradient. parameter: the parameter's layout while the experts compute."""
    shared = [axis for axis in parameter.mesh.axis_names if axis != EXPERT_AXIS and parameter[axis] == Replicate()]
    return parameter.replace(**dict.fromkeys(shared, Partial()))
