"""The I/O side of a simulated medium, whose times can be checked by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tiering.api.request import ReqContext
from tiering.errors import OverdueError
from tiering.replay.model import MediumModel
from tiering.replay.simulated import Clock, SimulatedIo, SimulatedStore
from tiering.secondary.contract import TransferJob
from tiering.secondary.options import BlockTierOptions


def io_side(bytes_per_second: int = 1000, latency: float = 1e-9, at_once: int = 1) -> SimulatedIo:
    """Return a medium; by default, blocks of 100 bytes take a tenth of a second."""
    clock = Clock()
    store = SimulatedStore("local", named=False, ttl=None, clock=clock)
    model = MediumModel(
        read_bytes_per_second=bytes_per_second, write_bytes_per_second=bytes_per_second, latency=latency
    )
    return SimulatedIo("local", store, model, BlockTierOptions(type="local", max_inflight=at_once), 1.0, clock)


def store(number: int, blocks: int, deadline: float = math.inf) -> TransferJob:
    rows = [100 * number + block for block in range(blocks)]
    keys = [b"%d" % row for row in rows]
    job = TransferJob(number, keys, np.array(rows), False, ReqContext("r"), deadline=deadline)
    job.move(keys, rows, rows, [100] * blocks)
    return job


def ended(io: SimulatedIo, now: float) -> list[int]:
    io.clock.now = now
    return [job.job_id for job in io.poll()]


def test_stores_are_written_one_after_the_other() -> None:
    io = io_side()
    assert io.next_end() == math.inf
    io.submit(store(1, 10))
    io.clock.now = 0.5
    io.submit(store(2, 5))
    assert io.next_end() == pytest.approx(1.0)
    assert ended(io, 0.99) == []
    assert ended(io, 1.001) == [1]
    assert io.next_end() == pytest.approx(1.5)
    assert ended(io, 9.0) == [2]
    io.submit(store(3, 1))
    assert io.next_end() == pytest.approx(9.1), "the medium has rested since"
    assert (io.stored_blocks, io.stats.written_bytes) == (16, 1600)
    assert io.stats.written_seconds == pytest.approx(1.6)


def test_a_store_fails_at_its_deadline_if_it_has_not_begun() -> None:
    io = io_side()
    for number, deadline in ((1, 0.2), (2, 0.3), (3, 2.0)):
        io.submit(store(number, 10, deadline))
    assert io.next_end() == pytest.approx(0.3)
    io.clock.now = 0.3
    (late,) = io.poll()
    assert late.job_id == 2
    assert all(isinstance(outcome, OverdueError) for outcome in late.outcomes)
    assert late.moved_bytes == 0
    assert ended(io, 5.0) == [1, 3], "a store that has begun goes on"
    assert io.stored_blocks == 20


def test_many_blocks_take_as_many_latencies_as_they_need_waves() -> None:
    for blocks, seconds in ((4, 0.5), (9, 1.5)):
        io = io_side(10**9, latency=0.5, at_once=4)
        io.submit(store(1, blocks))
        assert io.next_end() == pytest.approx(seconds, abs=1e-5)
