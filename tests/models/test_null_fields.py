"""A null or 0 in config.json has transformers' meaning, or raises a ValueError that names the field."""

import json

import pytest
import torch
from weft.models import from_pretrained
from weft.models.families import FAMILIES
from weft.models.rope import compute_rotary_frequencies

from tests.models.folders import CLASSES, LLAMA3, close, their_model, tokens_for

# Possible settings of a rotary family.
ROPES = {
    "llama3": {"rope_type": "llama3", "factor": 4.0, **LLAMA3},
    "yarn": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "attention_factor": 0.7,
        "beta_fast": 4.0,
        "beta_slow": 1.5,
        "truncate": True,
    },
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "linear": {"rope_type": "linear", "factor": 2.0},
}
WINDOW = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1, "layer_types": None}


def written(kind, **options):
    """All that transformers writes of a config of a family."""
    return {**their_model(kind, **options).config.to_dict(), "model_type": kind}


def read(config):
    return FAMILIES[config["model_type"]].weights.read_config(config)


def their_logits(folder, tokens):
    """The logits of transformers for a folder; None where transformers cannot make or call the model."""
    import transformers

    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
        return model(tokens).logits
    except Exception:  # the error is any that arithmetic with None raises
        return None


@pytest.mark.parametrize("value", [None, 0], ids=["null", "zero"])
@pytest.mark.parametrize("kind", CLASSES)
def test_every_field_is_as_in_transformers_or_refused_by_name(kind, value, tmp_path, portion):
    window = {name: each for name, each in WINDOW.items() if kind != "qwen3_moe" or name != "layer_types"}
    theirs = their_model(kind, **(window if kind.startswith("qwen") else {}))
    theirs.save_pretrained(tmp_path / "model")
    path, tokens = tmp_path / "model/config.json", tokens_for(theirs)
    whole = json.loads(path.read_text())
    weights = FAMILIES[kind].weights
    ours = weights.FIELDS if kind == "gpt2" else weights._FIELDS[kind]
    fields = [*ours.names, *ours.fixed, *ours.read_by_family, *ours.ignored, "bos_token_id", "is_decoder"]
    for name in portion.of(fields, every=3):
        path.write_text(json.dumps({**whole, name: value}))
        try:
            found = from_pretrained(tmp_path / "model").eval()(tokens)
        except ValueError as error:
            named = (
                name,
                ours.names.get(name, name),
                "lacks lm_head.weight; check config.json",
                "but config.json makes it",
                "layer_types has 2 layers; it needs",
            )
            assert any(each in str(error) for each in named), (name, error)
            continue
        if (wanted := their_logits(tmp_path / "model", tokens)) is not None:
            close(found, wanted, name)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *(("llama", name) for name in ("max_position_embeddings", "rms_norm_eps", "rope_theta", "tie_word_embeddings")),
        ("mistral", "rope_theta"),
        ("qwen2", "max_position_embeddings"),
        ("qwen3", "initializer_range"),
        *(
            ("gpt2", name)
            for name in ("n_positions", "tie_word_embeddings", "scale_attn_weights", "activation_function")
        ),
    ],
)
def test_a_null_that_says_nothing_is_refused(kind, name):
    with pytest.raises(ValueError, match=f"config.json: {name} is null; give"):
        read({**written(kind), name: None})


@pytest.mark.parametrize(
    ("kind", "name"),
    [("llama", "num_key_value_heads"), ("llama", "head_dim"), ("mistral", "num_key_value_heads"), ("gpt2", "n_inner")],
)
def test_a_null_size_follows_from_the_others_and_a_zero_is_refused(kind, name):
    assert read({**written(kind), name: None}).num_heads == 4
    with pytest.raises(ValueError, match=f"config.json: {name} is 0; give a size, or null"):
        read({**written(kind), name: 0})


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("rope", ROPES)
def test_every_rotary_setting_that_is_null_is_its_default_or_refused(rope, key):
    import transformers

    whole = written("llama", max_position_embeddings=64)
    for name in (*ROPES[rope], "rope_theta", "partial_rotary_factor"):
        given = {**ROPES[rope], name: None}
        try:
            config = read({**whole, key: given})
        except ValueError as error:
            assert name in str(error) or name == "rope_type", error
            continue
        if key == "rope_parameters":
            continue  # of transformers 5
        their = transformers.LlamaConfig(**{**whole, "rope_scaling": None})
        their.rope_scaling = {k: v for k, v in given.items() if k not in ("rope_theta", "partial_rotary_factor")}
        frequencies, scale = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS[rope](their, "cpu")
        assert torch.allclose(compute_rotary_frequencies(config.rotary, torch.device("cpu")), frequencies), name
        assert config.rotary.table_scale == pytest.approx(scale), name


@pytest.mark.parametrize(
    ("kind", "change", "named"),
    [
        ("llama", {"rope_scaling": 4}, "rope_scaling is 4; give an object"),
        ("llama", {"rope_parameters": [1]}, r"rope_parameters is \[1\]; give an object"),
        ("mistral", {"sliding_window": "5"}, "sliding_window is '5', and a whole number"),
        ("mistral", {"sliding_window": True}, "sliding_window is true, and a whole number"),
        ("mistral", {"sliding_window": 0}, "sliding_window is 0; give the number of keys that a query sees, or null"),
        ("qwen2", {**WINDOW, "max_window_layers": None}, "max_window_layers is None; give the number of layers"),
        ("qwen3", {**WINDOW, "max_window_layers": 0.5}, "max_window_layers is 0.5; give"),
        ("qwen3", {**WINDOW, "layer_types": 3}, "layer_types is 3; give a list"),
    ],
)
def test_settings_of_another_type_are_refused(kind, change, named):
    with pytest.raises(ValueError, match=named):
        read({**written(kind), **change})


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", CLASSES)
def test_every_setting_is_refused_or_read_as_a_text_a_list_or_a_truth(kind):
    """Never another error than a ValueError."""
    whole = written(kind)
    for name in whole:
        for value in ("4", [1], {"a": 1}, True, -1, 0.5):
            try:
                read({**whole, name: value, "model_type": kind})
            except ValueError:
                continue
