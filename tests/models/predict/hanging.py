"""Programs whose ranks wait for each other for ever, and for each program the kind and text of the `Hang`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from weft.mesh import ProcessMesh
from weft.models.predict.matching import Rule
from weft.reshard.extension import device_mesh


def tensor(*shape: int) -> Tensor:
    return torch.ones(*(shape or (4, 2)))


def condition_on_rank() -> None:
    gradient = tensor()
    if dist.get_rank() == 0:
        dist.all_reduce(gradient)


def groups_in_other_orders() -> None:
    first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
    for group in (first, second) if dist.get_rank() == 0 else (second, first):
        dist.all_reduce(tensor(), group=group)


def all_but_one() -> None:
    if dist.get_rank() != 2:
        dist.barrier()


def other_kind_on_one_rank() -> None:
    if dist.get_rank() == 1:
        dist.reduce_scatter_single(tensor(2), tensor(4))
    else:
        dist.all_reduce(tensor(4))


def other_sizes() -> None:
    dist.all_reduce(tensor(4 + dist.get_rank()))


def other_dtype() -> None:
    dist.all_reduce(tensor().to(torch.bfloat16 if dist.get_rank() else torch.float32))


def send_without_receive() -> None:
    if dist.get_rank() == 0:
        dist.send(tensor(), 1)


def receive_without_send() -> None:
    if dist.get_rank() == 1:
        dist.recv(tensor(), 0)


def tags_crossed() -> None:
    for tag in (1, 2) if dist.get_rank() == 0 else (2, 1):
        if dist.get_rank() == 0:
            dist.send(tensor(), 1, tag=tag)
        else:
            dist.recv(tensor(), 0, tag=tag)


def sends_in_a_circle() -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    dist.send(tensor(), (rank + 1) % ranks)
    dist.recv(tensor(), (rank - 1) % ranks)


def early_exit() -> None:
    for step in range(3):
        if dist.get_rank() == 1 and step == 2:
            break
        dist.all_reduce(tensor())


def extra_barrier() -> None:
    if dist.get_rank() == 0:
        dist.barrier()
    dist.all_reduce(tensor())


def other_number_of_microbatches() -> None:
    for _ in range(4 if dist.get_rank() == 0 else 3):
        if dist.get_rank() == 0:
            dist.send(tensor(), 1)
        else:
            dist.recv(tensor(), 0)


def asynchronous_in_crossing_orders() -> None:
    first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
    groups = (first, second) if dist.get_rank() == 0 else (second, first)
    for work in [dist.all_reduce(tensor(), group=group, async_op=True) for group in groups]:
        work.wait()


def subgroup_without_a_member() -> None:
    """Rank 2 makes a group of ranks 0 and 1, while ranks 0 and 1 make a group of all three ranks."""
    ranks = [0, 1, 2] if dist.get_rank() < 2 else [0, 1]
    dist.all_reduce(tensor(), group=dist.new_group(ranks))


def subgroup_used_by_a_non_member() -> None:
    """Ranks 0 and 1 wait in a collective of the world; rank 2 calls the collective on the group of ranks 0 and 1."""
    group = dist.new_group([0, 1])
    dist.all_reduce(tensor(), group=group if dist.get_rank() == 2 else None)


def broadcast_from_other_sources() -> None:
    dist.broadcast(tensor(), src=dist.get_rank())


class Gated(nn.Module):
    """Two branches: rank 0 computes the first alone, further ranks compute both."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.first(x)
        return y if dist.get_rank() == 0 else y + self.second(x)


def conditional_gradient_sync() -> None:
    model = Gated()
    model(tensor()).sum().backward()
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)


def uneven_last_batch() -> None:
    rows = 8 if dist.get_rank() == 0 else 5
    logits = tensor(rows, 3)
    dist.all_gather([torch.empty_like(logits) for _ in range(2)], logits)


