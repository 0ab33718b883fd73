"""The report of a study: a table of all stacks, and what they say about buying."""

from __future__ import annotations

from tiering.api.keys import PRIMARY_TIER
from tiering.api.units import format_bytes
from tiering.replay.replay import DEVICE
from tiering.replay.result import ReplayResult
from tiering.replay.study import Study
from tiering.replay.sweep import LEFT_OUT, NO_TIERS, SECONDARY

INCLUSION = "primary.inclusion"
"""Word of a stack that decides whether the CPU tier holds what the accelerator's own cache holds."""
LEAST_GAIN = 0.005
"""Share of the prompt blocks that another inclusion must serve to be recommended."""


def percent(value: float) -> str:
    """Return a share as a percentage."""
    return f"{100 * value:.1f}%"


def dollars(value: float) -> str:
    """Return an amount of dollars."""
    return f"-${-value:,.0f}" if value < -0.5 else f"${max(value, 0.0):,.0f}"


def seconds(value: float) -> str:
    """Return a duration with a fitting unit."""
    return f"{value:.3g} s" if value >= 1 or value == 0 else f"{value * 1000:.3g} ms"


def label(result: ReplayResult) -> str:
    """Return the settings of a result in a few words: "64GiB arc with local"."""
    words = [value for name, value in result.settings.items() if name != SECONDARY and value != LEFT_OUT]
    tiers = result.settings.get(SECONDARY)
    if tiers is not None:
        words = words or ["the stack"]
        words.append("without secondary tiers" if tiers == NO_TIERS else f"with {tiers}")
    return " ".join(words) or "this stack"


def advice(study: Study) -> list[str]:
    """Return what the study says about buying, in sentences."""
    best = study.best
    lines = [
        (
            f"{percent(study.reuse)} of the {study.accesses:,} prompt blocks came before in the trace: "
            "no cache of any size serves more."
        ),
        _verdict(study, best),
        _first_token(best),
    ]
    richer = sum(result.net_dollars_per_month > best.net_dollars_per_month for result in study.results)
    if richer:
        lines.append(
            f"{richer} of the stacks would save more money, and let requests wait longer for their first token than "
            "without tiers, in the mean or the slowest 1%: they do not count."
        )
    quicker = [r for r in study.results if not r.waits_longer and r.ttft_p99 <= best.ttft_p99 / 2]
    if quicker:
        other = max(quicker, key=lambda result: result.net_dollars_per_month)
        more = dollars(best.net_dollars_per_month - other.net_dollars_per_month)
        lines.append(
            f"For {more} a month less of net saving, {label(other)} shortens the time that 1% of the requests "
            f"exceed from {seconds(best.ttft_p99)} to {seconds(other.ttft_p99)}."
        )
    return [*lines, *_causes(best), *_prices(study, best), *_device_cache(study, best), *_troubles(best)]


def _causes(best: ReplayResult) -> list[str]:
    """Return the sentence about why tokens were computed, if the stack explains it."""
    if not best.causes:
        return []
    causes = ", ".join(f"{cause} {percent(tokens / best.computed_tokens)}" for cause, tokens in best.causes.items())
    return [f"Of the {best.computed_tokens:,} prompt tokens that {label(best)} computes: {causes}."]


def _verdict(study: Study, best: ReplayResult) -> str:
    many = len(study.results) > 1
    what = (
        f"serves {percent(best.hit_rate)} of the blocks, and saves prefill worth "
        f"{dollars(best.dollars_saved_per_month)} a month for {dollars(best.dollars_per_month)} of tiers."
    )
    if study.pays:
        subject = f"Of {len(study.results)} stacks, {label(best)} is the best buy: it" if many else "This stack"
        return f"{subject} {what}"
    why = "lets requests wait longer than without tiers" if best.waits_longer else "costs more than it saves"
    if many:
        return (
            f"Buy none of the {len(study.results)} stacks: none saves more than it costs and answers as soon as "
            f"without tiers. The least bad, {label(best)}, {why}: it {what}"
        )
    return f"This stack {why}: it {what}"


def _first_token(best: ReplayResult) -> str:
    """Return the sentence about the mean time to first token and its tail."""
    tail = "the time that 1% of the requests exceed "
    mean, tail = (
        f"{subject}stays at {seconds(now)}"
        if seconds(now) == seconds(without)
        else f"{subject}{'rises' if now > without else 'falls'} from {seconds(without)} to {seconds(now)}"
        for subject, now, without in (
            ("The mean time to first token ", best.ttft_mean, best.ttft_mean_without),
            (tail, best.ttft_p99, best.ttft_p99_without),
        )
    )
    remedy = (
        " A tier is too slow for this load. Look at its loads, at min_prefix_blocks and at a larger primary tier."
        if best.waits_longer
        else ""
    )
    return f"{mean}, {tail}.{remedy}"


