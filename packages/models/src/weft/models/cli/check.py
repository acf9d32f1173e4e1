"""`weft check`: compare the training steps of golden files with the steps of today's program.

`weft check --hangs` proves that no rank of a run's training step waits for ever, or shows the hang.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from ..predict.changes import Change, annotation, as_markdown, find_changes, summarize, totals
from ..predict.golden import Golden, read_golden
from ..terminal import PROGRAM, one_line, printable, wrap_lines
from ..train.config import TrainConfig
from .arguments import OwnOptions, raising_mistakes, report_bad_input
from .earlier_runs import arguments_of, command_line, describe_ranks, with_mesh_of
from .explain import complete_configuration
from .settings import read_configuration

OPTION = "--hangs"
HANGS_ABOUT = f"""\
  Runs a training step on shapes as each rank of a mesh, or on a mesh of more than 64 ranks as a few ranks of each \
kind, and matches their collectives, messages and waits. No process is started. Takes the options of train, or golden \
files.

Examples
  {PROGRAM} check {OPTION} --mesh.pp 2 --mesh.dp 4
  {PROGRAM} check {OPTION} llama3-8b --mesh.dp 256 --mesh.tp 8
  {PROGRAM} check {OPTION} golden.json

Recipes
{{recipes}}
  The options below show the defaults of the named recipe, or of {{default}} without a name.

Options of check alone
  --batch ROWS,TOKENS: as for explain.
  --config FILE: as for explain.

Prints
  a line where no rank waits for another for ever; otherwise the calls of two ranks that do not meet, beside one \
another, and which rank waits for which.

Exit status
  0: no rank waits for ever; 1: the step hangs; 2: input that cannot be used.
"""


def check_runs(arguments: Sequence[str]) -> int:
    """Check golden files or a run for hangs, and print the results. Returns the exit status.

    arguments: of `weft check`, without --hangs. Raises ValueError for wrong arguments.
    """
    parser = OwnOptions()
    parser.add_argument("--config", type=Path)
    parser.add_argument("--batch")
    own, run_arguments = parser.parse_known_args(arguments)
    paths = [Path(each) for each in run_arguments if each.endswith(".json")] if not _has_options(run_arguments) else []
    if not paths:
        name, config = read_configuration(run_arguments, own.config, command=f"check {OPTION}", about=HANGS_ABOUT)
        return _check_hangs(*complete_configuration(name, config, own.batch))
    if len(paths) < len(run_arguments) or own.config is not None or own.batch is not None:
        raise ValueError(f"with golden files, {OPTION} takes no recipe and no other options")
    goldens = [read_golden(path) for path in paths]
    has_hung = False
    for path, golden in zip(paths, goldens, strict=True):
        run_arguments, config_file = arguments_of(golden.command, path.parent)
        name, config = read_configuration(run_arguments, config_file, command="explain", about="")
        completed = complete_configuration(name, with_mesh_of(config, golden), golden.command.batch)
        has_hung |= bool(_check_hangs(*completed, before=f"{path}: "))
    return int(has_hung)


def _has_options(arguments: Sequence[str]) -> bool:
    return any(each.startswith("-") for each in arguments)


def _check_hangs(config: TrainConfig, axes: dict[str, int], before: str = "") -> int:
    """Check a run's step, and print the result after `before`. Returns 1 for a hang, else 0."""
    from ..train.explained_step import check_run  # imported here because torch takes seconds

    result = check_run(config, axes)
    print(before + printable(str(result)) if not result.hangs else before + str(result))
    return int(result.hangs)


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
        from ..train.explained_step import make_golden, ranks_of_stages  # imported here because torch takes seconds

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
