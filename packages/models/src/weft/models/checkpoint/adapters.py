"""LoRA adapters on disk, in the folder layout of `peft`: adapter_config.json and adapter_model.safetensors.

`from_pretrained` reads a folder of adapters together with the base model.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..data.tokenizer import FILES, Tokenizer
from ..low_rank import adapted_parameter
from ..parallel.lora import lora_of
from .adapter_tensors import ADAPTER_FILE, PREFIX, open_adapters, stored_layer_of
from .companions import GENERATION_FILE, companions_of, read_companions
from .configs import ADAPTER_CONFIG
from .huggingface import attempt, is_parallel, raise_on_all, weights_of_model, whole_parameter
from .shards import sync_folder, write_documents
from .storage import begin_folder, own_partial_path


def save_lora(
    model: nn.Module, folder: str | Path, *, base: str | None = None, tokenizer: Tokenizer | None = None
) -> None:
    """Writes a model's adapters alone, to be read by `peft.PeftModel.from_pretrained` and `load_lora`.

    Where `base` is a folder, `from_pretrained(folder)`, `weft generate` and peft's AutoPeftModelForCausalLM read the
    base model and the adapters at once.
    base: the name or folder of the base model; recorded in adapter_config.json as given. Give an absolute path, since
        a relative one counts from the reader's working folder.
    tokenizer: written into the folder. Where None, the tokenizer files of the folder `base` are copied; without
        `base`, the files that the model carries, see `from_pretrained`. generation_config.json is copied likewise,
        from the folder `base` or else from the model.
    Hugging Face's model may join several layers, like GPT-2's q, k and v. The adapters of joined layers are written as
    a joint adapter: A stacks the layers' A matrices, B has the layers' B matrices on the diagonal, and rank and alpha
    are multiplied by the number of layers. The adapters of stacked experts are written as an adapter for each expert.
    Every rank must call this. Communication: as `save_pretrained`, for the adapters only.
    Raises ValueError for a model without adapters, a model outside the families and an existing folder; OSError where
    the folder cannot be written. A parallel model raises on every rank.
    """
    folder, adapters = Path(folder), lora_of(model)
    weights = weights_of_model(model)
    stored = {target: stored_layer_of(weights, adapted_parameter(name)) for target, name in adapters.adapters.items()}
    parallel = is_parallel(model)
    writer = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
    temporary = own_partial_path(folder)
    error = attempt(begin_folder, folder, temporary) if writer else None
    raise_on_all(error, parallel)
    parts: dict[str, dict[int, tuple[Tensor, Tensor]]] = {}
    for target, stored_layer in stored.items():
        a, b = (whole_parameter(model, f"{adapters.adapters[target]}.{leaf}", keep=writer) for leaf in ("A", "B"))
        if stored_layer.stacked:
            matrices = zip(a, b, strict=True)
            parts |= {name: {0: pair} for name, pair in zip(stored_layer.names(a.shape), matrices, strict=True)}
        else:
            parts.setdefault(stored_layer.name, {})[stored_layer.part] = a, b
    joined_layers = {name: len(own) for name, own in parts.items() if len(own) > 1}
    if writer:
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base,
            "r": adapters.rank,
            "lora_alpha": adapters.alpha,
            "rank_pattern": {name: n * adapters.rank for name, n in joined_layers.items()},
            "alpha_pattern": {name: n * adapters.alpha for name, n in joined_layers.items()},
            "lora_dropout": adapters.dropout,
            "bias": "none",
            "fan_in_fan_out": any(stored_layer.transposed for stored_layer in stored.values()),
            "target_modules": list(parts),
            "inference_mode": True,
        }
        num_parts = {stored_layer.name: stored_layer.parts for stored_layer in stored.values()}  # 1 for experts
        tensors = {
            f"{PREFIX}{name}.lora_{leaf}.weight": whole
            for name, own in parts.items()
            for leaf, whole in zip(("A", "B"), _join_adapters(own, num_parts.get(name, 1)), strict=True)
        }

        def write() -> None:
            _write(tensors, config, _documents(model, base, tokenizer), temporary, folder)

        error = attempt(write)
        if error is not None:
            shutil.rmtree(temporary, ignore_errors=True)
    raise_on_all(error, parallel)


def load_lora(
    model: nn.Module, folder: str | Path, *, dtype: torch.dtype | None = None, dropout: float | None = None
) -> nn.Module:
    """Adds the adapters of a folder that `save_lora` or `peft` wrote to `model`, and returns `model`.

    Call this before or after `parallelize`. Each rank reads only the slices it holds.
    dtype: of the adapters, as for `lora`. None: as for `lora`, too.
    dropout: of the adapters' inputs, as for `lora`. None: the folder's lora_dropout, but 0 where experts have adapters.
    Communication: none.
    Raises ValueError for a folder without LoRA adapters, an unknown or unsupported field of adapter_config.json, an
    adapter of a layer missing from the model, a tensor of the wrong shape, and whatever `lora` refuses.
    """
    with open_adapters(model, weights_of_model(model), Path(folder)) as stored, torch.no_grad():
        stored.attach(model, dtype=dtype, dropout=dropout)
        for name, values in stored.read(model):
            parameter = model.get_parameter(name)
            (parameter.to_local() if isinstance(parameter, DTensor) else parameter).copy_(values)
    return model


def _documents(model: nn.Module, base: str | None, tokenizer: Tokenizer | None) -> dict[str, bytes]:
    """The files of the tokenizer, and generation_config.json, by name; see `save_lora`."""
    if base is None:
        carried = dict(companions_of(model).files)
    else:
        carried = read_companions(Path(base), (*FILES, GENERATION_FILE))
    if tokenizer is None:
        return carried
    return {**{name: each for name, each in carried.items() if name == GENERATION_FILE}, **dict(tokenizer.files)}


def _join_adapters(parts: dict[int, tuple[Tensor, Tensor]], num_parts: int) -> tuple[Tensor, Tensor]:
    """(A, B) for a stored layer made of `num_parts` of our layers, with B's blocks on the diagonal; see `save_lora`.

    parts: {part number: (A, B)} of the parts with an adapter.
    """
    if num_parts == 1:
        return parts[0]
    pairs = [parts[part] for part in sorted(parts)]
    a = torch.cat([a for a, _ in pairs])
    outputs, rank = pairs[0][1].shape
    b = a.new_zeros(num_parts * outputs, a.shape[0])
    for i, part in enumerate(sorted(parts)):
        b[part * outputs : (part + 1) * outputs, i * rank : (i + 1) * rank] = parts[part][1]
    return a, b


def _write(
    tensors: dict[str, Tensor], config: dict[str, Any], documents: dict[str, bytes], temporary: Path, folder: Path
) -> None:
    write_documents(temporary, documents)
    save_file(tensors, temporary / ADAPTER_FILE, metadata={"format": "pt"})
    (temporary / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    sync_folder(temporary)
    temporary.rename(folder)
