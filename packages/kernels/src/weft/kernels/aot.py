"""Compiles the kernels without a GPU and reports what they cost: registers, spills, shared memory, access widths.

    python -m weft.kernels.aot --target sm_90

prints one JSON line for each variant. A room declares its variants as `VARIANTS` in its launch.py.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOMS = (
    "weft.kernels.cross_entropy.launch",
    "weft.kernels.linear_cross_entropy.launch",
    "weft.kernels.random.launch",
    "weft.kernels.dropout.launch",
)


@dataclass(frozen=True, slots=True)
class Variant:
    """A kernel with the types of its arguments, as one launch would specialize it.

    arguments: name -> a Triton type ("*bf16", "i32"), with ":16" where the value is a multiple of 16, or a number
        that the launch compiles in, such as a stride of "1".
    """

    name: str
    kernel: Any
    arguments: Mapping[str, str]
    constexprs: Mapping[str, int]
    warps: int
    stages: int = 3


@dataclass(frozen=True, slots=True)
class Report:
    """What a compiled kernel costs.

    registers: for each thread.  spill_bytes: local memory for each thread.  shared_bytes: for each program.
    accesses: how many global loads and stores of each width the code has: {"load 128": 2}, in bits.
    """

    variant: str
    target: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    accesses: Mapping[str, int] = field(default_factory=dict)


def variants() -> Iterator[Variant]:
    """Every variant of every room."""
    for room in ROOMS:
        yield from importlib.import_module(room).VARIANTS


def compile_variant(variant: Variant, target: str) -> Report:
    """The report of a variant compiled for a target: "sm_90", "sm_100", … or "gfx942", …

    Raises ValueError for another kind of target, and while TRITON_INTERPRET is set, which makes kernels uncompilable.
    """
    import triton
    from triton.compiler import ASTSource

    if not isinstance(variant.kernel, triton.JITFunction):
        raise ValueError(f"{variant.name} was imported to be interpreted; unset TRITON_INTERPRET to compile it")
    signature, constexprs, attributes = {}, dict(variant.constexprs), {}
    for position, (name, kind) in enumerate(variant.arguments.items()):
        kind, _, multiple = kind.partition(":")
        if kind.lstrip("-").isdigit():
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
    return Report(variant.name, target, *usage, shared_bytes=compiled.metadata.shared, accesses=accesses(code))


def accesses(code: str) -> dict[str, int]:
    """The global loads and stores in PTX or in AMD assembly, counted by their width in bits."""
    widths: Counter[str] = Counter()
    for kind, vector, bits in re.findall(r"\b(ld|st)\.global(?:\.\w+(?:::\w+)*)*?(?:\.v(\d))?\.[busf](\d+)\b", code):
        widths[f"{'load' if kind == 'ld' else 'store'} {int(vector or 1) * int(bits)}"] += 1
    for kind, size in re.findall(r"\b(?:global|buffer|flat)_(load|store)_(dwordx?\d?|u?short|u?byte)", code):
        bits = {"d": 32, "s": 16, "b": 8}[size.lstrip("u")[0]]
        widths[f"{kind} {bits * int(size[-1]) if size[-1].isdigit() else bits}"] += 1
    return dict(sorted(widths.items()))


def _gpu(target: str) -> Any:
    from triton.backends.compiler import GPUTarget

    if match := re.fullmatch(r"sm_(\d+)", target):
        return GPUTarget("cuda", int(match[1]), 32)
    if re.fullmatch(r"gfx9\w+", target):
        return GPUTarget("hip", target, 64)
    raise ValueError(f"target is {target!r}; give an NVIDIA one such as 'sm_90', or an AMD one such as 'gfx942'")


def _usage_of_cubin(cubin: bytes) -> tuple[int, int]:
    """Registers and local bytes of a thread, as the `cuobjdump` that comes with triton states them."""
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
    parser = argparse.ArgumentParser(prog="python -m weft.kernels.aot", description="Compile kernels without a GPU.")
    parser.add_argument("--target", default="sm_90", help="sm_80, sm_90, sm_100, … or gfx942, …")
    target = parser.parse_args().target
    for variant in variants():
        print(json.dumps(asdict(compile_variant(variant, target))), flush=True)


if __name__ == "__main__":
    main()
