"""Recomputing a norm's or a gate's output in backward, instead of saving the output for the ops after.

A linear layer saves the layer's input for backward. If the input is the output of a norm or a gate, the layer saves
instead the tensors from which the norm or gate computes the output, for example swiglu's gate and up. These need no
further memory, because the norm or gate has saved the same tensors. Backward recomputes the output once for all ops.

Not done under torch.compile, where the compiler decides about recomputing, nor on a CPU in 32 bits or more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import backend
from .op import Op, Tensors

ATTRIBUTE = "_weft_recomputable"  # of an untyped storage: the `_RecomputableOutput` whose elements the storage has


@dataclass(slots=True, eq=False)
class Recipe:
    """Recomputes an op's output in backward, and holds the result until each reader has received the output, at most
    until this backward pass ends: a pass may lead through few of the readers.

    Made by `mark_recomputable` for each call of an op with `Op.recompute`. Keeps no tensor alive except `output`.
    """

    op: Op
    options: dict[str, Any]
    readers: int = 0  # how often an op's forward saved this recipe in place of the output; each is read in backward
    reads_left: int = 0  # while `output` is held: how many readers have not received `output` in this backward pass
    output: Tensor | None = None  # the recomputed output, between the first and the last reader of a backward pass

    def recompute(self, saved: Tensors) -> Tensor:
        """Return the output to a reader. The call for the first reader computes; the call for the last drops `output`.

        saved: the tensors saved by the op, from position `Op.recompute_from` on.
        """
        assert self.op.recompute is not None, "mark_recomputable is called for ops with `recompute` alone"
        output = self.output
        if output is None:
            output, self.reads_left = self.op.recompute(saved, **self.options), self.readers
            if self.readers > 1 and torch._C._current_graph_task_id() != -1:  # not for weight gradients that wait
                torch.autograd.Variable._execution_engine.queue_callback(self._drop)
        self.reads_left -= 1
        self.output = output if self.reads_left else None
        return output

    def _drop(self) -> None:
        """Called at the end of the backward pass of the first reader."""
        self.output, self.reads_left = None, 0


class _RecomputableOutput(NamedTuple):
    """A recomputable op output: the recipe, the tensors to recompute from, and state to check that these are unchanged.

    Attached to the output's storage by `mark_recomputable`. Invalid once the output or a saved tensor is written in
    place.
    """

    recipe: Recipe
    saved: Tensors  # the argument of `Recipe.recompute`
    versions: tuple[int, ...]  # `_versions` when the output was marked
    geometry: tuple[Any, ...]  # the output's `_geometry`


# For each tensor to save: None if the tensor is saved itself, else the recipe and the number of tensors saved instead.
Recipes = list[tuple[Recipe, int] | None]


def mark_recomputable(output: Tensor, op: Op, saved: Tensors, options: dict[str, Any]) -> None:
    """Mark the last output of `op` as recomputable. saved: the tensors saved by `op` for backward.

    Ops called later with `output` as an operand then save these tensors instead of `output`. Does nothing if
    recomputing takes longer than the saved memory is worth: for float32 and float64 on a CPU.
    """
    if not backend.is_short_of_memory(output):
        return
    saved = saved[op.recompute_from :]
    marked = _RecomputableOutput(Recipe(op, options), saved, _versions(output, saved), _geometry(output))
    setattr(output.untyped_storage(), ATTRIBUTE, marked)


def replace_recomputable(saved: Tensors) -> tuple[Sequence[Tensor | None], Recipes]:
    """Replace each recomputable tensor in `saved` by the tensors to recompute from.

    Called when an op saves for backward.

    Returns the tensors for `save_for_backward`, and the recipes for `restore`: an empty list if nothing was replaced.
    """
    for tensor in saved:  # most ops save no recomputable tensor, and should not pay for a list
        if tensor is not None and hasattr(tensor.untyped_storage(), ATTRIBUTE):
            break
    else:
        return saved, []
    tensors: list[Tensor | None] = []
    recipes: Recipes = []
    for tensor in saved:
        output = None if tensor is None else _recomputable(tensor)
        if output is None:
            tensors.append(tensor)
            recipes.append(None)
        else:
            output.recipe.readers += 1
            tensors += output.saved
            recipes.append((output.recipe, len(output.saved)))
    return (tensors, recipes) if any(recipes) else (saved, [])


def restore(tensors: Sequence[Tensor | None], recipes: Recipes) -> Tensors:
    """Return the tensors which `replace_recomputable` received, from the two results of that call.

    Called once per op and backward pass. Do not call with empty recipes.
    """
    remaining = iter(tensors)
    saved: list[Tensor | None] = []
    for entry in recipes:
        if entry is None:
            saved.append(next(remaining))
        else:
            recipe, count = entry
            saved.append(recipe.recompute(tuple(next(remaining) for _ in range(count))))
    return tuple(saved)


def _recomputable(tensor: Tensor) -> _RecomputableOutput | None:
    """The `_RecomputableOutput` with which `tensor` is marked; None if the tensor must be saved itself.

    None for a view of a marked output; where the output or a saved tensor was written in place after marking; and
    where the memory of a saved tensor was freed.
    """
    output: _RecomputableOutput | None = getattr(tensor.untyped_storage(), ATTRIBUTE, None)
    if output is None or output.geometry != _geometry(tensor) or output.versions != _versions(tensor, output.saved):
        return None
    return output if all(map(_has_memory, output.saved)) else None


def _versions(output: Tensor, saved: Tensors) -> tuple[int, ...]:
    """Counts of writes in place: to the output, and to each tensor from which the output would be recomputed."""
    return output._version, *[each._version for each in saved if each is not None]


def _has_memory(tensor: Tensor | None) -> bool:
    """False for a parameter whose gathered memory was freed after the module with the norm or gate.

    The parameter's memory is gathered again for this module's backward. The op which saves now is in a later module,
    whose backward runs before: the output could not be recomputed yet.
    """
    return tensor is None or tensor.untyped_storage().nbytes() >= tensor.nbytes


def _geometry(tensor: Tensor) -> tuple[Any, ...]:
    """Shape, strides, offset and dtype. If equal for two tensors of a storage, both show the same elements."""
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype
