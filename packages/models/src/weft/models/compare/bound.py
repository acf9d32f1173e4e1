"""How far rounding alone can take two runs apart: the bound by which a difference is called a bug.

Differences are relative 2-norms of whole tensors: |A - B| / |A|. The unit roundoff u of a dtype is half the distance of
1 to the next number: 2^-24 in float32, 2^-9 in bfloat16.

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

Two places are not continuous, and amplify without bound: a difference d becomes sqrt(d), since a share d of the
elements is within d of a jump of the result, and each of these elements changes by the element's own size.
- A router's choice of experts: a token whose two best experts are closer than d may take either expert.
- The update of Adam and its kin: a gradient smaller than the difference changes sign, and so does the whole
  update.
  An update, the weight after minus the weight before, may differ by sqrt(4 * d) for a difference d of gradients.
"""

from __future__ import annotations

import math

AMPLIFICATION = 8.0
UNIT = {"float64": 2.0**-53, "float32": 2.0**-24, "bfloat16": 2.0**-9, "float16": 2.0**-11}


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
    own: of `own_rounding`. before: the largest relative difference among the tensors computed earlier in the step.
    chooses: whether the tensor's module sends tokens to experts. is_update: whether the tensor is a parameter's update.
    """
    smooth = max(own, before)
    if is_update:
        smooth = max(smooth, math.sqrt(4 * smooth))
    elif chooses:
        smooth = max(smooth, math.sqrt(smooth))
    return AMPLIFICATION * smooth
