"""Reads and checks a chip's values in a TOML file, and writes these files. `chip.load_chip` makes the `Chip`.

A number stands alone, or with the source: `{ value = 132, source = "data sheet" }`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from ..safe_files import parse_toml, read_plain

UNLIMITED = 2**24  # `Level.ranks` of links between all ranks
# Default share of the peak sustained by attention, measured on 8 to 64 H100s with context parallelism: 580 to 602
# TFLOP/s in forward, 516 to 585 in backward.
ATTENTION = {"forward": 0.60, "backward": 0.555}
LARGEST = 2**20  # bytes of a file; `weft measure` writes about 20 thousand
MOST_PRODUCTS, MOST_OPS, MOST_LEVELS = 4096, 4096, 16
_DEEPEST = 8  # tables inside tables; rates of a chip have at most four
_HIGHEST = 1e24  # of any number: FLOP/s, bytes, bytes/s, seconds
_FIELDS = (
    "name", "source", "threads", "peaks", "reachable", "reachable_by_dtype", "sustained", "multiprocessors",
    "tiles",
    "memory_bytes", "memory_bandwidth", "memory_reachable", "levels", "host_seconds",
    "launch_seconds", "attention_reachable", "ops", "products", "collectives", "crowding", "collective_host_seconds",
    "drift",
)  # fmt: skip
_OF_LEVEL = ("name", "ranks", "bandwidth", "peer_bandwidth", "reachable", "latency", "slowdown")
_OF_RATE = ("seconds", "seconds_per_byte", "seconds_per_flop", "seconds_per_score", "adds_products")
_OF_PRODUCT = ("dtype", "M", "N", "K", "seconds")
_REMEDY = "measure the machine again, or copy an entry of chips.toml"


def read_chip(path: Path, *, table: str | None = None) -> dict[str, Any]:
    """Read and check a chip's values, by the fields of `Chip`; levels, products and rates are dictionaries.

    table: the table of the file with the chip; None: the whole file.
    Raises ValueError for an unreadable file, and with field, value and remedy for a wrong value.
    """
    values = read_values(path)
    if table is not None:
        values = {"name": table, **_table(values[table], table)}
    try:
        return _chip(values)
    except ValueError as error:
        raise ValueError(f"chip {path}: {error}") from None


def read_values(path: Path) -> dict[str, Any]:
    """The values of a TOML file. Raises ValueError for an unreadable file."""
    try:
        content = read_plain(path, limit=LARGEST)
    except OSError as error:
        raise ValueError(f"chip {path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"chip {error}") from None
    return parse_toml(content, f"chip {path}", "no number of a chip has so many dots")


def as_toml(values: Mapping[str, Any], comment: str) -> str:
    """The text of a file for `read_chip`. values: `dataclasses.asdict` of a chip. comment: first lines of the file."""
    import tomlkit  # imported here: not needed for reading

    document = tomlkit.document()
    for line in comment.splitlines():
        document.add(tomlkit.comment(line))
    for name in ("name", "source", "threads", "reachable", "sustained", "multiprocessors", "memory_bytes",
                 "memory_bandwidth", "memory_reachable", "host_seconds", "launch_seconds", "crowding",
                 "collective_host_seconds", "drift"):  # fmt: skip
        if (value := values[name]) is not None:
            document.add(name, value)
    document.add("tiles", [list(each) for each in values["tiles"]])
    document.add("peaks", dict(values["peaks"]))
    for name in ("reachable_by_dtype", "attention_reachable"):
        if values[name]:
            document.add(name, dict(values[name]))
    rows: dict[str, list[dict[str, Any]]] = {
        "levels": [
            {name: value for name in _OF_LEVEL if (value := each[name]) not in (UNLIMITED, math.inf)}
            for each in values["levels"]
        ],
        "products": [{name: each[name] for name in _OF_PRODUCT} for each in values["products"]],
    }
    for name, tables in rows.items():
        if not tables:
            continue
        array = tomlkit.array()
        for each in tables:
            row = tomlkit.inline_table()
            row.update(each)
            array.append(row)
        document.add(name, array.multiline(True))
    for name in ("collectives", "ops"):
        table = tomlkit.table()
        for key, rate in values[name].items():
            numbers = tomlkit.inline_table()
            numbers.update({each: value for each in _OF_RATE if (value := rate[each])})
            table.add(key, numbers)
        if values[name]:
            document.add(name, table)
    return tomlkit.dumps(document)


def _chip(values: Mapping[str, Any]) -> dict[str, Any]:
    _check_names(values, _FIELDS, "the chip")
    peaks = {name: _number(value, f"peaks.{name}") for name, value in _table(values.get("peaks"), "peaks").items()}
    if not peaks:
        raise ValueError("peaks is empty; give the FLOP/s of products by dtype, as peaks.bfloat16 = 989e12")
    by_dtype = _table(values.get("reachable_by_dtype", {}), "reachable_by_dtype")
    levels = tuple(
        _level(each, f"levels[{i}]") for i, each in enumerate(_rows(values.get("levels", []), "levels", MOST_LEVELS))
    )
    for inner, outer in pairwise(levels):
        if outer["ranks"] <= inner["ranks"] or outer["ranks"] % inner["ranks"]:
            raise ValueError(
                f"levels has {outer['name']} with {outer['ranks']} ranks outside of {inner['name']} with "
                f"{inner['ranks']}; give levels from the innermost, each with a multiple of the ranks of the one before"
            )
    if not levels:
        raise ValueError("levels is missing; give the links between ranks, innermost first, as [[levels]]")
    threads = values.get("threads")
    return {
        "name": _text(values.get("name"), "name"),
        "source": _text(values.get("source", ""), "source"),
        "threads": None if threads is None else _count(threads, "threads"),
        "peaks": peaks,
        "reachable": _share(values.get("reachable"), "reachable"),
        "reachable_by_dtype": {name: _share(each, f"reachable_by_dtype.{name}") for name, each in by_dtype.items()},
        "sustained": _share(values.get("sustained", 1.0), "sustained"),
        "multiprocessors": _count(values.get("multiprocessors"), "multiprocessors"),
        "tiles": _tiles(values.get("tiles")),
        "memory_bytes": _count(values.get("memory_bytes"), "memory_bytes"),
        "memory_bandwidth": _number(values.get("memory_bandwidth"), "memory_bandwidth"),
        "memory_reachable": _share(values.get("memory_reachable"), "memory_reachable"),
        "levels": levels,
        "host_seconds": _number(values.get("host_seconds"), "host_seconds", zero=True),
        "launch_seconds": _number(values.get("launch_seconds", 0.0), "launch_seconds", zero=True),
        "attention_reachable": {
            **ATTENTION,
            **{
                name: _share(each, f"attention_reachable.{name}")
                for name, each in _table(values.get("attention_reachable", {}), "attention_reachable").items()
            },
        },
        "crowding": _number(values.get("crowding", 1.0), "crowding"),
        "collective_host_seconds": _number(
            values.get("collective_host_seconds", 0.0), "collective_host_seconds", zero=True
        ),
        "drift": _number(values.get("drift", 0.0), "drift", zero=True),
        "ops": dict(_rates(values.get("ops", {}), "ops")),
        "collectives": dict(_rates(values.get("collectives", {}), "collectives")),
        "products": tuple(
            _product(each, f"products[{i}]")
            for i, each in enumerate(_rows(values.get("products", []), "products", MOST_PRODUCTS))
        ),
    }


def _level(value: Any, where: str) -> dict[str, Any]:
    row = _table(value, where)
    _check_names(row, _OF_LEVEL, where)
    return {
        "name": _text(row.get("name"), f"{where}.name"),
        "ranks": _count(row["ranks"], f"{where}.ranks") if "ranks" in row else UNLIMITED,
        "bandwidth": _number(row.get("bandwidth"), f"{where}.bandwidth"),
        "peer_bandwidth": (
            _number(row["peer_bandwidth"], f"{where}.peer_bandwidth") if "peer_bandwidth" in row else math.inf
        ),
        "reachable": _share(row.get("reachable"), f"{where}.reachable"),
        "latency": _number(row.get("latency"), f"{where}.latency", zero=True),
        "slowdown": _share(row.get("slowdown", 0.0), f"{where}.slowdown", zero=True),
    }


def _product(value: Any, where: str) -> dict[str, Any]:
    row = _table(value, where)
    _check_names(row, _OF_PRODUCT, where)
    M, N, K = (_count(row.get(name), f"{where}.{name}") for name in ("M", "N", "K"))
    seconds = _number(row.get("seconds"), f"{where}.seconds")
    return {"dtype": _text(row.get("dtype"), f"{where}.dtype"), "M": M, "N": N, "K": K, "seconds": seconds}


def _rates(value: Any, within: str) -> list[tuple[str, dict[str, Any]]]:
    """(name, rate) for each rate of a table. A dotted name may be a quoted key, or tables inside tables."""
    found: list[tuple[str, dict[str, Any]]] = []

    def visit(table: Mapping[str, Any], name: str, depth: int) -> None:
        if depth > _DEEPEST or len(found) > MOST_OPS:
            raise ValueError(
                f"{within} has more than {MOST_OPS} rates, or names of more than {_DEEPEST} parts; {_REMEDY}"
            )
        for key, each in table.items():
            where = f"{name}.{key}" if name else key
            row = _table(each, f"{within}.{where}")
            if row and all(isinstance(inner, dict) and "value" not in inner for inner in row.values()):
                visit(row, where, depth + 1)
                continue
            _check_names(row, _OF_RATE, f"{within}.{where}")
            adds = row.get("adds_products", False)
            if not isinstance(adds, bool):
                raise ValueError(f"{within}.{where}.adds_products is {_shown(adds)}; give true or false")
            numbers = (part for part in _OF_RATE[:4] if part in row)
            found.append(
                (
                    where,
                    {
                        **{part: _number(row[part], f"{within}.{where}.{part}", zero=True) for part in numbers},
                        "adds_products": adds,
                    },
                )
            )

    visit(_table(value, within), "", 1)
    return found


def _tiles(value: Any) -> tuple[tuple[int, int], ...]:
    tiles = _plain(value)
    if not isinstance(tiles, list) or not tiles or not all(isinstance(each, list) and len(each) == 2 for each in tiles):
        raise ValueError(f"tiles is {_shown(tiles)}; give pairs of sizes, as tiles = [[128, 256], [128, 128]]")
    return tuple((_count(m, "tiles"), _count(n, "tiles")) for m, n in tiles)


def _plain(value: Any) -> Any:
    """The number of `{ value = ..., source = ... }`; any further value unchanged."""
    return value["value"] if isinstance(value, dict) and "value" in value else value


def _number(value: Any, where: str, *, zero: bool = False) -> float:
    """Check a finite number above 0; zero: 0 is allowed. Raises ValueError, with `where`."""
    number = _plain(value)
    if number is None:
        raise ValueError(f"{where} is missing; {_REMEDY}")
    if isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number <= _HIGHEST:
        raise ValueError(f"{where} is {_shown(number)}; give a number from 0 to {_HIGHEST:g}")
    if number == 0 and not zero:
        raise ValueError(f"{where} is 0; give a number above 0")
    return float(number)


def _share(value: Any, where: str, *, zero: bool = False) -> float:
    """Check a share of a peak, above 0 and at most 1; zero: 0 is allowed. Raises ValueError, with `where`."""
    share = _number(value, where, zero=zero)
    if share > 1:
        raise ValueError(f"{where} is {share:g}; give a share of the peak, at most 1")
    return share


def _count(value: Any, where: str) -> int:
    number = _number(value, where)
    if number != int(number):
        raise ValueError(f"{where} is {number:g}; give a whole number")
    return int(number)


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{where} is {_shown(value)}; give a text")
    return value


def _table(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{where} is {_shown(value)}; give a table of numbers; {_REMEDY}")
    return value


def _rows(value: Any, where: str, most: int) -> list[Any]:
    if not isinstance(value, list) or len(value) > most:
        raise ValueError(f"{where} is {_shown(value)}; give a list of at most {most:,} tables")
    return value


def _check_names(row: Mapping[str, Any], known: Collection[str], where: str) -> None:
    if unknown := next((name for name in row if name not in known), None):
        raise ValueError(f"{where} has {unknown[:60]!r}, which is not known there; known are {', '.join(known)}")


def _shown(value: Any) -> str:
    text = "missing" if value is None else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
