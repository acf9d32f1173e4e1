"""Compiles the kernels without a GPU and reports registers, spills, shared memory, access widths and inner loops.

    python -m weft.kernels.launching.aot                                # a table of all targets
    python -m weft.kernels.launching.aot --target sm_90 --json
    python -m weft.kernels.launching.aot --save benchmarks/results/aot  # what the tests expect of the installed triton

Each op declares its variants as `VARIANTS`, and further ones as `EXTRA_VARIANTS`, in its launch.py or in a variants.py
next to it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import groupby
from multiprocessing import get_context
from pathlib import Path
from typing import Any

# cuda_occupancy.h of the CUDA Toolkit: registers are given to a warp, and shared memory to a program, in these steps.
# A multiprocessor has four quarters with a quarter of the registers each, to which a program's warps go in turn.
REGISTERS_STEP, SHARED_STEP, QUARTERS = 256, 128, 4
SHARED_RESERVED = 1024  # per program; CUDA C++ Programming Guide, "Shared Memory" of compute capability 8.x to 10.x


@dataclass(frozen=True, slots=True)
class _Multiprocessor:
    """The limits of a multiprocessor."""

    warps: int  # resident at once
    programs: int  # resident at once
    registers: int  # of 32 bits
    shared_bytes: int


# CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
MULTIPROCESSORS = {
    "sm_80": _Multiprocessor(64, 32, 65536, 164 * 1024),
    "sm_90": _Multiprocessor(64, 32, 65536, 228 * 1024),
    "sm_100": _Multiprocessor(64, 32, 65536, 228 * 1024),
}


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


MODULES = (
    "weft.kernels.attention.variants",
    "weft.kernels.cross_entropy.launch",
    "weft.kernels.linear_cross_entropy.launch",
    "weft.kernels.random.launch",
    "weft.kernels.dropout.launch",
    "weft.kernels.matmul.variants",
    "weft.kernels.grouped_matmul.launch",
    "weft.kernels.experts.launch",
    "weft.kernels.rms_norm.launch",
    "weft.kernels.layer_norm.launch",
    "weft.kernels.swiglu.launch",
    "weft.kernels.rope.launch",
    "weft.kernels.embedding.launch",
    "weft.kernels.routing.launch",
)
TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")


@dataclass(frozen=True, slots=True)
class Variant:
    """One compilation of a kernel: the types of the arguments, the compile-time constants, and the launch options.

    Triton compiles a kernel anew for each of these. Ops list variants in `VARIANTS`, for `compile_variant`.
    """

    name: str
    kernel: Any
    # Argument name -> its Triton type ("*bf16", "i32"), followed by ":16" if the value is a multiple of 16; or a number
    # to compile in, such as a stride of "1"; or "None" for an optional argument left out.
    arguments: Mapping[str, str]
    constexprs: Mapping[str, int | str | None]
    warps: int
    stages: int = 3
    # Flops per byte loaded into shared memory in a matrix product's inner loop; None for kernels without a product.
    flop_per_byte: float | None = None
    # Target or prefix of targets ("sm_80", "gfx" for all of AMD) -> the variant launched there instead.
    elsewhere: Mapping[str, Variant] = field(default_factory=dict)

    def on(self, target: str) -> Variant:
        """The variant launched on `target`: from `elsewhere` if listed there, otherwise this one."""
        return next((variant for prefix, variant in self.elsewhere.items() if target.startswith(prefix)), self)


@dataclass(frozen=True, slots=True)
class VariantCost:
    """The cost of a variant compiled for one target. Made by `compile_variant`."""

    variant: str
    target: str
    registers: int  # per thread
    spill_bytes: int  # local memory, per thread
    shared_bytes: int  # per program
    warps: int  # per program
    flop_per_byte: float | None  # see `Variant`
    accesses: Mapping[str, int]  # global loads and stores by width in bits: {"load 128": 2}
    loop_accesses: Mapping[str, int]  # the accesses inside loops
    # Tensor-core instructions by kind and dtype, with the instructions to load tiles and to move registers between
    # warps: {"wgmma.mma_async bf16": 4, "cp.async.bulk.tensor": 6, "setmaxnreg": 8}
    tensor_core: Mapping[str, int]
    inner_tensor_core: Mapping[str, int]  # `tensor_core` of the innermost loops
    inner_instructions: int  # all instructions of the innermost loops, in PTX or AMD assembly

    @property
    def programs(self) -> int | None:
        """How many programs run at once on a multiprocessor; None for a target with unknown limits."""
        return programs_at_once(self.target, self.warps, self.registers, self.shared_bytes)

    @property
    def occupancy(self) -> float | None:
        """The share of a multiprocessor's warp slots in use; None for a target with unknown limits."""
        return occupancy(self.target, self.warps, self.registers, self.shared_bytes)


def variants() -> Iterator[Variant]:
    """The main variants of every op. Together they compile every branch of a kernel which a launch can take."""
    for module in MODULES:
        yield from importlib.import_module(module).VARIANTS


