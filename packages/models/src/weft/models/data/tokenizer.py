"""Tokenizers as values: their files, what they make of a text, and how those files are found and made."""

from __future__ import annotations

import codecs
import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..terminal import install_command

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
SPECIAL_FILE = "special_tokens_map.json"
CHAT_FILE = "chat_template.jinja"  # `Tokenizer` has it in tokenizer_config.json, where transformers looks as well
# What transformers makes a tokenizer of, in whatever folder it saved one. It is data: no name of code is among them.
FILES = (
    TOKENIZER_FILE,
    CONFIG_FILE,
    SPECIAL_FILE,
    CHAT_FILE,
    "chat_template.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
)
END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")  # where nothing says how a document ends
BYTE_END = 256  # the token after each document, where a token is a byte
BYTE_VOCAB_SIZE = 257  # odd: it shards unevenly


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer: JSON files as (name, content), the token that ends a document, and how many tokens there are.

    It is what is pickled; the library reads the files where a text is first encoded.
    """

    files: tuple[tuple[str, bytes], ...]
    end: int
    vocab_size: int

    @cached_property
    def is_bytes(self) -> bool:
        """Whether a token is a byte: then no library is asked."""
        return _is_byte_file(dict(self.files)[TOKENIZER_FILE])

    @property
    def sha256(self) -> str:
        """Of tokenizer.json and of the end: two with the same give the same tokens."""
        return hashlib.sha256(f"{self.end}\n".encode() + dict(self.files)[TOKENIZER_FILE]).hexdigest()

    def encode(self, text: str) -> list[int]:
        """The tokens of a text. Names of special tokens in it are text as any other."""
        return list(self.encode_each([text])[0])

    def encode_each(self, texts: Sequence[str]) -> Sequence[Sequence[int]]:
        """The tokens of each text; where they are bytes, as such."""
        if self.is_bytes:
            return [text.encode() for text in texts]
        return [found.ids for found in self._library.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of the tokens; what is not UTF-8 becomes U+FFFD, and of bytes the end as well."""
        return "".join(self.decode_each(tokens))

    def decode_each(self, tokens: Iterable[int]) -> Iterator[str]:
        """The text of the tokens in pieces, each as soon as its last token is there; as `decode`."""
        return _decode_bytes(tokens) if self.is_bytes else _decode_pieces(self._library, tokens)

    def num_bytes(self, tokens: Sequence[int]) -> int:
        """Bytes of the text of the tokens, in UTF-8. The end of a document has none; a character that is cut has those of U+FFFD."""
        text = [token for token in tokens if token != self.end]
        return len(text) if self.is_bytes else len(self._library.decode(text, skip_special_tokens=False).encode())

    @cached_property
    def _library(self) -> Any:
        opened = open_library().Tokenizer.from_str(dict(self.files)[TOKENIZER_FILE].decode())
        opened.encode_special_tokens = True  # a document that says <|endoftext|> does not end there
        opened.no_truncation()
        opened.no_padding()
        return opened

    def __getstate__(self) -> dict[str, Any]:
        return {name: vars(self)[name] for name in ("files", "end", "vocab_size")}


def open_library() -> Any:
    """The package `tokenizers`. Raises ValueError where it is not installed."""
    if find_spec("tokenizers") is None:
        raise ValueError(f"tokenizers is not installed, which reads tokenizer.json; {install_command('tokenizers')}")
    return import_module("tokenizers")


def byte_tokenizer() -> Tokenizer:
    """The tokenizer whose tokens are the bytes of a text in UTF-8, as files that `tokenizers` and transformers read."""
    files = ((TOKENIZER_FILE, _byte_file()), (CONFIG_FILE, config_file(END_NAMES[0])))
    return Tokenizer(files, BYTE_END, BYTE_VOCAB_SIZE)


