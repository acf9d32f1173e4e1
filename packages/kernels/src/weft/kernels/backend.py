"""How code runs on a tensor: by Triton kernels or in plain torch, at once or recorded. Asked here; no op looks for hardware."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import is_fake
from torch.nn import Parameter

INTERPRETED_PROGRAMS = 3  # few, so that one has several tiles
# What is behind os.environ, which encodes and decodes, and raises for what is not there: a microsecond, twice in every op.
_ENVIRONMENT: dict[bytes, bytes] = vars(os.environ)["_data"]
_PLAIN = frozenset((Tensor, Parameter))
_FLOAT32, _FLOAT64 = torch.float32, torch.float64  # not looked up in torch in every op
if hasattr(torch.compiler, "_compile_session_context"):  # torch 2.13, where it is True for all of a torch.compile
    is_compiling = torch.compiler.is_compiling
else:

    def is_compiling() -> bool:
        """Whether what runs is traced: by Dynamo, of which torch tells, or by what traces its graph, of which it did not yet."""
        return torch.compiler.is_compiling() or TracingContext.try_get() is not None


is_jit_tracing = torch._C._is_tracing  # what torch.jit.is_tracing() asks, in a third of the time


def use_triton(tensor: Tensor) -> bool:
    """Whether an op on this tensor launches Triton kernels; otherwise it takes its plain torch path.

    True on CUDA, and on the CPU while TRITON_INTERPRET is 1 (kernels are interpreted only if that was also set when
    they were imported). float64 is always plain torch: it is what the kernels are checked against.
    Kernels are imported only after this said so, so a CPU run needs no triton.
    """
    if not tensor.is_cuda and _ENVIRONMENT.get(b"TRITON_INTERPRET") != b"1":  # first what decides most often
        return False
    return tensor.dtype != torch.float64 and (tensor.is_cuda or on_cpu(tensor))


def on_cpu(tensor: Tensor) -> bool:
    """Where memory is a CPU's, and no GEMM takes narrow factors to a wide product. Without data a tensor is on a GPU."""
    return tensor.device.type == "cpu"


def is_short_of_memory(tensor: Tensor) -> bool:
    """Whether to make a value again is worth its time: not so of float32 and float64 on a CPU, which is slow and has room."""
    return not on_cpu(tensor) or tensor.dtype.itemsize <= 2


def is_torchs(first: Tensor, *others: Tensor | None) -> bool:
    """Whether torch's own function may take these, and differentiate them: plain tensors of a CPU, all in float32 or all in float64,
    neither traced nor interpreted. It is asked before all else, as of a short op the host's part is most.
    """
    dtype = first.dtype
    if (dtype is not _FLOAT32 and dtype is not _FLOAT64) or type(first) not in _PLAIN or not first.is_cpu:
        return False
    for each in others:
        if each is not None and not (type(each) in _PLAIN and each.is_cpu and each.dtype is dtype):
            return False
    return _ENVIRONMENT.get(b"TRITON_INTERPRET") != b"1" and not is_compiling() and not is_jit_tracing()


def refuse_jit_trace(name: str) -> None:
    """Raises RuntimeError where `torch.jit.trace` records. Its graph keeps what the host decides by the values and shapes of one call,
    and checks none of that when the graph runs on other tensors.
    """
    if not is_compiling() and is_jit_tracing():  # Dynamo takes no such question
        raise RuntimeError(
            f"{name} is recorded by torch.jit.trace, which keeps what the host decided for the traced tensors and gives wrong "
            "numbers for others; use torch.compile, or torch.export.export"
        )


def chip_of(device: torch.device) -> tuple[str, int]:
    """The chip as Triton's targets are named, and its multiprocessors; "interpreted", with a few programs, of a CPU."""
    if device.type != "cuda":
        return "interpreted", INTERPRETED_PROGRAMS
    properties = torch.cuda.get_device_properties(device)
    name = getattr(properties, "gcnArchName", "").partition(":")[0] if torch.version.hip else ""
    return name or f"sm_{properties.major}{properties.minor}", properties.multi_processor_count


def multiplies(chip: str, dtype: torch.dtype) -> bool:
    """Whether Triton compiles products of the dtype for a chip, named as its targets: NVIDIA's lack some of 8 bits, or all of them
    but e5m2. A target without a number is none of NVIDIA's.
    """
    if dtype.itemsize > 1 or not chip.startswith("sm_"):
        return True
    return dtype == torch.float8_e5m2 or (dtype == torch.float8_e4m3fn and int(chip.removeprefix("sm_")) >= 89)


def can_read(tensor: Tensor) -> bool:
    """Whether the host may look at the tensor's values without waiting for a device: a CPU's, not traced, with data."""
    return on_cpu(tensor) and not is_compiling() and has_data(tensor)


def has_data(tensor: Tensor) -> bool:
    """Whether there are values, and not a shape alone: what is kept from call to call has some, and goes with such alone."""
    return not is_fake(tensor)


def device_of(tensor: Tensor) -> AbstractContextManager[Any]:
    """In it kernels are launched on the tensor's GPU, which need not be the current one. Of a CPU's tensor nothing."""
    return torch.cuda.device_of(tensor)  # type: ignore[no-untyped-call]  # torch has no types for it


def is_recorded(tensor: Tensor) -> bool:
    """Whether what runs on this tensor is recorded in a CUDA graph: it may be played again, and no host code with it."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
