"""The order in which GradientSync sends gradients, equal on all ranks, whichever gradients each rank has.

`SendOrder`: what is sent while backward runs. `send_remaining`: what is left at the end of a round. A round is a
synchronization of all gradients: a `GradientSync.wait()`, or the end of a `paused()` with ZeRO 2 or 3.

With ZeRO 2 and 3 a round may have several turns: in each turn every expected leaf is sent once, in the order of the
leaves. A position is a place in this order: turn * number of leaves + the leaf's index.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

from ..world.exact import exact_axes
from ..world.groups import format_ranks, this_rank
from .gradient_buckets import GradientBuckets, merge_forms
from .gradient_presence import GradientPresence, Sent
from .pending_gradient import Forms, Leaf


class SendOrder:
    """The expected leaves, and how far this rank has sent them in this round.

    Made by GradientSync. leaves: all leaves of the GradientSync, the same on every rank.
    """

    def __init__(self, leaves: Sequence[Leaf]) -> None:
        self.leaves = leaves
        self._index_of = {leaf: index for index, leaf in enumerate(leaves)}
        self.sends_every_pass = any(leaf.sends_every_pass for leaf in leaves)  # ZeRO 2, 3
        # The leaves to send: leaves with a gradient on any rank in the last round with gradients; at first, all leaves
        # requiring a gradient.
        self.expected = tuple(leaf for leaf in leaves if leaf.parameter.requires_grad)
        # {whether a round ended with a `paused()`: the number of turns in the last round of this kind with gradients}.
        # Backward sends at most this number of turns; without an entry, all turns.
        self._turns: dict[bool, int] = {}
        self._restart()

    def _restart(self) -> None:
        self.turn, self._next = 0, 0  # `_next`: in `expected`, the next leaf to send in this turn
        self._skipped: list[int] = []  # positions at which nothing was sent, see `_send`
        self.zero_forms: dict[int, Forms] = {}  # by leaf index, the forms of the zeros sent by this rank

    @property
    def sent(self) -> Sent:
        """How far this rank has sent in backward: to the next leaf's position. For messages to peers."""
        at_start = self._next in (0, len(self.expected))
        within = 0 if at_start else self._index_of[self.expected[self._next]]
        return Sent(self.turn * len(self.leaves) + within, frozenset(self._skipped))

    def send_ready(self, leaf: Leaf, buckets: GradientBuckets, *, paused: bool) -> None:
        """Counts a gradient of `leaf` as ready, then sends ready gradients in order, up to the first missing gradient.

        Called by GradientSync in backward, when a leaf has a gradient. paused: whether a `paused()` is open.
        """
        leaf.ready_count += 1
        leaf.num_grads += 1
        self._send(buckets, lambda leaf: False, paused=paused)

    def send_absent(self, buckets: GradientBuckets, is_over: Callable[[Leaf], bool], *, paused: bool) -> None:
        """Sends zeros in place of missing gradients that will not come, up to the first that may come.

        Called by GradientSync in backward before a gather: on all ranks, the sums of earlier modules then come first.
        is_over: whether no gradient of a leaf will come. Zeros take the forms of the last round with gradients; in the
        first round nothing is sent.
        """
        self._send(buckets, is_over, paused=paused)

    def _send(self, buckets: GradientBuckets, is_over: Callable[[Leaf], bool], *, paused: bool) -> None:
        while self._next < len(self.expected):
            expected = self.expected[self._next]
            index = self._index_of[expected]
            if expected.ready_count:
                # Outside of `exact_sums` this gradient may have been added to an earlier one, and sent with it.
                if self.turn and not expected.sums_each_pass and not expected.unsent_forms():
                    self._skipped.append(self.turn * len(self.leaves) + index)
                else:
                    expected.num_sent += 1
                buckets.add(expected)
                expected.ready_count -= 1
            elif expected.last_forms and is_over(expected):
                self.zero_forms[index] = expected.last_forms
                _add_zeros(buckets, expected, expected.last_forms)
                expected.num_sent += 1
            else:
                return
            self._next += 1
            if self._next == len(self.expected):
                self.turn += 1
                if self.sends_every_pass and self.turn < self._turns.get(paused, self.turn + 1):
                    self._next = 0  # the next backward pass sends in the same order

    def first_turn(self) -> Sequence[Leaf]:
        """The leaves of the first turn that were not sent in backward."""
        return self.expected[self._next :] if not self.turn else ()

    def further_positions(self) -> Iterator[tuple[int, Leaf]]:
        """The positions after the first turn that were not sent in backward, with their leaves; never ends."""
        start = self.sent.position
        for turn in itertools.count(max(self.turn, 1)):
            for leaf in self.expected:
                position = turn * len(self.leaves) + self._index_of[leaf]
                if position >= start:
                    yield position, leaf

    def is_usual(self, *, paused: bool) -> bool:
        """Whether this rank had as many turns as in the last round with gradients and the same `paused`.

        False if backward has sent a turn after the first only in part. True without ZeRO 2 and 3.
        Called by `send_remaining`.
        """
        if not self.sends_every_pass:
            return True
        whole_turns = not self.turn or self._next in (0, len(self.expected))
        return whole_turns and self.own_turns == self._turns.get(paused)

    @property
    def own_turns(self) -> int:
        """This rank's number of turns in this round: the largest `num_grads` of a leaf."""
        return max((leaf.num_grads for leaf in self.leaves), default=0)

    def end_round(self, leaf_forms: Sequence[Forms], turns: int, *, paused: bool) -> None:
        """Begins the next round. Called by GradientSync. leaf_forms, turns: of this round, on all ranks."""
        if any(leaf_forms):
            self.expected = tuple(leaf for leaf, forms in zip(self.leaves, leaf_forms, strict=True) if forms)
            self._turns[paused] = turns
        self._restart()


