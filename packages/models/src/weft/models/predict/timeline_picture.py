"""Draws a timeline: as SVG to read and print, and as JSON for Perfetto (ui.perfetto.dev) or chrome://tracing."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from html import escape
from itertools import accumulate, groupby
from typing import Any, NamedTuple

from .timeline import DEVICE, PARTS, Span, Timeline

# Okabe and Ito's colors, distinct for color-blind readers too.
_COLORS = {
    "products": "#0072b2",
    "attention": "#56b4e9",
    "memory_bound": "#009e73",
    "optimizer": "#cc79a7",
    "communication": "#e69f00",
    "bubble": "#ffffff",
    "host": "#999999",
    "F": "#56b4e9",
    "B": "#0072b2",
    "I": "#0072b2",
    "W": "#009e73",
}
_ACTIONS = {"F": "forward", "B": "backward", "I": "backward of inputs", "W": "backward of weights"}
_DARK = {"products", "memory_bound", "B", "I", "W"}  # colors on which text is white

_LEFT, _WIDTH, _RIGHT = 130, 1040, 30  # pixels: labels of rows, the step, the margin
_ROW, _GAP = 26, 8
_BREAK = 34  # width of a `Repeated` time
_SMALLEST = 0.8  # width of a rectangle; shorter spans are drawn together
_LETTER = 6.3  # mean width of a letter in text of 11 pixels


class _Box(NamedTuple):
    """A rectangle of a row, for a span, or for short neighbouring spans in the most frequent color."""

    left: float
    right: float
    color: str  # key of _COLORS
    text: str  # in the rectangle, where it has room
    title: str  # shown by a pointer


def timeline_json(timeline: Timeline) -> str:
    """The spans as chrome's trace events: a row for each stream, times in microseconds, args with module and part.

    timeline: with spans. Each `Repeated` is an event in an extra row.
    """
    events: list[dict[str, Any]] = []
    rows = [*timeline.streams, *(["left out"] if timeline.repeated else [])]
    labels = _labels(timeline)
    for row, stream in enumerate(rows):
        named = {"ph": "M", "name": "thread_name", "pid": 0, "tid": row, "args": {"name": labels.get(stream, stream)}}
        ordered = {"ph": "M", "name": "thread_sort_index", "pid": 0, "tid": row, "args": {"sort_index": row}}
        events += [named, ordered]
    number = {stream: row for row, stream in enumerate(rows)}
    for span in timeline.spans:
        args = {"module": span.module, "part": span.part, "where": span.where}
        events.append(_event(number[span.stream], span.name, span.begin, span.end, span.part, args))
    for each in timeline.repeated:
        name = _copies(each.copies)
        events.append(_event(number["left out"], name, each.begin, each.end, "left out", {"copies": each.copies}))
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events})


def _event(row: int, name: str, begin: float, end: float, category: str, args: dict[str, Any]) -> dict[str, Any]:
    times = {"ts": round(begin * 1e6, 3), "dur": round((end - begin) * 1e6, 3)}
    return {"ph": "X", "pid": 0, "tid": row, "name": name, "cat": category, **times, "args": args}


def timeline_svg(timeline: Timeline, title: str = "") -> str:
    """A picture of the step as SVG: the shares of the parts, then a row for each stream, with time across.

    timeline: with spans. Each `Repeated` is drawn short, with the number of copies. Titles of rectangles: name, module
    and time.
    """
    axis = _Axis(timeline)
    labels = _labels(timeline)
    is_pipeline = all(stream.startswith("pp=") for stream in timeline.streams)
    rows: list[str] = []
    y = 30.0
    if title:
        rows.append(_text(_LEFT, y, title, size=15, weight="bold"))
        y += 14
    rows += _shares(timeline, y)
    y += 2 * _ROW + 3 * _GAP
    top = y
    phases = list(_phases(timeline, axis))
    if phases:
        rows += _row("", phases, y)
        y += _ROW + _GAP + 8
        top = y
    for stream in timeline.streams:
        spans = sorted((each for each in timeline.spans if each.stream == stream), key=lambda span: span.begin)
        rows += _row(labels[stream], list(_boxes(spans, axis, is_pipeline)), y)
        y += _ROW + _GAP
    for each in timeline.repeated:
        left, right = axis.x(each.begin), axis.x(each.end)
        rows.append(
            f'<rect x="{left:.1f}" y="{top:.1f}" width="{right - left:.1f}" height="{y - top - _GAP:.1f}" '
            f'fill="url(#left-out)" stroke="#bbbbbb"><title>{escape(_copies(each.copies))} of the work before, '
            f"{_seconds(each.end - each.begin)}</title></rect>"
        )
        rows.append(_text((left + right) / 2, top - 3, f"×{each.copies}", anchor="middle", size=10))
    rows += _scale(axis, y)
    y += 34
    rows += _legend(timeline, is_pipeline, y)
    width, height = _LEFT + _WIDTH + _RIGHT, y + 20
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:.0f}" width="{width}" '
        f'height="{height:.0f}" font-family="Helvetica, Arial, sans-serif" font-size="11">\n'
        f"<title>{escape(title or 'timeline of a step')}</title>\n"
        '<defs><pattern id="left-out" width="6" height="6" patternUnits="userSpaceOnUse" '
        'patternTransform="rotate(45)"><rect width="6" height="6" fill="#ffffff"/>'
        '<line x1="0" y1="0" x2="0" y2="6" stroke="#dddddd" stroke-width="2"/></pattern></defs>\n'
        f'<rect width="{width}" height="{height:.0f}" fill="#ffffff"/>\n' + "\n".join(rows) + "\n</svg>\n"
    )


class _Axis:
    """Turns seconds into pixels: proportional, except that each `Repeated` time is `_BREAK` wide."""

    def __init__(self, timeline: Timeline) -> None:
        end = max((span.end for span in timeline.spans), default=timeline.seconds)
        self.seconds = max(end, timeline.seconds)
        breaks = sorted((each.begin, each.end) for each in timeline.repeated)
        edges = [0.0, *(time for pair in breaks for time in pair), self.seconds]
        self._is_break = [i % 2 == 1 for i in range(len(edges) - 1)]
        shown = sum(b - a for a, b, is_break in zip(edges, edges[1:], self._is_break, strict=False) if not is_break)
        wide = min(_BREAK, _WIDTH / 2 / max(1, len(breaks)))
        scale = (_WIDTH - wide * len(breaks)) / shown if shown else 0.0
        widths = [
            wide if is_break else (b - a) * scale
            for a, b, is_break in zip(edges, edges[1:], self._is_break, strict=False)
        ]
        self._edges, self._widths = edges, widths
        self._lefts = list(accumulate(widths, initial=float(_LEFT)))

    def x(self, seconds: float) -> float:
        part = min(max(0, bisect_right(self._edges, seconds) - 1), len(self._widths) - 1)
        begin, end = self._edges[part], self._edges[part + 1]
        share = (seconds - begin) / (end - begin) if end > begin else 0.0
        return self._lefts[part] + min(1.0, share) * self._widths[part]

    def ticks(self) -> Iterator[float]:
        """Round times in seconds, about 90 pixels apart, outside breaks."""
        if not self.seconds:
            return
        shown = sum(b - a for a, b, skip in zip(self._edges, self._edges[1:], self._is_break, strict=False) if not skip)
        rough = shown / (_WIDTH / 90) or 1.0
        power = 10.0 ** (len(f"{int(1 / rough)}") * -1) if rough < 1 else 1.0
        step = next((power * each for each in (1, 2, 5, 10, 20, 50, 100) if power * each >= rough), rough)
        last = -1e9
        for i in range(int(self.seconds / step) + 1):
            x = self.x(i * step)
            is_inside = any(
                begin < i * step < end
                for begin, end, is_break in zip(self._edges, self._edges[1:], self._is_break, strict=False)
                if is_break
            )
            if not is_inside and x - last > 60:
                last = x
                yield i * step


def _boxes(spans: Sequence[Span], axis: _Axis, is_pipeline: bool) -> Iterator[_Box]:
    """The rectangles of a row's spans, in order."""
    short: list[tuple[float, float, str]] = []

    def together() -> Iterator[_Box]:
        if short:
            widths: dict[str, float] = {}
            for left, right, color in short:
                widths[color] = widths.get(color, 0.0) + right - left
            color = max(widths, key=widths.__getitem__)
            yield _Box(short[0][0], max(short[-1][1], short[0][0] + 0.3), color, "", f"{len(short)} short spans")
            short.clear()

    for span in spans:
        left, right = axis.x(span.begin), axis.x(span.end)
        action = is_pipeline and span.name[:1] in _ACTIONS and span.name[1:].isdigit()
        color = span.name[0] if action else span.part
        if short and (left - short[0][0] > 1 or right - left >= _SMALLEST):
            yield from together()
        if right - left < _SMALLEST:
            short.append((left, right, color))
            continue
        name = f"{span.name} {span.module}".strip()
        yield _Box(left, right, color, span.name, f"{name}: {_seconds(span.end - span.begin)}")
    yield from together()


