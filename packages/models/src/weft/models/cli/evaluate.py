"""`weft evaluate`: the loss of a model on examples, and for preferences accuracies and rewards."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro

from ..checks import LARGEST
from ..config import longest_context
from ..data.examples.example import Task
from ..data.examples.forms import FORMS
from ..data.examples.records import FIELDS
from ..data.examples.template import find_template
from ..data.inputs import check_pyarrow, cut_file, read_records
from ..data.kinds import FileKind, kind_of
from ..data.manifest import MANIFEST
from ..data.parquet import column_names
from ..data.sources import find_data
from ..data.text import entries_under
from ..data.tokenizer import Tokenizer
from ..safe_files import read_json
from ..terminal import PROGRAM, printable
from ..train.folder import find_checkpoint
from ..train.from_folder import check_adapters, check_tokens, model_of
from ..train.task_config import DPOConfig, KTOConfig, changed_option, check_loss_options
from .arguments import parse, renamed_options, report_bad_input
from .earlier_runs import Merged, with_options_of_run
from .generate import base_of, find_tokenizer_of

OPTIONS = {"data.path": "data", "data.sequence_length": "sequence_length", "data.template": "template"}
LENGTH = 2048  # the default of --sequence-length, for models with a longer context
ABOUT = f"""\
  Computes the mean loss of a model on the examples of a file or folder, on one process, and on a GPU if there is one. \
Examples have the forms that `{PROGRAM} train` takes with the same --task; the loss is the mean over the learned \
tokens, which are the answers' tokens.

Examples
  {PROGRAM} evaluate \\
    outputs/RUN --data held-out.jsonl
  {PROGRAM} evaluate \\
    outputs/RUN --data pairs.jsonl \\
    --reference llama --json
  {PROGRAM} evaluate \\
    outputs/RUN --data pairs.jsonl \\
    --reference llama --dpo.loss ipo

Task
  Without --task, the fields of the first record decide: chosen and rejected (dpo), label (kto), messages or prompt or \
instruction (sft), text (pretrain). Text is read as by `{PROGRAM} train`: as bytes, or prepared.

Prints
  the number of examples and of learned tokens; loss, in nats, and perplexity. dpo: accuracy, the share of pairs whose \
chosen answer is more likely than the rejected one; with --reference also the loss of dpo, and accuracy, margin and \
means of the rewards. kto with --reference: the loss of kto, mean rewards, and kl, computed over all examples. For \
a run, options of the loss that are not given here come from its config.toml; these options are printed. For a folder \
that is not in its run's folder, give the --dpo.… or --kto.… options of the training.

