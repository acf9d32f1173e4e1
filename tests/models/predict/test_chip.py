"""Chips as data: each number beside its source, files that come back, and files from strangers."""

from __future__ import annotations

import math
import os
import pickle
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from weft.mesh import ProcessMesh
from weft.models.predict.chip import CHIPS, Chip, Level, Product, Rate, known_chips, load_chip
from weft.models.predict.chip_file import LARGEST

from tests.support.limits import PATIENCE

NAMES = ("h100", "h100-96gb", "h200", "a100", "b200", "gb200", "mi300x", "trn2")
DATA = tomllib.loads(CHIPS.read_text())


def numbers(value: Any, path: str) -> Iterator[tuple[str, Any, str]]:
    """Each number of a table with its path, and the source beside it: "" where there is none."""
    if isinstance(value, dict) and "value" in value:
        yield path, value["value"], value.get("source", "")
    elif isinstance(value, dict):
        for name, each in value.items():
            yield from numbers(each, f"{path}.{name}")
    elif isinstance(value, list):
        for i, each in enumerate(value):
            yield from numbers(each, f"{path}[{i}]")
    elif not isinstance(value, str):
        yield path, value, ""


@pytest.mark.parametrize("name", NAMES)
def test_each_number_has_a_source(name: str) -> None:
    found = list(numbers(DATA[name], name))
    assert len(found) >= 17
    assert not [path for path, _, source in found if not source]


def test_all_chips_are_known() -> None:
    assert known_chips() == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_chip_comes_back_from_its_file(name: str, tmp_path: Path) -> None:
    chip = load_chip(name)
    (tmp_path / "chip.toml").write_text(chip.as_toml("one line\nand another"))
    assert load_chip(tmp_path / "chip.toml") == chip
    assert pickle.loads(pickle.dumps(chip)) == chip and hash(chip) == hash(load_chip(name))


def test_a_measured_chip_comes_back(tmp_path: Path) -> None:
    rate = Rate(seconds=1e-6, seconds_per_byte=3e-10, seconds_per_score=1e-12)
    chip = replace(
        load_chip("h100"),
        name="here: 'µ'",
        threads=1,
        ops={"rms_norm.forward": rate, "aten.add.forward.bfloat16": Rate(seconds_per_flop=1e-12)},
        products=(Product(dtype="float32", M=3, N=1, K=7, seconds=1e-6),),
        collectives={"all-reduce": rate, "send": Rate(adds_products=True)},
        attention_reachable={"forward": 0.25, "backward": 0.5},
        launch_seconds=2e-6,
        crowding=1.25,
        drift=0.02,
    )
    (tmp_path / "chip.toml").write_text(chip.as_toml())
    assert load_chip(str(tmp_path / "chip.toml")) == chip


def test_peaks_are_those_of_the_data_sheets() -> None:
    assert load_chip("h100").peak("bfloat16") == 989.4e12
    assert load_chip("a100").peak("float16") == 312e12
    assert 770e12 <= load_chip("h200").reachable_peak("bfloat16") <= 800e12
    assert load_chip("h200").reachable_bandwidth == pytest.approx(4.3e12, rel=0.01)
    assert load_chip("h100").reachable_peak("float8") == pytest.approx(1402.6e12, rel=0.01)  # a share of its own
    with pytest.raises(ValueError, match=r"chip a100 has no peak for float8; it has bfloat16, .*; train in one"):
        load_chip("a100").peak("float8")


H100, MI300X = load_chip("h100"), load_chip("mi300x")


