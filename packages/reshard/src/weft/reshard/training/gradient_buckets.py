"""Sends gradients to their target layouts: while backward runs, and the remaining gradients at `GradientSync.wait()`.

`GradientBuckets`: fills buckets with gradients, starts the collectives of full buckets, and gives the sums to leaves.

`send_remaining`: puts the remaining gradients into buckets at `GradientSync.wait()`, in the same order on all ranks,
whichever gradients each rank has.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..moving.dtensor import dtensor_spec, memory_of
from ..moving.reshard import reshard
from ..world.exact import exact_axes
from ..world.groups import format_ranks, this_rank
from .buckets import Bucket, Route
from .gradient_presence import GradientPresence
from .pending_gradient import Form, Forms, Leaf, cast_grad


class GradientBuckets:
    """The open buckets of a GradientSync, and the buckets in flight. A `Leaf` is a parameter and the state of
    gradients.

    bucket_bytes, dtype: see GradientSync.
    before_wait: called before each wait for the older of two buckets in flight; publishes the gradients sent so far. A
        rank without gradients learns by this message to give zeros, without which the collective might not end.
    """

    def __init__(self, bucket_bytes: int, dtype: torch.dtype | None, before_wait: Callable[[], None]) -> None:
        self._bucket_bytes, self.dtype, self._before_wait = bucket_bytes, dtype, before_wait
        self._open_buckets: dict[Hashable, Bucket[Leaf]] = {}  # by `Route.key`
        self._in_flight: deque[Bucket[Leaf]] = deque()  # oldest first

    def add(self, leaf: Leaf) -> None:
        """Puts the leaf's unsent gradients into buckets, and a placeholder into `.grad`.

        Called in backward when the leaf's turn comes in the order of sending, and for the remaining leaves in `wait()`.
        A gradient in the target layout needs no bucket, and stays in `.grad`. Under ZeRO, or where a later gradient has
        a different layout, the gradient is added to the leaf's `reduced_grad` instead. A gradient without a Route is
        resharded at once.
        """
        leaf.sent_forms = _merge_forms(leaf.sent_forms, leaf.unsent_forms())
        if leaf.local_grad is not None:
            assert leaf.route_cache is not None and leaf.route_cache[2] is not None, "set with the local gradient"
            self._add_to_bucket(leaf, leaf.local_grad, leaf.route_cache[2])
            leaf.local_grad = None
        for older in leaf.older_grads:
            self._add_grad(leaf, older, leaf.grad_info(older)[2])
        leaf.older_grads.clear()
        grad = leaf.grad
        in_target = grad is not None and leaf.grad_info(grad)[2]
        if grad is not None and not (in_target and leaf.accumulator is leaf.parameter):  # else it is in its final place
            leaf.accumulator.grad = None
            self._add_grad(leaf, grad, in_target)
        if leaf.parameter.grad is None:
            leaf.put_placeholder()

    def add_zeros(self, leaf: Leaf, form: Form) -> None:
        """Gives zeros of this layout and dtype, as this rank's part of a gradient computed by peers.

        The zeros go where the gradient would: into a bucket, or in the target layout to `reduced_grad`.
        """
        self._add_grad(leaf, leaf.zeros(form), form.layout == leaf.target)

    def finish_all(self) -> None:
        """Starts the open buckets, and waits for all buckets."""
        for bucket in self._open_buckets.values():
            self._start(bucket)
        self._open_buckets.clear()
        while self._in_flight:
            self._finish_oldest()

    def _add_grad(self, leaf: Leaf, grad: DTensor, in_target: bool) -> None:
        """Puts a gradient into a bucket, or adds a gradient without a Route or in the target layout to `reduced_grad`.

        in_target: whether the gradient has the target layout.
        """
        if self.dtype is not None and grad.dtype != self.dtype:
            grad = cast_grad(grad, self.dtype)
        if in_target:
            leaf.add_reduced(grad)
            return
        route = leaf.route_of(memory_of(grad), dtensor_spec(grad))
        if route is None:
            leaf.add_reduced(reshard(grad, placements=leaf.target))
            return
        self._add_to_bucket(leaf, route.collapse(memory_of(grad)), route)

    def _add_to_bucket(self, leaf: Leaf, part: Tensor, route: Route) -> None:
        """Puts this rank's part of a gradient into the route's open bucket; starts a full bucket.

        A second gradient of the leaf is added to the first in the bucket. Inside `exact_sums` the second goes into a
        new
        bucket: whether two passes are added before or after the ranks' sum must not depend on the size of buckets.
        part: from `Route.collapse`.
        """
        bucket = self._open_buckets.get(route.key)
        if bucket is not None and leaf in bucket and exact_axes() is not None:
            self._start(self._open_buckets.pop(route.key))
            bucket = None
        if bucket is None:
            bucket = self._open_buckets[route.key] = Bucket(leaf.parameter.device_mesh)
        bucket.add(leaf, part, route)
        leaf.bucket = bucket
        if bucket.nbytes >= self._bucket_bytes:
            self._start(self._open_buckets.pop(route.key))

    def _start(self, bucket: Bucket[Leaf]) -> None:
        """Starts this bucket's collective.

        At most two buckets are in flight: older ones are finished first, which frees their buffers.
        """
        while len(self._in_flight) > 1:
            self._before_wait()
            self._finish_oldest()
        bucket.start()
        self._in_flight.append(bucket)

    def _finish_oldest(self) -> None:
        """Waits for the oldest bucket in flight, and gives the sums to the leaves."""
        for leaf, grad in self._in_flight.popleft().finish():
            leaf.add_reduced(grad)


def _merge_forms(first: Forms, second: Forms) -> Forms:
    """The forms of both, each once."""
    return second if not first or first == second else tuple(dict.fromkeys((*first, *second)))


def send_remaining(
    leaves: Sequence[Leaf], expected: Sequence[Leaf], buckets: GradientBuckets, presence: GradientPresence
) -> list[Forms]:
    """Puts unsent gradients into buckets, in the same order on all ranks. Called in GradientSync's `wait()`.

    Returns the forms (layout and dtype) of each leaf's gradients on all ranks; () if no rank has a gradient.
    leaves: all leaves of the GradientSync.
    expected: the leaves with a gradient on any rank in the last step, or in the first step all leaves requiring a
        gradient; without the leaves already sent in backward. Every rank sends the expected leaves in order, as
        gradients or zeros, and then the rank's remaining gradients.
    Communication: as `GradientPresence`, full buckets, and reshards of gradients without a Route.
    Raises RuntimeError where the ranks' gradients of a parameter differ in layout or dtype, or come from different
    numbers of passes. A gradient in the target layout is complete, and not summed: also raises where a
    rank with the same shard lacks the gradient.
    """
    # A later pass may have given a second gradient after the first was put into a bucket that is still open. If both
    # have the same forms, the second is added to the first there, and need not be sent separately. Not inside
    # `exact_sums`, see `_add_to_bucket`.
    for leaf in leaves if exact_axes() is None else ():
        if leaf.bucket is not None and leaf.bucket.is_open and leaf.unsent_forms() == leaf.sent_forms:
            buckets.add(leaf)
    unsent = [leaf.unsent_forms() for leaf in leaves]
    leaf_forms = [_merge_forms(leaf.sent_forms, forms) for leaf, forms in zip(leaves, unsent, strict=True)]
    expected_set = set(expected)
    unexpected = [i for i, forms in enumerate(unsent) if forms and leaves[i] not in expected_set]
    to_resend = {i for i in unexpected if leaves[i].sent_forms}
    # Whether this rank has every gradient once and in a single layout. Then no message of a peer could change anything.
    has_all = not to_resend and all(
        len(forms) == 1 for leaf, forms in zip(leaves, leaf_forms, strict=True) if leaf.expects_grad or forms
    )
    presence.publish_final(tuple(leaf_forms), frozenset(unexpected), reads=not has_all)
    if not has_all and presence.has_peers:
        return _send_with_peers(leaves, expected, buckets, presence, leaf_forms, to_resend)
    for leaf in (*expected, *leaves):
        if leaf.unsent_forms():
            buckets.add(leaf)
    return leaf_forms


def _send_with_peers(
    leaves: Sequence[Leaf],
    expected: Sequence[Leaf],
    buckets: GradientBuckets,
    presence: GradientPresence,
    leaf_forms: Sequence[Forms],
    to_resend: set[int],
) -> list[Forms]:
    """`send_remaining` on a rank that lacks a gradient, or has several to send for a leaf: reads the peers' messages.

    The messages tell which gradients each peer has. This rank gives zeros for a gradient that only peers have.
    leaf_forms: the forms of each leaf's gradients on this rank.
    to_resend: indices of the leaves with a second gradient to send in this step.

    The first loop sends the expected gradients, or zeros in the forms of the last step, without waiting for all
    messages: a rank still in backward may wait for these buckets before publishing a final message. The second loop
    reads the final messages, and sends the gradients that any rank lists as unexpected.
    """
    index_of = {leaf: i for i, leaf in enumerate(leaves)}
    lacks_all = not any(leaf_forms)
    zero_forms: dict[int, Forms] = {}  # by leaf index, the forms of the zeros given by this rank in the first loop
    for leaf in expected:
        i = index_of[leaf]
        if leaf.unsent_forms():
            buckets.add(leaf)
        elif leaf.expects_grad and (not lacks_all or presence.any_gradient_on(leaf.mesh)):
            zero_forms[i] = leaf.last_forms or presence.forms_of(i)
            _add_zeros(buckets, leaf, zero_forms[i])
    all_forms = list(leaf_forms)
    for i, leaf in enumerate(leaves):
        messages = presence.peer_messages(leaf) if leaf.is_on_mesh else {}
        peer_forms = {rank: message.leaf_forms[i] for rank, message in messages.items() if message.leaf_forms[i]}
        _check_alike(leaf, leaf_forms[i] or zero_forms.get(i, ()), peer_forms)
        if not leaf_forms[i]:
            all_forms[i] = next(iter(peer_forms.values()), ())
        # Peers that send no gradient of this leaf now, and read no messages, by which they could know to give zeros.
        unaware = [rank for rank, message in messages.items() if not message.reads and i not in message.unexpected]
        if i in to_resend and unaware:
            raise RuntimeError(
                f"the gradient of {leaf.name} came in more backward passes on rank {this_rank()} than on "
                f"{format_ranks(unaware)}, after the gradient was sent; run equally many passes on every rank, or all "
                f"but the last within sync.paused()"
            )
        if leaf.unsent_forms():
            buckets.add(leaf)
        elif any(i in message.unexpected for message in messages.values()):
            _add_zeros(buckets, leaf, all_forms[i])
        if not leaf_forms[i] and leaf.target in [form.layout for form in all_forms[i]]:
            _add_zero_shard(buckets, leaf, all_forms[i], sorted(peer_forms))
    return all_forms


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
