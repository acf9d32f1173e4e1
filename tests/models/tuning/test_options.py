"""Options of tasks: what is refused, what config.toml keeps, what a resumed run may change, and what is predicted."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from weft.models.cli import main
from weft.models.cli.settings import read_configuration
from weft.models.data.examples.example import Task
from weft.models.train.config import TrainConfig
from weft.models.train.memory_check import memory_need
from weft.models.train.objective import open_batches
from weft.models.train.recipes import recipe
from weft.models.train.saved_run import check_same_run, describe_run
from weft.models.train.task_config import DPOConfig, KTOConfig, LoRAConfig, ReferenceMeshConfig
from weft.models.train.toml import as_toml

from tests.models.examples.chats import CHATML, template
from tests.models.tuning.runs import LORA, make_run, records, save_model, write

LLAMA = recipe("llama-tiny")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("folders")
    save_model(path / "model", 1)
    save_model(path / "other", 2, vocab_size=400)
    for task in ("sft", "dpo", "kto"):
        write(path / f"{task}.jsonl", records(task, messages=True, count=24))  # type: ignore[arg-type]
    return path


def configured(*arguments: str) -> TrainConfig:
    return read_configuration(["llama-tiny", *arguments], None, command="train", about="")[1]


REFUSED = {
    "dpo-of-sft": ("--task sft --dpo.beta 0.2", "dpo.beta is 0.2, but task is sft; give --task dpo, or leave it out"),
    "kto-of-dpo": ("--task dpo --kto.beta 1", "kto.beta is 1.0, but task is dpo; give --task kto, or leave it out"),
    "dpo-of-texts": ("--dpo.loss ipo", "dpo.loss is ipo, but task is pretrain; give --task dpo"),
    "targets-alone": ("--task sft --lora.targets q_proj", "but lora.rank is 0, which trains all weights; give --lora"),
    "alpha-alone": ("--lora.alpha 8", "lora.alpha is 8.0, but lora.rank is 0"),
    "reference-of-sft": ("--task sft --reference model", "reference is model, but task sft has no reference"),
    "folder-of-sft": ("--task sft --reference-from x", "reference-from is x, but task sft has no reference"),
    "zero-of-texts": ("--reference-zero 3", "reference-zero is 3, but task pretrain has no reference"),
    "mesh-of-sft": ("--task sft --reference-mesh.dp 2", "but task sft has no reference; give --task dpo or --task kto"),
    "no-adapters": ("--task dpo --reference adapters", "the model without its adapters, but lora.rank is 0; give"),
    "adapters-from": (
        "--task dpo --lora.rank 2 --reference adapters --reference-from x",
        "reference-from is x, an option of a reference model, but reference is adapters; give --reference model",
    ),
    "adapters-mesh": ("--task kto --lora.rank 2 --reference-mesh.tp 2", "but reference is adapters; give --reference"),
    "adapters-zero": ("--task kto --lora.rank 2 --reference-zero 3", "reference-zero is 3, an option of a reference"),
    "beta": ("--task dpo --dpo.beta 0", "dpo.beta is 0.0; it must be above 0"),
    "smoothing": ("--task dpo --dpo.label-smoothing 0.5", "dpo.label-smoothing is 0.5; it must be below 0.5"),
    "smoothed-ipo": ("--task dpo --dpo.label-smoothing 0.1 --dpo.loss ipo", "but dpo.loss ipo has none; leave it out"),
    "weight": ("--task kto --kto.desirable-weight -1", "--kto.desirable-weight is -1.0; it must be 0 or more"),
    "dropout": ("--lora.rank 2 --lora.dropout 1", "lora.dropout is 1.0; it must be below 1"),
    "rank": ("--lora.rank -1", "lora.rank is -1; it must be 0 or more"),
    "reference-mesh": ("--task dpo --reference-mesh.dp 0", "--reference-mesh.dp is 0; it must be 1 or more"),
}


@pytest.mark.few(3)
@pytest.mark.every_value
@pytest.mark.parametrize("name", REFUSED)
def test_options_that_do_not_fit_are_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, why = REFUSED[name]
    with pytest.raises(SystemExit) as end:
        main(["train", *arguments.split()])
    out, err = capsys.readouterr()
    assert (end.value.code, out) == (2, "")
    assert why in " ".join(err.replace("│", " ").split())


def refusal(folders: Path, tmp_path: Path, task: Task, *options: str) -> str:
    """Why a run with these options is refused."""
    with pytest.raises(ValueError) as error:
        make_run(folders / "model", folders / f"{task}.jsonl", task, *options, output=tmp_path / "run", batch=4)
    return str(error.value)


def test_a_reference_of_another_vocabulary_is_refused(folders: Path, tmp_path: Path) -> None:
    why = refusal(folders, tmp_path, "dpo", "--reference-from", str(folders / "other"))
    assert re.search(r"has a vocabulary of 400 tokens, and the model one of \d+; give the folder of a model with", why)


def test_a_reference_mesh_of_other_processes_is_refused(folders: Path, tmp_path: Path) -> None:
    why = refusal(folders, tmp_path, "kto", "--mesh.dp", "2", "--mesh.tp", "1", "--reference-mesh.tp", "2")
    assert why == (
        "reference_mesh is pp=1 x dp=2 x cp=1 x tp=2, 4 processes, but the run has 2; give sizes with this product"
    )


UNUSABLE: dict[str, tuple[str, str]] = {
    "heads": ("--mesh.dp 8 --reference-mesh.tp 8 --reference-mesh.dp 1", "tp=8 does not divide num_heads 4"),
    "layers": ("--mesh.dp 4 --reference-mesh.pp 4 --reference-mesh.dp 1", "2 layers, which cannot be cut into 4"),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", UNUSABLE)
def test_a_reference_mesh_that_the_model_cannot_have_is_refused(name: str, folders: Path, tmp_path: Path) -> None:
    options, why = UNUSABLE[name]
    found = refusal(folders, tmp_path, "dpo", "--mesh.tp", "1", *options.split())
    assert found.startswith("reference_mesh is pp=") and why in found


def test_targets_that_the_model_lacks_are_refused(folders: Path, tmp_path: Path) -> None:
    why = refusal(folders, tmp_path, "sft", "--lora.rank", "2", "--lora.targets", "c_attn")
    assert "c_attn" in why


def test_both_ways_not_to_pack_are_one() -> None:
    plain, alias = configured("--task", "sft", "--data.no-pack"), configured("--task", "sft", "--no-data.pack")
    assert plain == alias
    assert not plain.data.pack


FILES: dict[str, dict[str, Any]] = {
    "sft": {"task": "sft", "lora": LoRAConfig(rank=4, alpha=8.0, targets=("q_proj", "v_proj"), dropout=0.1)},
    "dpo": {
        "task": "dpo",
        "dpo": DPOConfig(beta=0.2, loss="ipo", length_normalized=True),
        "reference": "model",
        "reference_from": Path("other"),
        "reference_zero": 3,
        "reference_mesh": ReferenceMeshConfig(dp=4, tp=1),
    },
    "kto": {
        "task": "kto",
        "kto": KTOConfig(beta=0.2, desirable_weight=1.5, undesirable_weight=0.5),
        "reference": "precomputed",
        "lora": LoRAConfig(rank=2),
    },
    "template": {"task": "sft", "data": replace(LLAMA.data, template=Path("chat.jinja"), pack=False)},
}


@pytest.mark.few(1)
@pytest.mark.every_value
@pytest.mark.parametrize("name", FILES)
def test_a_file_keeps_the_options_of_a_task(name: str, tmp_path: Path) -> None:
    config = replace(LLAMA, **FILES[name])
    file = tmp_path / "run.toml"
    file.write_text(as_toml("llama-tiny", config))
    assert read_configuration([], file, command="train", about="") == ("llama-tiny", config)


CHANGED = {
    "lora": ("dpo", (*LORA[:2], *LORA[4:]), "lora.alpha"),
    "beta": ("dpo", (*LORA, "--dpo.beta", "0.7"), "dpo.beta"),
    "reference": ("dpo", (*LORA, "--reference", "model"), "reference"),
    "pack": ("dpo", (*LORA, "--data.no-pack"), "data.pack"),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CHANGED)
def test_a_resumed_run_keeps_what_its_losses_depend_on(name: str, folders: Path, tmp_path: Path) -> None:
    task, options, differs = CHANGED[name]
    saved = describe_run(of_task(folders, tmp_path, "dpo", *LORA), 1, None)
    with pytest.raises(ValueError, match=f"the checkpoint was saved with {differs} .* give the saved value, or start"):
        check_same_run(saved, of_task(folders, tmp_path, task, *options))  # type: ignore[arg-type]


@pytest.mark.exhaustive
def test_a_resumed_run_is_of_the_same_task(folders: Path, tmp_path: Path) -> None:
    saved = describe_run(of_task(folders, tmp_path, "sft"), 1, None)
    run = of_task(folders, tmp_path, "sft")
    assert check_same_run(saved, run) == []
    with pytest.raises(ValueError, match="the checkpoint was saved with task sft, but this run has dpo"):
        check_same_run(saved, replace(run, config=replace(run.config, task="dpo")))


@pytest.mark.exhaustive
def test_a_resumed_run_may_move_its_reference(folders: Path, tmp_path: Path) -> None:
    """To other ranks, and in or out of shards."""
    saved = describe_run(of_task(folders, tmp_path, "dpo"), 1, None)
    assert check_same_run(saved, of_task(folders, tmp_path, "dpo", "--reference-zero", "3")) == []


@pytest.mark.exhaustive
def test_a_resumed_run_finds_its_reference_unchanged(folders: Path, tmp_path: Path) -> None:
    save_model(tmp_path / "reference", 3)
    options = ("--reference-from", str(tmp_path / "reference"))
    saved = describe_run(of_task(folders, tmp_path, "dpo", *options), 1, None)
    assert check_same_run(saved, of_task(folders, tmp_path, "dpo", *options)) == []
    shutil.rmtree(tmp_path / "reference")
    save_model(tmp_path / "reference", 4)
    with pytest.raises(
        ValueError, match=r"the weights of the reference .* have changed since the checkpoint was saved"
    ):
        check_same_run(saved, of_task(folders, tmp_path, "dpo", *options))


def test_a_run_can_be_resumed_from_another_folder(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folders)
    (folders / "chat.jinja").write_text(template(CHATML, marked=True))
    run = of_task(folders, tmp_path, "dpo", "--reference-from", "model", "--data.template", "chat.jinja")
    assert run.config.reference_from == folders.resolve() / "model"
    assert run.config.data.template == folders.resolve() / "chat.jinja"


def of_task(folders: Path, tmp_path: Path, task: Task, *options: str) -> Any:
    return make_run(folders / "model", folders / f"{task}.jsonl", task, *options, output=tmp_path / "run", batch=4)


@pytest.mark.few(1)
@pytest.mark.every_value
@pytest.mark.parametrize(("count", "held_out"), [(19, 0), (20, 1), (39, 1), (40, 2)])
@pytest.mark.parametrize("task", ["sft", "dpo", "kto"])
def test_one_example_in_20_is_held_out(task: Task, count: int, held_out: int, folders: Path, tmp_path: Path) -> None:
    data = write(tmp_path / "data.jsonl", records(task, messages=True, count=count))
    run = make_run(folders / "model", data, task, "--data.no-pack", output=tmp_path / "run", batch=4)
    batches: Any = open_batches(run)
    assert (batches.num_held_out, batches.num_samples) == (held_out, count - held_out)


def explained(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, int]:
    """The bytes that the rank holds from step to step, by kind, as `weft explain` prints them."""
    with pytest.raises(SystemExit, match="0"):
        main(["explain", "--mesh.dp", "2", "--mesh.tp", "1", *arguments])
    table, _, _ = capsys.readouterr().out.partition("at the peak of a step")
    rows = re.findall(r"^  (\S[a-z ]*?) +([\d,]+) bytes +[\d.]+ [MG]iB$", table, re.MULTILINE)
    return {name: int(nbytes.replace(",", "")) for name, nbytes in rows}


@pytest.mark.exhaustive
def test_explain_counts_adapters_and_the_reference(capsys: pytest.CaptureFixture[str]) -> None:
    texts = explained(capsys)
    base, adapters = texts["parameters"], 4 * 4 * (3 * (128 + 384) + 2 * (128 + 128) + 2 * (128 + 64)) * 4
    assert explained(capsys, "--task", "sft") == texts
    adapted = {"parameters": base + adapters, "gradients": adapters, "optimizer state": 2 * adapters}
    adapted["in all"] = base + 4 * adapters
    for arguments in (("--task", "sft"), ("--task", "dpo"), ("--task", "kto")):
        assert explained(capsys, *arguments, "--lora.rank", "4") == adapted
    whole = texts | {"reference model": base, "in all": texts["in all"] + base}
    assert explained(capsys, "--task", "dpo") == whole
    sharded = explained(capsys, "--task", "kto", "--reference-zero", "3")
    assert sharded["reference model"] < 0.6 * base
    precomputed = explained(capsys, "--task", "dpo", "--reference", "precomputed")
    assert precomputed == texts


@pytest.mark.exhaustive
def test_the_memory_check_counts_adapters_and_the_reference(folders: Path, tmp_path: Path) -> None:
    def need(*options: str, task: Task = "dpo") -> float:
        options = ("--mesh.dp", "2", "--mesh.tp", "1", "--no-check", *options)
        return memory_need(of_task(folders, tmp_path, task, *options), on_gpus=True).nbytes / 4

    about = partial(pytest.approx, abs=1)
    base = of_task(folders, tmp_path, "dpo").config.model.num_parameters
    adapters = 2 * 3 * ((32 + 32) + (32 + 32) + (48 + 32))
    assert need(task="sft") == about(4 * base)  # weights, gradients, and two states of AdamW
    assert need() == about(5 * base)
    assert need("--reference-zero", "3") == about(4.5 * base)
    assert need("--plan.zero", "3") == about(2.5 * base)
    assert need("--reference", "precomputed") == about(4 * base)
    assert need(*LORA) == about(base + 3 * adapters)
    assert need(*LORA, "--reference", "model") == about(2 * base + 3 * adapters)
