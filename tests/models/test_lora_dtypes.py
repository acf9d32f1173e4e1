"""Adapters on a 16-bit model: float32 by default, so that small updates are not rounded away; under every layout."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from weft.kernels import cross_entropy
from weft.kernels.random import normal_
from weft.mesh import ProcessMesh, derive_key
from weft.models import (
    PipelinePlan,
    forward_backward,
    from_pretrained,
    load_lora,
    lora,
    merge_lora,
    parallelize,
    save_lora,
    save_pretrained,
)
from weft.models.layers import Linear
from weft.models.low_rank import LowRank

from tests.models.cases import SMALL, make, whole

TARGETS = ["layers.*.self_attn.[qv]_proj", "layers.*.self_attn.o_proj", "layers.*.mlp.down_proj"]
LOWER = [torch.bfloat16, torch.float16]


def adapted(base=torch.bfloat16, **options):
    return stirred(lora(make(SMALL).to(base), 3, 12, TARGETS, **options))


def stirred(model):
    """Fill the adapters' B, which starts at 0, so that the adapters have an effect."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("lora.B"):
                normal_(parameter, derive_key(7, name), std=0.1)
    return model


def adapters(model):
    return {name: each for name, each in model.named_parameters() if ".lora." in name}


@pytest.mark.parametrize(
    ("base", "asked", "found"),
    [
        (torch.bfloat16, None, torch.float32),
        (torch.float16, None, torch.float32),
        (torch.float32, None, torch.float32),
        (torch.float64, None, torch.float64),
        (torch.bfloat16, torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float64, torch.float64),
    ],
    ids=str,
)
def test_adapters_are_float32_or_as_asked(base, asked, found, tmp_path):
    model = adapted(base, dtype=asked)
    assert {each.dtype for each in adapters(model).values()} == {found}
    tokens = torch.arange(12).reshape(2, 6)
    assert model(tokens).dtype == base
    save_lora(model, tmp_path / "adapters")
    assert {each.dtype for each in load_file(tmp_path / "adapters/adapter_model.safetensors").values()} == {found}
    again = load_lora(make(SMALL).to(base), tmp_path / "adapters", dtype=asked)
    for name, each in adapters(again).items():
        assert torch.equal(each, adapters(model)[name]), name
    assert torch.equal(again(tokens), model(tokens))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, "float32"], ids=str)
def test_another_dtype_is_refused(dtype):
    with pytest.raises(ValueError, match=r"lora: dtype is .*; give torch.float32"):
        lora(make(SMALL), 3, 12, TARGETS, dtype=dtype)


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", LOWER, ids=str)
@pytest.mark.parametrize("shape", [(1,), (5,), (2, 7), (0, 3)], ids=str)
def test_an_adapted_layer_computes_as_pefts_does(shape, dtype):
    """Input cast up, added in float32, rounded once."""
    import peft

    torch.manual_seed(0)
    base = torch.nn.Linear(16, 24, bias=False).to(dtype)
    config = peft.LoraConfig(r=3, lora_alpha=12, target_modules=["0"], init_lora_weights=False)
    theirs = peft.get_peft_model(torch.nn.Sequential(base), config)
    layer = theirs.base_model.model[0]
    ours = Linear(16, 24, bias=False).to(dtype)
    ours.weight.data = base.weight.data
    low = LowRank(layer.lora_A["default"].weight.detach().clone(), layer.lora_B["default"].weight.detach().clone(), 12)
    assert low.A.dtype == torch.float32
    x = torch.randn(*shape, 16).to(dtype)
    found, wanted = low(x, ours(x)), theirs(x)
    assert found.dtype == wanted.dtype == dtype
    torch.testing.assert_close(found, wanted, rtol=torch.finfo(dtype).eps, atol=1e-6)
    cotangent = torch.randn(found.shape).to(dtype)
    found.backward(cotangent)
    wanted.backward(cotangent)
    for mine, its in ((low.A, layer.lora_A["default"].weight), (low.B, layer.lora_B["default"].weight)):
        torch.testing.assert_close(mine.grad, its.grad, rtol=1e-4, atol=1e-5)


