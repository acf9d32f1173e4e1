"""The memory of this machine, asked of the kernel and of the driver: torch takes seconds to import."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/")


@dataclass(frozen=True, slots=True)
class MachineMemory:
    """Bytes. total: all that processes can have, with swap; available: what they can have now, without swap."""

    total: int
    available: int


def cpu_memory(root: Path = _ROOT) -> MachineMemory | None:
    """The memory of the machine, within the limit of this process's control groups; None where the system does not say it.

    root: where /proc and /sys are.
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
    """The memory of the smallest GPU that this process may use; None where there is none."""
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
    """The limits of the control groups that this process is in, and of those around them, of versions 1 and 2."""
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
    try:
        return [int(file.read_text())]
    except (OSError, ValueError):  # "max" is no limit
        return []
