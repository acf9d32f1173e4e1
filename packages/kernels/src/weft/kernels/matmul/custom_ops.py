"""The kernels' products as custom ops of torch: one node of torch.compile's graph, with a fake implementation for its shapes."""

from __future__ import annotations

import torch
from torch import Tensor, library


@library.custom_op("weft::matmul", mutates_args=())
def product(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    a_scale: Tensor | None,
    b_scale: Tensor | None,
    activation: str | None,
    alpha: float,
    beta: float,
    out_dtype: torch.dtype | None,
    keep_z: bool,
) -> list[Tensor]:
    """[out], or [out, z] where `keep_z`; see `launch.product`."""
    from . import launch  # imports triton, which a CPU run may not have

    out, z = launch.product(
        a, b, bias, residual, a_scale, b_scale,
        activation=activation, alpha=alpha, beta=beta, out_dtype=out_dtype, keep_z=keep_z,
    )  # fmt: skip
    return [out] if z is None else [out, z]


@product.register_fake
def _(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    a_scale: Tensor | None,
    b_scale: Tensor | None,
    activation: str | None,
    alpha: float,
    beta: float,
    out_dtype: torch.dtype | None,
    keep_z: bool,
) -> list[Tensor]:
    made = [torch.empty((*a.shape[:-1], b.shape[-1]), dtype=out_dtype or a.dtype, device=a.device) for _ in range(2)]
    return made[: 1 + keep_z]


@library.custom_op("weft::matmul_accumulate", mutates_args=("into",))
def accumulate(a: Tensor, b: Tensor, into: Tensor) -> None:
    """into += a @ b."""
    from . import launch

    launch.product(a, b, into=into)
