"""Checkpoints of a run: a model and its optimizer, saved under any plan and read under any other."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from ..data.tokenizer import Tokenizer
from ..families import family_of
from ..parallel.parallelize import pipeline_of
from .companions import Companions, companions_of, keep_companions
from .configs import check_config, own_config, saved_config
from .manifest import CONFIG, MODEL, OPTIMIZER, RUN, Manifest, as_document
from .optimizers import check_optimizer, describe_optimizer, state_to_fill
from .parts import Part, PartLoadPlanner, PartSavePlanner, part_of
from .shards import DTYPES
from .storage import FolderReader, FolderWriter, beside, check_sums


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a checkpoint will hold of this rank: the parts of its tensors, and the documents that rank 0 writes.

    optimizer: what the manifest says of the optimizer; None without one.
    """

    parts: Mapping[str, Part]
    documents: Mapping[str, bytes]
    optimizer: Mapping[str, Any] | None = None

    def copied(self, into: Snapshot | None = None) -> Snapshot:
        """The same with tensors of its own, on the CPU: training may go on while it is written.

        into: an earlier copy, which is written already; its memory is taken again.
        """
        before = {} if into is None else into.parts
        parts = {name: part.copied(before.get(name)) for name, part in self.parts.items()}
        return replace(self, parts=parts)

    @property
    def nbytes(self) -> int:
        return sum(part.values.nbytes for part in self.parts.values())

    def write(self, folder: Path, group: dist.ProcessGroup | None = None) -> None:
        """Writes the checkpoint; see `save_checkpoint`. group: of all ranks; nothing else may use it meanwhile."""
        try:
            with _quietly():
                save(
                    dict(self.parts),
                    storage_writer=FolderWriter(folder, self.documents, self.optimizer),
                    planner=PartSavePlanner(),
                    process_group=group,
                    no_dist=not dist.is_initialized(),
                )
        except CheckpointException as error:
            if not dist.is_initialized() or dist.get_rank() == 0:
                shutil.rmtree(beside(folder), ignore_errors=True)
            raise _cause(error) from None


def snapshot(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    run: Mapping[str, Any] | None = None,
    tokenizer: Tokenizer | None = None,
) -> Snapshot:
    """What `save_checkpoint` writes, not copied: the values are those that the tensors have when it is written."""
    family, along = family_of(model), companions_of(model).with_tokenizer(tokenizer)
    documents = {RUN: as_document(run or {}), **along.files}
    if family is not None:
        documents[CONFIG] = as_document(along.in_config(family.weights.write_config(model)))
    parts = {name: part_of(tensor) for name, tensor in _tensors(model, optimizer).items()}
    return Snapshot(parts, documents, None if optimizer is None else describe_optimizer(model, optimizer))


def save_checkpoint(
    model: nn.Module,
    folder: str | Path,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    run: Mapping[str, Any] | None = None,
    tokenizer: Tokenizer | None = None,
) -> None:
    """Writes the model, and the optimizer's state, so that `load_checkpoint` reads them under any plan.

    Each rank writes what it holds, and of what several hold one writes each part: nothing is gathered. The folder is there
    whole or not at all.
    The config of a model of this library goes into the folder, and what the model's own folder said beside the network, see
    `from_pretrained`. A subclass that computes otherwise than its family is saved as a model of one's own: without a config.
    run: what else is to be known, as JSON: it is what `read_run` gives. tokenizer: its files go into the folder.
    Communication: what each rank holds is told to rank 0, which tells each what to write, and hears when that is done. Every
    rank calls it.
    Raises ValueError where the folder exists, OSError where it cannot be written; on every rank.
    """
    snapshot(model, optimizer, run=run, tokenizer=tokenizer).write(Path(folder))


def load_checkpoint(
    model: nn.Module, folder: str | Path, optimizer: torch.optim.Optimizer | None = None
) -> FolderReader:
    """Fills the parameters, and the optimizer's state, from what `save_checkpoint` wrote, under whatever plan that was.

    Each rank reads what it holds, and no more; all that is read is compared with the sums that were written. The model's config
    has to be the checkpoint's, but for what leaves the function of the weights as it is: dropout, initializer_range and, where no
    position is computed in another way, a longer max_seq_len. A model of one's own is compared by the names and shapes of its
    parameters alone. No value is rounded: a parameter may have a wider dtype than was stored, not a narrower one.
    The model carries from now on what the checkpoint says beside the network, see `from_pretrained`.
    optimizer: of this model, and of the kind that was saved, before its first step. Where the checkpoint has no state of it,
    as one that `weft convert` made, it stays as it is.
    Returns what was read with, which has counted the bytes.
    Communication: a gather of what each rank's checks found; the plan of what is read, and its sums, by way of rank 0. Every rank calls it.
    Raises ValueError for a checkpoint of another model, whose differing fields it names, of another optimizer, whose kind or
    state it names, or of a dtype that would be rounded; DamagedCheckpoint for one that is not whole or not as it was written; on
    every rank.
    """
    return fill_from(model, folder, optimizer)


