"""The reshards at the boundaries of a parallel model's layers, which are hooks of its modules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from weft.mesh import Layout
from weft.reshard import layout_of, reshard
from weft.reshard.running.dynamo import in_graph

from .plan import ParallelPlan
from .styles import TENSOR_AXIS, ColwiseParallel, RowwiseParallel, Style, VocabParallel

TOKENS_DIM = 1  # activations are [B, T, ...]


def column_siblings(styles: dict[str, Style]) -> dict[str, list[str]]:
    """Column-parallel modules by the name of their parent: those that share an entrance."""
    siblings: dict[str, list[str]] = {}
    for name, style in styles.items():
        if isinstance(style, ColwiseParallel):
            siblings.setdefault(name.rpartition(".")[0], []).append(name)
    return siblings


def _enter(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """A tensor enters a column-parallel layer: it is made whole.

    The forward gathers a sequence-parallel input and moves nothing otherwise; the backward reduces the gradient.
    """
    x, *rest = args
    return (_along_tensor_axis(x, "R"), *rest) if isinstance(x, DTensor) else args  # a plain one counts as replicated


class _Entrance:
    """Where a tensor enters column-parallel siblings: as `_enter`, once, whichever of them come for it."""

    def __init__(self) -> None:
        self._outside: Tensor | None = None
        self._entered: tuple[Any, ...] | None = None

    def enter(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if args[0] is not self._outside or self._entered is None:
            self._outside, self._entered = args[0], _enter(module, args[:1])
        return *self._entered, *args[1:]

    def close(self, *_: object) -> None:
        """Called when the parent returns, so that no activation outlives it."""
        self._outside = self._entered = None


def hook(model: nn.Module, styles: dict[str, Style], plan: ParallelPlan) -> None:
    """Puts the reshards where the model's layers meet."""
    modules = dict(model.named_modules())
    places = Counter(module for _, module in model.named_modules(remove_duplicate=False))
    for parent, names in column_siblings(styles).items():
        if len(names) == 1 and places[modules[names[0]]] == 1:
            modules[names[0]].register_forward_pre_hook(_enter)
            continue
        entrance = _Entrance()
        for name in names:
            modules[name].register_forward_pre_hook(entrance.enter)
        modules[parent].register_forward_hook(entrance.close, always_call=True)
    stream = f"S({TOKENS_DIM})" if plan.sequence else "R"
    for name, style in styles.items():
        if isinstance(style, RowwiseParallel | VocabParallel):
            modules[name].register_forward_hook(_leave(stream))
    if not plan.loss_parallel:
        model.register_forward_hook(_leave("R"))


@in_graph
def _along_tensor_axis(x: DTensor, placement: str) -> DTensor:
    """x with another placement on the tensor axis."""
    return reshard(x, placements=_replaced(layout_of(x), placement))


@lru_cache(maxsize=1024)  # a few layouts, asked for at every boundary of every step
def _replaced(layout: Layout, placement: str) -> Layout:
    return layout.replace(**{TENSOR_AXIS: placement})


def _leave(placement: str) -> Callable[[nn.Module, Any, DTensor], DTensor]:
    def hook(module: nn.Module, args: Any, output: DTensor) -> DTensor:
        return _along_tensor_axis(output, placement)

    return hook
