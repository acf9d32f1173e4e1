"""Meshes: ranks on named axes, as an immutable value, equal by content."""

from __future__ import annotations

import hashlib
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, lru_cache
from itertools import islice, product
from typing import Any, overload

from .arguments import as_int, as_name
from .ranks import Ranks

Axis = str | int  # an axis by its name, or by its position; a negative position counts from the end
Index = int | slice
MOST_RANKS = 2**24  # limit of `ProcessMesh.grid`: 100 times the processes of the largest machines


class ProcessMesh:
    """Ranks laid out on named axes, row-major: the last axis varies fastest.

    ranks: nested sequences or an array of distinct ints >= 0, a level per axis; an int makes a mesh of one process.
    axis_names: a name per level; None: axis0, axis1, … Methods take an axis by name or by position.

    Two meshes with the same names, shape and ranks are equal and have the same hash. Their digest is the same in every
    process. A part of a grid is stored as strides, and takes no memory per rank.
    Raises ValueError for repeated, ragged or invalid ranks, for repeated names, and unless each level has a name.
    """

    __slots__ = ("__dict__", "_ranks", "axis_names")
    axis_names: tuple[str, ...]
    _ranks: Ranks

    def __init__(self, ranks: Sequence[Any] | int, axis_names: Sequence[str] | None = None) -> None:
        shape, flat = _flatten(ranks)
        shape = shape or (1,)
        names = _check_names(shape, _default_names(len(shape)) if axis_names is None else axis_names)
        flat = [_as_rank(rank) for rank in flat]
        if len(set(flat)) != len(flat):
            [(repeated, _)] = Counter(flat).most_common(1)
            raise ValueError(f"rank {repeated} appears twice in the mesh; a rank has one coordinate")
        self._set(names, Ranks.listed(shape, flat))

    @classmethod
    def grid(cls, /, *, first_rank: int = 0, **sizes: int) -> ProcessMesh:
        """The mesh of consecutive ranks: `ProcessMesh.grid(dp=2, tp=4)` has ranks 0 to 7.

        Raises ValueError for more than MOST_RANKS ranks.
        """
        shape = tuple(_as_size(name, size) for name, size in sizes.items())
        if math.prod(shape) > MOST_RANKS:
            raise ValueError(
                f"a mesh of sizes {', '.join(f'{name}={size}' for name, size in sizes.items())} is too large; "
                f"a mesh has {MOST_RANKS:,} ranks at most"
            )
        return cls._make(_check_names(shape, tuple(sizes)), Ranks.consecutive(shape, _as_rank(first_rank)))

    @classmethod
    def _make(cls, axis_names: tuple[str, ...], ranks: Ranks) -> ProcessMesh:
        mesh = cls.__new__(cls)
        mesh._set(axis_names, ranks)
        return mesh

    def _set(self, axis_names: tuple[str, ...], ranks: Ranks) -> None:
        object.__setattr__(self, "axis_names", axis_names)
        object.__setattr__(self, "_ranks", ranks)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a ProcessMesh is immutable; cannot set {name!r}")

    def __reduce__(self) -> tuple[Any, ...]:
        return ProcessMesh._make, (self.axis_names, self._ranks)

    # Content and identity

    @property
    def shape(self) -> tuple[int, ...]:
        return self._ranks.shape

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @cached_property
    def size(self) -> int:
        return math.prod(self.shape)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """All ranks, row-major. Made on first use; to look at a few of many ranks, iterate over the mesh."""
        return tuple(self._ranks)

    @property
    def strides(self) -> tuple[int, ...] | None:
        """Distance of neighbouring ranks along each axis, 0 along an axis of size 1; None for irregular ranks."""
        return self._ranks.strides if self._ranks.table is None else None

    @cached_property
    def digest(self) -> str:
        """Hex digest of the mesh's content, the same in every process: names the mesh in messages between ranks."""
        ranks = self._ranks
        text = repr((self.axis_names, ranks.shape, ranks.first, ranks.strides, ranks.table))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    @cached_property
    def _hash(self) -> int:
        return hash((self.axis_names, self._ranks))

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, ProcessMesh):
            return NotImplemented
        return self.axis_names == other.axis_names and self._ranks == other._ranks

    def __hash__(self) -> int:
        return self._hash

    def __iter__(self) -> Iterator[int]:
        """The ranks, row-major."""
        return iter(self._ranks)

    def __contains__(self, rank: object) -> bool:
        try:
            return _index(self, as_int("a rank", rank)) is not None
        except ValueError:
            return False

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}={size}" for name, size in zip(self.axis_names, self.shape, strict=True))
        first = self._ranks.at([0] * self.ndim)
        if self._ranks == Ranks.consecutive(self.shape, first):
            return f"ProcessMesh.grid({sizes}{f', first_rank={first}' if first else ''})"
        shown = ", ".join(map(str, islice(self, 2 if self.size > 16 else 16)))
        return f"ProcessMesh({sizes}, ranks=[{shown}{f', ... {self.size} ranks' if self.size > 16 else ''}])"

    def axis(self, name: Axis) -> int:
        """Position of axis `name` among the axes. Raises ValueError for an unknown axis."""
        try:
            return self.axis_names.index(name) if isinstance(name, str) else range(self.ndim)[as_int("an axis", name)]
        except (ValueError, IndexError):
            raise ValueError(f"the mesh has no axis {name!r}; its axes are {', '.join(self.axis_names)}") from None

    def axis_name(self, name: Axis) -> str:
        """Name of an axis given by name or by position."""
        return self.axis_names[self.axis(name)]

    def axis_size(self, *names: Axis) -> int:
        """Number of ranks along an axis, or along several axes together."""
        return math.prod(self.shape[self.axis(name)] for name in names)

    def coordinate(self, rank: int) -> dict[str, int] | None:
        """Index of `rank` along each axis, by name; None for a rank outside the mesh."""
        index = _index(self, as_int("a rank", rank))
        return None if index is None else dict(zip(self.axis_names, index, strict=True))

    def rank_at(self, /, *position: int, **index: int) -> int:
        """The rank at an index per axis, by name or in mesh order: `mesh.rank_at(dp=0, tp=1)`, `mesh.rank_at(0, 1)`.

        A negative index counts from the end.
        """
        if position:
            if index or len(position) != self.ndim:
                raise ValueError(
                    f"rank_at got {len(position)} indices by position{' and some by name' if index else ''}; "
                    f"give one for each of {', '.join(self.axis_names)}, in this order or by name"
                )
            index = dict(zip(self.axis_names, position, strict=True))
        if set(index) != set(self.axis_names):
            raise ValueError(f"rank_at got {sorted(index)}; give one index for each of {', '.join(self.axis_names)}")
        return self._ranks.at([self._check_index(name, index[name]) for name in self.axis_names])

    def _check_index(self, name: str, index: int) -> int:
        """`index` counted from the front. Raises ValueError outside the axis."""
        size, index = self.axis_size(name), as_int(f"the index along axis {name!r}", index)
        if not -size <= index < size:
            raise ValueError(
                f"index {index} is outside axis {name!r} of size {size}; "
                f"use 0 to {size - 1}, or {-size} to -1 from the end"
            )
        return index % size

    # Meshes derived from this one

    def select(self, /, **index: Index) -> ProcessMesh:
        """The sub-mesh at the given indices: an int drops its axis, a slice keeps it."""
        names, picks = self._part({self.axis(name): at for name, at in index.items()})
        if not names:
            raise ValueError(f"select({index}) drops every axis; use rank_at for a single rank")
        return self._make(names, self._ranks.take(picks))

    def _part(self, index: dict[int, Index]) -> tuple[tuple[str, ...], list[range | int]]:
        """The sub-mesh's axis names, and the indices picked along each axis. index: by axis position."""
        picks: list[range | int] = [range(size) for size in self.shape]
        for axis, at in index.items():
            name = self.axis_names[axis]
            picks[axis] = _pick(name, self.shape[axis], at) if isinstance(at, slice) else self._check_index(name, at)
        return tuple(n for n, pick in zip(self.axis_names, picks, strict=True) if isinstance(pick, range)), picks

    @overload
    def __getitem__(self, index: Index | tuple[Index, ...]) -> ProcessMesh: ...
    @overload
    def __getitem__(self, index: str | tuple[str, ...]) -> ProcessMesh | None: ...
    def __getitem__(self, index: Index | str | tuple[Index, ...] | tuple[str, ...]) -> ProcessMesh | None:
        """The sub-mesh at indices, as for an array: `mesh[0]`, `mesh[:, 1:]`; or along named axes: `mesh["tp"]`.

        An int drops its axis; an int for every axis gives the mesh of a single process. `mesh["tp"]` is
        `mesh.submesh(rank, "tp")` of this process's rank in torch.distributed; None for a process outside the mesh.
        With names, raises RuntimeError unless torch.distributed is initialized; `submesh` and `groups` work without.
        """
        indices: tuple[Any, ...] = index if isinstance(index, tuple) else (index,)
        if any(isinstance(at, str) for at in indices):
            self._check_axes("mesh", indices)
            return self.submesh(_this_rank(indices), *indices)
        if len(indices) > self.ndim:
            raise ValueError(f"{len(indices)} indices for the {self.ndim} axes of {self}; give at most one for each")
        names, picks = self._part(dict(enumerate(indices)))
        if names:
            return self._make(names, self._ranks.take(picks))
        return ProcessMesh(self._ranks.at([pick for pick in picks if isinstance(pick, int)]))

    def get_mesh_with_dim(self, name: Axis, index: int | None = None) -> ProcessMesh:
        """The mesh with axis `name` first (index None), or the sub-mesh at `index` of the axis, without the axis.

        The mesh of a pipeline stage is `mesh.get_mesh_with_dim("pp", stage)`, the same as `mesh.select(pp=stage)`.
        """
        first = self.axis_name(name)
        if index is not None:
            return self.select(**{first: index})
        return self.permute(first, *(axis for axis in self.axis_names if axis != first))

    def submesh(self, rank: int, *names: Axis) -> ProcessMesh | None:
        """The sub-mesh along the axes `names` which holds `rank`; None for a rank outside the mesh."""
        chosen = self._check_axes("submesh", names)
        coordinate = self.coordinate(rank)
        if coordinate is None:
            return None
        return self.select(**{name: at for name, at in coordinate.items() if name not in chosen}).permute(*chosen)

    def groups(self, *names: Axis) -> tuple[ProcessMesh, ...]:
        """The sub-meshes along the axes `names`: one for each index of the other axes, in row-major order."""
        chosen = self._check_axes("groups", names)
        remaining = [name for name in self.axis_names if name not in chosen]
        indices = product(*(range(self.axis_size(name)) for name in remaining))
        return tuple(self.select(**dict(zip(remaining, at, strict=True))).permute(*chosen) for at in indices)

    def _check_axes(self, call: str, names: Sequence[Axis]) -> tuple[str, ...]:
        """The names of the axes. Raises ValueError for no axis or a repeated axis. call: the method's name."""
        chosen = tuple(map(self.axis_name, names))
        if not chosen or len(set(chosen)) != len(chosen):
            raise ValueError(
                f"{call}{tuple(names)} must name one axis or more of {', '.join(self.axis_names)}, each once"
            )
        return chosen

    def permute(self, *names: Axis) -> ProcessMesh:
        """The same ranks with the axes in the order `names`."""
        axes = [self.axis(name) for name in names]
        if sorted(axes) != list(range(self.ndim)):
            raise ValueError(f"permute{names} must name each of {', '.join(self.axis_names)} once")
        if axes == list(range(self.ndim)):
            return self
        return self._make(tuple(self.axis_names[axis] for axis in axes), self._ranks.permute(axes))

    def rename(self, /, **names: str) -> ProcessMesh:
        """The same mesh with axes renamed: `mesh.rename(dp="data")`."""
        for name in names:
            self.axis(name)
        renamed = tuple(names.get(name, name) for name in self.axis_names)
        return self._make(_check_names(self.shape, renamed), self._ranks)

    def flatten(self, names: Sequence[Axis], *, into: str) -> ProcessMesh:
        """The mesh with the neighbouring axes `names`, major first, merged into axis `into`."""
        if not isinstance(names, Sequence):
            raise ValueError(f"flatten got the axes {names!r}; give a sequence of {self.axis_names}")
        axes = [self.axis(name) for name in names]
        if not axes or axes != list(range(axes[0], axes[0] + len(axes))):
            raise ValueError(f"axes {tuple(names)} are not neighbours in {self.axis_names}; permute the mesh first")
        first, end = axes[0], axes[-1] + 1
        ranks = self._ranks.merge(first, end)
        flat = (*self.axis_names[:first], into, *self.axis_names[end:])
        return self._make(_check_names(ranks.shape, flat), ranks)

    def unflatten(self, name: Axis, /, **sizes: int) -> ProcessMesh:
        """The mesh with axis `name` split into `sizes`, major first: `mesh.unflatten("dp", replica=2, shard=4)`."""
        at = self.axis(name)
        sizes = {part: _as_size(part, size) for part, size in sizes.items()}
        if not sizes or math.prod(sizes.values()) != self.shape[at]:
            raise ValueError(f"axis {name!r} of size {self.shape[at]} cannot be unflattened into sizes {sizes}")
        ranks = self._ranks.split(at, tuple(sizes.values()))
        names = (*self.axis_names[:at], *sizes, *self.axis_names[at + 1 :])
        return self._make(_check_names(ranks.shape, names), ranks)


