"""Training on prepared data: documents do not see each other, under any plan; weights are saved with the tokenizer."""

from __future__ import annotations

import contextlib
import io
import json
import math
import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from weft.models import GPTConfig, LlamaConfig, initialize
from weft.models.cli import main
from weft.models.data.batches import Batches, Rows
from weft.models.data.learn import train_tokenizer
from weft.models.data.prepare import prepare
from weft.models.data.sources import find_data
from weft.models.data.tokenizer import BYTE_END, byte_tokenizer, find_tokenizer
from weft.models.families import make_model
from weft.models.train.config import DataConfig, MeshConfig, PlanConfig, TrainConfig
from weft.models.train.loop import train
from weft.models.train.recipes import recipe
from weft.models.train.report import Metrics, closing_lines
from weft.models.train.run import Run, complete_plan, mesh_sizes
from weft.models.train.trainer import Trainer, TrainingError

from tests.kernels.reads import no_reads
from tests.support.pool import Pool

T, BATCH = 24, 8
SIZES: dict[str, Any] = {"vocab_size": 257, "hidden_size": 16, "num_layers": 2, "num_heads": 4, "max_seq_len": T}
MODELS = {"llama": LlamaConfig(intermediate_size=24, **SIZES), "gpt": GPTConfig(**SIZES)}

WAYS = [
    pytest.param({"dp": 4, "tp": 1}, {}, id="data", marks=pytest.mark.exhaustive),
    pytest.param({"dp": 1, "tp": 2}, {"sequence": True, "microbatches": 2}, id="sequence-microbatches"),
    pytest.param(
        {"dp": 2, "tp": 2},
        {"sequence": True, "microbatches": 2},
        id="data-sequence-microbatches",
        marks=pytest.mark.exhaustive,
    ),
    pytest.param({"dp": 1, "cp": 2, "tp": 1}, {"context": "all_gather"}, id="context"),
    pytest.param(
        {"dp": 1, "cp": 2, "tp": 2}, {"context": "all_gather"}, id="context-tensor", marks=pytest.mark.exhaustive
    ),
    pytest.param(
        {"dp": 2, "cp": 2, "tp": 1}, {"context": "ulysses", "zero": 3}, id="ulysses-zero3", marks=pytest.mark.exhaustive
    ),
    pytest.param({"pp": 2, "dp": 1, "tp": 1}, {"microbatches": 2}, id="pipeline"),
    pytest.param({"pp": 2, "dp": 2, "tp": 1}, {"microbatches": 2}, id="data-pipeline", marks=pytest.mark.exhaustive),
    pytest.param(
        {"pp": 2, "dp": 1, "cp": 2, "tp": 1},
        {"microbatches": 4, "context": "all_gather"},
        id="pipeline-context",
        marks=pytest.mark.exhaustive,
    ),
]  # fmt: skip


@pytest.fixture
def prepared(tmp_path: Path) -> str:
    """Documents of 3 to 33 bytes."""
    lines = [json.dumps({"text": f"{number} is a document" + " indeed" * (number % 3)}) for number in range(200)]
    (tmp_path / "in.jsonl").write_text("\n".join([*lines, *(json.dumps({"text": f"{n}."}) for n in range(60))]))
    prepare([tmp_path / "in.jsonl"], tmp_path / "prepared", tokenizer=byte_tokenizer(), part_bytes=3000)
    return str(tmp_path / "prepared")


def config(family: str, mesh: dict[str, int], plan: dict[str, Any]) -> TrainConfig:
    data = DataConfig(batch_size=BATCH, sequence_length=T)
    whole = TrainConfig(model=MODELS[family], steps=3, data=data, mesh=MeshConfig(**mesh), plan=PlanConfig(**plan))
    dp, cp, tp = mesh_sizes(whole.mesh, 8, every_process=False)
    return replace(whole, plan=complete_plan(whole.plan, whole, dp=dp, cp=cp, tp=tp))


