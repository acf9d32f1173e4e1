"""An op inside `exact_sums`, on a rank which stands for several coordinates of the named mesh.

Inside `exact_sums` every mesh gives the same bits as the named mesh, whose axes have the sizes given to `exact_sums`. A
rank of a smaller mesh does the work of several ranks of the named mesh: the rank stands for their coordinates. `Fold`
says which, and a `FoldIndex` numbers a rank's coordinates. The fold of an axis is the named size over the real size; a
folded axis has a fold above 1.
The op runs for each coordinate on the coordinate's parts of the operands, with the shapes, options and groups of a rank
of the named mesh.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from weft.mesh import Layout, LayoutError, Partial, Replicate, Shard
from weft.reshard.extension import Fold, FoldedMesh, FoldIndex, run_in_turn, this_rank

from ..backend import fresh_memory
from ..op import Op, Tensors
from .rules import Sharding

Needed = Sequence[bool]  # for each operand, whether its gradient is required
# Attribute of a joined local tensor: the `HeldParts`, the tensor's version, and the joined parts.
_PARTS = "_weft_parts"


@dataclass(frozen=True, slots=True)
class HeldParts:
    """How a rank's local tensor holds the parts of the rank's coordinates on the named mesh.

    Shards lie side by side, a replica is held once, and addends of a Partial value are stacked in leading dims.
    """

    shape: tuple[int, ...]  # of the rank's local tensor, with the leading dims
    # {a coordinate's index: the first index whose coordinate has the same part}. Coordinates share a part along an axis
    # that replicates: the part is held once.
    first: Mapping[FoldIndex, FoldIndex]
    in_memory: tuple[FoldIndex, ...]  # the indices of the distinct parts, in the order of the parts in memory
    # For each dim in which shards lie side by side, ascending: (dim, the lengths of the shards).
    splits: tuple[tuple[int, tuple[int, ...]], ...]
    num_stacked: int  # number of leading dims

    @classmethod
    def of(cls, fold: Fold, layout: Layout, shape: tuple[int, ...], rank: int) -> HeldParts:
        """How the local tensor of `rank`, of a tensor of global `shape`, holds the parts. layout: on the named mesh.

        Raises LayoutError if the coordinates' shards do not together make up exactly the rank's shard.
        """
        layout = layout.resolved(shape)
        own = fold.from_named(layout).local_slices(shape, rank)
        local = tuple(part.stop - part.start for part in own)
        sharded = [axis for axis in fold.axes if isinstance(layout[axis], Shard)]
        boxes = {index: layout.local_slices(shape, fold.rank(rank, index)) for index in fold.indices(sharded)}
        volume = sum(math.prod(part.stop - part.start for part in box) for box in boxes.values())
        if volume != math.prod(local) or not all(
            whole.start <= part.start and part.stop <= whole.stop
            for box in boxes.values()
            for part, whole in zip(box, own, strict=True)
        ):
            raise LayoutError(
                f"a tensor of shape {tuple(shape)} is laid out ({layout}), and a shard on {fold.mesh} is not a whole "
                f"number of shards on {fold.named}; choose sizes that both meshes divide, or give exact the sizes of "
                f"this mesh"
            )
        stacked = [i for i, axis in enumerate(fold.axes) if isinstance(layout[axis], Partial)]
        order = [*stacked]  # positions in a FoldIndex
        splits: list[tuple[int, tuple[int, ...]]] = []
        for dim, axes in layout.shard_order.items():
            positions = [fold.axes.index(axis) for axis in axes if axis in sharded]
            if positions:
                of_dim = sorted(fold.indices(axes), key=_by_positions(positions))
                splits.append((dim, tuple(boxes[index][dim].stop - boxes[index][dim].start for index in of_dim)))
                order += positions
        indices = list(fold.indices(fold.axes))
        first = {index: tuple(at if i in order else 0 for i, at in enumerate(index)) for index in indices}
        in_memory = sorted(set(first.values()), key=_by_positions(order))
        sizes = *(fold.sizes[i] for i in stacked), *local
        return cls(sizes, first, tuple(in_memory), tuple(splits), len(stacked))

    def cut(self, local: Tensor) -> dict[FoldIndex, Tensor]:
        """The distinct parts of the rank's local tensor, each contiguous and aligned as on a rank of the named mesh.

        An op on a part then adds in the same order as on the named mesh: see `fresh_memory`.
        """
        views = [*local.flatten(0, self.num_stacked - 1)] if self.num_stacked else [local]
        for dim, lengths in self.splits:
            views = [part for view in views for part in view.split_with_sizes(lengths, dim)]
        return dict(zip(self.in_memory, map(fresh_memory, views), strict=True))

    def join(self, parts: Mapping[FoldIndex, Tensor]) -> Tensor:
        """Join all coordinates' parts to the rank's local tensor.

        Shards are kept with the local tensor. If the next op has the tensor as an operand, `_parts_of` returns the kept
        shards, unless the tensor was written in place. Addends are not kept, because a sum reads them next, and no op.
        """
        distinct = {index: parts[index] for index in self.in_memory}
        first = distinct[self.in_memory[0]]
        if len(distinct) == 1 and first.shape == self.shape:
            return first
        local, values = first.new_empty(self.shape), [*distinct.values()]
        if not self.num_stacked:
            _concatenate(values, self.splits, local)
        elif not self.splits:
            torch.stack(values, out=local.flatten(0, self.num_stacked - 1))
        else:
            addends = local.flatten(0, self.num_stacked - 1).unbind()
            n = len(values) // len(addends)
            for i, addend in enumerate(addends):
                _concatenate(values[i * n : (i + 1) * n], self.splits, addend)
        if not self.num_stacked and not local.is_inference():
            vars(local)[_PARTS] = self, local._version, distinct
        return local


def _by_positions(positions: Sequence[int]) -> Callable[[FoldIndex], list[int]]:
    """A key to sort indices by the numbers at these positions, the first position outermost."""
    return lambda index: [index[i] for i in positions]


def _concatenate(parts: list[Tensor], splits: Sequence[tuple[int, tuple[int, ...]]], out: Tensor) -> None:
    """Concatenates parts into `out`, with a call for each run of parts along the last dim of `splits`.

    parts: in the order in memory. splits: as of `HeldParts`, not empty. An element is copied once.
    """
    (dim, lengths), *inner = splits
    if not inner:
        torch.cat(parts, dim, out=out)
        return
    n = len(parts) // len(lengths)
    for i, view in enumerate(out.split_with_sizes(lengths, dim)):
        _concatenate(parts[i * n : (i + 1) * n], inner, view)


_cached_held_parts = lru_cache(maxsize=65536)(HeldParts.of)


def _parts_of(held: HeldParts | None, local: Tensor | None) -> Mapping[FoldIndex, Tensor] | None:
    """The part of a local tensor for each index. None for an operand left out."""
    if held is None or local is None:
        return None
    parts = vars(local).get(_PARTS)  # if the local tensor is an earlier op's output
    distinct = parts[2] if parts is not None and parts[0] is held and parts[1] == local._version else held.cut(local)
    return {index: distinct[first] for index, first in held.first.items()}


def _only_part(local: Tensor | None) -> Tensor | None:
    """The part of a rank's only coordinate: the local tensor, in fresh memory. None for an operand left out."""
    return None if local is None else fresh_memory(local)


