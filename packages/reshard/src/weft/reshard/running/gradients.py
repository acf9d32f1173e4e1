"""Gradients brought to their parameters' layouts, or to shards of them, in buckets, while backward goes on."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from ..planning.layouts import sharded_over
from . import fused  # noqa: F401  optimizers' steps on the parameters, once it is there
from .attendance import Attendance
from .buckets import Route
from .completing import complete
from .dtensor import kind_of, layout_of, of_kind
from .groups import this_rank
from .leaves import Form, Leaf, as_dtensor, grad_of, in_dtype, sum_of
from .sending import Sending
from .units import units_of
from .waiting import Waiting
from .weakly import weakly

BUCKET_BYTES = 25 * 2**20  # the default of torch's DistributedDataParallel (bucket_cap_mb=25)

_synchronized = WeakTensorKeyDictionary()  # by parameter, a weak reference to its GradientSync: two would reduce twice

_alive: weakref.WeakSet[GradientSync] = weakref.WeakSet()


class GradientSync:
    """Brings the gradient of every DTensor parameter of `module` to the parameter's layout.

    A gradient is Partial over every axis that sharded something its parameter was applied to, whichever dim that was;
    it says so itself, so no dim is looked for. Gradients that go the same way travel together: one collective for each
    bucket, started from the hook of the last gradient in it, finished by `wait()`. Until then `.grad` holds no numbers, and what
    asks it for some is a RuntimeError: a step of a torch optimizer or an update by hand, torch's `clip_grad_norm_` or Weft's, a
    GradScaler. A gradient that has its layout from the start is there at once. A further forward pass is no error: backward passes
    add up until `wait()`. A step is given up by `sync.wait()` and then `zero_grad()`, which alone clears nothing that is on its way.

    shard_over: axes (one, or several) over which the gradient of a parameter that is replicated there ends as a shard:
        reduce-scattered instead of all-reduced, over the first dim that divides evenly, else dim 0.
    bucket_bytes: of the gradients on the first rank of their mesh, so that buckets close alike on all ranks.
    dtype: in which they are added up over ranks, where it is not their own; what arrives has the parameter's.
    Where `module` has its parameters on shards that it gathers (ParallelPlan's zero), a gradient goes from the whole parameter to
    the shard's `.grad`: with zero=1 as any other, with 2 and 3 in every backward pass, those that only accumulate too.
    Ranks may have gradients of different parameters, as with an expert for each rank, or a skipped batch: every rank ends with the sum
    over the ranks with a gradient, and a parameter without a gradient on any rank keeps `.grad`. All ranks of the parameters' meshes
    call `wait()` equally often.
    Communication: in the reverse of the order in which `module` has its parameters, so that ranks whose hooks run in other orders,
    as where one rank compiles a block and another does not, send the same. A gradient that comes early waits for those before it,
    but for parameters that no rank had a gradient of in the step before. In `wait()` each rank lists its gradients in one message to
    the store of the process group, and waits for no answer; a rank without some gradient reads the messages of all, a fraction of a
    millisecond for each. Freeze parameters that are never used (`requires_grad_(False)`).
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
        axes = (shard_over,) if isinstance(shard_over, str) else tuple(shard_over or ())
        named: dict[str, DTensor] = {n: p for n, p in module.named_parameters() if isinstance(p, DTensor)}
        for name, parameter in named.items():
            if parameter.requires_grad and _sync_of(parameter) is not None:
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
        self._wholes = {shard: whole for unit in self._units for shard, whole in unit.wholes().items()}
        leaves = []
        for name, home in named.items():
            whole = self._wholes.get(home)
            leaves.append(
                Leaf(
                    parameter=home if whole is None else as_dtensor(whole.leaf),
                    home=home,
                    name=name,
                    mesh=layout_of(home).mesh,
                    is_here=this_rank() in layout_of(home).mesh,
                    target=sharded_over(layout_of(home), home.shape, axes),
                    at_once=whole is not None and not whole.sums,
                )
            )
        self._leaves = tuple(reversed(leaves))  # about the order of backward, and the same on every rank
        self._frozen = list(enumerate(self._leaves))  # those that are not ours, by number
        self._of: dict[int, Leaf] = {}  # by the identity of the parameter, those whose addends need not come by `.grad`
        # Those that had a gradient on any rank in the last step, which are sent in this order; and which of them is next.
        self._expected = tuple(leaf for leaf in self._leaves if leaf.home.requires_grad)
        self._next = 0
        self._repeats = any(
            leaf.at_once for leaf in leaves
        )  # whether backward sends a parameter's gradients more than once
        self._attendance = Attendance(self._leaves)
        told = weakly(self._tell_before_waiting)
        self._sending = Sending(bucket_bytes, dtype, told)
        self._waits = False  # whether `wait()` runs
        self._paused = False
        self._unsynchronized = False  # whether any leaf waits
        _alive.add(self)
        self._hooks: list[RemovableHandle] = [register_optimizer_step_pre_hook(weakly(self._before_step))]
        weakref.finalize(self, self._hooks[0].remove)
        self._claim()

    def _claim(self) -> None:
        """Sets the hooks of parameters that learn, and have none yet."""
        own = weakref.ref(self)
        claimed = False
        for number, leaf in self._frozen:
            if not leaf.home.requires_grad or _sync_of(leaf.home) is not None:
                continue
            claimed = True
            leaf.is_ours, _synchronized[leaf.home] = True, own
            if leaf.parameter is leaf.home:
                self._of[id(leaf.home)] = leaf
            else:
                self._wholes[leaf.home].follow(leaf.home)
                self._wholes[leaf.home].synchronized_by = own
            parameter = leaf.parameter
            self._hooks.append(parameter.register_hook(_before_of(own, number)))  # type: ignore[no-untyped-call]
            self._hooks.append(parameter.register_post_accumulate_grad_hook(_ready_of(own, number)))  # type: ignore[no-untyped-call]
        if claimed:
            self._frozen = [(number, leaf) for number, leaf in self._frozen if not leaf.is_ours]

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Backward passes inside only accumulate; the next one outside, or `wait()`, synchronizes the sum.

        Parameters that lie on shards (ParallelPlan's zero=1 and 2) are gathered once for the forward passes inside and for those that
        follow until `wait()`: between these passes parameters do not change, as their gradients have one sum.
        """
        before, self._paused = self._paused, True
        for unit in self._units:
            unit.gathered_by.fix(self)
        try:
            yield
        finally:
            self._paused = before
        if self._repeats:
            self._synchronize()

    def wait(self) -> None:
        """Returns when every gradient has its layout.

        Communication: the collectives not yet started, one for each bucket; a reshard for each gradient whose way is
        neither an all-reduce nor a reduce-scatter.
        """
        self._synchronize()
        for unit in self._units:
            unit.gathered_by.fixed_by.discard(self)

    def _synchronize(self) -> None:
        """As `wait()`, where more passes may follow."""
        self._claim()
        self._waits = True
        try:
            there_is = complete(self._leaves, self._expected[self._next :], self._sending, self._attendance)
            self._sending.finish()
        finally:
            self._waits = False
        if any(there_is):
            self._expected = tuple(leaf for leaf, forms in zip(self._leaves, there_is, strict=True) if forms)
        self._next = 0
        self._attendance.leave()
        found = []
        for leaf, forms in zip(self._leaves, there_is, strict=True):
            leaf.end()
            if forms:
                leaf.known = forms
            else:
                leaf.held = None  # zeros, where no rank has a gradient
            for older in leaf.aside.values():  # of earlier steps, in its layout
                leaf.hold(older)
            leaf.aside.clear()
            if leaf.held is None:
                continue
            home = leaf.home
            there = grad_of(home)  # in its layout from the start
            if there is not None:
                leaf.hold(there)
            held, leaf.held = leaf.held, None
            dtype = getattr(home, "grad_dtype", home.dtype)  # None: any will do
            home.grad = held if dtype in (None, held.dtype) else in_dtype(held, dtype)
            found.append(leaf)
        self._unsynchronized = False
        for unit in self._units:
            unit.rest()
        for leaf in found:
            leaf.call_hooks()

    def close(self) -> None:
        """Takes the hooks off the parameters, whose gradients stay as they are. Call `wait()` before."""
        for hook in self._hooks:
            hook.remove()
        for leaf in self._leaves:
            if not leaf.is_ours:
                continue
            _synchronized.pop(leaf.home, None)  # type: ignore[no-untyped-call]
            if leaf.home in self._wholes:
                self._wholes[leaf.home].synchronized_by = None
            if isinstance(leaf.home.grad, Waiting):
                leaf.home.grad = None
        for unit in self._units:
            unit.gathered_by.fixed_by.discard(self)
        self._hooks.clear()
        self._leaves = self._expected = ()
        self._of.clear()
        self._frozen.clear()
        self._unsynchronized = False

    def _before_step(self, optimizer: Optimizer, *_: object) -> None:
        groups = optimizer.param_groups
        self._refuse(
            (p for group in groups for p in group["params"]), f"{type(optimizer).__name__}.step()", "optimizer.step()"
        )

    def _refuse(self, parameters: Iterable[Tensor], what: str, then: str) -> None:
        """Raises RuntimeError where `what` would pass over parameters, or take addends of their gradients."""
        waiting: dict[Tensor, str] = {leaf.home: leaf.name for _, leaf in self._frozen if _has_addend(leaf)}
        if self._unsynchronized:
            waiting |= {leaf.home: leaf.name for leaf in self._leaves if leaf.waits}
        if not waiting:
            return
        held = [waiting[parameter] for parameter in parameters if parameter in waiting]
        if held:
            others = f" and {len(held) - 1} other{'s' if len(held) > 2 else ''}" if len(held) > 1 else ""
            raise RuntimeError(
                f"{what} before sync.wait(): the gradients of {held[0]}{others} are still addends, or on their "
                f"way, and it would not see them; call sync.wait() between loss.backward() and {then}. To give these "
                f"gradients up, sync.wait() and then zero_grad()"
            )

    def _set_aside(self, leaf: Leaf, incoming: Tensor) -> None:
        """An older gradient that lies in another layout: added up, DTensor would move one of them unasked."""
        older = leaf.grad
        if older is None:  # on its way
            leaf.parameter.grad = None
            return
        if kind_of(older) is kind_of(as_dtensor(incoming)):
            return
        layout = layout_of(older)
        if layout != layout_of(as_dtensor(incoming)):
            leaf.parameter.grad = None
            leaf.aside[layout] = sum_of(leaf.aside.get(layout), older)

    def _ready(self, leaf: Leaf) -> None:
        leaf.waits = self._unsynchronized = True
        if self._paused and not leaf.at_once:
            return
        if leaf.grad is None and not leaf.aside:  # it waits, as those of a zero-bubble schedule do
            return
        self._arrived(leaf)

    def _take(self, parameter: DTensor, part: Tensor, kind: Any) -> bool:
        """See `takes_addends`."""
        leaf = self._of.get(id(parameter))
        if leaf is None or leaf.addend is not None or leaf.aside or self._paused:
            return False
        if parameter.grad is not None or self._sending.dtype not in (None, part.dtype) or not leaf.is_seen_by_us_alone:
            return False
        if leaf.travels is None or leaf.travels[0] is not kind:
            leaf.travels = kind, Route.of(of_kind(part, kind), leaf.target)
        if leaf.taken[0] is not kind:
            leaf.taken = kind, (Form(layout_of(of_kind(part, kind)), part.dtype),)
        route = leaf.travels[1]
        if route is None or not any(route.way.axes):  # one that has its layout is there at once
            return False
        leaf.addend = part
        leaf.stand()
        leaf.waits = self._unsynchronized = True
        self._arrived(leaf)
        return True

    def _arrived(self, leaf: Leaf) -> None:
        leaf.arrived += 1
        while self._next < len(self._expected) and (expected := self._expected[self._next]).arrived:
            self._sending.add(expected)
            expected.arrived -= 1
            self._next += 1
            if self._next == len(self._expected) and self._repeats:
                self._next = 0

    def _tell_before_waiting(self) -> None:
        """Tells, in backward, the gradients sent so far: a rank without any gradient learns to take part."""
        if not self._waits:
            anew = not any(
                leaf.known for leaf in self._leaves
            )  # nothing is known of the forms before the first `wait()`
            self._attendance.begin(tuple([leaf.sent for leaf in self._leaves]), anew=anew)


def refuse_before_wait(parameters: Iterable[Tensor], what: str) -> None:
    """Raises RuntimeError where the gradients of some of them wait for their `GradientSync.wait()`."""
    for sync in list(_alive):
        sync._refuse(parameters, what, what)


def _has_addend(leaf: Leaf) -> bool:
    """Whether a parameter frozen at the making of its GradientSync has an addend in `.grad`."""
    grad = leaf.grad if leaf.home.requires_grad and _sync_of(leaf.home) is None else None
    return grad is not None and any(placement.is_partial() for placement in grad.placements)


def _sync_of(parameter: Tensor) -> GradientSync | None:
    found: GradientSync | None = _synchronized[parameter]() if parameter in _synchronized else None
    return found


def takes_addends(parameter: DTensor | None) -> Callable[[DTensor, Tensor, Any], bool] | None:
    """What takes the gradients of a parameter, and of others of its GradientSync, without `.grad` in between; None where none would.

    It is called in a backward pass with a parameter, this rank's part of its gradient, and the `kind_of` that has, once a pass: it takes
    that along, or says False, where the gradient is to go by `.grad`, as autograd brings it.
    """
    alive = None if parameter is None else _sync_of(parameter)
    return None if alive is None else alive._take


def _before_of(sync: weakref.ref[GradientSync], number: int) -> Callable[[Tensor | None], None]:
    """What a leaf does with its older gradient before the next is added. It holds no tensor; see `weakly`."""

    def before(incoming: Tensor | None) -> None:  # None: a function gave this parameter no gradient
        alive = sync()
        if alive is not None and incoming is not None:
            leaf = alive._leaves[number]
            if leaf.parameter.grad is not None:
                alive._set_aside(leaf, incoming)

    return before


def _ready_of(sync: weakref.ref[GradientSync], number: int) -> Callable[[Tensor], None]:
    """What a leaf does once its gradient is added. It holds no tensor; see `weakly`."""

    def ready(_: Tensor) -> None:
        alive = sync()
        if alive is not None:
            alive._ready(alive._leaves[number])

    return ready
