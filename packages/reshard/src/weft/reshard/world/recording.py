"""Collectives recorded instead of run: a program acts as a rank of any mesh, without other processes.

`recording(mesh, rank)` enters a World (see world.py) whose groups note each collective. Weft's code then runs on
tensors without data, as it would on the mesh. The groups are subclasses of torch's ProcessGroup: calls of
torch.distributed and of DTensor's ops are recorded, too. weft.models predicts a step's communication from the record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from weft.mesh import ProcessMesh

from . import dynamo
from .collective_bytes import (
    Call,
    Collective,
    Tape,
    bytes_of_call,
    counted_collective,
    group_of_call,
    kind_of_op,
    received_bytes,
    uneven_bytes,
)
from .shape_cache import ShapesMode, add_dtensors, call_on_shapes
from .world import Positions, enter_world, nontrivial_axes, world


@contextmanager
def recording(mesh: ProcessMesh, rank: int) -> Iterator[Recorded]:
    """Inside, in this thread, this process acts as `rank` on `mesh`: collectives are recorded, and none is run.

    Tensors have no data (the meta device); nor have the results of collectives. The record is the same with or without
    a process group, whichever rank this process has, and also for a rank outside `mesh`.
    Cost: one rank's work. The only data with an entry for each rank is the tensor of ranks in torch's DeviceMesh.
    Communication: none.
    Raises RuntimeError inside for collectives that read data or wait for ranks: of Python objects, stores, global
    barriers.
    """
    dynamo.allow()  # the program inside may use DTensors
    recorded = Recorded(mesh, rank)
    try:
        with enter_world(recorded), _Functional(recorded):
            yield recorded
    finally:
        for name in recorded.groups:
            c10d._unregister_process_group(_as_torch(name))


class Recorded:
    """The World of a rank whose collectives are recorded; made by `recording`, read by `take_each()`.

    For the attributes, and for methods without a docstring, see `World`. Of these methods, `wait_for_message` raises
    RuntimeError, `published` finds nothing, and `meet` waits for nobody.
    """

    def __init__(self, mesh: ProcessMesh, rank: int) -> None:
        self.rank, self.size, self.device_type, self.prefers_all_to_all = rank, mesh.size, "cpu", False
        self.peers_run = False
        self.device_meshes: dict[tuple[ProcessMesh, str, ProcessMesh], DeviceMesh] = {}
        self.process_meshes: dict[DeviceMesh, ProcessMesh] = {}
        self.cache: dict[Any, Any] = {}
        self.axes: dict[str, tuple[str, ...]] = {}
        self.groups: dict[str, _Group] = {}
        self._same_ranks: dict[str, str] = {}  # by the name of a part's own group, the name of the group of its ranks
        self._parts: dict[str, ProcessMesh] = {}  # by group name, the ranks of each group from `group_of`
        self._ranks: dict[str, tuple[int, ...]] = {}  # by group name, of the groups from `group_for`
        self._issued: list[Collective] = []
        # Called with each collective; returns a function, to be called where the program waits for the result.
        self.listener: Callable[[Call], Callable[[], None]] | None = None
        self.tape: Tape | None = None  # the listener's list of calls, which `repeat` extends; a listener may have none
        # Called with the name and the ranks of each group when it is made. Processes wait there for the other members.
        self.group_listener: Callable[[str, tuple[int, ...]], None] | None = None

    def add(
        self,
        kind: str,
        group: _Group,
        nbytes: int,
        tensors: Sequence[Tensor],
        peer: int | None = None,
        tag: int = 0,
        rows: tuple[tuple[int, ...], tuple[int, ...]] = ((), ()),
    ) -> Callable[[], None]:
        """Appends a collective to the record. Returns a function to call where the program waits for the collective.

        Called by the methods of `_Group`, and by `_Functional`. The arguments become a `Call` for the listener.
        nbytes: received by this rank. tensors: given to the collective. peer: a rank's index in the group.
        rows: in an all-to-all of uneven parts, the rows sent to each member, and the rows received from each member.
        """
        name = group.group_name
        collective = counted_collective(kind, self.axes[name], nbytes)
        if collective is not None:
            self._issued.append(collective)
        if self.listener is None:
            return _ignore
        ranks = self.ranks_of(name)
        return self.listener(
            Call(
                collective=collective,
                group=name,
                ranks=ranks,
                shapes=tuple(tuple(each.shape) for each in tensors),
                dtype=tensors[0].dtype if tensors else None,
                op=kind,
                peer=None if peer is None else ranks[peer],
                tag=tag,
                sent=rows[0],
                received=rows[1],
            )
        )

    def ranks_of(self, name: str) -> tuple[int, ...]:
        """The ranks of the group `name`, in the group's order; for `listener` and `group_listener`."""
        return self._ranks[name] if name in self._ranks else tuple(self._parts[name].ranks)

    def _announce(self, name: str) -> None:
        if self.group_listener is not None:
            self.group_listener(name, self.ranks_of(name))

    def take_each(self) -> list[Collective]:
        """The collectives recorded since the last call, in order."""
        collectives, self._issued = self._issued, []
        return collectives

    @property
    def can_repeat(self) -> bool:
        """Whether `repeat` may replace a run of the program: there is no listener, or the listener has a tape."""
        return self.listener is None or self.tape is not None

    def mark(self) -> tuple[int, Any]:
        """The present ends of the record and of the tape, for `calls_since`. No `take_each` may come between."""
        return len(self._issued), None if self.tape is None else self.tape.mark()

    def calls_since(self, mark: tuple[int, Any]) -> tuple[tuple[Collective, ...], Any] | None:
        """The calls after `mark`, for `repeat`: of the record, and of the tape. None where the tape cannot repeat."""
        calls = () if self.tape is None else self.tape.calls_since(mark[1])
        return None if calls is None else (tuple(self._issued[mark[0] :]), calls)

    def repeat(self, calls: tuple[tuple[Collective, ...], Any]) -> None:
        """Adds `calls`, from `calls_since`, to the record and to the tape, as if the program ran them again."""
        self._issued += calls[0]
        if self.tape is not None:
            self.tape.repeat(calls[1])

    def device_mesh(self, mesh: ProcessMesh, device_type: str) -> DeviceMesh:
        with unset_fake_temporarily():  # ranks are real numbers, also where tensors have no data
            ranks = _ranks_of(mesh)
            result = _Mesh(device_type, ranks, mesh_dim_names=mesh.axis_names, _init_backend=False, _rank=self.rank)
        parts = [mesh.submesh(self.rank, axis) for axis in mesh.axis_names]
        names: list[Any] = [self.group_of(part).group_name for part in parts if part is not None]
        result._dim_group_names = names  # DTensor's ops look groups up by these names
        result.content = mesh, device_type, self.rank
        return result

    def group_of(self, part: ProcessMesh) -> _Group:
        name = f"recorded {part.rename(**{a: f'axis{i}' for i, a in enumerate(part.axis_names)}).digest}"
        if name not in self._same_ranks:
            self._same_ranks[name] = self._name_of_same_ranks(part) or name
        name = self._same_ranks[name]
        if name not in self.groups:
            coordinate = part.coordinate(self.rank)
            assert coordinate is not None, "ranks outside the mesh have no groups"
            position = 0
            for axis, index in coordinate.items():
                position = position * part.axis_size(axis) + index
            self.groups[name] = _Group(position, part.size, name)
            c10d._register_process_group(_as_torch(name), self.groups[name])  # DTensor's ops look groups up by name
            self.axes[name], self._parts[name] = nontrivial_axes(part), part
            self._announce(name)
        return self.groups[name]

    def _name_of_same_ranks(self, part: ProcessMesh) -> str | None:
        """The name of a group of the ranks of `part`: real processes have one group for all parts of these ranks."""
        same = (name for name, each in self._parts.items() if each.size == part.size and {*each} == {*part})
        return next(same, None)

    def group_of_ranks(self, ranks: tuple[int, ...]) -> _Group:
        for name, part in self._parts.items():  # real processes, too, have one group of the same ranks
            if part.size == len(ranks) and part.ranks == ranks:
                return self.groups[name]
        group = self.group_of(ProcessMesh(ranks, ["ranks"]))
        self.axes[group.group_name] = ()  # asked for by ranks, so along no axes of the program's mesh
        return group

    def group_for(self, purpose: str, ranks: tuple[int, ...], axes: tuple[str, ...]) -> _Group:
        name = f"recorded {purpose} {' '.join(map(str, ranks))}"
        self.groups[name] = _Group(ranks.index(self.rank), len(ranks), name)
        c10d._register_process_group(_as_torch(name), self.groups[name])
        self.axes[name], self._ranks[name] = axes, ranks
        self._announce(name)
        return self.groups[name]

    def publish(self, name: str, value: bytes) -> None:
        """Does nothing: no other rank runs."""

    def wait_for_message(self, name: str, seconds: float | None = None) -> bytes:
        raise RuntimeError(
            f"this rank waits for the message {name!r} of another rank, and inside recording() no other rank runs; "
            "run the program in real processes"
        )

    def published(self, names: Sequence[str]) -> list[bytes | None]:
        return [None for _ in names]

    def meet(self, name: str, round: int, members: int, number: int, seconds: float | None = None) -> int:
        return number

    def positions(self, part: ProcessMesh, group: dist.ProcessGroup) -> Positions:
        return range(part.size)  # the order makes no difference to tensors without data


