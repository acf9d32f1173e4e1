"""Ways to compute a product, with and without an epilogue: Weft's, torch's and Liger's.

100% is the speed of torch's GEMM followed by the compiled epilogue, for the same product in the same run.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from weft.kernels import matmul, swiglu_linear
from weft.kernels.matmul import reference
from weft.kernels.matmul.configurations import MEASURED, Configuration, ProductKind

from benchmarks.failures import Failures
from benchmarks.timing import Clock, Timed, in_turn

# Rows and columns of a weight. qkv: queries, keys and values together. o: the output projection. up: gate or up.
LLAMA_8B = {"qkv": (6144, 4096), "o": (4096, 4096), "up": (14336, 4096), "down": (4096, 14336)}
LLAMA_70B = {"qkv": (10240, 8192), "o": (8192, 8192), "up": (28672, 8192), "down": (8192, 28672)}
SHAPES = {
    f"Llama {size} {name}": of for size, all_ in (("8B", LLAMA_8B), ("70B", LLAMA_70B)) for name, of in all_.items()
}
TOKENS = (1024, 2048, 4096, 8192, 16384)
TORCH = "torch"  # the GEMM and the compiled epilogue
AGAIN = "torch, again"  # the same way again, to show the noise
EPILOGUE = "torch, the epilogue compiled"
AUTOTUNED = "torch.compile, max-autotune"  # takes long to compile
KERNEL = "Weft, the kernel"
STEP = 64  # rows of the smallest tiles
Way = Callable[[], Tensor]


class Inaccurate(AssertionError):
    """The error of a way against float64 is larger than rounding explains."""


@dataclass(frozen=True, slots=True)
class Truth:
    """Some full rows of a product in float64."""

    rows: Tensor  # the indices of the rows
    values: Tensor


def sampled(rows: int) -> Tensor:
    """Indices of the rows to check: a random row of every STEP rows, so that each tile has some, and the last row."""
    starts = torch.arange(0, rows, STEP)
    within = torch.randint(STEP, starts.shape, generator=torch.Generator().manual_seed(rows))
    return torch.cat([starts + within, starts.new_tensor([rows - 1])]).clamp(max=rows - 1).unique()


def chosen(x: Tensor, rows: Tensor) -> Tensor:
    """The given rows of x.

    8-bit numbers are converted to bf16, without rounding, as torch may lack a kernel to index 8-bit tensors.
    """
    return (x.bfloat16() if x.dtype.itemsize == 1 else x)[rows]


@dataclass(frozen=True, slots=True)
class Format:
    """The dtypes of a product."""

    dtype: torch.dtype  # of the factors
    out: torch.dtype  # of the output
    allowed: float  # the largest error of a way, relative to the largest element
    tf32: bool = False

    @contextmanager
    def chosen(self) -> Iterator[None]:
        """Within the context, float32 is multiplied in tf32 if `tf32`, else in full precision."""
        settings = torch.backends.cuda.matmul
        before = settings.fp32_precision
        settings.fp32_precision = "tf32" if self.tf32 else "ieee"
        try:
            yield
        finally:
            settings.fp32_precision = before


FORMATS = {
    "bf16": Format(torch.bfloat16, torch.bfloat16, 2.0**-7),  # an ulp
    "fp16": Format(torch.float16, torch.float16, 2.0**-10),
    "fp32": Format(torch.float32, torch.float32, 2.0**-14),  # sums of up to 2**15 terms, rounded to 24 bits
    "tf32": Format(torch.float32, torch.float32, 2.0**-9, tf32=True),  # tf32 cuts factors to 11 bits
    "fp8": Format(torch.float8_e4m3fn, torch.bfloat16, 2.0**-7),
}
BF16 = FORMATS["bf16"]


@dataclass(frozen=True, slots=True)
class Factors:
    """The operands of a product. Outputs are approximately standard normal."""

    a: Tensor  # [M, K]
    b: Tensor  # [K, N]
    up: Tensor  # [K, N]
    bias: Tensor  # [N]
    scales: tuple[Tensor, Tensor] | tuple[None, None] = (None, None)  # of a's rows and b's columns, for 8-bit factors

    @classmethod
    def of(cls, M: int, N: int, K: int, device: str, format: Format = BF16, transposed: str = "b") -> Factors:
        """Draws operands. transposed: the transposed factors, as in `ProductClass`."""
        generator = torch.Generator(device).manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, device=device, generator=generator)

        def factor(name: str, rows: int, cols: int, scale: float = 1.0) -> Tensor:
            drawn = normal(cols, rows).mT if name in transposed else normal(rows, cols)
            return (drawn * scale).to(format.dtype)

        eight = format.dtype.itemsize == 1  # 8-bit factors are scaled outside, as small 8-bit numbers have few bits
        of_b = 1.0 if eight else K**-0.5
        scales = (normal(M).abs(), torch.full((N,), K**-0.5, device=device)) if eight else (None, None)
        factors = factor("a", M, K), factor("b", K, N, of_b), factor("b", K, N, of_b)
        return cls(*factors, normal(N).to(format.out), scales)

    def wide(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The given rows of a, and b, up and the bias, in float64 with the scales applied."""
        a, b, up, bias = (each.double() for each in (chosen(self.a, rows), self.b, self.up, self.bias))
        of_a, of_b = self.scales
        return (
            a if of_a is None else a * (of_a[rows, None] if of_a.ndim else of_a),
            b if of_b is None else b * of_b,
            up,
            bias,
        )

    def with_one_scale(self) -> Factors:
        """The same operands with a single scale for each factor."""
        one, other = (None if each is None else each.mean() for each in self.scales)
        assert one is not None and other is not None, "8-bit factors have scales"
        return replace(self, scales=(one, other))


