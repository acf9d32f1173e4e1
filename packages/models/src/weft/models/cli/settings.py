"""What `weft train` and `weft explain` share: a run's configuration from arguments, checked before torch is imported."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..checks import check_tensor_parallel
from ..train.config import TrainConfig, settled_plan
from ..train.recipes import RECIPES, recipe, size_in_words
from ..train.toml import read_toml
from .arguments import parse

DEFAULT_RECIPE = "llama-tiny"
NEWEST = "newest"  # what --resume without a path stands for


def configured(arguments: Sequence[str], file: Path | None, *, command: str, about: str) -> tuple[str, TrainConfig]:
    """The recipe's name and its options: its own, then those of the file, then those that are given. Raises ValueError.

    about: with {recipes} where they are listed, and {default} for the one that is taken where none is named.
    """
    given = list(arguments)
    asked = given.pop(0) if given and not given[0].startswith("-") else None
    of_file, options = (None, []) if file is None else read_toml(file)
    if asked is not None and of_file not in (None, asked):
        raise ValueError(f"config {file} is of the recipe {of_file}, and {asked} is asked for; leave out one of them")
    name = asked or of_file or DEFAULT_RECIPE
    recipes = "\n".join(f"  {known}: {size_in_words(RECIPES[known].model)}" for known in RECIPES)
    config = recipe(name)
    given = _with_resume(given)
    for each in (options, given) if options else (given,):
        config = parse(
            TrainConfig,
            each,
            command=f"{command} [RECIPE]",
            about=about.format(recipes=recipes, default=DEFAULT_RECIPE),
            default=config,
            compact_below=60,
        )
    return name, config


def settled(config: TrainConfig, *, dp: int, cp: int, tp: int) -> TrainConfig:
    """The configuration with its mesh and plan as they are. Raises ValueError for what cannot be on that mesh."""
    check_tensor_parallel(config.model, tp)
    config = replace(config, plan=settled_plan(config.plan, config, dp=dp, cp=cp, tp=tp))
    processes = config.mesh.pp * dp * cp * tp
    if config.compile and config.plan.recompute == "selective" and processes > 1:
        raise ValueError(
            f"blocks that are recomputed selectively do not compile on a mesh of {processes} processes; leave --compile out, or "
            f"take --plan.recompute full"
        )
    return config


def _with_resume(arguments: Sequence[str]) -> list[str]:
    """The arguments, where `--resume` without a path has one that stands for it."""
    ended = [*arguments, "--"]
    return [
        f"{each}={NEWEST}" if each == "--resume" and ended[i + 1].startswith("-") else each
        for i, each in enumerate(arguments)
    ]
