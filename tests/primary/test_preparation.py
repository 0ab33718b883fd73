"""Rows whose memory is prepared beside the engine's start: states, failures, and the time before."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from examples.mini_engine import Engine
from examples.mini_engine.scheduler import ConnectorOutput
from examples.mini_engine.simple import SimpleEngine
from tests.mini_engine.helpers import ask_all, one_row, options, prompt, result
from tests.simple.simulation import Simulation, tokens
from tests.thread_limit import ThreadLimit
from tiering.api.request import ReqContext
from tiering.errors import RegionError
from tiering.primary.manager import CPUPrimaryTierOffloadingManager
from tiering.primary.memory import region
from tiering.primary.memory.preparation import FAILED, PREPARED, PREPARING, Preparation
from tiering.primary.memory.region import SharedRegion
from tiering.simple.metadata import SimpleCPUOffloadWorkerMetadata

KEYS = [b"0123456789abcdef0123"]


class Gate:
    """The prefaulting of large regions, which waits for a test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened = threading.Event()
        self.error: Exception | None = None
        self.overs: list[Callable[[], bool]] = []
        monkeypatch.setattr(region, "PREPARED_AT_ONCE", 0)
        monkeypatch.setattr(region, "prefault", self._prefault)

    def _prefault(self, flat: object, fd: int, *, share: object, is_over: Callable[[], bool]) -> None:
        self.overs.append(is_over)
        while not self.opened.wait(0.001) and not is_over():
            pass
        if self.error is not None:
            raise self.error

    def open(self) -> None:
        """Let the preparations end, and wait for their threads."""
        self.opened.set()
        wait()


def wait() -> None:
    """Wait for the threads of all preparations."""
    for thread in threading.enumerate():
        if thread.name == "kv-tiering-prepare":
            thread.join(60)
            assert not thread.is_alive()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate(monkeypatch)
    yield made
    made.open()


def test_a_small_region_is_prepared_at_once() -> None:
    rows = SharedRegion.create(4, 4096, in_background=True)
    assert (rows.is_prepared, rows.in_background) == (True, False)
    rows.close()


def test_a_large_one_is_prepared_beside_its_start_if_the_caller_asks_for_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(region, "PREPARED_AT_ONCE", 0)
    caplog.set_level(logging.INFO)
    rows = SharedRegion.create(4, 4096, in_background=True)
    wait()
    assert rows.is_prepared
    assert caplog.text.count("the primary tier's memory is prepared") == 1
    rows.close()
    assert rows.is_prepared, "as before the end"


def test_a_region_of_several_sides_is_prepared_when_all_sides_are(gate: Gate, tmp_path: Path) -> None:
    first = SharedRegion.open_shared("engine", 4, 4096, sides=2, directory=tmp_path, in_background=True)
    gate.open()
    assert not first.is_prepared, "the other side has not come"
    gate.opened.clear()
    second = SharedRegion.open_shared("engine", 4, 4096, sides=2, directory=tmp_path, in_background=True)
    assert first.is_complete
    assert [first.is_prepared, second.is_prepared] == [False, False]
    assert list(tmp_path.iterdir()) == [], "a kill from now on leaves nothing"
    gate.open()
    assert first.is_prepared
    assert second.is_prepared
    first.close()
    second.close()


