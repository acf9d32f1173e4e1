"""Adapters on disk, in the folder layout that `peft` reads and writes: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..initialization import local_slices
from ..parallel.lora import lora, lora_of
from .huggingface import attempt, is_parallel, raise_on_all, read_json, start_folder, weights_of_model, whole_parameter

CONFIG_FILE, FILE, PREFIX = "adapter_config.json", "adapter_model.safetensors", "base_model.model."
# Fields of adapter_config.json that change what adapters compute, and the values of those here.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_rslora": (False,),
    "use_dora": (False,),
    "use_qalora": (False,),
    "lora_bias": (False,),
    "rank_pattern": ({},),
    "alpha_pattern": ({},),
    "modules_to_save": (None, []),
    "layers_to_transform": (None, []),
    "layer_replication": (None,),
    "trainable_token_indices": (None, []),
    "target_parameters": (None, []),
    "alora_invocation_tokens": (None, []),
}


def save_lora(model: nn.Module, folder: str | Path, *, base: str | None = None) -> None:
    """Writes the adapters alone, as `peft.PeftModel.from_pretrained` and `load_lora` read them.

    base: the name or folder of the model that they are for, which is written down.
    Communication: as of `save_pretrained`, of the adapters alone. Every rank calls it.
    Raises ValueError for a model without adapters or of an unknown kind, for a layer that Hugging Face's model keeps in one
    with others, and where the folder exists; OSError where it cannot be written; on every rank, for a parallel model.
    """
    folder, adapters = Path(folder), lora_of(model)
    names = {layer: _stored_layer(model, layer) for layer in adapters.layers}
    parallel = is_parallel(model)
    writer = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
    temporary = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
    error = attempt(start_folder, folder, temporary) if writer else None
    raise_on_all(error, parallel)
    tensors: dict[str, Tensor] = {}
    for layer, name in names.items():
        for leaf in ("A", "B"):
            tensors[f"{PREFIX}{name}.lora_{leaf}.weight"] = whole_parameter(model, f"{layer}.lora.{leaf}", keep=writer)
    if writer:
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base,
            "r": adapters.rank,
            "lora_alpha": adapters.alpha,
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": any(weights_of_model(model).stored(f"{layer}.weight").transposed for layer in names),
            "target_modules": list(names.values()),
            "inference_mode": True,
        }
        error = attempt(_write, tensors, config, temporary, folder)
        if error is not None:
            shutil.rmtree(temporary, ignore_errors=True)
    raise_on_all(error, parallel)


def load_lora(model: nn.Module, folder: str | Path) -> nn.Module:
    """`model` itself, with the adapters of a folder that `save_lora` or `peft` wrote; before or after `parallelize`.

    Each rank reads the parts that it holds. What dropout the adapters were trained with acts in training alone, and is left out.
    Communication: none.
    Raises ValueError for a folder that has no such adapters, a setting that these here have not, layers that the model
    has not, tensors of other shapes, and as `lora`.
    """
    folder = Path(folder)
    config = read_json(folder / CONFIG_FILE, "give a folder that save_lora or peft saved adapters in")
    for field, plain in _PLAIN.items():
        if field in config and config[field] not in plain:
            raise ValueError(
                f"{folder / CONFIG_FILE}: {field} {config[field]!r} is not supported; it may be {plain[0]!r}"
            )
    layers = {
        _stored_layer(model, name, check=False): name
        for name, each in model.named_modules()
        if isinstance(each, nn.Linear)
    }
    try:
        file: Any = safe_open(folder / FILE, framework="pt", device="cpu")
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{folder / FILE} cannot be read: {error}; fetch it again") from None
    with file:
        found: dict[str, str] = {}  # by our parameter, the tensor
        for tensor in file.keys():  # noqa: SIM118  it is no mapping
            match = re.fullmatch(rf"{re.escape(PREFIX)}(.+)\.lora_([AB])(?:\.default)?\.weight", tensor)
            if match is None or match[1] not in layers:
                raise ValueError(
                    f"{folder / FILE} holds {tensor}, for which {type(model).__name__} has no layer; check it"
                )
            found[f"{layers[match[1]]}.lora.{match[2]}"] = tensor
        lora(model, config["r"], config["lora_alpha"], sorted({name.rpartition(".lora.")[0] for name in found}))
        for name in (f"{layer}.lora.{leaf}" for layer in lora_of(model).layers for leaf in ("A", "B")):
            parameter = model.get_parameter(name)
            if name not in found or tuple(file.get_slice(found[name]).get_shape()) != tuple(parameter.shape):
                raise ValueError(f"{folder / FILE} has no {name} of shape {tuple(parameter.shape)}; check it")
            part = file.get_slice(found[name])[local_slices(parameter)]
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            with torch.no_grad():
                local.copy_(part)
    return model


def _stored_layer(model: nn.Module, layer: str, *, check: bool = True) -> str:
    """The name of a layer in Hugging Face's model. Raises ValueError where it is one with others there."""
    stored = weights_of_model(model).stored(f"{layer}.weight")
    if stored.parts > 1:
        if check:
            raise ValueError(
                f"{layer} is a part of {stored.name} in Hugging Face's model, and an adapter of a part cannot be said in peft's "
                f"folder; fold it in by merge_lora(model), and save_pretrained(model, folder)"
            )
        return f"{layer} "  # no name of a layer there
    name: str = stored.name
    return name.removesuffix(".weight")


def _write(tensors: dict[str, Tensor], config: dict[str, Any], temporary: Path, folder: Path) -> None:
    save_file(tensors, temporary / FILE, metadata={"format": "pt"})
    (temporary / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    temporary.rename(folder)
