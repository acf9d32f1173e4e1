"""Records errors of other packages' ways, so that the run continues. Errors of Weft's ways end the run."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

from benchmarks.record import ours, printable


class Failures(dict[str, str]):
    """The reason of each failed way, in one line."""

    @contextmanager
    def of(self, way: str) -> Iterator[None]:
        """Records an error raised inside as the failure of `way`, and frees the failed call's memory.

        Errors of Weft's ways are raised.
        """
        try:
            yield
        except Exception as error:  # packages may raise any error on this machine
            if ours(way):
                raise
            self[way] = printable(f"{type(error).__name__}: {error}".splitlines()[0])
            traceback.clear_frames(error.__traceback__)  # the frames hold the tensors of a call which ran out of memory
            gc.collect()
            with suppress(RuntimeError):  # if the GPU no longer answers, each further way fails, too
                torch.cuda.empty_cache()
