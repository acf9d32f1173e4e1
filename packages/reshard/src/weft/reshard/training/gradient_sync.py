"""`GradientSync`: reduces gradients to the parameters' layouts, or to shards of these, in buckets while backward runs.

pending_gradient.py has the state of each parameter, send_order.py the order of sending, gradient_buckets.py the
buckets, gradient_presence.py the messages between ranks with different gradients.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from ..moving.dtensor import layout_of, wrap_with_spec
from . import fused_adam  # noqa: F401  imported to register fused optimizer steps on DTensors
from .exact_step import check_exact_step
from .gathered_modules import gathering_units
from .gradient_buckets import GradientBuckets, check_buckets
from .gradient_presence import GradientPresence
from .hooks import before_step, takes_none, weak_hook
from .pending_gradient import GradientForm, GradPlaceholder, Leaf, as_dtensor, grad_of
from .send_order import SendOrder, send_remaining
from .separate_uses import UsesOfStep

BUCKET_BYTES = 25 * 2**20  # the default of torch's DistributedDataParallel (bucket_cap_mb=25)

_synchronized = WeakTensorKeyDictionary()  # {parameter: weak reference to the GradientSync}
_syncs: weakref.WeakSet[GradientSync] = weakref.WeakSet()


class GradientSync:
    """Reduces the gradient of every DTensor parameter of `module` to the parameter's layout, while backward runs.

        sync = GradientSync(model)  # kept for as long as the model is trained
        loss.backward(); sync.wait(); optimizer.step()
        with sync.paused(): ...   # backward passes only accumulate

    Made by a program, or by weft.models' Trainer or `forward_backward`; step/find_gradients.py pauses and waits.
    A gradient's layout says over which axes to reduce. The gradient is Partial over each axis on which every rank
    computes only an addend, as over the axes sharding the batch, and sharded over an axis sharding the parameter. The
    target layout of a gradient is the parameter's layout, further sharded over `shard_over`.
    Gradients of several backward passes before `wait()` are added. To give up a step, call `sync.wait()` and then
    `zero_grad()`; `zero_grad()` alone does not clear gradients under way.

    shard_over: axis or axes along which gradients of replicated parameters are reduce-scattered; None: all-reduced. The
        first local dim that the axis's size divides is sharded, else dim 0. A scalar stays whole.
    bucket_bytes: the size of a bucket, counted on the first rank of the gradients' mesh: all ranks close buckets alike.
    dtype: in which gradients are summed over ranks; None: their own. The result has the parameter's dtype.

    Before `wait()`: `.grad` holds the gradient if backward computed the target layout; otherwise a partial sum, and
        once the sum is in a bucket, a placeholder. Reading numbers from the placeholder raises RuntimeError, as in an
        update by hand, torch's `clip_grad_norm_` or a GradScaler. A torch optimizer's step and Weft's
        `clip_grad_norm_` raise RuntimeError for all new gradients.
    Buckets: gradients with the same reduction share a bucket. The hook of a bucket's last gradient starts the bucket's
        collective. At most eight buckets are under way: the oldest is finished before a ninth starts, in backward too.
    ZeRO: where `module` gathers sharded parameters (the `zero` of ParallelPlan), the gradient of the full copy is
        reduced into the shard's `.grad`. With zero=1 the full gradient accumulates, and is sent as any gradient. With
        zero=2 and 3 every backward pass sends gradients, also in `paused()`; the sum is in the shard's `.grad` when
        `paused()` or `wait()` ends.
    Missing gradients: ranks may have gradients of different parameters, as with an expert for each rank, or a skipped
        batch. Every rank gets the sum over the ranks with a gradient; a parameter without a gradient on any rank keeps
        `.grad`. All ranks of the parameters' meshes call `wait()` equally often. With zero=3 outside of a pipeline,
        backward gathers parameters between the sums: all ranks then need gradients of the same parameters. Otherwise
        ranks may order gathers and sums differently, and `wait()` raises RuntimeError on a rank without a gradient.
    Unused parameters: freeze these (`requires_grad_(False)`). Otherwise every rank lacks a gradient, and waits in every
        `wait()` for the lists of all ranks (see Communication).

    Communication: every rank sends gradients in the reverse order of `module`'s parameters. Hooks may run in different
    orders, as where only some ranks compile a block. A gradient waits for all earlier gradients in the reverse order.
    Nothing waits for a parameter without a gradient on any rank in the last step. In `wait()` each rank writes a list
    of gradients to the store of the process group. A rank reads the lists of all ranks of the parameters' meshes, and
    waits for them, only if the rank lacks the gradient of a trainable parameter, has a gradient in several layouts, or
    has a gradient to send a second time in the step; and with zero=2 and 3, if the number of passes is not the last
    step's. A list may also be written in backward, before the wait for an older bucket.
    A copied or pickled model has None in place of its GradientSync.
    Raises ValueError for a bucket without room, an axis on no parameter's mesh, or a parameter already with a
    GradientSync, as two would reduce the gradient twice; `close()` the first.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        shard_over: str | Sequence[str] | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_buckets(bucket_bytes, dtype)
        if not (shard_over is None or isinstance(shard_over, str | Sequence)):
            raise ValueError(f"shard_over is {shard_over!r}; give the name of an axis, or a sequence of names")
        axes = (shard_over,) if isinstance(shard_over, str) else tuple(shard_over or ())
        named: dict[str, DTensor] = {n: p for n, p in module.named_parameters() if isinstance(p, DTensor)}
        for name, parameter in named.items():
            if parameter.requires_grad and _sync_of(parameter) is not None:
                raise ValueError(
                    f"parameter {name} has a GradientSync already, and two would reduce the gradient twice; close() "
                    f"that one first"
                )
        mesh_axes = {axis for parameter in named.values() for axis in layout_of(parameter).mesh.axis_names}
        for axis in axes:
            if named and axis not in mesh_axes:  # on one process, without any DTensor, nothing is cut
                raise ValueError(
                    f"shard_over names axis {axis!r}; the parameters' meshes have {', '.join(sorted(mesh_axes))}"
                )
        self._units = gathering_units(module)
        # Under ZeRO, each shard's full copy.
        self._full_copies = {shard: full for unit in self._units for shard, full in unit.full_parameters().items()}
        self._uses = UsesOfStep(module, self._full_copies, axes, self)  # of shared parameters
        of_parameters = [Leaf.of(name, each, self._full_copies.get(each), axes) for name, each in named.items()]
        leaves = [*of_parameters, *self._uses.leaves]
        self._leaves = tuple(reversed(leaves))  # about backward's order, and equal on every rank
        self._unhooked = list(enumerate(self._leaves))  # leaves without hooks yet, with their indices
        self._leaf_of_id: dict[int, Leaf] = {}  # by the parameter's id, hooked leaves not under ZeRO
        self._order = SendOrder(self._leaves)
        self.sends_every_pass = self._order.sends_every_pass  # any parameter has ZeRO 2 or 3; for step/record.py too
        self._presence = GradientPresence(self._leaves)
        gatherings = list({unit.model_gathering for unit in self._units})
        self._buckets = GradientBuckets(
            bucket_bytes,
            dtype,
            weak_hook(self._publish_before_wait),
            lambda: sum(each.started_gathers for each in gatherings),
        )
        self._gather_hook = weak_hook(self._before_gather)
        for each in gatherings:
            each.gather_hooks.append(self._gather_hook)
        self._in_wait = self._paused = False  # whether `wait()` runs; whether a `paused()` is open
        self._unsynchronized = False  # whether `was_reached` of any leaf is true
        _syncs.add(self)
        self._hooks: list[RemovableHandle] = [before_step.add(self._before_step)]
        self._hook_parameters()

    def __deepcopy__(self, memo: object) -> None:
        """None: a copied model has no GradientSync, since hooks belong to the parameters of the original."""

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Pickled as None, as in `__deepcopy__`."""
        return type(None), ()

    def _hook_parameters(self) -> None:
        """Sets hooks on parameters with `requires_grad` and without hooks."""
        weak_self = weakref.ref(self)
        self._uses.update_requires_grad()
        for index, leaf in self._unhooked:
            if not leaf.parameter.requires_grad or _sync_of(leaf.parameter) is not None:
                continue
            if self._uses.is_elsewhere(leaf.parameter):
                continue
            leaf.is_hooked, _synchronized[leaf.parameter] = True, weak_self
            if leaf.accumulator is leaf.parameter:
                self._leaf_of_id[id(leaf.parameter)] = leaf
            elif leaf.parameter in self._full_copies:
                self._full_copies[leaf.parameter].update_requires_grad(leaf.parameter)
                self._full_copies[leaf.parameter].synchronized_by = weak_self
            before, after = _before_hook(weak_self, index), _after_hook(weak_self, index)
            self._hooks.append(leaf.accumulator.register_hook(before))  # type: ignore[no-untyped-call]
            self._hooks.append(leaf.accumulator.register_post_accumulate_grad_hook(after))  # type: ignore[no-untyped-call]
        self._unhooked = [(index, leaf) for index, leaf in self._unhooked if not leaf.is_hooked]

    def has_parameters_of(self, module: nn.Module) -> bool:
        """False once a program replaced a DTensor parameter of `module`; `forward_backward` then calls `close()`."""
        known = {id(leaf.parameter) for leaf in self._leaves}
        return all(id(each) in known for each in module.parameters() if isinstance(each, DTensor))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context manager: backward passes in the block only accumulate; the next pass outside, or `wait()`, sends.

        Under ZeRO 2 and 3, however, every pass in the block sends gradients, and leaving the block synchronizes all
        gradients, by a message and collectives. All ranks must leave such blocks equally often.
        Under ZeRO 1 and 2, parameters are gathered once for all forward passes from here to `wait()`. Do not change
        parameters before `wait()`: forward passes might compute with the old values, as after a change by `.data`.
        """
        before, self._paused = self._paused, True
        for unit in self._units:
            unit.model_gathering.promise_fixed(self)
        try:
            yield
        finally:
            self._paused = before
        if self.sends_every_pass:
            self._synchronize()

    def wait(self) -> None:
        """Waits until `.grad` of every parameter holds the gradient in the target layout.

        Parameters unfrozen since the last `wait()` get hooks here, and gradients of separate uses are added.
        Communication: this rank's list of gradients (see GradientSync), and collectives left over from backward: of
        buckets, and a reshard for each unsent gradient without a Route.
        """
        self._synchronize(is_last=True)
        for unit in self._units:
            unit.model_gathering.promise_holders.discard(self)

    def _synchronize(self, *, is_last: bool = False) -> None:
        """Brings all gradients so far to the target layouts, in `.grad`.

        Called by `wait()`, and at the end of `paused()` where every pass sends: then more passes of the step follow.
        is_last: whether no pass of the step follows: then the gradients of separate uses are complete.
        """
        self._hook_parameters()
        self._in_wait = True
        try:
            leaf_forms, turns = send_remaining(self._order, self._buckets, self._presence, paused=not is_last)
            self._buckets.finish_all()
            self._presence.check_gather_order()
        finally:
            self._in_wait = False
        self._order.end_round(leaf_forms, turns, paused=not is_last)
        self._presence.advance()
        reduced_leaves = []
        for leaf, forms in zip(self._leaves, leaf_forms, strict=True):
            leaf.reset()
            if forms:
                leaf.last_forms = forms
            else:
                leaf.reduced_grad = leaf.earlier_grad  # zeros were added: no rank has a gradient
            for older in leaf.older_grads:  # only in the target layout: `send_remaining` sends other layouts
                leaf.add_reduced(older)
            leaf.older_grads.clear()
            leaf.earlier_grad = None
            if leaf.reduced_grad is None:
                continue
            parameter = leaf.parameter
            grad_in_target = grad_of(parameter)  # a gradient that was in the target layout from the start
            if grad_in_target is not None:
                leaf.add_reduced(grad_in_target)
            parameter.grad, leaf.reduced_grad = leaf.reduced_grad, None
            reduced_leaves.append(leaf)
        self._unsynchronized = False
        if is_last:
            self._uses.add_to_parameters()
        for unit in self._units:
            unit.release_idle()
        for leaf in reduced_leaves:
            leaf.call_parameter_hooks()

    def close(self) -> None:
        """Removes the hooks. Call `wait()` before: a placeholder in `.grad` becomes None, and the gradient is lost."""
        for hook in self._hooks:
            hook.remove()
        for leaf in self._leaves:
            if not leaf.is_hooked:
                continue
            _synchronized.pop(leaf.parameter, None)  # type: ignore[no-untyped-call]
            if leaf.parameter in self._full_copies:
                self._full_copies[leaf.parameter].synchronized_by = None
            if isinstance(leaf.parameter.grad, GradPlaceholder):
                leaf.parameter.grad = None
        for gathering in {unit.model_gathering for unit in self._units}:
            gathering.promise_holders.discard(self)
            gathering.gather_hooks = [hook for hook in gathering.gather_hooks if hook is not self._gather_hook]
        self._uses.close()
        self._hooks.clear()
        self._leaves = ()
        self._order = SendOrder(())
        self._leaf_of_id.clear()
        self._unhooked.clear()
        self._unsynchronized = False

    def _before_step(self, optimizer: Optimizer) -> None:
        check_exact_step(optimizer)
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        self._raise_if_unsynchronized(parameters, f"{type(optimizer).__name__}.step()", "optimizer.step()")

    def _raise_if_unsynchronized(self, parameters: Iterable[Tensor], call: str, user_call: str) -> None:
        """Raises RuntimeError where gradients of `parameters` are not synchronized yet.

        call: the refused call. user_call: the same call as written in a user's program, for the remedy.
        """
        unhooked = [leaf for _, leaf in self._unhooked if _has_partial_grad(leaf)]
        hooked = [leaf for leaf in self._leaves if leaf.was_reached] if self._unsynchronized else []
        pending: dict[Tensor, str] = {leaf.parameter: leaf.name for leaf in (*unhooked, *hooked)}
        names = [pending[parameter] for parameter in parameters if parameter in pending]
        if names:
            more = f" and {len(names) - 1} other{'s' if len(names) > 2 else ''}" if len(names) > 1 else ""
            raise RuntimeError(
                f"{call} before sync.wait(): the gradients of {names[0]}{more} are still partial sums, or being "
                f"reduced, and {call} would miss them; call sync.wait() between loss.backward() and {user_call}. To "
                f"drop these gradients, call sync.wait() and then zero_grad()"
            )

    def _on_grad_accumulated(self, leaf: Leaf) -> None:
        leaf.was_reached = self._unsynchronized = True
        if self._paused and not leaf.sends_every_pass:
            return
        # No gradient came: torch runs the hook also where a function returned None, as in zero-bubble backward.
        if leaf.grad is None and not leaf.older_grads:
            return
        self._order.send_ready(leaf, self._buckets, paused=self._paused)

    def _before_gather(self) -> None:
        """Called in backward before a gather. Sends zeros for gradients that this pass will not give.

        Peers with all gradients start sums before the gather. Without zeros, this rank starts sums in `wait()`.
        """

        def is_over(leaf: Leaf) -> bool:
            full = self._full_copies.get(leaf.parameter)
            return full is not None and not any(unit.expects_backward for unit in full.units)

        if self.sends_every_pass:
            self._order.send_absent(self._buckets, is_over, paused=self._paused)

    def _accept_local_grad(self, parameter: DTensor, part: Tensor, spec: Any) -> bool:
        """Puts this rank's part of a gradient into a bucket, without `.grad`; see `local_grad_callback`.

        Returns False, and does nothing, where the gradient must go by `.grad`: in `paused()`; where another gradient of
        the parameter is there already; where the part must be cast first; where a program's own hooks on the parameter
        must see the gradient; and where the gradient is in the target layout, or without a Route.
        """
        leaf = self._leaf_of_id.get(id(parameter))
        if leaf is None or leaf.local_grad is not None or leaf.older_grads or self._paused:
            return False
        if parameter.grad is not None or self._buckets.dtype not in (None, part.dtype) or not leaf.has_only_our_hooks:
            return False
        route = leaf.route_of(part, spec)
        if leaf.local_grad_forms[0] is not spec:
            leaf.local_grad_forms = spec, (GradientForm(layout_of(wrap_with_spec(part, spec)), part.dtype),)
        if route is None or not any(route.reduction.axes):  # a gradient in the target layout goes to `.grad`
            return False
        leaf.local_grad = route.collapse(part)
        leaf.put_placeholder()
        leaf.was_reached = self._unsynchronized = True
        self._order.send_ready(leaf, self._buckets, paused=self._paused)
        return True

    def _publish_before_wait(self) -> None:
        """Called by GradientBuckets with two buckets under way, before another: publishes gradients sent in backward.

        A rank without any gradient is in `wait()` already, and waits for this message. The message tells the rank to
        give zeros, without which the collectives of the buckets might not end.
        """
        if not self._in_wait:
            # In the first step, these messages alone tell a rank the forms of zeros: every message is needed.
            is_first_step = not any(leaf.last_forms for leaf in self._leaves)
            forms = tuple([leaf.sent_forms for leaf in self._leaves])
            self._presence.publish_early(forms, self._order.sent, repeat=is_first_step or self._order.turn > 0)


