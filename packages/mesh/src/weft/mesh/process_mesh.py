"""A grid of ranks with named axes: an immutable value, equal by content."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import product
from typing import Any

Index = int | slice


class ProcessMesh:
    """Ranks laid out on named axes, row-major: the last axis varies fastest.

    Two meshes with the same names, shape and ranks are the same mesh, in every process and whatever was made
    before them: equal, same hash, same digest.
    """

    __slots__ = ("__dict__", "axis_names", "ranks", "shape")
    shape: tuple[int, ...]
    axis_names: tuple[str, ...]
    ranks: tuple[int, ...]

    def __init__(self, ranks: Sequence[Any], axis_names: Sequence[str]) -> None:
        shape, flat = _flatten(ranks)
        self._set(shape, tuple(axis_names), tuple(flat))

    @classmethod
    def grid(cls, *, first_rank: int = 0, **sizes: int) -> ProcessMesh:
        """The mesh of consecutive ranks: `ProcessMesh.grid(dp=2, tp=4)` holds ranks 0 to 7."""
        for name, size in sizes.items():
            if not _is_int(size) or size < 1:
                raise ValueError(f"axis {name!r} has size {size!r}; a size is an int >= 1")
        size = math.prod(sizes.values())
        return cls._make(tuple(sizes.values()), tuple(sizes), tuple(range(first_rank, first_rank + size)))

    @classmethod
    def _make(cls, shape: tuple[int, ...], axis_names: tuple[str, ...], ranks: tuple[int, ...]) -> ProcessMesh:
        mesh = cls.__new__(cls)
        mesh._set(shape, axis_names, ranks)
        return mesh

    def _set(self, shape: tuple[int, ...], axis_names: tuple[str, ...], ranks: tuple[int, ...]) -> None:
        if len(shape) != len(axis_names):
            raise ValueError(
                f"{len(axis_names)} axis names {axis_names} for ranks of shape {shape}; give one per level"
            )
        for name in axis_names:
            if not isinstance(name, str) or not name.isidentifier():
                raise ValueError(f"axis name {name!r} is not an identifier; name axes like 'dp' or 'tp'")
        if len(set(axis_names)) != len(axis_names):
            raise ValueError(f"axis names {axis_names} repeat a name; each axis needs its own")
        if not shape or not ranks:
            raise ValueError(f"ranks of shape {shape} hold no rank; a mesh has at least one axis and one rank")
        for rank in ranks:
            if not _is_int(rank) or rank < 0:
                raise ValueError(f"rank {rank!r} is not an int >= 0")
        if len(set(ranks)) != len(ranks):
            repeated = next(r for i, r in enumerate(ranks) if r in ranks[:i])
            raise ValueError(f"rank {repeated} stands twice in the mesh; a rank has one coordinate")
        for name, value in (("shape", shape), ("axis_names", axis_names), ("ranks", ranks)):
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a ProcessMesh is immutable; cannot set {name!r}")

    def __reduce__(self) -> tuple[Any, ...]:
        return ProcessMesh._make, (self.shape, self.axis_names, self.ranks)

    # What it is

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return len(self.ranks)

    @cached_property
    def digest(self) -> str:
        """Hex digest of the content, the same in every process."""
        text = repr((self.axis_names, self.shape, self.ranks))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    @cached_property
    def _position(self) -> dict[int, int]:
        return {rank: position for position, rank in enumerate(self.ranks)}

    @cached_property
    def _hash(self) -> int:
        return hash((self.axis_names, self.shape, self.ranks))

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, ProcessMesh):
            return NotImplemented
        return (self.axis_names, self.shape, self.ranks) == (other.axis_names, other.shape, other.ranks)

    def __hash__(self) -> int:
        return self._hash

    def __contains__(self, rank: object) -> bool:
        return rank in self._position

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}={size}" for name, size in zip(self.axis_names, self.shape, strict=True))
        first = self.ranks[0]
        if self.ranks == tuple(range(first, first + self.size)):
            return f"ProcessMesh.grid({sizes}{f', first_rank={first}' if first else ''})"
        shown = str(list(self.ranks)) if self.size <= 16 else f"[{first}, {self.ranks[1]}, ... {self.size} ranks]"
        return f"ProcessMesh({sizes}, ranks={shown})"

    def axis(self, name: str) -> int:
        """Position of axis `name` among the axes."""
        try:
            return self.axis_names.index(name)
        except ValueError:
            raise ValueError(f"the mesh has no axis {name!r}; its axes are {', '.join(self.axis_names)}") from None

    def axis_size(self, name: str) -> int:
        return self.shape[self.axis(name)]

    def coordinate(self, rank: int) -> dict[str, int] | None:
        """Index of `rank` along each axis; None for a rank outside the mesh."""
        position = self._position.get(rank)
        if position is None:
            return None
        index = {}
        for name, size in zip(reversed(self.axis_names), reversed(self.shape), strict=True):
            position, index[name] = divmod(position, size)
        return {name: index[name] for name in self.axis_names}

    def rank_at(self, **index: int) -> int:
        """The rank at one index per axis: `mesh.rank_at(dp=0, tp=1)`."""
        if set(index) != set(self.axis_names):
            raise ValueError(f"rank_at got {sorted(index)}; give one index for each of {', '.join(self.axis_names)}")
        position = 0
        for name, size in zip(self.axis_names, self.shape, strict=True):
            position = position * size + self._checked(name, index[name])
        return self.ranks[position]

    def _checked(self, name: str, index: int) -> int:
        size = self.axis_size(name)
        if not _is_int(index) or not 0 <= index < size:
            raise ValueError(f"index {index!r} is outside axis {name!r} of size {size}; use 0 to {size - 1}")
        return index

    # Meshes made from it

    def select(self, **index: Index) -> ProcessMesh:
        """The part at `index`: an int drops its axis, a slice keeps it."""
        picks: list[range] = [range(size) for size in self.shape]
        kept = list(range(self.ndim))
        for name, at in index.items():
            axis = self.axis(name)
            if isinstance(at, slice):
                picks[axis] = picks[axis][at]
            else:
                picks[axis] = range(self._checked(name, at), at + 1)
                kept.remove(axis)
        ranks = tuple(self._gather(picks))
        if not kept:
            raise ValueError(f"select({index}) drops every axis; use rank_at for a single rank")
        return self._make(tuple(len(picks[a]) for a in kept), tuple(self.axis_names[a] for a in kept), ranks)

    def get_mesh_with_dim(self, name: str, index: int | None = None) -> ProcessMesh:
        """The mesh with axis `name` first; with `index`, that slice along it, and no mesh made in between."""
        if index is not None:
            return self.select(**{name: index})
        return self.permute(name, *(other for other in self.axis_names if other != name))

    def submesh(self, rank: int, *names: str) -> ProcessMesh:
        """The sub-mesh along `names` that holds `rank`."""
        coordinate = self.coordinate(rank)
        if coordinate is None:
            raise ValueError(f"rank {rank} is not in {self}")
        for name in names:
            self.axis(name)
        part = self.select(**{name: at for name, at in coordinate.items() if name not in names})
        return part.permute(*names)

    def groups(self, *names: str) -> tuple[ProcessMesh, ...]:
        """Every sub-mesh along `names`, in row-major order of the other axes."""
        for name in names:
            self.axis(name)
        others = [name for name in self.axis_names if name not in names]
        indices = product(*(range(self.axis_size(name)) for name in others))
        return tuple(self.select(**dict(zip(others, at, strict=True))).permute(*names) for at in indices)

    def permute(self, *names: str) -> ProcessMesh:
        """The same ranks with the axes in the order `names`."""
        axes = [self.axis(name) for name in names]
        if sorted(axes) != list(range(self.ndim)):
            raise ValueError(f"permute{names} must name each of {', '.join(self.axis_names)} once")
        if axes == list(range(self.ndim)):
            return self
        strides = self._strides()
        shape = tuple(self.shape[a] for a in axes)
        offsets = product(*(range(0, self.shape[a] * strides[a], strides[a]) for a in axes))
        return self._make(shape, names, tuple(self.ranks[sum(offset)] for offset in offsets))

    def rename(self, **names: str) -> ProcessMesh:
        """The same mesh with axes renamed: `mesh.rename(dp="data")`."""
        for name in names:
            self.axis(name)
        return self._make(self.shape, tuple(names.get(name, name) for name in self.axis_names), self.ranks)

    def flatten(self, names: Sequence[str], *, into: str) -> ProcessMesh:
        """Neighbouring axes `names`, major first, made into the one axis `into`."""
        axes = [self.axis(name) for name in names]
        if not axes or axes != list(range(axes[0], axes[0] + len(axes))):
            raise ValueError(f"axes {tuple(names)} are not neighbours in {self.axis_names}; permute the mesh first")
        first, end = axes[0], axes[-1] + 1
        shape = (*self.shape[:first], math.prod(self.shape[first:end]), *self.shape[end:])
        return self._make(shape, (*self.axis_names[:first], into, *self.axis_names[end:]), self.ranks)

    def unflatten(self, name: str, **sizes: int) -> ProcessMesh:
        """Axis `name` cut into the axes `sizes`, major first: `mesh.unflatten("dp", replica=2, shard=4)`."""
        at = self.axis(name)
        if math.prod(sizes.values()) != self.shape[at] or any(size < 1 for size in sizes.values()):
            raise ValueError(f"axis {name!r} of size {self.shape[at]} cannot be unflattened into sizes {sizes}")
        shape = (*self.shape[:at], *sizes.values(), *self.shape[at + 1 :])
        return self._make(shape, (*self.axis_names[:at], *sizes, *self.axis_names[at + 1 :]), self.ranks)

    def _strides(self) -> tuple[int, ...]:
        return tuple(math.prod(self.shape[axis + 1 :]) for axis in range(self.ndim))

    def _gather(self, picks: Sequence[range]) -> Iterator[int]:
        strides = self._strides()
        for index in product(*picks):
            yield self.ranks[sum(i * stride for i, stride in zip(index, strides, strict=True))]


def as_mesh(value: Any) -> ProcessMesh:
    """`value` as a mesh of ours; torch's DeviceMesh is taken too, its unnamed axes called axis0, axis1, …

    torch is not imported: a DeviceMesh is known by its public attributes.
    """
    if isinstance(value, ProcessMesh):
        return value
    if not hasattr(value, "mesh_dim_names"):
        raise ValueError(f"{value!r} is not a mesh; give a ProcessMesh or a DeviceMesh")
    ranks = value.mesh.tolist()
    return ProcessMesh(ranks, value.mesh_dim_names or [f"axis{axis}" for axis in range(value.ndim)])


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _flatten(ranks: Any) -> tuple[tuple[int, ...], list[Any]]:
    if hasattr(ranks, "tolist"):
        ranks = ranks.tolist()
    if not isinstance(ranks, Sequence) or isinstance(ranks, str):
        return (), [ranks]
    parts = [_flatten(part) for part in ranks]
    if not parts:
        return (0,), []
    shape = parts[0][0]
    for position, (other, _) in enumerate(parts):
        if other != shape:
            raise ValueError(f"ranks are ragged: part 0 has shape {shape}, part {position} has shape {other}")
    return (len(parts), *shape), [rank for _, flat in parts for rank in flat]
