"""A folder gets a family's label if the model's parameters and forward are the family's; else saving is refused."""

import copy
import functools
from dataclasses import replace

import pytest
import torch
from torch import nn
from weft.kernels import cross_entropy
from weft.mesh import ProcessMesh
from weft.models import (
    GPT,
    GPTConfig,
    Llama,
    PipelinePlan,
    Qwen,
    QwenConfig,
    forward_backward,
    from_pretrained,
    initialize,
    load_checkpoint,
    lora,
    merge_lora,
    parallelize,
    save_checkpoint,
    save_lora,
    save_pretrained,
)
from weft.models.blocks import GatedMLP
from weft.models.families import FAMILIES, family_of
from weft.models.layers import Head, Linear

from tests.models.cases import SMALL, make, some_tokens


class Ungated(nn.Module):
    """An MLP whose parameters are a subset of a Llama MLP's."""

    def __init__(self, config):
        super().__init__()
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(torch.relu(self.up_proj(x)))


class AnotherMLP(Llama):
    def __init__(self, config):
        super().__init__(config)
        for layer in self.layers:
            layer.mlp = Ungated(config)


class OfTheSameNames(GatedMLP):
    def forward(self, x):
        return self.down_proj(torch.relu(self.gate_proj(x)) * self.up_proj(x))


class SameNames(Llama):
    def __init__(self, config):
        super().__init__(config)
        for layer in self.layers:
            layer.mlp.__class__ = OfTheSameNames


class ScaledLogits(Llama):
    def forward(self, tokens, *args, **options):
        return super().forward(tokens, *args, **options) * 2


class ScaledEmbedding(Llama):
    def embed(self, *args):
        x, beside = super().embed(*args)
        return x * self.config.hidden_size**0.5, beside


class WithValueHead(Llama):
    def __init__(self, config):
        super().__init__(config)
        self.value_head = nn.Linear(config.hidden_size, 1)


class WithParameter(Llama):
    def __init__(self, config):
        super().__init__(config)
        self.temperature = nn.Parameter(torch.ones(()))


class WithMethods(Llama):
    """The same network, with a method and another start."""

    def initial_value(self, name):
        return super().initial_value(name)

    def perplexity(self, tokens):
        return cross_entropy(self(tokens[:, :-1]), tokens[:, 1:]).exp()


def of_class(kind):
    def make_it():
        model = kind(SMALL)
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.1)
        return model

    return make_it


def changed(change):
    def make_it():
        model = make(SMALL)
        change(model)
        return model

    return make_it


def swap(model, path, module):
    owner, _, name = path.rpartition(".")
    setattr(model.get_submodule(owner), name, module)


def set_forward(model):
    mlp = model.layers[0].mlp
    forward = mlp.forward
    mlp.forward = functools.wraps(forward)(lambda x: forward(x) * 2)


def drop_layer(model):
    model.layers = model.layers[:1]


def tie_by_hand(model):
    model.lm_head.weight = model.embed_tokens.weight


def other_config(model):
    model.config = replace(model.config, intermediate_size=45)


def another_familys_config(model):
    model.config = QwenConfig(vocab_size=61, hidden_size=32, intermediate_size=44, num_layers=2, num_heads=4)


STRANGERS = {
    "another-mlp": (of_class(AnotherMLP), "its layers.0.mlp is a Ungated, not a GatedMLP"),
    "same-names": (
        of_class(SameNames),
        "its layers.0.mlp is a OfTheSameNames, whose forward differs from a GatedMLP's",
    ),
    "forward": (of_class(ScaledLogits), "it is a ScaledLogits, whose forward differs from a Llama's"),
    "embed": (of_class(ScaledEmbedding), "it is a ScaledEmbedding, whose embed differs from a Llama's"),
    "value-head": (of_class(WithValueHead), "its value_head is a module that a Llama lacks"),
    "parameter": (of_class(WithParameter), "it has the parameter temperature, which a Llama of the same config lacks"),
    "swapped-mlp": (
        changed(lambda model: swap(model, "layers.1.mlp", Ungated(SMALL))),
        "its layers.1.mlp is a Ungated",
    ),
    "swapped-norm": (
        changed(lambda model: swap(model, "norm", nn.LayerNorm(32))),
        "its norm is a LayerNorm, not a RMSNorm",
    ),
    "swapped-size": (
        changed(lambda model: swap(model, "lm_head", Head(32, 70, bias=False))),
        r"its lm_head.weight has shape \(70, 32\)",
    ),
    "swapped-head": (
        changed(lambda model: swap(model, "lm_head", Linear(32, 61, bias=False))),
        "its lm_head is a Linear, not a Head",
    ),
    "set-forward": (changed(set_forward), "its layers.0.mlp has a forward that was set from outside"),
    "fewer-layers": (changed(drop_layer), "it has no layers.1"),
    "tied-by-hand": (changed(tie_by_hand), "it has no lm_head.weight"),
    "other-config": (
        changed(other_config),
        r"its layers.0.mlp.down_proj.weight has shape \(32, 44\), and by the config \(32, 45\)",
    ),
    "another-familys": (changed(another_familys_config), "its config is a QwenConfig, not a LlamaConfig"),
}


@pytest.mark.parametrize("name", STRANGERS)
def test_a_network_outside_the_family_has_no_folder_for_transformers(name, tmp_path):
    build, message = STRANGERS[name]
    model = build()
    with pytest.raises(ValueError, match=f"has no Hugging Face form: {message}.*save_checkpoint"):
        save_pretrained(model, tmp_path / "folder")
    assert not any(tmp_path.iterdir())
    assert family_of(model) is None


