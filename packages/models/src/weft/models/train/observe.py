"""The collectives that a piece of a program really issues, seen where torch dispatches them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

_NOT_SENT = ("wait_tensor", "wrap_tensor_autograd")  # of the same namespace, but nothing travels
_KINDS = {
    "allreduce": "all-reduce",
    "reduce_scatter": "reduce-scatter",
    "allgather": "all-gather",
    "alltoall": "all-to-all",
    "broadcast": "broadcast",
    "send": "send",
    "recv": "recv",
    "barrier": "barrier",
}


class CollectiveCount(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts collectives by kind while it is entered: `with CollectiveCount() as count: ...; count.issued`.

    It stands at torch's dispatcher, so it sees whoever issues them, DTensor's own included.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.issued: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor unwraps first: what it issues then comes by here
        name = func.__name__.lstrip("_").replace("all_", "all")
        if func.namespace in ("c10d", "_c10d_functional") and not name.startswith(_NOT_SENT):
            self.issued[next((kind for prefix, kind in _KINDS.items() if name.startswith(prefix)), name)] += 1
        return func(*args, **(kwargs or {}))

    def take(self) -> Counter[str]:
        """What was issued since the last call."""
        taken, self.issued = self.issued, Counter()
        return taken
