"""`LiveStorages`: follows each storage of a program's tensors from allocation to release.

Works for tensors with and without data. `follow_step` follows a step on shapes for `predict_memory`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from weft.kernels.extension import observing
from weft.reshard.extension import ShapesMode, add_dtensors, differentiable, memory_of, observing_buckets, tensors_of

BEFORE = -1  # the place before the first block: the embedding

# Weft's ops that on a GPU run several kernels with tensors in between. Every further op allocates nothing but results.
COMPOSED = frozenset(("linear_cross_entropy", "experts", "grouped_matmul", "route", "dispatch", "combine"))


@dataclass(slots=True, eq=False)
class Storage:
    """A followed storage: when and where in the program the storage was allocated, and when released.

    Made by `LiveStorages` at each allocation, and by `adopt`; read by `FollowedStep`.
    A moment is the number of allocations and releases up to then, 0 before the first. Adopted storages do not count.
    """

    nbytes: int
    born: int  # moment just after the allocation; of an adopted storage, the moment of `adopt`
    # Number of the block at work at the allocation: BEFORE the first block, and once a backward is over; the number of
    # blocks after the last block. Of parameters and gradients: as given to `adopt` or `relabel`.
    place: int
    in_module: bool  # whether a module's forward was running, in backward also as recomputation
    in_backward: bool  # whether autograd's backward was running
    op: str  # name of the op at the allocation: Weft's, or outside Weft's ops torch's; "" of an adopted storage
    call: int  # which call of a Weft op made the storage, counted from 1; 0 outside Weft's ops, and without `by_op`
    died: int | None = None  # moment just after the release; None: alive at the end
    call_of_death: int = 0  # which call of a Weft op released the storage, counted as `call`
    kind: str | None = None  # of `followed_step.KINDS`; None: by place, phase and lifetime

    def is_alive(self, moment: int) -> bool:
        """Whether the storage is allocated, and not yet released, at `moment`."""
        return self.born <= moment and (self.died is None or self.died > moment)


@dataclass(slots=True)
class _Followed:
    """An entry in the table of live storages."""

    reference: weakref.ref[Any]  # to torch's storage; ends the entry when the storage dies
    storage: Storage


class LiveStorages(ShapesMode):
    """A context in which each storage made by an op of torch is followed until freed.

    Made by `follow_step`, and entered once, around the second run of a step.
    The buffers of gathered parameters are followed through `resize_`, which frees and refills. Not seen: memory that
    an op of torch allocates and frees inside.
    blocks: of the model, in order; for `Storage.place`.
    by_op: count memory as on a GPU, where a call of a Weft op outside `COMPOSED` allocates nothing but results.
    """

    def __init__(self, blocks: Sequence[nn.Module] = (), *, by_op: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: list[Storage] = []  # also released storages, in the order of allocation
        self.marks: list[tuple[int, str]] = []  # (last moment of a phase, the phase), in order; from `mark`
        self.places: list[tuple[int, int]] = [(0, BEFORE)]  # (moment, place of the program from then on), in order
        self.now = 0  # the latest moment
        self._blocks, self._by_op = blocks, by_op
        self._live: dict[int, _Followed] = {}  # by address of torch's StorageImpl
        self._depth = 0  # modules whose forward is running
        self._calls, self._call, self._op = 0, 0, ""  # calls of Weft ops so far; number and op of the running call
        self._stack = ExitStack()

    def __enter__(self) -> LiveStorages:
        enter, resize = self._stack.enter_context, torch.UntypedStorage.resize_

        def followed_resize(storage: Any, nbytes: int) -> Any:
            result = resize(storage, nbytes)
            self._resized(storage)
            return result

        torch.UntypedStorage.resize_ = followed_resize  # type: ignore[method-assign,assignment]
        self._stack.callback(setattr, torch.UntypedStorage, "resize_", resize)
        hooks = [
            register_module_forward_pre_hook(self._enter_module),
            register_module_forward_hook(self._leave_module, always_call=True),
        ]
        for number, block in enumerate(self._blocks):
            hooks.append(block.register_forward_pre_hook(self._entering(number)))
            hooks.append(block.register_forward_hook(self._leaving(number)))
        for hook in hooks:
            self._stack.callback(hook.remove)
        if self._by_op:
            enter(observing(self._observe))
        enter(observing_buckets(lambda tensors: self.label(tensors, "buckets")))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._stack.close()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return add_dtensors(self, func, args, kwargs)  # of further ops, the local tensors then come here
        output = func(*args, **(kwargs or {}))
        known: set[int] | None = None
        for storage in _storages(output):
            if storage._cdata in self._live:
                continue
            known = {each._cdata for each in _storages((args, kwargs))} if known is None else known
            if storage._cdata not in known:
                self._follow(storage, self._op or str(func), None)
        return output

    def adopt(self, tensors: Iterable[Tensor], kind: str, place: int = BEFORE) -> None:
        """Follow the storages of existing tensors: parameters, buffers, inputs. Called by `follow_step` before a run.

        A storage followed before keeps kind and place.
        """
        for storage in _storages(list(tensors)):
            if storage._cdata not in self._live:
                self._follow(storage, "", kind).place = place

    def label(self, tensors: Iterable[Tensor], kind: str) -> None:
        """Set the kind of followed storages without a kind. Called with the tensors of each bucket of gradients."""
        for storage in _storages(list(tensors)):
            found = self._live.get(storage._cdata)
            if found is not None and found.storage.kind is None:
                found.storage.kind = kind

    def relabel(self, tensors: Iterable[Tensor], kind: str, place: int) -> None:
        """Replace kind and place of followed storages. Called by `follow_step` after a run, with the gradients.

        A gradient's storage may be a bucket's until then.
        """
        for storage in _storages(list(tensors)):
            if storage._cdata in self._live:
                record = self._live[storage._cdata].storage
                record.kind, record.place = kind, place

    def mark(self, phase: str) -> None:
        """Note the end of `phase` at the present moment.

        Called by `follow_step` as `after_phase` of a run, and after the optimizer. After "backward", the place becomes
        BEFORE.
        """
        self.marks.append((self.now, phase))
        if phase == "backward":
            self._go_to(BEFORE)

    def begin_forward(self) -> None:
        """Set the place to BEFORE the first block. Called by `follow_step` before each forward, if no backward runs."""
        self._go_to(BEFORE)

    def counts(self, storage: Storage) -> bool:
        """Whether a storage takes memory. With `by_op`, a storage made and freed in a call of a Weft op takes none,
        unless the op is in `COMPOSED`.
        """
        inside = self._by_op and storage.call and storage.call == storage.call_of_death
        return not inside or storage.op in COMPOSED

    def bytes_at_moments(self, chosen: Callable[[Storage], bool] | None = None) -> list[int]:
        """The live bytes by moment, from 0 to `now`: a list of `now` + 1 numbers.

        Called after a run by `FollowedStep`, and by the memory of models of any depth. chosen: which storages to count;
        None: all.
        """
        changes = [0] * (self.now + 2)
        for each in self.storages:
            if self.counts(each) and (chosen is None or chosen(each)):
                changes[each.born] += each.nbytes
                changes[self.now + 1 if each.died is None else each.died] -= each.nbytes
        return list(accumulate(changes))[:-1]

    def phase_at(self, moment: int) -> str:
        """The phase in which a moment lies; "" after the last mark. Called by `FollowedStep`."""
        return next((phase for end, phase in self.marks if moment <= end), "")

    def _follow(self, storage: Any, op: str, kind: str | None) -> Storage:
        nbytes = storage.nbytes()
        key = storage._cdata
        in_backward = torch._C._current_graph_task_id() != -1
        if kind is None:
            self.now += 1
        record = Storage(
            nbytes=nbytes,
            born=self.now,
            place=self.places[-1][1],
            in_module=self._depth > 0 or (in_backward and torch.is_grad_enabled()),
            in_backward=in_backward,
            op=op,
            call=self._call,
            kind=kind,
        )
        self.storages.append(record)
        self._live[key] = _Followed(weakref.ref(storage, lambda _: self._freed(key)), record)
        return record

    def _freed(self, key: int) -> None:
        found = self._live.pop(key, None)
        if found is not None:
            self._end(found.storage)

    def _end(self, record: Storage) -> None:
        self.now += 1
        record.died, record.call_of_death = self.now, self._call

    def _resized(self, storage: Any) -> None:
        found = self._live.get(storage._cdata)
        before = None if found is None else found.storage
        if before is not None and before.nbytes == storage.nbytes():
            return
        if before is not None:
            self._end(before)
        record = self._follow(storage, self._op or "resize_", None)
        # A buffer not followed yet is of a gathered parameter: empty until now, made in an earlier step.
        record.kind = "gathered" if before is None else before.kind
        if before is not None:
            record.place = before.place

    def _go_to(self, place: int) -> None:
        if self.places[-1][1] != place:
            self.places.append((self.now, place))

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        self._depth += 1

    def _leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        self._depth -= 1

    def _entering(self, number: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any) -> None:
            if torch._C._current_graph_task_id() == -1:
                self._go_to(number)
                if number == 0:
                    self._on_gradient(args, BEFORE)

        return hook

    def _leaving(self, number: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if torch._C._current_graph_task_id() == -1:
                self._on_gradient(output, number)
                self._go_to(number + 1)

        return hook

    def _on_gradient(self, tensors: Any, place: int) -> None:
        for each in differentiable(tensors)[:1]:
            each.register_hook(lambda grad: self._go_to(place))  # type: ignore[no-untyped-call]

    def _observe(self, op: Any, part: str, function: Callable[..., Any], /, *arguments: Any, **options: Any) -> Any:
        if self._call:  # an op's function calls another op
            return function(*arguments, **options)
        self._calls += 1
        self._call, self._op = self._calls, op.name
        try:
            return function(*arguments, **options)
        finally:
            self._call, self._op = 0, ""


def _storages(tree: Any) -> list[Any]:
    """The storages of all tensors in a tree of values; for a DTensor, of the local tensor."""
    tensors = tensors_of(tree)
    return [(memory_of(each) if isinstance(each, DTensor) else each).untyped_storage() for each in tensors]
