"""Names for the other Weft packages and for extensions: the packages import nothing else from inside `weft.kernels`.

Making an op (`Op`, `Sharding`, `apply`, `independent`), counting an op's traffic, delaying weight gradients, tokens in
another order, attention to received keys, and the choice of overlapped products. A release may rename them; the
changelog says how.
"""

from .attention.exchanged import Places, ReceivedKeys, Seen
from .attention.sharded.exchanged import attention_to_received
from .cross_entropy.merged import of_target
from .dispatch.autocast import is_autocasting
from .dispatch.backend import has_data
from .dispatch.delayed_weight_gradients import Later, waiting_weights, weights_may_wait
from .dispatch.op import Op
from .dispatch.sharded import Sharding, apply, cast_for, independent
from .dispatch.sharded.calls import sliced, sliced_layout
from .dispatch.sharded.functions import recorded, refusing
from .dispatch.token_order import Runs, as_laid, as_read
from .launching.traffic import counted_traffic
from .matmul.sharded.choice import MEASURED, Form, faster_in_steps
from .packing import pack, unpack
from .random import normal_

__all__ = [
    "MEASURED",
    "Form",
    "Later",
    "Op",
    "Places",
    "ReceivedKeys",
    "Runs",
    "Seen",
    "Sharding",
    "apply",
    "as_laid",
    "as_read",
    "attention_to_received",
    "cast_for",
    "counted_traffic",
    "faster_in_steps",
    "has_data",
    "independent",
    "is_autocasting",
    "normal_",
    "of_target",
    "pack",
    "recorded",
    "refusing",
    "sliced",
    "sliced_layout",
    "unpack",
    "waiting_weights",
    "weights_may_wait",
]
