"""`GradientBuckets`: fills buckets with gradients, starts full buckets' collectives, and gives the sums to leaves.

The order of sending, equal on all ranks: send_order.py.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Hashable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from weft.mesh.extension import as_int

from ..moving.dtensor import dtensor_spec, memory_of
from ..moving.reshard import reshard
from ..world.exact import exact_axes
from .buckets import Bucket, Route
from .pending_gradient import Forms, GradientForm, Leaf, cast_grad

# The most buckets whose collectives are under way at once. A decoder block has seven matrices, and each large matrix
# has a bucket of its own: a block's gradients may be summed while backward computes the next block.
MOST_IN_FLIGHT = 8


def check_buckets(bucket_bytes: int, dtype: torch.dtype | None) -> None:
    """Raises ValueError for a bucket without room, and for a dtype that is not floating-point.

    Called by `GradientSync.__init__`.
    """
    if as_int("bucket_bytes", bucket_bytes) < 1:
        raise ValueError(f"bucket_bytes is {bucket_bytes}; a bucket holds at least 1 byte")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"dtype is {dtype!r}; give a floating-point dtype, in which gradients are summed")


class GradientBuckets:
    """The open buckets of a GradientSync, and the buckets in flight. Made by `GradientSync.__init__`.

    bucket_bytes, dtype: see GradientSync.
    before_wait: called before a third bucket starts, and before each later bucket; publishes the gradients sent so far.
        A rank without gradients learns by this message to give zeros. Without zeros, the collectives might not end for
        which this rank waits: of the oldest bucket, or of a gather of parameters behind the buckets.
    count_gathers: returns how many gathers of parameters this rank has started; see `gather_order`.
    """

    def __init__(
        self,
        bucket_bytes: int,
        dtype: torch.dtype | None,
        before_wait: Callable[[], None],
        count_gathers: Callable[[], int],
    ) -> None:
        self._bucket_bytes, self.dtype, self._before_wait = bucket_bytes, dtype, before_wait
        self._open_buckets: dict[Hashable, Bucket[Leaf]] = {}  # by `Route.key`
        self._in_flight: deque[Bucket[Leaf]] = deque()  # oldest first
        # `_first_gather`: the number of gathers started before this round.
        self._count_gathers, self._first_gather = count_gathers, count_gathers()
        self._gathers_before: list[int] = []  # for each bucket started in this round, the gathers started before it

    def add(self, leaf: Leaf) -> None:
        """Puts the leaf's unsent gradients into buckets, and a placeholder into `.grad`.

        Called by SendOrder in backward, when the leaf's turn comes, and by `send_remaining` at the end of a round.
        Of a leaf with `sums_each_pass`, each call sends a single gradient, the oldest.
        A gradient in the target layout needs no bucket, and stays in `.grad`. Under ZeRO, or where a later gradient has
        a different layout, the gradient is added to the leaf's `reduced_grad` instead. A gradient without a Route is
        resharded at once.
        """
        leaf.sent_forms = merge_forms(leaf.sent_forms, leaf.unsent_forms())
        if leaf.local_grad is not None:
            assert leaf.route_cache is not None and leaf.route_cache[2] is not None, "set with the local gradient"
            self._add_to_bucket(leaf, leaf.local_grad, leaf.route_cache[2])
            leaf.local_grad = None
            if leaf.sums_each_pass:
                return
        older_grads = leaf.take_older_grads()
        for older in older_grads:
            self._add_grad(leaf, older, leaf.grad_info(older)[2])
        grad = None if older_grads and leaf.sums_each_pass else leaf.grad
        in_target = grad is not None and leaf.grad_info(grad)[2]
        # a gradient already in its final place stays in `.grad`
        if grad is not None and not (in_target and leaf.accumulator is leaf.parameter):
            leaf.accumulator.grad = None
            self._add_grad(leaf, grad, in_target)
        if leaf.parameter.grad is None:
            leaf.put_placeholder()

    def add_zeros(self, leaf: Leaf, form: GradientForm) -> None:
        """Gives zeros of this layout and dtype, as this rank's part of a gradient computed by peers.

        Called by send_order.py. The zeros go where the gradient would: into a bucket, or in the target layout to
        `reduced_grad`.
        """
        self._add_grad(leaf, leaf.zeros(form), form.layout == leaf.target)

    def gather_order(self) -> int:
        """A checksum of the order in which this rank has started gathers and buckets in this round.

        A gather with ZeRO 3 and a bucket may use the same process group, in which all ranks need the same order.
        A bucket counts only if a gather started after the bucket. Called by `send_remaining`.
        """
        total = self._count_gathers() - self._first_gather
        before = [count - self._first_gather for count in self._gathers_before]
        return zlib.crc32(repr((total, [count for count in before if count < total])).encode())

    def finish_all(self) -> None:
        """Starts the open buckets, and waits for all buckets. Ends the round of `gather_order`.

        Called by GradientSync at the end of a round: by `wait()`, and with ZeRO 2 and 3 at the end of `paused()`.
        """
        for bucket in self._open_buckets.values():
            self._start(bucket)
        self._open_buckets.clear()
        while self._in_flight:
            self._finish_oldest()
        self._gathers_before.clear()
        self._first_gather = self._count_gathers()

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
        new bucket: whether two passes are added before or after the ranks' sum must not depend on the size of buckets.
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

        At most `MOST_IN_FLIGHT` buckets are in flight: older ones are finished first, which frees their buffers.
        """
        if len(self._in_flight) > 1:
            self._before_wait()
        while len(self._in_flight) >= MOST_IN_FLIGHT:
            self._finish_oldest()
        self._gathers_before.append(self._count_gathers())
        bucket.start()
        self._in_flight.append(bucket)

    def _finish_oldest(self) -> None:
        """Waits for the oldest bucket in flight, and gives the sums to the leaves."""
        for leaf, grad in self._in_flight.popleft().finish():
            leaf.add_reduced(grad)


def merge_forms(first: Forms, second: Forms) -> Forms:
    """The forms in `first` or `second`, each form once. Called by `GradientBuckets.add` and `send_remaining`."""
    return second if not first or first == second else tuple(dict.fromkeys((*first, *second)))
