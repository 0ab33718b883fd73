"""A new common epoch on a shared medium: the manager drops all blocks before a tier enters the epoch."""

from __future__ import annotations

from tests.manager_rig import ManagerRig
from tiering.testing.fake_tier import FakeTier
from tiering.testing.keys import keys_of

K = keys_of(*range(10))


def held(rig: ManagerRig) -> int:
    """Return the number of leading blocks that a new request finds."""
    return rig.manager.match_prefix(K[:4], rig.request("later")).hits


def test_a_new_epoch_empties_the_primary_tier_and_lets_all_tiers_follow_without_a_wait() -> None:
    first, second = FakeTier("first"), FakeTier("second")
    tiers = [FakeTier("local"), first, second]
    rig = ManagerRig(8, tiers)
    rig.store(K[:4])
    assert held(rig) == 4
    first.has_successor = second.has_successor = True
    rig.step()
    assert held(rig) == 0
    assert [tier.calls("follow") for tier in tiers] == [[rig.clock()]] * 3
    assert [tier.calls("reset") for tier in tiers] == [[]] * 3
    assert (rig.stat("new_epochs"), rig.stat("resets"), rig.manager.new_epochs) == (1, 0, 1)
    rig.step()
    assert rig.manager.new_epochs == 1


def test_without_a_new_epoch_nothing_is_dropped() -> None:
    rig = ManagerRig(8, [FakeTier()])
    rig.store(K[:4])
    rig.step()
    assert (held(rig), rig.manager.new_epochs) == (4, 0)


def test_the_primary_tier_is_empty_when_a_tier_enters_the_epoch() -> None:
    rows: list[int] = []

    class Watching(FakeTier):
        def reset(self, deadline: float, revision: str | None = None, follow: bool = False) -> bool:
            rows.append(len(rig.primary.readable))
            return super().reset(deadline, revision, follow)

    tier = Watching("shared")
    rig = ManagerRig(8, [tier])
    rig.store(K[:4])
    tier.has_successor = True
    rig.step()
    assert rows == [0]


def test_a_tier_that_notices_while_another_one_is_followed_is_followed_in_the_same_step() -> None:
    class Noticing(FakeTier):
        def reset(self, deadline: float, revision: str | None = None, follow: bool = False) -> bool:
            second.has_successor = True
            return super().reset(deadline, revision, follow)

    first, second = Noticing("first", has_successor=True), FakeTier("second")
    rig = ManagerRig(8, [first, second])
    rig.step()
    assert len(second.calls("follow")) == 1
    rig.step()
    assert rig.manager.new_epochs == 1


def test_promotions_and_stores_in_flight_bring_nothing_back() -> None:
    tier = FakeTier("shared", held={K[0]})
    rig = ManagerRig(8, [tier])
    output = rig.manager.prepare_store(K[1:3], rig.ctx)
    assert output is not None
    assert rig.manager.match_prefix(K[:1], rig.ctx).pending
    rig.step()
    (load,) = tier.loads
    tier.has_successor = True
    rig.step()
    tier.finish(load)
    rig.manager.complete_store(K[1:3], rig.ctx)
    rig.step()
    assert not rig.primary.readable
    assert tier.stores == []
    assert rig.stat("rows_quarantined") == 0


def test_a_cascade_in_flight_keeps_its_rows_until_it_ends() -> None:
    tier = FakeTier("shared")
    rig = ManagerRig(4, [tier])
    output = rig.manager.prepare_store(K[:4], rig.ctx)
    assert output is not None
    rig.manager.complete_store(K[:4], rig.ctx)
    (cascade,) = tier.stores
    tier.has_successor = True
    rig.step()
    assert rig.manager.prepare_store(K[4:5], rig.ctx) is None
    tier.finish(cascade, success=False)
    rig.step()
    assert rig.manager.prepare_store(K[4:5], rig.ctx) is not None


def test_wanted_blocks_are_not_offered_to_the_new_epoch() -> None:
    tier = FakeTier("shared")
    rig = ManagerRig(8, [tier])
    rig.store(K[:2])
    tier.has_successor = True
    rig.step()
    tier.wanted = list(K[:2])
    rig.step()
    assert tier.stores == []


def test_a_disk_that_cannot_confirm_at_once_is_out_of_service_until_it_can() -> None:
    disk, shared = FakeTier("disk", resets=False), FakeTier("shared", has_successor=True)
    rig = ManagerRig(8, [disk, shared])
    rig.step()
    rig.store(K[:2])
    assert (disk.calls("submit_store"), len(shared.calls("submit_store"))) == ([], 1)
    disk.reset_later = True
    rig.step()
    rig.store(K[2:4])
    assert len(disk.calls("submit_store")) == 1


def test_a_tier_that_never_enters_its_new_epoch_is_retired() -> None:
    class Stuck(FakeTier):
        def reset(self, deadline: float, revision: str | None = None, follow: bool = False) -> bool:
            return True

    rig = ManagerRig(8, [Stuck("stuck", has_successor=True)])
    for _ in range(3):
        rig.step()
    assert (rig.stat("tiers_out_of_service"), rig.manager.new_epochs) == (1, 1)


def test_a_tier_that_raises_when_it_is_asked_is_retired() -> None:
    rig = ManagerRig(8, [FakeTier(raises={"on_schedule_end"})])
    rig.store(K[:4])
    assert (rig.stat("tiers_out_of_service"), rig.manager.new_epochs, held(rig)) == (1, 0, 4)


def test_tiers_of_their_own_are_left_also_where_a_reset_keeps_them() -> None:
    local, shared = FakeTier("local"), FakeTier("shared", has_successor=True)
    rig = ManagerRig(8, [local, shared], keep_secondary=True)
    rig.step()
    assert len(local.calls("follow")) == 1
