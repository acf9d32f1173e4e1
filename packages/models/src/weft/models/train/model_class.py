"""A model class of the user (`--model MODULE:CLASS`): importing, checking, making, and counting parameters.

In every function `name` is MODULE:CLASS; None, where allowed, means a model of Weft.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Mapping
from dataclasses import is_dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_origin, get_type_hints

from ..config import MixtureConfig, ModelConfig
from ..exact import parse_exact
from ..families import make_model

if TYPE_CHECKING:
    from torch import nn

    from .config import TrainConfig

# Keyword arguments passed to a model's forward besides the tokens. Of these, targets for preferences alone: the model
# then returns the tokens' losses in place of logits.
INPUTS = ("dropout_key", "positions", "documents", "targets")
ROUTER = "router"  # the parameter of forward by which a model with experts returns its routers' statistics


@lru_cache(maxsize=8)
def find_class(name: str) -> type[nn.Module]:
    """Import the model class.

    Raises ValueError for a name of another form, for a missing module or class, and for a class without
    `initial_value` or `parallel_plan`.
    """
    module_name, _, class_name = name.partition(":")
    if not module_name or not class_name:
        raise ValueError(f"--model {name!r} is not MODULE:CLASS; write it like --model my_models:Bigram")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module exists, and an import inside the module fails
        raise ValueError(
            f"--model {name}: there is no module {error.name!r}; start in its folder, or put that folder on PYTHONPATH"
        ) from None
    model_class = getattr(module, class_name, None)
    from torch import nn  # imported here because torch takes seconds

    if not (isinstance(model_class, type) and issubclass(model_class, nn.Module)):
        classes = [key for key, each in vars(module).items() if isinstance(each, type) and issubclass(each, nn.Module)]
        near = difflib.get_close_matches(class_name, classes, n=1)
        hint = f"; did you mean {near[0]}?" if near else "; give a class that is an nn.Module"
        raise ValueError(f"--model {name}: {module_name} has no model {class_name!r}{hint}")
    missing = [each for each in ("initial_value", "parallel_plan") if not callable(getattr(model_class, each, None))]
    if missing:
        raise ValueError(
            f"--model {name}: the class has no {' and no '.join(missing)}; initial_value(name) says how a parameter is "
            f"initialized, and parallel_plan() how the model is laid out"
        )
    return model_class


def config_class_of(name: str) -> type[ModelConfig]:
    """The class of the model's config, from the annotation of the first argument of __init__.

    The annotation may be a type variable, as in a class derived from `Decoder`. It is replaced by the type argument of
    the base class: NetConfig for `class Net(Decoder[NetConfig])`.
    Raises ValueError if the annotation is not a dataclass derived from ModelConfig.
    """
    model_class = find_class(name)
    try:
        hint = _hint_of(model_class)
    except NameError as error:
        raise ValueError(
            f"--model {name}: the annotation of its config cannot be read: {error}; import the config"
        ) from None
    if isinstance(hint, TypeVar):
        hint = _resolve_type_variable(model_class, hint)
    if not (isinstance(hint, type) and issubclass(hint, ModelConfig) and is_dataclass(hint)) or hint is ModelConfig:
        shown = getattr(hint, "__name__", repr(hint))
        raise ValueError(
            f"--model {name}: the config that __init__ takes is {'not annotated' if hint is None else f'a {shown}'}; "
            f"annotate it with a dataclass derived from weft.models.config.ModelConfig, as config: "
            f"{name.partition(':')[2]}Config"
        )
    return hint


def make_model_of(config: ModelConfig, name: str | None) -> nn.Module:
    """Make the model of a config, with uninitialized parameters. name: of the user's class; None: a model of Weft."""
    return make_model(config) if name is None else find_class(name)(config)


def inputs_of(name: str | None) -> tuple[str, ...]:
    """The names in INPUTS accepted by the forward of the user's class `name`; None, a model of Weft, accepts all."""
    if name is None:
        return INPUTS
    parameters = inspect.signature(find_class(name).forward).parameters.values()
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters):
        return INPUTS
    return tuple(each for each in INPUTS if each in {parameter.name for parameter in parameters})


def has_router(config: ModelConfig, name: str | None) -> bool:
    """Whether the model returns router statistics: its config has experts, and its forward the parameter `router`.

    name: of the user's class; None: a model of Weft.
    """
    if not isinstance(config, MixtureConfig):
        return False
    return name is None or ROUTER in inspect.signature(find_class(name).forward).parameters


