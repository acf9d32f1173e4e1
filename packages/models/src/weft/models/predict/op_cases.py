"""`op_cases`: calls of Weft's public ops as in the models, at several sizes, for `measure` to time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from weft import kernels
from weft.kernels.extension import observing

from .events import Compute
from .observer import Observer

TOKENS = (64, 256, 1024, 2048)
WIDTHS = (64, 128, 256, 512)
VOCABULARIES = (257, 2048, 8192)
HEAD_DIM = 32
HEAD_DIMS = (16, 32, 64)
LENGTHS = (64, 128, 256, 512)
LEAST_WORK, MOST_WORK = 2**12, 2**31  # operations of a case, with 8 for each byte: about 1 us to 0.1 s of a core


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """A call of an op with operands. Made by `op_cases`."""

    name: str  # of the op
    operands: tuple[Tensor, ...]
    learned: tuple[int, ...]  # positions of the operands with gradients
    function: Callable[..., Any]  # called with the operands

    def on(self, device: str | torch.device) -> Case:
        """The case on a device, with new operands of the same shapes and any values."""
        operands = tuple(_like(each, device, i in self.learned) for i, each in enumerate(self.operands))
        return Case(self.name, operands, self.learned, self.function)

    @property
    def dtype(self) -> str:
        return str(next(each.dtype for each in self.operands if each.is_floating_point())).removeprefix("torch.")

    def forward(self) -> list[Tensor]:
        """Call the op; returns the outputs."""
        output = self.function(*self.operands)
        return list(output) if isinstance(output, tuple) else [output]

    def backward(self, outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Compute the gradients of the learned operands. gradients: of the outputs of `forward`."""
        torch.autograd.grad(outputs, [self.operands[i] for i in self.learned], gradients)

    def events(self) -> tuple[list[Compute], list[Compute]]:
        """The events of forward and of backward, as in a trace, from a run on shapes."""
        case = self.on("meta")
        observer = Observer(nn.Module(), "", (), 1)
        with observer, observing(observer.on_op):
            outputs = case.forward()
            gradients = [torch.empty_like(each) for each in outputs]
            observer.after_phase("forward")
            count = len(observer.placed)
            case.backward(outputs, gradients)
        events = [each.event for each in observer.placed]
        return (
            [each for each in events[:count] if isinstance(each, Compute)],
            [each for each in events[count:] if isinstance(each, Compute)],
        )


def op_cases(dtype: torch.dtype, most_work: float = MOST_WORK) -> Iterator[Case]:
    """The ops of Llama, Qwen and GPT at the sizes of small models, with operands on the meta device.

    most_work: the most operations of a case, with 8 for each byte.
    """
    for case, work in _cases(dtype):
        if LEAST_WORK <= work <= most_work:
            yield case


