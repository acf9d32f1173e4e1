"""Attention's blocks: what a program keeps fits each chip, and larger heads or more options never get larger blocks."""

from __future__ import annotations

import importlib
import itertools

import pytest

SHARED_KIB = {  # shared memory that a program can have: CUDA C++ Programming Guide; AMD CDNA3 ISA
    "sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_90": 227, "sm_100": 227, "sm_120": 99, "gfx942": 64,
}  # fmt: skip
KERNELS = ["forward", "backward_queries", "backward_keys"]


@pytest.mark.parametrize("chip", SHARED_KIB)
@pytest.mark.parametrize("kernel", KERNELS)
def test_blocks_fit(kernel: str, chip: str) -> None:
    launch_of = importlib.import_module("weft.kernels.attention.launch").launch_of
    for dtype, masked, aligned in itertools.product(("bfloat16", "float32", "tf32"), (False, True), (True, False)):
        areas = []
        for block_d in (16, 32, 64, 128, 256):
            found = launch_of(kernel, chip, dtype, block_d, masked, aligned)
            itemsize = 2 if dtype == "bfloat16" else 4
            other = found.block_t if kernel == "backward_keys" else found.block_s
            own = found.block_s if kernel == "backward_keys" else found.block_t
            stages = 2 * other * block_d * itemsize * found.stages
            kept = 0 if chip == "gfx942" else (1 if kernel == "forward" else 2) * own * block_d * itemsize
            assert stages + kept <= (SHARED_KIB[chip] - 16) * 1024
            assert min(found.block_t, found.block_s) >= 16  # the least that tensor cores multiply
            areas.append(own * other)
        if chip != "sm_100":  # where small heads have 128 registers a thread
            assert areas == sorted(areas, reverse=True)
