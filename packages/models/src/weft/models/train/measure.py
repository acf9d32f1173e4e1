"""Measurements of training steps.

`flops_per_token` and `peak_flops`: the operations of a step and the peak of the chip, for the metrics tflops and mfu.
`weft explain` and `weft plan` also count by `flops_per_token`.
`peak_memory` and `total_memory`: the memory used by this process, and the device's memory. `Trainer` logs both.
`memory_table`: the memory held by each rank of a pipeline, printed by `Trainer.first_step`.
`CollectiveCount`: the collectives issued by a step, seen through torch's dispatcher. `Trainer.first_step` compares
these with the prediction, and tests assert their number.
`profiled`: torch profiler traces of a few steps, a file per rank (`--profile`).
"""

from __future__ import annotations

import os
import resource
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.profiler import profile, schedule
from torch.utils._python_dispatch import TorchDispatchMode
from weft.reshard.extension import (
    Collective,
    axes_of_group,
    bytes_of_call,
    gathering_units,
    group_named,
    group_of_call,
    kind_of_op,
)

from ..config import ModelConfig
from ..losses import local_value
from ..parallel.pipeline.run import Pipeline
from .config import PROFILED_FROM, PROFILED_STEPS

# Peak FLOP/s of dense bfloat16 matrix products, by a part of the device's name; the first match counts. From the
# makers' data sheets.
_BF16_PEAKS = (
    ("B200", 2250e12),
    ("H200", 989e12),
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989e12),
    ("A100", 312e12),
    ("L40S", 362e12),
    ("MI300X", 1307e12),
    ("MI325X", 1307e12),
)


def flops_per_token(model: ModelConfig, T: int, *, multiplying: int | None = None) -> int:
    """Floating-point operations of a training step per token, in sequences of T tokens.

    6 for each weight in a token's matrix products (of experts, only where the token is sent), plus 12 * T *
    attention_width per layer. A causal mask does not lower the count: Chowdhery et al., "PaLM" (2022), appendix B;
    published MFU figures are counted this way.
    multiplying: the number of weights in matrix products, from `model_class.parameters_of`, which can also count a
        model class of the user; None takes the config's number.
    """
    weights = model.num_multiplied if multiplying is None else multiplying
    return 6 * weights + 12 * model.num_layers * model.attention_width * T


def peak_flops(device: torch.device, dtype: str) -> float | None:
    """Peak FLOP/s of matrix products on this device; None for chips not in the table, and for float32."""
    if device.type != "cuda" or dtype != "bfloat16":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in _BF16_PEAKS if part in name), None)


def peak_memory(device: torch.device) -> int:
    """Peak bytes until now: allocated on a GPU, or resident in the process if `device` is a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def total_memory(device: torch.device) -> int:
    """Bytes of memory of the GPU, or, if `device` is a CPU, of the machine, whose processes share it."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def memory_table(pipeline: Pipeline, model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """A table for a pipeline: each rank's memory, in MiB, and its microbatches in flight.

    The gradient of a sharded parameter counts at full size where it accumulates in the gathered parameter (ZeRO 1).
    Communication: an all-gather of a few numbers.
    """
    states = [each for state in optimizer.state.values() for each in state.values() if isinstance(each, Tensor)]
    parameters = list(model.parameters())
    gathered = (each for unit in gathering_units(model) for each in unit.full_parameters().items())
    full_size: dict[Tensor, Tensor] = {shard: full.leaf for shard, full in gathered if full.accumulate_grad}
    gradients = [full_size.get(each, each) for each in parameters if each.requires_grad]
    numbers = [sum(local_value(each).nbytes for each in tensors) for tensors in (parameters, gradients, states)]
    of_ranks: list[list[int]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(of_ranks, [*numbers, pipeline.in_flight])
    lines = ["held by each rank, in MiB; and microbatches in flight at most"]
    lines.append("          parameters  gradients  optimizer state  in flight")
    for rank, (parameter, gradient, state, in_flight) in enumerate(of_ranks):
        lines.append(
            f"  rank {rank:<4} {parameter / 2**20:9.2f}  {gradient / 2**20:9.2f}  {state / 2**20:15.2f}  {in_flight:9}"
        )
    return "\n".join(lines)


class CollectiveCount(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context that records the collectives issued inside.

    Read the collectives with `take_each`, or their numbers with `issued` or `take`. `Trainer.step` takes the
    collectives after each phase of step 1.
    As a `TorchDispatchMode`, the counter sees collectives issued by any code, including DTensor.
    The axes of a collective are the mesh axes for which Weft first asked for the group; () for any other group.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._collectives: list[Collective] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor then runs local ops, and this mode sees the collectives among the local ops
        output = func(*args, **(kwargs or {}))
        kind = kind_of_op(func.namespace, func.__name__)
        if kind is not None:
            group = group_of_call(args)
            group = group_named(group) if isinstance(group, str) else group or dist.group.WORLD
            assert group is not None, "a collective has a group"
            nbytes = bytes_of_call(kind, group.size(), group.rank(), args, output)
            self._collectives.append(Collective(kind, axes_of_group(group.group_name), nbytes))
        return output

    @property
    def issued(self) -> Counter[str]:
        """Number of collectives of each kind since the last `take` or `take_each`. Nothing is reset."""
        return Counter(each.kind for each in self._collectives)

    def take(self) -> Counter[str]:
        """Return the number of collectives of each kind since the last call, and start again from zero."""
        return Counter(each.kind for each in self.take_each())

    def take_each(self) -> list[Collective]:
        """Return the collectives issued since the last call, in order, and start a new list."""
        collectives, self._collectives = self._collectives, []
        return collectives


@contextmanager
def profiled(folder: Path | None, rank: int) -> Iterator[Callable[[], None]]:
    """Context manager whose value is a function to call after each step.

    Traces the third to fifth steps of this process: a run resumed after 100 steps traces steps 103 to 105. The trace is
    written to FOLDER/rank-N.json, for chrome://tracing or Perfetto. Nothing is profiled if `folder` is None.
    """
    if folder is None:
        yield lambda: None
        return
    folder.mkdir(parents=True, exist_ok=True)

    def save(found: torch.profiler.profile) -> None:
        found.export_chrome_trace(str(folder / f"rank-{rank}.json"))

    # The first two steps include warm-up work. The profiler itself slows down the step before the recorded ones.
    steps = schedule(wait=PROFILED_FROM - 2, warmup=1, active=PROFILED_STEPS, repeat=1)
    # acc_events keeps the events of all cycles. There is a single cycle, but without the flag torch 2.11 warns.
    with profile(schedule=steps, on_trace_ready=save, acc_events=True) as profiler:
        yield profiler.step
