"""A precomputed reference is kept beside the data: read by later runs, and never for other weights, rows or dtypes."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from weft.models.safe_files import write_shared
from weft.models.train.reference import PrecomputedReference, Scorer
from weft.models.train.reference_table import find_identities, read_table, write_table
from weft.models.train.run import Run

from tests.models.examples.chats import CHATML, template
from tests.models.tuning.runs import (
    first_step,
    make_run,
    read_metrics,
    records,
    save_model,
    train_to_the_end,
    write,
)
from tests.support.pool import Pool, RanksFailed

PRECOMPUTED = ("--reference", "precomputed")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    save_model(path / "model", 1)
    save_model(path / "reference", 2)
    return path


@pytest.fixture
def folders(models: Path, tmp_path: Path) -> Path:
    """Models, and data that no other test has."""
    shutil.copytree(models, tmp_path, dirs_exist_ok=True)
    for task in ("dpo", "kto"):
        write(tmp_path / f"{task}.jsonl", records(task, messages=True, count=22))
    return tmp_path


def made(folders: Path, *options: str, task: Any = "dpo", output: str = "run", **further: Any) -> Run:
    data = folders / f"{task}.jsonl"
    every = (*PRECOMPUTED, *options)
    return make_run(folders / "model", data, task, *every, output=folders / output, batch=4, **further)


def kept(folder: Path) -> list[Path]:
    return sorted(folder.glob(".reference-*"))


def about_reference(found: dict[str, Any]) -> list[str]:
    return [line for line in found["lines"] if "reference" in line]


@pytest.mark.exhaustive
@pytest.mark.parametrize("task", ["dpo", "kto"])
def test_a_second_run_reads_the_numbers_of_the_first(task: Any, folders: Path, pool: Pool) -> None:
    (first,) = pool.run(first_step, made(folders, task=task), ranks=1)
    (file,) = kept(folders)
    computed, written = about_reference(first)
    assert computed.startswith("log-probabilities of 22 ") and "under the reference: computed in" in computed
    assert written == f"kept beside the data for later runs: {file}"
    content = file.read_bytes()
    beta, dp2 = (f"--{task}.beta", "0.7"), ("--mesh.dp", "2", "--mesh.tp", "1")
    (second,) = pool.run(first_step, made(folders, *beta, task=task, output="again"), ranks=1)
    meshed = pool.run(first_step, made(folders, *beta, *dp2, task=task, output="dp2"), ranks=2)
    for found in (second, meshed[0]):
        assert about_reference(found) == [f"log-probabilities under the reference: read from {file}"]
    # the losses are those of a reference that is computed in every step
    alone = make_run(folders / "model", folders / f"{task}.jsonl", task, *beta, output=folders / "model-run", batch=4)
    (truth,) = pool.run(first_step, alone, ranks=1)
    for found in (second, *meshed):
        assert found["loss"] == pytest.approx(truth["loss"], rel=1e-6)
    assert (kept(folders), file.read_bytes()) == ([file], content)


def change_a_weight(folder: Path) -> None:
    """The least change of the last value of one weight."""
    tensors = load_file(folder / "model.safetensors")
    value = tensors["model.layers.1.mlp.up_proj.weight"]
    value[-1, -1] = torch.nextafter(value[-1, -1], torch.tensor(9.0))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def change_a_row(folders: Path) -> None:
    rows = records("dpo", messages=True, count=22)
    rows[7]["rejected"][0]["content"] += "?"
    write(folders / "dpo.jsonl", rows)


def change_the_template(folders: Path) -> None:
    (folders / "template.jinja").write_text(template(CHATML, marked=False).replace("<|im_end|>", "<|im_end|> "))


CHANGES: dict[str, tuple[Any, tuple[str, ...]]] = {
    "weight": (lambda folders: change_a_weight(folders / "model"), ()),
    "row": (change_a_row, ()),
    "template": (change_the_template, ("--data.template", "template.jinja")),
    "dtype": (lambda folders: None, ("--dtype", "bfloat16")),
    "cut": (lambda folders: None, ("--data.sequence-length", "63")),
    "another-reference": (lambda folders: None, ("--reference-from", "reference")),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_reference_or_changed_rows_read_no_stale_numbers(name: str, folders: Path, pool: Pool) -> None:
    change, options = CHANGES[name]
    pool.run(first_step, made(folders), ranks=1)
    (file,) = kept(folders)
    change(folders)
    options = tuple(str(folders / each) if (folders / each).exists() else each for each in options)
    (found,) = pool.run(first_step, made(folders, *options, output="again"), ranks=1)
    assert "computed in" in about_reference(found)[0]
    assert len(kept(folders)) == 2 and file in kept(folders)


@pytest.mark.exhaustive
def test_weights_of_an_adapters_base_count(folders: Path, pool: Pool) -> None:
    """The weights of a folder of adapters are also those of their base."""
    lora = make_run(
        folders / "model", folders / "dpo.jsonl", "dpo", "--lora.rank", "2", output=folders / "lora", batch=4
    )
    pool.run(train_to_the_end, lora, ranks=1)
    run = make_run(folders / "lora", folders / "dpo.jsonl", "dpo", *PRECOMPUTED, output=folders / "run", batch=4)
    before = pool.run(find_identities, run, ranks=1)
    change_a_weight(folders / "model")
    assert pool.run(find_identities, run, ranks=1) != before


def test_ranks_share_the_reading_of_weights(folders: Path, pool: Pool) -> None:
    run = made(folders, "--mesh.dp", "2", "--mesh.tp", "1")
    (alone,) = pool.run(find_identities, run, ranks=1)
    assert pool.run(find_identities, run, ranks=2) == [alone, alone]


def cut_short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-9])


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)


def take_a_stranger(file: Path) -> None:
    """A whole file, of other data."""
    write_table(file, "0" * 64, torch.zeros(22, 2))


DAMAGES = {
    "cut": (cut_short, "it was changed after it was written"),
    "bit": (flip_a_bit, "it was changed after it was written"),
    "empty": (lambda file: file.write_bytes(b""), "it was changed after it was written"),
    "stranger": (take_a_stranger, "it was computed for other data or another reference"),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_file_is_computed_again_with_a_line(name: str, folders: Path, pool: Pool) -> None:
    damage, why = DAMAGES[name]
    (first,) = pool.run(first_step, made(folders), ranks=1)
    (file,) = kept(folders)
    whole = file.read_bytes()
    damage(file)
    (found,) = pool.run(first_step, made(folders, output="again"), ranks=1)
    lines = about_reference(found)
    assert lines[0] == f"{file} cannot be used, and is computed again: {why}"
    assert "computed in" in lines[1]
    assert found["loss"] == first["loss"]
    assert (kept(folders), file.read_bytes()) == ([file], whole)


@pytest.mark.exhaustive
def test_data_that_cannot_be_written_beside(folders: Path, pool: Pool) -> None:
    """A folder in the file's place, since no folder refuses the user who runs most tests, root."""
    (identity,) = pool.run(find_identities, made(folders), ranks=1)[0]
    place = folders / f".reference-{identity[:16]}.npy"
    (place / "x").mkdir(parents=True)
    run = made(folders, steps=2)
    pool.run(train_to_the_end, run, ranks=1)
    (found,) = pool.run(first_step, made(folders, output="lines"), ranks=1)
    assert about_reference(found)[-1] == (
        f"{place} cannot be written (Is a directory): the log-probabilities are kept in "
        f"{folders / 'lines/reference.npy'} for this run alone, and another run computes them again"
    )
    assert (folders / "run/reference.npy").is_file()
    assert kept(folders) == [place]  # no temporary file is left


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write into every folder")
def test_a_folder_without_permission(folders: Path, pool: Pool) -> None:
    data = folders / "data"
    data.mkdir()
    shutil.move(folders / "dpo.jsonl", data)
    data.chmod(0o555)
    run = make_run(folders / "model", data, "dpo", *PRECOMPUTED, output=folders / "run", batch=4)
    (found,) = pool.run(first_step, run, ranks=1)
    assert "cannot be written (Permission denied)" in about_reference(found)[-1]


