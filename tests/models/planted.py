"""Faults planted into a trainer on its ranks, as the bugs of parallel training are. For test_planted_faults."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from pytest import MonkeyPatch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from weft import kernels
from weft.mesh import Replicate
from weft.models.losses import local_value
from weft.models.step import find_gradients as step_module
from weft.models.train.trainer import Trainer
from weft.reshard import GradientSync, layout_of
from weft.reshard.extension import wrap
from weft.reshard.moving.collectives import immediate_result
from weft.reshard.training import buckets

Plant = Callable[[Trainer, MonkeyPatch], None]


@dataclass(frozen=True)
class Fault:
    """plant: called with the trainer on every rank, before step 1. name: of the module or parameter to be found."""

    plant: Plant
    name: str
    phase: str
    mesh: dict[str, int]
    plan: dict[str, Any]
    family: str = "llama"
    step: int = 1  # the first step with a difference


FAULTS: dict[str, Fault] = {}


def fault(
    name: str, phase: str, *, plan: dict[str, Any] | None = None, family: str = "llama", step: int = 1, **mesh: int
):  # type: ignore[no-untyped-def]
    def add(plant: Plant) -> Plant:
        FAULTS[plant.__name__.replace("_", "-")] = Fault(plant, name, phase, mesh, plan or {}, family, step)
        return plant

    return add


def module(trainer: Trainer, name: str) -> Any:
    return trainer.model.get_submodule(name)


def parameter(trainer: Trainer, name: str) -> Tensor:
    return trainer.model.get_parameter(name)


def after_sync(trainer: Trainer, change: Callable[[], Any]) -> None:
    """Call `change` when the gradients of a step are complete."""
    wait = trainer._sync.wait

    def waited(*arguments: Any, **options: Any) -> Any:
        result = wait(*arguments, **options)
        with torch.no_grad():
            change()
        return result

    trainer._sync.wait = waited  # type: ignore[method-assign]


def change_output(layer: nn.Module, change: Callable[[Any], Any]) -> None:
    forward = layer.forward
    layer.forward = lambda *args, **kwargs: change(forward(*args, **kwargs))  # type: ignore[method-assign]


def gradient_of(trainer: Trainer, name: str) -> Tensor:
    grad = parameter(trainer, name).grad
    assert grad is not None
    return local_value(grad)


@fault("layers.1.mlp.up_proj.weight", "gradients", dp=2)
def gradient_halved_on_one_rank(trainer: Trainer, patch: MonkeyPatch) -> None:
    if trainer.rank == 1:
        after_sync(trainer, lambda: gradient_of(trainer, "layers.1.mlp.up_proj.weight").mul_(0.5))


@fault("layers.0.self_attn", "forward", tp=2)
def reduction_of_attention_missed(trainer: Trainer, patch: MonkeyPatch) -> None:
    layer = module(trainer, "layers.0.self_attn.o_proj")
    layer._forward_hooks.clear()
    layer.register_forward_hook(
        lambda module, args, out: wrap(out.to_local(), layout_of(out).replace(tp=Replicate()), out.shape)
    )


@fault("h.0.attn.c_proj", "forward", family="gpt", step=2, tp=2)
def bias_added_on_every_rank_of_tp(trainer: Trainer, patch: MonkeyPatch) -> None:
    layer = module(trainer, "h.0.attn.c_proj")

    def add(out: DTensor) -> DTensor:
        return DTensor.from_local(out.to_local() + local_value(layer.bias), out.device_mesh, out.placements)

    change_output(layer, add)


@fault("layers.0.self_attn_dropout", "forward", family="llama-dropout", dp=2)
def dropout_mask_of_another_key(trainer: Trainer, patch: MonkeyPatch) -> None:
    module(trainer, "layers.0.self_attn_dropout").name = "layers.1.self_attn_dropout"


@fault("layers.1.input_layernorm", "forward", tp=2)
def eps_of_a_norm_changed(trainer: Trainer, patch: MonkeyPatch) -> None:
    module(trainer, "layers.1.input_layernorm").eps = 1e-5


@fault("layers.1.self_attn.attend", "forward", tp=2)
def attention_off_by_one(trainer: Trainer, patch: MonkeyPatch) -> None:
    module(trainer, "layers.1.self_attn.attend").window = 7  # of 8 tokens


@fault("layers.0.self_attn.attend", "forward", dp=2)
def scale_of_attention_rounded(trainer: Trainer, patch: MonkeyPatch) -> None:
    module(trainer, "layers.0.self_attn.attend").scale = 0.45  # 1 / sqrt(4) is 0.5


@fault("norm", "forward", dp=2)
def bfloat16_where_float32_was_meant(trainer: Trainer, patch: MonkeyPatch) -> None:
    change_output(module(trainer, "norm"), lambda out: out.bfloat16().float())


@fault("layers.0.self_attn.attend", "forward", tp=2)
def rope_off_by_a_factor(trainer: Trainer, patch: MonkeyPatch) -> None:
    tables = trainer.model._tables
    trainer.model._tables = lambda *arguments: tuple(each.roll(1, -2) for each in tables(*arguments))  # type: ignore[method-assign]


@fault("loss", "forward", dp=2)
def loss_divided_by_local_tokens(trainer: Trainer, patch: MonkeyPatch) -> None:
    criterion = type(trainer._outline).token_criterion
    patch.setattr(type(trainer._outline), "token_criterion", lambda self, learned: criterion(self, learned / 2))


@fault("*", "gradients", cp=2)
def gradients_not_reduced_over_cp(trainer: Trainer, patch: MonkeyPatch) -> None:
    def own_part(parts: list[Tensor], group: dist.ProcessGroup, members: Any) -> Any:
        return immediate_result(torch.cat([each.reshape(-1) for each in parts]))

    patch.setattr(buckets, "sum_parts", own_part)


@fault("layers.0.self_attn.q_proj.weight", "update", dp=2)
def stale_parameter_on_one_rank(trainer: Trainer, patch: MonkeyPatch) -> None:
    weight = local_value(parameter(trainer, "layers.0.self_attn.q_proj.weight"))
    update = trainer.optimizer.step

    def step(*arguments: Any) -> None:
        before = weight.detach().clone()
        update(*arguments)
        if trainer.rank == 1:
            with torch.no_grad():
                weight.copy_(before)

    trainer.optimizer.step = step  # type: ignore[method-assign, assignment]


@fault("*norm*", "update", dp=2)
def weight_decay_on_norms(trainer: Trainer, patch: MonkeyPatch) -> None:
    for group in trainer.optimizer.param_groups:
        group["weight_decay"] = 0.1


@fault("*", "update", step=2, dp=2)
def wrong_beta(trainer: Trainer, patch: MonkeyPatch) -> None:
    for group in trainer.optimizer.param_groups:
        group["betas"] = 0.8, group["betas"][1]


@fault("layers.1.mlp.down_proj.weight", "start", dp=2)
def slices_of_a_weight_swapped(trainer: Trainer, patch: MonkeyPatch) -> None:
    weight = local_value(parameter(trainer, "layers.1.mlp.down_proj.weight"))
    with torch.no_grad():
        weight.copy_(weight.roll(4, 0))


@fault("loss", "forward", cp=2)
def labels_shifted_at_the_border_of_a_shard(trainer: Trainer, patch: MonkeyPatch) -> None:
    training = trainer._objective._feed.training  # type: ignore[union-attr]

    def shifted(*arguments: Any, **options: Any) -> Any:
        found = training(*arguments, **options)
        for each in found:
            local = each.targets.to_local()
            local[:, -1] = local[:, 0]
        return found

    trainer._objective._feed.training = shifted  # type: ignore[union-attr, method-assign]


@fault("norm of the gradients", "gradients", tp=2)
def norm_of_local_gradients(trainer: Trainer, patch: MonkeyPatch) -> None:
    clip = step_module.clip_gradients

    def local_norm(model: nn.Module, max_norm: float) -> Tensor:
        squares = sum(local_value(each.grad).square().sum() for each in model.parameters() if each.grad is not None)
        clip(model, max_norm)
        return squares.sqrt()  # type: ignore[union-attr]

    patch.setattr(step_module, "clip_gradients", local_norm)


@fault("embed_tokens.weight", "gradients", tp=2)
def gradient_of_half_the_vocabulary_lost(trainer: Trainer, patch: MonkeyPatch) -> None:
    if trainer.rank == 0:  # with the bytes of the text
        after_sync(trainer, lambda: gradient_of(trainer, "embed_tokens.weight").zero_())


@fault("*", "update", plan={"zero": 1}, dp=2)
def learning_rate_doubled_on_one_rank(trainer: Trainer, patch: MonkeyPatch) -> None:
    update = trainer.optimizer.step

    def step(*arguments: Any) -> None:
        for group in trainer.optimizer.param_groups:
            group["lr"] *= 1 + trainer.rank
        update(*arguments)

    trainer.optimizer.step = step  # type: ignore[method-assign, assignment]


@fault("*layernorm.weight", "gradients", plan={"sequence": True}, tp=2)
def gradients_of_norms_not_reduced_over_tp(trainer: Trainer, patch: MonkeyPatch) -> None:
    def halve() -> None:
        for name, each in trainer.model.named_parameters():
            if name.endswith("layernorm.weight") and each.grad is not None:
                local_value(each.grad).mul_(0.4 + 0.2 * trainer.rank)

    after_sync(trainer, halve)


@fault("layers.0.mlp*", "forward", dp=2)
def gate_and_up_swapped(trainer: Trainer, patch: MonkeyPatch) -> None:
    mlp = module(trainer, "layers.0.mlp")
    mlp.forward = lambda x: mlp.down_proj(kernels.swiglu(mlp.up_proj(x), mlp.gate_proj(x)))


@fault("layers.0.mlp*", "forward", family="mixtral", dp=2)
def one_expert_too_few(trainer: Trainer, patch: MonkeyPatch) -> None:
    mixture = module(trainer, "layers.0.mlp")
    mixture.options = replace(mixture.options, experts_per_token=1)


@fault("embed_tokens", "forward", dp=2)
def rows_of_one_rank_in_another_order(trainer: Trainer, patch: MonkeyPatch) -> None:
    training = trainer._objective._feed.training  # type: ignore[union-attr]

    def turned(*arguments: Any, **options: Any) -> Any:
        found = training(*arguments, **options)
        if trainer.rank == 1:
            for each in found:
                each.args[0].to_local().copy_(each.args[0].to_local().roll(1, 0))
        return found

    trainer._objective._feed.training = turned  # type: ignore[union-attr, method-assign]


@fault("*", "gradients", dp=2)
def gradients_summed_in_bfloat16(trainer: Trainer, patch: MonkeyPatch) -> None:
    trainer._sync.close()
    trainer._sync = GradientSync(trainer.model, dtype=torch.bfloat16)


@fault("*", "gradients", step=2, dp=2)
def gradients_of_the_step_before_kept(trainer: Trainer, patch: MonkeyPatch) -> None:
    trainer.optimizer.zero_grad = lambda *arguments, **options: None  # type: ignore[method-assign]
