"""`all_gather_matmul` and `matmul_reduce_scatter`: products in steps, which overlap communication.

Each step of the all-gather or reduce-scatter moves the part of a rank of the group (a member). Every member sends
parts directly to all further members: the same bytes as in a collective, without waiting for a ring. All transfers run
while the member multiplies its own part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from weft.mesh import Layout, LayoutError, Partial, Placement, Shard, infer
from weft.reshard.extension import graph_name_of, group_named

from ...dispatch.arguments import described, is_int
from ...dispatch.op import Op, Tensors
from ...dispatch.sharded import Shapes, Sharding, apply, autocasts, check_operands
from ...launching.launched import communicating
from ..checks import check_matmul, check_wide
from ..function import matmul_backward, multiply
from ..reference import accumulate, flatten_to_rows, restore_leading_dims
from .product import ProductTerms, matmul


@autocasts("all_gather_matmul")
def all_gather_matmul(a: Tensor, b: Tensor) -> Tensor:
    """`matmul` of a and b, where a is all-gathered over an axis: rows arrive while earlier rows are multiplied.

    a: [..., K].
    b: [K, N].
    Saved for backward: the rank's own rows of a, which backward gathers again while computing b's gradient.

    Layouts: on a single axis, the gathered axis, a is sharded on a dim of the rows, for example the sequence, and b on
    N; the output is sharded on N. On all further axes as in `matmul`. For plain tensors, and DTensors without a
    gathered axis, this is `matmul`.
    Communication: forward, the bytes of an all-gather of a over the axis. Backward, the bytes of an all-gather of a
    and of a reduce-scatter of a's gradient, which has a's layout. Ranks send parts directly to each other.
    Raises LayoutError for several gathered axes, and for a gathered axis which is not the innermost of the sharded
    dim; ValueError as `matmul`, and for factors of 8 bits, which need `matmul` with scales.
    """
    check_operands("all_gather_matmul", ("a", "b"), 2, a, b)
    check_matmul(a, b, None, None, None, None, None, None)
    check_wide("all_gather_matmul", a, b)
    return matmul(a, b) if b.ndim > 2 else apply(ALL_GATHER_MATMUL, a, b)


@autocasts("matmul_reduce_scatter")
def matmul_reduce_scatter(a: Tensor, b: Tensor, *, dim: int = -2) -> Tensor:
    """`matmul` of a and b, with the output reduce-scattered over an axis: rows leave while later rows are multiplied.

    a: [..., K].
    b: [K, N].
    dim: the dim of the output's rows to scatter; -2 is the sequence.
    Sums over the ranks are computed in float32, in the order of the ranks, and rounded once.

    Layouts: on a single axis, the scattered axis, a and b are sharded on K; the output is sharded on `dim` by this
    axis, as the innermost. On all further axes as in `matmul`. For plain tensors, and DTensors without a scattered
    axis, this is `matmul`.
    Communication: forward, the bytes of a reduce-scatter of the output over the axis. Backward, the bytes of an
    all-gather of the output's gradient. Ranks send parts directly to each other.
    Raises LayoutError for several scattered axes; ValueError as `all_gather_matmul`, and for a dim outside the rows.
    """
    check_operands("matmul_reduce_scatter", ("a", "b"), 2, a, b)
    check_matmul(a, b, None, None, None, None, None, None)
    check_wide("matmul_reduce_scatter", a, b)
    rows = dim + a.ndim if is_int(dim) and dim < 0 else dim
    if not (is_int(rows) and 0 <= rows < a.ndim - 1):
        raise ValueError(
            f"matmul_reduce_scatter: dim {described(dim)} is none of the rows of a {a.ndim}-d output; give 0 to "
            f"{a.ndim - 2}"
        )
    return matmul(a, b) if b.ndim > 2 else apply(MATMUL_REDUCE_SCATTER, a, b, dim=rows)


def _axis(op: str, a: Layout, b: Layout, matches: Callable[[Placement, Placement], bool]) -> str | None:
    """The axis for which `matches(placement of a, placement of b)` is true, or None. Raises LayoutError for several."""
    axes = [axis for axis in a.mesh.axis_names if matches(a[axis], b[axis])]
    if len(axes) > 1:
        raise LayoutError(
            f"{op}: a ({a}) and b ({b}) would communicate over {' and '.join(map(repr, axes))}; reshard one of them on "
            f"all but one"
        )
    return axes[0] if axes else None


class _ScatteredLayout(NamedTuple):
    """A layout sharded along `dim` over `axis`, as the innermost of the axes which shard this dim."""

    layout: Layout
    axis: str
    dim: int

    @classmethod
    def from_whole(cls, whole: Layout, axis: str, dim: int) -> _ScatteredLayout:
        """The layout after scattering `dim` over `axis`. whole: the layout before, with Replicate on `axis`."""
        sharding = whole.shard_order.get(dim, ())
        order = {each: whole[each] for each in (*sharding, *(n for n in whole.mesh.axis_names if n not in sharding))}
        order.pop(axis)
        return cls(Layout.in_order(whole.mesh, order | {axis: Shard(dim)}), axis, dim)

    def local_options(self, shape: Sequence[int], rank: int, mesh: DeviceMesh) -> dict[str, Any]:
        """A rank's options for forward and backward: the axis' group, and the sizes of its members' parts along dim."""
        layout = self.layout
        at = layout.mesh.coordinate(rank) or {}
        members = [layout.mesh.rank_at(**at | {self.axis: i}) for i in range(layout.mesh.axis_size(self.axis))]
        sizes = tuple(layout.local_shape(shape, member)[self.dim] for member in members)
        own_size = layout.local_shape(shape, rank)[self.dim]
        name = graph_name_of(mesh.get_group(self.axis))
        return {"group": name, "sizes": sizes, "own_size": own_size, "dim": self.dim}