@pytest.mark.parametrize(
    ("size", "stride", "world", "levels"),
    [
        pytest.param(1, 1, None, [], id="alone"),
        pytest.param(8, 1, None, [("NVLink", 8)], id="a-node"),
        pytest.param(2, 4, None, [("NVLink", 2)], id="strided-in-a-node"),
        pytest.param(16, 1, None, [("NVLink", 8), ("InfiniBand NDR", 2)], id="two-nodes"),
        pytest.param(8, 4, None, [("NVLink", 2), ("InfiniBand NDR", 4)], id="two-in-each-node"),
        pytest.param(64, 8, None, [("InfiniBand NDR", 64)], id="one-in-each-node"),
        pytest.param(3, 1, 6, [("NVLink", 3)], id="a-run-within-a-node"),
        pytest.param(3, 1, 9, [("InfiniBand NDR", 3)], id="three-do-not-divide-a-node"),
        pytest.param(12, 1, None, [("NVLink", 4), ("InfiniBand NDR", 3)], id="twelve"),
    ],
)
def test_levels_of_a_group(size: int, stride: int, world: int | None, levels: list[tuple[str, int]]) -> None:
    assert [(level.name, members) for level, members in H100.levels_of(size, stride, world=world)] == levels


def test_a_group_over_nodes_has_an_adapter_for_each_member() -> None:
    """8 members in a node receive by 8 adapters; the ring's messages are counted as NCCL counts them."""
    nvlink, network = H100.levels
    seconds, speed = H100.link(16, 1)
    assert speed == pytest.approx(8 * 50e9 * network.reachable)
    assert seconds == pytest.approx((14 * nvlink.latency + network.latency) / 15)
    assert H100.link(64, 8) == (network.latency, 50e9 * network.reachable)
    assert H100.link(8, 1) == (nvlink.latency, 450e9 * nvlink.reachable)
    assert H100.link(1, 1) == (0.0, math.inf)


def test_links_between_pairs_limit_small_groups() -> None:
    """2 MI300X were measured at 47.7 GB/s, 8 at 312.9."""
    assert MI300X.link(2, 1)[1] == pytest.approx(47.67e9, rel=0.08)
    assert MI300X.link(8, 1)[1] == pytest.approx(312.9e9, rel=0.01)


def test_topology_of_a_mesh() -> None:
    topology = H100.topology(ProcessMesh.grid(pp=2, dp=8, tp=8))
    assert topology.link("tp").bandwidth == 360e9
    assert topology.link("dp").bandwidth == topology.link("pp").bandwidth == pytest.approx(36.95e9)
    assert H100.topology(ProcessMesh.grid(dp=3, tp=2)).link("dp").bandwidth == 360e9  # a run of 6 ranks, in a node
    with pytest.raises(ValueError, match="ranks without strides"):
        H100.topology(ProcessMesh([0, 3, 5], ["dp"]))


def test_a_group_larger_than_the_machine() -> None:
    small = replace(H100, levels=(Level(name="shared memory", ranks=2, bandwidth=1e9, reachable=1.0, latency=1e-5),))
    assert small.link(2, 1) == (1e-5, 1e9)
    with pytest.raises(ValueError, match="connects 2 ranks by shared memory, its outermost level, and a group of 4"):
        small.link(4, 1)


def test_rates_by_name_part_and_dtype() -> None:
    both, narrow = Rate(seconds=1.0), Rate(seconds=2.0, seconds_per_byte=0.5, seconds_per_flop=0.25)
    chip = replace(H100, ops={"rms_norm.forward": both, "rms_norm.forward.bfloat16": narrow})
    assert chip.rate("rms_norm", "forward", "bfloat16") is narrow
    assert chip.rate("rms_norm", "forward", "float32") is both
    assert chip.rate("rms_norm", "recompute") is both
    assert chip.rate("rms_norm", "backward") is None
    assert narrow.time(4, 8) == 2.0 + 2.0 + 2.0


def test_products_between_measured_shapes() -> None:
    """Between measured shapes of equal speed, a shape has this speed. A measured shape has the measured time."""
    rows = tuple(
        Product(dtype="float32", M=M, N=N, K=64, seconds=2 * M * N * 64 / 5e9) for M in (16, 256) for N in (16, 256)
    )
    chip = replace(H100, products=(*rows, Product(dtype="float32", M=64, N=64, K=64, seconds=1.0)))
    assert chip.product_seconds("float32", 64, 64, 64) == 1.0
    assert replace(chip, products=rows).product_seconds("float32", 90, 30, 300) == pytest.approx(
        2 * 90 * 30 * 300 / 5e9
    )
    assert chip.product_seconds("bfloat16", 64, 64, 64) is None


