"""Llama on one device, against transformers' Llama with the same weights; its config and its initial values."""

import copy
import dataclasses

import pytest
import torch
from weft.kernels.random import philox
from weft.models.initialization import initialize
from weft.models.llama.config import LlamaConfig
from weft.models.llama.model import Llama
from weft.models.llama.weights import stored
from weft.models.rope import rotary_tables

from tests.models.cases import SCALING, SMALL, each_variant, gradients_of, gradients_off, make, some_tokens, theirs


@each_variant()
def test_logits_and_gradients_are_those_of_transformers(config):
    model, tokens = make(config), some_tokens(config)
    other = theirs(model)
    logits, expected = model(tokens), other(tokens).logits
    assert logits.shape == (2, 33, config.vocab_size)
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)

    grad = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2)) / logits.numel() ** 0.5
    logits.backward(grad)
    expected.backward(grad)
    found, wanted = gradients_of(model), gradients_of(other)
    assert not gradients_off(found, {name: wanted[stored(name).name] for name in found})


@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (1, 64), (0, 5), (2, 0)], ids=str)
def test_odd_shapes(shape):
    model = make(SMALL)
    tokens = some_tokens(SMALL, *shape)
    logits = model(tokens)
    assert logits.shape == (*shape, SMALL.vocab_size)
    if tokens.numel():
        torch.testing.assert_close(logits, theirs(model)(tokens).logits, atol=1e-5, rtol=1e-5)
    logits.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_a_sequence_may_be_longer_than_those_trained_on():
    model = make(SMALL)
    tokens = some_tokens(SMALL, 1, 100)  # above 64
    torch.testing.assert_close(model(tokens), theirs(model)(tokens).logits, atol=1e-5, rtol=1e-5)


PACKED = [13, 1, 19]  # tokens of the documents in a row of 33


def test_documents_in_a_row_have_the_logits_that_each_has_alone():
    model, tokens = make(SMALL), some_tokens(SMALL)
    documents = torch.repeat_interleave(torch.tensor([2, 0, 7]), torch.tensor(PACKED)).expand(2, -1)
    positions = torch.cat([torch.arange(n) for n in PACKED]).expand(2, -1)
    packed = model(tokens, positions=positions, documents=documents).split(PACKED, 1)
    relative = model(tokens, documents=documents).split(PACKED, 1)  # rotary embedding knows differences alone
    for part, found, other in zip(tokens.split(PACKED, 1), packed, relative, strict=True):
        torch.testing.assert_close(found, model(part), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(other, model(part), atol=1e-5, rtol=1e-5)


def test_positions_are_those_of_transformers():
    model, tokens = make(dataclasses.replace(SMALL, rope_scaling=SCALING)), some_tokens(SMALL)
    positions = torch.stack((torch.arange(33) + 5, 2 * torch.arange(33)))
    torch.testing.assert_close(
        model(tokens, positions=positions), theirs(model)(tokens, position_ids=positions).logits, atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("steps", [[33], [1] * 33, [20, 1, 5, 7]], ids=["at-once", "one-by-one", "in-pieces"])
@pytest.mark.parametrize("spread", [False, True], ids=["counted", "given-positions"])
@torch.no_grad()
def test_logits_with_a_cache_are_those_without(steps, spread):
    model, tokens = make(SMALL), some_tokens(SMALL)
    positions = 2 * torch.arange(33).expand(2, -1) if spread else None
    cache, found, start = model.make_cache(40), [], 0
    for n in steps:
        given = None if positions is None else positions[:, start : start + n]
        found.append(model(tokens[:, start : start + n], positions=given, cache=cache))
        start += n
    assert {each.length for each in cache} == {33}
    torch.testing.assert_close(torch.cat(found, 1), model(tokens, positions=positions), atol=1e-5, rtol=1e-5)


def test_bfloat16_errs_no_more_than_transformers_does():
    model, tokens = make(SMALL), some_tokens(SMALL)
    truth = model.double()(tokens)
    low, other = copy.deepcopy(model).bfloat16(), theirs(model.float())
    frequencies = other.model.rotary_emb.inv_freq
    # float32, as transformers keeps them when it loads weights
    other.bfloat16().model.rotary_emb.inv_freq = frequencies
    error, allowed = ((logits.double() - truth).abs().mean() for logits in (low(tokens), other(tokens).logits))
    assert error <= 1.2 * allowed


def test_rotary_tables_do_not_depend_on_where_the_model_was_built():
    rotary_tables.cache_clear()
    with torch.device("meta"):
        model = Llama(SMALL)
        tables = rotary_tables(SMALL.rotary, 8, torch.device("cpu"))
    assert all(table.device.type == "cpu" for table in tables)
    model.to_empty(device="cpu")
    initialize(model, 0)
    other = Llama(SMALL)
    initialize(other, 0)
    assert torch.equal(model(some_tokens(SMALL)), other(some_tokens(SMALL)))


def test_tables_first_made_in_inference_mode_serve_training():
    rotary_tables.cache_clear()
    model, tokens = make(SMALL), some_tokens(SMALL)
    with torch.inference_mode():
        model(tokens)
    model(tokens).sum().backward()
    assert model.norm.weight.grad is not None


# Tied weights


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda m: m.to_empty(device="cpu"), id="to_empty"),
        pytest.param(lambda m: m.double(), id="double"),
        pytest.param(copy.deepcopy, id="deepcopy"),
        pytest.param(lambda m: torch.nn.Sequential(m).to_empty(device="cpu")[0], id="within-another"),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_tied_weight_stays_one_parameter(change, device):
    with torch.device(device):
        model = Llama(dataclasses.replace(SMALL, tie_embeddings=True))
    model = change(model)
    assert model.lm_head.weight is model.embed_tokens.weight
    assert "lm_head.weight" not in dict(model.named_parameters())


def test_an_untied_weight_stays_two():
    model = Llama(SMALL).to_empty(device="cpu")
    assert model.lm_head.weight is not model.embed_tokens.weight


# Initial values


def test_initial_values_depend_on_seed_and_name_alone():
    model, deeper = Llama(SMALL), Llama(dataclasses.replace(SMALL, num_layers=3))
    torch.manual_seed(5)  # torch's own generator has no part in it
    initialize(deeper, 3)
    initialize(model, 3)
    shared = dict(deeper.named_parameters())
    for name, parameter in model.named_parameters():
        scale = (3 / 2) ** 0.5 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1  # by depth
        torch.testing.assert_close(parameter, shared[name] * scale, msg=name)
    q = [layer.self_attn.q_proj.weight for layer in model.layers]
    assert not torch.equal(*q)
    before = q[0].detach().clone()
    initialize(model, 4)
    assert not torch.equal(q[0], before)


def test_initial_values_do_not_depend_on_how_they_are_cut(monkeypatch):
    model, other = Llama(SMALL), Llama(SMALL)
    initialize(model, 3)
    monkeypatch.setattr(philox, "_BLOCKS_A_THREAD", 13)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    initialize(other, 3)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)


