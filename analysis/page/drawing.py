"""The page's figures as inline SVG: real text, colours from the page's style sheet (so they follow its dark mode), no ids.

Every function returns finished mark-up; all texts in it are escaped here. Shapes differ as well as colours (circle and square,
filled and open), so the figures read without colour. Widths are in CSS pixels: figures are drawn at the size they are shown in.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

Bounds = tuple[float, float]
_LETTER = 6.3  # mean width of a letter of the 12 px labels, for placing them


@dataclass(frozen=True)
class Mark:
    """An estimate to draw: value, interval (or None), shape ("circle", "square", "diamond"), and its CSS class."""

    value: float | None
    low: float | None = None
    high: float | None = None
    shape: str = "circle"
    style: str = "em"


@dataclass(frozen=True)
class Point:
    """A labelled point of the scatter."""

    label: str
    x: float
    y: float
    shape: str = "circle"
    style: str = "em"


def ticks(low: float, high: float, most: int) -> list[float]:
    """Round numbers inside [low, high], at most ``most`` of them."""
    span = high - low
    if not span > 0:
        return [low]
    raw = span / max(1, most)
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= raw * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    values = [round(index * step, 10) + 0.0 for index in range(first, math.floor(high / step + 1e-9) + 1)]
    return values[:: 2 if len(values) > most else 1]


def bounds(values: Sequence[float | None], include: Sequence[float] = (), pad: float = 0.05) -> Bounds:
    """The range of the values and of ``include``, a little wider."""
    known = [value for value in [*values, *include] if value is not None and math.isfinite(value)]
    low, high = (min(known), max(known)) if known else (0.0, 1.0)
    if low == high:
        low, high = low - 1, high + 1
    margin = (high - low) * pad
    return low - margin, high + margin


def interval(mark: Mark, domain: Bounds, zero: bool, width: int = 132, height: int = 14) -> Markup:
    """One estimate with its interval for a table cell; the cell's text says the same, so it is hidden from screen readers."""
    if mark.value is None:
        return Markup("")
    middle = height / 2

    def x(value: float) -> float:
        return _scaled(value, domain, (5, width - 5))

    parts = [_line(0, middle, width, middle, "track")]
    if zero:
        parts.append(_line(x(0), 0, x(0), height, "zero"))
    if mark.low is not None and mark.high is not None:
        parts.append(_line(x(mark.low), middle, x(mark.high), middle, f"bar {mark.style}"))
    parts.append(_shape(x(mark.value), middle, mark.shape, mark.style))
    return _svg(width, height, parts, None, "cell")


def forest(
    rows: Sequence[tuple[str, Sequence[Mark]]], domain: Bounds, title: str, axis: str, width: int = 264, left: int = 128
) -> Markup:
    """Rows of estimates on a common horizontal axis; marks of one row stand below each other."""
    height_row = 30
    top, bottom = 24, 40
    height = top + height_row * len(rows) + bottom
    floor = height - bottom

    def x(value: float) -> float:
        return _scaled(value, domain, (left, width - 10))

    parts = [_text(0, 12, title, "title")]
    for value in ticks(*domain, 4):
        parts.append(_line(x(value), top, x(value), floor, "zero" if value == 0 else "grid"))
        parts.append(_text(x(value), floor + 16, _figure(value), "tick", "middle"))
    parts.append(_text((left + width - 10) / 2, height - 6, axis, "axis", "middle"))
    for at, (label, marks) in enumerate(rows):
        middle = top + height_row * (at + 0.5)
        parts.append(_text(left - 8, middle + 4, label, "label", "end"))
        for place, mark in enumerate(marks):
            y = middle + (place - (len(marks) - 1) / 2) * 9
            parts += _estimate(mark, domain, (left, width - 10), y)
    return _svg(width, height, parts, title)


