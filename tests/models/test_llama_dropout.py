"""Dropout in Llama: its places, the values that determine masks, and recomputation."""

import dataclasses
from unittest.mock import patch

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from weft.kernels import dropout
from weft.mesh import derive_key
from weft.models.layers import Dropout
from weft.models.llama.model import Llama
from weft.models.llama.weights import read_config, write_config
from weft.models.rope import rotary_tables

from tests.models.cases import SMALL, make, some_tokens, theirs

DROPPING = dataclasses.replace(SMALL, dropout=0.25)
ATTENTION = dataclasses.replace(SMALL, attention_dropout=0.25)
BOTH = dataclasses.replace(DROPPING, attention_dropout=0.25)
each_dropout = pytest.mark.parametrize("config", [pytest.param(DROPPING, id="stream"), pytest.param(BOTH, id="both")])


def loss_and_gradients(model, run, key):
    """The sum of squared logits, and its gradients; `run` takes a layer and its arguments."""
    tokens = some_tokens(SMALL)
    cos, sin = rotary_tables(SMALL.rotary, 64, tokens.device)
    x = model.dropout(model.embed_tokens(tokens), key)
    for layer in model.layers:
        x = run(layer, x, cos[:33], sin[:33], key)
    loss = model.lm_head(model.norm(x)).square().sum()
    return loss, lambda: torch.autograd.grad(loss, list(model.parameters()))


def test_a_dropout_layer_knows_its_name():
    layers = {name: module for name, module in Llama(DROPPING).named_modules() if isinstance(module, Dropout)}
    assert {name: module.name for name, module in layers.items()} == {name: name for name in layers}
    assert list(layers) == [
        "dropout",
        "layers.0.self_attn.attend.dropout",
        "layers.0.self_attn_dropout",
        "layers.0.mlp_dropout",
        "layers.1.self_attn.attend.dropout",
        "layers.1.self_attn_dropout",
        "layers.1.mlp_dropout",
    ]


def test_dropout_is_of_the_embedding_and_of_what_is_added_to_the_stream():
    model, key = make(DROPPING), derive_key(5, "dropout", 2)
    tokens = some_tokens(SMALL)
    cos, sin = (table[:33] for table in rotary_tables(SMALL.rotary, 64, tokens.device))
    x = dropout(model.embed_tokens(tokens), 0.25, derive_key(key, "dropout"))
    for i, layer in enumerate(model.layers):
        added = layer.self_attn(layer.input_layernorm(x), cos, sin)
        x = x + dropout(added, 0.25, derive_key(key, f"layers.{i}.self_attn_dropout"))
        added = layer.mlp(layer.post_attention_layernorm(x))
        x = x + dropout(added, 0.25, derive_key(key, f"layers.{i}.mlp_dropout"))
    assert torch.equal(model(tokens, dropout_key=key), model.lm_head(model.norm(x)))


@torch.no_grad()
def test_attention_dropout_is_of_the_weights():
    model, key, tokens = make(ATTENTION), derive_key(5, "dropout", 2), some_tokens(SMALL)
    other = theirs(model).train()  # in eager attention, which calls torch's dropout of the weights once a layer
    names = (f"layers.{i}.self_attn.attend.dropout" for i in range(SMALL.num_layers))

    def ours(weights, p, training):
        assert (p, training) == (0.25, True)
        return dropout(weights, p, key, next(names))

    with patch.object(torch.nn.functional, "dropout", lambda x, p=0.5, training=True: ours(x, p, training)):
        expected = other(tokens).logits
    torch.testing.assert_close(model(tokens, dropout_key=key), expected, atol=1e-5, rtol=1e-5)
    assert next(names, None) is None


@pytest.mark.parametrize("config", [DROPPING, ATTENTION], ids=["stream", "attention"])
def test_dropout_differs_by_step_and_not_otherwise(config):
    model, tokens = make(config), some_tokens(SMALL)
    first, second = (model(tokens, dropout_key=derive_key(0, "dropout", step)) for step in (0, 1))
    torch.manual_seed(9)
    assert torch.equal(model(tokens, dropout_key=derive_key(0, "dropout", 0)), first)
    assert not torch.equal(first, second)
    assert not torch.equal(first, model.eval()(tokens))


def test_without_dropout_a_key_changes_nothing():
    model, other, tokens = make(SMALL), make(BOTH).eval(), some_tokens(SMALL)
    assert torch.equal(model(tokens, dropout_key=7), model(tokens))
    assert torch.equal(other(tokens), model(tokens))
    assert torch.equal(other(tokens, dropout_key=7), model(tokens))


def test_a_missing_key_is_named():
    with pytest.raises(RuntimeError, match=r"dropout drops elements with p=0.25 .*dropout_key=derive_key\(seed, "):
        make(DROPPING)(some_tokens(SMALL))
    with pytest.raises(RuntimeError, match=r"layers.0.self_attn.attend.dropout drops elements with p=0.25"):
        make(ATTENTION)(some_tokens(SMALL))


def again(layer, *arguments):
    return checkpoint(layer, *arguments, use_reentrant=False)


@each_dropout
def test_recomputation_draws_the_same_masks(config):
    model = make(config)
    (loss, gradients), (other, recomputed) = (
        loss_and_gradients(model, run, 11) for run in (lambda f, *a: f(*a), again)
    )
    assert torch.equal(loss, other)
    for one, two in zip(gradients(), recomputed(), strict=True):
        assert torch.equal(one, two)


def test_recomputation_draws_the_same_masks_after_other_microbatches():
    """The order of pipeline schedules: two forwards, then two backwards."""
    model = make(DROPPING)
    expected = [loss_and_gradients(model, lambda f, *a: f(*a), key)[1]() for key in (11, 12)]
    backwards = [loss_and_gradients(model, again, key)[1] for key in (11, 12)]
    for wanted, backward in zip(expected, backwards, strict=True):
        for one, two in zip(wanted, backward(), strict=True):
            assert torch.equal(one, two)


def test_dropout_is_not_written_for_hugging_face():
    assert write_config(make(DROPPING)) == write_config(make(SMALL))


def test_attention_dropout_is_hugging_faces():
    assert write_config(make(ATTENTION))["attention_dropout"] == 0.25
    assert read_config(write_config(make(ATTENTION))) == ATTENTION
