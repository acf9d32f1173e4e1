"""Records the collectives that this rank starts, and its waits, in order."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from tests.support.collectives import Collectives


class Events(Collectives):
    """`with Events() as seen: ...`; then `seen.events` has each collective started, and "waited" for each wait.

    A test may append its computations in between.
    """

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []
        self.kinds = self.events

    def __enter__(self) -> Any:
        self._wait: Any = dist.Work.wait
        wait, events = self._wait, self.events

        def recorded(work: dist.Work, *args: Any, **kwargs: Any) -> Any:
            events.append("waited")
            return wait(work, *args, **kwargs)

        dist.Work.wait = recorded  # type: ignore[assignment,method-assign]
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> Any:
        dist.Work.wait = self._wait  # type: ignore[method-assign]
        return super().__exit__(*error)  # type: ignore[no-untyped-call]
