"""Names for the other Weft packages and for extensions: the packages import nothing else from inside `weft.reshard`.

By wing: who communicates (world), tensors from layout to layout (moving), gradients and gathered parameters (training).
A release may rename them; the changelog says how.
"""

from .moving.collectives import Pending, Running, Waits, measured_by, reduce_scatter, start_all_gather, wait_for
from .moving.compiled import COMMUNICATING
from .moving.dtensor import (
    as_process_mesh,
    kind_of,
    layout_on,
    memory_of,
    of_kind,
    one_mesh,
    shape_of,
    torch_layout,
    wrap,
)
from .moving.executor import giving, keeping, started
from .moving.reshard import StartedReshard, begin_in_graph, finish_in_graph
from .planning.layouts import cotangent, sharded_over
from .training.gathered_modules import (
    Place,
    gather_when_called,
    keeping_gathered,
    layout_in_call,
    units_of,
    with_fixed_parameters,
)
from .training.gradient_sync import BUCKET_BYTES, takes_addends
from .training.pending_gradient import Waiting
from .training.trees import tensors_of
from .training.whole_parameters import stretch_in
from .world.collective_bytes import Collective, bytes_of_call, group_of_call, kind_of_op
from .world.dynamo import guard_shapes, in_graph, is_compiling
from .world.groups import (
    axes_of_group,
    axis_group,
    device_mesh,
    group_for,
    group_named,
    group_over,
    name_of,
    of_this_world,
    process_mesh,
    this_rank,
)
from .world.recording import Recorded, recording
from .world.world import world

__all__ = [
    "BUCKET_BYTES",
    "COMMUNICATING",
    "Collective",
    "Pending",
    "Place",
    "Recorded",
    "Running",
    "StartedReshard",
    "Waiting",
    "Waits",
    "as_process_mesh",
    "axes_of_group",
    "axis_group",
    "begin_in_graph",
    "bytes_of_call",
    "cotangent",
    "device_mesh",
    "finish_in_graph",
    "gather_when_called",
    "giving",
    "group_for",
    "group_named",
    "group_of_call",
    "group_over",
    "guard_shapes",
    "in_graph",
    "is_compiling",
    "keeping",
    "keeping_gathered",
    "kind_of",
    "kind_of_op",
    "layout_in_call",
    "layout_on",
    "measured_by",
    "memory_of",
    "name_of",
    "of_kind",
    "of_this_world",
    "one_mesh",
    "process_mesh",
    "recording",
    "reduce_scatter",
    "shape_of",
    "sharded_over",
    "start_all_gather",
    "started",
    "stretch_in",
    "takes_addends",
    "tensors_of",
    "this_rank",
    "torch_layout",
    "units_of",
    "wait_for",
    "with_fixed_parameters",
    "world",
    "wrap",
]
