"""Charts as SVG, drawn by hand, and the style of their page: readable without any network or library."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 760, 340
_LEFT, _RIGHT, _TOP, _BOTTOM = 104, 44, 16, 60
COLORS = 8

STYLE = """
:root{--ink:#1c2330;--soft:#5b6474;--line:#dfe3ea;--paper:#fff;--tint:#f4f6f9}
.c0{color:#7a5195}.c1{color:#1f6feb}.c2{color:#e8710a}.c3{color:#0f9d76}
.c4{color:#d6336c}.c5{color:#8a6d00}.c6{color:#0b7285}.c7{color:#6b7280}
@media(prefers-color-scheme:dark){:root{--ink:#e6e9ef;--soft:#a0a8b6;--line:#323a48;--paper:#14181f;--tint:#1c222c}
.c0{color:#b794d6}.c1{color:#6ea8fe}.c2{color:#ffa34d}.c3{color:#4fd1a5}
.c4{color:#f783ac}.c5{color:#e0c050}.c6{color:#66d9e8}.c7{color:#adb5bd}}
body{margin:0;background:var(--paper);color:var(--ink);font:15px/1.5 system-ui,sans-serif}
main{max-width:1320px;margin:0 auto;padding:24px 20px 60px}.ink{color:var(--ink)}
p,ul{max-width:860px}h1{font-size:1.35rem;overflow-wrap:anywhere}h2{font-size:1.1rem;margin:2.2em 0 .6em}
figure{margin:0 0 1.4em;max-width:860px}figcaption{font-weight:600}svg{width:100%;height:auto;display:block}
svg text{font-size:12px;fill:var(--soft)}.grid{stroke:var(--line)}.axis,.tick{stroke:var(--soft)}
@media(max-width:600px){svg text{font-size:19px}}
.line{fill:none;stroke:currentColor;stroke-width:2.2}.mark{fill:currentColor}
.legend{display:flex;flex-wrap:wrap;gap:4px 18px;color:var(--soft);font-size:13px}
.legend i{display:inline-block;width:18px;height:0;border-top:4px solid;margin-right:6px;vertical-align:middle}
.wide{overflow-x:auto}table{border-collapse:collapse;font-size:13px;white-space:nowrap;width:100%}
th,td{padding:5px 9px;text-align:right;border-bottom:1px solid var(--line)}th{color:var(--soft);font-weight:600}
th:first-child,td:first-child{text-align:left}tr.best td{background:var(--tint);font-weight:600}
pre{background:var(--tint);border-radius:8px;padding:12px 14px;
white-space:pre-wrap;overflow-wrap:anywhere;font-size:13px}
"""
"""Style of a page with charts and tables."""

Format = Callable[[float], str]
"""Function that writes a value of an axis."""


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a chart."""

    name: str
    points: Sequence[tuple[float, float]]
    """The points, by ascending x."""
    color: str
    """Class of the color, "c0" to "c7" or "ink"."""
    marks: bool = True
    """True (default) to mark each point."""
    line: bool = True
    """True (default) to connect the points."""


def percent(value: float) -> str:
    """Return a share as a percentage."""
    return f"{100 * value:.1f}%"


def dollars(value: float) -> str:
    """Return an amount of dollars."""
    return f"-${-value:,.0f}" if value < -0.5 else f"${max(value, 0.0):,.0f}"


def seconds(value: float) -> str:
    """Return a duration with a fitting unit."""
    return f"{value:.3g} s" if value >= 1 or value == 0 else f"{value * 1000:.3g} ms"


def line_chart(series: Sequence[Series], x_title: str, y_title: str, x_format: Format, y_format: Format) -> str:
    """Return a chart of lines over a logarithmic x axis.

    Args:
        series: the lines; those without points are left out.
        x_title: title of the x axis; its values are above 0.
        y_title: title of the y axis.
        x_format: writes a value of the x axis.
        y_format: writes a value of the y axis.
    """
    series = [line for line in series if line.points]
    xs = [x for line in series for x, _ in line.points]
    ys = [y for line in series for _, y in line.points]
    if not xs:
        return ""
    low, high = min(xs), max(xs)
    if low == high:
        low, high = low / 2, high * 2
    bottom, top, ticks = _scale(min(0.0, *ys), max(ys))

    def across(x: float) -> float:
        share = math.log(x / low) / math.log(high / low)
        return _LEFT + share * (WIDTH - _LEFT - _RIGHT)

    def up(y: float) -> float:
        return HEIGHT - _BOTTOM - (y - bottom) / (top - bottom) * (HEIGHT - _TOP - _BOTTOM)

    parts: list[str] = []
    for tick in ticks:
        y, kind = up(tick), "axis" if tick == 0 else "grid"
        parts.append(f'<line class="{kind}" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_text(_LEFT - 8, y + 4, y_format(tick), "end"))
    for exponent in range(math.ceil(math.log2(low) - 1e-9), math.floor(math.log2(high) + 1e-9) + 1):
        every = max(1, math.ceil(math.log2(high / low) / 6))
        if exponent % every == 0:
            x = across(2.0**exponent)
            parts.append(
                f'<line class="tick" x1="{x:.1f}" x2="{x:.1f}" y1="{HEIGHT - _BOTTOM}" y2="{HEIGHT - _BOTTOM + 5}"/>'
            )
            parts.append(_text(x, HEIGHT - _BOTTOM + 21, x_format(2.0**exponent), "middle"))
    for line in series:
        places = [(across(x), up(y)) for x, y in line.points]
        if line.line:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
            parts.append(f'<polyline class="line {line.color}" points="{path}"/>')
        if line.marks:
            for (x, y), (value_x, value_y) in zip(places, line.points, strict=True):
                tip = escape(f"{line.name}: {x_format(value_x)}, {y_format(value_y)}")
                parts.append(
                    f'<circle class="mark {line.color}" cx="{x:.1f}" cy="{y:.1f}" r="4.5"><title>{tip}</title></circle>'
                )
    parts.append(_text(_LEFT + (WIDTH - _LEFT - _RIGHT) / 2, HEIGHT - 10, x_title, "middle"))
    keys = "".join(f'<span><i class="{line.color}"></i>{escape(line.name)}</span>' for line in series)
    return (
        f"<figure><figcaption>{escape(y_title)}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(y_title)}">{"".join(parts)}</svg>'
        f'<div class="legend">{keys}</div></figure>'
    )


def _scale(low: float, high: float) -> tuple[float, float, list[float]]:
    """Return the ends of an axis that includes ``low`` and ``high``, and its ticks."""
    span = (high - low) or 1.0
    step = 10.0 ** math.floor(math.log10(span / 4))
    step *= next(factor for factor in (1, 2, 2.5, 5, 10) if span / (step * factor) <= 6)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    last = max(last, first + 1)
    return first * step, last * step, [number * step for number in range(first, last + 1)]


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
