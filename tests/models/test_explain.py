"""`weft explain`: a prediction of training on any mesh, without processes."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from weft.models.cli import main
from weft.models.train.config import OptimizerConfig, state_tensors

from tests.architecture.rules import ROOT

SIXTEEN_THOUSAND = ("llama3-8b", "--mesh.dp", "256", "--mesh.tp", "8", "--mesh.pp", "8", "--plan.zero", "1")
TABLE, BLOCK = 257 * 128, 128 * (2 * 128 + 2 * 64 + 3 * 384 + 2)  # parameters of llama-tiny's
SECONDS = 60  # seconds of a CPU that also runs other programs; 6 when idle


def explained(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit, match="0"):
        main(["explain", *arguments])
    out, err = capsys.readouterr()
    assert not err
    return out


def held(out: str) -> dict[str, int]:
    """Bytes that the rank holds from step to step, by kind."""
    return bytes_in(out[: out.index("at the peak of a step")])


def at_peak(out: str) -> dict[str, int]:
    """Bytes of the rank at the peak of a step, by kind."""
    return bytes_in(out[out.index("at the peak of a step") :])


def bytes_in(table: str) -> dict[str, int]:
    rows = re.findall(r"^  (\S[a-z ]*?) +([\d,]+) bytes +[\d.]+ [MG]iB$", table, re.MULTILINE)
    return {name: int(nbytes.replace(",", "")) for name, nbytes in rows}


@pytest.mark.exhaustive
def test_explain_prints_the_lines_of_train_before_the_first_step(capsys: pytest.CaptureFixture[str]) -> None:
    """The lines that the README shows."""
    out = explained(capsys, "--mesh.dp", "2", "--mesh.tp", "2")
    readme = (ROOT / "README.md").read_text()
    shown = readme[readme.index("layout of the parameters\n") : readme.index("collectives of step 1, as issued")]
    told = out[out.index("layout of the parameters\n") : out.index("memory of rank 0")]
    assert re.sub(" +", " ", told) == re.sub(" +", " ", shown)
    size, batch, rank, *_ = out.splitlines()
    assert size == "llama-tiny: Llama, 0.85 M parameters, 4 layers; 4 processes, mesh dp=2 x tp=2"
    assert batch.startswith("batch 8 x 128 tokens; 5.71 MFLOP a token, ")
    assert rank == "rank 0 is at dp=0, tp=0"


@pytest.mark.exhaustive
def test_memory_of_one_process_is_16_bytes_a_parameter_with_adam(capsys: pytest.CaptureFixture[str]) -> None:
    whole = held(explained(capsys, "--mesh.dp", "1", "--mesh.tp", "1", "--model.num-layers", "1"))
    count = 2 * TABLE + 128 + BLOCK
    expected = {"parameters": 4 * count, "gradients": 4 * count, "optimizer state": 8 * count, "in all": 16 * count}
    assert whole == expected


@pytest.mark.exhaustive
def test_the_peak_has_the_activations_of_the_microbatches_in_flight(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--mesh.pp", "2", "--mesh.dp", "1", "--mesh.tp", "1", "--model.num-layers", "8", "--batch", "8,64")
    first, last = (at_peak(explained(capsys, *options, "--rank", rank)) for rank in ("0", "1"))
    for peak in (first, last):
        assert sum(nbytes for name, nbytes in peak.items() if name != "in all") == peak["in all"]
    assert first["parameters"] == 4 * (4 * BLOCK + TABLE)
    assert first["activations"] > 1.5 * last["activations"]  # two microbatches in flight, and one


@pytest.mark.parametrize(
    ("name", "states"),
    [("adamw", 2), ("sgd", 1), ("adagrad", 1), ("rmsprop", 2), ("radam", 2), ("adamax", 2), ("asgd", 1), ("rprop", 2)],
)
def test_numbers_that_optimizers_keep(name: str, states: int) -> None:
    assert state_tensors(OptimizerConfig(name=name)) == states


@pytest.mark.exhaustive
def test_a_rank_of_a_later_stage(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[mesh]\npp = 2\ndp = 1\ntp = 1\n")
    out = explained(capsys, "--config", str(tmp_path / "run.toml"), "--rank", "1", "--batch", "4,16")
    assert "batch 4 x 16 tokens in 4 microbatches; " in out
    assert "rank 1 is at pp=1, dp=0, tp=0\n" in out
    assert "  lm_head.weight " in out
    assert "embed_tokens" not in out
    assert "\nschedule of the pipeline, in microbatches: F forward, B gradients of inputs, " in out
    assert "\npp=0  F0 " in out
    assert "bytes that rank 1 receives\n" in out
    assert held(out)["parameters"] == 4 * (2 * BLOCK + 128 + TABLE)


@pytest.mark.exhaustive
def test_sixteen_thousand_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    began = time.process_time()
    out = explained(capsys, *SIXTEEN_THOUSAND, "--rank", "16383")
    assert time.process_time() - began < SECONDS
    assert "16,384 processes, mesh pp=8 x dp=256 x tp=8\n" in out
    assert "batch 2,048 x 8,192 tokens in 8 microbatches; 57.9 GFLOP a token, 972 PFLOP a step" in out
    assert "rank 16383 is at pp=7, dp=255, tp=7\n" in out
    assert len(re.findall(r"^pp=\d  ", out, re.MULTILINE)) == 8
    block = 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336) // 8 + 2 * 4096  # norms are whole on each rank
    parameters = 4 * (4 * block + 128256 * 4096 // 8 + 4096)
    memory = held(out)
    assert memory["gradients"] == parameters
    assert memory["parameters"] + memory["gathered from shards"] >= parameters
    assert memory["optimizer state"] == 2 * parameters // 256


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(["lama3-8b"], "unknown recipe 'lama3-8b'; did you mean 'llama3-8b'?", id="recipe"),
        pytest.param(["--rank", "4"], "--rank 4 is not in the mesh; its 4 ranks are 0 to 3", id="rank"),
        pytest.param(["--batch", "8x128"], "--batch '8x128' is not rows and tokens", id="batch"),
        pytest.param(
            ["gpt-tiny", "--batch", "8,999"], "data.sequence_length 999 is above model.max_seq_len", id="tokens"
        ),
        pytest.param(["--mesh.tp", "3"], "tp=3 does not divide num_heads 8", id="heads"),
        pytest.param(["--mesh.pp", "8"], "4 layers, which cannot be cut into 8 stages", id="stages"),
        pytest.param(["--mesh.dp", "0"], "mesh.dp is 0; it must be 1 or more", id="no-rank"),
        pytest.param(["--plan.zero", "7"], "invalid choice '7' for argument '--plan.zero'. Expected one of", id="zero"),
        pytest.param(
            ["llama-tiny", "extra"],
            "options: extra; --help lists the options. Of the words without dashes, the first may be a recipe",
            id="second-name",
        ),
        pytest.param(["mesh.dp", "2"], "unknown recipe 'mesh.dp'", id="no-dashes"),
        pytest.param(
            ["llama-tiny", "mesh.dpp", "2"],
            "; perhaps you meant --mesh.pp, --mesh.dp, --mesh.tp.",
            id="no-dashes-nor-option",
        ),
        pytest.param(["--mesh.dx", "2"], "Unrecognized options: --mesh.dx, 2; perhaps you meant --mesh.", id="axis"),
        pytest.param(["--plan.microbatches", "3"], "plan.microbatches 3 does not divide data.batch_size 8", id="parts"),
    ],
)
def test_impossible_arguments_are_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["explain", *arguments])
    out, err = capsys.readouterr()
    assert not out
    (line,) = err.splitlines()
    assert line.startswith("weft explain: ")
    assert message in line


@pytest.mark.exhaustive
def test_packed_rows_under_context_parallelism_exchange_at_most_what_is_counted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    note = "packed rows of prepared data exchange keys by documents"
    options = ("--mesh.dp", "1", "--mesh.tp", "1", "--mesh.cp", "2")
    out = explained(capsys, *options)
    assert note in out and "at most as many bytes" in out and "all-gather" in out
    assert note not in explained(capsys, *options, "--data.no-pack")
    assert note not in explained(capsys, *options, "--plan.context", "ulysses")
