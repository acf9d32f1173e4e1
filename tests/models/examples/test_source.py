"""Examples read from records, and from prepared folders: the same examples, cut to a length."""

from __future__ import annotations

import json
import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from weft.models.data.examples import source as source_module
from weft.models.data.examples.encode import ExampleRecords
from weft.models.data.examples.example import SEGMENTS, Task
from weft.models.data.examples.rows import ExampleBatches
from weft.models.data.examples.source import ExampleMixture, Examples, find_examples
from weft.models.data.prepare import prepare
from weft.models.data.sources import check_share, find_data
from weft.models.data.tokenizer import BYTE_END, byte_tokenizer

from tests.models.examples.records import record, write_records

TASKS: tuple[Task, ...] = ("sft", "dpo", "kto")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working folder. A sync of this disk may take longer than all else here."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "fsync", lambda file: None)


def find(name: str, task: Task, *, length: int = 100, skip_bad: bool = False) -> Examples:
    found = find_examples(
        Path(name), task=task, tokenizer=byte_tokenizer(), template=None, length=length, skip_bad=skip_bad
    )
    assert isinstance(found, Examples)
    return found


def texts(found: Examples) -> list[tuple[tuple[str, str], ...]]:
    """Of each example, of each segment the text and its learned part."""
    return [
        tuple(
            (bytes(each.tokens.tolist()[:-1]).decode(), bytes(each.tokens[each.learned].tolist()[:-1]).decode())
            for each in found.read(number).segments
        )
        for number in range(len(found))
    ]


@pytest.mark.parametrize("prepared", [False, True], ids=["records", "prepared"])
@pytest.mark.parametrize("task", TASKS)
def test_examples_are_the_records_in_order(task: Task, prepared: bool) -> None:
    """In kto, the mismatched completion is that of the record before; of the first, that of the last."""
    write_records(Path("in.jsonl"), task, 30)
    if prepared:
        prepare([Path("in.jsonl")], Path("out"), tokenizer=byte_tokenizer(), task=task)
    found = find("out" if prepared else "in.jsonl", task)
    records = [record(task, number) for number in range(30)]
    completions = [[each[name] for name in ("completion", "chosen", "rejected") if name in each] for each in records]
    if task == "kto":
        completions = [
            [own[0], before[0]] for own, before in zip(completions, completions[-1:] + completions, strict=False)
        ]
        assert found.labels.tolist() == [found.read(number).label for number in range(30)]
        assert found.labels.tolist() == [each["label"] for each in records]
    assert texts(found) == [
        tuple((each["prompt"] + own, own) for own in some) for each, some in zip(records, completions, strict=True)
    ]
    lengths = [[len(segment.tokens) for segment in found.read(number).segments] for number in range(30)]
    learned = [[int(segment.learned[1:].sum()) for segment in found.read(number).segments] for number in range(30)]
    assert found.lengths.tolist() == lengths
    assert found.learned.tolist() == learned
    own = 1 if task == "kto" else SEGMENTS[task]
    assert found.num_tokens == sum(sum(each[:own]) for each in lengths)
    assert found.prompt == records[0]["prompt"]
    assert (found.begin, found.is_prepared, found.num_cut) == ((), prepared, 0)
    assert ExampleBatches(found, sequence_length=100, batch_size=3, seed=0).held_out_counts(slice(None)).examples == 1


