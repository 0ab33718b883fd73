"""Copy jobs by themselves: the table of jobs, and the first token that a load did not fill."""

from __future__ import annotations

import pytest

from tiering.api.request import ReqContext
from tiering.connector.jobs import Job, JobTable, LoadTarget
from tiering.connector.metadata import OffloadingWorkerMetadata
from tiering.testing.keys import keys_of

CTX = ReqContext("r1")
K = keys_of(0, 1)


def target(
    first_gpu_block: int | None = 3, block_ids: tuple[int, ...] = (7, 8, 9), first_token: int = 12
) -> LoadTarget:
    return LoadTarget(None, 0, first_token, first_gpu_block, 4, list(block_ids))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("invalid", "first"),
    [([7], 12), ([8], 16), ([9, 8], 16), ([9], 20), ([100], 12), ([], 12)],
)
def test_a_load_is_invalid_from_its_first_unfilled_block(invalid: list[int], first: int) -> None:
    assert target().invalid_from(invalid) == first


def test_a_load_that_begins_within_a_block_is_invalid_from_its_own_first_token() -> None:
    assert target(first_token=14).invalid_from([7]) == 14
    assert target(first_token=14).invalid_from([8]) == 16


def test_a_load_of_several_groups_is_invalid_as_a_whole() -> None:
    assert target(None, ()).invalid_from([8]) == 12


def reported(job: Job, workers: int = 1, *, failed: bool = False) -> OffloadingWorkerMetadata:
    return OffloadingWorkerMetadata({job.job_id: workers}, {job.job_id} if failed else set())


def test_a_job_is_done_when_all_workers_have_reported_it() -> None:
    jobs = JobTable(world_size=3)
    job = jobs.open(CTX, K)
    assert jobs.take_done(reported(job, 2)) == []
    assert len(jobs) == 1
    assert jobs.take_done(reported(job)) == [job]
    assert jobs.take_done(reported(job)) == []
    assert len(jobs) == 0


def test_a_failure_on_one_worker_is_noted_once() -> None:
    jobs = JobTable(world_size=2)
    job, other = jobs.open(CTX, K), jobs.open(CTX, K)
    assert jobs.newly_failed(reported(job, failed=True)) == [job]
    assert jobs.newly_failed(reported(job, failed=True)) == []
    assert (jobs.has_failed(job.job_id), jobs.has_failed(other.job_id), jobs.has_failed(99)) == (True, False, False)


def test_stores_alone_are_distrusted_each_once() -> None:
    jobs = JobTable(world_size=1)
    store, load = jobs.open(CTX, K), jobs.open(CTX, K, target())
    assert jobs.distrust([store.job_id, load.job_id, 99]) == [store]
    assert (store.failed, store.distrusted, load.failed, load.distrusted) == (True, True, False, False)
    assert jobs.distrust([store.job_id]) == []


def test_a_withdrawn_job_is_gone_and_has_failed() -> None:
    jobs = JobTable(world_size=1)
    job = jobs.open(CTX, K)
    assert jobs.withdraw(job.job_id) is job
    assert job.failed
    assert jobs.withdraw(job.job_id) is None
    assert list(jobs) == []


def test_only_the_loads_of_the_named_requests_are_taken() -> None:
    jobs = JobTable(world_size=1)
    jobs.open(CTX, K)
    load = jobs.open(CTX, K, target())
    other = jobs.open(ReqContext("r2"), K, target())
    assert jobs.take_loads_of(["r1"]) == [load]
    assert jobs.take_loads_of(["r1"]) == []
    assert other in list(jobs)
    assert len(jobs) == 2
