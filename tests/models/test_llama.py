"""Llama on one device, against transformers' Llama with the same weights; its config; its initial values."""

import copy
import dataclasses

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from weft.kernels import dropout
from weft.kernels.random import philox
from weft.mesh import Layout, ProcessMesh, derive_key
from weft.models.generation import generate
from weft.models.initialization import initialize
from weft.models.layers import Dropout
from weft.models.llama.config import Llama3RopeScaling, LlamaConfig
from weft.models.llama.model import Llama, rotary_tables
from weft.models.llama.weights import tensor_name, write_config
from weft.reshard import distribute

SCALING = Llama3RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=16)
SMALL = LlamaConfig(
    vocab_size=61, hidden_size=32, intermediate_size=44, num_layers=2, num_heads=4, num_kv_heads=2, max_seq_len=64
)
VARIANTS = {
    "grouped": {},
    "one-kv-head": {"num_kv_heads": 1},
    "as-many-kv-heads": {"num_kv_heads": 4},
    "tied": {"tie_embeddings": True},
    "llama3-scaling": {"rope_scaling": SCALING, "rope_theta": 500000.0, "norm_eps": 1e-5},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "wide-heads": {"head_dim": 12},
    "one-layer": {"num_layers": 1, "vocab_size": 1, "intermediate_size": 1},
}


def each_variant():
    return pytest.mark.parametrize(
        "config", [pytest.param(dataclasses.replace(SMALL, **v), id=name) for name, v in VARIANTS.items()]
    )


def make(config, seed=0):
    """A model whose every parameter is random, biases and norms too."""
    model = Llama(config)
    initialize(model, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def theirs(model):
    """transformers' Llama with the model's weights, in eager attention."""
    import transformers  # here, as worker processes load this module too and have no use for it

    config = transformers.LlamaConfig(**write_config(model), attn_implementation="eager")
    other = transformers.LlamaForCausalLM(config).eval()
    weights = {tensor_name(name): parameter.detach().clone() for name, parameter in model.named_parameters()}
    missing, unexpected = other.load_state_dict(weights, strict=False)
    assert not unexpected
    assert missing == (["lm_head.weight"] if model.config.tie_embeddings else [])
    return other


def some_tokens(config, B=2, T=33):
    return torch.randint(0, config.vocab_size, (B, T), generator=torch.Generator().manual_seed(1))


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
    wanted = dict(other.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[tensor_name(name)].grad, atol=1e-5, rtol=1e-4, msg=name)


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


def test_too_long_a_sequence_is_named():
    with pytest.raises(ValueError, match=r"65 tokens in a sequence, but .* max_seq_len 64"):
        make(SMALL)(some_tokens(SMALL, 1, 65))


def test_bfloat16_errs_no_more_than_transformers_does():
    model, tokens = make(SMALL), some_tokens(SMALL)
    truth = model.double()(tokens)
    low, other = copy.deepcopy(model).bfloat16(), theirs(model.float())
    frequencies = other.model.rotary_emb.inv_freq
    other.bfloat16().model.rotary_emb.inv_freq = frequencies  # in float32, as it is when it loads weights
    error, allowed = ((logits.double() - truth).abs().mean() for logits in (low(tokens), other(tokens).logits))
    assert error <= 1.2 * allowed


def test_rotary_tables_do_not_depend_on_where_the_model_was_built():
    rotary_tables.cache_clear()
    with torch.device("meta"):
        model = Llama(SMALL)
        tables = rotary_tables(SMALL, 8, torch.device("cpu"))
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
    monkeypatch.setattr(philox, "_ELEMENTS_AT_ONCE", 52)
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


# Dropout


DROPPING = dataclasses.replace(SMALL, dropout=0.25)


def loss_and_gradients(model, run, key):
    """Of the sum of squared logits; `run` takes a layer and its arguments."""
    tokens = some_tokens(SMALL)
    cos, sin = rotary_tables(SMALL, 64, tokens.device)
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
        "layers.0.self_attn_dropout",
        "layers.0.mlp_dropout",
        "layers.1.self_attn_dropout",
        "layers.1.mlp_dropout",
    ]


