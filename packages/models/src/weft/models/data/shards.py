"""The files of shards: written entry by entry, verified by checksums and content. Needs numpy, unlike sources.py."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from .contents import ShardEntry
from .examples.stored import PartOnDisk
from .inputs import LeftOut
from .manifest import (
    DataManifest,
    TokenShard,
    check_sum,
    check_tokenizer,
    finish,
    num_files,
    read_manifest,
    write_whole,
)
from .streams import ShardStream

if TYPE_CHECKING:
    from .examples.example import Task


REPORT_BYTES = 1 << 20  # of input between two reports


class _Growing:
    """A file written piece by piece under a temporary name, and a running digest."""

    def __init__(self, path: Path, files: ExitStack) -> None:
        self.path, self._digest = path, hashlib.sha256()
        partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
        self._file: BinaryIO = files.enter_context(partial.open("wb"))

    def write(self, content: bytes) -> None:
        self._digest.update(content)
        self._file.write(content)

    def finish(self) -> str:
        """Rename the complete file to the final path. Returns the SHA-256."""
        finish(self._file, self.path)
        return self._digest.hexdigest()


def write_shard(
    folder: Path,
    number: int,
    entries: Iterable[ShardEntry],
    left_out: LeftOut,
    *,
    task: Task,
    dtype: str,
    report: Callable[[int], None],
) -> TokenShard:
    """Write the files of a shard. Returns the shard's entry for the manifest.

    left_out: filled by `entries`. dtype: of tokens. report: called now and then with the bytes of input read, about.
    """
    import numpy as np

    stored, num_tokens, read, reported, prompt = np.dtype(dtype).newbyteorder("<"), 0, 0, 0, ""
    ends: list[int] = []
    labels: list[bool] = []
    shard = TokenShard(
        number=number,
        tokens=0,
        documents=0,
        sha256=("",) * num_files(task),
        empty=0,
        skipped=(),
        bad=0,
        prompt="",
    )
    paths = [folder / name for name in shard.names]
    with ExitStack() as files:
        tokens, *masks = (_Growing(path, files) for path in (paths[0], *paths[2:3]))
        for entry in entries:
            for document in entry.documents:
                tokens.write(document.astype(stored).tobytes())
                num_tokens += len(document)
                ends.append(num_tokens)
            for mask in entry.masks:
                masks[0].write(mask.tobytes())
            if entry.label is not None:
                labels.append(entry.label)
            prompt = prompt or entry.prompt
            read += entry.size
            if read - reported >= REPORT_BYTES:
                report(read)
                reported = read
        sums = [tokens.finish(), *(each.finish() for each in masks)]
    lists = [np.array(ends, dtype="<u8").tobytes(), np.array(labels, dtype=np.uint8).tobytes()]
    for path, content in zip([paths[1], *paths[3:]], lists, strict=False):
        write_whole(path, content)
    sums.insert(1, hashlib.sha256(lists[0]).hexdigest())
    if len(paths) > len(sums):
        sums.append(hashlib.sha256(lists[1]).hexdigest())
    return TokenShard(
        number=number,
        tokens=num_tokens,
        documents=len(ends),
        sha256=tuple(sums),
        empty=left_out.empty,
        skipped=tuple(left_out.skipped),
        bad=left_out.bad,
        passed=tuple(left_out.passed),
        prompt=prompt,
    )


def verify(folder: Path) -> DataManifest:
    """Read every file of a prepared folder. Raises ValueError for a file whose checksum differs from the manifest's."""
    manifest = read_manifest(folder)
    check_tokenizer(folder, manifest)
    for shard in manifest.shards:
        check_shard(folder, shard, manifest)
    return manifest


def check_shard(folder: Path, shard: TokenShard, manifest: DataManifest) -> None:
    """Read the files of a shard.

    Raises ValueError where a checksum differs from the manifest's, and as `ShardStream.check` and `PartOnDisk.check`.
    """
    for name, digest in zip(shard.names, shard.sha256, strict=True):
        check_sum(folder / name, digest)
    ShardStream(folder, [shard], manifest.dtype, manifest.vocab_size).check()
    if manifest.task != "pretrain":
        PartOnDisk(folder, shard, manifest.task, manifest.dtype, manifest.vocab_size).check()
