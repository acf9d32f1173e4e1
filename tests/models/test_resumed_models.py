"""A checkpoint resumes only its own model: constants that no shape shows are compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from weft.models.checkpoint.convert import convert
from weft.models.cli import train as train_command
from weft.models.config import ModelConfig
from weft.models.rope_scaling import DynamicRopeScaling, LinearRopeScaling, YarnRopeScaling

from tests.models.asked import GPT2, LLAMA, QWEN, TEXT, Asked, begin, options_of, save


@pytest.fixture
def asked(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Asked:
    return begin(capsys, monkeypatch, tmp_path)


DIFFERENT: dict[str, tuple[ModelConfig, ModelConfig]] = {
    "theta": (LLAMA, replace(LLAMA, rope_theta=10000.0)),
    "no-scaling": (LLAMA, replace(LLAMA, rope_scaling=None)),
    "scaling-of-another-kind": (
        replace(LLAMA, rope_scaling=LinearRopeScaling(factor=2.0)),
        replace(LLAMA, rope_scaling=DynamicRopeScaling(factor=2.0)),
    ),
    "scaling-yarn": (
        replace(LLAMA, rope_scaling=YarnRopeScaling(factor=2.0, original_max_seq_len=16)),
        replace(LLAMA, rope_scaling=YarnRopeScaling(factor=2.0, original_max_seq_len=32)),
    ),
    "eps": (LLAMA, replace(LLAMA, norm_eps=1e-6)),
    "heads-of-one-shape": (LLAMA, replace(LLAMA, num_heads=8, num_kv_heads=4, head_dim=4)),
    "window": (QWEN, replace(QWEN, sliding_window=9)),
    "windows-of-other-layers": (QWEN, replace(QWEN, sliding_layers=(0, 1))),
    "activation": (GPT2, replace(GPT2, activation="gelu_new")),
    "gpt-eps": (GPT2, replace(GPT2, norm_eps=1e-6)),
    "gpt-heads": (GPT2, replace(GPT2, num_heads=2)),
    "scale-by-layer": (GPT2, replace(GPT2, scale_attention_by_layer=False)),
    "shorter": (LLAMA, replace(LLAMA, max_seq_len=32)),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", DIFFERENT)
def test_a_converted_checkpoint_of_another_model_is_not_resumed(
    name: str, asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The names and the shapes of all weights are the same; so only the config tells."""
    saved, given = DIFFERENT[name]
    save(saved, Path("hf"))
    convert(Path("hf"), Path("begin"))
    monkeypatch.setattr(train_command, "read_configuration", _with_the_model(given, train_command.read_configuration))
    said = asked.refusal("--resume", "begin", "--output", "run", *TEXT)
    assert said.startswith("begin has another model than this run: it has ")
    for field in ("rope_theta", "rope_scaling", "norm_eps", "num_heads", "sliding_window", "activation", "max_seq_len"):
        there, here = getattr(saved, field, None), getattr(given, field, None)
        assert (f"{field} {there!r}, but this run has {here!r}" in said) == (there != here), field
    assert said.endswith("or begin a new run from it with `weft train --from begin`")
    assert not Path("run").exists()


def _with_the_model(model: ModelConfig, configured: Callable[..., Any]) -> Callable[..., Any]:
    """`configured`, whose run has that model: of scalings no recipe has the options."""

    def changed(*arguments: Any, **options: Any) -> tuple[Any, Any]:
        name, config = configured(*arguments, **options)
        return name, replace(config, model=model)

    return changed


@pytest.mark.few(1)
@pytest.mark.parametrize("allowed", [{}, {"dropout": 0.2}, {"max_seq_len": 128}, {"initializer_range": 0.5}], ids=str)
def test_a_converted_checkpoint_of_the_same_model_is_resumed(allowed: dict[str, Any], asked: Asked) -> None:
    plain = replace(LLAMA, rope_scaling=None)
    save(plain, Path("hf"))
    convert(Path("hf"), Path("begin"))
    run = asked("--resume", "begin", "--output", "run", *options_of(replace(plain, **allowed)), *TEXT)
    assert (run.resume, run.config.model) == (Path("begin"), replace(plain, **allowed))


@pytest.mark.exhaustive
def test_the_recipe_of_another_family_is_not_resumed(asked: Asked) -> None:
    save(LLAMA, Path("hf"))
    convert(Path("hf"), Path("begin"))
    for recipe, title in (("gpt-tiny", "GPT-2"), ("qwen2-tiny", "Qwen 2")):
        said = asked.refusal(recipe, "--resume", "begin", "--output", "run", *TEXT)
        assert f"family 'Llama', but this run has {title!r}" in said
