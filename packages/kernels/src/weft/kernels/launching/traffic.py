"""Count the bytes loaded and stored by Triton kernels, exactly and without a GPU, in Triton's interpreter.

    with counted_traffic() as traffic:
        op(...)  # any kernels, not only Weft's, imported with TRITON_INTERPRET=1 in the environment
    print(traffic.loaded / logits.numel())

Masked elements are not counted. Each load of an element counts, also repeated loads from a GPU's caches.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ..dispatch import backend


@dataclass(slots=True)
class Traffic:
    """Bytes counted until now."""

    loaded: int = 0
    stored: int = 0


@contextmanager
def counted_traffic() -> Iterator[Traffic]:
    """Count the kernels' traffic inside the context, where Weft's ops on CPU tensors launch their kernels.

    Contexts must not be nested or run in parallel.
    """
    from triton.runtime import interpreter
    from triton.runtime.interpreter import InterpreterBuilder

    traffic = Traffic()
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store
    patch = interpreter._patch_lang_tensor

    def counted_load(builder: Any, ptrs: Any, mask: Any, *arguments: Any, **options: Any) -> Any:
        traffic.loaded += _bytes(ptrs, mask)
        return load(builder, ptrs, mask, *arguments, **options)  # loads by a tensor descriptor give options

    def counted_store(builder: Any, ptrs: Any, value: Any, mask: Any, *arguments: Any) -> Any:
        traffic.stored += _bytes(ptrs, mask)
        return store(builder, ptrs, value, mask, *arguments)

    def patch_tensor(tensor: Any, scope: Any) -> None:
        """Triton 3.6 treats an array of one element as a number, which NumPy 2.4 refuses."""
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda number: int(number.handle.data.squeeze()))

    InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store = counted_load, counted_store
    interpreter._patch_lang_tensor = patch_tensor
    was_interpreted, backend.INTERPRETED = backend.INTERPRETED, True
    try:
        yield traffic
    finally:
        backend.INTERPRETED = was_interpreted
        InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store = load, store
        interpreter._patch_lang_tensor = patch


def _bytes(ptrs: Any, mask: Any) -> int:
    from numpy import count_nonzero

    bits: int = int(count_nonzero(mask.data)) * ptrs.get_element_ty().primitive_bitwidth
    return bits // 8
