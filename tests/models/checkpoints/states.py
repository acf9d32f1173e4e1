"""Models and optimizers whose every value is a function of its name and element alone, under any plan."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from weft.mesh import ProcessMesh
from weft.models import Llama, LlamaConfig, PipelinePlan, lora, parallelize
from weft.models.checkpoint.parts import part_of
from weft.models.initialization import Normal, fill

# Many sizes are uneven on purpose.
CONFIG = LlamaConfig(
    vocab_size=33, hidden_size=16, intermediate_size=22, num_layers=3, num_heads=4, num_kv_heads=2, max_seq_len=16
)
KEYS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A mesh and its plan's options; one process where there are no axes."""

    axes: dict[str, int] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        return torch.Size(self.axes.values()).numel()


def stages(*counts: int, schedule: str = "1f1b") -> dict[str, Any]:
    return {"pipeline": PipelinePlan(split=counts, schedule=schedule, microbatches=4)}


CASES = {
    "one": Case(),
    "dp2": Case(axes={"dp": 2}),
    "tp2": Case(axes={"tp": 2}),
    "zero3-dp4": Case(axes={"dp": 4}, plan={"zero": 3}),
    "zero1-dp2-tp2": Case(axes={"dp": 2, "tp": 2}, plan={"zero": 1, "sequence": True}),
    "zero2-cp2-tp2": Case(axes={"cp": 2, "tp": 2}, plan={"zero": 2, "context": "all_gather"}),
    "pp2": Case(axes={"pp": 2}, plan=stages(1, 2)),
    "pp2-other-sizes-dp2": Case(axes={"pp": 2, "dp": 2}, plan=stages(2, 1)),
    "pp3-tp2": Case(axes={"pp": 3, "tp": 2}, plan=stages(1, 1, 1)),
}


def make(
    case: Case, *, adapters: bool = False, seed: int = 0, **config: Any
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model laid out with the parameters of `seed`, and an optimizer before its first step."""
    model: nn.Module = Llama(replace(CONFIG, **config))
    if adapters:
        lora(model, 2, 4.0, ["layers.*.self_attn.[qo]_proj", "layers.*.mlp.down_proj"])
    if case.axes:
        plan = replace(model.parallel_plan(), **case.plan)  # type: ignore[operator]
        parallelize(model, ProcessMesh.grid(**case.axes), plan)
    for name, parameter in model.named_parameters():
        fill(name, parameter.detach(), Normal(1.0), seed)
    return model, torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], fused=True)


def fill_state(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            state: dict[str, Tensor] = {key: torch.zeros_like(parameter, requires_grad=False) for key in KEYS}
            for key, value in state.items():
                fill(f"{name}.{key}", value, Normal(1.0), seed)
            optimizer.state[parameter] = {"step": torch.tensor(7.0), **state}


def held(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """This rank's parts of all parameters and optimizer states, by name."""
    found = dict(model.named_parameters())
    for name, parameter in model.named_parameters():
        found |= {f"{name}.{key}": value for key, value in optimizer.state.get(parameter, {}).items()}
    return {name: part_of(tensor).values.clone() for name, tensor in found.items()}