def _phases(timeline: Timeline, axis: _Axis) -> Iterator[_Box]:
    """A rectangle for each phase of a microbatch, over the device's spans."""
    for where, group in groupby((each for each in timeline.spans if each.stream == DEVICE), lambda span: span.where):
        spans = list(group)
        begin, end = spans[0].begin, spans[-1].end
        text = where.replace(" of microbatch", "")
        yield _Box(axis.x(begin), axis.x(end), "bubble", text, f"{where}: {_seconds(end - begin)}")


def _row(label: str, boxes: Sequence[_Box], y: float) -> Iterator[str]:
    yield _text(_LEFT - 8, y + _ROW * 0.65, label, anchor="end")
    for box in boxes:
        width = box.right - box.left
        border = ' stroke="#777777" stroke-width="0.6"' if box.color == "bubble" or width > 6 else ""
        yield (
            f'<rect x="{box.left:.2f}" y="{y:.1f}" width="{width:.2f}" height="{_ROW}" fill="{_COLORS[box.color]}"'
            f"{border}><title>{escape(box.title)}</title></rect>"
        )
        if box.text and len(box.text) * _LETTER + 4 < width:
            fill = "#ffffff" if box.color in _DARK else "#111111"
            yield _text((box.left + box.right) / 2, y + _ROW * 0.65, box.text, anchor="middle", fill=fill)


