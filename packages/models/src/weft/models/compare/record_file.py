"""The digests of a run as values, and the file that holds the digests.

A digest has numbers for each block of a tensor. The blocks depend on the tensor's global shape alone, never on a mesh.
A step's digests are the key, shape and layout of each tensor, and the numbers of all tensors.

The file is written line by line, step by step, and read back, also while the run goes on. Each line is a JSON object: a
header of the run, a table, or a step. A table names the tensors of the following steps, until the next table. A step
has the numbers of the step's tensors, as base64 of little-endian arrays. A resumed run appends a header, since the mesh
may have changed. A last line without a newline is being written, and is not read.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..safe_files import append, as_type, parse_json, read_plain, write_anew

SKETCHES = 4  # signed sums of a block


def parts_of(shape: Sequence[int]) -> tuple[int, ...]:
    """The number of parts of each dim: 4 for a vector, 4 x 4 for a matrix, 2 x 2 x 4 for activations [B, T, H].

    Tensors of more dims are cut in the first two and the last. At most 16 blocks; no dim has more parts than elements.
    """
    if len(shape) <= 2:
        most = [4] * len(shape)
    else:
        most = [2, 2, *[1] * (len(shape) - 3), 4]
    return tuple(max(1, min(part, size)) for part, size in zip(most, shape, strict=True))


def count_blocks(shape: Sequence[int]) -> int:
    """The number of blocks of a tensor; 1 for a scalar."""
    return math.prod(parts_of(shape))


def block_slices(shape: Sequence[int]) -> list[tuple[slice, ...]]:
    """The slice of each block in the global tensor, in the blocks' order: the last dim's parts run fastest."""
    cuts = []
    for size, parts in zip(shape, parts_of(shape), strict=True):
        edges = [-(-part * size // parts) for part in range(parts + 1)]
        cuts.append([slice(start, stop) for start, stop in pairwise(edges)])
    return list(product(*cuts))


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
    hashes: NDArray[np.int64]  # [blocks of all entries]; for hashes and sketches, see digest.py
    sketches: NDArray[np.float64]  # [blocks of all entries, SKETCHES]
    squares: NDArray[np.float64]  # [entries]: the sum of squares
    largest: NDArray[np.float64]  # [entries]: the largest magnitude
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
    # The facts on which the bits of a run depend, by name, as "exact": "dp=4,tp=2"; None without `plan.exact`.
    arithmetic: dict[str, str] | None = None
    # The options on which losses depend beside the mesh and the plan, by dotted name, as "optimizer.lr": "0.001".
    # Files of earlier versions have none.
    options: dict[str, str] = dataclasses.field(default_factory=dict)


DIGESTS = "digests.jsonl"
_VERSION = 1
_LARGEST = 2**34  # bytes; larger files are refused
_REMEDY = "copy the file again, or write it anew by `weft train --digests`"


class DigestFile:
    """Writes the file of a running run, on rank 0 alone."""

    def __init__(self, folder: Path, header: Header, *, step: int) -> None:
        """Appends the header to the file in the run's folder.

        step: the last step before this run begins, 0 for a new run; later steps in the file are removed.
        Raises ValueError for a file that cannot be read, OSError for a failed write.
        """
        self._path = folder / DIGESTS
        self._table: tuple[TensorEntry, ...] | None = None
        if os.path.lexists(self._path):
            write_anew(self._path, b"".join(_lines_until(self._path, step)))
        self._append({"digests": _VERSION, **dataclasses.asdict(header)})

    def add(self, digests: StepDigests) -> None:
        """Append a step, after the table of the step's tensors if the table is new. Raises OSError."""
        if digests.entries != self._table:
            self._table = digests.entries
            self._append({"tensors": [_entry_as_json(each) for each in digests.entries], "ops": digests.ops})
        self._append(
            {
                "step": digests.step,
                "loss": digests.loss,
                "norm": digests.norm,
                "disagreeing": sorted(digests.disagreeing),
                "hashes": _encode(digests.hashes, "<i8"),
                "sketches": _encode(digests.sketches, "<f8"),
                "squares": _encode(digests.squares, "<f8"),
                "largest": _encode(digests.largest, "<f8"),
            }
        )

    def _append(self, value: dict[str, Any]) -> None:
        """Appends a line."""
        append(self._path, (json.dumps(value) + "\n").encode())


@dataclasses.dataclass(frozen=True, slots=True)
class RunDigests:
    """The digests of a run, as `read_digests` returns them."""

    folder: Path
    headers: dict[int, Header]  # by the header's first step; the first header under 0
    steps: dict[int, StepDigests]  # by step, in ascending order

    @property
    def header(self) -> Header:
        """The newest header."""
        return self.headers[max(self.headers)]

    def header_of(self, step: int) -> Header:
        """The header in force at a step."""
        return self.headers[max(first for first in self.headers if first <= step)]


