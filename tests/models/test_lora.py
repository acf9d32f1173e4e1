"""Low-rank adapters: trained alone, laid out beside their layers, folded in, and read by peft."""

from __future__ import annotations

import copy
import json
import math
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from weft.kernels import cross_entropy
from weft.kernels.random import normal_
from weft.mesh import Layout, ProcessMesh, Shard, derive_key
from weft.models import (
    GPT,
    GPTConfig,
    Llama,
    LlamaConfig,
    initialize,
    load_lora,
    lora,
    merge_lora,
    parallelize,
    record,
    save_lora,
    save_pretrained,
)
from weft.models.data.tokenizer import byte_tokenizer
from weft.reshard import distribute, layout_of

from tests.models.cases import gradients_off, theirs, whole
from tests.models.stepping import observed_step
from tests.support.sample import number_of

CONFIG = LlamaConfig(vocab_size=31, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2)
TARGETS = ["layers.*.self_attn.[qv]_proj", "layers.*.self_attn.o_proj", "layers.*.mlp.down_proj"]
RANK, ALPHA = 3, 12


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else peft asks for the base model's files in the network, and waits."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def make(config: LlamaConfig = CONFIG) -> Llama:
    model = Llama(config)
    initialize(model, seed=3)
    return model


def stirred(model: nn.Module) -> nn.Module:
    """Adapters that do something: B is 0 at the start."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("lora.B"):
                normal_(parameter, derive_key(7, name), std=0.1)
    return model


def batch() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, CONFIG.vocab_size, (5, 10), generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def adapted_step(config: LlamaConfig, plan: dict[str, Any], after: bool, recorder: int) -> dict[str, Any]:
    """Loss, gradients, layouts and the communication of a step; the recorder adds the communication it recorded."""
    mesh = ProcessMesh.grid(dp=2, tp=2)
    model, rank = make(config), torch.distributed.get_rank()
    chosen = replace(model.parallel_plan(), **plan)
    expected = None
    if rank == recorder:
        expected = record(lora(make(config), RANK, ALPHA, TARGETS), mesh, chosen, batch=(5, 9), rank=rank)
    if after:
        lora(parallelize(model, mesh, chosen), RANK, ALPHA, TARGETS)
    else:
        parallelize(lora(model, RANK, ALPHA, TARGETS), mesh, chosen)
    stirred(model)
    tokens, target = (distribute(each, Layout(mesh, {"dp": Shard(0)})) for each in batch())
    found, issued = observed_step(model, partial(cross_entropy, denominator=float(target.numel())), tokens, target)
    named = dict(model.named_parameters())
    q, o = (f"layers.0.self_attn.{name}_proj.lora" for name in "qo")
    return {
        "loss": found.loss.item(),
        "gradients": {name: None if each.grad is None else whole(each.grad) for name, each in named.items()},
        "layouts": [str(layout_of(named[name])) for name in (f"{q}.A", f"{q}.B", f"{o}.A", f"{o}.B")],
        "issued": issued,
        "recorded": expected,
    }


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    ("change", "plan"),
    [
        pytest.param({}, {}, id="tensor"),
        pytest.param(
            {"attention_bias": True, "mlp_bias": True, "tie_embeddings": True}, {"sequence": True}, id="sequence"
        ),
        pytest.param({}, {"sequence": True, "recompute": "selective"}, id="recomputed"),
        pytest.param({"num_kv_heads": 1}, {}, id="one-key-head"),
    ],
)
def test_paddlenlp_9412_lora_takes_its_layout_from_the_base_layer_with_the_gradients_of_one_process(
    change: dict[str, Any], plan: dict[str, Any], after: bool, pool
) -> None:
    config = replace(CONFIG, **change)
    dense = stirred(lora(make(config), RANK, ALPHA, TARGETS))
    tokens, target = batch()
    loss = cross_entropy(dense(tokens), target)
    loss.backward()
    adapters = {name: each.grad for name, each in dense.named_parameters() if ".lora." in name}
    recorder = number_of((change, plan, after)) % 4
    for rank, found in enumerate(pool.run(adapted_step, config, plan, after, recorder)):
        assert found["loss"] == pytest.approx(loss.item(), rel=1e-6)
        gradients = {name: each for name, each in found["gradients"].items() if each is not None}
        assert gradients.keys() == adapters.keys()
        assert not gradients_off(gradients, adapters)
        assert found["layouts"] == ["dp: R, tp: R", "dp: R, tp: S(0)", "dp: R, tp: S(1)", "dp: R, tp: R"]
        assert found["recorded"] == (found["issued"] if rank == recorder else None)


@pytest.mark.exhaustive
@pytest.mark.parametrize("sequence", [False, True], ids=["tensor", "sequence"])
def test_adapters_add_nothing_to_a_block_and_reduce_their_own_gradients_alone(sequence: bool) -> None:
    mesh, plan = ProcessMesh.grid(dp=2, tp=2), replace(make().parallel_plan(), sequence=sequence)
    bare, adapted = (
        record(model, mesh, plan, batch=(4, 8))
        for model in (make(), lora(make(), RANK, ALPHA, [*TARGETS, "layers.*.mlp.up_proj"]))
    )
    assert adapted.select(phase="forward") == bare.select(phase="forward")
    # Backward ends at the first adapters: nothing before them needs a gradient.
    entered = Counter({"reduce-scatter": 1} if sequence else {"all-reduce": 1})
    ended = Counter({"all-gather": 1} if sequence else {})
    assert bare.select(phase="backward").counts - adapted.select(phase="backward").counts == entered + ended
    H, inside, kv, layers = 32, 48, 16, 2
    sums = RANK * (3 * H) + RANK * (2 * H)  # A of q, v and up, B of o and down: a rank's are addends over tp as well
    parts = RANK * (H + kv + inside) // 2 + RANK * (H + inside) // 2  # B of q, v and up, A of o and down
    found = adapted.select(phase="gradients")
    received = {each.axes: each.nbytes for each in found.entries}
    assert received == {
        ("dp",): layers * parts * 4,
        ("dp", "tp"): layers * sums * 4 * 3 // 2,
    }  # 2 * (n - 1) / n of the bytes
    assert found.nbytes < bare.select(phase="gradients").nbytes / 4


def folded(after: bool) -> dict[str, Tensor]:
    mesh = ProcessMesh.grid(dp=2, tp=2)
    model = parallelize(stirred(lora(make(), RANK, ALPHA, TARGETS)), mesh)
    return {name: whole(each) for name, each in merge_lora(model).named_parameters()}


@pytest.mark.exhaustive
def test_folded_in_the_model_is_a_plain_one_that_computes_the_same(pool) -> None:
    model = stirred(lora(make(), RANK, ALPHA, TARGETS))
    tokens, _ = batch()
    expected = model(tokens)
    assert not torch.allclose(expected, make()(tokens), atol=1e-3)
    merge_lora(model)
    torch.testing.assert_close(model(tokens), expected, rtol=1e-4, atol=1e-5)
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in make().named_parameters()]
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert model.initial_value("norm.weight") == make().initial_value("norm.weight")
    lora(model, 1, 1, ["lm_head"])  # lm_head may get adapters afterwards
    for weights in pool.run(folded, True):
        for name, weight in stirredly_folded().items():
            torch.testing.assert_close(weights[name], weight, rtol=1e-6, atol=1e-7, msg=name)


def stirredly_folded() -> dict[str, Tensor]:
    return dict(merge_lora(stirred(lora(make(), RANK, ALPHA, TARGETS))).named_parameters())


def test_adapters_start_from_their_names() -> None:
    model = lora(make(), RANK, ALPHA, TARGETS, seed=5)
    tokens, _ = batch()
    assert torch.equal(model(tokens), make()(tokens)), "B is 0"
    a = model.layers[0].mlp.down_proj.lora.A
    assert a.std().item() == pytest.approx(1 / math.sqrt(3 * 48), rel=0.2)
    with torch.device("meta"):
        other = lora(Llama(CONFIG), RANK, ALPHA, TARGETS).to_empty(device="cpu")
    initialize(other, seed=5)
    for (name, one), (_, two) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(one, two) == (".lora." in name or name.endswith("norm.weight")), name
    assert [name for name, each in other.named_parameters() if each.requires_grad] == [
        name for name, _ in other.named_parameters() if ".lora." in name
    ]
    again = copy.deepcopy(stirred(model))
    assert torch.equal(again(tokens), model(tokens))
    merge_lora(again)
    assert ".lora." in " ".join(name for name, _ in model.named_parameters())


def test_peft_reads_what_is_saved(tmp_path: Path) -> None:
    import peft

    model = stirred(lora(make(), RANK, ALPHA, TARGETS))
    save_lora(model, tmp_path / "adapters", base="a-llama")
    tokens, _ = batch()
    base = theirs(make())
    read = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapters")).eval()
    torch.testing.assert_close(model(tokens), read(tokens).logits, rtol=1e-5, atol=1e-5)
    ours = load_lora(make(), tmp_path / "adapters")
    assert torch.equal(ours(tokens), model(tokens))
    assert (
        json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())["base_model_name_or_path"] == "a-llama"
    )
    read.save_pretrained(str(tmp_path / "theirs"))
    back = load_lora(make(), tmp_path / "theirs")
    assert torch.equal(back(tokens), model(tokens))


@pytest.mark.exhaustive
@pytest.mark.parametrize("given", ["tokenizer", "base", "neither"])
def test_the_tokenizer_is_saved_beside_adapters(given: str, tmp_path: Path) -> None:
    """A given tokenizer, or else the model folder's, with all its files."""
    import transformers

    model = stirred(lora(make(), RANK, ALPHA, TARGETS))
    save_pretrained(make(), tmp_path / "model", tokenizer=byte_tokenizer())
    (tmp_path / "model/chat_template.jinja").write_text("{{ messages }}")
    base = None if given == "neither" else str(tmp_path / "model")
    save_lora(model, tmp_path / "adapters", base=base, tokenizer=byte_tokenizer() if given == "tokenizer" else None)
    names = {path.name for path in (tmp_path / "adapters").iterdir()} - {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    files = {"tokenizer.json", "tokenizer_config.json"}
    assert names == {"tokenizer": files, "base": {*files, "chat_template.jinja"}, "neither": set()}[given]
    for name in names:
        assert (tmp_path / "adapters" / name).read_bytes() == (tmp_path / "model" / name).read_bytes()
    if names:
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "adapters")
        assert theirs("wärp").input_ids == list("wärp".encode())
    tokens, _ = batch()
    assert torch.equal(load_lora(make(), tmp_path / "adapters")(tokens), model(tokens))


