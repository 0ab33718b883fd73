"""Engines of one machine share the tiers of a service, and the end of either side is a miss."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.machine.engines import SmallEngine, key_of
from tests.machine.hosts import ServiceProcess, service_process
from tiering.secondary.contract import TransferJob
from tiering.testing.clock import until

LOCAL = {"type": "local", "capacity": "16MiB"}


@pytest.fixture
def service(tmp_path: Path) -> Iterator[ServiceProcess]:
    with service_process(tmp_path, {**LOCAL, "path": str(tmp_path / "disk")}) as running:
        yield running


@pytest.fixture
def engine(service: ServiceProcess) -> Iterator[Callable[..., SmallEngine]]:
    made: list[SmallEngine] = []

    def make(**words: Any) -> SmallEngine:
        made.append(SmallEngine(service.socket, **words))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_an_engine_finds_what_another_has_stored(engine: Callable[..., SmallEngine]) -> None:
    one, two = engine(), engine()
    one.store(range(8))
    assert one.stored()
    assert two.load(range(8)) == (list(range(8)), [])
    assert two.stat("promotions") == 8


def test_an_engine_knows_what_differs_where_a_tier_of_the_service_has_begun_empty(
    engine: Callable[..., SmallEngine],
) -> None:
    one = engine()
    assert one.serving()
    assert one.manager.cold_starts() == {}
    other = engine(name="another")
    assert other.settle(lambda: bool(other.manager.cold_starts()))
    assert "model.weights (" in other.manager.cold_starts()["local"]


def test_an_engine_that_hides_its_new_weights_is_found_out(engine: Callable[..., SmallEngine]) -> None:
    """Without a reset, the blocks of another engine have other bytes, which the comparison finds."""
    one, two = engine(), engine()
    one.store(range(4))
    assert one.stored()
    two.weights = 1
    assert two.load(range(4)) == ([0, 1, 2, 3], [0, 1, 2, 3])


def test_blocks_outlive_engine_and_service(service: ServiceProcess, engine: Callable[..., SmallEngine]) -> None:
    first = engine()
    first.store(range(8))
    assert first.stored()
    first.close()
    assert service.end() == 0
    service.restart()
    assert engine().load(range(8)) == (list(range(8)), [])


def test_other_models_see_nothing_and_lose_nothing(engine: Callable[..., SmallEngine]) -> None:
    one, other = engine(), engine(name="other")
    one.store(range(8))
    assert one.stored()
    assert other.load(range(8)) == ([], [])
    other.weights = 1
    other.store(range(8))
    assert other.stored()
    assert engine().load(range(8)) == (list(range(8)), [])


def test_a_service_that_starts_later_is_joined(tmp_path: Path) -> None:
    late = SmallEngine(tmp_path / "cache.sock")
    late.store(range(4))
    assert late.load([50]) == ([], [])
    with service_process(tmp_path, {**LOCAL, "path": str(tmp_path / "disk")}):
        assert late.serving()
        late.store(range(8, 12))
        assert late.stored()
        late.forget_rows()
        assert late.load(range(8, 12)) == (list(range(8, 12)), [])
        late.close()


def test_a_dead_service_is_a_miss_and_its_successor_serves(
    service: ServiceProcess, engine: Callable[..., SmallEngine]
) -> None:
    one = engine()
    one.store(range(8))
    assert one.stored()
    one.forget_rows()
    service.kill()
    found, wrong = one.load(range(8))
    assert (found, wrong) == ([], [])
    service.restart()
    assert one.serving()
    found, wrong = one.load(range(8))
    assert not wrong
    assert len(found) >= 4


def test_a_stopped_service_costs_misses_and_its_late_results_no_bytes(
    service: ServiceProcess, engine: Callable[..., SmallEngine]
) -> None:
    one = engine(machine={"load_deadline": "300ms", "lookup_deadline": "100ms"})
    one.store(range(8))
    assert one.stored()
    one.forget_rows()
    os.kill(service.process.pid, signal.SIGSTOP)
    try:
        assert one.load(range(8), patience=10.0) == ([], [])
        one.store(range(100, 104))
        assert one.load(range(100, 104)) == (list(range(100, 104)), [])
    finally:
        os.kill(service.process.pid, signal.SIGCONT)
    assert one.stored()
    one.forget_rows(20_000)
    found, wrong = one.load(range(8))
    assert not wrong
    assert len(found) >= 4


def test_a_stopped_service_is_not_available(
    service: ServiceProcess, engine: Callable[..., SmallEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiering.machine.link.SILENT_SECONDS", 2.0)
    one = engine()

    def flags() -> tuple[int, int]:
        return one.stat("available"), one.stat("writable")

    assert until(lambda: flags() == (1, 1))
    os.kill(service.process.pid, signal.SIGSTOP)
    try:
        assert until(lambda: flags() == (0, 0))
    finally:
        os.kill(service.process.pid, signal.SIGCONT)
    assert until(lambda: flags() == (1, 1))


def test_rows_of_loads_stay_out_of_use_until_the_service_is_dead(
    service: ServiceProcess, engine: Callable[..., SmallEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped service still has the rows mapped: no timeout may give them back."""
    one = engine(machine={"load_deadline": "200ms"})
    one.store(range(8))
    assert one.stored()
    one.forget_rows()
    tier, ctx = one.manager.secondary_tiers[0], one.request()
    # The manager sends what a tier has to say at steps with lookups of its own.
    assert one.settle(lambda: one.manager.lookup(key_of(99_999), ctx) is False and tier.lookup(key_of(0), ctx) is True)
    loading: list[int] = []
    submit = tier.submit_load

    def note(job: TransferJob) -> None:
        loading.extend(job.block_ids.tolist())
        submit(job)

    monkeypatch.setattr(tier, "submit_load", note)
    os.kill(service.process.pid, signal.SIGSTOP)
    assert one.load([0]) == ([], [])
    (row,) = loading
    used: set[int] = set()
    for first in range(100, 300, 4):
        used.update(one.rows_of_store(range(first, first + 4)))
        one.manager.on_schedule_end()
    assert used
    assert row not in used
    assert one.stat("promotions_active") == 1
    service.kill()
    assert one.settle(lambda: one.stat("promotions_active") == 0)
    for first in range(300, 500, 4):
        used.update(one.rows_of_store(range(first, first + 4)))
        one.manager.on_schedule_end()
    assert row in used