Exit status
  0: done; 1: the loss is not finite; 2: input that cannot be used.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateOptions:
    """Compute the loss of a model on examples."""

    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """A run, whose last checkpoint is taken; a checkpoint; a folder for transformers; or LoRA adapters."""
    data: Annotated[Path, tyro.conf.arg(metavar="PATH")]
    """Examples: a file or folder of JSONL, JSON, CSV or Parquet, or a folder of `weft data prepare`."""
    task: Annotated[
        Task | None,
        tyro.conf.arg(metavar="{pretrain,sft,dpo,kto}", help_behavior_hint="(default: by the records)"),
    ] = None
    """The task whose examples the records are."""
    reference: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER", help_behavior_hint="(default: none)")] = None
    """The reference model of dpo and kto."""
    dpo: DPOConfig = field(default_factory=DPOConfig)
    """Options of the loss and rewards of dpo; these need --reference. Default for a run: those of its training."""
    kto: KTOConfig = field(default_factory=KTOConfig)
    """Options of the loss and rewards of kto; these need --reference. Default for a run: those of its training."""
    template: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="(default: the tokenizer's)")] = (
        None
    )
    """A Jinja file with the chat template."""
    sequence_length: Annotated[
        int | None, tyro.conf.arg(metavar="INT", help_behavior_hint=f"(default: the model's, at most {LENGTH})")
    ] = None
    """Most tokens of a prompt with its completion; longer ones are cut at their end. For text: tokens of a sequence."""
    batch_size: Annotated[int, tyro.conf.arg(metavar="INT")] = 8
    """Rows computed at once."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print an object of JSON in one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Inputs:
    """The checked inputs of a run of the command."""

    folder: Path
    reference: Path | None
    task: Task
    reason: str  # how the task was found, in words
    data: Any  # a source of texts or of examples
    length: int
    losses: Merged  # the options of the losses, given or of the run

    @property
    def num_cut(self) -> int:
        """The number of examples cut to `length`; 0 for text."""
        return 0 if self.task == "pretrain" else int(self.data.num_cut)


def run(arguments: list[str]) -> int:
    options = parse(EvaluateOptions, arguments, command="evaluate", about=ABOUT)
    with report_bad_input("evaluate"), renamed_options(OPTIONS):
        inputs = _find_inputs(options, arguments)
        from ..train.evaluate import LossNotFinite

        try:
            figures = _compute(inputs, options)
        except LossNotFinite as error:
            print(f"{PROGRAM} evaluate: {error}", file=sys.stderr)
            return 1
    if options.json:
        further = {"cut": inputs.num_cut, "options_of_run": inputs.losses.of_run}
        present = {name: value for name, value in further.items() if value}
        print(json.dumps({"task": inputs.task, **figures, **present}))
        return 0
    print(printable(f"{inputs.folder} on {options.data}: {inputs.task}, {inputs.reason}"))
    cut = inputs.num_cut
    notes = [f"{cut:,} of the examples cut to {inputs.length:,} tokens: give a longer --sequence-length"] if cut else []
    for note in (*inputs.losses.notes, *notes):
        print(printable(note))
    width = max(map(len, figures))
    for name, value in figures.items():
        shown = f"{value:,}" if isinstance(value, int) else f"{value:.6g}"
        print(f"{name.replace('_', ' '):{width}}  {shown}")
    return 0


def _compute(inputs: _Inputs, options: EvaluateOptions) -> Mapping[str, int | float]:
    """The figures to print, by name. Raises LossNotFinite."""
    import torch

    from ..checkpoint.huggingface import from_pretrained
    from ..data.batches import Batches
    from ..data.examples.rows import ExampleBatches
    from ..train.evaluate import evaluate_examples, evaluate_text

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape: dict[str, Any] = {"sequence_length": inputs.length, "batch_size": options.batch_size, "seed": 0}
    model = from_pretrained(inputs.folder, device=device).eval()
    if inputs.task == "pretrain":
        text = Batches(inputs.data, **shape, packed=inputs.data.is_prepared)
        return evaluate_text(model, text, rows=options.batch_size, device=device)
    reference = None if inputs.reference is None else from_pretrained(inputs.reference, device=device).eval()
    return evaluate_examples(
        model,
        ExampleBatches(inputs.data, **shape),
        task=inputs.task,
        rows=options.batch_size,
        device=device,
        reference=reference,
        pairs=inputs.losses.dpo,
        judged=inputs.losses.kto,
    )


def _find_inputs(options: EvaluateOptions, arguments: Sequence[str]) -> _Inputs:
    """Find the folders, the task and the data. Raises ValueError for input that cannot be used."""
    _check(options)
    folder = find_checkpoint(options.folder)
    tokenizer, config = find_tokenizer_of(folder), model_of(base_of(folder))
    task, reason = (options.task, "as asked") if options.task is not None else _find_task(options.data)
    _check_losses(options, task)
    losses = with_options_of_run(options, arguments, task)
    reference = None
    if options.reference is not None:
        if task not in ("dpo", "kto"):
            raise ValueError(f"--reference is given, and the task {task} has no reference; leave it out")
        reference = find_checkpoint(options.reference)
        find_tokenizer_of(reference)
        if (size := model_of(base_of(reference)).vocab_size) != config.vocab_size:
            raise ValueError(
                f"the reference {reference} has a vocabulary of {size:,} tokens, and "
                f"{folder} one of {config.vocab_size:,}; give a model with the same tokenizer to --reference"
            )
    for each in (folder, *([] if reference is None else [reference])):
        check_adapters(each)
    longest = longest_context(config)
    length = options.sequence_length or min(longest, LENGTH)
    if length > longest:
        raise ValueError(f"--sequence-length is {length}, and the model's context is {longest}; give {longest} or less")
    if task == "pretrain":
        if options.template is not None:
            raise ValueError("--template is given, and the task pretrain has no chat template; leave it out")
        data: Any = find_data(options.data, ())
        check_tokens(str(folder), base_of(folder), config, data)
        if options.sequence_length is None:  # `Batches` needs two sequences and a token
            length = max(1, min(length, (data.num_tokens - 1) // 2))
    else:
        data = _find_examples(options, task, tokenizer, length)
    return _Inputs(
        folder=folder, reference=reference, task=task, reason=reason, data=data, length=length, losses=losses
    )


def _find_examples(options: EvaluateOptions, task: Task, tokenizer: Tokenizer, length: int) -> Any:
    from ..data.examples.source import find_examples  # imported here because numpy takes a tenth of a second

    template = find_template(tokenizer, options.template)
    return find_examples(options.data, task=task, tokenizer=tokenizer, template=template, length=length)


def _check(options: EvaluateOptions) -> None:
    """Raise ValueError for a number out of range."""
    for name, value in (("--sequence-length", options.sequence_length), ("--batch-size", options.batch_size)):
        if value is not None and not 1 <= value <= LARGEST:
            raise ValueError(f"{name} is {value}; it must be 1 or more, and at most {LARGEST:,}")


def _check_losses(options: EvaluateOptions, task: Task) -> None:
    """Raise ValueError for an option of another task's loss, and for one without a reference."""
    check_loss_options(task, options.dpo, options.kto)
    for name, loss in (("dpo", options.dpo), ("kto", options.kto)):
        if options.reference is None and (changed := changed_option(loss)):
            raise ValueError(
                f"{name}.{changed} is {getattr(loss, changed)}, and a loss of {name} needs a reference; give "
                f"--reference FOLDER, or leave it out"
            )


