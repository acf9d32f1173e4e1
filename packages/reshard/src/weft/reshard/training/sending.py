"""Sends gradients to their layouts: while backward runs, and the rest at `GradientSync.wait()`.

`Sending`: fills buckets with gradients, starts the collectives of full buckets, and gives the sums to leaves.

`complete`: puts the remaining gradients into buckets at `GradientSync.wait()`, in the same order on all ranks,
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
from ..world.groups import format_ranks, this_rank
from .buckets import Bucket, Route
from .gradient_presence import GradientPresence
from .pending_gradient import Form, Forms, Leaf, in_dtype


class Sending:
    """The buckets of a GradientSync.

    bucket_bytes, dtype: see GradientSync. before_waiting: called before a full bucket's collective is waited for.
    """

    def __init__(self, bucket_bytes: int, dtype: torch.dtype | None, before_waiting: Callable[[], None]) -> None:
        self._bucket_bytes, self.dtype, self._before_waiting = bucket_bytes, dtype, before_waiting
        self._open_buckets: dict[Hashable, Bucket[Leaf]] = {}  # by `Route.key`
        self._in_flight: deque[Bucket[Leaf]] = deque()  # oldest first

    def add(self, leaf: Leaf) -> None:
        """Puts the leaf's unsent gradients into buckets. A gradient in the target layout needs no bucket.

        A gradient without a Route is resharded at once.
        """
        forms = leaf.pending()
        leaf.sent = forms if not leaf.sent or leaf.sent == forms else tuple(dict.fromkeys((*leaf.sent, *forms)))
        if leaf.local_grad is not None:
            assert leaf.route_cache is not None and leaf.route_cache[1] is not None, "set with the local gradient"
            self._add_to_bucket(leaf, leaf.local_grad, leaf.route_cache[1])
            leaf.local_grad = None
        for layout, older in leaf.older_grads.items():
            self._add_grad(leaf, older, layout == leaf.target)
        leaf.older_grads.clear()
        grad = leaf.grad
        in_target = grad is not None and leaf.layout_info(grad)[2]
        if grad is not None and not (in_target and leaf.parameter is leaf.home):
            leaf.parameter.grad = None
            self._add_grad(leaf, grad, in_target)
        if leaf.home.grad is None:
            leaf.put_placeholder()

    def add_zeros(self, leaf: Leaf, form: Form) -> None:
        """Puts zeros into a bucket: this rank's part of a gradient that other ranks have."""
        self._add_grad(leaf, leaf.zeros(form), form.layout == leaf.target)

    def finish(self) -> None:
        """Starts the remaining buckets, and waits for all buckets."""
        for bucket in self._open_buckets.values():
            self._send(bucket)
        self._open_buckets.clear()
        while self._in_flight:
            self._finish(self._in_flight.popleft())

    def _add_grad(self, leaf: Leaf, grad: DTensor, in_target: bool) -> None:
        """in_target: whether the gradient has the target layout."""
        if self.dtype is not None and grad.dtype != self.dtype:
            grad = in_dtype(grad, self.dtype)
        if in_target:
            leaf.add_synced(grad)
            return
        if leaf.route_cache is None or leaf.route_cache[0] is not dtensor_spec(grad):
            leaf.route_cache = dtensor_spec(grad), Route.of(grad, leaf.target)
        route = leaf.route_cache[1]
        if route is None:
            leaf.add_synced(reshard(grad, placements=leaf.target))
            return
        self._add_to_bucket(leaf, memory_of(grad), route)

    def _add_to_bucket(self, leaf: Leaf, part: Tensor, route: Route) -> None:
        """Puts this rank's part of a gradient into the route's open bucket; starts a full bucket."""
        bucket = self._open_buckets.get(route.key)
        if bucket is None:
            bucket = self._open_buckets[route.key] = Bucket(leaf.home.device_mesh)
        bucket.add(leaf, part, route)
        leaf.bucket = bucket
        if bucket.nbytes >= self._bucket_bytes:
            self._send(self._open_buckets.pop(route.key))

    def _send(self, bucket: Bucket[Leaf]) -> None:
        """Starts this bucket's collective.

        At most two buckets are in flight: older ones are finished first, which frees their buffers.
        """
        while len(self._in_flight) > 1:
            self._before_waiting()
            self._finish(self._in_flight.popleft())
        bucket.start()
        self._in_flight.append(bucket)

    def _finish(self, bucket: Bucket[Leaf]) -> None:
        for leaf, grad in bucket.finish():
            leaf.add_synced(grad)


