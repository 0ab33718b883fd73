"""``top``: the metrics of a real Prometheus endpoint, as an engine exports them, on one screen."""

from __future__ import annotations

import io
import os
import pty
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from rich.console import Console

from tests.cli.conftest import WriteStack
from tests.cli.runner import kv_tiering, process, started
from tiering.advisor.advisor import BRINGS_NOTHING, FIELDS
from tiering.cli.metrics import PREFIX, Sample, metrics_url, parse, quantile
from tiering.cli.top import Look
from tiering.connector.metrics import TIERS
from tiering.connector.prometheus import MetricClasses, OffloadPromMetrics
from tiering.connector.stats import OffloadingConnectorStats
from tiering.errors import ConfigError
from tiering.secondary.tier_stats import JOB_LATENCY_BUCKETS, TierStats


def reported(*engines: dict[str, TierStats]) -> str:
    """Return an endpoint's text after each engine has reported these stats of its tiers."""
    registry = CollectorRegistry()
    metrics = OffloadPromMetrics(
        MetricClasses.default(registry),
        ("engine",),
        {index: (index,) for index in range(len(engines))},
        tiers=["local"],
    )
    for index, tiers in enumerate(engines):
        report = OffloadingConnectorStats()
        report.record_labelled(TIERS, {name: fields.as_dict() for name, fields in tiers.items()})
        metrics.observe(report.data, index)
    return generate_latest(registry).decode()


def stats(**fields: object) -> TierStats:
    latency = [0] * (len(JOB_LATENCY_BUCKETS) + 1)
    latency[2] = 10
    words = {"available": True, "writable": True, "job_latency": latency, "job_latency_sum": 0.04} | fields
    return TierStats(**words)  # type: ignore[arg-type]


GIB = 1 << 30
HEALTHY = stats(
    queries=200, hits=90, read_bytes=3 * GIB, written_bytes=GIB, blocks=7, occupancy_bytes=GIB, capacity_bytes=4 * GIB
)


