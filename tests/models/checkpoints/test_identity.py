"""A checkpoint loads only into its own kind of model: config, dtype and optimizer are compared, not shapes alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from weft.kernels import cross_entropy
from weft.mesh import ProcessMesh
from weft.models import (
    DynamicRopeScaling,
    GPTConfig,
    LinearRopeScaling,
    LlamaConfig,
    MixtralConfig,
    PipelinePlan,
    QwenConfig,
    QwenMoeConfig,
    YarnRopeScaling,
    forward_backward,
    from_pretrained,
    initialize,
    load_checkpoint,
    parallelize,
    save_checkpoint,
    save_pretrained,
)
from weft.models.checkpoint.configs import config_of
from weft.models.checkpoint.convert import convert
from weft.models.checkpoint.manifest import MANIFEST, Manifest
from weft.models.config import ModelConfig
from weft.models.families import make_model

from tests.support.pool import Pool

SIZES: dict[str, Any] = {"vocab_size": 24, "hidden_size": 16, "intermediate_size": 24, "num_layers": 2, "num_heads": 4}
BASES: dict[str, ModelConfig] = {
    "llama": LlamaConfig(**SIZES, num_kv_heads=2),
    "mistral": LlamaConfig(**SIZES, num_kv_heads=2, sliding_window=4),
    "qwen2": QwenConfig(**SIZES, version=2, num_kv_heads=2, sliding_window=4, sliding_layers=(0,)),
    "qwen3": QwenConfig(**SIZES, version=3, num_kv_heads=2, sliding_window=4, sliding_layers=(0,)),
    "mixtral": MixtralConfig(**SIZES, num_kv_heads=2, num_experts=4, sliding_window=4),
    "qwen3-moe": QwenMoeConfig(
        **{**SIZES, "num_kv_heads": 2, "sliding_window": 4, "num_experts": 4, "experts_per_token": 2},
        moe_intermediate_size=12,
        router_bias_rate=0.1,
        expert_groups=(2, 1),
        shared_expert_size=8,
    ),
    "gpt": GPTConfig(**SIZES, max_seq_len=32),
}
# Another value of each field of a config.
OTHERS: dict[str, Any] = {
    "vocab_size": 25,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_layers": 3,
    "num_heads": 8,
    "num_kv_heads": 1,
    "head_dim": 8,
    "max_seq_len": 16,  # a shorter one
    "rope_theta": 5e5,
    "rope_scaling": LinearRopeScaling(factor=2.0),
    "norm_eps": 1e-3,
    "attention_bias": True,
    "mlp_bias": True,
    "sliding_window": 3,
    "sliding_layers": (1,),
    "activation": "gelu",
    "scale_attention": False,
    "scale_attention_by_layer": True,
    "num_experts": 6,
    "experts_per_token": 1,
    "moe_intermediate_size": 8,
    "decoder_sparse_step": 2,
    "mlp_only_layers": (1,),
    "norm_topk_prob": False,
    "router_score": "sigmoid",
    "softmax_after": True,
    "router_scale": 2.0,
    "router_bias_rate": 0.0,
    "expert_groups": None,
    "shared_expert_size": 16,
    "shared_expert_gate": True,
}
ALIKE = dict.fromkeys(("initializer_range", "attention_dropout", "dropout", "embedding_dropout"), 0.2)
ALIKE |= {"mistral": True, "router_aux_loss_coef": 0.5, "router_z_loss_coef": 0.5, "seq_aux": True}


def filled(config: ModelConfig, seed: int = 0) -> nn.Module:
    model = make_model(config)
    initialize(model, seed)
    return model


def other(config: ModelConfig, name: str) -> ModelConfig | None:
    """The config with another value of a field; None where the field has one value alone."""
    if name == "version":
        return replace(config, version=5 - config.version)  # type: ignore[attr-defined]
    if name == "tie_embeddings":
        return replace(config, tie_embeddings=not config.tie_embeddings)
    if name.endswith("_bias") and (getattr(config, "version", 3) == 2 or getattr(config, "mistral", False)):
        return None
    return replace(config, **{name: OTHERS[name]})


@pytest.mark.parametrize("kind", BASES)
def test_every_field_of_a_config_is_compared_or_said_to_leave_the_function(kind: str, tmp_path: Path) -> None:
    base = BASES[kind]
    model = filled(base)
    save_checkpoint(model, tmp_path / "saved")
    for field in dataclasses.fields(base):
        if field.name in ALIKE:
            load_checkpoint(filled(replace(base, **{field.name: ALIKE[field.name]}), 1), tmp_path / "saved")
            continue
        changed = other(base, field.name)
        if changed is None:
            continue
        there, here = getattr(base, field.name), getattr(changed, field.name)
        with pytest.raises(ValueError) as refused:
            load_checkpoint(make_model(changed), tmp_path / "saved")
        assert f"{field.name} is {there!r} in the folder, and {here!r} here" in str(refused.value)
        assert "from_pretrained(" in str(refused.value)


def test_all_that_differs_is_named_at_once(tmp_path: Path) -> None:
    """The shapes of the parameters are equal."""
    save_checkpoint(filled(replace(BASES["llama"], rope_theta=5e5)), tmp_path / "saved")
    given = make_model(replace(BASES["llama"], num_heads=8, num_kv_heads=4, head_dim=2))
    with pytest.raises(
        ValueError, match=r"num_heads is 4 .*num_kv_heads is 2 .*head_dim is 4 .*rope_theta is 500000\.0 in"
    ):
        load_checkpoint(given, tmp_path / "saved")


@pytest.mark.parametrize(
    ("scaling", "there", "here", "fits"),
    [
        pytest.param(None, 64, 128, True, id="longer"),
        pytest.param(None, 64, 32, False, id="shorter"),
        pytest.param(LinearRopeScaling(factor=2.0), 64, 128, True, id="longer-linear"),
        pytest.param(YarnRopeScaling(factor=2.0, original_max_seq_len=32), 64, 128, True, id="longer-yarn"),
        pytest.param(DynamicRopeScaling(factor=2.0), 64, 128, False, id="longer-dynamic"),
        pytest.param(DynamicRopeScaling(factor=2.0), 64, 64, True, id="as-long-dynamic"),
    ],
)
def test_a_longer_sequence_is_the_same_model_where_no_wavelength_follows_from_it(
    scaling: Any, there: int, here: int, fits: bool, tmp_path: Path
) -> None:
    config = replace(BASES["llama"], rope_scaling=scaling, max_seq_len=there)  # type: ignore[call-arg]
    save_checkpoint(filled(config), tmp_path / "saved")
    given = make_model(replace(config, max_seq_len=here))
    if fits:
        load_checkpoint(given, tmp_path / "saved")
    else:
        with pytest.raises(ValueError, match=f"max_seq_len is {there} in the folder, and {here} here"):
            load_checkpoint(given, tmp_path / "saved")


def test_another_family_of_the_same_shapes_is_refused(tmp_path: Path) -> None:
    save_checkpoint(filled(BASES["llama"]), tmp_path / "llama")
    for kind, title in (("qwen2", "Qwen 2"), ("qwen3", "Qwen 3"), ("gpt", "GPT-2")):
        with pytest.raises(ValueError, match=f"family is 'Llama' in the folder, and '{title}' here"):
            load_checkpoint(make_model(BASES[kind]), tmp_path / "llama")


def test_a_model_of_ones_own_is_compared_by_names_and_shapes(tmp_path: Path) -> None:
    save_checkpoint(nn.Linear(3, 2), tmp_path / "saved")
    load_checkpoint(nn.Linear(3, 2), tmp_path / "saved")
    with pytest.raises(ValueError, match=r"weight has shape \(2, 3\), and \(4, 3\) here"):
        load_checkpoint(nn.Linear(3, 4), tmp_path / "saved")
    assert config_of(tmp_path / "saved") is None


@pytest.mark.parametrize("kind", BASES)
def test_the_config_of_either_folder_is_the_models(kind: str, tmp_path: Path) -> None:
    model = filled(BASES[kind])
    save_checkpoint(model, tmp_path / "checkpoint")
    save_pretrained(model, tmp_path / "folder")
    assert config_of(tmp_path / "checkpoint") == config_of(tmp_path / "folder") == BASES[kind]


def refused_in_parallel(folder: Path) -> tuple[str, bool]:
    """The error of this rank; and whether a model as it was saved is read."""
    mesh = ProcessMesh.grid(dp=2, tp=2)
    config: Any = BASES["llama"]
    error = ""
    try:
        load_checkpoint(parallelize(filled(replace(config, rope_theta=1e4, norm_eps=1e-5)), mesh), folder)
    except ValueError as raised:
        error = str(raised)
    model = parallelize(filled(replace(config, rope_theta=3e4), 1), mesh)
    load_checkpoint(model, folder)
    return error, True


@pytest.mark.exhaustive
def test_every_rank_refuses_another_model(pool: Pool, tmp_path: Path) -> None:
    save_checkpoint(filled(replace(BASES["llama"], rope_theta=3e4)), tmp_path / "saved")  # type: ignore[call-arg]
    for error, is_read in pool.run(refused_in_parallel, tmp_path / "saved", ranks=4):
        assert "rope_theta is 30000.0 in the folder, and 10000.0 here; norm_eps is 1e-06 in the folder" in error
        assert is_read


# One dtype does not speak for all


def mixed(kind: str = "llama") -> nn.Module:
    """Weights in bfloat16 with norms in float32, as in many published models."""
    model = filled(BASES[kind]).bfloat16()
    for name, parameter in model.named_parameters():
        if "norm" in name or "ln_" in name or name.endswith("k_proj.weight"):
            parameter.data = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name)))
    return model


@pytest.mark.parametrize("kind", BASES)
@pytest.mark.parametrize("save", [save_pretrained, save_checkpoint], ids=["folder", "checkpoint"])
def test_a_folder_of_several_dtypes_is_read_as_it_is(kind: str, save: Callable[..., None], tmp_path: Path) -> None:
    model = mixed(kind)
    save(model, tmp_path / "saved")
    read = dict(from_pretrained(tmp_path / "saved").named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(read[name].float(), parameter.float()), name
        # q, k and v are saved as one tensor, in the widest dtype.
        fused = kind == "gpt" and save is save_pretrained and "attn" in name
        assert fused or read[name].dtype == parameter.dtype, name
    for name, wide in from_pretrained(tmp_path / "saved", dtype=torch.float64).named_parameters():
        assert wide.dtype == torch.float64 and torch.equal(wide.float(), read[name].float()), name


@pytest.mark.parametrize("kind", BASES)
def test_several_dtypes_are_converted_there_and_back_without_rounding(kind: str, tmp_path: Path) -> None:
    model = mixed(kind)
    save_checkpoint(model, tmp_path / "saved")
    convert(tmp_path / "saved", tmp_path / "folder")
    convert(tmp_path / "folder", tmp_path / "back")
    for folder in ("folder", "back"):
        read = from_pretrained(tmp_path / folder)
        for name, parameter in model.named_parameters():
            assert torch.equal(read.get_parameter(name).float(), parameter.float()), (folder, name)


def test_config_json_says_the_dtype_to_which_nothing_is_rounded(tmp_path: Path) -> None:
    import transformers

    model = mixed()
    save_pretrained(model, tmp_path / "saved")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype="auto")
    for name, parameter in model.named_parameters():
        their = theirs.get_parameter(name if name.startswith("lm_head") else f"model.{name}")
        assert torch.equal(their.float(), parameter.float()), name


@pytest.mark.parametrize(
    ("stored", "given"),
    [(torch.float32, torch.bfloat16), (torch.float16, torch.bfloat16), (torch.float64, torch.float32)],
    ids=str,
)
def test_no_value_is_rounded_unasked(stored: torch.dtype, given: torch.dtype, tmp_path: Path) -> None:
    save_checkpoint(filled(BASES["llama"]).to(stored), tmp_path / "saved")
    with pytest.raises(
        ValueError, match=rf"embed_tokens\.weight and \d+ more in {stored}, which a model in {given} would round"
    ):
        load_checkpoint(filled(BASES["llama"]).to(given), tmp_path / "saved")
    asked = from_pretrained(tmp_path / "saved", dtype=given)
    for name, parameter in filled(BASES["llama"]).named_parameters():
        assert torch.equal(asked.get_parameter(name), parameter.to(stored).to(given)), name
    wide = filled(BASES["llama"], 1).double()
    load_checkpoint(wide, tmp_path / "saved")
    assert torch.equal(wide.lm_head.weight, filled(BASES["llama"]).lm_head.weight.to(stored).double())  # type: ignore[union-attr, operator, arg-type]


def test_one_wide_tensor_of_many_is_named(tmp_path: Path) -> None:
    save_checkpoint(mixed(), tmp_path / "saved")
    with pytest.raises(
        ValueError, match=r"input_layernorm\.weight and 6 more in torch.float32, which a model in torch.bfloat16"
    ):
        load_checkpoint(filled(BASES["llama"]).bfloat16(), tmp_path / "saved")


# One optimizer's state is not another's

MAKES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "amsgrad": lambda parameters: torch.optim.AdamW(parameters, amsgrad=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "rmsprop": torch.optim.RMSprop,
    "centered": lambda parameters: torch.optim.RMSprop(parameters, centered=True, momentum=0.5),
    "adafactor": torch.optim.Adafactor,
    "groups": lambda parameters: torch.optim.AdamW([{"params": [each]} for each in parameters]),
}


def trained(make: Callable[[Any], torch.optim.Optimizer], steps: int, folder: Path | None = None) -> list[float]:
    """Losses after `steps` steps, of a model that is saved then, or was."""
    model = filled(BASES["llama"])
    optimizer = make(model.parameters())
    rows = torch.randint(0, 24, (2, 9), generator=torch.Generator().manual_seed(0))

    def step() -> float:
        loss = forward_backward(model, cross_entropy, rows[:, :-1], rows[:, 1:]).item()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    if folder is not None and not folder.exists():
        [step() for _ in range(steps)]
        save_checkpoint(model, folder, optimizer)
    elif folder is not None:
        load_checkpoint(model, folder, optimizer)
    return [step() for _ in range(2)]


@pytest.mark.parametrize("name", MAKES)
def test_the_optimizer_that_was_saved_goes_on(name: str, tmp_path: Path) -> None:
    assert trained(MAKES[name], 3, tmp_path / "saved") == trained(MAKES[name], 0, tmp_path / "saved")


@pytest.mark.parametrize(
    ("saved", "given", "message"),
    [
        ("adamw", "rmsprop", "has the state of AdamW, and the optimizer is RMSprop"),
        ("adamw", "sgd", "has the state of AdamW, and the optimizer is SGD"),
        ("sgd", "adamw", "has the state of SGD, and the optimizer is AdamW"),
        ("adamw", "adam", "has the state of AdamW, and the optimizer is Adam;"),
        ("adamw", "amsgrad", "another optimizer than this AdamW: of .* it lacks max_exp_avg_sq"),
        ("amsgrad", "adamw", "another optimizer than this AdamW: of .* it has beside max_exp_avg_sq"),
        ("momentum", "sgd", "another optimizer than this SGD: of .* it has beside momentum_buffer"),
        ("centered", "rmsprop", "it has beside grad_avg, momentum_buffer"),
        ("rmsprop", "centered", "it lacks grad_avg, momentum_buffer"),
        ("groups", "adamw", "an optimizer with 21 groups of parameters, and this AdamW has 1"),
    ],
)
def test_another_optimizer_is_refused_before_anything_is_changed(
    saved: str, given: str, message: str, tmp_path: Path
) -> None:
    trained(MAKES[saved], 1, tmp_path / "saved")
    model = filled(BASES["llama"], 1)
    optimizer = MAKES[given](model.parameters())
    with pytest.raises(ValueError, match=message):
        load_checkpoint(model, tmp_path / "saved", optimizer)
    assert not optimizer.state
    for name, parameter in filled(BASES["llama"], 1).named_parameters():
        assert torch.equal(model.get_parameter(name), parameter), name
    load_checkpoint(model, tmp_path / "saved")  # without the optimizer, which begins anew


def test_the_state_of_an_older_checkpoint_is_compared_by_its_names(tmp_path: Path) -> None:
    """The checkpoint does not name its optimizer's kind."""
    trained(MAKES["adamw"], 1, tmp_path / "saved")
    older = replace(Manifest.read(tmp_path / "saved"), optimizer=None)
    (tmp_path / "saved" / MANIFEST).write_text(older.text())
    for given, message in (
        ("rmsprop", "it lacks square_avg and it has beside exp_avg, exp_avg_sq"),
        ("sgd", "it has beside"),
    ):
        with pytest.raises(ValueError, match=message):
            trained(MAKES[given], 0, tmp_path / "saved")
    trained(MAKES["adamw"], 0, tmp_path / "saved")