@pytest.mark.exhaustive
def test_of_a_mixture_the_known_sources_are_read(folders: Path, pool: Pool) -> None:
    """A source has a file beside it. Only the numbers that are missing are computed."""
    (folders / "one").mkdir()
    (folders / "two").mkdir()
    write(folders / "one/a.jsonl", records("dpo", messages=True, count=9))
    write(folders / "two/b.jsonl", records("dpo", messages=False, count=21))
    single = make_run(folders / "model", folders / "two", "dpo", *PRECOMPUTED, output=folders / "two-run", batch=4)
    pool.run(first_step, single, ranks=1)
    (known,) = kept(folders / "two")
    known_content = known.read_bytes()
    mixture = [f"{folders / 'one'}=0.5", f"{folders / 'two'}=0.5"]
    results = []
    for number, options in enumerate((PRECOMPUTED, PRECOMPUTED, ())):
        arguments = (*options, "--data.mixture", *mixture)
        run = make_run(folders / "model", None, "dpo", *arguments, output=folders / f"run-{number}", batch=4)
        results += pool.run(first_step, run, ranks=1)
    (other,) = kept(folders / "one")
    assert about_reference(results[0])[0].endswith(f"read from {known}")
    assert about_reference(results[0])[1].startswith("log-probabilities of 9 pairs under the reference: computed")
    assert [line.rpartition(" ")[2] for line in about_reference(results[1])] == [str(other), str(known)]
    assert results[0]["loss"] == results[1]["loss"] == pytest.approx(results[2]["loss"], rel=1e-6)
    assert known.read_bytes() == known_content


