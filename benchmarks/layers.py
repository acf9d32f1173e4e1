"""Ways to compute a layer and its gradients: Weft's op, torch's eager ops, the same ops compiled, and Liger's op."""

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

WIDE = ("x", "y", "table")
HEAD = 128
NEVER = 1e-12  # a dropout probability: random numbers are drawn, but no element is dropped, so all ways agree
Layer = Callable[..., Any]  # maps a set of operands to an output, or to a tuple of outputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A layer to benchmark, and the functions which compute the layer."""

    weft: Layer
    eager: Layer
    takes: str  # the names of the operands, which `operands` makes
    passes: tuple[int, int]  # the fewest reads and writes of an [N, H] tensor, in forward and in backward
    # The module and name of Liger's function, and the arguments after the operands; None if Liger has no such function.
    liger: tuple[str, str, tuple[Any, ...]] | None = None

    @property
    def wide(self) -> int:
        """The number of operands of shape [N, H]."""
        return sum(name in WIDE for name in self.takes.split())


def drops(p: float) -> Case:
    """Dropout with probability p, and a residual addition."""
    return Case(
        weft=lambda x, y: kernels.dropout(x, p, 0, residual=y), eager=lambda x, y: y + F.dropout(x, p),
        takes="x y", passes=(3, 2),
    )  # fmt: skip


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, 1e-6)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """rope, as in transformers."""
    heads = x.unflatten(-1, (-1, 2 * cos.shape[-1]))  # [N, heads, D]
    first, second = heads.chunk(2, -1)
    cos, sin = (torch.cat((each, each), -1).unsqueeze(-2).to(x.dtype) for each in (cos, sin))
    return (heads * cos + torch.cat((-second, first), -1) * sin).flatten(-2)


def _turn_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Interleaved rope, as in transformers' GPT-J."""
    heads = x.unflatten(-1, (-1, 2 * cos.shape[-1]))  # [N, heads, D]
    cos, sin = (each.repeat_interleave(2, -1).unsqueeze(-2).to(x.dtype) for each in (cos, sin))
    turned = torch.stack((-heads[..., 1::2], heads[..., ::2]), -1).flatten(-2)
    return (heads * cos + turned * sin).flatten(-2)


