"""Matches a plan with a model: which styles each module gets, and whether plan and model fit."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from ..experts import Experts
from ..low_rank import Adapter, LowRankExperts
from .plan import ParallelPlan
from .styles import (
    TENSOR_AXIS,
    ColwiseParallel,
    ExpertParallel,
    PositionParallel,
    Preparation,
    PrepareInput,
    PrepareOutput,
    RowwiseParallel,
    Style,
    VocabParallel,
    as_styles,
)


@dataclass(frozen=True, slots=True)
class ModulePlan:
    """The plan of a module, and the styles that the plan gives to modules within. Made by `module_plans_of`.

    The module is the whole model; under a plan made by `ParallelPlan.merge`, a model within the whole model.
    """

    name: str  # the module's name in the whole model; "" for the whole model
    plan: ParallelPlan  # never a merged plan: `plan.parts` is empty
    # By the names of modules in the whole model, in the model's order:
    styles: dict[str, Style] = field(default_factory=dict)
    inputs: dict[str, PrepareInput] = field(default_factory=dict)
    outputs: dict[str, PrepareOutput] = field(default_factory=dict)


def resolve(model: nn.Module, plan: ParallelPlan) -> dict[str, Style]:
    """The style of each module named by the plan, or by one of the merged plans, in the model's order.

    A module with several names is listed under the first. Raises ValueError as `module_plans_of` does.
    """
    return styles_of(model, module_plans_of(model, plan))


def styles_of(model: nn.Module, module_plans: list[ModulePlan]) -> dict[str, Style]:
    """The styles of all plans by module name, in the model's order."""
    styles = {name: style for module_plan in module_plans for name, style in module_plan.styles.items()}
    return {name: styles[name] for name, _ in model.named_modules() if name in styles}


def module_plans_of(model: nn.Module, plan: ParallelPlan) -> list[ModulePlan]:
    """The plans merged into a plan, each with its module's name and its styles; a single entry for a plan not merged.

    Raises ValueError for a pattern matching no module, naming the nearest names; for a module with different styles
    by two patterns; for a style unfit for the module's class; for two plans of the same module.
    """
    names = dict(model.named_modules(remove_duplicate=False))
    first: dict[nn.Module, str] = {}
    for name, module in names.items():
        first.setdefault(module, name)
    module_plans: list[ModulePlan] = []
    assignments: dict[str, list[_Assignment]] = {}  # by module name
    for prefix, own in _flatten_plans(model, names, plan):
        if any(module_plan.name == prefix for module_plan in module_plans):
            raise ValueError(f"two plans are merged for the module {prefix!r}; give it one")
        names_within = {
            _join(prefix, name): name
            for name, module in names[prefix].named_modules(remove_duplicate=False)
            if not isinstance(module, Adapter | LowRankExperts)  # an adapter is laid out like the layer
        }
        module_plan = ModulePlan(prefix, own)
        for pattern, styles in own.tensor.items():
            shown = _join(prefix, pattern)
            matching = [
                full for full, name in names_within.items() if name == pattern or (name and fnmatchcase(name, pattern))
            ]
            if not matching:
                owner = f"{prefix}, a {type(names[prefix]).__name__}" if prefix else type(model).__name__
                raise ValueError(
                    f"plan pattern {shown!r} matches no module of {owner}; {nearest(shown, list(names_within))}"
                )
            for name in dict.fromkeys(first[names[full]] for full in matching):
                for style in as_styles(pattern, styles):
                    _check_kind(shown, style, name, names[name])
                    _add(assignments.setdefault(name, []), _Assignment(shown, style, module_plan), name)
        module_plans.append(module_plan)
    for name in names:
        for each in assignments.get(name, []):
            match each.style:
                case PrepareInput():
                    each.module_plan.inputs[name] = each.style
                case PrepareOutput():
                    each.module_plan.outputs[name] = each.style
                case _:
                    each.module_plan.styles[name] = each.style
    return module_plans


def plans_deciding(module_plans: list[ModulePlan], option: str) -> list[ModulePlan]:
    """The plans that decide the value of `option`, at most one for each module. Called by `parallelize`.

    Where a module with a plan contains modules with plans: if the outer plan sets the option to a value other than
    the default, the outer plan decides for all inner modules, and inner plans must have the same value. If not, each
    inner plan decides.
    Raises ValueError where outer and inner plans contradict.
    """
    default = next(each.default for each in fields(ParallelPlan) if each.name == option)
    deciding = []
    for module_plan in module_plans:
        own = getattr(module_plan.plan, option)
        containing = [other for other in module_plans if _is_within(module_plan.name, other.name)]
        outer = [other for other in containing if other is not module_plan and getattr(other.plan, option) != default]
        if any(getattr(other.plan, option) != own for other in outer):
            raise ValueError(
                f"the plan of {module_plan.name!r} has {option}={own!r}, and that of {outer[0].name!r}, which contains "
                f"{module_plan.name!r}, has {option}={getattr(outer[0].plan, option)!r}; give both the same {option}, "
                f"or leave {option} out in {outer[0].name!r}"
            )
        has_inner = any(_is_within(other.name, module_plan.name) for other in module_plans if other is not module_plan)
        if not outer and not (own == default and has_inner):
            deciding.append(module_plan)
    return deciding


def _is_within(name: str, outer: str) -> bool:
    return not outer or name.startswith(f"{outer}.")


@dataclass(slots=True)
class _Assignment:
    """A style given to a module by a pattern of a plan."""

    pattern: str
    style: Style | Preparation
    module_plan: ModulePlan  # of the plan with the pattern


