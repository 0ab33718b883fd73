"""The report of a study: one HTML page with curves, a table, and the stack file to copy.

The page needs no network and no library: its charts are SVG, and its script has a few lines.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape

from tiering.api.units import parse_size
from tiering.replay.charts import Bar, Format, Series, bar_chart, dollars, line_chart, percent, seconds, size
from tiering.replay.page import SCRIPT, STYLE
from tiering.replay.result import ReplayResult
from tiering.replay.study import Study


def report_page(study: Study) -> str:
    """Return the page of a study as HTML."""
    best = study.best
    sections = [
        _summary(study, best),
        _curve(study),
        _sources(study),
        _swept(study),
        "<h2>All stacks</h2>" if len(study.results) > 1 else "<h2>In numbers</h2>",
        _table(study, best),
        _tiers(best, single=len(study.results) == 1),
        _stack(study, best),
        _assumptions(study),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>kv-tiering replay</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}</style></head><body><main><h1>Replay of {escape(', '.join(study.trace))}</h1>"
        f"{''.join(sections)}</main><script>{SCRIPT}</script></body></html>\n"
    )


def label(result: ReplayResult) -> str:
    """Return the swept values of a result in a few words: "64GiB arc"."""
    return " ".join(result.settings.values()) or "this stack"


def advice(study: Study) -> list[str]:
    """Return what the study says about buying, in sentences."""
    best = study.best
    lines = [
        (
            f"{percent(study.reuse)} of the {study.accesses:,} prompt blocks came before in the trace: "
            "no cache of any size serves more."
        )
    ]
    many = len(study.results) > 1
    subject = f"Of {len(study.results)} stacks, {label(best)} is the best buy: it" if many else "This stack"
    ideal = "" if best.ideal_hit_rate is None else f" (the optimum for its room is {percent(best.ideal_hit_rate)})"
    lines.append(
        f"{subject} serves {percent(best.hit_rate)} of the blocks{ideal}, and saves prefill worth "
        f"{dollars(best.dollars_saved_per_month)} a month for {dollars(best.dollars_per_month)} of tiers."
    )
    if seconds(best.ttft_mean) == seconds(best.ttft_mean_without):
        lines.append(f"The mean time to first token stays at {seconds(best.ttft_mean)}.")
    elif best.ttft_mean > best.ttft_mean_without:
        lines.append(
            f"The mean time to first token rises from {seconds(best.ttft_mean_without)} to {seconds(best.ttft_mean)}: "
            "a tier is too slow for this load. Look at its loads, at min_prefix_blocks and at a larger primary tier."
        )
    else:
        lines.append(
            f"The mean time to first token falls from {seconds(best.ttft_mean_without)} to {seconds(best.ttft_mean)}."
        )
    richer = sum(result.net_dollars_per_month > best.net_dollars_per_month for result in study.results)
    if richer:
        lines.append(
            f"{richer} of the stacks would save more money, and let requests wait longer for their first token than "
            "without tiers: they do not count."
        )
    for tier in best.tiers:
        offered = tier.blocks_dropped + tier.requests
        if tier.blocks_dropped > 0.05 * offered:
            lines.append(
                f"The tier {tier.name} dropped {tier.blocks_dropped:,} blocks that its medium was too slow to take: "
                "admission: second_touch writes less."
            )
        if tier.seconds_out_of_service:
            lines.append(
                f"The tier {tier.name} is saturated: {tier.loads_overdue:,} blocks came too late, and it served "
                f"nothing for {tier.seconds_out_of_service:,.1f} s of {best.trace_seconds:,.0f} s. A faster medium, "
                "or more capacity in front of it, gives these hits back."
            )
    return lines


def _summary(study: Study, best: ReplayResult) -> str:
    tiles = [
        ("hit rate", percent(best.hit_rate), f"at most {percent(study.reuse)} of any cache"),
        ("mean TTFT", seconds(best.ttft_mean), f"{seconds(best.ttft_mean_without)} without tiers"),
        ("prefill saved", f"{best.device_seconds_saved / 3600:,.2f} h", f"in {best.trace_seconds / 3600:,.2f} h"),
        ("net saving", f"{dollars(best.net_dollars_per_month)}", "a month"),
    ]
    cells = "".join(
        f"<div><b>{escape(value)}</b>{escape(name)}<small>{escape(note)}</small></div>" for name, value, note in tiles
    )
    text = "".join(f"<p>{escape(line)}</p>" for line in advice(study))
    return f'<div class="tiles">{cells}</div>{text}'


def _curve(study: Study) -> str:
    lru = [(float(point.capacity_bytes), point.lru) for point in study.curve]
    ideal = [(float(point.capacity_bytes), point.ideal) for point in study.curve if point.ideal is not None]
    measured = [
        (float(room), result.hit_rate)
        for result in study.results
        if (room := _room(result)) is not None and lru and room <= 2 * lru[-1][0]
    ]
    chart = line_chart(
        [
            Series("the optimum (Belady)", ideal, dashed=True),
            Series("LRU of this size", lru),
            Series("replayed stacks, by the capacity of all tiers", sorted(measured), line=False),
        ],
        "capacity for blocks",
        "Share of prompt blocks served",
        size,
        percent,
    )
    return f"<h2>How much capacity?</h2>{chart}"


def _room(result: ReplayResult) -> int | None:
    """Return the capacity of all tiers together; None if one has none."""
    sizes = [tier.capacity_bytes for tier in result.tiers]
    return None if None in sizes else sum(size or 0 for size in sizes)


def _sources(study: Study) -> str:
    names = [tier.name for tier in study.results[0].tiers]
    bars = [
        Bar(label(result), [tier.hit_rate for tier in result.tiers], result.ideal_hit_rate)
        for result in study.results[:48]
    ]
    chart = bar_chart(bars, names, "the optimum for this room", "Share of prompt blocks served, by tier", percent)
    return f"<h2>Which tier serves them?</h2>{chart}"


def _swept(study: Study) -> str:
    """Return the charts over the first swept size; nothing without one."""
    word = next((word for word, text in study.results[0].settings.items() if _is_size(text)), None)
    if word is None or len({result.settings[word] for result in study.results}) < 2:
        return ""
    lines: dict[str, list[ReplayResult]] = {}
    for result in study.results:
        others = " ".join(value for name, value in result.settings.items() if name != word)
        lines.setdefault(others, []).append(result)

    def chart(title: str, value: str, write: Format) -> str:
        series = [
            Series(name or title, [(parse_size(r.settings[word]), getattr(r, value)) for r in results], marks=True)
            for name, results in lines.items()
        ]
        return line_chart(series, word, title, size, write)

    return (
        "<h2>What does it save?</h2>"
        + chart("Net saving a month: prefill saved, minus the price of the tiers", "net_dollars_per_month", dollars)
        + chart("Mean time to first token", "ttft_mean", seconds)
        + chart("Time to first token that 1% of the requests exceed", "ttft_p99", seconds)
    )


def _is_size(text: str) -> bool:
    try:
        return not text.isdigit() and parse_size(text) > 0
    except ValueError:
        return False


def _table(study: Study, best: ReplayResult) -> str:
    swept = list(study.results[0].settings)
    head = [*swept, "hits", "optimum", "TTFT mean", "p50", "p99", "prefill saved"]
    head += ["saved / month", "tiers / month", "net / month"]
    rows = [
        f"<tr{' class=best' if result is best and swept else ''}>"
        + "".join(f"<td>{escape(cell)}</td>" for cell in _cells(result))
        + "</tr>"
        for result in study.results
    ]
    without = study.results[0]
    base = [
        *([""] * len(swept)), "0.0%", "", seconds(without.ttft_mean_without), seconds(without.ttft_p50_without),
        seconds(without.ttft_p99_without), "", "", "", "",
    ]  # fmt: skip
    if swept:
        base[0] = "without tiers"
    rows.append("<tr class=base>" + "".join(f"<td>{escape(cell)}</td>" for cell in base) + "</tr>")
    return _html_table(head, rows)


def _cells(result: ReplayResult) -> list[str]:
    return [
        *result.settings.values(),
        percent(result.hit_rate),
        "" if result.ideal_hit_rate is None else percent(result.ideal_hit_rate),
        seconds(result.ttft_mean),
        seconds(result.ttft_p50),
        seconds(result.ttft_p99),
        f"{result.device_seconds_saved / 3600:,.2f} h",
        dollars(result.dollars_saved_per_month),
        dollars(result.dollars_per_month),
        dollars(result.net_dollars_per_month),
    ]


def _tiers(result: ReplayResult, *, single: bool) -> str:
    head = [
        "tier",
        "capacity",
        "hits",
        "read",
        "written",
        "requests",
        "declined",
        "dropped",
        "overdue",
        "out of service",
        "price / month",
    ]
    rows = [
        "<tr>"
        + "".join(
            f"<td>{escape(cell)}</td>"
            for cell in (
                tier.name,
                "without limit" if tier.capacity_bytes is None else size(tier.capacity_bytes),
                percent(tier.hit_rate),
                size(tier.bytes_read),
                size(tier.bytes_written),
                f"{tier.requests:,}",
                f"{tier.blocks_declined:,}",
                f"{tier.blocks_dropped:,}",
                f"{tier.loads_overdue:,}",
                f"{tier.seconds_out_of_service:,.1f} s" if tier.seconds_out_of_service else "",
                dollars(tier.dollars_per_month),
            )
        )
        + "</tr>"
        for tier in result.tiers
    ]
    title = "The tiers" if single else f"The tiers of {label(result)}"
    return f"<h2>{escape(title)}</h2>" + _html_table(head, rows)


def _html_table(head: Sequence[str], rows: Sequence[str]) -> str:
    cells = "".join(f"<th>{escape(word)}</th>" for word in head)
    return f'<div class="wide"><table><thead><tr>{cells}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def _stack(study: Study, best: ReplayResult) -> str:
    options = "".join(
        f'<option value="{number}"{" selected" if result is best else ""}>{escape(label(result))}</option>'
        for number, result in enumerate(study.results)
    )
    choice = f'<select id="which">{options}</select> ' if len(study.results) > 1 else ""
    texts = json.dumps([result.stack for result in study.results]).replace("<", "\\u003c")
    return (
        "<h2>The stack file</h2>"
        f'<p>{choice}<button id="copy">Copy</button> Secrets are masked: fill them in again.</p>'
        f'<pre id="stack">{escape(best.stack)}</pre>'
        f'<script type="application/json" id="stacks">{texts}</script>'
    )


def _assumptions(study: Study) -> str:
    model = study.model
    items = [
        f"A block has {study.block_tokens} tokens and {size(study.block_bytes)}.",
        f"The trace has {study.distinct_blocks:,} distinct blocks ({size(study.distinct_blocks * study.block_bytes)}).",
        f"The engine computes {model.prefill_tokens_per_second:,.0f} prompt tokens a second.",
        f"Accelerators cost ${model.device_dollars_per_hour:g} an hour.",
        "Requests do not queue for the accelerators, so under load hits save more than this.",
        f"Loads into the accelerator run at {size(model.device_bytes_per_second)}/s.",
        f"CPU memory costs ${model.primary_dollars_per_gib_month:g} a GiB and month.",
        "Manager, eviction, admission, indexes and budgets are the real ones.",
        "A medium is a queue with a bandwidth and a latency.",
        "The trace starts with empty tiers, so a short trace understates what a running system serves.",
    ]
    text = "".join(f"<li>{escape(item)}</li>" for item in items)
    numbers = escape(json.dumps(model.model_dump(mode="json"), indent=1))
    details = f"<details><summary>All numbers of the model</summary><pre>{numbers}</pre></details>"
    return f"<h2>Assumptions</h2><ul>{text}</ul>{details}"
