"""Finds the weights to adapt by name: linear layers and projections of experts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NoReturn

from torch import nn

from ..experts import Experts
from ..low_rank import PROJECTIONS
from .resolve import nearest


@dataclass(frozen=True, slots=True)
class AdapterPlace:
    """A weight to adapt, and the name of the adapter."""

    target: str  # the name of a linear layer, or of a projection of experts
    owner: Any  # the linear layer, or the module of experts
    leaf: str  # the weight's name in `owner`
    adapter: str  # the name of the adapter to attach


def find_places(model: nn.Module, targets: Sequence[str]) -> list[AdapterPlace]:
    """The weights named by `targets`, in the model's order. Raises ValueError as `lora` does."""
    if isinstance(targets, str) or not targets:
        raise ValueError(
            f'lora: targets is {targets!r}; give names of layers in a list, as ["layers.*.self_attn.q_proj"]'
        )
    modules: dict[str, Any] = {name: module for name, module in model.named_modules() if name}
    places: dict[str, AdapterPlace] = {}
    for name, module in modules.items():
        if isinstance(module, nn.Linear):
            places[name] = AdapterPlace(name, module, "weight", f"{name}.lora")
        elif isinstance(module, Experts):
            places |= {
                f"{name}.{leaf}": AdapterPlace(f"{name}.{leaf}", module, leaf, f"{name}.lora.{leaf}")
                for leaf in PROJECTIONS
            }
    candidates = list(dict.fromkeys((*modules, *places)))
    matching: set[str] = set()
    for pattern in targets:
        names = _matching_names(pattern, candidates)
        if not names:
            known = candidates if "." in pattern else list(dict.fromkeys(map(_last_part, places)))
            raise ValueError(
                f"LoRA target {pattern!r} matches no module of {type(model).__name__}; {nearest(pattern, known)}"
            )
        for name in names:
            if name not in places:
                _refuse(pattern, name, modules[name])
        matching.update(names)
    chosen = [place for name, place in places.items() if name in matching]
    _check_places(model, chosen)
    return chosen


def _matching_names(pattern: str, names: Sequence[str]) -> list[str]:
    """The names matched by a target. A target without a dot that matches no whole name is compared with last parts."""
    whole = [name for name in names if fnmatchcase(name, pattern)]
    return whole if whole or "." in pattern else [name for name in names if fnmatchcase(_last_part(name), pattern)]


def _last_part(name: str) -> str:
    return name.rpartition(".")[2]


def _check_places(model: nn.Module, places: list[AdapterPlace]) -> None:
    """Raises ValueError for a tied weight, and for experts with a forward of their own."""
    name_counts = Counter(each for _, each in model.named_parameters(remove_duplicate=False))
    for place in places:
        weight = getattr(place.owner, place.leaf)
        if name_counts[weight] > 1:
            tied = [n for n, each in model.named_parameters(remove_duplicate=False) if each is weight]
            raise ValueError(
                f"LoRA target {place.target!r} has a tied weight, {' and '.join(tied)}: folded in, its adapter would "
                f"change both; leave {place.target!r} out"
            )
        if isinstance(place.owner, Experts) and type(place.owner).forward is not Experts.forward:
            raise ValueError(
                f"LoRA target {place.target!r} is of a {type(place.owner).__name__}, whose own forward would ignore "
                f"adapters; leave {place.target!r} out, or use weft.models.experts.Experts"
            )


def _refuse(pattern: str, name: str, module: nn.Module) -> NoReturn:
    if isinstance(module, Experts):
        raise ValueError(
            f"LoRA target {pattern!r} matches {name!r}, an {type(module).__name__}, whose adapters are for its "
            f"projections; name {' or '.join(repr(f'{name}.{leaf}') for leaf in PROJECTIONS)}, or all by "
            f"'{name}.*_proj'"
        )
    raise ValueError(
        f"LoRA target {pattern!r} matches {name!r}, a {type(module).__name__}; adapters are for Linear layers and the "
        f"projections of Experts"
    )
