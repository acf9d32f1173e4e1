"""Where a model is cut: the layers, and the modules and parameters around them, that each stage has."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, pairwise

from torch import nn

from ...schedules.plan import PipelinePlan, Split
from ...schedules.schedule import Schedule
from .flow import END, follow, units_of


@dataclass(frozen=True, slots=True)
class Cut:
    """A model cut into stages; an equal value on every rank. Made by `cut`."""

    layers: tuple[str, ...]  # the names of the listed layers, in order
    ranges: tuple[tuple[int, int], ...]  # the layers of each stage, [start, stop)
    units: dict[str, frozenset[int]]  # modules outside the list, and the stages that use their outputs
    parameters: dict[str, frozenset[int]]  # parameters by their first names, and the stages that hold them

    def shared(self, rank_of: Callable[[int], int]) -> dict[str, tuple[int, ...]]:
        """The parameters that several ranks along "pp" hold, with the ranks' coordinates on "pp", ascending.

        rank_of: the coordinate on "pp" that holds a stage.
        """
        ranks = {name: tuple(sorted(set(map(rank_of, stages)))) for name, stages in self.parameters.items()}
        return {name: each for name, each in ranks.items() if len(each) > 1}


def cut(model: nn.Module, plan: PipelinePlan, schedule: Schedule) -> Cut:
    """Cut a model as the plan says. The model is not changed, and no data is computed.

    Raises ValueError for a model without a list of layers, for more stages than layers, for layer counts that do
    not add up, for a split point that is no layer, and as `follow` does.
    """
    layers, ranges = ranges_of(model, plan, schedule)
    flow = follow(model, layers)
    everywhere = frozenset(range(len(ranges)))

    def stages(readers: set[int]) -> frozenset[int]:
        last = len(ranges) - 1
        return frozenset(last if reader == END else _stage_of(reader, ranges) for reader in readers)

    units = {unit: stages(flow.units[unit]) if unit in flow.units else everywhere for unit in units_of(model, layers)}
    inside = {name: frozenset({_stage_of(i, ranges)}) for i, name in enumerate(layers)} | units
    held: dict[nn.Parameter, frozenset[int]] = {}
    first: dict[nn.Parameter, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        within = next((each for each in inside if name.startswith(f"{each}.")), None)
        first.setdefault(parameter, name)
        around = stages(flow.parameters[first[parameter]]) if first[parameter] in flow.parameters else everywhere
        held[parameter] = held.get(parameter, frozenset()) | (around if within is None else inside[within])
    return Cut(tuple(layers), ranges, units, {first[parameter]: stages for parameter, stages in held.items()})


def ranges_of(
    model: nn.Module, plan: PipelinePlan, schedule: Schedule
) -> tuple[list[str], tuple[tuple[int, int], ...]]:
    """The names of the listed layers, and each stage's layers as [start, stop). Raises ValueError as `cut` does."""
    layers, points = _layers_of(model, plan.split)
    return layers, _ranges(model, plan.split, layers, points, schedule)


def _layers_of(model: nn.Module, split: Split) -> tuple[list[str], list[str]]:
    """The names of the listed layers; and the first layers of the second and later stages, if `split` names them."""
    lists = {name: list(module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    if isinstance(split, tuple) and isinstance(split[0], str):
        points = [str(each) for each in split]
        parents = {point.rpartition(".")[0] for point in points}
        known = [f"{name}.{i}" for name, entries in lists.items() for i in range(len(entries))]
        for point in points:
            if point not in known:
                near = difflib.get_close_matches(point, known, n=3, cutoff=0.3) or known[:3]
                raise ValueError(
                    f"split names {point!r}, which is no layer in a list of {type(model).__name__}; "
                    + (f"the nearest names are {', '.join(near)}" if near else "it has no nn.ModuleList")
                )
        if len(parents) > 1:
            raise ValueError(
                f"split names layers of the lists {', '.join(sorted(parents))}; stages are cut from one list"
            )
        chosen = parents.pop()
    else:
        points = []
        outermost = [
            name for name in lists if not any(name.startswith(f"{other}.") for other in lists if other != name)
        ]
        if isinstance(split, str) and split in lists:
            chosen = split
        elif isinstance(split, str) and split != "layers":
            raise ValueError(
                f"split is {split!r}, which is no list of layers of {type(model).__name__}; "
                + (f"there are {', '.join(lists)}" if lists else "it has no nn.ModuleList")
            )
        elif len(outermost) != 1:
            raise ValueError(
                f"a pipeline cuts a model by its list of layers, and {type(model).__name__} has "
                + (f"several: {', '.join(outermost)}; name one by split=" if outermost else "no nn.ModuleList")
            )
        else:
            chosen = outermost[0]
    return [f"{chosen}.{i}" for i in range(len(lists[chosen]))], points


def _ranges(
    model: nn.Module, split: Split, layers: list[str], points: list[str], schedule: Schedule
) -> tuple[tuple[int, int], ...]:
    """Each stage's layers as [start, stop).

    points: the first layer of each stage after the first, if `split` names these layers; else empty.
    """
    stages, count = schedule.num_stages, len(layers)
    where = f"{schedule.ranks} ranks" + (f" with {schedule.chunks} each" if schedule.chunks > 1 else "")
    if stages > count:
        raise ValueError(
            f"{type(model).__name__} has {count} layers, {layers[0]} to {layers[-1]}, and they cannot be cut into "
            f"{stages} stages, on {where}: each stage needs a layer or more; lower pp or chunks"
        )
    if points:
        starts = [layers.index(point) for point in points]
        if starts != sorted(set(starts)) or starts[0] == 0:
            raise ValueError(f"split names {', '.join(points)}; the stages after the first begin at them, in order")
        bounds = [0, *starts, count]
    elif isinstance(split, tuple):
        counts = [int(each) for each in split]
        if sum(counts) != count or min(counts) < 1:
            raise ValueError(
                f"split gives the stages {', '.join(map(str, counts))} layers, {sum(counts)} in all; "
                f"{type(model).__name__} has {count}, and each stage needs one or more"
            )
        bounds = [0, *accumulate(counts)]
    else:
        counts = [count // stages + (stage < count % stages) for stage in range(stages)]
        bounds = [0, *accumulate(counts)]
    if len(bounds) != stages + 1:
        raise ValueError(
            f"split cuts {type(model).__name__} into {len(bounds) - 1} stages, and there are {stages}, on {where}"
        )
    return tuple(pairwise(bounds))


def _stage_of(layer: int, ranges: tuple[tuple[int, int], ...]) -> int:
    return next(stage for stage, (start, stop) in enumerate(ranges) if start <= layer < stop)
