"""Random runs of `weft train` with `exact`: a random mesh and plan has the bytes of the smallest mesh, or is refused.

A seed draws a model, a task, an optimizer, dtypes, data, microbatches and the named mesh, then two meshes with plans of
their own. The losses, the norms, the held-out losses, the digests, the tensors of the last checkpoint and the
exported files are compared. WEFT_EXACT_SEEDS names the seeds of the exhaustive cases, 0:24 by default.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import random
import shutil
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from weft.models import GPTConfig, LlamaConfig, MixtralConfig, QwenConfig, QwenMoeConfig
from weft.models.compare.report import compare_digests, describe, read_runs, verdict_of
from weft.models.config import ModelConfig
from weft.models.data.examples.source import find_examples
from weft.models.data.prepare import prepare
from weft.models.data.sources import find_data
from weft.models.data.tokenizer import byte_tokenizer
from weft.models.schedules.schedule import NAMES
from weft.models.train import trainer
from weft.models.train.config import DataConfig, MeshConfig, OptimizerConfig, PlanConfig, TrainConfig
from weft.models.train.loop import train
from weft.models.train.metrics_file import METRICS
from weft.models.train.results import Results
from weft.models.train.run import Run, complete_plan
from weft.models.train.task_config import LoRAConfig

from tests.faults.test_exact_kills import tensors_of
from tests.support.pool import Pool

FIRST, _, LAST = os.environ.get("WEFT_EXACT_SEEDS", "0:24").partition(":")
STEPS = 3
NAMED = ("dp=4,tp=2", "dp=2,tp=2", "dp=8", "tp=2", "dp=4", "dp=2,cp=2", "cp=2,tp=2", "dp=2,cp=2,tp=2")
SIZES: dict[str, Any] = {"vocab_size": 257, "num_heads": 4, "max_seq_len": 16}
FAMILIES = ("llama", "qwen2", "qwen3", "gpt", "mixtral", "qwen-moe")
OPTIMIZERS = ("adamw", "adamw", "adamw", "muon", "muon", "sgd", "nadam", "radam", "adamax", "adagrad", "rmsprop")
KINDS = ("text", "text", "prepared", "sft", "unpacked-sft")


@dataclass(frozen=True, slots=True)
class Drawn:
    """kind: of the data. ways: the smallest mesh, then two further ones; of each the mesh's sizes and the plan."""

    config: TrainConfig
    kind: str
    ways: tuple[tuple[dict[str, int], dict[str, Any]], ...]
    is_resumed: bool  # each further run continues the smallest mesh's checkpoint of step 1


def drawn_model(draw: random.Random, layers: int, trained_whole: bool) -> ModelConfig:
    family = draw.choice(FAMILIES)
    sizes = {**SIZES, "num_layers": layers, "hidden_size": draw.choice((16, 24, 36)), "initializer_range": 0.2}
    drops = {"dropout": draw.choice((0.0, 0.1)), "attention_dropout": draw.choice((0.0, 0.1))}
    tied = {"tie_embeddings": draw.random() < 0.3 and trained_whole}
    if family == "gpt":
        return GPTConfig(**sizes, **drops, **tied, intermediate_size=draw.choice((32, 44)))
    heads = {"head_dim": draw.choice((4, 6, 8)), "num_kv_heads": draw.choice((2, 4))}
    gated = {**sizes, **heads, **tied, "intermediate_size": draw.choice((24, 44))}
    experts = {"num_experts": 4, "experts_per_token": draw.choice((1, 2)), "router_z_loss_coef": 0.01}
    window = {"sliding_window": 5, "sliding_layers": (0,)} if draw.random() < 0.4 else {}
    match family:
        case "llama":
            return LlamaConfig(**gated, **drops)
        case "qwen2":
            return QwenConfig(**gated, **drops, **window, version=2)
        case "qwen3":
            return QwenConfig(**gated, **drops, **window, attention_bias=draw.random() < 0.5)
        case "mixtral":
            return MixtralConfig(**gated, **experts)
    sigmoid = {"router_score": "sigmoid", "router_bias_rate": 0.01, "expert_groups": (2, 1)}
    shared = {"shared_expert_size": 12, "shared_expert_gate": draw.random() < 0.5}
    more = {**(sigmoid if draw.random() < 0.5 else {}), **(shared if draw.random() < 0.5 else {})}
    return QwenMoeConfig(**gated, **experts, **more, moe_intermediate_size=draw.choice((12, 20)))


