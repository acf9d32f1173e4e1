"""The ways to a product, and to one with what follows it, that are timed in turn: Weft's, torch's, Liger's.

100% is what torch's GEMM reaches of the same product in the same run, followed by the same epilogue compiled.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from weft.kernels import matmul, swiglu_linear
from weft.kernels.matmul.configurations import Configuration

from benchmarks.failures import Failures
from benchmarks.timing import Clock, Timed, in_turn

# Rows of a weight and its columns: query, key and value together, the output's, gate or up, down.
LLAMA_8B = {"qkv": (6144, 4096), "o": (4096, 4096), "up": (14336, 4096), "down": (4096, 14336)}
LLAMA_70B = {"qkv": (10240, 8192), "o": (8192, 8192), "up": (28672, 8192), "down": (8192, 28672)}
SHAPES = {
    f"Llama {size} {name}": of for size, all_ in (("8B", LLAMA_8B), ("70B", LLAMA_70B)) for name, of in all_.items()
}
TOKENS = (1024, 2048, 4096, 8192, 16384)
TORCH = "torch"  # the GEMM, and the epilogue compiled
KERNEL = "Weft, the kernel"
ROWS, ALLOWED = 16, 2.0**-7  # of the rows that are checked, of the largest element: an ulp of bf16
Way = Callable[[], Tensor]


class Inaccurate(AssertionError):
    """A way is farther from float64 than rounding explains."""


@dataclass(frozen=True, slots=True)
class Factors:
    """x [M, K], the weight [N, K], another one and a bias [N], so that outputs are about randn."""

    x: Tensor
    weight: Tensor
    up: Tensor
    bias: Tensor

    @classmethod
    def of(cls, M: int, N: int, K: int, device: str) -> Factors:
        generator = torch.Generator(device).manual_seed(0)

        def normal(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(shape, device=device, generator=generator) * scale).bfloat16()

        return cls(normal(M, K), normal(N, K, scale=K**-0.5), normal(N, K, scale=K**-0.5), normal(N))


def by_kernel(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, configuration: Configuration | None
) -> Tensor:
    """By the Triton kernel, whatever is measured; without a configuration by that which the rule has."""
    from weft.kernels.matmul import launch

    out = x.new_empty(len(x), len(weight))
    launch.product(x, weight.mT, bias, None, None, None, out, None, activation, configuration=configuration)
    return out


def plain(given: Factors, configuration: Configuration | None = None) -> dict[str, Way]:
    """x @ weight.T. configuration: of the kernel alone."""
    x, weight = given.x, given.weight
    tuned = torch.compile(torch.mm, mode="max-autotune-no-cudagraphs", dynamic=False)
    return {
        "Weft": lambda: matmul(x, weight.mT),
        KERNEL: lambda: by_kernel(x, weight, None, None, configuration),
        TORCH: lambda: torch.mm(x, weight.mT),
        "torch.compile, max-autotune": lambda: tuned(x, weight.mT),
    }


def with_gelu(given: Factors, configuration: Configuration | None = None) -> dict[str, Way]:
    """gelu(x @ weight.T + bias)."""
    x, weight, bias = given.x, given.weight, given.bias
    compiled = torch.compile(_gelu, dynamic=False)
    tuned = torch.compile(_gelu, mode="max-autotune-no-cudagraphs", dynamic=False)
    return {
        "Weft": lambda: matmul(x, weight.mT, bias=bias, activation="gelu"),
        KERNEL: lambda: by_kernel(x, weight, bias, "gelu", configuration),
        TORCH: lambda: compiled(x, weight, bias),
        "torch.compile, max-autotune": lambda: tuned(x, weight, bias),
    }


def gated_by_kernel(x: Tensor, weight: Tensor, up: Tensor, configuration: Configuration | None) -> Tensor:
    """As `by_kernel`, of two products and their gate."""
    from weft.kernels.matmul import launch

    out = x.new_empty(len(x), len(weight))
    launch.gated(x, weight.mT, up.mT, out, None, None, configuration)
    return out


def gated(given: Factors, configuration: Configuration | None = None) -> dict[str, Way]:
    """silu(x @ weight.T) * (x @ up.T)."""
    x, weight, up = given.x, given.weight, given.up
    compiled = torch.compile(_swiglu, dynamic=False)
    ways: dict[str, Way] = {
        "Weft": lambda: swiglu_linear(x, weight, up),
        KERNEL: lambda: gated_by_kernel(x, weight, up, configuration),
        TORCH: lambda: compiled(x, weight, up),
    }
    if importlib.util.find_spec("liger_kernel"):
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction  # type: ignore[import-not-found, unused-ignore]

        ways["Liger"] = lambda: LigerSiLUMulFunction.apply(x @ weight.mT, x @ up.mT)
    return ways


def _gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(x @ weight.mT + bias)


def _swiglu(x: Tensor, weight: Tensor, up: Tensor) -> Tensor:
    return F.silu(x @ weight.mT) * (x @ up.mT)


def _plain(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight.mT


def truths(given: Factors) -> dict[str, Tensor]:
    """Of each kind the first ROWS rows in float64."""
    x, weight, up, bias = (each.double() for each in (given.x[:ROWS], given.weight, given.up, given.bias))
    return {"plain": _plain(x, weight), "gelu": _gelu(x, weight, bias), "swiglu": _swiglu(x, weight, up)}


KINDS: Mapping[str, Callable[..., dict[str, Way]]] = {"plain": plain, "gelu": with_gelu, "swiglu": gated}


@dataclass(frozen=True, slots=True)
class Compared:
    """Of a product of these sizes, what each way took that is right; why the others failed."""

    kind: str
    sizes: tuple[int, int, int]
    timed: Mapping[str, Timed]
    failed: Mapping[str, str]

    @property
    def flop(self) -> int:
        return 2 * math.prod(self.sizes) * (2 if self.kind == "swiglu" else 1)

    def of_torch(self, way: str) -> float:
        """torch's time over this way's."""
        return self.timed[TORCH].median / self.timed[way].median

    def __str__(self) -> str:
        lines = [f"{self.kind}, {' x '.join(map(str, self.sizes))} bf16"]
        for way, timed in self.timed.items():
            rate = self.flop / timed.median / 1e12
            lines.append(
                f"{way:32}{timed.median * 1e3:9.3f} ms{rate:9.0f} TFLOP/s{self.of_torch(way):8.1%} of torch's speed"
            )
        return "\n".join([*lines, *(f"{way:32}failed: {error}" for way, error in self.failed.items())])


def compared(kind: str, M: int, N: int, K: int, device: str, clock: Clock, rounds: int = 20) -> Compared:
    """Each way checked against float64, then timed, in turn. Raises Inaccurate, or whatever a way of Weft's raises."""
    given, failed = Factors.of(M, N, K, device), Failures()
    truth = truths(given)[kind]
    right: dict[str, Way] = {}
    with torch.no_grad():
        for name, way in KINDS[kind](given).items():
            with failed.of(name):
                check(name, way(), truth)
                right[name] = way
        timed = in_turn(right, clock, rounds=rounds, replayed=(), guard=failed.of)
    return Compared(kind, (M, N, K), timed, failed)


def check(name: str, found: Tensor, truth: Tensor) -> None:
    """Raises Inaccurate."""
    error, largest = float((found[:ROWS].double() - truth).abs().max()), float(truth.abs().max())
    if not error <= ALLOWED * largest:
        raise Inaccurate(f"{name} errs by {error:.3g}, of {largest:.3g} at the most")