def test_under_autocast_a_float32_base_computes_as_before():
    model, tokens = adapted(torch.float32), torch.arange(12).reshape(2, 6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = model(tokens)
    assert (found - model(tokens)).abs().max() < 0.05 * model(tokens).abs().max()


@pytest.mark.parametrize("dtype", LOWER, ids=str)
def test_an_adapter_is_folded_in_with_one_rounding(dtype, tmp_path):
    model = adapted(dtype)
    wanted = {}
    for name in ("layers.0.self_attn.q_proj", "layers.1.mlp.down_proj"):
        layer = model.get_submodule(name)
        wanted[name] = (layer.weight.double() + 4 * layer.lora.B.double() @ layer.lora.A.double()).float().to(dtype)
    save_pretrained(model, tmp_path / "folded")
    merge_lora(model)
    read = from_pretrained(tmp_path / "folded")
    for name, weight in wanted.items():
        torch.testing.assert_close(model.get_submodule(name).weight, weight, rtol=torch.finfo(dtype).eps, atol=0)
        assert torch.equal(read.get_submodule(name).weight, model.get_submodule(name).weight)
        assert read.get_submodule(name).weight.dtype == dtype


PLANS = {
    "tp": ({"dp": 2, "tp": 2}, {}),
    "sequence": ({"dp": 2, "tp": 2}, {"sequence": True}),
    "dp": ({"dp": 4}, {}),
    "zero1": ({"dp": 2, "tp": 2}, {"zero": 1}),
    "zero2": ({"dp": 4}, {"zero": 2}),
    "zero3": ({"dp": 2, "tp": 2}, {"zero": 3, "sequence": True}),
    "recomputed": ({"dp": 2, "tp": 2}, {"recompute": "full"}),
    "stages": ({"pp": 2, "tp": 2}, {"pipeline": PipelinePlan(split="layers", schedule="1f1b", microbatches=2)}),
    "stages-zero3": (
        {"pp": 2, "dp": 2},
        {"zero": 3, "pipeline": PipelinePlan(split="layers", schedule="1f1b", microbatches=2)},
    ),
}


def rows():
    tokens = torch.randint(0, SMALL.vocab_size, (4, 17), generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def trained(model, steps=5):
    """The loss and gradients of the first step, and the share of adapters' numbers unchanged after `steps` steps."""
    own = adapters(model)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-4, weight_decay=0)
    before = {name: local(each).clone() for name, each in own.items()}
    first = None
    for _ in range(steps):
        loss = forward_backward(model, cross_entropy, *rows())
        if first is None:
            first = loss.item(), {name: each.grad for name, each in own.items()}
            first = first[0], {name: whole(each) for name, each in first[1].items() if each is not None}
        optimizer.step()
        optimizer.zero_grad()
    moved = [(local(each) != before[name]).flatten() for name, each in own.items()]
    return *first, 1 - torch.cat(moved).float().mean().item(), {each.dtype for each in own.values()}


def local(parameter):
    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).detach()


def trained_in_parallel(axes, plan, after, folder):
    mesh = ProcessMesh.grid(**axes)
    model = make(SMALL).to(torch.bfloat16)
    chosen = replace(model.parallel_plan(), **plan)
    if after:
        model = lora(parallelize(model, mesh, chosen), 3, 12, TARGETS)
    else:
        model = parallelize(lora(model, 3, 12, TARGETS), mesh, chosen)
    stirred(model)
    save_lora(model, f"{folder}/adapters")
    save_pretrained(model, f"{folder}/folded")
    return trained(model)


@pytest.mark.exhaustive
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("name", PLANS)
def test_every_number_moves_under_every_layout(pool, name, after, tmp_path):
    axes, plan = PLANS[name]
    if after and "pp" in axes:
        pytest.skip("adapters come before stages")
    loss, gradients, still, dtypes = trained(adapted())
    assert still == 0 and dtypes == {torch.float32}
    found = pool.run(trained_in_parallel, axes, plan, after, str(tmp_path), ranks=torch.Size(axes.values()).numel())
    for their_loss, their_gradients, their_still, their_dtypes in found:
        assert their_still == 0 and their_dtypes == {torch.float32}
        assert their_loss == pytest.approx(loss, rel=2e-3)  # activations are rounded to 8 bits in another order
        for each, gradient in their_gradients.items():
            assert gradient.dtype == torch.float32
            off = (gradient - gradients[each]).abs().max() / gradients[each].abs().max()
            assert off < 0.1, (each, off)
    tokens, _ = rows()
    again = load_lora(make(SMALL).to(torch.bfloat16), tmp_path / "adapters")
    for each, value in adapters(adapted()).items():
        assert torch.equal(adapters(again)[each], value), each
    folded, wanted = from_pretrained(tmp_path / "folded"), merge_lora(adapted())
    assert torch.equal(folded(tokens), wanted(tokens))
