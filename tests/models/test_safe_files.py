"""Files that a stranger may have written: which files are opened, and how JSON is parsed."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from weft.models.safe_files import as_type, check_plain_name, parse_json, read_json, read_plain


@dataclass(frozen=True)
class Part:
    offsets: tuple[int, ...]
    file: str
    sum: int = 0


@dataclass(frozen=True)
class Whole:
    parts: tuple[Part, ...]
    scale: float
    names: Mapping[str, bool]
    end: int | str | None = None
    pair: tuple[int, str] = (0, "")


GOOD: dict[str, Any] = {"parts": [{"offsets": [0, 4], "file": "a"}], "scale": 2, "names": {"x": True}}


def test_a_document_becomes_the_dataclass_that_it_says() -> None:
    found = as_type(Whole, {**GOOD, "end": "stop", "pair": [3, "y"]}, "file")
    assert found == Whole((Part((0, 4), "a"),), 2.0, {"x": True}, "stop", (3, "y"))
    assert isinstance(found.scale, float)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        pytest.param({"parts": None}, "file.parts is null, and a list is needed", id="null-for-a-list"),
        pytest.param({"parts": [3]}, "file.parts[0] is 3, and an object is needed", id="number-for-an-object"),
        pytest.param(
            {"parts": [{"offsets": [True], "file": "a"}]},
            "file.parts[0].offsets[0] is true, and a whole number is needed",
            id="bool-for-a-number",
        ),
        pytest.param({"parts": [{"offsets": []}]}, "file.parts[0] has no 'file'", id="missing-field"),
        pytest.param(
            {"parts": [{"offsets": [], "file": "a", "code": "x"}]},
            "file.parts[0] has 'code'; known are offsets, file, sum",
            id="unknown-field",
        ),
        pytest.param({"scale": "2"}, "file.scale is '2', and a number is needed", id="string-for-a-number"),
        pytest.param({"scale": True}, "file.scale is true, and a number is needed", id="bool-for-a-float"),
        pytest.param({"names": {"x": 1}}, "file.names.x is 1, and true or false is needed", id="number-for-a-bool"),
        pytest.param({"names": []}, "file.names is a list of 0, and an object is needed", id="list-for-an-object"),
        pytest.param(
            {"end": 1.5}, "file.end is 1.5, and a whole number or a string or null is needed", id="none-of-a-union"
        ),
        pytest.param({"pair": [1]}, "file.pair is a list of 1, and a list of 2 is needed", id="short-pair"),
        pytest.param({"scale": "x" * 1000}, f"file.scale is '{'x' * 59}…, and a number is needed", id="long-value"),
    ],
)
def test_a_value_of_another_type_is_named(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError) as refusal:
        as_type(Whole, {**GOOD, **changed}, "file")
    assert str(refusal.value) == said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        pytest.param(b"[" * 100_000, "nests too deeply", id="deep-list"),
        pytest.param(b'{"a":' * 100_000, "nests too deeply", id="deep-object"),
        pytest.param(b"{", "is not JSON", id="cut-short"),
        pytest.param(b"\xff{}", "is not JSON", id="not-utf-8"),
        pytest.param(b"", "is not JSON", id="empty"),
        pytest.param(b"[1]", "holds a list of 1, not an object", id="list"),
        pytest.param(b'"a"', "holds 'a', not an object", id="string"),
        pytest.param(b"1" * 5000, "is not JSON", id="5000-digits"),
        pytest.param(b"null", "holds null, not an object", id="null"),
    ],
)
def test_a_text_that_is_no_object_is_refused(text: bytes, said: str) -> None:
    with pytest.raises(ValueError) as refusal:
        parse_json(text, "a/config.json", "fetch the file again")
    assert str(refusal.value).startswith(f"a/config.json {said}")
    assert str(refusal.value).endswith("; fetch the file again")


def test_only_plain_files_are_opened(tmp_path: Path) -> None:
    (tmp_path / "file").write_text('{"a": 1}')
    (tmp_path / "link").symlink_to("file")
    assert read_json(tmp_path / "link", "") == {"a": 1}
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", tmp_path, Path("/dev/zero")):
        with pytest.raises((ValueError, IsADirectoryError)):
            read_plain(path)
    for path in (tmp_path / "fifo", tmp_path, Path("/dev/zero")):
        with pytest.raises(ValueError):
            read_json(path, "give another")
    with pytest.raises(ValueError, match=r"has no absent; give another"):
        read_json(tmp_path / "absent", "give another")


def test_a_file_beyond_the_limit_is_refused_before_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(json.dumps({"a": 1}).encode())
    with pytest.raises(ValueError, match=r"file has 8 bytes, and 7 are read at most"):
        read_plain(tmp_path / "file", limit=7)
    assert read_plain(tmp_path / "file", limit=8) == b'{"a": 1}'
    with (tmp_path / "hole").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(ValueError, match="has 1,099,511,627,776 bytes"):
        read_plain(tmp_path / "hole")


@pytest.mark.parametrize(
    "name", ["../a", "/etc/passwd", "a/b", "..", ".", "", ".hidden", "a\0b", "a\\b", "./a", "x" * 256, "ä" * 128]
)
def test_a_name_that_leads_out_of_its_folder_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="a plain name within the folder is needed"):
        check_plain_name(name, "index.json")


@pytest.mark.parametrize(
    "name", ["model.safetensors", "model-00001-of-00002.safetensors", "a b", "ä", "x" * 255, "\ud800"]
)
def test_a_plain_name_is_taken(name: str) -> None:
    check_plain_name(name, "index.json")
