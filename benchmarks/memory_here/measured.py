"""The memory of real training steps on this machine's CPU: counted by torch's allocator, and resident by the kernel.

The two measurements share no code with the prediction. Both take the second step of a new model, whose first step makes
the optimizer's states and the buffers that stay.
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


def counted_peak(case: Case) -> int:
    """The most bytes that torch's allocator has given out at once in the second step, all of the model included."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        for step in steps(case):
            step()
            gc.collect()  # the model before it was laid out is part of reference cycles
            with record_function(MEASURED_STEP):
                step()
    changes, begin, end = [], 0, 0
    waiting = list(profiler.profiler.kineto_results.experimental_event_tree())  # type: ignore[union-attr]
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.name == MEASURED_STEP:
            begin, end = event.start_time_ns, event.end_time_ns
        if event.name == "[memory]":
            changes.append((event.start_time_ns, event.extra_fields.alloc_size))
    held = most = 0
    for at, nbytes in sorted(changes, key=lambda change: change[0]):
        held += nbytes
        if begin <= at <= end:
            most = max(most, held)
    return most


def resident_peak(case: Case) -> int:
    """The most bytes of this process in physical memory in the second step, beyond those before the model was made.

    The kernel's high-water mark is reset before the step.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = _status("VmRSS")
    most = 0
    for step in steps(case):
        step()
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")
        step()
        most = _status("VmHWM")
    return most - before


def measure(case: Case) -> dict[str, int]:
    """Both peaks of this rank.

    The same steps run before, so that what libraries keep is in memory already: code, stacks, the buffers of matrix
    products and of sockets. None of it is tensors, and it does not grow with the steps. malloc maps each block of
    64 KiB or more by itself, and gives it back when it is freed: gaps of a heap do not count.
    """
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD)
    libc.mallopt(M_TRIM_THRESHOLD, 0)
    torch.set_num_threads(1)
    for step in steps(case):
        step()
        step()
    del step
    resident = resident_peak(case)
    return {"counted": counted_peak(case), "resident": resident}


def _status(name: str) -> int:
    """A size in /proc/self/status, in bytes."""
    found = re.search(rf"^{name}:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None, f"Linux gives {name}"
    return 1024 * int(found[1])
