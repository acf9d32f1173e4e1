"""The load of experts as text: a line for each layer, a mark for each expert, drawn at the end of a run."""

from __future__ import annotations

import math
from collections.abc import Sequence

_MARKS = " ▁▂▃▄▅▆▇█"  # from no token to twice the mean or more
_MOST = 2.0  # the load, over the mean, of the highest mark


def draw_load(load: Sequence[Sequence[float]], layers: Sequence[int], width: int) -> str:
    """A heading, then a line for each layer: a mark for the load of each expert, over the layer's mean load.

    load: a row for each layer, with the number of tokens of each expert. layers: the layers' numbers. width: columns;
    in a layer with more experts than columns, neighbors share a mark, which shows the busiest expert.
    """
    label = max(len(f"layer {layer}") for layer in layers)
    columns = max(1, width - label - len("  busiest 10.00x"))
    each = math.ceil(len(load[0]) / columns)  # experts of a mark
    shared = f", {each} to a mark" if each > 1 else ""
    lines = [f"load of experts in the last steps (full height: {_MOST:g} times the mean or more{shared})"]
    for layer, row in zip(layers, load, strict=True):
        mean = sum(row) / len(row) or 1.0
        marks = "".join(_mark(max(row[i : i + each]) / mean) for i in range(0, len(row), each))
        lines.append(f"{f'layer {layer}':{label}} {marks}  busiest {max(row) / mean:.2f}x")
    return "\n".join(lines)


def _mark(share: float) -> str:
    """The mark of a load; a blank only for an expert without tokens. share: the load over the mean load."""
    steps = len(_MARKS) - 1
    return _MARKS[0 if share <= 0 else min(steps, max(1, round(share / _MOST * steps)))]
