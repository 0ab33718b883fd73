"""The panels of the Grafana dashboard: expressions, legends, and texts for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tiering.api.metric import MetricKind
from tiering.connector.metrics import TIERS, metrics_of

_ENGINE = 'instance=~"$instance"'
_TIER = 'instance=~"$instance",tier=~"$tier"'

_COPIED = '__name__=~"vllm[:_]kv_offload_total_bytes_total"'
"""Bytes of the copies; some versions of prometheus_client replace the colon when Prometheus asks."""


_COMBINED = {metric.field: metric.combined for metric in metrics_of(TIERS, MetricKind.GAUGE)}


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel of the dashboard."""

    title: str
    """Heading of the panel."""
    queries: Mapping[str, str]
    """Expression of each query by its legend."""
    text: str
    """Description that the panel's corner shows: what is seen, and what to do about it."""
    unit: str = "short"
    """Unit of the values, as Grafana names it; default: a plain number."""
    kind: str = "timeseries"
    """Kind of the panel, as Grafana names it; default: lines over time."""
    width: int = 8
    """Columns of the 24 that a row has; default 8."""
    most: float | None = None
    """Upper end of the axis; None (default): that of the data."""
    states: Mapping[int, tuple[str, str]] = field(default_factory=dict)
    """Text and colour by value, for panels of states; default: none."""


def _rate(name: str, by: str = "tier", selector: str = _TIER) -> str:
    return f"sum by ({by}) (rate({name}{{{selector}}}[$__rate_interval]))"


def _tier_rate(name: str) -> str:
    return _rate(f"kv_tiering_{name}_total")


def _engine_rate(name: str) -> str:
    return f"sum(rate(kv_tiering_{name}_total{{{_ENGINE}}}[$__rate_interval]))"


def _of_engines(name: str) -> str:
    return _rate(f"kv_tiering_{name}_total", "engine, tier")


def _now_of_engines(name: str) -> str:
    return f"sum by (engine, tier) (kv_tiering_{name}{{{_TIER}}})"


def _of_service(name: str, function: str = "", window: str = "") -> str:
    return f"sum by (instance) ({function}(kv_tiering_{name}{{{_ENGINE}}}{window}))"


def _tier_gauge(name: str) -> str:
    return f"{_COMBINED[name]} by (tier) (kv_tiering_{name}{{{_TIER}}})"


def _quantile(share: float) -> str:
    return f"histogram_quantile({share}, {_rate('kv_tiering_job_latency_seconds_bucket', 'tier, le')})"


def _dollars(kind: str, price: str) -> str:
    return f"{_tier_rate(f'requests_{kind}')} * {price} / 1e6"


_UP = {0: ("no", "red"), 1: ("yes", "green")}
_TROUBLE = {0: ("no", "green"), 1: ("yes", "orange")}
_BREAKER = {0: ("closed", "green"), 1: ("half open", "yellow"), 2: ("open", "red")}

_COST = (
    f"86400 * ({_dollars('put', '$price_put')} + {_dollars('list', '$price_put')}"
    f" + {_dollars('get', '$price_get')} + {_dollars('head', '$price_get')})"
)

