"""Optimizers update an element to the same bits in a tensor of any length, and on every mesh."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from weft.mesh import Layout, ProcessMesh
from weft.reshard import Muon, distribute, exact_sums, to_global
from weft.reshard.training.exact_step import check_exact_step

from tests.support.pool import Pool

N = 419  # no multiple of a vector
CUTS = [[1] * N, [3] * 140, [7] * 60, [17] * 25, [210, 209], [5, 11, 64, 33, 1, 2, 8, 16, 31, N]]
DECAY = {"weight_decay": 0.1}
FUSED: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": lambda given: torch.optim.AdamW(given, lr=0.013, fused=True, **DECAY),
    "adamw-amsgrad": lambda given: torch.optim.AdamW(given, lr=0.013, fused=True, amsgrad=True, **DECAY),
    "adam": lambda given: torch.optim.Adam(given, lr=0.013, betas=(0.8, 0.95), fused=True, **DECAY),
    "adam-maximize": lambda given: torch.optim.Adam(given, lr=torch.tensor(0.013), fused=True, maximize=True),
    "adamw-of-muon": lambda given: Muon([{"params": given, "adamw": True}], lr=0.013),
}
# As `make_optimizer` of weft.models makes them, of float32 parameters.
LOOPS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": lambda given: torch.optim.AdamW(given, lr=0.013, **DECAY),
    "adam": lambda given: torch.optim.Adam(given, lr=0.013, **DECAY),
    "nadam": lambda given: torch.optim.NAdam(given, lr=0.013, decoupled_weight_decay=True, **DECAY),
    "radam": lambda given: torch.optim.RAdam(given, lr=0.013, decoupled_weight_decay=True, **DECAY),
    "adamax": lambda given: torch.optim.Adamax(given, lr=0.013, **DECAY),
    "adagrad": lambda given: torch.optim.Adagrad(given, lr=0.013, **DECAY),
    "adadelta": lambda given: torch.optim.Adadelta(given, lr=0.013, rho=0.95, **DECAY),
    "rmsprop": lambda given: torch.optim.RMSprop(given, lr=0.013, alpha=0.95, momentum=0.9, **DECAY),
    "rprop": lambda given: torch.optim.Rprop(given, lr=0.013),
    "asgd": lambda given: torch.optim.ASGD(given, lr=0.013, **DECAY),
    "sgd": lambda given: torch.optim.SGD(given, lr=0.013, momentum=0.9, **DECAY),
}


def drawn(seed: int, spread: float, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * (spread * torch.randn(shape, generator=generator)).exp()


def pieces(whole: Tensor, cut: list[int]) -> list[Tensor]:
    bounds = [min(each, len(whole)) for each in itertools.accumulate(cut, initial=0)]
    return [whole[first:last].clone() for first, last in itertools.pairwise(bounds) if first < last]


def stepped(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    parts: list[Tensor],
    gradients: list[list[Tensor]],
) -> list[Tensor]:
    """The weights and each state after a step by each of the gradients, in one vector each."""
    parameters = [nn.Parameter(each) for each in parts]
    optimizer = make(parameters)
    for step in gradients:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient
        optimizer.step()
    states: dict[str, list[Tensor]] = {}
    for parameter in parameters:
        for name, state in optimizer.state[parameter].items():
            if name != "step" and isinstance(state, Tensor) and state.shape == parameter.shape:
                states.setdefault(name, []).append(state)
    return [torch.cat([whole(each).flatten() for each in tensors]) for tensors in (parameters, *states.values())]


def whole(tensor: Any) -> Tensor:
    return (to_global(tensor) if hasattr(tensor, "device_mesh") else tensor).detach()


@pytest.mark.few(1)
@pytest.mark.every_value
@pytest.mark.parametrize("name", LOOPS)
def test_loops_of_torch_round_float32_elements_alike(name: str) -> None:
    weight, gradients = drawn(0, 0.0, N), [drawn(1 + step, 4.0, N) for step in range(4)]
    truth = stepped(LOOPS[name], [weight.clone()], [[each] for each in gradients])
    for cut in CUTS:
        found = stepped(LOOPS[name], pieces(weight, cut), [pieces(each, cut) for each in gradients])
        for a, b in zip(found, truth, strict=True):
            assert torch.equal(a, b)


FURTHER: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "nadam-coupled": lambda given: torch.optim.NAdam(given, lr=0.013, **DECAY),
    "radam-coupled": lambda given: torch.optim.RAdam(given, lr=0.013, **DECAY),
    "adam-without-decay": lambda given: torch.optim.Adam(given, lr=0.013),
    "sgd-without-momentum": lambda given: torch.optim.SGD(given, lr=0.013),
}
OF_TWO_BYTES = LOOPS | FURTHER


@pytest.mark.few(2)
@pytest.mark.every_value
@pytest.mark.parametrize("name", OF_TWO_BYTES)
def test_loops_of_torch_round_bfloat16_elements_alike_or_are_refused(name: str) -> None:
    make, weight, *gradients = OF_TWO_BYTES[name], *[drawn(step, 4.0 * bool(step), N).bfloat16() for step in range(5)]
    truth = stepped(make, [weight.clone()], [[each] for each in gradients])
    found = [stepped(make, pieces(weight, cut), [pieces(each, cut) for each in gradients]) for cut in CUTS]
    is_alike = all(torch.equal(a, b) for each in found for a, b in zip(each, truth, strict=True))
    optimizer = make([nn.Parameter(weight)])
    check_exact_step(optimizer)  # outside of exact sums
    with exact_sums({"dp": 2}):
        check_exact_step(make([nn.Parameter(weight.float())]))
        with nullcontext() if is_alike else pytest.raises(ValueError, match="exact dp=2 cannot be kept by"):
            check_exact_step(optimizer)


def on_one_rank(name: str, dtype: torch.dtype, exact: bool) -> list[list[Tensor]]:
    """The weights and states for each cut, the whole tensor first; the pieces are DTensors on a mesh of one rank."""
    layout = Layout(ProcessMesh.grid(dp=1))
    weight, gradients = drawn(0, 0.0, N).to(dtype), [drawn(1 + step, 4.0, N).to(dtype) for step in range(4)]
    found = []
    for cut in ([N], *CUTS):
        parts, *grads = ([distribute(each, layout) for each in pieces(given, cut)] for given in (weight, *gradients))
        with exact_sums({"dp": 1} if exact else None):
            found.append(stepped(FUSED[name], parts, grads))
    return found


@pytest.mark.exhaustive
@pytest.mark.every_value
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", FUSED)
def test_fused_steps_round_elements_alike_inside_exact_sums(name: str, dtype: torch.dtype, pool: Pool) -> None:
    [[truth, *found]] = pool.run(on_one_rank, name, dtype, True, ranks=1)
    for each in found:
        for a, b in zip(each, truth, strict=True):
            assert torch.equal(a, b)
    [[usual, *_]] = pool.run(on_one_rank, name, dtype, False, ranks=1)
    allowed = 4 * torch.finfo(dtype).eps
    for a, b in zip(truth, usual, strict=True):
        torch.testing.assert_close(a, b, rtol=allowed, atol=allowed)
    assert all(torch.equal(a[: N - N % 32], b[: N - N % 32]) for a, b in zip(truth, usual, strict=True))


SHAPES = [(37, 19), (19, 37), (11, 10), (5, 3, 7), (13,), (3,)]
MESHES: list[tuple[dict[str, int], str, str]] = [  # sizes, the layout of matrices, and of vectors
    ({"dp": 1}, "", ""),
    ({"dp": 2}, "", ""),
    ({"dp": 2}, "dp: S(0)", "dp: S(0)"),
    ({"dp": 2}, "dp: S(1)", "dp: S(0)"),
    ({"dp": 4}, "dp: S(0)", "dp: S(0)"),
    ({"dp": 4}, "dp: S(1)", ""),
    ({"dp": 2, "tp": 2}, "tp: S(0), dp: S(1)", "tp: S(0)"),
    ({"dp": 2, "tp": 2}, "tp: S(1), dp: S(1)", "dp: S(0), tp: S(0)"),
]


def by_muon(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    matrices, vectors = parameters[:4], parameters[4:]
    return Muon([{"params": matrices}, {"params": vectors, "adamw": True}], lr=0.013)


def by_adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return FUSED["adamw"](parameters)


def on_meshes(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], size: int, dtype: torch.dtype
) -> list[list[Tensor]]:
    """The weights and states on each mesh of `size` ranks."""
    found = []
    for axes, of_matrices, of_vectors in MESHES:
        mesh = ProcessMesh.grid(**axes)
        if mesh.size != size:
            continue
        layouts = [Layout(mesh, of_matrices if len(shape) > 1 else of_vectors) for shape in SHAPES]
        parts, *gradients = (
            [distribute(drawn(10 * seed + i, 2.0, *shape).to(dtype), layouts[i]) for i, shape in enumerate(SHAPES)]
            for seed in range(4)
        )
        with exact_sums({"dp": 4, "tp": 2}):
            found.append(stepped(make, parts, gradients))
    dist.barrier()
    return found


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("make", [by_adamw, by_muon])
def test_every_mesh_has_the_bits_of_one_process(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], dtype: torch.dtype, pool: Pool
) -> None:
    [[truth]] = pool.run(on_meshes, make, 1, dtype, ranks=1)
    for size in (2, 4):
        for rank in pool.run(on_meshes, make, size, dtype, ranks=size):
            for found in rank:
                for a, b in zip(found, truth, strict=True):
                    assert torch.equal(a, b)
