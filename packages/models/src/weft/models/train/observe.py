"""The collectives that a piece of a program really issues, seen where torch dispatches them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from weft.reshard.running.groups import axes_of_group, group_named
from weft.reshard.running.issued import Collective, bytes_of_call, group_of_call, kind_of_op


class CollectiveCount(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts collectives while it is entered: `with CollectiveCount() as count: ...; count.issued` by kind.

    It stands at torch's dispatcher, so it sees whoever issues them, DTensor's own included. Their axes are those along which
    the group was first asked for; () where it was made by others.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen: list[Collective] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor unwraps first: what it issues then comes by here
        output = func(*args, **(kwargs or {}))
        kind = kind_of_op(func.namespace, func.__name__)
        if kind is not None:
            group = group_of_call(args)
            group = group_named(group) if isinstance(group, str) else group or dist.group.WORLD
            assert group is not None, "a collective has a group"
            nbytes = bytes_of_call(kind, group.size(), group.rank(), args, output)
            self._seen.append(Collective(kind, axes_of_group(group.group_name), nbytes))
        return output

    @property
    def issued(self) -> Counter[str]:
        """By kind, what was issued since it was taken last."""
        return Counter(each.kind for each in self._seen)

    def take(self) -> Counter[str]:
        """By kind, what was issued since the last call."""
        return Counter(each.kind for each in self.take_each())

    def take_each(self) -> list[Collective]:
        """What was issued since the last call, in order."""
        taken, self._seen = self._seen, []
        return taken