def uses_kernel(
    given: Factors, bias: Tensor | None, activation: str | None, configuration: Configuration | None
) -> Tensor:
    """The product by the Triton kernel, even where another way was measured to be faster.

    configuration: None for the table's or the rule's configuration.
    """
    from weft.kernels.matmul import launch

    a, b = given.a, given.b
    out = given.bias.new_empty(len(a), b.shape[1])
    launch.product(a, b, bias, None, *given.scales, out, None, activation, configuration=configuration)
    return out


def plain(given: Factors, configuration: Configuration | None = None) -> dict[str, Way]:
    """Ways to compute a @ b. configuration: of the kernel."""
    a, b = given.a, given.b
    tuned = torch.compile(torch.mm, mode="max-autotune-no-cudagraphs", dynamic=False)
    return {
        "Weft": lambda: matmul(a, b),
        KERNEL: lambda: uses_kernel(given, None, None, configuration),
        TORCH: lambda: torch.mm(a, b),
        AGAIN: lambda: torch.mm(a, b),
        AUTOTUNED: lambda: tuned(a, b),
    }


def with_gelu(given: Factors, configuration: Configuration | None = None) -> dict[str, Way]:
    """Ways to compute gelu(a @ b + bias). configuration: of the kernel.

    For 8-bit factors TORCH is the op's torch path, which runs where the kernel does not.
    """
    a, b, bias, (of_a, of_b) = given.a, given.b, given.bias, given.scales
    ways: dict[str, Way] = {
        "Weft": lambda: matmul(a, b, bias=bias, activation="gelu", a_scale=of_a, b_scale=of_b),
        KERNEL: lambda: uses_kernel(given, bias, "gelu", configuration),
    }
    if of_a is not None:
        assert of_b is not None, "both factors have scales, or neither has"
        scales = of_a, of_b
        with_epilogue = torch.compile(_scaled_gelu, dynamic=False)
        return ways | {
            TORCH: lambda: reference.product(a, b, bias, None, *scales, activation="gelu", out_dtype=bias.dtype)[0],
            EPILOGUE: lambda: with_epilogue(a, b, *scales, bias),
        }
    compiled = torch.compile(_gelu, dynamic=False)
    tuned = torch.compile(_gelu, mode="max-autotune-no-cudagraphs", dynamic=False)
    return ways | {
        TORCH: lambda: compiled(a, b, bias),
        AUTOTUNED: lambda: tuned(a, b, bias),
    }


def gated_by_kernel(given: Factors, configuration: Configuration | None) -> Tensor:
    """silu(a @ b) * (a @ up) by the Triton kernel; see `uses_kernel`."""
    from weft.kernels.matmul import launch

    out = given.bias.new_empty(len(given.a), given.b.shape[1])
    launch.gated(given.a, given.b, given.up, out, None, None, configuration)
    return out


def gated(given: Factors, configuration: Configuration | None = None) -> dict[str, Way]:
    """Ways to compute silu(a @ b) * (a @ up). configuration: of the kernel."""
    a, b, up = given.a, given.b, given.up
    compiled = torch.compile(_swiglu, dynamic=False)
    ways: dict[str, Way] = {
        "Weft": lambda: swiglu_linear(a, b.mT, up.mT),
        KERNEL: lambda: gated_by_kernel(given, configuration),
        TORCH: lambda: compiled(a, b, up),
    }
    if importlib.util.find_spec("liger_kernel"):
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction  # type: ignore[import-not-found, unused-ignore]

        ways["Liger"] = lambda: LigerSiLUMulFunction.apply(a @ b, a @ up)
    return ways


