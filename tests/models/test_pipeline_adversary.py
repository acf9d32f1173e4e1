"""Random programs on random pipelines have the numbers of one process: steps, evaluations, errors, a second model."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from weft.kernels import cross_entropy
from weft.mesh import ProcessMesh
from weft.models import PipelinePlan, forward_backward, parallelize
from weft.models.parallel.pipeline.step import Microbatch
from weft.models.step.find_gradients import clip_gradients, find_loss
from weft.models.step.forward_backward import divide_batch
from weft.reshard import GradientSync

from tests.models.cases import gradients_off, whole
from tests.models.test_pipeline import make
from tests.models.test_pipeline_failures import Fault, raised
from tests.support.pool import Pool

LR = 0.05


@dataclass(frozen=True)
class Program:
    """A random mesh, plan and model, and the events of a run on them."""

    axes: dict[str, int]
    plan: dict[str, Any]
    pipeline: dict[str, Any]
    family: str
    layers: int
    events: tuple[tuple[Any, ...], ...]

    @classmethod
    def of(cls, seed: int) -> Program:
        draw = random.Random(seed)
        axes = draw.choice(
            [{"pp": 2}, {"pp": 3}, {"pp": 4}, {"pp": 2, "dp": 2}, {"dp": 2, "pp": 2}, {"pp": 2, "tp": 2}]
        )
        schedule = draw.choice(["gpipe", "1f1b", "interleaved", "zero_bubble"])
        stages = axes["pp"] * (2 if schedule == "interleaved" else 1)
        layers = stages + draw.choice([0, 1, 2])
        pipeline: dict[str, Any] = {"schedule": schedule, "microbatches": draw.choice([1, 2, 4])}
        if draw.random() < 0.3:
            cuts = sorted(draw.sample(range(1, layers), stages - 1))
            pipeline["split"] = tuple(b - a for a, b in zip([0, *cuts], [*cuts, layers], strict=True))
        plan: dict[str, Any] = {"recompute": draw.choice(["none", "none", "selective", "full"])}
        if "dp" in axes:
            plan["zero"] = draw.choice([0, 1, 2, 3])
        if "tp" in axes:
            plan["sequence"] = draw.choice([False, True])
        family = draw.choice(["llama", "tied", "gpt", "qwen"])
        return cls(axes, plan, pipeline, family, layers, tuple(cls._event(draw, layers) for _ in range(7)))

    @staticmethod
    def _event(draw: random.Random, layers: int) -> tuple[Any, ...]:
        kind = draw.choice(
            ["step", "step", "step", "evaluate", "error", "error", "accumulate", "second", "sync", "copy"]
        )
        rows = draw.choice([4, 8, 8, 12])
        match kind:
            case "step":
                return kind, rows, draw.choice([1, 1, 2, 4]), draw.choice([None, 0.5])
            case "evaluate":
                return kind, draw.choice([(4, 4), (4, 3), (5, 5, 2), (8,), (3, 3, 3, 1)])
            case "error":
                place = draw.choice(
                    ["criterion", f"forward {draw.randrange(layers)}", f"backward {draw.randrange(layers)}"]
                )
                return kind, rows, place, draw.choice([0, 0, 1, 2])
        return kind, rows


def batch(rows: int, number: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, 31, (rows, 9), generator=torch.Generator().manual_seed(number))
    targets = tokens[:, 1:].clone()
    targets[0, 2:] = targets[-1, 1:4] = -100
    return tokens[:, :-1].contiguous(), targets


def alone(program: Program) -> list[float]:
    """What `run` finds, on one process."""
    models = [make(program.family, program.layers) for _ in range(2)]
    found = []
    for number, (kind, *arguments) in enumerate(program.events):
        model = models[kind == "second"]
        rows = sum(arguments[0]) if kind == "evaluate" else arguments[0]
        loss = cross_entropy(model(batch(rows, number)[0]), batch(rows, number)[1])
        if kind in ("step", "second", "accumulate", "sync"):
            loss.backward()
            if kind == "accumulate":
                second = cross_entropy(model(batch(rows, 99)[0]), batch(rows, 99)[1])
                second.backward()
                loss = loss + second.detach()
            if kind == "step" and arguments[2] is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), arguments[2])
            torch.optim.SGD(model.parameters(), LR).step()
            model.zero_grad()
        found.append(0.0 if kind in ("error", "copy") else loss.item())
    return found


def run(program: Program) -> list[str | float]:
    """The loss of each event, or an error in words; at last the names of parameters which differ from one process."""
    mesh = ProcessMesh.grid(**program.axes)
    faults: list[Fault] = []

    def made() -> nn.Module:
        model = make(program.family, program.layers)
        for kind, *arguments in program.events:
            if kind == "error" and not any(each.place == arguments[1] for each in faults):
                faults.append(Fault(mesh, arguments[1]))
                plant(faults[-1], model)
        plan = replace(model.parallel_plan(), **program.plan, pipeline=PipelinePlan(**program.pipeline))
        return parallelize(model, mesh, plan)

    models = [made(), made()]
    syncs: list[GradientSync | None] = [None, None]
    found: list[str | float] = []
    for number, (kind, *arguments) in enumerate(program.events):
        which = int(kind == "second")
        model = models[which]
        step = partial(forward_backward, model, cross_entropy, sync=syncs[which])
        loss: Any = 0.0
        match kind:
            case "step" | "second" | "accumulate" | "sync":
                if kind == "sync":
                    old = syncs[0] or vars(model).get("_gradient_sync")
                    if old is not None:
                        old.close()
                    syncs[0] = GradientSync(model)
                    step = partial(step, sync=syncs[0])
                count = arguments[1] if kind == "step" else 1
                loss = step(*batch(arguments[0], number), microbatches=count).item()
                if kind == "accumulate":
                    loss += step(*batch(arguments[0], 99)).item()
                if kind == "step" and arguments[2] is not None:
                    clip_gradients(model, arguments[2])
                torch.optim.SGD(model.parameters(), LR).step()
                model.zero_grad()
            case "evaluate":
                loss = evaluated(model, number, arguments[0])
            case "error":
                fault = next(each for each in faults if each.place == arguments[1])
                fault.armed, fault.calls, fault.call = True, 0, 0
                error = raised(partial(step, *batch(arguments[0], number)))
                fault.armed = False
                if arguments[1] == "criterion":
                    fault.armed = True
                    error = raised(
                        partial(forward_backward, model, fault.criterion, *batch(arguments[0], number), sync=syncs[0])
                    )
                    fault.armed = False
                if f"in {arguments[1]}" not in error:
                    loss = error
                model.zero_grad()
            case "copy":
                error = raised(partial(copy.deepcopy, model))
                if "cannot be copied" not in error:
                    loss = error
        found.append(loss)
    return [*found, *differing(program, models)]


def plant(fault: Fault, model: Any) -> None:
    if fault.place == "criterion":
        return
    kind, layer = fault.place.split()

    def hook(module: Any, args: Any, output: Tensor) -> None:
        if kind == "forward":
            fault.count()
        elif output.requires_grad:
            output.register_hook(lambda grad: fault.count())

    model.blocks[int(layer)].register_forward_hook(hook)


def evaluated(model: nn.Module, number: int, counts: tuple[int, ...]) -> float:
    tokens, targets = batch(sum(counts), number)
    total = (targets != -100).sum()
    parts: list[Microbatch] = [
        divide_batch(model, *each, 1, {})[0] for each in zip(tokens.split(counts), targets.split(counts), strict=True)
    ]
    return find_loss(model, lambda o, t: cross_entropy(o, t, denominator=total), parts).item()


def differing(program: Program, models: list[nn.Module]) -> list[str]:
    truths = [make(program.family, program.layers) for _ in range(2)]
    trained(program, truths)
    return [
        said
        for model, truth in zip(models, truths, strict=True)
        for said in gradients_off(
            {name: whole(p) for name, p in model.named_parameters()},
            {name: p.detach() for name, p in truth.named_parameters()},
        )
    ]


def trained(program: Program, models: list[nn.Module]) -> None:
    for number, (kind, *arguments) in enumerate(program.events):
        if kind not in ("step", "second", "accumulate", "sync"):
            continue
        model = models[kind == "second"]
        for seed in (number, 99) if kind == "accumulate" else (number,):
            cross_entropy(model(batch(arguments[0], seed)[0]), batch(arguments[0], seed)[1]).backward()
        if kind == "step" and arguments[2] is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), arguments[2])
        torch.optim.SGD(model.parameters(), LR).step()
        model.zero_grad()


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(24))
def test_a_random_program_has_the_numbers_of_one_process(seed: int, pool: Pool) -> None:
    program = Program.of(seed)
    expected = alone(program)
    ranks = 1
    for size in program.axes.values():
        ranks *= size
    for found in pool.run(run, program, ranks=ranks, timeout=120):
        assert found == pytest.approx(expected, rel=1e-5), (program, found, expected)
