"""Companions of a model's weights in a folder: tokenizer, chat template, generation settings, token ids.

Weft reads companions with a model and writes them with every save, unchanged.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from ..data.tokenizer import CHAT_FOLDER, FILES, TOKENIZER_FILE, Tokenizer, with_named_templates
from ..safe_files import links_outside, parse_json, read_plain
from .fields import COMPANIONS
from .manifest import Manifest

GENERATION_FILE = "generation_config.json"
_ATTRIBUTE = "_companions"  # set on the model, so copies and pickles of the model include the companions
_END = "eos_token_id"


@dataclass(frozen=True, slots=True)
class Companions:
    """The contents of a model's folder besides the network and the weights.

    Read with the model, attached to the model by `attach_companions`, and written by every later save.
    """

    # Fields of config.json listed in COMPANIONS: ids of tokens, generation settings.
    fields: Mapping[str, Any] = field(default_factory=dict)
    # Unchanged contents by file name: the tokenizer's files and generation_config.json.
    files: Mapping[str, bytes] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path, config: Mapping[str, Any], check: Callable[[str, bytes], None]) -> Companions:
        """The companions in a Hugging Face folder. config: the folder's config.json. check: raises for a damaged file.

        Raises ValueError as `read_companions`.
        """
        return cls(_companion_fields(config), read_companions(folder, (*FILES, GENERATION_FILE), check))

    @classmethod
    def saved(cls, folder: Path, config: Mapping[str, Any], manifest: Manifest) -> Companions:
        """Reads the companions in a checkpoint of a run, for `load_checkpoint` and `weft convert`.

        config: the checkpoint's config.json; empty for a checkpoint without one.
        Raises DamagedCheckpoint for a damaged file, ValueError as `read_companions`.
        """
        names = [name for name in (*FILES, GENERATION_FILE) if name in manifest.files]
        return cls(
            _companion_fields(config),
            read_companions(folder, names, lambda name, content: manifest.check(folder, name, content)),
        )

    def with_tokenizer(self, tokenizer: Tokenizer | None) -> Companions:
        """The companions to save when the caller of a save gives a tokenizer, as every run does; unchanged for None.

        The tokenizer's files replace files of the same names. The tokenizer's end token becomes eos_token_id if the
        companions have no eos_token_id. If the companions hold a different tokenizer.json, all companions are dropped:
        the token ids belong to a different vocabulary.
        """
        if tokenizer is None:
            return self
        named = dict(tokenizer.files)
        known = self.files.get(TOKENIZER_FILE)
        base = self if known is None or known == named.get(TOKENIZER_FILE) else Companions()
        end = base.fields.get(_END)
        return Companions({**base.fields, _END: tokenizer.end if end is None else end}, {**base.files, **named})

    def in_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The config.json `config`, with the companion fields added."""
        return {**config, **self.fields}

    @property
    def tokenizer_files(self) -> dict[str, bytes]:
        """The tokenizer's files, for a folder of adapters: all companion files except generation_config.json."""
        return {name: content for name, content in self.files.items() if name != GENERATION_FILE}


def read_companions(
    folder: Path, names: Iterable[str], check: Callable[[str, bytes], None] = lambda name, content: None
) -> dict[str, bytes]:
    """Reads the named files of a folder, byte for byte; a later save writes these bytes unchanged.

    Called for a folder with a model, and by `save_lora` for the base model's folder. A missing file is skipped.
    A link out of the folder (see `links_outside`) is skipped with a warning. check: raises for a damaged file.
    Named chat templates are merged into tokenizer_config.json, see `with_named_templates`.
    Raises ValueError for a .json file without an object, and for a chat template linking out of the folder.
    """
    files = {}
    for name in names:
        path = folder / name
        if not path.is_file():
            continue
        if links_outside(path):
            warnings.warn(f"{path} is a link out of its folder and is left out; put a copy in its place", stacklevel=3)
            continue
        files[name] = read_plain(path)
        if name.endswith(".json"):
            parse_json(files[name], str(path), "fetch or save it again")
        check(name, files[name])
    for template in sorted((folder / CHAT_FOLDER).glob("*.jinja")):
        if not template.is_file() or links_outside(template):
            raise ValueError(f"{template} is no plain file of its folder; put a copy in its place")
    return with_named_templates(files, folder)


def companions_of(model: nn.Module) -> Companions:
    """The companions of a model; empty for a model not read from a folder."""
    found = getattr(model, _ATTRIBUTE, None)
    return found if isinstance(found, Companions) else Companions()


def attach_companions(model: nn.Module, companions: Companions) -> None:
    """Attach the companions of the folder just read to the model.

    The model's earlier companions stay where the folder has none: after `load_checkpoint` reads a folder without a
    tokenizer, a model made by `from_pretrained` keeps its tokenizer. Fields and files are judged apart.
    """
    before = companions_of(model)
    fields = companions.fields if any(each is not None for each in companions.fields.values()) else before.fields
    merged = replace(before, fields=fields, files=companions.files or before.files)
    if merged != Companions():
        setattr(model, _ATTRIBUTE, merged)


def _companion_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name in COMPANIONS}