def _gelu(a: Tensor, b: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(a @ b + bias)


def _scaled_gelu(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(reference.scaled_product(a, b, a_scale, b_scale, bias.dtype) + bias)


def _swiglu(a: Tensor, b: Tensor, up: Tensor) -> Tensor:
    return F.silu(a @ b) * (a @ up)


@dataclass(frozen=True, slots=True)
class What:
    """A kind of product: the ways to compute it, and the true value."""

    of: ProductKind  # the kind's name in the table of measurements
    ways: Callable[..., dict[str, Way]]
    truth: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # from a, b, up and the bias
    format: Format = BF16

    def factors(
        self, M: int, N: int, K: int, device: str, format: Format | None = None, transposed: str = "b"
    ) -> Factors:
        given = Factors.of(M, N, K, device, format or self.format, transposed)
        return given.with_one_scale() if self.of == "one_scale" else given

    def truth_of(self, given: Factors) -> Truth:
        rows = sampled(len(given.a))
        return Truth(rows, self.truth(*given.wide(rows)))


def _truth_of_gelu(a: Tensor, b: Tensor, up: Tensor, bias: Tensor) -> Tensor:
    return _gelu(a, b, bias)


KINDS = {
    "plain": What("plain", plain, lambda a, b, up, bias: a @ b),
    "gelu": What("fused", with_gelu, _truth_of_gelu),
    "swiglu": What("gated", gated, lambda a, b, up, bias: _swiglu(a, b, up)),
    "fp8": What("fused", with_gelu, _truth_of_gelu, FORMATS["fp8"]),
    "fp8, one scale": What("one_scale", with_gelu, _truth_of_gelu, FORMATS["fp8"]),
}


@dataclass(frozen=True, slots=True)
class Compared:
    """The times of all ways to compute a product."""

    kind: str
    sizes: tuple[int, int, int]
    timed: Mapping[str, Timed]  # by way, of the accurate ways
    failed: Mapping[str, str]  # the reason of each failed way
    tuned: bool  # whether the table of measurements has this class of products

    @property
    def flop(self) -> int:
        return 2 * math.prod(self.sizes) * (2 if self.kind == "swiglu" else 1)

    @property
    def name(self) -> str:
        dtype = "e4m3" if "fp8" in self.kind else "bf16"
        return f"{self.kind}, {' x '.join(map(str, self.sizes))} {dtype}"

    def of_torch(self, way: str) -> float:
        """torch's time divided by this way's time. torch's way is EPILOGUE if present, else TORCH."""
        return self.timed[EPILOGUE if EPILOGUE in self.timed else TORCH].median / self.timed[way].median

    def __str__(self) -> str:
        lines = [self.name]
        for way, timed in self.timed.items():
            rate = self.flop / timed.median / 1e12
            lines.append(
                f"{way:32}{timed.median * 1e3:9.3f} ms{rate:9.0f} TFLOP/s{self.of_torch(way):8.1%} of torch's speed"
            )
        return "\n".join([*lines, *(f"{way:32}failed: {error}" for way, error in self.failed.items())])


def compared(
    kind: str, M: int, N: int, K: int, device: str, clock: Clock, rounds: int = 20, autotuned: bool = False
) -> Compared:
    """Checks each way against float64, and times the accurate ways in turn.

    autotuned: include AUTOTUNED, in which torch.compile tries many GEMMs.
    Raises Inaccurate and all other errors of Weft's ways.
    """
    from weft.kernels.matmul.launch import class_of

    # torch compiles a function for eight sizes; further sizes would run uncompiled, with only a warning.
    torch.compiler.reset()
    what, failed = KINDS[kind], Failures()
    given = what.factors(M, N, K, device)
    truth, right = what.truth_of(given), dict[str, Way]()
    with torch.no_grad():
        for name, way in what.ways(given).items():
            if name != AUTOTUNED or autotuned:
                with failed.of(name):
                    check(name, way(), truth, what.format.allowed)
                    right[name] = way
        timed = in_turn(right, clock, rounds=rounds, replayed=(), guard=failed.of)
    return Compared(kind, (M, N, K), timed, failed, class_of(given.a, given.b, what.of) in MEASURED)


def check(name: str, found: Tensor, truth: Truth, allowed: float = BF16.allowed) -> None:
    """Raises Inaccurate if an error exceeds `allowed` times the largest element."""
    error, largest = float((found[truth.rows].double() - truth.values).abs().max()), float(truth.values.abs().max())
    if not error <= allowed * largest:
        raise Inaccurate(f"{name} errs by {error:.3g}; the largest element is {largest:.3g}")
