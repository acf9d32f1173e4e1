"""Recomputing a norm's or a gate's output in backward, instead of saving it for the ops after.

A linear layer saves its input for backward. If the input is the output of a norm or a gate, the layer saves the
tensors from which the norm or gate computes the output, for example swiglu's gate and up. The norm or gate has saved
these already: no more memory is needed. Backward recomputes the output once for all readers.

Not done under torch.compile, where the compiler decides what to recompute, nor on a CPU in 32 bits or more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from . import backend
from .op import Op, Tensors

SOURCE = "_weft_source"  # the attribute of an untyped storage under which its `Source` is kept


@dataclass(slots=True, eq=False)
class Recipe:
    """How to recompute an op's last output in backward.

    `mark_recomputable` makes one for each call of an op with `Op.recompute`. Holds `value` until `readers` calls of
    `make` have passed. Keeps no other tensor alive.
    """

    op: Op
    options: dict[str, Any]
    readers: int = 0  # ops that would have saved the output
    reads_left: int = 0  # calls of `make` until `value` is dropped; 0 if there is no value
    value: Tensor | None = None  # the recomputed output

    def make(self, saved: Tensors) -> Tensor:
        """Return the recomputed output to one of its readers.

        saved: the tensors saved by the op, from position `Op.recompute_from` on.
        """
        assert self.op.recompute is not None, "mark_recomputable is called for ops with `recompute` alone"
        value = self.op.recompute(saved, **self.options) if self.value is None else self.value
        self.reads_left = (self.reads_left or self.readers) - 1
        self.value = value if self.reads_left else None
        made: Tensor = value
        return made


class Source(NamedTuple):
    """How to recompute the op output stored in a storage, on which the source is kept.

    Stale once the output or a saved tensor is written in place.
    """

    recipe: Recipe
    saved: Tensors
    versions: tuple[int, ...]  # `_versions` when the output was marked
    geometry: tuple[Any, ...]  # the output's `_geometry`


# For each tensor to save: None if the tensor is saved itself, else its recipe and the number of tensors saved in its
# place.
Recipes = list[tuple[Recipe, int] | None]


def mark_recomputable(output: Tensor, op: Op, saved: Tensors, options: dict[str, Any]) -> None:
    """Mark `output`, the last output of `op`, as recomputable from `saved`, the tensors saved by `op` for its own
    backward.

    Ops called later with `output` as an operand then save these tensors in its place.
    """
    if not backend.is_short_of_memory(output):
        return
    saved = saved[op.recompute_from :]
    source = Source(Recipe(op, options), saved, _versions(output, saved), _geometry(output))
    setattr(output.untyped_storage(), SOURCE, source)


def replace_recomputable(saved: Tensors) -> tuple[Sequence[Tensor | None], Recipes]:
    """Replace each recomputable tensor in `saved` by its `Source.saved`. Called when an op saves for backward.

    Returns the tensors for `save_for_backward`, and the recipes for `restore`: an empty list if nothing was replaced.
    """
    for tensor in saved:  # most ops save no recomputable tensor, and should not pay for a list
        if tensor is not None and hasattr(tensor.untyped_storage(), SOURCE):
            break
    else:
        return saved, []
    tensors: list[Tensor | None] = []
    recipes: Recipes = []
    for tensor in saved:
        source = None if tensor is None else _source(tensor)
        if source is None:
            tensors.append(tensor)
            recipes.append(None)
        else:
            source.recipe.readers += 1
            tensors += source.saved
            recipes.append((source.recipe, len(source.saved)))
    return (tensors, recipes) if any(recipes) else (saved, [])


def restore(tensors: Sequence[Tensor | None], recipes: Recipes) -> Tensors:
    """Return the tensors originally given to `replace_recomputable`, from its two results.

    Called once per op and backward pass. Do not call with empty recipes.
    """
    remaining = iter(tensors)
    saved: list[Tensor | None] = []
    for entry in recipes:
        if entry is None:
            saved.append(next(remaining))
        else:
            recipe, count = entry
            saved.append(recipe.make(tuple(next(remaining) for _ in range(count))))
    return tuple(saved)


def _source(tensor: Tensor) -> Source | None:
    """The tensor's `Source`; None if the tensor must be saved itself.

    None for a view of a marked output; where the output or a saved tensor was written in place after marking; and
    where the memory of a saved tensor was freed.
    """
    source: Source | None = getattr(tensor.untyped_storage(), SOURCE, None)
    if source is None or source.geometry != _geometry(tensor) or source.versions != _versions(tensor, source.saved):
        return None
    return source if all(map(_has_memory, source.saved)) else None


def _versions(output: Tensor, saved: Tensors) -> tuple[int, ...]:
    """Counts of writes in place: to the output, and to each tensor that it would be recomputed from."""
    return output._version, *[each._version for each in saved if each is not None]


def _has_memory(tensor: Tensor | None) -> bool:
    """False for a parameter gathered for another module and freed since.

    The op that saves now runs its backward before the other module gathers the parameter again, and could not
    recompute.
    """
    return tensor is None or tensor.untyped_storage().nbytes() >= tensor.nbytes


def _geometry(tensor: Tensor) -> tuple[Any, ...]:
    """Shape, strides, offset and dtype. If equal for two tensors of one storage, both show the same elements."""
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype
