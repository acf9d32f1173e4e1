"""`Golden`: a step's communication, memory and layouts as a JSON file, to compare with later versions of the program.

`weft explain --save` writes the file, `weft check` compares: see `changes.py`. Imports no torch.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..safe_files import as_type, parse_json, read_plain, write_anew
from ..step.communication import PHASES

FORMAT = 1
LARGEST = 64 * 2**20  # bytes of a file; Llama 3 405B on 16 stages takes under a million
_MOST_MODULES = 2**20  # modules and parameters behind the joined names of a file
_LARGEST_NUMBER = 2**63 - 1
_REMEDY = "save it again with `weft explain … --save FILE`"
_MANY = re.compile(r"\[([0-9,-]+)\]")  # the ranges in a joined name
_NUMBER = re.compile(r"(?<![^.])(\d+)(?![^.])")  # a part of a dotted name with digits alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """The arguments of `weft explain`, to run the step again. Paths are relative to the golden file's folder."""

    recipe: str | None = None
    config: str | None = None  # of --config
    from_folder: str | None = None  # of --from
    batch: str | None = None  # of --batch
    options: tuple[str, ...] = ()  # all further options, as given


@dataclass(frozen=True, slots=True, kw_only=True)
class Allow:
    """The largest differences that `weft check` ignores. Edited by hand, and kept when the file is saved again."""

    count: int = 0  # in the number of collectives of a kind, over the same axes, in the same phase and module
    bytes_percent: float = 0.0  # in the bytes of these collectives
    memory_percent: float = 1.0  # in each kind of memory


@dataclass(frozen=True, slots=True, kw_only=True)
class SitedCollectives:
    """The collectives of a kind in a phase, from the same line of code, of modules with equal `count` and `bytes`."""

    phase: str
    kind: str  # "all-reduce", ...
    axes: tuple[str, ...]  # of the mesh; () where unknown
    modules: str | None  # joined names, as "layers.[0-31].mlp"; None outside all modules
    count: int  # for each module
    bytes: int  # received by the rank, for each module, in all `count` collectives
    file: str  # with `line` and `code`, as in `site.Site`
    line: int
    code: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRecord:
    """A rank's collectives and memory in a step."""

    rank: int
    collectives: tuple[SitedCollectives, ...]  # by phase, then in the order of first issue
    memory: Mapping[str, int]  # bytes by kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A parameter's shape and layout."""

    shape: tuple[int, ...]  # global
    layout: str | None  # as `str(Layout)`; None for a plain tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Golden:
    """The content of a golden file."""

    format: int = FORMAT
    command: Command = field(default_factory=Command)
    device: str  # "cpu" or "cuda"; decides how tokens are sent to experts
    mesh: Mapping[str, int]  # sizes by axis
    batch: tuple[int, int]  # rows, tokens in a row
    allow: Allow = field(default_factory=Allow)
    ranks: tuple[RankRecord, ...]  # a rank of each pipeline stage
    parameters: Mapping[str, Parameter]  # of these ranks, by joined name: "layers.[0-31].mlp.up_proj.weight"

    @property
    def num_processes(self) -> int:
        return math.prod(self.mesh.values())


def write_golden(path: Path, golden: Golden) -> None:
    """Write the file. Raises ValueError where writing fails."""
    try:
        write_anew(path, dump(golden).encode())
    except OSError as error:
        raise ValueError(f"--save {path} cannot be written: {error.strerror}") from None


def dump(golden: Golden) -> str:
    """The text of a golden file: JSON with a line for each collective and each parameter, in a stable order."""
    return _lines(dataclasses.asdict(golden), "") + "\n"


def _lines(value: Any, indent: str) -> str:
    """JSON text. A value without objects inside, also in lists, takes a single line."""
    flat = json.dumps(value, ensure_ascii=False)
    inner = indent + "  "
    items = [*value.values()] if isinstance(value, dict) else [*value] if isinstance(value, list | tuple) else []
    if not any(isinstance(each, dict) for each in items) and not any(
        isinstance(each, list | tuple) and any(isinstance(one, dict) for one in each) for each in items
    ):
        return flat
    if isinstance(value, dict):
        lines = [f"{inner}{json.dumps(key, ensure_ascii=False)}: {_lines(each, inner)}" for key, each in value.items()]
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
    return "[\n" + ",\n".join(f"{inner}{_lines(each, inner)}" for each in value) + f"\n{indent}]"


def read_golden(path: Path) -> Golden:
    """Read a golden file. Raises ValueError for a missing file, and with the field's name for a wrong value."""
    try:
        content = read_plain(path, limit=LARGEST)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}; {_REMEDY}") from None
    values = parse_json(content, str(path), _REMEDY)
    version = values.get("format")
    if version != FORMAT or isinstance(version, bool):
        shown = "none" if version is None else f"{version!r:.60}"
        raise ValueError(f"{path}: format is {shown}, and this version of Weft reads {FORMAT}; {_REMEDY}")
    try:
        golden = as_type(Golden, values, str(path))
        _check(golden)
    except ValueError as error:
        text = str(error).replace(f"{path}.", f"{path}: ", 1)
        raise ValueError(text if text.startswith(str(path)) else f"{path}: {text}") from None
    return golden


def _check(golden: Golden) -> None:
    """Raise ValueError for values that `write_golden` never writes."""
    if golden.device not in ("cpu", "cuda"):
        raise ValueError(f"device is {golden.device!r:.60}; it is cpu or cuda")
    for name, size in (*golden.mesh.items(), *zip(("rows", "tokens"), golden.batch, strict=True)):
        if not 1 <= size <= _LARGEST_NUMBER:
            where = f"batch: {name}" if name in ("rows", "tokens") else f"mesh.{name[:60]}"
            raise ValueError(f"{where} is {_shown(size)}; give a whole number from 1 on")
    allow = dataclasses.asdict(golden.allow)
    for name, value in allow.items():
        if not 0 <= value <= _LARGEST_NUMBER:  # NaN is neither
            raise ValueError(f"allow.{name} is {_shown(value)}; give a number from 0 on")
    if not golden.ranks:
        raise ValueError("ranks is empty; a saved file has one rank or more")
    known_ranks = set[int]()
    num_modules = 0
    for i, each in enumerate(golden.ranks):
        where = f"ranks[{i}]"
        if not 0 <= each.rank < golden.num_processes or each.rank in known_ranks:
            problem = "is there twice" if each.rank in known_ranks else f"is not one of {golden.num_processes:,} ranks"
            raise ValueError(f"{where}.rank {_shown(each.rank)} {problem}; {_REMEDY}")
        known_ranks.add(each.rank)
        _check_sizes(f"{where}.memory", each.memory.items())
        for j, issued in enumerate(each.collectives):
            place = f"{where}.collectives[{j}]"
            if issued.phase not in PHASES:
                raise ValueError(f"{place}.phase is {issued.phase!r:.60}; it is one of {', '.join(PHASES)}")
            numbers = {"count": issued.count, "bytes": issued.bytes, "line": issued.line}
            _check_sizes(place, numbers.items())
            num_modules += _count_names(issued.modules or "", f"{place}.modules")
    for name, parameter in golden.parameters.items():
        num_modules += _count_names(name, "parameters")
        _check_sizes(f"parameters.{name[:60]}.shape", ((str(i), size) for i, size in enumerate(parameter.shape)))
    if num_modules > _MOST_MODULES:
        raise ValueError(f"the names of modules and parameters stand for {num_modules:,}, above {_MOST_MODULES:,}")


def _check_sizes(where: str, sizes: Iterable[tuple[str, int]]) -> None:
    for name, size in sizes:
        if not 0 <= size <= _LARGEST_NUMBER:
            raise ValueError(f"{where}.{name[:60]} is {_shown(size)}; give a whole number from 0 on, below 2**63")


def _shown(number: float) -> str:
    return "a number of many digits" if isinstance(number, int) and abs(number) >= 10**30 else str(number)


def join_names(names: Iterable[str]) -> list[tuple[str, list[str]]]:
    """Join dotted names that differ in the first number alone. Returns (joined name, names), by first appearance.

    "layers.0.mlp" and "layers.2.mlp" become "layers.[0,2].mlp".
    """
    found: dict[tuple[str, str] | str, list[str]] = {}
    for name in names:
        parts = _NUMBER.split(name, maxsplit=1)
        key = name if len(parts) == 1 or str(int(parts[1])) != parts[1] else (parts[0], parts[2])
        found.setdefault(key, []).append(name)
    joined = []
    for key, members in found.items():
        if isinstance(key, str) or len(members) == 1:
            joined.append((members[0], members))
            continue
        start, end = key
        numbers = sorted({int(each[len(start) : len(each) - len(end)]) for each in members})
        joined.append((f"{start}[{_ranges(numbers)}]{end}", members))
    return joined


def _ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] as "0-2,5"."""
    parts: list[list[int]] = []
    for each in numbers:
        if parts and each == parts[-1][1] + 1:
            parts[-1][1] = each
        else:
            parts.append([each, each])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def split_names(joined: str) -> Iterator[str]:
    """The names behind a joined name; a plain name itself."""
    found = _MANY.search(joined)
    if found is None:
        yield joined
        return
    for first, last in _bounds(found.group(1)):
        for number in range(first, last + 1):
            yield f"{joined[: found.start()]}{number}{joined[found.end() :]}"


def _count_names(joined: str, where: str) -> int:
    """The number of names behind a joined name. Raises ValueError, with `where`, for malformed ranges."""
    found = _MANY.search(joined)
    if found is None:
        return 1
    try:
        return sum(last - first + 1 for first, last in _bounds(found.group(1)))
    except ValueError:
        raise ValueError(f"{where} is {joined!r:.60}, whose numbers are no ranges like [0-3,5]; {_REMEDY}") from None


def _bounds(text: str) -> list[tuple[int, int]]:
    bounds = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        pair = int(first), int(last if dash else first)
        if pair[1] < pair[0]:
            raise ValueError(f"{part} is no range")
        bounds.append(pair)
    return bounds
