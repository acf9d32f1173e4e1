"""Saves and loads checkpoints of a run: model and optimizer. The plans of saving and loading may differ."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Collection, Iterator, Mapping
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
from ..parallel.lora import adapter_names, lora_of
from ..parallel.parallelize import pipeline_of
from .companions import Companions, attach_companions, companions_of
from .configs import check_config, checkpoint_config, model_config
from .manifest import ADAPTERS, CONFIG, MODEL, OPTIMIZER, RUN, Manifest, as_document
from .optimizers import check_optimizer, describe_optimizer, make_state_to_fill
from .parts import PartLoadPlanner, PartSavePlanner, TensorPart, part_of
from .shards import STORED_DTYPES
from .storage import FolderReader, FolderWriter, check_sums, partial_path


@dataclass(frozen=True, slots=True)
class Snapshot:
    """This rank's content of a checkpoint to be written: the rank's parts of all tensors, and the files without
    tensors.

    Made by `snapshot`. A run copies the snapshot to CPU memory and writes the copy in the background.
    """

    parts: Mapping[str, TensorPart]  # by tensor name
    files: Mapping[str, bytes]  # contents by file name: config, run, tokenizer, ...; on all ranks, written by rank 0
    optimizer: Mapping[str, Any] | None = None  # from `describe_optimizer`; None without an optimizer

    def copy_to_cpu(self, into: Snapshot | None = None) -> Snapshot:
        """A copy in CPU memory; training can continue while the copy is written.

        into: an earlier copy, already written, whose memory is reused. None: in new memory.
        """
        earlier = {} if into is None else into.parts
        parts = {name: part.copy_to_cpu(earlier.get(name)) for name, part in self.parts.items()}
        return replace(self, parts=parts)

    def write(self, folder: Path, group: dist.ProcessGroup | None = None) -> None:
        """Writes the checkpoint into `folder`. Every rank must call this.

        Called by `save_checkpoint`, and by the thread of a `Saver`. Communication and errors: as `save_checkpoint`.
        After an error, rank 0 removes the temporary folder.
        group: of all ranks; no collective of another thread may use the group during the call. None: the default group.
        """
        try:
            with _without_warning():
                save(
                    dict(self.parts),
                    storage_writer=FolderWriter(folder, self.files, self.optimizer),
                    planner=PartSavePlanner(),
                    process_group=group,
                    no_dist=not dist.is_initialized(),
                )
        except CheckpointException as error:
            if not dist.is_initialized() or dist.get_rank() == 0:
                shutil.rmtree(partial_path(folder), ignore_errors=True)
            raise _first_failure(error) from None


def snapshot(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    run: Mapping[str, Any] | None = None,
    tokenizer: Tokenizer | None = None,
) -> Snapshot:
    """The content of a checkpoint. The tensors are the model's own, not copies; see `Snapshot.copy_to_cpu`.

    Called by `save_checkpoint`, and by `Saver` in a run. Arguments: as for `save_checkpoint`.
    """
    family, companions = family_of(model), companions_of(model).with_tokenizer(tokenizer)
    files = {RUN: as_document(run or {}), **companions.files}
    if family is not None:
        files[CONFIG] = as_document(companions.in_config(family.weights.write_config(model)))
    if adapter_names(model):
        adapters = lora_of(model)
        options = {"rank": adapters.rank, "alpha": adapters.alpha, "dropout": adapters.dropout}
        files[ADAPTERS] = as_document({**options, "targets": sorted(adapters.adapters)})
    parts = {name: part_of(tensor) for name, tensor in _tensors(model, optimizer).items()}
    return Snapshot(parts, files, None if optimizer is None else describe_optimizer(model, optimizer))


def save_checkpoint(
    model: nn.Module,
    folder: str | Path,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    run: Mapping[str, Any] | None = None,
    tokenizer: Tokenizer | None = None,
) -> None:
    """Writes the model and the optimizer's state, for `load_checkpoint` to read under any plan.

    No tensor is gathered: each rank writes local parts, and a part held by several ranks is written once. The folder
    appears complete or not at all.
    The folder also gets the model's companions (tokenizer, chat template, generation settings; see `from_pretrained`)
    and, for the families of Weft, the model's config.json. A model class of the user's own is saved without a config,
    like a subclass that changes a family's computation.
    optimizer: None: no state is saved. run: JSON values about the run, for `read_run`; None: nothing about a run.
    tokenizer: written into the folder; None: the tokenizer among the model's companions, if any.
    Every rank must call this. Communication: rank 0 gathers which parts each rank holds, sends each rank the list
    of parts to write, and gathers the results.
    Raises, on every rank, ValueError where the folder exists and OSError where writing fails.
    """
    snapshot(model, optimizer, run=run, tokenizer=tokenizer).write(Path(folder))


def load_checkpoint(
    model: nn.Module, folder: str | Path, optimizer: torch.optim.Optimizer | None = None
) -> FolderReader:
    """Fills the model's parameters and the optimizer's state from a checkpoint saved under any plan.

    Each rank reads only local slices and verifies the stored checksums.
    The model's config must be the checkpoint's, except for fields without effect on the outputs of given weights:
    dropout, initializer_range and, where positions are computed the same, a longer max_seq_len. A model class of the
    user's own is compared by the names and shapes of parameters.
    No value is rounded: a parameter's dtype may be wider than the stored dtype, not narrower.
    The checkpoint's companions (tokenizer, chat template, generation settings, token ids) are attached to the model,
    and written by later saves; see `from_pretrained`.
    optimizer: of this model, of the saved kind, before the first step. Left unchanged where the checkpoint has no
    optimizer state, as after `weft convert`. None: a saved state is not read.
    Returns the reader, which has counted the bytes read.
    Every rank must call this. Communication: an all-gather of the outcomes of each rank's checks; rank 0 gathers which
    parts each rank reads, and all checksums of the values read, and broadcasts the outcome.
    Raises, on every rank, ValueError for a checkpoint of another model (naming the differing fields) or of another
    optimizer (naming its kind or state), and where a stored dtype is wider than the parameter's; DamagedCheckpoint for
    an incomplete or changed checkpoint.
    """
    return fill_from(model, folder, optimizer)


def fill_from(
    model: nn.Module,
    folder: str | Path,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    rounding: bool = False,
    absent: Collection[str] = (),
) -> FolderReader:
    """As `load_checkpoint`. Called by `from_pretrained`, and by runs that begin with a checkpoint's weights.

    rounding: parameters may be narrower than stored.
    absent: the names of parameters to leave as they are, missing from the checkpoint: new adapters.
    """
    with FolderReader(Path(folder)) as reader:
        manifest = reader.manifest
        config = manifest.document(reader.folder, CONFIG) if CONFIG in manifest.files else {}
        saved, own = checkpoint_config(manifest, reader.folder), model_config(model)
        if saved is not None and own is not None:
            check_config(
                saved, own, reader.folder, further_difference=_describe_difference(model, reader, absent) or ""
            )
        check_model(model, reader, absent)
        parameters = {name: each for name, each in model.named_parameters() if name not in absent}
        _check_local_parameters(model, parameters, optimizer, reader, rounding)
        tensors: dict[str, Tensor] = {f"{MODEL}{name}": each for name, each in parameters.items()}
        state = {} if optimizer is None else make_state_to_fill(model, optimizer, manifest)
        tensors |= {
            f"{OPTIMIZER}{name}.{key}": each for name, (_, values) in state.items() for key, each in values.items()
        }
        parts: dict[str, Any] = {name: part_of(tensor) for name, tensor in tensors.items()}
        try:
            with torch.no_grad(), _without_warning():
                load(parts, storage_reader=reader, planner=PartLoadPlanner(), no_dist=not dist.is_initialized())
        except CheckpointException as error:
            raise _first_failure(error) from None
        _check_sums_of_all_ranks(reader)
        attach_companions(model, Companions.saved(reader.folder, config, manifest))
    if optimizer is not None:
        for parameter, values in state.values():
            optimizer.state[parameter] = values
    return reader


def read_run(folder: str | Path) -> dict[str, Any]:
    """The `run` given to `save_checkpoint`, for a user's own program.

    Raises ValueError and DamagedCheckpoint as `Manifest.read`.
    """
    return Manifest.read(Path(folder)).document(Path(folder), RUN)


def check_model(model: nn.Module, reader: FolderReader, absent: Collection[str] = ()) -> None:
    """Raises ValueError unless the checkpoint's tensors have exactly the names and shapes of the model's.

    Called before the parameters are read: by `fill_from`, by `load_unsharded_weights`, and by `convert`.
    absent: as for `fill_from`.
    """
    difference = _describe_difference(model, reader, absent)
    if difference is not None:
        raise ValueError(f"{reader.folder} is of another model: {difference}; build the model that was saved")


def _describe_difference(model: nn.Module, reader: FolderReader, absent: Collection[str] = ()) -> str | None:
    """The first difference in name or shape between the checkpoint's tensors and the model's, or None.

    In words, for the errors of `check_model` and `check_config`.
    absent: as for `fill_from`.
    """
    pipeline = pipeline_of(model)
    parameters = dict(model.named_parameters()) if pipeline is None else pipeline.parameters
    expected = {name: tuple(parameter.shape) for name, parameter in parameters.items() if name not in absent}
    stored = {
        name.removeprefix(MODEL): tensor.shape
        for name, tensor in reader.manifest.tensors.items()
        if name.startswith(MODEL)
    }
    for verb, names in (("lacks", expected.keys() - stored.keys()), ("has", stored.keys() - expected.keys())):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            owner = "this model" if verb == "lacks" else "the checkpoint"
            return f"it {verb} {min(names)}{more}, of {owner}"
    for name, shape in expected.items():
        if stored[name] != shape:
            return f"{name} has shape {stored[name]}, and {shape} here"
    return None


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        tensors[f"{MODEL}{name}"] = parameter
        for key, value in sorted(({} if optimizer is None else optimizer.state.get(parameter, {})).items()):
            if not isinstance(value, Tensor):
                raise ValueError(
                    f"the optimizer keeps {key} of {name} as a {type(value).__name__}; a checkpoint holds only tensors"
                )
            tensors[f"{OPTIMIZER}{name}.{key}"] = value
    return tensors


def _check_local_parameters(
    model: nn.Module,
    parameters: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer | None,
    reader: FolderReader,
    rounding: bool,
) -> None:
    """Checks dtypes and optimizer for the parameters on this rank: under a pipeline, of the rank's stages.

    parameters: of the model, to be read.
    Communication: an all-gather of the outcomes. Raises the first failing rank's error on every rank.
    """
    outcomes: list[ValueError | None] = [None]
    try:
        if not rounding:
            _check_dtypes(parameters, reader)
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


def _check_dtypes(parameters: Mapping[str, Tensor], reader: FolderReader) -> None:
    """Raises ValueError where a parameter's dtype cannot hold every value of the stored dtype."""
    stored = {name: STORED_DTYPES[reader.manifest.tensors[f"{MODEL}{name}"].dtype] for name in parameters}
    rounded = [name for name, each in parameters.items() if torch.promote_types(each.dtype, stored[name]) != each.dtype]
    if rounded:
        first, more = rounded[0], f" and {len(rounded) - 1} more" if len(rounded) > 1 else ""
        raise ValueError(
            f"{reader.folder} has {first}{more} in {stored[first]}, which a model in {parameters[first].dtype} would "
            f"round; load into a model in {stored[first]} and then convert the model, or call "
            f"from_pretrained(folder, dtype={parameters[first].dtype}), which rounds"
        )


def _check_sums_of_all_ranks(reader: FolderReader) -> None:
    """Compares the checksums of all ranks' reads with the manifest's, on rank 0; see `check_sums`.

    Communication: a gather of the sums, and a broadcast of the outcome.
    """
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
def _without_warning() -> Iterator[None]:
    """Silences torch's warning about a missing process group, in a process without one."""
    with nullcontext() if dist.is_initialized() else warnings.catch_warnings():
        if not dist.is_initialized():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield


def _first_failure(error: CheckpointException) -> BaseException:
    """The error of the lowest failed rank."""
    cause: BaseException = min(error.failures.items())[1][0]
    return cause
