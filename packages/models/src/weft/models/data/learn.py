"""Trains tokenizers: byte-level BPE, by the library `tokenizers`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from .inputs import Columns, LeftOut, find_parts, read_part
from .prepare import PART_BYTES
from .tokenizer import CONFIG_FILE, END_NAMES, TOKENIZER_FILE, Tokenizer, config_file, find_tokenizer, open_library

SMALLEST = 257  # every byte, and the end of a document


def train_tokenizer(
    inputs: Sequence[Path], output: Path, *, vocab_size: int, columns: Columns | None = None
) -> Tokenizer:
    """Learn byte-level BPE (Sennrich et al. 2016) from documents, and save the tokenizer as a folder, complete or
    not at all.

    columns: where the text of a record is; None: the defaults of `Columns`.
    The end of a document is <|endoftext|>, token 0. The tokenizer has fewer than `vocab_size` tokens where the text
    has no more pairs to merge.
    Raises ValueError for unusable input, a vocabulary below 257, an output that exists, and without the library.
    """
    if vocab_size < SMALLEST:
        raise ValueError(
            f"--vocab-size {vocab_size} is below {SMALLEST}: every byte, and the end of a document; give more"
        )
    if output.exists():
        raise ValueError(f"the output folder {output} exists; give another --output, or remove it")
    library = open_library()
    columns = columns or Columns()
    parts = find_parts(inputs, columns, PART_BYTES)
    left_out = LeftOut(empty=0, skipped=[], bad=0, passed=[])

    def texts() -> Iterator[str]:
        for part in parts:
            yield from read_part(part, columns, left_out)

    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_NAMES[0]],
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(), trainer)
    temporary = output.with_name(f".{output.name}.partial-{os.getpid()}")
    try:
        temporary.mkdir(parents=True)
        (temporary / TOKENIZER_FILE).write_text(tokenizer.to_str(pretty=True) + "\n", encoding="utf-8")
        (temporary / CONFIG_FILE).write_bytes(config_file(END_NAMES[0]))
        temporary.rename(output)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise ValueError(f"{output} cannot be written: {error}; give another --output") from None
    return find_tokenizer(output)
