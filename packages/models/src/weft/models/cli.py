"""The `weft` command."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from .llama.config import check_tensor_parallel
from .train.config import Run, TrainConfig, mesh_sizes
from .train.data import check_enough, find_corpus
from .train.launch import CPU_PROCESSES, gpu_count, launch, launched_processes
from .train.recipes import RECIPES, recipe
from .train.report import describe

DEFAULT_RECIPE = "llama-tiny"
NO_SUBCOMMANDS = (tyro.conf.AvoidSubcommands,)  # a rope scaling that the recipe has not is not to be chosen here
USAGE = """usage: weft COMMAND ...

  weft train [RECIPE] [--mesh.dp 2 --mesh.tp 2 ...]   train a model on a mesh of processes; --help lists every option
  weft generate FOLDER --prompt TEXT                  let a trained model go on with a text
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateOptions:
    """Let a trained model go on with a text."""

    folder: Annotated[Path, tyro.conf.Positional]
    """A checkpoint of a byte-level model, as `weft train` saves it."""
    prompt: str
    tokens: int = 200
    """How many to generate."""
    temperature: float = 0.7
    """0 takes the likeliest token."""
    seed: int = 0


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs a command; exits with 0, with 1 where a run stopped, and with 2 for input that cannot be used."""
    command, *rest = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    commands = {"train": _train, "generate": _generate}
    if command in ("-h", "--help"):
        print(USAGE, end="")
        return
    if command not in commands:
        _refuse(f"unknown command {command!r}; the commands are {', '.join(commands)}")
    sys.exit(commands[command](rest))


@contextmanager
def _refusing(command: str) -> Iterator[None]:
    """Input that cannot be used is one line, and status 2; what goes wrong later keeps its traceback."""
    try:
        yield
    except ValueError as error:
        _refuse(f"{command}: {error}")


def _refuse(message: str) -> None:
    print(f"weft {message}", file=sys.stderr)
    sys.exit(2)


def _train(arguments: list[str]) -> int:
    with _refusing("train"):
        run, gpus = _settle(arguments)
    if os.environ.get("RANK", "0") == "0":
        print(describe(run, gpus=gpus), flush=True)
    return launch(run, gpus=gpus)


def _settle(arguments: list[str]) -> tuple[Run, int]:
    """The run that the arguments ask for, everything checked, and the number of GPUs. Raises ValueError."""
    name = arguments.pop(0) if arguments and not arguments[0].startswith("-") else DEFAULT_RECIPE
    config = tyro.cli(
        TrainConfig,
        default=recipe(name),
        args=arguments,
        prog=f"weft train {name}",
        description=f"Trains a model on a mesh of processes. Recipes: {', '.join(RECIPES)}.",
        config=NO_SUBCOMMANDS,
    )
    gpus, world = gpu_count(), launched_processes()
    dp, tp = mesh_sizes(config.mesh, world or gpus or CPU_PROCESSES, exact=world is not None)
    check_tensor_parallel(config.model, tp)
    corpus = find_corpus(config.data.path)
    check_enough(corpus, config.data.sequence_length)
    folder = config.output or Path("outputs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    if folder.exists():
        raise ValueError(f"the output folder {folder} exists; give another with --output, or remove it")
    return Run(recipe=name, config=config, corpus=corpus, dp=dp, tp=tp, folder=folder), gpus


def _generate(arguments: list[str]) -> int:
    options = tyro.cli(GenerateOptions, args=arguments, prog="weft generate")
    import torch

    from .checkpoint import from_pretrained
    from .generation import generate
    from .train.data import VOCAB_SIZE, decode, encode

    with _refusing("generate"):
        if not options.prompt:
            raise ValueError("--prompt is empty; give a text to go on with")
        model = from_pretrained(options.folder)
        vocab_size = model.get_parameter("embed_tokens.weight").shape[0]
        if vocab_size != VOCAB_SIZE:
            raise ValueError(
                f"{options.folder} has {vocab_size} tokens; this command speaks bytes, which are {VOCAB_SIZE}: use "
                f"weft.models.generate with the model's own tokenizer"
            )
        tokens = generate(
            model,
            torch.tensor([encode(options.prompt)]),
            max_new_tokens=options.tokens,
            temperature=options.temperature,
            seed=options.seed,
        )
    print(decode(tokens[0].tolist()))
    return 0


if __name__ == "__main__":
    main()
