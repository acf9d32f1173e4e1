"""How further files of a tokenizer's folder change tokenizer.json, as in transformers.

The tokens of a text depend on tokenizer.json and on the files beside tokenizer.json: added tokens, special tokens,
and the class named in tokenizer_config.json. A value of a wrong type would change tokens silently: `check_types` checks
the types. `changes_of` finds how transformers changes tokenizer.json when loading the folder, by the rules of fast
tokenizers, release 4.57; no library is needed. `Changes.apply` makes a tokenizer with the library `tokenizers`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..safe_files import as_type

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_GPT = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
_LLAMA = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
# The class of a model's tokenizer, where tokenizer_config.json names none: by the model_type of config.json.
CLASSES = {
    "llama": "LlamaTokenizer",
    "mistral": "LlamaTokenizer",
    "qwen2": "Qwen2Tokenizer",
    "qwen3": "Qwen2Tokenizer",
    "gpt2": "GPT2Tokenizer",
}

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


def check_types(content: Mapping[str, Any], settings: Mapping[str, Mapping[str, Any]]) -> None:
    """Raises ValueError for a value of another type than the file's format has, with the file and the place in the
    file.

    content, settings: as for `changes_of`. Values never read are not checked.
    """
    for file, value in (("tokenizer.json", content), *settings.items()):
        _check(file, value, _TYPES[file])
    for token, number in settings.get("added_tokens.json", {}).items():
        as_type(int, number, f"added_tokens.json: {token[:60]!r}")
    tokens = [("tokenizer.json: added_tokens", each) for each in content.get("added_tokens", ())]
    config = settings.get("tokenizer_config.json", {})
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
        named = settings.get(file, {})
        special = [named.get(name) for name in SPECIAL_NAMES]
        for each in (*special, *(named.get("additional_special_tokens") or ())):
            if isinstance(each, Mapping):
                _check(f"{file}: a special token", each, {"content": str, **_FLAGS})


def _check(where: str, value: Mapping[str, Any], types: Mapping[str, Any]) -> None:
    for name, kind in types.items():
        if name in value:
            as_type(kind, value[name], f"{where}: {name}")


@dataclass(frozen=True, slots=True)
class _TokenizerKind:
    """The defaults of a class of transformers' tokenizers, for settings missing in the config."""

    tokens: Mapping[str, str]  # special tokens by their names
    template: bool = False  # whether the class replaces the post-processor of tokenizer.json
    begins: bool = False  # whether prompts begin with BOS by default


