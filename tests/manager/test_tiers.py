"""Tiers as the manager treats them: in service, out of service for a reset, retired, and at the end."""

from __future__ import annotations

import pytest

from tests.manager_rig import ManagerRig
from tiering.api.request import OffloadPolicy, ReqContext
from tiering.errors import ConfigError
from tiering.secondary.tier_stats import TierStats
from tiering.testing.fake_tier import FakeTier
from tiering.testing.keys import keys_of

A, B = K = keys_of(0, 1)


class CountedTier(FakeTier):
    """A fake tier with statistics."""

    def get_stats(self) -> TierStats:
        return TierStats(blocks=len(self.held))


class OpenedTier(FakeTier):
    """A fake tier that logs when it is opened."""

    def open(self, deadline: float) -> bool:
        self.log.append(("open", deadline))
        return True


class SilentTier(FakeTier):
    """A fake tier whose statistics cannot be read."""

    def get_stats(self) -> TierStats:
        raise RuntimeError("no statistics")


def test_statistics_are_shown_by_tier_and_a_tier_that_cannot_give_them_is_left_out() -> None:
    rig = ManagerRig(4, [CountedTier("counted", held={A}), SilentTier("silent")])
    tiers = rig.manager.get_stats()["tiers"]
    assert list(tiers) == ["counted"]
    assert tiers["counted"]["blocks"] == 1
    assert rig.stat("tiers_out_of_service") == 1


def test_a_tier_that_has_not_confirmed_a_reset_comes_back_when_its_medium_has() -> None:
    tier = FakeTier(resets=False)
    rig = ManagerRig(4, [tier])
    assert rig.manager.reset_cache() is False
    tier.held.add(A)
    rig.step()
    assert rig.manager.lookup(A, rig.ctx) is False
    assert tier.calls("on_schedule_end") == [None]
    tier.reset_later = True
    rig.step()
    assert rig.manager.lookup(A, rig.request("r2")) is None


def test_a_tier_comes_back_by_a_second_reset_that_is_confirmed_at_once() -> None:
    tier = FakeTier(resets=False)
    rig = ManagerRig(4, [tier])
    assert rig.manager.reset_cache() is False
    tier.resets = True
    assert rig.manager.reset_cache() is True
    tier.held.add(A)
    assert rig.manager.lookup(A, rig.request("r2")) is None
    rig.step()
    assert len(tier.loads) == 1


def test_a_tier_that_raises_while_it_resets_is_retired_for_good() -> None:
    tier = FakeTier(resets=False)
    rig = ManagerRig(4, [tier])
    rig.manager.reset_cache()
    tier.raises.add("on_schedule_end")
    tier.reset_later = True
    rig.step()
    tier.held.add(A)
    assert rig.stat("tiers_out_of_service") == 1
    assert rig.manager.lookup(A, rig.request("r2")) is False
    rig.step()
    assert len(tier.calls("on_schedule_end")) == 1


def test_a_retired_tier_is_counted_and_logged_once_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    tier = FakeTier(raises={"touch"})
    rig = ManagerRig(4, [tier])
    rig.manager.touch([A], rig.ctx)
    tier.raises.add("get_finished")
    rig.step()
    (record,) = caplog.records
    assert record.getMessage().startswith("tier fake is out of service until a restart: its touch raised RuntimeError")
    assert record.exc_info is not None
    assert record.exc_info[0] is RuntimeError
    assert rig.stat("tiers_out_of_service") == 1


def test_a_breach_without_an_exception_is_logged_without_a_traceback(caplog: pytest.LogCaptureFixture) -> None:
    tier = FakeTier()
    rig = ManagerRig(4, [tier])
    rig.manager.prepare_store([A], rig.ctx)
    rig.manager.complete_store([A], rig.ctx)
    tier.finish(tier.stores[0])
    tier.results *= 2
    rig.step()
    (record,) = caplog.records
    assert "it reported job 1, which is not one of its own in flight" in record.getMessage()
    assert not record.exc_info


