"""Layouts: a mesh plus a placement per axis, which together define each rank's part of a tensor.

A dim is cut over an axis by the arithmetic of `torch.chunk`; a rank's part is a box.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import Any

from .arguments import as_int, as_shape
from .picture import WIDTH, coloured, draw
from .placement import Partial, Placement, Replicate, Shard, as_placement
from .process_mesh import Axis, ProcessMesh, as_mesh

Box = tuple[slice, ...]  # a part of a tensor: a slice for each dim


def largest_part(size: int, parts: int) -> int:
    """Size of the first and largest of `parts` parts of `size` elements."""
    return -(-size // parts)


def chunk(size: int, parts: int, index: int) -> tuple[int, int]:
    """Start and stop of part `index` of `size` elements cut into `parts`.

    Every part has ceil(size / parts) elements, except the last ones, which may be shorter or empty.
    """
    step = largest_part(size, parts)
    return min(size, index * step), min(size, (index + 1) * step)


def volume(box: Box) -> int:
    """Number of elements in a box."""
    return math.prod([part.stop - part.start for part in box])


def overlap(a: Box, b: Box) -> Box:
    """Intersection of two boxes; a box of volume 0 where they are disjoint."""
    return tuple([_common(x, y) for x, y in zip(a, b, strict=True)])


def _common(a: slice, b: slice) -> slice:
    # Comparisons take half the time of min() and max(), and planning intersects the boxes of every rank.
    start = a.start if a.start > b.start else b.start
    stop = a.stop if a.stop < b.stop else b.stop
    return slice(start, stop if stop > start else start)


# For each dim, the axes that shard the dim, major first: a name, several names, or None for no axis.
Spec = Sequence[str | Sequence[str] | None]


class LayoutError(ValueError):
    """A tensor's layout does not fit the request; the message says how to change the layout, mostly by a reshard.

    nearest: layouts to reshard to, where a layout rule names a remedy; else empty. Either a layout per operand, in the
        operands' order, or a single layout for the tensor which the message names: an operand, or an output's gradient.
        A caller may reshard to these layouts and try again.
    """

    def __init__(self, message: str, nearest: tuple[Layout, ...] = ()) -> None:
        super().__init__(message)
        self.nearest = nearest


class Layout:
    """How a tensor is distributed over a mesh.

    mesh: a ProcessMesh, or torch's DeviceMesh.
    placements: a mapping from names or positions of axes, like {"dp": Shard(0)} (axes left out replicate), a sequence
        with a placement per axis, or text like "dp: S(0), tp: P(sum)". Left out or empty: all axes replicate.

    Where several axes shard the same dim, the first of these axes is the major one and cuts the dim first. The order
    is the mesh's order for a mapping or a sequence, and the written order for text: "tp: S(0), dp: S(0)" cuts by tp
    first.

    A negative dim counts from the end, in a tensor of any number of dims. `resolved(shape)` counts every dim from the
    front. On a layout with a negative dim, `spec`, `parts` and some layout rules raise LayoutError: they know no shape,
    and so no number of dims.

    Raises LayoutError for an axis outside the mesh, and for a sequence, not empty, with more or fewer placements than
    axes.
    """

    __slots__ = ("__dict__", "_orders", "mesh", "placements", "shard_order")
    # Groups of axes that shard the same dim, major first. Where some dims are negative and some are not, a single group
    # of all sharding axes: which axes shard the same dim then depends on the tensor's number of dims.
    _orders: tuple[tuple[str, ...], ...]
    mesh: ProcessMesh
    placements: tuple[Placement, ...]  # in the order of the mesh's axes
    shard_order: Mapping[int, tuple[str, ...]]  # sharded dim -> the axes that shard it, major first

    def __init__(self, mesh: ProcessMesh | Any, placements: Mapping[Any, Any] | Sequence[Any] | str = ()) -> None:
        mesh = as_mesh(mesh)
        if isinstance(placements, str):
            placements, names = _parse(placements), None
        else:
            names = mesh.axis_names
        if not isinstance(placements, Mapping):
            if not isinstance(placements, Sequence):
                raise LayoutError(f"placements are {placements!r}; give a mapping of axes, a sequence or text")
            if placements and len(placements) != mesh.ndim:
                raise LayoutError(f"{len(placements)} placements for the {mesh.ndim} axes of {mesh}; give one per axis")
            placements = dict(zip(mesh.axis_names, placements, strict=False))
        self._set(mesh, placements, names)

    def _set(self, mesh: ProcessMesh, placements: Mapping[Any, Any], names: Sequence[str] | None = None) -> None:
        """names: the axes, major first where several shard the same dim; by default in the order of `placements`."""
        if not set(placements).issubset(mesh.axis_names):
            placements = _by_axis_name(mesh, placements)
        ordered_names = dict.fromkeys((*placements, *mesh.axis_names) if names is None else names)
        by_name = {str.__str__(name): as_placement(placements.get(name, Replicate())) for name in ordered_names}
        order: dict[int, list[str]] = {}
        for name, placement in by_name.items():
            if isinstance(placement, Shard):
                order.setdefault(placement.dim, []).append(name)
        orders = tuple(tuple(order[dim]) for dim in sorted(order))
        if order and min(order) < 0 <= max(order):  # dims counted from either end may be the same dim
            orders = (tuple(name for name, placement in by_name.items() if isinstance(placement, Shard)),)
        object.__setattr__(self, "_orders", orders)
        object.__setattr__(self, "mesh", mesh)
        object.__setattr__(self, "placements", tuple(by_name[name] for name in mesh.axis_names))
        object.__setattr__(self, "shard_order", MappingProxyType({dim: tuple(order[dim]) for dim in sorted(order)}))

    @classmethod
    def from_spec(cls, mesh: ProcessMesh, spec: Spec) -> Layout:
        """The layout whose dim i is sharded by the axes `spec[i]`, major first: `[("tp", "dp"), None]`.

        Raises LayoutError for a repeated axis, and for an axis outside the mesh.
        """
        placements_by_name: dict[str, Placement] = {}
        for dim, axes in enumerate(spec):
            if not isinstance(axes, str | Sequence | None):
                raise LayoutError(
                    f"spec {list(spec)} has {axes!r} for dim {dim}; give the name of an axis, several names, or None"
                )
            for name in (axes,) if isinstance(axes, str) else axes or ():
                if name in placements_by_name:
                    raise LayoutError(f"spec {list(spec)} uses axis {name!r} twice; an axis can shard only one dim")
                placements_by_name[name] = Shard(dim)
        return cls.in_order(mesh, placements_by_name)

    @classmethod
    def in_order(cls, mesh: ProcessMesh, placements: Mapping[str, Placement]) -> Layout:
        """The layout with these placements, where the order of the mapping, not of the mesh, decides the major axis.

        Where several axes shard the same dim, the first axis listed is major. Axes left out replicate.
        """
        layout = cls.__new__(cls)
        layout._set(as_mesh(mesh), placements)
        return layout

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a Layout is immutable; cannot set {name!r}")

    def __reduce__(self) -> tuple[Any, ...]:
        return Layout, (self.mesh, str(self))

    @cached_property
    def _key(self) -> tuple[Any, ...]:
        return self.mesh, self.placements, self._orders

    @cached_property
    def _hash(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return self._key == other._key if isinstance(other, Layout) else NotImplemented

    def __hash__(self) -> int:
        return self._hash

    def __str__(self) -> str:
        """The layout as text, which `Layout(mesh, text)` reads back.

        Axes are in the mesh's order, except axes sharding the same dim: these go from major to minor.
        """
        names = list(self.mesh.axis_names)
        for order in self._orders:
            slots = sorted(names.index(name) for name in order)
            for slot, name in zip(slots, order, strict=True):
                names[slot] = name
        return ", ".join(f"{name}: {self[name]}" for name in names)

    def __repr__(self) -> str:
        return f"Layout({self.mesh}, {str(self)!r})"

    def __getitem__(self, axis: Axis) -> Placement:
        return self.placements[self.mesh.axis(axis)]

    @property
    def spec(self) -> tuple[tuple[str, ...], ...]:
        """For each dim, the sharding axes, major first; ends at the last sharded dim.

        Raises LayoutError where a dim is counted from the end.
        """
        self.check_counted()
        return tuple(self.shard_order.get(dim, ()) for dim in range(max(self.shard_order, default=-1) + 1))

    def replace(self, /, **placements: Placement | str) -> Layout:
        """This layout with new placements on the named axes.

        An axis that newly shards a dim becomes the dim's minor axis. Several such axes keep the order given.
        """
        replacements = {name: as_placement(placement) for name, placement in placements.items()}
        changed = {name: placement for name, placement in replacements.items() if placement != self[name]}
        still_sharding = {name: self[name] for order in self._orders for name in order if name not in changed}
        unchanged = {name: self[name] for name in self.mesh.axis_names if name not in changed}
        return Layout.in_order(self.mesh, still_sharding | unchanged | changed)

    def parts(self, dim: int) -> int:
        """The number of parts into which the mesh cuts dim `dim`, counted from the front; 1 for a dim that is not cut.

        Raises LayoutError for a negative dim: a layout does not know how many dims a tensor has.
        """
        self.check_counted()
        if (counted := as_int("the dim of parts()", dim)) < 0:
            raise LayoutError(
                f"parts({dim}) of {self}: count the dim from the front, as in parts(tensor.ndim - {-counted})"
            )
        return self.mesh.axis_size(*self.shard_order.get(counted, ()))

    def explain(self, global_shape: Sequence[int] | None = None, *, width: int = WIDTH) -> str:
        """The layout as text, with an ASCII picture of the ranks holding each part.

        global_shape: adds the indices of each part to the picture. None: a picture without indices.
        width: the columns that the picture should fit in; to fit, fewer cells and shorter lists of ranks are drawn.
        """
        global_shape = None if global_shape is None else as_shape(global_shape)
        layout = self if global_shape is None else self.resolved(global_shape)
        lines = draw(layout, global_shape, width=as_int("the width of explain()", width))
        return "\n".join([f"{self} on {self.mesh}", *lines])

    def __rich__(self) -> Any:
        """What `rich.print(layout)` shows: the text of `explain()`, in colour where the terminal has it."""
        return coloured(self.explain())

    def is_partial(self) -> bool:
        """Whether the tensor is Partial on any axis."""
        return any(isinstance(placement, Partial) for placement in self.placements)

    def check_shape(self, global_shape: Sequence[int]) -> None:
        """Raise LayoutError where a sharded dim is outside a tensor of this shape."""
        ndim = len(global_shape)
        for dim, axes in self.shard_order.items():
            if not -ndim <= dim < ndim:
                raise LayoutError(
                    f"axis {axes[0]!r} shards dim {dim} of a tensor of shape {tuple(global_shape)}, which has "
                    f"{ndim} dims; shard one of its dims, or replicate"
                )

    def check_counted(self) -> None:
        """Raise LayoutError where the layout counts a dim from the end."""
        for dim, axes in self.shard_order.items():
            if dim < 0:
                raise LayoutError(
                    f"axis {axes[0]!r} of ({self}) shards dim {dim}, counted from the end of a tensor whose number of "
                    f"dims is not known here; count the dim from the front, or first call layout.resolved(shape)"
                )

    def resolved(self, global_shape: Sequence[int]) -> Layout:
        """This layout for a tensor of this shape, with every dim counted from the front.

        Raises LayoutError where a sharded dim is outside the tensor.
        """
        self.check_shape(global_shape)
        if min(self.shard_order, default=0) >= 0:
            return self
        ordered_names = dict.fromkeys([*(name for order in self._orders for name in order), *self.mesh.axis_names])
        ndim = len(global_shape)
        placements = {name: Shard(p.dim % ndim) if isinstance(p := self[name], Shard) else p for name in ordered_names}
        return Layout.in_order(self.mesh, placements)

    def local_slices(self, global_shape: Sequence[int], rank: int) -> tuple[slice, ...]:
        """The part of the global tensor on `rank`, a slice per dim.

        The axes that shard a dim cut it in turn by `torch.chunk`, major axis first. A rank outside the mesh has empty
        slices.
        """
        return _local_slices(self, as_shape(global_shape), as_int("a rank", rank))

    def local_shape(self, global_shape: Sequence[int], rank: int) -> tuple[int, ...]:
        """Shape of the part on `rank`; (0,) for a rank outside the mesh."""
        slices = self.local_slices(global_shape, rank)
        return tuple(part.stop - part.start for part in slices) if rank in self.mesh else (0,)

    def largest_local_shape(self, global_shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of the part on the mesh's first rank; no rank has a larger part in any dim."""
        return self.local_shape(global_shape, next(iter(self.mesh)))


