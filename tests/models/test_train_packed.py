"""Training on prepared data: each document as if it were alone, under any plan; the tokenizer goes with the weights."""

from __future__ import annotations

import contextlib
import io
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from weft.models import GPTConfig, LlamaConfig, initialize
from weft.models.cli import main
from weft.models.data.batches import Batches
from weft.models.data.prepare import prepare
from weft.models.data.sources import find_data
from weft.models.data.tokenizer import BYTE_END, byte_tokenizer, find_tokenizer
from weft.models.families import make_model
from weft.models.train.config import DataConfig, MeshConfig, PlanConfig, Run, TrainConfig, mesh_sizes, settled_plan
from weft.models.train.loop import train
from weft.models.train.trainer import Trainer, TrainingError

from tests.kernels.reads import no_reads
from tests.support.pool import Pool

T, BATCH = 24, 8
SIZES: dict[str, Any] = {"vocab_size": 257, "hidden_size": 16, "num_layers": 2, "num_heads": 4, "max_seq_len": T}
MODELS = {"llama": LlamaConfig(intermediate_size=24, **SIZES), "gpt": GPTConfig(**SIZES)}

WAYS = [
    pytest.param({"dp": 4, "tp": 1}, {}, id="data", marks=pytest.mark.exhaustive),
    pytest.param({"dp": 1, "tp": 2}, {"sequence": True, "microbatches": 2}, id="sequence-microbatches"),
    pytest.param({"dp": 2, "tp": 2}, {"sequence": True, "microbatches": 2}, id="data-sequence-microbatches", marks=pytest.mark.exhaustive),
    pytest.param({"dp": 1, "cp": 2, "tp": 1}, {"context": "all_gather"}, id="context"),
    pytest.param({"dp": 1, "cp": 2, "tp": 2}, {"context": "all_gather"}, id="context-tensor", marks=pytest.mark.exhaustive),
    pytest.param({"dp": 2, "cp": 2, "tp": 1}, {"context": "ulysses", "zero": 3}, id="ulysses-zero3", marks=pytest.mark.exhaustive),
    pytest.param({"pp": 2, "dp": 1, "tp": 1}, {"microbatches": 2}, id="pipeline"),
    pytest.param({"pp": 2, "dp": 2, "tp": 1}, {"microbatches": 2}, id="data-pipeline", marks=pytest.mark.exhaustive),
    pytest.param({"pp": 2, "dp": 1, "cp": 2, "tp": 1}, {"microbatches": 4, "context": "all_gather"}, id="pipeline-context", marks=pytest.mark.exhaustive),
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
    dp, cp, tp = mesh_sizes(whole.mesh, 8, exact=False)
    return replace(whole, plan=settled_plan(whole.plan, whole, dp=dp, cp=cp, tp=tp))


def trained(prepared: str, family: str, mesh: dict[str, int], plan: dict[str, Any]) -> list[float]:
    """The held-out loss, and those of two steps; what the first one communicates is as predicted, and the second waits for no device."""
    settled = config(family, mesh, plan)
    run = Run(
        recipe="small", config=settled, corpus=find_data(Path(prepared)), folder=Path("nowhere"), **{"tp": 1, **mesh}
    )
    made = Trainer(run, torch.device("cpu"))
    lines: list[str] = []
    made.report.line = lines.append  # type: ignore[method-assign]
    first = made.held_out_loss()
    made.first_step()
    with no_reads():
        made.step(1)
    assert not [line for line in lines if "NOT" in line]
    metrics = made.read()
    assert all(0 < each.data_share < 1 for each in metrics)
    return [first, *(each.loss for each in metrics)]


def alone(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean loss of rows, each document a batch of its own, told from the ends that stand in the tokens."""
    total = torch.zeros((), dtype=torch.float64)
    for row, target in zip(tokens, targets, strict=True):
        stops = [*((row == BYTE_END).nonzero()[:, 0] + 1).tolist(), len(row)]
        for start, stop in zip([0, *stops], stops, strict=False):
            if start < stop:
                logits = model(row[None, start:stop])[0].double()
                total += torch.nn.functional.cross_entropy(logits, target[start:stop], reduction="sum")
    return total / tokens.numel()


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


@pytest.mark.exhaustive
def test_the_tokenizer_goes_with_a_checkpoint_and_generates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From text to what transformers makes of the run's last folder."""
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


def begun(prepared: str, verify: bool) -> str:
    """What a run of one step on two ranks is told; nothing where it comes to its end."""
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


@pytest.mark.parametrize("verify", [True, False])
def test_a_flipped_bit_of_a_shard_ends_the_run_before_it_begins(verify: bool, prepared: str, pool: Pool) -> None:
    """Of the second shard, which the second rank reads."""
    path = Path(prepared, "tokens-00001.bin")
    with path.open("r+b") as file:
        file.write(b"!")
    wanted = f"{path} is not what was prepared: its SHA-256 differs; copy it again, or prepare it again"
    assert pool.run(begun, prepared, verify, ranks=2) == [wanted if verify else ""] * 2
    assert Path(prepared).with_name(f"run-{verify}").exists() is not verify
