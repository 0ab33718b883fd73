"""Counters and gauges of a tier that other tests do not move, as its statistics show them."""

from __future__ import annotations

from tests.block_tier.rig import K, Rig


def test_a_lookup_that_the_medium_answers_too_late_counts_once() -> None:
    rig = Rig(shared=True).opened()
    assert rig.tier.lookup_prefix(K[:4], rig.job(K[:4]).req_context) == (0, True)
    assert rig.tier.get_stats().lookups_late == 0
    rig.clock.advance(1.0)
    for _ in range(2):
        assert rig.tier.lookup_prefix(K[:4], rig.job(K[:4]).req_context) == (0, False)
    assert rig.tier.get_stats().lookups_late == 1


def test_blocks_count_as_active_while_their_job_runs() -> None:
    rig = Rig().opened()
    store = rig.submit_store(K[:4])
    assert rig.tier.get_stats().cascades_active == 4
    rig.io.finish(store)
    rig.finished()
    load = rig.submit_load(K[:3])
    stats = rig.tier.get_stats()
    assert (stats.cascades_active, stats.promotions_active) == (0, 3)
    rig.io.finish(load)
    rig.finished()
    assert rig.tier.get_stats().promotions_active == 0
