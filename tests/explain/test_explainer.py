"""The explainer's bounds, its tenants, and its sums; tests/connector/test_misses.py has the causes."""

from __future__ import annotations

import logging
import tracemalloc
from collections.abc import Sequence

import pytest

from tests.explain.walk import LEAST, TIERS, causes_of, event, make_explainer
from tiering.api.keys import OffloadKey
from tiering.api.misses import LookupOutcome
from tiering.explain import explainer as module
from tiering.explain import past_prompts
from tiering.explain.causes import MissCause, Reason
from tiering.explain.explainer import Explainer, Missed
from tiering.explain.explanation import Explanation
from tiering.explain.past_blocks import MOST_SECONDS
from tiering.explain.past_prompts import NO_PROMPT, Prompt
from tiering.testing.clock import FakeClock
from tiering.testing.keys import keys_of

MINE, THEIRS = keys_of(*range(4)), keys_of(*range(100, 104))
"""Keys of one prompt under two cache salts."""


def compute(explainer: Explainer, name: str, keys: Sequence[OffloadKey], tokens: Prompt = NO_PROMPT) -> Explanation:
    end = 4 * len(keys)
    outcome = LookupOutcome(None, (), LEAST)
    explainer.missed(Missed(name, end + 1, 0, end + 1, end, keys, outcome, tokens))
    explainer.started(name, 0)
    explainer.ended(name, keys, tokens)
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
        tokens = list(range(17))
        for others in (False, True):
            explainer, calls = make_explainer(), list[tuple[str, int]]()
            if others:
                compute(explainer, "theirs", THEIRS, Prompt(tokens, "theirs"))
            table, prompts = ("hashes", "find", "seen"), ("digest", "adapters", "parting", "add")
            places = [(explainer._blocks, name) for name in table] + [(explainer._prompts, name) for name in prompts]
            for place, name in places:
                original = getattr(place, name)

                def counted(blocks, *rest, name=name, original=original, calls=calls):  # type: ignore[no-untyped-def]
                    calls.append((name, len(blocks)))
                    return original(blocks, *rest)

                monkeypatch.setattr(place, name, counted)
            compute(explainer, "mine", MINE, Prompt(tokens, "mine"))
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


