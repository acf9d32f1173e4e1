"""Sharded optimizers: the weights of one process after steps that are clipped, by the fewest bytes, on as little memory as said."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from weft.kernels import cross_entropy
from weft.mesh import ProcessMesh
from weft.models import Llama, LlamaConfig, initialize, lay_out_batch, parallelize
from weft.reshard import GradientSync, reshard

from tests.models.cases import whole

CONFIG = LlamaConfig(
    vocab_size=32, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=4, max_seq_len=32
)


def make(config: LlamaConfig) -> Llama:
    model = Llama(config)
    initialize(model, seed=3)
    return model


def batch(seed: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, 31, (5, 10), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def weights_after(axes: dict[str, int], config: LlamaConfig, plan: dict[str, Any], steps: int = 3) -> dict[str, Tensor]:
    mesh = ProcessMesh.grid(**axes)
    model = make(config)
    chosen = replace(model.parallel_plan(), **plan)
    parallelize(model, mesh, chosen)
    sync = GradientSync(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    for step in range(steps):
        laid = lay_out_batch(mesh, chosen, *batch(step))
        loss = cross_entropy(model(laid.tokens, positions=laid.positions), laid.targets, denominator=45.0)
        loss = reshard(loss) if isinstance(loss, DTensor) else loss
        loss.backward()
        sync.wait()
        optimizer.step()
        optimizer.zero_grad()
    return {name: whole(parameter) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_first(zero, pool):
    truth = weights_after({"dp": 1}, CONFIG, {})
    for found in pool.run(weights_after, {"dp": 2}, CONFIG, {"zero": zero}, ranks=2):
        for name, weight in truth.items():
            torch.testing.assert_close(found[name], weight, rtol=1e-4, atol=1e-5, msg=lambda m: f"{name}: {m}")