def trained(prepared: str, family: str, mesh: dict[str, int], plan: dict[str, Any]) -> list[float]:
    """The held-out loss, and the losses of two steps.

    The first step communicates as predicted, and the second waits for no device.
    """
    settled = config(family, mesh, plan)
    run = Run(
        recipe="small", config=settled, corpus=find_data(Path(prepared)), folder=Path("nowhere"), **{"tp": 1, **mesh}
    )
    made = Trainer(run, torch.device("cpu"))
    lines: list[str] = []
    made.report.print_line = lines.append  # type: ignore[method-assign]
    first = made.held_out_loss()
    made.first_step()
    with no_reads("weft.models.parallel.batch.cut_rows"):  # of documents on the host
        made.step(1)
    assert not [line for line in lines if "NOT" in line]
    return [first, *(each.loss for each in made.read_metrics())]


READING = 0.05  # seconds that reading a batch takes, without a core


def waits_for_data(prepared: str) -> tuple[list[float], list[float]]:
    """The share of each step spent waiting for rows, in consecutive steps; then the seconds, in steps out of order."""
    settings = replace(recipe("llama-tiny"), steps=40, check=False)
    run = Run(recipe="tiny", config=settings, corpus=find_data(Path(prepared)), folder=Path("nowhere"), dp=1, tp=1)
    made = Trainer(run, torch.device("cpu"))
    read = made._batches.batch

    def slowly(step: int, rows: slice) -> Rows:
        time.sleep(READING)
        return read(step, rows)

    made._batches.batch = slowly  # type: ignore[method-assign]
    made.begin(0)
    tokens = settings.data.batch_size * settings.data.sequence_length
    found: list[Metrics] = []
    for step in (*range(6), 20):
        made.restart_clock()
        made.step(step)
        found += made.read_metrics()
    return (
        [each.data_share for each in found[1:6]],
        [each.data_share * tokens / each.tokens_per_second for each in found[6:]],
    )


@pytest.mark.exhaustive
def test_a_step_waits_for_its_data_for_less_than_a_hundredth_of_its_time(tmp_path: Path, pool: Pool) -> None:
    """With the default recipe on one process and slow reading: a batch is read before it is asked for."""
    (tmp_path / "in.jsonl").write_text(
        "".join(json.dumps({"text": "weft and warp " * (n % 9)}) + "\n" for n in range(400))
    )
    prepare([tmp_path / "in.jsonl"], tmp_path / "prepared", tokenizer=byte_tokenizer())
    ((in_turn, unforeseen),) = pool.run(waits_for_data, str(tmp_path / "prepared"), ranks=1)
    assert min(in_turn) < 0.01  # the shortest: in longer steps the reading thread may have waited for a core
    assert min(unforeseen) >= READING  # counted in full where it could not be read ahead


