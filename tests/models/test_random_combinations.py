"""Random combinations of features: a run on a mesh has the numbers of the run on one process, in float64.

A seed draws a model, a task with data, adapters or frozen parameters, an optimizer, a reference, a mesh and a plan; and
whether the run is resumed on the mesh, or goes on from the mesh's checkpoint on one process. Losses, norms, held-out
losses, metrics and all tensors of the last checkpoint are compared. WEFT_COMBINATIONS names the seeds of the exhaustive
cases, 0:48 by default.
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
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from weft.kernels import cross_entropy
from weft.models import GPTConfig, LlamaConfig, MixtralConfig, QwenConfig, QwenMoeConfig
from weft.models.checks import check_tensor_parallel
from weft.models.config import ModelConfig, RotaryConfig
from weft.models.data.examples.source import find_examples
from weft.models.data.prepare import prepare
from weft.models.data.sources import find_data
from weft.models.data.tokenizer import byte_tokenizer
from weft.models.schedules.schedule import NAMES
from weft.models.train import trainer
from weft.models.train.config import DataConfig, MeshConfig, MuonConfig, OptimizerConfig, PlanConfig, TrainConfig
from weft.models.train.explanation import Outline
from weft.models.train.loop import train
from weft.models.train.metrics_file import METRICS
from weft.models.train.model_class import count_adapters
from weft.models.train.reference_table import TABLE
from weft.models.train.results import Results
from weft.models.train.run import Run, axes_of, check_reference, complete_plan
from weft.models.train.task_config import DPOConfig, KTOConfig, LoRAConfig, ReferenceMeshConfig

from tests.faults.test_exact_kills import tensors_of
from tests.support.pool import Pool

FIRST, _, LAST = os.environ.get("WEFT_COMBINATIONS", "0:48").partition(":")
STEPS = 3
EPSILON = 1e-8  # of rmsprop
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gpt", "mixtral", "qwen-moe", "qwen-moe")
KINDS = ("text", "prepared", "sft", "sft", "dpo", "dpo", "kto", "kto")
OPTIMIZERS = ("adamw", "adamw", "muon", "muon", "sgd", "nadam", "radam", "adamax", "adagrad", "rmsprop", "adam", "asgd")
TARGETS = ("*_proj", "q_proj", "down_proj", "layers.0.*_proj", "*.up_proj", "o_proj")
GPT_TARGETS = ("q_proj", "c_proj", "h.0.*", "*.c_fc")
FROZEN = ("embed", "norm", "layers.0.", "attn", "mlp", "experts", "bias")
TIMES = (
    "tokens_per_second",
    "tflops",
    "mfu",
    "memory_bytes",
    "memory_share",
    "communication_share",
    "data_share",
    "seconds_left",
)


@dataclass(frozen=True, slots=True)
class Drawn:
    """A run: its config for one process and for the mesh.

    kind: of the data. frozen: parts of names of parameters without gradients. smoothing, z_loss: of the cross-entropy
    of training steps. resumed: None, or which run takes step 1 before the rest: "alone" or "mesh".
    """

    alone: TrainConfig
    mesh: TrainConfig
    kind: str
    frozen: tuple[str, ...]
    criterion: dict[str, float]
    resumed: str | None

    def __str__(self) -> str:
        changed = [f"{self.kind}, frozen {self.frozen}, {self.criterion}, resumed {self.resumed}"]
        return "\n".join([*changed, str(self.alone), str(self.mesh.mesh), str(self.mesh.plan)])


def drawn_model(draw: random.Random, tp: int, layers: int) -> ModelConfig:
    family = draw.choice(FAMILIES)
    heads, often = tp * draw.choice((1, 2, 4)), lambda share: draw.random() < share
    sizes: dict[str, Any] = {
        "vocab_size": draw.choice((257, 258, 261, 264)),
        "num_heads": heads,
        "num_layers": layers,
        "hidden_size": heads * 2 * draw.choice((2, 3, 4)),
        "max_seq_len": 24,
        "initializer_range": 0.2,
        "tie_embeddings": often(0.3),
    }
    drops = {"dropout": draw.choice((0.0, 0.0, 0.1)), "attention_dropout": draw.choice((0.0, 0.0, 0.1))}
    inner = tp * draw.choice((3, 8, 11))
    if family == "gpt":
        extra = {"embedding_dropout": draw.choice((0.0, 0.2)), "scale_attention_by_layer": often(0.3)}
        return GPTConfig(**sizes, **drops, **extra, intermediate_size=inner)
    kv = draw.choice([n for n in range(1, heads + 1) if heads % n == 0 and (n % tp == 0 or tp % n == 0)])
    gated = {**sizes, **drops, "head_dim": draw.choice((0, 4, 6)), "num_kv_heads": kv, "intermediate_size": inner}
    window = {"sliding_window": draw.choice((1, 3, 5))} if often(0.5) else {}
    experts = {"num_experts": draw.choice((4, 8, 12)), "experts_per_token": draw.choice((1, 2, 3))}
    experts |= {"router_aux_loss_coef": draw.choice((0.0, 0.1)), "router_z_loss_coef": draw.choice((0.0, 0.01))}
    experts |= {"seq_aux": often(0.2)}
    match family:
        case "llama":
            return LlamaConfig(**gated, attention_bias=often(0.3), mlp_bias=often(0.3))
        case "mistral":
            return LlamaConfig(**gated, sliding_window=draw.choice((1, 3, 5)))
        case "qwen2" | "qwen3":
            window |= {"sliding_layers": (draw.randrange(layers),)} if window else {}
            return QwenConfig(**gated, **window, version=int(family[-1]))  # type: ignore[arg-type]
        case "mixtral":
            return MixtralConfig(**gated, **experts, **window)
    more: dict[str, Any] = {"router_score": "sigmoid", "router_bias_rate": 0.01} if often(0.4) else {}
    more |= {"expert_groups": (2, draw.choice((1, 2)))} if often(0.3) and experts["experts_per_token"] < 3 else {}
    more |= {"shared_expert_size": tp * 4, "shared_expert_gate": often(0.5)} if often(0.4) else {}
    more |= {"mlp_only_layers": (0,)} if layers > 1 and often(0.3) else {}
    more |= {"norm_topk_prob": often(0.5), "attention_bias": often(0.3), "router_scale": draw.choice((1.0, 1.5))}
    return QwenMoeConfig(**gated, **experts, **window, **more, moe_intermediate_size=tp * draw.choice((2, 5)))


def drawn_sizes(draw: random.Random, *factors: int) -> dict[str, int]:
    sizes = dict.fromkeys(("pp", "dp", "cp", "tp"), 1)
    for factor in factors:
        sizes[draw.choice(("pp", "dp", "cp", "tp"))] *= factor
    return sizes


def draw_case(seed: int) -> Drawn:
    draw = random.Random(seed)

    def often(share: float) -> bool:
        return draw.random() < share

    sizes = drawn_sizes(draw, *draw.choice(((2,), (2,), (3,), *[(2, 2)] * 5)))
    pp, dp, cp, tp = sizes.values()
    kind = draw.choice(KINDS)
    adapted = often(0.35)
    schedule = draw.choice(NAMES)
    layers = max(2, pp * (2 if schedule == "interleaved" else 1), draw.choice((1, 2, 3)))
    model = drawn_model(draw, tp, layers)
    rows, microbatches = draw.choice((1, 2, 3, 4, 5)), draw.choice((1, 2, 3, 4) if pp > 1 else (1, 1, 1, 2, 3))
    experts, mesh = getattr(model, "num_experts", 1), MeshConfig(**sizes)
    plan: dict[str, Any] = {"microbatches": microbatches, "zero": draw.choice((0, 1, 2, 3)), "sequence": often(0.5)}
    plan |= {"recompute": draw.choice(("none", "selective", "full"))}
    heads = (model.num_heads, getattr(model, "num_kv_heads", model.num_heads))
    contexts = ("all_gather", "ulysses") if not any(each % (cp * tp) for each in heads) else ("all_gather",)
    plan |= {"context": draw.choice(contexts)} if cp > 1 else {}
    plan |= {"schedule": schedule} if pp > 1 else {}
    over_tp = often(0.5)
    fitting = [n for n in (2, 3, 4) if experts % n == 0 and (dp * cp * (tp if over_tp else 1)) % n == 0]
    if experts > 1 and fitting and often(0.8):
        mesh = replace(mesh, ep=draw.choice(fitting))
        plan |= {"experts_over_tp": over_tp, "experts_tokens": draw.choice(("exchange", "gather"))}
    kto, dpo, further = KTOConfig(), DPOConfig(), dict[str, Any]()
    task = kind if kind in ("sft", "dpo", "kto") else "pretrain"
    if task == "dpo":
        dpo = DPOConfig(beta=0.3, loss=draw.choice(("sigmoid", "ipo")), length_normalized=often(0.4))
        dpo = replace(dpo, label_smoothing=0.1) if dpo.loss == "sigmoid" and often(0.4) else dpo
    if task == "kto":
        kto = KTOConfig(beta=0.3, desirable_weight=1.5, undesirable_weight=draw.choice((0.0, 1.0)))
    of_mesh: dict[str, Any] = {}
    if task in ("dpo", "kto"):
        further["reference"] = draw.choice(("model", "model", "precomputed", "adapters" if adapted else "model"))
        if further["reference"] != "adapters":
            of_mesh["reference_zero"] = draw.choice((None, 0, 3))
            if often(0.5) and math.prod(sizes.values()) == 4:
                of_mesh["reference_mesh"] = ReferenceMeshConfig(**drawn_sizes(draw, 2, 2))
    # Adapters of experts have no dropout.
    dropout = draw.choice((0.0, 0.1)) if experts == 1 else 0.0
    names = TARGETS if isinstance(model, RotaryConfig) else GPT_TARGETS
    lora = LoRAConfig(rank=3, alpha=6.0, dropout=dropout, targets=tuple(draw.sample(names, draw.choice((1, 2)))))
    kinds = ("dropout", "attention_dropout", "embedding_dropout")
    drops = any(getattr(model, each, 0.0) for each in kinds) or (adapted and lora.dropout)
    name = draw.choice(OPTIMIZERS)
    muon = MuonConfig(split_heads=often(0.5), nesterov=often(0.5), ns_steps=3) if name == "muon" else MuonConfig()
    alone = TrainConfig(
        model=model,
        task=task,  # type: ignore[arg-type]
        steps=STEPS,
        seed=seed,
        check=often(0.3),
        save_every=1,
        keep=0,
        log_every=draw.choice((1, 3)),
        eval_every=draw.choice((0, 1, 2)),
        data=DataConfig(
            batch_size=rows * microbatches,
            sequence_length=draw.choice((13, 15, 16, 24) if kind in ("sft", "dpo", "kto") else (7, 12, 15, 16, 24)),
            pack=often(0.7),
        ),
        optimizer=OptimizerConfig(
            name=name,
            lr=1e-2,
            warmup_steps=1,
            clip_norm=draw.choice((0.0, 0.1, 1.0, math.inf)),
            weight_decay=draw.choice((0.0, 0.1)),
            muon=muon,
        ),
        lora=lora if adapted else LoRAConfig(),
        dpo=dpo,
        kto=kto,
        mesh=MeshConfig(dp=1, tp=1),
        plan=PlanConfig(microbatches=microbatches if experts > 1 or drops else draw.choice((1, microbatches))),
        **further,
    )
    frozen = () if adapted or often(0.7) else tuple(draw.sample(FROZEN, draw.choice((1, 2))))
    criterion = {}
    if task in ("pretrain", "sft") and often(0.5):
        criterion = {"label_smoothing": draw.choice((0.0, 0.1)), "z_loss": draw.choice((0.0, 0.01))}
    resumed = draw.choice((None, None, "alone", "mesh"))
    return Drawn(alone, replace(alone, mesh=mesh, plan=PlanConfig(**plan), **of_mesh), kind, frozen, criterion, resumed)


@cache
def data_in(folder: Path, kind: str, length: int) -> Any:
    if kind == "text":
        return find_data(folder / "text.txt")
    if kind == "prepared":
        return find_data(folder / "prepared")
    tokenizer = byte_tokenizer()
    return find_examples(folder / f"{kind}.jsonl", task=kind, tokenizer=tokenizer, template=None, length=length)  # type: ignore[arg-type]


def make_data(folder: Path) -> None:
    (folder / "text.txt").write_text(" ".join(str(number / 7) for number in range(300)))
    lines = [json.dumps({"text": f"{number} is" + " indeed" * (number % 3)}) for number in range(200)]
    (folder / "in.jsonl").write_text("\n".join(lines))
    prepare([folder / "in.jsonl"], folder / "prepared", tokenizer=byte_tokenizer(), part_bytes=3000)
    asked = [f"{n}:" + "?" * (n % 5) for n in range(61)]
    answers = {
        "sft": [{"prompt": each, "completion": str(n**2) * (1 + n % 2)} for n, each in enumerate(asked)],
        "dpo": [{"prompt": each, "chosen": str(n**2), "rejected": "no" * (1 + n % 3)} for n, each in enumerate(asked)],
        "kto": [{"prompt": p, "completion": str(n * 7), "label": n % 3 > 0} for n, p in enumerate(asked)],
    }
    for kind, each in answers.items():
        (folder / f"{kind}.jsonl").write_text("\n".join(map(json.dumps, each)))


def in_float64(case: Drawn) -> list[Any]:
    """Patches by which a run computes in float64, with the case's frozen parameters and cross-entropy."""
    make, criterion_of = Outline.make_model, Outline.token_criterion

    def model_of(outline: Outline) -> nn.Module:
        model = make(outline).double()
        for name, parameter in model.named_parameters():
            if any(part in name for part in case.frozen):
                parameter.requires_grad_(False)
        return model

    def criterion(outline: Outline, denominator: float) -> Any:
        if not case.criterion:
            return criterion_of(outline, denominator)
        return outline.with_routers(partial(cross_entropy, denominator=denominator, **case.criterion))

    double = property(lambda outline: torch.float64)
    return [
        patch.object(Outline, "make_model", model_of),
        patch.object(Outline, "token_criterion", criterion),
        patch.object(Outline, "reduce_dtype", double),
        patch.object(Results, "picture", return_value=""),
        patch.object(trainer, "SAMPLE_TOKENS", 2),
    ]