def test_memory_that_cannot_be_prepared_is_an_absence_on_all_sides(
    gate: Gate, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gate.error = RegionError("there is no memory")
    sides = [
        SharedRegion.open_shared("engine", 4, 4096, sides=2, directory=tmp_path, in_background=True) for _ in range(2)
    ]
    gate.open()
    assert not any(side.is_prepared for side in sides)
    assert (
        caplog.text.count("runs without its primary tier, whose memory could not be prepared: there is no memory") == 2
    )
    for side in sides:
        side.close()


def test_no_row_is_given_to_a_block_before(gate: Gate) -> None:
    """A write to a page without memory could end the process."""
    rows = SharedRegion.create(4, 4096, in_background=True)
    manager, ctx = CPUPrimaryTierOffloadingManager(rows), ReqContext("r")
    assert manager.prepare_store(KEYS, ctx) is None
    assert manager.allocate(KEYS) is None
    assert not manager.is_prepared
    gate.open()
    assert manager.prepare_store(KEYS, ctx) is not None
    rows.close()


def test_a_close_ends_a_preparation_early_and_frees_the_memory(gate: Gate) -> None:
    rows = SharedRegion.create(4, 4096, in_background=True)
    mapping = weakref.ref(rows.array.base)
    rows.close()
    assert all(is_over() for is_over in gate.overs)
    assert [thread.name for thread in threading.enumerate() if "prepare" in thread.name] == []
    gc.collect()
    assert mapping() is None, "the state of the preparation keeps the rows mapped"


def test_without_a_thread_the_start_waits(
    thread_limit: ThreadLimit, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(region, "PREPARED_AT_ONCE", 0)
    thread_limit.reach("kv-tiering-prepare")
    rows = SharedRegion.create(4, 4096, in_background=True)
    assert rows.is_prepared
    assert "the engine's start waits for the primary tier's memory" in caplog.text
    rows.close()


def test_parts_run_in_their_order_and_the_rows_are_prepared_after_the_last() -> None:
    state, ran, go = np.zeros(1, np.uint8), list[str](), threading.Event()
    preparation = Preparation(state)

    def first(is_over: Callable[[], bool]) -> None:
        go.wait(60)
        ran.append("first")

    preparation.begin(first)
    preparation.begin(lambda is_over: ran.append(f"second, {state[0]}"))
    assert state[0] == PREPARING
    go.set()
    wait()
    assert (ran, state[0]) == (["first", f"second, {PREPARING}"], PREPARED)
    preparation.begin(lambda is_over: ran.append("third"))
    wait()
    assert (ran[2:], state[0]) == (["third"], PREPARED)


def test_no_part_runs_after_one_that_failed() -> None:
    state, ran = np.zeros(1, np.uint8), list[str]()
    preparation = Preparation(state)

    def fail(is_over: Callable[[], bool]) -> None:
        raise MemoryError("none left")

    preparation.begin(fail)
    wait()
    preparation.begin(lambda is_over: ran.append("later"))
    wait()
    assert (ran, state[0]) == ([], FAILED)


def stats(engine: Engine) -> dict[str, int]:
    """Return the counters of the manager and of the connector."""
    assert engine.tiers is not None
    found = engine.tiers.scheduler_half.get_stats()
    return dict(found["manager"]) | dict(found["connector"])


def test_an_engine_answers_meanwhile_and_its_cpu_tier_joins(gate: Gate, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    prompts = [prompt(seed, 60) for seed in range(3)]
    with Engine(options(prefix_caching=False, stack={"primary": {"capacity": 64 * one_row()}})) as engine:
        expected = [result(answer) for answer in ask_all(engine, prompts, "before")]
        assert stats(engine)["stores"] == 0
        assert stats(engine)["rows_unprepared"] == stats(engine)["rows"]
        gate.open()
        for name, loaded in (("computed", False), ("loaded", True)):
            answers = ask_all(engine, prompts, name)
            assert [result(answer) for answer in answers] == expected
            assert engine.settle()
            assert (stats(engine)["loads"] > 0) is loaded
        assert stats(engine)["rows_unprepared"] == 0
    assert caplog.text.count("the CPU tier has joined") == 1


def test_an_engine_without_memory_for_its_cpu_tier_serves(gate: Gate) -> None:
    gate.error = RegionError("there is no memory")
    prompts = [prompt(1, 60)]
    with Engine(options(prefix_caching=False, stack={"primary": {"capacity": 64 * one_row()}})) as engine:
        gate.open()
        answers = [result(ask_all(engine, prompts, name)[0]) for name in ("first", "again")]
        assert answers[0] == answers[1]
        assert stats(engine)["loads"] == 0
        assert stats(engine)["rows_unprepared"] > 0


@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
@pytest.mark.parametrize("fails", [False, True])
def test_the_pool_of_the_simple_mode_joins_too(
    gate: Gate, caplog: pytest.LogCaptureFixture, lazy: bool, fails: bool
) -> None:
    caplog.set_level(logging.INFO)
    stack = {"mode": "simple", "lazy_offload": lazy, "primary": {"capacity": "8MiB"}}
    prompts = [prompt(seed, 60) for seed in range(8)]
    if fails:
        gate.error = RegionError("there is no memory")
    with SimpleEngine(options(num_blocks=44, stack=stack)) as engine:
        assert engine.tiers is not None

        def available() -> bool:
            return bool(engine.tiers.scheduler_half.get_stats()["tiers"]["cpu"]["available"])  # type: ignore[union-attr]

        expected = [result(answer) for answer in ask_all(engine, prompts, "before")]
        assert (dict(engine.tiers.bytes_moved), available()) == ({}, False)
        gate.open()
        for name in ("joins", "stored", "loaded"):
            assert [result(answer) for answer in ask_all(engine, prompts, name)] == expected
            assert engine.settle()
        assert (engine.loaded_bytes > 0, available()) == (not fails, not fails)
    assert caplog.text.count("the CPU tier has joined") == (not fails)


def test_the_pool_of_the_simple_mode_joins_when_all_workers_are_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region, "PREPARED_AT_ONCE", 0)
    sim = Simulation(world_size=2)

    def stored_after(reports: int) -> int:
        if reports:
            report = SimpleCPUOffloadWorkerMetadata(prepared=1)
            sim.half.update_connector_output(ConnectorOutput(kv_connector_worker_meta=report))
        sim.run(f"after {reports}", tokens(reports, 20))
        return sum(len(meta.store_gpu_blocks) for meta in sim.metadata)

    assert [stored_after(0), stored_after(1)] == [0, 0]
    assert stored_after(2) > 0
    both = SimpleCPUOffloadWorkerMetadata(prepared=1).aggregate(SimpleCPUOffloadWorkerMetadata(prepared=1))
    assert both.prepared == 2
