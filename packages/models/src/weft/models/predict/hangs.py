"""`check_hangs`: proves that no rank of a program waits for ever, or shows the first hang.

Each rank's program runs on shapes in `recording`; `matching` runs the recorded calls of all ranks together. The file is
not in weft.reshard, because a call is shown with the module of the model that issues the call.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh
from weft.mesh import ProcessMesh
from weft.mesh.extension import as_mesh
from weft.reshard.extension import Call, Recorded, recording, this_rank

from .hang_report import Hang, report
from .matching import MAKE_GROUP, NEW_GROUP, RECEIVE, SEND, CallOrWait, Issued, Program, Rule, Simulation
from .site import owner_of

MOST_RANKS = 64  # the largest mesh whose ranks are all recorded
_RULES: tuple[Rule, ...] = ("gloo", "nccl")


@dataclass(frozen=True, slots=True, kw_only=True)
class NoHang:
    """No rank waits for another for ever. Returned by `find_hang`, `check_hangs` and `check_plan`."""

    ranks: int  #: ranks for which the proof holds
    kinds: int  #: kinds of ranks: ranks of a kind issue the same calls, each rank on its own groups
    recorded: int  #: ranks whose program was recorded
    calls: int  #: collectives, sends and receives of the rank with the most

    hangs = False

    def __str__(self) -> str:
        kinds = "1 kind" if self.kinds == 1 else f"{self.kinds:,} kinds"
        in_kinds = f" in {kinds}" if self.kinds != self.ranks else ""
        some = f" ({self.recorded:,} recorded)" if self.recorded != self.ranks else ""
        return (
            f"no rank waits for another: {self.ranks:,} ranks{in_kinds}{some}, "
            f"{self.calls:,} collectives and sends each at most"
        )


def find_hang(programs: Sequence[Program], *, ranks: int | None = None, kinds: int | None = None) -> NoHang | Hang:
    """Match the calls of all programs, first by the rules of gloo, then by NCCL's (see `matching.Rule`).

    programs: of each rank, or of a rank of each kind. A rank without a program is assumed to join each
        collective of the group and to answer each message.
    ranks, kinds: numbers to report in `NoHang`; None for the number of programs.
    """
    by_rank = {each.rank: each for each in programs}
    for rule in _RULES:
        simulation = Simulation(by_rank, rule)
        simulation.run()
        if not simulation.has_ended:
            return report(simulation)
    most = max((sum(each.kind != MAKE_GROUP for each in program.calls) for program in programs), default=0)
    count = len(programs)
    return NoHang(ranks=ranks or count, kinds=kinds or count, recorded=count, calls=most)


def check_hangs(
    program: Callable[[], Any], mesh: ProcessMesh | DeviceMesh, ranks: Sequence[int] | None = None
) -> NoHang | Hang:
    """Prove that `program`, run by every rank of `mesh`, does not hang, or return the first hang.

    program: called once for each rank, with this rank's calls recorded. The program makes a model and runs a step of
        training, say. Tensors are made on the meta device and have no values. torch.distributed is initialized with the
        ranks of the mesh: `dist.get_rank()` is the recorded rank; `dist.new_group` and `dist.init_process_group` work.
    ranks: the ranks to record; None for all ranks of a mesh of up to 64. A rank not recorded is assumed to join
        each collective of the group and to answer each message.
    Compared are kinds, groups, sizes, dtypes, sources, tags, and the order of all calls and waits. A send is assumed to
    end only when received, as sends of large tensors do on gloo and NCCL.
    Not seen: values (a branch on a loss is taken by a tensor without data), and waits outside torch.distributed.
    Cost: a run on shapes for each rank. Communication: none.
    Raises ValueError for a mesh of more than 64 ranks without `ranks`, and for a rank outside the mesh. Errors of
    `program` are raised again with a note of the rank.
    """
    mesh = as_mesh(mesh)
    chosen = sorted(mesh) if ranks is None else sorted(set(ranks))
    if ranks is None and mesh.size > MOST_RANKS:
        raise ValueError(
            f"{mesh} has {mesh.size:,} ranks, and up to {MOST_RANKS} are recorded; give `ranks`, or a smaller mesh "
            "with the same axes"
        )
    outside = [rank for rank in chosen if rank not in mesh]
    if outside:
        raise ValueError(f"rank {outside[0]} of `ranks` is not in {mesh}")
    return find_hang([_record_program(program, mesh, rank) for rank in chosen])


def _record_program(program: Callable[[], Any], mesh: ProcessMesh, rank: int) -> Program:
    """Run `program` on shapes as `rank`, and return the rank's calls and waits. Arguments: as for `check_hangs`."""
    with recording(mesh, rank) as recorded, torch.device("meta"):
        # call sites are searched only in frames below this function
        recorder = CallRecorder(mesh.size, _record_program.__code__)
        with _as_default_group(recorded, mesh, recorder):
            recorder.listen(recorded)
            try:
                program()
            except Exception as error:
                error.add_note(f"raised by the program of rank {rank} of {mesh}, which runs on tensors without data")
                raise
    return Program(rank, tuple(recorder.events))


