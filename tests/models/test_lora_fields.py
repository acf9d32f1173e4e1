"""adapter_config.json by its known fields: each is read as peft reads it, or raises a ValueError naming the value."""

import dataclasses
import json
import shutil
from importlib.util import find_spec

import pytest
import torch
from weft.models import load_lora, lora, save_lora

from tests.models.folders import close, their_model, tokens_for
from tests.models.test_lora import make, make_gpt, their_gpt

pytestmark = pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed")

# Values other than the default, of every field of peft's LoraConfig; of some fields several.
OTHERS = {
    "task_type": ["CAUSAL_LM", "SEQ_CLS"],
    "peft_type": ["LOHA"],
    "auto_mapping": [{"base_model_class": "LlamaForCausalLM", "parent_library": "transformers"}],
    "peft_version": ["0.1"],
    "base_model_name_or_path": ["somewhere"],
    "revision": ["main"],
    "inference_mode": [True, False],
    "r": [2],
    "target_modules": ["all-linear", ["v_proj"]],
    "exclude_modules": [["v_proj"]],
    "lora_alpha": [3, 0.5],
    "lora_dropout": [0.1],
    "fan_in_fan_out": [True],
    "bias": ["all", "lora_only"],
    "use_rslora": [True],
    "modules_to_save": [["lm_head"]],
    "init_lora_weights": [
        True,
        False,
        "gaussian",
        "olora",
        "pissa",
        "pissa_niter_4",
        "orthogonal",
        "eva",
        "corda",
        "loftq",
        "lora_ga",
    ],
    "layers_to_transform": [[0], 1],
    "layers_pattern": ["layers"],
    "rank_pattern": [{"q_proj": 2}, {"model.layers.0.self_attn.q_proj": 2}],
    "alpha_pattern": [{"q_proj": 3}],
    "megatron_config": [{"tensor_model_parallel_size": 1}],
    "megatron_core": ["megatron.core"],
    "trainable_token_indices": [[1]],
    "loftq_config": [{"loftq_bits": 4}],
    "eva_config": [{"rho": 2.0}],
    "corda_config": [{"corda_method": "kpm"}],
    "lora_ga_config": [{"scale": "stable"}],
    "use_dora": [True],
    "velora_config": [{"rank": 1}],
    "alora_invocation_tokens": [[1, 2]],
    "use_qalora": [True],
    "qalora_group_size": [8],
    "monteclora_config": [{"num_samples": 2}],
    "layer_replication": [[[0, 2], [0, 2]]],
    "runtime_config": [{"ephemeral_gpu_offload": True}],
    "lora_bias": [True],
    "target_parameters": [["self_attn.q_proj.weight"]],
    "use_bdlora": [{"nblocks": 2}],
    "arrow_config": [{"top_k": 1}],
    "kasa_config": [{"beta": 1.0}],
    "ensure_weight_tying": [True],
}
ALONG = {"layers_pattern": {"layers_to_transform": [0]}}  # without which peft refuses a field
CAUSES = {
    "task_type": "modules_to_save",
    "init_lora_weights": "eva_config",
    "layers_pattern": "layers_to_transform",
}  # of a refusal
CASES = [(name, value) for name, values in OTHERS.items() for value in values]


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """Else peft asks for the base model's files in the network, and waits."""
    import peft  # noqa: F401  before the variable is set, which its import would read for all later tests

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def test_every_field_of_the_installed_peft_is_among_the_cases():
    import peft

    fields = {field.name for field in dataclasses.fields(peft.LoraConfig)}
    assert fields <= OTHERS.keys()


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base") / "model"
    their_model("llama").save_pretrained(folder)
    return folder


def tuned(base, **options):
    """peft's model with random adapters on a base that is read anew; None where peft cannot make the model."""
    import peft
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager").eval()
    given = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], **options}
    try:
        made = peft.get_peft_model(model, peft.LoraConfig(**given)).eval()
    except Exception:  # the error depends on the option's missing data or package
        return None
    for name, parameter in made.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(0))
    return made


