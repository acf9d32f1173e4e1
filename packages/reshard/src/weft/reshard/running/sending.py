"""Gradients on their way to their layouts: buckets that fill, leave, and arrive."""

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

    bucket_bytes, dtype: as of GradientSync. before_waiting: called before a full bucket's collective is waited for.
    """

    def __init__(self, bucket_bytes: int, dtype: torch.dtype | None, before_waiting: Callable[[], None]) -> None:
        self._bucket_bytes, self.dtype, self._before_waiting = bucket_bytes, dtype, before_waiting
        self._filling: dict[Hashable, Bucket[Leaf]] = {}
        self._sent: deque[Bucket[Leaf]] = deque()

    def add(self, leaf: Leaf) -> None:
        """Puts the leaf's pending gradients into buckets; a gradient in its target layout stays."""
        forms = leaf.pending()
        leaf.sent = forms if not leaf.sent or leaf.sent == forms else tuple(dict.fromkeys((*leaf.sent, *forms)))
        if leaf.addend is not None:
            assert leaf.travels is not None and leaf.travels[1] is not None, "it was found when the addend was taken"
            self._put(leaf, leaf.addend, leaf.travels[1])
            leaf.addend = None
        for layout, older in leaf.aside.items():
            self._bring(leaf, older, layout == leaf.target)
        leaf.aside.clear()
        grad = leaf.grad
        is_there = grad is not None and leaf.find(grad)[2]
        if grad is not None and not (is_there and leaf.parameter is leaf.home):
            leaf.parameter.grad = None
            self._bring(leaf, grad, is_there)
        if leaf.home.grad is None:
            leaf.stand()

    def add_zeros(self, leaf: Leaf, form: Form) -> None:
        """Puts zeros into a bucket: this rank's addend of a gradient that only the rest of the ranks have."""
        self._bring(leaf, leaf.zeros(form), form.layout == leaf.target)

    def finish(self) -> None:
        """Starts the remaining buckets, and waits for all of them."""
        for bucket in self._filling.values():
            self._send(bucket)
        self._filling.clear()
        while self._sent:
            self._finish(self._sent.popleft())

    def _bring(self, leaf: Leaf, grad: DTensor, is_there: bool) -> None:
        """is_there: whether the gradient has its layout."""
        if self.dtype is not None and grad.dtype != self.dtype:
            grad = in_dtype(grad, self.dtype)
        if is_there:
            leaf.hold(grad)
            return
        if leaf.travels is None or leaf.travels[0] is not kind_of(grad):
            leaf.travels = kind_of(grad), Route.of(grad, leaf.target)
        route = leaf.travels[1]
        if route is None:
            leaf.hold(reshard(grad, placements=leaf.target))
            return
        self._put(leaf, memory_of(grad), route)

    def _put(self, leaf: Leaf, part: Tensor, route: Route) -> None:
        """Into a bucket, which is sent when it is full."""
        bucket = self._filling.get(route.key)
        if bucket is None:
            bucket = self._filling[route.key] = Bucket(leaf.home.device_mesh)
        bucket.add(leaf, part, route)
        leaf.bucket = bucket
        if bucket.nbytes >= self._bucket_bytes:
            self._send(self._filling.pop(route.key))

    def _send(self, bucket: Bucket[Leaf]) -> None:
        """Start this bucket's collective. At most two are in flight: older buckets are finished first, which frees their buffers."""
        while len(self._sent) > 1:
            self._before_waiting()
            self._finish(self._sent.popleft())
        bucket.start()
        self._sent.append(bucket)

    def _finish(self, bucket: Bucket[Leaf]) -> None:
        for leaf, grad in bucket.finish():
            leaf.hold(grad)
