"""The generic tier on the real I/O side and a failing medium: right outcomes, one report per job."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from tiering.block_tier.tier import BlockTier
from tiering.index.shared import SharedIndex
from tiering.index.slots import SlotIndex
from tiering.medium.side import IoTask
from tiering.secondary.contract import TierContext
from tiering.secondary.options import BlockTierOptions
from tiering.testing.chaos import ChaosLayer, ChaosPlan, Fault
from tiering.testing.clock import SettableClock
from tiering.testing.faults import DictStore
from tiering.testing.keys import key_of
from tiering.testing.tier_rig import PATIENCE_SECONDS, TierRig

K = [key_of(number) for number in range(64)]


class Faulty:
    """A rig on a medium with faults."""

    def __init__(
        self,
        *,
        shared: bool = False,
        seed: int = 0,
        plan: ChaosPlan | None = None,
        **options: object,
    ) -> None:
        self.clock = SettableClock()
        self.store = ChaosLayer(DictStore(), seed=seed, plan=plan)
        self._options = {"type": "faulty", "retries": {"attempts": 3, "backoff": "1ms"}, "max_inflight": 4, **options}
        self._shared = shared
        self.rig = TierRig(self._make, group_bytes=(4096,), num_rows=128, clock=self.clock)

    def _make(self, context: TierContext) -> BlockTier:
        options = BlockTierOptions.model_validate(self._options)
        if self._shared:
            index = SharedIndex(absent_ttl=0.01, lookup_deadline=PATIENCE_SECONDS)
            return BlockTier(
                context, options, self.store, index, place_prefix=lambda namespace: f"{namespace.fingerprint.hex()}/"
            )
        slots = SlotIndex(24)
        slots.add_free(np.arange(24))
        return BlockTier(context, options, self.store, slots)

    def __enter__(self) -> Faulty:
        self.rig.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.store.release()
        self.rig.close()


@pytest.fixture(params=[False, True], ids=["slots", "shared"])
def faulty(request: pytest.FixtureRequest) -> Iterator[Faulty]:
    with Faulty(shared=request.param, breaker={"probe_after": "10ms"}) as faulty:
        yield faulty


def test_temporary_errors_are_retried(faulty: Faulty) -> None:
    faulty.store.inject(Fault.TEMPORARY, puts=2, gets=2)
    assert faulty.rig.store(K[:4]) == K[:4]
    assert faulty.rig.load(K[:4]) == K[:4]
    assert faulty.rig.tier.get_stats().retries > 0


@pytest.mark.parametrize("fault", [Fault.PERMANENT, Fault.OUT_OF_SPACE, Fault.TORN])
def test_blocks_that_could_not_be_written_are_misses_and_the_others_are_not(faulty: Faulty, fault: Fault) -> None:
    faulty.store.inject(fault, puts=3 if fault is Fault.TORN else 1)
    stored = faulty.rig.store(K[:1])
    assert stored in ([], K[:1])
    assert faulty.rig.load(K[:1]) == stored
    faulty.rig.wait(lambda: faulty.rig.tier.get_stats().writable)
    assert faulty.rig.store(K[1:4]) == K[1:4]
    assert faulty.rig.load(K[1:4]) == K[1:4]


@pytest.mark.parametrize("fault", [Fault.BIT_FLIP, Fault.TRUNCATE])
def test_a_block_damaged_on_its_way_out_is_a_counted_miss(faulty: Faulty, fault: Fault) -> None:
    faulty.store.inject(fault, puts=1)
    faulty.rig.store(K[:1])
    assert faulty.rig.load(K[:1]) == []
    assert faulty.rig.tier.get_stats().promotions_failed == 1
    assert faulty.rig.lookup(K[:1]) == 0


def test_a_load_that_hangs_is_reported_once_when_it_has_ended(faulty: Faulty) -> None:
    rig = faulty.rig
    rig.store(K[:4])
    faulty.store.inject(Fault.HANG, gets=1)
    job_id = rig.submit_load(K[:1])
    rig.wait(lambda: faulty.store.hanging == 1)
    assert rig.load(K[1:4], first_row=40) == K[1:4]
    assert job_id not in rig.reports()
    faulty.store.release()
    rig.result(job_id)
    assert rig.reports()[job_id] == 1


def test_a_medium_that_hangs_takes_the_tier_out_of_service_and_it_comes_back() -> None:
    with Faulty(deadline="1h", primary_share=0.02, breaker={"probe_after": "10ms"}) as faulty:
        rig = faulty.rig
        rig.store(K[:4])
        faulty.store.inject(Fault.HANG, gets=8)
        jobs = [rig.submit_load(K[n : n + 1], first_row=40 + n) for n in range(4)]
        rig.wait(lambda: faulty.store.hanging == 4)
        assert rig.tier.get_stats().available == 1
        faulty.clock.advance(3600)
        rig.wait(lambda: rig.tier.get_stats().loads_overdue == 4)
        rig.wait(lambda: rig.tier.get_stats().available == 0)
        assert rig.lookup(K[:4]) == 0
        assert rig.store(K[4:6]) == []
        faulty.store.release()
        for job_id in jobs:
            rig.result(job_id)
        rig.wait(lambda: rig.tier.get_stats().available == 1)
        assert rig.lookup(K[:4]) == 4
        assert set(rig.reports().values()) == {1}


def test_a_medium_whose_stores_hang_takes_the_tier_out_of_service_and_it_comes_back() -> None:
    with Faulty(deadline="1h", breaker={"probe_after": "10ms"}) as faulty:
        rig = faulty.rig
        rig.store(K[:2])
        faulty.store.inject(Fault.HANG, puts=64, gets=64)
        hung = rig.submit_store(K[2:4])
        rig.wait(lambda: faulty.store.hanging)
        faulty.clock.advance(3599)
        rig.wait(lambda: True)
        assert rig.tier.get_stats().available == 1, "it may still end in time"
        faulty.clock.advance(1)
        rig.wait(lambda: rig.tier.get_stats().available == 0)
        assert rig.tier.get_stats().breaker_opened == 2
        assert rig.tier.get_stats().breaker_state > 0
        assert rig.store(K[4:6]) == []
        assert rig.tier.get_stats().stores_dropped == 2
        faulty.store.release()
        rig.result(hung)
        rig.wait(lambda: rig.tier.get_stats().writable == 1)
        assert rig.lookup(K[:2]) == 2
        assert rig.store(K[4:6]) == K[4:6]
        assert set(rig.reports().values()) == {1}


def test_a_medium_whose_writes_alone_hang_goes_on_serving_its_blocks() -> None:
    with Faulty(deadline="1h", breaker={"probe_after": "10ms"}) as faulty:
        rig = faulty.rig
        rig.store(K[:2])
        faulty.store.inject(Fault.HANG, puts=64)
        rig.submit_store(K[2:4])
        rig.wait(lambda: faulty.store.hanging)
        faulty.clock.advance(3600)
        rig.wait(lambda: rig.tier.get_stats().breaker_opened == 2)
        rig.wait(lambda: rig.tier.get_stats().available == 1)
        assert rig.load(K[:2]) == K[:2]
        assert rig.tier.get_stats().writable == 0


def test_stores_that_are_slow_but_arrive_keep_the_tier_in_service() -> None:
    with Faulty(deadline="1h") as faulty:
        rig = faulty.rig
        faulty.store.inject(Fault.HANG, puts=1)
        rig.submit_store(K[:1])
        rig.wait(lambda: faulty.store.hanging)
        faulty.clock.advance(1800)
        assert rig.store(K[1:3]) == K[1:3]
        faulty.clock.advance(1800)
        rig.wait(lambda: True)
        stats = rig.tier.get_stats()
        assert (stats.available, stats.writable, stats.breaker_opened) == (1, 1, 0)


def test_a_medium_that_fails_all_the_time_is_left_alone_and_comes_back() -> None:
    with Faulty(retries={"attempts": 1}, breaker={"failures": 3, "probe_after": "10ms"}) as faulty:
        rig = faulty.rig
        rig.store(K[:2])
        faulty.store.inject(Fault.PERMANENT, gets=3)
        for _ in range(3):
            rig.load(K[:1])
        assert rig.tier.get_stats().breaker_opened == 1
        rig.wait(lambda: rig.tier.get_stats().available == 1)
        assert rig.load(K[:2]) == K[:2]


def test_shutdown_with_a_hanging_load_says_so_and_succeeds_later() -> None:
    with Faulty() as faulty:
        rig = faulty.rig
        rig.store(K[:1])
        faulty.store.inject(Fault.HANG, gets=1)
        job_id = rig.submit_load(K[:1])
        rig.wait(lambda: faulty.store.hanging == 1)
        assert rig.tier.shutdown(rig.context.clock() + 0.05) is False
        faulty.store.release()
        assert rig.close() is True
        rig.results += rig.tier.get_finished()
        assert rig.reports()[job_id] == 1


def test_shutdown_during_a_task_that_hangs_counts_no_jobs(caplog: pytest.LogCaptureFixture) -> None:
    begun, released = threading.Event(), threading.Event()
    with Faulty() as faulty:
        tier = faulty.rig.tier
        assert isinstance(tier, BlockTier)

        def hang() -> None:
            begun.set()
            released.wait()

        tier.io.run(IoTask("listing", hang, lambda *_: None))
        assert begun.wait(PATIENCE_SECONDS)
        assert tier.shutdown(faulty.clock() + 0.05) is False
        released.set()
    assert "a call to its medium did not end" in caplog.text
    assert "0 jobs" not in caplog.text


def test_a_medium_whose_io_hung_at_shutdown_is_closed_when_the_io_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = threading.Event()
    with Faulty() as faulty:
        rig = faulty.rig
        monkeypatch.setattr(faulty.store, "close", closed.set)
        rig.store(K[:1])
        faulty.store.inject(Fault.HANG, gets=1)
        rig.submit_load(K[:1])
        rig.wait(lambda: faulty.store.hanging == 1)
        assert rig.tier.shutdown(rig.context.clock() + 0.05) is False
        assert not closed.is_set()
        faulty.store.release()
        assert closed.wait(PATIENCE_SECONDS)


def test_a_load_that_hangs_over_a_reset_fails_and_fills_no_index() -> None:
    with Faulty() as faulty:
        rig = faulty.rig
        rig.store(K[:2])
        faulty.store.inject(Fault.HANG, gets=1)
        job_id = rig.submit_load(K[:1])
        rig.wait(lambda: faulty.store.hanging == 1)
        assert rig.tier.reset(rig.context.clock() + 0.2) is True
        rig.store(K[:2])
        faulty.store.release()
        assert rig.result(job_id).successful_keys == []
        assert rig.load(K[:2], first_row=40) == K[:2]


ALL_FAULTS = ChaosPlan(
    puts={
        Fault.TEMPORARY: 0.1,
        Fault.PERMANENT: 0.03,
        Fault.OUT_OF_SPACE: 0.03,
        Fault.BIT_FLIP: 0.05,
        Fault.TRUNCATE: 0.05,
        Fault.SWAP: 0.05,
        Fault.TORN: 0.05,
    },
    gets={
        Fault.TEMPORARY: 0.1,
        Fault.PERMANENT: 0.03,
        Fault.BIT_FLIP: 0.05,
        Fault.TRUNCATE: 0.05,
        Fault.SWAP: 0.05,
        Fault.TORN: 0.05,
    },
)


@pytest.mark.parametrize("shared", [False, True], ids=["slots", "shared"])
@pytest.mark.parametrize("seed", range(4))
def test_whatever_fails_no_wrong_block_arrives_and_every_job_is_reported_once(seed: int, shared: bool) -> None:
    chance = random.Random(seed)
    with Faulty(
        shared=shared, seed=seed, plan=ALL_FAULTS, breaker={"probe_after": "1ms", "probe_max": "5ms"}
    ) as faulty:
        rig = faulty.rig
        arrived = 0
        for _ in range(150):
            rig.wait(lambda: rig.tier.get_stats().writable)
            start = chance.randrange(0, 40)
            keys = K[start : start + chance.randrange(1, 8)]
            action = chance.random()
            if action < 0.45:
                rig.store(keys)
            elif action < 0.97:
                arrived += len(rig.load(keys[: rig.lookup(keys)]))
            else:
                rig.tier.reset(rig.context.clock() + PATIENCE_SECONDS)
        rig.tier.drain(rig.context.clock() + PATIENCE_SECONDS)
        rig.step()
        assert set(rig.reports().values()) == {1}, f"seed {seed}"
        assert arrived > 0, f"seed {seed}"
        assert sum(faulty.store.injected.values()) > 50, f"seed {seed}"
