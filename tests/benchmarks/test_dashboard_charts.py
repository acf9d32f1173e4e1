"""The page's charts and the tables beside them: every shape has its charts, and every mark its number."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("altair")
pytest.importorskip("vl_convert")

from benchmarks import history
from benchmarks.dashboard import shared, sources
from benchmarks.dashboard.blocks import Block, sections
from benchmarks.dashboard.panels import Figure
from benchmarks.dashboard.tables import Table
from benchmarks.figures import quantity
from benchmarks.record import Run
from tests.benchmarks import results
from tests.benchmarks.cases import case, run, unmeasured
from tests.benchmarks.results import count, cpu_run, gpu_run, host
from tests.browser import truth

PLOTTED = ("value", "mean", "low", "high", "share")


def blocks_of(made: Run) -> dict[str, Block]:
    return {block.title: block for section in sections(made) for block in section.blocks}


def data_of(spec: Any) -> Iterator[dict[str, Any]]:
    """The rows of a chart's data, wherever Vega-Lite lets them stand."""
    for key, value in spec.items() if isinstance(spec, dict) else enumerate(spec):
        if key in ("values", "datasets"):
            found = value if key == "values" else [row for rows in value.values() for row in rows]
            yield from (row for row in found if isinstance(row, dict))
        elif isinstance(value, dict | list):
            yield from data_of(value)


def labels(figure: Figure) -> list[str]:
    return list(dict.fromkeys(row["label"] for row in data_of(figure.spec)))


def cell(table: Table, case_name: str, figure: str, way: str) -> tuple[str, str]:
    (row,) = (row for row in table.rows if row.heads == (case_name, figure))
    found = row.cells[table.head.index(way) - len(row.heads)]
    return found.text, found.detail


def numbers(table: Table) -> Iterator[tuple[str, str]]:
    """Each number that is shown, and the heads of its row and column."""
    for row in table.rows:
        columns = table.head[len(row.heads) :]
        for column, each in zip(columns, row.cells, strict=True):
            for text in re.split(", | to ", f"{each.text}, {each.detail}"):
                if truth.NUMBER.fullmatch(text):
                    yield text, "\n".join((*row.heads, column))


def untold(block: Block) -> list[tuple[str, str, float]]:
    """What the figures of a block plot and none of its tables has, under the name of the mark."""
    every = [each for table in block.tables for each in numbers(table)]
    shown: dict[str, list[tuple[str, str]]] = {}
    missing = []
    for figure in block.figures:
        for row in data_of(figure.spec):
            label = row["label"] if "label" in row else row["name"]
            if label not in shown:
                shown[label] = [(text, heads) for text, heads in every if label in heads]
            for key in PLOTTED:
                value = row.get(key)
                if value is None or (label, value) == (
                    "Weft",
                    1.0,
                ):  # that others are over it is in the table's caption
                    continue
                if not any(truth.shows(text, value) for text, _ in shown[label]):
                    missing.append((figure.title, f"{label}, {key}", value))
    return missing


@pytest.fixture(scope="module")
def gpu() -> dict[str, Block]:
    return blocks_of(gpu_run(5))


@pytest.fixture(scope="module")
def cpu() -> dict[str, Block]:
    return blocks_of(cpu_run())


@pytest.fixture(scope="module")
def every_block(
    gpu: dict[str, Block], cpu: dict[str, Block], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Block]:
    """Of a GPU's run, a CPU's, and what all devices share."""
    made = {"gpu": gpu, "cpu": cpu}
    found = {f"{name}: {title}": block for name, blocks in made.items() for title, block in blocks.items()}
    read = sources.read(results.of_a_cpu(tmp_path_factory.mktemp("results")))
    return found | {f"shared: {block.title}": block for block in (*shared.reshard(read), *shared.compiled(read))}


def test_every_mark_has_its_number_in_a_table(every_block: dict[str, Block]) -> None:
    assert sum(len(block.figures) for block in every_block.values()) > 40
    assert {name: missing for name, block in every_block.items() if (missing := untold(block))} == {}


@pytest.mark.exhaustive  # the same shapes with other numbers
def test_every_mark_of_the_newest_run_that_is_kept_has_its_number_in_a_table() -> None:
    blocks = blocks_of(list(history.runs("cpu").runs.values())[-1])
    assert any(block.figures for block in blocks.values())
    assert {title: missing for title, block in blocks.items() if (missing := untold(block))} == {}


def test_a_mark_without_a_number_is_noticed(every_block: dict[str, Block]) -> None:
    (block,) = (block for name, block in every_block.items() if name.endswith("every ratio"))
    without = Block(title=block.title, figures=block.figures, tables=block.tables[:1])
    assert {label for _, label, _ in untold(without)} >= {"DTensor, value", "DTensor, share"}


def test_the_gpus_shapes_are_those_of_the_benchmark() -> None:
    pytest.importorskip("torch")
    from benchmarks import test_cross_entropy_speed as speed

    marks = speed.test_linear_cross_entropy_speed.pytestmark
    (linear,) = (mark for mark in marks if mark.name == "parametrize")
    assert (results.LOGITS, list(results.TOKENS)) == (speed.LOGITS, linear.args[1])


