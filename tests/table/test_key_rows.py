"""Keys and rows in several dictionaries, which answer as one, grow alone, and are freed in slices."""

from __future__ import annotations

import secrets
import sys
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.table.looks import listed_rows
from tests.thread_limit import ThreadLimit
from tiering.api.manager import OffloadingEvent
from tiering.index.slots import SlotIndex
from tiering.table import block_table, disposal, events, row_array
from tiering.table.block_table import MAX_ROWS, BlockTable
from tiering.table.disposal import AT_ONCE, SLICE, Disposal
from tiering.table.events import EventQueue
from tiering.table.key_rows import UNDIVIDED_ROWS, KeyRows
from tiering.table.policies import recency
from tiering.table.row_array import LARGE_ARRAY
from tiering.testing.clock import until
from tiering.testing.keys import keys_of

ALL = keys_of(*range(40))
some = st.lists(st.sampled_from(ALL), max_size=12, unique=True)


@given(held=some, asked=some, num_rows=st.sampled_from([UNDIVIDED_ROWS, UNDIVIDED_ROWS + 1, 10_000_000, MAX_ROWS]))
def test_all_sizes_answer_as_one_dictionary(held: list[bytes], asked: list[bytes], num_rows: int) -> None:
    table, model = KeyRows(num_rows), dict(zip(held, range(len(held)), strict=True))
    table.put(held, list(range(len(held))))
    assert (len(table), dict(table)) == (len(model), model)
    assert [key in table for key in asked] == [key in model for key in asked]
    assert [table.get(key) for key in asked] == [model.get(key) for key in asked] == table.rows_or_none(asked)
    leading = next((position for position, key in enumerate(asked) if key not in model), len(asked))
    assert table.leading(asked) == leading
    assert list(table.rows(asked[:leading])) == [model[key] for key in asked[:leading]]
    assert table.disjoint(asked) is model.keys().isdisjoint(asked)
    known = table.known(asked)
    assert known == [key for key in asked if key in model]
    table.remove(known)
    assert dict(table) == {key: row for key, row in model.items() if key not in known}
    if leading < len(asked):
        with pytest.raises(KeyError):
            list(table.rows(asked))


@pytest.mark.parametrize(("num_rows", "count"), [(1_000_000, 123), (1_200_000, 147)])
def test_the_dictionaries_of_a_large_table_are_small_and_grow_at_different_times(num_rows: int, count: int) -> None:
    table = KeyRows(num_rows)
    grown: list[int] = []
    sizes = [0] * count
    for start in range(0, 400_000, 64):
        keys = [secrets.token_bytes(36) for _ in range(64)]
        table.put(keys, range(start, start + 64))
        before, sizes = sizes, [sys.getsizeof(part) for part in table._different]
        grown.append(sum(size - old for size, old in zip(sizes, before, strict=True) if old > 1 << 16))
    assert max(grown) <= 3 << 17, "no call builds many bytes anew"
    lengths = sorted(map(len, table.take()))
    assert lengths[0] < 400_000 / count < lengths[-1] < 4 * lengths[0]


def test_a_cleared_table_gives_its_dictionaries_away_as_they_are() -> None:
    table = BlockTable(UNDIVIDED_ROWS * 2)
    taken = table.allocate(ALL)
    assert taken is not None
    table.commit(ALL, taken[0])
    before = [id(part) for part in table.readable._different]
    table.pin(taken[0][:3])
    tables = table.clear()
    assert [id(part) for part in tables] == before
    assert sorted(key for part in tables for key in part) == sorted(ALL)
    assert (len(table.readable), table.quarantined, table.free) == (0, 3, table.num_rows - 3)
    assert not listed_rows(table), "no free row is looked for before it is needed"
    again = table.allocate(ALL)
    assert again is not None
    assert again[0].tolist() == list(range(3, 43))
    assert table.free_rows.swept < table.num_rows, "only the next rows are looked at"
    table.unpin(taken[0][:3])
    assert (table.quarantined, table.free) == (0, table.num_rows - 40)


# ------------------------------------------------------------------------------------------------------------- disposal


def _table(count: int) -> dict[bytes, int]:
    return {number.to_bytes(4, "big"): number for number in range(count)}


def test_large_dictionaries_are_freed_elsewhere_in_slices() -> None:
    tables = [_table(3 * SLICE), _table(2 * SLICE + 1), {}]
    sizes: list[int] = []
    threads: set[threading.Thread] = set()

    def rest(seconds: float) -> None:
        sizes.append(sum(map(len, tables)))
        threads.add(threading.current_thread())

    freeing = Disposal(rest)
    freeing.add(tables)
    assert until(lambda: not freeing.busy)
    assert sizes == [4 * SLICE + 1, 3 * SLICE + 1, 2 * SLICE + 1, SLICE + 1, 1, 0]
    assert threading.current_thread() not in threads
    assert len(threads) == 1
    assert until(lambda: not any(thread.is_alive() for thread in threads)), "the thread ends when nothing is left"


