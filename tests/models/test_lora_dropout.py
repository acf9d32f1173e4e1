"""Dropout of the inputs of adapters: the masks of one process on every mesh, and peft's formula."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from weft.kernels import cross_entropy, dropout
from weft.mesh import ProcessMesh, derive_key
from weft.models import PipelinePlan, forward_backward, load_lora, lora, merge_lora, parallelize, save_lora

from tests.models.cases import gradients_off, whole
from tests.models.test_experts_parallel import make as make_mixture
from tests.models.test_lora import ALPHA, CONFIG, RANK, batch, make, stirred
from tests.models.test_lora_experts import CONFIG as MIXTURE

TARGETS = ["q_proj", "o_proj", "v_proj", "down_proj", "gate_proj", "lm_head"]
P, KEY = 0.25, derive_key(5, "dropout", 2)
PLANS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "dp": ({"dp": 2}, {}),
    "zero3-full": ({"dp": 2}, {"zero": 3, "recompute": "full"}),
    "tp": ({"tp": 2}, {}),
    "sequence-full": ({"dp": 2, "tp": 2}, {"sequence": True, "recompute": "full"}),
    "sequence-selective": ({"tp": 2}, {"sequence": True, "recompute": "selective"}),
    "cp-full": ({"cp": 2}, {"context": "all_gather", "recompute": "full"}),
    "cp-selective": ({"cp": 2}, {"context": "all_gather", "recompute": "selective"}),
    "cp-ulysses": ({"cp": 2}, {"context": "ulysses"}),
    "pp-full": ({"pp": 2}, {"pipeline": PipelinePlan(microbatches=2), "recompute": "full"}),
}


def dropping(model: nn.Module) -> nn.Module:
    return stirred(lora(model, RANK, ALPHA, TARGETS, dropout=P))


def step(axes: dict[str, int], changes: dict[str, Any], after: bool, microbatches: int, packed: bool) -> dict[str, Any]:
    tokens, targets = (each[:4] for each in batch())
    model = make()
    if axes:
        mesh, plan = ProcessMesh.grid(**axes), replace(model.parallel_plan(), **changes)
        model = dropping(parallelize(model, mesh, plan)) if after else parallelize(dropping(model), mesh, plan)
    else:
        dropping(model)
    inputs = {"dropout_key": torch.tensor(KEY, dtype=torch.uint64)}
    if packed:  # under cp each row then has an order of its own
        inputs["documents"] = torch.zeros_like(tokens)
        inputs["documents"][:, 5:] = 1
    loss = forward_backward(model, cross_entropy, tokens, targets, **inputs, microbatches=microbatches)
    return {
        "loss": None if loss is None else float(whole(loss)),
        "gradients": {n: whole(each.grad) for n, each in model.named_parameters() if each.grad is not None},
    }


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("case", PLANS)
def test_loss_and_gradients_are_those_of_one_process(case: str, after: bool, pool: Any) -> None:
    axes, changes = PLANS[case]
    if "pp" in axes and after:
        return  # refused
    packed = case == "cp-full"
    alone = step({}, {}, False, 2 if "pp" in axes else 1, packed)
    for found in pool.run(step, axes, changes, after, 1, packed, ranks=math.prod(axes.values())):
        if found["loss"] is not None:
            assert found["loss"] == pytest.approx(alone["loss"], rel=1e-6)
        assert found["gradients"]
        assert not gradients_off(found["gradients"], {n: alone["gradients"][n] for n in found["gradients"]})


def test_the_input_is_dropped_as_in_peft_and_each_adapter_has_a_mask_of_its_own() -> None:
    """output = layer(x) + scale * B(A(dropout(x)))."""
    model, tokens = dropping(make()), batch()[0]
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    for name in ("layers.0.self_attn.q_proj", "layers.0.self_attn.v_proj", "layers.1.mlp.down_proj", "lm_head"):
        model.get_submodule(name).register_forward_hook(
            lambda _, args, output, name=name: seen.update({name: (args[0], output)})
        )
    model(tokens, dropout_key=KEY)
    for name, (x, output) in seen.items():
        layer: Any = model.get_submodule(name)
        dropped = dropout(x, P, KEY, f"{name}.lora")
        expected = x @ layer.weight.T + ALPHA / RANK * (dropped @ layer.lora.A.T) @ layer.lora.B.T
        torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
    same_input = [
        dropout(seen["layers.0.self_attn.q_proj"][0], P, KEY, f"layers.0.self_attn.{n}_proj.lora") for n in "qv"
    ]
    assert not torch.equal(*same_input)


@pytest.mark.exhaustive
def test_masks_differ_by_step_leave_the_mean_and_end_in_eval_mode() -> None:
    model, tokens = dropping(make()).requires_grad_(False), batch()[0]
    layer: Any = model.layers[0].self_attn.q_proj
    outputs: list[Tensor] = []
    layer.register_forward_hook(lambda _, args, output: outputs.append(output))
    plain = copy.deepcopy(model).eval()
    expected = plain(tokens)
    assert torch.equal(model.eval()(tokens, dropout_key=KEY), expected)
    assert torch.equal(model(tokens), expected), "no key is needed"
    model.train()
    outputs.clear()
    for number in range(400):
        model(tokens, dropout_key=derive_key(0, "dropout", number))
    assert not torch.equal(outputs[0], outputs[1])
    mean, spread = torch.stack(outputs).mean(0), torch.stack(outputs).std(0) / math.sqrt(len(outputs))
    outputs.clear()
    model.eval()(tokens)
    assert ((mean - outputs[0]).abs() <= 5 * spread + 1e-6).all()
    with pytest.raises(
        RuntimeError, match=r"self_attn\.._proj\.lora drops elements with p=0.25 .*dropout_key=derive_key"
    ):
        model.train()(tokens)


def test_adapters_with_dropout_are_copied_and_merged() -> None:
    model, tokens = dropping(make()), batch()[0]
    copied = copy.deepcopy(model)
    assert torch.equal(copied(tokens, dropout_key=KEY), model(tokens, dropout_key=KEY))
    merge_lora(copied)
    assert torch.equal(copied(tokens, dropout_key=KEY), copied(tokens))
    assert not any("forward" in vars(module) for module in copied.modules())


@pytest.mark.parametrize("p", [0.25, 0.0])
def test_the_probability_is_written_and_read(p: float, tmp_path: Path) -> None:
    save_lora(lora(make(), 2, 4, ["q_proj"], dropout=p), tmp_path / "adapters")
    assert json.loads((tmp_path / "adapters/adapter_config.json").read_text())["lora_dropout"] == p
    read: Any = load_lora(make(), tmp_path / "adapters")
    assert read.layers[0].self_attn.q_proj.lora.dropout == p
    read = load_lora(make(), tmp_path / "adapters", dropout=0.5)
    assert read.layers[0].self_attn.q_proj.lora.dropout == 0.5


class WithoutKey(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x)


@pytest.mark.parametrize(
    ("model", "targets", "p", "message"),
    [
        pytest.param(make, ["q_proj"], 1.0, "dropout is 1.0; it must be a number from 0 to below 1", id="all"),
        pytest.param(make, ["q_proj"], True, "dropout is True; it must be a number", id="truth"),
        pytest.param(
            lambda: make_mixture(MIXTURE), ["gate_proj"], 0.1, "a projection of experts, has no dropout", id="experts"
        ),
        pytest.param(WithoutKey, ["one"], 0.1, "no module around 'one' takes the argument dropout_key", id="no-key"),
    ],
)
def test_dropout_that_adapters_cannot_have_is_refused(model: Any, targets: list[str], p: Any, message: str) -> None:
    made = model()
    with pytest.raises(ValueError, match=message):
        lora(made, 2, 4, targets, dropout=p)
    assert all(parameter.requires_grad for parameter in made.parameters())


def test_compiled_blocks_under_full_recompute_refuse_dropout() -> None:
    model = dropping(make())
    parallelize(model, ProcessMesh.grid(dp=1), replace(make().parallel_plan(), recompute="full"))
    with pytest.raises(ValueError, match="under recompute 'full' cannot have adapters with dropout; take recompute"):
        model.layers[0].compile(backend="aot_eager")


@pytest.mark.exhaustive
@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_compiled_blocks_draw_the_same_masks(recompute: Any) -> None:
    torch._dynamo.reset()
    tokens, model = batch()[0], dropping(make())
    key = torch.tensor(KEY, dtype=torch.uint64)
    expected = model(tokens, dropout_key=key)
    expected.square().sum().backward()
    compiled = dropping(make())
    parallelize(compiled, ProcessMesh.grid(dp=1), replace(make().parallel_plan(), recompute=recompute))
    for layer in compiled.layers:
        layer.compile(backend="aot_eager")
    found = compiled(tokens, dropout_key=key)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    found.square().sum().backward()
    for (name, one), (_, two) in zip(model.named_parameters(), compiled.named_parameters(), strict=True):
        if one.requires_grad:
            torch.testing.assert_close(two.grad, one.grad, rtol=1e-4, atol=1e-4, msg=name)


def test_targets_by_the_last_part_of_names() -> None:
    def adapted(targets: list[str], model: nn.Module | None = None) -> set[str]:
        found = lora(model or make(), 2, 4, targets)
        return {name.removesuffix(".lora.A") for name, _ in found.named_parameters() if name.endswith(".lora.A")}

    queries = {f"layers.{i}.self_attn.q_proj" for i in range(CONFIG.num_layers)}
    assert adapted(["q_proj"]) == adapted(["layers.*.self_attn.q_proj"]) == queries
    assert adapted(["[qv]_proj"]) == queries | {name.replace("q_proj", "v_proj") for name in queries}
    assert adapted(["lm_head"]) == {"lm_head"}
    assert len(adapted(["*_proj"])) == 7 * CONFIG.num_layers
    mixture = {name for name, _ in lora(make_mixture(MIXTURE), 2, 4, ["gate_proj"]).named_parameters()}
    assert "layers.1.mlp.experts.lora.gate_proj.A" in mixture
    assert not any("up_proj.A" in name or "self_attn.q_proj.lora" in name for name in mixture)
    for target, message in (
        ("qproj", "matches no module of Llama; the nearest names are q_proj"),
        ("embed_tokens", "'embed_tokens', a Embedding; adapters are for Linear"),
        ("input_layernorm", "'layers.0.input_layernorm', a RMSNorm; adapters are for Linear"),
        ("norm", "'norm', a RMSNorm"),
        ("self_attn.q_proj", "'self_attn.q_proj' matches no module of Llama; the nearest names are layers"),
    ):
        with pytest.raises(ValueError, match=message):
            lora(make(), 2, 4, [target])
