"""Times steps of fine-tuning and preference tuning beside trl's trainers, in turn, on one CPU thread.

`tests/models/tuning/test_against_trl.py` proves that both compute the same losses and gradients.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.conftest import Tell
from benchmarks.timing import Processor, in_turn

LENGTH = 256  # tokens of the longest example, at most
EXAMPLES = 160
MOST = 0.8  # of trl's time for a useful token
MODEL = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "vocab_size": 4096}
Step = Callable[[], int]  # takes a step; returns the number of useful tokens: those of examples


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    """A world of one process, on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    store = dist.FileStore(str(tmp_path / "store"), 1)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    torch.set_num_threads(threads)


def records(task: str) -> list[dict[str, Any]]:
    """Records of many lengths: most are short, and few are as long as a row."""
    draw = random.Random(0)

    def words(most: int) -> str:
        return "".join(draw.choice([" sea", " sky", " the", " blue", " weft"]) for _ in range(draw.randint(3, most)))

    found = []
    for number in range(EXAMPLES):
        most = 90 if number % 8 == 0 else 30
        prompt = f"What{words(most // 2)}?"
        if task == "dpo":
            found.append({"prompt": prompt, "chosen": words(most), "rejected": words(most)})
        else:
            label = {"label": number % 2 == 0} if task == "kto" else {}
            found.append({"prompt": prompt, "completion": words(most), **label})
    return found


def weft_step(folder: Path, data: Path, task: str, rows: int) -> tuple[Step, float]:
    """Steps of Weft's trainer with packed rows; and the examples of a step, in the mean."""
    from weft.models.train.trainer import Trainer

    from tests.models.tuning import runs

    options = ("--data.sequence-length", str(LENGTH), "--no-check", "--optimizer.lr", "1e-5")
    run = runs.make_run(
        folder / "model",
        data,
        task,
        *options,
        output=folder / "run",
        batch=rows,
        steps=1000,  # type: ignore[arg-type]
    )
    run.folder.mkdir()
    trainer = Trainer(run, torch.device("cpu"))
    trainer.begin(0)
    batches: Any = trainer._batches
    numbers = iter(range(1000))

    def step() -> int:
        number = next(numbers)
        trainer.step(number)
        return useful(batches.examples(number, slice(None)))

    def useful(examples: Any) -> int:
        lengths = run.corpus.lengths[examples[examples >= 0].numpy()]  # type: ignore[union-attr]
        return int(lengths.sum() if task == "dpo" else lengths[:, 0].sum())

    return step, batches.num_examples / batches.num_samples * rows


def trl_step(folder: Path, task: str, name: str, batch: int, options: dict[str, Any]) -> Step:
    """Steps of trl's trainer."""
    import datasets
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from tests.models.tuning.trl_steps import TRAINERS

    settings, trainer_class = TRAINERS[task]
    datasets.disable_progress_bars()
    arguments = settings(
        output_dir=str(folder / name), per_device_train_batch_size=batch, use_cpu=True, report_to=[], bf16=False,
        gradient_checkpointing=False, learning_rate=1e-5, disable_tqdm=True, dataloader_drop_last=True, **options,
    )  # fmt: skip

    def load() -> Any:
        return AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32, attn_implementation="sdpa")

    inputs = {} if task == "sft" else {"ref_model": load()}
    trainer = trainer_class(
        model=load(),
        args=arguments,
        train_dataset=datasets.Dataset.from_list(records(task)),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
        **inputs,
    )
    trainer.create_optimizer()
    trainer.current_gradient_accumulation_steps = 1
    loaded = cycle(trainer.get_train_dataloader())
    model = trainer.model.train()

    def step() -> int:
        found = next(loaded)
        tokens = useful(found)
        trainer.training_step(model, found)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        return tokens

    def useful(found: Any) -> int:
        if task == "dpo":
            prompts = found["prompt_attention_mask"].sum()
            return int(2 * prompts + found["chosen_attention_mask"].sum() + found["rejected_attention_mask"].sum())
        if task == "kto":
            return int(found["completion_attention_mask"].sum())
        return int(found["attention_mask"].sum()) if "attention_mask" in found else found["input_ids"].numel()

    return step


OTHERS: dict[str, dict[str, dict[str, Any]]] = {  # trl's options, by the name of a way
    "sft": {
        "trl, packed": {"packing": True, "max_length": LENGTH, "completion_only_loss": True},
        "trl, padded": {"max_length": LENGTH},
    },
    "dpo": {
        "trl, padded": {"max_length": None, "max_prompt_length": None},
        "trl, padding-free": {"max_length": None, "max_prompt_length": None, "padding_free": True},
    },
    "kto": {"trl, padded": {"max_length": LENGTH, "max_prompt_length": LENGTH}},
}


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("task", "rows"), [("sft", 4), ("dpo", 2), ("kto", 4)])
def test_a_step_beside_trl(
    task: str, rows: int, tmp_path: Path, one_process: None, tell: Tell, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("trl")
    import datasets

    from tests.models.tuning import runs

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    runs.save_model(tmp_path / "model", 1, **MODEL)
    data = runs.write(tmp_path / "data.jsonl", records(task))
    weft, examples = weft_step(tmp_path, data, task, rows)
    steps: dict[str, Step] = {"Weft, packed": weft}
    for number, (name, options) in enumerate(OTHERS[task].items()):
        batch = rows if "packing" in options else round(examples)
        steps[name] = trl_step(tmp_path, task, f"trl-{number}", batch, options)
    tokens: dict[str, list[int]] = {name: [] for name in steps}
    ways = {name: lambda name=name: tokens[name].append(steps[name]()) for name in steps}  # type: ignore[misc]
    rounds = 5
    found = tell.measuring(in_turn, ways, Processor(), rounds=rounds, warmup=1)
    each = {name: sum(timed.seconds) / sum(tokens[name][-rounds:]) for name, timed in found.items()}
    best = min(seconds for name, seconds in each.items() if name != "Weft, packed")
    share = each["Weft, packed"] / best
    case = f"a step of {task} on a CPU, H={MODEL['hidden_size']}, V={MODEL['vocab_size']}"
    print(f"\n{case}: {share:.3f} of trl's time for a useful token")
    for name, timed in found.items():
        useful = sum(tokens[name][-rounds:]) // rounds
        print(f"{name:20}{timed.median * 1e3:9.1f} ms{useful:7} tokens{1 / each[name]:9.1f} tokens/s")
        tell(case, name, "host_time", tokens=useful, tokens_per_second=1 / each[name], **timed.figures)
    assert share <= MOST
