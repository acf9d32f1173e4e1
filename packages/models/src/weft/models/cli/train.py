"""`weft train`: check the run as far as possible without torch, then launch the run."""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from ..checkpoint.configs import is_adapter_folder
from ..checkpoint.manifest import MANIFEST
from ..data.sources import check_enough, check_vocabulary, find_data, repeats
from ..data.tokenizer import TOKENIZER_FILE, find_tokenizer, with_template
from ..terminal import INTERRUPTED_UNSAVED, PROGRAM
from ..train.config import TrainConfig, unfinished_warmup
from ..train.folder import CHECKPOINT, check_new, check_resumable, checkpoints, find_to_resume, newest_complete
from ..train.from_folder import check_adapters, check_same_model, check_tokens, find_model, find_origin, fingerprint
from ..train.launch import adopt_launcher, check_world, launch
from ..train.memory_check import check_room, gpu_count
from ..train.metrics_file import METRICS, check_logged, check_trackers, read_logged
from ..train.model_class import check_blocks, check_class, check_named_cuts, count_adapters
from ..train.report import opening_lines
from ..train.run import Run, axes_of, check_reference, title_of
from ..train.saved_run import check_same_run, check_steps, logged_of, read_saved
from ..train.task_config import reference_of
from ..train.toml import as_toml
from .arguments import OwnOptions, is_printing_rank, report_bad_input
from .compare import check_run_folder
from .earlier_runs import plan_replay
from .settings import NEWEST, base_of, origin_of, read_configuration, sizes_for_processes, with_complete_plan

ABOUT = f"""\
  Trains a model on a text, whose bytes are the tokens, or on prepared tokens; with --task, on conversations or \
preferences. Runs on a mesh of processes: one per GPU, 4 on a CPU, as many as --mesh asks for, or those that a \
launcher such as torchrun has started.

Examples
  {PROGRAM} train
  {PROGRAM} train --data.path book.txt
  {PROGRAM} train --mesh.dp 4 --mesh.tp 1
  {PROGRAM} train --mesh.cp 2 --plan.sequence
  {PROGRAM} train --mesh.pp 2 --mesh.dp 2
  {PROGRAM} train llama-tiny-tied --steps 500
  {PROGRAM} train --from llama --task sft \\
    --data.path chats.jsonl
  {PROGRAM} train --from llama --task dpo \\
    --data.path pairs.jsonl --lora.rank 8
  {PROGRAM} train --print-config > run.toml
  {PROGRAM} train --config run.toml --steps 500
  {PROGRAM} train --output run --save-every 50 --resume
  {PROGRAM} train --output run --resume

Recipes
{{recipes}}
  The options below show the defaults of the named recipe, or of {{default}} without a name.

Other models
  --from FOLDER: starts from the config, weights and tokenizer of a folder for transformers, a checkpoint, or a run. \
A recipe then gives only the options of training; a --model option that contradicts the folder is an error.
  --model MODULE:CLASS: trains a class of a module that Python finds; with --help, shows the options of its config. \
The final model is saved as a checkpoint.

Configuration files
  --config FILE: reads options, and the recipe if there is one, from a TOML file. The command line overrides them.
  --resume: reads the options of the resumed run from its config.toml, except output and profile, and except track if \
a PATH is given. The command line and --config override them.
  --replay RUN --step N: takes step N of a run again, on any mesh, from the newest checkpoint before it, and compares \
the digests of that step.
  --print-config: prints the resulting configuration as such a file, and exits.

Prints
  the layout of each parameter; the collectives of a step, predicted and issued; the loss of step 1 beside the loss on \
one process; the steps; a sample; the loss on held-out text, before and after.

Saves
  metrics.jsonl, config.toml (for --config), curves.svg, plan.txt, versions.json, digests.jsonl (--digests), \
and the final model in checkpoint/, which transformers loads, or its adapters, which peft loads; during the run \
checkpoint-STEP/, from which --resume continues, on any mesh. SIGTERM and Ctrl-C save one more.

Exit status
  0: done; 1: the run stopped; 2: input that cannot be used; 130: interrupted; 143: ended by SIGTERM.
"""


def run(arguments: list[str]) -> int:
    """Runs `weft train` with the arguments after `train`. Returns the exit status: see `ABOUT`."""
    with report_bad_input("train"):
        adopt_launcher()
        files, run_arguments = _files().parse_known_args(arguments)
        replay = plan_replay(run_arguments, files.replay, files.step, files.config)
        if replay is not None:
            run_arguments, files.config = replay.arguments, replay.config
        new_run, gpus = _complete_run(run_arguments, files.config)
        if replay is not None:
            new_run = replace(new_run, last_step=replay.last, notes=(*new_run.notes, *replay.notes))
        if files.print_config:
            print(as_toml(new_run.recipe, new_run.resolved), end="")
            return 0
        check_world(os.environ)
        room = check_room(new_run, gpus=gpus)
    if is_printing_rank():
        print("\n".join([opening_lines(new_run, gpus=gpus), *new_run.notes, *room]), flush=True)
    try:
        return launch(new_run, gpus=gpus)
    except KeyboardInterrupt:
        if (new_run.folder / CHECKPOINT).exists() or checkpoints(new_run.folder):
            raise
        raise KeyboardInterrupt(INTERRUPTED_UNSAVED) from None


