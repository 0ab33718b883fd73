"""``top``: the tiers of a running engine, or of a service, on one screen, from its metrics."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

import click
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tiering.advisor.advisor import BRINGS_NOTHING
from tiering.api.units import format_bytes
from tiering.cli.metrics import Sample, fetch, metrics_url, parse, quantile
from tiering.cli.output import duration, rate, stdout
from tiering.cli.parameters import DURATION
from tiering.config.stack_file import load_stack
from tiering.connector.metrics import METRICS, SERVICE
from tiering.errors import StoreError
from tiering.manager.worth import LEAST, Saving

DEFAULT_URL = "http://127.0.0.1:8000"
"""Address of an engine whose address is not given: vLLM's default on this machine."""
CPU = "cpu"
"""Name of the primary tier in the metrics."""

_TROUBLES = tuple(metric.field for metric in METRICS if metric.is_trouble)
_SERVICE = {
    f"{SERVICE}_{word}": word
    for word in (
        *("connections", "refusals", "users_away"),
        *("orphaned_rows", "left_regions", "kept_blocks", "inherited_blocks"),
    )
}
_BAR_CELLS = 10
_NO_HITS = "0%"

WIDE = 100
"""Columns of a terminal from which on bars, latencies and active blocks are shown."""


HEADINGS = ("tier", "state", "full", "hits", "read", "write", "p50 / p99", "in/out", "troubles")
"""Headings of the table of tiers, which are the attributes of a :class:`Row`."""

ENGINE_HEADINGS = ("engine", "tier", "state", "rows", "busy", "loads", "shared", "stores", "waiting", "messages")
"""Headings of the table of a service's engines."""

_WIDE_ONLY = (6, 7)
"""Columns of tiers that only a wide terminal shows."""
_STYLES = {"up": "green", "down": "bold red", "missing": "bold red", "read-only": "yellow", "probing": "yellow"}


class Row(NamedTuple):
    """One tier on the screen, as text."""

    tier: str
    state: str
    """One word: up, down, read-only, recovering or probing."""
    full: str
    """Used and total bytes."""
    hits: str
    """Share of the queried blocks that were held."""
    reads: str
    """Bytes per second that are read from the medium, or their number since the start."""
    writes: str
    """Bytes per second that are written to the medium, or their number since the start."""
    latency: str
    """Upper bounds of the median and the 99th percentile of jobs."""
    active: str
    """Blocks being promoted and cascaded."""
    troubles: str
    """Counters of failures that are not 0."""


@click.command()
@click.argument("target", metavar="STACK|URL", type=click.Path())
@click.option("--url", help=f"Address of the engine, if STACK is given.  [default: {DEFAULT_URL}]")
@click.option("--interval", type=DURATION, default="2s", show_default=True, help="Time between two looks.")
@click.option("--once", is_flag=True, help="Print the numbers since the engine's start once. Default in a pipe.")
def top(target: str, url: str | None, interval: float, once: bool) -> int:
    """Show the tiers of a running engine, or of a machine's service and its engines, on one screen.

    The numbers are those of the Prometheus endpoint of the engine, summed over its replicas, or of the service. Rates,
    hits and latencies are those of the last interval; with --once, of the time since the start. With STACK, tiers are
    listed in its order, and tiers without metrics are shown as missing.

    \b
    Examples:
      kv-tiering top http://127.0.0.1:8000
      kv-tiering top stack.yaml --url http://gpu-7:8000
      kv-tiering top http://127.0.0.1:8000 --once | grep down
      kv-tiering top http://127.0.0.1:9400                # of kv-tiering serve --metrics
    """
    expected: Sequence[str] = ()
    if target.startswith(("http://", "https://")):
        if url is not None:
            raise click.UsageError("--url is for STACK; the address is given already")
        address = metrics_url(target)
    elif re.fullmatch(r"(\w[\w.-]*|\[[\da-f:]+\]):\d+(/\S*)?", target, re.ASCII):
        raise click.UsageError(f"an engine's address begins with http://; write http://{target}")
    else:
        expected = [CPU, *(options.tier_name for options in load_stack(target).secondary)]
        address = metrics_url(url or DEFAULT_URL)
    timeout = max(interval, 1.0)
    first = parse(fetch(address, timeout), time.monotonic())
    if f"{SERVICE}_responsive" in first.manager:
        expected = [name for name in expected if name != CPU]
    console = stdout()
    if once or not console.is_terminal:
        for line in Look(Sample(first.at), first, expected).lines():
            click.echo("\t".join(line).rstrip())
        return 0
    _watch(address, first, expected, interval, timeout)
    return 0