def complete(case: Drawn, on_mesh: bool, data: Path, folder: Path, resume: Path | None) -> tuple[str, str]:
    """Trains on this rank. Returns the error that refused the run, or "", and the printed text."""
    config = case.mesh if on_mesh else case.alone
    mesh = config.mesh
    sizes = {"pp": mesh.pp, "dp": mesh.dp or 1, "cp": mesh.cp, "tp": mesh.tp or 1}
    axes = {axis: size for axis, size in sizes.items() if axis != "pp"}
    torch.manual_seed(0)
    printed = io.StringIO()
    try:
        with contextlib.ExitStack() as stack:
            for each in in_float64(case):
                stack.enter_context(each)
            check_tensor_parallel(config.model, axes["tp"])
            config = replace(config, plan=complete_plan(config.plan, config, **axes), resume=resume and "newest")
            count_adapters(config)
            check_reference(config, axes_of(**sizes))
            corpus = data_in(data, case.kind, config.data.sequence_length)
            run = Run(recipe="llama-tiny", config=config, corpus=corpus, folder=folder, resume=resume, **sizes)
            stack.enter_context(contextlib.redirect_stdout(printed))
            assert train(run, torch.device("cpu")) == 0
    except ValueError as error:
        return f"{type(error).__name__}: {error}", printed.getvalue()
    return "", printed.getvalue()


