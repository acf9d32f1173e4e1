"""The memory of real training steps on this machine's CPU: counted by torch's allocator, and resident by the kernel.

The two measurements share no code with the prediction. Both take the second step of a new model, whose first step makes
the optimizer's states and the buffers that stay. `Parts` has what else is resident in the process.
"""

from __future__ import annotations

import ctypes
import gc
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile
from weft.kernels import cross_entropy
from weft.mesh import ProcessMesh
from weft.models import Llama, LlamaConfig, Memory, PipelinePlan, initialize, parallelize, predict_memory
from weft.models.step.find_gradients import find_gradients
from weft.models.step.forward_backward import divide_batch
from weft.reshard import GradientSync

MEASURED_STEP = "measured step"
COUNTS = 6  # attempts to count without a free missed by torch's profiler
LOST = 0.002  # share of the peak that may be left after a model is gone: tables of libraries
MMAP_THRESHOLD, M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = 1 << 16, -1, -3  # glibc's mallopt


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A plan of a small model on one or two processes."""

    axes: dict[str, int]
    plan: dict[str, Any] = field(default_factory=dict)  # changes of the model's own plan
    pipeline: dict[str, Any] = field(default_factory=dict)
    model: LlamaConfig
    batch: tuple[int, int]
    microbatches: int = 1
    dtype: torch.dtype = torch.float32  # of autocast
    clip_norm: float | None = None

    @property
    def mesh(self) -> ProcessMesh:
        return ProcessMesh.grid(**self.axes)

    def parallel_plan(self) -> Any:
        with torch.device("meta"):
            plan = Llama(self.model).parallel_plan()
        pipeline = PipelinePlan(microbatches=self.microbatches, **self.pipeline) if "pp" in self.axes else None
        return replace(plan, **self.plan, pipeline=pipeline)

    def autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast("cpu", self.dtype) if self.dtype != torch.float32 else nullcontext()

    def predict(self, rank: int) -> Memory:
        with torch.device("meta"):
            model = Llama(self.model)
        with self.autocast():
            return predict_memory(
                model,
                self.mesh,
                self.parallel_plan(),
                rank=rank,
                batch=self.batch,
                microbatches=self.microbatches,
                clip_norm=self.clip_norm,
                device="cpu",
            )


def steps(case: Case) -> Iterator[Callable[[], None]]:
    """Yields the step of a new model; run it as often as needed, then go on."""
    model = Llama(case.model)
    initialize(model, seed=3)
    parallelize(model, case.mesh, case.parallel_plan())
    sync, optimizer = GradientSync(model), torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.arange(case.batch[0] * case.batch[1]).reshape(case.batch) % case.model.vocab_size
    parts = divide_batch(model, tokens, tokens, case.microbatches, {})

    def criterion(logits: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(logits, targets, denominator=float(tokens.numel()))

    def step() -> None:
        find_gradients(model, criterion, parts, sync, clip_norm=case.clip_norm, call_context=case.autocast)
        optimizer.step()
        optimizer.zero_grad()

    yield step
    sync.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Bytes of a rank, in a process with a single thread."""

    counted: int  # the most given out by torch's allocator at once in the step, the model included
    resident: int  # the most in physical memory in the step, beyond what the process held before the model was made
    imported: int  # in physical memory before the first model: Python, torch and Weft, and the group of processes
    kept: int  # in physical memory after a model is gone, beyond `imported`: code run since, buffers of libraries


def counted_peak(case: Case) -> int:
    """The most bytes that torch's allocator has given out at once in the second step, all of the model included.

    torch's profiler sees the allocator's calls by this thread alone. A thread of gloo that is the last to let go of a
    tensor frees unseen, and the tensor counts until the memory is given out again. If that is never, bytes are left
    after the model is gone, and the count is taken again, up to `COUNTS` times. A missed free only adds, so the least
    count is returned.
    Communication: the step's, and an all-reduce, by which all ranks count again or none.
    """
    counts: list[int] = []
    for _ in range(COUNTS):
        most, left = _count(case)
        counts.append(most)
        is_missed = torch.tensor(float(abs(left) > LOST * most))
        dist.all_reduce(is_missed, dist.ReduceOp.MAX)
        if not is_missed:
            break
    return min(counts)


def _count(case: Case) -> tuple[int, int]:
    """(the most bytes in the second step, bytes left after the model is gone), as this thread allocates and frees."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        for step in steps(case):
            step()
            gc.collect()  # the model before it was laid out is part of reference cycles
            with record_function(MEASURED_STEP):
                step()
        del step
        gc.collect()
    changes, begin, end = list[tuple[int, int, int]](), 0, 0
    waiting = list(profiler.profiler.kineto_results.experimental_event_tree())
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.name == MEASURED_STEP:
            begin, end = event.start_time_ns, event.end_time_ns
        if event.name == "[memory]":
            changes.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
    held: dict[int, int] = {}  # address -> bytes
    most = 0
    for at, address, nbytes in sorted(changes, key=lambda change: change[0]):
        if nbytes < 0:
            held.pop(address, None)
            continue
        for other in [each for each in held if each < address + nbytes and address < each + held[each]]:
            del held[other]  # freed unseen
        held[address] = nbytes
        if begin <= at <= end:
            most = max(most, sum(held.values()))
    return most, sum(held.values())


def resident_peak(case: Case) -> int:
    """The most bytes of this process in physical memory in the second step, beyond those before the model was made.

    The kernel's high-water mark is reset before the step.
    """
    _trim()
    before = _status("VmRSS")
    most = 0
    for step in steps(case):
        step()
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")
        step()
        most = _status("VmHWM")
    return most - before


def measure(case: Case) -> Parts:
    """The bytes of this rank, where malloc maps each block of 64 KiB or more by itself.

    A block is then given back when it is freed: gaps of a heap do not count, see `resident_with_heap`.
    Communication: as `counted_peak`.
    """
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD)
    libc.mallopt(M_TRIM_THRESHOLD, 0)
    imported, kept = _warm_up(case)
    return Parts(resident=resident_peak(case), counted=counted_peak(case), imported=imported, kept=kept)


def resident_with_heap(case: Case) -> int:
    """`resident_peak` with glibc's malloc as set by default. For a new process: earlier steps leave gaps in the heap.

    Larger by the gaps: freed memory between blocks, or kept for later blocks. Communication: the step's.
    """
    _warm_up(case)
    return resident_peak(case)


def _warm_up(case: Case) -> tuple[int, int]:
    """Run two steps of a model. Returns `Parts.imported` and `Parts.kept`.

    Afterwards the memory has all that libraries keep: code, stacks, the buffers of matrix products and of sockets. No
    tensor is kept, and further steps keep no more.
    """
    torch.set_num_threads(1)
    _trim()
    imported = _status("VmRSS")
    for step in steps(case):
        step()
        step()
    del step
    _trim()
    return imported, _status("VmRSS") - imported


def _trim() -> None:
    """Give back all memory that nothing holds."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def _status(name: str) -> int:
    """A size in /proc/self/status, in bytes."""
    found = re.search(rf"^{name}:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None, f"Linux gives {name}"
    return 1024 * int(found[1])
