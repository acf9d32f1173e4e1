"""Mixtures of experts on one device: the layer's options, the routers' losses, files with and without all experts."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from weft.kernels import cross_entropy
from weft.models import (
    MixtralConfig,
    QwenMoeConfig,
    RouterLosses,
    forward_backward,
    from_pretrained,
    initialize,
    load_checkpoint,
    save_checkpoint,
    save_pretrained,
    update_correction_biases,
)
from weft.models.config import ExpertOptions
from weft.models.experts import MixtureOfExperts
from weft.models.families import family_of, make_model
from weft.models.train.metrics_file import draw_load

from tests.models.folders import close, gradient_in, their_model, tokens_for

SIZES: dict[str, Any] = {
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_layers": 3,
    "num_heads": 4,
    "num_kv_heads": 2,
}
SMALL = QwenMoeConfig(**SIZES, num_experts=6, experts_per_token=2, moe_intermediate_size=12)
DEEPSEEK = dataclasses.replace(
    SMALL,
    router_score="sigmoid",
    router_scale=1.5,
    router_bias_rate=0.01,
    expert_groups=(3, 2),
    shared_expert_size=20,
    router_z_loss_coef=0.01,
)


def filled(layer: nn.Module, seed: int = 0) -> Any:
    """The layer with random parameters, also biases."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return layer


def copy_experts(ours: MixtureOfExperts, theirs: Any) -> None:
    with torch.no_grad():
        for i, expert in enumerate(theirs.experts):
            for name in ("gate_proj", "up_proj", "down_proj"):
                getattr(expert, name).weight.copy_(getattr(ours.experts, name)[i])


def check_layer(ours: MixtureOfExperts, theirs: Any, pairs: dict[str, str]) -> None:
    """Outputs and gradients of both layers are the same. pairs: our parameter -> the layer's."""
    copy_experts(ours, theirs)
    own = dict(theirs.named_parameters())
    with torch.no_grad():
        for name, their_name in pairs.items():
            own[their_name].copy_(ours.get_parameter(name))
    x = torch.randn(2, 17, 16, generator=torch.Generator().manual_seed(1))
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    output, _ = ours(inputs[0])
    wanted = theirs(inputs[1])
    wanted = wanted[0] if isinstance(wanted, tuple) else wanted
    close(output, wanted, "output")
    cotangent = torch.randn(x.shape, generator=torch.Generator().manual_seed(2))
    output.backward(cotangent)
    wanted.backward(cotangent)
    close(inputs[0].grad, inputs[1].grad, "input")
    for name, their_name in pairs.items():
        close(ours.get_parameter(name).grad, own[their_name].grad, name)
    for name in ("gate_proj", "up_proj", "down_proj"):
        gradients = [own[f"experts.{i}.{name}.weight"].grad for i in range(ours.options.num_experts)]
        close(
            ours.experts.get_parameter(name).grad,
            torch.stack([torch.zeros_like(ours.experts.get_parameter(name)[0]) if g is None else g for g in gradients]),
            name,
        )


@pytest.mark.parametrize(("groups", "chosen"), [(1, 1), (4, 2), (4, 1)], ids=str)
@pytest.mark.parametrize("normalize", [True, False], ids=["normalized", "plain"])
@pytest.mark.parametrize("scale", [1.0, 2.5], ids=["unscaled", "scaled"])
def test_the_layer_is_that_of_deepseek(groups: int, chosen: int, normalize: bool, scale: float) -> None:
    """Sigmoid scores, a bias in the choice, groups, a scale and a shared expert."""
    from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

    ours = filled(
        MixtureOfExperts(
            16, 12, 8, 2, score="sigmoid", normalize=normalize, scale=scale, correction_bias=True,
            groups=None if groups == 1 else (groups, chosen), shared_size=20,
        )
    )  # fmt: skip
    with torch.no_grad():  # transformers puts 0 in the place of other groups' scores, which must stay below the rest
        ours.correction_bias.abs_()
    theirs = DeepseekV3MoE(
        DeepseekV3Config(
            hidden_size=16, moe_intermediate_size=20, n_routed_experts=8, num_experts_per_tok=2, n_group=groups,
            topk_group=chosen, norm_topk_prob=normalize, routed_scaling_factor=scale, n_shared_experts=1,
        )
    )  # fmt: skip
    for expert in theirs.experts:
        expert.gate_proj, expert.up_proj = (nn.Linear(16, 12, bias=False) for _ in range(2))
        expert.down_proj = nn.Linear(12, 16, bias=False)
    theirs.gate.e_score_correction_bias.copy_(ours.correction_bias)
    shared = {f"shared_expert.{n}.weight": f"shared_experts.{n}.weight" for n in ("gate_proj", "up_proj", "down_proj")}
    check_layer(ours, theirs, {"gate.weight": "gate.weight", **shared})


