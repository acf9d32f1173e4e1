"""`Recorder`: digests the tensors of a step by hooks from outside of the model, and adds the digests over the ranks.

The hooks are torch's global hooks, which see the calls of all modules. A hook on a module itself would keep the module
out of fused ops, and change the bits. Where a fused op computes a module without a call, the module has no digest, but
the module around has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import _disable_current_modes
from weft.kernels.extension import observing
from weft.mesh import Layout, Partial, Replicate, Shard
from weft.reshard import layout_of
from weft.reshard.extension import tensors_of, this_rank

from ..parallel.batch import ModelArguments
from ..parallel.packed.exchange import RowOrders
from ..parallel.parallelize import pipeline_of
from ..parallel.pipeline.step import Microbatch
from .digest import Digest, MicrobatchTokens, TensorPlace, digest_part, place_of, tokens_of_microbatches
from .record_file import KINDS, SKETCHES, Key, StepDigests, TensorEntry, TensorKind, count_blocks


class Recorder:
    """Digests the steps of a model in training, by a Recorder on every rank. Rank 0 has the sums over all ranks.

    model: after `parallelize`. batch: the number of rows of the whole batch, and of tokens in a row.
    every: digests step 1 and each multiple of `every`; 0: no step. steps: further steps, counted from 1.
    For each step call `begin`; where `begin` returns True, run forward and backward in the context `watching`, then
    call `add_gradients` after synchronization, and `finish` after the update. `take` returns the results.
    """

    def __init__(
        self, model: nn.Module, batch: tuple[int, int], *, every: int = 1, steps: Collection[int] = ()
    ) -> None:
        self._model, self._batch, self._every, self._steps = model, batch, every, frozenset(steps)
        self._step = 0  # the running step
        self._last: int | None = None  # the last step with digests
        self.ops: dict[str, tuple[str, ...]] = {}  # Weft's ops called directly by each module's forward, of all ranks
        self._unread: list[StepDigests] = []  # for `take`
        self._arguments = ModelArguments(model)
        self._pipeline = pipeline_of(model)
        self._names: dict[int, str] = {}  # by id of the module
        for name, module in model.named_modules():
            self._names.setdefault(id(module), name)
        self._places: dict[Any, TensorPlace] = {}  # by the arguments of `place_of`
        self._found: dict[Key, _DigestedTensor] = {}  # of the running step
        self._tokens: list[MicrobatchTokens] = []  # of each microbatch
        self._calls: Counter[tuple[str, bool]] = Counter()  # of each module in the step: in forward, recomputed
        self._root_calls = -1  # the number of the model's running call, from 0: the microbatch
        self._latest: tuple[Tensor, list[Digest]] | None = None  # the tensor digested last
        self._hooked: set[tuple[Key, int]] = set()  # gradients digested, with their microbatches
        self._running: list[str] = []  # modules whose forward runs, innermost last
        self._ops: dict[str, dict[str, None]] = {}  # by module: ops called by its own forward on this rank, in order
        self._table: tuple[TensorEntry, ...] | None = None  # the entries of the last step, over all ranks
        self._own: list[Any] | None = None  # this rank's part of the table, as sent last

    def begin(self, step: int) -> bool:
        """Whether step `step`, counted from 1, has digests.

        If so, digests the weights, except where `finish` has digested these weights at the end of the step before.
        """
        is_due = step in self._steps or bool(self._every and (step == 1 or step % self._every == 0))
        self._step = step
        if is_due and self._last != step - 1:
            self._add_weights("before")
        return is_due

    @contextmanager
    def watching(self, microbatches: Sequence[Microbatch]) -> Iterator[None]:
        """Context manager: digests the outputs of modules, and the gradients of these outputs. Communication: none."""
        self._calls.clear()
        self._hooked.clear()
        self._root_calls, self._tokens = -1, tokens_of_microbatches(self._arguments, microbatches)
        hooks = [register_module_forward_pre_hook(self._enter), register_module_forward_hook(self._leave)]
        try:
            # until the first `finish`, because listening makes each call of an op a little longer
            with observing(self._observe) if self._table is None else nullcontext():
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def add_gradients(self) -> None:
        """Digest the gradient of each parameter, from `.grad`. Communication: none."""
        for name, parameter in self._own_parameters():
            if parameter.grad is not None:
                self._add(Key("gradient", name), parameter.grad)

    def _add_weights(self, kind: TensorKind) -> None:
        """Digest each parameter. kind: "before" or "weight". Communication: none."""
        for name, parameter in self._own_parameters():
            self._add(Key(kind, name), parameter)

    def _own_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """The trained parameters of this rank; a parameter shared by several stages belongs to the first stage."""
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad and (self._pipeline is None or self._pipeline.is_counted_here(name)):
                yield name, parameter

    def _enter(self, module: nn.Module, args: Any) -> None:
        """Hook before the forward of every module."""
        if module is self._model and not _in_backward():
            self._root_calls += 1
            self._running.clear()  # a stage leaves the model's forward early
        if id(module) in self._names:
            self._running.append(self._names[id(module)])

    def _observe(self, op: Any, part: str, function: Callable[..., Any], /, *arguments: Any, **options: Any) -> Any:
        """Listener of `observing`: notes the op for the module whose forward runs."""
        if part in ("forward", "inference") and self._running and not _in_backward():
            self._ops.setdefault(self._running[-1], {})[op.name] = None
        return function(*arguments, **options)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """Hook after the forward of every module: digests the output, and sees that its gradient is digested."""
        name = self._names.get(id(module))
        if name is None:  # of a further model, as a reference
            return
        if self._running and self._running[-1] == name:
            self._running.pop()
        recomputed = _in_backward()  # the values equal forward's, but autograd's graph may be this call's
        call = self._calls[name, recomputed]
        self._calls[name, recomputed] += 1
        # A module is called once for a microbatch. Stages run the microbatches in order, and leave the model's forward
        # before its end, where the model's calls cannot be counted. So a stage counts the calls of each module.
        number = call if self._pipeline is not None or recomputed else self._root_calls
        if not 0 <= number < len(self._tokens):
            return
        tokens, stage = self._tokens[number], self._stage()
        outputs = [each for each in tensors_of(output) if _is_digested(each, tokens)]
        for index, tensor in enumerate(outputs):
            if not recomputed:
                self._add(Key("output", name, index), tensor, tokens, stage)
        # Of several outputs, the last may be computed from the earlier outputs. Whether the earlier outputs' gradients
        # contain the last output's share depends on the op behind both, which differs between meshes.
        if outputs and outputs[-1].requires_grad and torch.is_grad_enabled():
            key = Key("backward", name, len(outputs) - 1)
            outputs[-1].register_hook(self._on_gradient(key, number, stage))  # type: ignore[no-untyped-call]

    def _on_gradient(self, key: Key, number: int, stage: int) -> Any:
        """A hook of autograd that digests the gradient `key` of microbatch `number`, once."""

        def digest(grad: Tensor) -> None:
            if (key, number) not in self._hooked:
                self._hooked.add((key, number))
                self._add(key, grad, self._tokens[number], stage)

        return digest

    def _stage(self) -> int:
        """The pipeline stage whose forward runs; 0 without a pipeline."""
        running = None if self._pipeline is None else self._pipeline.stages.running
        return 0 if running is None else running

    @torch.no_grad()
    def _add(self, key: Key, tensor: Tensor, tokens: MicrobatchTokens | None = None, stage: int = 0) -> None:
        """Digest this rank's part of a tensor. tokens: of the microbatch, for an activation; None for a parameter."""
        layout = layout_of(tensor) if isinstance(tensor, DTensor) else None if tokens is None else tokens.layout
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        share = _share_of(layout)
        if share is None:
            return
        addends = _addends(local, tensor.ndim)
        share.is_hashed &= len(addends) == 1
        shape = tuple(tensor.shape)
        if tokens is not None:
            # [B, T] as [B, T, 1]: a digest has an order of tokens for a dim before the last
            shape = (self._batch[0], self._batch[1], *(shape[2:] or (1,)))
        # outside of torch's modes that see ops: selective recomputation counts the matrix products of a block
        with _disable_current_modes():
            place = self._place(tensor, layout, shape, tokens)
            found = self._found.get(key)
            if found is None:
                dtype, text = str(local.dtype).removeprefix("torch."), "" if layout is None else str(layout)
                entry = TensorEntry(key, shape, dtype, text, share.is_hashed, ())
                found = self._found[key] = _DigestedTensor(entry, stage, Digest.zeros(place.blocks, local.device))
            found.touched.update(place.touched)
            # a module often returns the tensor of the last module within
            if self._latest is None or self._latest[0] is not tensor:
                self._latest = tensor, [digest_part(each, place, **share.options) for each in addends]
            for digest in self._latest[1]:
                if not share.is_hashed:
                    digest.hashes.zero_()
                    digest.disagreement.zero_()
                found.digest.add(digest)

    def _place(
        self, tensor: Tensor, layout: Layout | None, shape: tuple[int, ...], tokens: MicrobatchTokens | None
    ) -> TensorPlace:
        """The place of this rank's part of a tensor of global `shape`; activations are parts of the whole batch's."""
        device = tensor.device
        if isinstance(tensor, DTensor) and layout is not None:
            slices = layout.local_slices(tensor.shape, this_rank())
        elif tokens is not None and layout is not None:  # the local part of rows
            slices = (*layout.local_slices(tokens.shape, this_rank()), *[slice(0, n) for n in tensor.shape[2:]])
        else:
            slices = tuple(slice(0, size) for size in tensor.shape)
        slices += (slice(0, 1),) * (len(shape) - len(slices))
        order = None if tokens is None else tokens.order
        key = shape, tuple((each.start, each.stop) for each in slices), device, 0 if tokens is None else tokens.first
        if isinstance(order, RowOrders):
            return self._make_place(shape, slices, device, tokens)
        if (key, order) not in self._places:
            self._places[key, order] = self._make_place(shape, slices, device, tokens)
        return self._places[key, order]

    def _make_place(
        self, shape: tuple[int, ...], slices: tuple[slice, ...], device: torch.device, tokens: MicrobatchTokens | None
    ) -> TensorPlace:
        if tokens is None:
            return place_of(shape, slices, device)
        return place_of(shape, slices, device, first_row=tokens.first, tokens=tokens.places(slices[1]))

    def finish(self, loss: Tensor, norm: Tensor | None) -> None:
        """Digest the updated weights, and add the step's digests over all ranks; `take` returns the sums on rank 0.

        The host waits for the device. loss, norm: of the step; norm None: the step computed none.
        Communication: three all-reduces of the digests, and an all-reduce of a flag; if the tensors have changed since
        the last digested step, an all-gather of the tensors' keys.
        """
        self._latest = None
        self._add_weights("weight")
        self._latest = None
        self._last, device = self._step, loss.device
        found, self._found = self._found, {}
        own = [(each.entry, each.stage, tuple(sorted(each.touched))) for each in found.values()]
        changed = torch.tensor(int(own != self._own), device=device)
        _all_reduce(changed, dist.ReduceOp.MAX)
        if changed or self._table is None:
            of_ranks = _gather((own, {name: tuple(ops) for name, ops in self._ops.items()}))
            self._own, self._table = own, _join([entries for entries, _ in of_ranks])
            self.ops = {name: ops for _, of_rank in of_ranks for name, ops in of_rank.items()}
        zeros = {n: Digest.zeros(n, device) for n in {each.blocks for each in self._table}}
        digests = [found[e.key].digest if e.key in found else zeros[e.blocks] for e in self._table]
        whole = torch.stack(
            [torch.cat([getattr(each, name) for each in digests]) for name in ("hashes", "disagreement")]
        )
        sketches = torch.cat([each.sketches for each in digests]).flatten()
        real = torch.cat([sketches, torch.stack([each.squares for each in digests])])
        largest = torch.stack([each.largest for each in digests])
        for tensor, op in ((whole, dist.ReduceOp.SUM), (real, dist.ReduceOp.SUM), (largest, dist.ReduceOp.MAX)):
            _all_reduce(tensor, op)
        if this_rank() != 0:
            return
        hashes, disagreement = whole.cpu().numpy()
        numbers, n = real.cpu().numpy(), sketches.numel()
        disagreeing, start = set(), 0
        for number, entry in enumerate(self._table):
            if disagreement[start : start + entry.blocks].any():
                disagreeing.add(number)
            start += entry.blocks
        digests_of_step = StepDigests(
            step=self._step,
            loss=float(loss),
            norm=None if norm is None else float(norm),
            entries=self._table,
            hashes=hashes,
            sketches=numbers[:n].reshape(-1, SKETCHES),
            squares=numbers[n:],
            largest=largest.cpu().numpy(),
            disagreeing=frozenset(disagreeing),
            ops=self.ops,
        )
        self._unread.append(digests_of_step)

    def take(self) -> list[StepDigests]:
        """On rank 0, the digests of the steps since the last call; elsewhere none."""
        unread, self._unread = self._unread, []
        return unread


