"""GPT-2: its three dropouts, positions and config. test_families.py compares its options with transformers."""

import copy
import dataclasses
from unittest.mock import patch

import pytest
import torch
from weft.kernels import dropout
from weft.mesh import derive_key
from weft.models import GPT, GPTConfig, from_pretrained, initialize
from weft.models.layers import Dropout

from tests.models.folders import close, their_model, tokens_for

SMALL = GPTConfig(vocab_size=61, hidden_size=32, num_layers=2, num_heads=4, max_seq_len=40)
EACH_DROPOUT = {"embedding_dropout": 0.1, "attention_dropout": 0.25, "dropout": 0.4}
NAMES = ["drop", *(f"h.{i}.{name}" for i in (0, 1) for name in ("attn.attend.dropout", "attn_dropout", "mlp_dropout"))]


def make(config=SMALL):
    model = GPT(config)
    initialize(model, 0)
    return model


def some_tokens(B=2, T=33):
    return torch.randint(0, 61, (B, T), generator=torch.Generator().manual_seed(1))


def test_a_dropout_layer_knows_its_name():
    layers = {name: module for name, module in make().named_modules() if isinstance(module, Dropout)}
    assert {name: module.name for name, module in layers.items()} == {name: name for name in layers}
    assert list(layers) == NAMES


@torch.no_grad()
def test_the_three_dropouts_are_where_transformers_has_them(tmp_path):
    theirs = their_model("gpt2", embd_pdrop=0.1, attn_pdrop=0.25, resid_pdrop=0.4)
    theirs.save_pretrained(tmp_path / "model")
    ours, key, tokens = from_pretrained(tmp_path / "model"), derive_key(5, "dropout", 2), tokens_for(theirs)
    assert dataclasses.replace(ours.config, **EACH_DROPOUT) == ours.config
    drawn = []

    def draw(x, p, training):
        drawn.append(p)
        return dropout(x, p, key, NAMES[len(drawn) - 1]) if training else x

    with patch.object(
        torch.nn.functional, "dropout", lambda x, p=0.5, training=True, inplace=False: draw(x, p, training)
    ):
        expected = theirs.train()(tokens).logits
    assert drawn == [0.1, *[0.25, 0.4, 0.4] * 2]
    close(ours.train()(tokens, dropout_key=key), expected)
    close(ours.eval()(tokens), theirs.eval()(tokens).logits)


@pytest.mark.parametrize("name", EACH_DROPOUT)
def test_without_a_key_a_dropout_is_an_error_that_names_it(name):
    with pytest.raises(
        RuntimeError, match=r"drops elements with p=0\.3 while training, but the model was given no key"
    ):
        make(dataclasses.replace(SMALL, **{name: 0.3}))(some_tokens())


@torch.no_grad()
def test_positions_are_those_of_transformers(tmp_path):
    theirs = their_model("gpt2")
    theirs.save_pretrained(tmp_path / "model")
    ours, tokens = from_pretrained(tmp_path / "model").eval(), tokens_for(theirs)
    positions = torch.stack((torch.arange(33) + 5, torch.arange(33).flip(0)))
    close(ours(tokens, positions=positions), theirs(tokens, position_ids=positions).logits)


def test_more_tokens_than_positions_are_refused():
    model = make()
    assert model(some_tokens(T=40)).shape == (2, 40, 61)
    with pytest.raises(ValueError, match="max_seq_len 40 has no position 40; give at most 40 tokens"):
        model(some_tokens(T=41))
    cache = model.eval().make_cache(50)
    with torch.no_grad():
        model(some_tokens(T=39), cache=cache)
        with pytest.raises(ValueError, match="has no position 40; give at most 40 tokens, those in the cache included"):
            model(some_tokens(T=2), cache=cache)


@pytest.mark.parametrize("change", [lambda m: m.to_empty(device="cpu"), lambda m: m.double(), copy.deepcopy])
def test_a_tied_weight_stays_one_parameter(change):
    model = change(make())
    assert model.lm_head.weight is model.wte.weight
    assert "lm_head.weight" not in dict(model.named_parameters())
    untied = change(make(dataclasses.replace(SMALL, tie_embeddings=False)))
    assert untied.lm_head.weight is not untied.wte.weight


def test_initial_values():
    model = make(dataclasses.replace(SMALL, vocab_size=2000, initializer_range=0.05, num_layers=8))
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            assert not parameter.any()
        elif ".ln_" in name or name == "ln_f.weight":
            assert (parameter == 1).all()
        else:
            std = 0.05 / 4 if name.endswith("c_proj.weight") else 0.05
            assert abs(parameter.std() / std - 1) < 5 * (0.5 / parameter.numel()) ** 0.5, name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 30}, "GPTConfig: hidden_size 30 is not a multiple of num_heads 4; change one"),
        ({"activation": "relu"}, "activation is 'relu'; it must be one of 'gelu_new', 'gelu'"),
        ({"norm_eps": 0}, "norm_eps is 0"),
        ({"embedding_dropout": 1.0}, "embedding_dropout is 1.0; it must be a number in 0 <= embedding_dropout < 1"),
        ({"attention_dropout": -1}, "attention_dropout is -1"),
        ({"dropout": True}, "dropout is True"),
        ({"intermediate_size": -4}, "intermediate_size is -4"),
        ({"max_seq_len": 0}, "max_seq_len is 0"),
    ],
    ids=str,
)
def test_config_names_what_does_not_fit(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **change)
