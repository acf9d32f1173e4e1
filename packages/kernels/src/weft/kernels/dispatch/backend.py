"""How an op runs on a tensor: with Triton or plain torch, eager or traced, with or without data, in which dtype.

Also checks operands' dtypes. These checks run in each call of an op and allocate nothing. Under `torch.autocast` the
dtype of each op follows torch's own lists of ops.

On a CPU the bits of a result depend on the operands' addresses and strides, so `fresh_memory` gives an operand as torch
allocates a new tensor. A float32 product by MKL rounds differently where an operand's address or stride between rows is
no multiple of 16 bytes. Elementwise functions compute in vectors, and the last elements of each contiguous stretch by
scalar code, which rounds differently; torch's gelu has different code for contiguous operands.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from enum import Enum
from functools import reduce
from typing import Any

import torch
from torch import Tensor, is_autocast_enabled
from torch._subclasses.fake_tensor import is_fake
from weft.reshard.extension import is_compiling as is_compiling

from .arguments import PLAIN

WIDE = (torch.bfloat16, torch.float16, torch.float32, torch.float64)  # dtypes of an op's floating-point operands
TOKEN_DTYPES = (torch.int32, torch.int64)  # dtypes of the token ids of `embedding`, and of the experts' ids in MoE ops

# The number of multiprocessors which `chip_of` gives in Triton's interpreter. As few programs then loop over the tiles
# of a launch, and each program has several tiles even in small tests.
INTERPRETED_PROGRAMS = 3
# Whether ops on CPU tensors launch their Triton kernels, in Triton's interpreter. The environment is read once, because
# `use_triton` and `runs_natively` ask in each call. `counted_traffic` sets the constant to True inside.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_FLOAT32, _FLOAT64 = torch.float32, torch.float64  # saves an attribute lookup in every op
is_jit_tracing = torch._C._is_tracing  # the same as torch.jit.is_tracing(), in a third of the time
_meta_is_cpu = False  # inside `meta_as_cpu`


@contextmanager
def meta_as_cpu() -> Iterator[None]:
    """Inside, in this process, ops on meta tensors run the code for CPU tensors: save and allocate as on a CPU.

    Outside, ops on meta tensors run the code for a GPU. See `on_cpu`, `runs_natively` and `is_shape_alone`.
    Entered by `weft.models` (`step/memory.py`) to predict the memory of a step on a CPU.
    """
    global _meta_is_cpu
    before, _meta_is_cpu = _meta_is_cpu, True
    try:
        yield
    finally:
        _meta_is_cpu = before


def use_triton(tensor: Tensor) -> bool:
    """Whether an op on this tensor launches Triton kernels. Otherwise the op runs plain torch.

    True on CUDA, and on a CPU if `INTERPRETED`: TRITON_INTERPRET was 1 when Weft was imported, or the call is inside
    `counted_traffic`. float64 always runs plain torch, as the reference for the kernels.
    Ask before importing kernels, because a CPU installation may have no triton.
    """
    return (tensor.is_cuda or (INTERPRETED and on_cpu(tensor))) and tensor.dtype != torch.float64


def on_cpu(tensor: Tensor) -> bool:
    """Whether the tensor is in CPU memory. For a meta tensor: whether inside `meta_as_cpu`.

    Asked where an op's code differs on a CPU. For example, a CPU has no GEMM of 16-bit factors with a float32 result,
    and the factors are cast first; and linear cross-entropy holds fewer bytes of logits at once.
    """
    return tensor.device.type == "cpu" or (_meta_is_cpu and tensor.is_meta)


def is_shape_alone(tensor: Tensor) -> bool:
    """Whether the tensor is a meta tensor which only gives shapes: an op may then compute in fewer, larger pieces.

    Asked by attention, and in plain torch by cross-entropy and the gradient of swiglu and geglu.
    False on data, and inside `meta_as_cpu`, where ops must allocate as on data.
    """
    return tensor.is_meta and not _meta_is_cpu


def is_short_of_memory(tensor: Tensor) -> bool:
    """Whether ops save less in forward and recompute more in backward. Decided by device and dtype, not by free memory.

    Asked by `mark_recomputable` for the output of a norm or gate, by swiglu for the activation of the gate, and by
    dropout for the mask.
    tensor: for the device and the dtype. False for float32 and float64 on a CPU, where recomputing is slow and memory
    is plentiful. Otherwise True.
    """
    return not on_cpu(tensor) or tensor.dtype.itemsize <= 2


def runs_natively(first: Tensor, *operands: Tensor | None) -> bool:
    """Whether an op may call torch's own differentiable function instead of an `Op`.

    True for plain CPU tensors, all float32 or all float64, neither traced nor interpreted. Inside `meta_as_cpu` also
    for meta tensors, but not under autocast, which torch's functions apply to CPU tensors alone.
    Asked first in an op, because a small op spends most of the time on the host.
    """
    if type(first) not in PLAIN:  # first of all: what is no tensor has no dtype
        return False
    dtype = first.dtype
    if dtype is not _FLOAT32 and dtype is not _FLOAT64:
        return False
    if not first.is_cpu:
        return _meta_is_cpu and _runs_natively_on_meta(first, *operands)
    for each in operands:
        if each is not None and not (type(each) in PLAIN and each.is_cpu and each.dtype is dtype):
            return False
    return not INTERPRETED and not is_compiling() and not is_jit_tracing()


def _runs_natively_on_meta(*operands: Tensor | None) -> bool:
    """`runs_natively` for meta tensors inside `meta_as_cpu`."""
    given = [each for each in operands if each is not None]
    alike = all(type(each) in PLAIN and each.is_meta and each.dtype is given[0].dtype for each in given)
    return alike and not (INTERPRETED or is_compiling() or torch.is_autocast_enabled("cpu"))


def refuse_jit_trace(name: str) -> None:
    """Raise RuntimeError while `torch.jit.trace` records. Called by `apply`, `apply_many`, `uniform` and `normal`.

    torch.jit.trace keeps what the host decided from the values and shapes of a single call, and never decides again.
    name: of the op.
    """
    if not is_compiling() and is_jit_tracing():  # Dynamo cannot trace is_jit_tracing
        raise RuntimeError(
            f"{name} is recorded by torch.jit.trace, which keeps the host's decisions for the traced tensors and gives "
            "wrong numbers for further tensors; use torch.compile, or torch.export.export"
        )


def chip_of(device: torch.device) -> tuple[str, int]:
    """The chip, as a Triton target name ("sm_90"), and the number of the device's multiprocessors.

    Called before launches: the name finds measurements on the chip, for example tile sizes; the number decides how many
    programs loop over the tiles.
    Any device but a GPU gives ("interpreted", INTERPRETED_PROGRAMS).
    """
    if device.type != "cuda":
        return "interpreted", INTERPRETED_PROGRAMS
    properties = torch.cuda.get_device_properties(device)
    name = getattr(properties, "gcnArchName", "").partition(":")[0] if torch.version.hip else ""
    return name or f"sm_{properties.major}{properties.minor}", properties.multi_processor_count


def multiplies(chip: str, dtype: torch.dtype) -> bool:
    """Whether Triton compiles matrix products of `dtype` for `chip`, a Triton target name.

    Asked by `matmul.function.compiles` before a Triton kernel is chosen, and by `matmul.reference.can_multiply` for
    torch's own float8 product.
    True for dtypes of more than 8 bits. Of the 8-bit dtypes, NVIDIA's chips (sm_...) multiply float8_e5m2, and from
    sm_89 on float8_e4m3fn. True for any other name: AMD's chips and the interpreter.
    """
    if dtype.itemsize > 1 or not chip.startswith("sm_"):
        return True
    return dtype == torch.float8_e5m2 or (dtype == torch.float8_e4m3fn and int(chip.removeprefix("sm_")) >= 89)


def can_read(tensor: Tensor) -> bool:
    """Whether the host can read the tensor's values without waiting for a device: on a CPU, not traced, with data."""
    return tensor.device.type == "cpu" and not is_compiling() and not is_fake(tensor)