def send_remaining(
    order: SendOrder, buckets: GradientBuckets, presence: GradientPresence, *, paused: bool
) -> tuple[list[Forms], int]:
    """Puts unsent gradients into buckets, in the same order on all ranks. Called by GradientSync at a round's end.

    Returns the forms (layout and dtype) of each leaf's gradients on all ranks, () if no rank has a gradient; and the
    number of turns. paused: whether the round ends with a `paused()`.
    Every rank sends the expected leaves in order, as gradients or zeros, and then the rank's remaining gradients.
    Communication: as `GradientPresence`, full buckets, and reshards of gradients without a Route.
    Raises RuntimeError where the ranks' gradients of a parameter differ in layout or dtype, or come from different
    numbers of passes; and where a rank lacks a gradient which is complete (in the target layout, so not summed) on
    another rank with the same shard.
    """
    leaves = order.leaves
    # A later pass may have given a second gradient after the first was put into a bucket that is still open. If both
    # have the same forms, the second is added to the first there, and need not be sent separately. Not inside
    # `exact_sums`, see `GradientBuckets._add_to_bucket`.
    unsent = [leaf.unsent_forms() for leaf in leaves]
    for i, leaf in enumerate(leaves) if exact_axes() is None else ():
        if unsent[i] and leaf.bucket is not None and leaf.bucket.is_open and unsent[i] == leaf.sent_forms:
            buckets.add(leaf)
            unsent[i] = leaf.unsent_forms()
    leaf_forms = [merge_forms(leaf.sent_forms, forms) for leaf, forms in zip(leaves, unsent, strict=True)]
    num_unsent = [
        leaf.num_unsent if forms or leaf.older_grads else 0 for leaf, forms in zip(leaves, unsent, strict=True)
    ]
    totals = [leaf.num_sent + number for leaf, number in zip(leaves, num_unsent, strict=True)]
    in_turn = set(order.first_turn())
    foreseen = [leaf.num_sent + (leaf in in_turn) for leaf in leaves]
    # Whether this rank has every gradient once a turn and in a single layout. Then no message of a peer could change
    # anything.
    has_all = (
        order.is_usual(paused=paused)
        and all(total <= max(1, number) for total, number in zip(totals, foreseen, strict=True))
        and all(len(forms) == 1 for leaf, forms in zip(leaves, leaf_forms, strict=True) if leaf.expects_grad or forms)
    )
    more = {i: total for i, (total, number) in enumerate(zip(totals, foreseen, strict=True)) if total > number}
    presence.publish_final(
        tuple(leaf_forms),
        order.sent,
        more,
        turns=order.own_turns,
        gather_order=buckets.gather_order(),
        reads=not has_all,
    )
    if not has_all and presence.has_peers:
        return _send_with_peers(order, buckets, presence, leaf_forms, more)
    for leaf in (*order.first_turn(), *leaves) if any(num_unsent) else ():
        while leaf.num_unsent:
            buckets.add(leaf)
            if leaf in in_turn:
                in_turn.remove(leaf)
                break
    return leaf_forms, order.own_turns


