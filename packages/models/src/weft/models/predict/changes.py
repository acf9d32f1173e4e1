"""`find_changes`: compares a golden file with the step of today; the changes as lines, GitHub errors, or a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from ..step.communication import PHASES
from ..terminal import one_line
from .golden import Golden, Parameter, RankRecord, SitedCollectives, join_names, split_names

_Key = tuple[str, str, tuple[str, ...], str | None]  # phase, kind, axes, module
_Text = tuple[str, str]  # a line of code by file name and text, because the number may change


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A difference between a golden file and the step of today."""

    text: str  # the change as a line
    subject: str  # first cell of a row of the table; the next are `before` and `after`
    before: str
    after: str
    file: str = ""  # of the line issuing the collective, relative as in `SitedCollectives`; "" where there is none
    line: int = 0
    code: str = ""


@dataclass(slots=True)
class _Sum:
    """The collectives of a module, phase, kind and axes, added up over lines of code."""

    count: int = 0
    nbytes: int = 0
    lines: Counter[_Text] = field(default_factory=Counter)  # number of collectives by line
    places: dict[_Text, SitedCollectives] = field(default_factory=dict)  # an entry of the file for each line


def find_changes(saved: Golden, now: Golden) -> list[Change]:
    """The changes beyond `saved.allow`, in the order of a golden file. A changed line number alone is no change.

    Compares the ranks found in both; where ranks differ, so does the mesh, which is a change.
    """
    changes = [
        *_value_changes("mesh", _in_words(saved.mesh), _in_words(now.mesh)),
        *_value_changes("batch", "{:,} x {:,} tokens".format(*saved.batch), "{:,} x {:,} tokens".format(*now.batch)),
    ]
    by_rank = {each.rank: each for each in now.ranks}
    pairs = [(each, by_rank[each.rank]) for each in saved.ranks if each.rank in by_rank]
    found: dict[Change, list[int]] = {}
    for before, after in pairs:
        for change in _collective_changes(saved, before, after):
            found.setdefault(change, []).append(before.rank)
    changes += [_with_ranks(change, ranks, len(pairs)) for change, ranks in found.items()]
    for before, after in pairs:
        changes += _memory_changes(saved, before, after)
    return changes + _parameter_changes(saved.parameters, now.parameters)


def summarize(saved: Golden, now: Golden) -> list[str]:
    """A line for each rank with changed totals: collectives and received bytes, before and after."""
    lines = []
    by_rank = {each.rank: each for each in now.ranks}
    for before in saved.ranks:
        after = by_rank.get(before.rank)
        if after is not None and (old := totals(before)) != (new := totals(after)):
            lines.append(
                f"rank {before.rank} in all: {old[0]:,} -> {new[0]:,} collectives, "
                f"{old[1]:,} -> {new[1]:,} bytes received{_percent(old[1], new[1])}"
            )
    return lines


def totals(record: RankRecord) -> tuple[int, int]:
    """The number of a rank's collectives in a step, and the bytes received."""
    weights = [(each, len([*split_names(each.modules)]) if each.modules else 1) for each in record.collectives]
    return sum(each.count * n for each, n in weights), sum(each.bytes * n for each, n in weights)


def _collective_changes(saved: Golden, before: RankRecord, after: RankRecord) -> list[Change]:
    old, new = _sums(before.collectives), _sums(after.collectives)
    groups: dict[tuple[object, ...], tuple[list[str | None], _Sum, _Sum, SitedCollectives]] = {}
    phases: tuple[str, ...] = PHASES
    for key in sorted({**old, **new}, key=lambda each: phases.index(each[0])):
        was, is_ = old.get(key, _Sum()), new.get(key, _Sum())
        allowed = saved.allow.bytes_percent / 100 * was.nbytes
        if abs(is_.count - was.count) <= saved.allow.count and abs(is_.nbytes - was.nbytes) <= allowed:
            continue
        place = _place_of_change(was, is_)
        signature = (*key[:3], was.count, is_.count, was.nbytes, is_.nbytes, place.file, place.line)
        groups.setdefault(signature, ([], was, is_, place))[0].append(key[3])
    changes = []
    for (phase, kind, axes, *_), (modules, was, is_, place) in groups.items():
        names: list[tuple[str | None, int]] = [(None, 1)] if None in modules else []
        names += [(name, len(members)) for name, members in join_names(each for each in modules if each is not None)]
        changes += [
            _collective_change(str(phase), str(kind), axes, name, number, was, is_, place)  # type: ignore[arg-type]
            for name, number in names
        ]
    return changes


def _collective_change(
    phase: str,
    kind: str,
    axes: tuple[str, ...],
    name: str | None,
    number: int,
    was: _Sum,
    is_: _Sum,
    place: SitedCollectives,
) -> Change:
    """The change of alike modules. name: joined. number: how many modules. was, is_: the sums of each module."""
    over = " x ".join(axes) or "others"
    who = f"issued by {name} at" if name is not None else "issued at"
    at = f"{place.file}:{place.line}" if place.file else "an unknown line"
    more, nbytes = (is_.count - was.count) * number, abs(is_.nbytes - was.nbytes) * number
    old, new = (f"{each.count * number:,} ({each.nbytes * number:,} bytes)" for each in (was, is_))
    if more:
        text = f"{more:+,} {kind} over {over} ({nbytes:,} bytes) in {phase}, {'' if more > 0 else 'was '}{who} {at}"
    else:
        text = (
            f"{is_.count * number:,} {kind} over {over} in {phase}: {was.nbytes * number:,} -> "
            f"{is_.nbytes * number:,} bytes{_percent(was.nbytes, is_.nbytes)}, {who} {at}"
        )
    subject = f"{kind} over {over} in {phase}" + (f", {name}" if name is not None else "")
    has_vanished = not is_.count  # the line is one of the earlier program
    return Change(
        text=text, subject=subject, before=old, after=new, code=place.code,
        file="" if has_vanished else place.file, line=0 if has_vanished else place.line,
    )  # fmt: skip


