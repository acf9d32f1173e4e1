"""`GradientSync`: reduces gradients to the parameters' layouts, or to shards of these, in buckets while backward runs.

pending_gradient.py has the state of each parameter, sending.py the buckets, gradient_presence.py the messages between
ranks with different gradients.
"""

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

from ..moving.dtensor import dtensor_spec, layout_of, wrap_with_spec
from ..planning.layouts import sharded_over
from ..world.groups import this_rank
from . import fused_adam  # noqa: F401  imported to register fused optimizer steps on DTensors
from .buckets import Route
from .gathered_modules import gathering_units
from .gradient_presence import GradientPresence
from .pending_gradient import Form, GradPlaceholder, Leaf, as_dtensor, grad_of, in_dtype, sum_of, weakly
from .sending import Sending, complete

BUCKET_BYTES = 25 * 2**20  # the default of torch's DistributedDataParallel (bucket_cap_mb=25)

_synchronized = WeakTensorKeyDictionary()  # by parameter, a weak reference to its GradientSync

_syncs: weakref.WeakSet[GradientSync] = weakref.WeakSet()


class GradientSync:
    """Reduces the gradient of every DTensor parameter of `module` to the parameter's layout, while backward runs.

    A gradient is Partial over each axis on which every rank computes only an addend of the gradient, as over the axes
    that shard the batch. Over an axis that shards the parameter, the gradient is sharded. Its layout says which.
    Gradients with the same reduction share a bucket. The hook of a bucket's last gradient starts the bucket's
    collective. At most two buckets are under way: before a third starts, the oldest is finished, also in backward.
    `wait()` finishes the rest.
    Once a gradient is put into a bucket, `.grad` holds a placeholder until `wait()`; reading numbers from the
    placeholder raises RuntimeError, as in an update by hand, torch's `clip_grad_norm_` or a GradScaler. A gradient not
    yet sent can be in `.grad` as a partial sum: in `paused()`, or behind a parameter that has no gradient yet. A
    gradient that has the target layout from the start is in `.grad` at once. Between backward and `wait()`, a torch
    optimizer's step and Weft's `clip_grad_norm_` raise RuntimeError for all of these.
    Further forward and backward passes before `wait()` add up. To give up a step, call `sync.wait()` and then
    `zero_grad()`; `zero_grad()` alone does not clear gradients under way.

    shard_over: axis, or axes, over which gradients of replicated parameters end as shards: reduce-scattered instead of
        all-reduced. Each axis cuts the first dim that it divides evenly, else dim 0.
    bucket_bytes: the size of a bucket, counted on the first rank of the gradients' mesh, so that all ranks close
        buckets alike.
    dtype: in which gradients are summed over ranks, by default their own. The result has the parameter's dtype.

    Where `module` gathers sharded parameters (ParallelPlan's zero), the gradient of the full copy is reduced into the
    shard's `.grad`: with zero=1 as above. With zero=2 and 3 every backward pass sends its gradients, also in
    `paused()`; the sum is in the shard's `.grad` when `paused()` or `wait()` ends.
    Ranks may have gradients of different parameters, as with an expert for each rank, or a skipped batch. Every rank
    gets the sum over the ranks with a gradient; a parameter without a gradient on any rank keeps `.grad`. All ranks of
    the parameters' meshes call `wait()` equally often.
    Communication: gradients are sent in the reverse order of `module`'s parameters. So ranks send alike even if their
    hooks run in different orders, as where only some ranks compile a block. An early gradient waits for all gradients
    before it, except those of parameters that had no gradient on any rank in the last step. In `wait()` each rank
    writes a list of its gradients to the store of the process group. A rank with all of them reads nothing, unless it
    must send one again or has one in several layouts. A rank that lacks one waits for the lists of all ranks of the
    parameters' meshes. A list may also be written in backward, before the wait for an older bucket. Freeze unused
    parameters (`requires_grad_(False)`): otherwise every rank lacks a gradient, and waits for all lists in every
    `wait()`.
    Raises ValueError for a bucket without room, an axis on no parameter's mesh, or a parameter that has a GradientSync
    already, as two would reduce its gradient twice; `close()` the first.

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
            raise ValueError(f"dtype is {dtype}; give a floating-point dtype, in which gradients are summed")
        axes = (shard_over,) if isinstance(shard_over, str) else tuple(shard_over or ())
        named: dict[str, DTensor] = {n: p for n, p in module.named_parameters() if isinstance(p, DTensor)}
        for name, parameter in named.items():
            if parameter.requires_grad and _sync_of(parameter) is not None:
                raise ValueError(
                    f"parameter {name} has a GradientSync already, and two would reduce the gradient twice; close() "
                    f"that one first"
                )
        known = {axis for parameter in named.values() for axis in layout_of(parameter).mesh.axis_names}
        for axis in axes:
            if named and axis not in known:  # on one process, without any DTensor, nothing is cut
                raise ValueError(
                    f"shard_over names axis {axis!r}; the parameters' meshes have {', '.join(sorted(known))}"
                )
        self._units = gathering_units(module)
        self._full = {shard: full for unit in self._units for shard, full in unit.full_parameters().items()}
        leaves = []
        for name, home in named.items():
            full = self._full.get(home)
            leaves.append(
                Leaf(
                    parameter=home if full is None else as_dtensor(full.leaf),
                    home=home,
                    name=name,
                    mesh=layout_of(home).mesh,
                    is_here=this_rank() in layout_of(home).mesh,
                    target=sharded_over(layout_of(home), home.shape, axes),
                    sends_every_pass=full is not None and not full.accumulate_grad,
                )
            )
        self._leaves = tuple(reversed(leaves))  # about backward's order, and equal on every rank
        self._unhooked = list(enumerate(self._leaves))  # leaves without hooks yet, with their indices
        # By the parameter's id, the leaves whose local gradients may bypass `.grad`.
        self._leaf_of_id: dict[int, Leaf] = {}
        # The leaves to send, in order: those with a gradient on any rank in the last step that had gradients; at first,
        # all that require one. `_next`: the index in `_expected` of the next to send.
        self._expected = tuple(leaf for leaf in self._leaves if leaf.home.requires_grad)
        self._next = 0
        # Whether a parameter's gradients may be sent several times in a step.
        self._sends_repeatedly = any(leaf.sends_every_pass for leaf in leaves)
        self._presence = GradientPresence(self._leaves)
        before_waiting = weakly(self._publish_before_waiting)
        self._sending = Sending(bucket_bytes, dtype, before_waiting)
        self._in_wait = False  # whether `wait()` runs
        self._paused = False
        self._unsynchronized = False  # whether any leaf has a gradient since `wait()`
        _syncs.add(self)
        self._hooks: list[RemovableHandle] = [register_optimizer_step_pre_hook(weakly(self._before_step))]
        weakref.finalize(self, self._hooks[0].remove)
        self._hook_parameters()

    def _hook_parameters(self) -> None:
        """Sets hooks on parameters with `requires_grad` and without hooks."""
        own = weakref.ref(self)
        claimed = False
        for number, leaf in self._unhooked:
            if not leaf.home.requires_grad or _sync_of(leaf.home) is not None:
                continue
            claimed = True
            leaf.is_hooked, _synchronized[leaf.home] = True, own
            if leaf.parameter is leaf.home:
                self._leaf_of_id[id(leaf.home)] = leaf
            else:
                self._full[leaf.home].follow(leaf.home)
                self._full[leaf.home].synchronized_by = own
            parameter = leaf.parameter
            self._hooks.append(parameter.register_hook(_before_hook(own, number)))  # type: ignore[no-untyped-call]
            self._hooks.append(parameter.register_post_accumulate_grad_hook(_after_hook(own, number)))  # type: ignore[no-untyped-call]
        if claimed:
            self._unhooked = [(number, leaf) for number, leaf in self._unhooked if not leaf.is_hooked]

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, backward passes only accumulate; the next pass outside, or `wait()`, synchronizes the sum.

        With zero=2 and 3 every pass inside sends its gradients, and leaving the block synchronizes all gradients, by a
        message and collectives: all ranks leave it equally often.
        Sharded parameters (ParallelPlan's zero=1 and 2) are gathered once for all forward passes from here to `wait()`.
        Do not change parameters before `wait()`: a change by `.data` would not be gathered again.
        """
        before, self._paused = self._paused, True
        for unit in self._units:
            unit.model_gathering.fix(self)
        try:
            yield
        finally:
            self._paused = before
        if self._sends_repeatedly:
            self._synchronize()

    def wait(self) -> None:
        """Waits until every gradient has its target layout in `.grad`.

        Communication: this rank's list of gradients (see GradientSync), and what backward has left: collectives of
        buckets, and a reshard for each unsent gradient that needs more than a reduce-scatter and an all-reduce.
        """
        self._synchronize()
        for unit in self._units:
            unit.model_gathering.fixed_by.discard(self)

    def _synchronize(self) -> None:
        """`wait()`, but more backward passes of the step may follow."""
        self._hook_parameters()
        self._in_wait = True
        try:
            leaf_forms = complete(self._leaves, self._expected[self._next :], self._sending, self._presence)
            self._sending.finish()
        finally:
            self._in_wait = False
        if any(leaf_forms):
            self._expected = tuple(leaf for leaf, forms in zip(self._leaves, leaf_forms, strict=True) if forms)
        self._next = 0
        self._presence.end_step()
        synced_leaves = []
        for leaf, forms in zip(self._leaves, leaf_forms, strict=True):
            leaf.end_step()
            if forms:
                leaf.last_forms = forms
            else:
                leaf.synced = None  # all zeros: no rank has a gradient
            for older in leaf.older_grads.values():  # in the target layout: `complete` has sent all others
                leaf.add_synced(older)
            leaf.older_grads.clear()
            if leaf.synced is None:
                continue
            home = leaf.home
            direct = grad_of(home)  # in the target layout from the start
            if direct is not None:
                leaf.add_synced(direct)
            synced, leaf.synced = leaf.synced, None
            dtype = getattr(home, "grad_dtype", home.dtype)  # None takes any dtype
            home.grad = synced if dtype in (None, synced.dtype) else in_dtype(synced, dtype)
            synced_leaves.append(leaf)
        self._unsynchronized = False
        for unit in self._units:
            unit.release_idle()
        for leaf in synced_leaves:
            leaf.call_hooks()

    def close(self) -> None:
        """Removes the hooks. Call `wait()` before: a placeholder in `.grad` becomes None, and its gradient is lost."""
        for hook in self._hooks:
            hook.remove()
        for leaf in self._leaves:
            if not leaf.is_hooked:
                continue
            _synchronized.pop(leaf.home, None)  # type: ignore[no-untyped-call]
            if leaf.home in self._full:
                self._full[leaf.home].synchronized_by = None
            if isinstance(leaf.home.grad, GradPlaceholder):
                leaf.home.grad = None
        for unit in self._units:
            unit.model_gathering.fixed_by.discard(self)
        self._hooks.clear()
        self._leaves = self._expected = ()
        self._leaf_of_id.clear()
        self._unhooked.clear()
        self._unsynchronized = False

    def _before_step(self, optimizer: Optimizer, *_: object) -> None:
        groups = optimizer.param_groups
        self._refuse(
            (p for group in groups for p in group["params"]), f"{type(optimizer).__name__}.step()", "optimizer.step()"
        )

    def _refuse(self, parameters: Iterable[Tensor], what: str, then: str) -> None:
        """Raises RuntimeError where gradients of `parameters` are not synchronized yet.

        what: the refused call, for the error. then: the call that needs the gradients, for the remedy.
        """
        waiting: dict[Tensor, str] = {leaf.home: leaf.name for _, leaf in self._unhooked if _has_partial_grad(leaf)}
        if self._unsynchronized:
            waiting |= {leaf.home: leaf.name for leaf in self._leaves if leaf.has_new_grad}
        if not waiting:
            return
        names = [waiting[parameter] for parameter in parameters if parameter in waiting]
        if names:
            more = f" and {len(names) - 1} other{'s' if len(names) > 2 else ''}" if len(names) > 1 else ""
            raise RuntimeError(
                f"{what} before sync.wait(): the gradients of {names[0]}{more} are still partial sums, or being "
                f"reduced, and {what} would miss them; call sync.wait() between loss.backward() and {then}. To drop "
                f"these gradients, call sync.wait() and then zero_grad()"
            )

    def _keep_older_grad(self, leaf: Leaf, incoming: Tensor) -> None:
        """Moves the gradient in `.grad` to `older_grads` if the incoming gradient has another layout.

        Autograd would add the two otherwise, and DTensor would reshard one of them unasked.
        """
        older = leaf.grad
        if older is None:  # `.grad` is a placeholder
            leaf.parameter.grad = None
            return
        if dtensor_spec(older) is dtensor_spec(as_dtensor(incoming)):
            return
        layout = layout_of(older)
        if layout != layout_of(as_dtensor(incoming)):
            leaf.parameter.grad = None
            leaf.older_grads[layout] = sum_of(leaf.older_grads.get(layout), older)

    def _on_grad_accumulated(self, leaf: Leaf) -> None:
        leaf.has_new_grad = self._unsynchronized = True
        if self._paused and not leaf.sends_every_pass:
            return
        # No gradient came: torch runs the hook also where a function returned None, as in zero-bubble backward.
        if leaf.grad is None and not leaf.older_grads:
            return
        self._send_ready(leaf)

    def _take_local_grad(self, parameter: DTensor, part: Tensor, spec: Any) -> bool:
        """See `local_grad_callback`."""
        leaf = self._leaf_of_id.get(id(parameter))
        if leaf is None or leaf.local_grad is not None or leaf.older_grads or self._paused:
            return False
        if parameter.grad is not None or self._sending.dtype not in (None, part.dtype) or not leaf.has_only_our_hooks:
            return False
        if leaf.route_cache is None or leaf.route_cache[0] is not spec:
            leaf.route_cache = spec, Route.of(wrap_with_spec(part, spec), leaf.target)
        if leaf.local_grad_forms[0] is not spec:
            leaf.local_grad_forms = spec, (Form(layout_of(wrap_with_spec(part, spec)), part.dtype),)
        route = leaf.route_cache[1]
        if route is None or not any(route.reduction.axes):  # a gradient in the target layout goes to `.grad`
            return False
        leaf.local_grad = part
        leaf.put_placeholder()
        leaf.has_new_grad = self._unsynchronized = True
        self._send_ready(leaf)
        return True

    def _send_ready(self, leaf: Leaf) -> None:
        leaf.ready_count += 1
        while self._next < len(self._expected) and (expected := self._expected[self._next]).ready_count:
            self._sending.add(expected)
            expected.ready_count -= 1
            self._next += 1
            if self._next == len(self._expected) and self._sends_repeatedly:
                self._next = 0

    def _publish_before_waiting(self) -> None:
        """Publishes, in backward, the gradients sent so far: a rank without any gradient learns to give zeros.

        Called in backward before the wait for an older bucket. That bucket may need zeros from a rank without
        gradients, which itself waits for this message.
        """
        if not self._in_wait:
            # Before the first `wait()` other ranks do not know the forms of the gradients.
            anew = not any(leaf.last_forms for leaf in self._leaves)
            self._presence.publish_early(tuple([leaf.sent for leaf in self._leaves]), anew=anew)