# By the class's name without "Tokenizer" and "Fast". A class missing here adds no changes.
KINDS: Mapping[str, _TokenizerKind] = {
    "Llama": _TokenizerKind(_LLAMA, template=True, begins=True),
    "CodeLlama": _TokenizerKind(_LLAMA, template=True, begins=True),
    "Gemma": _TokenizerKind(
        {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>"},
        template=True,
        begins=True,
    ),
    "Cohere": _TokenizerKind(
        {"bos_token": "<BOS_TOKEN>", "eos_token": "<|END_OF_TURN_TOKEN|>", "unk_token": "<UNK>"},
        template=True,
        begins=True,
    ),
    "GPTNeoX": _TokenizerKind(_GPT, template=True),
    "GPT2": _TokenizerKind(_GPT),
    "Qwen2": _TokenizerKind(dict.fromkeys(("eos_token", "unk_token", "pad_token"), "<|endoftext|>")),
    "Bert": _TokenizerKind({name: f"[{name[:-6].upper()}]" for name in SPECIAL_NAMES[2:]}),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """The changes to a tokenizer.json. Empty, and false, where the file is used unchanged."""

    # Tokens missing in the file, or there with different flags: (text, flags of `tokenizers.AddedToken` by FLAGS).
    added: tuple[tuple[str, tuple[bool, ...]], ...] = ()
    parts: tuple[tuple[str, str], ...] = ()  # replaced parts of the file, as JSON: pre_tokenizer, normalizer
    # The tokens before and after a prompt, replacing the file's post-processor; None for the file's own.
    template: tuple[str | None, str | None] | None = None

    def __bool__(self) -> bool:
        return bool(self.added or self.parts or self.template is not None)

    def apply(self, library: Any, content: bytes) -> Any:
        """The `tokenizers.Tokenizer` of the file's content, with the changes."""
        if self.parts:
            content = json.dumps(json.loads(content) | {name: json.loads(part) for name, part in self.parts}).encode()
        tokenizer = library.Tokenizer.from_str(content.decode())
        tokenizer.add_tokens(
            [library.AddedToken(token, **dict(zip(FLAGS, flags, strict=True))) for token, flags in self.added]
        )
        if self.template is not None:
            before, after = ([] if token is None else [token] for token in self.template)
            special = [(token, tokenizer.token_to_id(token)) for token in dict.fromkeys(before + after)]
            tokenizer.post_processor = library.processors.TemplateProcessing(
                single=[*before, "$A", *after], special_tokens=special
            )
        return tokenizer


def changes_of(content: Mapping[str, Any], settings: Mapping[str, Mapping[str, Any]]) -> Changes:
    """The changes to a tokenizer.json by further files of the folder.

    content: of tokenizer.json.
    settings: {name: content} of tokenizer_config.json, special_tokens_map.json and added_tokens.json; missing files
        have no entry.
    Raises ValueError where the class begins each prompt with a BOS token, and no BOS token is named.
    """
    config = settings.get("tokenizer_config.json", {})
    kind, named = KINDS.get(class_of(config), _TokenizerKind({})), _named(settings)
    special = _special(kind, named)
    return Changes(
        added=_added(content, settings, named, special),
        parts=_parts(content, config),
        template=_template(config, kind, special) if kind.template else None,
    )


def special_names(settings: Mapping[str, Mapping[str, Any]]) -> dict[str, str | list[str]]:
    """The names of special tokens by their uses (bos_token, ..., additional_special_tokens), without missing ones:
    the `special_tokens_map` of transformers' tokenizers. settings: as of `changes_of`.
    """
    kind, named = KINDS.get(class_of(settings.get("tokenizer_config.json", {})), _TokenizerKind({})), _named(settings)
    found: dict[str, str | list[str]] = {name: token for name, token in _special(kind, named).items() if token}
    more = [token for each in named.get("additional_special_tokens") or () if (token := token_of(each))]
    return found | ({"additional_special_tokens": list(dict.fromkeys(more))} if more else {})


def _special(kind: _TokenizerKind, named: Mapping[str, Any]) -> dict[str, str | None]:
    return {name: token_of({**kind.tokens, **named}.get(name)) for name in SPECIAL_NAMES}


def _named(settings: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    """The config with the special tokens in effect.

    A config with a list of added tokens is complete; special_tokens_map.json counts only beside older configs.
    """
    config = settings.get("tokenizer_config.json", {})
    return config if "added_tokens_decoder" in config else _older(config, settings.get("special_tokens_map.json", {}))


def _older(config: Mapping[str, Any], special: Mapping[str, Any]) -> dict[str, Any]:
    """An older config together with special_tokens_map.json, whose special tokens have precedence."""
    more = [*(config.get("additional_special_tokens") or ()), *(special.get("additional_special_tokens") or ())]
    return {**config, **special, "additional_special_tokens": more}


def class_of(config: Mapping[str, Any]) -> str:
    """The name of the tokenizer's class without "Tokenizer" and "Fast"."""
    return str(config.get("tokenizer_class")).removesuffix("Fast").removesuffix("Tokenizer")


def token_of(value: Any) -> str | None:
    """The text of a special token, which is in JSON either a string or an object."""
    found = value.get("content") if isinstance(value, dict) else value
    return found if isinstance(found, str) else None


def _added(
    content: Mapping[str, Any],
    settings: Mapping[str, Mapping[str, Any]],
    named: Mapping[str, Any],
    special: Mapping[str, str | None],
) -> tuple[tuple[str, tuple[bool, ...]], ...]:
    """The tokens to add: tokens missing in tokenizer.json, and tokens with different flags there."""
    of_file = {each["content"]: _flags(each) for each in content.get("added_tokens", ())}
    more = [each for each in named.get("additional_special_tokens") or () if token_of(each)]
    specials = [token for token in (*special.values(), *map(token_of, more)) if token]
    if "added_tokens_decoder" in named:
        listed = sorted(named["added_tokens_decoder"].items(), key=lambda item: int(item[0]))
        expected = {each["content"]: _flags(each) for _, each in listed}
    else:
        older = sorted(settings.get("added_tokens.json", {}).items(), key=lambda item: int(item[1]))
        expected = {token: _flags({"special": token in specials}) for token, _ in older} | of_file
    objects = [named[name] for name in SPECIAL_NAMES if isinstance(named.get(name), dict)]
    objects += [each for each in more if isinstance(each, dict)]
    of_object = {each["content"]: _flags({**each, "special": True}) for each in objects}
    for token in specials:
        if token not in of_file and token not in expected:
            expected[token] = of_object.get(token, _flags({"special": True}))
    expected = {token: (*flags[:-1], flags[-1] or token in specials) for token, flags in expected.items()}
    return tuple((token, flags) for token, flags in expected.items() if of_file.get(token) != flags)


def _flags(token: Mapping[str, Any]) -> tuple[bool, ...]:
    """A token's flags in the order of FLAGS, with the library's defaults: tokens not special are normalized."""
    special = bool(token.get("special", False))
    return (*(bool(token.get(name, False)) for name in FLAGS[:3]), bool(token.get("normalized", not special)), special)


def _parts(content: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """The parts of tokenizer.json replaced by settings of the config: the pre-tokenizer, the normalizer."""
    changed = {}
    splits = content.get("pre_tokenizer") or {}
    expected = config.get("add_prefix_space", None if KINDS.get(class_of(config)) is KINDS["Llama"] else False)
    if expected is not None and splits.get("add_prefix_space", expected) != expected:
        changed["pre_tokenizer"] = {**splits, "add_prefix_space": expected}
    normal = content.get("normalizer") or {}
    if class_of(config) == "Bert" and normal.get("type") == "BertNormalizer":
        settings = {
            "lowercase": config.get("do_lower_case", True),
            "strip_accents": config.get("strip_accents"),
            "handle_chinese_chars": config.get("tokenize_chinese_chars", True),
        }
        if any(normal.get(name) != value for name, value in settings.items()):
            changed["normalizer"] = {**normal, **settings}
    return tuple((name, json.dumps(part)) for name, part in changed.items())


def _template(
    config: Mapping[str, Any], kind: _TokenizerKind, special: Mapping[str, str | None]
) -> tuple[str | None, str | None]:
    """The tokens before and after a prompt, by the config and the class."""
    options = (
        ("bos_token", "add_bos_token", config.get("add_bos_token", kind.begins)),
        ("eos_token", "add_eos_token", config.get("add_eos_token", False)),
    )
    for name, option, expected in options:
        if expected and special[name] is None:
            raise ValueError(
                f"tokenizer_config.json: {option} is true (a {config.get('tokenizer_class')}'s default, or set there), "
                f"and there is no {name}; name the {name}, or set {option} to false"
            )
    before, after = (special[name] if expected else None for name, _, expected in options)
    return before, after