def _place_of_change(was: _Sum, is_: _Sum) -> SitedCollectives:
    """The line to show: the first with more collectives than before; else the first with fewer; else the first."""
    grown = [each for each in is_.lines if is_.lines[each] > was.lines[each]]
    shrunk = [each for each in was.lines if was.lines[each] > is_.lines[each]]
    if is_.lines and (is_.count >= was.count or not shrunk):
        return is_.places[next(iter(grown or is_.lines))]
    return was.places[next(iter(shrunk or was.lines))]


def _sums(collectives: Iterable[SitedCollectives]) -> dict[_Key, _Sum]:
    """The collectives of each module, added up over lines."""
    sums: dict[_Key, _Sum] = {}
    for each in collectives:
        text = PurePosixPath(each.file).name, each.code
        for module in (None,) if each.modules is None else split_names(each.modules):
            own = sums.setdefault((each.phase, each.kind, tuple(each.axes), module), _Sum())
            own.count += each.count
            own.nbytes += each.bytes
            own.lines[text] += each.count
            own.places.setdefault(text, each)
    return sums


def _memory_changes(saved: Golden, before: RankRecord, after: RankRecord) -> list[Change]:
    changes = []
    for kind in {**before.memory, **after.memory}:
        old, new = before.memory.get(kind, 0), after.memory.get(kind, 0)
        if abs(new - old) > saved.allow.memory_percent / 100 * old:
            subject = f"memory of rank {before.rank}, {kind}"
            figures = f"{old:,}", f"{new:,} bytes{_percent(old, new)}"
            changes.append(
                Change(text=f"{subject}: {' -> '.join(figures)}", subject=subject, before=figures[0], after=figures[1])
            )
    return changes


def _parameter_changes(saved: Mapping[str, Parameter], now: Mapping[str, Parameter]) -> list[Change]:
    old, new = ({name: each for joined, each in one.items() for name in split_names(joined)} for one in (saved, now))
    groups: dict[tuple[Parameter | None, Parameter | None], list[str]] = {}
    for name in {**old, **new}:
        if old.get(name) != new.get(name):
            groups.setdefault((old.get(name), new.get(name)), []).append(name)
    changes = []
    for (was, is_), names in groups.items():
        before, after = _layout_in_words(was, is_), _layout_in_words(is_, was)
        for name, _ in join_names(names):
            subject = f"parameter {name}"
            text = f"{subject}: {before} -> {after}"
            changes.append(Change(text=text, subject=subject, before=before, after=after))
    return changes


def _layout_in_words(parameter: Parameter | None, counterpart: Parameter | None) -> str:
    """The parameter's layout, after the shape where the counterpart's shape differs."""
    if parameter is None:
        return "none"
    layout = parameter.layout or "a plain tensor"
    is_same = counterpart is not None and counterpart.shape == parameter.shape
    return layout if is_same else f"{list(parameter.shape)} {layout}"


def _value_changes(name: str, before: str, after: str) -> list[Change]:
    if before == after:
        return []
    return [Change(text=f"{name}: {before} -> {after}", subject=name, before=before, after=after)]


def _with_ranks(change: Change, ranks: list[int], num_compared: int) -> Change:
    """The change with the ranks concerned, where several were compared."""
    if num_compared == 1:
        return change
    named = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
    return Change(
        text=f"{named}: {change.text}", subject=f"{named}: {change.subject}", before=change.before,
        after=change.after, file=change.file, line=change.line, code=change.code,
    )  # fmt: skip


def _in_words(mesh: Mapping[str, int]) -> str:
    return " x ".join(f"{axis}={size}" for axis, size in mesh.items())


def _percent(before: int, after: int) -> str:
    """A relative change: " (+49.7 %)"; "" where `before` is 0."""
    return f" ({(after - before) / before * 100:+.1f} %)" if before else ""


def annotation(change: Change, golden: Path, workspace: Path) -> str:
    """The change as a GitHub error, at the line of code if in the workspace, else at the golden file."""
    file, line = _in_workspace(Path(change.file), workspace) if change.file else None, change.line
    if file is None:
        file, line = _in_workspace(golden, workspace), 1
    place = "" if file is None else f"file={_escape(file, ':,')},line={line},"
    return f"::error {place}title=weft check::{_escape(change.text)}"


def _in_workspace(path: Path, workspace: Path) -> str | None:
    resolved, root = path.resolve(), workspace.resolve()
    if not resolved.is_relative_to(root) or not resolved.is_file():
        return None
    return resolved.relative_to(root).as_posix()


def _escape(text: str, more: str = "") -> str:
    """Text escaped as in https://docs.github.com/actions/reference/workflow-commands-for-github-actions

    more: further characters to escape.
    """
    return "".join(f"%{ord(each):02X}" if each in "%\r\n" + more else each for each in text)


def as_markdown(path: Path, changes: Iterable[Change]) -> str:
    """The changes as a table, for $GITHUB_STEP_SUMMARY."""
    rows = [
        (each.subject, each.before, each.after, f"`{each.file}:{each.line}`" if each.file else "") for each in changes
    ]
    lines = ["| what | before | after | line |", "|---|---|---|---|"]
    lines += [f"| {' | '.join(one_line(cell).replace('|', chr(92) + '|') for cell in row)} |" for row in rows]
    return "\n".join([f"### weft check: {path} differs", "", *lines, ""])