@dataclass
class Endpoint:
    """An engine's endpoint, which answers with ``text``."""

    text: str
    url: str = ""


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    state = Endpoint(reported({"local": HEALTHY}))

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = state.text.encode()
            self.send_response(200 if self.path == "/metrics" else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    state.url = f"http://127.0.0.1:{server.server_port}"
    yield state
    server.shutdown()
    server.server_close()
    thread.join()


def words(out: str) -> dict[str, list[str]]:
    return {line.split("\t")[0]: line.split("\t")[1:] for line in out.splitlines()}


def test_a_pipe_gets_the_numbers_since_the_start_once(endpoint: Endpoint) -> None:
    done = process("top", endpoint.url)
    assert (done.code, done.err) == (0, "")
    assert words(done.out)["local"][:5] == ["up", "1 GiB of 4 GiB", "45.0%", "3 GiB", "1 GiB"]
    assert "≤5 ms" in done.out


def test_tiers_of_a_stack_come_in_its_order_and_missing_ones_are_told(
    endpoint: Endpoint, write_stack: WriteStack
) -> None:
    stack = write_stack({"type": "memory"}, {"type": "local", "path": "/var/cache/kv", "capacity": "1GiB"})
    done = kv_tiering("top", stack, "--url", endpoint.url, "--once")
    found = words(done.out)
    assert (done.code, list(found)) == (0, ["cpu", "memory", "local"])
    assert (found["memory"][0], found["local"][0]) == ("missing", "up")


@pytest.mark.parametrize(
    ("fields", "state"),
    [
        ({}, "up"),
        ({"writable": False}, "read-only"),
        ({"available": False}, "down"),
        ({"recovering": 1}, "recovering"),
        ({"breaker_state": 1}, "probing"),
    ],
)
def test_states(fields: dict[str, object], state: str) -> None:
    (row,) = Look(Sample(0.0), parse(reported({"local": stats(**fields)}), 0.0)).rows()
    assert row.state == state


def test_replicas_add_up_and_the_worst_state_counts() -> None:
    sample = parse(reported({"local": HEALTHY}, {"local": stats(available=False, queries=200, hits=10)}), 0.0)
    (row,) = Look(Sample(0.0), sample).rows()
    assert (row.state, row.hits) == ("down", "25.0%")


def test_rates_are_those_of_the_interval() -> None:
    before = parse(reported({"local": HEALTHY}), 10.0)
    later = stats(queries=300, hits=190, read_bytes=3 * GIB + 4_000_000_000, written_bytes=GIB, corrupt_blocks=2)
    (row,) = Look(before, parse(reported({"local": later}), 12.0)).rows()
    assert (row.hits, row.reads, row.writes, row.troubles) == ("100.0%", "2.00 GB/s", "0.0 MB/s", "corrupt_blocks 2")


def estimated(*rates: float) -> dict[str, object]:
    return dict(zip(FIELDS.values(), rates, strict=True))


@pytest.mark.parametrize(
    ("rates", "sentence"),
    [
        ((0.1, 0.2, 0.41, 0.55, 0.6, 0.7, 0.7), "twice the capacity would raise {} from 41% to 55%"),
        ((0.1, 0.41, 0.41, 0.411, 0.5, 0.5, 0.5), "half the capacity would keep {} at 41%"),
        (
            (0.1, 0.2, 0.41, 0.41, 0.5, 0.5, 0.5),
            "twice the capacity would leave {} at 41%; half of it would lower them to 20%",
        ),
        ((0, 0, 0, 0, 0, 0.3, 0.6), "8 times the capacity would raise {} from 0% to 30%"),
        ((0, 0, 0, 0, 0, 0, 0), None),
    ],
)
@pytest.mark.parametrize(("tier", "hits"), [("cpu", "hits"), ("local", "hits, with all faster tiers,")])
def test_the_size_advisors_estimates_are_a_sentence_per_tier(
    rates: tuple[float, ...], sentence: str | None, tier: str, hits: str
) -> None:
    report = OffloadingConnectorStats()
    report.record_labelled(TIERS, {tier: stats().as_dict() | estimated(*rates), "s3": stats().as_dict()})
    registry = CollectorRegistry()
    OffloadPromMetrics(MetricClasses.default(registry), ("engine",), {0: (0,)}).observe(report.data)
    sample = parse(generate_latest(registry).decode(), 0.0)
    told = [] if sentence is None else [(tier, sentence.format(hits))]
    if tier == "cpu" and rates[2] == 0 and sentence is not None:
        told = [("cpu", f"{told[0][1]}: {BRINGS_NOTHING}")]
    assert list(Look(Sample(0.0), sample).advice()) == told
    console = Console(file=io.StringIO(), width=200, record=True)
    console.print(Look(Sample(0.0), sample).screen("http://engine:8000/metrics", ""))
    text = console.export_text()
    assert all(f"{name}: {said}" in text for name, said in told)


def test_estimates_of_replicas_are_averaged_not_added() -> None:
    text = "\n".join(
        f'{PREFIX}{field}{{engine="{engine}",tier="cpu"}} {rate}'
        for field, rates in zip(
            ("estimated_hit_ratio_x0_5", "estimated_hit_ratio_x1", "estimated_hit_ratio_x2"),
            ((0.2, 0.3), (0.4, 0.6), (0.6, 0.8)),
            strict=True,
        )
        for engine, rate in enumerate(rates)
    )
    sample = parse(f"{reported({'cpu': HEALTHY})}{text}\n", 0.0)
    assert list(Look(Sample(0.0), sample).advice()) == [("cpu", "twice the capacity would raise hits from 50% to 70%")]


def test_quantiles_are_bounds_of_buckets() -> None:
    bounds = {0.001: 5.0, 0.01: 9.0, float("inf"): 10.0}
    assert [quantile(bounds, {}, share) for share in (0.5, 0.9, 0.99)] == [0.001, 0.01, float("inf")]
    assert quantile(bounds, bounds, 0.5) is None
    assert quantile({}, {}, 0.5) is None


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_screen_fits_a_terminal_of_any_width(width: int) -> None:
    sample = parse(reported({"local": HEALTHY, "s3": stats(available=False, retries=4)}), 1.0)
    console = Console(file=io.StringIO(), width=width, record=True)
    console.print(Look(Sample(0.0), sample, ["cpu", "local"]).screen("http://engine:8000/metrics", "no answer"))
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= width
    assert "no answer" in text


def test_ctrl_c_ends_the_screen_of_a_terminal(endpoint: Endpoint) -> None:
    leader, follower = pty.openpty()
    with started(
        *("top", endpoint.url, "--interval", "50ms"),
        stdin=follower,
        stdout=follower,
        stderr=subprocess.PIPE,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
    ) as running:
        os.close(follower)
        seen = b""
        while b"Ctrl-C ends" not in seen:
            seen += os.read(leader, 65536)
        running.send_signal(signal.SIGINT)
        while running.poll() is None:
            try:
                seen += os.read(leader, 65536)
            except OSError:
                break
        assert (running.wait(30), running.stderr.read() if running.stderr else b"") == (0, b"")
    os.close(leader)
    assert b"local" in seen


@pytest.mark.parametrize(
    ("change", "code", "text"),
    [
        (lambda endpoint: setattr(endpoint, "text", "# nothing\n"), 1, "hold none that begin with kv_tiering_"),
        (lambda endpoint: setattr(endpoint, "text", "<html>"), 1, "not in Prometheus' text format"),
        (lambda endpoint: setattr(endpoint, "url", f"{endpoint.url}/other"), 1, "answers 404"),
        (
            lambda endpoint: setattr(endpoint, "url", "http://127.0.0.1:9"),
            1,
            "does not answer (Connection refused); start",
        ),
    ],
)
def test_an_endpoint_that_is_none_is_one_line(
    change: Callable[[Endpoint], None], code: int, text: str, endpoint: Endpoint
) -> None:
    change(endpoint)
    done = kv_tiering("top", endpoint.url)
    assert (done.code, done.err.count("\n"), done.out) == (code, 1, "")
    assert text in done.err


def test_addresses() -> None:
    assert metrics_url("http://engine:8000") == metrics_url("http://engine:8000/") == "http://engine:8000/metrics"
    assert metrics_url("https://proxy/engine-7/metrics") == "https://proxy/engine-7/metrics"
    for wrong in ("engine:8000", "http://[bad", "http://engine:port", "http://:8000"):
        with pytest.raises(ConfigError, match="is not an address"):
            metrics_url(wrong)
    assert kv_tiering("top", "http://engine", "--url", "http://engine").code == 2
    for plain in ("127.0.0.1:8000", "gpu-7:8000/metrics", "[::1]:8000"):
        done = kv_tiering("top", plain)
        assert (done.code, f"begins with http://; write http://{plain}" in done.err) == (2, True)


def worth_of(**fields: float) -> list[tuple[str, str]]:
    sample = Sample(0.0)
    sample.tiers["cpu"] = {"blocks": 1.0}
    sample.tiers["bucket"] = dict(fields)
    return list(Look(Sample(0.0), sample).worths())


def test_the_measured_worth_is_shown_with_its_interval_and_the_number_of_controls() -> None:
    assert worth_of(blocks=1.0) == []
    assert worth_of(worth_controls=37.0) == [("bucket", "saves — (N 37 of 200 requests)")]
    known = {
        "worth_controls": 512.0,
        "worth_prefill_seconds": 41.2,
        "worth_prefill_margin_seconds": 3.1,
        "worth_ttft_seconds": -2.04,
    }
    text = "saves 41 ± 3 prefill seconds and -2.0 ± 0.9 seconds of waiting a minute (N 512)"
    assert worth_of(**known, worth_ttft_margin_seconds=0.9) == [("bucket", f"{text}, promotions only")]
    text = "saves 41 ± 3 prefill seconds and -2 ± 2 seconds of waiting a minute (N 512)"
    assert worth_of(**known, worth_ttft_margin_seconds=2.1) == [("bucket", text)]
