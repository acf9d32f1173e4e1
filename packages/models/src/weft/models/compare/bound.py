"""How far rounding alone can take two runs apart: the bound by which a difference is called a bug.

`Structure` counts the roundings of a tensor's own computation: ops by modules, lengths of sums by parameters' shapes.

Differences are relative 2-norms of whole tensors: |A - B| / |A|. The unit roundoff u of a dtype is half the distance of
1 to the next number: 2^-24 in float32, 2^-8 in bfloat16.

A module's results differ by

    allowed = AMPLIFICATION * max(own, before)

before: the largest difference among the tensors computed earlier in the step, and of the weights (all weights together
    count as a single tensor). A module's output is thus judged by the module's inputs.
own: the rounding of the module itself, sqrt(ops * (addends * u_stored^2 + length * u_summed^2)), where every op rounds
    the result once to the run's stored dtype (u_stored), each of `addends` ranks' addends is rounded once more, and a
    sum of `length` products adds up roundings of the float32 accumulator (u_summed) as a random walk: roundings have
    random signs, and n roundings grow as sqrt(n) (Higham and Mary 2019), not as n.

AMPLIFICATION, the only constant, is 8: the condition number allowed to a module. Norms, products with weights of random
signs, gates and softmax have condition numbers of about 1 to 4, and the estimate of a norm by sketches may be wrong by
a factor of 1.5; 8 leaves a margin. A bug smaller than a few roundings of a tensor is not seen; for such a bug, compare
runs with the same bits.

Two places are not continuous, and amplify without bound: `allowed` becomes sqrt(allowed), since a share d of the
elements is within d of a jump of the result, and each of these elements changes by the element's own size.
- A router's choice of experts: a token whose two best experts are closer than d may take either expert.
- The update by any optimizer, because Adam and its kin are like this: a gradient smaller than the difference changes
  sign, and so does the whole update, the weight after minus the weight before. An update may differ by
  sqrt(4 * allowed).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .record_file import Header, Key

AMPLIFICATION = 8.0
UNIT = {"float64": 2.0**-53, "float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}


def unit_of(*dtypes: str) -> float:
    """The largest unit roundoff of some dtypes; float32's for dtypes outside of `UNIT`."""
    return max(UNIT.get(each, UNIT["float32"]) for each in dtypes)


def own_rounding(*, ops: int, addends: int, length: int, stored: float, summed: float = UNIT["float32"]) -> float:
    """The relative difference made by a module's own roundings: `own` at the top of this file.

    ops: results rounded in a row. addends: ranks whose addends are summed in the stored dtype. length: terms
    of the longest sum. stored, summed: unit roundoffs.
    """
    return math.sqrt(ops * (addends * stored**2 + length * summed**2))


def allowed_difference(own: float, before: float, *, chooses: bool = False, is_update: bool = False) -> float:
    """The largest relative difference of a tensor that rounding explains: `allowed` at the top of this file.

    A result of 1 or more allows any difference.
    own: of `own_rounding`. before: `before` at the top of this file; for an update, the largest relative difference of
        the parameter's gradients.
    chooses: whether the tensor's module sends tokens to experts. is_update: whether the tensor is a parameter's update.
    """
    smooth = AMPLIFICATION * max(own, before)
    if is_update:
        return max(smooth, math.sqrt(4 * smooth))
    return max(smooth, math.sqrt(smooth)) if chooses else smooth


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
