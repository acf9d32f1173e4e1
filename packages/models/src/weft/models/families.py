"""The table of model families, read by checkpoints, training and the package's public names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from .config import ModelConfig


@dataclass(frozen=True, slots=True)
class Family:
    """A family: a folder of config.py, model.py and weights.py, with the classes NAME and NAMEConfig."""

    folder: str
    model: str  # the model class's name

    @property
    def names(self) -> dict[str, str]:
        """Public name -> module of weft.models."""
        return {self.model: f".{self.folder}.model", f"{self.model}Config": f".{self.folder}.config"}

    @property
    def model_class(self) -> type[nn.Module]:
        """The model class."""
        found: type[nn.Module] = getattr(import_module(f".{self.folder}.model", __package__), self.model)
        return found

    @property
    def config_class(self) -> type[ModelConfig]:
        """The config class."""
        found: type[ModelConfig] = getattr(import_module(f".{self.folder}.config", __package__), f"{self.model}Config")
        return found

    @property
    def weights(self) -> Any:
        """The family's module weights.py: PREFIX, read_config, write_config, stored and repetition."""
        return import_module(f".{self.folder}.weights", __package__)


_LLAMA, _QWEN, _GPT = Family("llama", "Llama"), Family("qwen", "Qwen"), Family("gpt", "GPT")
_QWEN_MOE = Family("qwen_moe", "QwenMoe")

# model_type of config.json -> family; all but weft_moe are Hugging Face's.
FAMILIES: Mapping[str, Family] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "mixtral": Family("mixtral", "Mixtral"),
    "qwen2": _QWEN,
    "qwen3": _QWEN,
    "qwen3_moe": _QWEN_MOE,
    "weft_moe": _QWEN_MOE,  # with options that Hugging Face's Qwen3Moe lacks
    "gpt2": _GPT,
}


def make_model(config: ModelConfig) -> nn.Module:
    """The model of a config, with unset parameters. Raises ValueError for a config outside the families."""
    for family in FAMILIES.values():
        if type(config) is family.config_class:
            return family.model_class(config)
    known = ", ".join(dict.fromkeys(f"{family.model}Config" for family in FAMILIES.values()))
    raise ValueError(f"a {type(config).__name__} is the config of no model; give one of {known}")


def family_of(model: nn.Module) -> Family | None:
    """The family whose network the model is; None for any other network, see `foreign_part`."""
    family = _family_by_class(model)
    return None if family is None or _foreign_part(model, family) is not None else family


def foreign_part(model: nn.Module) -> str | None:
    """How a model of a family's class differs from the family's network, in words; None for no difference."""
    family = _family_by_class(model)
    return None if family is None else _foreign_part(model, family)


def _family_by_class(model: nn.Module) -> Family | None:
    return next((family for family in FAMILIES.values() if isinstance(model, family.model_class)), None)


# Names that a subclass may redefine, because they do not affect logits: making, filling, laying out and printing a
# model.
_MAY_DEFINE = frozenset(
    ["_apply", "extra_repr", "initial_value", "parallel_plan", "reset_parameters", "residual_outputs", "sharing_input"]
)


def _foreign_part(model: nn.Module, family: Family) -> str | None:
    """Compares modules by class and forward, and parameters by name and shape, with the model made from the config."""
    from .low_rank import Adapter, LowRankExperts
    from .parallel.parallelize import pipeline_of

    config: Any = getattr(model, "config", None)
    if type(config) is not family.config_class:
        return f"its config is a {type(config).__name__}, not a {family.model}Config"
    kinds, shapes = _expected_parts(config)
    found = {name: each for name, each in model.named_modules() if not isinstance(each, Adapter | LowRankExperts)}
    for name, module in found.items():
        where = f"its {name}" if name else "it"
        if name not in kinds:
            return f"{where} is a module that a {family.model} lacks"
        kind: Any = type(module)
        known: Any = kinds[name]
        if (reason := _class_difference(kind, known)) or (reason := _replaced_forward(module)):
            return f"{where} {reason}"
    if missing := kinds.keys() - found.keys():
        return f"it has no {min(missing)}"
    pipeline = pipeline_of(model)
    named = model.named_parameters() if pipeline is None else pipeline.parameters.items()
    own = {name: tuple(parameter.shape) for name, parameter in named if ".lora." not in name}
    if odd := own.keys() ^ shapes.keys():
        name = min(odd)
        return (
            f"it has the parameter {name}, which a {family.model} of the same config lacks"
            if name in own
            else f"it has no {name}"
        )
    if odd := {name for name, shape in own.items() if shape != shapes[name]}:
        name = min(odd)
        return f"its {name} has shape {own[name]}, and by the config {shapes[name]}"
    return None


@lru_cache(maxsize=32)
def _expected_parts(config: ModelConfig) -> tuple[dict[str, type[nn.Module]], dict[str, tuple[int, ...]]]:
    """The classes of the modules, and the shapes of the parameters, of a config's model; both by name."""
    import torch

    with torch.device("meta"):
        model = make_model(config)
    kinds: dict[str, type[nn.Module]] = {name: type(each) for name, each in model.named_modules()}
    return kinds, {name: tuple(each.shape) for name, each in model.named_parameters()}


@lru_cache(maxsize=1024)
def _class_difference(kind: type[nn.Module], known: type[nn.Module]) -> str | None:
    """How a class computes differently from `known`; None for `known` and for subclasses that only add names."""
    from torch import nn

    if known not in kind.__mro__:
        return f"is a {kind.__name__}, not a {known.__name__}"
    computing = {name for each in known.__mro__ if each not in nn.Module.__mro__ for name in vars(each)}
    computing = {name for name in computing if not name.startswith("__")} - _MAY_DEFINE | {"forward", "__call__"}
    for each in kind.__mro__[: kind.__mro__.index(known)]:
        for name in computing & vars(each).keys():
            if not _is_weft_function(vars(each)[name]):
                return f"is a {kind.__name__}, whose {name} differs from a {known.__name__}'s"
    return None


def _replaced_forward(module: nn.Module) -> str | None:
    forward = vars(module).get("forward")
    return None if forward is None or _is_weft_function(forward) else "has a forward that was set from outside"


def _is_weft_function(function: Any) -> bool:
    """Whether Weft defines a function, for example to lay out a model, which leaves values unchanged."""
    while True:
        module_name = str(getattr(getattr(function, "__func__", function), "__globals__", {}).get("__name__", ""))
        if isinstance(function, partial):
            function = function.func
        # The second case: a function compiled, or wrapped by a setting of torch.
        elif module_name.startswith(("torch.", "contextlib")) and hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        else:
            return module_name.startswith("weft.")
