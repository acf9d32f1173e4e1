"""Count the collectives really issued by a step, by watching torch's dispatcher.

`Trainer.first_step` compares the count with the prediction, and tests assert the count.
"""

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
    """Records every collective issued inside `with CollectiveCount() as count:`, then `count.issued`.

    As a `TorchDispatchMode`, the counter sees collectives issued by any code, including DTensor.
    The axes of a collective are the mesh axes for which the process group was first requested; () for groups made
    outside Weft.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen: list[Collective] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor then runs local ops, and this mode sees the collectives among the local ops
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
        """Number of collectives of each kind since the last `take` or `take_each`."""
        return Counter(each.kind for each in self._seen)

    def take(self) -> Counter[str]:
        """Return the number of collectives of each kind since the last call, and start again from zero."""
        return Counter(each.kind for each in self.take_each())

    def take_each(self) -> list[Collective]:
        """Return the collectives issued since the last call, in order, and start a new list."""
        taken, self._seen = self._seen, []
        return taken