def _as_torch(name: str) -> Any:
    """A group's name typed as torch types names: a subtype of str."""
    return name


def _ranks_of(mesh: ProcessMesh) -> Tensor:
    """The ranks of a mesh, as a tensor of the mesh's shape. For a part of a grid a few ops make it."""
    if mesh.strides is None:
        return torch.tensor(mesh.ranks, device="cpu").reshape(mesh.shape)
    ranks = torch.full((), mesh.rank_at(**dict.fromkeys(mesh.axis_names, 0)), device="cpu")
    for size, stride in zip(mesh.shape, mesh.strides, strict=True):
        ranks = ranks.unsqueeze(-1) + stride * torch.arange(size, device="cpu")
    return ranks


class _Mesh(DeviceMesh):
    """A DeviceMesh whose groups come from the current World.

    torch makes a DeviceMesh without groups by `_init_backend=False`, and for another rank than the process's by
    `_rank`. torch caches results by mesh, and returns them for any equal mesh. So a `_Mesh` equals no DeviceMesh of a
    real world, and equals a `_Mesh` of another recording by content. DeviceMesh's own comparison reads all ranks.
    """

    content: tuple[ProcessMesh, str, int]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Mesh):
            return False
        return self is other or (self.content, self._thread_id) == (other.content, other._thread_id)

    def __hash__(self) -> int:
        return hash((self.content, self._thread_id))

    def get_group(self, mesh_dim: int | str | None = None) -> dist.ProcessGroup:
        current = world()
        part = current.process_meshes[self].submesh(current.rank, self._axis(mesh_dim))
        assert part is not None, "ranks outside the mesh have no groups"
        return current.group_of(part)

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        coordinate = self.get_coordinate()
        assert coordinate is not None, "ranks outside the mesh have no coordinate"
        return coordinate[self.mesh_dim_names.index(self._axis(mesh_dim))]  # type: ignore[union-attr]

    def _axis(self, mesh_dim: int | str | None) -> str:
        names = self.mesh_dim_names
        assert names is not None, "`device_mesh` gives names"
        return mesh_dim if isinstance(mesh_dim, str) else names[mesh_dim or 0]


