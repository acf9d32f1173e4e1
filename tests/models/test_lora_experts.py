"""Low-rank adapters of experts on one process: as those of peft, merged, compiled, and errors."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from weft.kernels.random import normal_
from weft.mesh import Layout, LayoutError, ProcessMesh, derive_key
from weft.models import (
    from_pretrained,
    generate,
    initialize,
    load_lora,
    lora,
    merge_lora,
    save_lora,
    save_pretrained,
)
from weft.models.experts import Experts
from weft.models.families import make_model
from weft.models.low_rank import ADAPTED_EXPERTS, PROJECTIONS

from tests.models.cases import gradients_off, whole
from tests.models.folders import their_model, tokens_for
from tests.models.mixtures import PlainExperts
from tests.models.test_experts_axis import FAMILIES
from tests.models.test_experts_parallel import make

CONFIG = FAMILIES["qwen3-moe"]
EXPERTS = ["layers.*.mlp.experts.*_proj"]
ALL = ["*_proj"]
RANK, ALPHA = 3, 12.0


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else peft asks for the base model's files in the network, and waits."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def with_values(model: Any) -> Any:
    """The model with random values in B, which is 0 at the start."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora." in name and name.endswith("B"):
                normal_(parameter, derive_key(7, name), std=0.1)
    return model


def adapted(targets: list[str], family: str = "qwen3-moe") -> Any:
    return with_values(lora(make(FAMILIES[family]), RANK, ALPHA, targets))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(each.grad) for name, each in model.named_parameters() if each.grad is not None}


# One process, and peft


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
@pytest.mark.parametrize("projections", [("gate_proj", "up_proj", "down_proj"), ("down_proj",)], ids=["all", "down"])
def test_values_and_gradients_are_those_of_peft(kind: str, projections: tuple[str, ...], tmp_path: Path) -> None:
    import peft

    theirs = their_model(kind)
    theirs.save_pretrained(tmp_path / "base")
    names = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"} if kind == "mixtral" else {}
    chosen = [names.get(each, each) for each in projections]
    config = peft.LoraConfig(
        r=RANK, lora_alpha=ALPHA, target_modules=["q_proj", *chosen], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    theirs = peft.get_peft_model(theirs, config).eval()
    theirs.save_pretrained(str(tmp_path / "theirs"))
    ours = load_lora(from_pretrained(tmp_path / "base"), tmp_path / "theirs")
    tokens = tokens_for(theirs)
    wanted, found = theirs(tokens).logits, ours(tokens)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    upstream = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(0))
    wanted.backward(upstream)
    found.backward(upstream)
    own = {name: each.grad for name, each in theirs.named_parameters() if each.requires_grad}
    compared = 0
    for name, parameter in ours.named_parameters():
        if not parameter.requires_grad:
            assert parameter.grad is None, name
            continue
        if ".experts.lora." in name:
            layer, _, rest = name.partition(".experts.lora.")
            projection, _, leaf = rest.partition(".")
            layer = layer.replace(".mlp", ".block_sparse_moe") if kind == "mixtral" else layer
            matrices = [
                own[
                    f"base_model.model.model.{layer}.experts.{e}.{names.get(projection, projection)}"
                    f".lora_{leaf}.default.weight"
                ]
                for e in range(len(parameter))
            ]
            filled = next(each for each in matrices if each is not None)
            their_gradient = torch.stack([torch.zeros_like(filled) if each is None else each for each in matrices])
        else:
            layer, leaf = name.split(".lora.")
            their_gradient = own[f"base_model.model.model.{layer}.lora_{leaf}.default.weight"]
        assert (parameter.grad - their_gradient).abs().max() <= 1e-5 * their_gradient.abs().max(), name
        compared += 1
    assert compared == 2 * 2 * (1 + len(projections))

    save_lora(ours, tmp_path / "ours")
    base = type(theirs.get_base_model()).from_pretrained(tmp_path / "base", attn_implementation="eager")
    again = peft.PeftModel.from_pretrained(base, str(tmp_path / "ours")).eval()
    torch.testing.assert_close(again(tokens).logits, wanted, rtol=1e-5, atol=1e-5)


def test_only_adapters_are_trained_and_start_without_effect() -> None:
    model = lora(make(CONFIG), RANK, ALPHA, EXPERTS)
    tokens = torch.arange(24).view(2, 12)
    torch.testing.assert_close(model(tokens), make(CONFIG)(tokens), rtol=1e-5, atol=1e-5)
    E, H, I, layers = 8, 16, 12, 2
    trained = {name: tuple(each.shape) for name, each in model.named_parameters() if each.requires_grad}
    assert trained["layers.1.mlp.experts.lora.gate_proj.A"] == (E, RANK, H)
    assert trained["layers.1.mlp.experts.lora.down_proj.B"] == (E, H, RANK)
    assert sum(map(math.prod, trained.values())) == layers * 3 * E * RANK * (H + I)
    a = model.layers[1].mlp.experts.lora.down_proj.A
    assert a.std().item() == pytest.approx(1 / math.sqrt(3 * I), rel=0.2)
    with torch.device("meta"):
        other = lora(make_model(CONFIG), RANK, ALPHA, EXPERTS).to_empty(device="cpu")
    initialize(other, seed=0)
    assert torch.equal(other.layers[1].mlp.experts.lora.down_proj.A, a)


def test_all_projections_are_matched_by_one_pattern() -> None:
    model = lora(make(CONFIG), RANK, ALPHA, ALL)
    found = {name.rpartition(".")[0] for name, each in model.named_parameters() if each.requires_grad}
    attention = {f"layers.0.self_attn.{each}_proj.lora" for each in "qkvo"}
    assert {each for each in found if each.startswith("layers.0.")} == attention | {
        f"layers.0.mlp.{each}_proj.lora" for each in ("gate", "up", "down")
    }
    assert {each for each in found if each.startswith("layers.1.mlp")} == {
        f"layers.1.mlp.experts.lora.{each}_proj" for each in ("gate", "up", "down")
    }


