"""Verifies prepared data: the checksum of every file, and the content of the shards. Needs numpy, unlike sources.py."""

from __future__ import annotations

from pathlib import Path

from .examples.stored import PartOnDisk
from .manifest import DataManifest, TokenShard, check_sum, check_tokenizer, read_manifest
from .streams import ShardStream


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
