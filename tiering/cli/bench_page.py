"""The page of ``bench``: plots and tables in one file without any network or library."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from tiering.cli.measure import Measured
from tiering.replay.charts import COLORS, Series, line_chart, seconds, size
from tiering.replay.page import STYLE


def bench_page(
    stack: str,
    measured: Sequence[Measured],
    sentences: Sequence[str],
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
) -> str:
    """Return the page.

    Args:
        stack: name of the stack.
        measured: the measurements.
        sentences: one sentence per break-even.
        headings: headings of the table.
        rows: rows of the table.
    """
    body = [f"<h1>Tiers of {escape(stack)}</h1>"]
    body += [f"<p>{escape(sentence)}</p>" for sentence in sentences]
    for tier in dict.fromkeys(found.tier for found in measured):
        body.append(f"<h2>{escape(tier)}</h2>")
        for direction in ("load", "store"):
            some = [found for found in measured if (found.tier, found.direction) == (tier, direction) and found.blocks]
            if some:
                body.append(_bandwidth(some, direction))
                body.append(_latency(some, direction))
    body.append("<h2>All measurements</h2>")
    body.append(_table(headings, rows))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>kv-tiering bench</title>'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<style>{STYLE}</style></head><body><main>{''.join(body)}</main></body></html>\n"
    )


def _bandwidth(some: Sequence[Measured], direction: str) -> str:
    depths = sorted({found.depth for found in some})
    lines = [
        Series(
            f"{depth} in flight",
            [(found.block_bytes, found.bytes_per_second / 1e9) for found in some if found.depth == depth],
            marks=True,
        )
        for depth in depths
    ]
    limits = {found.block_bytes: found.limit for found in some if found.depth == depths[-1] and found.limit}
    if limits:
        points = [(float(block), limit / 1e9) for block, limit in limits.items() if limit is not None]
        lines.append(Series(f"bare device, {depths[-1]} in flight", points, marks=True, dashed=True, color="ink"))
    return line_chart(lines, "bytes of a block", f"GB/s of {direction}s", size, lambda value: f"{value:.3g}")


def _latency(some: Sequence[Measured], direction: str) -> str:
    sizes = sorted({found.block_bytes for found in some})
    lines = [
        Series(
            f"{name}, blocks of {size(block)}",
            [(found.depth, getattr(found, name)) for found in some if found.block_bytes == block],
            marks=True,
            dashed=name == "p99",
            color=f"c{(number + COLORS // 2) % COLORS}",  # The first colors are those of the depths.
        )
        for number, block in enumerate(sizes)
        for name in ("p50", "p99")
    ]
    return line_chart(lines, "blocks in flight", f"latency of {direction}s", lambda value: f"{value:.0f}", seconds)


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    lines = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>'
