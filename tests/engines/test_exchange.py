"""The exchange of blocks with threads that wait."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.thread_limit import ThreadLimit
from tiering import ModelIdentity, load_stack, make_offload_key, open_manager
from tiering.engines.exchange import BlockExchange, _Load
from tiering.errors import TierUnavailableError
from tiering.testing.clock import until

BLOCK = 4096
KEYS = [make_offload_key(bytes([n]) * 32, 0) for n in range(64)]
CONTENT = np.random.default_rng(0).integers(0, 256, (64, BLOCK), np.uint8)


def write(position: int, row: NDArray[np.uint8]) -> None:
    row[:BLOCK] = CONTENT[position]


@contextmanager
def running(deadline: float = 30.0, clock: Callable[[], float] = time.monotonic) -> Iterator[BlockExchange]:
    tier = {"type": "memory", "capacity": "16MiB"}
    stack = load_stack({"primary": {"capacity": "128KiB"}, "secondary": [tier], "shutdown_deadline": "5s"})
    manager = open_manager(stack, BLOCK, ModelIdentity("m", "w", "d", "l"))
    exchange = BlockExchange(manager, "a test", logging.getLogger("test"), window=16, deadline=deadline, patience=10.0)
    try:
        exchange.start()
        yield exchange
    finally:
        exchange.stop()
        manager.shutdown()


class Held:
    """A copy that waits in the middle, with the rows that its call was lent."""

    def __init__(self) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.rows: list[NDArray[np.uint8]] = []
        self.kept: list[bool] = []

    def __call__(self, position: int, row: NDArray[np.uint8]) -> None:
        self.rows.append(row)
        self.begun.set()
        self.go_on.wait()
        row[:BLOCK] = CONTENT[position]
        self.kept.append(np.array_equal(row[:BLOCK], CONTENT[position]))


@contextmanager
def calling(method: Any, *arguments: Any) -> Iterator[list[list[bool]]]:
    found: list[list[bool]] = []
    thread = threading.Thread(target=lambda: found.append(method(*arguments)))
    thread.start()
    try:
        yield found
    finally:
        thread.join()


def test_each_block_counts_where_no_prefix_is_meant() -> None:
    with running() as exchange:
        exchange.store([KEYS[1], KEYS[3]], write)
        assert exchange.held(KEYS[:4]) == [False] * 4
        assert exchange.held(KEYS[:4], is_prefix=False) == [False, True, False, True]
        loaded: dict[int, bytes] = {}
        copy = lambda n, row: loaded.update({n: row[:BLOCK].tobytes()})  # noqa: E731
        assert exchange.load(KEYS[:4], copy, is_prefix=False) == [False, True, False, True]
        assert loaded == {1: CONTENT[0].tobytes(), 3: CONTENT[1].tobytes()}


def test_a_copy_that_fails_stores_nothing_and_the_error_reaches_the_caller() -> None:
    with running() as exchange:
        with pytest.raises(ZeroDivisionError):
            exchange.store(KEYS[:4], lambda position, row: print(position / 0))
        assert exchange.held(KEYS[:1]) == [False]
        with pytest.raises(ZeroDivisionError):
            exchange.store(KEYS[:1], write) and exchange.load(KEYS[:1], lambda position, row: print(1 / 0))
        assert exchange.store(KEYS[:8], write) == [True] * 8
        assert exchange.manager.primary_tier.free > 0


def test_the_head_of_a_load_is_copied_while_the_medium_still_reads_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    from tiers.memory import MemoryStore

    monkeypatch.setattr("tiering.engines.exchange.LOAD_BYTES", 2 * BLOCK)
    original, go_on = MemoryStore.get_one, threading.Event()

    def get_one(store: MemoryStore, block: Any) -> Any:
        if block.key in KEYS[12:16]:
            go_on.wait()
        return original(store, block)

    monkeypatch.setattr(MemoryStore, "get_one", get_one)
    copied: list[int] = []

    def read(position: int, row: NDArray[np.uint8]) -> None:
        assert np.array_equal(row[:BLOCK], CONTENT[position])
        copied.append(position)

    with running() as exchange:
        try:
            for first in range(0, 64, 16):
                stored = lambda n, row, first=first: write(first + n, row)  # noqa: E731
                assert exchange.store(KEYS[first : first + 16], stored) == [True] * 16
            with calling(exchange.load, KEYS[:16], read) as found:
                assert until(lambda: len(copied) >= 8)
                assert copied == list(range(len(copied)))
                assert not found
                go_on.set()
            assert found == [[True] * 16]
            assert copied == list(range(16))
        finally:
            go_on.set()


def test_blocks_of_no_prefix_are_copied_while_the_first_ones_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    from tiers.memory import MemoryStore

    monkeypatch.setattr("tiering.engines.exchange.LOAD_BYTES", 4 * BLOCK)
    original, go_on = MemoryStore.get_one, threading.Event()

    def get_one(store: MemoryStore, block: Any) -> Any:
        if block.key in KEYS[:4]:
            go_on.wait()
        return original(store, block)

    monkeypatch.setattr(MemoryStore, "get_one", get_one)
    keys, copied = [*KEYS[:6], *KEYS[54:]], []  # the last ten are in memory: more than one loan

    def read(position: int, row: NDArray[np.uint8]) -> None:
        assert np.array_equal(row[:BLOCK], CONTENT[KEYS.index(keys[position])])
        copied.append(position)

    with running() as exchange:
        try:
            for first in range(0, 64, 16):
                stored = lambda n, row, first=first: write(first + n, row)  # noqa: E731
                assert exchange.store(KEYS[first : first + 16], stored) == [True] * 16
            with calling(partial(exchange.load, is_prefix=False), keys, read) as found:
                assert until(lambda: len(copied) == 12)
                assert sorted(copied) == list(range(4, 16))
                assert not found
                go_on.set()
            assert found == [[True] * 16]
            assert sorted(copied) == list(range(16))
        finally:
            go_on.set()


def test_blocks_that_come_one_by_one_are_lent_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each loan wakes two threads, so that many small ones would take longer than the reads."""
    from tiers.memory import MemoryStore

    monkeypatch.setattr("tiering.engines.exchange.TOGETHER_SECONDS", 60.0, raising=False)
    original, begun, go_on = MemoryStore.get_one, threading.Event(), threading.Event()

    def get_one(store: MemoryStore, block: Any) -> Any:
        if block.key == KEYS[0]:
            begun.set()
            go_on.wait()
        return original(store, block)

    monkeypatch.setattr(MemoryStore, "get_one", get_one)
    copied: list[int] = []
    with running() as exchange:
        try:
            for first in range(0, 64, 16):
                stored = lambda n, row, first=first: write(first + n, row)  # noqa: E731
                assert exchange.store(KEYS[first : first + 16], stored) == [True] * 16
            keys = [*KEYS[:2], *KEYS[60:]]  # the last four are in memory
            with calling(partial(exchange.load, is_prefix=False), keys, lambda n, row: copied.append(n)) as found:
                begun.wait()
                exchange.held(KEYS[60:])  # behind the first look of the load
                go_on.set()
            assert found == [[True] * 6]
            assert copied == list(range(6))
        finally:
            go_on.set()