@pytest.mark.parametrize("length", [100, 20])
@pytest.mark.parametrize("task", TASKS)
def test_prepared_examples_are_those_of_the_records_and_survive_pickling(task: Task, length: int) -> None:
    write_records(Path("in.jsonl"), task, 50)
    prepare([Path("in.jsonl")], Path("out"), tokenizer=byte_tokenizer(), task=task)
    own, prepared = (find(name, task, length=length, skip_bad=True) for name in ("in.jsonl", "out"))
    assert (own.num_cut > 0, own.num_bad > 0) == (length == 20, length == 20)
    for each in (prepared, pickle.loads(pickle.dumps(prepared)), pickle.loads(pickle.dumps(own))):
        assert isinstance(each, Examples)
        for name in ("lengths", "learned", "labels", "numbers"):
            assert np.array_equal(getattr(own, name), getattr(each, name))
        assert (own.num_cut, own.num_bad, own.prompt) == (each.num_cut, each.num_bad, each.prompt)
        for number in range(len(own)):
            for one, other in zip(own.read(number).segments, each.read(number).segments, strict=True):
                assert one.tokens.tolist() == other.tokens.tolist()
                assert one.learned.tolist() == other.learned.tolist()
                assert len(one.tokens) <= length
    assert len(pickle.dumps(prepared)) < 20_000  # without the shards' content


