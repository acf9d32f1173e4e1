"""`Tokenizer`: files as a value, encoding and decoding. `find_tokenizer` reads the files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from itertools import chain, takewhile
from pathlib import Path
from typing import Any

from ..safe_files import parse_json, read_plain
from ..terminal import install_command
from .byte_tokens import (
    BYTE_END,
    BYTE_VOCAB_SIZE,
    END_NAME,
    as_file,
    byte_file,
    decode_bytes,
    encode_bytes_with_places,
    is_byte_file,
)
from .tokenizer_files import CLASSES, Changes, changes_of, check_types, special_names, token_of

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
SPECIAL_FILE = "special_tokens_map.json"
ADDED_FILE = "added_tokens.json"
CHAT_FILE = "chat_template.jinja"
CHAT_FOLDER = "additional_chat_templates"  # NAME.jinja is the template NAME
# The files from which transformers makes a tokenizer, in any folder. All are data, none is code.
FILES = (
    TOKENIZER_FILE,
    CONFIG_FILE,
    SPECIAL_FILE,
    CHAT_FILE,
    "chat_template.json",
    ADDED_FILE,
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "sentencepiece.model",
    "tekken.json",
)
# The tokens tried in turn as the end of a document, if no file names the end.
END_NAMES = (END_NAME, "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
MODEL_FILE = "config.json"
_OBJECTS = (CONFIG_FILE, SPECIAL_FILE, ADDED_FILE)  # files of JSON objects with changes to tokenizer.json


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer, held as files. Only the fields are pickled; `tokenizers` parses the files at the first use."""

    files: tuple[tuple[str, bytes], ...]  # (name, content)
    end: int  # the token after a document
    vocab_size: int  # the number of tokens

    @cached_property
    def is_bytes(self) -> bool:
        """Whether a token is a byte; the library is then not used."""
        return is_byte_file(dict(self.files)[TOKENIZER_FILE]) and not self._changes

    @property
    def sha256(self) -> str:
        """SHA-256 of the end, of tokenizer.json, and of the changes by further files: equal sums give equal tokens."""
        changed = f"{self._changes}\n" if self._changes else ""
        return hashlib.sha256(f"{self.end}\n{changed}".encode() + dict(self.files)[TOKENIZER_FILE]).hexdigest()

    @cached_property
    def begin(self) -> tuple[int, ...]:
        """The tokens put before a prompt by `encode`: the BOS token, or none if the tokenizer adds none."""
        if self.is_bytes:
            return ()
        encoded = self._library.encode("a")
        added = takewhile(lambda pair: pair[1], zip(encoded.ids, encoded.special_tokens_mask, strict=True))
        return tuple(token for token, _ in added)

    @cached_property
    def bos(self) -> int | None:
        """The bos_token of the files, whether or not added by `encode`; None without a bos_token."""
        name = token_of(json.loads(dict(self.files).get(CONFIG_FILE, b"{}")).get("bos_token"))
        if name is None or self.is_bytes:
            return None
        found: int | None = self._library.token_to_id(name)
        return found

    def encode(self, text: str) -> list[int]:
        """The tokens of a prompt, as by transformers' AutoTokenizer.

        Names of special tokens in the text become these tokens. BOS comes first, if the tokenizer adds BOS.
        """
        if self.is_bytes:
            parts = [list(part.encode()) for part in text.split(END_NAMES[0])]
            return [*parts[0], *chain.from_iterable([BYTE_END, *part] for part in parts[1:])]
        self._library.encode_special_tokens = False
        found: list[int] = self._library.encode(text).ids
        return found

    def encode_with_places(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """The tokens of a text that names all special tokens, as a rendered chat; and by token the place (start, stop)
        of the token's characters in the text.

        Names of special tokens become these tokens, and no token is added. Several tokens of a single character all
        have the character's place. The place of a token of spaces may be empty, at the end of the spaces.
        """
        if self.is_bytes:
            return encode_bytes_with_places(text)
        self._library.encode_special_tokens = False
        encoded = self._library.encode(text, add_special_tokens=False)
        return encoded.ids, encoded.offsets

    @cached_property
    def end_name(self) -> str:
        """The text that names the token `end`."""
        if self.is_bytes:
            return END_NAMES[0]
        name: str = self._library.id_to_token(self.end)
        return name

    @cached_property
    def special_names(self) -> dict[str, str | list[str]]:
        """{use: name of the special token}, as transformers' variables for chat templates: bos_token, ..."""
        return special_names(_settings_of(dict(self.files)))

    @cached_property
    def chat_templates(self) -> dict[str, str]:
        """The chat templates of tokenizer_config.json by their names; a template without a name is "default".

        Raises ValueError for a chat_template of another form.
        """
        found = json.loads(dict(self.files).get(CONFIG_FILE, b"{}")).get("chat_template")
        if isinstance(found, list) and all(isinstance(each, dict) for each in found):
            found = {each.get("name"): each.get("template") for each in found}
        named = found if isinstance(found, dict) else {} if found is None else {"default": found}
        if not all(isinstance(each, str) for item in named.items() for each in item):
            raise ValueError(
                f"{CONFIG_FILE}: chat_template is neither a text nor texts with names; mend the file, or give a "
                f"template with --data.template FILE"
            )
        return named

    def encode_document(self, text: str) -> list[int]:
        """The tokens of a document: names of special tokens count as plain text, and no token is added."""
        return list(self.encode_each([text])[0])

    def encode_each(self, texts: Sequence[str]) -> Sequence[Sequence[int]]:
        """The tokens of each document; as bytes, where tokens are bytes."""
        if self.is_bytes:
            return [text.encode() for text in texts]
        self._library.encode_special_tokens = True  # a document that says <|endoftext|> does not end there
        return [found.ids for found in self._library.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of the tokens. Bytes not in UTF-8, and the end token of the byte tokenizer, become U+FFFD."""
        return "".join(self.decode_each(tokens))

    def decode_each(self, tokens: Iterable[int], *, after: Sequence[int] = ()) -> Iterator[str]:
        """The text of the tokens in pieces, each yielded as early as possible; joined, the pieces are `decode`'s text.

        tokens: may be drawn while pieces are read.
        after: the earlier tokens, as a prompt, whose text is not repeated. Some decoders drop the space before the
            first word of a text; after a prompt the space stays.
        """
        return decode_bytes(tokens) if self.is_bytes else _decode_pieces(self._library, tokens, after)

    def num_bytes(self, tokens: Sequence[int]) -> int:
        """The number of bytes of the tokens' text, in UTF-8; for the bits per byte printed at the end of a run.

        Tokens added around a document count nothing; a cut character counts as U+FFFD.
        """
        added = {self.end, self.bos, *self.begin}
        text = [token for token in tokens if token not in added]
        return len(text) if self.is_bytes else len(self._library.decode(text, skip_special_tokens=False).encode())

    @cached_property
    def _changes(self) -> Changes:
        return _changes_of(dict(self.files))

    @cached_property
    def _library(self) -> Any:
        opened = self._changes.apply(open_library(), dict(self.files)[TOKENIZER_FILE])
        opened.no_truncation()
        opened.no_padding()
        return opened

    def __getstate__(self) -> dict[str, Any]:
        return {name: vars(self)[name] for name in ("files", "end", "vocab_size")}


def open_library() -> Any:
    """The package `tokenizers`. Raises ValueError where the package is not installed."""
    if find_spec("tokenizers") is None:
        raise ValueError(f"tokenizers is not installed, which reads tokenizer.json; {install_command('tokenizers')}")
    return import_module("tokenizers")


def byte_tokenizer() -> Tokenizer:
    """The tokenizer whose tokens are the bytes of a text in UTF-8, with files for `tokenizers` and transformers."""
    files = ((TOKENIZER_FILE, byte_file()), (CONFIG_FILE, config_file(END_NAMES[0])))
    return Tokenizer(files, BYTE_END, BYTE_VOCAB_SIZE)


def find_tokenizer(path: Path | None, end: str | None = None) -> Tokenizer:
    """The tokenizer of a `tokenizer.json`, or of a folder with this file, as a checkpoint; None: the byte tokenizer.

    end: the name of the token after a document. None: the folder's eos_token, or else the first of END_NAMES in the
        vocabulary.
    Raises ValueError for a path without a tokenizer, for damaged files, for an end absent from the vocabulary, and
    without the library.
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
    names = FILES if folder == path else (TOKENIZER_FILE,)
    files = {name: read_plain(folder / name) for name in names if (folder / name).is_file()}
    content = read_plain(file)
    files[TOKENIZER_FILE] = byte_file() if is_byte_file(content) else content
    settings = {name: _object_of(folder / name, files[name]) for name in _OBJECTS if name in files}
    config = settings.setdefault(CONFIG_FILE, json.loads(config_file("")))
    if folder == path:
        _set_class(config, folder, has_own=CONFIG_FILE in files)
        if files.pop(CHAT_FILE, None) is not None or (folder / CHAT_FOLDER).is_dir():
            config["chat_template"] = _chat_templates(folder, config.get("chat_template"))
    vocabulary = _vocabulary(file, files | {name: as_file(each) for name, each in settings.items()})
    token = end or token_of(config.get("eos_token"))
    token = token or next((name for name in END_NAMES if name in vocabulary), None)
    if token not in vocabulary:
        raise ValueError(
            f"{file} has no {'token for the end of a document' if token is None else f'token {token!r}'}; name the "
            f"token that is to follow each document with --end"
        )
    for name in {CONFIG_FILE, SPECIAL_FILE} & settings.keys():  # tells transformers the end
        settings[name]["eos_token"] = token
    files |= {name: as_file(each) for name, each in settings.items()}
    return Tokenizer(tuple(sorted(files.items())), vocabulary[token], max(vocabulary.values()) + 1)


def with_template(tokenizer: Tokenizer, source: str) -> Tokenizer:
    """A copy of the tokenizer with `source` as the only chat template."""
    files = dict(tokenizer.files)
    config = json.loads(files.get(CONFIG_FILE, b"{}")) | {"chat_template": source}
    files.pop("chat_template.json", None)
    files[CONFIG_FILE] = as_file(config)
    return Tokenizer(tuple(sorted(files.items())), tokenizer.end, tokenizer.vocab_size)


def with_named_templates(files: dict[str, bytes], folder: Path) -> dict[str, bytes]:
    """A folder's files by name, with the named chat templates (`additional_chat_templates/NAME.jinja`) merged in.

    All templates, chat_template.jinja included, become the field chat_template of tokenizer_config.json, also read by
    transformers; chat_template.jinja is then left out. Without the folder additional_chat_templates, all files stay
    unchanged.
    """
    if not (folder / CHAT_FOLDER).is_dir():
        return files
    config = _object_of(folder / CONFIG_FILE, files.get(CONFIG_FILE, b"{}"))
    config["chat_template"] = _chat_templates(folder, config.get("chat_template"))
    return {name: content for name, content in files.items() if name != CHAT_FILE} | {CONFIG_FILE: as_file(config)}


def _chat_templates(folder: Path, configured: Any) -> Any:
    """The chat templates of a folder in the form of tokenizer_config.json: a single template as text, several as a
    list with names.

    configured: the chat_template of tokenizer_config.json, which counts in a folder without files of templates.
    """
    found = {}
    if (folder / CHAT_FILE).is_file():
        found["default"] = _text_of(folder / CHAT_FILE)
    for file in sorted((folder / CHAT_FOLDER).glob("*.jinja")):
        found[file.stem] = _text_of(file)
    if not found:
        return configured
    if list(found) == ["default"]:
        return found["default"]
    return [{"name": name, "template": template} for name, template in found.items()]


def _text_of(path: Path) -> str:
    try:
        return read_plain(path).decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 (byte {error.start} of the file); save it again") from None


def _set_class(config: dict[str, Any], folder: Path, *, has_own: bool) -> None:
    """Where tokenizer_config.json names no class, set the class by the model's config.json, as transformers does."""
    file = folder / MODEL_FILE
    if (has_own and config.get("tokenizer_class") is not None) or not file.is_file():
        return
    model = _object_of(file, read_plain(file))
    found = model.get("tokenizer_class") or CLASSES.get(str(model.get("model_type")))
    if found is not None:
        config["tokenizer_class"] = found


def _settings_of(files: Mapping[str, bytes]) -> dict[str, dict[str, Any]]:
    """{name: content} of the files with changes to tokenizer.json."""
    return {name: json.loads(files[name]) for name in _OBJECTS if name in files}


def _changes_of(files: Mapping[str, bytes]) -> Changes:
    content, settings = json.loads(files[TOKENIZER_FILE]), _settings_of(files)
    check_types(content, settings)
    return changes_of(content, settings)


def _vocabulary(file: Path, files: Mapping[str, bytes]) -> dict[str, int]:
    """{token: number}. Raises ValueError for a file without a tokenizer, and without the library."""
    _object_of(file, files[TOKENIZER_FILE])
    try:
        changes = _changes_of(files)
    except ValueError as error:
        raise ValueError(f"{file.parent} has no tokenizer that can be used: {error}") from None
    if is_byte_file(files[TOKENIZER_FILE]) and not changes:
        return {**json.loads(byte_file())["model"]["vocab"], END_NAMES[0]: BYTE_END}
    library = open_library()
    try:
        vocabulary: dict[str, int] = changes.apply(library, files[TOKENIZER_FILE]).get_vocab()
    except Exception as error:  # the library raises no more precise class for an unreadable file
        raise ValueError(f"{file} is no tokenizer: {error}; save it again") from None
    return vocabulary


def config_file(end: str) -> bytes:
    """A new tokenizer_config.json, which transformers needs beside tokenizer.json.

    end: the name of the token after a document.
    """
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": end,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
    }
    return as_file(config)


def _object_of(path: Path, content: bytes) -> dict[str, Any]:
    try:
        return parse_json(content, "the file", "save it again")
    except ValueError as error:
        raise ValueError(f"{path} is no tokenizer: {error}") from None


def _is_byte(token: str | None) -> bool:
    return token is not None and len(token) == 6 and token.startswith("<0x")


def _decode_pieces(library: Any, tokens: Iterable[int], after: Sequence[int]) -> Iterator[str]:
    """The text of tokens in pieces, each decoded after the piece before, since some decoders look at a token's
    neighbours.

    A decoder joins neighbouring tokens of single bytes, such as <0x0A>: a piece does not end with such a token.
    """
    decoded = list(after)
    pending: list[int] = []
    for token in tokens:
        pending.append(token)
        text_before = library.decode(decoded, skip_special_tokens=False)
        text = library.decode(decoded + pending, skip_special_tokens=False)
        if text.endswith("\ufffd") or _is_byte(library.id_to_token(token)):  # perhaps the first bytes of a character
            yield ""
            continue
        yield text[len(text_before) :]
        decoded, pending = pending, []
    if pending:
        text_before = library.decode(decoded, skip_special_tokens=False)
        yield library.decode(decoded + pending, skip_special_tokens=False)[len(text_before) :]


def have_same_tokens(first: Tokenizer, second: Tokenizer) -> bool:
    """Whether two tokenizers give the same tokens.

    Settings of truncation and padding, and the end token of documents, may differ.
    """
    contents = [dict(each.files)[TOKENIZER_FILE] for each in (first, second)]
    if contents[0] == contents[1]:
        return True
    settings = [
        {name: value for name, value in json.loads(content).items() if name not in ("truncation", "padding")}
        for content in contents
    ]
    return bool(settings[0] == settings[1])
