"""How many programs of a kernel a multiprocessor runs at once: by warps, registers and shared memory."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Multiprocessor:
    """What it has: warps and programs at once, 32-bit registers, bytes of shared memory."""

    warps: int
    programs: int
    registers: int
    shared_bytes: int


# CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
MULTIPROCESSORS = {
    "sm_80": Multiprocessor(64, 32, 65536, 164 * 1024),
    "sm_90": Multiprocessor(64, 32, 65536, 228 * 1024),
    "sm_100": Multiprocessor(64, 32, 65536, 228 * 1024),
}
# cuda_occupancy.h of the CUDA Toolkit: in these steps a warp is given registers, and a program shared memory; a quarter of a
# multiprocessor has a quarter of the registers, and a program's warps go round the quarters.
REGISTERS_STEP, SHARED_STEP, QUARTERS = 256, 128, 4
SHARED_RESERVED = 1024  # of each program; CUDA C++ Programming Guide, "Shared Memory" of compute capability 8.x to 10.x


def programs_at_once(target: str, warps: int, registers: int, shared_bytes: int) -> int | None:
    """How many programs a multiprocessor has at work; None of a target whose limits are not here.

    warps: of a program. registers: of a thread. shared_bytes: of a program.
    """
    limits = MULTIPROCESSORS.get(target)
    if limits is None:
        return None
    of_warp = _up(max(1, registers) * 32, REGISTERS_STEP)
    if of_warp * _up(warps, QUARTERS) > limits.registers:
        return 0
    by_registers = limits.registers // QUARTERS // of_warp * QUARTERS // warps
    by_shared = limits.shared_bytes // _up(shared_bytes + SHARED_RESERVED, SHARED_STEP)
    return min(limits.programs, limits.warps // warps, by_registers, by_shared)


def occupancy(target: str, warps: int, registers: int, shared_bytes: int) -> float | None:
    """The warps at work, of those that a multiprocessor could have."""
    programs = programs_at_once(target, warps, registers, shared_bytes)
    return None if programs is None else programs * warps / MULTIPROCESSORS[target].warps


def _up(size: int, step: int) -> int:
    return -(-size // step) * step
