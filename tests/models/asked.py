"""`weft train` called in this process, up to the launch; and small model folders that runs begin with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from weft.models import GPT, GPTConfig, Llama, LlamaConfig, Qwen, QwenConfig, initialize, save_pretrained
from weft.models.cli import main
from weft.models.cli import train as train_command
from weft.models.config import ModelConfig
from weft.models.data.tokenizer import Tokenizer, byte_tokenizer
from weft.models.rope_scaling import Llama3RopeScaling
from weft.models.train.recipes import recipe
from weft.models.train.run import Run
from weft.models.train.toml import as_toml

SIZES: dict[str, Any] = {"vocab_size": 257, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_seq_len": 64}
ROTARY: dict[str, Any] = {**SIZES, "intermediate_size": 44, "num_kv_heads": 2}
SCALING = Llama3RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=16)
LLAMA = LlamaConfig(**ROTARY, rope_theta=500000.0, rope_scaling=SCALING, norm_eps=1e-5)
MISTRAL = LlamaConfig(**ROTARY, head_dim=12, sliding_window=8)
QWEN = QwenConfig(**ROTARY, version=2, sliding_window=8, sliding_layers=(1,), attention_dropout=0.1)
GPT2 = GPTConfig(**SIZES, activation="gelu", scale_attention_by_layer=True, dropout=0.2)
TEXT = ("--data.path", "text.txt", "--data.sequence-length", "16")


def save(config: ModelConfig, folder: Path, *, tokenizer: Tokenizer | None = None) -> None:
    """A folder for transformers with a model of that config."""
    kind = {LlamaConfig: Llama, QwenConfig: Qwen, GPTConfig: GPT}[type(config)]
    model = kind(config)
    initialize(model, 1)
    save_pretrained(model, folder, tokenizer=tokenizer or byte_tokenizer())


class Asked:
    """Calls `weft train` without starting processes, and collects the runs that it would launch."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys, self.runs = capsys, list[Run]()

    def __call__(self, *arguments: str) -> Run:
        with pytest.raises(SystemExit) as end:
            main(["train", *arguments])
        assert not end.value.code, self._capsys.readouterr().err
        return self.runs[-1]

    def refusal(self, *arguments: str) -> str:
        """The line of an error, after which nothing is launched."""
        before = len(self.runs)
        self._capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main(["train", *arguments])
        out, err = self._capsys.readouterr()
        assert (end.value.code, out, len(self.runs)) == (2, "", before)
        return err.removeprefix("weft train: ").rstrip("\n")

    def said(self) -> str:
        return self._capsys.readouterr().out


def options_of(config: ModelConfig) -> list[str]:
    """Options for a recipe of the config's family, and a file that sets this config."""
    name = {LlamaConfig: "llama-tiny", QwenConfig: "qwen2-tiny", GPTConfig: "gpt-tiny"}[type(config)]
    Path("model.toml").write_text(
        as_toml(name, replace(recipe(name), model=config, data=replace(recipe(name).data, sequence_length=16)))
    )
    return ["--config", "model.toml"]


def begin(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: Path) -> Asked:
    """`weft train` in a folder with a text; nothing is launched."""
    found = Asked(capsys)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(train_command, "launch", lambda run, gpus: found.runs.append(run) or 0)
    (folder / "text.txt").write_text("a folder, its tokens and its constants; " * 40)
    return found
