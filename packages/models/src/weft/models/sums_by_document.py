"""`document_sums`: sums of per-token values over the documents of packed rows, for log-probabilities of answers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from weft.kernels.extension import Op, Sharding, apply, infer_gradient_layouts
from weft.mesh import Layout, LayoutError, Partial
from weft.reshard import layout_of, reshard
from weft.reshard.extension import partial_axes


def document_sums(values: Tensor, documents: Tensor, num_documents: int) -> Tensor:
    """Sums of the tokens' values by document: values [B, T] -> [B, num_documents].

    documents: [B, T] ints, the number of each token's document in its row, from 0. Tokens with a number of
        num_documents or more, such as padding, are left out. On a mesh laid out like `values`: `Batch.numbers` of
        `lay_out_batch`.
    Differentiable in `values`. The order of the sums is fixed: equal inputs give equal bits.
    On a mesh the result is sharded like the rows, and replicated over the axes sharding the tokens of a row.
    Communication: an all-reduce of [B, num_documents] over the axes sharding the tokens of a row; none in backward.
    Raises ValueError for different shapes, documents other than ints, and a negative number; LayoutError for different
    layouts, and for values that are partial sums.
    """
    if values.ndim != 2 or documents.shape != values.shape:
        raise ValueError(
            f"document_sums takes values [B, T] and documents of equal shape, got {tuple(values.shape)} and "
            f"{tuple(documents.shape)}"
        )
    if documents.is_floating_point() or documents.is_complex() or documents.dtype == torch.bool:
        raise ValueError(f"document_sums: documents are {documents.dtype}; give ints, the number of a token's document")
    if num_documents < 0:
        raise ValueError(f"document_sums: num_documents is {num_documents}; give 0 or more")
    sums: Tensor = apply(DOCUMENT_SUMS, values, documents, num_documents=num_documents)
    if not isinstance(sums, DTensor):
        return sums
    layout = layout_of(sums)
    return reshard(sums, placements=layout.replace(**dict.fromkeys(partial_axes(layout), "R")))


def _forward(values: Tensor, documents: Tensor, *, num_documents: int) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    numbers = torch.arange(num_documents, device=documents.device)
    chosen = documents[:, None] == numbers[:, None]  # [B, D, T]
    return torch.where(chosen, values[:, None], 0).sum(-1), (documents,)


def _backward(saved: Any, grad: Tensor, needed: Any, *, num_documents: int) -> tuple[Tensor | None, ...]:
    """The gradient of a token's value: the gradient of the document's sum; 0 for a token left out."""
    (documents,) = saved
    if not needed[0]:
        return None, None
    if not num_documents:
        return grad.new_zeros(documents.shape), None
    inside = (documents >= 0) & (documents < num_documents)
    return torch.where(inside, grad.gather(1, torch.where(inside, documents, 0).long()), 0), None


def _rule(
    layouts: tuple[Layout | None, ...], shapes: tuple[tuple[int, ...] | None, ...], options: dict[str, Any]
) -> Sharding:
    values, documents = layouts
    assert values is not None and documents is not None and shapes[0], "apply passes both"
    if partial_axes(values):
        raise LayoutError(f"document_sums has values ({values}), which are partial sums; reshard the values first")
    if documents != values:
        raise LayoutError(
            f"document_sums has values ({values}) and documents ({documents}); reshard the documents to ({values})",
            (values,),
        )
    output = values.replace(**dict.fromkeys(values.shard_order.get(1, ()), Partial("sum")))
    return Sharding(output, (shapes[0][0], options["num_documents"]), infer_gradient_layouts(output, layouts))


DOCUMENT_SUMS = Op("document sums", _forward, _backward, _rule)
