"""The table of rows against a model: every row has one state, and the counts match the rows."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.table.looks import listed_rows
from tiering.errors import ConfigError
from tiering.table import free_rows, key_rows
from tiering.table.block_table import MAX_ROWS, BlockTable
from tiering.table.free_rows import FREE, UNSEEN
from tiering.testing.keys import keys_of

ROWS = 8
KEYS = keys_of(*range(12))
chosen = st.lists(st.sampled_from(KEYS), min_size=1, max_size=5, unique=True)
choices = st.integers(0, 2**16)
Batch = tuple[list[bytes], list[int]]


class TableMachine(RuleBasedStateMachine):
    """A table in many dictionaries, swept in small pieces, with writers and readers of rows."""

    undivided, sweep = 0, 3

    @initialize(policy=st.sampled_from(["lru", "arc"]))
    def start(self, policy: str) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(key_rows, "UNDIVIDED_ROWS", self.undivided)
        self.patch.setattr(key_rows, "_KEYS_PER_TABLE", 1)
        self.patch.setattr(free_rows, "SWEEP_ROWS", self.sweep)
        self.table = BlockTable(ROWS, policy)
        self.withdrawn: list[int] = []
        self.unseen: list[int] = []
        self.writing: list[Batch] = []
        self.late: list[Batch] = []
        self.reading: list[list[int]] = []

    def teardown(self) -> None:
        self.patch.undo()

    @rule(rows=st.sets(st.integers(0, ROWS - 1), min_size=1, max_size=3))
    def withdraw(self, rows: set[int]) -> None:
        before = self.table.free
        taken = self.table.withdraw(np.array(sorted(rows))).tolist()
        assert self.table.free == before - len(taken)
        self.withdrawn += taken

    @rule(count=st.integers(1, 3))
    def take_free(self, count: int) -> None:
        before = self.table.free
        taken = self.table.take_free(count).tolist()
        assert len(taken) == min(count, before)
        self.withdrawn += taken

    @rule()
    def end_withdrawal(self) -> None:
        if self.withdrawn:
            self.table.end_writing(np.array([self.withdrawn.pop()]))

    @rule()
    def forget(self) -> None:
        if self.withdrawn:
            self.unseen.append(self.withdrawn.pop())
            self.table.forget(np.array(self.unseen[-1:]))

    @rule(start=st.integers(0, ROWS), count=st.integers(0, 3))
    def forget_free(self, start: int, count: int) -> None:
        before = self.table.free
        unseen = set(self.unseen)
        forgotten = self.table.forget_free(start, start + count)
        assert self.table.free == before - forgotten
        self.unseen += [row for row in range(ROWS) if self.table.refs[row] == UNSEEN and row not in unseen]
        assert len(self.unseen) == len(unseen) + forgotten

    @rule(keys=chosen)
    def find(self, keys: list[bytes]) -> None:
        """Insert a block in an unseen row, or free the row."""
        new = self.table.unknown(keys)[:1]
        if self.unseen and new:
            self.table.insert(new, np.array([self.unseen.pop()]))
        elif self.unseen:
            self.table.add_free(np.array([self.unseen.pop()]))

    def _end(self, batches: list[Batch], choice: int) -> tuple[list[bytes], np.ndarray]:
        keys, rows = batches.pop(choice % len(batches))
        return keys, np.array(rows, np.int64)

    @rule(keys=chosen)
    def begin_writing(self, keys: list[bytes]) -> None:
        new = self.table.unknown(keys)
        assert new == [key for key in keys if key not in self.table.readable and key not in self.table.pending]
        free, evictable = self.table.free, self.table.evictable
        taken = self.table.allocate(new)
        assert (taken is not None) is (len(new) <= free + evictable)
        if taken is not None:
            rows, evicted = taken
            assert len(evicted) == max(0, len(new) - free)
            assert not set(evicted) & self.table.readable.keys()
            self.writing.append((new, rows.tolist()))

    @rule(choice=choices, success=st.booleans())
    def end_writing(self, choice: int, success: bool) -> None:
        if self.writing:
            keys, rows = self._end(self.writing, choice)
            (self.table.commit if success else self.table.abort)(keys, rows)
            assert all((key in self.table.readable) is success for key in keys)

    @rule(choice=choices)
    def disown(self, choice: int) -> None:
        if self.writing:
            keys, rows = self._end(self.writing, choice)
            self.table.disown(keys, rows)
            self.late.append((keys, rows.tolist()))

    @rule(choice=choices)
    def end_late(self, choice: int) -> None:
        if self.late:
            keys, rows = self._end(self.late, choice)
            if len(self.table.unknown(keys)) == len(keys) and choice % 2:
                self.table.adopt(keys, rows)
            else:
                self.table.end_writing(rows)

    @rule(keys=chosen)
    def begin_reading(self, keys: list[bytes]) -> None:
        rows = [row for row in self.table.rows_of(keys) if row is not None]
        if rows:
            self.table.pin(np.array(rows, np.int64))
            self.reading.append(rows)

    @rule(choice=choices)
    def end_reading(self, choice: int) -> None:
        if self.reading:
            self.table.unpin(np.array(self.reading.pop(choice % len(self.reading)), np.int64))

    @rule(keys=chosen)
    def touch(self, keys: list[bytes]) -> None:
        known, rows = self.table.touch(keys)
        assert [(key, self.table.readable[key]) for key in known] == list(zip(known, rows.tolist(), strict=True))
        assert set(known) == set(keys) & self.table.readable.keys()

    @rule(keys=chosen)
    def drop(self, keys: list[bytes]) -> None:
        held = set(keys) & self.table.readable.keys()
        assert set(self.table.drop(keys)) == held
        assert not held & self.table.readable.keys()

    @rule(count=st.integers(0, 4))
    def evict(self, count: int) -> None:
        evictable = self.table.evictable
        assert len(self.table.evict(count)) == min(count, evictable)

    @rule()
    def clear(self) -> None:
        held = set(self.table.readable)
        assert set().union(*self.table.clear()) == held
        assert not self.table.readable
        assert not self.table.pending
        self.late += self.writing
        self.writing = []

    @invariant()
    def every_row_is_in_one_place(self) -> None:
        table = self.table
        rows = [*table.readable.values(), *table.pending.values()]
        assert len(set(rows)) == len(rows)
        assert table.free + len(rows) + table.quarantined + len(self.unseen) == ROWS
        assert set(self.withdrawn).isdisjoint(rows)
        assert set(self.unseen).isdisjoint(rows)
        assert np.flatnonzero(table.has_block(0, ROWS)).tolist() == sorted(rows)
        readable = sorted(key for key, row in table.readable.items() if 2 <= row < 5)
        assert sorted(table.readable_in(2, 5)) == readable
        assert np.flatnonzero(table.has_block(2, 5)).tolist() == [row - 2 for row in sorted(rows) if 2 <= row < 5]
        assert not table.any_quarantined(rows)
        assert table.room == table.free + table.evictable
        free = np.flatnonzero(table.free_rows.mask(0, ROWS)).tolist()
        assert len(free) == table.free
        assert sorted(listed_rows(table)) == [row for row in free if row < table.free_rows.swept]

    @invariant()
    def references_are_those_of_the_readers_and_writers(self) -> None:
        readers = Counter(row for rows in self.reading for row in rows)
        writers = {row for _, rows in [*self.writing, *self.late] for row in rows}.union(self.withdrawn)
        for row in range(ROWS):
            busy = -1 if row in writers else readers[row]
            assert self.table.refs[row] in ([busy] if busy else [0, FREE, UNSEEN])
        assert self.table.evictable == sum(not readers[row] for row in self.table.readable.values())
        assert all(self.table.keys[row] == key for key, row in self.table.readable.items())


TestTableMachine = TableMachine.TestCase
TestTableMachine.settings = settings(max_examples=120, stateful_step_count=50, deadline=None)


class UndividedMachine(TableMachine):
    """The same in one dictionary, swept at once."""

    undivided, sweep = ROWS, ROWS


TestUndividedMachine = UndividedMachine.TestCase
TestUndividedMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("rows", [0, -1, MAX_ROWS + 1])
def test_a_table_of_an_impossible_size_is_refused(rows: int) -> None:
    with pytest.raises(ConfigError):
        BlockTable(rows)


def test_the_first_free_row_is_reserved_first() -> None:
    table = BlockTable(4, rows_free=False)
    assert (table.free, table.room) == (0, 0)
    table.add_free(np.array([2, 0, 3]))
    taken = table.allocate(keys_of(0, 1))
    assert taken is not None
    assert taken[0].tolist() == [2, 0]


def test_free_rows_can_be_withdrawn_and_return() -> None:
    table = BlockTable(4)
    assert table.take_free(2).tolist() == [3, 2]
    assert table.withdraw(np.array([0, 3])).tolist() == [0]
    assert (table.free, table.quarantined) == (1, 3)
    table.end_writing(np.array([0, 2]))
    table.forget(np.array([3]))
    assert (table.free, table.quarantined) == (3, 0)


def test_nothing_is_imported_in_the_middle_of_a_step() -> None:
    """Run rare operations in a fresh process, where some functions of numpy would import modules."""
    code = """
import sys
import numpy as np
from tiering.table.block_table import BlockTable
from tiering.testing.keys import keys_of

table = BlockTable(8)
before = set(sys.modules)
rows, _ = table.allocate(keys_of(0, 1, 0))
table.commit(keys_of(0, 1), rows)
table.pin(rows)
table.pin(rows)
more = table.allocate(keys_of(*range(2, 8)))[0]
assert table.allocate(keys_of(9)) is None
table.commit(keys_of(*range(2, 8)), more)
table.evict(6)
table.unpin(rows)
table.unpin(rows)
table.policy.release(np.array([0, 0]))
table.withdraw(np.array([5, 5, 6]))
table.take_free(1)
table.clear()
assert table.allocate(keys_of(1)) is not None
print(sorted(set(sys.modules) - before))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[]\n"
