"""The digest of a tensor: numbers by which two runs are compared, whatever the meshes that cut the tensor.

A digest has, for each block of the tensor (`grid.py`):
- a hash: the sum modulo 2^64, over the elements, of bits * a[row] * b[column], where the tensor is seen as a matrix
  whose last dim are the columns. a and b are odd 64-bit numbers mixed from the global index. Sums modulo 2^64 have no
  order, so the hash is the same for any cut of the tensor. Two tensors that differ have the same hash with a
  probability of about 2^-32 (a bilinear form of random weights: Freivalds 1979);
- a sketch: SKETCHES signed sums of the elements in float64, with the sign s[row] * t[column] from the bits of the
  same mix. The sketch is linear, so the sketch of a difference is the difference of sketches, and the mean of its
  squares estimates the difference's squared 2-norm without bias (Johnson and Lindenstrauss 1984; Alon, Matias and
  Szegedy 1996), over 16 blocks of 4 sums with a standard deviation of about a third;
and for the whole tensor the sum of squares and the largest magnitude.

Of a replicated value every rank adds its n-th share, n being the number of replicas, so one wrong replica shows in the
sketch; the hash is the first replica's, and a second sum of hashes is zero where all replicas agree. Addends of a
Partial value are digested before the reduction: the sketch adds them up, and there is no hash.

Everything here runs on the tensor's device, and the host does not wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from .grid import SKETCHES, count_blocks, parts_of

_CHUNK = 2**22  # elements digested at once: bounds the memory of the 64-bit copies to 64 MiB
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of an element


@dataclass(slots=True)
class Digest:
    """The digest of a tensor, or of a rank's part, before the sum over ranks; tensors on the device.

    Sums over ranks, parts and microbatches: each field is added, but `largest` is a maximum.
    """

    hashes: Tensor  # [blocks] int64: of the first replica
    disagreement: Tensor  # [blocks] int64: zero, once summed over ranks, where all replicas have the same hash
    sketches: Tensor  # [blocks, SKETCHES] float64
    squares: Tensor  # scalar, float64: the sum of squares; of a Partial value no sum, since addends are squared
    largest: Tensor  # scalar, float64

    @classmethod
    def zeros(cls, blocks: int, device: torch.device) -> Digest:
        return cls(
            torch.zeros(blocks, dtype=torch.int64, device=device),
            torch.zeros(blocks, dtype=torch.int64, device=device),
            torch.zeros(blocks, SKETCHES, dtype=torch.float64, device=device),
            torch.zeros((), dtype=torch.float64, device=device),
            torch.zeros((), dtype=torch.float64, device=device),
        )

    def add(self, other: Digest) -> None:
        """Add the digest of another part of the tensor, in place."""
        self.hashes += other.hashes
        self.disagreement += other.disagreement
        self.sketches += other.sketches
        self.squares += other.squares
        self.largest = torch.maximum(self.largest, other.largest)


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Where a local tensor [*leading, columns] is in the global tensor, which is seen as a matrix. Made by `place_of`.

    R: the product of the local leading dims. C: the local columns.
    """

    blocks: int  # of the global tensor
    row_weights: Tensor  # [R] int64, odd
    row_signs: Tensor  # [R, SKETCHES] float64
    row_blocks: Tensor  # [R] int64: the row's block, with 0 for the columns' part
    col_weights: Tensor  # [C] int64, odd
    col_signs: Tensor  # [C, SKETCHES] float64
    col_cuts: tuple[tuple[int, int, int], ...]  # (start, stop, part): the local columns of each of the columns' parts
    touched: tuple[int, ...]  # the blocks of which this rank has elements