def _ignore() -> None:
    """Where the program waits for a collective, without a listener."""


class _RecordedWork(dist.Work):
    """The Work of a recorded collective: always complete. on_wait: called when the program waits."""

    def __init__(self, on_wait: Callable[[], None]) -> None:
        super().__init__()
        self._on_wait = on_wait

    def wait(self, timeout: Any = None) -> bool:
        self._on_wait()
        return True

    def is_completed(self) -> bool:
        return True


# Any: the methods' overloads differ between versions of torch.
_ProcessGroup: Any = dist.ProcessGroup


class _Group(_ProcessGroup):  # type: ignore[misc]
    """A process group that records each collective, barriers too. Outputs are the caller's tensors, without data.

    torch 2.13 calls these methods by public names, 2.11 and 2.12 by older names with an underscore in front.
    """

    def __init__(self, position: int, size: int, name: str) -> None:
        super().__init__(position, size)
        self._name = name

    @property
    def group_name(self) -> str:
        return self._name

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:
        return self._note_tensors("all-reduce", tensors, tensors)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        return self._note_tensors("all-gather", [input], [output])

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        return self._note_tensors("reduce-scatter", [input], [output])

    def all_to_all_single(
        self, output: Tensor, input: Tensor, received: Sequence[int], sent: Sequence[int], opts: Any = None
    ) -> dist.Work:
        if not received:
            return self._note_tensors("all-to-all", [input], [output])
        nbytes = uneven_bytes(output.nbytes, received, self.rank())
        return self._note("all-to-all", nbytes, [input], rows=(tuple(sent), tuple(received)))

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> dist.Work:
        return self._note_tensors("all-gather", inputs, outputs[0])

    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = None
    ) -> dist.Work:
        return self._note_tensors("reduce-scatter", inputs[0], outputs)

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> dist.Work:
        nbytes = sum(each.nbytes for i, each in enumerate(outputs) if i != self.rank())
        rows = tuple(each.numel() for each in inputs), tuple(each.numel() for each in outputs)
        return self._note("all-to-all", nbytes, inputs, rows=rows)

    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> dist.Work:
        return self._note_tensors("broadcast", tensors, tensors, opts.rootRank)

    def barrier(self, opts: Any = None) -> dist.Work:
        return self._note("barrier", 0, ())

    _allgather_base, _reduce_scatter_base, alltoall_base = all_gather_single, reduce_scatter_single, all_to_all_single

    def send(self, tensors: Sequence[Tensor], rank: int, tag: int = 0) -> dist.Work:
        return self._note_tensors("send", tensors, (), rank, tag)

    def recv(self, tensors: Sequence[Tensor], rank: int, tag: int = 0) -> dist.Work:
        return self._note_tensors("recv", tensors, tensors, rank, tag)

    def _note_tensors(
        self, kind: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor], peer: int | None = None, tag: int = 0
    ) -> dist.Work:
        size = sum(each.nbytes for each in inputs), sum(each.nbytes for each in outputs)
        nbytes = received_bytes(kind, self.size(), *size, inputs[0].element_size())
        return self._note(kind, nbytes, inputs, peer, tag)

    def _note(
        self,
        kind: str,
        nbytes: int,
        tensors: Sequence[Tensor],
        peer: int | None = None,
        tag: int = 0,
        rows: tuple[tuple[int, ...], tuple[int, ...]] = ((), ()),
    ) -> dist.Work:
        current = world()
        assert isinstance(current, Recorded), "only a recording makes these groups"
        return _RecordedWork(current.add(kind, self, nbytes, tensors, peer, tag, rows))


class _Functional(ShapesMode):
    """Records the collectives of DTensor's ops, which on tensors without data call no method of the group."""

    def __init__(self, recorded: Recorded) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorded = recorded

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return add_dtensors(self, func, args, kwargs)  # of further ops, DTensor's collectives then come here
        output = call_on_shapes(func, args, kwargs or {})
        kind = kind_of_op(func.namespace, func.__name__)
        if kind is not None:
            group = self._recorded.groups[str(group_of_call(args))]
            tensors = [each for each in args if isinstance(each, Tensor)]
            nbytes = bytes_of_call(kind, group.size(), group.rank(), args, output)
            self._recorded.add(kind, group, nbytes, tensors)()  # awaited at once: DTensor's ops read the result
        return output
