"""Charts as inline SVG, which scales, prints, and gets its colours from the page. All text is escaped.

The number of a run determines its colour, dash and marker in all charts (the classes s0, s1, … of the style sheet).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from sdrseg.colours import DASHES, MARKERS

WIDTH, HEIGHT = 340, 214
LEFT, RIGHT, TOP, BOTTOM = 44, 12, 12, 38
NAME_WIDTH = 110  # of the class names next to the forgetting chart
ROW = 18
RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True)
class Series:
    """A line: points in order, None where there is no value."""

    label: str
    style: int
    x: Sequence[float]
    y: Sequence[float | None]


@dataclass(frozen=True)
class Axes:
    """Ranges, ticks and names of the axes of a chart."""

    x: tuple[float, float]
    y: tuple[float, float]
    x_ticks: Sequence[tuple[float, str]]
    x_name: str
    y_name: str
    log: bool = False
    ruled: Sequence[float] = ()  # positions of vertical lines

    def across(self, value: float) -> float:
        low, high = self.x
        return LEFT + (value - low) / ((high - low) or 1) * (WIDTH - LEFT - RIGHT)

    def down(self, value: float) -> float:
        low, high = (math.log10(v) for v in self.y) if self.log else self.y
        value = math.log10(max(value, self.y[0])) if self.log else value
        return HEIGHT - BOTTOM - (value - low) / ((high - low) or 1) * (HEIGHT - TOP - BOTTOM)

    def y_ticks(self) -> list[tuple[float, str]]:
        if self.log:
            return log_ticks(*self.y)
        step = nice_step(self.y[1] - self.y[0])
        first = math.ceil(self.y[0] / step - 1e-9)
        return [(n * step, f"{n * step:g}") for n in range(first, math.floor(self.y[1] / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[tuple[float, str]]:
    """A few powers of ten; on a short axis also 2 and 5 times these."""
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    every = max(1, math.ceil((last - first) / 6))
    factors = (1, 2, 5) if last - first <= 2 else (1,)
    ticks = [(f * 10.0**p, p) for p in range(first, last + 1, every) for f in factors]
    inside = [(v, p) for v, p in ticks if low * 0.999 <= v <= high * 1.001]
    return [
        (v, f"{v:g}" if -3 < p < 4 else f"{v / 10.0**p:g}·10".removeprefix("1·") + str(p).translate(RAISED))
        for v, p in inside
    ]


def nice_step(span: float, parts: int = 5) -> float:
    """1, 2 or 5 times a power of ten that divides a span into about `parts` parts."""
    raw = max(span, 1e-12) / parts
    power = 10 ** math.floor(math.log10(raw))
    return float(next(f * power for f in (1, 2, 5, 10) if f * power >= raw * 0.999))


def nice_range(values: Sequence[float], zero: bool = True) -> tuple[float, float]:
    """A range with round ends that contains all values (and 0)."""
    low, high = min([*values, *([0.0] if zero else [])]), max([*values, *([0.0] if zero else [])])
    step = nice_step((high - low) or abs(high) or 1)
    return math.floor(low / step + 1e-9) * step, (math.ceil(high / step - 1e-9) or 1) * step


def lines(
    series: Sequence[Series],
    axes: Axes,
    name: str,
    markers: bool = True,
    text_of: Callable[[float], str] = "{:.1f}".format,
) -> Markup:
    """A line chart. `name` is its text alternative, for screen readers."""
    parts = [_frame(axes)]
    for one in series:
        points = [
            None if y is None else (axes.across(x), axes.down(y), f"{one.label}, {axes.x_name} {x:g}: {text_of(y)}")
            for x, y in zip(one.x, one.y, strict=True)
        ]
        dash = DASHES[one.style % len(DASHES)]
        path, pen = "", "M"
        for point in points:
            path += "" if point is None else f"{pen}{point[0]:.1f} {point[1]:.1f}"
            pen = "M" if point is None else "L"
        parts.append(Markup('<path class="line s{}" d="{}" stroke-dasharray="{}"/>').format(one.style, path, dash))
        neighbours = [None, *points, None]
        for before, point, after in zip(neighbours, points, neighbours[2:], strict=False):
            if point is not None and (markers or not (before or after)):  # a single point is not a line
                parts.append(marker(*point[:2], one.style, point[2]))
    return _svg(WIDTH, HEIGHT, name, parts)


def dots(rows: Sequence[tuple[str, Sequence[float | None]]], labels: Sequence[str], name: str) -> Markup:
    """A row per class and a marker per run: values in points, with a line at 0."""
    known = [v for _, values in rows for v in values if v is not None]
    low, high = nice_range(known or [0.0, 1.0])
    height, width = TOP + len(rows) * ROW + 24, 420

    def across(value: float) -> float:
        return NAME_WIDTH + 14 + (value - low) / ((high - low) or 1) * (width - NAME_WIDTH - 28)

    parts = []
    step = nice_step(high - low, 6)
    bottom = TOP + len(rows) * ROW
    for n in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1):
        x, kind = across(n * step), "zero" if n == 0 else "grid"
        parts.append(Markup('<path class="{}" d="M{:.1f} {}V{}"/>').format(kind, x, TOP, bottom))
        parts.append(_text(x, bottom + 15, f"{n * step:g}", "middle"))
    for number, (label, values) in enumerate(rows):
        y = TOP + (number + 0.5) * ROW
        parts.append(Markup('<path class="grid" d="M{} {:.1f}H{}"/>').format(NAME_WIDTH + 8, y, width - 8))
        parts.append(_text(NAME_WIDTH + 4, y + 4, _short(label, 17), "end", label))
        lane = min(4.5, 11 / len(labels))  # runs side by side, so that equal values do not hide each other
        parts += [
            marker(across(v), y + lane * (n - (len(labels) - 1) / 2), n, f"{label}, {labels[n]}: {v:+z.1f} points", 3.2)
            for n, v in enumerate(values)
            if v is not None
        ]
    return _svg(width, height, name, parts, "wide")


def scatter(
    points: Mapping[int, Sequence[tuple[float, float]]],
    colours: Sequence[str],
    box: tuple[float, float, float, float],
    name: str,
) -> Markup:
    """Points of classes (by channel), one path per class; `box` is (x low, x high, y low, y high)."""
    side, edge = 300, 8
    parts = [Markup('<rect class="plot" x="1" y="1" width="298" height="298" rx="4"/>')]
    for channel, cells in points.items():
        path = "".join(
            f"M{edge + (x - box[0]) / ((box[1] - box[0]) or 1) * (side - 2 * edge):.0f} "
            f"{side - edge - (y - box[2]) / ((box[3] - box[2]) or 1) * (side - 2 * edge):.0f}h0"
            for x, y in cells
        )
        parts.append(
            Markup('<path class="cloud" data-channel="{}" stroke="{}" d="{}"/>').format(channel, colours[channel], path)
        )
    return _svg(side, side, name, parts)


def marker(x: float, y: float, style: int, title: str = "", r: float = 3.6) -> Markup:
    """The marker of a run, with a tooltip."""
    kind = MARKERS[style % len(MARKERS)]
    shapes = {
        "circle": f"M{x - r:.1f} {y:.1f}a{r} {r} 0 1 0 {2 * r} 0a{r} {r} 0 1 0 {-2 * r} 0z",
        "square": f"M{x - r:.1f} {y - r:.1f}h{2 * r}v{2 * r}h{-2 * r}z",
        "triangle": f"M{x:.1f} {y - 1.2 * r:.1f}l{1.2 * r:.1f} {2.1 * r:.1f}h{-2.4 * r:.1f}z",
        "diamond": f"M{x:.1f} {y - 1.4 * r:.1f}l{1.3 * r:.1f} {1.4 * r:.1f}l{-1.3 * r:.1f} {1.4 * r:.1f}"
        f"l{-1.3 * r:.1f} {-1.4 * r:.1f}z",
        "cross": f"M{x - r:.1f} {y - r:.1f}l{2 * r} {2 * r}m0 {-2 * r}l{-2 * r} {2 * r}",
        "ring": f"M{x - r:.1f} {y:.1f}a{r} {r} 0 1 0 {2 * r} 0a{r} {r} 0 1 0 {-2 * r} 0z",
    }
    tooltip = Markup("<title>{}</title>").format(title) if title else ""
    return Markup('<path class="mark {} s{}" d="{}">{}</path>').format(kind, style, shapes[kind], tooltip)


def swatch(style: int) -> Markup:
    """A short piece of the line of a run, for legends."""
    dash = DASHES[style % len(DASHES)]
    line = Markup('<path class="line s{}" d="M1 7H33" stroke-dasharray="{}"/>').format(style, dash)
    return Markup('<svg class="swatch" viewBox="0 0 34 14" aria-hidden="true">{}{}</svg>').format(
        line, marker(17, 7, style)
    )


def _frame(axes: Axes) -> Markup:
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    parts = []
    for value, label in axes.y_ticks():
        y = axes.down(value)
        parts.append(Markup('<path class="grid" d="M{} {:.1f}H{}"/>').format(LEFT, y, right))
        parts.append(_text(LEFT - 5, y + 4, label, "end"))
    ruled = Markup('<path class="ruled" d="M{:.1f} {}V{}"/>')
    parts += [ruled.format(axes.across(value), TOP, bottom) for value in axes.ruled]
    parts.append(Markup('<path class="axis" d="M{} {}H{}"/>').format(LEFT, bottom, right))
    parts += [_text(axes.across(value), bottom + 14, label, "middle") for value, label in axes.x_ticks]
    parts.append(_text((LEFT + right) / 2, HEIGHT - 5, axes.x_name, "middle"))
    parts.append(
        Markup(
            '<text class="label" transform="translate(10 {:.0f}) rotate(-90)" text-anchor="middle">{}</text>'
        ).format((TOP + bottom) / 2, axes.y_name)
    )
    return Markup("").join(parts)


def _text(x: float, y: float, text: str, anchor: str, title: str = "") -> Markup:
    tooltip = Markup("<title>{}</title>").format(title) if title and title != text else ""
    return Markup('<text class="label" x="{:.1f}" y="{:.1f}" text-anchor="{}">{}{}</text>').format(
        x, y, anchor, text, tooltip
    )


def _short(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


def _svg(width: int, height: int, name: str, parts: Sequence[Markup], kind: str = "") -> Markup:
    return Markup('<svg class="chart {}" role="img" aria-label="{}" viewBox="0 0 {} {}">{}</svg>').format(
        kind, name, width, height, Markup("").join(escape(part) for part in parts)
    )
