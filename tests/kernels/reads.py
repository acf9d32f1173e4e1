"""Tells where the host would wait for a device."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

MASKS = (torch.bool, torch.uint8)
CHECKING = tuple(
    f"weft.kernels.{module}.can_read"
    for module in (
        "attention.ranges",
        "embedding.function",
        "experts.function",
        "cross_entropy.options",
        "cross_entropy.reference",
        "grouped_matmul.function",
        "linear_cross_entropy.gradients",
        "routing.function",
    )
)

READING_ON_A_CPU = (
    "weft.kernels.attention.options.fused_calls_for",
    "weft.kernels.attention.compute.are_finite",
    "weft.kernels.attention.blocks.forward",
    "weft.kernels.attention.blocks.backward",
    "weft.kernels.experts.function.plain_forward",
    "weft.kernels.experts.function.plain_backward",
    "weft.kernels.attention.options.number_of",  # of dropout's key, which is on the CPU
)
_is_excused: ContextVar[bool] = ContextVar("_is_excused", default=False)


@contextmanager
def no_reads(*reading_on_the_host: str) -> Iterator[None]:
    """`NoReads`, with reads allowed which Weft makes on a CPU alone, where a read waits for no device.

    These reads check values, and compare forward's guess of a loss's gradient (on a GPU in a kernel). Attention on a
    CPU also reads the keys seen by each query, and experts on a CPU the end of each expert's rows; kernels read both on
    the device.
    reading_on_the_host: further functions, module.name, whose tensors are on the host under every model.
    """
    with ExitStack() as stack:
        for name in (*READING_ON_A_CPU, *reading_on_the_host):
            module, function = name.rsplit(".", 1)
            stack.enter_context(patch(name, _excused(getattr(import_module(module), function))))
        for check in CHECKING:
            stack.enter_context(patch(check, lambda tensor: False))
        stack.enter_context(patch("weft.kernels.cross_entropy.guess.was_right", lambda guessed, grad: False))
        stack.enter_context(NoReads())
        yield


def _excused(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which may read."""

    def run(*args: Any, **kwargs: Any) -> Any:
        token = _is_excused.set(True)
        try:
            return function(*args, **kwargs)
        finally:
            _is_excused.reset(token)

    return run


class NoReads(TorchDispatchMode):
    """Raises AssertionError for an op that makes the host wait for a device.

    Such an op returns a number, has a shape computed from values, or copies to the CPU. On a CPU `x.to("cpu")` cannot
    be told from a move to the model's device: tests with tensors without data find these copies.
    """

    METHODS = ("__array__", "cpu", "numpy", "tolist")  # these reach no dispatch where the tensor is on the CPU

    def __enter__(self) -> NoReads:
        thread, self._patches = threading.get_ident(), ExitStack()
        for name in self.METHODS:
            self._patches.enter_context(patch.object(Tensor, name, _refused(name, getattr(Tensor, name), thread)))
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._patches.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor then runs ops on local tensors, which this mode sees
        kwargs = kwargs or {}
        assert _is_excused.get() or not waits(func, args, kwargs), f"{func} makes the host wait"
        return func(*args, **kwargs)


def _refused(name: str, method: Callable[..., Any], thread: int) -> Callable[..., Any]:
    """The method, refused in the thread that must not wait; allowed in further threads, such as the data reader's."""

    def refused(*args: Any, **kwargs: Any) -> Any:
        assert _is_excused.get() or threading.get_ident() != thread, f"Tensor.{name} makes the host wait"
        return method(*args, **kwargs)

    return refused


def waits(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether this call of a torch op waits for the device of the operands."""
    name = func.__name__.partition(".")[0].rstrip("_")
    if name in ("index", "index_put", "_index_put_impl", "_unsafe_index", "_unsafe_index_put", "_unsafe_masked_index"):
        return any(isinstance(each, Tensor) and each.dtype in MASKS for each in args[1])
    if name == "repeat_interleave":
        return kwargs.get("output_size") is None
    if name in ("_to_copy", "copy"):
        source, target = (args[0], kwargs.get("device")) if name == "_to_copy" else (args[1], args[0].device)
        return source.device.type != "cpu" and target is not None and torch.device(target).type == "cpu"
    return bool({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & {*func.tags}) or (
        name in ("is_nonzero", "_linalg_check_errors")
    )
