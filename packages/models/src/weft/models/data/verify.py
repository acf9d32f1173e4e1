"""Prepared data, read as a whole: the checksums of every file, and what stands in the shards."""

from __future__ import annotations

from pathlib import Path

from .manifest import Manifest, Shard, check_sum, check_tokenizer, read_manifest
from .streams import ShardStream


def verify(folder: Path) -> Manifest:
    """Reads every file of a prepared folder. Raises ValueError for one whose checksum is not the manifest's."""
    manifest = read_manifest(folder)
    check_tokenizer(folder, manifest)
    for shard in manifest.shards:
        check_shard(folder, shard, manifest)
    return manifest


def check_shard(folder: Path, shard: Shard, manifest: Manifest) -> None:
    """Reads both files of a shard. Raises ValueError where one's checksum is not the manifest's, and as `ShardStream.check`."""
    for name, wanted in zip(shard.names, shard.sha256, strict=True):
        check_sum(folder / name, wanted)
    ShardStream(folder, [shard], manifest.dtype, manifest.vocab_size).check()