def _find_task(path: Path) -> tuple[Task, str]:
    """The task of the data at `path`, as prepared or by the fields of the first record; and the reason, in words.

    Raises ValueError for a missing path and for a record in no form of a task.
    """
    if not path.exists():
        raise ValueError(f"--data {path} does not exist; give a file or folder of examples")
    if path.is_dir() and (path / MANIFEST).is_file():
        task: Task = read_json(path / MANIFEST, "prepare the data again").get("task") or "pretrain"
        return task, "as the data is prepared"
    files, has_text = entries_under(path).files, False
    for file in files:
        kind = kind_of(file, (*FIELDS, "text"), is_named=path.is_file())
        if kind is FileKind.TEXT:
            has_text = True
        elif kind is not FileKind.NONE and (names := _first_fields(file, kind, path.is_file())) is not None:
            return _task_of_fields(file, names)
    if files and not has_text:
        raise ValueError(f"no record is in --data {path}; give a file or folder of examples")
    return "pretrain", "since the data is text"


def _task_of_fields(file: Path, names: Iterable[str]) -> tuple[Task, str]:
    fields: set[str] = set(names)
    tasks: tuple[Task, ...] = ("dpo", "kto", "sft")  # pairs and judged completions may have the fields of sft, too
    for task in tasks:
        for needed, _ in FORMS[task]:
            if fields.issuperset(needed):
                return task, f"since the records have {' and '.join(needed)}"
    if "text" in fields:
        return "pretrain", "since the records have text"
    raise ValueError(
        f"{file} has records with the fields {', '.join(sorted(fields)) or 'none'}, and an example has chosen and "
        f"rejected (dpo), prompt, completion and label (kto), messages or prompt and completion or instruction and "
        f"output (sft), or text (pretrain); rename the fields"
    )


def _first_fields(file: Path, kind: FileKind, is_named: bool) -> list[str] | None:
    """The fields of the first record in a file of records; None without a record."""
    if kind is FileKind.PARQUET:
        try:
            check_pyarrow(file)
        except ModuleNotFoundError as error:
            raise ValueError(str(error)) from None
        return column_names(file)
    pieces = cut_file(file, kind, is_named, file.stat().st_size + 1, [])
    records = (record for piece in pieces for _, record in read_records(piece))
    return next((list(map(str, record)) for record in records if isinstance(record, dict)), None)