class _DigestedTensor:
    """A tensor of the running step: its entry, the pipeline stage, and the digest of this rank's parts so far."""

    __slots__ = ("digest", "entry", "stage", "touched")

    def __init__(self, entry: TensorEntry, stage: int, digest: Digest) -> None:
        self.entry, self.stage, self.digest = entry, stage, digest
        self.touched: set[int] = set()  # blocks of which this rank has elements


class _Share:
    """How this rank's part of a tensor counts in the sum over ranks: as a replica, or, not hashed, as an addend."""

    __slots__ = ("is_hashed", "options")

    def __init__(self, replicas: int, *, is_first: bool, is_hashed: bool) -> None:
        self.options: Any = {"replicas": replicas, "is_first": is_first}  # of `digest_part`
        self.is_hashed = is_hashed


def _share_of(layout: Layout | None) -> _Share | None:
    """The share of a tensor in this layout; None for a Partial min, max or product, since digests are sums."""
    if layout is None:
        return _Share(1, is_first=True, is_hashed=True)
    coordinate = layout.mesh.coordinate(this_rank())
    replicas, is_first, is_hashed = 1, True, True
    for axis, size, placement in zip(layout.mesh.axis_names, layout.mesh.shape, layout.placements, strict=True):
        if size == 1 or isinstance(placement, Shard):
            continue
        if isinstance(placement, Partial):
            is_hashed = False
            if placement.op not in ("sum", "avg"):
                return None
        if isinstance(placement, Replicate) or placement.op == "avg":
            replicas *= size
            is_first &= coordinate is not None and coordinate[axis] == 0
    return _Share(replicas, is_first=is_first, is_hashed=is_hashed)


