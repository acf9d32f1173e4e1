"""Counts the started collectives, in a dispatch mode below DTensor and autograd, where no collective is hidden."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from weft.reshard.world.collective_bytes import bytes_of_call, group_of_call, kind_of_op

KINDS = {  # name of torch's op -> kind
    "allgather_": "all-gather",
    "_allgather_base_": "all-gather",
    "allgather_into_tensor_coalesced_": "all-gather",
    "allreduce_": "all-reduce",
    "allreduce_coalesced_": "all-reduce",
    "reduce_scatter_": "reduce-scatter",
    "_reduce_scatter_base_": "reduce-scatter",
    "alltoall_": "all-to-all",
    "alltoall_base_": "all-to-all",
    "recv_": "recv",
}


class Collectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """`with Collectives() as seen: ...`; then `seen.kinds` lists the collectives started by this rank, in order.

    On gloo, all-gathers and reduce-scatters are issued as all-to-alls, and listed by the kind declared at the call. A
    collective in two halves has one kind, all bytes of both halves, and two names.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kinds: list[str] = []
        self.names: list[str] = []  # names of torch's ops, one per collective
        self.nbytes: list[int] = []  # each collective's bytes received from other ranks

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor unwraps the op first, and this mode sees the collectives of the inner ops
        namespace, name = func.namespace, func.__name__.partition(".")[0]
        if namespace not in ("c10d", "_c10d_functional"):
            return func(*args, **(kwargs or {}))
        counted_kind = kind_of_op(namespace, name)  # None for a c10d op in the second half of a counted collective
        kind = KINDS.get(name, name)
        if counted_kind is not None or namespace != "c10d":
            self.kinds.append(str(counted_kind) if kind == "all-to-all" else kind)
        self.names.append(name)
        result = func(*args, **(kwargs or {}))
        group = group_of_call(args)
        if isinstance(group, dist.ProcessGroup) and namespace == "c10d" and counted_kind is not None:
            self.nbytes.append(bytes_of_call(counted_kind, group.size(), group.rank(), args, result))
        return result