class Saved(NamedTuple):
    """Values which `FoldedCall.forward` keeps for backward, beside the saved tensors."""

    # The options of each coordinate's call of the op, in the order of the calls.
    options: dict[FoldIndex, dict[str, Any]]
    counts: tuple[int, ...]  # the number of tensors which each call saved


class FoldedCall:
    """Runs an op for each of this rank's coordinates on the named mesh. A part of `CallPlan`.

    mesh: the real mesh. fold: of `mesh`; a fold without folded axes has one coordinate a rank, and the op runs once.
    sharding: the answer of the op's rule for the operands' layouts on the named mesh.
    layouts, shapes: of the operands: the layouts on the named mesh, and the global shapes; None for an operand left
        out.

    Only folded axes on which some layout is not replicated need several calls: along the other axes, all coordinates
    would compute the same.
    """

    def __init__(
        self,
        op: Op,
        fold: Fold,
        mesh: DeviceMesh,
        sharding: Sharding,
        layouts: Sequence[Layout | None],
        shapes: Sequence[tuple[int, ...] | None],
    ) -> None:
        self._op, self._fold, self._sharding, self._shapes = op, fold, sharding, shapes
        self._axes = self._folded_axes([*layouts, *(layout for layout, _ in sharding.outputs)])
        self._operands = [self._held_parts(layout, shape) for layout, shape in zip(layouts, shapes, strict=True)]
        self._outputs = [self._held_parts(layout, shape) for layout, shape in sharding.outputs]
        self._options: dict[FoldIndex, dict[str, Any]] = {}
        self._communicates = False  # whether forward communicates over a folded axis; no op's backward does
        self._held_by_layouts: dict[Any, tuple[list[HeldParts | None], tuple[str, ...], list[HeldParts | None]]] = {}
        for index in fold.indices(self._axes):
            folded_mesh: Any = FoldedMesh(mesh, fold, index)
            self._options[index] = sharding.local_options(fold.rank(this_rank(), index), folded_mesh)
            self._communicates |= folded_mesh.communicates

    def forward(
        self, operands: Sequence[Tensor | None], options: Mapping[str, Any], *, saves: bool
    ) -> tuple[tuple[Tensor, ...], Tensors, Saved]:
        """Returns the rank's local outputs, the tensors saved by all calls, and further values for `backward`.

        operands: the rank's local tensors. options: from the caller.
        saves: whether a backward may follow. If not, no tensors are saved.
        """
        if not self._fold.axes:
            own = {**options, **self._options[()]}
            outputs, saved = self._call_op([_only_part(each) for each in operands], own, saves=saves)
            return tuple(outputs), saved, Saved({(): own}, (len(saved),))

        # each coordinate has its own list, to which its call of the op may add, as dropout adds the mask
        lists = [name for name, value in options.items() if isinstance(value, list)]
        own_options = {
            index: {**options, **{name: list(options[name]) for name in lists}, **own}
            for index, own in self._options.items()
        }
        operand_parts = [_parts_of(held, local) for held, local in zip(self._operands, operands, strict=True)]

        def call(index: FoldIndex) -> tuple[Sequence[Tensor], Tensors]:
            parts = [None if each is None else each[index] for each in operand_parts]
            return self._call_op(parts, own_options[index], saves=saves)

        results: dict[FoldIndex, tuple[Sequence[Tensor], Tensors]] = {}
        if self._communicates:
            indices = list(self._options)
            results |= zip(indices, run_in_turn([partial(call, index) for index in indices]), strict=True)
        else:
            results |= {index: call(index) for index in self._options}
        joined = tuple(
            held.join({index: results[index][0][i] for index in results})
            for i, held in enumerate(self._outputs)
            if held is not None
        )
        of_all = tuple(each for index in results for each in results[index][1])
        return joined, of_all, Saved(own_options, tuple(len(results[index][1]) for index in results))

    def _call_op(
        self, parts: Sequence[Tensor | None], options: Mapping[str, Any], *, saves: bool
    ) -> tuple[Sequence[Tensor], Tensors]:
        """The op's outputs and saved tensors for a coordinate. parts, options: of the coordinate."""
        if saves:
            output, saved = self._op.forward(*parts, **options)
        else:
            output, saved = self._op.compute_outputs(*parts, **options), ()
        return output if self._sharding.is_tuple else (output,), saved

    def backward(
        self,
        saved: Tensors,
        of_forward: Saved,
        grads: Sequence[Tensor | None],
        grad_layouts: Sequence[Layout | None],
        needed: Needed,
    ) -> list[Tensor | None]:
        """Returns the rank's local gradients of the operands, None where `needed` is false.

        saved, of_forward: from `forward`.
        grads: the rank's local gradients of the outputs. grad_layouts: their layouts on the named mesh.
        """
        if not self._fold.axes:
            return self._call_backward(saved, [_only_part(each) for each in grads], needed, of_forward.options[()])
        by_index: dict[FoldIndex, Tensors] = {}
        start = 0
        for index, count in zip(of_forward.options, of_forward.counts, strict=True):
            by_index[index] = saved[start : start + count]
            start += count
        held_grads, axes, held_gradients = self._held_in_backward(tuple(grad_layouts))

        grad_parts = [_parts_of(held, grad) for held, grad in zip(held_grads, grads, strict=True)]

        def call(index: FoldIndex) -> Tensors:
            parts = [None if each is None else each[index] for each in grad_parts]
            # Along axes on which forward was the same for all coordinates, forward ran once.
            own = tuple(at if axis in self._axes else 0 for axis, at in zip(self._fold.axes, index, strict=True))
            return tuple(self._call_backward(by_index[own], parts, needed, of_forward.options[own]))

        results = {index: call(index) for index in self._fold.indices(axes)}
        gradients: list[Tensor | None] = []
        for i, held in enumerate(held_gradients):
            parts = {index: part for index in results if (part := results[index][i]) is not None}
            gradients.append(held.join(parts) if parts and held is not None else None)
        return gradients

    def _call_backward(
        self, saved: Tensors, grads: Sequence[Tensor | None], needed: Needed, options: Mapping[str, Any]
    ) -> list[Tensor | None]:
        """The gradients of the operands for a coordinate. saved, options: of the coordinate's forward."""
        grad: Any = tuple(grads) if self._sharding.is_tuple else grads[0]
        if self._op.epilogue_backward is not None:
            grad = self._op.epilogue_backward(saved, grad, needed, **options)
        assert self._op.backward is not None, "ops without a backward are refused"
        return list(self._op.backward(saved, grad, needed, **options))

    def _held_in_backward(
        self, grad_layouts: tuple[Layout | None, ...]
    ) -> tuple[list[HeldParts | None], tuple[str, ...], list[HeldParts | None]]:
        """Held parts of the outputs' gradients, folded axes which need several calls, and held parts of the results."""
        found = self._held_by_layouts.get(grad_layouts)
        if found is None:
            layouts = self._sharding.gradient_layouts(*grad_layouts)
            shapes = [shape for _, shape in self._sharding.outputs]
            axes = {*self._axes, *self._folded_axes([*grad_layouts, *layouts])}
            found = self._held_by_layouts[grad_layouts] = (
                [self._held_parts(layout, shape) for layout, shape in zip(grad_layouts, shapes, strict=True)],
                tuple(axis for axis in self._fold.axes if axis in axes),
                [self._held_parts(layout, shape) for layout, shape in zip(layouts, self._shapes, strict=True)],
            )
        return found

    def _held_parts(self, layout: Layout | None, shape: tuple[int, ...] | None) -> HeldParts | None:
        """The `HeldParts` of this rank's local tensor; None for an operand left out. layout: on the named mesh."""
        return None if layout is None or shape is None else _cached_held_parts(self._fold, layout, shape, this_rank())

    def _folded_axes(self, layouts: Sequence[Layout | None]) -> tuple[str, ...]:
        """The folded axes on which some layout is not replicated."""
        return tuple(
            axis
            for axis in self._fold.axes
            if any(layout is not None and layout[axis] != Replicate() for layout in layouts)
        )
