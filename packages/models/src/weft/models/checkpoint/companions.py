"""The companions of a model's weights in every folder: tokenizer, chat template, generation settings, ids of tokens."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from ..data.tokenizer import CHAT_FOLDER, FILES, TOKENIZER_FILE, Tokenizer, with_named_templates
from ..documents import leads_out, parse_json, read_plain
from .fields import COMPANIONS
from .manifest import Manifest

GENERATION_FILE = "generation_config.json"
_ATTRIBUTE = "_companions"  # of a model: copied and pickled with the model
_END = "eos_token_id"


@dataclass(frozen=True, slots=True)
class Companions:
    """The contents of a model's folder beside the network and the weights.

    fields: the fields of config.json in COMPANIONS: ids of tokens, settings of generation. files: unchanged contents by name: the
    files of a tokenizer, and generation_config.json.
    """

    fields: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path, config: Mapping[str, Any], check: Callable[[str, bytes], None]) -> Companions:
        """The companions in a Hugging Face folder. config: the folder's config.json. check: raises for a damaged file.

        Raises ValueError as `read_companions`.
        """
        return cls(_chosen(config), read_companions(folder, (*FILES, GENERATION_FILE), check))

    @classmethod
    def saved(cls, folder: Path, config: Mapping[str, Any], manifest: Manifest) -> Companions:
        """The companions in a checkpoint of a run. Raises DamagedCheckpoint for a damaged file, ValueError as `read_companions`."""
        names = [name for name in (*FILES, GENERATION_FILE) if name in manifest.files]
        return cls(
            _chosen(config), read_companions(folder, names, lambda name, content: manifest.check(folder, name, content))
        )

    def with_tokenizer(self, tokenizer: Tokenizer | None) -> Companions:
        """The companions with a tokenizer that the caller names for the folder.

        The tokenizer's files replace files of the same names. The end of documents becomes eos_token_id where no end is known. If
        the companions hold a different tokenizer.json, all companions are dropped: their ids name tokens of that vocabulary.
        """
        if tokenizer is None:
            return self
        named = dict(tokenizer.files)
        known = self.files.get(TOKENIZER_FILE)
        kept = self if known is None or known == named.get(TOKENIZER_FILE) else Companions()
        end = kept.fields.get(_END)
        return Companions({**kept.fields, _END: tokenizer.end if end is None else end}, {**kept.files, **named})

    def in_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """A config.json with these fields."""
        return {**config, **self.fields}

    @property
    def tokenizer_files(self) -> dict[str, bytes]:
        """The files of a tokenizer."""
        return {name: content for name, content in self.files.items() if name != GENERATION_FILE}


def read_companions(
    folder: Path, names: Iterable[str], check: Callable[[str, bytes], None] = lambda name, content: None
) -> dict[str, bytes]:
    """The contents of a folder's files of these names, which are written as they are where the model is saved.

    A file that is a link out of the folder, see `leads_out`, is left out, and a warning names the file. check: raises for a damaged
    file. Named chat templates are in tokenizer_config.json, see `with_named_templates`.
    Raises ValueError for a file with the name of JSON that holds no object.
    """
    files = {}
    for name in names:
        path = folder / name
        if not path.is_file():
            continue
        if leads_out(path):
            warnings.warn(f"{path} is a link out of its folder and is left out; put a copy in its place", stacklevel=3)
            continue
        files[name] = read_plain(path)
        if name.endswith(".json"):
            parse_json(files[name], str(path), "fetch or save it again")
        check(name, files[name])
    for template in sorted((folder / CHAT_FOLDER).glob("*.jinja")):
        if not template.is_file() or leads_out(template):
            raise ValueError(f"{template} is no plain file of its folder; put a copy in its place")
    return with_named_templates(files, folder)


def companions_of(model: nn.Module) -> Companions:
    """The companions of a model; empty for a model that was not read from a folder."""
    found = getattr(model, _ATTRIBUTE, None)
    return found if isinstance(found, Companions) else Companions()


def keep_companions(model: nn.Module, companions: Companions) -> None:
    """Attach a folder's companions to the model. Where the folder has none, the model's earlier companions stay."""
    before = companions_of(model)
    fields = companions.fields if any(each is not None for each in companions.fields.values()) else before.fields
    kept = replace(before, fields=fields, files=companions.files or before.files)
    if kept != Companions():
        setattr(model, _ATTRIBUTE, kept)


def _chosen(config: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name in COMPANIONS}