def divided(named: dict[str, int], draw: random.Random, most: int) -> dict[str, int]:
    """A mesh within the named one with at most `most` ranks; cp has the named size."""
    while True:
        sizes = {axis: draw.choice([n for n in (1, 2, 4, 8) if named.get(axis, 1) % n == 0]) for axis in ("dp", "tp")}
        sizes["cp"] = named.get("cp", 1)
        if math.prod(sizes.values()) <= most:
            return sizes


def draw_case(seed: int) -> Drawn:
    draw = random.Random(seed)
    exact = draw.choice(NAMED)
    named = {axis: int(size) for axis, _, size in (item.partition("=") for item in exact.split(","))}
    kind, adapted, is_resumed = draw.choice(KINDS), draw.random() < 0.25, draw.random() < 0.3
    most_stages = draw.choice((1, 2, 2, 3, 4))
    layers = max(2, most_stages * draw.choice((1, 2)))
    microbatches = draw.choice((1, 2, 4))
    rows = named.get("dp", 1) * microbatches * draw.choice((1, 2))
    levels = (0, 1, 2, 3) if microbatches == 1 else draw.choice(((0, 1), (2, 3)))
    context = draw.choice(("all_gather", "ulysses")) if "cp" in named else None
    if context == "ulysses" and "tp" in named:
        context = "all_gather"
    # Adapters of experts have no dropout, and are refused with `exact`.
    targets, dropout = draw.choice((("*_proj", 0.0), ("q_proj", 0.0), ("q_proj", 0.1)))
    lora = LoRAConfig(rank=4, dropout=dropout, targets=(targets,))
    config = TrainConfig(
        model=drawn_model(draw, layers, not adapted),
        task="sft" if kind.endswith("sft") else "pretrain",
        steps=STEPS,
        seed=seed,
        check=False,
        save_every=1 if is_resumed else STEPS,
        log_every=1,
        digests=1,
        dtype=draw.choice(("float32", "float32", "bfloat16")),
        reduce_dtype=draw.choice(("float32", "float32", "float32", "bfloat16")),
        data=DataConfig(batch_size=rows, sequence_length=16, pack=kind != "unpacked-sft"),
        optimizer=OptimizerConfig(
            name=draw.choice(OPTIMIZERS), lr=1e-2, warmup_steps=1, clip_norm=draw.choice((0.0, 0.1, 1.0, math.inf))
        ),
        lora=lora if adapted else LoRAConfig(),
    )
    ways: list[Any] = []
    for number in range(3):
        pp = draw.choice([n for n in (1, 2, 3, 4) if n <= most_stages]) if number else 1
        sizes = {"pp": pp, **divided(named, draw, 8 // pp)} if number else {"pp": 1, "cp": named.get("cp", 1)}
        plan = {"exact": exact, "microbatches": microbatches, "zero": draw.choice(levels), "context": context}
        plan |= {"sequence": draw.random() < 0.5, "recompute": draw.choice(("none", "selective", "full"))}
        if pp > 1:
            plan["schedule"] = draw.choice([name for name in NAMES if name != "interleaved" or layers >= 2 * pp])
        ways.append(({"pp": 1, "dp": 1, "cp": 1, "tp": 1, **sizes}, plan))
    return Drawn(config, kind, tuple(ways), is_resumed)


@cache
def data_in(folder: Path, kind: str) -> Any:
    if kind == "text":
        return find_data(folder / "text.txt")
    if kind == "prepared":
        return find_data(folder / "prepared")
    return find_examples(
        folder / "answers.jsonl", task="sft", tokenizer=byte_tokenizer(), template=None, length=SIZES["max_seq_len"]
    )


def make_data(folder: Path) -> None:
    (folder / "text.txt").write_text(" ".join(str(number / 7) for number in range(300)))
    lines = [json.dumps({"text": f"{number} is" + " indeed" * (number % 3)}) for number in range(300)]
    (folder / "in.jsonl").write_text("\n".join(lines))
    prepare([folder / "in.jsonl"], folder / "prepared", tokenizer=byte_tokenizer(), part_bytes=3000)
    pairs = [{"prompt": f"{n}:", "completion": str(n**2) * (1 + n % 2)} for n in range(300)]
    (folder / "answers.jsonl").write_text("\n".join(map(json.dumps, pairs)))


def complete(case: Drawn, way: int, data: Path, folder: Path, resume: Path | None) -> str:
    """Trains on this rank. Returns the error that refused the run, or ""."""
    sizes, plan = case.ways[way]
    config = replace(case.config, mesh=MeshConfig(**sizes), plan=PlanConfig(**plan), resume=resume and "newest")
    axes = {axis: size for axis, size in sizes.items() if axis != "pp"}
    try:
        config = replace(config, plan=complete_plan(config.plan, config, **axes))
        run = Run(
            recipe="llama-tiny", config=config, corpus=data_in(data, case.kind), folder=folder, resume=resume, **sizes
        )
        without = patch.object(Results, "picture", return_value=""), patch.object(trainer, "SAMPLE_TOKENS", 1)
        with contextlib.redirect_stdout(io.StringIO()), without[0], without[1]:
            assert train(run, torch.device("cpu")) == 0
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def lines_of(folder: Path) -> dict[int, Any]:
    lines = map(json.loads, (folder / METRICS).read_text().splitlines())
    fields = ("loss", "grad_norm", "held_out_loss", "balance", "z")
    return {line["step"]: [line.get(name) for name in fields] for line in lines}


def check_same(found: Path, truth: Path) -> None:
    ours, theirs = lines_of(found), lines_of(truth)
    assert list(ours) == list(range(1, STEPS + 1)) and ours == theirs
    tensors, wanted = (tensors_of(each / f"checkpoint-{STEPS}") for each in (found, truth))
    assert tensors.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(tensors[name], wanted[name])] == []
    exported = sorted(each.name for each in (truth / "checkpoint").glob("*.safetensors"))
    assert exported
    for name in exported:
        assert (found / "checkpoint" / name).read_bytes() == (truth / "checkpoint" / name).read_bytes(), name
    judge = compare_digests(read_runs([truth, found]))
    assert verdict_of(judge) == "the same bits" and judge.exact, describe(judge, ("truth", "found"))


def check(pool: Pool, case: Drawn, folder: Path) -> str:
    """Compares each further way with the first. Returns "same", or the refusal of all ways."""
    make_data(folder)
    answers = []
    for way, (sizes, _) in enumerate(case.ways):
        run, resume = folder / f"{way}", None
        if way and case.is_resumed and answers == [""] * way:
            run.mkdir()
            shutil.copytree(folder / "0" / "checkpoint-1", run / "checkpoint-1")
            first = (folder / "0" / METRICS).read_text().splitlines(keepends=True)[:1]
            (run / METRICS).write_text("".join(first))
            resume = run / "checkpoint-1"
        found = set(pool.run(complete, case, way, folder, run, resume, ranks=math.prod(sizes.values())))
        assert len(found) == 1, found
        answers += found
    if answers[0]:
        assert len(set(answers)) == 1, answers
        return answers[0]
    assert answers == [""] * len(case.ways), answers
    for way in range(1, len(case.ways)):
        try:
            check_same(folder / f"{way}", folder / "0")
        except AssertionError as error:
            raise AssertionError(f"{case.ways[way]} beside {case.ways[0]}, {case}: {error}") from None
    return "same"


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(int(FIRST), int(LAST)))
def test_a_random_exact_run_has_the_bytes_of_the_smallest_mesh(seed: int, pool: Pool, tmp_path: Path) -> None:
    print(check(pool, draw_case(seed), tmp_path))
