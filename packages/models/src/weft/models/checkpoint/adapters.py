"""LoRA adapters on disk, in the folder layout that `peft` reads and writes.

A folder holds adapter_config.json and adapter_model.safetensors. `save_lora` and `load_lora` are for scripts: no `weft`
command calls them.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..data.tokenizer import FILES, Tokenizer
from ..documents import as_type, read_json
from ..experts import Experts
from ..initialization import local_slices
from ..low_rank import PROJECTIONS, adapted_parameter
from ..parallel.lora import lora, lora_of
from .companions import companions_of, read_companions
from .huggingface import attempt, is_parallel, raise_on_all, start_folder, weights_of_model, whole_parameter
from .shards import open_shard, write_documents
from .stored import Stored
from .tensors import WEIGHT_DTYPES

CONFIG_FILE, FILE, PREFIX = "adapter_config.json", "adapter_model.safetensors", "base_model.model."
# `load_lora` knows the fields of adapter_config.json in the three tables below; any further field is an error.
# _IGNORED: fields that affect only training, or nothing beyond the tensors and the scale.
_IGNORED = frozenset(
    [
        "auto_mapping",
        "base_model_name_or_path",
        "exclude_modules",  # like target_modules: the file has tensors for the chosen layers only
        "fan_in_fan_out",  # whether the base layer stores a transposed weight; used for merging
        "inference_mode",
        "layers_pattern",  # goes with layers_to_transform
        "lora_dropout",
        "megatron_core",  # goes with megatron_config
        "peft_version",
        "qalora_group_size",  # goes with use_qalora
        "revision",
        "target_modules",
    ]
)
_READ = ("r", "lora_alpha", "rank_pattern", "alpha_pattern")
_OFF: tuple[Any, ...] = (None, {}, [], False)
# Fields that change the adapters' output, except with the listed values.
_PLAIN: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "task_type": ("CAUSAL_LM", None),
    "bias": ("none",),
    # pissa, olora, corda, eva, loftq and lora_ga start from the base model's weights, which the folder does not hold.
    "init_lora_weights": (True, False, "gaussian"),
    **dict.fromkeys(
        [
            "use_rslora",
            "use_dora",
            "use_qalora",
            "use_bdlora",
            "lora_bias",
            "modules_to_save",
            "layers_to_transform",
            "layer_replication",
            "trainable_token_indices",
            "target_parameters",
            "alora_invocation_tokens",
            "arrow_config",
            "corda_config",
            "ensure_weight_tying",
            "eva_config",
            "kasa_config",
            "loftq_config",
            "lora_ga_config",
            "megatron_config",
            "monteclora_config",
            "velora_config",
        ],
        _OFF,
    ),
}


def save_lora(
    model: nn.Module, folder: str | Path, *, base: str | None = None, tokenizer: Tokenizer | None = None
) -> None:
    """Writes a model's adapters alone, in the form that `peft.PeftModel.from_pretrained` and `load_lora` read.

    base: the name or folder of the base model; recorded in adapter_config.json.
    tokenizer: written into the folder. Where None, the tokenizer files of the folder `base` are copied; without
        `base`, the files that the model carries, see `from_pretrained`.
    Hugging Face's model may store several layers as one, like GPT-2's q, k and v. Their adapters are written as one
    adapter: A stacks the layers' A matrices, B has the layers' B matrices on its diagonal, and rank and alpha are
    multiplied by the number of layers. The adapters of stacked experts are written as an adapter for each expert.
    Every rank must call this. Communication: as `save_pretrained`, for the adapters only.
    Raises ValueError for a model without adapters, a model outside the families and an existing folder; OSError where
    the folder cannot be written. A parallel model raises on every rank.
    """
    folder, adapters = Path(folder), lora_of(model)
    weights = weights_of_model(model)
    stored = {target: _stored_layer(weights, adapted_parameter(name)) for target, name in adapters.adapters.items()}
    parallel = is_parallel(model)
    writer = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
    temporary = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
    error = attempt(start_folder, folder, temporary) if writer else None
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
            "lora_dropout": 0.0,
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
            if tokenizer is not None:
                documents = dict(tokenizer.files)
            else:
                documents = companions_of(model).tokenizer_files if base is None else read_companions(Path(base), FILES)
            _write(tensors, config, documents, temporary, folder)

        error = attempt(write)
        if error is not None:
            shutil.rmtree(temporary, ignore_errors=True)
    raise_on_all(error, parallel)


def load_lora(model: nn.Module, folder: str | Path, *, dtype: torch.dtype | None = None) -> nn.Module:
    """Adds the adapters of a folder that `save_lora` or `peft` wrote to `model`, and returns `model`.

    Call this before or after `parallelize`. Each rank reads only the slices it holds. The adapters' training dropout
    is not restored.
    dtype: of the adapters, as for `lora`.
    Communication: none.
    Raises ValueError for a folder without LoRA adapters, an unknown or unsupported field of adapter_config.json, an
    adapter of a layer missing from the model, a tensor of the wrong shape, and whatever `lora` refuses.
    """
    folder = Path(folder)
    config = read_json(folder / CONFIG_FILE, "give a folder that save_lora or peft saved adapters in")
    _check_config(config, folder / CONFIG_FILE)
    layers, stacks = _stored_layers(model)
    with open_shard(folder / FILE, "fetch it again") as file:
        file_tensors: dict[str, dict[str, Any]] = {}  # Hugging Face's layer -> its "A" and "B" in the file
        for tensor in file.keys():  # noqa: SIM118  safe_open is not iterable
            match = re.fullmatch(rf"{re.escape(PREFIX)}(.+)\.lora_([AB])(?:\.default)?\.weight", tensor)
            if match is None or match[1] not in layers:
                raise ValueError(
                    f"{folder / FILE} holds {tensor}, for which {type(model).__name__} has no layer; check it"
                )
            stored = file.get_slice(tensor)
            if stored.get_dtype() not in WEIGHT_DTYPES or len(stored.get_shape()) != 2 or 0 in stored.get_shape():
                raise ValueError(
                    f"{folder / FILE}: {tensor} is {stored.get_dtype()} of shape {stored.get_shape()}; it must be a "
                    f"matrix of {', '.join(WEIGHT_DTYPES)}"
                )
            file_tensors.setdefault(match[1], {})[match[2]] = stored
        sources: dict[str, _Source] = {}  # by the name of our layer
        for name, pair in file_tensors.items():
            if set(pair) != {"A", "B"}:
                raise ValueError(f"{folder / FILE} has no lora_A or no lora_B of {name}; check it")
            own = _sources(pair, len(layers[name]), config["r"])
            if own is None:
                raise ValueError(
                    f"{folder / FILE}: the adapter of {name} cannot be split into adapters of "
                    f"{' and '.join(layers[name].values())}: its B is not block diagonal; merge the adapter into the "
                    f"base model in peft, and read the merged model"
                )
            sources.update({layers[name][part]: source for part, source in own.items()})
        _check_patterns(config, file_tensors, folder / CONFIG_FILE)
        for layer, source in sources.items():  # checked before `lora` allocates memory for the config's rank
            weight = layer if layer.rpartition("[")[0] in stacks else f"{layer}.weight"
            *_, outputs, inputs = model.get_parameter(weight.partition("[")[0]).shape
            for leaf, shape in (("A", (config["r"], inputs)), ("B", (outputs, config["r"]))):
                if source.shape(leaf) != shape:
                    raise ValueError(f"{folder / FILE} has no lora.{leaf} of {layer} of shape {shape}; check it")
        found = _join_stacks(sources, stacks, folder / FILE)
        lora(model, config["r"], config["lora_alpha"], sorted(found), dtype=dtype)
        for target, adapter in lora_of(model).adapters.items():
            for leaf in ("A", "B"):
                parameter = model.get_parameter(f"{adapter}.{leaf}")
                local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                with torch.no_grad():
                    local.copy_(found[target].read(leaf, local_slices(parameter)))
    return model


def _stored_layers(model: nn.Module) -> tuple[dict[str, dict[int, str]], dict[str, int]]:
    """Our layers by Hugging Face's layer and part number; and the number of experts of each projection.

    An expert's matrix counts as a layer of its own, "layers.0.mlp.experts.gate_proj[3]".
    """
    layers: dict[str, dict[int, str]] = {}
    stacks: dict[str, int] = {}
    weights = weights_of_model(model)
    for name, each in model.named_modules():
        if isinstance(each, nn.Linear):
            stored = _stored_layer(weights, f"{name}.weight")
            layers.setdefault(stored.name, {})[stored.part] = name
        elif isinstance(each, Experts):
            for leaf in PROJECTIONS:
                target, shape = f"{name}.{leaf}", tuple(each.get_parameter(leaf).shape)
                stacks[target] = shape[0]
                for number, own in enumerate(_stored_layer(weights, target).names(shape)):
                    layers[own] = {0: f"{target}[{number}]"}
    return layers, stacks


@dataclass(frozen=True, slots=True)
class _Source:
    """One layer's adapter in the file, as slices of the file's A [R, in] and B [out, R]."""

    a: Any  # the file's A, as safetensors slices
    b: Any  # the file's B
    rows: slice  # the layer's outputs: rows of B
    ranks: slice  # the layer's ranks: rows of A and columns of B

    def _slices(self, leaf: str) -> tuple[slice, ...]:
        return (self.ranks, slice(0, self.a.get_shape()[1])) if leaf == "A" else (self.rows, self.ranks)

    def shape(self, leaf: str) -> tuple[int, ...]:
        """The shape of the layer's A or B."""
        return tuple(outer.stop - outer.start for outer in self._slices(leaf))

    def read(self, leaf: str, part: tuple[slice, ...]) -> Tensor:
        """The slice `part` of the layer's A or B."""
        pairs = zip(self._slices(leaf), part, strict=True)
        read: Tensor = (self.a if leaf == "A" else self.b)[
            tuple(slice(outer.start + inner.start, outer.start + inner.stop) for outer, inner in pairs)
        ]
        return read