def fill_from(
    model: nn.Module,
    folder: str | Path,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    rounding: bool = False,
) -> FolderReader:
    """See `load_checkpoint`. rounding: whether parameters may be of narrower dtypes than what is stored."""
    with FolderReader(Path(folder)) as reader:
        manifest = reader.manifest
        config = manifest.document(reader.folder, CONFIG) if CONFIG in manifest.files else {}
        saved, own = saved_config(manifest, reader.folder), own_config(model)
        if saved is not None and own is not None:
            check_config(saved, own, reader.folder, beside=tensors_that_differ(model, reader) or "")
        check_model(model, reader)
        _check_own_part(model, optimizer, reader, rounding)
        tensors: dict[str, Tensor] = {f"{MODEL}{name}": each for name, each in model.named_parameters()}
        state = {} if optimizer is None else state_to_fill(model, optimizer, manifest)
        tensors |= {
            f"{OPTIMIZER}{name}.{key}": each for name, (_, values) in state.items() for key, each in values.items()
        }
        parts: dict[str, Any] = {name: part_of(tensor) for name, tensor in tensors.items()}
        try:
            with torch.no_grad(), _quietly():
                load(parts, storage_reader=reader, planner=PartLoadPlanner(), no_dist=not dist.is_initialized())
        except CheckpointException as error:
            raise _cause(error) from None
        _check_on_all(reader)
        keep_companions(model, Companions.saved(reader.folder, config, manifest))
    if optimizer is not None:
        for parameter, values in state.values():
            optimizer.state[parameter] = values
    return reader


def read_run(folder: str | Path) -> dict[str, Any]:
    """What `save_checkpoint` was told of the run. Raises as `Manifest.read`."""
    return Manifest.read(Path(folder)).document(Path(folder), RUN)


def check_model(model: nn.Module, reader: FolderReader) -> None:
    """Raises ValueError for a checkpoint that has not the tensors of this model, in their shapes, and no others."""
    differing = tensors_that_differ(model, reader)
    if differing is not None:
        raise ValueError(f"{reader.folder} is of another model: {differing}; give the model as it was")


def tensors_that_differ(model: nn.Module, reader: FolderReader) -> str | None:
    """How the tensors of a checkpoint differ from the model's, by name or shape; None where they are the same."""
    pipeline = pipeline_of(model)
    parameters = dict(model.named_parameters()) if pipeline is None else pipeline.parameters
    wanted = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    found = {
        name.removeprefix(MODEL): tensor.shape
        for name, tensor in reader.manifest.tensors.items()
        if name.startswith(MODEL)
    }
    for verb, names in (("lacks", wanted.keys() - found.keys()), ("has", found.keys() - wanted.keys())):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            whose = "this model" if verb == "lacks" else "the checkpoint"
            return f"it {verb} {min(names)}{more}, of {whose}"
    for name, shape in wanted.items():
        if found[name] != shape:
            return f"{name} has shape {found[name]}, and {shape} here"
    return None


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        tensors[f"{MODEL}{name}"] = parameter
        for key, value in sorted(({} if optimizer is None else optimizer.state.get(parameter, {})).items()):
            if not isinstance(value, Tensor):
                raise ValueError(
                    f"the optimizer keeps {key} of {name} as a {type(value).__name__}; a checkpoint holds tensors alone"
                )
            tensors[f"{OPTIMIZER}{name}.{key}"] = value
    return tensors


def _check_own_part(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, reader: FolderReader, rounding: bool
) -> None:
    """Checks the dtypes and the optimizer of what this rank holds, which may be some stages of the model.

    Communication: a gather of the outcomes. Raises the first rank's error, on every rank.
    """
    outcomes: list[ValueError | None] = [None]
    try:
        if not rounding:
            _check_dtypes(model, reader)
        if optimizer is not None:
            check_optimizer(model, optimizer, reader.manifest, reader.folder)
    except ValueError as error:
        outcomes = [error]
    if dist.is_initialized():
        own, outcomes = outcomes[0], [None] * dist.get_world_size()
        dist.all_gather_object(outcomes, own)
    for outcome in outcomes:
        if outcome is not None:
            raise outcome


def _check_dtypes(model: nn.Module, reader: FolderReader) -> None:
    """Raises ValueError where a parameter's dtype does not hold every value of the dtype that is stored."""
    parameters = dict(model.named_parameters())
    stored = {name: DTYPES[reader.manifest.tensors[f"{MODEL}{name}"].dtype] for name in parameters}
    rounded = [name for name, each in parameters.items() if torch.promote_types(each.dtype, stored[name]) != each.dtype]
    if rounded:
        first, more = rounded[0], f" and {len(rounded) - 1} more" if len(rounded) > 1 else ""
        raise ValueError(
            f"{reader.folder} has {first}{more} in {stored[first]}, which a model in {parameters[first].dtype} would round; load "
            f"into a model in {stored[first]} and convert the model after that, or read it by "
            f"from_pretrained(folder, dtype={parameters[first].dtype}), which rounds"
        )


def _check_on_all(reader: FolderReader) -> None:
    """`check_sums` of what all ranks have read. Communication: a gather of the sums, and a broadcast of the outcome."""
    pieces = [reader.sums_of_pieces]
    if dist.is_initialized():
        pieces = [{} for _ in range(dist.get_world_size())]
        dist.gather_object(reader.sums_of_pieces, pieces if dist.get_rank() == 0 else None, dst=0)
    outcome: list[ValueError | None] = [None]
    try:
        check_sums(reader.folder, reader.manifest, {key: each for of_rank in pieces for key, each in of_rank.items()})
    except ValueError as error:
        outcome = [error]
    if dist.is_initialized():
        dist.broadcast_object_list(outcome, src=0)
    if outcome[0] is not None:
        raise outcome[0]


@contextmanager
def _quietly() -> Iterator[None]:
    """Without torch's warning that there is one process, where there is one."""
    with nullcontext() if dist.is_initialized() else warnings.catch_warnings():
        if not dist.is_initialized():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield


def _cause(error: CheckpointException) -> BaseException:
    """What went wrong on the first rank that failed."""
    cause: BaseException = min(error.failures.items())[1][0]
    return cause
