"""A trained policy and its frozen reference, each on its own mesh by its own plan, and a criterion outside both."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from weft.kernels import cross_entropy, on_local_tensors
from weft.mesh import Layout, ProcessMesh
from weft.models import LlamaConfig, clip_gradients, parallelize
from weft.reshard import GradientSync, distribute, reshard

from tests.models.cases import gradients_off, make, whole

CONFIG = LlamaConfig(
    vocab_size=31, hidden_size=16, intermediate_size=24, num_layers=1, num_heads=4, num_kv_heads=1, max_seq_len=32
)
ROWS = {"dp": "S(0)"}
# About a row's log probability: the losses are differences of such values, and round as these do.
LOG_PROBABILITY = 8 * math.log(31)


@on_local_tensors(in_layouts=[ROWS] * 4, out_layouts={"dp": "P(sum)"})
def preference_losses(chosen: Tensor, rejected: Tensor, chosen_fixed: Tensor, rejected_fixed: Tensor) -> Tensor:
    """Log-probabilities [B] of rows of each kind -> the sum of their losses."""
    return -F.logsigmoid(0.5 * (chosen - chosen_fixed - rejected + rejected_fixed)).sum()


def batches() -> list[tuple[Tensor, Tensor]]:
    """Tokens and targets of the chosen rows, and of the rejected ones: 3 of each, which no mesh divides."""
    drawn = torch.randint(0, 31, (2, 3, 9), generator=torch.Generator().manual_seed(0))
    return [(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()) for rows in drawn]


def log_probabilities(model: Any, tokens: Tensor, target: Tensor) -> Tensor:
    return -cross_entropy(model(tokens), target, reduction="none").sum(-1)


def steps(on: tuple[ProcessMesh, ProcessMesh] | None, copied: bool) -> tuple[list[Tensor], dict[str, Tensor], Tensor]:
    """Losses of two steps, the second's gradients and their norm: on one process, or on a mesh for each model."""
    policy, reference = make(CONFIG), make(CONFIG, seed=0 if copied else 1)
    if on is not None:
        parallelize(policy, on[0], replace(policy.parallel_plan(), sequence=True))
        reference = copy.deepcopy(policy) if copied else parallelize(reference, on[1])
    reference.requires_grad_(False)
    sync = GradientSync(policy) if on is not None else None
    optimizer = torch.optim.SGD(policy.parameters(), lr=1e-2)
    losses = []
    for step in range(2):
        mine, theirs = [], []
        for pair in batches():
            if on is None:
                mine.append(log_probabilities(policy, *pair))
                theirs.append(log_probabilities(reference, *pair).detach())
                continue
            mine.append(log_probabilities(policy, *laid_out(on[0], pair)))
            with torch.no_grad():
                fixed = log_probabilities(reference, *laid_out(on[0] if copied else on[1], pair))
            theirs.append(reshard(fixed, over_rows(on[0])))
        loss = preference_losses(*mine, *theirs)
        loss = loss if on is None else reshard(loss)
        optimizer.zero_grad()
        loss.backward()
        if sync is not None:
            sync.wait()
        norm = clip_gradients(policy, 1e9)
        if step == 0:
            optimizer.step()
        losses.append(whole(loss))
    assert all(parameter.grad is None for parameter in reference.parameters())
    return losses, {name: whole(parameter.grad) for name, parameter in policy.named_parameters()}, norm


def over_rows(mesh: ProcessMesh) -> Layout:
    return Layout(mesh, ROWS if "dp" in mesh.axis_names else {})


def laid_out(mesh: ProcessMesh, pair: tuple[Tensor, Tensor]) -> list[Tensor]:
    return [distribute(each, over_rows(mesh)) for each in pair]


FIRST, SECOND = ProcessMesh.grid(tp=2), ProcessMesh.grid(dp=2, first_rank=2)
ALL, CROSSED = ProcessMesh.grid(dp=2, tp=2), ProcessMesh([[0, 2], [1, 3]], ["tp", "dp"])


@pytest.mark.parametrize(
    ("policy", "reference", "copied"),
    [
        pytest.param(FIRST, SECOND, False, id="on-other-ranks"),
        pytest.param(ALL, SECOND, False, id="on-some-of-its-ranks", marks=pytest.mark.exhaustive),
        pytest.param(SECOND, ALL, False, id="on-more-ranks", marks=pytest.mark.exhaustive),
        pytest.param(ALL, CROSSED, False, id="on-the-same-ranks-otherwise", marks=pytest.mark.exhaustive),
        pytest.param(ALL, ALL, True, id="a-copy"),
    ],
)
def test_paddlenlp_9412_a_policy_and_its_frozen_reference_are_laid_out_apart(policy, reference, copied, pool) -> None:
    losses, gradients, norm = steps(None, copied)
    assert losses[0] != losses[1]
    for rank, (found, parts, found_norm) in enumerate(pool.run(steps, (policy, reference), copied)):
        if rank not in policy:
            assert found_norm == 0 and all(part.numel() == 0 for part in parts.values())
            continue
        torch.testing.assert_close(found_norm, norm, rtol=1e-5, atol=0)
        torch.testing.assert_close(found, losses, rtol=0, atol=1e-6 * LOG_PROBABILITY)
        assert not gradients_off(parts, gradients)
