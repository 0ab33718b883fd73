"""Stores are put off while cascades to the fastest tier hold too many primary rows."""

from __future__ import annotations

from collections.abc import Sequence

from tiering.api.keys import OffloadKey
from tiering.manager.backlog import BACKLOG_SHARE, CALM_AFTER
from tiering.manager.weak_rows import TAKE_AFTER
from tiering.secondary.contract import SecondaryTierManager
from tiering.testing.fake_tier import FakeTier
from tiering.testing.keys import keys_of
from tiering.testing.manager_rig import ManagerRig

K = keys_of(*range(32))
ROWS = 16
MOST = int(BACKLOG_SHARE * ROWS)


def offer(rig: ManagerRig, keys: Sequence[OffloadKey], *, is_last: bool = False) -> bool:
    """Store ``keys``, and return False if the manager does not take them now; cascades stay open."""
    output = rig.manager.prepare_store(keys, rig.ctx, is_last=is_last)
    if output is None:
        return False
    rig.manager.complete_store(output.keys_to_store, rig.ctx)
    rig.step()
    return True


def end_one(rig: ManagerRig, tier: FakeTier) -> None:
    """End the oldest cascade of a tier."""
    tier.finish(tier.stores[0])
    rig.step()


def store_for_another(rig: ManagerRig, tier: FakeTier) -> None:
    """Store a block for another request and end its cascade, so that the tier has written a block now."""
    ctx = rig.request("other")
    key = OffloadKey(rig.primary.unknown(K)[-1])
    output = rig.manager.prepare_store([key], ctx, is_last=True)
    assert output is not None
    rig.manager.complete_store(output.keys_to_store, ctx)
    tier.finish(tier.stores[-1])
    rig.step()


def busy_rig(*behind: FakeTier) -> tuple[ManagerRig, FakeTier]:
    """Return a rig that puts stores off: its cascades hold too many rows, and one has ended just now."""
    tier = FakeTier("disk", waits=True)
    rig = ManagerRig(ROWS, (tier, *behind))
    rig.clock.advance(10.0)
    assert offer(rig, K[:1])
    assert offer(rig, K[1:2])
    assert offer(rig, K[2 : MOST + 2])
    end_one(rig, tier)
    return rig, tier


def test_a_store_is_put_off_until_cascades_have_ended() -> None:
    rig, tier = busy_rig()
    assert not offer(rig, K[20:21])
    assert rig.stat("stores_put_off") == 1
    assert rig.stat("stores_without_room") == 0
    assert K[0] in rig.primary.readable, "the block that no cascade pins stays"
    end_one(rig, tier)
    assert offer(rig, K[20:21])


def test_the_share_itself_may_be_held() -> None:
    rig, tier = busy_rig()
    end_one(rig, tier)
    assert offer(rig, K[20:22]), "the cascades hold their share, and not more"
    assert not offer(rig, K[22:23])


def test_the_last_offer_of_blocks_is_taken() -> None:
    rig, _ = busy_rig()
    assert not offer(rig, K[20:21])
    assert offer(rig, K[20:21], is_last=True)


def test_blocks_that_are_held_are_no_store() -> None:
    rig, _ = busy_rig()
    assert offer(rig, K[2:5])
    assert rig.stat("stores_put_off") == 0


def test_a_request_is_put_off_for_as_long_as_a_write_takes() -> None:
    rig, tier = busy_rig()
    assert not offer(rig, K[20:21])
    rig.clock.advance(TAKE_AFTER / 2)
    store_for_another(rig, tier)
    assert not offer(rig, K[20:21])
    rig.clock.advance(TAKE_AFTER)
    store_for_another(rig, tier)
    assert offer(rig, K[20:21])
    assert offer(rig, K[21:22]), "a request waits once, however many stores it has"
    ctx = rig.request("new")
    assert rig.manager.prepare_store(K[22:23], ctx) is None, "each request waits by itself"


