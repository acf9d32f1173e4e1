"""A model is trained to answer by rote, then preferred away from its answers, with all weights and with adapters."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.examples.chats import turns
from tests.models.tuning.runs import make_run, read_metrics, save_model, train_to_the_end, write
from tests.support.pool import Pool

ROTE = {"What color is the sky?": "It is blue.", "Where is the sun?": "In the sea", "Is it weft?": "It is wärp ☃"}
PREFERRED = {"What color is the sky?": "the sun", "Where is the sun?": "It is weft.", "Is it weft?": "In the sky"}
LEARNING = ("--optimizer.lr", "5e-3", "--optimizer.warmup-steps", "5", "--optimizer.weight-decay", "0")
ADAPTERS = ("--lora.rank", "8", "--lora.alpha", "32", "--lora.targets", "*_proj", "lm_head")
MESHES = {"dp2": {"dp": 2}, "tp2": {"tp": 2}, "dp2-tp2-zero3": {"dp": 2, "tp": 2}, "pp2": {"pp": 2}}
WAYS = [pytest.param((), id="all-weights"), pytest.param(ADAPTERS, id="adapters")]


def trained(
    pool: Pool, base: Path, path: Path, task: Any, rows: list[dict[str, Any]], mesh: str, *options: str, steps: int
) -> Path:
    """The folder of a run."""
    axes, data = MESHES[mesh], write(path / f"{task}.jsonl", rows)
    sizes = [text for axis in ("pp", "dp", "cp", "tp") for text in (f"--mesh.{axis}", str(axes.get(axis, 1)))]
    sizes += ["--plan.zero", "3"] if mesh.endswith("zero3") else []
    run = make_run(base, data, task, *sizes, *LEARNING, *options, output=path / task, batch=4, steps=steps)
    pool.run(train_to_the_end, run, ranks=math.prod(axes.values()))
    return path / task


def loaded(run: Path) -> tuple[Any, Any]:
    """The final model of a run by transformers, or with its adapters by peft; and its tokenizer."""
    # imported late, because the ranks of `trained` import this module too
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = run / "checkpoint"
    kind = AutoPeftModelForCausalLM if (folder / "adapter_config.json").exists() else AutoModelForCausalLM
    return kind.from_pretrained(folder, dtype=torch.float32).eval(), AutoTokenizer.from_pretrained(folder)


def answers(run: Path) -> dict[str, str]:
    """The likeliest answer to each question, by transformers' generate."""
    (model, tokenizer), found = loaded(run), {}
    for question in ROTE:
        prompt = tokenizer.apply_chat_template(
            turns(question), add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        tokens = prompt["input_ids"]
        ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
        new = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=24, do_sample=False, **ends)
        found[question] = tokenizer.decode(new[0, tokens.shape[1] :], skip_special_tokens=True)
    return found


def likelier(run: Path) -> list[bool]:
    """For each question, whether the preferred answer is likelier than that learned by rote."""
    (model, tokenizer), found = loaded(run), []
    for question in ROTE:
        begin = tokenizer.apply_chat_template(turns(question), add_generation_prompt=True)
        of_answers = []
        for answer in (ROTE[question], PREFERRED[question]):
            tokens = torch.tensor([tokenizer.apply_chat_template(turns(question, answer))])
            with torch.no_grad():
                each = model(tokens).logits.log_softmax(-1)[0, :-1].gather(-1, tokens[0, 1:, None])
            of_answers.append(each[len(begin) - 1 :].sum())
        found.append(bool(of_answers[1] > of_answers[0]))
    return found


def rows_of(task: str) -> list[dict[str, Any]]:
    if task == "sft":
        return [{"messages": turns(*each)} for each in ROTE.items()]
    both = [(turns(question), turns("", ROTE[question])[1:], turns("", PREFERRED[question])[1:]) for question in ROTE]
    if task == "dpo":
        return [{"prompt": asked, "chosen": preferred, "rejected": rote} for asked, rote, preferred in both]
    return [
        {"prompt": asked, "completion": completion, "label": label}
        for asked, rote, preferred in both
        for completion, label in ((preferred, True), (rote, False))
    ]


@pytest.mark.exhaustive
@pytest.mark.parametrize("adapters", WAYS)
@pytest.mark.parametrize("mesh", MESHES)
def test_answers_are_learned_and_then_others_preferred(
    mesh: str, adapters: tuple[str, ...], tmp_path: Path, pool: Pool
) -> None:
    base = save_model(tmp_path / "model", 1)
    steps = 80 if adapters else 40
    learned = trained(pool, base, tmp_path, "sft", rows_of("sft"), mesh, *adapters, "--data.no-pack", steps=steps)
    assert answers(learned) == ROTE
    assert likelier(learned) == [False, False, False]
    assert (learned / "checkpoint/adapter_config.json").exists() == bool(adapters)
    for task in ("dpo", "kto"):
        folder = trained(pool, learned, tmp_path, task, rows_of(task), mesh, *adapters, steps=20)
        last = read_metrics(folder)[-1]
        assert last["rewards_margin"] > 0, json.dumps(last)
        assert likelier(folder) == [True, True, True]