def check_class(name: str, *, ordered: bool, documents: bool, compiled: bool) -> None:
    """Raise ValueError if the user's model class lacks an attribute or a parameter needed by the run.

    ordered: whether the token order is changed, as under context parallelism by all_gather; forward then needs
    positions.
    documents: whether rows hold several documents with separate attention; forward then needs positions and
    documents.
    compiled: whether blocks are compiled; the class then needs `blocks`.
    """
    accepted = inputs_of(name)
    if ordered and "positions" not in accepted:
        raise ValueError(
            f"--model {name}: its forward takes no positions, but plan.context all_gather changes the order of the "
            f"tokens; add the parameter positions, or leave mesh.cp at 1"
        )
    missing = [each for each in ("positions", "documents") if each not in accepted]
    if documents and missing:
        raise ValueError(
            f"--model {name}: its forward takes no {' and no '.join(missing)}, which keep attention within a document; "
            f"add these parameters, or give --data.no-pack"
        )
    if compiled and not hasattr(find_class(name), "blocks"):
        raise ValueError(f"--model {name} has no blocks, which --compile compiles one by one; leave out --compile")


def check_blocks(config: ModelConfig, name: str) -> None:
    """Raise ValueError if the user's model has no matrices in blocks, which muon orthogonalizes."""
    import torch

    from .optimizer import check_matrices

    with torch.device("meta"):
        check_matrices(make_model_of(config, name))


def check_named_cuts(config: TrainConfig) -> None:
    """Raise ValueError for a model that some mesh within the one of `plan.exact` cuts elsewhere."""
    if config.plan.exact is None:
        return
    import torch
    from weft.reshard import exact_sums

    from ..parallel.parallelize import own_plan
    from ..parallel.parameter_layouts import check_parameters
    from ..parallel.resolve import resolve

    exact = parse_exact(config.plan.exact)
    with torch.device("meta"):
        model = make_adapted_model(config)
    with exact_sums(exact):
        check_parameters(model, resolve(model, own_plan(model)), exact)


def count_adapters(config: TrainConfig) -> int:
    """The number of parameters of the run's adapters; 0 without adapters. Raises ValueError as `lora`."""
    if not config.lora.rank:
        return 0
    import torch

    with torch.device("meta"):
        return sum(each.numel() for each in make_adapted_model(config).parameters() if each.requires_grad)


def make_adapted_model(config: TrainConfig) -> nn.Module:
    """The run's model, with its adapters if it has any; all parameters uninitialized. Raises ValueError as `lora`."""
    model, options = make_model_of(config.model, config.model_class), config.lora
    if not options.rank:
        return model
    from ..parallel.lora import lora

    return lora(model, options.rank, options.alpha, options.targets, dropout=options.dropout, seed=config.seed)


def count_block_matrices(config: ModelConfig, name: str | None) -> int:
    """The number of parameters in the matrices of blocks, which muon updates; for the run's memory estimate.

    name: of the user's class; None: a model of Weft. The number is then approximate: all parameters outside the tables,
    norms and biases included.
    """
    if name is None:
        return config.num_parameters - config.num_in_tables
    import torch

    from .optimizer import find_matrices

    with torch.device("meta"):
        return sum(each.numel() for each in find_matrices(make_model_of(config, name)))


def parameters_of(config: ModelConfig, name: str | None) -> tuple[int, int]:
    """Count (all parameters, parameters in matrix products): for a run's size, memory, and operations of a step.

    The second number excludes embedding tables used for look-ups only.
    name: of the user's class; None: a model of Weft. For a class of the user, the parameters of the model itself are
    counted, on the meta device: the config may inherit the count of another model.
    """
    if name is None:
        return config.num_parameters, config.num_multiplied
    import torch
    from torch import nn

    from ..layers import embedding_tables

    with torch.device("meta"):
        model = make_model_of(config, name)
    tables = embedding_tables(model)
    multiplying = {
        each
        for module in model.modules()
        if not isinstance(module, nn.Embedding)
        for each in module.parameters(recurse=False)
    }
    total = sum(each.numel() for each in model.parameters())
    return total, total - sum(each.numel() for each in tables - multiplying)


def _hint_of(model_class: type) -> Any:
    """The annotation of the first argument of the class's __init__; None without arguments or annotation."""
    parameters: Mapping[str, inspect.Parameter] = inspect.signature(model_class).parameters
    if not parameters:
        return None
    name = next(iter(parameters))
    owner = next(each for each in model_class.__mro__ if "__init__" in vars(each))
    return get_type_hints(vars(owner)["__init__"]).get(name)


def _resolve_type_variable(model_class: type, variable: TypeVar) -> Any:
    """The value of a type variable in the nearest generic base class; the variable itself if none sets it."""
    for each in model_class.__mro__:
        for base in getattr(each, "__orig_bases__", ()):
            origin = get_origin(base)
            names = getattr(origin, "__parameters__", ())
            for parameter, argument in zip(names, get_args(base), strict=False):
                if parameter is variable or not isinstance(argument, TypeVar):
                    return argument
    return variable