def _flatten_plans(
    model: nn.Module, names: Mapping[str, nn.Module], plan: ParallelPlan
) -> Iterator[tuple[str, ParallelPlan]]:
    """The plans merged into `plan`, with the names of their modules; a plan not merged is the whole model's."""
    if not plan.parts:
        yield "", plan
        return
    for pattern, module_plan in plan.parts.items():
        matching = [name for name in names if name == pattern or (name and fnmatchcase(name, pattern))]
        if not matching:
            raise ValueError(
                f"the plan of {pattern!r} was merged for a module that {type(model).__name__} does not have; "
                f"{nearest(pattern, list(names))}"
            )
        for name in matching:
            if any(name.startswith(f"{outer}.") for outer in matching):
                continue  # of nested modules matching a wildcard, the outermost counts
            names_within = dict(names[name].named_modules(remove_duplicate=False))
            yield from (
                (_join(name, below), own) for below, own in _flatten_plans(names[name], names_within, module_plan)
            )


def _add(styles: list[_Assignment], new: _Assignment, name: str) -> None:
    """Add a style to the styles of the module `name`. Raises ValueError where styles contradict."""
    for earlier in styles:
        _check_together(earlier, new, name)
        if earlier.style == new.style:
            if (
                earlier.module_plan is not new.module_plan
                and earlier.module_plan.plan.sequence != new.module_plan.plan.sequence
            ):
                raise ValueError(
                    f"{name!r} is laid out by the plan of {earlier.module_plan.name!r} with sequence="
                    f"{earlier.module_plan.plan.sequence}, and by the plan of {new.module_plan.name!r} with "
                    f"sequence={new.module_plan.plan.sequence}; name {name!r} in a single plan"
                )
            return
        if isinstance(earlier.style, PrepareInput) and isinstance(new.style, PrepareInput):
            earlier.style = PrepareInput({**earlier.style.layouts, **new.style.layouts})
            return
        if isinstance(earlier.style, PrepareOutput) and isinstance(new.style, PrepareOutput):
            earlier.style = PrepareOutput({**earlier.style.layouts, **new.style.layouts})
            return
    styles.append(new)


def _check_together(earlier: _Assignment, new: _Assignment, name: str) -> None:
    """Raises ValueError where two styles of the module `name` contradict."""
    a, b = earlier.style, new.style
    agree = True
    if isinstance(a, Style) and isinstance(b, Style):
        agree = a == b
    elif isinstance(a, PrepareInput) and isinstance(b, PrepareInput):
        agree = all(a.layouts[key] == b.layouts[key] for key in a.layouts.keys() & b.layouts.keys())
    elif isinstance(a, PrepareOutput) and isinstance(b, PrepareOutput):
        earlier_placements, new_placements = a.placements_by_output, b.placements_by_output
        same_keys = (None in earlier_placements) == (None in new_placements)
        agree = same_keys and all(
            earlier_placements[key] == new_placements[key] for key in earlier_placements.keys() & new_placements.keys()
        )
    elif isinstance(a, PrepareInput) or isinstance(b, PrepareInput):
        style, preparation = (a, b) if isinstance(b, PrepareInput) else (b, a)
        assert isinstance(preparation, PrepareInput), "one of the two is"
        layout = preparation.layouts.get("input", preparation.layouts.get(0, {}))
        agree = TENSOR_AXIS not in layout or _accepts(style, str(layout[TENSOR_AXIS]))
    if not agree:
        if earlier.pattern == new.pattern and earlier.module_plan is new.module_plan:
            raise ValueError(f"plan pattern {new.pattern!r} gives {name!r} styles that contradict: {a} and {b}")
        raise ValueError(
            f"plan patterns {earlier.pattern!r} and {new.pattern!r} give {name!r} two styles: {a} and {b}"
            f"{_plan_names(earlier, new)}"
        )


def _accepts(style: Style | Preparation, placement: str) -> bool:
    """Whether a layer of this style can take an input with this placement on the tensor axis."""
    match style:
        case ColwiseParallel() | VocabParallel() | ExpertParallel():
            return placement == "R"
        case RowwiseParallel():
            return placement.startswith("S")
    return True


def _plan_names(earlier: _Assignment, new: _Assignment) -> str:
    """The end of an error message: the names of the plans that gave the styles, if there are two plans."""
    if earlier.module_plan is new.module_plan:
        return ""
    first, second = earlier.module_plan.name, new.module_plan.name
    return f"; the first is of the plan merged for {first!r}, the second of that for {second!r}"


def _check_kind(pattern: str, style: Style | Preparation, name: str, module: nn.Module) -> None:
    """Raises ValueError for a style unfit for the module's class."""
    if isinstance(style, Preparation):
        return
    kind: type[nn.Module] = nn.Linear
    if isinstance(style, VocabParallel | PositionParallel):
        kind = nn.Embedding
    elif isinstance(style, ExpertParallel):
        kind = Experts
    if not isinstance(module, kind):
        raise ValueError(
            f"plan pattern {pattern!r} gives {style} to {name!r}, a {type(module).__name__}; "
            f"that style is for {kind.__name__} layers"
        )


def holder_of(model: nn.Module, parameter: str) -> tuple[Any, str]:
    """The module that has a parameter, and the parameter's name there. parameter: the name in the model."""
    owner, _, leaf = parameter.rpartition(".")
    return model.get_submodule(owner), leaf


def nearest(name: str, names: list[str]) -> str:
    """The end of an error message: the names most similar to `name`."""
    known = [each for each in names if each]
    matches = difflib.get_close_matches(name, known, n=3, cutoff=0.3)
    return f"the nearest names are {', '.join(matches or known[:3])}"


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix and name else prefix or name
