"""The tensors that a Llama block keeps for backward: launching kernels keeps as much as torch's ops."""

from __future__ import annotations

import pytest
import torch
from weft.models import Llama, LlamaConfig

from tests.models.test_saved import LLAMA, filled, kept


@pytest.mark.exhaustive
def test_a_llama_block_keeps_no_more_by_kernels(interpreted: None) -> None:
    model = filled(Llama(LlamaConfig(**LLAMA)))
    units = kept(model, model.layers[1], torch.zeros(1, 8, dtype=torch.int64))
    # The streams before each norm; q, k, v and attention's output; gate and up; a few numbers a row.
    assert units == pytest.approx(2 + 1 + 0.5 + 0.5 + 1 + 2 * 2.75, abs=0.1)
