"""Gradients brought to their parameters' layouts, or to shards of them, in buckets, while backward goes on."""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary
from weft.mesh import Layout, Replicate, Shard

from . import fused  # noqa: F401  optimizers' steps on the parameters, once it is there
from .api import reshard
from .buckets import Bucket, Route
from .dtensor import kind_of, layout_of, wrap
from .units import units_of

BUCKET_BYTES = 25 * 2**20  # the default of torch's DistributedDataParallel (bucket_cap_mb=25)

_synchronized = WeakTensorKeyDictionary()  # by parameter, a weak reference to its GradientSync: two would reduce twice

_alive: weakref.WeakSet[GradientSync] = weakref.WeakSet()


class GradientSync:
    """Brings the gradient of every DTensor parameter of `module` to the parameter's layout.

    A gradient is Partial over every axis that sharded something its parameter was applied to, whichever dim that was;
    it says so itself, so no dim is looked for. Gradients that go the same way travel together: one collective for each
    bucket, started from the hook of the last gradient in it, finished by `wait()`. Until then `.grad` is None, and a step of
    a torch optimizer that holds such a parameter, or `clip_grad_norm_` of it, is a RuntimeError. An update by hand finds no
    gradient. A further forward pass is no error: backward passes add up until `wait()`. A step is given up by `sync.wait()` and
    then `zero_grad()`, which alone clears nothing that is on its way.

    shard_over: axes (one, or several) over which the gradient of a parameter that is replicated there ends as a shard:
        reduce-scattered instead of all-reduced, over the first dim that divides evenly, else dim 0.
    bucket_bytes: of the gradients on the first rank of their mesh, so that buckets close alike on all ranks.
    dtype: in which they are added up over ranks, where it is not their own; what arrives has the parameter's.
    Where `module` has its parameters on shards that it gathers (ParallelPlan's zero), a gradient goes from the whole parameter to
    the shard's `.grad`: with zero=1 as any other, with 2 and 3 in every backward pass, those that only accumulate too.
    Communication: in the reverse of the order in which `module` has its parameters, so that ranks whose hooks run in other orders,
    as where one rank compiles a block and another does not, send the same. A gradient that comes early waits for those before it,
    but for parameters that had none in the step before.
    Raises ValueError for a bucket without room, an axis that no parameter's mesh has, or a parameter that has another
    GradientSync, which would reduce it twice; `close()` that one first.

        sync = GradientSync(model)  # kept for as long as the model is trained
        loss.backward(); sync.wait(); optimizer.step()
        with sync.paused(): ...   # backward passes that only accumulate
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        shard_over: str | Sequence[str] | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        dtype: torch.dtype | None = None,
    ) -> None:
        if bucket_bytes < 1:
            raise ValueError(f"bucket_bytes is {bucket_bytes}; a bucket holds at least 1 byte")
        if dtype is not None and not dtype.is_floating_point:
            raise ValueError(f"dtype is {dtype}; gradients are added up in a floating-point one")
        self._bucket_bytes, self._dtype = bucket_bytes, dtype
        axes = (shard_over,) if isinstance(shard_over, str) else tuple(shard_over or ())
        named: dict[str, DTensor] = {
            n: p for n, p in module.named_parameters() if isinstance(p, DTensor) and p.requires_grad
        }
        for name, parameter in named.items():
            if parameter in _synchronized and _synchronized[parameter]() is not None:
                raise ValueError(
                    f"parameter {name} has a GradientSync already, which reduces it; close() that one first"
                )
        known = {axis for parameter in named.values() for axis in layout_of(parameter).mesh.axis_names}
        for axis in axes:
            if named and axis not in known:  # without any DTensor, on one process, there is nothing to cut
                raise ValueError(
                    f"shard_over names axis {axis!r}; the parameters' meshes have {', '.join(sorted(known))}"
                )
        self._units = units_of(module)
        wholes = {shard: whole for unit in self._units for shard, whole in unit.wholes().items()}
        # By the parameter that autograd gives gradients to: the one that they are for, and the layout that they end in.
        leaves = {
            parameter: wholes[parameter].leaf if parameter in wholes else parameter for parameter in named.values()
        }
        self._homes: dict[DTensor, DTensor] = {_dtensor(leaf): parameter for parameter, leaf in leaves.items()}
        self._targets: dict[DTensor, Layout] = {
            leaf: sharded_over(layout_of(home), home.shape, axes) for leaf, home in self._homes.items()
        }
        self._at_once = {
            _dtensor(whole.leaf) for whole in wholes.values() if not whole.sums
        }  # whole gradients never add up
        self._aside: dict[DTensor, dict[Layout, DTensor]] = {}  # earlier gradients, in other layouts than `.grad`
        self._lying: dict[DTensor, tuple[object, Layout]] = {}  # how the last gradient of a parameter lay
        self._routes: dict[DTensor, tuple[object, Route | None]] = {}  # and how one that was sent travels
        self._order = tuple(reversed(self._targets))  # about that of backward, and the same on every rank
        self._expected = self._order  # those whose gradients others wait for: those that came in the last step
        self._next = 0  # of the expected, the one that is sent next
        self._came: set[DTensor] = set()  # since `wait()`
        self._arrived: Counter[DTensor] = Counter()  # how often, and was not sent
        self._filling: dict[Hashable, Bucket] = {}
        self._sent: deque[Bucket] = deque()
        self._held: dict[DTensor, DTensor] = {}  # synchronized before, waiting for what is on its way
        self._paused = False
        self._names = {_dtensor(leaves[parameter]): name for name, parameter in named.items()}
        self._unsynchronized: set[DTensor] = set()  # parameters that a backward pass gave gradients to since `wait()`
        _alive.add(self)
        self._hooks: list[RemovableHandle] = [register_optimizer_step_pre_hook(_weakly(self._before_step))]
        weakref.finalize(self, self._hooks[0].remove)
        for parameter in self._targets:
            _synchronized[self._homes[parameter]] = weakref.ref(self)
            before, ready = partial(_weakly(self._before), parameter), _weakly(self._ready)
            self._hooks.append(parameter.register_hook(before))  # type: ignore[no-untyped-call]
            self._hooks.append(parameter.register_post_accumulate_grad_hook(ready))  # type: ignore[no-untyped-call]

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Backward passes inside only accumulate; the next one outside, or `wait()`, synchronizes the sum."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before
        if self._at_once:
            self.wait()

    def wait(self) -> None:
        """Returns when every gradient has its layout.

        Communication: the collectives not yet started, one for each bucket; a reshard for each gradient whose way is
        neither an all-reduce nor a reduce-scatter.
        """
        for parameter in self._order:
            self._add(parameter)
        if self._came:
            self._expected = tuple(each for each in self._order if each in self._came)
        self._next = 0
        self._came.clear()
        self._arrived.clear()
        for bucket in self._filling.values():
            self._send(bucket)
        while self._sent:
            self._finish(self._sent.popleft())
        for parameter in list(self._held):
            home = self._homes[parameter]
            if home.grad is not None:  # in its layout from the start
                self._accumulate(parameter, _gradient(home))
            held = self._held[parameter]
            dtype = getattr(home, "grad_dtype", home.dtype)  # None: any will do
            home.grad = held if dtype in (None, held.dtype) else _in_dtype(held, dtype)
        self._filling.clear()
        self._held.clear()
        self._unsynchronized.clear()
        for unit in self._units:
            unit.rest()

    def close(self) -> None:
        """Takes the hooks off the parameters, whose gradients stay as they are. Call `wait()` before."""
        for hook in self._hooks:
            hook.remove()
        for parameter in self._targets:
            _synchronized.pop(self._homes[parameter], None)  # type: ignore[no-untyped-call]
        self._hooks.clear()
        self._targets.clear()
        self._order = self._expected = ()
        self._came.clear()
        self._arrived.clear()
        self._homes.clear()
        self._names.clear()
        self._lying.clear()
        self._routes.clear()
        self._unsynchronized.clear()

    def _before_step(self, optimizer: Optimizer, *_: object) -> None:
        if self._unsynchronized:
            groups = optimizer.param_groups
            self._refuse(
                [p for group in groups for p in group["params"]],
                f"{type(optimizer).__name__}.step()",
                "optimizer.step()",
            )

    def _refuse(self, parameters: Iterable[Tensor], what: str, then: str) -> None:
        """Raises RuntimeError where `what` would pass over parameters, or take addends of their gradients."""
        waiting: dict[Tensor, DTensor] = {self._homes[parameter]: parameter for parameter in self._unsynchronized}
        held = [waiting[parameter] for parameter in parameters if parameter in waiting]
        if held:
            others = f" and {len(held) - 1} other{'s' if len(held) > 2 else ''}" if len(held) > 1 else ""
            raise RuntimeError(
                f"{what} before sync.wait(): the gradients of {self._names[held[0]]}{others} are still addends, or on their "
                f"way, and it would not see them; call sync.wait() between loss.backward() and {then}. To give these "
                f"gradients up, sync.wait() and then zero_grad()"
            )

    def _before(self, parameter: DTensor, incoming: Tensor | None) -> None:
        """Sets an older gradient in another layout aside: added up, DTensor would move one of them unasked."""
        if parameter.grad is None or incoming is None:  # None: a function gave this parameter no gradient
            return
        older = _gradient(parameter)
        if kind_of(older) is kind_of(_dtensor(incoming)):
            return
        layout = layout_of(older)
        if layout != layout_of(_dtensor(incoming)):
            parameter.grad = None
            by_layout = self._aside.setdefault(parameter, {})
            by_layout[layout] = _sum(by_layout.get(layout), older)

    def _ready(self, parameter: Tensor) -> None:
        arrived = _dtensor(parameter)
        self._unsynchronized.add(arrived)
        if self._paused and arrived not in self._at_once:
            return
        if arrived.grad is None and arrived not in self._aside:  # it waits, as those of a zero-bubble schedule do
            return
        self._came.add(arrived)
        self._arrived[arrived] += 1
        while self._arrived[expected := self._expected[self._next]]:
            self._add(expected)
            self._arrived[expected] -= 1
            self._next = (self._next + 1) % len(self._expected)

    def _add(self, parameter: DTensor) -> None:
        """Sends the parameter's gradients on their way, but for one that has its layout."""
        for layout, grad in self._aside.pop(parameter, {}).items():
            self._bring(parameter, grad, layout)
        if parameter.grad is not None:
            grad = _gradient(parameter)
            layout = self._layout_of(parameter, grad)
            if layout != self._targets[parameter]:
                parameter.grad = None
                self._bring(parameter, grad, layout)

    def _bring(self, parameter: DTensor, grad: DTensor, layout: Layout) -> None:
        target = self._targets[parameter]
        if self._dtype is not None and grad.dtype != self._dtype:
            grad = _in_dtype(grad, self._dtype)
        if layout == target:
            self._accumulate(parameter, grad)
            return
        kind, route = self._routes.get(parameter, (None, None))
        if kind is not kind_of(grad):
            kind, route = self._routes[parameter] = kind_of(grad), Route.of(grad, target)
        if route is None:
            self._accumulate(parameter, reshard(grad, placements=target))
            return
        bucket = self._filling.setdefault(route.key, Bucket(route.key))
        bucket.add(parameter, grad, route)
        if bucket.nbytes >= self._bucket_bytes:
            self._send(self._filling.pop(route.key))

    def _layout_of(self, parameter: DTensor, grad: DTensor) -> Layout:
        kind, layout = self._lying.get(parameter, (None, None))
        if layout is None or kind is not kind_of(grad):
            layout = layout_of(grad)
            self._lying[parameter] = kind_of(grad), layout
        return layout

    def _send(self, bucket: Bucket) -> None:
        """Starts it; of those that were sent before, one stays on its way, and what others brought gives its memory back."""
        while len(self._sent) > 1:
            self._finish(self._sent.popleft())
        bucket.start()
        self._sent.append(bucket)

    def _finish(self, bucket: Bucket) -> None:
        for parameter, grad in bucket.finish():
            self._accumulate(parameter, grad)

    def _accumulate(self, parameter: DTensor, grad: DTensor) -> None:
        self._held[parameter] = _sum(self._held.get(parameter), grad)