@lru_cache(maxsize=65536)
def _local_slices(layout: Layout, global_shape: tuple[int, ...], rank: int) -> tuple[slice, ...]:
    layout = layout.resolved(global_shape)
    coordinate = layout.mesh.coordinate(rank)
    if coordinate is None:
        return tuple(slice(0, 0) for _ in global_shape)
    parts = []
    for dim, size in enumerate(global_shape):
        start, stop = 0, size
        for axis in layout.shard_order.get(dim, ()):
            first, last = chunk(stop - start, layout.mesh.axis_size(axis), coordinate[axis])
            start, stop = start + first, start + last
        parts.append(slice(start, stop))
    return tuple(parts)


def _by_axis_name(mesh: ProcessMesh, placements: Mapping[Any, Any]) -> dict[str, Any]:
    """`placements` by the names of axes, where some axes are given by position."""
    named: dict[str, Any] = {}
    for axis, placement in placements.items():
        try:
            name = mesh.axis_name(axis)
        except ValueError as error:
            raise LayoutError(str(error)) from None
        if name in named:
            raise LayoutError(f"axis {name!r} appears twice in {dict(placements)}, by name and by position")
        named[name] = placement
    return named


def _parse(text: str) -> dict[str, Placement]:
    """The placements in `text` by the names of axes, in the order written."""
    placements_by_name: dict[str, Placement] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, colon, placement = item.partition(":")
        name = name.strip()
        if not colon:
            raise LayoutError(f"{item!r} in layout {text!r} is not 'axis: placement'; write it like 'dp: S(0), tp: R'")
        if name in placements_by_name:
            raise LayoutError(f"axis {name!r} appears twice in layout {text!r}")
        placements_by_name[name] = as_placement(placement.strip())
    return placements_by_name
