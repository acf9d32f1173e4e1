"""`parallelize`: a single-device model laid out on a mesh, its parameters DTensors, its boundaries reshards."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from weft.mesh import Layout, ProcessMesh, Shard
from weft.reshard import distribute, layout_of, reshard
from weft.reshard.running.dtensor import as_process_mesh, one_mesh
from weft.reshard.running.dynamo import in_graph

from .plan import TENSOR_AXIS, ColwiseParallel, ParallelPlan, RowwiseParallel, Style, VocabParallel, resolve

TOKENS_DIM = 1  # activations are [B, T, ...]


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
    model is left as it is. Give it tokens as a DTensor, sharded over the data axes; plain tokens count as replicated.
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
        _hook(model, styles, plan)
    return model


def check_units(model: nn.Module, styles: dict[str, Style], ways: int) -> None:
    """Raises ValueError where the outputs of a column-parallel layer would be parted within a unit: a head would be cut."""
    layers: dict[str, Any] = {
        name: module
        for name, module in model.named_modules()
        if isinstance(styles.get(name), ColwiseParallel) and getattr(module, "unit", 1) > 1
    }
    counts = {name: layer.out_features // layer.unit for name, layer in layers.items()}
    for name, count in counts.items():
        if count % ways:
            most = math.gcd(*counts.values())
            works = ", ".join(str(n) for n in range(1, most + 1) if most % n == 0)
            raise ValueError(
                f"{name} has {count} heads of {layers[name].unit}, which cannot be split evenly over {TENSOR_AXIS!r} of "
                f"size {ways}; sizes that work: {works}"
            )


def has_tensor_axis(mesh: ProcessMesh) -> bool:
    """True where tensor parallelism has something to do."""
    return TENSOR_AXIS in mesh.axis_names and mesh.axis_size(TENSOR_AXIS) > 1


def parameter_layouts(model: nn.Module, mesh: ProcessMesh, styles: dict[str, Style]) -> dict[str, Layout]:
    """The layout of every parameter by name, tied names included, those of a module under another name left out.

    Raises ValueError where tied parameters disagree.
    """
    layouts: dict[str, Layout] = {}
    first: dict[nn.Parameter, str] = {}
    for module_name, module in model.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            name = f"{module_name}.{leaf}".lstrip(".")
            layouts[name] = Layout(mesh, _placements(styles.get(module_name), leaf) if has_tensor_axis(mesh) else {})
            other = first.setdefault(parameter, name)
            if layouts[other] != layouts[name]:
                raise ValueError(
                    f"{other!r} and {name!r} are one tied parameter, but the plan lays them out as "
                    f"({layouts[other]}) and ({layouts[name]}); give both modules styles that agree"
                )
    return layouts


def _placements(style: Style | None, leaf: str) -> dict[str, Shard]:
    match style:
        case ColwiseParallel() | VocabParallel():
            return {TENSOR_AXIS: Shard(0)}
        case RowwiseParallel() if leaf == "weight":
            return {TENSOR_AXIS: Shard(1)}
    return {}


def column_siblings(styles: dict[str, Style]) -> dict[str, list[str]]:
    """Column-parallel modules by the name of their parent: those that share an entrance."""
    siblings: dict[str, list[str]] = {}
    for name, style in styles.items():
        if isinstance(style, ColwiseParallel):
            siblings.setdefault(name.rpartition(".")[0], []).append(name)
    return siblings


def _enter(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """A tensor enters a column-parallel layer: it is made whole.

    The forward gathers a sequence-parallel input and moves nothing otherwise; the backward reduces the gradient.
    """
    x, *rest = args
    return (_along_tensor_axis(x, "R"), *rest) if isinstance(x, DTensor) else args  # a plain one counts as replicated


class _Entrance:
    """Where a tensor enters column-parallel siblings: as `_enter`, once, whichever of them come for it."""

    def __init__(self) -> None:
        self._outside: Tensor | None = None
        self._entered: tuple[Any, ...] | None = None

    def enter(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if args[0] is not self._outside or self._entered is None:
            self._outside, self._entered = args[0], _enter(module, args[:1])
        return *self._entered, *args[1:]

    def close(self, *_: object) -> None:
        """Called when the parent returns, so that no activation outlives it."""
        self._outside = self._entered = None


def _hook(model: nn.Module, styles: dict[str, Style], plan: ParallelPlan) -> None:
    modules = dict(model.named_modules())
    places = Counter(module for _, module in model.named_modules(remove_duplicate=False))
    for parent, names in column_siblings(styles).items():
        if len(names) == 1 and places[modules[names[0]]] == 1:
            modules[names[0]].register_forward_pre_hook(_enter)
            continue
        entrance = _Entrance()
        for name in names:
            modules[name].register_forward_pre_hook(entrance.enter)
        modules[parent].register_forward_hook(entrance.close, always_call=True)
    stream = f"S({TOKENS_DIM})" if plan.sequence else "R"
    for name, style in styles.items():
        if isinstance(style, RowwiseParallel | VocabParallel):
            modules[name].register_forward_hook(_leave(stream))
    if not plan.loss_parallel:
        model.register_forward_hook(_leave("R"))


@in_graph
def _along_tensor_axis(x: DTensor, placement: str) -> DTensor:
    """x with another placement on the tensor axis."""
    return reshard(x, placements=_replaced(layout_of(x), placement))


@lru_cache(maxsize=1024)  # a few layouts, asked for at every boundary of every step
def _replaced(layout: Layout, placement: str) -> Layout:
    return layout.replace(**{TENSOR_AXIS: placement})


def _leave(placement: str) -> Callable[[nn.Module, Any, DTensor], DTensor]:
    def hook(module: nn.Module, args: Any, output: DTensor) -> DTensor:
        return _along_tensor_axis(output, placement)

    return hook