def test_dropout_is_of_the_embedding_and_of_what_is_added_to_the_stream():
    model, key = make(DROPPING), derive_key(5, "dropout", 2)
    tokens = some_tokens(SMALL)
    cos, sin = (table[:33] for table in rotary_tables(SMALL, 64, tokens.device))
    x = dropout(model.embed_tokens(tokens), 0.25, derive_key(key, "dropout"))
    for i, layer in enumerate(model.layers):
        added = layer.self_attn(layer.input_layernorm(x), cos, sin)
        x = x + dropout(added, 0.25, derive_key(key, f"layers.{i}.self_attn_dropout"))
        added = layer.mlp(layer.post_attention_layernorm(x))
        x = x + dropout(added, 0.25, derive_key(key, f"layers.{i}.mlp_dropout"))
    assert torch.equal(model(tokens, dropout_key=key), model.lm_head(model.norm(x)))


def test_dropout_differs_by_step_and_not_otherwise():
    model, tokens = make(DROPPING), some_tokens(SMALL)
    first, second = (model(tokens, dropout_key=derive_key(0, "dropout", step)) for step in (0, 1))
    torch.manual_seed(9)
    assert torch.equal(model(tokens, dropout_key=derive_key(0, "dropout", 0)), first)
    assert not torch.equal(first, second)
    assert not torch.equal(first, model.eval()(tokens))


def test_without_dropout_a_key_changes_nothing():
    model, other, tokens = make(SMALL), make(DROPPING).eval(), some_tokens(SMALL)
    assert torch.equal(model(tokens, dropout_key=7), model(tokens))
    assert torch.equal(other(tokens), model(tokens))
    assert torch.equal(other(tokens, dropout_key=7), model(tokens))


def test_a_missing_key_is_named():
    with pytest.raises(RuntimeError, match=r"dropout drops elements with p=0.25 .*dropout_key=derive_key\(seed, "):
        make(DROPPING)(some_tokens(SMALL))


def again(layer, *arguments):
    return checkpoint(layer, *arguments, use_reentrant=False)


def test_recomputation_draws_the_same_masks():
    model = make(DROPPING)
    (loss, gradients), (other, recomputed) = (
        loss_and_gradients(model, run, 11) for run in (lambda f, *a: f(*a), again)
    )
    assert torch.equal(loss, other)
    for one, two in zip(gradients(), recomputed(), strict=True):
        assert torch.equal(one, two)


def test_recomputation_draws_the_same_masks_after_other_microbatches():
    """As pipeline schedules run them: two forwards, then two backwards."""
    model = make(DROPPING)
    expected = [loss_and_gradients(model, lambda f, *a: f(*a), key)[1]() for key in (11, 12)]
    backwards = [loss_and_gradients(model, again, key)[1] for key in (11, 12)]
    for wanted, backward in zip(expected, backwards, strict=True):
        for one, two in zip(wanted, backward(), strict=True):
            assert torch.equal(one, two)


def test_dropout_is_not_written_for_hugging_face():
    assert write_config(make(DROPPING)) == write_config(make(SMALL))


# Generation


def test_greedy_generation_is_that_of_transformers():
    model = make(SMALL)
    prompt = some_tokens(SMALL, 2, 5)
    expected = theirs(model).generate(prompt, max_new_tokens=12, do_sample=False, pad_token_id=0)
    assert torch.equal(generate(model, prompt, max_new_tokens=12), expected)


def test_generation_crops_its_context():
    model = make(dataclasses.replace(SMALL, max_seq_len=8))
    tokens = generate(model, some_tokens(SMALL, 2, 6), max_new_tokens=9)
    assert tokens.shape == (2, 15)
    assert torch.equal(tokens[:, -1], model(tokens[:, -9:-1])[:, -1].argmax(-1))


