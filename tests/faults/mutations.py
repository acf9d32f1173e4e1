"""Random damage to files: bytes flipped, cut and doubled, JSON values swapped, links and pipes in a file's place."""

from __future__ import annotations

import copy
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

# Replacements for JSON values: each type, the ends of ranges, and names that lead out of a folder.
SWAPPED: list[Any] = [
    None,
    True,
    False,
    "false",
    "",
    "ä\x1b[31m\n",
    "../secret/model.safetensors",
    "/etc/passwd",
    "x" * 5000,
    0,
    -1,
    -7,
    3,
    1.5,
    1e300,
    float("inf"),
    float("nan"),
    1_000_000_000,
    2**31,
    2**62,
    2**70,
    [],
    [1, "a"],
    [[[[]]]],
    {},
    {"a": {"b": 1}},
]


def damage(path: Path, random: Random) -> str:
    """Damage the file in a random way; returns the damage in a few words."""
    ways: list[Callable[[Path, Random], str]] = [_flip, _cut, _double, _erase, _replace]
    if path.suffix in (".json", ".jsonl"):
        ways += [_swap] * 12
    if path.suffix == ".toml":
        ways += [_swap_toml] * 6
    if path.suffix == ".safetensors":
        ways += [_swap_header] * 4
    return random.choice(ways)(path, random)


def _flip(path: Path, random: Random) -> str:
    content = bytearray(path.read_bytes())
    for _ in range(random.choice((1, 1, 1, 8)) if content else 0):
        content[random.randrange(len(content))] ^= 1 << random.randrange(8)
    path.write_bytes(content)
    return "flipped bits"


def _cut(path: Path, random: Random) -> str:
    content = path.read_bytes()
    at = random.randrange(len(content) + 1)
    path.write_bytes(content[:at])
    return f"cut at {at} of {len(content)} bytes"


def _double(path: Path, random: Random) -> str:
    content = path.read_bytes()
    start, stop = sorted(random.randrange(len(content) + 1) for _ in range(2))
    path.write_bytes(content[:stop] + content[start:])
    return f"bytes {start} to {stop} doubled"


def _erase(path: Path, random: Random) -> str:
    path.unlink()
    return "removed"


def _replace(path: Path, random: Random) -> str:
    """Replace the file by a pipe, a folder or a link; a link leads to a text outside the folder."""
    path.unlink()
    match random.randrange(4):
        case 0:
            os.mkfifo(path)
            return "a pipe in its place"
        case 1:
            path.mkdir()
            return "a folder in its place"
        case 2:
            path.symlink_to("../secret/secret.txt")
            return "a link to a text outside"
        case _:
            path.symlink_to("nowhere")
            return "a link that leads nowhere"


def _swap(path: Path, random: Random) -> str:
    """Another value somewhere in the JSON; a manifest's digest is made right again, two times of three."""
    text = path.read_text()
    if path.suffix == ".jsonl":
        lines = text.splitlines()
        at = random.randrange(len(lines))
        value, said = _swapped(json.loads(lines[at]), random)
        lines[at] = json.dumps(value)
        path.write_bytes(("\n".join(lines) + "\n").encode())
        return f"line {at}: {said}"
    value, said = _swapped(json.loads(text), random)
    if isinstance(value, dict) and random.randrange(3):
        value = _signed(value)
    if isinstance(value, dict) and "holds" in value:  # as the manifests of checkpoints are written
        path.write_bytes((json.dumps(value, indent=1) + "\n").encode())
    else:
        path.write_bytes(json.dumps(value, indent=random.choice((None, 1))).encode())
    return said


def _swapped(value: Any, random: Random) -> tuple[Any, str]:
    """A copy of a JSON value with one place changed, and a description of the change."""
    value = copy.deepcopy(value)
    places: list[tuple[Any, Any]] = []

    def visit(node: Any) -> None:
        keys = node.keys() if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
        for key in keys:
            places.append((node, key))
            visit(node[key])

    visit(value)
    if not places:
        return random.choice(SWAPPED), "swapped whole"
    node, key = random.choice(places)
    match random.randrange(12):
        case 0:
            del node[key]
            return value, f"{key!r} removed"
        case 1 if isinstance(node, list):
            node.append(copy.deepcopy(node[key]))
            return value, f"item {key} doubled"
        case 2:
            deep: Any = 1
            for _ in range(random.choice((10, 900))):
                deep = [deep]
            node[key] = deep
            return value, f"{key!r} nests deeply"
        case 3:
            other, there = random.choice(places)
            node[key] = copy.deepcopy(other[there])
            return value, f"{key!r} is the value of {there!r}"
        case 4 if isinstance(node, dict):
            node[random.choice(("added", "../added", "ä\x1b[31m"))] = node[key]
            return value, "a key was added"
        case 5 if isinstance(node[key], list):
            node[key] = node[key][: len(node[key]) // 2]
            return value, f"{key!r} was halved"
        case _:
            node[key] = random.choice(SWAPPED)
            return value, f"{key!r} is {str(node[key])[:30]!r}"


def _signed(value: dict[str, Any]) -> dict[str, Any]:
    """The value with its digest recomputed as its writer would, for checkpoints and prepared data."""
    if "holds" in value:
        return {**value, "sha256": hashlib.sha256(json.dumps(value["holds"]).encode()).hexdigest()}
    if "sha256" in value:
        rest = {name: each for name, each in value.items() if name != "sha256"}
        return {**rest, "sha256": hashlib.sha256(json.dumps(rest).encode()).hexdigest()}
    return value


def _swap_toml(path: Path, random: Random) -> str:
    """Another value of an option; the line with the file's own sum is dropped."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("# sha256")]
    options = [number for number, line in enumerate(lines) if " = " in line]
    number = random.choice(options)
    name = lines[number].partition(" = ")[0]
    values = ("1e12", "-1", "0", "true", '"x"', "[1]", "1.5", '"../secret"', str(2**70), "[" * 900 + "]" * 900)
    lines[number] = f"{name} = {random.choice(values)}"
    path.write_bytes("\n".join(lines).encode())
    return lines[number][:60]


def _swap_header(path: Path, random: Random) -> str:
    """Another value in the header of a safetensors file, whose length is made right again."""
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    value, said = _swapped(json.loads(content[8 : 8 + size]), random)
    header = json.dumps(value).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + size :])
    return f"header: {said}"
