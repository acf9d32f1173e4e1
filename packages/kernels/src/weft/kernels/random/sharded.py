"""Uniform and normal random numbers, a function of (key, global element index), as plain tensors and as DTensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from weft.mesh import Layout, LayoutError
from weft.reshard import layout_of
from weft.reshard.extension import this_rank, wrap

from ..dispatch.arguments import described, is_int
from ..dispatch.backend import refuse_jit_trace, use_triton
from . import philox
from .philox import Part

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def uniform(
    shape: Sequence[int],
    key: int,
    *,
    layout: Layout | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> Tensor:
    """Uniform numbers in 0 <= u < 1, multiples of 2**-24: a function of (key, row-major index in `shape`) only.

    shape: the global shape.
    key: 64 bits, from weft.mesh.derive_key.
    layout: returns a DTensor with this layout, and each rank draws its own part; None returns a plain tensor.
    dtype: bfloat16, float16, float32 or float64. Numbers are drawn in float32, then rounded to the dtype; in bfloat16
    and float16 the highest numbers round to 1.
    device: of the numbers; None means torch's default device.

    The numbers are bitwise the same in every layout, on a CPU and on a GPU: Philox 4x32-10 (Salmon et al. 2011).

    Communication: none, except to create the mesh's process groups where they are new.
    Raises ValueError for a shape, key or dtype outside these; LayoutError for a layout which does not fit the shape
    or is Partial.
    """
    return _generate("uniform", shape, key, layout, dtype, device, _fill_uniform)


def normal(
    shape: Sequence[int],
    key: int,
    *,
    layout: Layout | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> Tensor:
    """Standard normal numbers: a function of (key, row-major index in `shape`) only.

    The arguments are those of `uniform`. The numbers are bitwise the same in every layout; a CPU and a GPU agree within
    2 ulp of float32. By Philox 4x32-10 (Salmon et al. 2011) and the Box-Muller transform.

    Communication and errors: as in `uniform`.
    """
    return _generate("normal", shape, key, layout, dtype, device, _fill_normal)


def normal_(tensor: Tensor, key: int, *, std: float = 1.0) -> Tensor:
    """Fills `tensor`, plain or a DTensor, with std times the numbers of `normal`, and returns `tensor`.

    Each rank draws its own part. The scratch memory is bounded where this part is contiguous in memory.

    Communication: none.
    Raises ValueError for a key or dtype which `normal` does not take; LayoutError for a Partial layout.
    """
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    layout = layout_of(tensor) if isinstance(tensor, DTensor) else None
    _check("normal_", tensor.shape, key, layout, tensor.dtype)
    with torch.no_grad():
        if local.is_contiguous():
            _fill_normal(local, _part(tuple(tensor.shape), layout), key, std)
        else:
            dense = torch.empty_like(local, memory_format=torch.contiguous_format)
            _fill_normal(dense, _part(tuple(tensor.shape), layout), key, std)
            local.copy_(dense)
    # Autograd must see the write: neither a kernel nor a write to a DTensor's local tensor counts as one.
    torch.autograd.graph.increment_version(tensor)
    return tensor


@lru_cache(maxsize=4096)
def part_of(layout: Layout, shape: tuple[int, ...], rank: int) -> Part:
    """The box of a tensor of global `shape` on `rank`."""
    return Part.of(shape, layout.local_slices(shape, rank))


def _generate(
    name: str,
    shape: Sequence[int],
    key: int,
    layout: Layout | None,
    dtype: torch.dtype,
    device: torch.device | str | None,
    fill: Callable[[Tensor, Part, int], None],
) -> Tensor:
    refuse_jit_trace(name)
    _check(name, shape, key, layout, dtype)
    _check_device(name, device)
    sizes = tuple(shape)
    layout = None if layout is None else layout.resolved(sizes)
    part = _part(sizes, layout)
    local_shape = sizes if layout is None else layout.local_shape(sizes, this_rank())  # [0] on ranks outside the mesh
    local = torch.empty(local_shape, dtype=dtype, device=device)
    fill(local, part, key)
    return local if layout is None else wrap(local, layout, sizes)


def _part(shape: tuple[int, ...], layout: Layout | None) -> Part:
    return Part.of(shape) if layout is None else part_of(layout, shape, this_rank())


def _check(name: str, shape: Sequence[int], key: int, layout: Layout | None, dtype: torch.dtype) -> None:
    if isinstance(shape, Layout):
        raise ValueError(f"{name}: ({shape}) is a layout, which has no sizes; give the global shape, and layout=")
    philox.check_key(name, "key", key)
    if not (
        isinstance(shape, Sequence) and all(isinstance(size, int) and is_int(size) and size >= 0 for size in shape)
    ):
        raise ValueError(f"{name}: the shape is {described(shape)}; its sizes must be ints >= 0, as in (4, 8)")
    if dtype not in DTYPES:
        raise ValueError(f"{name}: the dtype is {dtype}; choose one of {', '.join(map(str, DTYPES))}")
    if layout is not None and not isinstance(layout, Layout):
        raise ValueError(f"{name}: layout is {described(layout)}; give a Layout, or None for a plain tensor")
    if layout is not None:
        layout.check_shape(tuple(shape))
        if layout.is_partial():
            raise LayoutError(
                f"{name}: the layout is ({layout}), but random numbers are no sum of parts: draw them with Replicate() "
                f"in place of Partial, then reshard() the tensor"
            )


def _check_device(name: str, device: object) -> None:
    try:
        is_device = device is None or (isinstance(device, torch.device | str) and bool(torch.device(device)))
    except RuntimeError:  # a name of no device
        is_device = False
    if not is_device:
        raise ValueError(f'{name}: device is {described(device)}; give a torch.device or its name, as "cuda", or None')


def _fill_uniform(local: Tensor, part: Part, key: int) -> None:
    if use_triton(local):
        from . import launch  # imports triton, which a CPU run may not have

        launch.uniform(local, part, key)
    else:
        philox.fill(local, part, key, philox.as_uniform)


def _fill_normal(local: Tensor, part: Part, key: int, std: float = 1.0) -> None:
    if use_triton(local):
        from . import launch

        launch.normal(local, part, key, std)
    else:
        philox.fill(local, part, key, lambda words: philox.as_normal(words).mul_(std))
