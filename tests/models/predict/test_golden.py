"""Golden files: what is written is read, mistakes are named in a line, and changes are found whatever the lines."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from weft.models.predict.changes import annotation, as_markdown, find_changes, summarize, totals
from weft.models.predict.golden import (
    Allow,
    Golden,
    Parameter,
    RankRecord,
    SitedCollectives,
    dump,
    join_names,
    read_golden,
    split_names,
    write_golden,
)

DOWN = SitedCollectives(
    phase="forward", kind="all-reduce", axes=("tp",), modules="layers.[0-3].mlp.down_proj", count=1, bytes=100,
    file="weft/models/blocks.py", line=131, code="output = self.down_proj(hidden)",
)  # fmt: skip
SUMS = SitedCollectives(
    phase="gradients", kind="all-reduce", axes=("dp",), modules=None, count=2, bytes=64, file="weft/buckets.py",
    line=7, code="wait()",
)  # fmt: skip
GOLDEN = Golden(
    device="cpu",
    mesh={"dp": 2, "tp": 2},
    batch=(8, 128),
    ranks=(RankRecord(rank=0, collectives=(DOWN, SUMS), memory={"parameters": 1000, "states": 2000}),),
    parameters={
        "layers.[0-3].mlp.down_proj.weight": Parameter(shape=(16, 24), layout="dp: R, tp: S(1)"),
        "scale": Parameter(shape=(), layout=None),
    },
)


def with_collectives(*collectives: SitedCollectives, memory: dict[str, int] | None = None) -> Golden:
    record = GOLDEN.ranks[0]
    return replace(GOLDEN, ranks=(replace(record, collectives=collectives, memory=memory or record.memory),))


def texts(now: Golden, saved: Golden = GOLDEN) -> list[str]:
    return [each.text for each in find_changes(saved, now)]


@pytest.mark.parametrize(
    ("names", "joined"),
    [
        pytest.param([], [], id="none"),
        pytest.param(["norm"], ["norm"], id="no-number"),
        pytest.param(["layers.3.mlp"], ["layers.3.mlp"], id="one"),
        pytest.param(["layers.0.mlp", "layers.1.mlp", "layers.2.mlp"], ["layers.[0-2].mlp"], id="range"),
        pytest.param(["layers.5", "layers.0", "layers.1"], ["layers.[0-1,5]"], id="gap"),
        pytest.param(["layers.0.a", "layers.1.b"], ["layers.0.a", "layers.1.b"], id="unlike"),
        pytest.param(["a.0.e.1", "a.1.e.1", "a.0.e.2"], ["a.[0-1].e.1", "a.0.e.2"], id="two-numbers"),
        pytest.param(["h.01.x", "h.02.x"], ["h.01.x", "h.02.x"], id="leading-zeros"),
        pytest.param(["0", "1", "2"], ["[0-2]"], id="numbers-alone"),
        pytest.param(["conv1.weight", "conv2.weight"], ["conv1.weight", "conv2.weight"], id="number-in-a-word"),
    ],
)
def test_names_that_differ_in_a_number_are_joined_and_split(names: list[str], joined: list[str]) -> None:
    assert [name for name, _ in join_names(names)] == joined
    assert sorted(name for each in joined for name in split_names(each)) == sorted(names)


def test_a_file_is_read_as_it_was_written_and_has_a_line_for_each_collective(tmp_path: Path) -> None:
    path = tmp_path / "golden.json"
    write_golden(path, GOLDEN)
    assert read_golden(path) == GOLDEN
    lines = path.read_text().splitlines()
    assert sum('"kind": "all-reduce"' in line for line in lines) == 2
    assert '  "allow": {"count": 0, "bytes_percent": 0.0, "memory_percent": 1.0},' in lines
    assert dump(read_golden(path)) == path.read_text()


def edited(change: Callable[[dict[str, Any]], object]) -> bytes:
    values = json.loads(dump(GOLDEN))
    change(values)
    return json.dumps(values).encode()


def put(*path: Any) -> bytes:
    """The file with the last of `path` at the place of the others."""
    *folders, name, value = path

    def change(values: Any) -> None:
        for each in folders:
            values = values[each]
        values[name] = value

    return edited(change)


ISSUED = ("ranks", 0, "collectives", 0)


@pytest.mark.every_value
@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(b"", "is not JSON", id="empty"),
        pytest.param(b"\xff\xfe", "is not JSON", id="no-text"),
        pytest.param(b"[]", "holds a list of 0, not an object", id="list"),
        pytest.param(b"[" * 100_000, "nests too deeply", id="nested"),
        pytest.param(b"{}", "format is none, and this version of Weft reads 1", id="no-format"),
        pytest.param(put("format", 2), "format is 2, and this version of Weft reads 1; save it again", id="format"),
        pytest.param(put("format", True), "format is True", id="format-true"),
        pytest.param(edited(lambda values: values.pop("ranks")), "golden.json has no 'ranks'", id="no-ranks"),
        pytest.param(put("ranks", []), "ranks is empty", id="ranks-empty"),
        pytest.param(put("rnaks", []), "has 'rnaks'; known are format, command", id="unknown"),
        pytest.param(put("ranks", 0, "rank", 4), "ranks[0].rank 4 is not one of 4 ranks", id="rank"),
        pytest.param(put("mesh", "dp", 0), "mesh.dp is 0; give a whole number from 1 on", id="mesh"),
        pytest.param(put("mesh", "dp", 2.5), "golden.json: mesh.dp is 2.5, and a whole number is needed", id="half"),
        pytest.param(put("batch", [8]), "batch is a list of 1, and a list of 2 is needed", id="batch"),
        pytest.param(put("batch", [8, 0]), "batch: tokens is 0", id="tokens"),
        pytest.param(put("device", "tpu"), "device is 'tpu'; it is cpu or cuda", id="device"),
        pytest.param(put("allow", "memory_percent", float("nan")), "allow.memory_percent is nan", id="nan"),
        pytest.param(put("allow", "bytes_percent", -1), "allow.bytes_percent is -1.0; give a number", id="negative"),
        pytest.param(put("allow", "bytes_percent", float("inf")), "allow.bytes_percent is inf", id="infinite"),
        pytest.param(put("allow", "count", 10**400), "allow.count is a number of many digits", id="huge"),
        pytest.param(put("allow", "count", "2"), "allow.count is '2', and a whole number is needed", id="text"),
        pytest.param(put(*ISSUED, "count", -1), "ranks[0].collectives[0].count is -1", id="count"),
        pytest.param(put(*ISSUED, "phase", "sideways"), "collectives[0].phase is 'sideways'; it is one of", id="phase"),
        pytest.param(put(*ISSUED, "modules", "layers.[3-1]"), "modules is 'layers.[3-1]', whose numbers", id="range"),
        pytest.param(put(*ISSUED, "modules", "layers.[,]"), "modules is 'layers.[,]', whose numbers", id="no-range"),
        pytest.param(put(*ISSUED, "modules", "[0-99999999999]"), "stand for 100,000,000,006, above", id="many"),
        pytest.param(put(*ISSUED, "modules", f"[0-{'9' * 5000}]"), "whose numbers are no ranges", id="digits"),
        pytest.param(put("ranks", 0, "memory", "states", None), "memory.states is null", id="memory"),
        pytest.param(put("parameters", "scale", "shape", [-1]), "parameters.scale.shape.0 is -1", id="shape"),
    ],
)
def test_a_file_that_cannot_be_is_a_line_with_the_field(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "golden.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"golden\.json") as error:
        read_golden(path)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_the_same_rank_twice_is_refused(tmp_path: Path) -> None:
    write_golden(tmp_path / "golden.json", replace(GOLDEN, ranks=GOLDEN.ranks * 2))
    with pytest.raises(ValueError, match=r"ranks\[1\].rank 0 is there twice"):
        read_golden(tmp_path / "golden.json")


def test_other_lines_alone_are_no_change() -> None:
    moved = replace(DOWN, line=500, file="packages/models/src/weft/models/blocks.py")
    assert texts(with_collectives(moved, replace(SUMS, code="await_them()"))) == []


def test_the_order_of_collectives_and_how_names_are_joined_are_no_change() -> None:
    parts = [replace(DOWN, modules=f"layers.{i}.mlp.down_proj") for i in (3, 1, 0, 2)]
    assert texts(with_collectives(SUMS, *parts)) == []


def test_a_new_collective_is_named_with_its_module_and_its_line() -> None:
    new = replace(DOWN, modules="layers.2.mlp", file="my_models.py", line=12, code="x = reshard(x)", bytes=50)
    (change,) = find_changes(GOLDEN, with_collectives(DOWN, SUMS, new))
    assert change.text == "+1 all-reduce over tp (50 bytes) in forward, issued by layers.2.mlp at my_models.py:12"
    assert (change.file, change.line, change.code) == ("my_models.py", 12, "x = reshard(x)")
    assert (change.before, change.after) == ("0 (0 bytes)", "1 (50 bytes)")


def test_of_several_lines_of_a_module_the_one_with_more_collectives_is_named() -> None:
    new = replace(DOWN, line=140, code="again = self.down_proj(hidden)")
    moved = replace(DOWN, line=132)
    (text,) = texts(with_collectives(moved, new, SUMS))
    assert text == (
        "+4 all-reduce over tp (400 bytes) in forward, issued by layers.[0-3].mlp.down_proj at "
        "weft/models/blocks.py:140"
    )


def test_a_vanished_collective_is_named_with_the_line_of_the_file() -> None:
    (change,) = find_changes(GOLDEN, with_collectives(DOWN))
    assert change.text == "-2 all-reduce over dp (64 bytes) in gradients, was issued at weft/buckets.py:7"
    assert change.file == ""  # no line of today's program: GitHub shows the change at the golden file
    assert summarize(GOLDEN, with_collectives(DOWN)) == [
        "rank 0 in all: 6 -> 4 collectives, 464 -> 400 bytes received (-13.8 %)"
    ]


def test_other_bytes_of_as_many_collectives() -> None:
    (text,) = texts(with_collectives(replace(DOWN, bytes=150), SUMS))
    assert text == (
        "4 all-reduce over tp in forward: 400 -> 600 bytes (+50.0 %), issued by layers.[0-3].mlp.down_proj at "
        "weft/models/blocks.py:131"
    )


@pytest.mark.parametrize(
    ("allow", "bytes", "count", "changes"),
    [
        pytest.param(Allow(), 101, 1, 1, id="nothing"),
        pytest.param(Allow(bytes_percent=1), 101, 1, 0, id="bytes"),
        pytest.param(Allow(bytes_percent=1), 102, 1, 1, id="more-bytes"),
        pytest.param(Allow(bytes_percent=1), 99, 1, 0, id="fewer-bytes"),
        pytest.param(Allow(count=1), 100, 2, 0, id="count"),
        pytest.param(Allow(count=1), 100, 3, 1, id="more"),
        pytest.param(Allow(count=1), 101, 2, 1, id="count-but-not-bytes"),
    ],
)
def test_an_allowed_difference_is_no_change(allow: Allow, bytes: int, count: int, changes: int) -> None:
    now = with_collectives(replace(DOWN, bytes=bytes, count=count), SUMS)
    assert len(texts(now, replace(GOLDEN, allow=allow))) == changes


@pytest.mark.parametrize(
    ("memory", "expected"),
    [
        pytest.param({"parameters": 1010, "states": 1980}, [], id="within"),
        pytest.param({"parameters": 1011, "states": 2000}, ["parameters: 1,000 -> 1,011 bytes (+1.1 %)"], id="more"),
        pytest.param({"parameters": 1000}, ["states: 2,000 -> 0 bytes (-100.0 %)"], id="gone"),
        pytest.param(
            {"parameters": 1000, "states": 2000, "gathered": 5}, ["gathered: 0 -> 5 bytes"], id="of-another-kind"
        ),
    ],
)  # fmt: skip
def test_memory_before_and_after(memory: dict[str, int], expected: list[str]) -> None:
    found = texts(with_collectives(DOWN, SUMS, memory=memory))
    assert found == [f"memory of rank 0, {each}" for each in expected]


def test_layouts_before_and_after() -> None:
    parameters = {
        "layers.[0-1].mlp.down_proj.weight": Parameter(shape=(16, 24), layout="dp: R, tp: S(1)"),
        "layers.[2-3].mlp.down_proj.weight": Parameter(shape=(16, 24), layout="dp: R, tp: R"),
        "scale": Parameter(shape=(1,), layout=None),
        "bias": Parameter(shape=(4,), layout="dp: R, tp: R"),
    }
    assert texts(replace(GOLDEN, parameters=parameters)) == [
        "parameter layers.[2-3].mlp.down_proj.weight: dp: R, tp: S(1) -> dp: R, tp: R",
        "parameter scale: [] a plain tensor -> [1] a plain tensor",
        "parameter bias: none -> [4] dp: R, tp: R",
    ]


def test_ranks_with_the_same_change_share_a_line() -> None:
    ranks = tuple(replace(GOLDEN.ranks[0], rank=rank) for rank in (0, 1, 2))
    saved = replace(GOLDEN, ranks=ranks)
    now = replace(saved, ranks=ranks)
    assert texts(now, saved) == []
    now = replace(saved, ranks=(ranks[0], *(replace(each, collectives=(DOWN,)) for each in ranks[1:])))
    (text,) = texts(now, saved)
    assert text.startswith("ranks 1, 2: -2 all-reduce over dp")


def test_another_mesh_and_batch_are_changes() -> None:
    now = replace(GOLDEN, mesh={"dp": 4, "tp": 2}, batch=(16, 128))
    assert texts(now) == ["mesh: dp=2 x tp=2 -> dp=4 x tp=2", "batch: 8 x 128 tokens -> 16 x 128 tokens"]


def test_a_name_with_a_newline_breaks_no_line_of_github(tmp_path: Path) -> None:
    new = replace(DOWN, modules="layers.2\n::error::x|y", file="")
    (change,) = find_changes(GOLDEN, with_collectives(DOWN, SUMS, new))
    assert annotation(change, tmp_path / "golden.json", tmp_path).count("\n") == 0
    table = as_markdown(Path("golden.json"), [change]).splitlines()
    assert len(table) == 5 and "layers.2 ::error::x\\|y" in table[-1]


def test_totals_count_each_module() -> None:
    assert totals(GOLDEN.ranks[0]) == (4 + 2, 400 + 64)


def test_an_annotation_is_at_the_line_or_else_at_the_golden_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my,models.py").write_text("")
    Path("golden.json").write_text("")
    new = replace(DOWN, modules="layers.2", file="my,models.py", line=12)
    (change,) = find_changes(GOLDEN, with_collectives(DOWN, SUMS, new))
    expected = "+1 all-reduce over tp (100 bytes) in forward, issued by layers.2 at my,models.py:12"
    assert annotation(change, Path("golden.json"), tmp_path) == (
        f"::error file=my%2Cmodels.py,line=12,title=weft check::{expected}"
    )
    (vanished,) = find_changes(GOLDEN, with_collectives(DOWN))
    assert annotation(vanished, Path("golden.json"), tmp_path).startswith("::error file=golden.json,line=1,title=")
    assert annotation(vanished, Path("/elsewhere/golden.json"), tmp_path).startswith("::error title=weft check::-2 ")
    assert "| all-reduce over tp in forward, layers.2 | 0 (0 bytes) | 1 (100 bytes) | `my,models.py:12` |" in (
        as_markdown(Path("golden.json"), [change])
    )