def _shares(timeline: Timeline, y: float) -> Iterator[str]:
    """A bar with the share of each part of the step."""
    yield _text(_LEFT - 8, y + _ROW * 0.65, f"step {_seconds(timeline.seconds)}", anchor="end", weight="bold")
    left, texts = float(_LEFT), []
    for part in PARTS:
        share = timeline.parts[part] / timeline.seconds if timeline.seconds else 0.0
        if share <= 0:
            continue
        width = share * _WIDTH
        text = f"{'exposed ' * (part == 'communication')}{_name(part)} {share:.1%}"
        yield (
            f'<rect x="{left:.2f}" y="{y:.1f}" width="{width:.2f}" height="{_ROW}" fill="{_COLORS[part]}" '
            f'stroke="#777777" stroke-width="0.6"><title>{escape(text)}</title></rect>'
        )
        if share >= 0.0005:  # as text, 0.1 % or more
            texts.append((left, text))
        left += width
    for x, text in _without_overlap(texts):
        yield _text(x, y + _ROW + 13, text)


def _without_overlap(texts: Sequence[tuple[float, str]]) -> list[tuple[float, str]]:
    """(left, text) of each text, moved to cover neither the next text nor the right end of the step."""
    widths = [len(text) * _LETTER + 18 for _, text in texts]
    places, end = [], 0.0
    for (x, _), width in zip(texts, widths, strict=True):
        places.append(max(x, end))
        end = places[-1] + width
    end = float(_LEFT + _WIDTH + _RIGHT)
    for i in range(len(texts) - 1, -1, -1):
        places[i] = min(places[i], end - widths[i])
        end = places[i]
    return [(x, text) for x, (_, text) in zip(places, texts, strict=True)]


def _scale(axis: _Axis, y: float) -> Iterator[str]:
    yield f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{_LEFT + _WIDTH}" y2="{y:.1f}" stroke="#777777"/>'
    for seconds in axis.ticks():
        x = axis.x(seconds)
        yield f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{x:.1f}" y2="{y + 4:.1f}" stroke="#777777"/>'
        yield _text(x, y + 16, _seconds(seconds), anchor="middle", size=10)


def _legend(timeline: Timeline, is_pipeline: bool, y: float) -> Iterator[str]:
    if is_pipeline:
        kinds = dict.fromkeys(span.name[0] for span in timeline.spans if span.name[0] in _ACTIONS)
        entries = [(kind, _ACTIONS[kind]) for kind in kinds if kind != "I" or "B" not in kinds]
        entries += [(part, _name(part)) for part in ("communication", "optimizer")]
    else:
        entries = [(part, _name(part)) for part in PARTS if any(span.part == part for span in timeline.spans)]
    left = float(_LEFT)
    for key, name in entries:
        yield (
            f'<rect x="{left:.1f}" y="{y - 9:.1f}" width="11" height="11" fill="{_COLORS[key]}" stroke="#777777" '
            f'stroke-width="0.6"/>'
        )
        yield _text(left + 16, y, name)
        left += 34 + len(name) * _LETTER


def _labels(timeline: Timeline) -> dict[str, str]:
    """A short name for each stream: for a group, the axes, with a number where several groups share the axes."""
    labels: dict[str, str] = {}
    for stream in timeline.streams:
        label = stream
        if stream != DEVICE and not stream.startswith("pp="):
            first = next(span.name for span in timeline.spans if span.stream == stream)
            label = f"over {first.partition(' over ')[2]}"
            earlier = sum(each.partition(" (")[0] == label for each in labels.values())
            label = f"{label} ({earlier + 1})" if earlier else label
        labels[stream] = label
    return labels


def _name(part: str) -> str:
    return part.replace("_", "-")


def _copies(copies: int) -> str:
    return f"{copies} more {'copy' if copies == 1 else 'copies'}"


def _seconds(seconds: float) -> str:
    """A time to three digits, in s, ms or µs."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs" if seconds else "0"


def _text(x: float, y: float, text: str, **style: Any) -> str:
    names = {"anchor": "text-anchor", "size": "font-size", "weight": "font-weight", "fill": "fill"}
    attributes = "".join(f' {names[key]}="{value}"' for key, value in style.items())
    return f'<text x="{x:.1f}" y="{y:.1f}"{attributes}>{escape(text)}</text>'
