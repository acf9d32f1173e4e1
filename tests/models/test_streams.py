"""Streams of tokens, beside the list of them; and batches that are read ahead."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

import pytest
from weft.models.data.prefetch import Prefetch
from weft.models.data.prepare import prepare
from weft.models.data.sources import find_data
from weft.models.data.streams import Stream
from weft.models.data.tokenizer import BYTE_END, byte_tokenizer

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


def test_what_the_next_step_needs_is_read_while_a_step_is_computed() -> None:
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
    assert batches(7) == "batch 7"  # not the one that was begun
    with pytest.raises(OSError, match="the disk is gone"):
        batches(4)
    here = threading.get_ident()
    assert [step for step, thread in read if thread == here] == [0, 7, 4]
    assert {1, 2} <= {step for step, thread in read if thread != here}
    assert len({step for step, _ in read}) == len(read)  # each once
    assert batches.waited > 0
