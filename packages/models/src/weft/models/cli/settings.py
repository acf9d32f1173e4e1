"""What `weft train` and `weft explain` share: a run's configuration from arguments, checked before torch is imported."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..checks import check_tensor_parallel
from ..train.config import TrainConfig, settled_plan
from ..train.recipes import RECIPES, recipe, size_in_words
from ..train.toml import check_sum, read_toml
from .arguments import parse
from .resuming import config_to_resume, names_not_taken, on_a_mesh_that_fits, with_resume

DEFAULT_RECIPE = "llama-tiny"


def configured(arguments: Sequence[str], file: Path | None, *, command: str, about: str) -> tuple[str, TrainConfig]:
    """The recipe's name and its options: its own, then those of the run that goes on, of the file, and that are given.

    about: with {recipes} where they are listed, and {default} for the one that is taken where none is named. Raises ValueError.
    """
    given = list(arguments)
    asked = given.pop(0) if given and not given[0].startswith("-") else None
    of_file, options = (None, []) if file is None else read_toml(file)
    before = config_to_resume([*options, *given])
    if before is not None:
        check_sum(before)
    not_taken = names_not_taken([*options, *given])
    of_run, options_of_run = (None, []) if before is None else read_toml(before, without=not_taken)
    name = asked or of_file or of_run or DEFAULT_RECIPE
    for path, known in ((file, of_file), (before, of_run)):
        if known not in (None, name):
            raise ValueError(f"config {path} is of the recipe {known}, and {name} is asked for; leave out one of them")
    recipes = "\n".join(f"  {known}: {size_in_words(RECIPES[known].model)}" for known in RECIPES)
    about = about.format(recipes=recipes, default=DEFAULT_RECIPE)

    def parsed(options: list[str], default: TrainConfig) -> TrainConfig:
        return parse(
            TrainConfig, options, command=f"{command} [RECIPE]", about=about, default=default, compact_below=60
        )

    config = recipe(name)
    if options_of_run:
        config = on_a_mesh_that_fits(parsed(options_of_run, config), [*options, *given])
    if options:
        config = parsed(options, config)
    return name, parsed(with_resume(given), config)


def settled(config: TrainConfig, *, dp: int, cp: int, tp: int) -> TrainConfig:
    """The configuration with its mesh and plan as they are. Raises ValueError for what cannot be on that mesh."""
    check_tensor_parallel(config.model, tp)
    return replace(config, plan=settled_plan(config.plan, config, dp=dp, cp=cp, tp=tp))
