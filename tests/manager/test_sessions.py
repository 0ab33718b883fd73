"""Sessions: a release returns what only its session uses; the bound drops those used longest ago."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.connector.fakes import FakeRequest, finished, make_scheduler, run_prompt
from tests.connector.test_engine_cache import Bench
from tiering.api.hints import KeptBlocks, tenant_of
from tiering.manager.sessions import MOST_SHARERS, Sessions
from tiering.testing.keys import keys_of

A, B, C = b"A", b"B", b"C"
KEYS = keys_of(*range(64))


def test_a_release_returns_the_blocks_that_no_other_session_shares_in_order() -> None:
    sessions = Sessions(1000)
    sessions.computed(KEYS[:4], A)
    sessions.computed(KEYS[4:6], A)
    sessions.used(KEYS[:2], B)
    assert sessions.release(A) == KEYS[2:6]
    assert sessions.release(A) == []
    assert sessions.release(B) == KEYS[:2]
    assert (len(sessions), sessions.blocks) == (0, 0)


def test_blocks_that_a_request_without_a_session_uses_are_never_released() -> None:
    sessions = Sessions(1000)
    sessions.computed(KEYS[:4], A)
    sessions.used(KEYS[:3], None)
    assert sessions.release(A) == KEYS[3:4]


def test_blocks_that_a_session_has_only_found_are_not_its_own() -> None:
    sessions = Sessions(1000)
    sessions.used(KEYS[:4], A)
    sessions.computed(KEYS[4:6], A)
    assert sessions.release(A) == KEYS[4:6]


class CountedUsers(dict[Any, Any]):
    """The users of blocks, with the number of blocks that were asked for."""

    asked = 0

    def get(self, key: Any, default: Any = None) -> Any:
        self.asked += 1
        return super().get(key, default)


def test_a_session_s_own_blocks_are_sought_among_a_request_s_blocks_only() -> None:
    """A session of many prompts would otherwise make each end of a request take tens of milliseconds."""
    sessions = Sessions(1000)
    sessions.computed(KEYS, A)
    sessions.used(KEYS[1:2], None)
    sessions._users = users = CountedUsers(sessions._users)
    assert sessions.own_of(A, KEYS[:3]) == [KEYS[0], KEYS[2]]
    assert users.asked == 3


def test_a_block_of_more_sessions_than_are_followed_is_shared_for_good() -> None:
    sessions = Sessions(1000)
    names = [bytes([number]) for number in range(MOST_SHARERS + 2)]
    sessions.computed(KEYS[:2], names[0])
    for name in names[1:]:
        sessions.used(KEYS[:1], name)
    assert [sessions.release(name) for name in names] == [KEYS[1:2]] + [[]] * (len(names) - 1)


def test_the_sessions_that_were_used_longest_ago_are_followed_no_more_beyond_the_bound() -> None:
    sessions = Sessions(16)
    for start, name in ((0, A), (2, B), (4, A), (6, C)):
        sessions.computed(KEYS[start : start + 2], name)
    for number in range(5):
        sessions.computed(KEYS[10 + 2 * number : 12 + 2 * number], bytes([number]))
    sessions.computed(KEYS[40:42], b"last")
    assert sessions.blocks <= 16
    assert sessions.release(B) == []
    assert sessions.release(C) == KEYS[6:8]


def test_blocks_that_a_session_shared_which_is_followed_no_more_are_never_released() -> None:
    """The session is not over: it may use them again."""
    sessions = Sessions(32)
    sessions.computed(KEYS[:2], A)
    sessions.used(KEYS[:1], B)
    sessions.computed(KEYS[2:4], B)
    for number in range(20):
        sessions.computed(KEYS[2:4], B)
        sessions.computed(KEYS[10 + 2 * number : 12 + 2 * number], bytes([number]))
    assert sessions.release(A) == []
    assert sessions.release(B) == KEYS[2:4]


def test_blocks_that_a_session_computes_though_another_request_has_left_them_are_not_its_own() -> None:
    sessions = Sessions(1000)
    sessions.computed(KEYS[:4], A, KEYS[:2])
    assert sessions.release(A) == KEYS[:2]
    sessions.computed(KEYS[:4], A)
    sessions.computed(KEYS[:4], B, KEYS[3:4])
    assert sessions.release(B) == []
    assert sessions.release(A) == KEYS[:4]


def test_one_session_gets_a_share_of_the_bound_only() -> None:
    sessions = Sessions(64)
    sessions.computed(KEYS[:40], A)
    assert sessions.release(A) == KEYS[:8]


def test_random_lives_of_sessions_release_exactly_what_no_other_session_has() -> None:
    for seed in range(200):
        rng, sessions = random.Random(seed), Sessions(1 << 20)
        users: dict[bytes, set[bytes]] = {}
        owned: set[bytes] = set()
        for _ in range(60):
            name, start = rng.choice([A, B, C]), rng.randrange(50)
            keys = KEYS[start : start + rng.randrange(1, 10)]
            action = rng.randrange(3)
            if action == 0:
                sessions.computed(keys, name)
                for key in keys:
                    owned.add(key)
                    users.setdefault(key, set()).add(name)
            elif action == 1:
                sessions.used(keys, name)
                for key in set(keys) & owned:
                    users[key].add(name)
            else:
                released = sessions.release(name)
                for key in released:
                    assert users[key] == {name}, (seed, key)
                only = {key for key in owned if users[key] == {name}}
                assert set(released) == only
                for key in [key for key in owned if name in users[key]]:
                    if users[key] == {name}:
                        owned.discard(key)
                        del users[key]
                    else:
                        users[key].discard(name)


# ---------------------------------------------------------------------------------------------------- in the scheduler


def run(scheduler: object, request: FakeRequest, blocks: list[int], found: int = 0) -> None:
    meta = run_prompt(scheduler, request, blocks, computed=found)  # type: ignore[arg-type]
    scheduler.update_connector_output(finished(*(order.job_id for order in meta.reqs_to_store.values())))  # type: ignore[attr-defined]
    scheduler.request_finished(request, [])  # type: ignore[attr-defined]


def ask(name: str, session: str | None, tokens: list[int], *actions: object) -> FakeRequest:
    request = FakeRequest(name, tokens)
    request.session_id = session  # type: ignore[attr-defined]
    request.kv_transfer_params = {"kv_tiering": {"hints": list(actions)}}
    return request


RELEASE = {"action_type": "release", "payload": {}}


def test_the_last_request_of_a_session_releases_all_blocks_that_the_session_has_computed() -> None:
    scheduler, manager = make_scheduler()
    first = ask("one", "s", [*range(8)])
    run(scheduler, first, [1, 2])
    last = ask("two", "s", [*range(16)], RELEASE)
    run(scheduler, last, [1, 2, 3, 4], found=8)
    assert manager.released == last.keys()
    assert scheduler.get_stats()["connector"]["sessions_released"] == 1


def test_a_prefix_that_another_session_uses_stays() -> None:
    scheduler, manager = make_scheduler()
    run(scheduler, ask("one", "s", [*range(16)]), [1, 2, 3, 4])
    run(scheduler, ask("other", "t", [*range(8), 90, 91, 92, 93]), [1, 2, 5], found=8)
    last = ask("two", "s", [*range(16)], RELEASE)
    run(scheduler, last, [1, 2, 3, 4], found=12)
    assert manager.released == last.keys()[2:]


def test_what_the_first_request_of_a_session_finds_is_not_released() -> None:
    scheduler, manager = make_scheduler()
    request = ask("one", "s", [*range(16)], RELEASE)
    run(scheduler, request, [1, 2, 3, 4], found=8)
    assert manager.released == request.keys()[2:]


@pytest.mark.parametrize("found", [12, 4, 0], ids=["last block", "behind a hole", "nothing found"])
@pytest.mark.parametrize("first", [None, "r"], ids=["no session", "released session"])
def test_blocks_that_a_request_computes_again_although_the_tier_has_them_are_not_released(
    found: int, first: str | None
) -> None:
    scheduler, manager = make_scheduler()
    run(scheduler, ask("one", first, [*range(16)], *[RELEASE] * bool(first)), [1, 2, 3, 4])
    manager.released.clear()
    request = ask("two", "s", [*range(16), *range(90, 94)], RELEASE)
    run(scheduler, request, [1, 2, 3, 4, 5], found=found)
    assert manager.released == request.keys()[4:]


@pytest.mark.parametrize("feeds_tiers", [False, True])
@pytest.mark.parametrize("first", [None, "r"], ids=["no session", "released session"])
def test_blocks_that_an_exclusive_tier_has_and_a_session_computes_again_are_not_released(
    first: str | None, feeds_tiers: bool
) -> None:
    bench = Bench(feeds_tiers=feeds_tiers)
    left = ask("one", first, [*range(16)], *[RELEASE] * bool(first))
    bench.run(left)
    bench.end(left)
    bench.manager.hold(left.keys())
    bench.use_up(16)
    assert bench.notes == set(), "the blocks have left the engine's cache"
    bench.pool.free_blocks(bench.pool.blocks[1:])
    bench.manager.released.clear()
    again = ask("two", "s", [*range(20)], RELEASE)
    bench.run(again)
    bench.end(again)
    assert bench.manager.released == again.keys()[4:]


@pytest.mark.parametrize("session", [None, "t"])
@pytest.mark.parametrize("is_first", [True, False])
def test_blocks_that_two_requests_compute_at_the_same_time_are_not_released(
    session: str | None, is_first: bool
) -> None:
    scheduler, manager = make_scheduler()
    ends = ask("one", "s", [*range(16), *range(50, 54)], RELEASE)
    other = ask("two", session, [*range(16), *range(60, 64)])
    for request in (ends, other) if is_first else (other, ends):
        run_prompt(scheduler, request, [1, 2, 3, 4, 5] if request is ends else [6, 7, 8, 9, 10])
    scheduler.request_finished(ends, [])
    assert manager.released == ends.keys()[4:]


def test_a_reset_forgets_the_sessions() -> None:
    scheduler, manager = make_scheduler()
    run(scheduler, ask("one", "s", [*range(16)]), [1, 2, 3, 4])
    scheduler.reset_cache()
    run(scheduler, ask("two", "t", [*range(4)], {"action_type": "release", "payload": {"session_id": "s"}}), [9])
    assert manager.released == []


def test_malformed_and_unknown_hints_are_counted_and_the_request_stores() -> None:
    scheduler, manager = make_scheduler()
    request = ask("one", None, [*range(8)], RELEASE, {"action_type": "teleport"})
    run(scheduler, request, [1, 2])
    counters = scheduler.get_stats()["connector"]
    assert (counters["hints_ignored"], counters["hints_unknown"]) == (1, 1)
    assert set(request.keys()) <= manager.rows.keys()


def test_a_request_retains_all_its_blocks_and_needs_no_session() -> None:
    scheduler, manager = make_scheduler()
    request = ask("one", None, [*range(16)], {"action_type": "retain", "payload": {"seconds": 5}})
    run(scheduler, request, [1, 2, 3, 4], found=8)
    assert manager.kept == [KeptBlocks(request.keys(), 5.0, 0.25, tenant=tenant_of(None))]


def test_a_request_retains_the_blocks_that_another_session_has_computed() -> None:
    scheduler, manager = make_scheduler()
    first = ask("one", "s", [*range(16)])
    run(scheduler, first, [1, 2, 3, 4], found=8)
    others = [{"action_type": "expect", "payload": {"seconds": 5, "session_id": name}} for name in ("s", "nobody")]
    run(scheduler, ask("two", "t", [90, 91, 92, 93], *others), [9])
    assert manager.kept == [KeptBlocks(first.keys()[2:], 7.5, 0.25, tenant=tenant_of(None), is_own=True)]


def test_blocks_that_another_session_uses_are_no_longer_a_session_s_own() -> None:
    scheduler, manager = make_scheduler()
    run(scheduler, ask("one", "s", [*range(16)]), [1, 2, 3, 4])
    run(scheduler, ask("two", "t", [*range(8), 70, 71, 72, 73]), [1, 2, 5], found=8)
    expects = {"action_type": "expect", "payload": {"seconds": 5, "session_id": "s"}}
    run(scheduler, last := ask("three", "u", [90, 91, 92, 93], expects), [9])
    keys = ask("one", "s", [*range(16)]).keys()
    assert [(list(kept.keys), kept.is_own) for kept in manager.kept] == [(keys[:2], False), (keys[2:], True)]
    assert last.keys() != keys


def test_a_session_of_another_salt_is_another_session() -> None:
    scheduler, manager = make_scheduler()
    run(scheduler, ask("one", "s", [*range(16)]), [1, 2, 3, 4])
    other = ask("two", "t", [90, 91, 92, 93], {"action_type": "retain", "payload": {"seconds": 5, "session_id": "s"}})
    other.cache_salt = "tenant"  # type: ignore[attr-defined]
    run(scheduler, other, [9])
    assert manager.kept == []


def test_a_pin_has_no_effect_unless_the_stack_gives_it_a_share() -> None:
    for pin, kept in ((0.0, 0), (0.125, 1)):
        scheduler, manager = make_scheduler(hints={"pin": pin})
        request = ask("one", None, [*range(8)], {"action_type": "pin", "payload": {"seconds": 5}})
        run(scheduler, request, [1, 2])
        assert manager.kept == [KeptBlocks(request.keys(), 5.0, 0.125, True, tenant_of(None))] * kept
        assert scheduler.get_stats()["connector"]["hints_unknown"] == 1 - kept


PREFETCH = {"action_type": "prefetch", "payload": {}}


def test_a_request_prefetches_its_prompt_and_the_blocks_of_a_session_when_it_arrives() -> None:
    scheduler, manager = make_scheduler(hints={"prefetch": 1e6})
    first = ask("one", "s", [*range(8)])
    run(scheduler, first, [1, 2])
    other = {"action_type": "prefetch", "payload": {"session_id": "s"}}
    request = ask("two", None, [*range(50, 63)], PREFETCH, other)
    scheduler.on_new_request(request)
    assert manager.prefetched == [(request.keys()[:3], 1e6, 0.0), (first.keys(), 1e6, 0.0)]
    assert manager.early == []


def test_an_expected_session_is_prefetched_before_it_returns_where_the_stack_allows_that() -> None:
    expect = {"action_type": "expect", "payload": {"seconds": 10}}
    for retain, kept in ((0.25, 1), (0.0, 0)):
        scheduler, manager = make_scheduler(hints={"prefetch": 1e6, "retain": retain})
        request = ask("one", None, [*range(8)], expect)
        run(scheduler, request, [1, 2])
        assert manager.prefetched == [(request.keys(), 1e6, 8.0)]
        assert len(manager.kept) == kept


@pytest.mark.parametrize("limits", [{"load": False}, {"tiers": ["disk"]}])
def test_the_limits_of_a_request_hold_for_what_it_expects(limits: dict[str, object]) -> None:
    scheduler, manager = make_scheduler(hints={"prefetch": 1e6, "retain": 0.25})
    request = ask("one", None, [*range(8)], {"action_type": "expect", "payload": {"seconds": 10}})
    request.kv_transfer_params["kv_tiering"].update(limits)  # type: ignore[index]
    run(scheduler, request, [1, 2])
    assert (manager.prefetched, len(manager.kept)) == ([], 1)


def test_without_a_bound_a_prefetch_counts_as_unknown() -> None:
    scheduler, manager = make_scheduler()
    scheduler.on_new_request(ask("two", None, [*range(8)], PREFETCH))
    assert manager.prefetched == []
    assert scheduler.get_stats()["connector"]["hints_unknown"] == 1


@pytest.mark.parametrize("on", [False, True])
def test_a_request_that_joins_the_queue_is_promoted_early_if_the_stack_says_so(on: bool) -> None:
    scheduler, manager = make_scheduler(promotes_waiting=on)
    request = ask("one", None, [*range(13)])
    scheduler.on_new_request(request)
    assert manager.early == ([(request.keys()[:3], "one")] if on else [])
    may_not = ask("two", None, [*range(13)])
    may_not.kv_transfer_params = {"kv_tiering": {"load": False}}
    scheduler.on_new_request(may_not)
    assert len(manager.early) == int(on)


def test_without_the_word_no_session_is_followed() -> None:
    scheduler, manager = make_scheduler(session_blocks=0, hints={})
    run(scheduler, ask("one", "s", [*range(8)], RELEASE), [1, 2])
    assert manager.released == []
    assert scheduler.get_stats()["connector"]["session_blocks"] == 0