ROWS: Mapping[str, Sequence[Panel]] = {
    "At a glance": (
        Panel(
            "Tiers in service",
            {"{{tier}}": _tier_gauge("available")},
            "A tier that is down takes itself back; the engine's log has the reason.",
            kind="stat",
            width=6,
            states={0: ("down", "red"), 1: ("up", "green")},
        ),
        Panel(
            "Prefill that the tiers save",
            {"share of the tokens asked for": f"{_engine_rate('hit_tokens')} / ({_engine_rate('queried_tokens')} > 0)"},
            "Tokens loaded, of the tokens beyond the engine's own prefix cache.",
            unit="percentunit",
            kind="stat",
            width=6,
            most=1,
        ),
        Panel(
            "Corrupt blocks in a day",
            {"{{tier}}": f"sum by (tier) (increase(kv_tiering_corrupt_blocks_total{{{_TIER}}}[1d]))"},
            "No request got them. Run kv-tiering inspect --verify, and check disk, memory and network.",
            kind="stat",
            width=6,
        ),
        Panel(
            "Cost of requests, dollars a day",
            {"{{tier}}": f"{_COST} > 0"},
            "Requests to object stores at the prices above, at the present rate; empty without an object store.",
            unit="currencyUSD",
            kind="stat",
            width=6,
        ),
    ),
    "Hits": (
        Panel(
            "Hit rate of each tier",
            {"{{tier}}": f"{_tier_rate('hits')} / ({_tier_rate('queries')} > 0)"},
            "Share of the blocks asked for that the tier held. A slower tier is asked for what the faster ones lack.",
            unit="percentunit",
            most=1,
        ),
        Panel(
            "Size advisor: estimated hit rates",
            {
                f"{{{{tier}}}} × {label}": _tier_gauge(f"estimated_hit_ratio_{name}")
                for label, name in (("½", "x0_5"), ("1", "x1"), ("2", "x2"), ("4", "x4"))
            },
            "Hit rate of the tier and all faster ones at multiples of its capacity. A gap between × 1 and × 2 is worth "
            "buying; none means that half the capacity may do.",
            unit="percentunit",
            most=1,
        ),
        Panel(
            "Late lookups",
            {"{{tier}}": _tier_rate("lookups_late")},
            "Lookups answered with no because the medium was late: hits lost to latency.",
            unit="ops",
        ),
    ),
    "Traffic": (
        Panel(
            "Bytes read and written",
            {"{{tier}} read": _tier_rate("read_bytes"), "{{tier}} written": _tier_rate("written_bytes")},
            "Compare with kv-tiering bench.",
            unit="Bps",
        ),
        Panel(
            "Bytes between the GPU and the CPU tier",
            {"{{transfer_type}}": _rate("", "transfer_type", f"{_COPIED},{_ENGINE}")},
            "Copies by all workers.",
            unit="Bps",
        ),
        Panel(
            "Latency of jobs",
            {f"{{{{tier}}}} p{100 * share:g}": _quantile(share) for share in (0.5, 0.9, 0.99)},
            "From the submission of a tier's job to its end. Above load_deadline, hits become misses.",
            unit="s",
        ),
        Panel(
            "Bandwidth of one read and one write",
            {
                f"{{{{tier}}}} {word}": f"{_tier_rate(f'{word}_bytes')} / ({_tier_rate(f'{word}_seconds')} > 0)"
                for word in ("read", "written")
            },
            "If it falls while the load is the same, the medium has become slower.",
            unit="Bps",
        ),
        Panel(
            "Blocks in flight",
            {
                "{{tier}} promoted": _tier_gauge("promotions_active"),
                "{{tier}} cascaded": _tier_gauge("cascades_active"),
                "{{tier}} load depth": _tier_gauge("load_depth"),
                "{{tier}} store depth": _tier_gauge("store_depth"),
            },
            "Blocks being loaded from and stored to the tier. High without bytes moving: the medium hangs.",
        ),
        Panel(
            "Promotions",
            {
                "{{tier}} done": _tier_rate("promotions"),
                "{{tier}} failed": _tier_rate("promotions_failed"),
                "{{tier}} overdue": _tier_rate("loads_overdue"),
                "{{tier}} process started again": _tier_rate("io_restarts"),
                "{{tier}} too long": _tier_rate("loads_too_long"),
            },
            "Blocks a second. Requests compute the blocks whose promotion failed or missed its deadline.",
            unit="ops",
        ),
        Panel(
            "Loads slower than computing",
            {
                "{{tier}} computed": _tier_rate("loads_gated"),
                "{{tier}} cut off": _tier_rate("loads_cut"),
                "{{tier}} computes now": _tier_gauge("gate_closed"),
            },
            "Blocks a second of tiers with load_or_compute: auto. If it goes on, the tier is too slow for this engine.",
            unit="ops",
        ),
        Panel(
            "Measured worth",
            {
                "{{tier}} prefill": _tier_gauge("worth_prefill_seconds"),
                "{{tier}} prefill ±": _tier_gauge("worth_prefill_margin_seconds"),
                "{{tier}} waiting": _tier_gauge("worth_ttft_seconds"),
                "{{tier}} waiting ±": _tier_gauge("worth_ttft_margin_seconds"),
                "{{tier}} N": _tier_gauge("worth_controls"),
                "{{tier}} controls/s": _tier_rate("controls"),
            },
            "Seconds a minute that loads save, and half of the 95% interval; only with load_or_compute: auto.",
        ),
    ),
    "Capacity": (
        Panel(
            "Occupancy and capacity",
            {
                "{{tier}} used": _tier_gauge("occupancy_bytes"),
                "{{tier}} capacity": f"{_tier_gauge('capacity_bytes')} > 0",
            },
            "A full tier evicts, which is normal. Buckets have no capacity of their own.",
            unit="bytes",
        ),
        Panel(
            "Time that a block stays",
            {"{{tier}}": f"{_tier_gauge('blocks')} / ({_tier_rate('evictions')} > 0)"},
            "Blocks held, by the rate of evictions. Minutes on a disk: the tier is too small. Empty: none was evicted.",
            unit="s",
        ),
        Panel(
            "Rows of the CPU tier",
            {
                word: f"sum(kv_tiering_rows_{word}{{{_ENGINE}}})"
                for word in ("free", "evictable", "reserved", "quarantined", "unprepared")
            },
            "No free and no evictable rows: stores find no room.",
        ),
    ),
    "Faults": (
        Panel(
            "Circuit breakers",
            {"{{tier}}": _tier_gauge("breaker_state")},
            "Open: the medium failed in a row, and is probed from time to time.",
            kind="state-timeline",
            states=_BREAKER,
        ),
        Panel(
            "Service",
            {
                "{{tier}} serves": _tier_gauge("available"),
                "{{tier}} stores": _tier_gauge("writable"),
            },
            "A tier that serves and does not store is full or read-only.",
            kind="state-timeline",
            states=_UP,
        ),
        Panel(
            "Recovery and private epochs",
            {
                "{{tier}} recovers": _tier_gauge("recovering"),
                "{{tier}} private": _tier_gauge("private_epoch"),
            },
            "Private: after a reset without a revision, other engines cannot read what this one stores.",
            kind="state-timeline",
            states=_TROUBLE,
        ),
        Panel(
            "Stores dropped and declined",
            {
                "{{tier}} dropped": _tier_rate("stores_dropped"),
                "{{tier}} declined": _tier_rate("stores_declined"),
                "{{tier}} left to another machine": _tier_rate("stores_left"),
                "{{tier}} evicted while waiting": _tier_rate("stores_evicted"),
            },
            "Dropped: the tier is too slow or out of service. Declined: not admitted, which is normal.",
            unit="ops",
        ),
        Panel(
            "Corrupt and lost blocks",
            {
                "{{tier}} corrupt": _tier_rate("corrupt_blocks"),
                "{{tier}} deleted": _tier_rate("blocks_deleted"),
                "{{tier}} lost": _tier_rate("blocks_lost"),
                "{{tier}} device errors": _tier_rate("device_errors"),
            },
            "Each is a counted miss. Find the cause: disk, memory, network, or somebody in the tier's directory.",
            unit="ops",
        ),
        Panel(
            "Failures and retries",
            {
                "{{tier}} cascades failed": _tier_rate("cascades_failed"),
                "{{tier}} retries": _tier_rate("retries"),
                "copies to the GPU failed": _engine_rate("loads_failed"),
                "copies from the GPU failed": _engine_rate("stores_failed"),
            },
            "Blocks and copies a second.",
            unit="ops",
        ),
        Panel(
            "No room in the CPU tier",
            {
                "stores": _engine_rate("stores_without_room"),
                "promotions": _engine_rate("promotions_without_room"),
                "promotions that waited": _engine_rate("promotions_waited"),
                "queued blocks evicted": _engine_rate("queued_evicted"),
                "queued blocks reset": _engine_rate("queued_reset"),
                "queued blocks of a tier out of service": _engine_rate("queued_retired"),
                "offers refused": _engine_rate("stores_refused"),
                "hits shrunk": _engine_rate("hits_shrunk"),
                "reservations expired": _engine_rate("reservations_expired"),
            },
            "Steadily above 0: raise primary.capacity.",
            unit="ops",
        ),
        Panel(
            "Resets, epochs, broken tiers",
            {
                "resets": f"sum(increase(kv_tiering_resets_total{{{_ENGINE}}}[$__rate_interval]))",
                "new epochs": f"sum(increase(kv_tiering_new_epochs_total{{{_ENGINE}}}[$__rate_interval]))",
                "tiers out of service until a restart": f"sum(kv_tiering_tiers_out_of_service_total{{{_ENGINE}}})",
                "{{tier}} opened again": "sum by (tier) "
                f"(increase(kv_tiering_reopened_total{{{_TIER}}}[$__rate_interval]))",
            },
            "A tier that broke its contract stays away until a restart: keep the log. A medium that is opened again "
            "changed its state, or is another one: see the kernel's log.",
        ),
    ),
    "Requests to object stores": (
        Panel(
            "Requests by kind",
            {
                f"{{{{tier}}}} {kind}": _tier_rate(f"requests_{kind}")
                for kind in ("get", "head", "put", "delete", "list")
            },
            "0 for tiers without an object store.",
            unit="reqps",
        ),
        Panel(
            "Answers",
            {
                "{{tier}} absent": _tier_rate("answers_absent"),
                "{{tier}} conflict": _tier_rate("answers_conflict"),
                "{{tier}} bytes refused": _tier_rate("refused_bytes"),
            },
            "404 to probes is normal; conflicts mean that another engine has stored the block already.",
        ),
        Panel(
            "Cost of requests over time, dollars a day",
            {"{{tier}}": _COST},
            "At the prices above, at the present rate.",
            unit="currencyUSD",
        ),
    ),
    "Scheduler": (
        Panel(
            "Time on the scheduler's thread",
            {
                "{{instance}} {{engine}}": "sum by (instance, engine) "
                f"(rate(kv_tiering_scheduler_seconds_total{{{_ENGINE}}}[$__rate_interval]))"
            },
            "Share of the scheduler's time that the connector takes.",
            unit="percentunit",
        ),
        Panel(
            "Steps and requests that waited",
            {
                "copies that a step waited for": _engine_rate("jobs_flushed"),
                "requests that waited for another's load": _engine_rate("sharer_waits"),
            },
            "A step waits if it reuses GPU blocks that a copy still reads.",
            unit="ops",
        ),
        Panel(
            "Exclusive CPU tier, blocks per second",
            {
                "stored late": _engine_rate("late_stores"),
                "exclusive losses": _engine_rate("exclusive_losses"),
            },
            "With primary.inclusion: exclusive. Losses left the engine's cache unstored.",
            unit="ops",
        ),
        Panel(
            "What hints of requests change",
            {
                "sessions": _engine_rate("sessions_released"),
                "blocks that go first": _engine_rate("blocks_released"),
                "malformed hints": _engine_rate("hints_ignored"),
                "hints without effect": _engine_rate("hints_unknown"),
                "blocks retained": _engine_rate("blocks_retained"),
                "blocks pinned": _engine_rate("blocks_pinned"),
                "blocks prefetched": _engine_rate("blocks_prefetched"),
                "hits by session hints": _engine_rate("hint_hits"),
                "blocks that are followed": f"sum(kv_tiering_session_blocks{{{_ENGINE}}})",
            },
            "Blocks that only an ended session used make room first. Retained and pinned ones go after others.",
        ),
        Panel(
            "Warm start",
            {
                "blocks loaded": _engine_rate("warm_start_blocks"),
                "blocks that no tier had": _engine_rate("warm_start_missing"),
                "engines followed": _engine_rate("warm_start_engines"),
                "blocks inherited from an earlier engine": _engine_rate("inherited_blocks"),
                "documents written, {{tier}}": _tier_rate("hot_keys_written"),
                "documents refused, {{tier}}": _tier_rate("hot_keys_refused"),
            },
            "Blocks that an engine loads when it starts, with warm_start in the stack.",
        ),
        Panel(
            "Computed prompt tokens by cause, tokens per second",
            {"{{cause}} {{tier}}": _rate("kv_tiering_missed_tokens_total", "cause, tier", _ENGINE)},
            "Only with explain in the stack. kv-tiering why REQUEST names the causes of one request.",
        ),
        Panel(
            "Cached prompt tokens by tenant, tokens per second",
            {
                "{{tenant}} {{tier}}": _rate("kv_tiering_cached_tokens_total", "tenant, tier", _ENGINE),
                "{{tenant}} arrived": _rate("kv_tiering_cached_tokens_arrived_total", "tenant", _ENGINE),
            },
            "Only with report_cached in the stack. A tenant is the keyed hash of a cache salt. If fewer have "
            "arrived than all tiers had, loads failed, and the engine computed those tokens.",
        ),
        Panel(
            "In progress",
            {
                "requests": f"sum(kv_tiering_requests_active{{{_ENGINE}}})",
                "copies": f"sum(kv_tiering_jobs_active{{{_ENGINE}}})",
                "jobs of tiers": f"sum(kv_tiering_jobs_in_flight{{{_ENGINE}}})",
                "blocks that wait for tiers": f"sum(kv_tiering_blocks_queued{{{_ENGINE}}})",
            },
            "Jobs that grow without end: a medium hangs.",
        ),
    ),
    "Service of the machine": (
        Panel(
            "Services",
            {
                "{{instance}} answers": _of_service("service_responsive"),
                "{{instance}} connections": _of_service("service_connections"),
                "{{instance}} users that are not served": _of_service("service_users_away"),
                "{{instance}} rows of dead engines": _of_service("service_orphaned_rows"),
                "{{instance}} refusals": _of_service("service_refusals_total", "increase", "[1h]"),
            },
            "Only with kv-tiering serve --metrics. A service that does not answer hangs; engines go on without it.",
        ),
        Panel(
            "Blocks of each engine per second",
            {
                "{{engine}} {{tier}} loaded": _of_engines("engine_loaded_blocks"),
                "{{engine}} {{tier}} stored": _of_engines("engine_stored_blocks"),
                "{{engine}} {{tier}} from another's read": _of_engines("engine_shared_reads"),
                "{{engine}} {{tier}} failed": _of_engines("engine_failed_blocks"),
            },
            "An engine is named by its process. One without loads may have another namespace, or was reset.",
        ),
        Panel(
            "Engines that wait",
            {
                "{{engine}} {{tier}} rows in jobs": _now_of_engines("engine_rows_busy"),
                "{{engine}} {{tier}} stores": _now_of_engines("engine_stores_waiting"),
                "{{engine}} {{tier}} lookups": _now_of_engines("engine_lookups_waiting"),
                "{{engine}} {{tier}} in service": _now_of_engines("engine_attached"),
            },
            "Rows in jobs that stay: the medium hangs. An engine out of service was reset, and shares no blocks.",
        ),
        Panel(
            "Rows that outlive engines",
            {
                "{{instance}} blocks": _of_service("service_kept_blocks"),
                "{{instance}} CPU tiers of ended engines": _of_service("service_left_regions"),
            },
            "Only with machine.keep_rows. Blocks that the next engine would find in the rows.",
        ),
    ),
}
"""The panels, by the title of their row."""
