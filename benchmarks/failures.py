"""What another package's way raises is told and ends no run; what Weft's own ways raise ends it."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

from benchmarks.record import ours, printable


class Failures(dict[str, str]):
    """Why each way failed, in one line."""

    @contextmanager
    def of(self, way: str) -> Iterator[None]:
        """What fails inside is kept as a failure of the way, and the memory that it held is freed; Weft's is raised."""
        try:
            yield
        except Exception as error:  # whatever a package that is not ours does on this machine
            if ours(way):
                raise
            self[way] = printable(f"{type(error).__name__}: {error}".splitlines()[0])
            traceback.clear_frames(error.__traceback__)  # which hold the tensors of a call that ran out of memory
            gc.collect()
            with suppress(RuntimeError):  # of a GPU that no longer answers: each way tells that itself
                torch.cuda.empty_cache()
