"""Recomputation: blocks keep fewer activations, and run forward again in backward.

Chen et al. 2016; Korthikanti et al. 2022, section 5.
"""

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
from weft.reshard.extension import COMMUNICATING, is_compiling, record_received, replay_received

from ..low_rank import LowRank
from ..plan_options import Recompute
from .plan import ParallelPlan
from .resolve import nearest

_COMPILED = "_is_compiled"  # attribute of a recomputed block whose forward is compiled

aten = torch.ops.aten
PRODUCTS = (aten.mm.default, aten.addmm.default)  # batched products give attention's weights, which are recomputed
# Ops that save no operand for backward. A value read by nothing else is not needed in the repetition.
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
    """Make every block of the model run forward again in backward, by the plan. Numbers keep their bits.

    Communication: none here. In backward, "full" repeats a block's forward collectives, except in the block's last
    layer; "selective" repeats no collective.
    Raises ValueError as `blocks_of` does.
    """
    for block in blocks_of(model, plan).values():
        forward = block.forward
        block.forward = partial(_run_checkpointed, plan.recompute, forward)
        compile_block = _compile_whole if plan.recompute == "full" else _compile_marked
        block.compile = partial(compile_block, block, forward)  # type: ignore[method-assign]


def replace_forward(module: nn.Module, change: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace a module's forward by `change(forward)`; in a recomputed module, the forward inside the checkpoint.

    Raises ValueError for a recomputed module whose forward is compiled, unless `change` changes nothing.
    """
    forward = module.forward
    if not (isinstance(forward, partial) and forward.func is _run_checkpointed):
        changed: Any = change(forward)
        if getattr(changed, "__self__", None) is module and changed.__func__ is type(module).forward:
            vars(module).pop("forward", None)  # the class's own
        elif changed is not forward:
            module.forward = changed
        return
    kind, own = forward.args
    changed = change(own)
    if changed is own:
        return
    if _COMPILED in vars(module):
        raise ValueError(f"a {type(module).__name__} is compiled already; add adapters with dropout before compile()")
    module.forward = partial(_run_checkpointed, kind, changed)
    compiling: Any = module.compile
    module.compile = partial(compiling.func, module, changed)  # type: ignore[method-assign]


def is_compiled(model: nn.Module) -> bool:
    """Whether the model, or a module within it, runs as compiled by torch.compile."""
    modules = [model]
    for module in modules:  # the list grows meanwhile; `model.modules()` would make every name
        if hasattr(module, "_orig_mod") or module._compiled_call_impl is not None or _COMPILED in vars(module):
            return True
        modules += filter(None, module._modules.values())
    return False


def _compile_whole(block: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """`block.compile` under "full": compiles the forward, and checkpoints the compiled function.

    Raises ValueError for a block whose adapters have dropout: each is handed its key in the forward, and the compiled
    recomputation would save other tensors than the first call.
    """
    if any(isinstance(each, LowRank) and each.dropout for each in block.modules()):
        raise ValueError(
            "a compiled block under recompute 'full' cannot have adapters with dropout; take recompute 'selective' or "
            "'none', no compile(), or lora(..., dropout=0)"
        )
    block.forward = partial(_run_checkpointed, "full", torch.compile(forward, *args, **kwargs))
    object.__setattr__(block, _COMPILED, True)


def _compile_marked(block: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """`block.compile` under "selective": compiles the checkpointed forward; marks in the graph tell the compiler
    which values to keep.

    Dynamo refuses a checkpoint in which Python state changes, as where column-parallel siblings share an input.
    Here the state need not change again in backward, which only runs nodes of the graph.
    """
    compiled = torch.compile(partial(_run_checkpointed, "selective", forward), *args, **kwargs)
    allowed = torch._dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=True)
    block.forward = allowed(compiled)
    object.__setattr__(block, _COMPILED, True)


def blocks_of(model: nn.Module, plan: ParallelPlan) -> dict[str, nn.Module]:
    """The outermost modules matching `plan.blocks`, by name; empty where the plan does not recompute.

    Raises ValueError for a pattern matching no module.
    """
    if plan.recompute == "none":
        return {}
    names = [name for name, _ in model.named_modules() if name]
    blocks: dict[str, None] = {}
    for pattern in plan.blocks:
        matching = [name for name in names if fnmatchcase(name, pattern)]
        if not matching:
            raise ValueError(
                f"recompute={plan.recompute!r} works block by block, and blocks {pattern!r} match no module of "
                f"{type(model).__name__}; name the blocks by ParallelPlan(blocks=(...,)); "
                f"{nearest(pattern, names)}"
            )
        blocks |= dict.fromkeys(matching)
    return {name: model.get_submodule(name) for name in blocks if not blocks.keys() & _enclosing(name)}


def _enclosing(name: str) -> set[str]:
    """The names of the modules around a module: of "layers.0.mlp", "layers" and "layers.0"."""
    parts = name.split(".")
    return {".".join(parts[:i]) for i in range(1, len(parts))}


def _run_checkpointed(kind: Recompute, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The output of `forward`, which backward computes again."""
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    if kind == "full":
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, context_fn=_contexts, **kwargs)