def alone(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean loss of rows, with each document a batch of its own; documents end at the end tokens."""
    total = torch.zeros((), dtype=torch.float64)
    for row, target in zip(tokens, targets, strict=True):
        stops = [*((row == BYTE_END).nonzero()[:, 0] + 1).tolist(), len(row)]
        for start, stop in zip([0, *stops], stops, strict=False):
            if start < stop:
                logits = model(row[None, start:stop])[0].double()
                total += torch.nn.functional.cross_entropy(logits, target[start:stop], reduction="sum")
    return total / tokens.numel()


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize(("mesh", "plan"), WAYS)
def test_documents_of_a_row_are_as_if_each_were_alone(
    pool: Pool, prepared: str, family: str, mesh: dict[str, int], plan: dict[str, Any]
) -> None:
    batches = Batches(find_data(Path(prepared)), sequence_length=T, batch_size=BATCH, seed=0)
    model = make_model(MODELS[family])
    initialize(model, 0)
    held, rows = batches.held_out(slice(None)), batches.batch(0, slice(None))
    assert (rows.tokens == BYTE_END).sum() > BATCH / 2
    with torch.no_grad():
        expected = [alone(model, each.tokens, each.targets).item() for each in (held, rows)]
    for found in pool.run(trained, prepared, family, mesh, plan, ranks=math.prod(mesh.values())):
        assert found[:2] == pytest.approx(expected, rel=1e-5)
        assert found[2] < found[1]


def test_without_packing_a_row_is_one_run(prepared: str) -> None:
    rows = Batches(find_data(Path(prepared)), sequence_length=T, batch_size=BATCH, seed=0).batch(0, slice(None))
    assert rows.positions is rows.documents is None


def step_of_few(path: str) -> float:
    """The loss of a first step of 4,096 sequences of 8 tokens."""
    data = DataConfig(batch_size=4096, sequence_length=8)
    settings = replace(config("llama", {"dp": 2, "tp": 1}, {}), data=data)
    made = Trainer(
        Run(recipe="small", config=settings, corpus=find_data(Path(path)), folder=Path("nowhere"), dp=2, tp=1),
        torch.device("cpu"),
    )
    made.step(0)
    return made.read_metrics()[0].loss


@pytest.mark.exhaustive
def test_a_step_of_more_sequences_than_there_are_takes_each_as_often(tmp_path: Path, pool: Pool) -> None:
    """The loss is the mean over the batch, in which some of the data's sequences occur once more than the rest."""
    letters = random.Random(0).choices("abcdefgh", k=1000)
    (path := tmp_path / "small.txt").write_text("".join(letters))
    windows = torch.tensor([*"".join(letters).encode(), BYTE_END]).unfold(0, 9, 8)  # [125, 9]
    batches = Batches(find_data(path), sequence_length=8, batch_size=4096, seed=0)
    rows, held_out = batches.batch(0, slice(None)), batches.held_out(slice(None)).tokens
    found = torch.cat([rows.tokens, rows.targets[:, -1:]], dim=1)
    times = (found[:, None] == windows).all(2).sum(0)  # of each window in the batch
    kept = ~(windows[:, None, :8] == held_out).all(2).any(1)
    assert kept.sum() == 119 and set(times[kept].tolist()) == {34, 35} and times[~kept].sum() == 0
    model = make_model(MODELS["llama"])
    initialize(model, 0)
    with torch.no_grad():
        logits = model(windows[:, :-1]).double().mT
    losses = torch.nn.functional.cross_entropy(logits, windows[:, 1:], reduction="none").mean(1)
    expected = (losses * times).sum().item() / 4096
    for loss in pool.run(step_of_few, str(path), ranks=2):
        assert loss == pytest.approx(expected, rel=1e-5)


@pytest.mark.exhaustive
def test_the_tokenizer_goes_with_a_checkpoint_and_generates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From text to the tokens that transformers generates with the run's last folder."""
    import transformers

    (tmp_path / "in.txt").write_text("the whale and the sea and the ship " * 400)

    def weft(*arguments: str) -> str:
        with pytest.raises(SystemExit) as end:
            main(arguments)
        assert end.value.code == 0
        return capsys.readouterr().out

    text, bpe, data, run = (str(tmp_path / name) for name in ("in.txt", "bpe", "data", "run"))
    weft("data", "train-tokenizer", text, "--vocab-size", "300", "--output", bpe)
    weft("data", "prepare", text, "--tokenizer", bpe, "--output", data)
    size = find_tokenizer(Path(bpe)).vocab_size
    sizes = ("--model.vocab-size", str(size), "--model.hidden-size", "32", "--model.num-layers", "1")
    small = ("--data.sequence-length", "32", "--steps", "2", "--save-every", "1", "--mesh.dp", "1", "--mesh.tp", "1")
    weft("train", "--data.path", data, "--output", run, *sizes, *small)
    checkpoint = tmp_path / "run" / "checkpoint"
    assert find_tokenizer(checkpoint) == find_tokenizer(Path(bpe))
    assert find_tokenizer(tmp_path / "run" / "checkpoint-1").sha256 == find_tokenizer(Path(bpe)).sha256
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    prompt = tokenizer("the whale", return_tensors="pt")
    expected = tokenizer.decode(theirs.generate(**prompt, max_new_tokens=8, do_sample=False, eos_token_id=-1)[0])
    assert weft("generate", run, "--prompt", "the whale", "--tokens", "8", "--temperature", "0") == expected + "\n"


def closing(prepared: str, vocab_size: int, seconds: float | None) -> tuple[float, str]:
    """A run's bytes per token of the held-out text, and the closing line for two losses. seconds: of training."""
    settled = config("llama", {"dp": 1, "tp": 1}, {})
    settled = replace(settled, model=replace(settled.model, vocab_size=vocab_size))
    run = Run(recipe="llama-tiny", config=settled, corpus=find_data(Path(prepared)), folder=Path("run"), dp=1, tp=1)
    bytes_per_token = Trainer(run, torch.device("cpu")).held_out_bytes_per_token()
    return bytes_per_token, closing_lines(
        run, (math.log(8), math.log(2)), seconds, bytes_per_token=bytes_per_token, on_cpu=True
    ).splitlines()[0]


def test_bits_a_byte_are_of_the_text_whatever_the_tokenizer(pool: Pool, tmp_path: Path) -> None:
    """Losses of 3 bits and 1 bit a token, divided by the held-out text's characters per token; the text is ASCII."""
    text = tmp_path / "in.jsonl"
    text.write_text("\n".join(json.dumps({"text": f"the whale {n} and the sea"}) for n in range(400)))
    tokenizer = train_tokenizer([text], tmp_path / "bpe", vocab_size=300)
    for name, each in {"bpe": tokenizer, "bytes": byte_tokenizer()}.items():
        prepare([text], tmp_path / name / "data", tokenizer=each)
        data = find_data(tmp_path / name / "data")
        targets = Batches(data, sequence_length=T, batch_size=BATCH, seed=0).held_out(slice(None)).targets.flatten()
        characters = [len(each.decode([token])) for token in targets.tolist() if token != each.end]
        expected = sum(characters) / len(targets)
        assert expected > 1.5 if name == "bpe" else 0.9 < expected < 1
        bits = f"{3 / expected:.2f} -> {1 / expected:.2f} bits a byte"
        for seconds, ending in ((1.0, ", in 1 s"), (None, "; no step was taken")):
            (found,) = pool.run(closing, str(tmp_path / name / "data"), each.vocab_size, seconds, ranks=1)
            assert found == (pytest.approx(expected), f"loss on held-out text 2.0794 -> 0.6931, {bits}{ending}")


def begun(prepared: str, verify: bool) -> str:
    """The error of a run of one step on two ranks; empty if the run completes."""
    settled = config("llama", {"dp": 2, "tp": 1}, {})
    folder = Path(prepared).with_name(f"run-{verify}")
    settled = replace(settled, steps=1, check=False, data=replace(settled.data, verify=verify))
    run = Run(recipe="llama-tiny", config=settled, corpus=find_data(Path(prepared)), folder=folder, dp=2, tp=1)
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            train(run, torch.device("cpu"))
        except TrainingError as error:
            return str(error)
    return ""


@pytest.mark.exhaustive
@pytest.mark.parametrize("verify", [True, False])
def test_a_flipped_bit_of_a_shard_ends_the_run_before_it_begins(verify: bool, prepared: str, pool: Pool) -> None:
    """A bit of the second shard, which the second rank reads."""
    path = Path(prepared, "tokens-00001.bin")
    with path.open("r+b") as file:
        file.write(b"!")
    wanted = (
        f"{path} is not what was prepared: its SHA-256 differs; "
        f"copy it again, or remove the folder and prepare it again"
    )
    assert pool.run(begun, prepared, verify, ranks=2) == [wanted if verify else ""] * 2
    assert Path(prepared).with_name(f"run-{verify}").exists() is not verify
