"""Runs a rank's step on shapes, and notes module and line of each collective, for golden files."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import nn
from weft.mesh import ProcessMesh
from weft.reshard.extension import Call, Collective

from ..parallel import ParallelPlan
from ..parallel.parameter_layouts import layouts_of, shapes_of
from ..step.communication import PHASES, Phase
from ..step.record import StepShape, on_shapes
from .golden import Parameter, SitedCollectives, join_names
from .site import Site, finding_sites


@dataclass(frozen=True, slots=True)
class SitedStep:
    """A rank's step as in a golden file: the collectives with their sites, and the rank's parameters by name."""

    collectives: tuple[SitedCollectives, ...]
    parameters: Mapping[str, Parameter]


def record_sites(
    model: nn.Module,
    mesh: ProcessMesh,
    plan: ParallelPlan,
    shape: StepShape,
    *,
    clip_norm: float | None = None,
    update: Callable[[nn.Module], None] | None = None,
) -> SitedStep:
    """Record the collectives of rank `shape.rank` in a step, each with its site. Called to make golden files.

    Arguments and errors: as for `run_on_shapes`. update: the optimizer's step, whose collectives are recorded too.
    Cost: a run on shapes, and a walk up the stack for each node of autograd's graph. Communication: none.
    """
    found: list[tuple[Phase, Collective, Site]] = []
    with on_shapes(model, mesh, plan, shape) as ready:
        assert ready is not None, "the rank is one of the mesh"
        unphased: list[tuple[Collective, Site]] = []

        def after_phase(phase: Phase) -> None:
            found.extend((phase, *each) for each in unphased)
            unphased.clear()

        with finding_sites(ready.model) as find:

            def listen(call: Call) -> Callable[[], None]:
                if call.collective is not None:
                    unphased.append((call.collective, find()))
                return _continue

            ready.recorded.listener = listen
            try:
                ready.run(after_phase, clip_norm=clip_norm)
                if update is not None:
                    update(ready.model)
                    after_phase("optimizer")
            finally:
                ready.recorded.listener = None
        layouts = layouts_of(ready.model)
        parameters = {
            name: Parameter(shape=shape, layout=None if layouts[name] is None else str(layouts[name]))
            for name, shape in shapes_of(ready.model).items()
        }
    return SitedStep(_grouped(found), parameters)


def _continue() -> None:
    """Called where the program waits for a collective; waits are not recorded here."""


def _grouped(found: list[tuple[Phase, Collective, Site]]) -> tuple[SitedCollectives, ...]:
    """Collectives counted by phase, kind, axes, line and module; modules with equal counts joined in one entry."""
    sums: dict[tuple[Phase, str, tuple[str, ...], Site], list[int]] = {}
    for phase in PHASES:
        for own_phase, collective, site in found:
            if own_phase == phase:
                total = sums.setdefault((phase, collective.kind, collective.axes, site), [0, 0])
                total[0] += 1
                total[1] += collective.nbytes
    groups: dict[SitedCollectives, list[str | None]] = {}
    for (phase, kind, axes, site), (count, nbytes) in sums.items():
        issued = SitedCollectives(
            phase=phase, kind=kind, axes=axes, modules=None, count=count, bytes=nbytes, file=site.file, line=site.line,
            code=site.code,
        )  # fmt: skip
        groups.setdefault(issued, []).append(site.module)
    result: list[SitedCollectives] = []
    for issued, modules in groups.items():
        result += [issued] if None in modules else []
        names = join_names(each for each in modules if each is not None)
        result += [dataclasses.replace(issued, modules=name) for name, _ in names]
    return tuple(result)


def join_parameters(parameters: Mapping[str, Parameter]) -> dict[str, Parameter]:
    """Parameters with equal shape and layout under a joined name (`golden.join_names`), in the order given."""
    groups: dict[Parameter, list[str]] = {}
    for name, parameter in parameters.items():
        groups.setdefault(parameter, []).append(name)
    joined = [(members[0], name, kind) for kind, names in groups.items() for name, members in join_names(names)]
    order = {name: i for i, name in enumerate(parameters)}
    return {name: kind for _, name, kind in sorted(joined, key=lambda each: order[each[0]])}
