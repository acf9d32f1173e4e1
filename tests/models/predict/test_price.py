"""Prices of events by hand: products by tiles and waves, attention, bytes, and collectives by their links."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from weft.models.predict.chip import Chip, Product, Rate, load_chip
from weft.models.predict.events import Compute
from weft.models.predict.price import collective_seconds, fuse, product_seconds, seconds_of, transfer

from tests.models.predict.traces import NETWORK, NVLINK, TOY, memory, product, start

TILE = 2 * 128 * 128 * 500 / 1e12  # seconds of a tile with K = 500
QUICK = replace(TOY, memory_bandwidth=2e14)  # of which 1e14 bytes/s are reachable: no product is bounded by bytes
WRITTEN = 128 * 128 * 2 / 1e14  # seconds to write a tile


@pytest.mark.parametrize(
    ("M", "N", "waves", "last"),
    [
        pytest.param(128, 128, 1, 1, id="one tile"),
        pytest.param(1, 1, 1, 1, id="a part of a tile"),
        pytest.param(132 * 128, 128, 1, 132, id="a full wave"),
        pytest.param(133 * 128, 128, 2, 132, id="a tile more"),
        pytest.param(132 * 128 + 1, 128, 2, 132, id="a row more"),
        pytest.param(11 * 128, 24 * 128, 2, 132, id="two full waves"),
    ],
)
def test_a_product_takes_whole_waves(M: int, N: int, waves: int, last: int) -> None:
    assert product_seconds((1, M, N, 500), "bfloat16", QUICK) == pytest.approx(waves * TILE + last * WRITTEN)


def test_a_batch_of_products_fills_waves_together() -> None:
    assert product_seconds((66, 128, 256, 500), "bfloat16", QUICK) == pytest.approx(TILE + 132 * WRITTEN)
    assert product_seconds((67, 128, 256, 500), "bfloat16", QUICK) == pytest.approx(2 * TILE + 132 * WRITTEN)


def test_a_product_with_a_short_k_takes_its_bytes() -> None:
    size = (1, 2**14, 2**14, 1)
    nbytes = 2 * (2**15 + 2**28)
    assert product_seconds(size, "bfloat16", TOY) == pytest.approx(nbytes / 1e12)
    assert product_seconds((1, 0, 7, 130), "bfloat16", TOY) == 0


def test_a_long_k_is_split_where_tiles_are_few() -> None:
    chip = replace(TOY, memory_bandwidth=2e15)  # sums take no time to speak of
    whole = 2 * 128 * 128 * 8192 / 1e12
    assert product_seconds((1, 256, 256, 8192), "bfloat16", chip) == pytest.approx(whole / 16, rel=0.02)  # 64 parts
    assert product_seconds((1, 256, 256, 1023), "bfloat16", chip) == pytest.approx(whole * 1023 / 8192, rel=0.02)
    # 128 tiles leave 4 multiprocessors idle: no split gains. 133 are more than a wave, and are not split.
    assert product_seconds((1, 128 * 128, 128, 8192), "bfloat16", chip) == pytest.approx(whole, rel=0.02)
    assert product_seconds((1, 133 * 128, 128, 8192), "bfloat16", chip) == pytest.approx(2 * whole, rel=0.02)


def test_the_best_tile_counts_and_small_tiles_are_slower() -> None:
    chip = replace(TOY, memory_bandwidth=2e18, tiles=((128, 128), (64, 64)))
    # One tile of 128 x 128, or four of 64 x 64 at once, at half the speed: half of the time.
    assert product_seconds((1, 128, 128, 500), "bfloat16", chip) == pytest.approx(TILE / 2, rel=0.001)
    assert product_seconds((1, 132 * 128, 128, 500), "bfloat16", chip) == pytest.approx(TILE, rel=0.001)


def test_measured_rates_and_products_decide() -> None:
    measured = Product(dtype="bfloat16", M=1024, N=1024, K=1024, seconds=3.0)
    assert seconds_of(product(), replace(TOY, products=(measured,))) == pytest.approx(3.0)
    collectives = {"all-gather": Rate(seconds=0.5, seconds_per_byte=1e-9)}
    assert collective_seconds(start(0, nbytes=10**9), replace(TOY, collectives=collectives)) == pytest.approx(1.5)
    # Gradients may be summed another way than all further tensors.
    collectives = {"all-reduce": Rate(seconds=3.0), "all-reduce of gradients": Rate(seconds=2.0)}
    summed = replace(start(0, nbytes=10**9), kind="all-reduce")
    for purpose, expected in (("gradients", 2.0), ("", 3.0)):
        event = replace(summed, purpose=purpose)
        assert collective_seconds(event, replace(TOY, collectives=collectives)) == pytest.approx(expected)
    rate = Rate(seconds=1.0, seconds_per_byte=1e-6)
    chip = replace(TOY, ops={"rms_norm.forward": rate})
    assert seconds_of(memory(nbytes=10**6), chip) == pytest.approx(2.0)
    assert seconds_of(memory(nbytes=10**6, part="backward"), chip) == pytest.approx(1e-6)


def test_memory_bound_work_takes_its_bytes_and_its_launches() -> None:
    chip = replace(TOY, launch_seconds=1e-6)
    assert seconds_of(memory(1.0), TOY) == pytest.approx(1.0)
    assert seconds_of(memory(0.0, num_launches=3), chip) == pytest.approx(3e-6)
    assert seconds_of(memory(1e-3, kind="optimizer", name="optimizer"), chip) == pytest.approx(1e-3 + 1e-6)


def test_operands_besides_a_product_are_bytes() -> None:
    alone = product()
    assert seconds_of(replace(alone, nbytes=alone.nbytes + 10**9), TOY) == pytest.approx(seconds_of(alone, TOY) + 1e-3)


@pytest.mark.parametrize(("part", "share"), [("forward", 0.5), ("backward", 0.25), ("recompute", 0.5)])
def test_attention_takes_the_seen_operations(part: Any, share: float) -> None:
    flops = 4 * 2 * 32 * 128 * 8192**2 // 2
    sizes = ((2, 32, 8, 8192, 8192, 128),)
    event = Compute(name="attention", part=part, kind="attention", dtype="bfloat16", nbytes=1, flops=flops, sizes=sizes)
    assert seconds_of(event, TOY) == pytest.approx(flops / (132e12 * share))
    few = replace(event, sizes=((1, 1, 1, 33 * 128, 33 * 128, 128),))  # 33 blocks on 132 multiprocessors
    assert seconds_of(few, TOY) == pytest.approx(4 * flops / (132e12 * share))


def test_a_dtype_without_a_peak_is_an_error() -> None:
    with pytest.raises(ValueError, match="toy has no peak for float64"):
        seconds_of(replace(product(), dtype="float64"), TOY)


@pytest.mark.parametrize(
    ("kind", "size", "stride", "seconds"),
    [
        # Bytes received are 15 GB. A rank receives 50 GB/s in a node and 10 GB/s from outside.
        pytest.param("all-gather", 8, 1, 0.3 + 7e-6, id="in a node"),
        pytest.param("reduce-scatter", 8, 1, 0.3 + 7e-6, id="reduce-scatter"),
        pytest.param("all-gather", 16, 1, 0.3 + 14e-6 + 10e-6, id="two nodes, by 8 adapters at once"),
        pytest.param("all-gather", 16, 8, 1.5 + 150e-6, id="a rank of each node"),
        pytest.param("all-gather", 16, 4, 0.75 + 8e-6 + 70e-6, id="two ranks of each node"),
        pytest.param("all-gather", 2, 8, 1.5 + 10e-6, id="two nodes, a rank of each"),
        pytest.param("all-reduce", 8, 1, 0.3 + 14e-6, id="all-reduce, a ring"),
        # 2 x (7 in the node + log2(128) = 7 messages between nodes), where a ring has 2 x 127 of them.
        pytest.param("all-reduce", 1024, 1, 0.3 + 14e-6 + 140e-6, id="all-reduce, a tree"),
        # Of 15 peers 8 are outside: 8 GB come by an adapter of 10 GB/s.
        pytest.param("all-to-all", 16, 1, 0.8 + 11e-6, id="all-to-all"),
        pytest.param("all-to-all", 8, 1, 0.3 + 1e-6, id="all-to-all in a node"),
        pytest.param("recv", 2, 1, 0.3 + 1e-6, id="receive in a node"),
        pytest.param("recv", 2, 8, 1.5 + 10e-6, id="receive from a node"),
        pytest.param("send", 2, 8, 0.0, id="the receiver's time counts"),
        pytest.param("all-gather", 1, 1, 0.0, id="one rank"),
    ],
)
def test_a_collective_by_its_links(kind: str, size: int, stride: int, seconds: float) -> None:
    event = start(0, kind=kind, size=size, stride=stride, nbytes=15 * 10**9)
    assert collective_seconds(event, TOY) == pytest.approx(seconds, rel=1e-12)


def test_the_level_that_decides_is_known() -> None:
    assert transfer(start(0, size=16), TOY).level is NVLINK
    assert transfer(start(0, size=16, stride=8), TOY).level is NETWORK
    assert transfer(start(0, size=1), TOY).level is None


def test_a_group_that_has_less_than_a_node() -> None:
    event = start(0, size=3, stride=1, nbytes=10**9)
    assert collective_seconds(event, TOY, world=6) == pytest.approx(0.02 + 2e-6)


def test_neighbouring_elementwise_work_is_fused() -> None:
    one, two = memory(name="aten.add", nbytes=300), memory(name="aten.mul", nbytes=150)
    norm = memory(name="rms_norm", nbytes=300)
    fused = list(fuse([one, two, norm, one, start(0), two, product(name="aten.mm"), one]))
    assert [(e.name, e.nbytes) for e in fused if isinstance(e, Compute) and e.kind == "memory"] == [
        ("aten.add", 300 + 150 - 100),
        ("rms_norm", 300),
        ("aten.add", 300),
        ("aten.mul", 150),
        ("aten.add", 300),
    ]
    assert list(fuse([])) == [] and list(fuse([one])) == [one]
    assert all(each.num_launches == 1 for each in fused if isinstance(each, Compute))


@st.composite
def events(draw: st.DrawFn) -> Any:
    sizes = st.integers(1, 40_000)
    if draw(st.booleans()):
        kind = draw(st.sampled_from(["all-gather", "all-reduce", "all-to-all", "reduce-scatter", "recv", "broadcast"]))
        size = draw(st.sampled_from([2, 8, 16, 64, 3, 24]))
        return start(0, kind=kind, size=size, stride=draw(st.sampled_from([1, 2, 8])), nbytes=draw(sizes))
    if draw(st.booleans()):
        return product(draw(sizes), draw(sizes), draw(sizes))
    return memory(nbytes=draw(sizes) ** 2)


def price(event: Any, chip: Chip) -> float:
    return seconds_of(event, chip) if isinstance(event, Compute) else collective_seconds(event, chip)


@pytest.mark.exhaustive
@given(events(), st.floats(1.0, 10.0), st.sampled_from(["toy", "h100", "mi300x"]))
def test_a_faster_machine_takes_no_longer(event: Any, factor: float, name: str) -> None:
    chip = TOY if name == "toy" else load_chip(name)
    faster = replace(
        chip,
        name="faster",
        peaks={dtype: factor * peak for dtype, peak in chip.peaks.items()},
        memory_bandwidth=factor * chip.memory_bandwidth,
        launch_seconds=chip.launch_seconds / factor,
        levels=tuple(
            replace(level, bandwidth=factor * level.bandwidth, latency=level.latency / factor) for level in chip.levels
        ),
    )
    assert 0 < price(event, faster) <= price(event, chip) * (1 + 1e-12)
    links = replace(chip, name="links", levels=faster.levels)
    assert price(event, faster) <= price(event, links) * (1 + 1e-12) <= price(event, chip) * (1 + 1e-9)
