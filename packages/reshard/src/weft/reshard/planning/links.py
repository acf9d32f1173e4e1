"""The cost of a message on each axis of a mesh."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weft.mesh.extension import is_number


@dataclass(frozen=True, slots=True)
class Link:
    """How fast a rank receives along an axis."""

    latency: float  #: seconds per message
    bandwidth: float  #: bytes per second

    def __post_init__(self) -> None:
        if not (is_number(self.latency) and 0 <= self.latency < math.inf):
            raise ValueError(f"a link's latency is {self.latency!r} s; give a finite number of seconds >= 0")
        if not (is_number(self.bandwidth) and self.bandwidth > 0):
            raise ValueError(f"a link's bandwidth is {self.bandwidth!r} bytes/s; give a number > 0")


UNUSED = Link(0.0, math.inf)  # for an axis of size 1, which carries no messages


@dataclass(frozen=True, slots=True, init=False)
class Links:
    """The links of a mesh's axes. `Topology` is the public form. between: None: the slowest of the axes' links."""

    links: tuple[tuple[str, Link], ...]  # (axis, link), sorted by axis
    between: Link  # between ranks of different meshes; by default the slowest of the axes' links

    def __init__(self, links: Mapping[str, Link], between: Link | None = None) -> None:
        if not isinstance(links, Mapping):
            raise ValueError(f"the links of the Topology are {links!r}; give the link of each axis by the axis' name")
        if not links:
            raise ValueError("the Topology has no axes; give the link of each axis, as in {'tp': Link(2e-6, 400e9)}")
        for axis, link in links.items():
            if not isinstance(link, Link):
                raise ValueError(f"axis {axis!r} has the link {link!r}; give Link(latency, bandwidth)")
        if between is not None and not isinstance(between, Link):
            raise ValueError(f"between is {between!r}; give Link(latency, bandwidth), or None")
        object.__setattr__(self, "links", tuple(sorted(links.items(), key=lambda item: item[0])))
        object.__setattr__(
            self, "between", between or min(links.values(), key=lambda link: (link.bandwidth, -link.latency))
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (dict(self.links), self.between)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({dict(self.links)}, between={self.between})"

    def link(self, axis: str) -> Link:
        """The link of `axis`. Raises ValueError for an axis without a link."""
        for name, link in self.links:
            if name == axis:
                return link
        axes = ", ".join(name for name, _ in self.links)
        raise ValueError(f"the topology has no link for axis {axis!r}; its axes are {axes}; give a link for each axis")

    def seconds(self, traffic: Mapping[str, tuple[int, int]]) -> float:
        """Time to receive all messages, one axis after the other.

        traffic: axis -> (messages, bytes), as {"tp": (3, 4096)}.
        """
        links = ((self.link(axis), *moved) for axis, moved in traffic.items())
        return sum(messages * link.latency + nbytes / link.bandwidth for link, messages, nbytes in links)