def find_tokenizer(path: Path | None, end: str | None = None) -> Tokenizer:
    """The tokenizer of a `tokenizer.json`, or of a folder that has one, such as a checkpoint; that of bytes where None.

    end: the token that ends a document; where None, the folder's eos_token, or the first there is of END_NAMES.
    Raises ValueError for a path without a tokenizer, files that are none, an end that it has not, and without the library.
    """
    if path is None:
        if end is not None:
            raise ValueError(f"the end of a document is {end!r}, but bytes end with {BYTE_END}; give a tokenizer too")
        return byte_tokenizer()
    folder, file = (path, path / TOKENIZER_FILE) if path.is_dir() else (path.parent, path)
    if not file.is_file():
        raise ValueError(
            f"{path} has no {TOKENIZER_FILE}; give one that the tokenizers library wrote, or a folder where "
            f"transformers saved a fast tokenizer"
        )
    content = file.read_bytes()
    if _is_byte_file(content) and end is None:
        return byte_tokenizer()
    library = open_library()
    try:
        vocabulary: dict[str, int] = library.Tokenizer.from_str(content.decode()).get_vocab()
    except Exception as error:  # the library raises nothing more precise for a file that it cannot read
        raise ValueError(f"{file} is no tokenizer: {error}; save it again") from None
    names = (CONFIG_FILE, SPECIAL_FILE) if folder == path else ()
    beside = {name: _read_object(folder / name) for name in names if (folder / name).is_file()}
    config = beside.setdefault(CONFIG_FILE, json.loads(config_file("")))
    eos = config.get("eos_token")
    token = end or (eos.get("content") if isinstance(eos, dict) else eos)
    token = token or next((name for name in END_NAMES if name in vocabulary), None)
    if token not in vocabulary:
        raise ValueError(
            f"{file} has no {'token for the end of a document' if token is None else f'token {token!r}'}; name the one that "
            f"is to follow each document with --end"
        )
    for each in beside.values():  # as transformers is to know it, too
        each["eos_token"] = token
    if folder == path and (folder / CHAT_FILE).is_file():
        config["chat_template"] = (folder / CHAT_FILE).read_text(encoding="utf-8")
    files = {name: _as_file(each) for name, each in beside.items()} | {TOKENIZER_FILE: content}
    return Tokenizer(tuple(sorted(files.items())), vocabulary[token], max(vocabulary.values()) + 1)


def files_beside(folder: Path) -> dict[str, bytes]:
    """The files of a tokenizer that stand in a model's folder, as they are, by name; none where that is no folder."""
    return {name: (folder / name).read_bytes() for name in FILES if (folder / name).is_file()}


def config_file(end: str) -> bytes:
    """What transformers asks beside tokenizer.json."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": end,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
    }
    return _as_file(config)


def _as_file(value: Any) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
        if isinstance(value, dict):
            return value
    except ValueError:
        pass
    raise ValueError(f"{path} is not a JSON object; save the tokenizer again")


def _is_byte_file(content: bytes) -> bool:
    """Whether a tokenizer.json is that of bytes, by whatever program it was written once more."""
    if len(content) > 4 * len(_byte_file()):
        return False
    try:
        return bool(json.loads(content) == json.loads(_byte_file()))
    except ValueError:
        return False


@lru_cache(maxsize=1)
def _byte_file() -> bytes:
    """A tokenizer.json of bytes: byte-level BPE without merges, whose ids are the bytes, and the end."""
    # GPT-2's name of a byte: itself where it is printable, otherwise the next of 256, 257, ... (Radford et al. 2019)
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    names = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    file = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": BYTE_END, "content": END_NAMES[0], **plain, "special": True}],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {"type": "BPE", "vocab": {names[byte]: byte for byte in range(256)}, "merges": []},
    }
    return _as_file(file)


def _decode_bytes(tokens: Iterable[int]) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for token in tokens:
        yield decoder.decode(bytes([token]) if token < BYTE_END else b"\xff")
    yield decoder.decode(b"", final=True)


def _decode_pieces(library: Any, tokens: Iterable[int]) -> Iterator[str]:
    """Some decoders look at a token's neighbours, so each piece is decoded behind the piece before it."""
    before: list[int] = []
    pending: list[int] = []
    for token in tokens:
        pending.append(token)
        shown = library.decode(before, skip_special_tokens=False)
        text = library.decode(before + pending, skip_special_tokens=False)
        if text.endswith("\ufffd"):  # perhaps the first bytes of a character
            yield ""
            continue
        yield text[len(shown) :]
        before, pending = pending, []
    if pending:
        shown = library.decode(before, skip_special_tokens=False)
        yield library.decode(before + pending, skip_special_tokens=False)[len(shown) :]