def complete(
    leaves: Sequence[Leaf], expected: Sequence[Leaf], sending: Sending, presence: GradientPresence
) -> list[Forms]:
    """Puts unsent gradients into buckets. Returns each parameter's forms on all ranks, () if no rank has a gradient.

    expected: the parameters that every rank still sends in order, as a gradient or zeros.
    Communication: as `GradientPresence`, the buckets that fill up, and reshards of gradients without a Route.
    Raises RuntimeError where the ranks' gradients of a parameter differ in layout or dtype, or come from different
    numbers of passes, or where a rank lacks a gradient that a rank with the same shard has in the target layout.
    """
    for leaf in leaves:
        if leaf.bucket is not None and leaf.bucket.is_open and leaf.pending() == leaf.sent:
            sending.add(leaf)  # added to this parameter's gradient in the open bucket
    pending = [leaf.pending() for leaf in leaves]
    leaf_forms = [
        forms if not leaf.sent or leaf.sent == forms else tuple(dict.fromkeys((*leaf.sent, *forms)))
        for leaf, forms in zip(leaves, pending, strict=True)
    ]
    expected_set = set(expected)
    unexpected = [i for i, forms in enumerate(pending) if forms and leaves[i] not in expected_set]
    resent = {i for i in unexpected if leaves[i].sent}
    regular = not resent and all(
        len(forms) == 1 for leaf, forms in zip(leaves, leaf_forms, strict=True) if leaf.expects_grad or forms
    )
    presence.publish_final(tuple(leaf_forms), frozenset(unexpected), reads=not regular)
    if not regular and presence.has_peers:
        return _complete_with_peers(leaves, expected, sending, presence, leaf_forms, resent)
    for leaf in (*expected, *leaves):
        if leaf.pending():
            sending.add(leaf)
    return leaf_forms


def _complete_with_peers(
    leaves: Sequence[Leaf],
    expected: Sequence[Leaf],
    sending: Sending,
    presence: GradientPresence,
    leaf_forms: Sequence[Forms],
    resent: set[int],
) -> list[Forms]:
    """`complete` on a rank without some gradient, or with a gradient to send twice: reads messages, and gives zeros.

    leaf_forms: of each parameter's gradients on this rank.
    resent: indices of the parameters whose gradients were sent before in this step.
    The expected gradients come first, in the forms of the last step: a rank still in backward may wait for these
    buckets before it publishes its message.
    """
    number = {leaf: i for i, leaf in enumerate(leaves)}
    lacks_all = not any(leaf_forms)
    zero_forms: dict[int, Forms] = {}  # by parameter, the forms of the zeros that this rank gives
    for leaf in expected:
        i = number[leaf]
        if leaf.pending():
            sending.add(leaf)
        elif leaf.expects_grad and (not lacks_all or presence.any_gradient_on(leaf.mesh)):
            zero_forms[i] = leaf.last_forms or presence.forms_of(i)
            _add_zeros(sending, leaf, zero_forms[i])
    all_forms = list(leaf_forms)
    for i, leaf in enumerate(leaves):
        messages = presence.peer_messages(leaf) if leaf.is_here else {}
        theirs = {rank: each.leaf_forms[i] for rank, each in messages.items() if each.leaf_forms[i]}
        _check_alike(leaf, leaf_forms[i] or zero_forms.get(i, ()), theirs)
        if not leaf_forms[i]:
            all_forms[i] = next(iter(theirs.values()), ())
        unaware = [rank for rank, each in messages.items() if not each.reads and i not in each.unexpected]
        if i in resent and unaware:
            raise RuntimeError(
                f"the gradient of {leaf.name} came in more backward passes on rank {this_rank()} than on "
                f"{format_ranks(unaware)}, after the gradient was sent; run equally many passes on every rank, or all "
                f"but the last within sync.paused()"
            )
        if leaf.pending():
            sending.add(leaf)
        elif any(i in each.unexpected for each in messages.values()):
            _add_zeros(sending, leaf, all_forms[i])
        if not leaf_forms[i] and leaf.target in [form.layout for form in all_forms[i]]:
            _add_zero_shard(sending, leaf, all_forms[i], sorted(theirs))
    return all_forms


def _add_zeros(sending: Sending, leaf: Leaf, forms: Forms) -> None:
    for form in forms:
        if form.layout != leaf.target:
            sending.add_zeros(leaf, form)


def _check_alike(leaf: Leaf, mine: Forms, theirs: Mapping[int, Forms]) -> None:
    """Raises RuntimeError where another rank's gradients differ from this rank's in form."""
    for rank, forms in theirs.items():
        if mine and set(mine) != set(forms):
            raise RuntimeError(
                f"the gradient of {leaf.name} is ({', '.join(map(str, mine))}) on rank {this_rank()}, and "
                f"({', '.join(map(str, forms))}) on rank {rank}: these cannot be summed; give all ranks batches of the "
                f"same layout and dtype"
            )


def _add_zero_shard(sending: Sending, leaf: Leaf, forms: Forms, ranks: Sequence[int]) -> None:
    """Adds zeros as this rank's shard, where other ranks have other shards in the target layout.

    Raises RuntimeError if a rank with the same shard has a gradient: that gradient is complete, not an addend.
    """
    shape, target = leaf.home.shape, leaf.target
    mine = target.local_slices(shape, this_rank())
    same_shard = [rank for rank in ranks if target.local_slices(shape, rank) == mine]
    if same_shard:
        raise RuntimeError(
            f"rank {this_rank()} has no gradient of {leaf.name}, which {format_ranks(same_shard)} "
            f"ha{'s' if len(same_shard) == 1 else 've'} whole ({target}), so there is no sum to which this rank could "
            f"add; compute with {leaf.name} on all of these ranks, or shard the batch's rows over an axis"
        )
    sending.add_zeros(leaf, next(form for form in forms if form.layout == target))
