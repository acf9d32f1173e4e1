"""Finds which slices of adapter_model.safetensors each adapter of a model reads."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..experts import Experts
from ..initialization import local_slices
from ..low_rank import PROJECTIONS
from ..parallel.lora import lora, lora_of
from ..safe_files import as_type
from .configs import ADAPTER_CONFIG, check_patterns, read_adapter_config
from .fields import Stored
from .shards import open_safetensors
from .tensors import WEIGHT_DTYPES

ADAPTER_FILE, PREFIX = "adapter_model.safetensors", "base_model.model."


@dataclass(frozen=True, slots=True)
class StoredAdapters:
    """The adapters of an open folder, which fit the model. Made by `open_adapters`."""

    config: Mapping[str, Any]  # adapter_config.json
    sources: Mapping[str, _Source | _Stack]  # {target of `lora`: where the values of A and B are}

    def attach(self, model: nn.Module, *, dtype: torch.dtype | None = None, dropout: float | None = None) -> None:
        """Add adapters to the model, with values unread. dtype, dropout: as for `load_lora`."""
        if dropout is None:
            of_experts = any(isinstance(source, _Stack) for source in self.sources.values())
            dropout = 0.0 if of_experts else float(self.config.get("lora_dropout", 0.0))
        lora(model, self.config["r"], self.config["lora_alpha"], sorted(self.sources), dtype=dtype, dropout=dropout)

    def read(self, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Yields (name, this rank's values on the CPU) of the adapters' parameters on this rank; called after
        `attach`.
        """
        for target, adapter in lora_of(model).adapters.items():
            for leaf, parameter in model.get_submodule(adapter).named_parameters():
                yield f"{adapter}.{leaf}", self.sources[target].read(leaf, local_slices(parameter))


@contextmanager
def open_adapters(model: nn.Module, weights: Any, folder: Path) -> Iterator[StoredAdapters]:
    """Opens a folder of adapters for a model without adapters, and checks the folder against the model.

    weights: the module `weights` of the model's family. Raises ValueError as `load_lora`.
    """
    config, file = read_adapter_config(folder), folder / ADAPTER_FILE
    layers, stacks = _stored_layers(model, weights)
    with open_safetensors(file, "fetch it again") as opened:
        file_tensors = _pairs(opened, layers, file, type(model).__name__)
        sources: dict[str, _Source] = {}  # by the name of our layer
        for name, pair in file_tensors.items():
            own = _sources(pair, len(layers[name]), config["r"])
            if own is None:
                raise ValueError(
                    f"{file}: the adapter of {name} cannot be split into adapters of "
                    f"{' and '.join(layers[name].values())}: its B is not block diagonal; merge the adapter into the "
                    f"base model in peft, and read the merged model"
                )
            sources.update({layers[name][part]: source for part, source in own.items()})
        ranks = {name: pair["B"].get_shape()[1] for name, pair in file_tensors.items()}
        check_patterns(config, ranks, folder / ADAPTER_CONFIG)
        for layer, source in sources.items():  # checked before `lora` allocates memory for the config's rank
            weight = layer if layer.rpartition("[")[0] in stacks else f"{layer}.weight"
            *_, outputs, inputs = model.get_parameter(weight.partition("[")[0]).shape
            for leaf, shape in (("A", (config["r"], inputs)), ("B", (outputs, config["r"]))):
                if source.shape(leaf) != shape:
                    raise ValueError(
                        f"{file} has no lora.{leaf} of {layer} of shape {shape}, but one of shape "
                        f"{source.shape(leaf)}: the adapters are of another base model, or damaged"
                    )
        yield StoredAdapters(config, _join_stacks(sources, stacks, file))


def add_adapters(model: nn.Module, document: Mapping[str, Any], file: Path) -> None:
    """Add the adapters of a checkpoint's model, with values unset. document: of the file adapters.json.

    Raises ValueError for a damaged document.
    """
    try:
        rank, alpha = as_type(int, document.get("rank"), "rank"), as_type(float, document.get("alpha"), "alpha")
        dropout = as_type(float, document.get("dropout"), "dropout")
        targets = as_type(tuple[str, ...], document.get("targets"), "targets")
        lora(model, rank, alpha, targets, dropout=dropout)
    except ValueError as error:
        raise ValueError(f"{file} is not as a run writes it: {error}; use another checkpoint") from None


