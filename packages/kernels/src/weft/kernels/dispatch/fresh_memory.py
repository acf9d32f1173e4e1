"""Memory as torch allocates a new tensor. The bits of a CPU's results depend on the operands' addresses and strides.

A float32 product by MKL rounds differently where an operand's address or stride between rows is no multiple of 16
bytes. Elementwise functions compute in vectors, and the last elements of each contiguous stretch by scalar code, which
rounds differently; torch's gelu has different code for contiguous operands.
"""

from __future__ import annotations

import torch
from torch import Tensor

ALIGNMENT = 64  # of torch's allocations on a CPU, in bytes


def fresh_memory(tensor: Tensor) -> Tensor:
    """The tensor in memory as torch allocates a new tensor: contiguous, at a multiple of 64 bytes. Copies if needed.

    Dims of size 1 get the strides of a new tensor, too: products choose code by strides.
    tensor: a plain tensor in an eager op, not in a compiled graph. Differentiable.
    """
    if not tensor.is_contiguous() or (not tensor.is_meta and tensor.data_ptr() % ALIGNMENT):
        return tensor.clone(memory_format=torch.contiguous_format)
    shape = tensor.shape
    if 1 not in shape:
        return tensor
    strides, elements = [0] * len(shape), 1
    for dim in range(len(shape) - 1, -1, -1):
        strides[dim] = elements
        elements *= shape[dim]
    return tensor if tensor.stride() == tuple(strides) else tensor.as_strided(shape, strides)