class Branching(nn.Module):
    """A layer that gathers activations on the first coordinate along "tp" alone."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        self.mesh = mesh

    def forward(self, x: DTensor) -> DTensor:
        if self.mesh.get_local_rank("tp") == 0:
            return x.redistribute(self.mesh, [Replicate()])
        return x


class Model(nn.Module):
    def __init__(self, mesh: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Branching(mesh)])

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


def branch_on_the_coordinate() -> None:
    mesh = device_mesh(ProcessMesh.grid(tp=2), "cpu")
    local = tensor(4, 2)
    Model(mesh)(DTensor.from_local(local, mesh, [Shard(0)], run_check=False))


def zero_bubble_with_swapped_weights() -> None:
    """Two stages sum the gradient of a shared table in W. The last stage runs W before sending the result of I."""
    rank = dist.get_rank()
    table = tensor(8)
    if rank == 0:
        dist.send(tensor(), 1)  # F
        dist.recv(tensor(), 1)  # I
        dist.all_reduce(table)  # W
    else:
        dist.recv(tensor(), 0)
        dist.all_reduce(table)
        dist.send(tensor(), 0)


def new_groups_of_other_ranks() -> None:
    dist.new_group([0, 1] if dist.get_rank() == 0 else [1])


def parts_that_do_not_fit() -> None:
    sent = [2, 2] if dist.get_rank() == 0 else [1, 3]
    dist.all_to_all_single(tensor(4), tensor(4), [2, 2], sent)


def messages_both_ways_in_one_order() -> None:
    """Fine on gloo; on NCCL both sends wait, as each is before the rank's receive on the stream of the two ranks."""
    other = 1 - dist.get_rank()
    works = [dist.isend(tensor(), other), dist.irecv(tensor(), other)]
    for work in works:
        assert work is not None
        work.wait()


@dataclass(frozen=True)
class Case:
    program: Callable[[], None]
    kind: str  # of the `Hang`
    said: tuple[str, ...]  # parts of the text of the `Hang`
    ranks: int = 2
    rule: Rule = "gloo"

    @property
    def name(self) -> str:
        return self.program.__name__


CASES = [
    Case(
        condition_on_rank, "missing", ("rank 0 waits for a collective that rank 1 never joins", "all-reduce of [4, 2]")
    ),
    Case(groups_in_other_orders, "cycle", ("ranks 0, 1 wait for one another in a circle",)),
    Case(all_but_one, "missing", ("that rank 2 never joins", "barrier"), ranks=4),
    Case(other_kind_on_one_rank, "mismatch", ("different kinds", "all-reduce of [4]", "reduce-scatter of [4]")),
    Case(other_sizes, "mismatch", ("different sizes", "all-reduce of [4]", "all-reduce of [5]")),
    Case(other_dtype, "mismatch", ("different dtypes", "float32", "bfloat16")),
    Case(send_without_receive, "missing", ("rank 0 waits for a message that rank 1 never receives", "send of")),
    Case(receive_without_send, "missing", ("rank 1 waits for a message that rank 0 never sends", "recv of")),
    Case(tags_crossed, "cycle", ("tag 1", "tag 2", "in a circle")),
    Case(sends_in_a_circle, "cycle", ("ranks 0, 1, 2, 3 wait for one another", "send of"), ranks=4),
    Case(early_exit, "missing", ("rank 0, call 3", "rank 1 never joins", "its step has 2 calls")),
    Case(extra_barrier, "mismatch", ("different kinds", "barrier", "all-reduce")),
    Case(other_number_of_microbatches, "missing", ("rank 0, call 4", "rank 1 never receives", "its step has 3 calls")),
    Case(asynchronous_in_crossing_orders, "cycle", ("in a circle", "not on gloo"), rule="nccl"),
    Case(subgroup_without_a_member, "mismatch", ("different ranks of the new group", "0, 1, 2"), ranks=3),
    Case(subgroup_used_by_a_non_member, "missing", ("rank 2 never joins",), ranks=3),
    Case(broadcast_from_other_sources, "mismatch", ("different sources", "from source 0", "from source 1")),
    Case(conditional_gradient_sync, "missing", ("rank 1, call 2", "rank 0 never joins")),
    Case(uneven_last_batch, "mismatch", ("different sizes", "[8, 3]", "[5, 3]")),
    Case(branch_on_the_coordinate, "missing", ("rank 0", "all-gather", "layers.0", "rank 1 never joins")),
    Case(zero_bubble_with_swapped_weights, "cycle", ("recv of", "all-reduce of [8]", "in a circle")),
    Case(new_groups_of_other_ranks, "mismatch", ("different ranks of the new group",)),
    Case(parts_that_do_not_fit, "mismatch", ("different sizes of a part",)),
    Case(messages_both_ways_in_one_order, "cycle", ("not on gloo",), rule="nccl"),
]
