"""The cached tokens of requests by tier: in responses, and as counters per tenant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.connector.fakes import FakeBlocks, FakeRequest, FakeSchedulerOutput, idle_step, ids
from tests.connector.test_misses import BLOCK, Rig
from tiering.connector.cached_tokens import MOST_TENANTS, OTHERS, Cached, CachedTokens, planned


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path, tenant_key=b"key")


def report(rig: Rig, tokens: list[int], name: str, found: int = 0, salt: str | None = None, **options: Any) -> Any:
    """Run a request to its end, and return what its response reports."""
    request = FakeRequest(name, list(tokens))
    request.cache_salt = salt  # type: ignore[attr-defined]
    rig.begin(request, found, **options)
    _, parameters = rig.scheduler.request_finished(request, ())
    assert parameters is not None
    idle_step(rig.scheduler)
    return parameters["kv_tiering"]


def cached(rig: Rig) -> Any:
    return rig.scheduler.get_stats()["cached"]


PROMPT = list(range(8 * BLOCK))


def test_tokens_of_each_tier_are_reported_as_planned_and_counted(rig: Rig) -> None:
    nothing = {"cached_tokens": 0, "arrived_tokens": 0, "cached_tokens_by_tier": {}}
    assert report(rig, PROMPT, "first") == nothing
    assert cached(rig) == {}
    second = report(rig, PROMPT, "second", found=2 * BLOCK)
    parts = {"engine": 2 * BLOCK, "cpu": 6 * BLOCK}
    assert second == {"cached_tokens": 8 * BLOCK, "arrived_tokens": 8 * BLOCK, "cached_tokens_by_tier": parts}
    assert cached(rig) == {
        f"none {tier}": {"cached_tokens": tokens, "cached_tokens_arrived": tokens} for tier, tokens in parts.items()
    }


def test_promoted_tokens_count_for_the_tier_by_its_name(tmp_path: Path) -> None:
    rig = Rig(tmp_path, rows=8, tenant_key=b"key")
    report(rig, PROMPT, "first")
    report(rig, list(range(1000, 1000 + 8 * BLOCK)), "takes all rows")
    report(rig, PROMPT[: 2 * BLOCK], "brings two back")
    assert cached(rig)["none local"]["cached_tokens"] == 2 * BLOCK
    third = report(rig, PROMPT, "third")["cached_tokens_by_tier"]
    assert third == {"cpu": 2 * BLOCK, "local": 4 * BLOCK}  # promotions may hold half of the rows


def test_a_failed_load_has_not_arrived(rig: Rig) -> None:
    report(rig, PROMPT, "first")
    second = report(rig, PROMPT, "second", fails=True)
    assert second["cached_tokens"] == 8 * BLOCK
    assert second["arrived_tokens"] < 8 * BLOCK
    assert cached(rig)["none cpu"]["cached_tokens_arrived"] == second["arrived_tokens"]


def test_a_preempted_request_counts_what_it_found_first(rig: Rig) -> None:
    report(rig, PROMPT, "first")
    request = FakeRequest("second", list(PROMPT))
    rig.begin(request, 2 * BLOCK)
    rig.scheduler.build_connector_meta(FakeSchedulerOutput(preempted_req_ids={"second"}))
    request.num_computed_tokens = 0
    rig.begin(request)
    _, parameters = rig.scheduler.request_finished(request, ())
    assert parameters is not None
    assert parameters["kv_tiering"]["cached_tokens_by_tier"] == {"engine": 2 * BLOCK, "cpu": 6 * BLOCK}


def test_nothing_is_reported_without_the_word_or_before_blocks(tmp_path: Path, rig: Rig) -> None:
    waiting = FakeRequest("waiting", list(PROMPT))
    rig.match(waiting)
    assert rig.scheduler.request_finished(waiting, ()) == (False, None)
    silent = Rig(tmp_path / "other")
    request = FakeRequest("a", list(PROMPT), kv_transfer_params={"kv_tiering": {}, "report_cached": True})
    silent.scheduler.update_state_after_alloc(request, FakeBlocks((ids(8),)), 0)
    assert silent.scheduler.request_finished(request, ()) == (False, None)
    assert "cached" not in silent.scheduler.get_stats()


def test_tenants_are_named_by_a_keyed_hash_and_bounded(rig: Rig) -> None:
    report(rig, PROMPT, "first")
    report(rig, PROMPT, "second", salt="a tenant")
    (name,) = {name.split()[0] for name in cached(rig)}
    assert len(name) == 12
    assert "tenant" not in name
    one, same, other = CachedTokens(b"key"), CachedTokens(b"key"), CachedTokens(b"other key")
    for number in range(MOST_TENANTS + 2):
        one.count(Cached({"cpu": 1}, 0), f"salt {number}")
    same.count(Cached({"cpu": 1}, 0), "salt 0")
    other.count(Cached({"cpu": 1}, 0), "salt 0")
    assert len(one.totals()) == MOST_TENANTS + 1
    assert one.totals()[f"{OTHERS} cpu"]["cached_tokens"] == 2
    assert same.totals().keys() <= one.totals().keys()
    assert other.totals().keys().isdisjoint(one.totals())


def test_a_failure_takes_the_slowest_tiers_first_and_only_in_its_generation() -> None:
    one = Cached(planned(10, 90, {"local": 30, "bucket": 20}), 1)
    assert one.tiers == {"engine": 10, "cpu": 40, "local": 30, "bucket": 20}
    one.load_failed(0, 2)
    assert one.arrived() == one.tiers
    one.load_failed(85, 1)
    assert one.arrived() == {"engine": 10, "cpu": 40, "local": 30, "bucket": 5}
    assert planned(0, 5, {"local": 8}) == {"engine": 0, "cpu": 0, "local": 5}
