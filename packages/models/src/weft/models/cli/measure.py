"""`weft measure`: this machine's speed as a file, from which steps are predicted."""

from __future__ import annotations

import os
import signal
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from ..predict.chip import Chip, Rate
from ..predict.measure import Measuring, measure
from ..processes import ProcessFailed
from ..safe_files import check_writable, write_anew
from ..terminal import PROGRAM, printable
from ..train.memory_check import gpu_count
from .arguments import parse, report_bad_input

MOST_PROCESSES = 256
LONGEST = 3600.0  # seconds
BUSY = 0.5  # mean of running processes over the last minute above which a warning is printed
COMMENT = f"Written by {PROGRAM} measure: for {PROGRAM} explain --chip FILE and {PROGRAM} plan --chip FILE"
ABOUT = f"""\
  Measures this machine and writes a file for `{PROGRAM} explain --chip FILE` and `{PROGRAM} plan --chip FILE`. \
Measured are products of matrices, copies, Weft's ops forward and backward, AdamW, the host's time for an op, and \
collectives between processes. Other programs that run at the same time make the file wrong.

Examples
  {PROGRAM} measure
  {PROGRAM} measure --processes 4 --output cpu.toml
  {PROGRAM} measure --seconds 300

Processes
  On a machine with GPUs each process has a GPU. On a CPU the processes share the cores, as `{PROGRAM} train` shares \
them; a file is for runs with as many threads a process as it was measured with. OMP_NUM_THREADS sets another number.

Exit status
  0: done; 1: a process failed, or the file cannot be written; 2: input that cannot be used.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureOptions:
    """Measure this machine, for predictions."""

    output: Annotated[Path, tyro.conf.arg(metavar="FILE")] = Path("chip-here.toml")
    """The file to write, ending in .toml; one that exists is replaced."""
    processes: Annotated[
        int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="(default: one per GPU; on a CPU 2)")
    ] = None
    """Processes whose collectives are measured."""
    seconds: Annotated[float, tyro.conf.arg(metavar="FLOAT")] = 60.0
    """Time to take, about. In less time fewer and smaller sizes are measured."""


def run(arguments: list[str]) -> int:
    options = parse(MeasureOptions, arguments, command="measure", about=ABOUT)
    with report_bad_input("measure"):
        measuring = _check(options, gpu_count())
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(128 + signum))  # also ends the processes
    print(f"measuring with {_count(measuring.processes)}, for {measuring.seconds:g} s or a little more")
    busy = os.getloadavg()[0]
    if busy > BUSY:
        print(f"other programs keep {busy:.1f} cores busy; the measured times will be too long, and so the predictions")
    try:
        chip = measure(measuring)
        print(_table(chip), flush=True)
        write_anew(options.output, chip.as_toml(COMMENT).encode())
    except ProcessFailed as failure:
        print(f"\n{PROGRAM} measure: {printable(str(failure))}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"{PROGRAM} measure: {options.output} cannot be written: {error.strerror}", file=sys.stderr)
        return 1
    print(printable(f"wrote {options.output}; {PROGRAM} explain --chip {options.output} predicts a step here"))
    return 0


def _check(options: MeasureOptions, gpus: int) -> Measuring:
    """Check the options. gpus: of this machine. Raises ValueError for a wrong option."""
    processes = options.processes if options.processes is not None else gpus or min(2, os.cpu_count() or 1)
    if not 1 <= processes <= MOST_PROCESSES:
        raise ValueError(f"--processes is {processes}; give 1 to {MOST_PROCESSES}")
    if gpus and processes > gpus:
        raise ValueError(f"--processes is {processes}, and this machine has {gpus} GPUs; give {gpus} or less")
    if not 0 < options.seconds <= LONGEST:  # refuses nan, too
        raise ValueError(f"--seconds is {options.seconds:g}; give more than 0, and at most {LONGEST:g}")
    _check_output(options.output)
    return Measuring(processes=processes, seconds=options.seconds, gpus=gpus)


def _check_output(output: Path) -> None:
    """Raise ValueError for a file that could not be written after the measurement."""
    if output.suffix != ".toml":
        raise ValueError(f"--output {output} does not end in .toml; name it {output}.toml")
    try:
        if os.path.lexists(output) and not output.is_file() and not output.is_symlink():
            raise ValueError(f"--output {output} is no plain file; give another name")
        check_writable(output)
    except OSError as error:
        raise ValueError(
            f"--output {output} cannot be written: {error.strerror}; give a file in a folder that exists and that you "
            f"may write to"
        ) from None


def _table(chip: Chip) -> str:
    """The measured chip as lines of text."""
    lines = ["", f"{chip.name}; {chip.source}"]
    if chip.threads is not None:
        lines.append(f"  threads of a process       {chip.threads}")
    for dtype, peak in chip.peaks.items():
        count = sum(each.dtype == dtype for each in chip.products)
        lines.append(f"  products in {dtype:<14} up to {peak / 1e9:,.1f} GFLOP/s, {count} shapes")
    lines.append(f"  memory                     {chip.memory_bandwidth / 1e9:,.1f} GB/s in long copies")
    of_collectives = f", {chip.collective_host_seconds * 1e6:.0f} us a collective" if chip.threads is not None else ""
    lines.append(f"  host                       {chip.host_seconds * 1e6:.1f} us an op{of_collectives}")
    for level in chip.levels if chip.collectives else ():
        lines.append(f"  {level.name:<26} {level.bandwidth / 1e9:.2f} GB/s, {level.latency * 1e6:.0f} us a message")
    for kind, rate in chip.collectives.items():
        speed = f"{1e-9 / rate.seconds_per_byte:.2f} GB/s" if rate.seconds_per_byte else "any size"
        lines.append(f"    {kind:<24} {rate.seconds * 1e6:.0f} us and {speed}")
    if chip.crowding > 1:
        lines.append(f"  all processes at once      {chip.crowding:.3f} times the time alone")
    parts: dict[str, list[str]] = defaultdict(list)
    for key, rate in chip.ops.items():
        *names, part, dtype = key.split(".")
        if dtype == "float32" and part != "recompute":
            parts[".".join(names)].append(f"{part} {_in_words(rate)}")
    if parts:
        lines.append("  ops in float32, besides their products")
        lines += [f"    {name:<24} {'; '.join(each)}" for name, each in parts.items()]
    return "\n".join([*lines, ""])


def _in_words(rate: Rate) -> str:
    terms = [f"{rate.seconds * 1e6:.0f} us"]
    if rate.seconds_per_byte:
        terms.append(f"{rate.seconds_per_byte * 1e9:.3f} ns a byte")
    if rate.seconds_per_flop:
        terms.append(f"{rate.seconds_per_flop * 1e12:.1f} ps an operation")
    if rate.seconds_per_score:
        terms.append(f"{rate.seconds_per_score * 1e12:.1f} ps for each over the head's size")
    return " + ".join(terms)


def _count(processes: int) -> str:
    return "one process" if processes == 1 else f"{processes} processes"
