"""Stores of several requests that end together are one job of a tier that mixes requests."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.manager_rig import ManagerRig
from tiering.api.keys import OffloadKey
from tiering.api.request import OffloadPolicy, ReqContext
from tiering.manager.cascade_queue import AT_ONCE, NOBODY
from tiering.testing.fake_tier import FakeTier
from tiering.testing.keys import keys_of

K = keys_of(*range(200))
THREE = [K[0:3], K[3:5], K[5:9]]


class BreakingTier(FakeTier):
    """A tier that raises when it is offered the blocks of one request."""

    broken_for: ReqContext | None = None

    def admit(self, keys: Sequence[OffloadKey], req_context: ReqContext, is_fill: bool) -> Sequence[int] | None:
        if req_context is self.broken_for:
            raise RuntimeError("broken")
        return super().admit(keys, req_context, is_fill)


class InterruptedTier(FakeTier):
    """A tier whose process is interrupted when it is offered the blocks of a second request."""

    is_interrupted = True

    def admit(self, keys: Sequence[OffloadKey], req_context: ReqContext, is_fill: bool) -> Sequence[int] | None:
        if self.is_interrupted and req_context.req_id == "request 1":
            raise KeyboardInterrupt
        return super().admit(keys, req_context, is_fill)


def end_together(
    rig: ManagerRig, parts: Sequence[Sequence[OffloadKey]], failed: Sequence[int] = ()
) -> list[ReqContext]:
    """Store each part for a request of its own, and complete all of them in one call."""
    requests = [rig.request(f"request {number}") for number in range(len(parts))]
    for keys, ctx in zip(parts, requests, strict=True):
        assert rig.manager.prepare_store(keys, ctx) is not None
    ended = zip(parts, requests, range(len(parts)), strict=True)
    rig.manager.complete_stores([(keys, ctx, number not in failed) for keys, ctx, number in ended])
    return requests


def submitted(tier: FakeTier) -> list[list[OffloadKey]]:
    return [list(job.keys) for job in tier.stores]


def test_they_are_one_job_of_no_request_whose_rows_are_released_at_its_end() -> None:
    tier = FakeTier(mixes_requests=True)
    rig = ManagerRig(16, [tier])
    end_together(rig, THREE)
    assert submitted(tier) == [K[:9]]
    assert tier.stores[0].req_context is NOBODY
    rows = rig.primary.prepare_load(K[:9], rig.ctx).block_ids.tolist()
    assert tier.stores[0].block_ids.tolist() == rows
    rig.primary.complete_load(K[:9], rig.ctx)
    assert rig.stat("rows_evictable") == 0
    tier.finish_all()
    rig.step()
    assert tier.held == set(K[:9])
    assert rig.stat("rows_evictable") == 9


def test_other_tiers_get_a_job_for_each_request() -> None:
    apart, all_of_them = FakeTier("apart"), FakeTier("all", takes_all=True)
    picky = FakeTier("picky", policy=OffloadPolicy.REQUEST_LEVEL)
    rig = ManagerRig(16, [apart, all_of_them, picky])
    requests = end_together(rig, THREE)
    for tier in (apart, all_of_them, picky):
        assert submitted(tier) == THREE
        assert [job.req_context for job in tier.stores] == requests


def test_a_store_that_failed_or_that_ends_alone_is_not_part_of_it() -> None:
    tier = FakeTier(mixes_requests=True)
    rig = ManagerRig(16, [tier])
    end_together(rig, THREE, failed=[1])
    assert submitted(tier) == [K[0:3] + K[5:9]]
    (ctx,) = end_together(rig, [K[20:22]])
    assert submitted(tier)[1:] == [K[20:22]]
    assert tier.stores[1].req_context is ctx


def test_each_request_is_admitted_by_itself_also_if_it_has_finished() -> None:
    tier = FakeTier(mixes_requests=True, admits=set(K[:4]) | set(K[6:9]))
    rig = ManagerRig(16, [tier])
    requests = [rig.request(f"request {number}") for number in range(3)]
    for keys, ctx in zip(THREE, requests, strict=True):
        assert rig.manager.prepare_store(keys, ctx) is not None
        rig.manager.on_request_finished(ctx)
    tier.log.clear()
    rig.manager.complete_stores([(keys, ctx, True) for keys, ctx in zip(THREE, requests, strict=True)])
    assert tier.offered == THREE
    assert submitted(tier) == [K[:4] + K[6:9]]
    assert [name for method, name in tier.log if method == "on_request_finished"] == [ctx.req_id for ctx in requests]


def test_blocks_beyond_the_credit_wait_in_the_order_of_the_requests() -> None:
    tier = FakeTier(mixes_requests=True, allowance=4)
    rig = ManagerRig(16, [tier])
    end_together(rig, THREE)
    assert submitted(tier) == [K[:4]]
    assert rig.stat("blocks_queued") == 5
    tier.finish_all()
    rig.step()
    assert [key for job in tier.stores for key in job.keys] == K[4:8]


@pytest.mark.parametrize(("parts", "jobs"), [(4, 1), (5, 2), (9, 3)])
def test_a_job_has_a_bounded_number_of_blocks(parts: int, jobs: int) -> None:
    share = AT_ONCE // 4
    tier = FakeTier(mixes_requests=True)
    rig = ManagerRig(160, [tier])
    end_together(rig, [K[at * share : (at + 1) * share] for at in range(parts)])
    assert len(tier.stores) == jobs
    assert max(len(job.keys) for job in tier.stores) == AT_ONCE
    assert [key for job in tier.stores for key in job.keys] == K[: parts * share]


def test_a_block_is_in_a_job_once() -> None:
    tier = FakeTier(mixes_requests=True, policy=OffloadPolicy.REQUEST_LEVEL)
    rig = ManagerRig(16, [tier])
    first, second = rig.request("first"), rig.request("second")
    for keys, ctx in ((K[:3], first), (K[:4], second)):
        assert rig.manager.prepare_store(keys, ctx) is not None
    rig.manager.complete_stores([(K[:3], first, True), (K[3:4], second, True)])
    assert all(len(set(job.keys)) == len(job.keys) for job in tier.stores)
    assert {key for job in tier.stores for key in job.keys} == set(K[:4])


def test_a_tier_that_fails_meanwhile_gets_nothing_and_holds_no_row() -> None:
    tier = BreakingTier(mixes_requests=True)
    rig = ManagerRig(16, [tier])
    requests = [rig.request(f"request {number}") for number in range(2)]
    for keys, ctx in zip(THREE, requests, strict=False):
        assert rig.manager.prepare_store(keys, ctx) is not None
    tier.broken_for = requests[1]
    rig.manager.complete_stores([(keys, ctx, True) for keys, ctx in zip(THREE, requests, strict=False)])
    assert (submitted(tier), rig.stat("tiers_out_of_service")) == ([], 1)
    assert (rig.stat("jobs_in_flight"), rig.stat("rows_evictable")) == (0, 5)


def test_blocks_that_were_offered_before_an_interrupt_are_stored_from_their_own_rows() -> None:
    tier = InterruptedTier(mixes_requests=True)
    rig = ManagerRig(8, [tier])
    with pytest.raises(KeyboardInterrupt):
        end_together(rig, [K[:2], K[2:4]])
    tier.is_interrupted = False
    (job,) = tier.stores
    assert list(job.keys) == K[:2]
    rows = rig.primary.prepare_load(K[:2], rig.ctx).block_ids.tolist()
    assert job.block_ids.tolist() == rows
    rig.store(K[10:12])
    assert tier.held == {*K[:2], *K[10:12]}
