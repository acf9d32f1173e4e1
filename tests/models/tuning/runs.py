"""Folders of small models, records of every task, and one step of a run by `Trainer`, with its gradients."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from weft.mesh import derive_key
from weft.models.cli.train import _complete_run
from weft.models.data.examples.example import Task
from weft.models.initialization import normal_
from weft.models.train.loop import train
from weft.models.train.objective import open_batches
from weft.models.train.run import Run
from weft.models.train.trainer import Trainer

from tests.models.cases import whole
from tests.models.examples.chats import folder as save_tokenizer
from tests.models.examples.chats import turns

LENGTH = 64  # data.sequence_length: the longest segment of the records has fewer tokens
RANK, ALPHA, TARGETS = 3, 6.0, ("q_proj", "v_proj", "down_proj")
LORA = ("--lora.rank", str(RANK), "--lora.alpha", str(ALPHA), "--lora.targets", *TARGETS)
SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "max_position_embeddings": 128, "initializer_range": 0.15,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8}
QUESTIONS = (
    "What color is the sky?",
    "Where is the sun?",
    "Is it in the sea?",
    "What is wärp?",
    "the weft or the sea?",
)
ANSWERS = ("It is blue.", "In the sea", "It is the sky.", "wärp and weft ☃", "the sun")


def save_model(path: Path, seed: int, *, experts: bool = False, **sizes: Any) -> Path:
    """A folder of a Llama, or of a Qwen3 mixture, with a tokenizer and a chat template. The seed draws its weights."""
    # Imported here: the worker processes import this module too, and never need transformers.
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    save_tokenizer(path, "chatml")
    size = len(AutoTokenizer.from_pretrained(path))
    torch.manual_seed(seed)
    sizes = {**SIZES, "vocab_size": size, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None} | sizes
    model = (
        Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **EXPERTS))  # type: ignore[no-untyped-call]
        if experts
        else LlamaForCausalLM(LlamaConfig(**sizes))
    )
    model.save_pretrained(path)
    return path


def records(task: Task, *, messages: bool, count: int = 8) -> list[dict[str, Any]]:
    """Records of different lengths. messages: whether they have messages in place of text."""
    found = []
    for number in range(count):
        question = QUESTIONS[number % 5] + " the" * (number % 3)
        answer, other = ANSWERS[number % 5] + "!" * (number % 4), ANSWERS[(number * 2 + 1) % 5] + " and weft"
        if messages:
            asked, given, wrong = turns(question), turns("", answer)[1:], turns("", other)[1:]
        else:
            asked, given, wrong = question, f" {answer}", f" {other}"  # type: ignore[assignment]
        if task == "dpo":
            found.append({"prompt": asked, "chosen": given, "rejected": wrong})
        elif task == "kto":
            found.append({"prompt": asked, "completion": given, "label": number % 3 > 0})
        elif messages and number % 2:
            found.append({"messages": [*asked, *given, *turns("the sun?", other)]})
        elif messages:
            found.append({"messages": [*asked, *given]})
        else:
            found.append({"prompt": asked, "completion": given})
    return found


def write(path: Path, of: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in of))
    return path


def make_run(
    base: Path, data: Path | None, task: Task, *options: str, output: Path, batch: int | None = None, steps: int = 1
) -> Run:
    """The run of `weft train --from BASE --task TASK`. batch: rows; None: as many as the data fill.

    Gradients are clipped in runs of several steps alone.
    """
    arguments = [
        *("--from", str(base), "--task", task, "--output", str(output)),
        *([] if data is None else ["--data.path", str(data)]),
        *("--steps", str(steps), "--data.sequence-length", str(LENGTH), *options),
        *([] if steps > 1 else ["--optimizer.clip-norm", "0"]),
    ]
    sizes = [] if batch is None else ["--data.batch-size", str(batch)]
    if not any(each.startswith("--mesh") for each in options):
        arguments += ["--mesh.dp", "1", "--mesh.tp", "1"]
    run, _ = _complete_run([*arguments, *sizes], None)
    if batch is None:
        rows = open_batches(run).num_samples
        run = replace(run, config=replace(run.config, data=replace(run.config.data, batch_size=rows)))
    return run


def stir(model: nn.Module) -> None:
    """Give the adapters' B, which is 0 at the start, values that do not depend on the mesh."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("lora.B"):
                normal_(parameter, derive_key(7, name), std=0.2)


def first_step(run: Run, stirs: bool = False, at_trainer: Callable[[Trainer], None] | None = None) -> dict[str, Any]:
    """Step 1 of a run on this rank: the loss, gradients, metrics, and lines about the check and the prediction.

    stirs: whether the adapters begin as `stir` makes them, and no check is made.
    """
    if stirs:
        run = replace(run, config=replace(run.config, check=False))
    run.folder.mkdir(parents=True, exist_ok=True)
    trainer, lines, gradients = Trainer(run, torch.device("cpu")), list[str](), dict[str, Tensor]()
    trainer.report.print_line = lines.append  # type: ignore[method-assign]
    if stirs:
        stir(trainer.model)
    if at_trainer is not None:
        at_trainer(trainer)
    update = trainer.optimizer.step

    def keep_gradients() -> None:
        for name, parameter in trainer.model.named_parameters():
            if parameter.grad is not None:
                gradients[name] = parameter.grad.detach().clone()
        update()

    trainer.optimizer.step = keep_gradients  # type: ignore[method-assign, assignment]
    trainer._objective.begin(0, lines.append)
    trainer.first_step()
    gradients = {name: whole(each) for name, each in gradients.items()}  # after the step's collectives were counted
    result = trainer._unread_steps[0].result
    (metrics,) = trainer.read_metrics()
    return {
        "loss": float(result.loss),
        "sums": None if result.sums is None else result.sums.tolist(),
        "gradients": gradients,
        "metrics": metrics,
        "lines": lines,
    }


def train_to_the_end(run: Run) -> int:
    """The whole run on this rank, as `weft train` starts it."""
    return train(run, torch.device("cpu"))


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
