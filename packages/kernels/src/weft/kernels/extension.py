"""Names for the other Weft packages and for extensions: the packages import nothing else from inside `weft.kernels`.

Making an op (`Op`, `Sharding`, `apply`, `infer_gradient_layouts`), observing the calls of ops, counting an op's
traffic, the device that meta tensors stand for, delaying weight gradients, tokens in another order, tokens sorted by
expert, attention to received keys, dropout of rows in orders of their own, and the choice of overlapped products. A
release may rename them; the changelog says how.
"""

from .attention.exchanged import Places, ReceivedKeys
from .attention.options import VisibleKeys
from .attention.sharded.op import attention_to_received
from .cross_entropy.merged import weigh_targets
from .dispatch.backend import has_data, is_autocasting, is_compiling, meta_as_cpu
from .dispatch.delayed_weight_gradients import (
    DelayedGradients,
    allow_delayed_weight_gradients,
    delay_weight_gradients,
)
from .dispatch.op import Op, OpPart, observing
from .dispatch.sharded import Sharding, apply, cast_for, infer_gradient_layouts, sharing_casts
from .dispatch.sharded.call_plan import find_slice_layout, slice_gradient
from .dispatch.sharded.functions import apply_function
from .dispatch.sharded.second_derivatives import refuse_second_derivative
from .dispatch.token_order import Runs, as_laid, as_read
from .dropout.sharded import dropout_by_row
from .launching.traffic import counted_traffic
from .matmul.sharded.choice import MEASURED, OverlappedOp, faster_in_steps
from .plain import pack, unpack
from .random import normal_
from .routing import sort_by_expert

__all__ = [
    "MEASURED",
    "DelayedGradients",
    "Op",
    "OpPart",
    "OverlappedOp",
    "Places",
    "ReceivedKeys",
    "Runs",
    "Sharding",
    "VisibleKeys",
    "allow_delayed_weight_gradients",
    "apply",
    "apply_function",
    "as_laid",
    "as_read",
    "attention_to_received",
    "cast_for",
    "counted_traffic",
    "delay_weight_gradients",
    "dropout_by_row",
    "faster_in_steps",
    "find_slice_layout",
    "has_data",
    "infer_gradient_layouts",
    "is_autocasting",
    "is_compiling",
    "meta_as_cpu",
    "normal_",
    "observing",
    "pack",
    "refuse_second_derivative",
    "sharing_casts",
    "slice_gradient",
    "sort_by_expert",
    "unpack",
    "weigh_targets",
]