def test_a_store_that_runs_over_a_reset_does_not_count() -> None:
    copy = Held()
    with running() as exchange, calling(exchange.store, KEYS[:2], copy) as found:
        copy.begun.wait()
        exchange.reset()
        exchange.held(KEYS[:1])  # the reset is done
        copy.go_on.set()
        assert until(lambda: found == [[False, False]])
        assert exchange.held(KEYS[:2], is_prefix=False) == [False, False]


def test_a_deadline_ends_a_call_during_a_copy_and_its_rows_are_of_use_again() -> None:
    copy, now = Held(), [0.0]
    with running(deadline=5.0, clock=lambda: now[0]) as exchange:
        with calling(exchange.store, KEYS[:2], copy) as found:
            copy.begun.wait()
            now[0] = 6.0
            copy.go_on.set()
        assert len(found[0]) == 2
        assert until(lambda: not exchange._calls and not exchange._lent)
        assert exchange.store(KEYS[2:10], write) == [True] * 8


class Interrupting:
    """The replies of a call whose caller is interrupted once rows are lent to it."""

    def __init__(self) -> None:
        self.lent = threading.Event()

    def put(self, reply: object) -> None:
        self.lent.set()

    def get(self, timeout: float) -> None:
        self.lent.wait()
        raise KeyboardInterrupt


def test_an_interrupted_wait_gives_its_rows_back() -> None:
    with running() as exchange:
        exchange.store(KEYS[:4], write)
        call = _Load(*exchange._start(KEYS[:4]))
        call.replies = Interrupting()  # type: ignore[assignment]
        with pytest.raises(KeyboardInterrupt):
            exchange._await(call, write, None)
        exchange.held(KEYS[:1])  # behind the messages so far
        assert not exchange._lent
        assert not exchange._calls


def test_a_stop_waits_for_a_copy_and_leaves_its_memory_mapped() -> None:
    copy = Held()
    with running() as exchange, calling(exchange.store, KEYS[:2], copy):
        copy.begun.wait()
        stopping = threading.Thread(target=exchange.stop)
        stopping.start()
        assert until(lambda: exchange._ended)
        assert stopping.is_alive()
        copy.go_on.set()
        stopping.join()
        assert copy.kept == [True, True]
        assert copy.rows[0][0] == 0  # freed, and still mapped
        assert exchange.held(KEYS[:1]) == [False]


def test_a_failure_of_the_thread_lets_a_caller_return_and_its_copy_harms_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copy = Held()
    with running() as exchange, calling(exchange.store, KEYS[:2], copy) as found:
        copy.begun.wait()
        monkeypatch.setattr(exchange.manager, "held", lambda *_: 1 / 0)
        assert exchange.held(KEYS[:1]) == [False]
        assert exchange.failed
        copy.go_on.set()
        assert until(lambda: found == [[False, False]])


def test_a_thread_that_cannot_start_is_an_error_of_the_start(thread_limit: ThreadLimit) -> None:
    tier = {"type": "memory", "capacity": "16MiB"}
    manager = open_manager(
        load_stack({"primary": {"capacity": "128KiB"}, "secondary": [tier]}), BLOCK, ModelIdentity("m", "w", "d", "l")
    )
    exchange = BlockExchange(manager, "a test", logging.getLogger("test"), window=4, deadline=1.0, patience=1.0)
    thread_limit.reach("kv-tiering-manager")
    with pytest.raises(TierUnavailableError, match="limit on threads"):
        exchange.start()
    thread_limit.leave()
    manager.shutdown()