def refuse_before_wait(parameters: Iterable[Tensor], call: str) -> None:
    """Called by Weft's `clip_grad_norm_`. Raises RuntimeError where a gradient of `parameters` waits for `wait()`.

    call: the refused call, as written in the user's program.
    """
    for sync in list(_syncs):
        sync._raise_if_unsynchronized(parameters, call, call)


def _has_partial_grad(leaf: Leaf) -> bool:
    """Whether a parameter without hooks, frozen when GradientSync was made, has a partial sum in `.grad`."""
    grad = leaf.grad if leaf.parameter.requires_grad and _sync_of(leaf.parameter) is None else None
    return grad is not None and any(placement.is_partial() for placement in grad.placements)


def _sync_of(parameter: Tensor) -> GradientSync | None:
    sync: GradientSync | None = _synchronized[parameter]() if parameter in _synchronized else None
    return sync


def local_grad_callback(parameter: DTensor | None) -> Callable[[DTensor, Tensor, Any], bool] | None:
    """A callback to hand a local gradient straight to the parameter's GradientSync, skipping `.grad`.

    Called by weft.models' parallel/local_modules.py, whose functions compute weight gradients on local tensors:
    building a DTensor for `.grad` takes time. None for a parameter without a GradientSync. The callback serves all
    parameters of the same GradientSync, and takes the parameter, the local gradient, and the gradient's `dtensor_spec`,
    at most once in a backward pass. False means that the caller must return the gradient to autograd.
    """
    sync = None if parameter is None else _sync_of(parameter)
    return None if sync is None else sync._accept_local_grad


def _before_hook(sync: weakref.ref[GradientSync], index: int) -> Callable[[Tensor | None], Tensor | None]:
    """The hook that runs before autograd adds a gradient to a leaf's `.grad`. Holds no tensor; see `weak_hook`."""

    def before(incoming: Tensor | None) -> Tensor | None:  # None where a function returned no gradient
        alive = sync()
        if alive is None or incoming is None:
            return None
        return alive._leaves[index].gradient_for_autograd(as_dtensor(incoming))

    return takes_none(before)


def _after_hook(sync: weakref.ref[GradientSync], index: int) -> Callable[[Tensor], None]:
    """The hook that runs after autograd has added a leaf's gradient to `.grad`. Holds no tensor; see `weak_hook`."""

    def ready(_: Tensor) -> None:
        alive = sync()
        if alive is not None:
            alive._on_grad_accumulated(alive._leaves[index])

    return takes_none(ready)
