"""A plan beside a model: what it says of which module, and whether the two fit."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase

from torch import nn

from ..low_rank import LowRank
from .plan import ParallelPlan
from .styles import (
    TENSOR_AXIS,
    ColwiseParallel,
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
class Part:
    """A model, or one within it, and what its own plan says of its modules.

    name: of the module in the whole model. plan: without parts. styles, inputs, outputs: by the names of modules in the whole
    model, in its order.
    """

    name: str
    plan: ParallelPlan
    styles: dict[str, Style] = field(default_factory=dict)
    inputs: dict[str, PrepareInput] = field(default_factory=dict)
    outputs: dict[str, PrepareOutput] = field(default_factory=dict)


def resolve(model: nn.Module, plan: ParallelPlan) -> dict[str, Style]:
    """How the parameters of each module lie that the plan, or one of its parts, names, in the model's order.

    A module under several names is known by its first. Raises ValueError as `parts_of`.
    """
    return styles_of(model, parts_of(model, plan))


def styles_of(model: nn.Module, parts: list[Part]) -> dict[str, Style]:
    """The styles of all parts together, in the model's order."""
    styles = {name: style for part in parts for name, style in part.styles.items()}
    return {name: styles[name] for name, _ in model.named_modules() if name in styles}


def parts_of(model: nn.Module, plan: ParallelPlan) -> list[Part]:
    """What the plan says of each module, apart for each plan that was merged into it.

    Raises ValueError for a pattern that matches no module, naming the nearest that there are; for a module that two
    patterns give different styles; for a style that the module's kind does not have; for plans of one module that differ.
    """
    names = dict(model.named_modules(remove_duplicate=False))
    first: dict[nn.Module, str] = {}
    for name, module in names.items():
        first.setdefault(module, name)
    parts: list[Part] = []
    given: dict[str, list[_Given]] = {}
    for prefix, own in _flat(model, names, plan):
        if any(part.name == prefix for part in parts):
            raise ValueError(f"two plans are merged for the module {prefix!r}; give it one")
        within = {
            _join(prefix, name): name
            for name, module in names[prefix].named_modules(remove_duplicate=False)
            if not isinstance(module, LowRank)  # it follows its layer
        }
        part = Part(prefix, own)
        for pattern, styles in own.tensor.items():
            shown = _join(prefix, pattern)
            found = [full for full, name in within.items() if name == pattern or (name and fnmatchcase(name, pattern))]
            if not found:
                whom = f"{prefix}, a {type(names[prefix]).__name__}" if prefix else type(model).__name__
                raise ValueError(f"plan pattern {shown!r} matches no module of {whom}; {nearest(shown, list(within))}")
            for name in dict.fromkeys(first[names[full]] for full in found):
                for style in as_styles(pattern, styles):
                    _check_kind(shown, style, name, names[name])
                    _add(given.setdefault(name, []), _Given(shown, style, part), name)
        parts.append(part)
    for name in names:
        for each in given.get(name, []):
            match each.style:
                case PrepareInput():
                    each.part.inputs[name] = each.style
                case PrepareOutput():
                    each.part.outputs[name] = each.style
                case _:
                    each.part.styles[name] = each.style
    return parts


def parts_with(parts: list[Part], option: str) -> list[Part]:
    """The parts whose modules an option of a plan is of, each module in one: of a part within another, the other's alone.

    Where the other has the option's default, it is the inner part's. Raises ValueError where they contradict each other.
    """
    default = next(each.default for each in fields(ParallelPlan) if each.name == option)
    found = []
    for part in parts:
        own = getattr(part.plan, option)
        around = [other for other in parts if other is not part and _is_within(part.name, other.name)]
        outer = [other for other in around if getattr(other.plan, option) != default]
        if any(getattr(other.plan, option) != own for other in outer):
            raise ValueError(
                f"the plan of {part.name!r} has {option}={own!r}, and that of {outer[0].name!r}, in which it is, "
                f"{option}={getattr(outer[0].plan, option)!r}; give both the same, or leave it out in {outer[0].name!r}"
            )
        holds_others = any(_is_within(other.name, part.name) for other in parts if other is not part)
        if not outer and not (own == default and holds_others):
            found.append(part)
    return found


def _is_within(name: str, outer: str) -> bool:
    return not outer or name.startswith(f"{outer}.")


@dataclass(slots=True)
class _Given:
    """A style that a pattern gives a module."""

    pattern: str
    style: Style | Preparation
    part: Part


