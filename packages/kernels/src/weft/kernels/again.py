"""Values that are made again in backward, instead of kept until then: what a norm or a gate gave, from what that has kept itself.

Where an op saves such a value, as a product saves its input, it saves the tensors that make it, which take no more memory: they are
saved already. Products that share an input share what is made again. Under torch.compile the compiler decides, and nothing of this is
done; nor is it where a CPU computes in 32 bits or more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from . import backend
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


class Source(NamedTuple):
    """What is in a storage, as long as its version is this one."""

    again: Again
    saved: Tensors
    version: int
    lies: tuple[Any, ...]


Makes = list[tuple[Again, int] | None]  # of each tensor: what makes it, of so many of those that are kept; or None


def mark(output: Tensor, op: Op, saved: Tensors, options: dict[str, Any]) -> None:
    """Has what saves `output`, the last of an op that has `again`, keep instead what makes it of what the op has saved."""
    if not backend.is_short_of_memory(output):
        return
    source = Source(Again(op, options), saved[op.again_from :], output._version, _lies(output))
    setattr(output.untyped_storage(), SOURCE, source)


def kept(saved: Tensors) -> tuple[Sequence[Tensor | None], Makes]:
    """What to save in the place of `saved`, and what makes that of it; nothing does where all are kept as they are."""
    for tensor in saved:  # most ops find none: no list is made for them
        if tensor is not None and _source(tensor) is not None:
            break
    else:
        return saved, []
    tensors: list[Tensor | None] = []
    makes: Makes = []
    for tensor in saved:
        source = None if tensor is None else _source(tensor)
        if source is None:
            tensors.append(tensor)
            makes.append(None)
        else:
            source.again.readers += 1
            tensors += source.saved
            makes.append((source.again, len(source.saved)))
    return tensors, makes


def restored(tensors: Sequence[Tensor | None], makes: Makes) -> Tensors:
    """What was to be saved, from what `kept` saved in its place. In backward, once."""
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