@dataclass(frozen=True, slots=True)
class _Stack:
    """The adapters of one projection of experts in the file: a source for each expert."""

    experts: tuple[_Source, ...]

    def read(self, leaf: str, part: tuple[slice, ...]) -> Tensor:
        """The slice `part` of the stacked A or B."""
        experts, *further = part
        if experts.start >= experts.stop:
            return torch.empty(0, *(each.stop - each.start for each in further))
        return torch.stack([each.read(leaf, tuple(further)) for each in self.experts[experts]])


def _join_stacks(sources: dict[str, _Source], stacks: dict[str, int], file: Path) -> dict[str, _Source | _Stack]:
    """The sources by target of `lora`. sources: by our layer, an expert's matrix as in `_stored_layers`.

    stacks: the number of experts by projection. Raises ValueError for a projection of which some experts have no
    adapter.
    """
    found: dict[str, _Source | _Stack] = {}
    for layer, source in sources.items():
        target = layer.rpartition("[")[0]
        if target not in stacks:
            found[layer] = source
        elif target not in found:
            missing = [number for number in range(stacks[target]) if f"{target}[{number}]" not in sources]
            if missing:
                raise ValueError(
                    f"{file} has no adapter of expert {missing[0]} of {target}, and adapters of other experts; Weft's "
                    f"adapters are of all {stacks[target]} experts: merge this folder into the base model in peft, and "
                    f"read the merged model"
                )
            found[target] = _Stack(tuple(sources[f"{target}[{number}]"] for number in range(stacks[target])))
    return found


def _sources(pair: dict[str, Any], parts: int, rank: int) -> dict[int, _Source] | None:
    """Splits a stored layer's adapter among our `parts` layers, as c_attn's among q, k and v. Part number -> source.

    An adapter of the config's rank: every part uses the whole A, and its own rows of B. A part whose rows are all zero
    gets no adapter, unless all of B is zero, as before training. An adapter of a higher rank must be block diagonal,
    with a block of ranks for each part.
    Returns None where no split exists.
    """
    outputs, wide = pair["B"].get_shape()
    rows = [slice(part * (outputs // parts), (part + 1) * (outputs // parts)) for part in range(parts)]
    if parts == 1:
        return {0: _Source(pair["A"], pair["B"], rows[0], slice(0, wide))}
    if wide % rank:
        return None
    blocks = pair["B"][:].reshape(parts, outputs // parts, wide // rank, rank)
    used = (blocks != 0).any(3).any(1)  # [parts, ranks / rank]
    if wide == rank:
        with_adapter = [part for part in range(parts) if used[part] or not used.any()]
        return {part: _Source(pair["A"], pair["B"], rows[part], slice(0, rank)) for part in with_adapter}
    order = list(range(parts)) if wide == parts * rank else [int(each.argmax()) for each in used.int().T]
    if sorted(set(order)) != order or any(used[:, i].sum() > int(used[part, i]) for i, part in enumerate(order)):
        return None
    return {
        part: _Source(pair["A"], pair["B"], rows[part], slice(i * rank, (i + 1) * rank)) for i, part in enumerate(order)
    }


def _check_config(config: Mapping[str, Any], file: Path) -> None:
    """Raises ValueError for an unknown field of adapter_config.json, or an unsupported value."""
    for field, value in config.items():
        if field in _IGNORED or field in _READ:
            continue
        if field not in _PLAIN:
            raise ValueError(
                f"{file}: {field!r}, which is {value!r}, is not a known field; remove the field if it does not affect "
                f"the adapters' output"
            )
        if not any(value is plain or (value == plain and type(value) is type(plain)) for plain in _PLAIN[field]):
            allowed = (
                _PLAIN[field] if _PLAIN[field] is not _OFF else (type(value)() if isinstance(value, bool) else None,)
            )
            raise ValueError(
                f"{file}: {field} {value!r} is not supported; it may be {' or '.join(map(repr, allowed))}. Merge the "
                f"adapters into the base model in peft, and read that model"
            )
    for field, kinds in (("r", int), ("lora_alpha", int | float)):
        value = config.get(field)
        if not isinstance(value, kinds) or isinstance(value, bool) or not 0 < value <= sys.float_info.max:
            raise ValueError(f"{file}: {field} is {value!r}; it must be a number above 0")


def _check_patterns(config: dict[str, Any], file_tensors: dict[str, dict[str, Any]], file: Path) -> None:
    """Raises ValueError for a rank_pattern or alpha_pattern that gives a layer a rank or alpha of its own.

    An adapter that joins n of our layers must have both patterns: n times the config's rank, and n times its alpha.
    """
    multiples = {name: pair["B"].get_shape()[1] // config["r"] for name, pair in file_tensors.items()}
    for field, value_per_part in (("rank_pattern", config["r"]), ("alpha_pattern", config["lora_alpha"])):
        value = config.get(field)
        pattern = {} if value is None else as_type(dict[str, Any], value, f"{file}: {field}")
        own = {name: n * value_per_part for name, n in multiples.items() if n > 1}
        if pattern != own:
            raise ValueError(f"{file}: {field} {pattern!r} is not supported; it may be {own!r}")


def _join_adapters(parts: dict[int, tuple[Tensor, Tensor]], num_parts: int) -> tuple[Tensor, Tensor]:
    """A and B of a stored layer that joins `num_parts` of our layers: B's blocks on the diagonal, see `save_lora`.

    parts: part number -> (A, B), for the parts that have an adapter.
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


def _stored_layer(weights: Any, weight: str) -> Stored:
    """The layer of Hugging Face's model that stores a weight, in whole or in part; or an expert's layer with "{}" in
    the place of the number. weights: the family's module.
    """
    stored: Stored = weights.stored(weight)
    return replace(stored, name=stored.name.removesuffix(".weight"))


def _write(
    tensors: dict[str, Tensor], config: dict[str, Any], documents: dict[str, bytes], temporary: Path, folder: Path
) -> None:
    write_documents(temporary, documents)
    save_file(tensors, temporary / FILE, metadata={"format": "pt"})
    (temporary / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    temporary.rename(folder)
