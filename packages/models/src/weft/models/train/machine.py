"""The memory of this machine's CPU and GPUs, to check whether a run fits.

Asks the kernel and the CUDA driver directly, because importing torch takes seconds.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/")


@dataclass(frozen=True, slots=True)
class MachineMemory:
    """Memory of the machine or of a GPU, in bytes."""

    total: int  # all memory, with swap
    available: int  # free for processes now, without swap


def cpu_memory(root: Path = _ROOT) -> MachineMemory | None:
    """The machine's memory, within the limits of this process's control groups; None if the system does not tell.

    root: the folder that contains /proc and /sys; tests pass a folder of their own.
    """
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
        total, available, swap = (1024 * kib[name] for name in ("MemTotal", "MemAvailable", "SwapTotal"))
    except (OSError, ValueError, KeyError, IndexError):
        return None
    limit = min([total, *_group_limits(root)])
    return MachineMemory(limit + swap, min(limit, available))


def gpu_memory() -> MachineMemory | None:
    """The memory of the smallest GPU available to this process; None without a GPU."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    count, device, nbytes = ctypes.c_int(0), ctypes.c_int(0), ctypes.c_size_t(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return None
    found = []
    for number in range(count.value):
        is_there = driver.cuDeviceGet(ctypes.byref(device), number) == 0
        if is_there and driver.cuDeviceTotalMem_v2(ctypes.byref(nbytes), device) == 0:
            found.append(nbytes.value)
    return MachineMemory(min(found), min(found)) if found else None


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
