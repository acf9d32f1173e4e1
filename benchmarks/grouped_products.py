"""Ways to compute products of groups of rows: Weft's kernels, and a torch GEMM for each group in turn."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from weft.kernels.matmul import reference
from weft.kernels.matmul.configurations import Configuration

from benchmarks.products import BF16, KERNEL, TORCH, Format, Truth, Way, chosen, sampled

# The number of experts, and the columns of an expert's output and input. up stands for gate, too.
EXPERTS = {
    "Mixtral 8x7B up": (8, 14336, 4096),
    "Mixtral 8x7B down": (8, 4096, 14336),
    "Qwen3 30B A3B up": (128, 768, 2048),
    "Qwen3 30B A3B down": (128, 2048, 768),
}


@dataclass(frozen=True, slots=True)
class Groups:
    """Operands of a grouped product, in G groups of equally many rows."""

    a: Tensor  # [M, K]
    b: Tensor  # [G, K, N]
    grad: Tensor  # [M, N]
    offsets: Tensor  # the end of each group
    ends: tuple[int, ...]  # the same, on the host
    out: torch.dtype

    @classmethod
    def of(
        cls, groups: int, M: int, N: int, K: int, device: str, format: Format = BF16, transposed: str = ""
    ) -> Groups:
        """Draws operands with M rows in all. transposed: "b" makes the columns of b contiguous."""
        generator = torch.Generator(device).manual_seed(0)

        def normal(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(shape, device=device, generator=generator) * scale).to(format.dtype)

        b = normal(groups, N, K, scale=K**-0.5).mT if "b" in transposed else normal(groups, K, N, scale=K**-0.5)
        ends = tuple(M // groups * (g + 1) for g in range(groups))
        offsets = torch.tensor(ends, dtype=torch.int32, device=device)
        return cls(normal(M, K), b, normal(M, N), offsets, ends, format.out)

    def rows(self) -> list[slice]:
        return [slice(start, stop) for start, stop in pairwise((0, *self.ends))]


def of_rows(given: Groups, configuration: Configuration | None = None) -> dict[str, Way]:
    """Ways to compute a[rows] @ b[g] for each group. configuration: of the kernel."""
    a, b = given.a, given.b
    out = torch.empty(len(a), b.shape[-1], dtype=given.out, device=a.device)

    def uses_kernel() -> Tensor:
        from weft.kernels.grouped_matmul import launch

        launch.forward(a, b, given.offsets, None, None, None, None, out, None, configuration=configuration)
        return out

    def one_by_one() -> Tensor:
        for rows, each in zip(given.rows(), b, strict=True):
            out[rows] = reference.product(a[rows], each, out_dtype=given.out)[0]
        return out

    return {KERNEL: uses_kernel, TORCH: one_by_one}


def of_weights(given: Groups, configuration: Configuration | None = None) -> dict[str, Way]:
    """Ways to compute a[rows].T @ grad[rows] for each group, stacked along the rows. configuration: of the kernel."""
    a, grad = given.a, given.grad
    out = torch.empty(given.b.shape, dtype=given.out, device=a.device)

    def uses_kernel() -> Tensor:
        from weft.kernels.grouped_matmul import launch

        launch.weights(a, grad, given.offsets, out, configuration=configuration)
        return out.flatten(0, 1)

    def one_by_one() -> Tensor:
        for rows, each in zip(given.rows(), out, strict=True):
            torch.mm(a[rows].mT, grad[rows], out=each)
        return out.flatten(0, 1)

    return {KERNEL: uses_kernel, TORCH: one_by_one}


def truth_of_rows(given: Groups) -> Truth:
    """The product in float64, at some rows of each group, including the group's last row."""
    of_groups = [rows.start + sampled(rows.stop - rows.start) for rows in given.rows() if rows.stop > rows.start]
    full = [b for b, rows in zip(given.b, given.rows(), strict=True) if rows.stop > rows.start]
    values = [chosen(given.a, rows).double() @ b.double() for rows, b in zip(of_groups, full, strict=True)]
    return Truth(torch.cat(of_groups), torch.cat(values))


def truth_of_weights(given: Groups) -> Truth:
    """The gradients in float64, at some rows of each group's matrix."""
    K = given.a.shape[1]
    rows = sampled(K)
    values = [given.a[of, rows].double().mT @ given.grad[of].double() for of in given.rows()]
    return Truth(torch.cat([g * K + rows for g in range(len(values))]), torch.cat(values))
