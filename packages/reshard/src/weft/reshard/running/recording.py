"""Collectives recorded instead of run: one rank of any mesh, in a process of its own or of any other program.

Weft's own code runs as it does on the mesh, on tensors without data: it finds a world (see `worlds.py`) whose groups note
what they are asked for. They are subclasses of torch's ProcessGroup, so a call of torch.distributed on a group of the mesh is
recorded as well, and so is what DTensor's own ops issue.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from weft.mesh import ProcessMesh

from . import dynamo
from .issued import Collective, bytes_of_call, group_of_call, kind_of_op, received_bytes
from .worlds import Positions, entered, wide_axes, world

UNLIKE = (
    -62125
)  # marks meshes as of no world, less the rank: torch keeps what it found for a mesh, and would give it to an equal one


@contextmanager
def recording(mesh: ProcessMesh, rank: int) -> Iterator[Recorded]:
    """Inside, in this thread, this process is `rank` of the ranks of `mesh`: its collectives are recorded, and none is run.

    Tensors have no data (the meta device), and neither have the results of the collectives. It makes no difference whether
    there is a process group, which `rank` this process is in it, or whether `mesh` holds the rank.
    Cost: that of one rank. Nothing is made for each rank of the mesh, but the tensor of ranks that torch's DeviceMesh holds.
    Communication: none.
    Raises RuntimeError inside for collectives that read data or wait for other ranks: those of Python objects, stores, barriers of all.
    """
    dynamo.allow()
    recorded = Recorded(mesh, rank)
    try:
        with entered(recorded), _Functional(recorded):
            yield recorded
    finally:
        for name in recorded.groups:
            c10d._unregister_process_group(_as_torch(name))


class Recorded:
    """A rank whose collectives are recorded: `take_each()` gives those since it was last called, in order."""

    def __init__(self, mesh: ProcessMesh, rank: int) -> None:
        self.rank, self.size, self.device_type, self.by_exchange = rank, mesh.size, "cpu", False
        self.others_run = False
        self.made: dict[tuple[ProcessMesh, str, ProcessMesh], DeviceMesh] = {}
        self.known: dict[DeviceMesh, ProcessMesh] = {}
        self.kept: dict[Any, Any] = {}
        self.axes: dict[str, tuple[str, ...]] = {}
        self.groups: dict[str, _Group] = {}
        self._issued: list[Collective] = []

    def add(self, kind: str, group: _Group, nbytes: int) -> None:
        """Notes a collective."""
        self._issued.append(Collective(kind, self.axes[group.group_name], nbytes))

    def take_each(self) -> list[Collective]:
        """What was issued since the last call."""
        taken, self._issued = self._issued, []
        return taken

    def device_mesh(self, mesh: ProcessMesh, device_type: str) -> DeviceMesh:
        with unset_fake_temporarily():  # which ranks there are is known, also among tensors without data
            ranks = _ranks_of(mesh)
            made = _Mesh(device_type, ranks, mesh_dim_names=mesh.axis_names, _init_backend=False, _rank=self.rank)
        parts = [mesh.submesh(self.rank, axis) for axis in mesh.axis_names]
        names: list[Any] = [self.group_of(part).group_name for part in parts if part is not None]
        made._dim_group_names = names  # for DTensor's own ops
        made.content = mesh, device_type, self.rank
        return made

    def group_of(self, part: ProcessMesh) -> _Group:
        name = f"recorded {part.rename(**{a: f'axis{i}' for i, a in enumerate(part.axis_names)}).digest}"
        if name not in self.groups:
            coordinate = part.coordinate(self.rank)
            assert coordinate is not None, "ranks outside have no groups"
            place = 0
            for axis, index in coordinate.items():
                place = place * part.axis_size(axis) + index
            self.groups[name] = _Group(place, part.size, name)
            c10d._register_process_group(_as_torch(name), self.groups[name])  # DTensor's own ops find it by name alone
            self.axes[name] = wide_axes(part)
        return self.groups[name]

    def group_of_ranks(self, ranks: tuple[int, ...]) -> _Group:
        group = self.group_of(ProcessMesh(ranks, ["ranks"]))
        self.axes[group.group_name] = ()
        return group

    def group_for(self, purpose: str, ranks: tuple[int, ...], axes: tuple[str, ...]) -> _Group:
        name = f"recorded {purpose} {' '.join(map(str, ranks))}"
        self.groups[name] = _Group(ranks.index(self.rank), len(ranks), name)
        c10d._register_process_group(_as_torch(name), self.groups[name])
        self.axes[name] = axes
        return self.groups[name]

    def tell(self, what: str, value: bytes) -> None:
        """Nobody hears it."""

    def hear(self, what: str) -> bytes:
        raise RuntimeError(f"a rank that is recorded was to be told {what} by another, which does not run")

    def told(self, names: Sequence[str]) -> list[bytes | None]:
        return [None for _ in names]

    def positions(self, part: ProcessMesh, group: dist.ProcessGroup) -> Positions:
        return range(part.size)  # another order is a view of what has no data


def _as_torch(name: str) -> Any:
    """A group's name in torch's words, which are a str of another type."""
    return name


def _ranks_of(mesh: ProcessMesh) -> Tensor:
    """Its ranks as a tensor of its shape; of a part of a grid by a few ops."""
    if mesh.strides is None:
        return torch.tensor(mesh.ranks, device="cpu").reshape(mesh.shape)
    ranks = torch.full((), mesh.rank_at(**dict.fromkeys(mesh.axis_names, 0)), device="cpu")
    for size, stride in zip(mesh.shape, mesh.strides, strict=True):
        ranks = ranks.unsqueeze(-1) + stride * torch.arange(size, device="cpu")
    return ranks


class _Mesh(DeviceMesh):
    """A DeviceMesh whose groups are those of the world that is entered.

    torch makes one without groups by `_init_backend=False` alone, and for a rank that is not the process's by `_rank`.
    torch keeps what it found for a mesh, and gives it to an equal one: so this one equals none of a real world, and those of
    other recordings by their content. DeviceMesh itself compares all ranks.
    """

    content: tuple[ProcessMesh, str, int]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Mesh):
            return False
        return self is other or (self.content, self._thread_id) == (other.content, other._thread_id)

    def __hash__(self) -> int:
        return hash((self.content, self._thread_id))

    def get_group(self, mesh_dim: int | str | None = None) -> dist.ProcessGroup:
        here = world()
        part = here.known[self].submesh(here.rank, self._axis(mesh_dim))
        assert part is not None, "ranks outside have no groups"
        return here.group_of(part)

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        coordinate = self.get_coordinate()
        assert coordinate is not None, "ranks outside have none"
        return coordinate[self.mesh_dim_names.index(self._axis(mesh_dim))]  # type: ignore[union-attr]

    def _axis(self, mesh_dim: int | str | None) -> str:
        names = self.mesh_dim_names
        assert names is not None, "it was made with names"
        return mesh_dim if isinstance(mesh_dim, str) else names[mesh_dim or 0]


class _Done(dist.Work):
    """Of what was never started."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


