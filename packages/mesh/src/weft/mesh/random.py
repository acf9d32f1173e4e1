"""Keys of random numbers, the same on every mesh."""

from __future__ import annotations

import hashlib
from typing import Any

from .arguments import as_int


def derive_key(seed: int, *path: str | int) -> int:
    """64-bit key from a seed and a path of names and ints, such as `derive_key(0, "layers.3.mlp", step)`.

    The key depends on these arguments alone: not on ranks, meshes or the order in which keys are made.
    Raises ValueError for a seed or a part of the path which is neither a str nor an int.
    """
    parts = [str.__str__(part) if isinstance(part, str) else _as_int(part) for part in (seed, *path)]
    text = "/".join(f"{type(part).__name__}:{len(str(part))}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _as_int(part: Any) -> int:
    try:
        return as_int("a part of a key", part)
    except ValueError:
        raise ValueError(f"a key is derived from names and ints, not from {part!r} of {type(part).__name__}") from None
