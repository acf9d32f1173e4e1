"""`parallelize`: a single-device model laid out on a mesh, its parameters DTensors, its boundaries reshards."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from weft.mesh import ProcessMesh
from weft.reshard import distribute
from weft.reshard.running.dtensor import as_process_mesh, one_mesh

from .boundaries import hook
from .layouts import check_units, has_tensor_axis, parameter_layouts
from .plan import ParallelPlan, resolve
from .recompute import recompute
from .styles import TENSOR_AXIS


def parallelize(
    model: nn.Module,
    mesh: ProcessMesh | DeviceMesh | None = None,
    plan: ParallelPlan | None = None,
    *,
    device_mesh: ProcessMesh | DeviceMesh | None = None,
) -> nn.Module:
    """`model` itself, laid out on `mesh` by `plan`: parameters become DTensors, and the layers' boundaries reshard.

    plan: the model's own where None. device_mesh: torch's name for the mesh; give one of the two.
    Parameters may be on the meta device. Tied parameters, found by identity, stay tied. On a mesh of one process the
    parameters are left as they are. Give it tokens as a DTensor, sharded over the data axes; plain tokens count as replicated.
    Communication: none here, but for the mesh's process groups where they are new; in the forward, for every
    row- or vocab-parallel layer one reduction of its output, and in the backward one for every input that
    column-parallel layers share.
    Raises ValueError as `resolve` does, where tied parameters are given two layouts, where a head would be cut, and for no mesh or two.
    """
    given = one_mesh(mesh, device_mesh)
    if given is None:
        raise ValueError("parallelize needs a mesh to lay the model out on")
    mesh = as_process_mesh(given)
    if plan is None:
        plan = model.parallel_plan()  # type: ignore[operator]
    styles = resolve(model, plan)  # a mistake in the plan is one on any mesh
    recompute(model, plan)
    if mesh.size == 1:
        return model
    if has_tensor_axis(mesh):
        check_units(model, styles, mesh.axis_size(TENSOR_AXIS))
    layouts = parameter_layouts(model, mesh, styles)
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module_name, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter not in made:
                layout = layouts[f"{module_name}.{name}".lstrip(".")]
                made[parameter] = nn.Parameter(distribute(parameter.detach(), layout), parameter.requires_grad)
            module.register_parameter(name, made[parameter])
    if has_tensor_axis(mesh):
        hook(model, styles, plan)
    return model