def columns(
    values: Sequence[tuple[str, Mark]], domain: Bounds, title: str, axis: str, width: int = 264, height: int = 200
) -> Markup:
    """Estimates side by side over a categorical axis."""
    left, right, top, bottom = 34, 8, 24, 52
    floor = height - bottom

    def y(value: float) -> float:
        return _scaled(value, domain, (floor, top))

    parts = [_text(0, 12, title, "title")]
    for value in ticks(*domain, 5):
        parts.append(_line(left, y(value), width - right, y(value), "zero" if value == 0 else "grid"))
        parts.append(_text(left - 6, y(value) + 4, _figure(value), "tick", "end"))
    step = (width - left - right) / max(1, len(values))
    widest = max((len(label) for label, _ in values), default=1) * 5.9 + 4  # tick labels are smaller than the others
    every = max(1, math.ceil(widest / step))
    lines = 2 if every == 2 and len(values) < 12 else 1  # a few long names: on two lines in turn rather than left out
    for at, (label, mark) in enumerate(values):
        x = left + step * (at + 0.5)
        if mark.value is not None:
            if mark.low is not None and mark.high is not None:
                parts.append(_line(x, y(mark.low), x, y(mark.high), f"bar {mark.style}{' thin' if step < 9 else ''}"))
            parts.append(_shape(x, y(mark.value), mark.shape, mark.style, min(4.5, max(2.5, step / 2))))
        if at % every == 0 or lines == 2:
            parts.append(_text(x, floor + 16 + 12 * (at % lines), label, "tick", "middle"))
    parts.append(_text((left + width - right) / 2, height - 6, axis, "axis", "middle"))
    return _svg(width, height, parts, title)


def curve(
    low: Sequence[float], middle: Sequence[float], high: Sequence[float], own: int | None, title: str, width: int
) -> Markup:
    """Ascending values with a band around them, and a diamond at position ``own``."""
    height, left, right, top, bottom = 240, 40, 10, 24, 40
    domain = bounds([*low, *high], [0.0])
    floor, last = height - bottom, max(1, len(middle) - 1)

    def x(at: float) -> float:
        return left + (width - left - right) * at / last

    def y(value: float) -> float:
        return _scaled(value, domain, (floor, top))

    parts = [_text(0, 12, title, "title")]
    for value in ticks(*domain, 5):
        parts.append(_line(left, y(value), width - right, y(value), "zero" if value == 0 else "grid"))
        parts.append(_text(left - 6, y(value) + 4, _figure(value), "tick", "end"))
    kept = sorted({round(at * last / 299) for at in range(300)}) if last > 299 else list(range(len(middle)))
    upper = [f"{x(at):.1f},{y(high[at]):.1f}" for at in kept]
    lower = [f"{x(at):.1f},{y(low[at]):.1f}" for at in reversed(kept)]
    parts.append(Markup('<polygon class="band" points="{}"/>').format(" ".join([*upper, *lower])))
    line = " ".join(f"{x(at):.1f},{y(middle[at]):.1f}" for at in kept)
    parts.append(Markup('<polyline class="path em" points="{}"/>').format(line))
    if own is not None:
        parts.append(_shape(x(own), y(middle[own]), "diamond", "ours", 6))
    parts.append(_text((left + width - right) / 2, height - 6, f"{len(middle)} variants, worst to best", "axis", "middle"))
    return _svg(width, height, parts, title)


