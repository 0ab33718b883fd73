"""Queues of a simulated medium, whose times can be checked by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tiering.api.request import ReqContext
from tiering.errors import OverdueError
from tiering.replay.queues import JobQueue
from tiering.secondary.contract import TransferJob


def ten_a_second() -> JobQueue:
    """Blocks of 100 bytes, ten a second."""
    return JobQueue(bytes_per_second=1000.0, latency=0.0, at_once=1, bytes_ratio=1.0)


def store(number: int, blocks: int, deadline: float = math.inf) -> TransferJob:
    rows = [100 * number + block for block in range(blocks)]
    keys = [b"%d" % row for row in rows]
    job = TransferJob(number, keys, np.array(rows), False, ReqContext("r"), deadline=deadline)
    job.move(keys, rows, rows, [100] * blocks)
    return job


def numbers(results: list[TransferJob]) -> list[int]:
    return [result.job_id for result in results]


def test_stores_are_written_one_after_the_other() -> None:
    queue = ten_a_second()
    assert queue.next_end == math.inf
    queue.submit(store(1, 10), 0.0)
    queue.submit(store(2, 5), 0.5)
    assert queue.next_end == pytest.approx(1.0)
    assert numbers(queue.take_ended(0.99)) == []
    assert numbers(queue.take_ended(1.0)) == [1]
    assert queue.next_end == pytest.approx(1.5)
    assert numbers(queue.take_ended(9.0)) == [2]
    queue.submit(store(3, 1), 9.0)
    assert queue.next_end == pytest.approx(9.1), "the medium has rested since"
    assert (queue.blocks, queue.moved_bytes) == (16, 1600)
    assert queue.moved_seconds == pytest.approx(1.6)


def test_a_store_fails_at_its_deadline_if_it_has_not_begun() -> None:
    queue = ten_a_second()
    for number, deadline in ((1, 0.2), (2, 0.3), (3, 2.0)):
        queue.submit(store(number, 10, deadline), 0.0)
    assert queue.next_end == pytest.approx(0.3)
    (late,) = queue.take_ended(0.3)
    assert late.job_id == 2
    assert all(isinstance(outcome, OverdueError) for outcome in late.outcomes)
    assert late.moved_bytes == 0
    assert numbers(queue.take_ended(5.0)) == [1, 3], "a store that has begun goes on"
    assert queue.blocks == 20


def test_many_blocks_take_as_many_latencies_as_they_need_waves() -> None:
    queue = JobQueue(bytes_per_second=1e9, latency=0.5, at_once=4, bytes_ratio=1.0)
    assert queue.seconds(4, 4000) == pytest.approx(0.5, abs=1e-5)
    assert queue.seconds(9, 9000) == pytest.approx(1.5)
