"""Gathers and scatters over links of two speeds go in pieces: the same bits, in no more memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from weft.mesh import Layout, ProcessMesh
from weft.reshard import Link, Topology, reshard
from weft.reshard.moving import collectives
from weft.reshard.moving.collectives import interleave, split_into_pieces
from weft.reshard.moving.dtensor import wrap
from weft.reshard.world.world import world

from tests.reshard.test_memory import Alive
from tests.support.collectives import Collectives
from tests.support.pool import Pool

NODES = ProcessMesh.grid(node=2, gpu=2)
SLOW = Topology({"node": Link(1e-4, 1e8), "gpu": Link(1e-5, 4e9)})
MANY, ONE = 1 << 12, 1 << 40  # bytes of a piece


class Sent:
    """A collective's work handle that records its name when waited for."""

    def __init__(self, name: str) -> None:
        self.name = name


def test_while_a_piece_is_in_one_phase_the_next_is_in_another() -> None:
    said: list[str] = []

    def piece(name: str) -> Any:
        for phase in (1, 2):
            said.append(f"start {name}{phase}")
            yield Sent(f"{name}{phase}")

    for work in interleave(map(piece, "abc")):  # type: ignore[attr-defined]
        said.append(f"wait {work.name}")  # type: ignore[attr-defined]
    order = (
        "start a1, start b1, wait a1, start a2, start c1, "
        "wait b1, start b2, wait a2, wait c1, start c2, wait b2, wait c2"
    )
    assert said == order.split(", ")


@pytest.mark.parametrize("phases", [1, 2, 3])
def test_at_most_three_pieces_are_in_flight(phases: int) -> None:
    started, most = 0, 0

    def piece() -> Any:
        nonlocal started, most
        for _ in range(phases):
            started += 1
            most = max(most, started)
            yield Sent("")

    for _ in interleave(piece() for _ in range(16)):
        started -= 1
    assert (started, most) == (0, 2 if phases == 1 else 3)


@pytest.mark.parametrize("elements", [0, 1, 1000, 3 << 17, (1 << 22) + 5])
def test_pieces_are_all_of_a_part(elements: int) -> None:
    two: Any = [(None, range(2)), (None, range(2))]
    tensor = torch.empty(())
    covered = [i for piece in split_into_pieces(elements, tensor, two) for i in (piece.start, piece.stop)]
    assert covered[0] == 0 and covered[-1] == elements and covered[1:-1:2] == covered[2::2]
    assert len(split_into_pieces(elements, tensor, two)) == max(1, min(16, elements * 4 // (1 << 18)))
    assert split_into_pieces(elements, tensor, two[:1]) == [slice(0, elements)]


CHANGES = {
    "gathered": ("node: S(0), gpu: S(0)", ""),
    "gathered-dims": ("node: S(0), gpu: S(1)", ""),
    "summed": ("node: P(sum), gpu: P(sum)", ""),
    "summed-and-cut": ("node: P(sum), gpu: P(sum)", "node: S(0), gpu: S(1)"),
    "largest": ("node: P(max), gpu: P(max)", "node: S(1), gpu: S(0)"),
    "averaged": ("node: P(avg), gpu: P(avg)", "node: S(0), gpu: S(0)"),
}


def changed(src: str, dst: str, shape: tuple[int, int], dtype: torch.dtype, piece: int) -> tuple[Tensor, int, int]:
    """A rank's part, the number of collectives started, and the most bytes alive at once."""
    before, collectives._LEAST_PIECE_BYTES = collectives._LEAST_PIECE_BYTES, piece
    try:
        layout = Layout(NODES, src)
        generator = torch.Generator().manual_seed(dist.get_rank())
        mine = torch.randn(layout.local_shape(shape, dist.get_rank()), generator=generator).to(dtype)
        with Alive(mine) as alive, Collectives() as seen:
            found = reshard(wrap(mine, layout, shape), placements=Layout(NODES, dst), topology=SLOW).to_local()
        return found, len(seen.kinds), alive.peak
    finally:
        collectives._LEAST_PIECE_BYTES = before


def in_one_piece_and_in_many(src: str, dst: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    whole, once, _ = changed(src, dst, shape, dtype, ONE)
    found, times, _ = changed(src, dst, shape, dtype, MANY)
    assert torch.equal(found, whole)
    assert times == 16 * once or (shape[0] % 2 and times >= once)  # of uneven parts some go as one exchange


def held(src: str, dst: str, shape: tuple[int, int]) -> tuple[int, int]:
    """Bytes alive at once in many pieces and in one, with the backend's own gathers; gloo's threads may let go late."""
    world().prefers_all_to_all = False
    try:
        many, one = (min(changed(src, dst, shape, torch.float32, each)[2] for _ in range(3)) for each in (MANY, ONE))
    finally:
        world().prefers_all_to_all = True
    return many, one


@pytest.mark.few(1)
@pytest.mark.parametrize("change", sorted(set(CHANGES) - {"largest"}))  # of which all ranks' rows are reduced here
def test_no_more_is_alive_at_once_than_in_one_piece(pool: Pool, change: str) -> None:
    for many, one in pool.run(held, *CHANGES[change], (256, 256), ranks=4):
        assert many <= one
