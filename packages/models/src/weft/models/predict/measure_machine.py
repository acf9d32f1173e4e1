"""`measure_rank`: the measurements of a process started by `measure`, and the resulting `Chip`."""

from __future__ import annotations

import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from ..terminal import begin_printing
from .chip import Chip, Level, Product, Rate
from .fitting import Sample, fit_line, fit_rates, relative_errors
from .measure_links import MeasuredLinks, measure_links
from .measure_step import (
    DIVIDED,
    LARGE,
    SMALL,
    StandardStep,
    collective_host_seconds_of,
    drift_of,
    host_seconds_of,
)
from .op_cases import MOST_WORK, Case, make_gradients, op_cases, product_shapes
from .rounds import SHORT, Clock, interleaved

# Shares of the whole time, 1 together. Products and ops: in both dtypes of `SHARES`.
OF_PRODUCTS, OF_OPS, OF_TORCH, OF_STEPS, OF_LINKS = 0.2, 0.5, 0.06, 0.12, 0.12
# By dtype, the share of the time of products, and of the time of ops. With less time go fewer and smaller cases.
SHARES = {torch.float32: 0.7, torch.bfloat16: 0.3}
WHOLE = 60.0  # seconds to measure all cases; in a shorter time, fewer and smaller cases are measured
SHORTEST = 2**22  # operations of the largest case in the shortest time
COPIES = tuple(2**k for k in (12, 15, 18, 20, 22, 24))  # elements
PROBE = 256  # rows and columns of the product in `_speed`
DIVIDED_STEPS = 50
TIMEOUT = timedelta(minutes=30)  # of ranks waiting for rank 0
# Ops whose output backward computes again in place of saving the output: on a GPU, and in 16 bits on a CPU. A trace has
# the part "recompute" of these ops on every chip. In float32 a CPU saves the outputs, and gets rates of 0 for the part.
RECOMPUTED = ("rms_norm", "add_rms_norm", "layer_norm", "add_layer_norm", "gelu", "swiglu", "swiglu_linear")


def measure_rank(rank: int, file: Path, *, processes: int, seconds: float, gpus: int) -> None:
    """Measure this machine as a process of `measure`. Rank 0 writes the chip to `file`.

    processes, seconds, gpus: as of `measure.Measuring`.
    Communication: called by all ranks together. The ranks above 0 wait while rank 0 measures alone.
    """
    begin_printing()
    device = torch.device("cuda", rank) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if gpus else "gloo",
        init_method=f"file://{file.with_name('store')}",
        rank=rank,
        world_size=processes,
        timeout=TIMEOUT,
    )
    try:
        machine = _Machine(device, processes, seconds)
        if rank == 0:
            machine.measure_alone()
        dist.barrier()
        machine.measure_together(rank)
        if rank == 0:
            file.write_text(machine.chip().as_toml(), encoding="utf-8")
    finally:
        with suppress(RuntimeError):
            dist.destroy_process_group()


