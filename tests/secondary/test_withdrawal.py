"""A tier names its stores that have not begun, and gives up their blocks."""

from __future__ import annotations

from tests.secondary.fakes import BLOCK_BYTES
from tests.secondary.rig import CTX, K, Rig
from tiering.secondary.contract import JobResult


def test_a_tier_names_the_oldest_store_first_and_each_from_its_tail() -> None:
    rig = Rig().opened()
    assert rig.tier.waiting_stores([]) is None
    rig.clock.advance(5.0)
    first = rig.submit_store(K[:3])
    rig.clock.advance(1.0)
    second = rig.submit_store(K[3:5])
    assert rig.tier.waiting_stores([first, second]) is None, "threads have begun all stores"
    rig.io.unbegun.update((first, second))
    assert rig.tier.waiting_stores([first, 99, second]) == ([[2, 1, 0], (), [1, 0]], rig.clock() - 1.0)
    assert rig.tier.waiting_stores([second]) == ([[1, 0]], rig.clock())
    rig.io.store_begun = rig.clock()
    waiting = rig.tier.waiting_stores([first])
    assert waiting is not None
    assert waiting.since == rig.clock()


def test_withdrawn_blocks_are_counted_and_give_their_bytes_back_at_once() -> None:
    rig = Rig(max_queued=4 * BLOCK_BYTES).opened()
    job = rig.submit_store(K[:4])
    rig.io.unbegun.add(job)
    assert rig.tier.withdraw_stores({job: {0, 1, 2, 3}, 99: {0}}) == [(job, [0, 1, 2, 3])]
    again = rig.submit_store(K[4:8])
    assert list(rig.io.jobs[-1].keys) == K[4:8]
    assert rig.finished() == [JobResult(job, False, [], 4 * BLOCK_BYTES, 0.5)]
    rig.io.finish(again)
    rig.finished()
    stats = rig.tier.get_stats()
    assert (stats.stores_withdrawn, stats.stores_dropped, stats.cascades_failed) == (4, 0, 0)
    assert (stats.cascades, stats.cascades_active) == (4, 0)
    assert not rig.tier.lookup(K[0], CTX)
    assert list(rig.tier.index.lacking(K[:1], rig.clock()) or ()) == K[:1], "the block may be offered again"


def test_the_budget_is_that_of_the_primary_tier_by_default() -> None:
    rig = Rig(slots=1000).opened()
    rows = len(rig.context.primary_view)
    job = rig.submit_store(K[:2])
    rig.io.finish(job)
    rig.finished()
    for start in range(0, 96, 8):
        rig.submit_store(K[start + 2 : start + 10])
    submitted = sum(len(job.keys) for job in rig.io.jobs)
    assert submitted == min(rows, 96)
    assert rig.tier.get_stats().stores_dropped == 96 - submitted


def test_a_store_that_waited_for_places_has_its_whole_deadline_for_the_io() -> None:
    rig = Rig(deadline=0.5).opened()
    assert isinstance(rig.tier.index.growing, bool)  # type: ignore[attr-defined]
    rig.tier.index.growing = True  # type: ignore[attr-defined]
    job = rig.submit_store(K[:40])
    assert rig.tier.waiting_blocks == 40
    assert rig.io.jobs == []
    rig.clock.advance(2.0)
    rig.finished()
    (order,) = rig.io.jobs
    assert (order.job_id, order.deadline) == (job, rig.clock() + 0.5)


def test_a_store_that_waits_for_places_can_be_withdrawn() -> None:
    rig = Rig().opened()
    rig.tier.index.growing = True  # type: ignore[attr-defined]
    job = rig.submit_store(K[:40])
    assert rig.tier.waiting_stores([job]) == ([list(reversed(range(40)))], rig.clock())
    assert rig.tier.withdraw_stores({job: set(range(20, 40))}) == [(job, list(range(20, 40)))]
    assert rig.tier.waiting_blocks == 20
    rig.finished()
    (order,) = rig.io.jobs
    assert (list(order.keys), list(order.rows)) == (K[:20], list(range(20)))
    rig.io.finish(job)
    (result,) = rig.finished()
    assert (result.success, result.successful_keys) == (False, K[:20])
    second = rig.submit_store(K[40:80])
    rig.tier.withdraw_stores({second: set(range(40))})
    assert rig.finished() == [JobResult(second, False, [])]
    assert rig.tier.get_stats().stores_withdrawn == 60
