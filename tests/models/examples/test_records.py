"""Records of examples in files of every kind: in order, with their places, cut in parts that several processes read."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from weft.models.data.examples.records import find_record_parts, read_examples
from weft.models.data.inputs import LeftOut

from tests.models.examples.chats import CHATS, turns

pytestmark = pytest.mark.every_value


@pytest.fixture(autouse=True)
def folder_of_this_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def read(*inputs: str, part_bytes: int = 1 << 20, skip_bad: bool = False) -> tuple[list[tuple[str, Any]], LeftOut]:
    left_out = LeftOut(empty=0, skipped=[], bad=0, passed=[])
    parts = find_record_parts([Path(each) for each in inputs], part_bytes, skip_bad=skip_bad)
    found = [
        (str(place), record) for part in parts for place, record in read_examples(part, left_out, skip_bad=skip_bad)
    ]
    return found, left_out


def write(name: str, records: list[Any]) -> None:
    """A file of records, of the kind of its suffix."""
    Path(name).parent.mkdir(exist_ok=True)
    if name.endswith(".parquet"):
        columns = dict.fromkeys(column for each in records for column in each)
        table = pyarrow.table({column: [each.get(column) for each in records] for column in columns})
        pyarrow.parquet.write_table(table, name, row_group_size=2)
    elif name.endswith(".json"):
        Path(name).write_text(json.dumps(records, indent=1))
    else:
        Path(name).write_text("".join(json.dumps(each) + "\n" for each in records))


@pytest.mark.parametrize(
    ("name", "unit"), [("a.jsonl", "line"), ("a.ndjson", "line"), ("a.json", "item"), ("a.parquet", "row")]
)
@pytest.mark.parametrize("part_bytes", [1, 50, 1 << 20])
def test_records_of_each_kind_with_their_places(name: str, unit: str, part_bytes: int) -> None:
    records = [*CHATS, {"messages": turns("a", "b"), "label": True}]
    write(name, records)
    found, _ = read(name, part_bytes=part_bytes)
    assert found == [(f"{name}: {unit} {number}", each) for number, each in enumerate(records, 1)]


def test_columns_of_a_table_are_fields() -> None:
    Path("a.csv").write_text('prompt,completion\n"the sky,",is blue\n\nthe sun,"in\nthe sea"\n')
    expected = [("the sky,", "is blue"), ("the sun", "in\nthe sea")]
    found, left_out = read("a.csv")
    assert found == [
        (f"a.csv: row {number}", {"prompt": prompt, "completion": completion})
        for number, (prompt, completion) in zip((1, 3), expected, strict=True)
    ]
    assert left_out.empty == 1


def test_nulls_of_parquet_are_missing_fields() -> None:
    """All structs of a column have the same fields, so a call of a tool puts a null into every other message."""
    calls = [{"role": "assistant", "tool_calls": [{"name": "sun", "of": None}]}]
    write("a.parquet", [{"messages": [*turns("where?"), *calls], "tools": None, "prompt": "p", "other": 1}])
    ((_, record),), _ = read("a.parquet")
    assert record == {
        "messages": [*turns("where?"), {"role": "assistant", "tool_calls": [{"name": "sun"}]}],
        "prompt": "p",
    }


def test_a_folders_files_in_order() -> None:
    for name, content in (("in/b.jsonl", "b"), ("in/a.parquet", "a"), ("in/c.json", "c")):
        write(name, [{"prompt": content, "completion": content}])
    Path("in/README.md").write_text("about")
    Path("in/settings.json").write_text('{"lr": 1}')
    Path("in/photo.png").write_bytes(b"\x89PNG\x00")
    Path("in/one.json").write_text('{"prompt": "o", "completion": "o"}')
    found, left_out = read("in", part_bytes=30)
    assert [record["prompt"] for _, record in found] == ["a", "b", "c", "o"]
    assert left_out.skipped == ["in/README.md", "in/photo.png", "in/settings.json"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        pytest.param("{text: 1}", "a.jsonl: line 3 is not JSON; mend the record, or skip", id="no-json"),
        pytest.param("[1]", "a.jsonl: line 3 is list, not an object", id="list"),
        pytest.param("null", "a.jsonl: line 3 is null, not an object", id="null"),
        pytest.param('"BadRecord"', "a.jsonl: line 3 is str, not an object", id="text"),
        pytest.param("[" * 100_000, "a.jsonl: line 3 is not JSON", id="deep-list"),
        pytest.param('{"a":' * 100_000 + "1" + "}" * 100_000, "a.jsonl: line 3 is not JSON", id="deep-object"),
    ],
)
def test_records_that_are_no_objects_are_refused_by_file_and_line_or_counted(line: str, message: str) -> None:
    good = json.dumps(CHATS[0])
    Path("a.jsonl").write_text(f"{good}\n\n{line}\n{good}\n")
    with pytest.raises(ValueError, match="weft data prepare --skip-bad") as refused:
        read("a.jsonl")
    assert message in str(refused.value)
    found, left_out = read("a.jsonl", skip_bad=True)
    assert [place for place, _ in found] == ["a.jsonl: line 1", "a.jsonl: line 4"]
    assert (left_out.bad, left_out.empty) == (1, 1)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        pytest.param("a.txt", b"a text", "a.txt holds text, not records of examples; give files of", id="text"),
        pytest.param("a.md", b"a text", "a.md holds text, not records", id="page"),
        pytest.param("a.json", b'{\n"lr": 1}', "a.json holds no records", id="settings"),
        pytest.param("a.jsonl", b"", "no records of examples are in a.jsonl", id="empty"),
        pytest.param("a.json", b"", "a.json holds text, not records", id="empty-json"),
        pytest.param("a.json", b'[{"a": 1}, ]', "begins as a list of objects, and is not JSON", id="torn-list"),
        pytest.param("a.parquet", b"PAR1 and no more", "a.parquet is not a Parquet file", id="torn-parquet"),
        pytest.param("a.jsonl", b"\x1f\x8b", "a.jsonl is compressed by gzip", id="packed"),
        pytest.param("a.csv", b"prompt,completion\na\n", "a.csv: row 1 has 1 values, and there are 2", id="short-row"),
    ],
)
def test_files_without_records_are_refused(name: str, content: bytes, message: str) -> None:
    Path(name).write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(message)):
        read(name)


def test_inputs_that_are_missing_or_hold_nothing() -> None:
    with pytest.raises(ValueError, match="nowhere does not exist; give files, or folders of them: JSONL"):
        read("nowhere")
    Path("none").mkdir()
    Path("none/a.md").write_text("about")
    with pytest.raises(ValueError, match="no records of examples are in none; give files of JSONL"):
        read("none")


def test_parquet_without_a_column_of_examples() -> None:
    write("a.parquet", [{"text": "a", "n": 1}])
    with pytest.raises(ValueError, match=r"a\.parquet has the columns text, n, and none of an example: messages"):
        read("a.parquet")


def test_damaged_files_of_a_folder_are_left_out_by_skip_bad() -> None:
    write("in/b.jsonl", [CHATS[0]])
    Path("in/a.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(ValueError, match=r"a\.parquet is not a Parquet file"):
        read("in")
    found, left_out = read("in", skip_bad=True)
    assert ([place for place, _ in found], left_out.skipped) == (["in/b.jsonl: line 1"], ["in/a.parquet"])


def test_labels_of_csv_are_text_and_those_of_json_are_not() -> None:
    Path("in.csv").write_text("prompt,completion,label\na,b,True\nc,d,0\ne,f,maybe\n")
    assert [record["label"] for _, record in read("in.csv")[0]] == [True, False, "maybe"]
    write("in.jsonl", [{"prompt": "a", "completion": "b", "label": "true"}])
    assert [record["label"] for _, record in read("in.jsonl")[0]] == ["true"]