def test_every_shape_of_a_kernel_has_its_ratios_its_roofline_and_its_memory(gpu: dict[str, Block]) -> None:
    block = gpu["Losses, forward and backward"]
    shapes = [f"cross_entropy, {N} x {V} bf16" for N, V in results.LOGITS]
    shapes += [f"linear_cross_entropy, {tokens} tokens, H=4096, V=128256 bf16" for tokens in results.TOKENS]
    notes = (
        "time over Weft's; less is better",
        "share of the roofline; more is better",
        "memory above inputs and gradients; less is better",
    )
    assert sorted((figure.title, figure.note) for figure in block.figures) == sorted(
        (shape, note) for shape in shapes for note in notes
    )


def test_many_times_of_a_host_have_one_chart_and_their_mean_in_the_table() -> None:
    cases = [
        host("many", f"case {at}", way, 1 + at * (way != "Weft")) for way in ("Weft", "DTensor") for at in range(8)
    ]
    block = blocks_of(run(*cases, device="cpu"))["many"]
    assert [figure.title for figure in block.figures] == ["8 cases"]
    mean = block.tables[0].rows[-1]
    assert mean.heads == ("geometric mean of 8 cases", "host time over Weft's")
    assert [each.text for each in mean.cells] == ["", "3.76×"]  # the 8th root of 8!


def test_what_is_counted_of_a_group_has_one_scale(cpu: dict[str, Block]) -> None:
    figures = cpu["Device memory that cross-entropy moves"].figures
    scales = [figure.spec["layer"][0]["encoding"]["x"]["scale"] for figure in figures]
    assert len(scales) == 2 and scales[0] == scales[1]
    assert scales[0]["domain"] == [0, 10.0011]


def test_a_word_stands_before_what_refers_to_it(cpu: dict[str, Block]) -> None:
    block = cpu["Device memory that cross-entropy moves"]
    ways = ["Weft", "Liger, where the upstream gradient is 1", "Liger, where it is another number"]
    assert labels(block.figures[0]) == list(block.tables[0].head[2:]) == ways


def test_a_training_steps_collectives_are_drawn(cpu: dict[str, Block]) -> None:
    block = cpu["Host time of a training step over gloo"]
    (figure,) = (figure for figure in block.figures if figure.note == "collectives issued; less is better")
    assert figure.told == "collectives, a step of llama-tiny, dp=2 x tp=2: Weft 21; torch 23; torch again 23."


def test_tables_say_by_which_timer_and_in_which_configuration(cpu: dict[str, Block], gpu: dict[str, Block]) -> None:
    (table,) = gpu["Losses, forward and backward"].tables
    large, small = (f"cross_entropy, {N} x {V} bf16" for N, V in (results.LOGITS[0], results.LOGITS[-1]))
    assert cell(table, large, "timer", "Weft")[0] == "CUDA events"
    assert cell(table, small, "timer", "Weft")[0] == "CUDA graph, replayed"
    assert cell(table, large, "configuration", "Weft")[0] == "4096 classes at a time, 8 warps"
    assert cell(table, large, "configuration", "eager torch")[0] == ""
    (host_times,) = cpu["Dispatch of an op"].tables
    assert {row.heads[1] for row in host_times.rows} == {"host time"}, "whose timer goes without saying"


def test_the_error_of_what_failed_is_said_once() -> None:
    failed = unmeasured("loss", "CCE", error="out of memory")
    (table,) = blocks_of(run(case(), failed))["losses"].tables
    assert [row.heads for row in table.rows] == [("loss", "time")]
    assert cell(table, "loss", "time", "CCE")[0] == "failed: out of memory"


@pytest.mark.parametrize(
    ("label", "value", "told"),
    [
        pytest.param("copy_bytes_per_second", 4.1e12, "4.1 TB/s", id="bytes-a-second"),
        pytest.param("bf16_flop_per_second", 7.8e14, "780 Tflop/s", id="flop-a-second"),
        pytest.param("flop", 1.291e13, "12.91 Tflop", id="flop"),
        pytest.param("peak_bytes", 1.084e9, "1.084 GB", id="bytes"),
        pytest.param("roofline", 0.91, "91.0%", id="share"),
        pytest.param("registers", 40, "40", id="count"),
    ],
)
def test_amounts_have_their_units(label: str, value: float, told: str) -> None:
    assert quantity(label, value) == told


def test_forms_of_weft_and_of_a_baseline_are_rows_of_their_cases_chart(cpu: dict[str, Block]) -> None:
    (figure,) = cpu["Host time of a step with sharded optimizers, over gloo"].figures
    assert figure.title == "a sharded step of llama-tiny, dp=4"
    assert labels(figure) == ["Weft zero=2", "Weft zero=3", "FSDP2", "FSDP2 kept"]


def test_nothing_is_plotted_of_a_group_that_has_no_rival() -> None:
    block = blocks_of(run(count("cross_entropy", "alone", "Weft", bytes_a_logit=6.0)))
    (figure,) = block["Device memory that cross-entropy moves"].figures
    assert (figure.title, labels(figure)) == ("Weft", ["alone"])