def has_data(tensor: Tensor) -> bool:
    """Whether the tensor has values. False for a fake tensor, which has only a shape.

    True for a meta tensor: callers check `is_meta` themselves.
    Caches of real tensors, kept from call to call, must not be filled or read with fake ones.
    """
    return not is_fake(tensor)


def device_of(tensor: Tensor) -> AbstractContextManager[Any]:
    """Context to launch kernels on the tensor's GPU, even if another is current. Does nothing for a CPU tensor."""
    return torch.cuda.device_of(tensor)  # type: ignore[no-untyped-call]  # torch has no types for it


def is_recorded(tensor: Tensor) -> bool:
    """Whether the current CUDA stream is capturing a graph. False for a CPU tensor.

    A replay runs the kernels again without the host code. Attention therefore caches no ranges made during a capture.
    A captured backward may run on the GPU several times after a forward: the backward of cross-entropy makes each
    replay after the first compute the gradient again, and for linear cross-entropy `is_last_use` is False.
    """
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def check_floats(op: str, names: tuple[str, ...], *operands: Tensor | None) -> None:
    """Raise ValueError for an operand whose dtype is not in WIDE. names: of the operands, for the message."""
    for operand in operands:
        if operand is not None and operand.dtype not in WIDE:
            name = next(name for name, each in zip(names, operands, strict=True) if each is operand)
            raise ValueError(
                f"{op}: {name} is {operand.dtype}; cast it with .to(), to one of {', '.join(map(str, WIDE))}"
            )


DEVICES = ("cpu", "cuda")  # device types for which ops follow autocast


