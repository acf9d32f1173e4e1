"""The norm inside `exact_sums`: the same bits, however the elements are cut over ranks, tensors and chunks.

As in Demmel and Nguyen, "Parallel Reproducible Summation" (IEEE Transactions on Computers 64, 2015): each power is
rounded to a multiple of a unit, which follows from the largest magnitude of all ranks, and the remainder to a multiple
of a finer unit. Sums of multiples of a unit are sums of integers, which are exact in any order.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..moving.waits import wait_for

# Elements are scaled so that the largest magnitude of all ranks is in [1/2, 1), so powers are at most 1. A power is
# m1 * UNITS[0] + m2 * UNITS[1] + a rest of at most UNITS[1] / 2, with integers |m1|, |m2| <= 2**40.
UNITS = (2.0**-40, 2.0**-81)
# 1.5 * 2**52 units: a float64 between 2**52 and 2**53 units has the spacing of one unit, so adding rounds to units.
ROUNDERS = tuple(1.5 * 2**52 * unit for unit in UNITS)
_ROUNDER_BITS = tuple(struct.unpack("<q", struct.pack("<d", rounder))[0] for rounder in ROUNDERS)
# Elements a chunk. Two float64 buffers of a chunk are all the workspace: 2 MiB on a CPU, in its cache; elsewhere
# 32 MiB. At most 2**22: a chunk's sum of integers of 2**40 is an int64.
CPU_CHUNK, CHUNK = 2**17, 2**21
_LOW = 2**32 - 1  # chunks' sums are added in halves of 32 bits: exact for 2**31 chunks on all ranks together


def exact_norm(
    tensors: Sequence[Tensor], norm_type: float, group: dist.ProcessGroup | None, device: torch.device | None
) -> Tensor:
    """The p-norm of all ranks' elements as one vector: a float64 scalar, with the same bits for any cut of them.

    tensors: this rank's elements, floating-point, of any shapes; an element that several ranks hold is given by one.
    norm_type: p: 1, 2 or inf.
    group: the ranks; None for this rank alone. device: of the result where `tensors` is empty; None: torch's
        default.
    NaN and infinite elements give NaN and infinity. The sum of the powers of n elements has a relative error of at most
    n * 2**-80 and a few roundings of float64, whatever the magnitudes. Powers of float64 elements are rounded first.
    Communication: an all-reduce of a maximum, one int64; but for inf, also an all-reduce of a sum, four int64.
    Raises ValueError for another norm_type.
    """
    if norm_type not in (1, 2, math.inf):
        raise ValueError(
            f"norm_type is {norm_type}, and exact_sums has norms of type 1, 2 and inf only: other powers are not exact "
            f"in float64; give norm_type 2, or leave exact_sums"
        )
    largest_bits = _largest_bits(tensors, device)
    if group is not None:
        wait_for(dist.all_reduce(largest_bits, dist.ReduceOp.MAX, group=group, async_op=True))
    largest = largest_bits.view(torch.float64)
    if math.isinf(norm_type):
        return largest
    # 2 ** -(e + 1) for a largest magnitude in [2**e, 2**(e + 1)). Bits 52 to 62 of a float64 are its exponent + 1023.
    scale = ((2045 - (largest_bits >> 52)).clamp(min=1) << 52).view(torch.float64)
    sums = _sums_of_units(tensors, int(norm_type), scale)
    if group is not None:
        wait_for(dist.all_reduce(sums, group=group, async_op=True))
    high, low = sums
    high, low = high + (low >> 32), low & _LOW
    first, second = (high.double() * 2.0**32 + low.double()).unbind()
    total = first * UNITS[0] + second * UNITS[1]
    norm = (total if norm_type == 1 else total.sqrt()) / scale
    bound = largest * 4  # not finite for magnitudes above the scales, from 2**1022 in float64, and for inf and NaN
    return torch.where(bound.isfinite(), norm, bound)


def _largest_bits(tensors: Sequence[Tensor], device: torch.device | None) -> Tensor:
    """The largest magnitude, as the bits of a float64 in an int64 scalar.

    As integers, the bits have the order of the magnitudes, with NaN above infinity.
    """
    if not tensors:
        return torch.zeros((), dtype=torch.int64, device=device)
    bounds = torch.stack([bound for tensor in tensors for bound in torch.aminmax(tensor)])  # in the widest dtype
    return bounds.double().abs().max().abs().view(torch.int64)  # the last abs: a NaN may have a sign


def _sums_of_units(tensors: Sequence[Tensor], power: int, scale: Tensor) -> Tensor:
    """The sums of m1 and of m2 over the elements' powers (see `UNITS`), in halves of 32 bits.

    power: 1 or 2. scale: a float64 scalar, by which elements are multiplied.
    Returns int64 [2, 2]: the high halves of both sums, then the low halves.
    """
    chunk = CPU_CHUNK if scale.device.type == "cpu" else CHUNK
    if scale.is_meta or not tensors:
        return scale.new_zeros((2, len(UNITS)), dtype=torch.int64)
    size = min(chunk, sum(each.numel() for each in tensors))
    buffers = scale.new_empty((2, size))
    rounder, both = scale.new_full((), ROUNDERS[0]), scale.new_full((), sum(ROUNDERS))
    sums: list[Tensor] = []
    for pieces in _batches(tensors, chunk):
        n = sum(each.numel() for each in pieces)
        scaled, rounded = buffers if n == size else buffers[:, :n]
        torch.cat(pieces, out=scaled)
        scaled.mul_(scale)
        factor = scaled.sign() if power == 1 else scaled
        # Each addcmul rounds to units. The subtraction is exact: its result is ROUNDERS[1] - m1 * UNITS[0].
        torch.addcmul(rounder, scaled, factor, out=rounded)
        sums.append(_sum_of_integers(rounded, 0))
        torch.sub(both, rounded, out=rounded).addcmul_(scaled, factor)
        sums.append(_sum_of_integers(rounded, 1))
    by_chunk = torch.stack(sums).view(-1, len(UNITS))
    return torch.stack([(by_chunk >> 32).sum(0), (by_chunk & _LOW).sum(0)])


def _sum_of_integers(rounded: Tensor, level: int) -> Tensor:
    """The sum of m over elements ROUNDERS[level] + m * UNITS[level]: an int64 scalar.

    The bits of an element are, as an integer, the rounder's bits + m. The sum of the bits wraps at 2**63; subtracting
    the rounders' bits modulo 2**64 gives the sum of m.
    """
    of_rounders = (rounded.numel() * _ROUNDER_BITS[level] + 2**63) % 2**64 - 2**63
    return rounded.view(torch.int64).sum().sub_(of_rounders)


def _batches(tensors: Sequence[Tensor], size: int) -> Iterator[list[Tensor]]:
    """All elements as lists of vectors with together at most `size` elements."""
    batch: list[Tensor] = []
    left = size
    for tensor in tensors:
        for piece in _pieces(tensor, size):
            if piece.numel() > left:
                yield batch
                batch, left = [], size
            batch.append(piece)
            left -= piece.numel()
    if batch:
        yield batch


def _pieces(tensor: Tensor, size: int) -> Iterator[Tensor]:
    """The elements as vectors of at most `size` elements, in any order; views where the memory has no gaps."""
    n = tensor.numel()
    if n <= size:
        yield tensor.reshape(-1)
    elif tensor.is_contiguous():
        yield from torch.split(tensor.view(-1), size)
    elif torch.ops.aten.is_non_overlapping_and_dense(tensor):
        yield from torch.split(tensor.as_strided((n,), (1,)), size)
    else:
        rows = size * len(tensor) // n
        for part in torch.split(tensor, rows) if rows else tensor.unbind():
            yield from _pieces(part, size)
