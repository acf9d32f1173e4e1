"""The README's figures are those of the newest run on a CPU that is kept."""

from __future__ import annotations

import json
import re
import statistics

import pytest

from benchmarks import history
from benchmarks.record import Case
from tests.architecture.rules import ROOT

README, RESHARD = ((ROOT / folder / "README.md").read_text() for folder in ("", "packages/reshard"))
STEP, CURVES = "a step of llama-tiny, dp=2 x tp=2", "llama-tiny, 60 steps"


@pytest.fixture(scope="module")
def kept() -> dict[tuple[str, str, str], Case]:
    """The cases by group, name and way."""
    return {case.key: case for case in list(history.runs("cpu").runs.values())[-1].cases}


def test_steps(kept: dict[tuple[str, str, str], Case]) -> None:
    weft, torch, again = (kept["step_time", STEP, way] for way in ("Weft", "torch", "torch again"))
    collectives = [case.numbers["collectives"] for case in (weft, torch)]
    assert "| {} | {} with torch's `parallelize_module`".format(*collectives) in README
    ratios = [case.seconds.median / torch.seconds.median for case in (weft, again)]
    assert "| {:.2f} | 1.00 with the same, and {:.2f} again |".format(*ratios) in README


def test_steps_beside_torchs_data_parallelism(kept: dict[tuple[str, str, str], Case]) -> None:
    ratios = []
    for dp in (1, 2, 4):
        name = f"a step of the default recipe, dp={dp}, zero=0"
        weft, torch = (kept["parallel_stacks", name, way].seconds.median for way in ("Weft", "torch"))
        ratios.append(weft / torch)
    assert "| {:.2f}, {:.2f} and {:.2f} | 1.00 with `DistributedDataParallel` |".format(*ratios) in README


def test_layers_on_a_cpu(kept: dict[tuple[str, str, str], Case]) -> None:
    names = {name for group, name, _ in kept if group == "layers_cpu"}
    seconds = {(name, way): case.seconds.median for (group, name, way), case in kept.items() if group == "layers_cpu"}
    weft, again = ([seconds[name, way] / seconds[name, "torch"] for name in names] for way in ("Weft", "torch again"))
    ops = {name.partition(" on a CPU")[0] for name in names}
    assert f"| host time of {len(ops)} layers and products, each in {len(names) // len(ops)} sizes" in README
    shown = f"{statistics.geometric_mean(weft):.2f}, {max(weft):.2f}"
    beside = f"1.00 with torch's own ops, and {max(again):.2f} at the most with the same again"
    assert f"the geometric mean, and the most | {shown} | {beside} |" in README


def test_layout_changes(kept: dict[tuple[str, str, str], Case]) -> None:
    shown = []
    for way in ENGINES:
        numbers = kept["reshard_bytes", "4x4x4, 8192 x 8192 fp32", way].numbers
        shown.append(f"mean {numbers['bytes_over_bound_mean']:.2f}, max {numbers['bytes_over_bound_max']:.3g}")
    searched = f"with its min-cost search, a private switch: {shown[2]}"
    assert f"| {shown[0].replace('max 1', 'max 1.00')} | `DTensor.redistribute`: {shown[1]}; {searched} |" in README
    pairs = {name for group, name, _ in kept if group == "reshard_time"}
    times = {way: [kept["reshard_time", name, way].seconds.median for name in pairs] for way in ("Weft", "DTensor")}
    ratio = statistics.geometric_mean(a / b for a, b in zip(times["Weft"], times["DTensor"], strict=True))
    assert f"| {ratio:.2f}, the geometric mean | 1.00 with `DTensor.redistribute` |" in README
    assert f"host take {ratio:.2f} of DTensor's time" in RESHARD


def test_losses(kept: dict[tuple[str, str, str], Case]) -> None:
    moved = {way: kept["cross_entropy", "cross_entropy", way].numbers["bytes_a_logit"] for way in LIGER}
    own = kept["cross_entropy", "cross_entropy, vocab-parallel", "Weft"].numbers["bytes_a_logit"]
    words = [f"{moved[way]:.1f}" for way in LIGER[1:]]
    assert f"| {own:.1f}, vocab-parallel too | Liger 0.8: {words[0]}, or {words[1]} where" in README
    held = [
        kept["linear_cross_entropy", f"linear_cross_entropy, {tokens} tokens", way].numbers["peak_bytes"] / 1e9
        for way in ("Weft", "eager torch")
        for tokens in (4096, 16384)
    ]
    assert "| {:.2f} and {:.2f} GB | eager torch: {:.2f} and {:.2f} GB;".format(*held) in README
    others = {way for group, _, way in kept if group == "linear_cross_entropy" and not way.startswith("Weft")}
    assert others == {"eager torch"}, "what else is measured is to be named beside eager torch"


@pytest.mark.parametrize("mesh", ["2x2", "2x2x2", "2x2x2x2", "4x4x4"])
def test_the_table_of_layout_changes(kept: dict[tuple[str, str, str], Case], mesh: str) -> None:
    found = [kept["reshard_bytes", f"{mesh}, 8192 x 8192 fp32", way].numbers for way in ENGINES]
    shares = " / ".join(f"{each['share_above_bound']:.0%}" for each in found)
    means = " / ".join(f"{each['bytes_over_bound_mean']:.2f}" for each in found)
    most = " / ".join(f"{each['bytes_over_bound_max']:.3g}" for each in found)
    assert re.search(rf"^\| {mesh}[^|]* \| {shares} \| {means} \| {most} \|$", RESHARD, re.MULTILINE)


PREDICTED = {  # by heading in docs/results.md: the files of rows, and the key of the value beside the prediction
    "Predicted steps": (("predicted.json",), "reported"),
    "Predicted steps, run": (("predicted_seconds_here.json", "predicted_memory_here.json"), "measured"),
}


@pytest.mark.parametrize("heading", PREDICTED)
def test_predicted_steps(heading: str) -> None:
    errors: dict[str, list[float]] = {}
    files, beside = PREDICTED[heading]
    for each in (row for file in files for row in json.loads((ROOT / "benchmarks/results" / file).read_text())):
        figure = each["figure"] + (", held out" if each.get("held_out") else "")
        errors.setdefault(figure, []).append(abs(each["predicted"] / each[beside] - 1))
    shown = [
        f"| {name} | {len(some)} | {statistics.fmean(some):.1%} | {max(some):.1%} |" for name, some in errors.items()
    ]
    _, _, section = (ROOT / "docs/results.md").read_text().partition(f"## {heading}\n")
    assert "\n".join(["|---|---|---|---|", *shown, ""]) in section.partition("\n## ")[0]


ENGINES = ("Weft", "DTensor", "DTensor, min-cost")
LIGER = ("Weft", "Liger, where the upstream gradient is 1", "Liger, where it is another number")


def test_curves(kept: dict[tuple[str, str, str], Case]) -> None:
    apart = [
        case.numbers["largest_relative_difference"]
        for (group, name, _), case in kept.items()
        if (group, name) == ("loss_curves", CURVES)
    ]
    assert len(apart) == 5
    assert f"| apart by {max(apart):.0e} at most, relative |" in README


def test_dispatch(kept: dict[tuple[str, str, str], Case]) -> None:
    weft, torch = (kept["dispatch", "linear, forward and backward", way].seconds.median for way in ("Weft", "DTensor"))
    assert f"| {weft / torch:.2f} | 1.00 with DTensor's own dispatch |" in README
