"""The fields of config.json: each is read, has no effect on the network, or raises an error naming the field."""

import json

import pytest
import torch
from weft.models import (
    DynamicRopeScaling,
    LinearRopeScaling,
    Llama3RopeScaling,
    YarnRopeScaling,
    from_pretrained,
)
from weft.models.families import FAMILIES, make_model

from tests.models.folders import BASES, CLASSES, LLAMA3, close, their_model, tokens_for
from tests.models.public_configs import PUBLISHED


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_has_its_parameters(name):
    given, parameters = PUBLISHED[name]
    config = FAMILIES[given["model_type"]].weights.read_config(given)
    with torch.device("meta"):
        model = make_model(config)
    assert config.num_parameters == sum(parameter.numel() for parameter in model.parameters()) == parameters


def read(kind, **changes):
    given = {**BASES[kind], "model_type": kind, **changes}
    return FAMILIES[kind].weights.read_config({name: value for name, value in given.items() if value is not ...})


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_routed_experts": 8}, "'n_routed_experts', which is 8, is not a known field of a .*; remove the field if"),
        ({"vocab_size": ...}, "has no 'vocab_size'; a .* needs vocab_size, "),
        ({"is_encoder_decoder": True}, "is_encoder_decoder True is not supported; a .* here has False"),
        ({"add_cross_attention": True}, "add_cross_attention True"),
        ({"chunk_size_feed_forward": 4}, "chunk_size_feed_forward 4"),
        ({"pruned_heads": {"0": [1]}}, r"pruned_heads \{'0': \[1\]\}"),
        ({"quantization_config": {"bits": 4}}, "quantized weights are not supported; save the model dequantized"),
        ({"vocab_size": 0.5}, "config.json: vocab_size is 0.5, and a whole number is needed"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_a_field_that_is_not_understood_is_an_error_that_names_the_field(kind, change, message):
    with pytest.raises(ValueError, match=message):
        read(kind, **change)


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("llama", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; a Llama here has 'silu' or 'swish'"),
        ("llama", {"use_sliding_window": True}, "'use_sliding_window', which is True, is not a known field of a Llama"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ("llama", {"rope_interleaved": True}, "rope_interleaved is not supported"),
        ("mistral", {"rope_interleaved": True}, "rope_interleaved is not supported"),
        ("mistral", {"attention_bias": True}, "attention_bias True is not supported; a Mistral here has False"),
        ("mistral", {"layer_types": ["full_attention"] * 2}, "'layer_types', which is .*, is not a known field of a"),
        ("mistral", {"sliding_window": -1}, "sliding_window is -1; give the number of keys that a query sees, or null"),
        (
            "llama",
            {"rope_scaling": {"type": "longrope"}},
            "rope type 'longrope' is not supported; use one of default, ",
        ),
        ("llama", {"rope_scaling": {"type": "linear"}}, "the 'linear' rope scaling has no factor; add it"),
        (
            "llama",
            {"rope_scaling": {"type": "linear", "factor": 2.0, "alpha": 1.0}},
            "the 'linear' rope scaling has alpha, which is not known; its known settings: factor",
        ),
        ("llama", {"rope_scaling": {"factor": 2.0}}, "the 'default' rope scaling has factor, which is not known"),
        (
            "llama",
            {"rope_scaling": {"type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 32}},
            "original_max_position_embeddings 32, but scaling begins at max_position_embeddings, 64; make them equal",
        ),
        ("qwen2", {"attention_bias": True}, "'attention_bias', which is True, is not a known field of a Qwen 2"),
        ("qwen2", {"use_mrope": True}, "use_mrope True is not supported; a Qwen 2 here has False"),
        ("qwen3", {"layer_types": ["full_attention"]}, "layer_types has 1 layers; it needs 2, each full_attention or"),
        ("qwen3", {"layer_types": ["chunked_attention"] * 2}, r"some of \['chunked_attention'\]; it needs 2"),
        ("qwen3", {"layer_types": ["sliding_attention"] * 2}, "no window is set; set use_sliding_window"),
        ("gpt2", {"activation_function": "relu"}, "activation is 'relu'; it must be one of 'gelu_new', 'gelu'"),
        ("gpt2", {"rope_theta": 1e4}, "'rope_theta', which is 10000.0, is not a known field of a GPT-2"),
    ],
)
def test_a_field_that_a_family_does_not_have_is_an_error(kind, change, message):
    with pytest.raises(ValueError, match=message):
        read(kind, **change)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"type": "linear", "factor": 2}, LinearRopeScaling(factor=2)),
        ({"rope_type": "dynamic", "factor": 2.5}, DynamicRopeScaling(factor=2.5)),
        (
            {"rope_type": "dynamic", "factor": 2.5, "original_max_position_embeddings": 64},
            DynamicRopeScaling(factor=2.5),
        ),
        (
            {"rope_type": "llama3", "factor": 8.0, **LLAMA3},
            Llama3RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=16),
        ),
        ({"rope_type": "yarn", "factor": 4.0}, YarnRopeScaling(factor=4.0, original_max_seq_len=64)),
        (
            {"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.5, "mscale": 2.0, "mscale_all_dim": 1.0},
            YarnRopeScaling(factor=4.0, original_max_seq_len=64, attention_factor=0.5),
        ),
        ({"rope_type": "default"}, None),
        (None, None),
    ],
    ids=str,
)
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_rotary_scalings_under_old_and_new_keys(key, settings, expected):
    assert read("llama", **{key: settings}).rope_scaling == expected
    new = None if settings is None else {**settings, "rope_theta": 5e5}
    assert read("llama", rope_parameters=new).rope_theta == (10000.0 if settings is None else 5e5)


@pytest.mark.parametrize(
    ("change", "window", "layers"),
    [
        ({}, 0, ()),
        ({"sliding_window": 4}, 0, ()),
        ({"use_sliding_window": True, "sliding_window": 4}, 0, ()),  # of 2 layers, 28 see all
        ({"use_sliding_window": True, "max_window_layers": 1}, 4096, (1,)),
        ({"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}, 4, (0, 1)),
    ],
)
def test_a_sliding_window_is_of_the_layers_that_transformers_gives_it(change, window, layers):
    config = read("qwen2", **change)
    assert (config.sliding_window, config.sliding_layers) == (window, layers)


QWEN_HEADS = {"hidden_size": 64, "num_attention_heads": 32}  # of which transformers takes 32 for keys


def test_fields_that_are_absent_have_the_values_of_transformers():
    import transformers

    chosen_of = dict.fromkeys(("mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe"), QWEN_HEADS)
    for kind, chosen in {**chosen_of, "gpt2": {}}.items():
        required = {
            name: value
            for name, value in BASES[kind].items()
            if name not in ("max_position_embeddings", "num_key_value_heads", "head_dim", "n_positions", "n_inner")
        }
        required |= chosen
        full = transformers.AutoConfig.for_model(kind, **required).to_dict()
        weights = FAMILIES[kind].weights
        assert weights.read_config({**required, "model_type": kind}) == weights.read_config(full)
    assert read("qwen2", num_key_value_heads=None).num_kv_heads == 4


@pytest.mark.parametrize("kind", CLASSES)
def test_a_model_that_was_saved_without_its_head_is_read_where_that_is_tied(kind, tmp_path):
    """Like the published GPT-2, whose tensors are named without the outer model's prefix."""
    theirs = their_model(kind, tie_word_embeddings=True)
    theirs.base_model.save_pretrained(tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "tie_word_embeddings": True}))
    tokens = tokens_for(theirs)
    close(from_pretrained(tmp_path / "model").eval()(tokens), theirs(tokens).logits)
