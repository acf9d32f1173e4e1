"""A Llama on torch's own stack: `parallelize_module`, `fully_shard` or DistributedDataParallel, and the schedules of
`torch.distributed.pipelining`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from weft.models import Llama
from weft.models.rope import rotary_tables

from benchmarks.baselines import PLAN, TorchLlama


class Stage(nn.Module):
    """One of `count` pipeline stages of a TorchLlama, with equally many layers each.

    `torch.distributed.pipelining` needs a module for each stage. The first stage takes tokens [B, T], a later stage
    takes activations [B, T, H] of the stage before, and the last stage returns logits.
    """

    def __init__(self, whole: TorchLlama, index: int, count: int) -> None:
        super().__init__()
        self.rotary = whole.config.rotary
        size = len(whole.layers) // count
        assert size * count == len(whole.layers), "all stages have equally many layers"
        if index == 0:
            self.embed_tokens = whole.embed_tokens
        self.layers = nn.ModuleList(whole.layers[index * size : (index + 1) * size])
        if index == count - 1:
            self.norm, self.lm_head = whole.norm, whole.lm_head

    def forward(self, x: Tensor) -> Tensor:
        if "embed_tokens" in self._modules:
            x = self.embed_tokens(x)
        cos, sin = rotary_tables(self.rotary, x.shape[1], x.device)  # cached between steps
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.lm_head(self.norm(x)) if "lm_head" in self._modules else x


def torch_step(
    source: Llama,
    mesh: DeviceMesh,
    tokens: Tensor,
    targets: Tensor,
    *,
    reshard_after_forward: bool | None,
    microbatches: int,
) -> tuple[Callable[[], float], nn.Module]:
    """Returns a training step, and the module of this rank's stage. The step returns the mean loss on every rank.

    mesh: has an axis "dp", and may have "pp" and "tp"; "tp" comes after "dp".
    tokens, targets: [B, T], the whole batch.
    reshard_after_forward: the option of `fully_shard`; None for DistributedDataParallel, without an axis "tp".
    """
    axes = mesh.mesh_dim_names
    assert axes is not None, "the mesh has named axes"
    count, index = (mesh["pp"].size(), mesh["pp"].get_local_rank()) if "pp" in axes else (1, 0)
    stage: nn.Module = Stage(TorchLlama(source), index, count)
    if "tp" in axes:
        own = {name for name, _ in stage.named_children()}
        stage = parallelize_module(stage, mesh["tp"], {k: v for k, v in PLAN.items() if k.partition(".")[0] in own})
    if reshard_after_forward is None:
        stage = DistributedDataParallel(stage, process_group=mesh["dp"].get_group(), gradient_as_bucket_view=True)
    else:
        outside = [child for name, child in stage.named_children() if name != "layers"]
        for unit in (*stage.layers, *outside):
            fully_shard(unit, mesh=mesh["dp"], reshard_after_forward=reshard_after_forward)
        fully_shard(stage, mesh=mesh["dp"])
    optimizer = adamw(stage)
    ranks, part = mesh["dp"].size(), mesh["dp"].get_local_rank()
    tokens, targets = tokens.chunk(ranks)[part], targets.chunk(ranks)[part]
    schedule = None
    if "pp" in axes:
        # Imported here, as it imports Dynamo, which collecting tests must not
        from torch.distributed.pipelining import (
            PipelineStage,
            Schedule1F1B,
        )

        pipeline = PipelineStage(stage, index, count, torch.device("cpu"), group=mesh["pp"].get_group())
        schedule = Schedule1F1B(pipeline, microbatches, loss_fn=_loss)

    def step() -> float:
        with loss_parallel() if "tp" in axes else nullcontext():
            if schedule is None:
                loss = _loss(stage(tokens), targets)
                loss.backward()  # type: ignore[no-untyped-call]
                mean = _plain(loss)
            else:
                losses: list[Tensor] = []
                schedule.step(*([tokens] if index == 0 else []), target=targets, losses=losses, return_outputs=False)
                mean = torch.stack([_plain(each) for each in losses]).mean() if losses else torch.zeros(())
        mean = mean / ranks
        dist.all_reduce(mean, group=mesh["dp"].get_group())
        if "pp" in axes:
            dist.all_reduce(mean, group=mesh["pp"].get_group())
        optimizer.step()
        optimizer.zero_grad()
        return mean.item()

    return step, stage


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """A fused AdamW, with a parameter group for each mesh: a fused step takes only tensors of a single mesh."""
    groups: dict[object, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        groups.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
    return torch.optim.AdamW([{"params": group} for group in groups.values()], lr=1e-3, fused=True)


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _plain(loss: Tensor) -> Tensor:
    loss = loss.detach()
    return loss.to_local() if isinstance(loss, DTensor) else loss