class _Machine:
    """Measures the machine step by step, and keeps the results for `chip`."""

    def __init__(self, device: torch.device, processes: int, seconds: float) -> None:
        self._device, self._processes, self._seconds = device, processes, seconds
        self._on_gpu, self._clock = device.type == "cuda", Clock(device)
        self._share = min(1.0, seconds / WHOLE)
        self._products: tuple[Product, ...] = ()
        self._ops: dict[str, Rate] = {}
        self._speeds: dict[torch.dtype, float] = {}
        self._bandwidth = 0.0
        self._host_seconds = 0.0
        self._links = MeasuredLinks((Level(name="none", bandwidth=1.0, reachable=1.0, latency=0.0),), {}, 0.0)
        self._crowding = 1.0  # `Chip.crowding`
        self._drift = 0.0  # `Chip.drift`
        self._alone = 0.0  # seconds of the large step, on rank 0 alone

    def measure_alone(self) -> None:
        """Measure products, ops, copies, the optimizer and the host, on rank 0 while the rest wait."""
        self._copies()
        for dtype in SHARES:
            self._measure_products(dtype)
        self._ops_of_torch()
        for dtype in SHARES:
            self._measure_ops(dtype)
        self._optimizer()
        self._host()

    def measure_together(self, rank: int) -> None:
        """Measure steps of all ranks at once, and collectives. Communication: the measured collectives."""
        if dist.get_world_size() > 1:
            step = StandardStep(LARGE, self._device, rank)
            dist.barrier()
            [times] = interleaved([step.run], self._seconds * OF_STEPS / 3, self._clock)
            together = _undisturbed(times)
            if rank == 0 and not self._on_gpu:
                self._crowding = max(1.0, together / self._alone)
                _report(
                    f"a step takes {self._crowding:.3f} times as long where all {dist.get_world_size()} processes run"
                )
            if rank == 0:
                _report("collectives")
        self._links = measure_links(self._device, self._seconds * OF_LINKS)
        if dist.get_world_size() > 1 and not self._on_gpu:
            self._divided_step(rank)

    def _divided_step(self, rank: int) -> None:
        """Measure the computing thread's time and its waits for a collective, in a step of ranks 0 and 1 together.

        Communication: the step's, and a barrier.
        """
        if rank < 2:
            step, times = StandardStep(DIVIDED, self._device, 0, tp=2), list[tuple[float, float]]()
            for _ in range(DIVIDED_STEPS):
                begin, begin_of_thread = time.perf_counter(), time.thread_time()
                step.run()
                of_thread = time.thread_time() - begin_of_thread
                times.append((time.perf_counter() - begin, of_thread))
            if rank == 0:
                quickest = sorted(times)[: DIVIDED_STEPS // 4]  # other programs only make a step longer
                seconds, busy = (statistics.median(each) for each in zip(*quickest, strict=True))
                host = collective_host_seconds_of(step.trace(), busy, self.chip())
                self._links = replace(self._links, collective_host_seconds=host)
                self._drift = drift_of(step.trace(), busy, seconds - busy, self.chip())
                apart = self._drift * math.sqrt(1e-3)
                _report(
                    f"a step of two ranks: host {host * 1e6:.0f} us a collective; after 1 ms a rank waits "
                    f"{apart * 1e6:.0f} us for the last rank"
                )
        dist.barrier()

    def chip(self) -> Chip:
        """The results measured so far as a `Chip`; later measurements are taken with the help of earlier results."""
        peaks: dict[str, float] = {}
        for each in self._products:
            peaks[each.dtype] = max(peaks.get(each.dtype, 0.0), each.flops / each.seconds)
        if self._on_gpu:
            name = torch.cuda.get_device_name(self._device)
            memory = torch.cuda.get_device_properties(self._device).total_memory
            count = torch.cuda.get_device_properties(self._device).multi_processor_count
        else:
            name, count = f"CPU {_processor()}", 1
            memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // self._processes
        return Chip(
            name=f"{name}, {self._processes} processes",
            source=f"measured on {datetime.now():%Y-%m-%d} with torch {torch.__version__}",
            peaks=peaks,
            reachable=1.0,
            multiprocessors=count,
            tiles=((128, 128), (64, 64)),
            memory_bytes=memory,
            memory_bandwidth=self._bandwidth,
            memory_reachable=1.0,
            levels=self._links.levels,
            host_seconds=self._host_seconds,
            attention_reachable={"forward": 1.0, "backward": 1.0},
            ops=self._ops,
            products=self._products,
            collectives=self._links.collectives,
            collective_host_seconds=self._links.collective_host_seconds,
            crowding=self._crowding,
            drift=self._drift,
            threads=None if self._on_gpu else torch.get_num_threads(),
        )

    def _most_work(self, dtype: torch.dtype) -> float:
        """Operations of the largest case to measure; fewer in a slow dtype, as bfloat16 on many CPUs."""
        slow = min(1.0, self._speed(dtype) / self._speed(torch.float32))
        return max(SHORTEST, MOST_WORK * self._share_of_cases(dtype) * slow)

    def _share_of_cases(self, dtype: torch.dtype) -> float:
        """Cases to measure in a dtype, as a share of all cases. All are measured in float32 within `WHOLE` seconds."""
        return self._share * SHARES[dtype] / SHARES[torch.float32]

    def _speed(self, dtype: torch.dtype) -> float:
        """Products of a fixed size per second, in a dtype."""
        if dtype not in self._speeds:
            x = torch.ones(PROBE, PROBE, device=self._device, dtype=dtype)
            [times] = interleaved([lambda: x @ x], 0.0, self._clock)
            self._speeds[dtype] = 1 / _undisturbed(times)
        return self._speeds[dtype]

    def _copies(self) -> None:
        """Measure copies that fit the caches and copies that do not; the longest gives the memory's bandwidth."""
        tensors = [torch.ones(count, device=self._device) for count in COPIES]
        targets = [torch.empty_like(each) for each in tensors]
        pairs = list(zip(targets, tensors, strict=True))
        calls = [lambda a=a, b=b: a.copy_(b) for a, b in pairs]
        times = interleaved(calls, self._seconds * OF_TORCH / 4, self._clock, warm=True)
        seconds = [_undisturbed(each) for each in times]
        self._bandwidth = 2 * tensors[-1].nbytes / seconds[-1]
        line = fit_line([2 * each.nbytes for each in tensors], seconds)
        for name in ("copy_", "clone", "cat", "_foreach_copy_", "_to_copy"):
            self._ops[f"aten.{name}.forward"] = line
        _report(f"copies: {self._bandwidth / 1e9:.1f} GB/s of long ones, reads and writes counted")

    def _measure_products(self, dtype: torch.dtype) -> None:
        shapes = _thin(product_shapes(self._most_work(dtype)), self._share_of_cases(dtype))
        name = str(dtype).removeprefix("torch.")
        operands = [
            (torch.randn(M, K, device=self._device, dtype=dtype), torch.randn(N, K, device=self._device, dtype=dtype))
            for M, N, K in shapes
        ]
        calls = [lambda x=x, w=w: torch.nn.functional.linear(x, w) for x, w in operands]
        times = interleaved(calls, self._seconds * OF_PRODUCTS * SHARES[dtype], self._clock, warm=True)
        found = tuple(
            Product(dtype=name, M=M, N=N, K=K, seconds=_undisturbed(each))
            for (M, N, K), each in zip(shapes, times, strict=True)
        )
        self._products += found
        best = max(each.flops / each.seconds for each in found)
        _report(f"products in {name}: {len(found)} shapes, up to {best / 1e9:.1f} GFLOP/s")

    def _ops_of_torch(self) -> None:
        """Measure torch's elementwise ops outside Weft's ops, as in adding gradients and taking the norm."""
        tensors = [torch.ones(count, device=self._device) for count in COPIES[:5]]
        named: list[tuple[str, int, Callable[[Tensor], object]]] = [  # reads and writes of an element
            ("add", 3, lambda x: x + x),
            ("add_", 3, lambda x: x.add_(1e-9)),
            ("mul", 3, lambda x: x * x),
            ("_foreach_norm", 1, lambda x: torch._foreach_norm([x])),
            ("_foreach_mul_", 2, lambda x: torch._foreach_mul_([x], 1.0)),
            ("_foreach_add_", 3, lambda x: torch._foreach_add_([x], 0.0)),
            ("zero_", 1, lambda x: torch.zeros_like(x)),
            ("sum", 1, torch.sum),
        ]
        calls = [lambda f=f, x=x: f(x) for _, _, f in named for x in tensors]
        times = interleaved(calls, self._seconds * OF_TORCH / 2, self._clock, warm=True)
        for i, (name, moved, _) in enumerate(named):
            seconds = [_undisturbed(each) for each in times[i * len(tensors) : (i + 1) * len(tensors)]]
            self._ops[f"aten.{name}.forward"] = fit_line([moved * each.nbytes for each in tensors], seconds)
        _report(f"ops of torch: {len(named)}, of {len(tensors)} sizes")

    def _measure_ops(self, dtype: torch.dtype) -> None:
        cases = _thin_by_name(list(op_cases(dtype, self._most_work(dtype))), self._share_of_cases(dtype))
        events = [case.events() for case in cases]
        ready = [case.on(self._device) for case in cases]
        gradients = [make_gradients(case.forward()) for case in ready]
        backwards: list[list[float]] = [[] for _ in ready]

        def call(i: int) -> Callable[[], float]:
            def both() -> float:
                for _ in range(2):  # the first brings operands and code into the caches
                    forward = self._clock.time(lambda: outputs.extend(ready[i].forward()))
                    backward = self._clock.time(lambda: ready[i].backward(outputs, gradients[i]))
                    outputs.clear()
                    if forward >= SHORT:
                        break
                backwards[i].append(backward)
                return forward

            outputs: list[Tensor] = []
            return both

        seconds = self._seconds * OF_OPS * SHARES[dtype]
        forwards = interleaved([call(i) for i in range(len(ready))], seconds, None)
        samples = []
        for (forward, backward), first, second in zip(events, forwards, backwards, strict=True):
            if forward:
                samples.append(Sample(events=tuple(forward), seconds=_undisturbed(first)))
            if backward:  # `second` begins with the times of the first round, which `first` leaves out
                samples.append(Sample(events=tuple(backward), seconds=_undisturbed(second[-len(first) :])))
        known = replace(self._chip_of_products(), ops={})
        rates = fit_rates(samples, known.product_seconds)
        self._ops |= rates
        priced = replace(known, ops=rates)
        errors = relative_errors(
            samples, lambda e: priced.measured_seconds(e.name, e.part, e.dtype, e.nbytes, e.flops, e.sizes)
        )
        middle = statistics.median(abs(each) for of_op in errors.values() for each in of_op)
        name = str(dtype).removeprefix("torch.")
        if not self._on_gpu and dtype == torch.float32:
            for each in RECOMPUTED:
                self._ops[f"{each}.recompute.{name}"] = Rate()
        _report(f"ops in {name}: {len(rates)} rates from {len(samples)} calls, within {middle:.0%} in the middle")

    def _chip_of_products(self) -> Chip:
        """A chip of the measured products alone."""
        link = Level(name="none", bandwidth=1.0, reachable=1.0, latency=0.0)
        return replace(_EMPTY, products=self._products, levels=(link,))

    def _optimizer(self) -> None:
        """Measure AdamW's update, by the bytes of gradient, parameter and two states."""
        sizes = [count for count in COPIES[:5] if 7 * 4 * count * 8 < self._most_work(torch.float32)] or [COPIES[0]]
        sizes = sizes if len(sizes) > 1 else [*sizes, COPIES[1]]
        optimizers = []
        for count in sizes:
            parameter = torch.nn.Parameter(torch.zeros(count, device=self._device))
            parameter.grad = torch.zeros_like(parameter)
            optimizers.append(torch.optim.AdamW([parameter], fused=True))
        times = interleaved([each.step for each in optimizers], self._seconds * OF_TORCH / 4, self._clock)
        line = fit_line([7 * 4 * count for count in sizes], [_undisturbed(each) for each in times])
        self._ops["optimizer.forward"] = replace(line, seconds=0.0)  # of a call, in which all parameters are updated
        _report(f"AdamW: {1e-9 / line.seconds_per_byte if line.seconds_per_byte else 0:.1f} GB/s")

    def _host(self) -> None:
        """Measure the host's time for an op: a small step's time beyond the ops. A large step checks the prediction."""
        small, large = StandardStep(SMALL, self._device, 0), StandardStep(LARGE, self._device, 0)
        times = interleaved([small.run, large.run], self._seconds * OF_STEPS * 2 / 3, self._clock)
        of_small, of_large = (_undisturbed(each) for each in times)
        self._alone = of_large
        chip = self.chip()
        self._host_seconds = host_seconds_of(small.trace(), of_small, chip)
        predicted = large.predicted_seconds(replace(chip, host_seconds=self._host_seconds))
        _report(
            f"host: {self._host_seconds * 1e6:.1f} us an op; a larger step took {of_large * 1e3:.1f} ms, "
            f"and its ops and the host {predicted * 1e3:.1f} ms"
        )


_EMPTY = Chip(
    name="products",
    peaks={"float32": 1.0},
    reachable=1.0,
    multiprocessors=1,
    tiles=((1, 1),),
    memory_bytes=1,
    memory_bandwidth=1.0,
    memory_reachable=1.0,
    levels=(),
    host_seconds=0.0,
)


def _undisturbed(times: Sequence[float]) -> float:
    """The lower quartile of a call's times, because disturbances only make a call longer."""
    return statistics.quantiles(times, n=4, method="inclusive")[0] if len(times) > 1 else times[0]


def _thin(items: Sequence[tuple[int, int, int]], share: float) -> list[tuple[int, int, int]]:
    """A share of the items, evenly spaced; at least 8."""
    count = min(len(items), max(8, round(len(items) * share)))
    return [items[i * (len(items) - 1) // max(1, count - 1)] for i in range(count)]


def _thin_by_name(cases: Sequence[Case], share: float) -> list[Case]:
    """A share of each op's cases, evenly spaced; at least 3 of each op."""
    found: list[Case] = []
    for name in dict.fromkeys(case.name for case in cases):
        of_op = [case for case in cases if case.name == name]
        count = min(len(of_op), max(3, round(len(of_op) * share)))
        found += [of_op[i * (len(of_op) - 1) // max(1, count - 1)] for i in range(count)]
    return found


def _processor() -> str:
    """The processor's name, from the kernel."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


_START = time.monotonic()


def _report(line: str) -> None:
    """Print a line of progress, with the seconds since the start."""
    print(f"{time.monotonic() - _START:6.1f} s  {line}", flush=True)
