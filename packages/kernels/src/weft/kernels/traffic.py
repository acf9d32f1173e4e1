"""Counts the bytes that Triton kernels load and store, without a GPU: in Triton's interpreter, exactly.

    with counted_traffic() as traffic:
        op(...)  # under TRITON_INTERPRET=1, set before the kernels are imported; any kernels, Weft's or others'
    print(traffic.loaded / logits.numel())

An element that a mask leaves out is not counted. What a GPU's caches would keep is counted each time it is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Traffic:
    """Bytes so far."""

    loaded: int = 0
    stored: int = 0


@contextmanager
def counted_traffic() -> Iterator[Traffic]:
    """What kernels load and store inside; one at a time."""
    from triton.runtime import interpreter
    from triton.runtime.interpreter import InterpreterBuilder

    traffic = Traffic()
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store
    patch = interpreter._patch_lang_tensor

    def counted_load(builder: Any, ptrs: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        traffic.loaded += _bytes(ptrs, mask)
        return load(builder, ptrs, mask, *rest, **named)  # a descriptor's load names what is left

    def counted_store(builder: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        traffic.stored += _bytes(ptrs, mask)
        return store(builder, ptrs, value, mask, *rest)

    def patched(tensor: Any, scope: Any) -> None:
        """Triton 3.6 takes an array of one element for a number, which NumPy 2.4 does not."""
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda number: int(number.handle.data.squeeze()))

    InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store = counted_load, counted_store
    interpreter._patch_lang_tensor = patched
    try:
        yield traffic
    finally:
        InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store = load, store
        interpreter._patch_lang_tensor = patch


def _bytes(ptrs: Any, mask: Any) -> int:
    from numpy import count_nonzero

    bits: int = int(count_nonzero(mask.data)) * ptrs.get_element_ty().primitive_bitwidth
    return bits // 8