def _send_with_peers(
    order: SendOrder,
    buckets: GradientBuckets,
    presence: GradientPresence,
    leaf_forms: Sequence[Forms],
    more: Mapping[int, int],
) -> tuple[list[Forms], int]:
    """`send_remaining` on a rank that lacks a gradient, or has several to send for a leaf: reads the peers' messages.

    The messages tell which gradients each peer has. This rank gives zeros for a gradient that only peers have.
    leaf_forms: the forms of each leaf's gradients on this rank. more: as `Message.more`, of this rank.

    The first two loops send the expected gradients, or zeros, without waiting for all messages: a rank still in
    backward may wait for these buckets before publishing a final message. The second loop follows the peers through
    the turns which peers send in backward. The third loop reads the final messages, and sends what is left on any rank.
    """
    leaves, all_forms = order.leaves, list(leaf_forms)
    lacks_all = not any(leaf_forms)
    zero_forms = order.zero_forms

    def give(i: int, forms: Forms | None = None) -> None:
        """Sends a gradient of a leaf, or zeros. forms: of the zeros, if known from the messages."""
        leaf = leaves[i]
        if leaf.num_unsent:
            buckets.add(leaf)
        else:
            zero_forms[i] = found = forms or leaf.last_forms or presence.forms_of(i)
            if leaf.sums_each_pass and len(found) > 1:
                raise RuntimeError(
                    f"rank {this_rank()} lacks the gradient of {leaf.name} of a pass, and the gradient's layout "
                    f"differs between passes: {', '.join(map(str, found))}; compute with {leaf.name} in every pass"
                )
            _add_zeros(buckets, leaf, found)
        leaf.num_sent += 1

    index_of = {leaf: i for i, leaf in enumerate(leaves)}
    for leaf in order.first_turn():
        if leaf.num_unsent or (leaf.expects_grad and (not lacks_all or presence.any_gradient_on(leaf.mesh))):
            give(index_of[leaf])
    misses, most_misses = 0, len(order.expected)
    for position, leaf in order.further_positions() if order.sends_every_pass and order.expected else ():
        sends = presence.is_sent(leaf.mesh, position) if leaf.expects_grad else None
        if sends:
            give(position % len(leaves))
        misses = misses + 1 if sends is None else 0
        if misses == most_misses:  # no peer was beyond
            break
    turns = order.own_turns
    for i, leaf in enumerate(leaves):
        messages = presence.peer_messages(leaf) if leaf.is_on_mesh else {}
        turns = max([turns, *(message.turns for message in messages.values())])
        peer_forms = {rank: message.leaf_forms[i] for rank, message in messages.items() if message.leaf_forms[i]}
        _check_alike(leaf, leaf_forms[i] or zero_forms.get(i, ()), peer_forms)
        if not leaf_forms[i]:
            all_forms[i] = next(iter(peer_forms.values()), ())
        # How many gradients each rank still has to send; a peer that reads no messages would give no zeros.
        totals = {rank: message.more.get(i, 0) for rank, message in messages.items()} | {this_rank(): more.get(i, 0)}
        left = {rank: max(0, total - leaf.num_sent) for rank, total in totals.items()}
        most = max(left.values())
        unaware = [rank for rank, message in messages.items() if not message.reads and left[rank] < most]
        if leaf.num_sent and unaware:
            ahead = [rank for rank, number in left.items() if number == most]
            raise RuntimeError(
                f"the gradient of {leaf.name} came in more backward passes on {format_ranks(ahead)} than on "
                f"{format_ranks(unaware)}, after the gradient was sent; run equally many passes on every rank, or all "
                f"but the last within sync.paused()"
            )
        for _ in range(most):
            give(i, all_forms[i])
        if not leaf_forms[i] and leaf.target in [form.layout for form in all_forms[i]]:
            _add_zero_shard(buckets, leaf, all_forms[i], sorted(peer_forms))
    return all_forms, turns


def _add_zeros(buckets: GradientBuckets, leaf: Leaf, forms: Forms) -> None:
    """Adds zeros in each form to be reduced: all but the target layout."""
    for form in forms:
        if form.layout != leaf.target:
            buckets.add_zeros(leaf, form)


def _check_alike(leaf: Leaf, own_forms: Forms, peer_forms: Mapping[int, Forms]) -> None:
    """Raises RuntimeError where another rank's gradients differ from this rank's in form."""
    for rank, forms in peer_forms.items():
        if own_forms and set(own_forms) != set(forms):
            raise RuntimeError(
                f"the gradient of {leaf.name} is ({', '.join(map(str, own_forms))}) on rank {this_rank()}, and "
                f"({', '.join(map(str, forms))}) on rank {rank}: these cannot be summed; give all ranks batches of the "
                f"same layout and dtype"
            )


def _add_zero_shard(buckets: GradientBuckets, leaf: Leaf, forms: Forms, ranks: Sequence[int]) -> None:
    """Adds zeros as this rank's shard, where ranks with different shards have gradients in the target layout.

    ranks: the ranks with a gradient.
    Raises RuntimeError if a rank with the same shard has a gradient, which is then complete, not an addend.
    """
    shape, target = leaf.parameter.shape, leaf.target
    shard = target.local_slices(shape, this_rank())
    same_shard = [rank for rank in ranks if target.local_slices(shape, rank) == shard]
    if same_shard:
        raise RuntimeError(
            f"rank {this_rank()} has no gradient of {leaf.name}. On {format_ranks(same_shard)} the gradient is "
            f"complete ({target}), so there is no sum to which this rank could add; compute with {leaf.name} on all of "
            f"these ranks, or shard the batch's rows over an axis"
        )
    buckets.add_zeros(leaf, next(form for form in forms if form.layout == target))