def _is_digested(tensor: Tensor, tokens: MicrobatchTokens) -> bool:
    """Whether an output of a module is digested: floating-point, with data, and [B, T, ...] of the microbatch."""
    return not isinstance(tensor, FakeTensor) and tensor.is_floating_point() and tokens.has_rows(tensor)


def _addends(local: Tensor, ndim: int) -> list[Tensor]:
    """The addends of a Partial value in a local tensor, several inside `exact_sums`. ndim: of the global tensor."""
    extra = local.ndim - ndim
    return [local] if extra <= 0 else list(local.flatten(0, extra - 1))


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _all_reduce(tensor: Tensor, op: Any) -> None:
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(tensor, op=op)


def _gather(own: Any) -> list[Any]:
    """Each rank's value, by rank. Communication: an all-gather of objects."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [own]
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, own)
    return of_ranks


def _join(of_ranks: Sequence[Sequence[tuple[TensorEntry, int, tuple[int, ...]]]]) -> tuple[TensorEntry, ...]:
    """The table over all ranks: each tensor once, in the order of computation, with the first rank of each block.

    of_ranks: by rank, the (entry, stage, blocks on this rank) of each tensor. Stages compute forward in ascending
    order, and backward in descending.
    """
    entries: dict[Key, tuple[TensorEntry, Any]] = {}
    holders: dict[Key, dict[int, int]] = {}
    for rank, own in enumerate(of_ranks):
        for place, (entry, stage, touched) in enumerate(own):
            kind = KINDS.index(entry.key.kind)
            order = kind, -stage if entry.key.kind == "backward" else stage, place
            entries.setdefault(entry.key, (entry, order))
            for block in touched:
                holders.setdefault(entry.key, {}).setdefault(block, rank)
    ordered = sorted(entries.values(), key=lambda each: each[1])
    return tuple(
        TensorEntry(
            *(each.key, each.shape, each.dtype, each.layout, each.is_hashed),
            tuple(holders.get(each.key, {}).get(block, 0) for block in range(count_blocks(each.shape))),
        )
        for each, _ in ordered
    )
