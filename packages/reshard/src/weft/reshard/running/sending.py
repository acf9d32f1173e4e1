"""`Sending`: fills buckets with gradients, starts the collectives of full buckets, and gives the sums to leaves."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .api import reshard
from .buckets import Bucket, Route
from .dtensor import kind_of, memory_of
from .leaves import Form, Leaf, in_dtype


class Sending:
    """The buckets of a GradientSync.

    bucket_bytes, dtype: see GradientSync. before_waiting: called before a full bucket's collective is waited for.
    """

    def __init__(self, bucket_bytes: int, dtype: torch.dtype | None, before_waiting: Callable[[], None]) -> None:
        self._bucket_bytes, self.dtype, self._before_waiting = bucket_bytes, dtype, before_waiting
        self._open_buckets: dict[Hashable, Bucket[Leaf]] = {}  # by `Route.key`
        self._in_flight: deque[Bucket[Leaf]] = deque()  # oldest first

    def add(self, leaf: Leaf) -> None:
        """Puts the leaf's unsent gradients into buckets. A gradient in the target layout needs no bucket."""
        forms = leaf.pending()
        leaf.sent = forms if not leaf.sent or leaf.sent == forms else tuple(dict.fromkeys((*leaf.sent, *forms)))
        if leaf.local_grad is not None:
            assert leaf.route_cache is not None and leaf.route_cache[1] is not None, "set with the local gradient"
            self._add_to_bucket(leaf, leaf.local_grad, leaf.route_cache[1])
            leaf.local_grad = None
        for layout, older in leaf.in_other_layouts.items():
            self._add_grad(leaf, older, layout == leaf.target)
        leaf.in_other_layouts.clear()
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
        if leaf.route_cache is None or leaf.route_cache[0] is not kind_of(grad):
            leaf.route_cache = kind_of(grad), Route.of(grad, leaf.target)
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