@pytest.mark.exhaustive
def test_the_numbers_of_a_reference_that_is_not_finite_are_not_kept(folders: Path, pool: Pool) -> None:
    tensors = load_file(folders / "reference/model.safetensors")
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, folders / "reference/model.safetensors", {"format": "pt"})
    run = made(folders, "--reference-from", str(folders / "reference"))
    with pytest.raises(RanksFailed, match=r"log-probability of example 1 is \[nan, nan\]; look for NaN in"):
        pool.run(first_step, run, ranks=1)
    assert not kept(folders)


@pytest.mark.exhaustive
def test_writers_at_once_leave_a_whole_file(tmp_path: Path) -> None:
    """A reader finds a whole table, of one of the writers. Writers are threads, which share a process id."""
    path, failures, table = tmp_path / ".reference-0.npy", list[BaseException](), torch.empty(500, 2)
    write_table(path, "a", torch.zeros(500, 2))

    def write_often(value: float) -> None:
        try:
            for _ in range(20):
                write_table(path, "a", torch.full((500, 2), value))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=write_often, args=(float(number),)) for number in range(6)]
    for each in threads:
        each.start()
    while any(each.is_alive() for each in threads):
        read_table(path, "a", table)
        assert table.min() == table.max()
    for each in threads:
        each.join()
    assert not failures
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_in_the_files_place_is_replaced_not_followed(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("theirs")
    (tmp_path / "file").symlink_to(tmp_path / "victim")
    write_shared(tmp_path / "file", b"ours")
    assert ((tmp_path / "victim").read_text(), (tmp_path / "file").read_bytes()) == ("theirs", b"ours")
    assert not (tmp_path / "file").is_symlink()


def half_computed(run: Run) -> None:
    """The run on this rank, which dies in the middle of the reference's computing."""
    of_every = Scorer.of_every

    def dying(self: Scorer, first: int, count: int, which: int) -> Any:
        if first >= 8:
            os._exit(9)
        return of_every(self, first, count, which)

    Scorer.of_every = dying  # type: ignore[method-assign]
    train_to_the_end(run)


def unsaved(run: Run) -> None:
    """The run on this rank, which dies when the numbers are beside the data, and not yet in the run's folder."""
    fill = PrecomputedReference._fill

    def dying(self: PrecomputedReference, *arguments: Any) -> None:
        fill(self, *arguments)
        os._exit(9)

    PrecomputedReference._fill = dying  # type: ignore[method-assign, assignment]
    train_to_the_end(run)


def weights(folder: Path) -> dict[str, bytes]:
    found = {each.name: each.read_bytes() for each in (folder / "checkpoint").glob("*.safetensors")}
    assert found
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize("task", ["dpo", "kto"])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("dies", [half_computed, unsaved], ids=["half-computed", "unsaved"])
def test_killed_while_computing_and_started_again_has_the_same_bits(
    dies: Any, ranks: int, task: str, folders: Path, pool: Pool
) -> None:
    sizes = ("--mesh.dp", str(ranks), "--mesh.tp", "1", "--log-every", "1", "--optimizer.lr", "1e-3")
    pool.run(train_to_the_end, made(folders, *sizes, task=task, output="whole", steps=3), ranks=ranks)
    (file,) = kept(folders)
    file.unlink()
    with pytest.raises(RanksFailed, match="exit code 9"):
        pool.run(dies, made(folders, *sizes, task=task, steps=3), ranks=ranks)
    assert len(kept(folders)) == (dies is unsaved)
    again = made(folders, *sizes, "--resume", task=task, steps=3)
    assert again.resume is None
    pool.run(train_to_the_end, again, ranks=ranks)
    assert weights(folders / "run") == weights(folders / "whole")
    whole, found = (read_metrics(folders / name) for name in ("whole", "run"))
    assert [(each["loss"], each["grad_norm"]) for each in found] == [(e["loss"], e["grad_norm"]) for e in whole]


@pytest.mark.exhaustive
def test_a_resumed_run_needs_neither_the_file_beside_the_data_nor_the_references_weights(
    folders: Path, pool: Pool
) -> None:
    options = ("--save-every", "2", "--log-every", "1", "--optimizer.lr", "1e-3")
    pool.run(train_to_the_end, made(folders, *options, output="whole", steps=4), ranks=1)
    checkpoint = folders / "whole/checkpoint-2"
    shutil.move(folders / "model", folders / "model-elsewhere")
    for file in kept(folders):
        file.unlink()
    resumed = made(folders, *options, "--resume", str(checkpoint), steps=4)
    pool.run(train_to_the_end, resumed, ranks=1)
    assert weights(folders / "run") == weights(folders / "whole")
    assert (folders / "run/reference.npy").read_bytes() == (folders / "whole/reference.npy").read_bytes()
    assert not kept(folders)