def test_every_tier_is_shut_down_though_a_queue_is_broken(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An interrupt in the middle of a call may leave it so."""
    tiers = [FakeTier("first"), FakeTier("second")]
    rig = ManagerRig(4, tiers)

    def take(*arguments: object) -> None:
        raise StopIteration

    monkeypatch.setattr(rig.manager._jobs, "drain", take)
    rig.manager.shutdown()
    assert [len(tier.calls("shutdown")) for tier in tiers] == [1, 1]
    assert caplog.text.count("blocks that waited for it at shutdown were not stored") == 2


def test_every_tier_is_shut_down_though_one_does_not_stop(caplog: pytest.LogCaptureFixture) -> None:
    tiers = [FakeTier("stuck", stops=False), FakeTier("good")]
    rig = ManagerRig(4, tiers)
    rig.manager.shutdown()
    assert [len(tier.calls("shutdown")) for tier in tiers] == [1, 1]
    assert "the primary buffer stays mapped" in caplog.text


def test_a_tier_that_uses_more_than_its_time_leaves_the_others_none_that_has_passed() -> None:
    fast = FakeTier("fast")
    rig = ManagerRig(4, [fast, LateTier("slow")], reset_deadline=4.0)
    slow = rig.tiers[1]
    assert isinstance(slow, LateTier)
    slow.rig = rig
    rig.manager.reset_cache()
    assert fast.calls("reset") == [rig.clock()]


class LateTier(FakeTier):
    """A tier whose reset takes ten seconds more than it may."""

    rig: ManagerRig

    def reset(self, deadline: float, revision: str | None = None, follow: bool = False) -> bool:
        self.rig.clock.advance(deadline - self.rig.clock() + 10.0)
        return True


def test_a_tier_opens_by_its_deadline_and_one_that_raises_is_retired() -> None:
    rig = ManagerRig(4, [OpeningTier("good"), OpeningTier("bad", raises={"open"})])
    assert [rig.manager.open_tier(rank, 7.0) for rank in range(2)] == [True, False]
    good = rig.tiers[0]
    assert isinstance(good, OpeningTier)
    assert good.calls("open") == [7.0]
    assert rig.stat("tiers_out_of_service") == 1


class OpeningTier(FakeTier):
    """A tier that logs when it is opened."""

    def open(self, deadline: float) -> bool:
        self._enter("open", deadline)
        return True


def test_the_smallest_share_of_the_rows_is_one_row() -> None:
    tier = FakeTier(held=set(K), primary_share=0.01)
    rig = ManagerRig(8, [tier])
    rig.manager.match_prefix(K, rig.ctx)
    rig.step()
    assert [list(job.keys) for job in tier.loads] == [[A]]


def test_a_request_offers_all_its_blocks_only_if_one_of_its_tiers_wants_them() -> None:
    rig = ManagerRig(8, [FakeTier("plain")])
    assert rig.manager.on_new_request(ReqContext("r2")).policy is OffloadPolicy.BLOCK_LEVEL
    rig = ManagerRig(8, [FakeTier("plain"), FakeTier("eager", policy=OffloadPolicy.REQUEST_LEVEL)])
    assert rig.manager.on_new_request(ReqContext("r2")).policy is OffloadPolicy.REQUEST_LEVEL


def test_a_tier_that_finds_a_new_common_epoch_when_it_is_opened_enters_it_and_is_opened_again() -> None:
    tier = OpenedTier(has_successor=True)
    rig = ManagerRig(8, [tier])
    assert rig.manager.open_tier(0, 500.0)
    assert tier.calls("follow") == [500.0]
    assert tier.calls("open") == [500.0, 500.0]
    assert rig.stat("new_epochs") == 1


def test_a_request_id_that_begins_anew_gives_up_the_promotions_of_the_old_request() -> None:
    tier = FakeTier(held=set(K))
    rig = ManagerRig(8, [tier])
    rig.manager.match_prefix(K, rig.ctx)
    rig.manager.on_new_request(rig.ctx)
    rig.step()
    assert tier.loads == []
    assert rig.manager.match_prefix(K, rig.ctx).pending
    rig.step()
    assert [list(job.keys) for job in tier.loads] == [K]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a", "b", "a"], r"secondary_tiers\[2\] has the name 'a', which is the name of secondary_tiers\[0\]"),
        (["cpu"], r"secondary_tiers\[0\] has the name 'cpu', which is the name of the primary tier"),
    ],
)
def test_two_tiers_of_one_name_are_refused(names: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ManagerRig(8, [FakeTier(name) for name in names])
