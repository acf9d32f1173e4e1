"""What an op's rule answers, asked once for operands that lie alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from weft.mesh import Layout, infer
from weft.mesh.infer.terms import one_mesh

from ..op import Op

Shapes = tuple[tuple[int, ...] | None, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Sharding:
    """What a rule answers: how the output lies, how the gradients lie, and what differs between ranks."""

    output: Layout
    shape: tuple[int, ...]  # of the global output
    gradients: Callable[..., tuple[Layout | None, ...]]  # from the layouts in which the outputs' gradients arrive
    local: Callable[[int, DeviceMesh], dict[str, Any]] = lambda rank, mesh: {}  # options of a rank's forward: kept
    # Layout and shape of each further output; None where the op's output is no tuple.
    more: tuple[tuple[Layout, tuple[int, ...]], ...] | None = None

    @property
    def outputs(self) -> tuple[tuple[Layout, tuple[int, ...]], ...]:
        """Layout and shape of each output."""
        return (self.output, self.shape), *(self.more or ())


@lru_cache(maxsize=65536)
def sharding_of(op: Op, layouts: tuple[Layout | None, ...], shapes: Shapes, options: tuple[Any, ...]) -> Sharding:
    """The answer of the op's rule; options: those that it is given, as pairs.

    Raises LayoutError where it does not take how the operands lie.
    """
    one_mesh([layout for layout in layouts if layout is not None], op.name)
    answer: Sharding = op.rule(layouts, shapes, dict(options))
    return answer


def independent(output: Layout, layouts: tuple[Layout | None, ...]) -> Callable[[Layout], tuple[Layout | None, ...]]:
    """The `gradients` of an op whose local parts are computed independently of one another."""
    operands = tuple(layout for layout in layouts if layout is not None)
    return lambda grad: tuple(
        None if layout is None else infer.gradient(output, grad, layout, operands) for layout in layouts
    )
