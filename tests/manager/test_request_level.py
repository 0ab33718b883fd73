"""A request-level tier also gets blocks that another request still writes at the time of the offer."""

from __future__ import annotations

from tests.manager_rig import ManagerRig
from tiering.api.keys import OffloadKey
from tiering.api.request import OffloadPolicy, ReqContext
from tiering.testing.fake_tier import FakeTier
from tiering.testing.keys import keys_of

K = keys_of(*range(6))


class Both:
    """Two requests over a request-level tier; the first writes blocks that the second needs as well."""

    def __init__(self, **params: object) -> None:
        self.picky = FakeTier("picky", policy=OffloadPolicy.REQUEST_LEVEL)
        self.rig = ManagerRig(8, [self.picky])
        self.first = self.rig.request("first", **params)
        self.second = self.rig.request("second")
        self.prepare(K[:3], self.first)
        self.prepare(K[:4], self.second)

    def prepare(self, keys: list[OffloadKey], ctx: ReqContext) -> None:
        assert self.rig.manager.prepare_store(keys, ctx) is not None

    def complete(self, keys: list[OffloadKey], ctx: ReqContext, success: bool = True) -> None:
        self.rig.manager.complete_store(keys, ctx, success)

    def cascaded(self, ctx: ReqContext) -> list[OffloadKey]:
        return [key for job in self.picky.stores if job.req_context is ctx for key in job.keys]

    def told_of_end(self) -> list[object]:
        return [argument for name, argument in self.picky.log if name == "on_request_finished"]


def test_they_are_cascaded_for_it_as_soon_as_they_are_readable() -> None:
    both = Both()
    assert both.cascaded(both.second) == []
    both.complete(K[:3], both.first)
    assert both.cascaded(both.second) == K[:3]
    both.complete(K[3:4], both.second)
    assert both.cascaded(both.second) == K[:4]
    both.rig.step()
    assert both.cascaded(both.second) == K[:4]


def test_also_if_the_writer_has_nothing_to_do_with_the_tier() -> None:
    both = Both(tiers=[])
    both.complete(K[:3], both.first)
    assert both.cascaded(both.first) == []
    assert both.cascaded(both.second) == K[:3]


def test_also_part_by_part() -> None:
    both = Both()
    both.complete(K[:1], both.first)
    assert both.cascaded(both.second) == K[:1]
    both.complete(K[1:3], both.first)
    assert both.cascaded(both.second) == K[:3]


def test_also_after_it_has_ended_and_then_the_tier_is_told() -> None:
    both = Both()
    both.complete(K[3:4], both.second)
    both.rig.manager.on_request_finished(both.second)
    assert "second" not in both.told_of_end()
    both.complete(K[:3], both.first)
    assert both.cascaded(both.second) == [K[3], *K[:3]]
    assert both.told_of_end() == ["second"]


def test_those_that_are_being_promoted_are_cascaded_when_they_arrive() -> None:
    picky = FakeTier("picky", policy=OffloadPolicy.REQUEST_LEVEL, fill=False)
    slow = FakeTier("slow", held=set(K[:2]))
    rig = ManagerRig(8, [picky, slow])
    rig.manager.match_prefix(K[:2], rig.ctx)
    rig.step()
    other = rig.request("other")
    rig.manager.prepare_store(K[:2], other)
    slow.finish_all()
    rig.step()
    assert [(list(job.keys), job.req_context) for job in picky.stores] == [(K[:2], other)]


def test_what_failed_or_was_reset_is_forgotten_and_the_request_ends() -> None:
    for reset in (False, True):
        both = Both()
        both.complete(K[3:4], both.second)
        both.rig.manager.on_request_finished(both.second)
        if reset:
            both.rig.manager.reset_cache()
        both.complete(K[:3], both.first, success=False)
        both.rig.step()
        assert both.cascaded(both.second) == K[3:4]
        assert both.told_of_end() == ["second"]
        both.picky.finish_all()
        both.rig.step()
        assert not both.rig.manager.has_pending_work()
