"""Tables for rotary embedding (Su et al. 2021), computed from a config on demand instead of kept as buffers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from weft.mesh import Shard
from weft.reshard import layout_of, reshard
from weft.reshard.extension import dtensor_spec, exact_axes, stacked_shape, this_rank, wrap, wrap_with_spec

from .rope_scaling import DynamicRopeScaling, LinearRopeScaling, Llama3RopeScaling, Rotary, YarnRopeScaling


def compute_rotary_tables(
    rotary: Rotary, rows: int, device: torch.device, length: int | None = None
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the angles of positions 0 to rows - 1: [rows, D // 2] float32 each.

    Called in a traced graph; elsewhere `rotary_tables` caches the result. Computed in float32 like Hugging Face's
    tables, because the published weights were trained with these.
    length: number of tokens up to the last of this call, for dynamic scaling; None: at most max_seq_len.
    """
    frequencies = compute_rotary_frequencies(rotary, device, length)
    angle = torch.outer(torch.arange(rows, device=device).float(), frequencies)
    if rotary.table_scale == 1:
        return angle.cos(), angle.sin()
    return angle.cos() * rotary.table_scale, angle.sin() * rotary.table_scale


def compute_rotary_frequencies(rotary: Rotary, device: torch.device, length: int | Tensor | None = None) -> Tensor:
    """The rotation of each pair of elements from one token to the next, in radians: [D // 2] float32.

    length: number of tokens up to the last of this call, an int or a scalar on the device; used by dynamic scaling
        only. None: at most max_seq_len.
    """
    exponent = torch.arange(0, rotary.head_dim, 2, device=device).float() / rotary.head_dim  # [D // 2]
    match rotary.scaling:
        case DynamicRopeScaling(factor=factor) if length is not None:
            return 1.0 / _dynamic_base(rotary, factor, length, device) ** exponent
        case LinearRopeScaling(factor=factor):
            return 1.0 / rotary.theta**exponent / factor
        case Llama3RopeScaling() as scaling:
            return _llama3(1.0 / rotary.theta**exponent, scaling)
        case YarnRopeScaling() as scaling:
            return _yarn(rotary, rotary.theta**exponent, scaling)
    return 1.0 / rotary.theta**exponent


_ALL_POSITIONS = "_positions_of_all_parts"  # attribute of a microbatch's positions: the positions of all microbatches


def link_positions_of_batch(parts: Sequence[Tensor]) -> None:
    """Links the positions of a batch's microbatches, before the first forward of a step.

    For dynamic rope scaling: `length_of` the positions of any microbatch is then the length of the whole batch.
    """
    # Detached aliases: a tensor referring to itself by an attribute would live until garbage collection.
    aliases = tuple(
        [wrap_with_spec(x.to_local(), dtensor_spec(x)) if isinstance(x, DTensor) else x.detach() for x in parts]
    )
    for each in parts:
        setattr(each, _ALL_POSITIONS, aliases)


def length_of(positions: Tensor) -> Tensor:
    """One more than the highest position of the whole batch: an int64 scalar on the device.

    Communication: where the positions are sharded, an all-reduce of a number over the sharding axes.
    """
    parts: tuple[Tensor, ...] = getattr(positions, _ALL_POSITIONS, (positions,))
    locals_ = [each.to_local() if isinstance(each, DTensor) else each for each in parts]
    nothing = torch.full((), -1, dtype=positions.dtype, device=positions.device)
    highest = torch.stack([each.max() if each.numel() else nothing for each in locals_]).max()
    if isinstance(positions, DTensor):
        layout = layout_of(positions)
        sharded = [axis for axis in layout.mesh.axis_names if isinstance(layout[axis], Shard)]
        partial = layout.replace(**dict.fromkeys(sharded, "P(max)"))
        if exact_axes() is not None:  # an addend for each coordinate; the largest has any number of equals
            highest = highest.expand(stacked_shape(partial, (), this_rank())).contiguous()
        own = wrap(highest, partial, ())
        highest = reshard(own, placements=layout.replace(**dict.fromkeys(sharded, "R"))).to_local()
    return highest + 1


def _dynamic_base(rotary: Rotary, factor: float, length: int | Tensor, device: torch.device) -> Tensor:
    """The base under dynamic scaling: a scalar computed on the device, without a wait of the host for `length`."""
    scaled_length = torch.as_tensor(length, device=device).clamp(min=rotary.max_seq_len)
    growth = factor * scaled_length / rotary.max_seq_len - (factor - 1)
    base: Tensor = rotary.theta * growth ** (rotary.head_dim / (rotary.head_dim - 2))
    return base


def _llama3(frequency: Tensor, scaling: Llama3RopeScaling) -> Tensor:
    turns = scaling.original_max_seq_len * frequency / (2 * math.pi)  # full rotations within the original context
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = blend.clamp(0, 1)  # 0: long wavelength, stretched; 1: short wavelength, unchanged
    return (1 - blend) * frequency / scaling.factor + blend * frequency


def _yarn(rotary: Rotary, wavelength: Tensor, scaling: YarnRopeScaling) -> Tensor:
    """wavelength: [D // 2], divided by 2 pi. `pair` finds the pair with n rotations, as in YaRN's eq. 17."""

    def pair(turns: float) -> float:
        ratio = scaling.original_max_seq_len / (turns * 2 * math.pi)
        return rotary.head_dim * math.log(ratio) / (2 * math.log(rotary.theta))

    low, high = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary.head_dim - 1)
    if low == high:
        high += 0.001  # as in transformers
    number = torch.arange(rotary.head_dim // 2, device=wavelength.device, dtype=torch.float32)
    stretched = ((number - low) / (high - low)).clamp(0, 1)
    return stretched / (scaling.factor * wavelength) + (1 - stretched) / wavelength


@lru_cache(maxsize=32)
@torch.inference_mode(False)  # cached tables must work in training, even if first made in inference
@torch.no_grad()
def rotary_tables(rotary: Rotary, rows: int, device: torch.device, length: int | None = None) -> tuple[Tensor, Tensor]:
    """`compute_rotary_tables` of the same arguments, cached. Not for a traced graph, which computes its own tables."""
    return compute_rotary_tables(rotary, rows, device, length)


@lru_cache(maxsize=32)
@torch.inference_mode(False)
@torch.no_grad()
def rotary_frequencies(rotary: Rotary, device: torch.device) -> Tensor:
    """`compute_rotary_frequencies` for lengths up to max_seq_len, cached. Not for a traced graph.

    For a model called with `positions`, whose tables `kernels.rope_tables` makes from the frequencies.
    """
    return compute_rotary_frequencies(rotary, device)