_ProcessGroup: Any = (
    dist.ProcessGroup
)  # to a type checker its methods have overloads, which differ between versions of torch


class _Group(_ProcessGroup):  # type: ignore[misc]
    """A process group that notes what it is asked for. Its results are the tensors that it is given, which have no data.

    torch 2.13 calls the methods by their public names, 2.11 and 2.12 by the older ones that start with an underscore.
    """

    def __init__(self, place: int, size: int, name: str) -> None:
        super().__init__(place, size)
        self._name = name

    @property
    def group_name(self) -> str:
        return self._name

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:
        return self._noted("all-reduce", tensors, tensors)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        return self._noted("all-gather", [input], [output])

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        return self._noted("reduce-scatter", [input], [output])

    def all_to_all_single(
        self, output: Tensor, input: Tensor, received: Sequence[int], sent: Sequence[int], opts: Any = None
    ) -> dist.Work:
        if not received:
            return self._noted("all-to-all", [input], [output])
        row = output.nbytes // sum(received) if sum(received) else 0
        return self._note("all-to-all", row * (sum(received) - received[self.rank()]))

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> dist.Work:
        return self._noted("all-gather", inputs, outputs[0])

    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = None
    ) -> dist.Work:
        return self._noted("reduce-scatter", inputs[0], outputs)

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> dist.Work:
        return self._note("all-to-all", sum(each.nbytes for i, each in enumerate(outputs) if i != self.rank()))

    _allgather_base, _reduce_scatter_base, alltoall_base = all_gather_single, reduce_scatter_single, all_to_all_single

    def send(self, tensors: Sequence[Tensor], rank: int, tag: int = 0) -> dist.Work:
        return self._noted("send", tensors, ())

    def recv(self, tensors: Sequence[Tensor], rank: int, tag: int = 0) -> dist.Work:
        return self._noted("recv", tensors, tensors)

    def _noted(self, kind: str, given: Sequence[Tensor], made: Sequence[Tensor]) -> dist.Work:
        size = sum(each.nbytes for each in given), sum(each.nbytes for each in made)
        return self._note(kind, received_bytes(kind, self.size(), *size, given[0].element_size()))

    def _note(self, kind: str, nbytes: int) -> dist.Work:
        here = world()
        assert isinstance(here, Recorded), "its groups are those of a recording"
        here.add(kind, self, nbytes)
        return _Done()


class _Functional(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the collectives that DTensor's own ops issue: torch gives them an output without data, and asks no group."""

    def __init__(self, recorded: Recorded) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorded = recorded

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it unwraps first: what it issues then comes by here
        output = func(*args, **(kwargs or {}))
        kind = kind_of_op(func.namespace, func.__name__)
        if kind is not None:
            group = self._recorded.groups[str(group_of_call(args))]
            self._recorded.add(kind, group, bytes_of_call(kind, group.size(), group.rank(), args, output))
        return output
