"""`weft evaluate` of a run, on the examples that the run held out, gives the run's own held-out loss."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from weft.models.cli import evaluate
from weft.models.data.streams import even_middles

from tests.models.chat_folder import save_chat_folder

WORDS = ["warp", "weft", "loom", "row", "over", "under", "drawn", "through"]


def some_words(number: int, count: int) -> str:
    return " ".join(WORDS[(number * 7 + i * i) % len(WORDS)] for i in range(count))


def conversation(i: int) -> dict:
    answer = {"role": "assistant", "content": some_words(i + 3, 1 + i % 9)}
    return {"messages": [{"role": "user", "content": some_words(i, 2 + i % 5)}, answer]}


def pair(i: int) -> dict:
    return {"prompt": some_words(i, 4), "chosen": some_words(i + 2, 1 + i % 7), "rejected": some_words(i + 3, 8)}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("task", "record", "name"),
    [pytest.param("sft", conversation, "loss", id="sft"), pytest.param("dpo", pair, "dpo_loss", id="dpo")],
)
def test_the_held_out_loss_of_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], task: str, record, name: str
) -> None:
    folder, run, data, held_out = (tmp_path / each for each in ("llama", "run", "data.jsonl", "held-out.jsonl"))
    save_chat_folder(folder)
    records = [json.dumps(record(i)) + "\n" for i in range(65)]
    data.write_text("".join(records))
    held_out.write_text("".join(records[i] for i in even_middles(len(records) // 20, len(records))))
    lr = ["--optimizer.lr", "1e-2", "--optimizer.warmup-steps", "0"]  # a loss that moves
    options = [
        *lr,
        "--steps",
        "3",
        "--mesh.dp",
        "1",
        "--mesh.tp",
        "1",
        "--data.sequence-length",
        "96",
        "--data.batch-size",
        "4",
    ]
    command = ["train", "--from", str(folder), "--task", task, "--data.path", str(data), "--output", str(run), *options]
    weft = [sys.executable, "-m", "weft.models.cli"]
    printed = subprocess.run([*weft, *command], check=True, capture_output=True, text=True).stdout
    reference = ["--reference", str(folder)] if task == "dpo" else []
    assert evaluate.run([str(run), "--data", str(held_out), "--json", *reference]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["task"], found["examples"]) == (task, 3)
    (last,) = re.findall(r"^loss on held-out .* -> ([\d.]+)", printed, re.MULTILINE)
    assert found[name] == pytest.approx(float(last), abs=1e-4)