def _rule_of_gather(layouts: tuple[Layout | None, ...], shapes: Shapes, options: dict[str, Any]) -> Sharding:
    """The layout rule of `ALL_GATHER_MATMUL`. layouts, shapes: of a and b."""
    a, b = layouts
    a_shape, b_shape = shapes
    assert a is not None and b is not None and a_shape and b_shape, "both are given"
    last = len(a_shape) - 1
    axis = _axis(
        "all_gather_matmul", a, b, lambda in_a, in_b: isinstance(in_a, Shard) and in_a.dim < last and in_b == Shard(1)
    )
    if axis is None:
        return _rule_without_steps("all_gather_matmul", a, b, ProductTerms(a_shape, b_shape))
    placement = a[axis]
    assert isinstance(placement, Shard), "_axis chose an axis with Shard"
    terms, gathered = ProductTerms(a_shape, b_shape), a.replace(**{axis: "R"})
    scattered = _ScatteredLayout.from_whole(gathered, axis, placement.dim)
    if scattered.layout != a:
        raise LayoutError(
            f"all_gather_matmul: a is ({a}), where {axis!r} is not the innermost axis of its dim; reshard a to "
            f"({scattered.layout})",
            (scattered.layout,),
        )
    output = terms.output_layout("all_gather_matmul", gathered, b)

    def gradient_layouts(grad: Layout) -> tuple[Layout | None, ...]:
        summed, b_layout = terms.gradient_layouts("all_gather_matmul", grad, gathered, b)
        _check_sum(summed, axis)
        return _ScatteredLayout.from_whole(summed.replace(**{axis: "R"}), axis, placement.dim).layout, b_layout

    return Sharding(
        output, terms.shape, gradient_layouts, lambda rank, mesh: scattered.local_options(a_shape, rank, mesh)
    )


def _rule_of_scatter(layouts: tuple[Layout | None, ...], shapes: Shapes, options: dict[str, Any]) -> Sharding:
    """The layout rule of `MATMUL_REDUCE_SCATTER`. layouts, shapes: of a and b."""
    a, b = layouts
    a_shape, b_shape = shapes
    assert a is not None and b is not None and a_shape and b_shape, "both are given"
    dim, last = options["dim"], len(a_shape) - 1
    axis = _axis("matmul_reduce_scatter", a, b, lambda in_a, in_b: in_a == Shard(last) and in_b == Shard(0))
    terms = ProductTerms(a_shape, b_shape)
    if axis is None:
        return _rule_without_steps("matmul_reduce_scatter", a, b, terms)
    summed = terms.output_layout("matmul_reduce_scatter", a, b)
    scattered = _ScatteredLayout.from_whole(summed.replace(**{axis: "R"}), axis, dim)

    def gradient_layouts(grad: Layout) -> tuple[Layout | None, ...]:
        infer.gradient(scattered.layout, grad, scattered.layout, (scattered.layout,))
        return terms.gradient_layouts("matmul_reduce_scatter", grad.replace(**{axis: "R"}), a, b)

    return Sharding(
        scattered.layout,
        terms.shape,
        gradient_layouts,
        lambda rank, mesh: scattered.local_options(terms.shape, rank, mesh),
    )


def _rule_without_steps(op: str, a: Layout, b: Layout, terms: ProductTerms) -> Sharding:
    """The rule for layouts without an axis to communicate over, the same as of `matmul`."""
    output = terms.output_layout(op, a, b)
    return Sharding(output, terms.shape, lambda grad: terms.gradient_layouts(op, grad, a, b))


def _check_sum(summed: Layout, axis: str) -> None:
    assert summed[axis] == Partial("sum"), "output and gradient are sharded on N over this axis, the contracted dim"


