"""Messages between pipeline stages.

A message carries the tensors of a microbatch from each rank of a stage to the peer: the rank at the same place in the
neighboring stage. The receiver gets the message's form as JSON: structure, shapes, dtypes and layouts. JSON and not
pickle, because forms are published in a store to which strangers may be able to write, and a pickle can run any
program.
"""

from __future__ import annotations

import json
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from weft.mesh import Layout, ProcessMesh
from weft.reshard import layout_of
from weft.reshard.extension import (
    dtensor_spec,
    group_for,
    memory_of,
    wait_for,
    world,
    world_cache,
    wrap,
    wrap_with_spec,
)

from ..styles import PIPELINE_AXIS

_PLAIN = (bool, int, float, str, type(None))  # types known to JSON
_SEQUENCES: Mapping[str, Callable[[Iterable[Any]], Any]] = {"tuple": tuple, "list": list}
_MAPPINGS: Mapping[str, Callable[[Iterable[Any]], Any]] = {"dict": dict, "OrderedDict": OrderedDict}


NOT_SENT: Any = object()  # received in place of a message that a failed rank could not send


class Channel:
    """This rank's end of a channel: the messages between two neighboring stages in one direction.

    Each channel has a process group of its own, so channels never wait for each other. Sends return at once. The
    receiver posts the next receive ahead of time. The form of a message is published in the world's store, once for
    each kind of microbatch, with the first message of the kind. Both ranks have the same coordinates in the meshes of
    their stages, so shards correspond.
    mesh: the mesh of the stages of this rank.
    forms: the forms of messages that are known beforehand, by kind.
    """

    def __init__(
        self,
        name: str,
        ranks: tuple[int, int],
        rank: int,
        mesh: ProcessMesh,
        device: torch.device,
        forms: Mapping[Any, Any],
    ) -> None:
        members = (min(ranks), max(ranks))
        self._group = group_for(f"pipeline {name}", members, (PIPELINE_AXIS,))
        self._peer = 1 - members.index(rank)  # the rank in the group of the channel's other end
        self._name, self._mesh, self._device = name, mesh, device
        cache = world_cache()
        number = cache[self._group] = cache.get(self._group, 0) + 1  # counts models with stages on these two ranks
        self._key = f"pipeline {number}: {name}, ranks {members}"  # of the forms in the world's store
        self._forms: dict[Any, Any] = dict(forms)  # by kind: the message with a `_SentTensor` in place of each tensor
        # By kind: the last message's structure and `_leaf_form`s, which are compared faster than forms.
        self._leaf_forms: dict[Any, Any] = {}
        self._expected: dict[Any, _Expected] = {}
        self._num_unsent: dict[Any, int] = {}  # by kind: messages that were not sent, before the form was published
        self._sent: deque[tuple[dist.Work, Tensor]] = deque()  # sends under way, with their buffers
        self._ahead: tuple[list[Tensor], list[dist.Work]] | None = None  # the receive posted ahead: buffers and works

    def check(self, message: Any, kind: Any) -> None:
        """Check the form of a message before `send`; publish the form of the first message of a kind.

        Raises RuntimeError for a form that differs, and for a form that JSON cannot express.
        """
        leaves, structure = tree_flatten(message)
        leaf_forms = structure, [_leaf_form(leaf) for leaf in leaves]
        if kind not in self._leaf_forms or self._leaf_forms[kind] != leaf_forms:
            self._compare_form(message, kind)
            self._leaf_forms[kind] = leaf_forms

    def send(self, message: Any, kind: Any) -> None:
        """Start to send a checked message, a tree of tensors and small values. kind: `Microbatch.kind`; messages of a
        kind must have equal forms.
        """
        self._forget_received()
        with torch.no_grad():
            for leaf in tree_leaves(message):
                if isinstance(leaf, Tensor):
                    self._start_send((leaf.to_local() if isinstance(leaf, DTensor) else leaf.detach()).contiguous())

    def send_nothing(self, kind: Any) -> None:
        """Send zeros in place of a message; publish, where the form is unknown, that no message comes."""
        if kind not in self._forms:
            world().publish(self._form_key(kind), b"")
            self._num_unsent[kind] = self._num_unsent.get(kind, 0) + 1
            return
        self._forget_received()
        for sent in tree_leaves(self._forms[kind]):
            if isinstance(sent, _SentTensor):
                self._start_send(torch.zeros(sent.local, dtype=sent.dtype, device=self._device))

    def receive(self, kind: Any, more: bool, seconds: float | None = None) -> Any:
        """Wait for the next message; NOT_SENT from a failed rank. kind: `Microbatch.kind`.

        more: whether to post the receive of a further message of this kind. seconds: to wait at most; None for the
        timeout of the world. Raises RuntimeError after that time.
        """
        if kind not in self._expected:
            if kind not in self._forms:
                encoded = world().wait_for_message(self._form_key(kind), seconds)
                if not encoded:
                    self._num_unsent[kind] = self._num_unsent.get(kind, 0) + 1
                    return NOT_SENT
                self._forms[kind] = decode_form(encoded)
            self._expected[kind] = _Expected(self._forms[kind], self._mesh, self._device)
        expected = self._expected[kind]
        parts, works = self._ahead or self._post_receives(expected)
        self._ahead = None
        for work in works:
            wait_for(work, seconds)
        self._ahead = self._post_receives(expected) if more else None
        return expected.build(parts)

    def finish(self) -> None:
        """Wait until the peer has received all messages sent."""
        while self._sent:
            wait_for(self._sent.popleft()[0])

    def _form_key(self, kind: Any) -> str:
        """The form's name in the world's store: a new name after each message that was not sent."""
        unsent = self._num_unsent.get(kind, 0)
        return f"{self._key}, {kind}" + (f", after {unsent} not sent" if unsent else "")

    def _compare_form(self, message: Any, kind: Any) -> None:
        """Publish the form of the first message of a kind; compare the form of later messages.

        Raises RuntimeError as `check`.
        """
        form = form_of(message)
        known = self._forms.get(kind)
        if known is None:
            try:
                encoded = encode_form(form)
            except TypeError as error:
                raise RuntimeError(f"pipeline {self._name}: a message between stages has a bad form: {error}") from None
            world().publish(self._form_key(kind), encoded)
            self._forms[kind] = form
        elif known != form:
            raise RuntimeError(f"pipeline {self._name}: {_why_refused(known, form, kind)}")

    def _forget_received(self) -> None:
        """Drop the buffers of messages which the peer has received."""
        while self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()

    def _start_send(self, part: Tensor) -> None:
        if part.numel():
            work = dist.isend(part, group=self._group, group_dst=self._peer)
            assert work is not None, "this rank is in the group"
            self._sent.append((work, part))

    def _post_receives(self, expected: _Expected) -> tuple[list[Tensor], list[dist.Work]]:
        parts = expected.empty()
        works = [dist.irecv(part, group=self._group, group_src=self._peer) for part in parts if part.numel()]
        return parts, [work for work in works if work is not None]


