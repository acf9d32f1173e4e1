"""What an op's rule answers, asked once for operands that lie alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from weft.mesh import Layout, LayoutError, infer
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


def of_several(
    name: str, gradients: Callable[[Layout], tuple[Layout | None, ...]], shared: int
) -> Callable[..., tuple[Layout | None, ...]]:
    """The `gradients` of an op of several outputs, whose gradients arrive in one layout. name: of the op.

    shared: how many of the operands, the first, have a gradient from each output; the others from the last alone.
    """

    def found(*grads: Layout | None) -> tuple[Layout | None, ...]:
        arrived = {grad for grad in grads if grad is not None}
        if len(arrived) > 1:
            raise LayoutError(
                f"{name}: the gradients lie as {' and '.join(f'({each})' for each in arrived)}; reshard one"
            )
        layouts = gradients(arrived.pop())
        return layouts if grads[-1] is not None else layouts[:shared] + (None,) * (len(layouts) - shared)

    return found
