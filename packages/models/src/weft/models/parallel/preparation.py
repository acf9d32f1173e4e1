"""The hooks of `PrepareInput` and `PrepareOutput`."""

from __future__ import annotations

import copy
import inspect
from collections.abc import MutableMapping
from functools import lru_cache
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from weft.mesh import Layout, ProcessMesh
from weft.mesh.refinement import axes_of
from weft.reshard import layout_of, reshard
from weft.reshard.running.dtensor import torch_layout
from weft.reshard.running.dynamo import in_graph

from .axes import check_named
from .resolve import Part
from .styles import Placed, PrepareInput, PrepareOutput

Axes = tuple[str, ...]
Words = tuple[str, ...]  # the text of a placement for each axis


def check_prepared(model: nn.Module, parts: list[Part], mesh: ProcessMesh) -> None:
    """Check the plan's PrepareInput and PrepareOutput styles against the mesh and the model.

    Raises ValueError for an axis unknown to the mesh and to plans, and for an input unknown to forward.
    """
    for part in parts:
        for name, inputs in part.inputs.items():
            for where, placed in inputs.layouts.items():
                check_named(mesh, placed, f"PrepareInput of {name!r}")
                _parameter(model.get_submodule(name), name, where)
        for name, outputs in part.outputs.items():
            for placed in outputs.by_output.values():
                check_named(mesh, placed, f"PrepareOutput of {name!r}")


def hook_prepared(model: nn.Module, parts: list[Part], mesh: ProcessMesh) -> None:
    """Register the hooks: prepared inputs before all registered pre-hooks, prepared outputs after all registered
    hooks.
    """
    for part in parts:
        for name, inputs in part.inputs.items():
            _hook_inputs(model.get_submodule(name), name, inputs, mesh)
        for name, outputs in part.outputs.items():
            _hook_outputs(model.get_submodule(name), name, outputs, mesh)


def _hook_inputs(module: nn.Module, name: str, style: PrepareInput, mesh: ProcessMesh) -> None:
    wanted = {_parameter(module, name, where): _on_mesh(placed, mesh) for where, placed in style.layouts.items()}

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        positional, named = list(args), dict(kwargs)
        for (position, parameter), (axes, words) in wanted.items():
            if parameter in named:
                named[parameter] = _prepared(named[parameter], axes, words, mesh)
            elif position is not None and position < len(positional):
                positional[position] = _prepared(positional[position], axes, words, mesh)
        return tuple(positional), named

    module.register_forward_pre_hook(hook, with_kwargs=True, prepend=True)


def _hook_outputs(module: nn.Module, name: str, style: PrepareOutput, mesh: ProcessMesh) -> None:
    wanted = {where: _on_mesh(placed, mesh) for where, placed in style.by_output.items()}

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        if None in wanted:
            return _prepared(output, *wanted[None], mesh)
        changed: Any = list(output) if isinstance(output, tuple | list) else copy.copy(output)
        if not isinstance(changed, list | MutableMapping):
            raise ValueError(
                f"{name!r} returned a {type(output).__name__}, and its plan prepares several outputs; write "
                f'PrepareOutput({{"tp": …}}) for a single output'
            )
        outputs: Any = changed
        for where, (axes, words) in wanted.items():
            try:
                found = outputs[where]
            except (KeyError, IndexError, TypeError):
                raise ValueError(f"{name!r} returned no output {where!r}, which its plan prepares") from None
            outputs[where] = _prepared(found, axes, words, mesh)
        if isinstance(output, tuple):
            return output._make(changed) if hasattr(output, "_make") else tuple(changed)
        return changed

    module.register_forward_hook(hook)


def _parameter(module: nn.Module, name: str, where: str | int) -> tuple[int | None, str]:
    """Position and name of the parameter of forward named by `where`; the position is None for keyword-only
    parameters.

    Raises ValueError where forward lacks the parameter.
    """
    signature = inspect.signature(module.forward)
    parameters = list(signature.parameters.values())
    kinds = {each.kind for each in parameters}
    by_position = [each.name for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    if isinstance(where, int):
        if 0 <= where < len(by_position):
            return where, by_position[where]
        if where >= 0 and inspect.Parameter.VAR_POSITIONAL in kinds:
            return where, ""
    elif where in signature.parameters:
        return (by_position.index(where) if where in by_position else None), where
    elif inspect.Parameter.VAR_KEYWORD in kinds:
        return None, where
    raise ValueError(
        f"PrepareInput of {name!r} names the input {where!r}, but {type(module).__name__}.forward takes {signature}"
    )


def _on_mesh(placed: Placed, mesh: ProcessMesh) -> tuple[Axes, Words]:
    """The declared axes present in the mesh, and their placements as text. Absent axes have size 1."""
    axes = [axis for axis in placed if axes_of(mesh, axis)]
    return tuple(axes), tuple(str(placed[axis]) for axis in axes)


def _prepared(x: Any, axes: Axes, words: Words, mesh: ProcessMesh) -> Any:
    """x resharded to the declared placements. Plain tensors declared replicated, and other values, are returned
    unchanged.
    """
    if not isinstance(x, Tensor) or (set(words) <= {"R"} and not isinstance(x, DTensor)):
        return x
    if not isinstance(x, DTensor):
        on, placements = torch_layout(Layout(mesh), x.device.type)
        x = DTensor.from_local(x, on, placements, run_check=False)
    return _resharded(x, axes, words)


@in_graph
def _resharded(x: DTensor, axes: Axes, words: Words) -> DTensor:
    return reshard(x, placements=_placed(layout_of(x), axes, words))


@lru_cache(maxsize=1024)  # few layouts, looked up at every call
def _placed(layout: Layout, axes: Axes, words: Words) -> Layout:
    wanted = {own: word for axis, word in zip(axes, words, strict=True) for own in axes_of(layout.mesh, axis)}
    return layout.replace(**wanted)
