"""The counts of a service: at its Prometheus endpoint, in ``top``, and per engine."""

from __future__ import annotations

import io
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from tests.cli.runner import kv_tiering
from tests.machine.engines import SmallEngine
from tests.machine.hosts import service_in_thread, service_process, stack_of
from tests.machine.test_service import MEMORY, Raw
from tiering.cli.metrics import Sample, fetch, metrics_url, parse
from tiering.cli.service_metrics import endpoint
from tiering.cli.top import Look
from tiering.errors import ConfigError
from tiering.machine.counts import ServiceCounts, ServiceLook
from tiering.machine.messages import Kind, Record
from tiering.machine.service import MachineService
from tiering.secondary.contract import TierContext
from tiering.secondary.tier_stats import TierStats
from tiering.testing.clock import until
from tiering.testing.fake_tier import FakeTier
from tiering.testing.keys import key_of

SILENT = ServiceLook(ServiceCounts())
"""The counts of a service whose thread does not answer."""


@pytest.fixture
def service(tmp_path: Path) -> Iterator[MachineService]:
    with service_in_thread(tmp_path / "cache.sock", MEMORY) as running:
        yield running


@pytest.fixture
def url(service: MachineService) -> Iterator[str]:
    with endpoint("127.0.0.1:0", service.look) as port:
        yield f"http://127.0.0.1:{port}"


def sample(url: str) -> Sample:
    return parse(fetch(metrics_url(url), 30.0), 0.0)


def of_this_process(found: Sample) -> dict[str, float]:
    return found.engines[str(os.getpid()), "local"]


def test_a_service_without_engines_has_counts_of_itself(url: str) -> None:
    found = sample(url)
    assert (found.tiers, found.engines) == ({}, {})
    assert found.manager["service_responsive"] == 1
    assert found.manager["service_connections"] == 0


def test_tiers_keep_the_names_of_their_metrics_and_engines_are_counted_apart(service: MachineService, url: str) -> None:
    one = SmallEngine(service.path)
    try:
        one.store(range(6))
        assert one.stored()
        one.forget_rows()
        assert one.load(range(6)) == (list(range(6)), [])
        found = sample(url)
        counts = of_this_process(found)
        # The service reports its statistics now and then: an engine's may be older than a sample.
        assert found.tiers["local"]["written_bytes"] > 0
        assert one.settle(lambda: one.stat("written_bytes") == found.tiers["local"]["written_bytes"])
        assert found.tiers["local"]["available"] == 1
        assert sum(found.latency["local"].values()) > 0
        assert counts["engine_loaded_blocks"] == one.stat("promotions") == 6
        assert counts["engine_stored_blocks"] == one.stat("cascades") >= 6
        assert (counts["engine_connections"], counts["engine_rows"], counts["engine_attached"]) == (1, 24, 1)
        assert (counts["engine_rows_busy"], counts["engine_stores_waiting"], counts["engine_failed_blocks"]) == (
            0,
            0,
            0,
        )
        assert min(counts["engine_messages_received"], counts["engine_messages_sent"]) > 0
        assert found.manager["service_connections"] == 1
    finally:
        one.close()
    assert sample(url).engines == {}


def test_an_engine_with_other_weights_is_apart(service: MachineService, url: str) -> None:
    one, two = SmallEngine(service.path), SmallEngine(service.path)
    try:
        assert one.serving()
        assert two.serving()
        one.manager.reset_cache("step-1")
        assert of_this_process(sample(url))["engine_attached"] == 0
        two.manager.reset_cache("step-1")
        assert one.serving()
        assert two.serving()
        counts = of_this_process(sample(url))
        assert (counts["engine_attached"], counts["engine_connections"]) == (1, 2)
    finally:
        one.close()
        two.close()


