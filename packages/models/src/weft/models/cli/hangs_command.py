"""`weft check --hangs`: proves that no rank of a run's training step waits for ever, or shows the hang."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..predict.golden import read_golden
from ..terminal import PROGRAM, printable
from ..train.config import TrainConfig
from .arguments import OwnOptions
from .explain import complete_configuration
from .golden_command import arguments_of, with_mesh_of
from .settings import read_configuration

OPTION = "--hangs"
ABOUT = f"""\
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
        name, config = read_configuration(run_arguments, own.config, command=f"check {OPTION}", about=ABOUT)
        return _check(*complete_configuration(name, config, own.batch))
    if len(paths) < len(run_arguments) or own.config is not None or own.batch is not None:
        raise ValueError(f"with golden files, {OPTION} takes no recipe and no other options")
    goldens = [read_golden(path) for path in paths]
    has_hung = False
    for path, golden in zip(paths, goldens, strict=True):
        run_arguments, config_file = arguments_of(golden.command, path.parent)
        name, config = read_configuration(run_arguments, config_file, command="explain", about="")
        completed = complete_configuration(name, with_mesh_of(config, golden), golden.command.batch)
        has_hung |= bool(_check(*completed, before=f"{path}: "))
    return int(has_hung)


def _has_options(arguments: Sequence[str]) -> bool:
    return any(each.startswith("-") for each in arguments)


def _check(config: TrainConfig, axes: dict[str, int], before: str = "") -> int:
    """Check a run's step, and print the result after `before`. Returns 1 for a hang, else 0."""
    from ..train.guard import check_run  # imported here because torch takes seconds

    result = check_run(config, axes)
    print(before + printable(str(result)) if not result.hangs else before + str(result))
    return int(result.hangs)