def as_mesh(value: Any) -> ProcessMesh:
    """`value` as a ProcessMesh; torch's DeviceMesh is taken too.

    torch is not imported: a DeviceMesh is recognized and read by its public attributes.
    """
    if isinstance(value, ProcessMesh):
        return value
    if not hasattr(value, "mesh_dim_names"):
        raise ValueError(f"{value!r} is not a mesh; give a ProcessMesh or a DeviceMesh")
    return ProcessMesh(value.mesh.tolist(), value.mesh_dim_names)


@lru_cache(maxsize=65536)
def _index(mesh: ProcessMesh, rank: int) -> tuple[int, ...] | None:
    """The index of `rank` along each axis. Cached: every process asks for its own rank again and again."""
    return mesh._ranks.find(rank)


def _this_rank(names: tuple[str, ...]) -> int:
    """This process's rank in torch.distributed. names: the axes asked for, for the error.

    torch is not imported here: a process that has not imported torch cannot have joined a process group.
    """
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        shown = ", ".join(map(repr, names))
        raise RuntimeError(
            f"mesh[{shown}] is the part of the mesh that holds this process, but torch.distributed is not initialized; "
            f"call mesh.submesh(rank, {shown}) or mesh.groups({shown})"
        )
    return int(distributed.get_rank())