def _gather_forward(
    a: Tensor, b: Tensor, *, group: str | None = None, sizes: tuple[int, ...] = (), own_size: int = 0, dim: int = 0
) -> tuple[Tensor, Tensors]:
    """The rows of all members of the group times b; without a group, this rank's rows times b."""
    if group is None:
        return _product(a, b), (a, b)
    out = _empty_with_size(a, dim, sum(sizes), b.shape[-1])
    _all_gather_matmul(a, b, out, group, sizes, dim)
    return out, (a, b)


def _gather_backward(
    saved: Tensors,
    grad: Tensor,
    needed: Sequence[bool],
    *,
    group: str | None = None,
    sizes: tuple[int, ...] = (),
    own_size: int = 0,
    dim: int = 0,
) -> Tensors:
    """da: the sum of the members' addends for this rank's rows. db: from all members' rows, gathered again."""
    if group is None:
        return matmul_backward((*saved, None, None), grad, (*needed, False, False))[:2]
    da, db = _empty_gradients(saved, needed)
    _all_gather_matmul_backward(*saved, grad, da, db, group, sizes, dim)
    return da, db


def _scatter_forward(
    a: Tensor, b: Tensor, *, group: str | None = None, sizes: tuple[int, ...] = (), own_size: int = 0, dim: int = 0
) -> tuple[Tensor, Tensors]:
    """This member's rows of the sum of all members' products a @ b; without a group, a @ b."""
    if group is None:
        return _product(a, b), (a, b)
    out = _empty_with_size(a, dim, own_size, b.shape[-1])
    _matmul_reduce_scatter(a, b, out, group, sizes, dim)
    return out, (a, b)


def _scatter_backward(
    saved: Tensors,
    grad: Tensor,
    needed: Sequence[bool],
    *,
    group: str | None = None,
    sizes: tuple[int, ...] = (),
    own_size: int = 0,
    dim: int = 0,
) -> Tensors:
    """da and db, from the output's gradient of all members, part by part as the members' parts arrive."""
    if group is None:
        return matmul_backward((*saved, None, None), grad, (*needed, False, False))[:2]
    da, db = _empty_gradients(saved, needed)
    _matmul_reduce_scatter_backward(*saved, grad, da, db, group, sizes, dim)
    return da, db


def _empty_gradients(saved: Tensors, needed: Sequence[bool]) -> Tensors:
    """Uninitialized tensors for the needed gradients, None for the rest."""
    pairs = zip(saved, needed, strict=True)
    return tuple(
        torch.empty(x.shape, dtype=x.dtype, device=x.device) if x is not None and need else None for x, need in pairs
    )


