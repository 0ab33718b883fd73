"""The explainer's bounds, its tenants, and its sums; tests/connector/test_misses.py has the causes."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest

from tests.explain.walk import LEAST, TIERS, causes_of, event, make_explainer
from tiering.api.keys import OffloadKey
from tiering.api.manager import LookupOutcome
from tiering.explain import explainer as module
from tiering.explain.causes import MissCause
from tiering.explain.explainer import Explainer, Missed
from tiering.explain.explanation import Explanation
from tiering.explain.past_blocks import MOST_SECONDS
from tiering.testing.clock import FakeClock
from tiering.testing.keys import keys_of

MINE, THEIRS = keys_of(*range(4)), keys_of(*range(100, 104))
"""Keys of one prompt under two cache salts."""


def compute(explainer: Explainer, name: str, keys: Sequence[OffloadKey]) -> Explanation:
    end = 4 * len(keys)
    outcome = LookupOutcome(False, (), LEAST)
    explainer.missed(Missed(name, end + 1, 0, end + 1, end, keys, outcome))
    explainer.started(name, 0)
    explainer.ended(name, keys)
    explainer.settle()
    found = explainer.answer(name)
    assert found is not None
    return found


class TestTenants:
    @pytest.mark.parametrize("others", ["nothing", "held", "evicted", "declined"])
    def test_an_answer_does_not_depend_on_what_another_salt_has(self, others: str) -> None:
        explainer = make_explainer()
        if others != "nothing":
            compute(explainer, "theirs", THEIRS)
            explainer.events([event("cpu", *THEIRS), event("local", *THEIRS)])
        if others == "evicted":
            explainer.events([event(tier, *THEIRS, evicted=True) for tier in TIERS[:2]])
        answer = compute(explainer, "mine", MINE).as_dict()
        alone = compute(make_explainer(), "mine", MINE).as_dict()
        assert answer == alone

    def test_the_work_for_an_answer_does_not_depend_on_what_another_salt_has(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The table is asked the same number of times, about the same number of blocks."""
        work: list[list[tuple[str, int]]] = []
        for others in (False, True):
            explainer, calls = make_explainer(), list[tuple[str, int]]()
            if others:
                compute(explainer, "theirs", THEIRS)
            for name in ("hashes", "find", "seen"):
                original = getattr(explainer._blocks, name)

                def counted(blocks, *rest, name=name, original=original, calls=calls):  # type: ignore[no-untyped-def]
                    calls.append((name, len(blocks)))
                    return original(blocks, *rest)

                monkeypatch.setattr(explainer._blocks, name, counted)
            compute(explainer, "mine", MINE)
            work.append(calls)
        assert work[0] == work[1]

    def test_no_answer_has_tokens_or_keys(self) -> None:
        answer = compute(make_explainer(), "mine", MINE).as_dict()
        assert set(answer) == {
            "request",
            "time",
            "prompt_tokens",
            "computed_tokens",
            "followed_seconds",
            "causes",
        }


class TestBounds:
    def test_the_oldest_request_drops_out(self) -> None:
        explainer = make_explainer(requests=2)
        for name in "abc":
            compute(explainer, name, MINE)
        assert explainer.answer("a") is None
        assert explainer.requests == 2

    def test_blocks_beyond_the_bound_of_the_queue_are_not_examined_and_all_start_over(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "MAX_WAITING_BLOCKS", 3)
        explainer = make_explainer()
        explainer.events([event("cpu", *MINE)])
        explainer.missed(Missed("a", 17, 0, 17, 16, MINE, None))
        explainer.started("a", 0)
        explainer.events([event("cpu", *MINE, evicted=True)])  # not noted
        explainer.settle()
        found = explainer.answer("a")
        assert found is not None
        assert [(span.end - span.first, span.cause) for span in found.spans] == [
            (16, MissCause.UNEXAMINED),
            (1, MissCause.REMAINDER),
        ]
        explainer.events([event("local", THEIRS[0])])
        explainer.settle()
        assert compute(explainer, "b", MINE[:1]).spans[0].cause is MissCause.NEW

    def test_notes_without_keys_are_bounded_too(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "MAX_WAITING_BLOCKS", 3)
        explainer = make_explainer()
        for number in range(100):
            explainer.started(str(number), 0)
            explainer.reset()
        assert len(explainer._queue) < 10
        explainer.settle()
        assert compute(explainer, "a", MINE[:1]).spans[0].cause is MissCause.NEW

    def test_a_dropped_record_in_the_middle_of_known_blocks_is_not_taken_for_a_new_block(self) -> None:
        explainer = make_explainer()
        explainer.events([event("cpu", MINE[0]), event("cpu", MINE[2]), event("cpu", MINE[0], MINE[2], evicted=True)])
        spans = compute(explainer, "a", MINE).spans
        assert [span.cause for span in spans] == [
            MissCause.EVICTED,
            MissCause.UNEXAMINED,
            MissCause.EVICTED,
            MissCause.DIVERGED,
            MissCause.REMAINDER,
        ]

    def test_the_table_starts_over_when_its_times_end(self) -> None:
        clock = FakeClock()
        explainer = make_explainer(clock)
        compute(explainer, "a", MINE)
        clock.advance(MOST_SECONDS + 1)
        found = compute(explainer, "b", MINE)
        assert (found.spans[0].cause, found.since) == (MissCause.NEW, 0)

    def test_without_a_thread_nothing_is_kept(self) -> None:
        explainer = make_explainer()
        explainer.disable()
        explainer.events([event("cpu", *MINE)])
        explainer.missed(Missed("a", 17, 0, 17, 16, MINE, None))
        assert not explainer._queue

    def test_a_tier_without_a_name_here_is_left_out(self) -> None:
        explainer = make_explainer()
        explainer.events([event("other", *MINE)])
        assert compute(explainer, "a", MINE).spans[0].cause is MissCause.NEW


class TestSums:
    def test_each_cause_and_tier_has_a_total(self) -> None:
        explainer = make_explainer()
        assert set(explainer.totals.values()) == {0}
        compute(explainer, "a", MINE)
        totals = explainer.totals
        assert (totals[MissCause.NEW, ""], totals[MissCause.REMAINDER, ""], sum(totals.values())) == (16, 1, 17)

    def test_the_last_hour_forgets_what_is_older(self) -> None:
        clock = FakeClock()
        explainer = make_explainer(clock)
        compute(explainer, "a", MINE)
        clock.advance(3500)
        compute(explainer, "b", THEIRS[:1])
        assert explainer.last_hour()[MissCause.NEW, ""] == 20
        clock.advance(200)
        assert explainer.last_hour()[MissCause.NEW, ""] == 4

    def test_a_request_is_logged_on_one_line(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.DEBUG, "kv_tiering.explain"):
            compute(make_explainer(), "a", MINE)
        assert caplog.messages == ["request a computed new 16, remainder 1"]

    def test_a_client_knows_the_beginning_of_the_engines_id(self) -> None:
        explainer = make_explainer()
        compute(explainer, "cmpl-1-abcd", MINE)
        compute(explainer, "cmpl-12-abcd", MINE)
        found = explainer.answer("cmpl-1")
        assert found is not None
        assert found.req_id == "cmpl-1-abcd"

    def test_tokens_that_others_loaded_are_not_computed(self) -> None:
        explainer = make_explainer()
        explainer.missed(Missed("a", 17, 0, 17, 16, MINE, None))
        explainer.started("a", 10)
        explainer.settle()
        found = explainer.answer("a")
        assert found is not None
        assert causes_of(found) == [(MissCause.NEW, "")] * 6 + [(MissCause.REMAINDER, "")]