def _pairs(opened: Any, layers: Mapping[str, Any], file: Path, kind: str) -> dict[str, dict[str, Any]]:
    """{Hugging Face's layer: {"A": slices, "B": slices}} of the file. Raises ValueError as `load_lora`.

    layers: the names of Hugging Face's layers. kind: the model's class.
    """
    file_tensors: dict[str, dict[str, Any]] = {}
    for tensor in opened.keys():  # noqa: SIM118  safe_open is not iterable
        match = re.fullmatch(rf"{re.escape(PREFIX)}(.+)\.lora_([AB])(?:\.default)?\.weight", tensor)
        if match is None or match[1] not in layers:
            raise ValueError(f"{file} holds {tensor}, for which {kind} has no layer; check it")
        stored = opened.get_slice(tensor)
        if stored.get_dtype() not in WEIGHT_DTYPES or len(stored.get_shape()) != 2 or 0 in stored.get_shape():
            raise ValueError(
                f"{file}: {tensor} is {stored.get_dtype()} of shape {stored.get_shape()}; it must be a "
                f"matrix of {', '.join(WEIGHT_DTYPES)}"
            )
        file_tensors.setdefault(match[1], {})[match[2]] = stored
    for name, pair in file_tensors.items():
        if set(pair) != {"A", "B"}:
            raise ValueError(f"{file} has no lora_A or no lora_B of {name}; check it")
    return file_tensors


def _stored_layers(model: nn.Module, weights: Any) -> tuple[dict[str, dict[int, str]], dict[str, int]]:
    """{Hugging Face's layer: {part number: our layer}}, and {projection of experts: number of experts}.

    An expert's matrix counts as a layer, as "layers.0.mlp.experts.gate_proj[3]". weights: the family's module.
    """
    layers: dict[str, dict[int, str]] = {}
    stacks: dict[str, int] = {}
    for name, each in model.named_modules():
        if isinstance(each, nn.Linear):
            found = stored_layer_of(weights, f"{name}.weight")
            layers.setdefault(found.name, {})[found.part] = name
        elif isinstance(each, Experts):
            for leaf in PROJECTIONS:
                target, shape = f"{name}.{leaf}", tuple(each.get_parameter(leaf).shape)
                stacks[target] = shape[0]
                for number, own in enumerate(stored_layer_of(weights, target).names(shape)):
                    layers[own] = {0: f"{target}[{number}]"}
    return layers, stacks


@dataclass(frozen=True, slots=True)
class _Source:
    """The adapter of a layer, as slices of the file's A [R, in] and B [out, R]."""

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
    """The adapters of a projection of experts: a source for each expert."""

    experts: tuple[_Source, ...]

    def read(self, leaf: str, part: tuple[slice, ...]) -> Tensor:
        """The slice `part` of the stacked A or B."""
        experts, *further = part
        if experts.start >= experts.stop:
            return torch.empty(0, *(each.stop - each.start for each in further))
        return torch.stack([each.read(leaf, tuple(further)) for each in self.experts[experts]])


def _join_stacks(sources: dict[str, _Source], stacks: dict[str, int], file: Path) -> dict[str, _Source | _Stack]:
    """Join the sources of experts: {target of `lora`: source or stack}.

    sources, stacks: keys as from `_stored_layers`. Raises ValueError for a projection with adapters of some experts
    only.
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
    """Split a stored layer's adapter among our `parts` layers, as c_attn's among q, k and v: {part number: source}.

    An adapter of the config's rank: every part uses the whole A, and the part's rows of B. A part with zero rows gets
    no adapter, unless all of B is zero, as before training. An adapter of a higher rank must be block diagonal, with a
    block of ranks for each part.
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


def stored_layer_of(weights: Any, weight: str) -> Stored:
    """The layer of Hugging Face's model with a given weight, in whole or in part; for a stack of experts, a name with
    "{}" in place of the expert's number. weights: the family's module.
    """
    stored: Stored = weights.stored(weight)
    return replace(stored, name=stored.name.removesuffix(".weight"))
