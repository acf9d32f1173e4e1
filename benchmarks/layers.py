"""The ways to compute a layer and its gradients that are timed against Weft's: torch's own ops, those compiled, Liger's."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from weft import kernels

from benchmarks.losses import Made, Ways

Layer = Callable[..., Any]  # of a set of operands: an output, or a tuple of them


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A layer. weft, eager: of the operands, of which the first `wide` are [N, H] and the others [H].

    liger: module and name of Liger's function, and what it takes after the operands; None where it has none.
    passes: over [N, H] that no way does without, in forward and in backward.
    """

    weft: Layer
    eager: Layer
    wide: int
    others: int
    liger: tuple[str, str, tuple[Any, ...]] | None
    passes: tuple[int, int]


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, 1e-6)


def _add_and_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return total, _norm(total, weight)


CASES = {
    "rms_norm": Case(
        weft=kernels.rms_norm, eager=_norm, wide=1, others=1, passes=(2, 3),
        liger=("rms_norm", "LigerRMSNormFunction", (1e-6, 0.0, "llama", False)),
    ),
    "add_rms_norm": Case(
        weft=kernels.add_rms_norm, eager=_add_and_norm, wide=2, others=1, passes=(4, 4),
        liger=("fused_add_rms_norm", "LigerFusedAddRMSNormFunction", (1e-6, 0.0, "llama", False)),
    ),
    "layer_norm": Case(
        weft=kernels.layer_norm, eager=lambda x, w, b: F.layer_norm(x, w.shape, w, b), wide=1, others=2, passes=(2, 3),
        liger=("layer_norm", "LigerLayerNormFunction", (1e-5,)),
    ),
    "swiglu": Case(
        weft=kernels.swiglu, eager=lambda gate, up: F.silu(gate) * up, wide=2, others=0, passes=(3, 5),
        liger=("swiglu", "LigerSiLUMulFunction", ()),
    ),
    "geglu": Case(
        weft=lambda gate, up: kernels.geglu(gate, up, approximate="tanh"),
        eager=lambda gate, up: F.gelu(gate, approximate="tanh") * up, wide=2, others=0, passes=(3, 5),
        liger=("geglu", "LigerGELUMulFunction", ()),
    ),
}  # fmt: skip


def operands(case: Case, N: int, H: int, device: str, seed: int) -> tuple[Tensor, ...]:
    """In bf16, at random; each has a gradient."""
    generator = torch.Generator(device).manual_seed(seed)
    shapes = [(N, H)] * case.wide + [(H,)] * case.others
    made = (torch.randn(shape, device=device, generator=generator).bfloat16() for shape in shapes)
    return tuple(each.requires_grad_() for each in made)


def upstream_of(outputs: tuple[Tensor, ...]) -> list[Tensor]:
    """Gradients of the outputs, the same for all ways."""
    generator = torch.Generator(outputs[0].device).manual_seed(7)
    shapes = [each.shape for each in outputs]
    return [torch.randn(shape, device=outputs[0].device, generator=generator).bfloat16() for shape in shapes]


def as_tuple(found: Any) -> tuple[Tensor, ...]:
    return tuple(found) if isinstance(found, tuple) else (found,)


def ways_of(case: Case, sets: list[tuple[Tensor, ...]], backward: bool) -> Ways:
    """Forward alone, or with backward. A call takes the next set of operands."""
    ways = Ways()
    upstream = upstream_of(as_tuple(case.eager(*sets[0])))

    def add(name: str, layer: Callable[[], Layer]) -> None:
        with ways.failed.of(name):
            ways.made[name] = _in_turn(layer(), sets, upstream if backward else None)

    add("Weft", lambda: case.weft)
    add("eager torch", lambda: case.eager)
    add("torch.compile", lambda: torch.compile(case.eager, dynamic=False))
    if case.liger is not None:
        liger = liger_layer(case)
        if liger is None:
            ways.absent.append("Liger")
        else:
            add("Liger", lambda: liger)
    return ways


def liger_layer(case: Case) -> Layer | None:
    """Liger's layer of the same operands; None where it is not installed."""
    if case.liger is None or not importlib.util.find_spec("liger_kernel"):
        return None
    module, name, more = case.liger
    function = getattr(importlib.import_module(f"liger_kernel.ops.{module}"), name)

    def layer(*given: Tensor) -> Any:
        found = function.apply(*given, *more)
        return found[::-1] if module == "fused_add_rms_norm" else found  # it gives the norm first

    return layer


def _in_turn(layer: Layer, sets: list[tuple[Tensor, ...]], upstream: list[Tensor] | None) -> Callable[[], Made]:
    turn = 0

    def way() -> Made:
        nonlocal turn
        given = sets[turn % len(sets)]
        turn += 1
        if upstream is None:
            with torch.no_grad():
                return Made(as_tuple(layer(*given))[-1], [])
        outputs = as_tuple(layer(*given))
        return Made(outputs[-1].detach(), torch.autograd.grad(outputs, given, upstream))

    return way
