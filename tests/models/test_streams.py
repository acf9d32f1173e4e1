"""Streams of tokens, compared with lists of them; and batches read ahead."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from weft.models.data.batches import Prefetch
from weft.models.data.manifest import TokenShard
from weft.models.data.prepare import prepare
from weft.models.data.sources import find_data
from weft.models.data.streams import ShardStream, Stream
from weft.models.data.tokenizer import BYTE_END, byte_tokenizer, find_tokenizer

TEXTS = ["a", "bc", "defgh", "i" * 9, "jk", "l"]
TOKENS = [token for text in TEXTS for token in [*text.encode(), BYTE_END]]
ENDS = list(accumulate(len(text) + 1 for text in TEXTS))


def of_text(folder: Path) -> Stream:
    for number, text in enumerate(TEXTS):
        (folder / f"{number}.txt").write_text(text)
    (folder / "0-is-empty.txt").touch()
    return find_data(folder).open()  # type: ignore[union-attr]


def of_shards(folder: Path) -> Stream:
    (folder / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    made = prepare([folder / "in.jsonl"], folder / "out", tokenizer=byte_tokenizer(), part_bytes=10)
    assert len(made.shards) > 3 and not all(shard.tokens for shard in made.shards)
    return find_data(folder / "out").open()  # type: ignore[union-attr]


@pytest.mark.parametrize("make", [of_text, of_shards])
def test_a_stream_reads_any_tokens_and_knows_their_documents(make: Callable[[Path], Stream], tmp_path: Path) -> None:
    stream = make(tmp_path)
    assert stream.num_tokens == len(TOKENS)
    for start in range(len(TOKENS)):
        assert stream.document_start(start) == max([0, *(end for end in ENDS if end <= start)])
        for stop in range(start + 1, len(TOKENS) + 1):
            assert stream.read(start, stop).tolist() == TOKENS[start:stop]
            last = next(end for end in ENDS if end >= stop)
            assert stream.document_ends(start, stop).tolist() == [end for end in ENDS if start < end <= last]


def test_of_a_shard_that_is_larger_than_memory_a_row_is_read(tmp_path: Path) -> None:
    """Reads a row of a sparse file with twice the bytes of this machine's memory."""
    nbytes = 2 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    count, row = nbytes // 2, np.arange(1000, 1064, dtype="<u2")
    shard = TokenShard(number=0, tokens=count, documents=2, sha256=("", ""), empty=0, skipped=(), bad=0, prompt="")
    with (tmp_path / shard.names[0]).open("wb") as file:
        file.truncate(nbytes)
        for place in (0, count // 2, count - 64):
            file.seek(2 * place)
            file.write(row.tobytes())
    (tmp_path / shard.names[1]).write_bytes(np.array([count // 2, count], dtype="<u8").tobytes())
    stream = ShardStream(tmp_path, [shard], "uint16", 2**16)
    assert stream.num_tokens == count
    for place in (0, count // 2, count - 64):
        assert stream.read(place, place + 64).tolist() == row.tolist()
    assert stream.document_start(count - 1) == count // 2
    assert stream.document_ends(0, count).tolist() == [count // 2, count]


@pytest.mark.exhaustive
def test_tokens_above_65535_are_read_as_they_are(tmp_path: Path) -> None:
    words = [f"w{number}" for number in range(70000)]
    model = tokenizers.models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="w0")
    wide = tokenizers.Tokenizer(model)
    wide.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    wide.save(str(tmp_path / "tokenizer.json"))
    texts = [[69998, 65536, 1], [65535], [3, 65537, 69999]]
    (tmp_path / "in.jsonl").write_text(
        "".join(json.dumps({"text": " ".join(words[number] for number in text)}) + "\n" for text in texts)
    )
    end = 69997
    tokenizer = find_tokenizer(tmp_path, words[end])
    assert prepare([tmp_path / "in.jsonl"], tmp_path / "out", tokenizer=tokenizer, part_bytes=20).dtype == "uint32"
    stream = find_data(tmp_path / "out").open()  # type: ignore[union-attr]
    whole = [token for text in texts for token in [*text, end]]
    assert stream.read(0, stream.num_tokens).tolist() == whole
    assert [stream.read(place, place + 1).item() for place in range(len(whole))] == whole
    assert stream.document_ends(0, len(whole)).tolist() == [4, 6, 10]


def test_the_next_batch_is_read_while_a_step_is_computed() -> None:
    read: list[tuple[int, int]] = []
    ahead = threading.Event()

    def reading(step: int) -> str:
        read.append((step, threading.get_ident()))
        if step == 1:
            ahead.set()
        if step == 4:
            raise OSError("the disk is gone")
        return f"batch {step}"

    begun = Prefetch(lambda step: threading.get_ident())
    begun.begin(3)
    assert begun(3) != threading.get_ident()
    batches = Prefetch(reading)
    assert batches(0) == "batch 0"
    assert ahead.wait(30)  # before it is asked for
    assert [batches(1), batches(2)] == ["batch 1", "batch 2"]
    assert batches(7) == "batch 7"  # not the batch read ahead
    with pytest.raises(OSError, match="the disk is gone"):
        batches(4)
    here = threading.get_ident()
    assert [step for step, thread in read if thread == here] == [0, 7, 4]
    assert {1, 2} <= {step for step, thread in read if thread != here}
    assert len({step for step, _ in read}) == len(read)  # each once
    assert batches.waited > 0
