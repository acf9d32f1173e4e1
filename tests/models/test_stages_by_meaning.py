"""Stages without a schedule: all ranks run the same program, whose two halves are on separate meshes."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from weft.kernels import cross_entropy, gelu, linear
from weft.mesh import Layout, ProcessMesh
from weft.reshard import GradientSync, clip_grad_norm_, distribute, reshard

from tests.models.cases import gradients_off, whole

FIRST, SECOND = ProcessMesh.grid(tp=2), ProcessMesh.grid(tp=3, first_rank=2)  # rank 5 is on neither
PLACED = {"up": (FIRST, "tp: S(0)"), "down": (FIRST, "tp: S(1)"), "head": (SECOND, "tp: S(0)")}
PRODUCTS = ("mm", "addmm", "linear", "bmm")
MAKES_A_NUMBER = {"new_empty", "zeros", "lift_fresh"}  # and computes none


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Program:
    """Two products on two ranks, and a head of seven classes on three more ranks; or everything on a process."""

    def __init__(self, *, alone: bool) -> None:
        sizes = {"up": (6, 4), "down": (4, 6), "head": (7, 4)}
        plain = {name: normal(seed, *shape) for seed, (name, shape) in enumerate(sizes.items())}
        self.alone = alone
        self.inputs = {seed: normal(seed, 5, 4) for seed in (11, 12)}
        self.targets = {seed: each[:, 0].gt(0).long() + 5 for seed, each in self.inputs.items()}
        self.weights = {name: self.laid(each, *PLACED[name]).requires_grad_() for name, each in plain.items()}

    def laid(self, x: Tensor, mesh: ProcessMesh, placements: str) -> Tensor:
        return x if self.alone else distribute(x, Layout(mesh, placements))

    def brought(self, x: Tensor, mesh: ProcessMesh) -> Tensor:
        return x if self.alone else reshard(x, mesh, "")

    def stream(self, seed: int) -> Tensor:
        """The first stage's output, on the second stage's mesh."""
        x = self.laid(self.inputs[seed], FIRST, "")
        hidden = linear(gelu(linear(x, self.weights["up"])), self.weights["down"])
        return self.brought(self.brought(hidden, FIRST), SECOND)

    def loss(self, stream: Tensor, seed: int) -> Tensor:
        return cross_entropy(linear(stream, self.weights["head"]), self.laid(self.targets[seed], SECOND, ""))


def in_microbatches(program: Program) -> None:
    for seed in (11, 12):
        loss = program.loss(program.stream(seed), seed)
        loss.backward()


def with_a_gradient_that_the_caller_holds(program: Program) -> None:
    loss = program.loss(program.stream(11), 11)
    held = program.laid(torch.tensor(0.5), SECOND, "")
    loss.backward(held)
    loss = program.loss(program.stream(12), 12)
    loss.backward(held)


def with_a_retained_graph(program: Program) -> None:
    loss = program.loss(program.stream(11), 11)
    loss.backward(retain_graph=True)
    loss.backward()


def with_an_output_used_twice(program: Program) -> None:
    stream = program.stream(11)
    torch.autograd.backward([program.loss(stream, 11), program.loss(stream, 12)])


class Launched(TorchDispatchMode):
    """Counts the ops that torch runs: in `numbers` ops whose results are single numbers, in `ops` all further ops.

    A scalar is empty under no layout. So a rank outside the mesh of the loss holds a number for the loss, and a number
    for the gradient; neither is read.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ops: Counter[str] = Counter()
        self.numbers: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        output = func(*args, **(kwargs or {}))
        made = [each for each in tree_leaves(output) if isinstance(each, Tensor) and not isinstance(each, FakeTensor)]
        if any(each.numel() > 1 for each in made):
            self.ops[func._opname] += 1
        elif made and all(each.numel() for each in made):
            self.numbers[func._opname] += 1
        return output


def on_stages(act: Callable[[Program], None]) -> dict[str, Any]:
    program = Program(alone=False)
    with Launched() as launched:
        act(program)
    local = {name: each.to_local() for name, each in program.weights.items()}
    gradients = {name: each.grad for name, each in program.weights.items()}
    assert all(isinstance(each, DTensor) for each in gradients.values())
    return {
        "products": sum(launched.ops[op] for op in PRODUCTS),
        "ops": dict(launched.ops),
        "numbers": dict(launched.numbers),
        "bytes": {name: each.nbytes + gradients[name].to_local().nbytes for name, each in local.items()},
        "gradients": {n: whole(each) for n, each in gradients.items() if dist.get_rank() in PLACED[n][0]},
    }


