"""A Llama whose MLPs are mixtures of experts in plain torch, for tests of the axis "ep"."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from weft.kernels import on_local_tensors
from weft.models import ExpertPlan, Llama, LlamaConfig, ParallelPlan, initialize
from weft.models.experts import Experts as WeftExperts
from weft.models.initialization import Normal
from weft.models.layers import Linear
from weft.models.parallel.styles import ExpertParallel

CONFIG = LlamaConfig(
    vocab_size=31, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=4, num_kv_heads=4, max_seq_len=32
)
EXPERTS, CHOSEN, INSIDE = 8, 3, 12


def chosen(logits: Tensor) -> tuple[Tensor, Tensor]:
    """[..., E] -> the experts [..., k] int32 with the highest logits, and the softmax of these."""
    values, experts = logits.topk(CHOSEN)
    return experts.int(), values.softmax(-1)


ROWS = {"dp": "S(0)", "cp": "S(1)"}
CUT = {**ROWS, "tp": "S(1)"}
of_rows = on_local_tensors(in_layouts=[ROWS], out_layouts=[ROWS, ROWS])(chosen)
of_cut = on_local_tensors(in_layouts=[CUT], out_layouts=[CUT, CUT])(chosen)


class Experts(WeftExperts):
    """Experts in plain torch: a loop over the experts."""

    def __init__(self) -> None:
        super().__init__(CONFIG.hidden_size, INSIDE, EXPERTS)

    def forward(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """x [..., H], experts [..., k], weights [..., k] -> [..., H]. Numbers outside are of no expert."""
        total = torch.zeros_like(x)
        for e in range(self.gate_proj.shape[0]):
            weight = (weights * (experts == e)).sum(-1, keepdim=True)
            inner = F.silu(x @ self.gate_proj[e].mT) * (x @ self.up_proj[e].mT)
            total = total + weight * (inner @ self.down_proj[e].mT)
        return total


class Mixture(nn.Module):
    """A router and its experts."""

    def __init__(self, sequence: bool) -> None:
        super().__init__()
        self.gate = Linear(CONFIG.hidden_size, EXPERTS, bias=False)
        self.experts, self.sequence = Experts(), sequence

    def forward(self, x: Tensor) -> Tensor:
        experts, weights = (of_cut if self.sequence else of_rows)(self.gate(x))
        output: Tensor = self.experts(x, experts, weights)
        return output


class MixedLlama(Llama):
    """A Llama with mixtures."""

    def __init__(self, sequence: bool = False, layers: int = 2) -> None:
        super().__init__(replace(CONFIG, num_layers=layers))
        for layer in self.layers:
            layer.mlp = Mixture(sequence)  # type: ignore[union-attr]

    def initial_value(self, name: str) -> Any:
        return Normal(0.3) if ".mlp." in name else super().initial_value(name)

    def parallel_plan(self) -> ParallelPlan:
        plan = super().parallel_plan()
        styles = {name: style for name, style in plan.tensor.items() if ".mlp." not in name}
        return replace(plan, tensor={**styles, "layers.*.mlp.experts": ExpertParallel()})


def make(sequence: bool = False, layers: int = 2) -> Any:
    model = MixedLlama(sequence, layers)
    initialize(model, seed=3)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def batch(rows: int = 5, length: int = 11, seed: int = 0) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, 31, (rows, length + 1), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def plan_of(model: Any, ep: int, **changes: Any) -> ParallelPlan:
    """The model's plan with ep. tokens, over_tp: of the ExpertPlan."""
    tokens, over_tp = changes.pop("tokens", None), changes.pop("over_tp", False)
    return replace(model.parallel_plan(), experts=ExpertPlan(size=ep, tokens=tokens, over_tp=over_tp), **changes)
