"""The work behind a tensor of a model: the ops and the lengths of sums in the bound of rounding."""

from __future__ import annotations

from dataclasses import dataclass

from .bound import own_rounding
from .entries import Header, Key


@dataclass(frozen=True, slots=True)
class Structure:
    """A model's modules, the shapes of its parameters, and the dtypes of two runs of it."""

    header: Header
    ranks: int  # of the larger mesh: the most addends of a sum over ranks
    stored: float  # unit roundoff of the coarser of the two runs' dtypes
    reduced: float  # unit roundoff of the coarsest dtype, sums of gradients included

    def own(self, key: Key) -> float:
        """The rounding of the ops between the tensors digested before and this tensor.

        The backward of the modules after a module, in the same parent, computes the module's gradient, so the parent
        counts.
        """
        rows, tokens = self.header.batch
        if key.kind in ("before", "weight"):
            return own_rounding(ops=1, addends=1, length=1, stored=self.reduced)
        module = key.name if key.kind == "output" else key.name.rpartition(".")[0]
        if key.kind == "gradient":
            module = module.rpartition(".")[0]
            length = max(rows * tokens, self._longest(module))
            return own_rounding(ops=self._ops(module), addends=self.ranks, length=length, stored=self.reduced)
        return own_rounding(
            ops=self._ops(module), addends=self.ranks, length=max(tokens, self._longest(module)), stored=self.stored
        )

    def own_of_sum(self) -> float:
        """The rounding of a sum over all tokens of the batch and all parameters' modules, as the loss and the norm."""
        rows, tokens = self.header.batch
        length = max(rows * tokens, self._longest(""))
        return own_rounding(ops=1, addends=self.ranks, length=length, stored=self.stored)

    def chooses(self, key: Key) -> bool:
        """Whether the module of an output sends tokens to experts."""
        return key.kind == "output" and any(
            each == key.name or each.startswith(f"{key.name}.") for each in self.header.choosing
        )

    def _ops(self, module: str) -> int:
        """The module and the modules within; for the model, the modules around the blocks' contents."""
        within = [each for each in self.header.modules if _is_within(each, module)]
        return 1 + len(within)

    def _longest(self, module: str) -> int:
        """The largest dim of the parameters within a module."""
        dims = [max(shape, default=1) for name, shape in self.header.parameters.items() if _is_within(name, module)]
        return max(dims, default=1)


def _is_within(name: str, module: str) -> bool:
    return name.startswith(f"{module}.") if module else bool(name)