def _traced_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """The contexts of a checkpoint within a graph: torch's own, which mark the graph's nodes for the compiler."""
    contexts: tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
    contexts = create_selective_checkpoint_contexts(_policy)  # type: ignore[no-untyped-call]
    return contexts


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Whether a graph keeps an op's output: products, received tensors, and outputs of random ops (by torch's tags).

    torch's fused attention counts as random. To repeat a random op, AOTAutograd would hand the generator's state from
    forward to backward, which in torch 2.13 takes the place where a graph of DTensors hands on the mesh.
    """
    saves = op in (*PRODUCTS, *COMMUNICATING) or torch.Tag.nondeterministic_seeded in op.tags
    return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE


def _contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """The contexts entered around the forward, and around the repetition.

    Called where the checkpoint runs: a compiled block with two graphs runs the checkpoint uncompiled.
    """
    if is_compiling():
        return _traced_contexts()
    products, received = _SavedValues(), _SavedValues()
    return _Save(products, received), _Restore(products, received)


class _SavedValue:
    """A product or a received tensor, made in the forward and used again in the repetition.

    A value that only `PASSING` ops and communication read was merely added into the block's output or into a sent
    tensor. Nothing that the repetition needs depends on the value, so NaNs that take no memory replace the tensor.
    """

    def __init__(self) -> None:
        self.tensor: Tensor | None = None
        self.storages: set[StorageWeakRef] = set()  # of the value, and of values made from the value by `PASSING` ops
        self.needed = False  # whether any other op has read the value

    def fill(self, tensor: Tensor) -> None:
        self.tensor, self.version = tensor, tensor._version
        self.storages = {_storage(tensor)}
        self.needed = not tensor.is_floating_point()

    def close(self) -> None:
        """End of the forward: keep the tensor if needed, else NaNs without memory."""
        self.storages.clear()
        if self.tensor is None:
            return
        self.tensor = self.tensor.detach()  # not where the tensor was made, as changes in place would go unseen
        if not self.needed:
            shape = self.tensor.shape
            self.tensor = torch.full((), float("nan"), dtype=self.tensor.dtype, device=self.tensor.device).expand(shape)
            self.version = self.tensor._version

    def restore(self) -> Tensor:
        assert self.tensor is not None, "a reshard that was started was waited for in the forward"
        if self.tensor._version != self.version:
            raise RuntimeError(
                f"recompute='selective' keeps a product of shape {tuple(self.tensor.shape)}, which was changed in "
                f"place since; change a copy instead, or use recompute='full'"
            )
        return self.tensor.detach()


class _SavedValues(list[_SavedValue]):
    """Saved values in the order of the forward."""

    def add(self) -> _SavedValue:
        self.append(_SavedValue())
        return self[-1]


class _Save(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Around the forward: saves products and received tensors."""

    def __init__(self, products: _SavedValues, received: _SavedValues) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._products, self._received = products, received

    def __enter__(self) -> Any:
        self._communication = ExitStack()
        self._communication.enter_context(record_received(self._begin))
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
            return NotImplemented  # DTensor unwraps first; the local op then comes here
        out = func(*args, **(kwargs or {}))
        operands = {_storage(each) for each in tree_iter((args, kwargs)) if isinstance(each, Tensor)}
        for value in self._values():
            if not value.needed and not operands.isdisjoint(value.storages):
                if func in PASSING or func.namespace in ("c10d", "_c10d_functional"):
                    value.storages |= {_storage(each) for each in tree_iter(out) if isinstance(each, Tensor)}
                else:
                    value.needed = True
        if func in PRODUCTS:
            self._products.add().fill(out)
        return out

    def _begin(self) -> Callable[[Tensor], None]:
        """Called when a reshard starts to communicate. Returns the callback for the received tensor."""
        value = self._received.add()

        def fill_value(received: Tensor) -> None:
            for each in self._values():
                each.storages.discard(_storage(received))  # the received tensor is saved as a separate value
            value.fill(received)

        return fill_value

    def _values(self) -> list[_SavedValue]:
        return [*self._products, *self._received]


class _Restore(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Around the repetition: returns the values saved by `_Save`, in the same order, instead of computing anew."""

    def __init__(self, products: _SavedValues, received: _SavedValues) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._products, self._received = products, received

    def __enter__(self) -> Any:
        self._next_product, received = iter(self._products), iter(self._received)
        self._communication = ExitStack()
        self._communication.enter_context(replay_received(lambda: next(received).restore()))
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> Any:
        self._communication.close()
        return super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        return next(self._next_product).restore() if func in PRODUCTS else func(*args, **(kwargs or {}))


def _storage(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