def _why_refused(known: Any, form: Any, kind: Any) -> str:
    """The reason to refuse a message whose form differs from the form of earlier messages, with the remedy.

    kind: of the microbatch.
    """
    if _without(known, requires_grad=False) == _without(form, requires_grad=False):
        return (
            "tensors of a message require a gradient in one step and not in another, because parameters of this stage "
            "or an earlier one were frozen or unfrozen between the steps, and the next stage knows the first step's "
            "form; keep requires_grad as in the first step, and leave frozen parameters out of the optimizer; or save "
            "the model by save_checkpoint(model, folder), and read it by load_checkpoint(model, folder) into a model "
            "that is frozen before its first step"
        )
    if _without(known, dtype=None) == _without(form, dtype=None):
        first, later = ([each.dtype for each in _sent(form)] for form in (known, form))
        return (
            f"messages had dtypes {first} and then {later}; a model is converted, as by to() or bfloat16(), before its "
            f"first step, or saved by save_pretrained(model, folder) and read by from_pretrained(folder, mesh, plan, "
            f"dtype=...); and torch.autocast is on in each step, or in none"
        )
    return (
        f"microbatches with equal shapes and grad mode, {kind}, gave messages of two forms, {known} and then {form}; "
        f"make the output of a stage depend on the shapes alone"
    )


def _sent(form: Any) -> list[_SentTensor]:
    """The tensors of a form, in order."""
    return [leaf for leaf in tree_leaves(form) if isinstance(leaf, _SentTensor)]


def _without(form: Any, **fields: Any) -> Any:
    """The form with some fields of all tensors set to the given values."""
    return tree_map(lambda leaf: replace(leaf, **fields) if isinstance(leaf, _SentTensor) else leaf, form)


class _Expected:
    """Builds received messages of a given form; caches the structure and the specs of DTensors."""

    def __init__(self, form: Any, mesh: ProcessMesh, device: torch.device) -> None:
        self._leaves, self._structure = tree_flatten(form)
        self._sent = _sent(form)
        self._mesh, self._device = mesh, device
        self._specs: dict[int, Any] = {}  # the spec of each DTensor of the message, by position

    def empty(self) -> list[Tensor]:
        """Buffers for this rank's parts of the message's tensors."""
        return [torch.empty(sent.local, dtype=sent.dtype, device=self._device) for sent in self._sent]

    def build(self, parts: Sequence[Tensor]) -> Any:
        """The message, given the received parts."""
        tensors = iter([self._tensor(i, *each) for i, each in enumerate(zip(parts, self._sent, strict=True))])
        leaves = [next(tensors) if isinstance(leaf, _SentTensor) else leaf for leaf in self._leaves]
        return tree_unflatten(leaves, self._structure)

    def _tensor(self, i: int, part: Tensor, sent: _SentTensor) -> Tensor:
        if sent.placements is None:
            return part.requires_grad_(sent.requires_grad)
        if i not in self._specs:
            self._specs[i] = dtensor_spec(wrap(part, Layout(self._mesh, sent.placements), sent.shape))
        return wrap_with_spec(part, self._specs[i]).requires_grad_(sent.requires_grad)


