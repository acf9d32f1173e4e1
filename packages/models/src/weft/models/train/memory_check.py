"""Check a run against the memory of the machine, without torch.

`weft train` calls `check_room` before the run, and after the run for meshes that could be suggested. `check_room`
counts the bytes needed by every run: parameters, gradients and the optimizer's state. Only to count the parameters of a
user's model class, or of adapters, torch is imported. `cpu_memory` and `gpu_memory` give the memory of this machine's
CPU and GPUs, and `gpu_count` the number of GPUs. These functions ask the kernel and the CUDA driver directly: a call
takes a millisecond, and importing torch takes seconds.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ..checks import check_tensor_parallel
from ..config import MixtureConfig, ModelConfig
from ..processes import is_launched
from ..terminal import gib
from .config import state_tensors
from .model_class import count_adapters, count_block_matrices, parameters_of
from .recipes import RECIPES
from .run import Run
from .task_config import reference_of

_ROOT = Path("/")

BYTES = 4  # of a float32: the dtype of parameters, gradients and optimizer state
USED = 0.8  # share of the memory above which activations may not fit


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeed:
    """The sizes that determine the least memory of a run, on a GPU or on all processes of this machine."""

    parameters: int  # of the whole model, experts included
    processes: int  # processes on the device: 1 on a GPU, all processes of this machine on the CPU
    parts: int  # parts of the model, on different processes: pp * tp
    holders: int  # processes with the same part: dp * cp. ZeRO shards the part over these
    zero: int  # the plan's ZeRO level
    states: float  # state tensors per parameter, each of the parameter's size; a mean over the parameters
    compares: bool  # whether the loss of step 1 is also computed on a single process, with a whole model
    experts: int = 0  # parameters of experts on an axis "ep", for which the next two fields replace parts and holders
    expert_parts: int = 1  # parts of the experts, on different processes
    expert_holders: int = 1  # processes with the same part of the experts
    trained: float = 1.0  # share of the parameters with gradients and states; below 1 with adapters
    reference: float = 0.0  # parameters of a reference model on the device, all processes of the device together

    @property
    def nbytes(self) -> int:
        """Peak bytes of the device: in an update of the weights, or while the whole model for the comparison exists.

        Each process counts with an equal share, as if all parts of the model were equally large.
        Activations are not counted, and replicated tensors (norms, ...) count as sharded.
        """
        groups = (
            (self.parameters - self.experts, self.parts, self.holders),
            (self.experts, self.expert_parts, self.expert_holders),
        )
        updated, compared = 0.0, float(self.parameters if self.compares else 0)
        for count, parts, holders in groups:
            parameters, gradients, states = (1 / (holders if self.zero >= level else 1) for level in (3, 2, 1))
            copies = count * self.processes / parts
            updated += copies * (parameters + self.trained * (gradients + self.states * states))
            compared += copies * parameters if self.compares else 0
        return math.floor(BYTES * (self.reference + max(updated, compared)))


def check_room(run: Run, *, gpus: int) -> list[str]:
    """Compare the memory needed by a run with the memory of this machine.

    gpus: above 0 for a run on GPUs; 0 for a run on the CPU.
    Returns a line of warning if the run comes close to the memory, else an empty list, also where the memory is
    unknown.
    Raises ValueError if the run cannot fit; the error names options that would fit, if there are any.
    """
    memory, device = (gpu_memory(), "a GPU") if gpus else (cpu_memory(), "this machine")
    if memory is None:
        return []
    need = memory_need(run, on_gpus=bool(gpus))
    needs = f"needs at least {gib(need.nbytes, digits=1)} on {device}, without activations"
    if need.nbytes > memory.total:
        axes = " x ".join(f"{axis}={size}" for axis, size in run.axes.items())
        alternatives = ", or ".join(_alternatives(run, need, memory, on_gpus=bool(gpus)))
        raise ValueError(
            f"{run.title} on {axes} {needs}, and there are {gib(memory.total, digits=1)}; "
            + (f"would fit: {alternatives}" if alternatives else "give a smaller model")
        )
    if need.nbytes > USED * memory.usable:
        usable = gib(memory.usable, digits=1)
        room = f"a GPU has {usable}" if gpus else f"{usable} are free"
        return [f"memory may not suffice: the run {needs}, and {room}"]
    return []


def memory_need(run: Run, *, on_gpus: bool) -> MemoryNeed:
    """The `MemoryNeed` of a run: per GPU, or for all CPU processes on this machine."""
    config = run.config
    parameters = parameters_of(config.model, config.model_class)[0]
    states: float = state_tensors(config.optimizer)
    if config.optimizer.name == "muon":
        in_blocks = state_tensors(config.optimizer, in_block=True)
        share = count_block_matrices(config.model, config.model_class) / parameters
        states = share * in_blocks + (1 - share) * states
    adapters = count_adapters(config)
    ep, over_tp = config.mesh.ep, config.plan.experts_over_tp
    expert_parts = run.pp * ep * (1 if over_tp else run.tp)
    return MemoryNeed(
        experts=_experts_of(config.model) if ep > 1 else 0,
        expert_parts=expert_parts,
        expert_holders=run.processes // expert_parts,
        parameters=parameters,
        processes=1 if on_gpus else _local_processes(run),
        parts=run.pp * run.tp,
        holders=run.dp * run.cp,
        zero=config.plan.zero,
        states=states,
        compares=config.check and run.resume is None,
        trained=adapters / parameters if adapters else 1.0,
        reference=_reference(run, parameters, 1 if on_gpus else _local_processes(run)),
    )


def _reference(run: Run, parameters: int, processes: int) -> float:
    """The parameters of the run's reference model in the memory of `processes` processes; 0 without such a model."""
    config = run.config
    if reference_of(config) != "model":
        return 0.0
    pp, tp = config.reference_mesh.pp or run.pp, config.reference_mesh.tp or run.tp
    zero = config.reference_zero if config.reference_zero is not None else config.plan.zero
    return parameters * processes / (run.processes if zero == 3 else pp * tp)


