"""The digest of a tensor: numbers by which two runs are compared, whatever the meshes that cut the tensor.

A digest has, for each block of the tensor (`record_file.py: parts_of`):
- a hash: the sum modulo 2^64, over the elements, of bits * a[row] * b[column], where the tensor is seen as a matrix
  whose last dim are the columns. a and b are odd 64-bit numbers mixed from the global index. Sums modulo 2^64 have no
  order, so the hash is the same for any cut of the tensor. Two tensors that differ have the same hash with a
  probability of about 2^-32 (a bilinear form of random weights: Freivalds 1979);
- a sketch: SKETCHES signed sums of the elements in float64, with the sign s[row] * t[column] from the bits of the
  same mix. The sketch is linear, so the sketch of a difference is the difference of sketches, and the mean of its
  squares estimates the difference's squared 2-norm without bias (Johnson and Lindenstrauss 1984; Alon, Matias and
  Szegedy 1996), over 16 blocks of 4 sums with a standard deviation of about a third;
and for the whole tensor the sum of squares and the largest magnitude.

Digests of all ranks are added. With n replicas of a value, each rank divides the replica's sketch by n, and a wrong
replica shows in the sum. The hash is the first replica's; a second sum of hashes (`disagreement`) is zero where all
replicas agree. Addends of a Partial value are digested before the reduction: the sum of their sketches is the sketch of
the reduced value, and there is no hash.

`MicrobatchTokens` gives the places of a microbatch's tokens in the batch, from which the global indices follow. Digests
are computed on the tensor's device, and the host does not wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from weft.kernels.extension import Runs
from weft.reshard import layout_of

from ..parallel.batch import ModelArguments
from ..parallel.packed.exchange import RowOrders
from ..parallel.pipeline.step import Microbatch
from .record_file import SKETCHES, count_blocks, parts_of

_CHUNK = 2**22  # elements digested at once: bounds the memory of the 64-bit copies to 64 MiB
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of an element


@dataclass(slots=True)
class Digest:
    """The digest of a rank's part of a tensor, on the tensor's device. For the numbers, see the top of this file.

    The digest of the whole tensor is the sum over parts, microbatches and ranks, but for `largest` the maximum.
    """

    hashes: Tensor  # [blocks] int64: zero but on the first replica
    disagreement: Tensor  # [blocks] int64: the sum over ranks is zero where all replicas have the same hash
    sketches: Tensor  # [blocks, SKETCHES] float64
    squares: Tensor  # scalar, float64: the sum of squares; without meaning for a Partial value (squares of addends)
    largest: Tensor  # scalar, float64: the largest magnitude

    @classmethod
    def zeros(cls, blocks: int, device: torch.device) -> Digest:
        """The digest of no elements. blocks: of the global tensor."""
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
class TensorPlace:
    """A local tensor's place in the global tensor, for `digest_part`: weights and signs from global indices.

    The local tensor [*leading, C] is seen as a matrix [R, C], R being the product of the leading dims. Made by
    `place_of`, once for all tensors at the same place.
    """

    blocks: int  # of the global tensor
    row_weights: Tensor  # [R] int64, odd: a[row] of the hash
    row_signs: Tensor  # [R, SKETCHES] float64: s[row] of the sketch
    row_blocks: Tensor  # [R] int64: the block of the row's elements in part 0 of the columns
    col_weights: Tensor  # [C] int64, odd: b[column] of the hash
    col_signs: Tensor  # [C, SKETCHES] float64: t[column] of the sketch
    col_cuts: tuple[tuple[int, int, int], ...]  # (start, stop, part) of local columns: add part to row_blocks
    touched: tuple[int, ...]  # the blocks with elements on this rank


def place_of(
    shape: Sequence[int],
    slices: Sequence[slice],
    device: torch.device,
    *,
    first_row: int = 0,
    tokens: Tensor | None = None,
) -> TensorPlace:
    """The place of the local tensor at `slices` of a global tensor of `shape`.

    first_row: added to the indices of dim 0: the first row of a microbatch in a batch of `shape[0]` rows.
    tokens: where tokens lie in memory out of reading order, on the CPU: the global index along dim 1 of each local
        token, int64 [rows, local tokens], or [1, local tokens] for all rows. None: the indices are `slices[1]`. With
        tokens, `shape` has at least three dims.
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
    return TensorPlace(
        blocks=count_blocks(shape),
        row_weights=(_mix(row, 1) | 1).to(device),
        row_signs=_signs(_mix(row, 2)).to(device),
        row_blocks=block.to(device),
        col_weights=(_mix(columns, 3) | 1).to(device),
        col_signs=_signs(_mix(columns, 4)).to(device),
        col_cuts=tuple(cuts),
        touched=tuple(sorted(touched)),
    )


def digest_part(local: Tensor, place: TensorPlace, *, replicas: int = 1, is_first: bool = True) -> Digest:
    """The digest of a rank's part of a tensor: `local`, at `place`. Communication: none.

    replicas: the number of ranks with this part. is_first: whether this rank is the first of these ranks.
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


def _add_rows(found: Digest, matrix: Tensor, place: TensorPlace, rows: slice) -> None:
    """Adds rows of a part to the part's digest `found`. matrix: [rows, C], at `rows` of the place."""
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
    """A pseudorandom int64 for each index, the same on every machine: SplitMix64 (Steele et al. 2014).

    purpose: a number for each independent sequence.
    """
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
    """The start of a purpose's sequence in `_mix`."""
    return _signed(purpose * 0xD1342543DE82EF95 % 2**64)


class MicrobatchTokens:
    """Where a microbatch's tokens [B, T] are in the batch, from row `first` on, and which tokens are on this rank."""

    def __init__(self, tokens: Tensor, first: int, order: Runs | RowOrders | None) -> None:
        self.shape = tuple(tokens.shape)
        self.layout = layout_of(tokens) if isinstance(tokens, DTensor) else None
        self.first = first  # the microbatch's first row in the batch
        self.local = tuple((tokens.to_local() if isinstance(tokens, DTensor) else tokens).shape)
        self.order = order  # of tokens in memory; None: reading order

    def has_rows(self, tensor: Tensor) -> bool:
        """Whether a tensor has this microbatch's rows and tokens: [B, T, ...], as a DTensor or as the local part."""
        shape = tuple(tensor.shape)
        return shape[:2] == (self.shape if isinstance(tensor, DTensor) or self.layout is None else self.local)

    def places(self, cut: slice) -> Tensor | None:
        """The index in the row of each token in the slice `cut` of memory; None in reading order. For `place_of`."""
        if self.order is None:
            return None
        if isinstance(self.order, RowOrders):
            return self.order.places(torch.device("cpu"))[:, cut]
        return torch.cat([torch.arange(start, stop) for start, stop in self.order])[cut].unsqueeze(0)


def tokens_of_microbatches(arguments: ModelArguments, microbatches: Sequence[Microbatch]) -> list[MicrobatchTokens]:
    """The tokens of each microbatch of a step. arguments: of the model."""
    found, first = [], 0
    for each in microbatches:
        tokens = arguments.tokens(each.args, each.kwargs)
        found.append(MicrobatchTokens(tokens, first, arguments.order(each.args, each.kwargs)))
        first += tokens.shape[0]
    return found
