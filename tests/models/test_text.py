"""Text files as a corpus, and batches of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from weft.mesh import Layout, ProcessMesh, Shard
from weft.models.data.batches import Batches, Rows
from weft.models.data.text import Corpus, find_corpus
from weft.models.data.tokenizer import BYTE_END, byte_tokenizer

encode, decode, decode_each = byte_tokenizer().encode, byte_tokenizer().decode, byte_tokenizer().decode_each


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a.txt").write_text("first ä")
    (tmp_path / ".hidden").write_bytes(b"\xff")
    return find_corpus(tmp_path)


def test_a_corpus_is_its_documents_in_order_each_with_its_end(corpus: Corpus) -> None:
    batches = Batches(corpus, sequence_length=7, batch_size=1, seed=0)
    parts = [batches.batch(0, slice(None)), batches.held_out(slice(None))]  # there are two samples
    text = [*encode("first ä"), BYTE_END, *encode("second"), BYTE_END]
    assert [part.tokens[0].tolist() for part in parts] == [text[:7], text[7:14]]
    assert [part.targets[0].tolist() for part in parts] == [text[1:8], text[8:15]]


def test_files_without_text_in_a_folder_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "chapter.txt").write_text("Call me Ishmael.")
    (tmp_path / "cover.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    found = find_corpus(tmp_path)
    assert (found.files, found.skipped) == ((tmp_path / "chapter.txt",), (tmp_path / "cover.png",))
    assert found.num_bytes == len("Call me Ishmael.")


@pytest.mark.parametrize(
    ("text", "prompt"),
    [
        pytest.param("Call me Ishmael.", "Call me ", id="words"),
        pytest.param("\ufeff\n\n  Wörter\n", "Wörter ", id="one-word"),
        pytest.param("我" * 100, "我" * 39 + " ", id="no-spaces"),
        pytest.param("a\x1b[31m b", "a\ufffd[31m b ", id="controls"),
        pytest.param(" \n", " ", id="none"),
    ],
)
def test_a_sample_begins_with_the_texts_own_words(tmp_path: Path, text: str, prompt: str) -> None:
    (tmp_path / "0").touch()
    (tmp_path / "1").write_text(text)
    assert find_corpus(tmp_path).prompt == prompt


def test_a_sample_of_python_begins_as_python() -> None:
    assert find_corpus(None).prompt == "def "


def test_text_survives_its_tokens() -> None:
    assert decode(encode("wärp\n")) == "wärp\n"
    assert decode([ord("a"), BYTE_END]) == "a\ufffd"
    assert list(decode_each(encode("aä") + encode("ä")[:1])) == ["a", "", "ä", "", "\ufffd"]


def both(rows: Rows) -> torch.Tensor:
    return torch.cat((rows.tokens, rows.targets), 1)


def test_anchor_32_the_order_of_samples_does_not_depend_on_the_mesh(corpus: Corpus) -> None:
    batches = Batches(corpus, sequence_length=2, batch_size=5, seed=1)
    for step in range(4):  # across epochs: there are 6 samples
        whole = both(batches.batch(step, slice(None)))
        for dp in (2, 3, 4, 8):
            layout = Layout(ProcessMesh.grid(dp=dp), {"dp": Shard(0)})
            rows = [layout.local_slices((5, 2), rank)[0] for rank in range(dp)]
            parts = [both(batches.batch(step, part)) for part in rows]
            assert torch.equal(torch.cat(parts), whole)


def test_an_epoch_visits_every_sample_once_and_the_next_in_another_order(corpus: Corpus) -> None:
    batches = Batches(corpus, sequence_length=2, batch_size=1, seed=1)
    count = batches.num_samples
    seen = [tuple(batches.batch(step, slice(None)).tokens[0].tolist()) for step in range(2 * count)]
    assert sorted(seen[:count]) == sorted(seen[count:])
    assert len(set(seen[:count])) == count
    assert seen[:count] != seen[count:]


@pytest.mark.parametrize(
    ("samples", "held_out"),
    [
        pytest.param(2, [1], id="two"),
        pytest.param(39, [19], id="fewer-than-forty"),
        pytest.param(60, [10, 30, 50], id="one-in-twenty"),
        pytest.param(5120, list(range(20, 5120, 40)), id="at-most-128"),
    ],
)
@pytest.mark.parametrize("seed", [0, 1])
def test_held_out_samples_are_never_trained_on(samples: int, held_out: list[int], seed: int, tmp_path: Path) -> None:
    """In a text whose samples are their own numbers."""
    text = "".join(f"{i:06}" for i in range(samples))
    (tmp_path / "numbers.txt").write_text(text)
    batches = Batches(find_corpus(tmp_path), sequence_length=6, batch_size=8, seed=seed)
    kept = [int(decode(tokens.tolist())) for tokens in batches.held_out(slice(None)).tokens]
    assert kept == held_out
    assert batches.num_held_out == len(held_out)
    steps = -(-batches.num_samples // 8)
    trained = {int(decode(row.tolist())) for step in range(steps) for row in batches.batch(step, slice(None)).tokens}
    assert trained == set(range(samples)) - set(held_out)
