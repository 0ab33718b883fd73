"""Blocks of stores that no I/O thread has begun can be withdrawn; no thread reads their rows any more."""

from __future__ import annotations

import random
from collections import deque

import numpy as np
import pytest

from tests.secondary.io_fakes import Primary, finish, make_job, outcome_names, running_host
from tests.secondary.test_io_host import GatedStore
from tiering.block_store import Done
from tiering.secondary.io.lanes import Unit
from tiering.secondary.io.messages import IoKind
from tiering.testing.clock import until
from tiering.testing.faults import DictStore


def test_blocks_of_stores_that_no_thread_has_begun_are_withdrawn_and_the_others_are_stored() -> None:
    primary, store = Primary(16), GatedStore()
    with running_host(store, primary, threads=1) as host:
        host.submit(make_job(primary, IoKind.STORE, [0], job_id=1))
        assert until(lambda: store.waiting == 1)
        host.submit(make_job(primary, IoKind.STORE, range(1, 7), job_id=2))
        host.submit(make_job(primary, IoKind.STORE, range(7, 9), job_id=3))
        host.submit(make_job(primary, IoKind.STORE, range(9, 10), job_id=4))
        waiting = [host.waiting_rows(job_id) for job_id in range(6)]
        assert waiting == [[], [], [6, 5, 4, 3, 2, 1], [8, 7], [9], []]
        assert host.withdraw({1: {0}}) == [], "row 0 is being read"
        assert host.withdraw({5: {9}}) == [], "there is no such job"
        wanted = {2: {0, 2, 5, 6, 7}, 3: {7, 8}}
        assert host.withdraw(wanted) == [(2, [2, 5, 6]), (3, [7, 8])], "row 7 is not that of the first job"
        assert [host.waiting_rows(job_id) for job_id in range(6)] == [[], [], [4, 3, 1], [], [9], []]
        primary.rows[[2, 5, 6, 7, 8]] = 0xEE
        store.gate.set()
        results = {result.job.job_id: result for result in finish(host, 4)}
    assert outcome_names(results[1].outcomes) == ["DONE"]
    assert outcome_names(results[2].outcomes) == ["DONE", "ABSENT", "DONE", "DONE", "ABSENT", "ABSENT"]
    assert outcome_names(results[3].outcomes) == ["ABSENT", "ABSENT"]
    assert results[2].transfer_bytes == 3 * primary.size
    stored = [place for places in store.calls for place in places[1]]
    assert stored == [0, 1, 3, 4, 9], "what remains of a store keeps its place in the queue"


def test_a_store_of_which_a_thread_has_begun_a_part_loses_the_other_parts() -> None:
    primary, store = Primary(16), GatedStore()
    with running_host(store, primary, threads=2) as host:
        host.submit(make_job(primary, IoKind.STORE, range(8), job_id=1))
        assert until(lambda: store.waiting == 2)
        begun = set(range(8)).difference(host.waiting_rows(1))
        withdrawn = [row for _, rows in host.withdraw({1: set(range(8))}) for row in rows]
        assert sorted({*withdrawn, *begun}) == list(range(8))
        assert not begun.intersection(withdrawn)
        assert host.withdraw({1: set(range(8))}) == []
        assert host.waiting_rows(1) == []
        store.gate.set()
        (result,) = finish(host)
    assert [at for at, outcome in enumerate(result.outcomes) if outcome is Done.DONE] == sorted(begun)


def test_a_store_that_is_withdrawn_entirely_ends_at_the_next_poll() -> None:
    primary, store = Primary(4), GatedStore()
    with running_host(store, primary, threads=1) as host:
        host.submit(make_job(primary, IoKind.STORE, [0], job_id=1))
        assert until(lambda: store.waiting == 1)
        host.submit(make_job(primary, IoKind.STORE, [1, 2], job_id=2))
        assert host.withdraw({2: {1, 2}}) == [(2, [1, 2])]
        assert [result.job.job_id for result in host.poll()] == [2]
        store.gate.set()
        finish(host)
        assert host.in_flight == 0


def test_what_remains_behind_a_withdrawn_block_is_moved_in_units_of_the_usual_size() -> None:
    primary, store = Primary(16), GatedStore()
    with running_host(store, primary, threads=1) as host:
        host.unit_bytes = 2 * primary.size
        host.submit(make_job(primary, IoKind.STORE, [0], job_id=1))
        assert until(lambda: store.waiting == 1)
        host.submit(make_job(primary, IoKind.STORE, range(1, 12), job_id=2))
        assert host.withdraw({2: {1, 4}}) == [(2, [1, 4])]
        store.gate.set()
        results = {result.job.job_id: result for result in finish(host, 2)}
    assert results[2].outcomes.count(Done.DONE) == 9
    stored = [list(places) for operation, places in store.calls if operation == "put"]
    assert stored == [[0], [2, 3], [5, 6], [7, 8], [9, 10], [11]]


