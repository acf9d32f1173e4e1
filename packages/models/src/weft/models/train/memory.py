"""The memory that a process has used."""

from __future__ import annotations

import os
import resource

import torch


def peak_memory(device: torch.device) -> int:
    """Bytes at the most so far: of the device, or of the process where that is a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def total_memory(device: torch.device) -> int:
    """Bytes that there are: of the device, or of the machine, which processes share."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
