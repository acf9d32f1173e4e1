"""How a parameter is stored in a safetensors file: under which name, as which part of a tensor, transposed or not."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a parameter's values are: `name`, and of several parameters that one tensor holds the `part`-th of `parts`.

    They lie side by side along the parameter's first dim. transposed: the tensor is the parameter's transpose.
    """

    name: str
    part: int = 0
    parts: int = 1
    transposed: bool = False

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The stored tensor's shape, for a parameter of this one."""
        whole = (shape[0] * self.parts, *shape[1:])
        return whole[::-1] if self.transposed else whole

    def slices(self, slices: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
        """The part of the stored tensor that is `slices` of the parameter of this shape."""
        first, *rest = slices
        start = self.part * shape[0]
        found = (slice(start + first.start, start + first.stop), *rest)
        return found[::-1] if self.transposed else found

    def place(self, whole: Tensor) -> Tensor:
        """Where the parameter lies in the stored tensor, as it is in the model; what is written there is stored."""
        own = whole.mT if self.transposed else whole
        size = own.shape[0] // self.parts
        return own[self.part * size : (self.part + 1) * size]

    def restored(self, read: Tensor) -> Tensor:
        """What was read of the stored tensor, as it is in the parameter."""
        return read.mT.contiguous() if self.transposed else read


def joined(parts: Iterable[tuple[Stored, Tensor]]) -> Tensor:
    """The stored tensor of whole parameters, of which all its parts are given, in any order."""
    given = list(parts)
    first, tensor = given[0]
    assert sorted(stored.part for stored, _ in given) == list(range(first.parts)), "all parts are given"
    if first.parts == 1 and not first.transposed:
        return tensor
    whole = tensor.new_empty(first.shape(tuple(tensor.shape)))
    for stored, tensor in given:
        stored.place(whole).copy_(tensor)
    return whole


def grouped(names: Iterable[str], stored: Callable[[str], Stored]) -> dict[str, list[str]]:
    """The parameters by the name of the tensor that holds them, in order of its first."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(stored(name).name, []).append(name)
    return groups
