"""Hugging Face folders: config.json and safetensors, read in parts and written whole."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from weft.mesh import ProcessMesh
from weft.reshard import layout_of, to_global
from weft.reshard.running.dtensor import one_mesh, wrap

from ..data.tokenizer import Tokenizer
from ..families import FAMILIES, family_of, make_model
from ..initialization import local_slices
from ..parallel import ParallelPlan, parallelize
from ..parallel.lora import adapter_names, merged_parameter
from ..parallel.parallelize import pipeline_of
from .checksums import INDEX_FILE, Sums, write_summed
from .manifest import CHECKSUMS, CONFIG, MANIFEST, MODEL, Manifest, StoredFile, StoredTensor, as_document
from .shards import sync_folder, write_file
from .states import load_checkpoint
from .stored import grouped, joined

SINGLE_FILE = "model.safetensors"
SHARD_BYTES = 5_000_000_000  # a file's size, as transformers writes them

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


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
    dtype: of the parameters; as stored where None.
    Raises ValueError, before a weight is read, for a folder that is absent, incomplete or of an unsupported model;
    DamagedCheckpoint for one that is not as it was written.
    """
    mesh = one_mesh(mesh, device_mesh)
    folder = Path(folder)
    if (folder / MANIFEST).is_file():
        return _from_checkpoint(folder, mesh, plan, torch.device(device), dtype)
    config = read_config(folder)
    weights = weights_of(folder, config)
    with torch.device("meta"):
        model = make_model(weights.read_config(config))
    sums = Sums(folder)
    with ExitStack() as files:
        tensors = open_tensors(folder, files, weights.PREFIX, sums)
        check_tensors(model, tensors, folder, weights)
        if mesh is not None:
            model = parallelize(model, mesh, plan)
        loaded: dict[Tensor, nn.Parameter] = {}
        for name, parameter in model.named_parameters():
            stored = weights.stored(name)
            file = tensors[stored.name]()
            held = stored.slices(local_slices(parameter), tuple(parameter.shape))
            part = stored.restored(read_slices(file, held)).to(device, dtype or _DTYPES[file.get_dtype()])
            if isinstance(parameter, DTensor):
                part = wrap(part, layout_of(parameter), parameter.shape)
            loaded[parameter] = nn.Parameter(part, parameter.requires_grad)
        _replace(model, loaded)
    sums.check(mesh, torch.device(device))
    return model


def save_pretrained(
    model: nn.Module, folder: str | Path, *, shard_bytes: int = SHARD_BYTES, tokenizer: Tokenizer | None = None
) -> None:
    """Writes a folder that transformers' `AutoModelForCausalLM.from_pretrained` and `from_pretrained` read.

    Rank 0 writes, next to the folder and then under its name, so a folder is there whole or not at all.
    Adapters are folded into what is written, as `merge_lora` does it; the model stays as it is. `save_lora` writes them alone.
    shard_bytes: a model of more bytes is written as several files, each gathered and written before the next.
    tokenizer: its files are put into the folder, where `weft generate` and transformers' AutoTokenizer find them.
    Communication: each parallel parameter is brought whole to every rank of its mesh, and from its stage to the others; with such parameters, one
        broadcast of rank 0's outcome before and one after. Every rank calls it.
    Raises ValueError where the folder exists or the model is of an unknown kind, OSError where it cannot be written;
        on every rank, for a parallel model.
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
        documents = dict(() if tokenizer is None else tokenizer.files)
        config = weights.write_config(model)
        error = attempt(
            finish_pretrained, parameters, config, Manifest(stored, files, CHECKSUMS), documents, temporary, folder
        )
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
    first = next(each for name, each in manifest.tensors.items() if name.startswith(MODEL))
    with torch.device("meta"):
        model = make_model(weights_of(folder, config).read_config(config)).to(dtype or _DTYPES[first.dtype])
    if mesh is not None:
        model = parallelize(model, mesh, plan)
    model.to_empty(device=device)
    load_checkpoint(model, folder)
    return model


def read_config(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; give one with config.json and safetensors files")
    return read_json(folder / "config.json", "give a folder that transformers or Weft saved a model in")


def read_json(path: Path, remedy: str) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"{path.parent} has no {path.name}; {remedy}")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}; fetch or save it again") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__}, not an object; fetch or save it again")
    return value


def weights_of(folder: Path, config: Mapping[str, Any]) -> Any:
    kind = str(config.get("model_type"))
    if kind not in FAMILIES:
        raise ValueError(
            f"{folder / 'config.json'}: model_type {kind!r} is not supported; use one of {', '.join(FAMILIES)}"
        )
    return FAMILIES[kind].weights


def open_tensors(folder: Path, files: ExitStack, prefix: str, sums: Sums) -> dict[str, Callable[[], Any]]:
    """By name, what gives each tensor to read slices of, which are noted in `sums`.

    prefix: of the names within the model without its head. Where no name has it, such a model was saved alone, as the
    published GPT-2 was, and all names are of it.
    """
    tensors: dict[str, Callable[[], Any]] = {}
    for filename in weight_files(folder):
        if not (folder / filename).is_file():
            raise ValueError(f"{folder} has no {filename}, which {INDEX_FILE} names; fetch it again")
        sums.check_header(filename)
        try:
            file = files.enter_context(safe_open(folder / filename, framework="pt", device="cpu"))
        except SafetensorError as error:
            raise ValueError(f"{folder / filename} is not a safetensors file: {error}; fetch it again") from None
        names: list[str] = file.keys()  # it is no mapping, and has no iterator
        tensors.update({name: partial(_slices, sums, file, name) for name in names})
    if any(name.startswith(prefix) for name in tensors):
        return tensors
    return {f"{prefix}{name}": tensor for name, tensor in tensors.items()}


def weight_files(folder: Path) -> list[str]:
    """The names of the safetensors files of a folder. Raises ValueError where it has none."""
    if (folder / INDEX_FILE).is_file():
        index = read_json(folder / INDEX_FILE, "").get("weight_map")
        if not isinstance(index, dict):
            raise ValueError(f"{folder / INDEX_FILE} has no weight_map; fetch or save it again")
        return sorted(set(index.values()))
    if (folder / SINGLE_FILE).is_file():
        return [SINGLE_FILE]
    raise ValueError(
        f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}; "
        f"save the model with save_pretrained(..., safe_serialization=True)"
    )


def _slices(sums: Sums, file: Any, name: str) -> Any:
    return sums.of(name, file.get_slice(name))


def check_tensors(model: nn.Module, tensors: Mapping[str, Callable[[], Any]], folder: Path, weights: Any) -> None:
    """Raises ValueError unless the files hold the model's tensors, in its shapes, and no others."""
    shapes = {}
    for name, parameter in model.named_parameters():
        stored = weights.stored(name)
        shapes[stored.name] = stored.shape(tuple(parameter.shape))
    missing = [name for name in shapes if name not in tensors]
    if missing:
        raise ValueError(f"{folder} lacks {_listed(missing)}; check config.json against the files")
    unexpected = [name for name in tensors if name not in shapes and not weights.is_ignored(name, model)]
    if unexpected:
        raise ValueError(f"{folder} holds {_listed(unexpected)}, which config.json's model does not have; check it")
    for name, shape in shapes.items():
        stored = tensors[name]()
        if tuple(stored.get_shape()) != shape:
            raise ValueError(
                f"{folder}: {name} has shape {tuple(stored.get_shape())}, but config.json makes it {shape}; check it"
            )
        if stored.get_dtype() not in _DTYPES:
            raise ValueError(f"{folder}: {name} is {stored.get_dtype()}; save it as one of {', '.join(_DTYPES)}")


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 3} more tensors" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def read_slices(stored: Any, part: tuple[slice, ...]) -> Tensor:
    shape = [s.stop - s.start for s in part]
    if 0 in shape:
        return torch.empty(shape, dtype=_DTYPES[stored.get_dtype()])
    tensor: Tensor = stored[part]
    return tensor.contiguous()


def _replace(model: nn.Module, loaded: Mapping[Tensor, nn.Parameter]) -> None:
    """Puts each new parameter in every place that holds the old one, so tied weights stay one."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            setattr(module, name, loaded[parameter])


# Writing


def weights_of_model(model: nn.Module) -> Any:
    family = family_of(model)
    if family is None:
        raise ValueError(f"a {type(model).__name__} has no Hugging Face form; save one of {', '.join(FAMILIES)}")
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
    parameters: Mapping[str, Tensor],
    config: dict[str, Any],
    manifest: Manifest,
    documents: Mapping[str, bytes],
    temporary: Path,
    folder: Path,
) -> None:
    """Adds the config, the index of several files, the documents and the checksums, and gives the folder its name.

    It returns when the disk has all. manifest: of the safetensors files, which are written.
    """
    dtype = next(iter(parameters.values())).dtype
    written = {CONFIG: as_document({**config, "torch_dtype": str(dtype).removeprefix("torch.")}), **documents}
    if len(manifest.files) > 1:
        total = sum(parameter.numel() * parameter.element_size() for parameter in parameters.values())
        weight_map = {name: tensor.parts[0].file for name, tensor in manifest.tensors.items()}
        written[INDEX_FILE] = as_document({"metadata": {"total_size": total}, "weight_map": weight_map})
    files = {name: write_file(temporary / name, content) for name, content in written.items()}
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