@pytest.mark.parametrize("normalize", [True, False], ids=["normalized", "plain"])
def test_the_layer_is_that_of_qwen2_moe(normalize: bool) -> None:
    """A shared expert with a gate."""
    from transformers.models.qwen2_moe.configuration_qwen2_moe import Qwen2MoeConfig
    from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock

    ours = filled(MixtureOfExperts(16, 12, 5, 2, normalize=normalize, shared_size=20, shared_gate=True))
    theirs = Qwen2MoeSparseMoeBlock(
        Qwen2MoeConfig(
            hidden_size=16, moe_intermediate_size=12, num_experts=5, num_experts_per_tok=2, norm_topk_prob=normalize,
            shared_expert_intermediate_size=20,
        )
    )  # fmt: skip
    names = ["gate", "shared_expert_gate", *(f"shared_expert.{n}" for n in ("gate_proj", "up_proj", "down_proj"))]
    check_layer(ours, theirs, {f"{name}.weight": f"{name}.weight" for name in names})


def test_a_softmax_after_the_choice_is_a_normalized_softmax() -> None:
    layers = [
        filled(MixtureOfExperts(16, 12, 6, 3, softmax_after=after, normalize=not after)) for after in (True, False)
    ]
    x = torch.randn(2, 9, 16, generator=torch.Generator().manual_seed(0))
    close(layers[0](x)[0], layers[1](x)[0])


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_router_logits_losses_and_gradients_are_those_of_transformers(kind: str, k: int, tmp_path: Path) -> None:
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    theirs = their_model(kind, num_hidden_layers=3, num_experts_per_tok=k)
    theirs.save_pretrained(tmp_path / "theirs")
    ours: Any = from_pretrained(tmp_path / "theirs")
    found: list[Tensor] = []
    for block in ours.layers:
        block.mlp.gate.register_forward_hook(lambda gate, args, output: found.append(output))
    tokens = tokens_for(theirs)
    targets = tokens.roll(-1, 1)
    their_output = theirs(tokens, output_router_logits=True)
    result = RouterLosses(cross_entropy, balance=0.1, z=0.03)(ours(tokens, router=True), targets)
    for own, their_logits in zip(found, their_output.router_logits, strict=True):
        close(own.flatten(0, 1), their_logits)
    balance = load_balancing_loss_func(their_output.router_logits, ours.config.num_experts, k)
    z = torch.stack([each.logsumexp(-1) ** 2 for each in their_output.router_logits]).mean()
    wanted = (
        nn.functional.cross_entropy(their_output.logits.flatten(0, 1), targets.flatten()) + 0.1 * balance + 0.03 * z
    )
    close(result.loss, wanted)
    close(result.routers.addends[0], balance)
    close(result.routers.addends[1:].sum(), z)
    assert result.routers.load.sum() == 3 * k * tokens.numel()
    result.loss.backward()
    wanted.backward()
    gradients, stored = dict(theirs.named_parameters()), family_of(ours).weights.stored  # type: ignore[union-attr]
    for name, parameter in ours.named_parameters():
        close(parameter.grad, gradient_in(gradients, stored(name), parameter), name)


def test_microbatches_count_by_their_number_and_a_plain_call_returns_logits() -> None:
    model: Any = make_model(SMALL)
    initialize(model, 0)
    tokens = torch.randint(0, 31, (4, 9), generator=torch.Generator().manual_seed(0))
    targets = tokens.roll(-1, 1)
    assert isinstance(model(tokens), Tensor)
    criterion = RouterLosses(cross_entropy, balance=0.2, z=0.1)
    halves = [criterion(model(t, router=True), u).loss for t, u in zip(tokens.chunk(2), targets.chunk(2), strict=True)]
    loss = forward_backward(model, criterion, tokens, targets, microbatches=2, router=True)
    close(loss, sum(halves) / 2)
    with pytest.raises(ValueError, match="call the model with router=True"):
        criterion(model(tokens), targets)
    with pytest.raises(ValueError, match="RouterLosses: z is -1; it must be a number, 0 or more"):
        RouterLosses(cross_entropy, z=-1)
    with pytest.raises(ValueError, match=r"RouterLosses got targets \(0, 4\), no token; give one at least"):
        RouterLosses(cross_entropy)((torch.zeros(0, 4, 5), torch.zeros(1, 9)), torch.zeros(0, 4, dtype=torch.int64))


def test_huge_logits_of_a_router_leave_a_loss_without_the_z_loss_finite() -> None:
    statistics = torch.tensor([[2.0, 2.0, 2.0, 2.0, math.inf]])  # of two experts; the squares have overflowed
    output, targets = (torch.zeros(2, 2, 5), statistics), torch.zeros(2, 2, dtype=torch.int64)
    assert RouterLosses(cross_entropy, balance=0.1)(output, targets).loss.isfinite()
    assert not RouterLosses(cross_entropy, balance=0.1, z=0.1)(output, targets).loss.isfinite()