def test_an_op_takes_its_products_besides_where_its_rate_says_so() -> None:
    rows = (Product(dtype="float32", M=4, N=4, K=4, seconds=1.0),)
    rates = {"linear.forward": Rate(seconds=2.0, adds_products=True), "swiglu_linear.forward": Rate(seconds=2.0)}
    chip = replace(H100, products=rows, ops=rates)
    assert chip.measured_seconds("linear", "forward", "float32", 0, 128, [(3, 4, 4, 4), (1, 4, 4, 4)]) == 2.0 + 4 * 1.0
    assert chip.measured_seconds("swiglu_linear", "forward", "float32", 0, 128, [(1, 4, 4, 4)]) == 2.0
    assert chip.measured_seconds("linear", "backward", "float32", 0, 128, [(1, 4, 4, 4)]) is None


def test_torch_is_not_imported() -> None:
    program = (
        "import sys; from weft.models.predict.chip import load_chip; load_chip('h100'); print('torch' in sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=PATIENCE
    )
    assert result.stdout == "False\n"


# Files from strangers

MINIMAL = {
    "name": "'mine'",
    "reachable": "0.5",
    "multiprocessors": "1",
    "tiles": "[[64, 64]]",
    "memory_bytes": "1e9",
    "memory_bandwidth": "1e9",
    "memory_reachable": "1",
    "host_seconds": "0",
    "levels": "[{name = 'link', bandwidth = 1e9, reachable = 1, latency = 0}]",
    "peaks": "{float32 = 1e9}",
}


def written(folder: Path, **changed: str | None) -> Path:
    values = {**MINIMAL, **changed}
    path = folder / "chip.toml"
    path.write_text("".join(f"{name} = {value}\n" for name, value in values.items() if value is not None))
    return path