def _files() -> OwnOptions:
    """The parser of options about configuration files and replays, which are not options of the run itself."""
    parser = OwnOptions()
    parser.add_argument("--config", type=Path)
    parser.add_argument("--print-config", action="store_true")
    parser.add_argument("--replay", type=Path)
    parser.add_argument("--step", type=int)
    return parser


def _complete_run(arguments: list[str], file: Path | None) -> tuple[Run, int]:
    """The run described by the arguments, fully checked, and the number of GPUs.

    file: the value of --config. Raises ValueError for an impossible run.
    """
    name, config = read_configuration(arguments, file, command="train", about=ABOUT)
    origin, from_ = origin_of(config), config.from_
    base = base_of(name, config)
    check_trackers(config.track)
    dp, cp, tp = sizes_for_processes(config)
    config = with_complete_plan(config, dp=dp, cp=cp, tp=tp)
    corpus = _find_corpus(config, origin)
    check_vocabulary(corpus, config.model.vocab_size)
    if config.model_class is not None:
        check_class(
            config.model_class,
            ordered=config.plan.context == "all_gather",
            documents=config.data.pack and corpus.is_prepared,
            compiled=config.compile,
        )
        if config.optimizer.name == "muon":
            check_blocks(config.model, config.model_class)
    check_named_cuts(config)
    count_adapters(config)  # raises for targets that the model lacks
    check_reference(config, axes_of(pp=config.mesh.pp, dp=dp, cp=cp, tp=tp))
    if from_ is not None and origin is not None:
        if config.task == "pretrain":
            check_tokens(f"--from {from_}", origin, config.model, corpus)
        check_adapters(origin)
        config = replace(config, from_=from_.resolve())  # absolute, because a run may be resumed from another folder
    config = _with_absolute_paths(config)
    title = title_of(name, config)
    folder, resume, notes = _folder_and_checkpoint(config, title)
    notes = [
        *notes,
        *_describe_data(corpus, config),
        *_lengthened(config, base, title),
    ]
    notes += unfinished_warmup(config.optimizer, config.steps)
    reference = _find_reference(config)
    new_run = Run(
        recipe=name, config=config, corpus=corpus, pp=config.mesh.pp, dp=dp, cp=cp, tp=tp, folder=folder,
        resume=resume, origin=origin if resume is None else None, reference=reference, base=base,
        adapter_base=_find_adapter_base(config), digested_steps=_digested_steps(config),
        reference_sha256=None if reference is None else fingerprint(reference),
    )  # fmt: skip
    if new_run.origin is not None:
        notes = [f"begins with the model of {new_run.origin}", *notes]
        if config.lora.rank and new_run.adapter_base is None:
            notes += ["the final model is saved with its adapters merged: the run begins with no Hugging Face folder"]
    if resume is not None:
        saved = read_saved(resume)
        steps_done = check_steps(saved, resume, config.steps)
        # on rank 0 alone: it may be cutting the file while other ranks would read
        if is_printing_rank():
            if (logged := logged_of(saved, resume, folder)) is not None:
                check_logged(folder / METRICS, logged)
            read_logged(folder / METRICS, saved.get("step", 0))
        notes = [*steps_done, *notes, f"goes on from {resume}", *check_same_run(saved, new_run)]
        check_same_model(resume, config.model)
        if "config" not in saved and config.task == "pretrain":  # a converted checkpoint names no data
            check_tokens(f"--resume {resume}", resume, config.model, corpus)
    return replace(new_run, notes=tuple(notes)), gpu_count()


def _digested_steps(config: TrainConfig) -> tuple[int, ...]:
    """The steps with digests in the run of --against; () without --against.

    Raises ValueError for a run without digests of any step up to --steps.
    """
    if config.against is None:
        return ()
    check_run_folder(config.against)
    from ..compare.record_file import read_digests  # imported here because numpy takes a tenth of a second

    steps = tuple(read_digests(config.against).steps)
    if not steps or steps[0] > config.steps:
        raise ValueError(f"{config.against} has digests of no step up to {config.steps}, with which to compare")
    return steps


def _with_absolute_paths(config: TrainConfig) -> TrainConfig:
    """The config with absolute paths of the reference and the template: a run may be resumed from another folder."""
    reference, template = (
        None if path is None else path.resolve() for path in (config.reference_from, config.data.template)
    )
    return replace(config, reference_from=reference, data=replace(config.data, template=template))