def saved_and_loaded(folder: str) -> list[bool]:
    mesh = ProcessMesh.grid(dp=2, tp=2)
    model = parallelize(stirred(lora(make(), RANK, ALPHA, TARGETS)), mesh)
    save_lora(model, folder)
    other = load_lora(parallelize(make(), mesh), folder)
    named = dict(other.named_parameters())
    return [torch.equal(each.to_local(), named[name].to_local()) for name, each in model.named_parameters()]


def test_a_parallel_models_adapters_are_saved_whole_and_read_in_parts(pool, tmp_path: Path) -> None:
    assert all(all(same) for same in pool.run(saved_and_loaded, str(tmp_path / "adapters")))
    alone = load_lora(make(), tmp_path / "adapters")
    expected = stirred(lora(make(), RANK, ALPHA, TARGETS))
    for (name, one), (_, two) in zip(alone.named_parameters(), expected.named_parameters(), strict=True):
        assert torch.equal(one, two), name


@pytest.mark.parametrize(
    ("rank", "alpha", "targets", "message"),
    [
        pytest.param(0, 1, ["lm_head"], "rank is 0; it must be an int >= 1", id="rank"),
        pytest.param(2, 0, ["lm_head"], "alpha is 0; it must be a number > 0", id="alpha"),
        pytest.param(2, 1, "lm_head", "targets is 'lm_head'; give names of layers in a list", id="text"),
        pytest.param(
            2,
            1,
            ["layers.*.self_attn.qproj"],
            r"'layers\.\*\.self_attn\.qproj' matches no module of Llama; .*self_attn\.q_proj",
            id="nothing",
        ),
        pytest.param(
            2,
            1,
            ["layers.*.input_layernorm"],
            "'layers.0.input_layernorm', a RMSNorm; adapters are for Linear",
            id="kind",
        ),
    ],
)
def test_bad_ranks_alphas_and_targets_of_adapters_are_refused(
    rank: Any, alpha: Any, targets: Any, message: str
) -> None:
    model = make()
    with pytest.raises(ValueError, match=message):
        lora(model, rank, alpha, targets)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_two_sets_of_adapters_and_tied_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="has adapters already; merge_lora"):
        lora(lora(make(), 2, 4, ["lm_head"]), 2, 4, ["lm_head"])
    with pytest.raises(ValueError, match=r"'lm_head' has a tied weight, embed_tokens\.weight and lm_head\.weight"):
        lora(make(replace(CONFIG, tie_embeddings=True)), 2, 4, ["lm_head"])
    with pytest.raises(ValueError, match="has no adapters; add adapters by"):
        merge_lora(make())


