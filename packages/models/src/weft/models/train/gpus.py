"""The GPUs of this machine, from the CUDA driver: a call takes a millisecond, and importing torch takes seconds."""

from __future__ import annotations

import ctypes


def open_driver() -> tuple[ctypes.CDLL, int]:
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
        return open_driver()[1]
    except OSError:
        return 0


def gpu_bytes() -> list[int]:
    """The bytes of memory of each GPU available to this process."""
    try:
        driver, count = open_driver()
    except OSError:
        return []
    device, nbytes, found = ctypes.c_int(0), ctypes.c_size_t(0), []
    for number in range(count):
        is_there = driver.cuDeviceGet(ctypes.byref(device), number) == 0
        if is_there and driver.cuDeviceTotalMem_v2(ctypes.byref(nbytes), device) == 0:
            found.append(nbytes.value)
    return found
