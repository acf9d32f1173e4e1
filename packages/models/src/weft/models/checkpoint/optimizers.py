"""An optimizer's state in a checkpoint: its kind, the check before loading, and the tensors to fill."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..parallel.parallelize import pipeline_of
from .manifest import OPTIMIZER, Manifest
from .shards import STORED_DTYPES

_NO_TRIAL_STEP = ("LBFGS", "SparseAdam")  # their step needs a closure, or a sparse gradient
# Options for a trial step, which affect how the step is computed, but not which state the optimizer keeps.
_TRIAL_OPTIONS = {
    "capturable": False,
    "foreach": None,
    "fused": None,
    "differentiable": False,
    "lr": 0.0,
    "rows": None,  # of a block, under Muon; the tried parameter has a single row
}


def describe_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """An optimizer's class and number of parameter groups, for the manifest of a checkpoint.

    groups: None for a model in stages, where each rank's optimizer has the parameters of only some stages.
    """
    groups = len(optimizer.param_groups) if pipeline_of(model) is None else None
    return {"kind": type(optimizer).__name__, "groups": groups}


def make_state_to_fill(
    model: nn.Module, optimizer: torch.optim.Optimizer, manifest: Manifest
) -> dict[str, tuple[nn.Parameter, dict[str, Tensor]]]:
    """{parameter name: (parameter, {state name: zeros})}; the checkpoint's values are loaded into the zeros.

    State of the parameter's shape gets the parameter's layout.
    """
    groups = _groups(optimizer)
    state: dict[str, tuple[nn.Parameter, dict[str, Tensor]]] = {}
    for name, parameter, keys in _parameters_with_state(model, optimizer, manifest):
        on_device = groups[parameter].get("fused") or groups[parameter].get("capturable")
        values: dict[str, Tensor] = {}
        for key in keys:
            tensor = manifest.tensors[f"{OPTIMIZER}{name}.{key}"]
            if tensor.shape == tuple(parameter.shape):
                values[key] = torch.zeros_like(parameter, dtype=STORED_DTYPES[tensor.dtype], requires_grad=False)
            else:  # the step count, which torch keeps on the device only if its kernel reads the count there
                device = parameter.device if on_device else "cpu"
                values[key] = torch.zeros(tensor.shape, dtype=STORED_DTYPES[tensor.dtype], device=device)
        state[name] = (parameter, values)
    return state


def check_optimizer(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    manifest: Manifest,
    folder: Path,
) -> None:
    """Raises ValueError where the optimizer's class, number of groups or state differs from the saved optimizer's.

    Older checkpoints do not name the class. The names of a torch optimizer's state are found by a step of a fresh
    optimizer on a one-element parameter.
    """
    saved = manifest.optimizer
    own = describe_optimizer(model, optimizer)
    remedy = "make the optimizer as it was, or leave it out of load_checkpoint to begin with fresh state"
    if saved is not None and saved["kind"] != own["kind"]:
        raise ValueError(f"{folder} has the state of {saved['kind']}, and the optimizer is {own['kind']}; {remedy}")
    if saved is not None and None not in (saved["groups"], own["groups"]) and saved["groups"] != own["groups"]:
        raise ValueError(
            f"{folder} has the state of an optimizer with {saved['groups']} groups of parameters, and this "
            f"{own['kind']} has {own['groups']}; {remedy}"
        )
    groups, state_names = _groups(optimizer), {}
    for name, parameter, keys in _parameters_with_state(model, optimizer, manifest):
        group = groups[parameter]
        kind = id(group), parameter.ndim, parameter.dtype
        if kind not in state_names:
            state_names[kind] = _keys_of(optimizer, group, parameter)
        expected = state_names[kind]
        if expected is not None and expected != set(keys):
            differences = [
                f"it {verb} {', '.join(sorted(names))}"
                for verb, names in (("lacks", expected - set(keys)), ("has beside", set(keys) - expected))
                if names
            ]
            raise ValueError(
                f"{folder} has the state of another optimizer than this {own['kind']}: of {name} "
                f"{' and '.join(differences)}; {remedy}"
            )


def _groups(optimizer: torch.optim.Optimizer) -> dict[Tensor, dict[str, Any]]:
    return {parameter: group for group in optimizer.param_groups for parameter in group["params"]}


def _parameters_with_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, manifest: Manifest
) -> list[tuple[str, nn.Parameter, list[str]]]:
    """The optimizer's parameters with state in the checkpoint, and the names of this state."""
    groups = _groups(optimizer)
    stored: dict[str, list[str]] = {}
    for each in manifest.tensors:
        if each.startswith(OPTIMIZER):
            name, _, key = each.removeprefix(OPTIMIZER).rpartition(".")
            stored.setdefault(name, []).append(key)
    named = model.named_parameters()
    return [(name, each, stored[name]) for name, each in named if each in groups and name in stored]


def _keys_of(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], parameter: Tensor) -> set[str] | None:
    """The state names of an optimizer of torch or Weft for a parameter; None where no step can be tried."""
    kind: Any = type(optimizer)
    if not kind.__module__.startswith(("torch.optim.", "weft.")) or kind.__name__ in _NO_TRIAL_STEP:
        return None
    trial_parameter = nn.Parameter(torch.zeros((1,) * parameter.ndim, dtype=parameter.dtype))
    trial_parameter.grad = torch.zeros_like(trial_parameter)
    options = {
        **group,
        **{name: value for name, value in _TRIAL_OPTIONS.items() if name in group},
        "params": [trial_parameter],
    }
    trial_optimizer = kind([options])
    trial_optimizer.step()
    return {key for key, value in trial_optimizer.state[trial_parameter].items() if isinstance(value, Tensor)}