def refuse_before_wait(parameters: Iterable[Tensor], what: str) -> None:
    """Raises RuntimeError where a gradient of `parameters` waits for GradientSync's `wait()`.

    what: the refused call, for the error.
    """
    for sync in list(_syncs):
        sync._refuse(parameters, what, what)


def _has_partial_grad(leaf: Leaf) -> bool:
    """Whether a parameter without hooks, frozen when GradientSync was made, has a partial sum in `.grad`."""
    grad = leaf.grad if leaf.home.requires_grad and _sync_of(leaf.home) is None else None
    return grad is not None and any(placement.is_partial() for placement in grad.placements)


def _sync_of(parameter: Tensor) -> GradientSync | None:
    found: GradientSync | None = _synchronized[parameter]() if parameter in _synchronized else None
    return found


def local_grad_callback(parameter: DTensor | None) -> Callable[[DTensor, Tensor, Any], bool] | None:
    """The callback that hands a local gradient straight to the parameter's GradientSync, skipping `.grad`.

    None for a parameter without a GradientSync. The callback serves all parameters of the GradientSync. Call it in a
    backward pass, at most once for each parameter, with the parameter, this rank's part of the gradient and the
    gradient's `dtensor_spec`. It returns False where the gradient must go by `.grad`.
    """
    alive = None if parameter is None else _sync_of(parameter)
    return None if alive is None else alive._take_local_grad


def _before_hook(sync: weakref.ref[GradientSync], number: int) -> Callable[[Tensor | None], None]:
    """The hook that runs before autograd adds a gradient to a leaf's `.grad`. It holds no tensor; see `weakly`."""

    def before(incoming: Tensor | None) -> None:  # None where a function returned no gradient
        alive = sync()
        if alive is not None and incoming is not None:
            leaf = alive._leaves[number]
            if leaf.parameter.grad is not None:
                alive._keep_older_grad(leaf, incoming)

    return before


def _after_hook(sync: weakref.ref[GradientSync], number: int) -> Callable[[Tensor], None]:
    """The hook that runs after autograd has added a leaf's gradient to `.grad`. It holds no tensor; see `weakly`."""

    def ready(_: Tensor) -> None:
        alive = sync()
        if alive is not None:
            alive._on_grad_accumulated(alive._leaves[number])

    return ready