def _default_names(count: int) -> tuple[str, ...]:
    """Default names of `count` axes."""
    return tuple(f"axis{position}" for position in range(count))


def _check_names(shape: tuple[int, ...], axis_names: Any) -> tuple[str, ...]:
    """The axis names as a tuple. Raises ValueError for repeated names, and unless there is one per axis."""
    if isinstance(axis_names, str) or not isinstance(axis_names, Iterable):
        raise ValueError(f"axis_names is {axis_names!r}; give a sequence of names, one for each level of ranks")
    names = tuple(axis_names)
    if len(shape) != len(names):
        raise ValueError(f"{len(names)} axis names {names} for ranks of shape {shape}; give one per level")
    names = tuple(map(as_name, names))
    if len(set(names)) != len(names):
        raise ValueError(f"axis names {names} repeat a name; each axis needs its own")
    if not shape or 0 in shape:
        raise ValueError(f"ranks of shape {shape} hold no rank; a mesh has at least one axis and one rank")
    return names


def _as_rank(value: Any) -> int:
    return _as_int_from(
        0,
        value,
        lambda: f"rank {value!r} is not an int >= 0; name processes as torch.distributed does, from 0 on",
    )


def _as_size(name: str, value: Any) -> int:
    return _as_int_from(1, value, lambda: f"axis {name!r} has size {value!r}; a size is an int >= 1")