def test_a_part_has_a_cycle_of_its_own_in_memory_as_in_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    write_records(Path("in.jsonl"), "kto", 40)
    monkeypatch.setattr(source_module, "PART_BYTES", 1000)
    made = prepare([Path("in.jsonl")], Path("out"), tokenizer=byte_tokenizer(), task="kto", part_bytes=1000)
    assert len(made.shards) == 4  # the last without an example
    own, prepared = find("in.jsonl", "kto"), find("out", "kto")
    assert texts(own) == texts(prepared)
    completions = [record("kto", number)["completion"] for number in range(40)]
    firsts = [int(shard.documents) // 2 for shard in made.shards]
    assert texts(own)[0][1][1] == completions[firsts[0] - 1]
    assert texts(own)[firsts[0]][1][1] == completions[firsts[0] + firsts[1] - 1]


def test_a_description_counts_examples_tokens_and_cuts() -> None:
    write_records(Path("in.jsonl"), "sft", 1200)
    found = find("in.jsonl", "sft", length=24, skip_bad=True)
    share = round(100 * found.num_learned / found.num_tokens)
    assert found.describe() == (
        f"{len(found):,} conversations, {found.num_tokens:,} tokens ({share}% learned), {found.num_cut:,} cut to 24, "
        f"{found.num_bad:,} left out"
    )
    write_records(Path("one.jsonl"), "dpo", 1)
    assert find("one.jsonl", "dpo").describe() == "1 pair, 17 tokens (65% learned)"


def test_a_cut_that_leaves_nothing_to_learn_is_refused_by_line_or_number() -> None:
    write_records(Path("in.jsonl"), "sft", 9)
    prepare([Path("in.jsonl")], Path("out"), tokenizer=byte_tokenizer(), task="sft")
    says = "has no token to learn among the first 8 of its .* tokens; give a longer --data.sequence-length"
    with pytest.raises(ValueError, match=rf"in\.jsonl: line 3 {says}"):
        find("in.jsonl", "sft", length=8)
    with pytest.raises(ValueError, match=f"out: example 3 {says}"):
        find("out", "sft", length=8)
    assert find("out", "sft", length=8, skip_bad=True).numbers.tolist() == [0, 1, 7, 8]


def test_more_records_than_a_run_reads_are_refused_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    write_records(Path("in.jsonl"), "kto", 40)
    monkeypatch.setattr(source_module, "MOST_BYTES", 1000)
    command = "weft data prepare in.jsonl --task kto --tokenizer FOLDER --output prepared"
    with pytest.raises(ValueError, match=f"bytes of records, more than the 1,000 .* with `{command}`"):
        find("in.jsonl", "kto")


def test_a_folder_prepared_for_another_task_or_by_another_tokenizer_is_refused(tmp_path: Path) -> None:
    write_records(Path("in.jsonl"), "dpo", 4)
    prepare([Path("in.jsonl")], Path("pairs"), tokenizer=byte_tokenizer(), task="dpo")
    with pytest.raises(ValueError, match="pairs was prepared for --task dpo, not kto; give --task dpo, or prepare the"):
        find("pairs", "kto")
    with pytest.raises(ValueError, match="pairs was prepared for --task dpo; give --task dpo"):
        find_data(Path("pairs"))
    (tmp_path / "text.txt").write_text("words of text")
    prepare([Path("text.txt")], Path("texts"), tokenizer=byte_tokenizer())
    with pytest.raises(ValueError, match="texts was prepared for --task pretrain, not sft; give --task pretrain, or"):
        find("texts", "sft")
    bytes_file = dict(byte_tokenizer().files)["tokenizer.json"]
    other = json.loads(bytes_file) | {"normalizer": {"type": "Lowercase"}}
    tokenizer = replace(byte_tokenizer(), files=(("tokenizer.json", json.dumps(other).encode()),))
    with pytest.raises(
        ValueError,
        match=r"another tokenizer than the model's, or another end token; .*`weft data prepare FILE_OR_FOLDER --task",
    ):
        find_examples(Path("pairs"), task="dpo", tokenizer=tokenizer, template=None, length=9)


def test_a_mixture_of_records_and_a_prepared_folder() -> None:
    write_records(Path("in.jsonl"), "sft", 40)
    prepare([Path("in.jsonl")], Path("out"), tokenizer=byte_tokenizer(), task="sft")
    options: dict[str, Any] = {"task": "sft", "tokenizer": byte_tokenizer(), "template": None, "length": 100}
    found = find_examples(None, ["in.jsonl=3", "out=1"], **options)
    assert isinstance(found, ExampleMixture)
    made = ExampleBatches(found, sequence_length=100, batch_size=4, seed=0, packed=False)
    for step in range(3):
        numbers = made.batch(step, slice(None)).examples.flatten().tolist()
        assert sum(number >= 40 for number in numbers) == 1
    assert found.describe().count("40 conversations") == 2
    assert found.tokenizer.end == BYTE_END
    assert check_share(found, 0, 1) == sum(file.stat().st_size for file in Path("out").glob("*-*.bin"))
    with pytest.raises(ValueError, match="both given; give one"):
        find_examples(Path("out"), ["out=1"], **options)
    with pytest.raises(ValueError, match="--task sft needs data"):
        find_examples(None, **options)


def test_bad_records_are_refused_by_line_or_left_out_and_counted() -> None:
    write_records(Path("in.jsonl"), "kto", 6)
    lines = Path("in.jsonl").read_text().splitlines()
    lines[2:2] = ['{"prompt": "a", "completion": "b", "label": "good"}', "{", ""]
    Path("in.jsonl").write_text("\n".join(lines))
    with pytest.raises(ValueError, match=r"in\.jsonl: line 3 has the label 'good'"):
        find("in.jsonl", "kto")
    found = find("in.jsonl", "kto", skip_bad=True)
    assert (len(found), found.num_bad) == (6, 2)
    assert ExampleRecords("kto", byte_tokenizer(), None).task == "kto"


@pytest.mark.parametrize("prepared", [False, True], ids=["records", "prepared"])
def test_a_pair_made_equal_by_the_cut_is_refused_or_left_out(prepared: bool) -> None:
    pairs = [("bcdX", "bcdYYY"), ("wx", "yz"), ("bcdZZZ", "bcdZZ")]
    rows = [{"prompt": "aaaa", "chosen": chosen, "rejected": rejected} for chosen, rejected in pairs]
    name = "in.jsonl"
    Path(name).write_text("".join(json.dumps(each) + "\n" for each in rows))
    if prepared:
        prepare([Path(name)], Path("out"), tokenizer=byte_tokenizer(), task="dpo")
        name = "out"
    with pytest.raises(ValueError, match="has chosen and rejected answers that are equal in their first 7 tokens"):
        find(name, "dpo", length=7)
    assert find(name, "dpo", length=7, skip_bad=True).numbers.tolist() == [1]
    assert len(find(name, "dpo", length=8, skip_bad=True)) == 2, "the first pair differs in its eighth token"
    assert len(find(name, "dpo")) == 3