def _prices(study: Study, best: ReplayResult) -> list[str]:
    """Return a sentence for each tier whose price exceeds the saving by its hits."""
    names = study.results[0].settings.get(SECONDARY)
    alike = [
        result
        for result in study.results
        if result.settings.get(SECONDARY) == names and _differ(result, best) <= {SECONDARY}
    ]
    full = max(alike, key=lambda result: result.net_dollars_per_month)
    lines = []
    for tier in full.tiers:
        price, saved = tier.dollars_per_month, tier.dollars_saved_per_month
        if tier.name == DEVICE or price <= saved or dollars(price) == dollars(saved):
            continue
        line = (
            f"The tier {tier.name} costs {dollars(price)} a month in {label(full)}, more than the "
            f"{dollars(saved)} that its hits save ({percent(tier.hit_rate)} of the blocks)"
        )
        others = "+".join(t.name for t in full.tiers if t.name not in {DEVICE, PRIMARY_TIER, tier.name}) or NO_TIERS
        for result in study.results:
            if result is not full and result.settings.get(SECONDARY) == others and _differ(result, full) <= {SECONDARY}:
                line += (
                    f": without it, the net saving is {dollars(result.net_dollars_per_month)} a month "
                    f"instead of {dollars(full.net_dollars_per_month)}"
                )
                break
        lines.append(f"{line}.")
    return lines


def _differ(one: ReplayResult, other: ReplayResult) -> set[str]:
    """Return the settings in which two results differ; words of tiers that are left out do not count."""
    pairs = ((word, {value, other.settings[word]}) for word, value in one.settings.items())
    return {word for word, values in pairs if len(values) == 2 and LEFT_OUT not in values}


def _device_cache(study: Study, best: ReplayResult) -> list[str]:
    """Return the sentence about a primary tier beside the accelerator's own cache."""
    cache = study.model.device_cache
    if cache is None:
        return [
            (
                "The accelerator's own prefix cache is not modelled, so its hits count for the tiers, and all CPU "
                "tiers are inclusive: give its size with --device-cache. An inclusive CPU tier that is smaller than "
                "that cache brings nothing by itself."
            )
        ]
    for result in study.results:
        if result is not best and _differ(result, best) == {INCLUSION}:
            word, other = best.settings[INCLUSION], result.settings[INCLUSION]
            return [
                (
                    f"With primary.inclusion: {word}, the tiers and the accelerator's own cache serve "
                    f"{percent(best.hit_rate)} of the blocks, and {percent(result.hit_rate)} with {other}. Of 100 "
                    f"prompt blocks, {100 * best.copied_blocks / study.accesses:.0f} are copied out of the accelerator "
                    f"with {word}, and {100 * result.copied_blocks / study.accesses:.0f} with {other}."
                )
            ]
    (room,) = (tier.capacity_bytes or 0 for tier in best.tiers if tier.name == PRIMARY_TIER)
    now, both = study.lru(max(room, cache)), study.lru(room + cache)
    if best.is_exclusive or both - now < LEAST_GAIN:
        return []
    nothing = ", so by itself it brings nothing" if room <= cache else ""
    return [
        (
            f"The CPU tier of {label(best)} ({format_bytes(room)}) holds what the accelerator's own cache "
            f"({format_bytes(cache)}) holds as well{nothing}. With primary.inclusion: exclusive, the two hit like one "
            f"cache of both sizes: {percent(both)} of the blocks instead of {percent(now)}, tiers behind them aside. "
            f"Compare with --sweep {INCLUSION}=inclusive,exclusive."
        )
    ]


def _troubles(best: ReplayResult) -> list[str]:
    lines = []
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


def table(study: Study) -> tuple[list[str], list[list[str]]]:
    """Return the heading and the rows of all results; the last row has no tiers."""
    swept, names = list(study.results[0].settings), [tier.name for tier in study.results[0].tiers]
    bounded = study.model.hinted_sessions > 0
    head = [*swept, *names, "hits", *["cpu optimum"] * bounded, "TTFT mean", "p50", "p99", "written"]
    head += ["saved/month", "tiers/month", "net/month"]
    rows = []
    for result in study.results:
        served = {tier.name: percent(tier.hit_rate) for tier in result.tiers}
        rows.append([
            *result.settings.values(),
            *(served.get(name, "") for name in names),
            percent(result.hit_rate),
            *([] if result.optimum is None else [percent(result.optimum)]),
            seconds(result.ttft_mean),
            seconds(result.ttft_p50),
            seconds(result.ttft_p99),
            format_bytes(sum(tier.bytes_written for tier in result.tiers)),
            dollars(result.dollars_saved_per_month),
            dollars(result.dollars_per_month),
            dollars(result.net_dollars_per_month),
        ])  # fmt: skip
    without = study.results[0]
    own = ["" if name != DEVICE else percent(without.tiers[0].hit_rate) for name in names]
    times = [without.ttft_mean_without, without.ttft_p50_without, without.ttft_p99_without]
    base = [*[""] * len(swept), *own, own[0] or "0.0%", *[""] * bounded, *map(seconds, times), "", "$0", "$0", "$0"]
    base[0] = "without tiers"
    return head, [*rows, base]