def steps(
    points: Sequence[tuple[float, Mark]],
    alone: Sequence[tuple[float, Mark]],
    title: str,
    axes: tuple[str, str],
    width: int = 264,
) -> Markup:
    """Values joined by a line over a numeric axis (the gate's curve), and others that stand ``alone``."""
    height, left, right, top, bottom = 200, 34, 12, 24, 40
    floor = height - bottom
    across = bounds([x for x, _ in [*points, *alone]])
    domain = bounds([mark.value for _, mark in [*points, *alone]], pad=0.15)

    def place(x: float, y: float) -> tuple[float, float]:
        return _scaled(x, across, (left, width - right)), _scaled(y, domain, (floor, top))

    parts = [_text(0, 12, title, "title")]
    for value in ticks(*domain, 5):
        y = place(across[0], value)[1]
        parts += [_line(left, y, width - right, y, "grid"), _text(left - 6, y + 4, _figure(value), "tick", "end")]
    for value in ticks(*across, 4):
        parts.append(_text(place(value, domain[0])[0], floor + 16, _figure(value), "tick", "middle"))
    joined, others = ([(*place(x, mark.value), mark) for x, mark in part if mark.value is not None] for part in (points, alone))
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in joined)
    parts.append(Markup('<polyline class="path em" points="{}"/>').format(line))
    ordered = sorted([*joined, *others], key=lambda entry: entry[2].style == "ours")
    parts += [_shape(x, y, mark.shape, mark.style) for x, y, mark in ordered]
    parts.append(_text((left + width - right) / 2, height - 6, axes[0], "axis", "middle"))
    return _svg(width, height, parts, f"{title}: {axes[1]} against {axes[0]}")


def scatter(points: Sequence[Point], axes: tuple[str, str], width: int, height: int) -> Markup:
    """Labelled points; labels are put where they cover no point and no other label, with a hairline where they stand off."""
    left, right, top, bottom = 44, 14, 12, 44
    floor = height - bottom
    across, domain = bounds([p.x for p in points], [0.0], 0.04), bounds([p.y for p in points], pad=0.08)

    def place(point: Point) -> tuple[float, float]:
        return _scaled(point.x, across, (left, width - right)), _scaled(point.y, domain, (floor, top))

    parts = []
    for value in ticks(*domain, 6):
        y = _scaled(value, domain, (floor, top))
        parts += [_line(left, y, width - right, y, "grid"), _text(left - 8, y + 4, _figure(value), "tick", "end")]
    for value in ticks(*across, 7 if width > 500 else 4):
        x = _scaled(value, across, (left, width - right))
        parts.append(_text(x, floor + 18, f"{value:,.0f}", "tick", "middle"))
    places = [place(point) for point in points]
    for point, (x, y), box in zip(points, places, _labels(points, places, (left, top, width - right, floor)), strict=True):
        if box is not None:
            middle_x, middle_y = (box[0] + box[2]) / 2, (box[1] + box[3]) / 2
            if abs(middle_y - y) > 14 or abs(middle_x - x) > (box[2] - box[0]) / 2 + 14:
                parts.append(_line(x, y, min(max(x, box[0]), box[2]), min(max(y, box[1]), box[3]), "leader"))
            parts.append(_text(box[0] + 2, box[3] - 3, point.label, "label ours" if point.style == "ours" else "label"))
    for point, (x, y) in sorted(zip(points, places, strict=True), key=lambda entry: entry[0].style == "ours"):
        parts.append(_shape(x, y, point.shape, point.style, 5))
    parts.append(_text((left + width - right) / 2, height - 6, axes[0], "axis", "middle"))
    turned = Markup('<text class="axis" text-anchor="middle" transform="translate(12 {:.0f}) rotate(-90)">{}</text>')
    parts.append(turned.format((top + floor) / 2, axes[1]))
    return _svg(width, height, parts, f"{axes[1]} against {axes[0]}")


_Box = tuple[float, float, float, float]


def _labels(points: Sequence[Point], places: Sequence[tuple[float, float]], frame: _Box) -> list[_Box | None]:
    """A box for each label: the nearest place around its point that stays in the frame and overlaps least."""
    taken: list[_Box] = [(x - 6, y - 6, x + 6, y + 6) for x, y in places]
    found: list[_Box | None] = []
    for point, (x, y) in zip(points, places, strict=True):
        wide, high = len(point.label) * _LETTER + 4, 15.0
        best: tuple[float, _Box] | None = None
        for distance in (8.0, 16.0, 26.0, 38.0, 52.0, 68.0, 86.0):
            for angle in range(0, 360, 30):
                dx, dy = math.cos(math.radians(angle)), math.sin(math.radians(angle))
                middle_x, middle_y = x + dx * (distance + wide / 2 * abs(dx)), y + dy * (distance + high / 2 * abs(dy))
                box = (middle_x - wide / 2, middle_y - high / 2, middle_x + wide / 2, middle_y + high / 2)
                if box[0] < frame[0] or box[1] < frame[1] or box[2] > frame[2] or box[3] > frame[3]:
                    continue
                badness = sum(_overlap(box, other) for other in taken) * 10 + distance
                if best is None or badness < best[0] - 1e-9:
                    best = (badness, box)
        found.append(best[1] if best else None)
        if best:
            taken.append(best[1])
    return found


