"""`MicrobatchTokens`: where a microbatch's tokens are in the batch, and in which order this rank has the tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from weft.kernels.extension import Runs
from weft.reshard import layout_of

from ..parallel.batch import ModelArguments
from ..parallel.packed.rows import RowOrders
from ..parallel.pipeline.step import Microbatch


class MicrobatchTokens:
    """Where a microbatch's tokens [B, T] are in the batch, from row `first` on, and which tokens are on this rank."""

    def __init__(self, tokens: Tensor, first: int, order: Runs | RowOrders | None) -> None:
        self.shape = tuple(tokens.shape)
        self.layout = layout_of(tokens) if isinstance(tokens, DTensor) else None
        self.first = first  # the microbatch's first row in the batch
        self.local = tuple((tokens.to_local() if isinstance(tokens, DTensor) else tokens).shape)
        self.order = order  # of tokens in memory; None: reading order

    def has_rows(self, tensor: Tensor) -> bool:
        """Whether a tensor has this microbatch's rows and tokens: [B, T, ...], as a DTensor or as the local part."""
        shape = tuple(tensor.shape)
        return shape[:2] == (self.shape if isinstance(tensor, DTensor) or self.layout is None else self.local)

    def places(self, cut: slice) -> Tensor | None:
        """The index in the row of each token in the slice `cut` of memory; None in reading order. For `place_of`."""
        if self.order is None:
            return None
        if isinstance(self.order, RowOrders):
            return self.order.places(torch.device("cpu"))[:, cut]
        return torch.cat([torch.arange(start, stop) for start, stop in self.order])[cut].unsqueeze(0)


def tokens_of_microbatches(arguments: ModelArguments, microbatches: Sequence[Microbatch]) -> list[MicrobatchTokens]:
    """The tokens of each microbatch of a step. arguments: of the model."""
    found, first = [], 0
    for each in microbatches:
        tokens = arguments.tokens(each.args, each.kwargs)
        found.append(MicrobatchTokens(tokens, first, arguments.order(each.args, each.kwargs)))
        first += tokens.shape[0]
    return found