@pytest.mark.parametrize(
    ("act", "forwards", "backwards"),
    [
        pytest.param(in_microbatches, 2, 2, id="microbatches"),
        pytest.param(with_a_gradient_that_the_caller_holds, 2, 2, id="held"),
        pytest.param(with_a_retained_graph, 1, 2, id="retained"),
        pytest.param(with_an_output_used_twice, 1, 1, id="used-twice"),
    ],
)
def test_paddle_58126_stages_of_several_degrees(act: Any, forwards: int, backwards: int, pool: Any) -> None:
    """Gradients equal a single process's; a rank outside a stage holds 0 bytes of the stage, and launches nothing."""
    alone = Program(alone=True)
    act(alone)
    truth = {name: each.grad for name, each in alone.weights.items()}
    found = pool.run(on_stages, act, ranks=6)
    heads = 2 if act is with_an_output_used_twice else 1
    for rank, each in enumerate(found):
        assert not gradients_off(each["gradients"], truth)
        for name, (mesh, _) in PLACED.items():
            assert (each["bytes"][name] > 0) == (rank in mesh)
        first, second = 2 * forwards + 3 * backwards, heads * (forwards + 2 * backwards)
        assert each["products"] == (first if rank in FIRST else second if rank in SECOND else 0), each["ops"]
    assert found[5]["ops"] == {}
    assert found[5]["numbers"].keys() <= MAKES_A_NUMBER, found[5]["numbers"]


CLIP, EVERY_STAGE = 0.1, ProcessMesh.grid(stages=5)


def stage_alone(program: Program, seed: int) -> float:
    """This rank's stage of a microbatch, forward and backward; returns the loss, which the second stage computes."""
    rank, shape = dist.get_rank(), program.inputs[seed].shape
    if rank in FIRST:
        stream = program.stream(seed)
        stream.backward(distribute(torch.empty(shape), Layout(SECOND, "")))  # on a rank outside the second stage
        return 0.0
    received = distribute(torch.empty(shape), Layout(FIRST, "")).requires_grad_()
    stream = reshard(received, SECOND, "")
    # The backward of the reshard returns the gradient in the layout of the first stage.
    loss = program.loss(reshard(stream, SECOND, ""), seed)
    loss.backward()
    return float(whole(loss))


def steps(alone: bool) -> dict[str, Any]:
    """Three clipped steps of two microbatches: on a process (alone), or on two stages, where a rank runs a stage."""
    program, rank = Program(alone=alone), 0 if alone else dist.get_rank()
    model = nn.Module()
    for name, weight in program.weights.items():
        if alone or rank in PLACED[name][0]:
            model.register_parameter(name, nn.Parameter(weight.detach()))
            program.weights[name] = model.get_parameter(name)
    if not alone and rank not in EVERY_STAGE:
        return {}
    sync, losses, norms = GradientSync(model), [], []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    for _ in range(3):
        for seed in (11, 12):
            with sync.paused() if seed == 11 else contextlib.nullcontext():
                if alone:
                    loss = program.loss(program.stream(seed), seed)
                    loss.backward()
                    losses.append(loss.item())
                else:
                    losses.append(stage_alone(program, seed))
        sync.wait()
        norms.append(float(clip_grad_norm_(model.parameters(), CLIP, mesh=None if alone else EVERY_STAGE)))
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "norms": norms, "weights": {name: whole(each) for name, each in model.named_parameters()}}


def test_each_rank_trains_its_own_stage_alone(pool: Any) -> None:
    truth, found = steps(alone=True), pool.run(steps, False, ranks=6)
    assert min(truth["norms"]) > 2 * CLIP  # the clipping bites
    for rank, each in enumerate(found[:5]):
        assert each["weights"].keys() == ({"up", "down"} if rank in FIRST else {"head"})
        assert each["losses"] == pytest.approx([0.0] * 6 if rank in FIRST else truth["losses"], rel=1e-5)
        assert each["norms"] == pytest.approx(truth["norms"], rel=1e-5)
        for name, weight in each["weights"].items():
            torch.testing.assert_close(weight, truth["weights"][name], rtol=1e-5, atol=1e-6, msg=name)
    assert found[5] == {}  # a rank without a stage runs nothing