def lines_of(folder: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (folder / METRICS).read_text().splitlines())
    return [{name: value for name, value in line.items() if not name.startswith(TIMES)} for line in lines]


def differences(found: Path, truth: Path, allowed: float) -> list[str]:
    """How the metrics and the last checkpoint of a run differ from the run's on one process. allowed: relative."""
    wrong = []
    ours, theirs = lines_of(found), lines_of(truth)
    if [line["step"] for line in ours] != [line["step"] for line in theirs]:
        return [f"steps {ours} beside {theirs}"]
    for mine, line in zip(ours, theirs, strict=True):
        for name in line.keys() | mine.keys():
            a, b = mine.get(name), line.get(name)
            if name == "rewards_accuracy" and line["step"] == 1 and abs(line["rewards_margin"] or 0) <= allowed:
                continue  # the policy is the reference: which margins are above 0 is rounding
            are_floats = isinstance(a, float) and isinstance(b, float)
            if not (math.isclose(a, b, rel_tol=10 * allowed, abs_tol=allowed) if are_floats else a == b):
                wrong.append(f"step {line['step']}: {name} is {a!r} beside {b!r}")
    tensors, wanted = (tensors_of(each / f"checkpoint-{STEPS}") for each in (found, truth))
    if tensors.keys() != wanted.keys():
        return [*wrong, f"tensors {sorted(tensors.keys() ^ wanted.keys())}"]
    for name, value in wanted.items():
        squares = wanted.get(name.replace("momentum_buffer", "square_avg")) if "momentum_buffer" in name else None
        # rmsprop's momentum is of updates, whose scale is 1. A gradient of 0 but for rounding is divided by epsilon.
        is_noise = squares is not None and squares.max().item() < EPSILON**2
        scale = 1e-6 if "optimizer" in name and not is_noise else 1.0
        off = (tensors[name].double() - value.double()).abs().max().item() if value.numel() else 0.0
        if not off <= allowed * max(value.double().abs().max().item(), scale):
            wrong.append(f"{name} is off by {off} of {value.double().abs().max().item()}")
    return wrong