def refuse_before_wait(parameters: Iterable[Tensor], what: str) -> None:
    """Raises RuntimeError where the gradients of some of them wait for their `GradientSync.wait()`."""
    for sync in list(_alive):
        if sync._unsynchronized:
            sync._refuse(parameters, what, what)


def sharded_over(layout: Layout, shape: Sequence[int], axes: Sequence[str]) -> Layout:
    """`layout` with shards over those of `axes` that it replicates; a scalar stays as it is."""
    for axis in axes:
        if axis in layout.mesh.axis_names and layout[axis] == Replicate() and shape:
            size = layout.mesh.axis_size(axis)
            local = layout.largest_local_shape(shape)
            dims = [dim for dim, extent in enumerate(local) if extent % size == 0]
            layout = layout.replace(**{axis: Shard(dims[0] if dims else 0)})
    return layout


def _in_dtype(grad: DTensor, dtype: torch.dtype) -> DTensor:
    with torch.no_grad():
        return wrap(grad.to_local().to(dtype), layout_of(grad), grad.shape)


def _sum(first: DTensor | None, second: DTensor) -> DTensor:
    """The sum of two gradients in one layout."""
    with torch.no_grad():
        return second if first is None else _dtensor(first + second)


def _weakly(method: Callable[..., None]) -> Callable[..., None]:
    """`method` as long as its object lives: the garbage collector does not see what torch's gradient hooks hold."""
    found = weakref.WeakMethod(method)

    def call(*arguments: Any) -> None:
        alive = found()
        if alive is not None:
            alive(*arguments)

    return call


def _gradient(parameter: DTensor) -> DTensor:
    assert parameter.grad is not None, "asked for where there is one"
    return _dtensor(parameter.grad)


def _dtensor(tensor: Tensor) -> DTensor:
    assert isinstance(tensor, DTensor), "parameters that are hooked are DTensors, and their gradients are"
    return tensor
