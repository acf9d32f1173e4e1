"""Memory used by this process, and memory of the device. `Trainer` logs both."""

from __future__ import annotations

import os
import resource

import torch


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
