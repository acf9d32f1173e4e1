"""The bounds of documents on plain tensors and DTensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from weft.mesh import Layout, infer

from ...dispatch.op import Op
from ...dispatch.sharded import Shapes, Sharding, apply, infer_gradient_layouts
from .. import ranges


def document_bounds(documents: Tensor) -> Tensor:
    """The start and stop of each token's document, for `attention(documents=...)`: made once, used by all layers.

    documents: ids [..., S] of ints. Each contiguous stretch of equal ids is one document.
    Returns int32 [..., S, 2].

    Layouts: sharded on the leading dims; the bounds are sharded as the ids.
    Communication: none.
    Raises LayoutError for any other layouts; ValueError for ids that are no ints, and, where the host can read the
    ids, for an id that comes back after its document ended.
    """
    if not documents.ndim or documents.is_floating_point() or documents.is_complex():
        raise ValueError(
            f"document_bounds takes ids [..., S] of ints, got {tuple(documents.shape)} of {documents.dtype}; give each "
            f"token the number of its document"
        )
    return apply(BOUNDS, documents)


def _rule(layouts: tuple[Layout | None, ...], shapes: Shapes, options: dict[str, Any]) -> Sharding:
    (documents,), (shape,) = layouts, shapes
    assert documents is not None and shape is not None, "there is one operand"
    infer.whole("document_bounds", "the documents", documents, len(shape) - 1)
    return Sharding(documents, (*shape, 2), infer_gradient_layouts(documents, layouts))


BOUNDS = Op("document_bounds", ranges.document_bounds, None, _rule, dtype=lambda dtype, options: torch.int32)