@dataclass
class CallRecorder:
    """Lists the calls and waits of a rank's program, which runs on shapes in `recording`.

    Made by `_record_program` for a user's program, and by `check_plan` for a step of Weft's.
    """

    world_size: int
    stop: CodeType  # code of the function running the program; stack frames from there up are not searched for sites
    events: list[CallOrWait] = field(default_factory=list)
    _calls: dict[Issued, Issued] = field(default_factory=dict)  # equal calls share an object
    _awaited: set[int] = field(default_factory=set)  # numbers of calls with a wait
    _count: int = 0  # calls until now
    _groups: dict[str, str] = field(default_factory=dict)  # name in torch -> key, see `_group`
    _batches: list[FrameType] = field(default_factory=list)  # frames of `batch_isend_irecv`, told apart by identity
    _names: dict[int, tuple[nn.Module, dict[int, str]]] = field(default_factory=dict)  # id(root) -> root, id -> name

    def listen(self, recorded: Recorded) -> None:
        """Forget all earlier calls, and list the calls of `recorded` from now on."""
        for each in (self.events, self._awaited, self._groups, self._batches, self._names):
            each.clear()
        self._count = 0
        recorded.listener, recorded.group_listener, recorded.tape = self._note, self._note_group, self

    def mark(self) -> tuple[int, int]:
        """The present place in the program, for `calls_since`. Called by `Recorded.mark`."""
        return len(self.events), self._count

    def calls_since(self, mark: tuple[int, int]) -> tuple[CallOrWait, ...] | None:
        """The calls and waits since `mark`, for `repeat`; a wait has the call's number among these calls.

        None where a copy could differ from a second run: with a message, with a new group, with a wait for a call
        before `mark`, or with a call not awaited yet.
        """
        start, number = mark
        events = self.events[start:]
        waits = {each for each in events if isinstance(each, int)}
        calls = [each for each in events if isinstance(each, Issued)]
        if waits != set(range(number, self._count)) or any(
            each.is_message or each.kind in (MAKE_GROUP, NEW_GROUP) for each in calls
        ):
            return None
        return tuple(each - number if isinstance(each, int) else each for each in events)

    def repeat(self, calls: Sequence[CallOrWait]) -> None:
        """Append a copy of calls and waits from `calls_since`, for a microbatch without a run."""
        number = self._count
        for each in calls:
            if isinstance(each, Issued):
                self.add(each)
            else:
                self.wait(number + each)

    def add(self, call: Issued) -> int:
        """Append a call. Returns the call's number."""
        self.events.append(self._calls.setdefault(call, call))
        self._count += 1
        return self._count - 1

    def wait(self, number: int) -> None:
        """Append a wait for the call `number`; nothing if the call was awaited before."""
        if number not in self._awaited:
            self._awaited.add(number)
            self.events.append(number)

    def _note(self, call: Call) -> Callable[[], None]:
        site, batch = self._site()
        message = call.op in (SEND, RECEIVE)
        rank = this_rank()
        offset = 0
        if message and call.peer is not None:
            offset = call.peer - rank if call.op == SEND else rank - call.peer
        number = self.add(
            Issued(
                kind=call.op,
                group=self._group(call.group, call.ranks),
                members=call.ranks,
                shapes=call.shapes,
                dtype="" if call.dtype is None else str(call.dtype).removeprefix("torch."),
                peer=call.peer,
                offset=offset,
                tag=call.tag,
                sent=call.sent,
                received=call.received,
                batch=batch if message else 0,
                site=site,
            )
        )
        return lambda: self.wait(number)

    def _note_group(self, name: str, ranks: tuple[int, ...]) -> None:
        group = self._group(name, ranks)
        if len(ranks) == 1 or (len(ranks) == self.world_size and group.startswith("ranks")):
            return  # the world's own group is there already
        number = self.add(Issued(kind=MAKE_GROUP, group=group, members=ranks, site=self._site()[0]))
        self.wait(number)

    def _group(self, name: str, ranks: tuple[int, ...]) -> str:
        """A key equal on all members of a group, made of purpose and ranks. `name` differs from rank to rank."""
        if name not in self._groups:
            _, _, text_after_name = name.partition(" ")
            text = " ".join(map(str, ranks))
            purpose = text_after_name.removesuffix(text).strip() if text_after_name.endswith(" " + text) else "ranks"
            self._groups[name] = f"{purpose} {' '.join(map(str, sorted(ranks)))}"
        return self._groups[name]

    def _site(self) -> tuple[str, int]:
        """Where the present call is issued, as "step.py:12 in run (blocks.0.mlp)", and the number of the call's batch.

        The innermost line of the user's files; without a line there, of Weft's models; then of the rest of Weft.
        The batch is 0 for a call outside `batch_isend_irecv`.
        """
        frame: FrameType | None = sys._getframe(2)
        best: dict[str, FrameType] = {}
        batch, modules = 0, list[nn.Module]()
        while frame is not None and frame.f_code is not self.stop:
            code = frame.f_code
            best.setdefault(owner_of(code.co_filename), frame)
            if code.co_name == "_call_impl" and isinstance(frame.f_locals.get("self"), nn.Module):
                modules.append(frame.f_locals["self"])
            elif code is dist.batch_isend_irecv.__code__:
                batch = self._number_of_batch(frame)
            frame = frame.f_back
        line = next((best[owner] for owner in ("user", "model", "weft", "passage", "summing") if owner in best), None)
        module = self._module_name(modules)
        where = "" if line is None else f"{Path(line.f_code.co_filename).name}:{line.f_lineno} in {line.f_code.co_name}"
        return where + (f" ({module})" if module else ""), batch

    def _number_of_batch(self, frame: FrameType) -> int:
        if not any(each is frame for each in self._batches):
            self._batches.append(frame)
        return 1 + next(i for i, each in enumerate(self._batches) if each is frame)

    def _module_name(self, modules: Sequence[nn.Module]) -> str:
        """The dotted name of the innermost running module, in the outermost; "" with fewer than two modules.

        modules: the running modules, innermost first.
        """
        if len(modules) < 2:
            return ""
        root = modules[-1]
        if id(root) not in self._names:
            self._names[id(root)] = root, {id(each): name for name, each in root.named_modules()}
        return self._names[id(root)][1].get(id(modules[0]), "")