GPT_TARGETS = {
    "q": ["h.*.attn.q_proj"],
    "q-v": ["h.*.attn.[qv]_proj", "h.*.mlp.c_fc"],
    "q-k-v": ["h.*.attn.[qkv]_proj", "h.*.attn.c_proj"],
}


def make_gpt() -> GPT:
    gpt = GPT(GPTConfig(vocab_size=31, hidden_size=16, num_layers=2, num_heads=2, max_seq_len=32))
    initialize(gpt, seed=3)
    return gpt


def their_gpt(folder: Path) -> Any:
    import transformers

    if not folder.exists():
        save_pretrained(make_gpt(), folder)
    return transformers.GPT2LMHeadModel.from_pretrained(folder).eval()


def same_adapters(one: nn.Module, other: nn.Module) -> None:
    named = dict(one.named_parameters())
    assert list(named) == [name for name, _ in other.named_parameters()]
    for name, parameter in other.named_parameters():
        assert torch.equal(parameter, named[name]), name


@pytest.mark.few(1)
@pytest.mark.parametrize("targets", [pytest.param(each, id=name) for name, each in GPT_TARGETS.items()])
def test_adapters_of_queries_keys_and_values_are_one_of_the_fused_layer_for_peft(
    targets: list[str], tmp_path: Path
) -> None:
    import peft

    model = stirred(lora(make_gpt(), RANK, ALPHA, targets))
    save_lora(model, tmp_path / "adapters")
    tokens, _ = batch()
    read = peft.PeftModel.from_pretrained(their_gpt(tmp_path / "gpt"), str(tmp_path / "adapters")).eval()
    torch.testing.assert_close(model(tokens), read(tokens).logits, rtol=1e-5, atol=1e-5)
    same_adapters(load_lora(make_gpt(), tmp_path / "adapters"), model)
    read.save_pretrained(str(tmp_path / "theirs"))
    same_adapters(load_lora(make_gpt(), tmp_path / "theirs"), model)