def step_of(run: Path, folder: Path) -> Path:
    """Begin the folder of a run that continues the checkpoint of step 1 of `run`."""
    folder.mkdir()
    shutil.copytree(run / "checkpoint-1", folder / "checkpoint-1")
    first = (run / METRICS).read_text().splitlines(keepends=True)[:1]
    (folder / METRICS).write_text("".join(first))
    if (run / TABLE).exists():
        shutil.copy(run / TABLE, folder)
    return folder / "checkpoint-1"


def check(pool: Pool, case: Drawn, folder: Path) -> str:
    """Compare the runs. Returns "same", or the refusal; raises AssertionError for differences."""
    make_data(folder)
    ranks = case.mesh.mesh.pp * (case.mesh.mesh.dp or 1) * case.mesh.mesh.cp * (case.mesh.mesh.tp or 1)
    ((refused, _),) = pool.run(complete, case, False, folder, folder / "alone", None, ranks=1)
    if refused:
        return f"refused on one process: {refused}"
    resume = step_of(folder / "alone", folder / "mesh") if case.resumed == "alone" else None
    for kept in folder.glob(".reference-*"):  # the mesh computes a precomputed reference by itself
        kept.unlink()
    found = pool.run(complete, case, True, folder, folder / "mesh", resume, ranks=ranks)
    errors = {each for each, _ in found}
    assert len(errors) == 1, f"some ranks refuse: {errors}"
    if refused := errors.pop():
        return f"refused: {refused}"
    allowed = 1e-5 if case.mesh.reference == "precomputed" else 1e-7  # the table is float32
    wrong = differences(folder / "mesh", folder / "alone", allowed)
    wrong += [line for line in found[0][1].splitlines() if "NOT" in line]
    if case.resumed == "mesh":
        resume = step_of(folder / "mesh", folder / "again")
        ((refused, _),) = pool.run(complete, case, False, folder, folder / "again", resume, ranks=1)
        wrong += (
            [refused]
            if refused
            else [f"again: {each}" for each in differences(folder / "again", folder / "alone", allowed)]
        )
    assert not wrong, "\n".join(wrong[:12])
    return "same"


QUICK = (0, 1)  # a GPT whose rows of dpo are longer than its last position; a mixture in stages


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", QUICK)
def test_a_combination_has_the_numbers_of_a_process(seed: int, pool: Pool, tmp_path: Path) -> None:
    assert check(pool, draw_case(seed), tmp_path) == "same"


@pytest.mark.exhaustive
@pytest.mark.parametrize("task", ["dpo", "kto"])
def test_a_gpt_takes_preferences_up_to_its_last_position(task: str, pool: Pool, tmp_path: Path) -> None:
    """Also in the padding of rows of dpo, which have room for two sequences."""
    case = draw_case(0)
    data = replace(case.alone.data, sequence_length=24)
    alone, mesh = (replace(each, data=data, task=task, dpo=DPOConfig()) for each in (case.alone, case.mesh))
    assert check(pool, replace(case, alone=alone, mesh=mesh, kind=task), tmp_path) == "same"


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(int(FIRST), int(LAST)))
def test_a_random_combination_has_the_numbers_of_a_process(seed: int, pool: Pool, tmp_path: Path) -> None:
    print(check(pool, draw_case(seed), tmp_path))
