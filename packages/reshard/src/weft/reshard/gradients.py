"""Gradients brought to their parameters' layouts: Partial -> Replicate, in buckets, while backward goes on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from weft.mesh import Layout, Partial, Replicate

from .api import reshard
from .dtensor import layout_of, wrap
from .groups import axis_group, this_rank
from .layouts import without_trivial_axes

BUCKET_BYTES = 25 * 2**20  # the default of torch's DistributedDataParallel (bucket_cap_mb=25)


class GradientSync:
    """Brings the gradient of every DTensor parameter of `module` to the parameter's layout.

    A gradient is Partial over every axis that sharded something its parameter was applied to, whichever dim that was;
    it says so itself, so no dim is looked for. Gradients that are Partial over the same axes travel together: one
    all-reduce per bucket and axis, started from the hook of the last gradient in it, finished by `wait()`.

    sync = GradientSync(model)
    loss.backward(); sync.wait(); optimizer.step()
    with sync.paused(): ...   # backward passes that only accumulate
    """

    def __init__(self, module: nn.Module, *, bucket_bytes: int = BUCKET_BYTES) -> None:
        if bucket_bytes < 1:
            raise ValueError(f"bucket_bytes is {bucket_bytes}; a bucket holds at least 1 byte")
        self._bucket_bytes = bucket_bytes
        self._parameters = [p for p in module.parameters() if isinstance(p, DTensor) and p.requires_grad]
        self._filling: dict[_Key, _Bucket] = {}
        self._sent: list[_Bucket] = []
        self._synced: set[Tensor] = set()
        self._paused = False
        for parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(self._ready)  # type: ignore[no-untyped-call]

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Backward passes inside only accumulate; the next one outside, or `wait()`, synchronizes the sum."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def wait(self) -> None:
        """Returns when every gradient has its parameter's layout.

        Communication: the all-reduces not yet started, one per bucket and axis; a reshard for each gradient whose
        way to its parameter's layout is not an all-reduce.
        """
        for parameter in self._parameters:
            if parameter.grad is not None and parameter not in self._synced:
                self._add(parameter)
        for bucket in self._filling.values():
            self._send(bucket)
        for bucket in self._sent:
            bucket.finish()
        self._filling.clear()
        self._sent.clear()
        self._synced.clear()

    def _ready(self, parameter: Tensor) -> None:
        if self._paused:
            self._synced.discard(parameter)  # what an earlier backward sent lacks this gradient
        else:
            self._add(parameter)

    def _add(self, parameter: Tensor) -> None:
        assert isinstance(parameter, DTensor), "only DTensor parameters are hooked"
        grad = _gradient(parameter)
        self._synced.add(parameter)
        src, dst = layout_of(grad), layout_of(parameter)
        if src == dst:
            return
        axes = summed_axes(src, dst)
        if not axes or this_rank() not in src.mesh:
            parameter.grad = reshard(grad, placements=dst)
            return
        key = (src.mesh, axes, grad.dtype, grad.device)
        bucket = self._filling.setdefault(key, _Bucket(axes))
        bucket.add(parameter, dst)
        if bucket.nbytes >= self._bucket_bytes:
            self._send(self._filling.pop(key))

    def _send(self, bucket: _Bucket) -> None:
        bucket.start()
        self._sent.append(bucket)


def summed_axes(src: Layout, dst: Layout) -> tuple[str, ...]:
    """The axes to all-reduce over on the way from `src` to `dst`; none where the way is another."""
    src, dst = without_trivial_axes(src), without_trivial_axes(dst)
    if src.mesh != dst.mesh or src.shard_order != dst.shard_order:
        return ()
    changed = [axis for axis in src.mesh.axis_names if src[axis] != dst[axis]]
    if any(src[axis] != Partial("sum") or dst[axis] != Replicate() for axis in changed):
        return ()
    return tuple(changed)


def _gradient(parameter: DTensor) -> DTensor:
    grad = parameter.grad
    assert isinstance(grad, DTensor), "a gradient that is ready is there, and that of a DTensor is a DTensor"
    return grad


_Key = tuple[object, tuple[str, ...], torch.dtype, torch.device]


@dataclass
class _Bucket:
    """Gradients that are Partial over the same axes, and the flat tensor they travel in."""

    axes: tuple[str, ...]
    parameters: list[DTensor] = field(default_factory=list)
    layouts: list[Layout] = field(default_factory=list)
    nbytes: int = 0

    def add(self, parameter: DTensor, layout: Layout) -> None:
        self.parameters.append(parameter)
        self.layouts.append(layout)
        self.nbytes += _gradient(parameter).to_local().nbytes

    def start(self) -> None:
        with torch.no_grad():
            self._flat = torch.cat([_gradient(parameter).to_local().reshape(-1) for parameter in self.parameters])
        self._work = self._all_reduce(self.axes[0])

    def finish(self) -> None:
        self._work.wait()
        for axis in self.axes[1:]:
            self._all_reduce(axis).wait()
        with torch.no_grad():
            offset = 0
            for parameter, layout in zip(self.parameters, self.layouts, strict=True):
                local = parameter.to_local()
                part = self._flat[offset : offset + local.numel()].view(local.shape)
                parameter.grad = wrap(part, layout, parameter.shape)
                offset += local.numel()

    def _all_reduce(self, axis: str) -> dist.Work:
        group = axis_group(self.parameters[0].device_mesh, axis)
        work: dist.Work | None = dist.all_reduce(self._flat, group=group, async_op=True)
        assert work is not None, "async_op=True returns the work"
        return work