@pytest.mark.parametrize(("name", "value"), CASES, ids=[f"{name}-{value}" for name, value in CASES])
def test_a_field_is_as_in_peft_or_refused(name, value, base, tmp_path):
    from weft.models import from_pretrained

    theirs = tuned(base, **{name: value}, **ALONG.get(name, {}))
    tokens = tokens_for(their_model("llama"))
    if theirs is None:  # then the field alone is written, into a folder of plain adapters
        tuned(base).save_pretrained(tmp_path / "adapters")
        path = tmp_path / "adapters/adapter_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), name: value}))
        with pytest.raises(ValueError, match=f"{name}.*{str(value)[:6]}".replace("[", r"\[").replace("{", r"\{")):
            load_lora(from_pretrained(base), tmp_path / "adapters")
        return
    theirs.save_pretrained(tmp_path / "adapters")
    try:
        ours = load_lora(from_pretrained(base), tmp_path / "adapters").eval()
    except ValueError as error:
        assert any(each in str(error) for each in (name, CAUSES.get(name, name), "for which Llama has no layer")), error
        return
    close(ours(tokens), theirs(tokens).logits, name)


REFUSED = ["olora", "pissa", "pissa_niter_4", "eva", "corda", "loftq", "lora_ga", "orthogonal", 3, None]


@pytest.mark.parametrize("value", REFUSED, ids=str)
def test_a_start_that_changes_the_base_is_refused(value, tmp_path):
    save_lora(lora(make(), 2, 4, ["lm_head"]), tmp_path / "adapters")
    with_fields(tmp_path / "adapters", init_lora_weights=value)
    with pytest.raises(
        ValueError, match=f"init_lora_weights {value!r} is not supported; it may be True or False or 'gaussian'"
    ):
        load_lora(make(), tmp_path / "adapters")


def with_fields(folder, **fields):
    path = folder / "adapter_config.json"
    config = {**json.loads(path.read_text()), **fields}
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not ...}))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        pytest.param({"use_new_lora": True}, "'use_new_lora', which is True, is not a known field", id="unknown"),
        pytest.param({"new": None}, "'new', which is None, is not a known field", id="unknown-null"),
        pytest.param({"r": ...}, "r is None; it must be a number above 0", id="no-rank"),
        pytest.param({"r": 0}, "r is 0; it must be", id="rank-0"),
        pytest.param({"r": "2"}, "r is '2'; it must be", id="rank-of-text"),
        pytest.param({"r": True}, "r is True; it must be", id="rank-of-truth"),
        pytest.param({"lora_alpha": None}, "lora_alpha is None; it must be", id="no-alpha"),
        pytest.param({"lora_alpha": -1}, "lora_alpha is -1; it must be", id="alpha-below-0"),
        pytest.param({"use_rslora": 1}, "use_rslora 1 is not supported", id="a-number-for-a-truth"),
        pytest.param(
            {"alpha_pattern": {"lm_head": 8}}, r"alpha_pattern \{'lm_head': 8\} is not supported", id="alpha-pattern"
        ),
    ],
)
def test_unknown_fields_of_an_adapter_config_are_named(fields, message, tmp_path):
    save_lora(lora(make(), 2, 4, ["lm_head"]), tmp_path / "adapters")
    load_lora(make(), tmp_path / "adapters")
    with_fields(tmp_path / "adapters", **fields)
    with pytest.raises(ValueError, match=message):
        load_lora(make(), tmp_path / "adapters")


def test_a_wider_adapter_without_its_own_alpha_is_refused(tmp_path):
    """Its scale in peft is alpha over the wider rank."""
    save_lora(lora(make_gpt(), 3, 12, ["h.*.attn.[qkv]_proj"]), tmp_path / "adapters")
    load_lora(make_gpt(), tmp_path / "adapters")
    with_fields(tmp_path / "adapters", alpha_pattern={})
    with pytest.raises(ValueError, match=r"alpha_pattern \{\} is not supported; it may be \{'transformer\.h\.0"):
        load_lora(make_gpt(), tmp_path / "adapters")


@pytest.mark.parametrize("alpha", [4, 7.5])
@pytest.mark.parametrize("target", ["c_fc", "c_proj"])
def test_pefts_adapters_of_transposed_layers(alpha, target, tmp_path):
    """fan_in_fan_out must not matter: the layer itself says how its weight is stored."""
    import peft

    for fan in (True, False):
        config = peft.LoraConfig(
            r=2, lora_alpha=alpha, target_modules=[target], fan_in_fan_out=fan, init_lora_weights=False
        )
        theirs = peft.get_peft_model(their_gpt(tmp_path / "gpt"), config).eval()
        theirs.save_pretrained(str(tmp_path / "theirs"))
        tokens = torch.arange(12).reshape(2, 6)
        close(load_lora(make_gpt(), tmp_path / "theirs")(tokens), theirs(tokens).logits)
        shutil.rmtree(tmp_path / "theirs")