STAGES = {"pipeline": PipelinePlan(split=(1, 1), schedule="1f1b", microbatches=2)}


def refused_in_stages(folder: Path) -> list[str]:
    """This rank's errors: a dtype that a single stage would round, and a different optimizer."""
    config: Any = BASES["llama"]
    errors = []
    for dtype, make in (
        (torch.bfloat16, MAKES["adamw"]),
        (torch.float32, MAKES["amsgrad"]),
        (torch.float32, MAKES["sgd"]),
    ):
        model = filled(config, 1)
        model = parallelize(model, ProcessMesh.grid(pp=2), replace(model.parallel_plan(), **STAGES))  # type: ignore[operator]
        if torch.distributed.get_rank() == 1:
            model.to(dtype)
        with pytest.raises(ValueError) as refused:
            load_checkpoint(model, folder, make(model.parameters()))
        errors.append(str(refused.value))
    return errors


def test_every_stage_refuses_what_one_cannot_take(pool: Pool, tmp_path: Path) -> None:
    trained(MAKES["adamw"], 1, tmp_path / "saved")
    first, second = pool.run(refused_in_stages, tmp_path / "saved", ranks=2)
    assert first == second
    rounded, other_state, other_kind = first
    assert "layers.1.input_layernorm.weight and" in rounded and "would round" in rounded
    assert "it lacks max_exp_avg_sq" in other_state
    assert "has the state of AdamW, and the optimizer is SGD" in other_kind