def place_of(
    shape: Sequence[int],
    slices: Sequence[slice],
    device: torch.device,
    *,
    first_row: int = 0,
    tokens: Tensor | None = None,
) -> Place:
    """Where the local part `slices` of a tensor of `shape` is.

    first_row: added to the indices of dim 0, as for the rows of a microbatch of a batch of `shape[0]` rows.
    tokens: on the CPU, [rows, T] or [1, T] int64, the index along dim 1 of each local row and place; None: `slices[1]`.
    Communication: none.
    """
    shape = tuple(shape) or (1,)
    slices = tuple(slices) or (slice(0, 1),)
    parts = parts_of(shape)
    leading = [torch.arange(each.start, each.stop) for each in slices[:-1]]
    if leading:
        leading[0] = leading[0] + first_row
    n = len(leading)
    row, block = torch.zeros((1,) * n, dtype=torch.int64), torch.zeros((1,) * n, dtype=torch.int64)
    for dim, index in enumerate(leading):
        view = [1] * n
        view[dim] = -1
        if dim == 1 and tokens is not None:
            view[0] = -1 if len(tokens) > 1 else 1
            view[1] = tokens.shape[1]
            index = tokens
        index = index.reshape(view)
        row = row * shape[dim] + index
        block = block * parts[dim] + index * parts[dim] // shape[dim]
    sizes = [each.stop - each.start for each in slices[:-1]]
    row, block = row.expand(sizes).reshape(-1), (block * parts[-1]).expand(sizes).reshape(-1)
    columns = torch.arange(slices[-1].start, slices[-1].stop)
    cuts = []
    part_of_column = columns * parts[-1] // max(1, shape[-1])
    for part in range(parts[-1]):
        places = (part_of_column == part).nonzero().flatten()
        if len(places):
            cuts.append((int(places[0]), int(places[-1]) + 1, part))
    touched = {int(first) + part for first in sorted(set(block.tolist())) for _, _, part in cuts} if len(row) else set()
    return Place(
        blocks=count_blocks(shape),
        row_weights=(_mix(row, 1) | 1).to(device),
        row_signs=_signs(_mix(row, 2)).to(device),
        row_blocks=block.to(device),
        col_weights=(_mix(columns, 3) | 1).to(device),
        col_signs=_signs(_mix(columns, 4)).to(device),
        col_cuts=tuple(cuts),
        touched=tuple(sorted(touched)),
    )


def digest_part(local: Tensor, place: Place, *, replicas: int = 1, is_first: bool = True) -> Digest:
    """The digest of a rank's part of a tensor: of `local`, which lies at `place`.

    replicas: how many ranks hold this part. is_first: whether this rank is the first of them.
    """
    found = Digest.zeros(place.blocks, local.device)
    if local.numel() == 0:
        return found
    matrix = local.detach().reshape(len(place.row_weights), len(place.col_weights))
    rows = max(1, _CHUNK // max(1, matrix.shape[1]))
    for start in range(0, len(matrix), rows):
        _add_rows(found, matrix[start : start + rows], place, slice(start, start + rows))
    found.disagreement = found.hashes * (replicas - 1 if is_first else -1)
    if not is_first:
        found.hashes = torch.zeros_like(found.hashes)
    if replicas > 1:
        found.sketches /= replicas
        found.squares /= replicas
    return found


def _add_rows(found: Digest, matrix: Tensor, place: Place, rows: slice) -> None:
    """Add some rows of a part to its digest."""
    values = matrix.contiguous()
    blocks, weights, signs = place.row_blocks[rows], place.row_weights[rows], place.row_signs[rows]
    bits, real = values.view(_BITS[values.element_size()]).to(torch.int64), values.to(torch.float64)
    for start, stop, part in place.col_cuts:
        columns = slice(start, stop)
        found.hashes.index_add_(0, blocks + part, _weigh(bits[:, columns], place.col_weights[columns]) * weights)
        signed = (real[:, columns] @ place.col_signs[columns]) * signs  # [rows, SKETCHES]
        found.sketches.index_add_(0, blocks + part, signed)
    flat = real.view(-1)
    found.squares += torch.dot(flat, flat)
    found.largest = torch.maximum(found.largest, torch.stack(values.aminmax()).abs().amax().to(torch.float64))


def _weigh(bits: Tensor, weights: Tensor) -> Tensor:
    """The product of a matrix and a vector of int64, modulo 2^64."""
    if bits.device.type == "cpu":
        return torch.mv(bits, weights)
    return (bits * weights).sum(1)  # torch has no such product on GPUs


def _signs(mixed: Tensor) -> Tensor:
    """SKETCHES signs of each number, from its bits: [n, SKETCHES] float64."""
    bits = (mixed.unsqueeze(1) >> torch.arange(8, 8 + SKETCHES)) & 1
    return 1.0 - 2.0 * bits.to(torch.float64)


def _mix(index: Tensor, purpose: int) -> Tensor:
    """A 64-bit number for each index, the same everywhere: SplitMix64 (Steele et al. 2014) of (index, purpose)."""
    z = index * _signed(0x9E3779B97F4A7C15) + _seed(purpose)
    z = (z ^ _shift(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shift(z, 27)) * _signed(0x94D049BB133111EB)
    return z ^ _shift(z, 31)


def _shift(z: Tensor, bits: int) -> Tensor:
    """Logical shift to the right."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _signed(number: int) -> int:
    """The int64 with the bits of an unsigned 64-bit number."""
    return number - 2**64 if number >= 2**63 else number


@lru_cache(maxsize=16)
def _seed(purpose: int) -> int:
    return _signed(purpose * 0xD1342543DE82EF95 % 2**64)