def read_digests(folder: Path) -> RunDigests:
    """The digests of the run whose folder is `folder`.

    Raises ValueError for a run without digests, and, with the line's number, for a damaged file.
    """
    path = folder / DIGESTS
    if not path.is_file():
        raise ValueError(
            f"{folder} has no {DIGESTS}; train with --digests to write it, or --digests 10 for every tenth step"
        )
    headers: dict[int, Header] = {}
    steps: dict[int, StepDigests] = {}
    table: tuple[TensorEntry, ...] | None = None
    ops: dict[str, tuple[str, ...]] = {}
    for number, line in enumerate(_whole_lines(path), 1):
        where = f"{path}, line {number}"
        value = parse_json(line, where, _REMEDY)
        try:
            if "digests" in value:
                if value.pop("digests") != _VERSION:
                    raise ValueError(f"is of another version than {_VERSION}")
                headers[max(steps, default=-1) + 1] = as_type(Header, value, "the header")
            elif "tensors" in value:
                table = tuple(map(_entry_of, value["tensors"]))
                ops = as_type(dict[str, tuple[str, ...]], value["ops"], "ops")
            else:
                if table is None or not headers:
                    raise ValueError("comes before its header and its table")
                step = _step_of(value, table, ops)
                if step.step <= max(steps, default=0):
                    raise ValueError(f"is of step {step.step}, but follows {max(steps)}")
                steps[step.step] = step
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{where} is not as it was written: {error}; {_REMEDY}") from None
    if not headers:
        raise ValueError(f"{path} has no header; {_REMEDY}")
    return RunDigests(folder, headers, steps)


def _whole_lines(path: Path) -> Iterator[bytes]:
    """The lines that end with a newline, without the newline. Raises ValueError for a file that cannot be read."""
    try:
        content = read_plain(path, limit=_LARGEST)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}; {_REMEDY}") from None
    yield from content.split(b"\n")[:-1]


def _lines_until(path: Path, step: int) -> Iterable[bytes]:
    """The lines of a file up to the first step after `step`, with newlines."""
    for line in _whole_lines(path):
        if line.startswith(b'{"step": ') and int(line[9 : line.index(b",")]) > step:
            return
        yield line + b"\n"


def _encode(array: NDArray[Any], kind: str) -> str:
    return base64.b64encode(np.ascontiguousarray(array).astype(kind).tobytes()).decode()


def _decode(text: Any, kind: str, length: int) -> NDArray[Any]:
    array = np.frombuffer(base64.b64decode(text, validate=True), kind)
    if len(array) != length:
        raise ValueError(f"has {len(array)} numbers where {length} are needed")
    return array


def _entry_as_json(entry: TensorEntry) -> list[Any]:
    return [*entry.key, list(entry.shape), entry.dtype, entry.layout, entry.is_hashed, list(entry.holders)]


def _entry_of(value: Any) -> TensorEntry:
    kind, name, index, shape, dtype, layout, is_hashed, holders = value
    if kind not in KINDS:
        raise ValueError(f"has a tensor of the kind {kind!r:.60}")
    texts, numbers = (name, dtype, layout), (index, *shape, *holders)
    if not all(isinstance(each, str) for each in texts) or not all(type(each) is int for each in numbers):
        raise ValueError("has a tensor whose entries are of other types")
    entry = TensorEntry(Key(kind, name, index), tuple(shape), dtype, layout, bool(is_hashed), tuple(holders))
    if len(parts_of(entry.shape)) != len(shape) or len(holders) != entry.blocks:
        raise ValueError("has a tensor with other blocks than its shape")
    return entry


def _step_of(value: dict[str, Any], table: tuple[TensorEntry, ...], ops: dict[str, tuple[str, ...]]) -> StepDigests:
    blocks = sum(each.blocks for each in table)
    if type(value["step"]) is not int:
        raise ValueError("has a step that is no number")
    return StepDigests(
        step=value["step"],
        loss=float(value["loss"]),
        norm=None if value["norm"] is None else float(value["norm"]),
        entries=table,
        hashes=_decode(value["hashes"], "<i8", blocks),
        sketches=_decode(value["sketches"], "<f8", blocks * SKETCHES).reshape(-1, SKETCHES),
        squares=_decode(value["squares"], "<f8", len(table)),
        largest=_decode(value["largest"], "<f8", len(table)),
        disagreeing=frozenset(value["disagreeing"]),
        ops=ops,
    )