def test_merged_the_model_computes_the_same_and_is_a_plain_one(tmp_path: Path) -> None:
    model, tokens = adapted(ALL), torch.arange(24).view(2, 12)
    expected = model(tokens)
    save_pretrained(model, tmp_path / "written")
    merge_lora(model)
    torch.testing.assert_close(model(tokens), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(from_pretrained(tmp_path / "written")(tokens), model(tokens), rtol=0, atol=0)
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in make(CONFIG).named_parameters()]
    assert all(each.requires_grad for each in model.parameters())
    lora(model, 1, 1, EXPERTS)  # experts may get adapters afterwards


def test_beside_bfloat16_adapters_are_float32() -> None:
    model = with_values(lora(make(CONFIG).bfloat16(), RANK, ALPHA, EXPERTS))
    trained = [each for each in model.parameters() if each.requires_grad]
    assert {each.dtype for each in trained} == {torch.float32}
    x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))
    layer = model.layers[1].mlp
    output, _ = layer(x.bfloat16())
    assert output.dtype == torch.bfloat16
    output.float().sum().backward()
    assert all(each.grad is not None for each in layer.experts.lora.parameters())
    wanted, _ = layer.float()(x)
    assert (output - wanted).abs().max() <= 0.05 * wanted.abs().max()


def test_under_autocast_adapters_compute_in_its_dtype() -> None:
    model = adapted(EXPERTS)
    layer = model.layers[1].mlp
    x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))
    wanted, _ = layer(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, _ = layer(x)
    assert output.dtype == torch.bfloat16
    assert (output - wanted).abs().max() <= 0.05 * wanted.abs().max()


@pytest.mark.exhaustive  # compilation takes long
def test_a_compiled_model_computes_the_same() -> None:
    model, tokens = adapted(EXPERTS), torch.arange(24).view(2, 12)
    expected = model(tokens)
    expected.sum().backward()
    own = gradients(model)
    model.zero_grad()
    compiled = torch.compile(model, backend="aot_eager")(tokens)
    torch.testing.assert_close(compiled, expected, rtol=1e-5, atol=1e-5)
    compiled.sum().backward()
    assert not gradients_off(gradients(model), own)


@pytest.mark.parametrize("operand", ["experts", "features"])
def test_layouts_that_do_not_fit_are_refused_with_the_repair(operand: str) -> None:
    mesh, experts = ProcessMesh.grid(x=2), adapted(EXPERTS).layers[1].mlp.experts
    replicated, by_expert = Layout(mesh), Layout(mesh, "x: S(0)")
    layouts: list[Layout] = [replicated] * 12
    layouts[3 if operand == "experts" else 0] = by_expert if operand == "experts" else Layout(mesh, "x: S(2)")
    factors = [getattr(getattr(experts.lora, each), leaf) for each in PROJECTIONS for leaf in "AB"]
    shapes = [(2, 5, 16), (2, 5, 3), (2, 5, 3), *(tuple(getattr(experts, each).shape) for each in PROJECTIONS)]
    name = "gate_proj" if operand == "experts" else "x"
    with pytest.raises(LayoutError, match=rf"{name} is \(x: S.*reshard {name} to \(x: R\)"):
        ADAPTED_EXPERTS.rule(tuple(layouts), (*shapes, *(tuple(each.shape) for each in factors)), {})


def test_generates_with_adapters() -> None:
    model = adapted(ALL)
    prompt = torch.arange(10).view(2, 5)
    cached = generate(model, prompt, max_new_tokens=4)
    assert torch.equal(cached, generate(model, prompt, max_new_tokens=4, use_cache=False))


# What does not fit


def test_a_target_that_is_a_module_of_experts_names_the_projections() -> None:
    with pytest.raises(ValueError, match=r"an Experts, .*'layers\.1\.mlp\.experts\.gate_proj' or .*experts\.\*_proj'"):
        lora(make(CONFIG), 2, 4, ["layers.*.mlp.experts"])
    with pytest.raises(ValueError, match=r"matches no module of QwenMoe; .*layers\.1\.mlp\.experts\.down_proj"):
        lora(make(CONFIG), 2, 4, ["layers.1.mlp.experts.down_prj"])


def test_experts_with_a_forward_of_their_own_are_refused() -> None:
    model = make(CONFIG)
    model.layers[1].mlp.experts.__class__ = PlainExperts
    with pytest.raises(ValueError, match="of a PlainExperts, whose own forward would ignore adapters; leave"):
        lora(model, 2, 4, EXPERTS)
    assert isinstance(model.layers[3].mlp.experts, Experts)
    lora(model, 2, 4, ["layers.3.mlp.experts.up_proj"])


def test_a_folder_without_an_experts_adapter_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    save_lora(adapted(EXPERTS), tmp_path / "adapters")
    file = tmp_path / "adapters/adapter_model.safetensors"
    tensors = load_file(file)
    assert len(json.loads((tmp_path / "adapters/adapter_config.json").read_text())["target_modules"]) == 2 * 3 * 8
    for leaf in "AB":
        del tensors[f"base_model.model.model.layers.3.mlp.experts.5.up_proj.lora_{leaf}.weight"]
    save_file(tensors, file)
    with pytest.raises(
        ValueError, match=r"no adapter of expert 5 of layers\.3\.mlp\.experts\.up_proj, .*all 8 experts"
    ):
        load_lora(make(CONFIG), tmp_path / "adapters")
