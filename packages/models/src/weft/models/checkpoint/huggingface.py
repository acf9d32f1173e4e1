"""Reads and writes Hugging Face folders: config.json and safetensors files. Each rank reads only local slices."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from weft.mesh import ProcessMesh
from weft.reshard import layout_of, to_global
from weft.reshard.extension import mesh_argument, wrap

from ..config import ModelConfig
from ..data.tokenizer import FILES, Tokenizer
from ..families import FAMILIES, family_of, foreign_part, make_model
from ..initialization import local_slices
from ..losses import local_value
from ..parallel import ParallelPlan, parallelize
from ..parallel.lora import adapter_names, merged_parameter
from ..parallel.parallelize import pipeline_of
from .adapter_tensors import StoredAdapters, add_adapters, open_adapters
from .companions import GENERATION_FILE, Companions, attach_companions, companions_of, read_companions
from .configs import ADAPTER_CONFIG, base_folder, check_layers, is_adapter_folder, read_config, weights_of
from .fields import StoredGroup, common_dtype, group_by_stored_tensor
from .manifest import ADAPTERS, CHECKSUMS, CONFIG, MANIFEST, MODEL, Manifest, StoredFile, StoredTensor, as_document
from .shards import STORED_DTYPES, sync_folder, write_documents, write_file
from .states import fill_from
from .storage import begin_folder, own_partial_path
from .tensors import (
    INDEX_FILE,
    SINGLE_FILE,
    WEIGHT_DTYPES,
    FolderChecksums,
    check_tensors,
    open_tensors,
    read_parameter,
    write_with_checksums,
)

SHARD_BYTES = 5_000_000_000  # the size of a weights file, as in transformers


def from_pretrained(
    folder: str | Path,
    mesh: ProcessMesh | DeviceMesh | None = None,
    plan: ParallelPlan | None = None,
    *,
    device_mesh: ProcessMesh | DeviceMesh | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> nn.Module:
    """Reads the model of a Hugging Face folder, of a checkpoint of a run, or of a folder of LoRA adapters.

    A folder of adapters, as written by `save_lora` and peft, gives the base model, from the folder named by
    base_model_name_or_path, with the adapters beside the layers; `merge_lora` folds the adapters in. The adapters'
    dtype is float32 at least. Tokenizer and generation settings come from the folder of adapters, else from the base.
    mesh, plan: lay the model out on `mesh` by `plan` (None: by the model's own plan). Without a mesh: a single device.
    device_mesh: torch's name for `mesh`; None: `mesh` is given, or no mesh.
    dtype: of the parameters; stored values are rounded to this dtype. Where None, each parameter keeps the stored
        dtype. A folder in bfloat16 then gives bfloat16 parameters, and an optimizer loses small updates
        to 16-bit weights: to train the whole model, give dtype=torch.float32 and compute in bfloat16 by
        torch.autocast.
    Each rank reads only local slices. Reads from a checkpoint, and from a folder written by Weft, are verified
    against checksums.
    The model carries the folder's tokenizer files, chat template, generation_config.json and the token ids in
    config.json; `save_pretrained` and `save_checkpoint` write these files and fields again.
    Communication: for a Hugging Face folder with checksums, on a mesh: an all-gather of the checksums along each
    axis. For a checkpoint, as `load_checkpoint`.
    Raises ValueError, before any weight is read, for an absent or incomplete folder and for an unsupported model;
    DamagedCheckpoint for a folder changed after the save.
    """
    mesh = mesh_argument(mesh, device_mesh)
    folder = Path(folder)
    if not is_adapter_folder(folder):
        return _read_model(folder, None, mesh, plan, torch.device(device), dtype)
    model = _read_model(base_folder(folder), folder, mesh, plan, torch.device(device), dtype)
    own, base = read_companions(folder, (*FILES, GENERATION_FILE)), companions_of(model)
    attach_companions(model, replace(base, files={**base.files, **own}))
    return model


def _model_on_meta(config: ModelConfig) -> nn.Module:
    """A model of the config without memory for its parameters."""
    with torch.device("meta"):
        return make_model(config)


def _read_model(
    folder: Path,
    adapters: Path | None,
    mesh: ProcessMesh | DeviceMesh | None,
    plan: ParallelPlan | None,
    device: torch.device,
    dtype: torch.dtype | None,
) -> nn.Module:
    """See `from_pretrained`. folder: of the model. adapters: the folder of adapters to add, or None."""
    if (folder / MANIFEST).is_file():
        return _from_checkpoint(folder, adapters, mesh, plan, device, dtype)
    config = read_config(folder)
    weights = weights_of(folder, config)
    own_config = weights.read_config(config)
    sums = FolderChecksums(folder)
    with ExitStack() as files:
        tensors = open_tensors(folder, files, weights.PREFIX, sums)
        check_layers(own_config, tensors, folder)
        model = _model_on_meta(own_config)
        check_tensors(model, tensors, folder, weights)
        stored_adapters = _attach_adapters(model, weights, adapters, dtype, files)
        if mesh is not None:
            model = parallelize(model, mesh, plan)
        values = {} if stored_adapters is None else dict(stored_adapters.read(model))
        loaded: dict[Tensor, nn.Parameter] = {}
        for name, parameter in model.named_parameters():
            if name in values:
                part = values[name].to(device, parameter.dtype)
            else:
                part = read_parameter(
                    weights.stored(name), tensors, local_slices(parameter), tuple(parameter.shape), device, dtype
                )
            if isinstance(parameter, DTensor):
                part = wrap(part, layout_of(parameter), parameter.shape)
            loaded[parameter] = nn.Parameter(part, parameter.requires_grad)
        _replace(model, loaded)
    sums.check(mesh, torch.device(device))
    attach_companions(model, Companions.read(folder, config, sums.check_content))
    return model


def save_pretrained(
    model: nn.Module, folder: str | Path, *, shard_bytes: int = SHARD_BYTES, tokenizer: Tokenizer | None = None
) -> None:
    """Writes a Hugging Face folder, for transformers' `AutoModelForCausalLM.from_pretrained` and Weft's
    `from_pretrained`.

    Rank 0 writes under a temporary name and then renames: the folder appears complete or not at all.
    LoRA adapters are merged into the written weights, as by `merge_lora`; the model itself is unchanged. `save_lora`
    writes the adapters alone.
    shard_bytes: a larger model is written as several files. Each file is gathered and written before the next.
    tokenizer: written into the folder, where `weft generate` and transformers' AutoTokenizer look. These files
        replace the model's own tokenizer files, see `from_pretrained`. The tokenizer's end token becomes eos_token_id
        where the model's folder had none. None: the model's own tokenizer files are written.
    Every rank must call this. Communication, for a parallel model: each parameter is gathered on every rank of the
    parameter's mesh and broadcast over "pp"; rank 0's outcome is broadcast once before and once after.
    Raises ValueError where the folder exists, and for a model outside the families, as a subclass with a different
    computation; OSError where the folder cannot be written. A parallel model raises on
    every rank.
    """
    folder = Path(folder)
    weights = weights_of_model(model)
    pipeline, parallel = pipeline_of(model), is_parallel(model)
    writer = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
    temporary = own_partial_path(folder)
    error: Exception | None = None
    if writer:
        error = attempt(begin_folder, folder, temporary)
    raise_on_all(error, parallel)

    adapters = adapter_names(model)
    named = model.named_parameters() if pipeline is None else pipeline.parameters.items()
    parameters = {name: parameter for name, parameter in named if name not in adapters}
    stored: dict[str, StoredTensor] = {}
    files: dict[str, StoredFile] = {}

    def write(filename: str, whole: Mapping[str, Tensor]) -> None:
        shapes = {name: (tensor.dtype, tensor.shape) for name, tensor in whole.items()}
        files[filename], found = write_with_checksums(temporary / filename, shapes, whole.values())
        stored.update(found)

    for filename, groups in group_into_files(parameters, weights, shard_bytes).items():
        whole: dict[str, Tensor] = {}
        for group in groups:
            gathered = [whole_parameter(model, name, keep=writer) for name in group.parameters]
            whole |= group.values(weights.stored, gathered)
            del gathered
        if writer and error is None:  # after a failure all ranks still gather; the error is raised at the end
            error = attempt(write, filename, whole)
    if writer and error is None:
        companions = companions_of(model).with_tokenizer(tokenizer)
        config = companions.in_config(weights.write_config(model))
        whole_manifest = Manifest(stored, files, CHECKSUMS)
        error = attempt(finish_pretrained, config, whole_manifest, companions.files, temporary, folder)
    if error is not None:
        shutil.rmtree(temporary, ignore_errors=True)
    raise_on_all(error, parallel)


# Reading


def _attach_adapters(
    model: nn.Module, weights: Any, folder: Path | None, dtype: torch.dtype | None, files: ExitStack
) -> StoredAdapters | None:
    """Add a folder's adapters to a model on the meta device; None for no folder. files: closes the folder's file.

    weights: the module of the model's family. dtype: of the model's parameters.
    """
    if folder is None:
        return None
    stored = files.enter_context(open_adapters(model, weights, folder))
    stored.attach(model, dtype=torch.promote_types(dtype or torch.float32, torch.float32))
    return stored


def _from_checkpoint(
    folder: Path,
    adapters: Path | None,
    mesh: ProcessMesh | DeviceMesh | None,
    plan: ParallelPlan | None,
    device: torch.device,
    dtype: torch.dtype | None,
) -> nn.Module:
    manifest = Manifest.read(folder)
    if CONFIG not in manifest.files:
        raise ValueError(
            f"{folder} has no config.json, as for a model class outside Weft's families; build the model, and call "
            f"load_checkpoint(model, folder)"
        )
    config = manifest.document(folder, CONFIG)
    weights = weights_of(folder, config)
    own_config = weights.read_config(config)
    check_layers(own_config, manifest.tensors, folder)
    model = _model_on_meta(own_config)
    if ADAPTERS in manifest.files:
        if adapters is not None:
            raise ValueError(
                f"{adapters} holds adapters of {folder}, a checkpoint of a model with adapters; fold these in by "
                f"`weft convert {folder} OUT`, and name OUT as the base model in {adapters / ADAPTER_CONFIG}"
            )
        add_adapters(model, manifest.document(folder, ADAPTERS), folder / ADAPTERS)
    own = {name: manifest.tensors.get(f"{MODEL}{name}") for name, _ in model.named_parameters()}
    dtypes = {
        name: (dtype if dtype is not None and ".lora." not in name else None)
        or (torch.float32 if each is None else WEIGHT_DTYPES[each.dtype])
        for name, each in own.items()
    }
    _replace(
        model,
        {each: nn.Parameter(each.to(dtypes[name]), each.requires_grad) for name, each in model.named_parameters()},
    )
    with ExitStack() as files:
        stored_adapters = _attach_adapters(model, weights, adapters, dtype, files)
        if mesh is not None:
            model = parallelize(model, mesh, plan)
        model.to_empty(device=device)
        fill_from(model, folder, rounding=dtype is not None, absent=() if adapters is None else adapter_names(model))
        if stored_adapters is not None:
            for name, values in stored_adapters.read(model):
                local_value(model.get_parameter(name)).copy_(values)
    return model


def _replace(model: nn.Module, loaded: Mapping[Tensor, nn.Parameter]) -> None:
    """Replaces every parameter in all modules holding the parameter: tied weights stay tied."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            setattr(module, name, loaded[parameter])


# Writing


def weights_of_model(model: nn.Module) -> Any:
    """The `weights` module of the model's family, which maps config and parameter names to Hugging Face's.

    Raises ValueError for a model outside the families.
    """
    family = family_of(model)
    if family is None:
        part = foreign_part(model)
        remedy = (
            f"; save one of {', '.join(FAMILIES)}"
            if part is None
            else f": {part}; save_checkpoint(model, folder) writes its weights, for a model of the same class to load"
        )
        raise ValueError(f"a {type(model).__name__} has no Hugging Face form{remedy}")
    return family.weights


def group_into_files(parameters: Mapping[str, Tensor], weights: Any, shard_bytes: int) -> dict[str, list[StoredGroup]]:
    """{file name: groups of stored tensors}. A file holds up to `shard_bytes`, or a single larger group."""
    files: list[list[StoredGroup]] = [[]]
    held = 0
    for group in group_by_stored_tensor({n: tuple(each.shape) for n, each in parameters.items()}, weights.stored):
        nbytes = sum(parameters[name].numel() * parameters[name].element_size() for name in group.parameters)
        if files[-1] and held + nbytes > shard_bytes:
            files.append([])
            held = 0
        files[-1].append(group)
        held += nbytes
    if len(files) == 1:
        return {SINGLE_FILE: files[0]}
    return {f"model-{i:05}-of-{len(files):05}.safetensors": groups for i, groups in enumerate(files, 1)}


def is_parallel(model: nn.Module) -> bool:
    """Whether the model is laid out over several ranks: has stages or DTensor parameters."""
    return pipeline_of(model) is not None or any(isinstance(parameter, DTensor) for parameter in model.parameters())


def whole_parameter(model: nn.Module, name: str, keep: bool) -> Tensor:
    """Gathers a parameter, with the adapter merged, on every rank, on the CPU. keep: False returns an empty tensor."""
    pipeline = pipeline_of(model)
    if pipeline is None:
        parameter = merged_parameter(model, name)
    else:
        parameter = pipeline.whole_parameter(model, name, merged_parameter)
    with torch.no_grad():
        whole = to_global(parameter) if isinstance(parameter, DTensor) else parameter
        return whole.detach().cpu().contiguous() if keep else whole.new_empty((0, *whole.shape[1:]))


def finish_pretrained(
    config: dict[str, Any], manifest: Manifest, documents: Mapping[str, bytes], temporary: Path, folder: Path
) -> None:
    """Writes the remaining files and renames the temporary folder; returns when everything is on disk.

    The files: config.json, the index if there are several weights files, `documents`, and the checksums.
    manifest: of the safetensors files, which are already written.
    """
    stored = [(STORED_DTYPES[tensor.dtype], torch.Size(tensor.shape)) for tensor in manifest.tensors.values()]
    dtype = common_dtype(each for each, _ in stored)  # transformers converts every tensor to this dtype
    written = {CONFIG: as_document({**config, "torch_dtype": str(dtype).removeprefix("torch.")}), **documents}
    if len(manifest.files) > 1:
        total = sum(each.itemsize * shape.numel() for each, shape in stored)
        weight_map = {name: tensor.parts[0].file for name, tensor in manifest.tensors.items()}
        written[INDEX_FILE] = as_document({"metadata": {"total_size": total}, "weight_map": weight_map})
    files = write_documents(temporary, written)
    whole = Manifest(manifest.tensors, {**manifest.files, **files}, CHECKSUMS)
    write_file(temporary / CHECKSUMS, whole.text().encode())
    sync_folder(temporary)
    temporary.rename(folder)
    sync_folder(folder.parent)


def attempt(function: Any, *arguments: Any, **options: Any) -> Exception | None:
    """Calls a function; returns the OSError, ValueError or SafetensorError raised by the call, or None."""
    try:
        function(*arguments, **options)
    except (OSError, ValueError, SafetensorError) as error:
        return error
    return None


def raise_on_all(error: Exception | None, parallel: bool) -> None:
    """Raises rank 0's error on every rank. Called by all ranks after rank 0 has done a step, as writing a file.

    error: the outcome of `attempt` on rank 0, None for success; ignored on other ranks.
    parallel: False for a single process, which raises `error` without communication.
    Communication: a broadcast from rank 0.
    """
    if parallel:
        outcome = [error]
        torch.distributed.broadcast_object_list(outcome, src=0)
        error = outcome[0]
    if error is not None:
        raise error