def _experts_of(model: ModelConfig) -> int:
    """The parameters of a model's experts."""
    mixtures = (model.block(layer).experts for layer in model.sparse_layers) if isinstance(model, MixtureConfig) else ()
    return sum(
        3 * model.hidden_size * each.intermediate_size * each.num_experts for each in mixtures if each is not None
    )


def _local_processes(run: Run) -> int:
    """Processes of the run on this machine. 1 if the launcher does not tell."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if is_launched(os.environ) else run.processes


def _alternatives(run: Run, need: MemoryNeed, memory: MachineMemory, *, on_gpus: bool) -> Iterator[str]:
    """Yield fitting options, process counts and recipes, as text for the error."""

    def fits(candidate: MemoryNeed) -> bool:
        return candidate.nbytes <= USED * memory.usable

    options = next(
        (
            [f"--plan.zero {zero}"] * (zero > need.zero) + ["--no-check"] * (compares < need.compares)
            for compares in sorted({need.compares, False}, reverse=True)
            for zero in range(need.zero, 4)
            if fits(replace(need, zero=zero, compares=compares))
        ),
        [],
    )
    alone = replace(need, processes=1, parts=1, holders=1, experts=0)
    if options:
        yield " ".join(options)
    elif on_gpus:
        count = math.ceil(replace(alone, compares=False).nbytes / (USED * memory.usable))
        yield f"{count:,} such GPUs by --mesh.dp {count} --mesh.tp 1 --plan.zero 3 --no-check"
    elif not is_launched(os.environ) and fits(alone):
        yield "--mesh.dp 1 --mesh.tp 1"
    sizes = {name: config.model.num_parameters for name, config in RECIPES.items() if _can_split(config.model, run.tp)}
    smaller = {name: size for name, size in sizes.items() if fits(replace(need, parameters=size, experts=0))}
    if smaller and run.config.from_ is None and run.config.model_class is None:
        yield f"the recipe {max(smaller, key=smaller.__getitem__)}"


def _can_split(model: ModelConfig, tp: int) -> bool:
    """Whether tensor parallelism of degree `tp` can split the model."""
    try:
        check_tensor_parallel(model, tp)
    except ValueError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class MachineMemory:
    """Memory of the machine or of a GPU, in bytes."""

    total: int  # all memory, with swap
    usable: int  # on the CPU, free for processes now, without swap; on a GPU, all memory, used or free


def cpu_memory(root: Path = _ROOT) -> MachineMemory | None:
    """The machine's memory, within the limits of this process's control groups; None if the system does not tell.

    root: the folder that contains /proc and /sys; tests pass a folder of their own.
    """
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        kib = {name: int(value.split()[0]) for name, _, value in (line.partition(":") for line in lines)}
        total, available, swap = (1024 * kib[name] for name in ("MemTotal", "MemAvailable", "SwapTotal"))
    except (OSError, ValueError, KeyError, IndexError):
        return None
    limit = min([total, *_group_limits(root)])
    return MachineMemory(limit + swap, min(limit, available))


def gpu_memory() -> MachineMemory | None:
    """The memory of the smallest GPU available to this process, used or free; None without a GPU."""
    least = min(_gpu_bytes(), default=None)
    return None if least is None else MachineMemory(least, least)


def _group_limits(root: Path) -> list[int]:
    """Memory limits of this process's control groups and all their parents, for cgroup versions 1 and 2."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    limits = []
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            mount, file = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            mount, file = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        group = mount / path.lstrip("/")
        for folder in [group, *group.parents]:
            if folder.is_relative_to(mount):
                limits += _limit(folder / file)
    return limits


def _limit(file: Path) -> list[int]:
    """The limit in the file, as a list of one number; empty without a limit."""
    try:
        return [int(file.read_text())]
    except (OSError, ValueError):  # "max" means no limit
        return []


def _open_driver() -> tuple[ctypes.CDLL, int]:
    """The CUDA driver's library, and the number of GPUs available to this process.

    Raises OSError without a driver, and where the driver fails.
    """
    driver, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        raise OSError("the CUDA driver does not start")
    return driver, count.value


def gpu_count() -> int:
    """The number of GPUs available to this process."""
    try:
        return _open_driver()[1]
    except OSError:
        return 0


def _gpu_bytes() -> list[int]:
    """The bytes of memory of each GPU available to this process."""
    try:
        driver, count = _open_driver()
    except OSError:
        return []
    device, nbytes, sizes = ctypes.c_int(0), ctypes.c_size_t(0), []
    for number in range(count):
        exists = driver.cuDeviceGet(ctypes.byref(device), number) == 0
        if exists and driver.cuDeviceTotalMem_v2(ctypes.byref(nbytes), device) == 0:
            sizes.append(nbytes.value)
    return sizes
