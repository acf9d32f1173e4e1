"""Blocks that backward computes again, so that less is kept until then (Chen et al. 2016; Korthikanti et al. 2022, section 5)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from weft.kernels.backend import is_compiling
from weft.reshard.running.received import giving, keeping
from weft.reshard.running.traced import COMMUNICATING

from .plan import ParallelPlan, Recompute
from .resolve import nearest

aten = torch.ops.aten
PRODUCTS = (aten.mm.default, aten.addmm.default)  # batched ones are attention's weights, which are recomputed
# Ops of whose operands autograd keeps nothing: a value that goes through these alone is not needed again.
PASSING = (
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.alias.default,
    aten.detach.default,
    aten.t.default,
    aten.permute.default,
    aten.transpose.int,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.expand.default,
    aten.slice.Tensor,
    aten.select.int,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.cat.default,
    aten.stack.default,
    aten.constant_pad_nd.default,
    aten.add.Tensor,
    aten.add_.Tensor,
    aten.sum.dim_IntList,
    aten.clone.default,
    aten._to_copy.default,
    aten.copy_.default,
    aten.new_empty.default,
    aten.new_zeros.default,
    aten.empty_like.default,
)


def recompute(model: nn.Module, plan: ParallelPlan) -> None:
    """Has every block of the model computed again in backward, as the plan says: the same bits, with less that is kept.

    Communication: none here. In backward "full" issues a block's forward collectives again, but for those of its last layer;
    "selective" none. Raises ValueError as `blocks_of` does.
    """
    for block in blocks_of(model, plan).values():
        forward = block.forward
        block.forward = partial(_recomputed, plan.recompute, forward)
        compile_it = _compile_whole if plan.recompute == "full" else _compile_marked
        block.compile = partial(compile_it, block, forward)  # type: ignore[method-assign]


def _compile_whole(block: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """`block.compile`: the graph is what is computed again, and the checkpoint is outside of it."""
    block.forward = partial(_recomputed, "full", torch.compile(forward, *args, **kwargs))


def _compile_marked(block: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """`block.compile`: the checkpoint is in the graph, where it marks what the compiler is to keep.

    Dynamo refuses a checkpoint in which Python state changes, as that of siblings which share what they were sent; it need not
    change again in backward, which runs the graph's nodes alone.
    """
    compiled = torch.compile(partial(_recomputed, "selective", forward), *args, **kwargs)
    allowed = torch._dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=True)
    block.forward = allowed(compiled)


def blocks_of(model: nn.Module, plan: ParallelPlan) -> dict[str, nn.Module]:
    """By name, the outermost modules that `plan.blocks` names, where the plan recomputes. Raises ValueError for a pattern that matches none."""
    if plan.recompute == "none":
        return {}
    names = [name for name, _ in model.named_modules() if name]
    found: dict[str, None] = {}
    for pattern in plan.blocks:
        matching = [name for name in names if fnmatchcase(name, pattern)]
        if not matching:
            raise ValueError(
                f"recompute={plan.recompute!r} is by the block, and blocks {pattern!r} match no module of "
                f"{type(model).__name__}; name them by ParallelPlan(blocks=(...,)); "
                f"{nearest(pattern, names)}"
            )
        found |= dict.fromkeys(matching)
    inner = {name for name in found if any(name.startswith(f"{other}.") for other in found)}
    return {name: model.get_submodule(name) for name in found if name not in inner}


def _recomputed(kind: Recompute, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What `forward` returns, to be computed again in backward."""
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    if kind == "full":
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)
    contexts = _traced_contexts if is_compiling() else _contexts
    return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)


def _traced_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """For a graph: torch's own, which mark its nodes for the compiler."""
    contexts: tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
    contexts = create_selective_checkpoint_contexts(_marked)  # type: ignore[no-untyped-call]
    return contexts


def _marked(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """What a graph keeps: products, what was communicated, and what torch counts as random, its fused attention among it.

    To repeat the last, AOTAutograd hands the generator's state from forward to backward, in torch 2.13 in the place where a graph
    of DTensors hands on its mesh.
    """
    kept = op in (*PRODUCTS, *COMMUNICATING) or torch.Tag.nondeterministic_seeded in op.tags
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def _contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """What is entered around the forward, and around its repetition."""
    products, received = _Kept(), _Kept()
    return _Keep(products, received), _Give(products, received)


class _Value:
    """A tensor that was made in the forward.

    storages: in which its values are, or values that are made of them by `PASSING` ops.
    needed: by another op. One that is not was only an addend of what the block returned, or of what was communicated: in the
        repetition no value depends on it, and NaNs that take no memory stand for it.
    """

    def __init__(self) -> None:
        self.tensor: Tensor | None = None
        self.storages: set[StorageWeakRef] = set()
        self.needed = False

    def fill(self, tensor: Tensor) -> None:
        self.tensor, self.version = tensor, tensor._version
        self.storages = {_storage(tensor)}
        self.needed = not tensor.is_floating_point()

    def close(self) -> None:
        """The forward is over."""
        self.storages.clear()
        if self.tensor is None:
            return
        self.tensor = self.tensor.detach()  # here, and not where it was made: a change in place is then seen
        if not self.needed:
            shape = self.tensor.shape
            self.tensor = torch.full((), float("nan"), dtype=self.tensor.dtype, device=self.tensor.device).expand(shape)
            self.version = self.tensor._version

    def given(self) -> Tensor:
        assert self.tensor is not None, "a reshard that was started was waited for in the forward"
        if self.tensor._version != self.version:
            raise RuntimeError(
                f"recompute='selective' keeps a product of shape {tuple(self.tensor.shape)}, which was changed in place since; "
                f"make that op out of place, or take recompute='full'"
            )
        return self.tensor.detach()


class _Kept(list[_Value]):
    """Values in the order in which they are made."""

    def add(self) -> _Value:
        self.append(_Value())
        return self[-1]


class _Keep(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps products, and what was communicated."""

    def __init__(self, products: _Kept, received: _Kept) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._products, self._received = products, received

    def __enter__(self) -> Any:
        self._communication = ExitStack()
        self._communication.enter_context(keeping(self._begin))
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> Any:
        self._communication.close()
        for value in self._values():
            value.close()
        return super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it unwraps first: the local op then comes by here
        out = func(*args, **(kwargs or {}))
        given = {_storage(each) for each in tree_iter((args, kwargs)) if isinstance(each, Tensor)}
        for value in self._values():
            if not value.needed and not given.isdisjoint(value.storages):
                if func in PASSING or func.namespace in ("c10d", "_c10d_functional"):
                    value.storages |= {_storage(each) for each in tree_iter(out) if isinstance(each, Tensor)}
                else:
                    value.needed = True
        if func in PRODUCTS:
            self._products.add().fill(out)
        return out

    def _begin(self) -> Callable[[Tensor], None]:
        value = self._received.add()

        def take(received: Tensor) -> None:
            for each in self._values():
                each.storages.discard(_storage(received))  # which is kept for itself
            value.fill(received)

        return take

    def _values(self) -> list[_Value]:
        return [*self._products, *self._received]


class _Give(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives what `_Keep` has kept, in the same order."""

    def __init__(self, products: _Kept, received: _Kept) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._products, self._received = products, received

    def __enter__(self) -> Any:
        self._next_product, received = iter(self._products), iter(self._received)
        self._communication = ExitStack()
        self._communication.enter_context(giving(lambda: next(received).given()))
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> Any:
        self._communication.close()
        return super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        return next(self._next_product).given() if func in PRODUCTS else func(*args, **(kwargs or {}))


def _storage(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
