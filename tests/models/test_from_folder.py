"""`weft train --from FOLDER` trains the folder's model, and refuses contradicting options before a process starts."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from weft.models import (
    save_checkpoint,
)
from weft.models.checkpoint.convert import convert
from weft.models.cli import main
from weft.models.config import ModelConfig
from weft.models.data.tokenizer import byte_tokenizer

from tests.models.asked import GPT2, LLAMA, MISTRAL, QWEN, TEXT, Asked, begin, options_of, save
from tests.models.folders import CLASSES, their_model
from tests.support import preloaded


@pytest.fixture
def asked(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Asked:
    return begin(capsys, monkeypatch, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("converted", [False, True], ids=["folder", "checkpoint"])
@pytest.mark.parametrize(
    "config",
    [
        pytest.param(LLAMA, id="llama"),
        pytest.param(MISTRAL, id="mistral"),
        pytest.param(QWEN, id="qwen"),
        pytest.param(GPT2, id="gpt"),
    ],
)
def test_the_model_is_the_folders(config: ModelConfig, converted: bool, asked: Asked) -> None:
    """The model has every constant as transformers reads the folder; a named recipe gives the training options."""
    save(config, Path("hf"))
    if converted:
        convert(Path("hf"), Path("begin"))
    folder = "begin" if converted else "hf"
    run = asked("--from", folder, *TEXT)
    assert run.config.model == config
    assert (run.recipe, run.origin, run.resume, run.title) == (None, Path(folder), None, folder)
    assert run.config.optimizer.lr == 2e-5
    assert f"begins with the model of {folder}\n" in asked.said()
    assert asked("qwen3-tiny", "--from", folder, *TEXT).config.model == config
    assert asked("qwen3-tiny", "--from", folder, *TEXT).config.optimizer.lr == 4e-3


@pytest.mark.exhaustive
def test_every_config_that_transformers_writes_is_taken(asked: Asked) -> None:
    import transformers  # here, as the import takes a second, also in workers that run none of these tests

    for kind in CLASSES:
        their_model(kind, vocab_size=257).save_pretrained(f"theirs-{kind}")
        for name, content in byte_tokenizer().files:
            Path(f"theirs-{kind}", name).write_bytes(content)
        run = asked("--from", f"theirs-{kind}", *TEXT)
        theirs = transformers.AutoConfig.from_pretrained(f"theirs-{kind}")
        assert run.config.model.hidden_size == theirs.hidden_size
        assert run.config.model.initializer_range == theirs.initializer_range


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("config", "options", "said"),
    [
        pytest.param(
            LLAMA,
            ("--model.rope-theta", "10000"),
            "--model.rope-theta 10000.0 contradicts rope_theta 500000.0",
            id="theta",
        ),
        pytest.param(
            LLAMA, ("--model.num-heads", "2"), "--model.num-heads 2 contradicts num_heads 4", id="heads-of-one-shape"
        ),
        pytest.param(
            LLAMA,
            ("--model.num-heads", "5"),
            "--model.num-heads 5 contradicts num_heads 4",
            id="heads-that-fit-nothing",
        ),
        pytest.param(
            LLAMA, ("--model.num-kv-heads=4",), "--model.num-kv-heads 4 contradicts num_kv_heads 2", id="one-word"
        ),
        pytest.param(
            LLAMA, ("--model.norm-eps", "1e-6"), "--model.norm-eps 1e-06 contradicts norm_eps 1e-05", id="eps"
        ),
        pytest.param(
            LLAMA,
            ("--model.rope-scaling.factor", "4"),
            "factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=16) "
            "contradicts rope_scaling Llama3RopeScaling(factor=8.0",
            id="scaling",
        ),
        pytest.param(
            LLAMA, ("--model.max-seq-len", "32"), "--model.max-seq-len 32 contradicts max_seq_len 64", id="shorter"
        ),
        pytest.param(
            LLAMA,
            ("--model.tie-embeddings",),
            "--model.tie-embeddings True contradicts tie_embeddings False",
            id="tied",
        ),
        pytest.param(QWEN, ("--model.version", "3"), "--model.version 3 contradicts version 2", id="version"),
        pytest.param(
            QWEN, ("--model.sliding-window", "9"), "--model.sliding-window 9 contradicts sliding_window 8", id="window"
        ),
        pytest.param(
            QWEN,
            ("--model.sliding-layers", "0", "1"),
            "--model.sliding-layers (0, 1) contradicts sliding_layers (1,)",
            id="layers",
        ),
        pytest.param(
            GPT2,
            ("--model.activation", "gelu_new"),
            "--model.activation 'gelu_new' contradicts activation 'gelu'",
            id="activation",
        ),
        pytest.param(
            GPT2,
            ("--model.max-seq-len", "128"),
            "--model.max-seq-len 128 contradicts max_seq_len 64",
            id="longer-table",
        ),
        pytest.param(
            GPT2,
            ("--model.no-scale-attention-by-layer",),
            "--model.scale-attention-by-layer False contradicts scale_attention_by_layer True",
            id="scale",
        ),
    ],
)  # fmt: skip
def test_an_option_that_contradicts_the_folder_is_refused_with_both_values(
    config: ModelConfig, options: tuple[str, ...], said: str, asked: Asked
) -> None:
    save(config, Path("hf"))
    assert f"{said}" in (refused := asked.refusal("--from", "hf", *options, *TEXT))
    assert "of --from hf" in refused
    Path("run.toml").write_text("\n".join(["[model]", *(_as_toml(options))]))
    if len(options) == 2 and "." not in options[0].removeprefix("--model."):
        assert asked.refusal("--config", "run.toml", "--from", "hf", *TEXT) == refused


def _as_toml(options: tuple[str, ...]) -> list[str]:
    name, *values = options
    value = values[0] if values else "true"
    quoted = value if value.replace(".", "").replace("e-", "").isdigit() else json.dumps(value)
    return [f"{name.removeprefix('--model.').replace('-', '_')} = {quoted}"]


def test_all_that_contradicts_is_named_at_once(asked: Asked) -> None:
    save(LLAMA, Path("hf"))
    said = asked.refusal("llama3.2-1b", "--from", "hf", "--model.hidden-size", "64", "--model.rope-theta", "1e6", *TEXT)
    assert "--model.hidden-size 64 contradicts hidden_size 32" in said
    assert "--model.rope-theta 1000000.0 contradicts rope_theta 500000.0" in said


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("config", "options", "field", "value"),
    [
        pytest.param(
            LLAMA, ("--model.rope-theta", "5e5", "--model.head-dim", "0"), "rope_theta", 500000.0, id="agrees"
        ),
        pytest.param(LLAMA, ("--model.dropout", "0.3"), "dropout", 0.3, id="dropout"),
        pytest.param(QWEN, ("--model.attention-dropout", "0"), "attention_dropout", 0.0, id="attention-dropout"),
        pytest.param(GPT2, ("--model.embedding-dropout", "0.4"), "embedding_dropout", 0.4, id="embedding-dropout"),
        pytest.param(QWEN, ("--model.initializer-range", "0.5"), "initializer_range", 0.5, id="initializer-range"),
        pytest.param(LLAMA, ("--model.max-seq-len", "128"), "max_seq_len", 128, id="longer"),
        pytest.param(LLAMA, ("--data.sequence-length", "80"), "max_seq_len", 80, id="longer-sequences"),
    ],
)
def test_options_that_agree_with_the_folder_or_leave_the_weights_alone_are_taken(
    config: ModelConfig, options: tuple[str, ...], field: str, value: object, asked: Asked
) -> None:
    save(config, Path("hf"))
    model = asked("--from", "hf", *TEXT, *options).config.model
    assert getattr(model, field) == value
    assert replace(model, **{field: getattr(config, field)}) == config


def test_sequences_of_a_recipe_are_as_long_as_the_folders_model_takes(asked: Asked) -> None:
    save(GPT2, Path("hf"))
    run = asked("llama3-8b", "--from", "hf", "--data.path", "text.txt")
    assert (run.config.data.sequence_length, run.config.model) == (64, GPT2)


@pytest.mark.exhaustive
def test_a_run_from_a_folder_is_read_back_from_the_printed_config(asked: Asked) -> None:
    save(LLAMA, Path("hf"))
    with pytest.raises(SystemExit):
        main(["train", "--from", "hf", "--print-config", "--model.dropout", "0.1", *TEXT])
    printed = asked.said()
    assert f'from = "{Path("hf").resolve()}"\n' in printed and "recipe" not in printed
    Path("run.toml").write_text(printed)
    run = asked("--config", "run.toml")
    assert (run.config.model, run.recipe, run.origin) == (replace(LLAMA, dropout=0.1), None, Path("hf").resolve())
    assert run.config.data.sequence_length == 16


def test_from_and_a_checkpoint_of_no_run_are_two_beginnings(asked: Asked) -> None:
    save(LLAMA, Path("hf"))
    convert(Path("hf"), Path("begin"))
    said = asked.refusal("--from", "hf", "--resume", "begin", "--output", "run", *TEXT)
    assert said == "--from hf begins a new run, but --resume continues begin; give only one of them"


def test_a_first_start_with_resume_begins_with_the_folder(asked: Asked) -> None:
    """The command that starts a run also restarts the run."""
    save(LLAMA, Path("hf"))
    run = asked("--from", "hf", "--output", "run", "--save-every", "5", "--resume", *TEXT)
    assert (run.origin, run.resume, run.config.model) == (Path("hf"), None, LLAMA)


def trained(*arguments: str) -> str:
    """The output of `weft train` in processes of its own."""
    done = preloaded.run((sys.executable, "-m", "weft.models.cli", "train", *arguments))
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.exhaustive
def test_a_run_goes_on_without_the_folder_that_it_began_with(asked: Asked) -> None:
    """A run's checkpoints hold the whole model, including the rope scaling, which no option can give.

    `--from run` begins with the newest checkpoint or, without checkpoints, with the run's final model.
    """
    save(LLAMA, Path("hf"))
    ids = {"bos_token_id": 1, "eos_token_id": [7, 9]}
    Path("hf/config.json").write_text(json.dumps(json.loads(Path("hf/config.json").read_text()) | ids))
    Path("hf/generation_config.json").write_text(json.dumps(ids | {"temperature": 0.6}))
    Path("hf/checksums.json").unlink()  # as a folder that another program wrote
    options = (*TEXT, "--mesh.dp", "1", "--mesh.tp", "1", "--no-check", "--steps", "2")
    said = trained("--from", "hf", "--output", "run", "--save-every", "1", *options)
    assert "begins with the model of hf\n" in said
    Path("hf").rename("moved")
    run = asked("--output", "run", "--resume", "--steps", "3")
    assert (run.config.model, run.resume, run.origin) == (LLAMA, Path("run/checkpoint-2"), None)
    assert run.config.from_ == Path("hf").resolve()
    assert "goes on from run/checkpoint-2\nsteps is 3, and was 2\n" in asked.said()
    said = asked.refusal("--output", "run", "--resume", "--from", "moved")
    assert f"saved with from {Path('hf').resolve()}, but this run has {Path('moved').resolve()}" in said
    said = asked.refusal("--output", "run", "--resume", "--model.rope-theta", "10000")
    assert "--model.rope-theta 10000.0 contradicts rope_theta 500000.0" in said
    again = asked("--from", "run", *TEXT)
    assert (again.config.model, again.origin) == (LLAMA, Path("run/checkpoint-2"))
    for checkpoint in Path("run").glob("checkpoint-*"):
        checkpoint.rename(f"{checkpoint}.aside")
    assert asked("--from", "run", *TEXT).origin == Path("run/checkpoint")
    began, ended = (json.loads(Path(name, "config.json").read_text()) for name in ("moved", "run/checkpoint"))
    assert began == ended and ended["rope_scaling"]["factor"] == 8.0
    assert ended["eos_token_id"] == [7, 9]
    for folder in ("run/checkpoint", "run/checkpoint-2.aside"):
        assert json.loads(Path(folder, "generation_config.json").read_text())["eos_token_id"] == [7, 9]


def test_a_path_without_a_model_is_refused(asked: Asked) -> None:
    Path("empty").mkdir()
    Path("broken").mkdir()
    Path("broken/config.json").write_text("{")
    Path("bert").mkdir()
    Path("bert/config.json").write_text('{"model_type": "bert"}')
    save_checkpoint(torch.nn.Linear(2, 2), "other")
    for name, said in {
        "nowhere": "--from nowhere is not a folder; give a Hugging Face folder, a checkpoint, or the folder of a run",
        "empty": "--from empty has no model: no config.json, and no complete checkpoint of a run; give",
        "broken": "broken/config.json is not JSON",
        "bert": "bert/config.json: model_type 'bert' is not supported; use one of llama, mistral, mixtral, qwen2, "
        "qwen3, qwen3_moe, weft_moe, gpt2",
        "other": "other has no config.json, because its model is a class of your own",
    }.items():
        assert said in asked.refusal("--from", name, *TEXT), name


@pytest.mark.exhaustive
def test_a_text_is_not_trained_as_bytes_where_the_folder_has_another_tokenizer(asked: Asked) -> None:
    for name in ("one", "two"):
        Path(f"{name}.txt").write_text(f"{name} text of its own kind, {name}; " * 60)
        main_ends("data", "train-tokenizer", f"{name}.txt", "--vocab-size", "270", "--output", f"tokenizer-{name}")
        main_ends("data", "prepare", "text.txt", "--tokenizer", f"tokenizer-{name}", "--output", f"prepared-{name}")
    config = replace(LLAMA, vocab_size=270, rope_scaling=None)
    save(config, Path("hf"))
    for path in Path("tokenizer-one").iterdir():
        Path("hf", path.name).write_bytes(path.read_bytes())
    Path("hf/checksums.json").unlink()
    said = asked.refusal("--from", "hf", *TEXT)
    assert said == (
        "text.txt is text, which would be read as bytes, but --from hf has a tokenizer; tokenize the text with "
        "`weft data prepare FILE_OR_FOLDER --tokenizer hf --output prepared`, and give --data.path prepared"
    )
    said = asked.refusal("--from", "hf", "--data.path", "prepared-two", "--data.sequence-length", "16")
    assert said.startswith(
        "prepared-two was prepared with another tokenizer than that of --from hf; prepare it again with `weft"
    )
    run = asked("--from", "hf", "--data.path", "prepared-one", "--data.sequence-length", "16")
    assert run.corpus.tokenizer.vocab_size == 270
    # The same tokenizer, as another program with other spaces would write the file.
    tokenizer = json.loads(Path("hf/tokenizer.json").read_text())
    Path("hf/tokenizer.json").write_text(json.dumps({**tokenizer, "padding": None}, indent=1))
    asked("--from", "hf", "--data.path", "prepared-one", "--data.sequence-length", "16")
    convert(Path("hf"), Path("begin"))
    said = asked.refusal("--resume", "begin", "--output", "run", *options_of(config), *TEXT)
    assert said.startswith(
        "text.txt is text, which would be read as bytes, but --resume begin has a tokenizer; tokenize "
    )


@pytest.mark.exhaustive
def test_a_folder_without_a_tokenizer_takes_bytes_where_it_has_as_many_tokens(asked: Asked) -> None:
    for size in (257, 300):
        save(replace(LLAMA, vocab_size=size), Path(f"hf-{size}"))
        for name, _ in byte_tokenizer().files:
            Path(f"hf-{size}", name).unlink()
        Path(f"hf-{size}/checksums.json").unlink()
    assert asked("--from", "hf-257", *TEXT).config.model.vocab_size == 257
    said = asked.refusal("--from", "hf-300", *TEXT)
    assert (
        "--from hf-300 has a model of 300 tokens but no tokenizer.json, and text.txt would be read as bytes, 257"
        in said
    )


def main_ends(*arguments: str) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert not end.value.code


@pytest.mark.exhaustive
def test_nothing_of_it_waits_for_torch(asked: Asked) -> None:
    """A contradiction is told before torch is imported, of every family."""
    for name, config in {"llama": LLAMA, "qwen": QWEN, "gpt": GPT2}.items():
        save(config, Path(name))
        convert(Path(name), Path(f"{name}-begin"))
    program = """
import sys
from weft.models.cli import main
for arguments in (
    *(["train", "--from", name, "--model.num-heads", "8"] for name in ("llama", "qwen-begin", "gpt")),
    [
        "train", "gpt-tiny", "--resume", "llama-begin", "--output", "run",
        "--data.path", "text.txt", "--data.sequence-length", "16",
    ],
):
    try:
        main(arguments)
    except SystemExit as end:
        assert end.code == 2
    assert "torch" not in sys.modules, arguments
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(done.stderr.splitlines()) == 4, done.stderr