class CastTo(Enum):
    """The dtype to which `torch.autocast` casts an op's floating operands. float64 operands are never cast.

    LOWER_INSIDE, of `linear_cross_entropy` alone: `autocasts` casts no operand, and gives the dtype as `compute_dtype`.
    """

    LOWER = "the dtype of autocast"
    FLOAT32 = "float32"
    WIDEST = "the widest dtype of the operands"
    UNCHANGED = "the dtype of each operand, unchanged"
    LOWER_INSIDE = "autocast's dtype, passed as compute_dtype: the op casts operands and sums their gradients itself"


# By name of the op, as given to `autocasts` and `cast_for`.
CASTS = {
    "add": CastTo.WIDEST,
    "add_layer_norm": CastTo.FLOAT32,
    "add_rms_norm": CastTo.FLOAT32,
    "all_gather_matmul": CastTo.LOWER,
    "attention": CastTo.LOWER,
    "combine": CastTo.UNCHANGED,  # sums in float32
    "cross_entropy": CastTo.UNCHANGED,  # computes and returns float32 for any logits
    "dispatch": CastTo.UNCHANGED,
    "dropout": CastTo.UNCHANGED,
    "embedding": CastTo.UNCHANGED,
    "experts": CastTo.LOWER,
    "geglu": CastTo.WIDEST,
    "gelu": CastTo.UNCHANGED,
    "grouped_matmul": CastTo.LOWER,
    "layer_norm": CastTo.FLOAT32,
    "linear": CastTo.LOWER,
    "linear_cross_entropy": CastTo.LOWER_INSIDE,
    "matmul": CastTo.LOWER,
    "matmul_reduce_scatter": CastTo.LOWER,
    "qkv_linear": CastTo.LOWER,
    "rms_norm": CastTo.FLOAT32,
    "rms_norm_rope": CastTo.FLOAT32,
    "rope": CastTo.UNCHANGED,  # computes in float32
    "route": CastTo.UNCHANGED,  # computes and returns float32 for any scores
    "router_statistics": CastTo.UNCHANGED,  # as route
    "sigmoid_gate": CastTo.WIDEST,
    "swiglu": CastTo.WIDEST,
    "swiglu_linear": CastTo.LOWER,
}


def is_autocasting() -> bool:
    """Whether autocast is enabled on any device. Asked before the slower `autocast_dtype`.

    Asked by `autocasts` in every call of an op, and by `first_order` in every backward.
    """
    return is_autocast_enabled("cpu") or is_autocast_enabled("cuda")


def autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """The dtype of the autocast enabled on the tensor's device; None if none is enabled.

    Asked by `autocasts` and `cast_for` before an op, and by `first_order` in a backward.
    """
    device = _device(tensor)
    enabled = device in DEVICES and is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if enabled else None


def autocast_off(tensor: Tensor) -> AbstractContextManager[None]:
    """Context without autocast on the tensor's device.

    Entered by `autocasts` around an op, once the operands are cast, and by `first_order` around a backward that is
    called inside autocast.
    """
    return torch.autocast(_device(tensor), enabled=False)


def _device(tensor: Tensor) -> str:
    """The tensor's device type. A meta tensor has none: the first device with autocast enabled, if any, stands in."""
    device = tensor.device.type
    return next(filter(is_autocast_enabled, DEVICES), device) if device == "meta" else device


def operands_dtype(cast_to: CastTo, dtype: torch.dtype, operands: list[torch.dtype]) -> torch.dtype | None:
    """The dtype to which autocast casts an op's operands; None to leave all operands unchanged.

    cast_to: of the op. dtype: of autocast.
    operands: the dtypes of the operands for which `may_be_cast` is True. If any has 8 bits, nothing is cast: the caller
        chose float8 factors, and the factors' scales are float32.
    """
    if any(each.itemsize == 1 for each in operands):
        return None
    match cast_to:
        case CastTo.LOWER:
            return dtype
        case CastTo.FLOAT32:
            return torch.float32
        case CastTo.WIDEST:
            return reduce(torch.promote_types, operands) if operands else None
        case CastTo.UNCHANGED | CastTo.LOWER_INSIDE:
            return None


def may_be_cast(operand: object) -> bool:
    """Whether autocast casts an operand: any floating tensor, except float64."""
    return isinstance(operand, Tensor) and operand.is_floating_point() and operand.dtype != torch.float64


ALIGNMENT = 64  # of torch's allocations on a CPU, in bytes


def fresh_memory(tensor: Tensor) -> Tensor:
    """The tensor in memory as torch allocates a new tensor: contiguous, at a multiple of 64 bytes. Copies if needed.

    Called inside `exact_sums` (`sharded/folded.py`) for each part of an operand or a gradient, so that an op gives the
    same bits on the part as on a rank of the named mesh.
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
