"""Hugging Face folders: config.json and safetensors, read in parts and written whole."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from weft.mesh import ProcessMesh
from weft.reshard import layout_of, to_global
from weft.reshard.running.dtensor import one_mesh, wrap

from ..data.tokenizer import Tokenizer
from ..families import FAMILIES, family_of, foreign_part, make_model
from ..initialization import local_slices
from ..parallel import ParallelPlan, parallelize
from ..parallel.lora import adapter_names, merged_parameter
from ..parallel.parallelize import pipeline_of
from .checksums import INDEX_FILE, Sums, write_summed
from .companions import Companions, companions_of, keep_companions
from .configs import check_layers, read_config, weights_of
from .manifest import CHECKSUMS, CONFIG, MANIFEST, MODEL, Manifest, StoredFile, StoredTensor, as_document
from .shards import DTYPES as STORED_DTYPES
from .shards import sync_folder, write_documents, write_file
from .states import fill_from
from .stored import grouped, joined, widest
from .tensors import DTYPES, SINGLE_FILE, check_tensors, open_tensors, read_slices

SHARD_BYTES = 5_000_000_000  # a file's size, as transformers writes them


def from_pretrained(
    folder: str | Path,
    mesh: ProcessMesh | DeviceMesh | None = None,
    plan: ParallelPlan | None = None,
    *,
    device_mesh: ProcessMesh | DeviceMesh | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> nn.Module:
    """The model of a Hugging Face folder or of a checkpoint of a run, on one device, or laid out on `mesh` by `plan` (its own
    where None).

    Each rank reads the slices that it holds, no more. What is read of a checkpoint, and of a folder that Weft wrote, is compared
    with its checksums. Communication: with a mesh a gather of these sums along each axis; of a checkpoint that of
    `load_checkpoint`.
    device_mesh: torch's name for the mesh; give one of the two.
    dtype: of the parameters, to which stored values are rounded; where None each parameter keeps the dtype of its own stored
        tensor. So a folder in bfloat16 gives parameters in bfloat16, and an optimizer then updates 16-bit weights, in which
        small updates are lost: give dtype=torch.float32 to train the whole model, and compute in bfloat16 by torch.autocast.
    The model carries what the folder says beside the network, which `save_pretrained` and `save_checkpoint` write again: the
    files of the tokenizer, the chat template, generation_config.json and the ids of tokens in config.json.
    Raises ValueError, before a weight is read, for a folder that is absent, incomplete or of an unsupported model;
    DamagedCheckpoint for one that is not as it was written.
    """
    mesh = one_mesh(mesh, device_mesh)
    folder = Path(folder)
    if (folder / MANIFEST).is_file():
        return _from_checkpoint(folder, mesh, plan, torch.device(device), dtype)
    config = read_config(folder)
    weights = weights_of(folder, config)
    own = weights.read_config(config)
    sums = Sums(folder)
    with ExitStack() as files:
        tensors = open_tensors(folder, files, weights.PREFIX, sums)
        check_layers(own, tensors, folder)
        with torch.device("meta"):
            model = make_model(own)
        check_tensors(model, tensors, folder, weights)
        if mesh is not None:
            model = parallelize(model, mesh, plan)
        loaded: dict[Tensor, nn.Parameter] = {}
        for name, parameter in model.named_parameters():
            stored = weights.stored(name)
            file = tensors[stored.name]()
            held = stored.slices(local_slices(parameter), tuple(parameter.shape))
            part = stored.restored(read_slices(file, held)).to(device, dtype or DTYPES[file.get_dtype()])
            if isinstance(parameter, DTensor):
                part = wrap(part, layout_of(parameter), parameter.shape)
            loaded[parameter] = nn.Parameter(part, parameter.requires_grad)
        _replace(model, loaded)
    sums.check(mesh, torch.device(device))
    keep_companions(model, Companions.read(folder, config, sums.check_content))
    return model


def save_pretrained(
    model: nn.Module, folder: str | Path, *, shard_bytes: int = SHARD_BYTES, tokenizer: Tokenizer | None = None
) -> None:
    """Writes a folder that transformers' `AutoModelForCausalLM.from_pretrained` and `from_pretrained` read.

    Rank 0 writes, next to the folder and then under its name, so a folder is there whole or not at all.
    Adapters are folded into what is written, as `merge_lora` does it; the model stays as it is. `save_lora` writes them alone.
    shard_bytes: a model of more bytes is written as several files, each gathered and written before the next.
    What the model's own folder said beside the network goes along, see `from_pretrained`.
    tokenizer: its files are put into the folder, where `weft generate` and transformers' AutoTokenizer find them, in the place
        of those that go along; the end of its documents is eos_token_id where the model's folder had none.
    Communication: each parallel parameter is brought whole to every rank of its mesh, and from its stage to the others; with such parameters, one
        broadcast of rank 0's outcome before and one after. Every rank calls it.
    Raises ValueError where the folder exists, and where the model is of an unknown kind or computes otherwise than its family,
        as a subclass with another MLP does; OSError where it cannot be written; on every rank, for a parallel model.
    """
    folder = Path(folder)
    weights = weights_of_model(model)
    pipeline, parallel = pipeline_of(model), is_parallel(model)
    writer = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
    temporary = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
    error: Exception | None = None
    if writer:
        error = attempt(start_folder, folder, temporary)
    raise_on_all(error, parallel)

    adapters = adapter_names(model)
    named = model.named_parameters() if pipeline is None else pipeline.parameters.items()
    parameters = {name: parameter for name, parameter in named if name not in adapters}
    stored: dict[str, StoredTensor] = {}
    files: dict[str, StoredFile] = {}

    def write(filename: str, whole: Mapping[str, Tensor]) -> None:
        shapes = {name: (tensor.dtype, tensor.shape) for name, tensor in whole.items()}
        files[filename], found = write_summed(temporary / filename, shapes, whole.values())
        stored.update(found)

    for filename, tensors in shards_of(parameters, weights, shard_bytes).items():
        whole = {
            tensor: joined([(weights.stored(name), whole_parameter(model, name, keep=writer)) for name in names])
            for tensor, names in tensors.items()
        }
        if writer and error is None:  # after a failure the ranks still gather together, and hear of it at the end
            error = attempt(write, filename, whole)
    if writer and error is None:
        along = companions_of(model).with_tokenizer(tokenizer)
        config = along.in_config(weights.write_config(model))
        whole_manifest = Manifest(stored, files, CHECKSUMS)
        error = attempt(finish_pretrained, config, whole_manifest, along.files, temporary, folder)
    if error is not None:
        shutil.rmtree(temporary, ignore_errors=True)
    raise_on_all(error, parallel)


# Reading


def _from_checkpoint(
    folder: Path,
    mesh: ProcessMesh | DeviceMesh | None,
    plan: ParallelPlan | None,
    device: torch.device,
    dtype: torch.dtype | None,
) -> nn.Module:
    manifest = Manifest.read(folder)
    if CONFIG not in manifest.files:
        raise ValueError(
            f"{folder} is of a model of no family, so its config is not known; make the model, and load_checkpoint(model, folder)"
        )
    config = manifest.document(folder, CONFIG)
    own = weights_of(folder, config).read_config(config)
    check_layers(own, manifest.tensors, folder)
    with torch.device("meta"):
        model = make_model(own)
    stored = {name: manifest.tensors.get(f"{MODEL}{name}") for name, _ in model.named_parameters()}
    dtypes = {name: dtype or (torch.float32 if each is None else DTYPES[each.dtype]) for name, each in stored.items()}
    _replace(model, {each: nn.Parameter(each.to(dtypes[name])) for name, each in model.named_parameters()})
    if mesh is not None:
        model = parallelize(model, mesh, plan)
    model.to_empty(device=device)
    fill_from(model, folder, rounding=dtype is not None)
    return model


def _replace(model: nn.Module, loaded: Mapping[Tensor, nn.Parameter]) -> None:
    """Puts each new parameter in every place that holds the old one, so tied weights stay one."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            setattr(module, name, loaded[parameter])


