"""Memory used by this process, and memory of its device. `Trainer` logs both."""

from __future__ import annotations

import os
import resource

import torch


def peak_memory(device: torch.device) -> int:
    """Peak bytes so far: allocated on a GPU, or resident in the process if `device` is a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def total_memory(device: torch.device) -> int:
    """Bytes of the GPU, or of the whole machine if `device` is a CPU. The machine's processes share them."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
