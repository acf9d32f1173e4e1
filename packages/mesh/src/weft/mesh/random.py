"""Keys for randomness that no mesh can change."""

from __future__ import annotations

import hashlib


def derive_key(seed: int, *path: str | int) -> int:
    """64-bit key from a seed and a path of names and ints, such as `derive_key(0, "layers.3.mlp", step)`.

    A function of its arguments alone: no rank, mesh or order of creation enters it.
    """
    for part in (seed, *path):
        if not isinstance(part, str | int) or isinstance(part, bool):
            raise ValueError(f"a key is derived from names and ints, not from {part!r} of {type(part).__name__}")
    kinds = ("str" if isinstance(part, str) else "int" for part in (seed, *path))  # numpy's are the same keys
    text = "/".join(f"{kind}:{len(str(part))}:{part}" for kind, part in zip(kinds, (seed, *path), strict=True))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