class TestTokens:
    """The same tokens under other keys."""

    TOKENS = tuple(range(17))

    @pytest.mark.parametrize(
        ("salt", "cause"), [("mine", MissCause.OTHER_ADAPTER), ("theirs", MissCause.NEW), ("", MissCause.NEW)]
    )
    def test_another_adapter_is_named_within_a_salt_only(self, salt: str, cause: MissCause) -> None:
        explainer = make_explainer()
        compute(explainer, "a", THEIRS, Prompt(self.TOKENS, salt, "french"))
        spans = compute(explainer, "b", MINE, Prompt(self.TOKENS, "mine", "german")).spans
        assert [(span.first, span.end, span.cause) for span in spans] == [
            (0, 16, cause),
            (16, 17, MissCause.REMAINDER),
        ]

    def test_blocks_behind_those_of_another_adapter_diverge(self) -> None:
        explainer = make_explainer()
        compute(explainer, "a", THEIRS[:2], Prompt(self.TOKENS[:9], "", "french"))
        spans = compute(explainer, "b", MINE, Prompt(self.TOKENS)).spans
        assert [(span.first, span.end, span.cause) for span in spans] == [
            (0, 8, MissCause.OTHER_ADAPTER),
            (8, 16, MissCause.DIVERGED),
            (16, 17, MissCause.REMAINDER),
        ]

    def test_blocks_with_the_same_adapter_and_without_a_record_were_seen(self) -> None:
        explainer = make_explainer()
        compute(explainer, "a", THEIRS, Prompt(self.TOKENS))
        assert compute(explainer, "b", MINE, Prompt(self.TOKENS)).spans[0].cause is MissCause.UNEXAMINED

    @pytest.mark.parametrize("token", [8, 9, 11])
    def test_the_first_token_that_differs_is_named(self, token: int) -> None:
        explainer, keys = make_explainer(), [*MINE[:2], *THEIRS[2:]]
        compute(explainer, "a", MINE, Prompt(self.TOKENS))
        other = Prompt([*self.TOKENS[:token], 99, *self.TOKENS[token + 1 :]])
        (_, parted, _) = compute(explainer, "b", keys, other).spans
        assert (parted.first, parted.cause, parted.token) == (8, MissCause.DIVERGED, token)

    def test_a_prompt_that_ends_before_the_others_block_parts_at_its_end(self) -> None:
        explainer = make_explainer()
        compute(explainer, "a", MINE[:2], Prompt(self.TOKENS[:10]))
        (_, parted, _) = compute(explainer, "b", [*MINE[:2], *THEIRS[2:]], Prompt(self.TOKENS)).spans
        assert parted.token == 10

    def test_the_token_is_not_named_once_the_tokens_are_dropped(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(past_prompts, "MAX_TOKENS", 200)
        explainer = make_explainer()
        compute(explainer, "a", MINE, Prompt(self.TOKENS))
        compute(explainer, "other", keys_of(*range(200, 204)), Prompt(range(50, 67)))
        other = Prompt([*self.TOKENS[:10], *range(90, 97)])
        (_, parted, _) = compute(explainer, "b", [*MINE[:2], *THEIRS[2:]], other).spans
        assert (parted.cause, parted.token) == (MissCause.DIVERGED, None)
        assert len(explainer._prompts._kept) == 1

    def test_short_prompts_take_no_more_memory_than_long_ones(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(past_prompts, "MAX_TOKENS", 1 << 17)
        prompts = past_prompts.PastPrompts(1, 4, lambda: None)
        tracemalloc.start()
        try:
            for number in range(1_500):
                digest = prompts.digest(Prompt(range(number, number + 4)))
                assert digest is not None
                prompts.add(digest)
            assert tracemalloc.get_traced_memory()[0] < 1.1 * 4 * past_prompts.MAX_TOKENS
        finally:
            tracemalloc.stop()

    def test_of_a_prompt_beyond_the_bound_only_the_kept_tokens_take_memory(self) -> None:
        prompts = past_prompts.PastPrompts(1, 4, lambda: None)
        digest = prompts.digest(Prompt(range(2 * past_prompts.MAX_TOKENS)))
        assert digest is not None
        prompts.add(digest)
        (kept,) = prompts._kept.values()
        assert kept.tokens.base is None
        assert len(kept.tokens) == past_prompts.MAX_TOKENS

    @pytest.mark.parametrize(("salt", "token"), [("mine", 10), ("theirs", None)])
    def test_the_token_never_comes_from_another_salt(
        self, monkeypatch: pytest.MonkeyPatch, salt: str, token: int | None
    ) -> None:
        """The numbers of requests have all been used, and the next request has that of the first one."""
        monkeypatch.setattr(past_prompts, "_NUMBERS", 1)
        explainer = make_explainer()
        compute(explainer, "a", MINE, Prompt(self.TOKENS, "mine"))
        compute(explainer, "b", THEIRS, Prompt([*self.TOKENS[:12], *range(90, 95)], salt))
        other = Prompt([*self.TOKENS[:10], *range(80, 87)], "mine")
        (_, parted, _) = compute(explainer, "c", [*MINE[:2], *keys_of(300, 301)], other).spans
        assert (parted.cause, parted.token) == (MissCause.DIVERGED, token)

    def test_tokens_beyond_the_bound_of_the_queue_are_not_examined(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "MAX_WAITING_TOKENS", 20)
        explainer = make_explainer()
        explainer.ended("a", THEIRS, Prompt(self.TOKENS, "", "french"))
        explainer.ended("b", keys_of(*range(200, 204)), Prompt(range(50, 67), "", "french"))  # no room
        explainer.settle()
        causes = [
            compute(explainer, "c", MINE, Prompt(self.TOKENS)).spans[0].cause,
            compute(explainer, "d", keys_of(*range(300, 304)), Prompt(range(50, 67))).spans[0].cause,
        ]
        assert causes == [MissCause.OTHER_ADAPTER, MissCause.NEW]

    def test_tokens_that_an_engine_appends_to_a_waiting_prompt_leave_the_bound_of_the_queue(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """An engine appends what it samples to the tokens that wait by reference."""
        monkeypatch.setattr(module, "MAX_WAITING_TOKENS", 20)
        explainer, growing = make_explainer(), list(self.TOKENS)
        explainer.ended("a", THEIRS, Prompt(growing, "", "french"))
        growing += range(1000)
        explainer.settle()
        explainer.ended("b", THEIRS, Prompt(self.TOKENS, "", "french"))
        explainer.ended("c", keys_of(*range(200, 204)), Prompt(range(50, 67), "", "french"))  # no room
        explainer.settle()
        cause = compute(explainer, "d", keys_of(*range(300, 304)), Prompt(range(50, 67))).spans[0].cause
        assert cause is MissCause.NEW

    def test_a_reset_drops_the_tokens(self) -> None:
        explainer = make_explainer()
        compute(explainer, "a", THEIRS, Prompt(self.TOKENS, "", "french"))
        explainer.reset()
        assert compute(explainer, "b", MINE, Prompt(self.TOKENS)).spans[0].cause is MissCause.NEW

    def test_more_adapters_than_can_be_numbered_are_not_examined(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(past_prompts, "_ADAPTER", 1)
        explainer = make_explainer()
        for name in ("", "french", "one too many", "another"):
            compute(explainer, name, THEIRS, Prompt(self.TOKENS, "", name))
        assert len(explainer._prompts._adapters) == 2
        assert compute(explainer, "b", MINE, Prompt(self.TOKENS)).spans[0].cause is MissCause.OTHER_ADAPTER
        explainer.reset()
        compute(explainer, "c", THEIRS, Prompt(self.TOKENS, "", "one too many"))
        assert compute(explainer, "d", MINE, Prompt(self.TOKENS)).spans[0].cause is MissCause.OTHER_ADAPTER


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
        assert explainer.last().causes[MissCause.NEW, "", Reason.NONE] == 20
        clock.advance(200)
        last = explainer.last()
        assert (last.causes[MissCause.NEW, "", Reason.NONE], last.prompt) == (4, 5)

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