# Writing


def weights_of_model(model: nn.Module) -> Any:
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


def shards_of(parameters: Mapping[str, Tensor], weights: Any, shard_bytes: int) -> dict[str, dict[str, list[str]]]:
    """Per file name, the stored tensors that it holds and the parameters of each: each file up to shard_bytes, or one tensor."""
    files: list[dict[str, list[str]]] = [{}]
    held = 0
    for tensor, names in grouped(parameters, weights.stored).items():
        nbytes = sum(parameters[name].numel() * parameters[name].element_size() for name in names)
        if files[-1] and held + nbytes > shard_bytes:
            files.append({})
            held = 0
        files[-1][tensor] = names
        held += nbytes
    if len(files) == 1:
        return {SINGLE_FILE: files[0]}
    return {f"model-{i:05}-of-{len(files):05}.safetensors": tensors for i, tensors in enumerate(files, 1)}


def is_parallel(model: nn.Module) -> bool:
    """Whether several ranks hold the model."""
    return pipeline_of(model) is not None or any(isinstance(parameter, DTensor) for parameter in model.parameters())


def whole_parameter(model: nn.Module, name: str, keep: bool) -> Tensor:
    """The parameter of that name, its adapter folded in, from whatever stage has it, on the CPU; without rows where it is not kept."""
    pipeline = pipeline_of(model)
    if pipeline is None:
        parameter = merged_parameter(model, name)
    else:
        parameter = pipeline.whole_parameter(model, name, merged_parameter)
    with torch.no_grad():
        whole = to_global(parameter) if isinstance(parameter, DTensor) else parameter
        return whole.detach().cpu().contiguous() if keep else whole.new_empty((0, *whole.shape[1:]))


def start_folder(folder: Path, temporary: Path) -> None:
    """Makes the folder that is to be renamed. Raises ValueError where there is one of that name, OSError where it cannot be."""
    if folder.exists():
        raise ValueError(f"{folder} exists; give another folder, or remove it")
    shutil.rmtree(temporary, ignore_errors=True)  # what was left by one that was killed
    temporary.mkdir(parents=True)


def finish_pretrained(
    config: dict[str, Any], manifest: Manifest, documents: Mapping[str, bytes], temporary: Path, folder: Path
) -> None:
    """Adds the config, the index of several files, the documents and the checksums, and gives the folder its name.

    It returns when the disk has all. manifest: of the safetensors files, which are written.
    """
    stored = [(STORED_DTYPES[tensor.dtype], torch.Size(tensor.shape)) for tensor in manifest.tensors.values()]
    dtype = widest(each for each, _ in stored)  # to which transformers brings every tensor that it reads
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
    """The error of a call, or None."""
    try:
        function(*arguments, **options)
    except (OSError, ValueError, SafetensorError) as error:
        return error
    return None


def raise_on_all(error: Exception | None, parallel: bool) -> None:
    """Raises rank 0's error, on every rank where the model is parallel."""
    if parallel:
        outcome = [error]
        torch.distributed.broadcast_object_list(outcome, src=0)
        error = outcome[0]
    if error is not None:
        raise error