def _overlap(a: _Box, b: _Box) -> float:
    return max(0.0, min(a[2], b[2]) - max(a[0], b[0])) * max(0.0, min(a[3], b[3]) - max(a[1], b[1]))


def _estimate(mark: Mark, domain: Bounds, place: Bounds, y: float) -> list[Markup]:
    if mark.value is None:
        return []
    parts = []
    if mark.low is not None and mark.high is not None:
        parts.append(_line(_scaled(mark.low, domain, place), y, _scaled(mark.high, domain, place), y, f"bar {mark.style}"))
    return [*parts, _shape(_scaled(mark.value, domain, place), y, mark.shape, mark.style)]


def _scaled(value: float, domain: Bounds, place: Bounds) -> float:
    share = (value - domain[0]) / (domain[1] - domain[0])
    return place[0] + (place[1] - place[0]) * min(1.0, max(0.0, share))


def _shape(x: float, y: float, shape: str, style: str, size: float = 4.5) -> Markup:
    if shape == "square":
        return Markup('<rect class="dot {}" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}"/>').format(
            style, x - size + 0.5, y - size + 0.5, 2 * size - 1, 2 * size - 1
        )
    if shape == "diamond":
        path = (
            f"M{x:.1f} {y - size - 1.5:.1f}l{size + 1.5} {size + 1.5}l{-size - 1.5} {size + 1.5}l{-size - 1.5} {-size - 1.5}z"
        )
        return Markup('<path class="dot {}" d="{}"/>').format(style, path)
    if shape == "cross":
        path = f"M{x - size:.1f} {y - size:.1f}l{2 * size} {2 * size}m0 {-2 * size}l{-2 * size} {2 * size}"
        return Markup('<path class="cross {}" d="{}"/>').format(style, path)
    return Markup('<circle class="dot {}" cx="{:.1f}" cy="{:.1f}" r="{:.1f}"/>').format(style, x, y, size)


def _line(x1: float, y1: float, x2: float, y2: float, style: str) -> Markup:
    return Markup('<line class="{}" x1="{:.1f}" y1="{:.1f}" x2="{:.1f}" y2="{:.1f}"/>').format(style, x1, y1, x2, y2)


def _text(x: float, y: float, text: str, style: str, anchor: str = "start") -> Markup:
    return Markup('<text class="{}" x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>').format(style, x, y, anchor, text)


def _svg(width: int, height: float, parts: Sequence[Markup], label: str | None, style: str = "plot") -> Markup:
    named = Markup('role="img" aria-label="{}"').format(label) if label else Markup('aria-hidden="true"')
    head = Markup('<svg class="{}" viewBox="0 0 {} {:.0f}" width="{}" height="{:.0f}" {}>').format(
        style, width, height, width, height, named
    )
    return head + Markup("").join(parts) + Markup("</svg>")


def _figure(value: float) -> str:
    text = f"{value:.2f}".rstrip("0").rstrip(".") if abs(value) < 10 else f"{value:,.0f}"
    return text.replace("-", "\N{MINUS SIGN}")


def estimate(record: Mapping[str, Any], name: str, shape: str = "circle", style: str = "em") -> Mark:
    """The mark of a stored estimate: columns ``name``, ``name_low``, ``name_high``."""
    return Mark(record.get(name), record.get(f"{name}_low"), record.get(f"{name}_high"), shape, style)
