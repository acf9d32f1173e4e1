"""Values that are made again in backward, instead of kept until then: what a norm or a gate gave, from what that has kept itself.

Where an op saves such a value, as a product saves its input, it saves the tensors that make it, which take no more memory: they are
saved already. Products that share an input share what is made again. Under torch.compile the compiler decides, and nothing of this is
done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .op import Op, Tensors

SOURCE = "_weft_source"  # of a storage: the `Source` of what is in it


@dataclass(slots=True, eq=False)
class Again:
    """How to make an op's last output again. It holds no tensor but, from its first reader in backward to its last, the value."""

    op: Op
    options: dict[str, Any]
    readers: int = 0
    left: int = 0
    value: Tensor | None = None

    def make(self, saved: Tensors) -> Tensor:
        """The value, for one of the readers. saved: what the op saved, from `again_from` on."""
        assert self.op.again is not None, "only such ops have a source"
        value = self.op.again(saved, **self.options) if self.value is None else self.value
        self.left = (self.left or self.readers) - 1
        self.value = value if self.left else None
        made: Tensor = value
        return made


@dataclass(slots=True, eq=False)
class Source:
    """What is in a storage, as long as its version is this one."""

    again: Again
    saved: Tensors
    version: int
    lies: tuple[Any, ...]


@dataclass(slots=True)
class Kept:
    """What takes the place of the tensors that an op saves.

    makes: for each of them what makes it of so many of `tensors`, or None; empty where all are kept as they are.
    """

    tensors: Sequence[Tensor | None]
    makes: list[tuple[Again, int] | None] = field(default_factory=list)


def mark(output: Tensor, op: Op, saved: Tensors, options: dict[str, Any]) -> None:
    """Has what saves `output`, the last of op's, keep instead what makes it of what the op has saved."""
    if op.again is not None and not torch.compiler.is_compiling():
        source = Source(Again(op, options), saved[op.again_from :], output._version, _lies(output))
        setattr(output.untyped_storage(), SOURCE, source)


def kept(saved: Tensors) -> Kept:
    """What to save in the place of `saved`."""
    if torch.compiler.is_compiling():
        return Kept(saved)
    sources = [None if tensor is None else _source(tensor) for tensor in saved]
    if not any(sources):
        return Kept(saved)
    tensors: list[Tensor | None] = []
    result = Kept(tensors)
    for tensor, source in zip(saved, sources, strict=True):
        if source is None:
            tensors.append(tensor)
            result.makes.append(None)
        else:
            source.again.readers += 1
            tensors += source.saved
            result.makes.append((source.again, len(source.saved)))
    return result


def restored(tensors: Sequence[Tensor | None], makes: Sequence[tuple[Again, int] | None]) -> Tensors:
    """What was to be saved, from what `kept` saved in its place. In backward, once."""
    if not makes:
        return tuple(tensors)
    remaining = iter(tensors)
    saved: list[Tensor | None] = []
    for make in makes:
        if make is None:
            saved.append(next(remaining))
        else:
            again, count = make
            saved.append(again.make(tuple(next(remaining) for _ in range(count))))
    return tuple(saved)


def _source(tensor: Tensor) -> Source | None:
    """Where the tensor is what an op gave, unchanged, not a part of it or another view, and what makes it has its memory."""
    source: Source | None = getattr(tensor.untyped_storage(), SOURCE, None)
    if source is None or source.version != tensor._version or source.lies != _lies(tensor):
        return None
    return source if all(map(_has_memory, source.saved)) else None


def _has_memory(tensor: Tensor | None) -> bool:
    """Not so for a parameter that was gathered for another module, and given back: backward comes to this one before."""
    return tensor is None or tensor.untyped_storage().nbytes() >= tensor.nbytes


def _lies(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype
