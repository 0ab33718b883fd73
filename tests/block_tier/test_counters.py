"""Counters and gauges of a tier that other tests do not move, as its statistics show them."""

from __future__ import annotations

import pytest

from tests.block_tier.rig import K, Rig
from tiering.errors import CorruptBlockError, DeviceError, OverdueError, TemporaryStoreError
from tiering.medium.block_store import Done, Outcome
from tiering.medium.layers.breaker import BreakerOpenError


def test_a_lookup_that_the_medium_answers_too_late_counts_once() -> None:
    rig = Rig(shared=True).opened()
    assert rig.tier.lookup_prefix(K[:4], rig.job(K[:4]).req_context) == (0, True)
    assert rig.tier.get_stats().lookups_late == 0
    rig.clock.advance(1.0)
    for _ in range(2):
        assert rig.tier.lookup_prefix(K[:4], rig.job(K[:4]).req_context) == (0, False)
    assert rig.tier.get_stats().lookups_late == 1


def test_blocks_count_as_active_while_their_job_runs() -> None:
    rig = Rig().opened()
    store = rig.submit_store(K[:4])
    assert rig.tier.get_stats().cascades_active == 4
    rig.io.finish(store)
    rig.finished()
    load = rig.submit_load(K[:3])
    stats = rig.tier.get_stats()
    assert (stats.cascades_active, stats.promotions_active) == (0, 3)
    rig.io.finish(load)
    rig.finished()
    assert rig.tier.get_stats().promotions_active == 0


def end_load(rig: Rig, outcomes: list[Outcome]) -> int:
    """Load as many blocks as there are ``outcomes``, end the job with them, and return its number."""
    rig.store_blocks(keys := K[: len(outcomes)])
    load = rig.submit_load(keys)
    rig.io.finish(load, outcomes)
    rig.finished()
    return load


def failures(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [line for line in caplog.messages if "because:" in line]


def test_failures_are_counted_and_the_line_names_the_job(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig().opened()
    load = end_load(rig, [Done.DONE, CorruptBlockError("torn"), DeviceError("bad sector"), TemporaryStoreError("x")])
    stats = rig.tier.get_stats()
    assert (stats.corrupt_blocks, stats.device_errors) == (1, 1)
    assert failures(caplog) == [f"tier t: 2 block(s) were not loaded, the last one (of job {load}) because: x"]


def test_failures_that_others_log_are_counted_without_a_line(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig().opened()
    end_load(rig, [CorruptBlockError("torn"), OverdueError("late"), BreakerOpenError("open"), Done.ABSENT])
    assert rig.tier.get_stats().corrupt_blocks == 1
    assert failures(caplog) == []


def test_one_line_in_a_while_stands_for_all_failures_since(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig().opened()
    for number in range(4):
        rig.clock.advance(60.0 if number == 3 else 0.0)
        store = rig.submit_store(K[:1])
        rig.io.finish(store, [TemporaryStoreError(f"failure {number}")])
        rig.finished()
    last = f"tier t: 3 block(s) were not stored, the last one (of job {store}) because: failure 3"
    assert failures(caplog)[1:] == [last]