def _watch(address: str, first: Sample, expected: Sequence[str], interval: float, timeout: float) -> None:
    """Refresh the screen until Ctrl-C."""
    look, fault = Look(Sample(first.at), first, expected), ""
    with (
        suppress(KeyboardInterrupt),
        Live(look.screen(address, fault), console=stdout(), auto_refresh=False) as live,
    ):
        while True:
            time.sleep(interval)
            try:
                look = Look(look.now, parse(fetch(address, timeout), time.monotonic()), expected)
                fault = ""
            except StoreError as error:
                fault = str(error)
            live.update(look.screen(address, fault), refresh=True)


@dataclass(frozen=True, slots=True)
class Look:
    """Rows and sentences about the time between two samples."""

    before: Sample
    """The earlier sample; an empty one for the numbers since the start."""
    now: Sample
    """The later sample."""
    expected: Sequence[str] = ()
    """Names of the tiers of the stack, in its order; default: they are not known."""

    def lines(self) -> Iterator[Sequence[str]]:
        """Yield everything as lines of words, for a pipe."""
        yield from self.rows()
        for engine in self.engine_rows():
            yield "engine", *engine
        if service := self._service():
            yield "service", *service
        for tier, sentence in self.advice():
            yield tier, "size", sentence
        for tier, sentence in self.worths():
            yield tier, "worth", sentence

    def screen(self, address: str, fault: str) -> RenderableType:
        """Return everything as a screen, for a terminal.

        Args:
            address: address of the engine's metrics.
            fault: reason why there is no newer sample; empty if there is one.
        """
        wide = stdout().width >= WIDE
        shown = [column for column in range(len(HEADINGS)) if wide or column not in _WIDE_ONLY]
        tiers: list[list[str | Text]] = []
        for row in self.rows():
            cells: list[str | Text] = list(row)
            cells[1] = Text(row.state, style=_STYLES.get(row.state, "cyan"))
            cells[2] = f"{_bar(self.now.tiers.get(row.tier, {})) if wide else ''}{row.full}"
            cells[-1] = Text(row.troubles, style="yellow")
            tiers.append([cells[column] for column in shown])
        lines: list[RenderableType] = [Text(address, style="bold")]
        lines.append(_table([HEADINGS[column] for column in shown], tiers))
        if self.now.engines:
            lines.append(_table(ENGINE_HEADINGS, self.engine_rows()))
        lines += [Text(f"{tier}: {sentence}") for tier, sentence in [*self.advice(), *self.worths()]]
        lines.append(Text("   ".join(self._summary())))
        if fault:
            lines.append(Text(f"{fault}; trying again", style="bold red"))
        lines.append(Text("Ctrl-C ends", style="dim"))
        return Group(*lines)

    @property
    def _names(self) -> list[str]:
        """Names of the tiers of the stack in its order, then those of the other tiers with metrics."""
        others = (name for name in self.now.tiers if name not in self.expected)
        return [*self.expected, *sorted(others, key=lambda name: name != CPU)]

    def rows(self) -> Iterator[Row]:
        """Yield the tiers of the stack, also those without metrics, then the others."""
        for name in self._names:
            if name in self.now.tiers:
                yield self._row(name)
            else:
                yield Row(name, "missing", "-", "-", "-", "-", "-", "-", "the engine has no metrics of it")

    def _row(self, name: str) -> Row:
        before, now = self.before, self.now
        values, earlier = now.tiers[name], before.tiers.get(name, {})

        def grown(word: str) -> float:
            return values.get(word, 0.0) - earlier.get(word, 0.0)

        def speed(word: str) -> str:
            if word not in values:
                return "-"
            elapsed = now.at - before.at
            return rate(grown(word) / elapsed) if elapsed > 0 else format_bytes(int(grown(word)))

        used, capacity = values.get("occupancy_bytes"), values.get("capacity_bytes")
        full = "-" if used is None else format_bytes(int(used))
        if used is not None and capacity:
            full = f"{full} of {format_bytes(int(capacity))}"
        queries = grown("queries")
        bounds, bounds_before = now.latency.get(name, {}), before.latency.get(name, {})
        half, most = quantile(bounds, bounds_before, 0.5), quantile(bounds, bounds_before, 0.99)
        active = f"{values.get('promotions_active', 0):.0f}/{values.get('cascades_active', 0):.0f}"
        troubles = [f"{word} {grown(word):.0f}" for word in _TROUBLES if grown(word) > 0]
        return Row(
            name,
            _state(values),
            full,
            f"{100 * grown('hits') / queries:.1f}%" if queries > 0 else "-",
            speed("read_bytes"),
            speed("written_bytes"),
            "-" if half is None or most is None else f"≤{duration(half)} / ≤{duration(most)}",
            active if name != CPU else "-",
            ", ".join(troubles),
        )

    def advice(self) -> Iterator[tuple[str, str]]:
        """Yield each tier with a sentence about its size, from the size advisor's estimates.

        Estimates of several replicas count as their mean. Tiers without estimates are left out: a bucket has no
        capacity, and the advisor may be off. So are tiers that would have no hits at any estimated capacity.
        """
        for name in filter(self.now.estimates.__contains__, self._names):
            rates = {
                factor: f"{100 * fmean(values):.0f}%" for factor, values in sorted(self.now.estimates[name].items())
            }
            now, half, twice = rates.get(1.0), rates.get(0.5), rates.get(2.0)
            if now is None or half is None or twice is None:
                continue
            hits = "hits" if name == CPU else "hits, with all faster tiers,"
            better = next((factor for factor, text in rates.items() if factor > 1 and text != now), None)
            if better is not None and (better == 2 or now == _NO_HITS):
                times = "twice" if better == 2 else f"{better:g} times"
                why = f": {BRINGS_NOTHING}" if name == CPU and now == _NO_HITS else ""
                yield name, f"{times} the capacity would raise {hits} from {now} to {rates[better]}{why}"
            elif now == _NO_HITS:
                continue
            elif half == now:
                yield name, f"half the capacity would keep {hits} at {now}"
            else:
                yield name, f"twice the capacity would leave {hits} at {now}; half of it would lower them to {half}"

    def worths(self) -> Iterator[tuple[str, str]]:
        """Yield each tier that chooses between loading and computing with what its loads save."""
        for name in self._names:
            values = self.now.tiers.get(name, {})
            if (controls := values.get("worth_controls")) is None:
                continue
            if "worth_ttft_seconds" not in values:
                yield name, f"saves — (N {controls:.0f} of {LEAST} requests)"
                continue
            seconds = ("prefill_seconds", "prefill_margin_seconds", "ttft_seconds", "ttft_margin_seconds")
            saved = [values[f"worth_{word}"] for word in seconds]
            slower = ", promotions only" if saved[2] + saved[3] < 0.0 else ""
            yield name, f"{Saving(int(controls), *saved)}{slower}"

    def engine_rows(self) -> Iterator[tuple[str, ...]]:
        """Yield the engines of a service at each tier, as text under :data:`ENGINE_HEADINGS`."""
        for (engine, tier), values in sorted(self.now.engines.items()):
            earlier = self.before.engines.get((engine, tier), {})

            def grown(*words: str, values: dict[str, float] = values, earlier: dict[str, float] = earlier) -> str:
                return f"{sum(values.get(word, 0.0) - earlier.get(word, 0.0) for word in words):.0f}"

            yield (
                engine,
                tier,
                "up" if values.get("engine_attached") else "apart",
                f"{values.get('engine_rows', 0):.0f}",
                f"{values.get('engine_rows_busy', 0):.0f}",
                grown("engine_loaded_blocks"),
                grown("engine_shared_reads"),
                grown("engine_stored_blocks"),
                f"{values.get('engine_lookups_waiting', 0):.0f}/{values.get('engine_stores_waiting', 0):.0f}",
                grown("engine_messages_received", "engine_messages_sent"),
            )

    def _service(self) -> list[str]:
        """Return what a service states of itself; nothing of an engine."""
        manager = self.now.manager
        found = {word: manager[name] for name, word in _SERVICE.items() if name in manager}
        if manager.get(f"{SERVICE}_responsive") == 0:
            return ["the service does not answer"]
        return [f"{word.replace('_', ' ')}: {value:.0f}" for word, value in found.items()]

    def _summary(self) -> list[str]:
        """Return words about the manager and the copies to and from the accelerator."""
        elapsed, manager = self.now.at - self.before.at, self.now.manager
        words = [
            f"{kind.replace('_to_', ' → ')} {rate((value - self.before.offloaded.get(kind, 0.0)) / elapsed)}"
            for kind, value in sorted(self.now.offloaded.items())
            if elapsed > 0
        ]
        words += self._service()
        if "rows" in manager:
            words.append(f"rows: {manager['rows']:.0f}, {manager.get('rows_free', 0):.0f} free")
        return words + [
            f"{name.replace('_', ' ')}: {manager[name]:.0f}"
            for name in ("jobs_in_flight", "stores_without_room", "tiers_out_of_service")
            if manager.get(name)
        ]


def _state(values: dict[str, float]) -> str:
    if values.get("available") is None:
        return "idle"
    if not values["available"]:
        return "down"
    if values.get("recovering"):
        return "recovering"
    if values.get("breaker_state") == 1:
        return "probing"
    return "read-only" if values.get("writable") == 0 else "up"


def _bar(values: Mapping[str, float]) -> str:
    """Return the used share of a capacity as cells; empty without a capacity."""
    used, capacity = values.get("occupancy_bytes"), values.get("capacity_bytes")
    if used is None or not capacity:
        return ""
    cells = round(min(used / capacity, 1.0) * _BAR_CELLS)
    return f"{'█' * cells}{'░' * (_BAR_CELLS - cells)} "


def _table(headings: Iterable[str], rows: Iterable[Sequence[str | Text]]) -> Table:
    table = Table(expand=True)
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table
