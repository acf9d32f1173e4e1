"""A model from outside this package, named as MODULE:CLASS: found, checked, made, and counted."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Mapping
from dataclasses import is_dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_origin, get_type_hints

from ..config import ModelConfig
from ..families import make_model

if TYPE_CHECKING:
    from torch import nn

INPUTS = ("dropout_key", "positions", "documents")  # a run gives a model these beside the tokens


@lru_cache(maxsize=8)
def find_class(name: str) -> type[nn.Module]:
    """The model's class. name: MODULE:CLASS, of an importable module.

    Raises ValueError for a name of another form, an absent module or class, and a class without initial values or a plan.
    """
    module_name, _, class_name = name.partition(":")
    if not module_name or not class_name:
        raise ValueError(f"--model {name!r} is not MODULE:CLASS; write it like --model my_models:Bigram")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # an import of the module itself fails
        raise ValueError(
            f"--model {name}: there is no module {error.name!r}; start in its folder, or put that folder on PYTHONPATH"
        ) from None
    found = getattr(module, class_name, None)
    from torch import nn  # not sooner, as it takes seconds

    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        classes = [key for key, each in vars(module).items() if isinstance(each, type) and issubclass(each, nn.Module)]
        near = difflib.get_close_matches(class_name, classes, n=1)
        hint = f"; did you mean {near[0]}?" if near else "; give a class that is an nn.Module"
        raise ValueError(f"--model {name}: {module_name} has no model {class_name!r}{hint}")
    missing = [each for each in ("initial_value", "parallel_plan") if not callable(getattr(found, each, None))]
    if missing:
        raise ValueError(
            f"--model {name}: the class has no {' and no '.join(missing)}; initial_value(name) says how a parameter starts, and "
            f"parallel_plan() how the model is laid out"
        )
    return found


def config_class_of(name: str) -> type[ModelConfig]:
    """The class of the model's config: the annotation of the first argument of __init__.

    A type variable, as `Decoder` has there, stands for the class's own argument: NetConfig of `class Net(Decoder[NetConfig])`.
    Raises ValueError for an annotation that is no dataclass derived from ModelConfig.
    """
    found = find_class(name)
    try:
        hint = _hint_of(found)
    except NameError as error:
        raise ValueError(
            f"--model {name}: the annotation of its config cannot be read: {error}; import the config"
        ) from None
    if isinstance(hint, TypeVar):
        hint = _filled_in(found, hint)
    if not (isinstance(hint, type) and issubclass(hint, ModelConfig) and is_dataclass(hint)) or hint is ModelConfig:
        shown = getattr(hint, "__name__", repr(hint))
        raise ValueError(
            f"--model {name}: the config that __init__ takes is {'not annotated' if hint is None else f'a {shown}'}; annotate "
            f"it with a dataclass that is derived from weft.models.config.ModelConfig, as config: {name.partition(':')[2]}Config"
        )
    return hint


def make_model_of(config: ModelConfig, name: str | None) -> nn.Module:
    """The model of a config, the parameters unset: of a family, or from outside. name: MODULE:CLASS; None of a family."""
    return make_model(config) if name is None else find_class(name)(config)


def inputs_of(name: str | None) -> tuple[str, ...]:
    """The names in INPUTS that the model's forward takes. name: MODULE:CLASS; None of a family."""
    if name is None:
        return INPUTS
    parameters = inspect.signature(find_class(name).forward).parameters.values()
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters):
        return INPUTS
    return tuple(each for each in INPUTS if each in {parameter.name for parameter in parameters})


def check_class(name: str, *, ordered: bool, documents: bool, compiled: bool) -> None:
    """Raises ValueError where a run has an input that the model's forward does not take, or compiles blocks of a model without.

    name: MODULE:CLASS. ordered: whether tokens lie in another order than in the text. documents: whether rows have several
    documents, each with attention of its own. compiled: whether blocks are compiled.
    """
    taken = inputs_of(name)
    if ordered and "positions" not in taken:
        raise ValueError(
            f"--model {name}: its forward takes no positions, which say the order of the tokens that plan.context all_gather "
            f"cuts; let it take positions, or leave mesh.cp at 1"
        )
    missing = [each for each in ("positions", "documents") if each not in taken]
    if documents and missing:
        raise ValueError(
            f"--model {name}: its forward takes no {' and no '.join(missing)}, by which tokens see their own document alone; let "
            f"it take them, or give --data.no-pack"
        )
    if compiled and not hasattr(find_class(name), "blocks"):
        raise ValueError(f"--model {name} has no blocks, which --compile compiles one by one; leave out --compile")


def parameters_of(config: ModelConfig, name: str | None) -> tuple[int, int]:
    """The number of the model's parameters, and of the parameters that multiply, which leaves out tables for look-ups alone.

    name: MODULE:CLASS; None of a family. The parameters of a model from outside are counted in the model, made without data: the
    config may inherit the number of another model.
    """
    if name is None:
        return config.num_parameters, config.num_parameters - config.num_looked_up
    import torch
    from torch import nn

    with torch.device("meta"):
        model = make_model_of(config, name)
    tables = {each for module in model.modules() if isinstance(module, nn.Embedding) for each in module.parameters()}
    others = {
        each
        for module in model.modules()
        if not isinstance(module, nn.Embedding)
        for each in module.parameters(recurse=False)
    }
    total = sum(each.numel() for each in model.parameters())
    return total, total - sum(each.numel() for each in tables - others)


def _hint_of(found: type) -> Any:
    parameters: Mapping[str, inspect.Parameter] = inspect.signature(found).parameters
    if not parameters:
        return None
    name = next(iter(parameters))
    owner = next(each for each in found.__mro__ if "__init__" in vars(each))
    return get_type_hints(vars(owner)["__init__"]).get(name)


def _filled_in(found: type, variable: TypeVar) -> Any:
    """The argument of the nearest generic base for a type variable."""
    for each in found.__mro__:
        for base in getattr(each, "__orig_bases__", ()):
            origin = get_origin(base)
            names = getattr(origin, "__parameters__", ())
            for parameter, argument in zip(names, get_args(base), strict=False):
                if parameter is variable or not isinstance(argument, TypeVar):
                    return argument
    return variable
