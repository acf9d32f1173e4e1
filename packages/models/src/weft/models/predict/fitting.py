"""Fits rates of ops to measured times, by least squares of relative errors. Absolute errors would favor long times."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from .chip import Rate
from .events import Compute


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A measured call of an op's part: the seconds, and the events that a trace has for the call."""

    events: tuple[Compute, ...]
    seconds: float

    @property
    def key(self) -> str:
        """The key in `Chip.ops`: op, part and dtype."""
        first = self.events[0]
        return f"{first.name}.{first.part}.{first.dtype}"


def fit_rates(
    samples: Iterable[Sample], product_seconds: Callable[[str, int, int, int], float | None]
) -> dict[str, Rate]:
    """Fit a rate to the samples of each key. Returns the rates by `Sample.key`.

    product_seconds: (dtype, M, N, K) -> seconds of a product; None where unknown. The rate of an op with products is
        fitted to the time beyond the products. Attention is fitted by operations.
    """
    by_key: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        by_key[sample.key].append(sample)
    return {key: _fit(each, product_seconds) for key, each in by_key.items()}


def fit_line(sizes: Sequence[float], seconds: Sequence[float]) -> Rate:
    """Fit seconds and seconds_per_byte, neither negative. sizes: bytes of each call. seconds: of each call."""
    ones = np.ones(len(sizes))
    a, b = least_squares(np.stack([ones, np.asarray(sizes, float)], 1), np.zeros(len(sizes)), np.asarray(seconds))
    return Rate(seconds=a, seconds_per_byte=b)


def _fit(samples: Sequence[Sample], product_seconds: Callable[[str, int, int, int], float | None]) -> Rate:
    seconds = np.array([each.seconds for each in samples])
    known, adds_products = np.zeros(len(samples)), True
    for i, sample in enumerate(samples):
        for event in sample.events:
            for batch, M, N, K in event.sizes if event.kind == "product" else ():
                of_product = product_seconds(event.dtype, M, N, K)
                adds_products = adds_products and of_product is not None
                known[i] += batch * (of_product or 0.0)
    adds_products = adds_products and bool(known.any())
    columns = [
        [sum(getattr(event, name) for event in sample.events) for sample in samples] for name in ("nbytes", "flops")
    ]
    ones = [len(sample.events) for sample in samples]
    if adds_products or not any(columns[1]):
        columns = columns[:1]
    if is_attention := all(event.kind == "attention" for sample in samples for event in sample.events):
        columns.append([sum(event.flops / event.sizes[0][-1] for event in sample.events) for sample in samples])
    found = least_squares(np.array([ones, *columns], float).T, known if adds_products else 0 * known, seconds)
    return Rate(
        seconds=found[0],
        seconds_per_byte=found[1],
        seconds_per_flop=found[2] if len(found) > 2 else 0.0,
        seconds_per_score=found[3] if is_attention else 0.0,
        adds_products=adds_products,
    )


def least_squares(rows: np.ndarray, known: np.ndarray, seconds: np.ndarray) -> list[float]:
    """The numbers x >= 0 with the least sum of ((known + rows @ x - seconds) / seconds) ** 2.

    rows: [n, k], with small k: every choice of numbers above 0 is tried. known, seconds: [n].
    """
    scaled, target = rows / seconds[:, None], (seconds - known) / seconds
    width = rows.shape[1]
    best, best_error = np.zeros(width), float(np.square(target).sum())
    for count in range(1, width + 1):
        for chosen in combinations(range(width), count):
            part = scaled[:, chosen]
            norms = np.linalg.norm(part, axis=0)
            if not norms.all():
                continue
            found, *_ = np.linalg.lstsq(part / norms, target, rcond=None)  # columns of very different sizes
            found = found / norms
            error = float(np.square(part @ found - target).sum())
            if (found >= 0).all() and error < best_error * (1 - 1e-12):
                best, best_error = np.zeros(width), error
                best[list(chosen)] = found
    return [float(each) for each in best]


def relative_errors(
    samples: Iterable[Sample], seconds_of: Callable[[Compute], float | None]
) -> Mapping[str, list[float]]:
    """The relative error of each sample, predicted / measured - 1, by `Sample.key`."""
    errors: dict[str, list[float]] = defaultdict(list)
    for sample in samples:
        errors[sample.key].append(sum(seconds_of(event) or 0.0 for event in sample.events) / sample.seconds - 1)
    return errors
