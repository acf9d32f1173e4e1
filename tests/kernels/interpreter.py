"""Triton's interpreter, changed to round as GPUs do, and to be faster. Import this module under TRITON_INTERPRET.

The interpreter computes with numpy, but spends most of its time before: on objects made anew for every value, which
are cached here.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def correct() -> None:
    """Make casts and products of bfloat16 those of GPUs and torch."""
    truncate, multiply = InterpreterBuilder.create_fp_trunc, InterpreterBuilder.create_dot

    def round_to_nearest_even(self: Any, source: Any, to: Any) -> Any:
        """The interpreter truncates float32's low bits; GPUs round to nearest even."""
        if (source.dtype.scalar.name, to.scalar.name) != ("fp32", "bf16"):
            return truncate(self, source, to)
        rounded = torch.from_numpy(np.ascontiguousarray(source.data)).to(torch.bfloat16).view(torch.int16)
        return TensorHandle(rounded.numpy().view(np.uint16), to.scalar)

    def multiply_bfloat16(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        """Multiplies bfloat16 numbers in float32; the interpreter would multiply their bits."""
        return multiply(self, *(widened(x) if x.dtype.scalar.name == "bf16" else x for x in (a, b)), *rest)

    def widened(x: Any) -> Any:
        values = torch.from_numpy(np.ascontiguousarray(x.data).view(np.int16)).view(torch.bfloat16).float().numpy()
        return TensorHandle(values, tl.float32)

    InterpreterBuilder.create_fp_trunc = round_to_nearest_even
    InterpreterBuilder.create_dot = multiply_bfloat16


def quicken() -> None:
    """The same numbers in about half of the time."""
    _patch_once()
    _keep_numpys_dtypes()
    _keep_types_of_blocks()
    _keep_shapes_of_tensors()
    # Integer sums and products would be computed in 64 bits, too, and compared; only debug mode looks at the result.
    options = interpreter.interpreter_builder.options
    assert not options.debug, "what is left out would be asked for"
    interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)


def _patch_once() -> None:
    """Skip patching where the language is patched: looking through a function's globals is as slow as running it."""
    patch = interpreter._patch_lang

    def patch_once(function: Any) -> Any:
        languages = [value for value in function.__globals__.values() if value is tl or value is tl.core]
        patched = languages and not any(tl.core.is_builtin(language.load) for language in languages)
        return interpreter._LangPatchScope() if patched else patch(function)

    interpreter._patch_lang = patch_once


def _keep_numpys_dtypes() -> None:
    """Cache the numpy dtype of each Triton dtype; the interpreter makes the list to look it up for every value."""
    look_up, kept = interpreter._get_np_dtype, {}

    def numpy_dtype(dtype: tl.dtype) -> np.dtype[Any]:
        name = dtype.scalar.name
        if name not in kept:
            kept[name] = look_up(dtype.scalar)
        return kept[name]

    interpreter._get_np_dtype = numpy_dtype


def _keep_types_of_blocks() -> None:
    """Cache the types of blocks, as making a type checks the shape and spells a name."""
    make, kept = tl.block_type.__init__, {}

    def made_once(self: Any, element_ty: tl.dtype, shape: Sequence[Any]) -> None:
        pointer = isinstance(element_ty, tl.pointer_type)
        key = (element_ty.name, pointer and (element_ty.address_space, element_ty.const), _sizes(shape))
        if key not in kept:
            make(self, element_ty, shape)
            kept[key] = dict(vars(self))
        vars(self).update(kept[key])

    tl.block_type.__init__ = made_once


def _keep_shapes_of_tensors() -> None:
    """Cache a tensor's shape, as a tuple of Triton's constants, and its number of elements."""
    kept: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def made(self: Any, handle: Any, type: tl.dtype) -> None:
        sizes = _sizes(type.shape) if type.is_block() else ()
        if sizes not in kept:
            kept[sizes] = (tl.constexpr(math.prod(sizes)), tl.core.tuple([tl.constexpr(size) for size in sizes]))
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = kept[sizes]

    tl.tensor.__init__ = made


def _sizes(shape: Sequence[Any]) -> tuple[int, ...]:
    return tuple(size.value if isinstance(size, tl.constexpr) else size for size in shape)
