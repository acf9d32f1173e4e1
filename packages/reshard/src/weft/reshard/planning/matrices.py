"""The schedule by which sharded matrices become whole on single ranks, for an optimizer such as Muon.

`shards_of` finds the ranks sharing a parameter's matrices. `assign_owners` gives each matrix an owner among these
ranks, evenly by cost. `schedule_rounds` puts matrices into rounds: in a round, each rank owns at most one matrix. Equal
matrices of a round move as a stack, by the plans from the stack's source layout to the target layout and back.

The schedule follows from global metadata, so all ranks compute the same schedule without a message.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from weft.mesh import Layout, ProcessMesh, Shard

OWNER = "owner"  # the axis of a mesh of owners


@dataclass(frozen=True, slots=True)
class MatrixShards:
    """A sharded matrix, and how a group of ranks holds the shards."""

    layout: Layout  # of a stack of such matrices [k, n, m], on the ranks with shards; dim 0 is not sharded
    shape: tuple[int, int]  # (n, m), of the whole matrix
    rows: int  # of a block; each block of a matrix is orthogonalized by itself

    @property
    def cost(self) -> int:
        """The products of an orthogonalization, up to a constant factor: n m min(n, m) for each block."""
        n, m = self.shape
        return n * m * min(self.rows, m)


@dataclass(frozen=True, slots=True)
class Stack:
    """Matrices of equal shape and layout, moved together, each to its own owner."""

    members: tuple[int, ...]  # positions in the sequence given to `schedule_rounds`
    shape: tuple[int, int, int]  # (members, n, m)
    source: Layout  # the members' shards
    target: Layout  # on the owners, a whole member on each


@lru_cache(maxsize=65536)
def shards_of(layout: Layout, shape: tuple[int, ...], rank: int, rows: int | None = None) -> MatrixShards | None:
    """How the ranks which share a parameter's matrices with `rank` hold the shards.

    None where `rank` holds whole matrices, or none.

    shape: of the parameter, [n, m], or [k, n, m] for a stack of k matrices.
    rows: of a block, for a parameter [n, m] orthogonalized block by block; None: the matrix is a single block. Axes
        cutting the parameter between blocks leave the blocks whole, and each part then counts as a matrix.
    """
    mesh, layout = layout.mesh, layout.resolved(shape)
    if rank not in mesh:
        return None
    first = len(shape) - 2  # the dim of a matrix's rows
    blocks = shape[0] // rows if rows is not None and first == 0 else 1
    between: dict[str, Shard] = {}  # the axes that leave matrices, or blocks, whole
    sharing: dict[str, Shard] = {}
    for dim, axes in layout.shard_order.items():
        for axis in axes:
            size = mesh.axis_size(axis)
            if size == 1:
                continue
            if dim == first == 0 and blocks % size == 0 and not any(each.dim == 0 for each in sharing.values()):
                blocks //= size
                between[axis] = Shard(dim)
            elif dim < first:
                between[axis] = Shard(dim)
            else:
                sharing[axis] = Shard(dim + 1 - first)
    part = mesh.submesh(rank, *(axis for axis in mesh.axis_names if axis in sharing)) if sharing else None
    if part is None:
        return None
    n, m = Layout.in_order(mesh, between).local_shape(shape, rank)[-2:]
    in_blocks = rows is not None and blocks > 1
    return MatrixShards(Layout.in_order(part, sharing), (n, m), rows if in_blocks and rows is not None else n)


def assign_owners(costs: Sequence[int], ranks: int) -> list[int]:
    """The owner of each matrix, from 0 to `ranks` - 1: evenly by cost.

    Each matrix, the most expensive first, goes to the rank with the least cost so far: Graham (1969), whose bound for
    the busiest rank is 4/3 of the least possible cost. Equal matrices are dealt out in turn.
    """
    owners = [0] * len(costs)
    loads = [(0, rank) for rank in range(ranks)]
    for matrix in sorted(range(len(costs)), key=lambda matrix: -costs[matrix]):
        load, rank = loads[0]
        owners[matrix] = rank
        heapq.heapreplace(loads, (load + costs[matrix], rank))
    return owners


@lru_cache(maxsize=256)
def schedule_rounds(matrices: tuple[MatrixShards, ...]) -> tuple[tuple[Stack, ...], ...]:
    """The rounds, in order, each with its stacks; in a round, each rank owns at most one matrix.

    A rank's most expensive matrix is in the first round. Each group of ranks with shards has separate rounds.
    """
    groups: dict[ProcessMesh, list[int]] = {}
    for position, matrix in enumerate(matrices):
        groups.setdefault(matrix.layout.mesh, []).append(position)
    return tuple(each for mesh, members in groups.items() for each in _rounds(mesh, members, matrices))


def _rounds(mesh: ProcessMesh, members: Sequence[int], matrices: Sequence[MatrixShards]) -> Iterable[tuple[Stack, ...]]:
    """The rounds of the matrices at the positions `members`, whose shards the ranks of `mesh` hold."""
    ranks = tuple(sorted(mesh))
    owners = assign_owners([matrices[each].cost for each in members], len(ranks))
    owned: dict[int, list[int]] = {}
    for member, owner in sorted(zip(members, owners, strict=True), key=lambda pair: -matrices[pair[0]].cost):
        owned.setdefault(ranks[owner], []).append(member)
    for number in range(max(map(len, owned.values()), default=0)):
        stacks: dict[MatrixShards, dict[int, int]] = {}  # matrices of a kind, by owner
        for rank in sorted(owned):
            if number < len(owned[rank]):
                member = owned[rank][number]
                stacks.setdefault(matrices[member], {})[rank] = member
        yield tuple(
            Stack(
                members=tuple(by_owner.values()),
                shape=(len(by_owner), *kind.shape),
                source=kind.layout,
                target=Layout(ProcessMesh(list(by_owner), [OWNER]), {OWNER: Shard(0)}),
            )
            for kind, by_owner in stacks.items()
        )
