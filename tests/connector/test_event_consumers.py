"""A consumer that applies the events in order knows at every step which blocks each tier holds."""

from __future__ import annotations

import pytest

from tests.connector.event_walk import BUCKET, CPU, DISK, EventWalk

SEEDS = range(3)


@pytest.mark.parametrize("factor", [1, 2, 4])
@pytest.mark.parametrize("seed", SEEDS)
def test_with_a_slow_disk_that_fails_now_and_then(seed: int, factor: int) -> None:
    walk = EventWalk(seed, factor=factor)
    walk.run(150)
    assert min(walk.removed[CPU], walk.removed[DISK]) > 5
    assert min(walk.stored[CPU], walk.stored[DISK]) > 20
    assert not walk.index.bare, "events of a slow tier lost their tokens"


@pytest.mark.parametrize("factor", [1, 4])
@pytest.mark.parametrize("seed", SEEDS)
def test_with_a_bucket_behind_the_disk_and_restarts_and_resets(seed: int, factor: int) -> None:
    walk = EventWalk(seed, factor=factor, bucket=True)
    walk.run(70)
    walk.start()
    walk.run(70)
    assert walk.index.bare, "what was found after the restart is announced, by its own hash at first"
    walk.run(70, resets=0.05)
    walk.start()
    walk.run(20)
    assert min(walk.stored[tier] for tier in (CPU, DISK, BUCKET)) > 10
    assert min(walk.removed[tier] for tier in (CPU, DISK)) > 0


@pytest.mark.parametrize("seed", SEEDS)
def test_what_resets_leave_on_the_disk_stays_known_by_all_of_its_hashes(seed: int) -> None:
    walk = EventWalk(seed, factor=4, keep_secondary=True)
    walk.run(150, resets=0.05)
    assert walk.removed[DISK] > 0


@pytest.mark.parametrize("factor", [1, 4])
@pytest.mark.parametrize("seed", SEEDS)
def test_beyond_the_bound_on_snapshots_blocks_are_known_by_their_own_hashes(seed: int, factor: int) -> None:
    walk = EventWalk(seed, factor=factor, max_tokens=64)
    walk.run(120)
    assert walk.connector.get_stats()["connector"]["snapshots_dropped"] > 10
    assert walk.connector.events.snapshots.tokens <= 64


@pytest.mark.parametrize("seed", SEEDS)
def test_blocks_of_windows_are_described_too(seed: int) -> None:
    walk = EventWalk(seed, windows=(None, 8))
    walk.run(100)
    assert walk.index.described.keys() == {0, 1}
    assert not walk.index.bare


@pytest.mark.parametrize("factor", [1, 4])
def test_no_snapshot_outlives_the_blocks_that_it_describes(factor: int) -> None:
    walk = EventWalk(7, factor=factor, bucket=True)
    walk.run(100)
    while walk.scheduler.has_work():
        walk.step()
    walk.scheduler.reset()
    walk.step()
    assert len(walk.connector.events) == 0
    assert not walk.connector.events.held