def _as_int_from(least: int, value: Any, message: Callable[[], str]) -> int:
    """`value` as an int. Raises ValueError with the text `message()` for anything but an int >= `least`."""
    try:
        number = as_int("a number", value)
        if number >= least:
            return number
    except ValueError:
        pass
    raise ValueError(message())


def _pick(name: str, size: int, at: slice) -> range:
    """The indices picked by a slice along an axis. Raises ValueError where the slice picks none."""
    try:
        pick = range(size)[at]
    except TypeError:
        raise ValueError(f"{at} of axis {name!r} has a bound that is not an int") from None
    if not pick:
        raise ValueError(f"{at} of axis {name!r} of size {size} holds no rank; its indices are 0 to {size - 1}")
    return pick


def _flatten(ranks: Any) -> tuple[tuple[int, ...], list[Any]]:
    """The shape of nested sequences, and their elements in row-major order."""
    if hasattr(ranks, "tolist"):
        ranks = ranks.tolist()
    if isinstance(ranks, set | frozenset | dict | str | bytes | Iterator) or ranks is None:
        raise ValueError(f"ranks are {ranks!r}; give nested lists of ints, or an array of them")
    if not isinstance(ranks, Sequence):
        return (), [ranks]
    parts = [_flatten(part) for part in ranks]
    if not parts:
        return (0,), []
    shape = parts[0][0]
    for position, (part_shape, _) in enumerate(parts):
        if part_shape != shape:
            raise ValueError(f"ranks are ragged: part 0 has shape {shape}, part {position} has shape {part_shape}")
    return (len(parts), *shape), [rank for _, flat in parts for rank in flat]