def test_other_offers_of_a_request_do_not_prolong_its_wait() -> None:
    rig, tier = busy_rig()
    assert not offer(rig, K[20:21])
    assert rig.manager.was_put_off(rig.ctx)
    for _ in range(4):
        rig.clock.advance(TAKE_AFTER / 4)
        store_for_another(rig, tier)
        assert offer(rig, K[2:4]), "blocks that are held"
        assert offer(rig, [])
        assert not rig.manager.was_put_off(rig.ctx)
    rig.clock.advance(TAKE_AFTER / 100)
    assert offer(rig, K[20:21])


def test_a_request_is_put_off_only_for_a_tier_that_it_may_use() -> None:
    rig, tier = busy_rig(FakeTier("slow"))
    ctx = rig.request("slow only", tiers=["slow"])
    assert rig.manager.prepare_store(K[20:21], ctx) is not None
    assert not rig.manager.was_put_off(ctx)
    both = rig.request("both", tiers=["slow", tier.name])
    assert rig.manager.prepare_store(K[21:22], both) is None
    assert rig.manager.was_put_off(both)
    assert rig.manager.prepare_store(K[22:23], rig.request("no tier", tiers=["cpu"])) is not None


def test_a_request_waits_again_in_the_next_burst() -> None:
    rig, tier = busy_rig()
    assert not offer(rig, K[20:21])
    rig.clock.advance(TAKE_AFTER)
    store_for_another(rig, tier)
    assert offer(rig, K[20:21])
    tier.finish_all()
    rig.step()
    rig.clock.advance(CALM_AFTER + 1)
    assert offer(rig, K[21:22])
    assert offer(rig, rig.primary.unknown(K)[: MOST + 1])
    end_one(rig, tier)
    assert not offer(rig, rig.primary.unknown(K)[:1])


def test_a_refusal_for_lack_of_room_is_no_wait_for_the_tier() -> None:
    rig, _ = busy_rig()
    assert not offer(rig, K[20:21])
    assert rig.manager.prepare_store(keys_of(*range(100, 101 + ROWS)), rig.ctx, is_last=True) is None
    assert not rig.manager.was_put_off(rig.ctx)
    assert rig.stat("stores_without_room") == 1


def test_a_tier_that_ends_no_cascade_puts_nothing_off() -> None:
    rig, _ = busy_rig()
    rig.clock.advance(TAKE_AFTER)
    assert offer(rig, K[20:21])
    assert rig.stat("stores_put_off") == 0


def test_cascades_that_were_withdrawn_are_no_progress() -> None:
    tier = FakeTier("disk", waits=True)
    rig = ManagerRig(ROWS, [tier])
    rig.clock.advance(10.0)
    assert offer(rig, K[:ROWS])
    assert offer(rig, K[20:24]), "the tier writes nothing, so that its rows are taken"
    assert rig.stat("cascades_withdrawn") == 4
    tier.finish_all()
    rig.clock.advance(1.0)
    rig.step()
    rig.clock.advance(1.0)
    assert offer(rig, K[:ROWS])
    assert rig.stat("stores_put_off") == 0


def test_a_slower_tier_puts_nothing_off() -> None:
    bucket = FakeTier("bucket", waits=True)
    rig, disk = busy_rig(bucket)
    disk.finish_all()
    end_one(rig, bucket)
    assert offer(rig, K[20:21])
    assert rig.stat("stores_put_off") == 0


def test_the_fastest_tier_in_service_counts() -> None:
    bucket = FakeTier("bucket", waits=True)
    rig, disk = busy_rig(bucket)
    disk.raises.add("on_schedule_end")
    rig.step()
    assert rig.stat("tiers_out_of_service") == 1
    end_one(rig, bucket)
    assert not offer(rig, K[20:21])


def test_a_tier_that_gives_up_no_row_is_waited_for_alike() -> None:
    class Stubborn(FakeTier):
        waiting_stores = SecondaryTierManager.waiting_stores
        withdraw_stores = SecondaryTierManager.withdraw_stores

    tier = Stubborn("disk")
    rig = ManagerRig(ROWS, [tier])
    rig.clock.advance(10.0)
    assert offer(rig, K[:1])
    assert offer(rig, K[1 : MOST + 2])
    end_one(rig, tier)
    assert not offer(rig, K[20:21])
    tier.finish_all()
    rig.step()
    assert offer(rig, K[20:21])
