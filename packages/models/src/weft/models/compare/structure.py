"""How much rounding a tensor's own computation makes: ops counted by modules, lengths of sums by parameters' shapes."""

from __future__ import annotations

from dataclasses import dataclass

from .bound import own_rounding
from .entries import Header, Key


@dataclass(frozen=True, slots=True)
class Structure:
    """The numbers of two runs of a model that the bound needs: `own` of bound.py for each tensor."""

    header: Header  # of either run: modules, shapes of parameters, and batch are the same
    ranks: int  # of the larger mesh: the most addends of a sum over ranks
    stored: float  # the unit roundoff of the coarser dtype of the two runs
    reduced: float  # the unit roundoff of the coarsest dtype, reduce_dtype included

    def own(self, key: Key) -> float:
        """The relative rounding of all ops between the tensors digested earlier and this tensor.

        These are the ops of an output's own module. The gradient of an output is made by the backward of the modules
        that follow in the same parent, and all ops of the parent count.
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
        """The relative rounding of the loss and of the norm: a sum over all tokens of the batch."""
        rows, tokens = self.header.batch
        length = max(rows * tokens, self._longest(""))
        return own_rounding(ops=1, addends=self.ranks, length=length, stored=self.stored)

    def chooses(self, key: Key) -> bool:
        """Whether the tensor is the output of a module in which tokens choose experts."""
        return key.kind == "output" and any(
            each == key.name or each.startswith(f"{key.name}.") for each in self.header.choosing
        )

    def _ops(self, module: str) -> int:
        """The number of ops of a module, estimated: the module and all modules within. "" is the model."""
        within = [each for each in self.header.modules if _is_within(each, module)]
        return 1 + len(within)

    def _longest(self, module: str) -> int:
        """The longest sum of a module, estimated: the largest dim of the parameters within. "" is the model."""
        dims = [max(shape, default=1) for name, shape in self.header.parameters.items() if _is_within(name, module)]
        return max(dims, default=1)


def _is_within(name: str, module: str) -> bool:
    """Whether a module or parameter is within a module; "" is the model, around all but itself."""
    return name.startswith(f"{module}.") if module else bool(name)