def extra_variants() -> Iterator[Variant]:
    """Further variants of some ops: the same branches as the main variants', in further launch configurations."""
    for module in MODULES:
        yield from getattr(importlib.import_module(module), "EXTRA_VARIANTS", ())


def _compile_all(targets: Iterable[str]) -> list[VariantCost]:
    """The reports of all variants, sorted by variant, then as `targets`. Each target is compiled in its own process."""
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        reports = [report for target_reports in pool.map(_compile_for, targets) for report in target_reports]
    return sorted(reports, key=lambda report: report.variant)


def _compile_for(target: str) -> list[VariantCost]:
    """The reports of all variants for a target. Runs in a process of its own."""
    return [compile_variant(variant, target) for variant in (*variants(), *extra_variants())]


def compile_variant(variant: Variant, target: str) -> VariantCost:
    """The report of a variant compiled for `target`: "sm_90", "sm_100", … or "gfx942", …

    Raises ValueError for an unknown kind of target, and for kernels imported under TRITON_INTERPRET, which cannot be
    compiled.
    """
    import triton
    from triton.compiler import ASTSource

    variant = variant.on(target)
    if not isinstance(variant.kernel, triton.JITFunction):
        raise ValueError(
            f"{variant.name} was imported under TRITON_INTERPRET, which cannot compile; unset TRITON_INTERPRET and "
            f"import the kernels anew"
        )
    signature, attributes = {}, {}
    constexprs: dict[str, Any] = dict(variant.constexprs)
    for position, (name, kind) in enumerate(variant.arguments.items()):
        kind, _, multiple = kind.partition(":")
        if kind == "None":
            constexprs[name], kind = None, "constexpr"
        elif kind.lstrip("-").isdigit():
            constexprs[name], kind = int(kind), "constexpr"
        signature[name] = kind
        if multiple:
            attributes[position,] = [["tt.divisibility", int(multiple)]]
    signature |= dict.fromkeys(variant.constexprs, "constexpr")
    compiled = triton.compile(
        ASTSource(variant.kernel, signature, constexprs, attributes),
        target=_gpu(target),
        options={"num_warps": variant.warps, "num_stages": variant.stages},
    )
    asm = compiled.asm
    usage = _usage_of_cubin(asm["cubin"]) if "cubin" in asm else _usage_of_amdgcn(asm["amdgcn"])
    code = asm["ptx"] if "ptx" in asm else asm["amdgcn"]
    inner = inner_loops(code)
    return VariantCost(
        variant.name,
        target,
        *usage,
        shared_bytes=compiled.metadata.shared,
        warps=compiled.metadata.num_warps,  # includes the warps added by warp specialization
        flop_per_byte=variant.flop_per_byte,
        accesses=accesses(code),
        loop_accesses=accesses(loops(code)),
        tensor_core=tensor_core(code),
        inner_tensor_core=tensor_core(inner),
        inner_instructions=instructions(inner),
    )


def accesses(code: str) -> dict[str, int]:
    """Count the global loads and stores in PTX or AMD assembly by their width in bits."""
    widths: Counter[str] = Counter()
    for kind, vector, bits in re.findall(r"\b(ld|st)\.global(?:\.\w+(?:::\w+)*)*?(?:\.v(\d))?\.[busf](\d+)\b", code):
        widths[f"{'load' if kind == 'ld' else 'store'} {int(vector or 1) * int(bits)}"] += 1
    # a pipelined loop's loads
    for size in re.findall(r"\bcp\.async\.c[ag]\.shared\.global[^;]*?\], (0x\w+|\d+)", code):
        widths[f"load {int(size, 0) * 8}"] += 1
    for kind, size in re.findall(r"\b(?:global|buffer|flat)_(load|store)_(dwordx?\d?|u?short|u?byte)", code):
        bits = {"d": 32, "s": 16, "b": 8}[size.lstrip("u")[0]]
        widths[f"{kind} {bits * int(size[-1]) if size[-1].isdigit() else bits}"] += 1
    return dict(sorted(widths.items()))


def loops(code: str) -> str:
    """The code inside loops, in PTX or AMD assembly: the blocks marked by LLVM's loop comments."""
    return "".join(block for block in _blocks(code) if re.search(r"(//|;) .*(\bin Loop:|Loop Header:)", block))


def inner_loops(code: str) -> str:
    """The code inside innermost loops, in PTX or AMD assembly."""
    blocks = _blocks(code)
    headers = [re.match(r"[$.]L(?:__)?(BB\w+)", block) for block in blocks if "This Inner Loop Header:" in block]
    inside = {f"in Loop: Header={header[1]} " for header in headers if header}
    return "".join(
        block for block in blocks if "This Inner Loop Header:" in block or any(each in block for each in inside)
    )


def _blocks(code: str) -> list[str]:
    """PTX or AMD assembly, cut at the labels of basic blocks."""
    return re.split(r"^(?=\$L__BB\d|\.LBB\d|(?://|;) %bb\.)", code, flags=re.MULTILINE)


def instructions(code: str) -> int:
    """Count the instructions in PTX or AMD assembly; directives, labels and comments are left out."""
    return len(re.findall(r"^\s+[@a-z].*(?<!:)$", code, flags=re.MULTILINE))