def test_a_reset_reaches_the_engines_that_have_not_been_reset(engine: Callable[..., SmallEngine]) -> None:
    """Another engine must neither serve the new weights' blocks nor add its own to them."""
    one, two = engine(), engine()
    one.store(range(4))
    assert one.stored()
    assert two.load(range(4)) == (list(range(4)), [])
    one.weights = 1
    one.manager.reset_cache("step-1")
    assert one.serving()
    assert one.load(range(4)) == ([], [])
    two.forget_rows()
    assert two.load(range(4)) == ([], [])
    two.store(range(30, 34))
    two.stored()
    assert one.load(range(30, 34)) == ([], [])
    one.store(range(4))
    assert one.stored()
    two.weights = 1
    two.manager.reset_cache("step-1")
    assert two.serving()
    assert two.load(range(4)) == (list(range(4)), [])


def test_a_reset_while_the_service_is_away_holds_when_it_is_back(
    service: ServiceProcess, engine: Callable[..., SmallEngine]
) -> None:
    one = engine()
    one.store(range(8))
    assert one.stored()
    service.kill()
    assert one.settle(lambda: not one.manager.secondary_tiers[0].serving)  # type: ignore[attr-defined]
    one.weights = 1
    assert not one.manager.reset_cache()
    service.restart()
    assert one.settle(lambda: one.manager.secondary_tiers[0].storing)  # type: ignore[attr-defined]
    assert one.load(range(8)) == ([], [])
    one.store(range(8))
    assert one.stored()
    one.forget_rows()
    found, wrong = one.load(range(8))
    assert not wrong
    assert found


def test_a_new_engine_waits_for_the_weights_of_the_start(engine: Callable[..., SmallEngine]) -> None:
    one = engine()
    one.store(range(4))
    assert one.stored()
    one.weights = 1
    one.manager.reset_cache()
    assert one.serving()
    two = engine()
    assert two.load(range(4)) == ([], [])
    one.close()
    assert two.serving()
    assert two.load(range(4)) == ([], [])
    two.store(range(4))
    assert two.stored()
    assert engine().load(range(4)) == (list(range(4)), [])
