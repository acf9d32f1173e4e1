"""Checks of the operands of linear cross-entropy's matrix product. Cross-entropy checks the rest."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..cross_entropy.options import LOGITS_DTYPES, Form, form_of


def computed(input: Tensor, compute_dtype: torch.dtype | None) -> Form:
    """The input's form in the GEMMs, cast to compute_dtype. Raises ValueError for a compute_dtype without a loss."""
    if compute_dtype is not None and compute_dtype not in LOGITS_DTYPES:
        raise ValueError(
            f"compute_dtype is {compute_dtype}; give one of {', '.join(map(str, LOGITS_DTYPES))}, or None for "
            f"the input's dtype"
        )
    return replace(form_of(input), dtype=compute_dtype or input.dtype)


def check_factors(
    input: Form,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    chunk_tokens: int | None,
    compute_dtype: torch.dtype | None,
) -> None:
    """Raise ValueError for factors, chunk_tokens or dtypes which do not fit together. input: from `computed`."""
    if linear_weight.ndim != 2 or not input.shape or input.shape[-1] != linear_weight.shape[1]:
        raise ValueError(
            f"linear_cross_entropy takes input [..., H] and linear_weight [V, H], got {input.shape} and "
            f"{tuple(linear_weight.shape)}"
        )
    if linear_bias is not None and linear_bias.shape != linear_weight.shape[:1]:
        raise ValueError(
            f"linear_cross_entropy takes a linear_bias of shape {tuple(linear_weight.shape[:1])}, got "
            f"{tuple(linear_bias.shape)}"
        )
    for name, tensor in (("linear_weight", linear_weight), ("linear_bias", linear_bias)):
        if tensor is None:
            continue
        is_as_input = tensor.dtype == input.dtype if compute_dtype is None else tensor.is_floating_point()
        if not is_as_input or tensor.device != input.device:
            raise ValueError(
                f"{name} is {tensor.dtype} on {tensor.device}, input {input.dtype} on {input.device}; convert one of "
                f"them, or give a compute_dtype for both"
            )
    if chunk_tokens is not None and (
        not isinstance(chunk_tokens, int) or isinstance(chunk_tokens, bool) or chunk_tokens < 1
    ):
        raise ValueError(
            f"chunk_tokens is {chunk_tokens!r}; give a number of tokens, 1 or more, or None to choose automatically"
        )