def _empty_with_size(x: Tensor, dim: int, size: int, last: int) -> Tensor:
    """Memory of x's shape, except for `size` along `dim` and `last` along the last dim."""
    shape = list(x.shape)
    shape[dim], shape[-1] = size, last
    return x.new_empty(shape)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a [..., K] @ b [K, N]."""
    return restore_leading_dims(multiply(flatten_to_rows(a), b), a)


class _WeightGradient:
    """Accumulates the gradient of b over the arriving parts, in float32 at least."""

    def __init__(self, b: Tensor) -> None:
        self.total = torch.zeros(b.shape, dtype=torch.promote_types(b.dtype, torch.float32), device=b.device)

    def add(self, a: Tensor, grad: Tensor) -> None:
        accumulate(flatten_to_rows(a).mT, flatten_to_rows(grad), self.total)


@communicating("all_gather_matmul(Tensor a, Tensor b, Tensor(a!) out, str group, int[] sizes, int dim)")
def _all_gather_matmul(a: Tensor, b: Tensor, out: Tensor, group: str, sizes: Sequence[int], dim: int) -> None:
    steps = Steps.from_group_name(group, sizes, dim)
    for member, part in steps.gather(a):
        steps.part(out, member).copy_(_product(part, b))


@communicating(
    "all_gather_matmul_backward(Tensor a, Tensor b, Tensor grad, Tensor(a!)? da, Tensor(b!)? db, str group, int[] "
    "sizes, int dim)"
)
def _all_gather_matmul_backward(
    a: Tensor, b: Tensor, grad: Tensor, da: Tensor | None, db: Tensor | None, group: str, sizes: Sequence[int], dim: int
) -> None:
    steps = Steps.from_group_name(group, sizes, dim)
    arriving = steps.gather(a) if db is not None else iter(())
    first = next(arriving, None)  # starts the transfers
    if da is not None:
        da.copy_(steps.reduce_scatter(lambda member: _product(steps.part(grad, member), b.mT)))
    if db is not None and first is not None:
        weight_gradient = _WeightGradient(b)
        for member, part in (first, *arriving):
            weight_gradient.add(part, steps.part(grad, member))
        db.copy_(weight_gradient.total)


@communicating("matmul_reduce_scatter(Tensor a, Tensor b, Tensor(a!) out, str group, int[] sizes, int dim)")
def _matmul_reduce_scatter(a: Tensor, b: Tensor, out: Tensor, group: str, sizes: Sequence[int], dim: int) -> None:
    steps = Steps.from_group_name(group, sizes, dim)
    out.copy_(steps.reduce_scatter(lambda member: _product(steps.part(a, member), b)))


@communicating(
    "matmul_reduce_scatter_backward(Tensor a, Tensor b, Tensor grad, Tensor(a!)? da, Tensor(b!)? db, str group, int[] "
    "sizes, int dim)"
)
def _matmul_reduce_scatter_backward(
    a: Tensor, b: Tensor, grad: Tensor, da: Tensor | None, db: Tensor | None, group: str, sizes: Sequence[int], dim: int
) -> None:
    steps = Steps.from_group_name(group, sizes, dim)
    weight_gradient = None if db is None else _WeightGradient(b)
    for member, part in steps.gather(grad):
        if da is not None:
            steps.part(da, member).copy_(_product(part, b.mT))
        if weight_gradient is not None:
            weight_gradient.add(steps.part(a, member), part)
    if db is not None and weight_gradient is not None:
        db.copy_(weight_gradient.total)


ALL_GATHER_MATMUL = Op("all_gather_matmul", _gather_forward, _gather_backward, _rule_of_gather)
MATMUL_REDUCE_SCATTER = Op("matmul_reduce_scatter", _scatter_forward, _scatter_backward, _rule_of_scatter)


@dataclass(frozen=True, slots=True)
class Steps:
    """The steps for a tensor which is sharded along `dim` over the members of a group."""

    group: dist.ProcessGroup
    sizes: tuple[int, ...]  # each member's size along dim
    position: int  # this rank's index in the group
    dim: int

    @classmethod
    def from_group_name(cls, name: str, sizes: Sequence[int], dim: int) -> Steps:
        group = group_named(name)
        return cls(group, tuple(sizes), group.rank(), dim)

    def part(self, whole: Tensor, member: int) -> Tensor:
        """The view of a member's part in `whole`, a tensor with all parts."""
        return whole.narrow(self.dim, sum(self.sizes[:member]), self.sizes[member])

    def gather(self, own: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Start all transfers, then yield (member, part): this rank's own part first, then each received part."""
        own = own.contiguous()
        arriving = []
        for step in range(1, len(self.sizes)):
            target, source = self._at(step), self._at(-step)
            shape = list(own.shape)
            shape[self.dim] = self.sizes[source]
            part = own.new_empty(shape)
            arriving.append((source, part, self._exchange(own, target, part, source)))
        yield self.position, own
        for source, part, works in arriving:
            _wait(works)
            yield source, part

    def reduce_scatter(self, compute: Callable[[int], Tensor]) -> Tensor:
        """Return the sum of all members' addends for this rank, in float32 at least and in the order of members.

        compute: this rank's addend for a member; called for this rank itself last, while the transfers run.
        """
        addends: dict[int, Tensor] = {}  # by member
        works, sent_parts = [], []
        for step in range(1, len(self.sizes)):
            target, source = self._at(step), self._at(-step)
            part = compute(target).contiguous()
            shape = list(part.shape)
            shape[self.dim] = self.sizes[self.position]
            addends[source] = part.new_empty(shape)
            works += self._exchange(part, target, addends[source], source)
            sent_parts.append(part)  # keeps the memory alive until the send completes
        addends[self.position] = own = compute(self.position)
        _wait(works)
        total = torch.zeros_like(own, dtype=torch.promote_types(own.dtype, torch.float32))
        for member in range(len(self.sizes)):
            total += addends[member]
        return total.to(own.dtype)

    def _at(self, step: int) -> int:
        """The member `step` places after this rank in the group, in a circle."""
        return (self.position + step) % len(self.sizes)

    def _exchange(self, sent: Tensor, target: int, received: Tensor, source: int) -> list[dist.Work]:
        """Start sending `sent` to member `target` and receiving `received` from `source`. Skip empty tensors."""
        ranks = dist.get_process_group_ranks(self.group)
        transfers = [dist.P2POp(dist.isend, sent, ranks[target], self.group)] if sent.numel() else []
        if received.numel():
            transfers.append(dist.P2POp(dist.irecv, received, ranks[source], self.group))
        return list(dist.batch_isend_irecv(transfers)) if transfers else []


def _wait(works: Sequence[dist.Work]) -> None:
    for work in works:
        work.wait()