def _flat(model: nn.Module, names: Mapping[str, nn.Module], plan: ParallelPlan) -> Iterator[tuple[str, ParallelPlan]]:
    """The plans that a plan was merged of, by the names of their modules; a plan that was not is that of the model."""
    if not plan.parts:
        yield "", plan
        return
    for pattern, part in plan.parts.items():
        found = [name for name in names if name == pattern or (name and fnmatchcase(name, pattern))]
        if not found:
            raise ValueError(
                f"the plan of {pattern!r} was merged for a module that {type(model).__name__} has not; "
                f"{nearest(pattern, list(names))}"
            )
        for name in found:
            if any(name.startswith(f"{outer}.") for outer in found):
                continue  # a wildcard is of the outermost modules that it matches
            within = dict(names[name].named_modules(remove_duplicate=False))
            yield from ((_join(name, below), own) for below, own in _flat(names[name], within, part))


def _add(styles: list[_Given], new: _Given, name: str) -> None:
    """Puts another style beside those that a module has. Raises ValueError where they contradict each other."""
    for other in styles:
        _check_together(other, new, name)
        if other.style == new.style:
            if other.part is not new.part and other.part.plan.sequence != new.part.plan.sequence:
                raise ValueError(
                    f"{name!r} is laid out by the plan of {other.part.name!r} with sequence={other.part.plan.sequence}, and "
                    f"by that of {new.part.name!r} with sequence={new.part.plan.sequence}; name it in one of them"
                )
            return
        if isinstance(other.style, PrepareInput) and isinstance(new.style, PrepareInput):
            other.style = PrepareInput({**other.style.layouts, **new.style.layouts})
            return
        if isinstance(other.style, PrepareOutput) and isinstance(new.style, PrepareOutput):
            other.style = PrepareOutput({**other.style.layouts, **new.style.layouts})
            return
    styles.append(new)


def _check_together(other: _Given, new: _Given, name: str) -> None:
    a, b = other.style, new.style
    agree = True
    if isinstance(a, Style) and isinstance(b, Style):
        agree = a == b
    elif isinstance(a, PrepareInput) and isinstance(b, PrepareInput):
        agree = all(a.layouts[where] == b.layouts[where] for where in a.layouts.keys() & b.layouts.keys())
    elif isinstance(a, PrepareOutput) and isinstance(b, PrepareOutput):
        mine, theirs = a.by_output, b.by_output
        alike = (None in mine) == (None in theirs)
        agree = alike and all(mine[where] == theirs[where] for where in mine.keys() & theirs.keys())
    elif isinstance(a, PrepareInput) or isinstance(b, PrepareInput):
        style, prepared = (a, b) if isinstance(b, PrepareInput) else (b, a)
        assert isinstance(prepared, PrepareInput), "one of the two is"
        layout = prepared.layouts.get("input", prepared.layouts.get(0, {}))
        agree = TENSOR_AXIS not in layout or _takes(style, str(layout[TENSOR_AXIS]))
    if not agree:
        if other.pattern == new.pattern and other.part is new.part:
            raise ValueError(f"plan pattern {new.pattern!r} gives {name!r} styles that contradict: {a} and {b}")
        raise ValueError(
            f"plan patterns {other.pattern!r} and {new.pattern!r} give {name!r} two styles: {a} and {b}{_whose(other, new)}"
        )


def _takes(style: Style | Preparation, placement: str) -> bool:
    """Whether a layer of that style can take an input that lies so on the tensor axis."""
    match style:
        case ColwiseParallel() | VocabParallel():
            return placement == "R"
        case RowwiseParallel():
            return placement.startswith("S")
    return True


def _whose(other: _Given, new: _Given) -> str:
    if other.part is new.part:
        return ""
    return f"; the first is of the plan merged for {other.part.name!r}, the second of that for {new.part.name!r}"


def _check_kind(pattern: str, style: Style | Preparation, name: str, module: nn.Module) -> None:
    """Raises ValueError for a style that a module of this kind cannot have."""
    if isinstance(style, Preparation):
        return
    kind = nn.Embedding if isinstance(style, VocabParallel | PositionParallel) else nn.Linear
    if not isinstance(module, kind):
        raise ValueError(
            f"plan pattern {pattern!r} gives {style} to {name!r}, a {type(module).__name__}; "
            f"that style is for {kind.__name__} layers"
        )


def nearest(name: str, names: list[str]) -> str:
    known = [each for each in names if each]
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.3)
    return f"the nearest names are {', '.join(near or known[:3])}"


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix and name else prefix or name
