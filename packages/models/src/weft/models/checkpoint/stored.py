"""`Stored`: where Hugging Face's files store a parameter, by tensor name, part and orientation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a parameter's values are in Hugging Face's files. Made by a family's `weights.stored`.

    Several parameters may share a stored tensor, like GPT-2's q, k and v, joined along the parameters' first dim.
    """

    name: str  # of the stored tensor
    part: int = 0  # the parameter's place among the parameters that share the stored tensor
    parts: int = 1  # the number of parameters that share the stored tensor
    transposed: bool = False  # whether the file stores the transpose
    # Whether the parameter is a stack of experts' matrices, and the file has a tensor for each expert. `name` then has
    # "{}" in place of the expert's number.
    stacked: bool = False

    def names(self, shape: tuple[int, ...]) -> tuple[str, ...]:
        """The names of the stored tensors: a single name, or for a stack a name by expert. shape: the parameter's."""
        return tuple(self.name.format(i) for i in range(shape[0])) if self.stacked else (self.name,)

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the stored tensor; for a stack, of each expert's. shape: the parameter's."""
        if self.stacked:
            return shape[1:]
        whole = (shape[0] * self.parts, *shape[1:])
        return whole[::-1] if self.transposed else whole

    def slices(self, slices: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
        """The stored tensor's slices with the values of the parameter's `slices`. shape: the parameter's. No stack."""
        first, *further = slices
        start = self.part * shape[0]
        found = (slice(start + first.start, start + first.stop), *further)
        return found[::-1] if self.transposed else found

    def place(self, whole: Tensor) -> Tensor:
        """The view of a stored tensor `whole` into which the parameter's values are written. No stack."""
        own = whole.mT if self.transposed else whole
        size = own.shape[0] // self.parts
        return own[self.part * size : (self.part + 1) * size]

    def to_parameter_orientation(self, read: Tensor) -> Tensor:
        """Values read from the stored tensor, transposed into the parameter's orientation if necessary."""
        return read.mT.contiguous() if self.transposed else read


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """Stored tensors written together: a tensor with the parameters sharing the tensor, or all tensors of a stack."""

    tensors: tuple[str, ...]
    parameters: tuple[str, ...]

    def values(self, stored: Callable[[str], Stored], whole: Iterable[Tensor]) -> dict[str, Tensor]:
        """The stored tensors by name, from the whole parameters in order. Entries of a stack are views."""
        pairs = [(stored(name), each) for name, each in zip(self.parameters, whole, strict=True)]
        if pairs[0][0].stacked:
            return dict(zip(self.tensors, pairs[0][1].unbind(), strict=False))
        return {self.tensors[0]: join_parameters(pairs)}


@dataclass(frozen=True, slots=True)
class Repeats:
    """The values required of a stored tensor without a parameter: equal to `tensor`, or accepted by `accepts`.

    Files of Hugging Face may hold tensors besides the parameters: a tied head, a causal mask, rotary frequencies.
    Made by a family's `weights.repetition` for `check_tensors`, which also accepts a tensor of zeros.
    """

    # The error is "{name of the stored tensor} is not {what}; {remedy}".
    what: str
    remedy: str
    tensor: str | None = None  # the name of another stored tensor
    accepts: Callable[[Tensor], bool] = bool  # called only without `tensor`


def tied_head(embedding: str) -> Repeats:
    """The values required of a stored head where embeddings are tied: equal to the table named `embedding`."""
    return Repeats(
        what=f"{embedding}, though config.json ties them by tie_word_embeddings",
        remedy="set tie_word_embeddings to false in config.json to keep this head, or remove the tensor to drop it",
        tensor=embedding,
    )


def join_parameters(parts: Iterable[tuple[Stored, Tensor]]) -> Tensor:
    """Join all parameters of a stored tensor, given in any order.

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


def group_by_stored_tensor(shapes: Mapping[str, tuple[int, ...]], stored: Callable[[str], Stored]) -> list[StoredGroup]:
    """The stored tensors of parameters, in order of their first parameters. shapes: of the parameters, by name."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, shape in shapes.items():
        groups.setdefault(stored(name).names(shape), []).append(name)
    return [StoredGroup(tensors, tuple(parameters)) for tensors, parameters in groups.items()]
