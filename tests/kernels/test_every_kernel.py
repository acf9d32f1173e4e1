"""Each Triton kernel is launched once, and its op's result is as good as plain torch's; ops have tests of their own."""

from __future__ import annotations

import functools
import importlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from weft import kernels
from weft.kernels.dispatch import backend

from tests.kernels.cases import ints, normal
from tests.kernels.matmul.cases import assert_as_good_as_eager
from tests.kernels.test_without_data import CASES, found

LOGITS = (normal(4, 8),)
CLASSES = ints(8, 4)
OWN: dict[str, Any] = {
    "loss-of-each": (lambda ids, x: kernels.cross_entropy(x, ids, reduction="none"), CLASSES, LOGITS),
    "mean-loss": (lambda ids, x: kernels.cross_entropy(x, ids), CLASSES, LOGITS),
    "mean-loss-in-chunks": (
        lambda ids, x, weight: kernels.linear_cross_entropy(x, weight, ids, chunk_tokens=2),
        CLASSES,
        (normal(4, 8), normal(8, 8)),
    ),
    "product-in-splits": (
        lambda _, a, b: kernels.matmul(a, b, activation="silu"),
        None,
        (normal(4, 80), normal(80, 8)),
    ),
}
# By kernel, as folder and name: the case that launches the kernel.
LAUNCHED_BY = {
    "attention.forward": "attention-all",
    "attention.backward_queries": "attention-all",
    "attention.backward_keys": "attention-all",
    "cross_entropy.statistics": "loss-of-each",
    "cross_entropy.losses": "loss-of-each",
    "cross_entropy.gradient": "loss-of-each",
    "cross_entropy.statistics_and_gradient": "mean-loss",
    "cross_entropy.gradient_unless_guessed": "mean-loss",
    "dropout.masked": "dropout",
    "embedding.forward": "embedding",
    "embedding.backward": "embedding",
    "experts.gated_rows": "experts",
    "experts.gated_rows_backward": "experts",
    "experts.weights_by_expert": "experts",
    "grouped_matmul.rows_by_group": "grouped_matmul",
    "grouped_matmul.weights_by_group": "grouped_matmul",
    "layer_norm.forward": "layer_norm",
    "layer_norm.backward": "layer_norm",
    "linear_cross_entropy.scale": "mean-loss-in-chunks",
    "linear_cross_entropy.accumulate": "mean-loss-in-chunks",
    "matmul.product": "linear-gelu",
    "matmul.combine": "product-in-splits",
    "random.uniform": "uniform",
    "random.normal": "normal",
    "rms_norm.forward": "rms_norm",
    "rms_norm.backward": "rms_norm",
    "rope.turn": "rope",
    "rope.normalize_and_turn": "rms_norm_rope",
    "rope.normalize_and_turn_backward": "rms_norm_rope",
    "routing.route": "route",
    "routing.route_backward": "route",
    "routing.statistics": "router_statistics",
    "routing.statistics_backward": "router_statistics",
    "routing.count": "dispatch",
    "routing.scan": "dispatch",
    "routing.place": "dispatch",
    "routing.gather_rows": "dispatch",
    "routing.sum_rows": "combine",
    "routing.sum_rows_backward": "combine",
    "swiglu.forward": "swiglu",
    "swiglu.backward": "swiglu",
}


class Launches:
    """Wraps a kernel; counts its launches."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.count = kernel, 0

    def __getitem__(self, grid: Any) -> Any:
        self.count += 1
        return self.kernel[grid]


@functools.cache
def launches_of(case: str) -> dict[str, int]:
    """How often the case launches each of its kernels, after a check of its results."""
    from weft.kernels.matmul import launch

    run, ids, tensors = (CASES | OWN)[case]
    counted: dict[str, Launches] = {}
    with pytest.MonkeyPatch.context() as patched:
        for name in (name for name, of in LAUNCHED_BY.items() if of == case):
            folder, kernel = name.split(".")
            module = importlib.import_module(f"weft.kernels.{folder}.kernel")
            counted[name] = Launches(getattr(module, kernel))
            patched.setattr(module, kernel, counted[name])
        if case == "product-in-splits":
            choose = launch.choose_configuration
            patched.setattr(launch, "choose_configuration", lambda *asked: replace(choose(*asked), splits=2, tile_k=32))
        results: list[list[Tensor]] = [found(run, ids, [each.to(torch.bfloat16) for each in tensors])]
        patched.setattr(backend, "INTERPRETED", False)
        results += [
            found(run, ids, [each.to(torch.bfloat16).to(dtype) for each in tensors])
            for dtype in (torch.bfloat16, torch.float64)
        ]
    for made, eager, truth in zip(*results, strict=True):
        assert_as_good_as_eager(made.detach(), eager.detach(), truth.detach())
    return {name: each.count for name, each in counted.items()}


@pytest.mark.every_value
@pytest.mark.parametrize("name", LAUNCHED_BY)
def test_a_kernel_is_launched(name: str, interpreted: None) -> None:
    assert launches_of(LAUNCHED_BY[name])[name] > 0
