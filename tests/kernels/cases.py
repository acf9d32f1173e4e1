"""Shared by the tests of ops on DTensors: meshes, tensors, and a global tensor's parts."""

import re

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from weft.mesh import Layout, ProcessMesh
from weft.reshard import layout_of

from tests.support.shards import rebuild

TWO, FOUR = ProcessMesh.grid(tp=2), ProcessMesh.grid(tp=4)
GRID = ProcessMesh.grid(dp=2, tp=2)
REMEDY = r"reshard|give it a layout with distribute\(\)|sizes that work"


def normal(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def ints(below: int, *shape: int) -> Tensor:
    return torch.randint(0, below, shape, generator=torch.Generator().manual_seed(below))


def upstream_of(shape: torch.Size) -> Tensor:
    return normal(*shape, seed=7)


def told(tensor: DTensor) -> tuple[str, object]:
    """The layout and this rank's part, as values that a worker can send."""
    return str(layout_of(tensor)), tensor.detach().to_local().numpy()


def whole(parts: list[tuple[str, object]], mesh: ProcessMesh, shape: torch.Size) -> Tensor:
    """The global tensor of the ranks' parts; asserts the same layout on all ranks, and bitwise equal replicas."""
    (layout,) = {text for text, _ in parts}
    return rebuild(
        {rank: torch.from_numpy(local) for rank, (_, local) in enumerate(parts)}, Layout(mesh, layout), shape
    )


def torch_cross_entropy(logits: Tensor, target: Tensor, **options: object) -> Tensor:
    loss = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), target.reshape(-1), **options)  # type: ignore[arg-type]
    return loss.view(target.shape) if options["reduction"] == "none" else loss


def assert_names_a_remedy(message):
    assert re.search(REMEDY, message), message


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Each pair as a complex number, times exp(i angle)."""
    pairs = x.unflatten(-1, (-1, 2, cos.shape[-1])).transpose(-1, -2)  # [..., T, heads, D / 2, 2]
    angle = torch.complex(cos, sin).unsqueeze(-2)  # [..., T, 1, D / 2]
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * angle)
    return turned.transpose(-1, -2).flatten(-3)


def rotate_neighbours(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, cos.shape[-1], 2)))  # [T, heads, D / 2]
    return torch.view_as_real(pairs * torch.complex(cos, sin).unsqueeze(-2)).flatten(-3)
