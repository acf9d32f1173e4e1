"""The gradients left to send at `GradientSync.wait()`: in the same order on all ranks, which may have different gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .attendance import Attendance
from .groups import this_rank
from .leaves import Forms, Leaf
from .order import named_ranks
from .sending import Sending


def complete(leaves: Sequence[Leaf], rest: Sequence[Leaf], sending: Sending, attendance: Attendance) -> list[Forms]:
    """Adds the gradients left to send to buckets; returns each parameter's forms on all ranks, () where no rank has a gradient.

    rest: the parameters that every rank sends next, in order.
    Communication: as `attendance`, and the full buckets. Raises RuntimeError for gradients without a sum.
    """
    for leaf in leaves:
        if leaf.bucket is not None and leaf.bucket.is_open and leaf.pending() == leaf.sent:
            sending.add(leaf)  # to the part in the open bucket
    pending = [leaf.pending() for leaf in leaves]
    has = [
        forms if not leaf.sent or leaf.sent == forms else tuple(dict.fromkeys((*leaf.sent, *forms)))
        for leaf, forms in zip(leaves, pending, strict=True)
    ]
    expected = set(rest)
    again = [i for i, forms in enumerate(pending) if forms and leaves[i] not in expected]
    twice = {i for i in again if leaves[i].sent}
    regular = not twice and all(
        len(forms) == 1 for leaf, forms in zip(leaves, has, strict=True) if leaf.learns or forms
    )
    attendance.come(tuple(has), frozenset(again), reads=not regular)
    if not regular and attendance.has_peers:
        return _complete_with_others(leaves, rest, sending, attendance, has, twice)
    for leaf in (*rest, *leaves):
        if leaf.pending():
            sending.add(leaf)
    return has


def _complete_with_others(
    leaves: Sequence[Leaf],
    rest: Sequence[Leaf],
    sending: Sending,
    attendance: Attendance,
    has: Sequence[Forms],
    twice: set[int],
) -> list[Forms]:
    """As `complete`, where this rank lacks a gradient, or sends a gradient twice.

    has: the forms of each gradient on this rank. twice: the numbers of the gradients that were sent before.
    The expected gradients come first, in their known forms: a rank that still runs backward may wait for their buckets, and has not
    told its message yet.
    """
    number = {leaf: i for i, leaf in enumerate(leaves)}
    lacks_all = not any(has)
    given: dict[int, Forms] = {}  # zeros
    for leaf in rest:
        i = number[leaf]
        if leaf.pending():
            sending.add(leaf)
        elif leaf.learns and (not lacks_all or attendance.someone_has_any(leaf.mesh)):
            given[i] = leaf.known or attendance.forms_of(i)
            _add_zeros(sending, leaf, given[i])
    found = list(has)
    for i, leaf in enumerate(leaves):
        told = attendance.others(leaf) if leaf.is_here else {}
        theirs = {rank: each.has[i] for rank, each in told.items() if each.has[i]}
        _check_alike(leaf, has[i] or given.get(i, ()), theirs)
        if not has[i]:
            found[i] = next(iter(theirs.values()), ())
        alone = [rank for rank, each in told.items() if not each.reads and i not in each.again]
        if i in twice and alone:
            raise RuntimeError(
                f"the gradient of {leaf.name} came in more backward passes on rank {this_rank()} than on {named_ranks(alone)}, "
                f"after it was sent; make as many on every rank, or all but the last within sync.paused()"
            )
        if leaf.pending():
            sending.add(leaf)
        elif any(i in each.again for each in told.values()):
            _add_zeros(sending, leaf, found[i])
        if not has[i] and leaf.target in [form.layout for form in found[i]]:
            _stand_in(sending, leaf, found[i], sorted(theirs))
    return found


def _add_zeros(sending: Sending, leaf: Leaf, forms: Forms) -> None:
    for form in forms:
        if form.layout != leaf.target:
            sending.add_zeros(leaf, form)


def _check_alike(leaf: Leaf, mine: Forms, theirs: Mapping[int, Forms]) -> None:
    """Raises RuntimeError where a rank's gradients have forms unlike this rank's."""
    for rank, forms in theirs.items():
        if mine and set(mine) != set(forms):
            raise RuntimeError(
                f"the gradient of {leaf.name} is ({', '.join(map(str, mine))}) on rank {this_rank()}, and "
                f"({', '.join(map(str, forms))}) on rank {rank}: such addends have no sum; give the ranks batches that lie alike"
            )


def _stand_in(sending: Sending, leaf: Leaf, forms: Forms, ranks: Sequence[int]) -> None:
    """Gives zeros for this rank's shard of a gradient whose remaining shards are complete.

    Raises RuntimeError where a rank with this rank's shard has a gradient: complete there, it is no sum.
    """
    shape, target = leaf.home.shape, leaf.target
    mine = target.local_slices(shape, this_rank())
    same = [rank for rank in ranks if target.local_slices(shape, rank) == mine]
    if same:
        raise RuntimeError(
            f"rank {this_rank()} has no gradient of {leaf.name}, which {named_ranks(same)} ha{'s' if len(same) == 1 else 've'} whole "
            f"({target}), so that nothing is to be added up; compute with it on all of these ranks, or on rows that an axis shards"
        )
    sending.add_zeros(leaf, next(form for form in forms if form.layout == target))
