"""Metering: every attempt counts, and bytes count only if they moved."""

from __future__ import annotations

from tests.medium.io_fakes import make_blocks
from tiering.medium.block_store import StoreTraits
from tiering.medium.layers.attempts import IoStats, MeterLayer
from tiering.testing.chaos import ChaosLayer, Fault
from tiering.testing.clock import FakeClock
from tiering.testing.faults import DictStore


def test_requests_and_bytes_are_counted_per_direction() -> None:
    stats = IoStats()
    layer = MeterLayer(DictStore(), stats, clock=FakeClock())
    layer.put(make_blocks(3, size=100))
    layer.get(make_blocks(4, size=100))
    assert (stats.requests, stats.written_bytes, stats.read_bytes) == (7, 3 * 228, 3 * 228)


def test_a_failed_attempt_is_a_request_that_moved_nothing() -> None:
    stats, store = IoStats(), ChaosLayer(DictStore())
    store.inject(Fault.TEMPORARY, puts=2)
    MeterLayer(store, stats, clock=FakeClock()).put(make_blocks(3, size=100))
    assert (stats.requests, stats.written_bytes) == (3, 228)


def test_what_was_there_is_counted_where_sizes_vary() -> None:
    stats = IoStats()
    layer = MeterLayer(DictStore(variable_size=True), stats, clock=FakeClock())
    layer.put(make_blocks(1, size=50))
    layer.get(make_blocks(1, size=100))
    assert stats.read_bytes == 178


def test_seconds_are_those_of_the_calls() -> None:
    clock, stats = FakeClock(), IoStats()
    store = ChaosLayer(DictStore(), sleep=clock.sleep)
    layer = MeterLayer(store, stats, clock=clock)
    store.inject(Fault.DELAY, puts=2, gets=1)
    layer.put(make_blocks(2))
    layer.get(make_blocks(1))
    assert round(stats.written_seconds, 6) == 0.02
    assert round(stats.read_seconds, 6) == 0.01


def test_probes_and_deletions_are_requests() -> None:
    stats = IoStats()
    layer = MeterLayer(DictStore(), stats, clock=FakeClock())
    layer.probe(["a", "b"])
    layer.delete(["a"])
    assert stats.requests == 3


def test_a_layer_is_a_store_like_the_one_it_wraps() -> None:
    store = DictStore(variable_size=True, header_bytes=512, alignment=512)
    layer = MeterLayer(MeterLayer(store, IoStats(), clock=FakeClock()), IoStats(), clock=FakeClock())
    assert layer.traits == StoreTraits("MEMORY", header_bytes=512, alignment=512, variable_size=True, batches=True)
    layer.write_document("a.json", b"{}")
    assert layer.read_document("a.json") == b"{}"