def _find_corpus(config: TrainConfig, origin: Path | None) -> Any:
    """The documents of a run of pretrain, or the examples of a run of any different task.

    origin: the folder with the model of --from, whose tokenizer and chat template examples take.
    Raises ValueError for unusable data.
    """
    data = config.data
    if config.task == "pretrain":
        if data.template is not None:
            raise ValueError(f"data.template is {data.template}, but task pretrain has no conversations; leave it out")
        corpus = find_data(data.path, data.mixture)
        check_enough(corpus, data.sequence_length)
        return corpus
    from ..data.examples.source import find_examples  # imported here because numpy takes a tenth of a second
    from ..data.examples.template import find_template

    has_tokenizer = origin is not None and (origin / TOKENIZER_FILE).is_file()
    tokenizer = find_tokenizer(origin if has_tokenizer else None)
    template = find_template(tokenizer, data.template)
    if data.template is not None and template is not None:
        tokenizer = with_template(tokenizer, template.source)  # saved with the model
    examples = find_examples(
        *(data.path, data.mixture),
        task=config.task,
        tokenizer=tokenizer,
        template=template,
        length=data.sequence_length,
    )
    if data.template is not None and examples.is_prepared:
        raise ValueError(
            f"data.template is {data.template}, but {examples.name} was prepared with a template of its own; leave the "
            f"option out, or prepare the records again with --template"
        )
    return examples


def _describe_data(corpus: Any, config: TrainConfig) -> list[str]:
    """Lines about the data, printed before the run: warnings for texts, counts for examples."""
    if config.task != "pretrain":
        return [corpus.describe()]
    return repeats(corpus, config.data.sequence_length, config.data.batch_size)


def _find_reference(config: TrainConfig) -> Path | None:
    """The folder of the reference model's weights; None without a reference model, or for weights of the seed.

    Raises ValueError for a model with another vocabulary than the run's.
    """
    path = config.reference_from or (config.from_ if reference_of(config) == "model" else None)
    if path is None:
        return None
    folder = find_origin(path, option="--from" if config.reference_from is None else "--reference-from")
    model = find_model(folder)
    check_adapters(folder)
    if model is not None and model.vocab_size != config.model.vocab_size:
        raise ValueError(
            f"the reference {folder} has a vocabulary of {model.vocab_size:,} tokens, and the model one of "
            f"{config.model.vocab_size:,}; give the folder of a model with the same tokenizer to --reference-from"
        )
    return folder


def _find_adapter_base(config: TrainConfig) -> Path | None:
    """The Hugging Face folder with the base weights of the run's adapters; None without adapters or this folder."""
    if not config.lora.rank or config.from_ is None:
        return None
    folder = find_origin(config.from_)
    # a checkpoint is no folder for peft; and of a folder of adapters, these are folded into the weights
    return None if (folder / MANIFEST).is_file() or is_adapter_folder(folder) else folder.resolve()


def _lengthened(config: TrainConfig, base: TrainConfig, title: str) -> list[str]:
    """A line to print if max_seq_len was raised to the length of the training sequences; otherwise an empty list.

    base: the configuration before the command's options. title: the run's.
    """
    longest, usual = config.model.max_seq_len, base.model.max_seq_len
    raised = longest == config.data.sequence_length > usual
    return [f"model.max_seq_len is {longest}, as data.sequence_length; {title} has {usual}"] if raised else []


def _folder_and_checkpoint(config: TrainConfig, name: str) -> tuple[Path, Path | None, list[str]]:
    """The run's folder, the checkpoint to resume from or None, and the errors of newer, damaged checkpoints.

    name: the run's title, for the default folder. Raises ValueError for a folder in use or with newer checkpoints, and
    for an unusable checkpoint.
    """
    folder = config.output
    if config.resume is None:
        folder = folder or Path("outputs") / f"{name}-{datetime.now():%Y%m%d-%H%M%S-%f}"
    elif config.resume == NEWEST:
        if folder is None:
            raise ValueError(
                "--resume without a PATH continues the run in --output; give --output too, or --resume PATH"
            )
        if folder.exists():
            if is_printing_rank():
                check_resumable(folder)
            return (folder, *newest_complete(folder))
    else:
        found = find_to_resume(Path(config.resume))
        if folder is None or folder.resolve() == found.parent.resolve():
            newest = next(reversed(checkpoints(found.parent).values()), found)
            if not newest.samefile(found):
                raise ValueError(
                    f"{newest} is newer than {found}, and would be overwritten; give another --output, or remove it"
                )
            if is_printing_rank():
                check_resumable(found.parent)
            return found.parent, found, []
        if is_printing_rank():
            check_new(folder)
        return folder, found, []
    if is_printing_rank():  # on rank 0 alone: other ranks could find its trial folder
        check_new(folder)
    return folder, None, []