@contextmanager
def _as_default_group(recorded: Recorded, mesh: ProcessMesh, recorder: CallRecorder) -> Iterator[None]:
    """A context in which torch.distributed has the mesh's ranks as its world, and `new_group` is recorded."""
    ranks = tuple(sorted(mesh))
    group = recorded.group_of_ranks(ranks)
    world: Any = c10d._world
    before = world.default_pg
    replaced = {name: getattr(dist, name) for name in ("new_group", "init_process_group", "destroy_process_group")}

    def new_group(members: Sequence[int] | None = None, *_: Any, ranks_: Any = None, **options: Any) -> Any:
        chosen = tuple(sorted(options.get("ranks", members) or ranks))
        place = sum(1 for each in recorder.events if isinstance(each, Issued) and each.kind == NEW_GROUP)
        call = Issued(
            kind=NEW_GROUP, group=recorder._group(group.group_name, ranks), members=ranks, shapes=(chosen,),
            site=recorder._site()[0],
        )  # fmt: skip
        recorder.wait(recorder.add(call))
        if recorded.rank not in chosen:
            return dist.GroupMember.NON_GROUP_MEMBER
        listener, recorded.group_listener = recorded.group_listener, None  # `call` stands for the group's making
        subgroup = recorded.group_for(f"new group {place}", chosen, ())
        recorded.group_listener = listener
        _register(subgroup, chosen)
        return subgroup

    def _register(each: Any, members: Sequence[int]) -> None:
        world.pg_group_ranks[each] = {rank: i for i, rank in enumerate(members)}
        world.pg_map[each] = ("gloo", None)
        world.pg_names[each] = each.group_name
        groups.append(each)

    groups: list[Any] = []
    _register(group, ranks)
    world.default_pg = group
    changes = {"new_group": new_group, "init_process_group": _do_nothing, "destroy_process_group": _do_nothing}
    for name, function in changes.items():
        setattr(dist, name, function)
    try:
        yield
    finally:
        for name, function in replaced.items():
            setattr(dist, name, function)
        world.default_pg = before
        for each in groups:
            for table in (world.pg_group_ranks, world.pg_map, world.pg_names):
                table.pop(each, None)


def _do_nothing(*_: Any, **__: Any) -> None:
    """Replaces `init_process_group` and `destroy_process_group` inside `_as_default_group`."""