@pytest.mark.parametrize("name", ["another-mlp", "same-names", "parameter"])
def test_a_changed_familys_checkpoint_has_no_config_and_loads(name, tmp_path):
    model = STRANGERS[name][0]()
    save_checkpoint(model, tmp_path / "saved")
    assert not (tmp_path / "saved/config.json").exists()
    again = STRANGERS[name][0]()
    load_checkpoint(again, tmp_path / "saved")
    assert torch.equal(again(some_tokens(SMALL)), model(some_tokens(SMALL)))
    with pytest.raises(ValueError, match=r"has no config\.json, as for a model class outside Weft's families"):
        from_pretrained(tmp_path / "saved")


def adapted(model):
    lora(model, 2, 4.0, ["layers.*.mlp.down_proj"])


def merged(model):
    adapted(model)
    merge_lora(model)


def compiled(model):
    for layer in model.layers:
        layer.compile(backend="eager")
    model(some_tokens(SMALL))


RELATIVES = {
    "methods": of_class(WithMethods),
    "adapted": changed(adapted),
    "merged": changed(merged),
    "compiled": changed(compiled),
    "hooked": changed(lambda model: model.norm.register_forward_hook(lambda *_: None)),
    "copied": lambda: copy.deepcopy(make(SMALL)),
    "cast": lambda: make(SMALL).double(),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", RELATIVES)
def test_a_network_that_computes_as_the_family_is_of_the_family(name, tmp_path):
    model = RELATIVES[name]()
    save_pretrained(model, tmp_path / "folder")
    tokens = some_tokens(SMALL)
    read = from_pretrained(tmp_path / "folder")
    assert type(read) is Llama
    torch.testing.assert_close(read(tokens), model(tokens), rtol=1e-5, atol=1e-5)
    assert family_of(model) is FAMILIES["llama"]


def test_every_family_knows_its_own():
    for model, kind in (
        (make(SMALL), "llama"),
        (Qwen(QwenConfig(vocab_size=9, hidden_size=8, intermediate_size=8, num_layers=1, num_heads=2)), "qwen3"),
        (GPT(GPTConfig(vocab_size=9, hidden_size=8, num_layers=1, num_heads=2)), "gpt2"),
    ):
        assert family_of(model) is FAMILIES[kind]
    assert family_of(nn.Linear(1, 1)) is None


PLANS = {
    "tp": ({"dp": 2, "tp": 2}, {"sequence": True}),
    "zero3": ({"dp": 4}, {"zero": 3}),
    "zero1-recomputed": ({"dp": 2, "tp": 2}, {"zero": 1, "recompute": "full"}),
    "selective-compiled": ({"tp": 2}, {"recompute": "selective"}),
    "full-compiled": ({"tp": 2}, {"recompute": "full"}),
    "stages": ({"pp": 2, "dp": 2}, {"pipeline": PipelinePlan(split="layers", schedule="1f1b", microbatches=2)}),
    "stages-zero2": (
        {"pp": 2, "dp": 2},
        {"zero": 2, "pipeline": PipelinePlan(split="layers", schedule="gpipe", microbatches=2)},
    ),
}


def parallel(axes, plan, kind, folder, compiles):
    """The family of a model laid out and called on a mesh, and the error of saving a stranger with the same layout."""
    mesh = ProcessMesh.grid(**axes)
    model = make(SMALL)
    if kind == "adapted":
        adapted(model)
    model = parallelize(model, mesh, replace(model.parallel_plan(), **plan))
    if compiles:
        for layer in model.layers:
            layer.compile(backend="eager")
    tokens = torch.randint(0, 61, (4, 9), generator=torch.Generator().manual_seed(0))
    forward_backward(model, cross_entropy, tokens[:, :-1], tokens[:, 1:])
    save_pretrained(model, f"{folder}/saved")
    if kind == "adapted":
        save_lora(model, f"{folder}/adapters")
    stranger = of_class(ScaledEmbedding)()
    stranger = parallelize(stranger, mesh, replace(stranger.parallel_plan(), **plan))
    with pytest.raises(ValueError, match="ScaledEmbedding, whose embed differs"):
        save_pretrained(stranger, f"{folder}/stranger")
    return family_of(model) is FAMILIES["llama"]


@pytest.mark.parametrize("kind", ["plain", "adapted"])
@pytest.mark.parametrize("name", PLANS)
def test_a_model_that_is_laid_out_is_of_its_family(pool, name, kind, tmp_path):
    axes, plan = PLANS[name]
    ranks = torch.Size(axes.values()).numel()
    compiles = name.endswith("compiled")
    assert all(pool.run(parallel, axes, plan, kind, str(tmp_path), compiles, ranks=ranks))
    read = from_pretrained(tmp_path / "saved")
    tokens = some_tokens(SMALL)
    torch.testing.assert_close(read(tokens), make(SMALL)(tokens), rtol=1e-5, atol=1e-5)


def sharded_by_fsdp(folder):
    from torch.distributed.fsdp import fully_shard

    model = make(SMALL)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    save_pretrained(model, folder)
    return family_of(model) is FAMILIES["llama"]


@pytest.mark.exhaustive
def test_torchs_fully_shard_leaves_the_family(pool, tmp_path):
    assert all(pool.run(sharded_by_fsdp, tmp_path / "saved", ranks=2))
    for name, parameter in make(SMALL).named_parameters():
        assert torch.equal(from_pretrained(tmp_path / "saved").get_parameter(name), parameter), name


def test_the_start_of_a_subclass_is_its_own():
    model = WithMethods(SMALL)
    initialize(model, 0)
    assert family_of(model) is FAMILIES["llama"]