def test_drawn_tokens_depend_on_seed_and_position_alone():
    model, prompt = make(SMALL), some_tokens(SMALL, 2, 5)
    drawn = generate(model, prompt, max_new_tokens=10, temperature=1.0, seed=7)
    torch.manual_seed(1)
    assert torch.equal(generate(model, prompt, max_new_tokens=10, temperature=1.0, seed=7), drawn)
    assert torch.equal(generate(model, drawn[:, :9], max_new_tokens=6, temperature=1.0, seed=7), drawn)
    assert not torch.equal(generate(model, prompt, max_new_tokens=10, temperature=1.0, seed=8), drawn)
    assert torch.equal(generate(model, prompt, max_new_tokens=0), prompt)


def test_top_k():
    model, prompt = make(SMALL), some_tokens(SMALL, 2, 5)
    greedy = generate(model, prompt, max_new_tokens=10)
    assert torch.equal(generate(model, prompt, max_new_tokens=10, temperature=2.0, top_k=1), greedy)
    drawn = generate(model, prompt, max_new_tokens=10, temperature=50.0, top_k=3)
    for t in range(5, 15):
        likeliest = model(drawn[:, :t])[:, -1].topk(3).indices
        assert (likeliest == drawn[:, t : t + 1]).any(-1).all()
    assert generate(model, prompt, max_new_tokens=1, temperature=1.0, top_k=1000).shape == (2, 6)


def test_draws_follow_the_softmax():
    logits = torch.tensor([2.0, 0.0, 1.0, -1.0])

    class Fixed(torch.nn.Module):
        config = SMALL

        def forward(self, tokens):
            return logits.expand(*tokens.shape, 4)

    n = 4000
    drawn = generate(Fixed(), torch.zeros(n, 1, dtype=torch.long), max_new_tokens=1, temperature=0.5)[:, 1]
    expected = F.softmax(logits / 0.5, 0)
    error = (torch.bincount(drawn, minlength=4) / n - expected).abs()
    assert (error < 5 * (expected * (1 - expected) / n) ** 0.5 + 1e-3).all()


class WithLayout(torch.nn.Module):
    """A model whose logits come laid out, as a parallel model's do."""

    def __init__(self, model, layout):
        super().__init__()
        self.model, self.config, self.layout = model, model.config, layout

    def forward(self, tokens):
        return distribute(self.model(tokens), self.layout)


def generate_in_parallel(text, options):
    model = WithLayout(make(SMALL), Layout(ProcessMesh.grid(dp=2, tp=2), text))
    return generate(model, some_tokens(SMALL, 3, 5), max_new_tokens=6, **options)


@pytest.mark.parametrize("text", ["tp: S(2)", "dp: S(0), tp: S(2)", "tp: S(1)", "dp: P(sum)"])
@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "top_k": 9}], ids=["greedy", "drawn"])
def test_every_rank_generates_what_one_device_does(pool, text, options):
    expected = generate(make(SMALL), some_tokens(SMALL, 3, 5), max_new_tokens=6, **options)
    for tokens in pool.run(generate_in_parallel, text, options):
        assert torch.equal(tokens, expected)


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        pytest.param((2, 0), {}, "give a prompt", id="empty-prompt"),
        pytest.param((3,), {}, r"tokens \[B, T\]", id="no-batch"),
        pytest.param((2, 3), {"max_new_tokens": -1}, "max_new_tokens is -1", id="max_new_tokens"),
        pytest.param((2, 3), {"temperature": -0.5}, "temperature is -0.5", id="temperature"),
        pytest.param((2, 3), {"temperature": float("nan")}, "temperature is nan", id="nan-temperature"),
        pytest.param((2, 3), {"top_k": 0}, "top_k is 0", id="top_k"),
    ],
)
def test_generation_names_a_bad_argument(shape, options, message):
    with pytest.raises(ValueError, match=message):
        generate(make(SMALL), torch.zeros(shape, dtype=torch.long), **{"max_new_tokens": 1, **options})