def test_pefts_adapter_of_a_fused_layer_is_one_of_queries_keys_and_values_each(tmp_path: Path) -> None:
    import peft

    config = peft.LoraConfig(r=2, lora_alpha=6, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False)
    theirs = peft.get_peft_model(their_gpt(tmp_path / "gpt"), config).eval()
    theirs.save_pretrained(str(tmp_path / "theirs"))
    ours, (tokens, _) = load_lora(make_gpt(), tmp_path / "theirs"), batch()
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-5, atol=1e-5)
    assert (
        sum(name.endswith(("q_proj.lora.B", "k_proj.lora.B", "v_proj.lora.B")) for name, _ in ours.named_parameters())
        == 6
    )
    mixed = peft.LoraConfig(r=2, target_modules=["c_attn"], rank_pattern={"c_attn": 4}, init_lora_weights=False)
    peft.get_peft_model(their_gpt(tmp_path / "gpt"), mixed).save_pretrained(str(tmp_path / "mixed"))
    with pytest.raises(
        ValueError,
        match=r"adapter of transformer\.h\.0\.attn\.c_attn cannot be split .*q_proj and .*its B is not block diagonal",
    ):
        load_lora(make_gpt(), tmp_path / "mixed")
    plain = peft.LoraConfig(r=2, target_modules=["c_fc"], rank_pattern={"c_fc": 4}, init_lora_weights=False)
    peft.get_peft_model(their_gpt(tmp_path / "gpt"), plain).save_pretrained(str(tmp_path / "plain"))
    with pytest.raises(ValueError, match=r"rank_pattern \{'c_fc': 4\} is not supported"):
        load_lora(make_gpt(), tmp_path / "plain")


def fused_adapters_in_parts(folder: str) -> list[bool]:
    mesh = ProcessMesh.grid(dp=2, tp=2)
    model = parallelize(stirred(lora(make_gpt(), RANK, ALPHA, GPT_TARGETS["q-v"])), mesh)
    save_lora(model, folder)
    other = load_lora(parallelize(make_gpt(), mesh), folder)
    named = dict(other.named_parameters())
    return [torch.equal(each.to_local(), named[name].to_local()) for name, each in model.named_parameters()]


@pytest.mark.exhaustive
def test_a_parallel_models_adapters_of_a_fused_layer_are_read_in_parts(pool, tmp_path: Path) -> None:
    assert all(all(same) for same in pool.run(fused_adapters_in_parts, str(tmp_path / "adapters")))
    expected = stirred(lora(make_gpt(), RANK, ALPHA, GPT_TARGETS["q-v"]))
    same_adapters(load_lora(make_gpt(), tmp_path / "adapters"), expected)


def test_a_setting_of_peft_that_is_not_known_is_named(tmp_path: Path) -> None:
    save_lora(lora(make(), 2, 4, ["lm_head"]), tmp_path / "adapters")
    config = tmp_path / "adapters" / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "use_dora": True}))
    with pytest.raises(ValueError, match="use_dora True is not supported; it may be False"):
        load_lora(make(), tmp_path / "adapters")