def test_biases_move_to_an_even_load_by_their_rate() -> None:
    model: Any = make_model(DEEPSEEK)
    initialize(model, 0)
    biases = [block.mlp.correction_bias for block in model.layers]
    assert all(not bias.any() and not bias.requires_grad for bias in biases)
    load = torch.tensor([[3.0, 1, 2, 2, 2, 2], [0, 0, 0, 0, 0, 12], [2, 2, 2, 2, 2, 2]])
    update_correction_biases(model, load, 0.01)
    signs = torch.tensor([[-1.0, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, -1], [0, 0, 0, 0, 0, 0]])
    for bias, sign in zip(biases, signs, strict=True):
        torch.testing.assert_close(bias.detach(), 0.01 * sign)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("config", "kind"),
    [
        pytest.param(MixtralConfig(**SIZES, num_experts=3, sliding_window=5), "mixtral", id="mixtral"),
        pytest.param(SMALL, "qwen3_moe", id="qwen3-moe"),
        pytest.param(DEEPSEEK, "weft_moe", id="deepseek-router"),
        pytest.param(dataclasses.replace(SMALL, softmax_after=True), "weft_moe", id="softmax-after"),
    ],
)
def test_folders_and_checkpoints_keep_config_and_weights(config: Any, kind: str, tmp_path: Path) -> None:
    import json

    model: Any = filled(make_model(config))
    save_pretrained(model, tmp_path / "folder", shard_bytes=10_000)
    assert json.loads((tmp_path / "folder/config.json").read_text())["model_type"] == kind
    save_checkpoint(model, tmp_path / "checkpoint")
    again: Any = from_pretrained(tmp_path / "folder")
    loaded = make_model(config).to_empty(device="cpu")
    load_checkpoint(loaded, tmp_path / "checkpoint")
    of_checkpoint: Any = from_pretrained(tmp_path / "checkpoint")
    assert again.config == of_checkpoint.config == config
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, again.get_parameter(name)), name
        assert torch.equal(parameter, of_checkpoint.get_parameter(name)), name
        assert torch.equal(parameter, loaded.get_parameter(name)), name


def test_a_folder_without_an_expert_names_layer_and_expert(tmp_path: Path) -> None:
    save_pretrained(filled(make_model(SMALL)), tmp_path / "folder")
    (tmp_path / "folder/checksums.json").unlink()
    file = tmp_path / "folder/model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.experts.4.up_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(
        ValueError, match=r"lacks model\.layers\.1\.mlp\.experts\.4\.up_proj\.weight, of expert 4 of 6 in layers\.1;"
    ):
        from_pretrained(tmp_path / "folder")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"experts_per_token": 7}, "experts_per_token 7 is above num_experts 6; .* give at most 6"),
        ({"num_experts": 0}, "num_experts is 0; it must be an int >= 1"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size is 0"),
        ({"mlp_only_layers": (0, 1, 2)}, "leave no layer with experts, of 3 layers"),
        ({"mlp_only_layers": (3,)}, r"mlp_only_layers is \(3,\); give each layer once, in order, of 0 to 2"),
        ({"decoder_sparse_step": 4}, "decoder_sparse_step 4 and .* leave no layer with experts"),
        ({"router_aux_loss_coef": -1.0}, "router_aux_loss_coef is -1.0; it must be a number, 0 or more"),
        ({"router_score": "relu"}, "router_score|score is 'relu'; it must be one of 'softmax', 'sigmoid'"),
        ({"router_score": "sigmoid", "softmax_after": True}, "softmax_after is an option of score 'softmax'"),
        ({"router_scale": 0.0}, "scale is 0.0; it must be a number > 0"),
        ({"expert_groups": (4, 1)}, r"groups 4 do not divide num_experts 6 .* use one of \[1, 2, 3\]"),
        ({"expert_groups": (3, 4)}, "4 of 3 groups of 2 experts are chosen"),
        ({"expert_groups": (3, 1), "experts_per_token": 3}, "1 of 3 groups of 2 experts .* choose 2 to 3"),
        ({"shared_expert_gate": True}, "shared_gate is on without a shared expert"),
        ({"router_bias_rate": -0.1}, "router_bias_rate is -0.1"),
    ],
    ids=str,
)
def test_config_names_what_does_not_fit(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"QwenMoeConfig: .*{message}"):
        dataclasses.replace(SMALL, **change)


@pytest.mark.parametrize("config", [SMALL, DEEPSEEK, MixtralConfig(**SIZES)], ids=["qwen3-moe", "deepseek", "mixtral"])
def test_parameters_are_counted(config: Any) -> None:
    with torch.device("meta"):
        model: Any = make_model(config)
    total = sum(each.numel() for each in model.parameters())
    assert total == config.num_parameters
    options: ExpertOptions = config.block(2).experts
    unused = sum(
        each.numel() // options.num_experts * (options.num_experts - options.experts_per_token)
        for name, each in model.named_parameters()
        if ".experts." in name
    )
    assert config.num_active_parameters == total - unused


def test_the_load_is_drawn() -> None:
    drawn = draw_load([[0, 10, 20, 10], [10, 10, 10, 10]], (0, 11), 60).splitlines()
    assert drawn[1:] == ["layer 0   ▄█▄  busiest 2.00x", "layer 11 ▄▄▄▄  busiest 1.00x"]
    wide = draw_load([[1.0] * 127 + [math.pi]], (3,), 60)
    assert max(map(len, wide.splitlines()[1:])) <= 60
    assert "4 to a mark" in wide
    assert "busiest 0.00x" in draw_load([[0.0, 0.0]], (0,), 60)
