"""`python -m benchmarks.dashboard [--results DIR] [--output FILE]` writes the page, and says where it is."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import history
from benchmarks.dashboard import sources
from benchmarks.dashboard.page import page


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="./run dashboard", description="The page of the benchmarks' results.")
    results = "the history; benchmarks/results"
    parser.add_argument("--results", type=Path, default=history.RESULTS, metavar="DIR", help=results)
    parser.add_argument("--output", type=Path, default=Path("dashboard/index.html"), metavar="FILE")
    options = parser.parse_args(arguments)
    if not options.results.is_dir():
        sys.exit(f"dashboard: {options.results} is no folder; give the folder of a history to --results")
    found = sources.read(options.results)
    for line in found.problems:
        print(f"not read: {line}", file=sys.stderr)
    text = page(found)
    try:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(text)
    except OSError as error:
        sys.exit(f"dashboard: {options.output}: {error.strerror}; give another file to --output")
    devices = ", ".join(device.name for device in found.devices) or "no device"
    print(f"The page is {options.output}: {len(text.encode()) / 1e6:.2f} MB, {devices}.")


if __name__ == "__main__":
    main()