def test_refusals_are_counted(service: MachineService, url: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.connect(str(service.path))
        stranger.send(b"nothing of the kind")
        stranger.recv(4096)
    assert sample(url).manager["service_refusals"] == 1


def test_counters_of_a_service_that_hangs_do_not_go_back(tmp_path: Path) -> None:
    with service_in_thread(tmp_path / "cache.sock", MEMORY) as service:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
            stranger.connect(str(service.path))
            stranger.send(b"nothing of the kind")
            stranger.recv(4096)
        assert service.look(30.0).service.service_refusals == 1
    counts = service.look(0.05).service
    assert (counts.service_responsive, counts.service_refusals) == (0, 1)


def test_top_shows_the_engines_of_a_service(service: MachineService, url: str) -> None:
    one = SmallEngine(service.path)
    try:
        one.store(range(4))
        assert one.stored()
        lines = kv_tiering("top", url, "--once").out.splitlines()
    finally:
        one.close()
    assert [line.split("\t")[0] for line in lines] == ["local", "engine", "service"]
    assert lines[1].split("\t")[1:8] == [str(os.getpid()), "local", "up", "24", "0", "0", "0"]
    assert lines[2].startswith("service\tconnections: 1\t")


def test_top_lists_the_tiers_of_a_services_stack(service: MachineService, url: str, tmp_path: Path) -> None:
    stack = tmp_path / "service.yaml"
    stack.write_text(yaml.safe_dump(stack_of(MEMORY)))
    assert kv_tiering("top", str(stack), "--url", url, "--once").out.splitlines()[0].startswith("local\tmissing")


def test_a_service_that_hangs_is_seen(tmp_path: Path) -> None:
    with endpoint("127.0.0.1:0", lambda _: SILENT) as port:
        found = kv_tiering("top", f"http://127.0.0.1:{port}", "--once")
    assert "the service does not answer" in found.out
    with service_in_thread(tmp_path / "cache.sock", MEMORY) as service:
        pass
    began = time.monotonic()
    assert service.look(0.05).service.service_responsive == 0
    assert time.monotonic() - began < 30.0


def test_a_client_that_sends_nothing_keeps_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiering.cli.service_metrics.IDLE_SECONDS", 0.05)
    with endpoint("127.0.0.1:0", lambda _: SILENT) as port, socket.create_connection(("127.0.0.1", port)) as client:
        client.settimeout(60.0)
        assert client.recv(10) == b""


def test_a_tier_that_breaks_its_contract_is_shown_out_of_service(tmp_path: Path) -> None:
    class Broken(FakeTier):
        def get_stats(self) -> TierStats:
            raise RuntimeError("broken")

    def build(context: TierContext) -> Broken:
        return Broken(context.name)

    with service_in_thread(tmp_path / "cache.sock", MEMORY, wrong=build) as service:
        one = SmallEngine(service.path, ("local", "wrong"))
        assert one.serving(0)
        tiers = {name: stats.available for (_, name), stats in service.look(30.0).tiers.items()}
        one.close()
    assert tiers == {"local": 1, "wrong": 0}


@pytest.mark.parametrize("address", ["9400", "127.0.0.1", "127.0.0.1:70000", "here:port", "http://here:9400", ""])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="write it like"), endpoint(address, lambda _: SILENT):
        pass


def test_an_address_that_is_taken_is_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match="cannot be listened on"), endpoint(address, lambda _: SILENT):
            pass


def test_inspect_finds_the_namespaces_of_a_running_service(tmp_path: Path) -> None:
    disk = {"type": "local", "path": str(tmp_path / "disk"), "capacity": "4MiB"}
    with service_process(tmp_path, disk) as service:
        one = SmallEngine(service.socket)
        one.store(range(4))
        assert one.stored()
        stack = str(tmp_path / "service.yaml")
        note = kv_tiering("inspect", stack).err
        (name,) = [path.name.removeprefix("replica-") for path in (tmp_path / "disk").glob("replica-*")]
        assert f"for --replica: {name}" in note
        assert "4" in kv_tiering("inspect", stack, "--replica", name).out
        one.close()
        os.kill(service.process.pid, signal.SIGTERM)
        assert service.process.wait(60.0) == 0


def test_rows_that_a_medium_still_holds_for_an_engine_that_has_gone_are_counted(tmp_path: Path) -> None:
    made: list[FakeTier] = []

    def build(context: TierContext) -> FakeTier:
        made.append(FakeTier(context.name, held={key_of(1), key_of(2)}))
        return made[-1]

    with service_in_thread(tmp_path / "cache.sock", slow=build) as service:
        one, two = Raw(service.path, tier="slow"), Raw(service.path, tier="slow")
        for number, engine in enumerate((one, two)):
            load = Record(Kind.LOAD, number, seconds=60.0, keys=[key_of(1), key_of(2)], rows=[3, 4])
            engine.send(Record(Kind.FOLLOWED, engine.receive(Kind.STATE).number), load)
        assert until(lambda: sum(counts.engine_rows_busy for counts in service.look(30.0).engines.values()) == 4, 30.0)
        assert sum(counts.engine_shared_reads for counts in service.look(30.0).engines.values()) == 2
        assert service.look(30.0).service.service_orphaned_rows == 0
        one.connection.leave()
        assert until(lambda: service.look(30.0).service.service_orphaned_rows == 2, 30.0)
        made[0].finish(made[0].loads[0])
        assert one.ended()
        assert service.look(30.0).service.service_orphaned_rows == 0
        one.close()
        two.close()


def test_the_screen_has_a_table_of_engines_of_the_last_interval() -> None:
    before, now = Sample(1.0), Sample(3.0)
    before.engines["4711", "local"] = {"engine_loaded_blocks": 100.0}
    now.engines["4711", "local"] = {"engine_loaded_blocks": 142.0, "engine_attached": 0.0, "engine_rows": 24.0}
    console = Console(file=io.StringIO(), width=140, record=True)
    console.print(Look(before, now).screen("http://service", ""))
    (line,) = [line for line in console.export_text().splitlines() if "4711" in line]
    assert [word for word in line.split() if word != "│"][:6] == ["4711", "local", "apart", "24", "0", "42"]
