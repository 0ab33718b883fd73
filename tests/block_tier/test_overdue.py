"""The count of rows whose load has passed its deadline."""

from __future__ import annotations

import numpy as np

from tiering.api.request import ReqContext
from tiering.block_tier.transfers import OverdueLoads
from tiering.secondary.contract import TransferJob
from tiering.testing.keys import keys_of


def load(job_id: int, *, deadline: float, rows: int, req_id: str = "r") -> TransferJob:
    job = TransferJob(job_id, (), np.arange(0), True, ReqContext(req_id), deadline=deadline)
    job.moved = keys_of(*range(rows))
    return job


def test_rows_count_from_the_deadline_to_the_end_of_the_io() -> None:
    overdue = OverdueLoads(limit_rows=5)
    overdue.begin(load(1, deadline=10, rows=3))
    overdue.begin(load(2, deadline=5, rows=2))
    assert overdue.expire(4.9) == []
    assert (overdue.expire(5), overdue.rows, overdue.spent) == ([2], 2, False)
    assert (overdue.expire(50), overdue.rows, overdue.spent) == ([3], 5, True)
    assert overdue.expire(60) == []
    assert overdue.end(2) is True
    assert (overdue.rows, overdue.spent) == (3, False)
    overdue.end(1)
    assert overdue.rows == 0


def test_a_share_below_one_row_is_one_row() -> None:
    overdue = OverdueLoads(limit_rows=0)
    assert not overdue.spent
    overdue.begin(load(1, deadline=10, rows=1))
    overdue.expire(10)
    assert overdue.spent


def test_loads_that_end_in_time_never_count() -> None:
    overdue = OverdueLoads(limit_rows=1)
    overdue.begin(load(1, deadline=10, rows=3))
    assert overdue.end(1) is False
    assert overdue.expire(20) == []
    assert not overdue.spent


def test_parts_of_one_load_are_overdue_together() -> None:
    overdue = OverdueLoads(limit_rows=100)
    for job_id, (deadline, req_id) in enumerate([(5, "a"), (5, "b"), (5, "a"), (6, "a")]):
        overdue.begin(load(job_id, deadline=deadline, rows=10, req_id=req_id))
    assert sorted(overdue.expire(6)) == [10, 10, 20]
    assert overdue.rows == 40


def test_deadlines_of_loads_that_have_ended_are_dropped_once_no_earlier_load_runs() -> None:
    overdue = OverdueLoads(limit_rows=5)
    for job_id, deadline in ((1, 10), (2, 20), (3, 30)):
        overdue.begin(load(job_id, deadline=deadline, rows=1))
    overdue.end(2)
    assert overdue.deadlines[0] == (10, 1)
    overdue.end(1)
    assert overdue.deadlines == [(30, 3)]
    overdue.end(3)
    assert overdue.deadlines == []
