"""Checks the types of values in a tokenizer's files: a value of a wrong type would change tokens silently."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..documents import as_type
from .changes import FLAGS, SPECIAL_NAMES

_OBJECT = Mapping[str, Any] | None
_BOOL = bool | None
_NAMED: Mapping[str, Any] = {  # special tokens named in tokenizer_config.json and special_tokens_map.json
    **dict.fromkeys(SPECIAL_NAMES, str | Mapping[str, Any] | None),
    "additional_special_tokens": tuple[str | Mapping[str, Any], ...] | None,
}
_FLAGS: Mapping[str, Any] = dict.fromkeys(FLAGS, bool)
_TYPES: Mapping[str, Mapping[str, Any]] = {
    "tokenizer.json": {
        "added_tokens": tuple[Mapping[str, Any], ...],
        "pre_tokenizer": _OBJECT,
        "normalizer": _OBJECT,
    },
    "tokenizer_config.json": {
        **_NAMED,
        "added_tokens_decoder": dict[str, Mapping[str, Any]],
        "tokenizer_class": str | None,
        **dict.fromkeys(
            ("add_bos_token", "add_eos_token", "add_prefix_space", "do_lower_case", "tokenize_chinese_chars"), _BOOL
        ),
        "strip_accents": _BOOL,
    },
    "special_tokens_map.json": _NAMED,
    "added_tokens.json": {},
}


def check_types(content: Mapping[str, Any], beside: Mapping[str, Mapping[str, Any]]) -> None:
    """Raises ValueError for a value of another type than the file's format has, with the file and the place in the
    file.

    content, beside: as of `changes_of`. Values that are not read are not checked.
    """
    for file, value in (("tokenizer.json", content), *beside.items()):
        _check(file, value, _TYPES[file])
    for token, number in beside.get("added_tokens.json", {}).items():
        as_type(int, number, f"added_tokens.json: {token[:60]!r}")
    tokens = [("tokenizer.json: added_tokens", each) for each in content.get("added_tokens", ())]
    config = beside.get("tokenizer_config.json", {})
    for number, each in config.get("added_tokens_decoder", {}).items():
        if not (number.isascii() and number.isdigit()):
            raise ValueError(
                f"tokenizer_config.json: added_tokens_decoder has the token {number[:60]!r}, which is no number"
            )
        tokens.append(("tokenizer_config.json: added_tokens_decoder", each))
    for where, each in tokens:
        as_type(str, each.get("content"), f"{where}.content")
        _check(where, each, _FLAGS)
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        named = beside.get(file, {})
        special = [named.get(name) for name in SPECIAL_NAMES]
        for each in (*special, *(named.get("additional_special_tokens") or ())):
            if isinstance(each, Mapping):
                _check(f"{file}: a special token", each, {"content": str, **_FLAGS})


def _check(where: str, value: Mapping[str, Any], types: Mapping[str, Any]) -> None:
    for name, kind in types.items():
        if name in value:
            as_type(kind, value[name], f"{where}: {name}")
