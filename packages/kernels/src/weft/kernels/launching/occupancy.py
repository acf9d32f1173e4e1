"""Occupancy: the programs of a kernel at once on a multiprocessor, by warps, registers and shared memory."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Multiprocessor:
    """The limits of a multiprocessor."""

    warps: int  # resident at once
    programs: int  # resident at once
    registers: int  # of 32 bits
    shared_bytes: int


# CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
MULTIPROCESSORS = {
    "sm_80": Multiprocessor(64, 32, 65536, 164 * 1024),
    "sm_90": Multiprocessor(64, 32, 65536, 228 * 1024),
    "sm_100": Multiprocessor(64, 32, 65536, 228 * 1024),
}
# cuda_occupancy.h of the CUDA Toolkit: registers are given to a warp, and shared memory to a program, in these steps.
# A multiprocessor has four quarters with a quarter of the registers each, to which a program's warps go in turn.
REGISTERS_STEP, SHARED_STEP, QUARTERS = 256, 128, 4
SHARED_RESERVED = 1024  # per program; CUDA C++ Programming Guide, "Shared Memory" of compute capability 8.x to 10.x


def programs_at_once(target: str, warps: int, registers: int, shared_bytes: int) -> int | None:
    """How many programs run at once on a multiprocessor; None for a target not in MULTIPROCESSORS.

    warps, shared_bytes: of a program. registers: of a thread.
    """
    limits = MULTIPROCESSORS.get(target)
    if limits is None:
        return None
    warp_registers = _round_up(max(1, registers) * 32, REGISTERS_STEP)
    if warp_registers * _round_up(warps, QUARTERS) > limits.registers:
        return 0
    most_by_registers = limits.registers // QUARTERS // warp_registers * QUARTERS // warps
    most_by_shared = limits.shared_bytes // _round_up(shared_bytes + SHARED_RESERVED, SHARED_STEP)
    return min(limits.programs, limits.warps // warps, most_by_registers, most_by_shared)


def occupancy(target: str, warps: int, registers: int, shared_bytes: int) -> float | None:
    """The share of a multiprocessor's warp slots in use; None for a target not in MULTIPROCESSORS."""
    programs = programs_at_once(target, warps, registers, shared_bytes)
    return None if programs is None else programs * warps / MULTIPROCESSORS[target].warps


def _round_up(size: int, step: int) -> int:
    return -(-size // step) * step
