"""Jobs that a reset makes worthless: queued parts end at once, running parts end by themselves."""

from __future__ import annotations

import threading

from tests.medium.io_fakes import LOAD, STORE, Primary, all_done, finish, make_job, outcome_names, running_host
from tiering.medium.block_store import BlockIO
from tiering.testing.clock import until
from tiering.testing.faults import DictStore


class Gated(DictStore):
    """A store that begins to put blocks and then waits."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = threading.Event()
        self.gate = threading.Event()

    def put_one(self, block: BlockIO) -> None:
        self.begun.set()
        self.gate.wait()
        super().put_one(block)


def test_what_nobody_has_begun_ends_at_once_and_what_runs_when_it_ends() -> None:
    store, primary = Gated(), Primary(12)
    with running_host(store, primary, threads=1, release=store.gate.set) as host:
        host.submit(make_job(primary, STORE, range(1), job_id=1))
        assert until(store.begun.is_set)
        host.submit(make_job(primary, STORE, range(4, 8), job_id=2))
        host.submit(make_job(primary, LOAD, range(8, 12), job_id=3))
        assert host.poll() == []
        host.drop_waiting()
        ended = {result.job_id: outcome_names(result.outcomes) for result in finish(host, 2)}
        assert ended == {2: ["TemporaryStoreError"] * 4, 3: ["TemporaryStoreError"] * 4}
        store.gate.set()
        (running,) = finish(host)
        assert (running.job_id, all_done(running.outcomes)) == (1, True)
        assert len(store.frames) == 1