class Handover:
    """A channel between two stages on the same rank."""

    def __init__(self) -> None:
        self._messages: deque[Any] = deque()

    def check(self, message: Any, kind: Any) -> None:
        """Nothing to check: a message on the same rank may have any form."""

    def send_nothing(self, kind: Any) -> None:
        """Keep NOT_SENT in place of a message."""
        self._messages.append(NOT_SENT)

    def send(self, message: Any, kind: Any) -> None:
        """Keep the message, with detached tensors."""
        self._messages.append(
            tree_map(lambda x: x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x, message)
        )

    def receive(self, kind: Any, more: bool, seconds: float | None = None) -> Any:
        """The next message, which is there already. Arguments: as for `Channel.receive`, and without effect."""
        return self._messages.popleft()

    def finish(self) -> None:
        """Nothing to wait for."""


def gradient_edge(tensor: Tensor) -> GradientEdge:
    """torch's `get_gradient_edge`, extended to DTensors with stacked addends. Communication: none.

    torch keeps the graph alive through a view of the tensor, and a stack cannot be viewed in the global shape. A view
    of this rank's memory keeps the graph alive as well.
    """
    node = tensor.grad_fn
    if node is None or not isinstance(tensor, DTensor) or memory_of(tensor).ndim == tensor.ndim:
        return get_gradient_edge(tensor)
    with torch.enable_grad():
        memory = tensor.to_local()
        return GradientEdge(node, tensor.output_nr, memory.view_as(memory).grad_fn)


def _leaf_form(leaf: Any) -> Any:
    """A value that is equal for leaves of the same form."""
    if isinstance(leaf, DTensor):
        return dtensor_spec(leaf), leaf.requires_grad
    return (leaf.shape, leaf.dtype, leaf.requires_grad) if isinstance(leaf, Tensor) else leaf


@dataclass(frozen=True, slots=True)
class _SentTensor:
    """The description of a tensor in the form of a message."""

    local: tuple[int, ...]  # the shape of a rank's part, as sent to the peer
    dtype: torch.dtype
    requires_grad: bool
    shape: tuple[int, ...]  # the global shape
    placements: str | None  # a DTensor's layout as text; None for a plain tensor


def form_of(message: Any) -> Any:
    """The message with a `_SentTensor` in place of each tensor."""
    return tree_map(_describe, message)


def _describe(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    local, placements = leaf, None
    if isinstance(leaf, DTensor):
        local, placements = leaf.to_local(), str(layout_of(leaf))
    return _SentTensor(tuple(local.shape), leaf.dtype, leaf.requires_grad, tuple(leaf.shape), placements)


def encode_form(form: Any) -> bytes:
    """A form as JSON. Raises TypeError for a value of a type unknown to `decode_form`."""
    return json.dumps(_as_json(form)).encode()


def decode_form(encoded: bytes) -> Any:
    """The form written by `encode_form`. Safe for text of strangers: names in the text are looked up as dtypes only.

    Raises ValueError for text that is no form.
    """
    try:
        return _of_json(json.loads(encoded))
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{encoded[:200]!r} is not the form of a message between stages") from error


def _as_json(form: Any) -> Any:
    if type(form) in _PLAIN:
        return form
    if type(form) in _SEQUENCES.values():
        return {type(form).__name__: [_as_json(each) for each in form]}
    if type(form) in _MAPPINGS.values():
        return {type(form).__name__: [[_as_json(key), _as_json(each)] for key, each in form.items()]}
    if isinstance(form, _SentTensor):
        dtype = str(form.dtype).removeprefix("torch.")
        return {"Sent": [form.local, dtype, form.requires_grad, form.shape, form.placements]}
    raise TypeError(
        f"a {type(form).__name__} cannot be sent to the next stage; use tensors, numbers, text and None, "
        f"in tuples, lists and dicts"
    )


def _of_json(value: Any) -> Any:
    if not isinstance(value, dict):
        if type(value) not in _PLAIN:
            raise TypeError
        return value
    ((kind, content),) = value.items()
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](_of_json(each) for each in content)
    if kind in _MAPPINGS:
        return _MAPPINGS[kind]((_of_json(key), _of_json(each)) for key, each in content)
    if kind != "Sent":
        raise TypeError
    local, name, requires_grad, shape, placements = content
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype) or type(requires_grad) is not bool or not isinstance(placements, str | None):
        raise TypeError
    return _SentTensor(tuple(map(int, local)), dtype, requires_grad, tuple(map(int, shape)), placements)