def test_small_dictionaries_need_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disposal, "ThreadPool", None)
    freeing = Disposal()
    freeing.add([_table(AT_ONCE), {}])
    freeing.add([])
    assert not freeing.busy


@pytest.mark.parametrize("reset", [False, True])
def test_the_large_arrays_of_an_index_are_freed_elsewhere(reset: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    freed: list[tuple[int, threading.Thread]] = []

    def note(array: NDArray[Any]) -> None:
        row_array.free_pages(array)
        assert not array.any()
        freed.append((array.nbytes, threading.current_thread()))

    monkeypatch.setattr(disposal, "free_pages", note)
    index = SlotIndex(LARGE_ARRAY)
    index.add_free(np.arange(LARGE_ARRAY))
    index.begin_recovery()
    keys = keys_of(*range(8))
    plan = index.plan_store(keys, 0.0)
    index.end_store(keys, plan.places, [True] * 8, 0.0)
    if reset:
        index.clear()
    else:
        index.end_recovery()
    assert until(lambda: not disposal.DISPOSAL.busy)
    assert [size for size, _ in freed] == ([LARGE_ARRAY] * 2 if reset else [8 * LARGE_ARRAY])
    assert threading.current_thread() not in {thread for _, thread in freed}
    small = SlotIndex(LARGE_ARRAY - 1)
    small.clear()
    assert not disposal.DISPOSAL.busy


@pytest.mark.parametrize("eviction", ["lru", "arc"])
def test_the_recency_log_of_a_large_index_is_freed_elsewhere_at_a_reset(
    eviction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, a reset freed all of it in one call: 4 to 11 ms with 10 million blocks."""
    freeing = Disposal()
    monkeypatch.setattr(freeing, "_run", lambda: None)
    monkeypatch.setattr(recency, "DISPOSAL", freeing)
    monkeypatch.setattr(recency, "_CHUNK", 4)
    rows = 4 * (AT_ONCE + 1)
    index = SlotIndex(rows, eviction=eviction)
    index.add_free(np.arange(rows))
    keys = keys_of(*range(rows))
    index.end_store(keys, index.plan_store(keys, 0.0).places, [True] * rows, 0.0)
    index.clear()
    assert sum(map(len, freeing._waiting)) >= AT_ONCE + 1


def test_dictionaries_wait_while_no_thread_can_be_started(thread_limit: ThreadLimit) -> None:
    thread_limit.reach()
    freeing, first, second = Disposal(lambda seconds: None), _table(AT_ONCE + 1), _table(AT_ONCE + 1)
    freeing.add([first])
    assert until(lambda: thread_limit.refused and not freeing.busy)
    assert len(first) == AT_ONCE + 1
    thread_limit.leave()
    freeing.add([second])
    assert until(lambda: not first and not second)


def test_a_table_that_is_filled_frees_what_waits_while_no_thread_can_be_started(
    thread_limit: ThreadLimit, monkeypatch: pytest.MonkeyPatch
) -> None:
    thread_limit.reach()
    freeing = Disposal(lambda seconds: None)
    monkeypatch.setattr(block_table, "DISPOSAL", freeing)
    waiting: list[Any] = [_table(AT_ONCE + 1), {}, _table(100)]
    total = sum(map(len, waiting))
    freeing.add([np.zeros(1, np.int64), *waiting])
    assert until(lambda: freeing.needs_help)
    table = BlockTable(total)
    keys = keys_of(*range(1, total))
    taken = table.allocate(keys[:100])
    assert sum(map(len, waiting)) == total - 199
    table.insert(keys[100:200], np.arange(total - 100, total))
    assert sum(map(len, waiting)) == total - 399
    assert taken is not None
    assert table.allocate(keys[200 : total // 2 + 1]) is not None
    assert sum(map(len, waiting)) == 0
    assert table.allocate(keys[total // 2 + 1 : total // 2 + 2]) is not None
    assert not freeing.needs_help
    first, second = _table(AT_ONCE + 1), _table(AT_ONCE + 1)
    freeing.add([first])
    assert until(lambda: freeing.needs_help)
    thread_limit.leave()
    freeing.add([second])
    assert until(lambda: not first and not second and not freeing.needs_help)


# --------------------------------------------------------------------------------------------------------------- events


def test_the_keys_of_a_reset_are_announced_in_pieces_and_before_later_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "CLEARED_AT_ONCE", 3)
    queue = EventQueue()
    stored, removed = (OffloadingEvent([], "CPU", "LOCAL", "cpu", gone) for gone in (False, True))
    queue.add(stored)
    queue.clear(removed, [dict.fromkeys(ALL[:2]), {}, dict.fromkeys(ALL[2:7])])
    queue.clear(removed, [])
    queue.add(stored)
    pieces = [queue.take() for _ in range(4)]
    assert [[(event.removed, len(event.keys)) for event in piece] for piece in pieces] == [
        [(False, 0), (True, 3)],
        [(True, 3)],
        [(True, 1), (False, 0)],
        [],
    ]
    assert {key for piece in pieces for event in piece for key in event.keys} == set(ALL[:7])
    assert {event.order for piece in pieces for event in piece} == {stored.order, removed.order}
