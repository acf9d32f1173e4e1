"""The families of models: the one table that checkpoints, training and the package's names read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from .config import ModelConfig


@dataclass(frozen=True, slots=True)
class Family:
    """A folder of config.py, model.py, plan.py and weights.py, and the name of the model in it; NAMEConfig is its config."""

    folder: str
    model: str

    @property
    def names(self) -> dict[str, str]:
        """The public names, and the modules of weft.models that they are in."""
        return {self.model: f".{self.folder}.model", f"{self.model}Config": f".{self.folder}.config"}

    @property
    def model_class(self) -> type[nn.Module]:
        """The model."""
        found: type[nn.Module] = getattr(import_module(f".{self.folder}.model", __package__), self.model)
        return found

    @property
    def config_class(self) -> type[ModelConfig]:
        """Its config."""
        found: type[ModelConfig] = getattr(import_module(f".{self.folder}.config", __package__), f"{self.model}Config")
        return found

    @property
    def weights(self) -> Any:
        """What Hugging Face's files say of it: PREFIX, read_config, write_config, stored, is_ignored."""
        return import_module(f".{self.folder}.weights", __package__)


_LLAMA, _QWEN, _GPT = Family("llama", "Llama"), Family("qwen", "Qwen"), Family("gpt", "GPT")

# By the model_type of Hugging Face's config.json.
FAMILIES: Mapping[str, Family] = {"llama": _LLAMA, "qwen2": _QWEN, "qwen3": _QWEN, "gpt2": _GPT}


def make_model(config: ModelConfig) -> nn.Module:
    """The model of a config, its parameters unset. Raises ValueError for a config of no family."""
    for family in FAMILIES.values():
        if type(config) is family.config_class:
            return family.model_class(config)
    known = ", ".join(dict.fromkeys(f"{family.model}Config" for family in FAMILIES.values()))
    raise ValueError(f"a {type(config).__name__} is the config of no model; give one of {known}")


def family_of(model: nn.Module) -> Family | None:
    """The family that the model is of; None where it is of none."""
    return next((family for family in FAMILIES.values() if isinstance(model, family.model_class)), None)