class _OvertakenQueue(deque[Unit]):
    """Queue whose head a thread takes as soon as it was looked at."""

    taken: Unit | None = None

    def index(self, unit: Unit, *bounds: int) -> int:
        at = super().index(unit, *bounds)
        if self.taken is None:
            self.taken = self.popleft()
        return at


def test_a_unit_that_a_thread_takes_during_the_withdrawal_is_not_given_up() -> None:
    primary, store = Primary(8), GatedStore()
    with running_host(store, primary, threads=1) as host:
        host.submit(make_job(primary, IoKind.STORE, [0], job_id=1))
        assert until(lambda: store.waiting == 1)
        host.submit(make_job(primary, IoKind.STORE, [1, 2], job_id=2))
        host.submit(make_job(primary, IoKind.STORE, [3], job_id=3))
        lane = host.lanes.stores
        queue = _OvertakenQueue(lane.waiting)
        lane.waiting = queue
        assert host.withdraw({2: {1, 2}, 3: {3}}) == [(3, [3])]
        assert queue.taken is not None
        lane.waiting = deque([queue.taken, *queue])
        store.gate.set()
        results = {result.job.job_id: outcome_names(result.outcomes) for result in finish(host, 3)}
    assert results == {1: ["DONE"], 2: ["DONE", "DONE"], 3: ["ABSENT"]}


@pytest.mark.parametrize("seed", range(3))
def test_no_thread_reads_a_row_that_was_withdrawn(seed: int) -> None:
    """Real threads store blocks from rows that are used again as soon as they are withdrawn."""
    dice = random.Random(seed)
    rows, primary, store = 24, Primary(64, 1024), DictStore()
    free, number = list(range(rows)), 0
    content: dict[int, bytes] = {}
    stored: set[int] = set()
    withdrawn_blocks = 0
    with running_host(store, primary, threads=4) as host:

        def settle() -> bool:
            for result in host.poll():
                for block, row, outcome in zip(result.job.places, result.job.rows, result.outcomes, strict=True):
                    assert isinstance(block, int)
                    if outcome is Done.DONE:
                        assert owner[row] == block, "a withdrawn block was stored all the same"
                        stored.add(block)
                    if owner.get(row) == block:
                        del owner[row]
                        free.append(row)
            return host.in_flight == 0

        owner: dict[int, int] = {}
        job_of: dict[int, int] = {}
        for _ in range(1500):
            settle()
            if free and dice.random() < 0.7:
                dice.shuffle(free)
                taken = [free.pop() for _ in range(dice.randint(1, min(6, len(free))))]
                numbers = list(range(number, number + len(taken)))
                number += len(taken)
                for row, block in zip(taken, numbers, strict=True):
                    primary.rows[row] = np.frombuffer(dice.randbytes(primary.rows.shape[1]), np.uint8)
                    content[block] = primary.block(row)
                    owner[row] = block
                    job_of[block] = numbers[0]
                host.submit(make_job(primary, IoKind.STORE, numbers, rows=taken, places=numbers, job_id=numbers[0]))
            elif dice.random() < 0.5:
                wanted = {row for row in range(rows) if dice.random() < 0.3}
                for _, given in host.withdraw({job_of[block]: wanted for block in owner.values()}):
                    withdrawn_blocks += len(given)
                    for row in given:
                        primary.rows[row] = 0xEE
                        del owner[row]
                        free.append(row)
            else:  # let the threads store what waits: on a busy machine, they may lose each race against withdrawals
                assert until(settle)
        assert until(settle)
        assert sorted(free) == list(range(rows))
        for first in range(0, len(stored), 40):
            blocks = sorted(stored)[first : first + 40]
            targets = range(rows, rows + len(blocks))
            host.submit(make_job(primary, IoKind.LOAD, blocks, rows=targets, places=blocks, job_id=10**6 + first))
            (result,) = finish(host)
            assert result.all_done, "WRONG KV: a block was stored while its row had other bytes"
            for row, block in zip(targets, blocks, strict=True):
                assert primary.block(row) == content[block], "WRONG KV: a block has other bytes than were stored"
    assert withdrawn_blocks > 50
    assert len(stored) > 50