def test_the_smallest_file(tmp_path: Path) -> None:
    chip = load_chip(written(tmp_path))
    assert chip.reachable_peak("float32") == 0.5e9 and chip.link(1024, 1) == (0.0, 1e9)


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        pytest.param({"reachable": "nan"}, "reachable is nan; give a number from 0", id="nan"),
        pytest.param(
            {"reachable": "1.5"}, "reachable is 1.5; give a share of the peak, at most 1", id="above-the-peak"
        ),
        pytest.param({"reachable": "0"}, "reachable is 0; give a number above 0", id="zero"),
        pytest.param({"memory_bandwidth": "-1.0"}, "memory_bandwidth is -1.0; give a number", id="negative"),
        pytest.param({"memory_bandwidth": "inf"}, "memory_bandwidth is inf; give a number", id="infinite"),
        pytest.param({"memory_bytes": "1" + 40 * "0"}, r"memory_bytes is 10+\.*; give a number", id="huge"),
        pytest.param({"memory_bytes": "0.5"}, "memory_bytes is 0.5; give a whole number", id="half-a-byte"),
        pytest.param({"memory_bytes": None}, "memory_bytes is missing; measure the machine again", id="missing"),
        pytest.param({"memory_bytes": "true"}, "memory_bytes is True; give a number", id="boolean"),
        pytest.param({"memory_bytes": "'x'"}, "memory_bytes is 'x'; give a number", id="text"),
        pytest.param({"name": "7"}, "name is 7; give a text", id="name"),
        pytest.param({"peaks": "{}"}, "peaks is empty; give the FLOP/s", id="no-peaks"),
        pytest.param({"peaks": "3"}, "peaks is 3; give a table", id="peaks-a-number"),
        pytest.param({"peaks": "{float32 = {source = 'x'}}"}, "peaks.float32 is {'source': 'x'}; give", id="no-value"),
        pytest.param({"tiles": "[[64]]"}, r"tiles is \[\[64\]\]; give pairs", id="tiles"),
        pytest.param({"tiles": "[[64, -1]]"}, "tiles is -1; give", id="tile"),
        pytest.param({"levels": "[]"}, "levels is missing; give the links", id="no-levels"),
        pytest.param({"levels": "[1]"}, r"levels\[0\] is 1; give a table", id="level-a-number"),
        pytest.param({"levels": "[{name = 'a'}]"}, r"levels\[0\].bandwidth is missing", id="level-without-bandwidth"),
        pytest.param(
            {
                "levels": "[{name = 'a', ranks = 8, bandwidth = 1, reachable = 1, latency = 0}, "
                "{name = 'b', ranks = 4, bandwidth = 1, reachable = 1, latency = 0}]"
            },
            "levels has b with 4 ranks outside of a with 8; give levels from the innermost",
            id="levels-turned-round",
        ),
        pytest.param({"ops": "{a = {forward = {seconds = nan}}}"}, "ops.a.forward.seconds is nan", id="op-nan"),
        pytest.param(
            {"ops": "{a = {forward = {second = 1}}}"}, "ops.a.forward has 'second', which is not known", id="op-name"
        ),
        pytest.param({"ops": "{a = {seconds = 1, x = 2}}"}, "ops.a has 'x', which is not known there", id="op-unknown"),
        pytest.param({"products": "[{dtype = 'float32', M = 0}]"}, r"products\[0\].M is 0; give", id="no-rows"),
        pytest.param({"ops": "{a = {adds_products = 1}}"}, "ops.a.adds_products is 1; give true", id="op-boolean"),
        pytest.param({"collectives": "{send = {seconds = -1}}"}, "collectives.send.seconds is -1", id="collective"),
        pytest.param({"attention_reachable": "{forward = 2}"}, "attention_reachable.forward is 2", id="attention"),
        pytest.param({"drift": "-1"}, r"drift is -1; give a number from 0 to 1e\+24", id="drift"),
        pytest.param({"crowding": "0"}, "crowding is 0; give a number above 0", id="crowding"),
        pytest.param({"products": "3"}, "products is 3; give a list", id="products-a-number"),
        pytest.param({"threads": "0"}, "threads is 0; give a number above 0", id="no-threads"),
        pytest.param({"colour": "1"}, "the chip has 'colour', which is not known there; known are name", id="unknown"),
    ],
)
def test_a_wrong_value_is_named_in_a_line(changed: dict[str, str | None], error: str, tmp_path: Path) -> None:
    path = written(tmp_path, **changed)
    with pytest.raises(ValueError, match=error) as raised:
        load_chip(path)
    assert "\n" not in str(raised.value) and str(raised.value).startswith(f"chip {path}")


@pytest.mark.parametrize(
    ("content", "error"),
    [
        pytest.param(b"\xff\xfe", "is not TOML", id="binary"),
        pytest.param(b"a = ", "is not TOML", id="not-toml"),
        pytest.param(b"", "peaks is None|peaks is missing", id="empty"),
        pytest.param(b"x = " + b"[" * 100_000, "nests too deeply", id="brackets"),
        pytest.param(b".".join([b"a"] * 50_000) + b" = 1", "nests too deeply", id="dots"),
        pytest.param(b"x = " + b"1" * 5000, "is not TOML", id="digits"),
        pytest.param(b"#" * (LARGEST + 1), "are read at most", id="large"),
    ],
)
def test_a_file_that_is_no_chip(content: bytes, error: str, tmp_path: Path) -> None:
    path = tmp_path / "chip.toml"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=error):
        load_chip(path)


def test_folders_pipes_and_absent_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is no plain file; give a plain file"):
        load_chip(tmp_path)
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        load_chip(tmp_path / "chip.toml")
    os.mkfifo(tmp_path / "pipe.toml")
    with pytest.raises(ValueError, match="is no plain file"):
        load_chip(tmp_path / "pipe.toml")


@pytest.mark.parametrize("name", ["h1000", "", "x" * 500, "H100"])
def test_an_unknown_chip_lists_those_that_are_known(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=f"is not known; the chips are {', '.join(NAMES)}; or give a file") as raised:
        load_chip(name)
    assert len(str(raised.value)) < 300


def test_a_chip_is_a_value() -> None:
    assert isinstance(H100, Chip)
    assert load_chip("h100") == H100
    assert load_chip("h200") != H100
