"""A plan: the steps from one layout to another, as a value that can be priced, printed and simulated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from weft.mesh import Layout, LayoutError, Partial, Replicate

from .search import cheapest, without_trivial_axes
from .steps import Step, follow, received_elements


@dataclass(frozen=True)
class Plan:
    """How a tensor of `shape` and `dtype` goes from `src` to `dst`; the same on every rank."""

    src: Layout
    dst: Layout
    shape: tuple[int, ...]
    dtype: torch.dtype
    steps: tuple[Step, ...]

    @cached_property
    def layouts(self) -> tuple[Layout, ...]:
        """The layout before each step."""
        layouts = [without_trivial_axes(self.src)]
        for step in self.steps:
            layouts.append(follow(step, layouts[-1]))
        return tuple(layouts[:-1])

    def received_bytes(self, rank: int) -> int:
        """Bytes that arrive at `rank` from other ranks; the algorithms counted are stated in `steps.py`."""
        return self.dtype.itemsize * sum(
            received_elements(step, layout, self.shape, rank)
            for step, layout in zip(self.steps, self.layouts, strict=True)
        )

    @property
    def max_received_bytes(self) -> int:
        return max(self.received_bytes(rank) for rank in self.src.mesh.ranks)

    def explain(self) -> str:
        """The steps with the layout after each, and the bytes that the first rank receives."""
        rank = self.src.mesh.ranks[0]
        lines = [f"({self.src}) -> ({self.dst})  {self.dtype} {self.shape}  {self.max_received_bytes} bytes received"]
        for step, layout in zip(self.steps, self.layouts, strict=True):
            received = self.dtype.itemsize * received_elements(step, layout, self.shape, rank)
            lines.append(f"  {step}: ({layout}) -> ({follow(step, layout)}), {received} bytes")
        return "\n".join(lines if self.steps else [*lines, "  nothing to do"])


def plan(src: Layout, dst: Layout, shape: Sequence[int], dtype: torch.dtype) -> Plan:
    """The plan from `src` to `dst` for a global tensor; computed from global metadata alone, cached by value.

    Raises LayoutError where the layouts lie on different meshes, shard a dim that the shape does not have, or name
    reductions that do not go together.
    """
    return _plan(src, dst, tuple(shape), dtype)


@lru_cache(maxsize=65536)
def _plan(src: Layout, dst: Layout, shape: tuple[int, ...], dtype: torch.dtype) -> Plan:
    if src.mesh != dst.mesh:
        raise LayoutError(f"a plan stays on one mesh; the source lies on {src.mesh}, the target on {dst.mesh}")
    for layout in (src, dst):
        layout.check_shape(shape)
        if Partial("avg") in layout.placements and not (dtype.is_floating_point or dtype.is_complex):
            raise LayoutError(f"({layout}) averages {dtype}, which has no fractions; use Partial('sum')")
    steps = cheapest(without_trivial_axes(src), without_trivial_axes(dst), shape)
    return Plan(src, dst, shape, dtype, steps)


@lru_cache(maxsize=65536)
def cotangent(layout: Layout) -> Layout:
    """The layout that the gradient of a tensor is brought to: the tensor's own, Replicate where it is Partial."""
    return layout.replace(
        **{
            axis: Replicate()
            for axis, placement in zip(layout.mesh.axis_names, layout.placements, strict=True)
            if isinstance(placement, Partial)
        }
    )
