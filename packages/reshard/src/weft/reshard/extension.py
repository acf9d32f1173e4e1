"""Names for `weft.kernels`, `weft.models` and extensions, beside the public names of `weft.reshard`.

The packages above `weft.reshard` import from these two modules only. The names come from the folders of `weft.reshard`:
moving (tensors change layout), planning (which steps), training (gradients and gathered parameters), and world (process
groups). A release may rename a name here; the changelog then gives the new name.
"""

from .moving.collectives import (
    Pending,
    Running,
    all_gather,
    reduce_scatter,
    start_all_gather,
    start_sum,
)
from .moving.compiled import COMMUNICATING
from .moving.dtensor import (
    as_process_mesh,
    dtensor_spec,
    layout_on,
    local_of,
    memory_of,
    mesh_argument,
    shape_of,
    torch_layout,
    wrap,
    wrap_with_spec,
)
from .moving.executor import record_received, replay_received, run_or_replay, start_plan
from .moving.order_check import LazyText, announce
from .moving.reshard import StartedReshard, begin_in_graph, finish_in_graph
from .moving.tree import stacked_shape
from .moving.waits import WaitTimer, measure_waits, wait_for
from .planning.layouts import cotangent, partial_axes, shard_replicated_axes
from .training.buckets import observing_buckets
from .training.cut_models import CutModel
from .training.full_parameters import contiguous_shard_slices
from .training.gathered_modules import (
    gather_when_called,
    gathering_units,
    keep_gathered,
    layout_in_call,
    with_fixed_parameters,
)
from .training.gradient_sync import BUCKET_BYTES, local_grad_callback
from .training.hooks import differentiable, tensors_of, with_mixin
from .training.pending_gradient import GradPlaceholder
from .training.separate_uses import separate_use
from .training.unit import ParameterSlot
from .world.collective_bytes import Call, Collective, bytes_of_call, count_as, group_of_call, kind_of_op
from .world.dynamo import between_graphs, guard_shapes, in_graph, is_compiling
from .world.exact import NAMED, exact_axes, mark_exact, named_axes_key, named_size
from .world.folded import Fold, FoldedMesh, FoldIndex, run_in_turn
from .world.groups import (
    axes_of_group,
    axis_group,
    device_mesh,
    format_ranks,
    graph_name_of,
    group_along,
    group_for,
    group_named,
    group_over,
    process_mesh,
    this_rank,
    world_cache,
)
from .world.recording import Recorded, recording
from .world.shape_cache import ShapesMode, add_dtensors
from .world.world import members_by_position, world

__all__ = [
    "BUCKET_BYTES",
    "COMMUNICATING",
    "NAMED",
    "Call",
    "Collective",
    "CutModel",
    "Fold",
    "FoldIndex",
    "FoldedMesh",
    "GradPlaceholder",
    "LazyText",
    "ParameterSlot",
    "Pending",
    "Recorded",
    "Running",
    "ShapesMode",
    "StartedReshard",
    "WaitTimer",
    "add_dtensors",
    "all_gather",
    "announce",
    "as_process_mesh",
    "axes_of_group",
    "axis_group",
    "begin_in_graph",
    "between_graphs",
    "bytes_of_call",
    "contiguous_shard_slices",
    "cotangent",
    "count_as",
    "device_mesh",
    "differentiable",
    "dtensor_spec",
    "exact_axes",
    "finish_in_graph",
    "format_ranks",
    "gather_when_called",
    "gathering_units",
    "graph_name_of",
    "group_along",
    "group_for",
    "group_named",
    "group_of_call",
    "group_over",
    "guard_shapes",
    "in_graph",
    "is_compiling",
    "keep_gathered",
    "kind_of_op",
    "layout_in_call",
    "layout_on",
    "local_grad_callback",
    "local_of",
    "mark_exact",
    "measure_waits",
    "members_by_position",
    "memory_of",
    "mesh_argument",
    "named_axes_key",
    "named_size",
    "observing_buckets",
    "partial_axes",
    "process_mesh",
    "record_received",
    "recording",
    "reduce_scatter",
    "replay_received",
    "run_in_turn",
    "run_or_replay",
    "separate_use",
    "shape_of",
    "shard_replicated_axes",
    "stacked_shape",
    "start_all_gather",
    "start_plan",
    "start_sum",
    "tensors_of",
    "this_rank",
    "torch_layout",
    "wait_for",
    "with_fixed_parameters",
    "with_mixin",
    "world",
    "world_cache",
    "wrap",
    "wrap_with_spec",
]
