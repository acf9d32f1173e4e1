"""Where Hugging Face's files store a parameter: the tensor's name, the part of this tensor, and the orientation."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a parameter's values are in Hugging Face's files. A family's `weights.stored` makes one for each parameter.

    Several parameters may share a stored tensor, like GPT-2's q, k and v, joined along the parameters' first dim.
    """

    name: str  # of the stored tensor
    part: int = 0  # which of the parameters in the stored tensor
    parts: int = 1  # how many parameters the stored tensor holds
    transposed: bool = False  # whether the file stores the transpose

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The stored tensor's shape, from the parameter's shape."""
        whole = (shape[0] * self.parts, *shape[1:])
        return whole[::-1] if self.transposed else whole

    def slices(self, slices: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
        """The slices of the stored tensor that hold `slices` of the parameter. shape: the parameter's."""
        first, *further = slices
        start = self.part * shape[0]
        found = (slice(start + first.start, start + first.stop), *further)
        return found[::-1] if self.transposed else found

    def place(self, whole: Tensor) -> Tensor:
        """The parameter's view of the stored tensor, in the parameter's shape; to be written to."""
        own = whole.mT if self.transposed else whole
        size = own.shape[0] // self.parts
        return own[self.part * size : (self.part + 1) * size]

    def to_parameter_orientation(self, read: Tensor) -> Tensor:
        """Values read from the stored tensor, in the parameter's orientation."""
        return read.mT.contiguous() if self.transposed else read


@dataclass(frozen=True, slots=True)
class Repeats:
    """The values required of a stored tensor without a parameter: those of `tensor`, or any accepted by `accepts`.

    Files of Hugging Face may hold tensors besides the parameters: a tied head, a causal mask, rotary frequencies.
    Made by a family's `weights.repetition` for `check_tensors`, which also accepts a tensor of zeros.
    """

    # The error is "{name of the stored tensor} is not {what}; {remedy}".
    what: str
    remedy: str
    tensor: str | None = None  # the name of another stored tensor
    accepts: Callable[[Tensor], bool] = bool  # called only without `tensor`


def tied_head(embedding: str) -> Repeats:
    """The values required of a stored head where embeddings are tied: those of the table named `embedding`."""
    return Repeats(
        what=f"{embedding}, though config.json ties them by tie_word_embeddings",
        remedy="set tie_word_embeddings to false in config.json to keep this head, or remove the tensor to drop it",
        tensor=embedding,
    )


def join_parameters(parts: Iterable[tuple[Stored, Tensor]]) -> Tensor:
    """The stored tensor, joined from its parameters, which are all given, in any order.

    The dtype is the narrowest to hold the values of all parameters without rounding.
    """
    pairs = list(parts)
    first, tensor = pairs[0]
    assert sorted(stored.part for stored, _ in pairs) == list(range(first.parts)), "every part is given once"
    if first.parts == 1 and not first.transposed:
        return tensor
    whole = tensor.new_empty(first.shape(tuple(tensor.shape)), dtype=common_dtype([each.dtype for _, each in pairs]))
    for stored, tensor in pairs:
        stored.place(whole).copy_(tensor)
    return whole


def common_dtype(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """The narrowest dtype to which all of `dtypes` convert without rounding."""
    from torch import promote_types

    return reduce(promote_types, dtypes)


def group_by_stored_tensor(names: Iterable[str], stored: Callable[[str], Stored]) -> dict[str, list[str]]:
    """Stored tensor's name -> the parameters in it, in order of their first parameters."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(stored(name).name, []).append(name)
    return groups