# Each pattern's last group is the factors' dtype: in PTX after the sums' dtype, for tcgen05 the kind, for AMD after
# the sizes.
_MULTIPLIES = (
    r"\b(wgmma\.mma_async|mma\.sync)\.\S*?\.f32\.(\w+)\.",
    r"\b(tcgen05\.mma)\.\S*?kind::(\w+)",
    r"\b(v_mfma)_f32_\d+x\d+x\d+_?([a-z]+\d+)",
)


def tensor_core(code: str) -> dict[str, int]:
    """Count the tensor-core instructions in PTX or AMD assembly by kind and dtype, with TMA loads and setmaxnreg."""
    kinds = Counter(" ".join(each) for pattern in _MULTIPLIES for each in re.findall(pattern, code))
    kinds.update(re.findall(r"\b(cp\.async\.bulk\.tensor|setmaxnreg)\.", code))
    return dict(sorted(kinds.items()))


def as_json(reports: Iterable[VariantCost]) -> str:
    """The reports as JSON, one report a line: a changed report is one changed line in a diff."""
    lines = [json.dumps(asdict(report) | {"occupancy": report.occupancy}) for report in reports]
    return "[\n" + ",\n".join(lines) + "\n]\n"


def as_table(reports: Iterable[VariantCost]) -> str:
    """The reports as a table to read, each variant above its targets.

    The occupancy column shows how many programs run at once on a multiprocessor, and their share of the warp slots. The
    inner loop column counts all instructions of the innermost loops, the next column the tensor-core ones by kind.
    """
    line = "  {:8}{:>9}{:>9}{:>8}{:>7}{:>13}{:>11}{:>12}  {:60}  {:50}  {}"
    names = ("", "registers", "spilled", "shared", "warps", "occupancy", "flop/byte", "inner loop")
    lines = [line.format(*names, "tensor cores in inner loop", "accesses, in bits", "accesses in loops")]
    for variant, target_reports in groupby(reports, key=lambda report: report.variant):
        lines.append(variant)
        for report in target_reports:
            costs = (report.registers, report.spill_bytes, report.shared_bytes, report.warps)
            measures = (
                "-" if report.occupancy is None else f"{report.programs}, {report.occupancy:.1%}",
                report.flop_per_byte or "-",
            )
            counts = map(_format_counts, (report.inner_tensor_core, report.accesses, report.loop_accesses))
            lines.append(line.format(report.target, *costs, *measures, report.inner_instructions, *counts).rstrip())
    return "\n".join(lines) + "\n"


def _format_counts(kinds: Mapping[str, int]) -> str:
    """A cell of the table: "load 128: 2, store 32: 1"."""
    return ", ".join(f"{kind}: {count}" for kind, count in kinds.items())


def save(reports: Iterable[VariantCost], folder: Path) -> None:
    """Write the reports to FOLDER/triton-<version>.json."""
    import triton

    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"triton-{triton.__version__}.json").write_text(as_json(reports))


def _gpu(target: str) -> Any:
    """Triton's GPUTarget of a target. Raises ValueError for an unknown kind of target."""
    from triton.backends.compiler import GPUTarget

    if match := re.fullmatch(r"sm_(\d+)", target):
        return GPUTarget("cuda", int(match[1]), 32)
    if re.fullmatch(r"gfx9\w+", target):
        return GPUTarget("hip", target, 64)
    raise ValueError(f"target is {target!r}; give an NVIDIA target such as 'sm_90', or an AMD target such as 'gfx942'")


def _usage_of_cubin(cubin: bytes) -> tuple[int, int]:
    """Registers and local bytes of a thread, from triton's `cuobjdump`."""
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(cubin)
        text = subprocess.run(
            [knobs.nvidia.cuobjdump.path, "-res-usage", str(file)], capture_output=True, text=True, check=True
        ).stdout
    usage = dict(re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text))
    return int(usage["REG"]), int(usage["STACK"]) + int(usage["LOCAL"])


def _usage_of_amdgcn(code: str) -> tuple[int, int]:
    """Registers and scratch bytes of a thread, from the metadata at the end of AMD assembly."""
    usage = dict(re.findall(r"\.(vgpr_count|private_segment_fixed_size):\s*(\d+)", code))
    return int(usage["vgpr_count"]), int(usage["private_segment_fixed_size"])


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m weft.kernels.launching.aot", description="Compile kernels without a GPU."
    )
    which = parser.add_mutually_exclusive_group()  # a saved file holds all targets
    which.add_argument("--target", action="append", help=f"may be repeated; default: all, {', '.join(TARGETS)}")
    which.add_argument("--save", type=Path, metavar="FOLDER", help="write FOLDER/triton-VERSION.json")
    parser.add_argument("--json", action="store_true", help="print JSON, not a table")
    options = parser.parse_args()
    reports = _compile_all(options.target or TARGETS)
    if options.save:
        save(reports, options.save)
    print(as_json(reports) if options.json else as_table(reports), end="")


if __name__ == "__main__":
    main()