def _norm_and_turn(x: Tensor, head: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    heads = x.unflatten(-1, (-1, len(head)))  # [N, heads, D]
    return _turn(_norm(heads, head).flatten(-2), cos, sin)


def _add_and_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return total, _norm(total, weight)


def _add_and_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return total, F.layer_norm(total, weight.shape, weight, bias)


CASES = {
    "rms_norm": Case(
        weft=kernels.rms_norm, eager=_norm, takes="x weight", passes=(2, 3),
        liger=("rms_norm", "LigerRMSNormFunction", (1e-6, 0.0, "llama", False)),
    ),
    "add_rms_norm": Case(
        weft=kernels.add_rms_norm, eager=_add_and_norm, takes="x y weight", passes=(4, 4),
        liger=("fused_add_rms_norm", "LigerFusedAddRMSNormFunction", (1e-6, 0.0, "llama", False)),
    ),
    "layer_norm": Case(
        weft=kernels.layer_norm, eager=lambda x, w, b: F.layer_norm(x, w.shape, w, b),
        takes="x weight bias", passes=(2, 3),
        liger=("layer_norm", "LigerLayerNormFunction", (1e-5,)),
    ),
    "add_layer_norm": Case(
        weft=kernels.add_layer_norm, eager=_add_and_layer_norm, takes="x y weight bias", passes=(4, 4)
    ),
    "gelu": Case(
        weft=lambda x: kernels.gelu(x, approximate="tanh"), eager=lambda x: F.gelu(x, approximate="tanh"),
        takes="x", passes=(2, 3),
    ),
    "swiglu": Case(
        weft=kernels.swiglu, eager=lambda gate, up: F.silu(gate) * up, takes="x y", passes=(3, 5),
        liger=("swiglu", "LigerSiLUMulFunction", ()),
    ),
    "geglu": Case(
        weft=lambda gate, up: kernels.geglu(gate, up, approximate="tanh"),
        eager=lambda gate, up: F.gelu(gate, approximate="tanh") * up, takes="x y", passes=(3, 5),
        liger=("geglu", "LigerGELUMulFunction", ()),
    ),
    "rope": Case(
        weft=kernels.rope, eager=_turn, takes="x cos sin", passes=(2, 2), liger=("rope", "LigerRopeFunction", ()),
    ),
    "rope, interleaved": Case(
        weft=lambda x, cos, sin: kernels.rope(x, cos, sin, interleaved=True), eager=_turn_interleaved,
        takes="x cos sin", passes=(2, 2),
    ),
    "rms_norm_rope": Case(
        weft=kernels.rms_norm_rope, eager=_norm_and_turn, takes="x head cos sin", passes=(2, 3)
    ),
    "embedding": Case(weft=kernels.embedding, eager=F.embedding, takes="tokens table", passes=(2, 2)),
    "dropout, residual": drops(NEVER),
}  # fmt: skip


def operands(
    case: Case, N: int, H: int, device: str, seed: int, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, ...]:
    """Draws a case's operands: random numbers which bf16 can represent, all with gradients.

    The exceptions have no gradient: N tokens for a table of N rows, and cosines and sines in float32.
    """
    generator = torch.Generator(device).manual_seed(seed)
    D = min(HEAD, H)
    rates = torch.logspace(0, -4, D // 2, device=device)
    angles = torch.outer(torch.arange(N, device=device), rates)  # [N, D / 2]

    def made(name: str) -> Tensor:
        if name == "tokens":
            return torch.randint(N, (N,), device=device, generator=generator)
        if name in ("cos", "sin"):
            return angles.cos() if name == "cos" else angles.sin()
        shape = (N, H) if name in WIDE else (H, H) if name == "square" else (D,) if name == "head" else (H,)
        return torch.randn(shape, device=device, generator=generator).bfloat16().to(dtype).requires_grad_()

    return tuple(map(made, case.takes.split()))


def leaves(given: tuple[Tensor, ...]) -> list[Tensor]:
    """The operands with a gradient."""
    return [each for each in given if each.requires_grad]


def upstream_of(outputs: tuple[Tensor, ...], dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """Upstream gradients, the same for all ways: random numbers which bf16 can represent."""
    generator = torch.Generator(outputs[0].device).manual_seed(7)
    shapes = [each.shape for each in outputs]
    return [torch.randn(shape, device=outputs[0].device, generator=generator).bfloat16().to(dtype) for shape in shapes]


def as_tuple(found: Any) -> tuple[Tensor, ...]:
    return tuple(found) if isinstance(found, tuple) else (found,)


def ways_of(case: Case, sets: list[tuple[Tensor, ...]], backward: bool) -> Ways:
    """The ways to compute a case, forward alone or with backward. Each call takes the next set of operands."""
    # torch compiles a function for eight sizes; further sizes would run uncompiled, with only a warning.
    torch.compiler.reset()
    ways = Ways()
    like = as_tuple(case.eager(*sets[0]))

    def add(name: str, layer: Callable[[], Layer], sets: list[tuple[Tensor, ...]] = sets) -> None:
        with ways.failed.of(name):
            ways.made[name] = _in_turn(layer(), sets, upstream_of(like) if backward else None)

    add("Weft", lambda: case.weft)
    add("eager torch", lambda: case.eager)
    add("torch.compile", lambda: torch.compile(case.eager, dynamic=False))
    if case.liger is not None:
        liger = liger_layer(case)
        if liger is None:
            ways.absent.append("Liger")
        else:
            # Liger's rope overwrites the operands and the upstream gradient.
            add("Liger", lambda: liger, [tuple(map(_copied, given)) for given in sets])
    return ways


def liger_layer(case: Case) -> Layer | None:
    """Liger's layer for the same operands; None if Liger is not installed or has no such layer."""
    if case.liger is None or not importlib.util.find_spec("liger_kernel"):
        return None
    module, name, more = case.liger
    function = getattr(importlib.import_module(f"liger_kernel.ops.{module}"), name)

    def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Liger's rope, which rotates queries and keys in one call: here queries x, and a single unused key head."""
        queries = x.unflatten(-1, (-1, 2 * cos.shape[-1]))[None].transpose(1, 2)  # [1, heads, N, D]
        key = torch.empty_like(queries[:, :1])
        turned: Tensor = function.apply(queries, key, cos[None], sin[None])[0]
        return turned.transpose(1, 2).reshape(x.shape)

    def layer(*given: Tensor) -> Any:
        found = function.apply(*given, *more)
        return found[::-1] if module == "fused_add_rms_norm" else found  # Liger returns the norm first

    return turn if module == "rope" else layer


def _copied(operand: Tensor) -> Tensor:
    return operand.detach().clone().requires_grad_(operand.requires_grad)


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
        return Made(outputs[-1].detach(), torch.autograd.grad(outputs, leaves(given), upstream))

    return way
