"""`weft check`: compare the training steps of golden files with the steps of today's program."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from ..predict.changes import Change, annotation, as_markdown, find_changes, summarize, totals
from ..predict.golden import Golden, read_golden
from ..terminal import PROGRAM, one_line, wrap_lines
from .arguments import OwnOptions, raising_mistakes, report_bad_input
from .explain import complete_configuration
from .golden_command import arguments_of, command_line, describe_ranks, with_mesh_of
from .hangs_command import OPTION, check_runs
from .settings import read_configuration

ABOUT = f"""\
usage: {PROGRAM} check GOLDEN [GOLDEN ...]
       {PROGRAM} check --hangs [RECIPE] [OPTIONS]

  Runs the training steps of golden files again, on shapes alone, and compares their collectives, bytes, memory and \
layouts with the files. `{PROGRAM} explain` writes a golden file with --save. No process is started, and no weights \
are made.

Examples
  {PROGRAM} check golden.json
  {PROGRAM} check ci/tp.golden.json ci/pp.golden.json
  {PROGRAM} check --hangs --mesh.pp 2 --mesh.dp 4

Option
  --hangs: match the collectives of all ranks, and show which ranks wait for one another for ever, if any do. Takes \
golden files or the options of train; `{PROGRAM} check --hangs --help` shows them.

Prints
  a line for each file that agrees; for the others every collective that is new, gone, or of another size, with the \
module and the line that issues it; memory and layouts, before and after; and the command that saves the file anew.
  Under GITHUB_ACTIONS=true also annotations; and a table into the file GITHUB_STEP_SUMMARY.

Exit status
  0: all files agree; 1: a step has changed, or hangs; 2: input that cannot be used.
"""


def run(arguments: list[str]) -> int:
    if OPTION in arguments:
        with report_bad_input("check"):
            return check_runs([each for each in arguments if each != OPTION])
    if {"-h", "--help"} & {*arguments}:
        print(wrap_lines(ABOUT, shutil.get_terminal_size().columns))
        return 0
    with report_bad_input("check"):
        paths = _parse(arguments)
        goldens = [read_golden(path) for path in paths]  # all are read before the first step runs
        has_changed = False
        for path, golden in zip(paths, goldens, strict=True):
            has_changed |= _check(path, golden)
    return int(has_changed)


def _parse(arguments: Sequence[str]) -> list[Path]:
    """The golden files. Raises ValueError for an unknown option, and without files."""
    parser = OwnOptions()
    parser.add_argument("goldens", nargs="*", type=Path)
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        raise ValueError(f"{unknown[0]!r} is not an option of check; `{PROGRAM} check --help` shows its use")
    if not options.goldens:
        raise ValueError(f"no golden file is given; save one with `{PROGRAM} explain … --save golden.json`")
    goldens: list[Path] = options.goldens
    return goldens


def _check(path: Path, saved: Golden) -> bool:
    """Run the step of a golden file again, and print the changes. Returns whether there are any."""
    now = _rerun(path, saved)
    changes = find_changes(saved, now)
    if not changes:
        count, nbytes = map(sum, zip(*map(totals, saved.ranks), strict=True))
        print(f"{path}: unchanged: {describe_ranks(saved)}, {count:,} collectives, {nbytes:,} bytes received")
        return False
    print(f"{path}: the step has changed")
    for change in changes:
        print(f"  {one_line(change.text)}")
        if change.code:
            print(f"    {one_line(change.code)}")
    for line in summarize(saved, now):
        print(f"  {line}")
    print(f"  if this is meant: {command_line(saved, path)}")
    _report_to_github(path, changes)
    return True


def _rerun(path: Path, saved: Golden) -> Golden:
    """The step of a golden file as of today. Raises ValueError, with the path, where the step cannot run."""
    try:
        arguments, config_file = arguments_of(saved.command, path.parent)
        with raising_mistakes("command.options"):
            name, config = read_configuration(arguments, config_file, command="explain", about="")
        config, axes = complete_configuration(name, with_mesh_of(config, saved), saved.command.batch)
        from ..train.guard import make_golden, ranks_of_stages  # imported here because torch takes seconds

        ranks = [each.rank for each in saved.ranks] if axes == saved.mesh else ranks_of_stages(axes)
        return make_golden(config, axes, saved.command, device_type=saved.device, ranks=ranks)
    except ValueError as error:
        raise ValueError(f"{path}: the step cannot be run again: {error}") from None


def _report_to_github(path: Path, changes: Sequence[Change]) -> None:
    """In a GitHub workflow, print annotations, and append a table to the job's summary."""
    if os.environ.get("GITHUB_ACTIONS") != "true":
        return
    workspace = Path(os.environ.get("GITHUB_WORKSPACE") or Path.cwd())
    for change in changes:
        print(annotation(change, path, workspace))
    if summary := os.environ.get("GITHUB_STEP_SUMMARY"):
        try:
            with open(summary, "a", encoding="utf-8") as file:
                file.write(as_markdown(path, changes) + "\n")
        except OSError as error:
            print(
                f"{PROGRAM} check: GITHUB_STEP_SUMMARY {one_line(summary)} cannot be written: {error.strerror}",
                file=sys.stderr,
            )
