"""The digests of a step: the key, shape and layout of each tensor, and the numbers of all tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .grid import count_blocks

# In the order in which a step computes the tensors. "before": a parameter before the step, recorded only if the step
# before has no digests. "output": a module's output. "backward": the gradient of a module's output. "gradient": a
# parameter's gradient, after synchronization and before clipping. "weight": a parameter after the update.
TensorKind = Literal["before", "output", "backward", "gradient", "weight"]
KINDS: tuple[TensorKind, ...] = ("before", "output", "backward", "gradient", "weight")


class Key(NamedTuple):
    """Which tensor of a step: the same on every mesh."""

    kind: TensorKind
    name: str  # of the module or the parameter; "" for the model
    number: int = 0  # of the tensor among the module's outputs

    def __str__(self) -> str:
        name = (self.name or "the model") + (f" (output {self.number})" if self.number else "")
        match self.kind:
            case "output":
                return f"the output of {name}"
            case "backward":
                return f"the gradient of the output of {name}"
            case "gradient":
                return f"the gradient of {name}"
            case "before":
                return f"the weight {name} before the step"
            case "weight":
                return f"the weight {name} after the update"


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor of a step, without the digest's numbers. Entries are the same for many steps, and written once."""

    key: Key
    shape: tuple[int, ...]  # of the global tensor; of activations, of the whole batch
    dtype: str  # as "bfloat16"
    layout: str  # as "dp: S(0), tp: R"; "" for a plain tensor
    is_hashed: bool  # False for Partial values, whose addends differ between meshes
    holders: tuple[int, ...]  # for each block the first rank with elements of the block

    @property
    def blocks(self) -> int:
        """The number of blocks of the tensor in a digest."""
        return count_blocks(self.shape)


@dataclass(frozen=True, slots=True, eq=False)
class StepDigests:
    """The digests of a step, added over all ranks. Each array has all entries in order, an entry's blocks in a row."""

    step: int  # from 1
    loss: float
    norm: float | None  # of the gradients, before clipping
    entries: tuple[TensorEntry, ...]  # in the order of computation
    hashes: NDArray[np.int64]  # [blocks of all entries]
    sketches: NDArray[np.float64]  # [blocks of all entries, SKETCHES]
    squares: NDArray[np.float64]  # [entries]
    largest: NDArray[np.float64]  # [entries]
    disagreeing: frozenset[int]  # indices of the entries whose replicas differ
    ops: dict[str, tuple[str, ...]]  # Weft's ops called directly by each module's forward

    def by_key(self) -> dict[Key, TensorDigest]:
        """The digest of each tensor, in the order of computation."""
        found, start = {}, 0
        for number, entry in enumerate(self.entries):
            stop = start + entry.blocks
            found[entry.key] = TensorDigest(
                entry=entry,
                hashes=self.hashes[start:stop],
                sketches=self.sketches[start:stop],
                squares=float(self.squares[number]),
                largest=float(self.largest[number]),
                agrees=number not in self.disagreeing,
            )
            start = stop
        return found


@dataclass(frozen=True, slots=True, eq=False)
class TensorDigest:
    """The digest of a tensor of a step, added over all ranks; for the numbers, see digest.py."""

    entry: TensorEntry
    hashes: Any  # [blocks] int64
    sketches: Any  # [blocks, SKETCHES] float64
    squares: float  # the sum of squares
    largest: float  # the largest magnitude
    agrees: bool  # whether all replicas had the same bits

    @property
    def norm(self) -> float:
        """The 2-norm: exact, or of a Partial value estimated by the sketch."""
        squares = self.squares if self.entry.is_hashed else float(np.square(self.sketches).mean(1).sum())
        return float(np.sqrt(squares))


@dataclass(frozen=True, slots=True)
class Header:
    """The facts about a run by which digests are judged. A file begins with a Header; a resumed run appends another."""

    parameters: dict[str, tuple[int, ...]]  # shapes by name, of all pipeline stages
    modules: tuple[str, ...]  # the names of all modules
    mesh: dict[str, int]  # sizes by axis
    batch: tuple[int, int]  # rows and tokens of a row
    dtype: str
    reduce_dtype: str
    choosing: tuple[str, ...]  # modules with a choice of experts for each token
    microbatches: int
    by_microbatch: tuple[str, ...]  # parts of a step whose values depend on the number of microbatches, in words
    data: str  # checksum of the data
    seed: int
    arithmetic: dict[str, str] | None = None  # on which the bits of a run with `plan.exact` depend; None without