def _cases(dtype: torch.dtype) -> Iterator[tuple[Case, float]]:
    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def numbers(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int64, device="meta")

    for N in TOKENS:
        for H in WIDTHS:
            x, weight = empty(1, N, H), empty(H)
            moved = 8.0 * N * H * dtype.itemsize
            yield Case("rms_norm", (x, weight), (0, 1), kernels.rms_norm), moved
            yield Case("add_rms_norm", (x, x, weight), (0, 1, 2), kernels.add_rms_norm), moved
            yield Case("layer_norm", (x, weight, weight), (0, 1, 2), kernels.layer_norm), moved
            yield Case("add_layer_norm", (x, x, weight, weight), (0, 1, 2, 3), kernels.add_layer_norm), moved
            yield Case("add", (x, x), (0, 1), kernels.add), moved
            yield Case("gelu", (empty(1, N, 4 * H),), (0,), _gelu), 4 * moved
            yield Case("swiglu", (empty(1, N, 3 * H), empty(1, N, 3 * H)), (0, 1), kernels.swiglu), 3 * moved
            yield Case("linear", (x, empty(H, H)), (0, 1), kernels.linear), 2.0 * N * H * H
            up, down = empty(4 * H, H), empty(H, 4 * H)
            yield Case("linear", (x, up, empty(4 * H)), (0, 1, 2), kernels.linear), 8.0 * N * H * H
            inner = empty(1, N, 4 * H)
            yield Case("linear", (inner, down, weight), (0, 1, 2), _gelu_linear), 8.0 * N * H * H
            gated = (x, empty(3 * H, H), empty(3 * H, H))
            yield Case("swiglu_linear", gated, (0, 1, 2), kernels.swiglu_linear), 12.0 * N * H * H
            T, keys = min(N, 256), max(HEAD_DIM, H // 2)
            half = empty(T, HEAD_DIM // 2)
            rows = empty(N // T, T, H)
            projected = (rows, empty(H, H), empty(keys, H), empty(keys, H), half, half)
            yield Case("qkv_linear", projected, (0, 1, 2, 3), _qkv_linear), 4.0 * N * H * H
            yield Case("rope", (rows, half, half), (0,), kernels.rope), moved
            normed = (rows, empty(HEAD_DIM), half, half)
            yield Case("rms_norm_rope", normed, (0, 1), kernels.rms_norm_rope), moved
            yield Case("embedding", (numbers(1, N), empty(2048, H)), (1,), kernels.embedding), moved
    for N in TOKENS:
        for V in VOCABULARIES:
            moved = 8.0 * N * V * dtype.itemsize
            yield Case("cross_entropy", (empty(N, V), numbers(N)), (0,), kernels.cross_entropy), moved
            head = (empty(1, N, 256), empty(V, 256))
            yield Case("linear", head, (0, 1), kernels.linear), 2.0 * N * V * 256
    for T in LENGTHS:
        for B in (1, 8):
            for head_dim in HEAD_DIMS:
                H, keys = 8 * head_dim, (4 if T % 256 else 8) * head_dim
                operands = (empty(B, T, H), empty(B, T, keys), empty(B, T, keys))
                attention = partial(kernels.attention, head_dim=head_dim)
                yield Case("attention", operands, (0, 1, 2), attention), 4.0 * B * T * T * H


def make_gradients(outputs: Sequence[Tensor]) -> list[Tensor]:
    return [torch.full_like(each, 1e-3) for each in outputs]


def product_shapes(most_work: float = MOST_WORK) -> list[tuple[int, int, int]]:
    """(M, N, K) of products in linear layers of small models: of forward, and of the gradients of input and weight.

    most_work: the most operations of a product.
    """
    # Outputs and inputs of a layer, in either order.
    layers = {(H, K) for H in WIDTHS for K in (H // 2, H, 3 * H, 4 * H)}
    layers |= {(V, H) for V in VOCABULARIES for H in (128, 512)}
    found = set()
    for N in TOKENS:
        for outputs, inputs in layers:
            found |= {(N, outputs, inputs), (N, inputs, outputs), (outputs, inputs, N), (inputs, outputs, N)}
    return sorted(each for each in found if LEAST_WORK <= 2 * math.prod(each) <= most_work)


def _like(tensor: Tensor, device: str | torch.device, learned: bool) -> Tensor:
    shape, dtype = tensor.shape, tensor.dtype
    if not dtype.is_floating_point:  # tokens and targets
        return torch.zeros(shape, dtype=dtype, device=device)
    tensor = torch.empty(shape, dtype=dtype, device=device)
    if tensor.device.type != "meta":
        tensor.uniform_(-0.1, 0.1)
    return tensor.requires_grad_(learned)


def _gelu(x: Tensor) -> Tensor:
    return kernels.gelu(x, approximate="tanh")


def _gelu_linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return kernels.linear(x, weight, bias, input_activation="gelu_tanh")


def _qkv_linear(x: Tensor, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return kernels.qkv_linear(x, q, k, v, cos=cos, sin=sin)