def test_initial_values_have_the_configs_spread():
    config = dataclasses.replace(SMALL, vocab_size=1000, attention_bias=True, initializer_range=0.05)
    model = Llama(config)
    initialize(model, 0)
    std = model.embed_tokens.weight.double().std()
    assert abs(std / 0.05 - 1) < 5 * (0.5 / 32000) ** 0.5  # five standard errors
    assert abs(model.layers[0].mlp.down_proj.weight.double().std() / 0.025 - 1) < 5 * (0.5 / 1408) ** 0.5
    assert (model.norm.weight == 1).all()
    assert (model.layers[1].post_attention_layernorm.weight == 1).all()
    assert (model.layers[1].self_attn.q_proj.bias == 0).all()


def test_initial_values_without_spread_are_zero():
    model = Llama(dataclasses.replace(SMALL, initializer_range=0))
    initialize(model, 0)
    assert not model.lm_head.weight.any() and not model.layers[1].mlp.down_proj.weight.any()
    assert (model.norm.weight == 1).all()


def test_initialize_names_a_parameter_without_storage():
    with torch.device("meta"):
        model = Llama(SMALL)
    with pytest.raises(ValueError, match=r"embed_tokens.weight is on the meta device; call model.to_empty"):
        initialize(model, 0)


# The config


def test_config_fills_in_what_follows():
    config = LlamaConfig(vocab_size=10, hidden_size=24, intermediate_size=8, num_layers=1, num_heads=3)
    assert (config.num_kv_heads, config.head_dim) == (3, 8)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.num_heads = 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 0}, "LlamaConfig: vocab_size is 0; it must be an int >= 1"),
        ({"num_layers": 1.5}, "num_layers is 1.5"),
        ({"num_heads": True}, "num_heads is True"),
        ({"num_kv_heads": -1}, "num_kv_heads is -1"),
        ({"num_kv_heads": 3}, r"num_heads 4 is not a multiple of num_kv_heads 3; use one of \[1, 2, 4\]"),
        ({"head_dim": 7}, "head_dim 7 is odd"),
        ({"head_dim": 0, "hidden_size": 30}, "hidden_size 30 is not a multiple of num_heads 4"),
        ({"norm_eps": -1e-6}, "norm_eps is -1e-06"),
        ({"rope_theta": float("nan")}, "rope_theta is nan"),
        ({"rope_scaling": {"factor": 8}}, "rope_scaling is .*; give a Llama3RopeScaling"),
        ({"dropout": 1.0}, "LlamaConfig: dropout is 1.0; it must be a number in 0 <= dropout < 1"),
        ({"dropout": -0.1}, "dropout is -0.1"),
        ({"dropout": float("nan")}, "dropout is nan"),
        ({"dropout": True}, "dropout is True"),
        ({"attention_dropout": 1.0}, "attention_dropout is 1.0; it must be a number in 0 <= attention_dropout < 1"),
        ({"initializer_range": -0.02}, "initializer_range is -0.02"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_config_names_what_does_not_fit(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **change)


def test_rope_scaling_names_what_does_not_fit():
    with pytest.raises(ValueError, match=r"high_freq_factor .* must be above low_freq_factor"):
        dataclasses.replace(SCALING, high_freq_factor=1.0)
    with pytest.raises(ValueError, match="factor is 0"):
        dataclasses.replace(SCALING, factor=0)
