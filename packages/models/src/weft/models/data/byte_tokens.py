"""The tokenizer with the bytes of a text in UTF-8 as tokens: tokenizer.json, encoding and decoding."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any

END_NAME = "<|endoftext|>"  # in a text, the name of BYTE_END
BYTE_END = 256  # the token after each document, where a token is a byte
BYTE_VOCAB_SIZE = 257  # the bytes and BYTE_END; an odd number: every sharding of the vocabulary is uneven


def is_byte_file(content: bytes) -> bool:
    """Whether a tokenizer.json is the tokenizer of bytes, also when rewritten by another program."""
    if len(content) > 4 * len(byte_file()):
        return False
    try:
        return bool(json.loads(content) == json.loads(byte_file()))
    except (ValueError, RecursionError):
        return False


@lru_cache(maxsize=1)
def byte_file() -> bytes:
    """The tokenizer.json of bytes: byte-level BPE without merges. Ids are the bytes, and BYTE_END."""
    # GPT-2's name of a byte: itself where it is printable, otherwise the next of 256, 257, ... (Radford et al. 2019)
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    unprintable = [byte for byte in range(256) if byte not in printable]
    names = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(unprintable)}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    file = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": BYTE_END, "content": END_NAME, **plain, "special": True}],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {"type": "BPE", "vocab": {names[byte]: byte for byte in range(256)}, "merges": []},
    }
    return as_file(file)


def encode_bytes_with_places(text: str) -> tuple[list[int], list[tuple[int, int]]]:
    """See `Tokenizer.encode_with_places`. A token is a byte, with the place of its character, or BYTE_END."""
    tokens: list[int] = []
    places: list[tuple[int, int]] = []
    start = 0
    for number, part in enumerate(text.split(END_NAME)):
        if number:
            tokens.append(BYTE_END)
            places.append((start, start + len(END_NAME)))
            start += len(END_NAME)
        for place, character in enumerate(part, start):
            content = character.encode()
            tokens += content
            places += [(place, place + 1)] * len(content)
        start += len(part)
    return tokens, places


def decode_bytes(tokens: Iterable[int]) -> Iterator[str]:
    """See `Tokenizer.decode_each`. A piece for each token, empty inside a character, and a last piece for the rest.

    BYTE_END and bytes that are not UTF-8 become U+FFFD.
    """
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for token in tokens:
        yield decoder.decode(bytes([token]) if token < BYTE_END else b"\xff")
    yield decoder.decode(b"", final=True)


def as_file(value: Any) -> bytes:
    """The content of a JSON file of a tokenizer."""
    return (json.dumps(value, indent=2) + "\n").encode()
