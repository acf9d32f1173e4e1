"""The configuration of a run, for `weft train` and commands with its options; checked as far as possible without torch.

With `--resume`, options which are not given come from the earlier run's config.toml; the mesh only if it can be used
again.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import field, fields, make_dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

from ..checks import check_tensor_parallel
from ..config import ModelConfig
from ..terminal import PROGRAM
from ..train.config import MeshConfig, OptimizerConfig, TrainConfig
from ..train.folder import CONFIG, find_to_resume, newest_complete
from ..train.from_folder import contradictions, find_model, find_origin, model_of
from ..train.launch import CPU_PROCESSES, launched_processes, processes_for
from ..train.memory_check import gpu_count
from ..train.model_class import config_class_of
from ..train.recipes import RECIPES, WITHOUT_RECIPE, recipe, size_in_words
from ..train.run import complete_plan, mesh_sizes
from ..train.toml import check_sum, read_toml
from .arguments import HELP_OPTIONS, OwnOptions, parse

NEWEST = "newest"  # the value of --resume without a path

DEFAULT_RECIPE = "llama-tiny"
TASK_LENGTH = 1024  # tokens, as in trl
PREFERENCE_RATES = {"dpo": 1e-6, "kto": 1e-6}  # trl's default learning rates, of training without adapters


def read_configuration(
    arguments: Sequence[str], file: Path | None, *, command: str, about: str
) -> tuple[str | None, TrainConfig]:
    """The recipe's name (None without a recipe) and the configuration, for `weft train` and commands with its options.

    Four sources give options, and later sources override earlier: the recipe, the resumed run's config.toml, the
    --config file, the command line.
    arguments: the command's arguments, without options that are no part of a run's configuration, such as --config.
    file: the value of --config, None where not given.
    command: of `weft`, such as "train", for the help text.
    about: the help text, with {recipes} for the list of recipes and {default} for the default recipe.
    Raises ValueError for unusable input, such as a --model option which contradicts the folder of --from.
    """
    own_arguments = list(arguments)
    named_recipe = own_arguments.pop(0) if own_arguments and not own_arguments[0].startswith("-") else None
    file_recipe, options = (None, []) if file is None else read_toml(file)
    resumed_config = _config_to_resume([*options, *own_arguments])
    if resumed_config is not None:
        check_sum(resumed_config)
    ignored_options = _options_not_resumed([*options, *own_arguments])
    run_recipe, run_options = (
        (None, []) if resumed_config is None else read_toml(resumed_config, without=ignored_options)
    )
    all_arguments = [*run_options, *options, *own_arguments]
    model = _model_options().parse_known_args(all_arguments)[0]
    has_own_model = model.from_ is not None or model.model_class is not None
    name = named_recipe or file_recipe or run_recipe or (None if has_own_model else DEFAULT_RECIPE)
    for path, known in ((file, file_recipe), (resumed_config, run_recipe)):
        if known not in (None, name):
            raise ValueError(f"config {path} is of the recipe {known}, but {name} is asked for; leave out one of them")
    if {*HELP_OPTIONS}.isdisjoint(all_arguments):
        about = ""  # counting the parameters of every recipe takes a twentieth of a second
    else:
        recipes = "\n".join(f"  {known}: {size_in_words(RECIPES[known].model)}" for known in RECIPES)
        about = about.format(recipes=recipes, default=DEFAULT_RECIPE)

    def parse_options(options: list[str], default: TrainConfig, file: Path | None = None) -> TrainConfig:
        return parse(
            *(TrainConfig, options),
            command=f"{command} [RECIPE]",
            about=about,
            default=default,
            compact_below=60,
            file=file,
        )

    origin = None
    if model.from_ is not None:
        resumed_checkpoint = _checkpoint_to_resume(model.output, model.resume)
        if resumed_checkpoint is not None and resumed_config is None:
            raise ValueError(
                f"--from {model.from_} begins a new run, but --resume continues {resumed_checkpoint}; give only one "
                f"of them"
            )
        origin = find_origin(model.from_, resumed_checkpoint)
        if model.model_class is None:
            _check_options(model_of(origin), all_arguments, model.from_)
    user_model = None
    if model.model_class is not None:
        _find_modules_in_current_folder()
        user_model = _user_model_config(model.model_class, all_arguments, command)
    config = base_configuration(name, origin, user_model, task=model.task)
    if run_options:
        config = drop_unusable_mesh(parse_options(run_options, config, resumed_config), [*options, *own_arguments])
    if options:
        config = parse_options(options, config, file)
    return name, parse_options(_complete_options(own_arguments), config)


def base_configuration(
    name: str | None, origin: Path | None, user_model: ModelConfig | None = None, task: str = "pretrain"
) -> TrainConfig:
    """The defaults for a run's options: the configuration of the recipe, with the model of --from or of --model.

    name: of the recipe; None: the options of training are `WITHOUT_RECIPE`, and for tasks other than pretrain, examples
    have up to TASK_LENGTH tokens. Sequences are never longer than the model's max_seq_len.
    origin: the folder with the model of --from. user_model: the config of the user's model class. task: of --task.
    Raises ValueError for an unknown recipe, for a folder without a known model, and if --model and --from both give a
    model.
    """
    if name is not None:
        base = recipe(name)
    else:
        base = WITHOUT_RECIPE if origin is not None else replace(WITHOUT_RECIPE, optimizer=OptimizerConfig())
    model = user_model
    if origin is not None and user_model is None:
        model = model_of(origin)
    elif origin is not None and find_model(origin) is not None:
        raise ValueError(
            f"--model names a class, but {origin} has a model of its own in config.json; "
            f"give only one of --model and --from"
        )
    if model is None:
        return base
    if name is None and origin is not None and task in PREFERENCE_RATES:
        base = replace(base, optimizer=replace(base.optimizer, lr=PREFERENCE_RATES[task]))
    usual = TASK_LENGTH if name is None and task != "pretrain" else base.data.sequence_length
    length = min(usual, model.max_seq_len)
    return replace(base, model=model, data=replace(base.data, sequence_length=length))


def base_of(name: str | None, config: TrainConfig) -> TrainConfig:
    """`base_configuration` of a complete configuration. name: of the recipe; None without."""
    model = config.model if config.model_class is not None else None
    return base_configuration(name, origin_of(config), model, config.task)


def origin_of(config: TrainConfig) -> Path | None:
    """The folder with the config, weights and tokenizer that a run with --from begins with; None without --from.

    For a resumed run the folder is the checkpoint, for a new run the folder of --from.
    """
    if config.from_ is None:
        return None
    return find_origin(config.from_, _checkpoint_to_resume(config.output, config.resume))


def with_complete_plan(config: TrainConfig, *, dp: int, cp: int, tp: int) -> TrainConfig:
    """The configuration with each unset plan option filled in for the mesh, for `weft train` and `weft explain`.

    Raises ValueError for an impossible plan.
    """
    check_tensor_parallel(config.model, tp)
    return replace(config, plan=complete_plan(config.plan, config, dp=dp, cp=cp, tp=tp))


def _model_options() -> OwnOptions:
    """A parser of the options that decide about model and defaults: --from, --model, --task, and `_resume_options`."""
    parser = _resume_options()
    parser.add_argument("--from", type=Path, dest="from_")
    parser.add_argument("--model", dest="model_class")
    parser.add_argument("--task", default="pretrain")
    return parser


def _find_modules_in_current_folder() -> None:
    """Make Python find modules in the current folder, as `python -m` does."""
    current_folder = str(Path.cwd())
    if not {"", current_folder} & set(sys.path):
        sys.path.insert(0, current_folder)


def _user_model_config(name: str, arguments: Sequence[str], command: str) -> ModelConfig:
    """The config of the user's model class, from the --model options in the arguments.

    With --help, shows these options and exits. Raises ValueError for a class that cannot be found.
    """
    wrapper = make_dataclass("Options", [("model", config_class_of(name))], frozen=True, kw_only=True)
    help_flags = [each for each in arguments if each in HELP_OPTIONS]
    about = f"  The options of the model {name}. `{PROGRAM} {command} --help` has all others.\n"
    parsed: Any = parse(
        wrapper, help_flags or _options_of_model(arguments), command=f"{command} --model {name}", about=about
    )
    config: ModelConfig = parsed.model
    return config


def _check_options(model: ModelConfig, arguments: Sequence[str], path: Path) -> None:
    """Raise ValueError if a --model option contradicts the config of the model in the folder `path`.

    The error shows both values. Values are compared before a config is made, because the sizes of two models may not
    form a valid config.
    """
    options = _options_of_model(arguments)
    if not options:
        return
    hints = get_type_hints(type(model), include_extras=True)
    names = [each.name for each in fields(model)]
    unset: list[Any] = [(name, hints[name], field(default=getattr(model, name))) for name in names]
    unchecked = make_dataclass(type(model).__name__, unset, frozen=True, kw_only=True)
    wrapper = make_dataclass("Options", [("model", unchecked, field(default=unchecked()))], frozen=True, kw_only=True)
    parsed: Any = parse(wrapper, options, command="train --from FOLDER", about="").model
    values = {name: getattr(parsed, name) for name in names}
    contradicting = [
        f"--model.{name.replace('_', '-')} {value!r} contradicts {name} {known!r} of --from {path}"
        for name, known, value in contradictions(model, values)
    ]
    if contradicting:
        raise ValueError(f"{'; '.join(contradicting)}; leave the option out, or train a new model without --from")


def _options_of_model(arguments: Sequence[str]) -> list[str]:
    """The --model.* options among the arguments, each with its values."""
    found, is_model_option = list[str](), False
    for each in arguments:
        if each.startswith("--"):
            is_model_option = each.startswith("--model.")
        if is_model_option:
            found.append(each)
    return found


def _complete_options(arguments: Sequence[str]) -> list[str]:
    """The arguments, with values for options that may stand alone: NEWEST for `--resume`, 1 for `--digests`."""
    ended, values = [*arguments, "--"], {"--resume": NEWEST, "--digests": "1"}
    return [
        f"{each}={values[each]}" if each in values and ended[i + 1].startswith("-") else each
        for i, each in enumerate(arguments)
    ]


def _config_to_resume(arguments: Sequence[str]) -> Path | None:
    """The config.toml of the run to resume; None for a new run, or without such a file."""
    options, _ = _resume_options().parse_known_args(arguments)
    if options.resume is None:
        return None
    path = Path(options.resume)
    folders = [options.output] if options.resume == NEWEST else [path, path.parent]
    return next((folder / CONFIG for folder in folders if folder is not None and (folder / CONFIG).is_file()), None)


def _resume_options() -> OwnOptions:
    """A parser of --output and --resume, which determine the run to resume."""
    parser = OwnOptions()
    parser.add_argument("--output", type=Path)
    parser.add_argument("--resume", nargs="?", const=NEWEST)
    return parser


def _checkpoint_to_resume(output: Path | None, resume: str | None) -> Path | None:
    """The checkpoint to resume from; None for a new run, or without a checkpoint.

    Raises ValueError and DamagedCheckpoint as `find_to_resume`.
    """
    if resume == NEWEST:
        return None if output is None else newest_complete(output)[0]
    return None if resume is None else find_to_resume(Path(resume))


def _options_not_resumed(arguments: Sequence[str]) -> tuple[str, ...]:
    """Names of options to ignore in a resumed run's config.toml: where to write, and where to send metrics.

    The file may come from a stranger, and must not choose these places. "track" is ignored with --resume PATH only:
    without PATH, the file is in --output, the folder of the user's own run.
    """
    options, _ = _resume_options().parse_known_args(arguments)
    return ("output", "resume", "profile", *(() if options.resume == NEWEST else ("track",)))


def sizes_for_processes(config: TrainConfig) -> tuple[int, int, int]:
    """(dp, cp, tp) for the processes of the launcher, or for the processes to start on this machine.

    Raises ValueError as `mesh_sizes`, and for more processes than this machine has GPUs.
    """
    mesh, world, gpus = config.mesh, launched_processes(), gpu_count()
    if world is not None:
        return mesh_sizes(mesh, world, every_process=True)
    count = gpus or CPU_PROCESSES
    if mesh.dp is not None:
        count = min(processes_for(mesh, gpus=gpus), gpus or sys.maxsize)
    return mesh_sizes(mesh, count, every_process=False)


def drop_unusable_mesh(config: TrainConfig, arguments: Sequence[str]) -> TrainConfig:
    """The config of a resumed run. If its mesh cannot be used again, the mesh and the mesh's plan options are reset.

    The mesh cannot be used again if any --mesh option is given, or if there are too few processes.
    arguments: those of the --config file and of the command.
    """
    try:
        sizes_for_processes(config)
        fits = not any(each.startswith("--mesh.") for each in arguments)
    except ValueError:
        fits = False
    if fits:
        return config
    plan = config.plan
    if not _has_axis("pp", arguments):
        plan = replace(plan, schedule=None, split=None)  # these belong to the old pipeline
    if not _has_axis("ep", arguments):
        plan = replace(plan, experts_tokens=None, experts_over_tp=False)  # these belong to the old mesh of experts
    return replace(config, mesh=MeshConfig(), plan=plan)


def _has_axis(axis: str, arguments: Sequence[str]) -> bool:
    """Whether the command gives the mesh's axis a size other than 1."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(f"--mesh.{axis}", dest="size", nargs="?", default="1")
    return bool(parser.parse_known_args(arguments)[0].size != "1")
