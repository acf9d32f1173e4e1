"""--mesh.ep, --plan.experts-tokens and --plan.experts-over-tp: what a run says, refuses and goes on with."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from weft.models.cli import main
from weft.models.cli.settings import drop_unusable_mesh
from weft.models.train.config import MeshConfig, PlanConfig
from weft.models.train.memory_check import MemoryNeed
from weft.models.train.recipes import RECIPES

from tests.models.test_explain import explained, held
from tests.support import preloaded

TINY = ("qwen3-moe-tiny", "--mesh.dp", "4", "--mesh.tp", "1")
SMALL = (
    *("--model.hidden-size", "16", "--model.num-layers", "2", "--model.num-experts", "8", "--model.num-heads", "4"),
    *("--model.num-kv-heads", "2", "--model.intermediate-size", "16", "--model.moe-intermediate-size", "8"),
    *("--model.head-dim", "4", "--data.batch-size", "4", "--data.sequence-length", "16", "--eval-every", "0"),
)


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit, match="2"):
        main(["explain", *arguments])
    return " ".join(capsys.readouterr().err.split())


@pytest.mark.exhaustive
def test_explain_says_how_tokens_come_to_experts_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    out = explained(capsys, *TINY, "--mesh.ep", "4", "--data.batch-size", "8")
    assert "4 processes, mesh dp=4 x tp=1, experts over ep=4" in out.splitlines()[0]
    assert re.search(
        r"tokens come to experts over ep=4 by (exchange|gather), the cheaper one: exchange [\d,]+ us, gather "
        r"[\d,]+ us a layer and microbatch, if 46% of a rank's 256 tokens go to each of the 3 other ranks",
        out,
    )
    assert re.search(r"layers\.\*\.mlp\.experts\.gate_proj +\[8, 188, 128\] x 4 +dp: R, ep: S\(0\)", out)


@pytest.mark.exhaustive
def test_a_plan_forces_either_way(capsys: pytest.CaptureFixture[str]) -> None:
    gather = explained(capsys, *TINY, "--mesh.ep", "2", "--plan.experts-tokens", "gather")
    assert "by gather, as --plan.experts-tokens says" in gather
    assert re.search(r"forward +ep +8 all-gather, 4 reduce-scatter +[\d,]+ bytes", gather)
    assert "at most" not in gather
    exchange = explained(capsys, *TINY, "--mesh.ep", "2", "--plan.experts-tokens", "exchange")
    assert re.search(r"forward +ep +16 all-to-all +at most [\d,]+ bytes", exchange)  # 4 a layer, one of them the counts


@pytest.mark.exhaustive
def test_each_rank_holds_its_experts_alone(capsys: pytest.CaptureFixture[str]) -> None:
    whole, parts = (
        held(explained(capsys, *TINY, *more, "--plan.experts-tokens", "gather"))["parameters"]
        if more
        else held(explained(capsys, *TINY))["parameters"]
        for more in ((), ("--mesh.ep", "4"))
    )
    assert whole - parts == 4 * 3 * 128 * 188 * 8 * 4 * 3 // 4


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(
            (*TINY, "--mesh.ep", "3"),
            "mesh.ep 3 does not divide the 4 processes of dp x cp; sizes that do: 1, 2, 4",
            id="ranks",
        ),
        pytest.param(
            ("qwen3-moe-tiny", "--mesh.dp", "5", "--mesh.tp", "1", "--mesh.ep", "5"),
            "mesh.ep 5 does not divide model.num_experts 8; sizes that do: 1, 2, 4, 8",
            id="experts",
        ),
        pytest.param(
            ("llama-tiny", "--mesh.dp", "2", "--mesh.ep", "2"), "mesh.ep is 2, but a Llama has no experts", id="dense"
        ),
        pytest.param((*TINY, "--plan.experts-tokens", "gather"), "set --mesh.ep above 1 too", id="tokens-alone"),
        pytest.param((*TINY, "--plan.experts-over-tp"), "set --mesh.ep above 1 too", id="over-tp-alone"),
        pytest.param((*TINY, "--mesh.ep", "0"), "mesh.ep is 0; it must be 1 or more", id="zero"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refusal(capsys, *arguments)


@pytest.mark.exhaustive
def test_ep_adds_no_processes(capsys: pytest.CaptureFixture[str]) -> None:
    assert MeshConfig().ep == 1
    assert PlanConfig().options(1, 1)["experts"] is None
    assert "8 processes, mesh dp=4 x tp=2" in explained(
        capsys, "qwen3-moe-tiny", "--mesh.dp", "4", "--mesh.tp", "2", "--mesh.ep", "8", "--plan.experts-over-tp"
    )


def test_memory_of_experts_is_divided_by_ep() -> None:
    need = MemoryNeed(parameters=100, processes=1, parts=1, holders=4, zero=0, states=2, compares=False)
    of_experts = MemoryNeed(
        parameters=100, processes=1, parts=1, holders=4, zero=0, states=2, compares=False, experts=80, expert_parts=4
    )
    assert (need.nbytes, of_experts.nbytes) == (4 * 100 * 4, 4 * (20 + 80 // 4) * 4)


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_a_run_goes_on_under_another_ep(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("experts on ranks of their own. " * 200)
    start = [sys.executable, "-m", "weft.models.cli", "train", "qwen3-moe-tiny", *SMALL, "--data.path", str(text)]
    options = [*start, "--output", str(tmp_path / "run")]
    first = "--steps 4 --save-every 2 --mesh.dp 2 --mesh.tp 1 --mesh.ep 2 --plan.zero 3"
    done = preloaded.run([*options, *first.split()], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("as predicted") >= 3
    assert "NOT" not in done.stdout
    (suggested,) = (line for line in done.stdout.splitlines() if "the same loss on another mesh" in line)
    assert "--mesh.dp 1 --mesh.tp 2" in suggested
    assert "--mesh.ep" not in suggested
    second = "--steps 6 --resume --mesh.dp 2 --mesh.tp 2 --mesh.ep 4 --plan.experts-over-tp"
    done = preloaded.run([*options, *second.split()], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    steps = [json.loads(line)["step"] for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert steps[-1] == 6


@pytest.mark.parametrize(
    ("arguments", "experts", "pipeline"),
    [
        (["--mesh.dp", "2"], False, False),
        (["--mesh.ep", "1", "--mesh.pp=1"], False, False),
        (["--mesh.ep=2"], True, False),
        (["--mesh.pp", "2", "--mesh.ep=1"], False, True),
    ],
)
def test_options_of_an_axis_end_with_the_axis_where_a_run_resumes(
    arguments: list[str], experts: bool, pipeline: bool
) -> None:
    plan = PlanConfig(experts_tokens="exchange", experts_over_tp=True, schedule="gpipe")
    resumed = replace(RECIPES["qwen3-moe-tiny"], mesh=MeshConfig(dp=2, pp=2, tp=1, ep=2), plan=plan)
    found = drop_unusable_mesh(resumed, arguments).plan
    assert (found.experts_tokens, found.experts_over_tp) == (("exchange", True) if experts else (None, False))
    assert found.schedule == ("gpipe" if pipeline else None)
