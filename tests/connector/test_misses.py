"""Each cause of a miss is found behind the real manager, in the scheduler half of the connector."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.connector.fakes import FakeBlocks, FakeRequest, FakeSchedulerOutput, finished, idle_step, ids, make_spec
from tiering.api.engine import MissExplaining
from tiering.api.keys import OffloadKey
from tiering.api.manager import LOCAL, MEDIUM_STORAGE, OffloadingEvent
from tiering.connector.scheduler import OffloadingConnectorScheduler
from tiering.explain.causes import MissCause, Reason
from tiering.explain.explanation import Explanation
from tiering.manager.manager import TieringOffloadingManager
from tiering.primary.manager import CPUPrimaryTierOffloadingManager
from tiering.secondary.contract import TransferJob
from tiering.secondary.tier_stats import TierStats
from tiering.testing.clock import FakeClock
from tiering.testing.fake_tier import FakeTier

BLOCK = 4


@dataclass
class AnnouncingTier(FakeTier):
    """A fake tier that announces the blocks that come and go."""

    events: list[OffloadingEvent] = field(default_factory=list)

    def finish(self, job: TransferJob, success: bool = True, keys: Sequence[OffloadKey] | None = None) -> None:
        super().finish(job, success, keys)
        if not job.is_promotion and success:
            self._announce(job.keys if keys is None else keys)

    def remove(self, keys: Iterable[OffloadKey], *, evicted: bool) -> None:
        gone = [key for key in keys if key in self.held]
        self.held.difference_update(gone)
        self._announce(gone, removed=True, evicted=evicted)

    def _announce(self, keys: Iterable[OffloadKey], *, removed: bool = False, evicted: bool = False) -> None:
        self.events.append(OffloadingEvent(list(keys), MEDIUM_STORAGE, LOCAL, self.name, removed, evicted=evicted))

    def take_events(self) -> list[OffloadingEvent]:
        taken, self.events = self.events, []
        return taken


class Rig:
    """A scheduler half over a CPU tier and one secondary tier, whose explainer the test drives."""

    def __init__(
        self,
        directory: Path,
        rows: int = 32,
        windows: Sequence[int | None] = (None,),
        tenant_key: bytes | None = None,
        capacity: int = 100,
        retention_interval: int | None = None,
        **tier: Any,
    ) -> None:
        self.clock = FakeClock()
        self.tier = AnnouncingTier(name="local", **tier)
        primary = CPUPrimaryTierOffloadingManager(np.zeros((rows, 16), np.uint8).data, enable_events=True)
        self.manager = TieringOffloadingManager(primary, [self.tier], enable_events=True, clock=self.clock)
        self.manager.keep_unstored()
        spec = make_spec(*windows)
        spec.engine = replace(spec.engine, retention_interval=retention_interval)
        spec.manager = self.manager  # type: ignore[assignment]
        spec.explaining = MissExplaining(
            {"cpu": rows, "local": capacity}, blocks=4096, socket=directory / "why.sock", block_bytes=10
        )
        spec.tenant_key = tenant_key
        self.scheduler = OffloadingConnectorScheduler(spec, clock=self.clock)
        misses = self.scheduler._misses
        assert misses is not None
        self.misses = misses
        misses.service.stop(30)  # the test processes the notes itself
        self.groups = len(windows)

    def match(self, request: FakeRequest, found: int = 0) -> int:
        """Return the hit of a request, after its promotions."""
        for _ in range(20):
            tokens, _ = self.scheduler.get_num_new_matched_tokens(request, found)
            if tokens is not None:
                return tokens
            idle_step(self.scheduler)
            self.tier.finish_all()
        raise AssertionError("the lookup stays pending")

    def begin(self, request: FakeRequest, found: int = 0, *, fails: bool = False) -> None:
        """Run a request until all of its prompt is computed and stored."""
        tokens = self.match(request, found)
        blocks = [ids(-(-request.num_tokens // BLOCK)) for _ in range(self.groups)]
        self.scheduler.update_state_after_alloc(request, FakeBlocks(tuple(blocks)), tokens)
        computed = found + tokens
        if tokens:
            job = idle_step(self.scheduler).reqs_to_load[request.request_id].job_id
            invalid = {found // BLOCK + 1} if fails else set()
            self.scheduler.update_connector_output(
                finished(job, failed=[job] if fails else [], invalid_block_ids=invalid)
            )
            computed = found if fails else min(computed, request.num_tokens - 1)
        request.num_computed_tokens = computed
        count = request.num_tokens - computed
        meta = self.scheduler.build_connector_meta(FakeSchedulerOutput().new(request, count, *blocks))
        request.num_computed_tokens += count
        for order in meta.reqs_to_store.values():
            self.scheduler.update_connector_output(finished(order.job_id))
        idle_step(self.scheduler)
        self.tier.finish_all()
        idle_step(self.scheduler)

    def run(
        self, tokens: Sequence[int], name: str, found: int = 0, *, fails: bool = False, **fields: Any
    ) -> Explanation:
        """Run a request to its end, and return its explanation."""
        request = FakeRequest(name, list(tokens), **fields)
        self.begin(request, found, fails=fails)
        self.scheduler.request_finished(request, [])
        idle_step(self.scheduler)
        self.misses.explainer.settle()
        found_one = self.misses.explainer.answer(name)
        assert found_one is not None
        return found_one

    def causes(self, tokens: Sequence[int], name: str, found: int = 0, **options: Any) -> list[tuple[Any, ...]]:
        """Return first token, end, cause, tier and reason of each span of a new request."""
        spans = self.run(tokens, name, found, **options).spans
        return [(span.first, span.end, span.cause, span.tier, span.reason) for span in spans]

    def fail_jobs(self) -> None:
        """Let all jobs of the secondary tier fail from now on."""

        def fail() -> None:
            for job in [*self.tier.loads, *self.tier.stores]:
                self.tier.finish(job, False)

        self.tier.finish_all = fail  # type: ignore[method-assign]

    def evict(self, tier: str) -> None:
        """Let the CPU tier, or the secondary tier, evict all of its blocks."""
        keys = list(self.manager.primary_tier.readable)
        if tier == "cpu":
            self.manager.primary_tier.drop(keys)
        else:
            self.tier.remove(list(self.tier.held), evicted=True)


@contextmanager
def rig(directory: Path, **options: Any) -> Iterator[Rig]:
    made = Rig(directory, **options)
    try:
        yield made
    finally:
        made.scheduler.shutdown()


NONE = Reason.NONE
PROMPT = range(18)
"""Four blocks and two tokens more."""


def test_a_prompt_that_was_never_seen_is_new(tmp_path: Path) -> None:
    with rig(tmp_path) as one:
        explanation = one.run(PROMPT, "a")
    assert [(span.first, span.end, span.cause) for span in explanation.spans] == [
        (0, 16, MissCause.NEW),
        (16, 18, MissCause.REMAINDER),
    ]
    assert (explanation.prompt, explanation.computed) == (18, 18)


def test_a_prompt_diverges_behind_the_blocks_that_it_shares(tmp_path: Path) -> None:
    with rig(tmp_path) as one:
        one.run(PROMPT, "a")
        assert one.causes([*range(9), *range(100, 110)], "b") == [
            (8, 16, MissCause.DIVERGED, "", NONE),
            (16, 19, MissCause.REMAINDER, "", NONE),
        ]


def test_the_first_token_that_differs_is_named(tmp_path: Path) -> None:
    with rig(tmp_path) as one:
        one.run(PROMPT, "a")
        assert one.run([*range(9), *range(100, 110)], "b").spans[0].token == 9


def with_adapter(one: Rig, name: str, adapter: str, **fields: Any) -> MissCause:
    """Run a request with an adapter, and return its first cause."""
    request = FakeRequest(name, list(PROMPT), lora_request=SimpleNamespace(lora_name=adapter))
    for word, value in fields.items():
        setattr(request, word, value)
    key = repr((adapter, fields)).encode()
    request.block_hashes = [sha256(key + block_hash).digest() for block_hash in request.block_hashes]
    one.begin(request)
    one.scheduler.request_finished(request, [])
    one.misses.explainer.settle()
    found = one.misses.explainer.answer(name)
    assert found is not None
    return found.spans[0].cause


def test_a_prompt_of_another_adapter_is_named_if_the_salt_is_the_same(tmp_path: Path) -> None:
    with rig(tmp_path) as one:
        assert with_adapter(one, "a", "french") is MissCause.NEW
        assert with_adapter(one, "b", "german") is MissCause.OTHER_ADAPTER
        assert with_adapter(one, "c", "german", cache_salt="theirs") is MissCause.NEW
        assert with_adapter(one, "d", "french", cache_salt="theirs") is MissCause.OTHER_ADAPTER


def test_prompts_with_images_are_not_compared_by_their_tokens(tmp_path: Path) -> None:
    with rig(tmp_path) as one:
        assert with_adapter(one, "a", "french", mm_features=["image"]) is MissCause.NEW
        assert with_adapter(one, "b", "german", mm_features=["image"]) is MissCause.NEW


def test_blocks_of_the_engines_own_cache_count_as_known(tmp_path: Path) -> None:
    with rig(tmp_path) as one:
        assert one.causes(PROMPT, "a", 8)[0] == (8, 16, MissCause.DIVERGED, "", NONE)


def test_evicted_blocks_name_the_last_tier_that_held_them_and_the_capacity_that_suffices(tmp_path: Path) -> None:
    with rig(tmp_path) as one:
        one.run(PROMPT, "a")
        one.evict("cpu")
        one.clock.advance(80)
        one.evict("local")
        one.scheduler.build_connector_meta(FakeSchedulerOutput())
        one.misses.explainer.settle()
        one.clock.advance(160)
        (first, _) = one.run(PROMPT, "b").spans
    assert (first.first, first.end, first.cause, first.tier) == (0, 16, MissCause.EVICTED, "local")
    assert first.ages == (160, 160)
    assert first.factor == pytest.approx(1.04)  # four blocks beyond 100


def test_the_capacity_of_a_tier_in_another_process_is_that_of_its_statistics(tmp_path: Path) -> None:
    with rig(tmp_path, capacity=0) as one:
        one.tier.get_stats = lambda: TierStats(capacity_bytes=1000)  # type: ignore[method-assign]
        one.run(PROMPT, "a")
        one.evict("cpu")
        one.evict("local")
        (first, _) = one.run(PROMPT, "b").spans
    assert (first.cause, first.tier) == (MissCause.EVICTED, "local")
    assert first.factor == pytest.approx(1.04)


def test_lost_blocks_were_not_evicted(tmp_path: Path) -> None:
    with rig(tmp_path) as one:
        one.run(PROMPT, "a")
        one.evict("cpu")
        one.tier.remove(list(one.tier.held), evicted=False)
        assert one.causes(PROMPT, "b")[0] == (0, 16, MissCause.LOST, "local", NONE)


def test_declined_blocks_name_the_tier_that_declined_them(tmp_path: Path) -> None:
    with rig(tmp_path, admits=set()) as one:
        one.run(PROMPT, "a")
        one.evict("cpu")
        assert one.causes(PROMPT, "b")[0] == (0, 16, MissCause.UNSTORED, "local", NONE)


def test_blocks_whose_write_failed_name_the_tier(tmp_path: Path) -> None:
    with rig(tmp_path) as one:
        one.fail_jobs()
        one.run(PROMPT, "a")
        one.evict("cpu")
        assert one.causes(PROMPT, "b")[0] == (0, 16, MissCause.UNSTORED, "local", NONE)


def test_blocks_that_left_the_queue_of_a_tier_name_the_tier(tmp_path: Path) -> None:
    with rig(tmp_path, rows=4, allowance=0) as one:
        one.run(PROMPT, "a")
        one.run(range(100, 116), "other")  # takes the rows
        assert one.causes(PROMPT, "b")[0] == (0, 16, MissCause.UNSTORED, "local", NONE)


def test_blocks_that_the_cpu_tier_never_took_name_it(tmp_path: Path) -> None:
    with rig(tmp_path, rows=1) as one:
        one.run(PROMPT, "a")
        assert one.causes(PROMPT, "b")[0][2:4] == (MissCause.UNSTORED, "cpu")


def test_blocks_that_another_request_computes_now_are_not_new(tmp_path: Path) -> None:
    with rig(tmp_path) as one:
        running = FakeRequest("a", list(PROMPT))
        one.match(running)
        one.scheduler.update_state_after_alloc(running, FakeBlocks((ids(5),)), 0)  # in the same step as the other
        assert one.causes(PROMPT, "b")[0] == (0, 16, MissCause.UNSTORED, "cpu", NONE)


def test_blocks_behind_a_missing_one_are_held_in_vain(tmp_path: Path) -> None:
    with rig(tmp_path) as one:
        one.run(PROMPT, "a")
        keys = FakeRequest("x", list(PROMPT)).keys()
        one.evict("cpu")
        one.tier.remove(keys[1:2], evicted=True)
        assert one.causes(PROMPT, "b") == [
            (4, 8, MissCause.EVICTED, "local", NONE),
            (8, 16, MissCause.UNSERVED, "local", Reason.GAP),
            (16, 18, MissCause.REMAINDER, "", NONE),
        ]


def test_blocks_of_a_tier_out_of_service_are_unavailable(tmp_path: Path) -> None:
    with rig(tmp_path) as one:
        one.run(PROMPT, "a")
        one.evict("cpu")
        one.manager._states[0].in_service = False
        assert one.causes(PROMPT, "b")[0] == (0, 16, MissCause.UNSERVED, "local", Reason.UNAVAILABLE)


def test_too_few_blocks_for_a_load_are_short(tmp_path: Path) -> None:
    with rig(tmp_path, min_prefix_blocks=5) as one:
        one.run(PROMPT, "a")
        one.evict("cpu")
        assert one.causes(PROMPT, "b")[0] == (0, 16, MissCause.UNSERVED, "local", Reason.SHORT)


@pytest.mark.parametrize("rule", ["auto", "never"])
def test_blocks_of_a_tier_that_is_not_asked_are_gated(tmp_path: Path, rule: str) -> None:
    with rig(tmp_path, load_or_compute=rule) as one:
        one.run(PROMPT, "a")
        one.evict("cpu")
        one.manager.note_compute([0.0])  # no load takes less
        assert one.causes(PROMPT, "b")[0] == (0, 16, MissCause.UNSERVED, "local", Reason.GATED)


def test_overdue_promotions_of_a_tier_that_delivers_nothing_are_hung(tmp_path: Path) -> None:
    with rig(tmp_path, load_deadline=1.0) as one:
        one.run(PROMPT, "a")
        one.evict("cpu")
        one.tier.finish_all = lambda: one.clock.advance(2)  # type: ignore[method-assign]
        assert one.causes(PROMPT, "b")[0] == (0, 16, MissCause.UNSERVED, "local", Reason.HUNG)


def test_overdue_promotions_of_a_tier_that_delivers_others_are_late(tmp_path: Path) -> None:
    with rig(tmp_path, load_deadline=1.0, max_load_blocks=1) as one:
        one.run(PROMPT, "a")
        one.evict("cpu")

        def finish_one() -> None:
            if one.tier.loads:
                one.tier.finish(one.tier.loads[0])
            one.clock.advance(2)

        one.tier.finish_all = finish_one  # type: ignore[method-assign]
        assert one.causes(PROMPT, "b")[0] == (4, 16, MissCause.UNSERVED, "local", Reason.LATE)


def test_loads_that_take_longer_than_computing_are_cut(tmp_path: Path) -> None:
    with rig(tmp_path, load_or_compute="auto") as one:
        one.manager.note_compute([0.1])
        one.run(PROMPT, "a")
        one.evict("cpu")
        one.tier.finish_all = lambda: one.clock.advance(2)  # type: ignore[method-assign]
        assert one.causes(PROMPT, "b")[0] == (0, 16, MissCause.UNSERVED, "local", Reason.CUT)


def test_blocks_without_a_row_are_misses_for_lack_of_room(tmp_path: Path) -> None:
    with rig(tmp_path, rows=4) as one:
        one.run(PROMPT, "a")
        one.evict("cpu")
        assert one.causes(PROMPT, "b")[0] == (8, 16, MissCause.UNSERVED, "local", Reason.ROOM)


def test_blocks_that_a_tier_fails_to_load_have_failed(tmp_path: Path) -> None:
    with rig(tmp_path) as one:
        one.run(PROMPT, "a")
        one.evict("cpu")
        one.fail_jobs()
        assert one.causes(PROMPT, "b")[0] == (0, 16, MissCause.UNSERVED, "local", Reason.FAILED)


def test_a_request_that_may_not_load_names_no_other_cause(tmp_path: Path) -> None:
    with rig(tmp_path) as one:
        one.run(PROMPT, "a")
        params = {"kv_tiering": {"load": False}}
        parameters = (0, 16, MissCause.NOT_ALLOWED, "", Reason.PARAMETERS)
        assert one.causes(PROMPT, "b", kv_transfer_params=params)[0] == parameters


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"block_hashes": []}, Reason.ADAPTER),  # as those of an adapter whose files are not known
        ({"skip_reading_prefix_cache": True}, Reason.LOGPROBS),
        ({"skip_reading_prefix_cache": True, "block_hashes": []}, Reason.LOGPROBS),
    ],
)
def test_what_must_be_computed_in_any_case_names_the_reason(
    tmp_path: Path, fields: dict[str, Any], reason: Reason
) -> None:
    with rig(tmp_path) as one:
        one.run(PROMPT, "a")
        request = FakeRequest("b", list(PROMPT))
        for word, value in fields.items():
            setattr(request, word, value)
        one.begin(request)
        one.misses.explainer.settle()
        found = one.misses.explainer.answer("b")
        assert found is not None
        assert [(span.first, span.end, span.cause, span.reason) for span in found.spans] == [
            (0, 16, MissCause.NOT_ALLOWED, reason),
            (16, 18, MissCause.REMAINDER, NONE),
        ]


def test_prompts_that_come_during_a_reset_or_before_the_rows_are_prepared_name_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with rig(tmp_path) as one:
        one.run(PROMPT, "a")
        monkeypatch.setattr(one.scheduler, "_is_paused", lambda: True)
        assert one.causes(PROMPT, "b")[0] == (0, 16, MissCause.NOT_ALLOWED, "", Reason.RESET)
        monkeypatch.setattr(one.scheduler, "_is_preparing", True)
        assert one.causes(PROMPT, "c")[0] == (0, 16, MissCause.NOT_ALLOWED, "", Reason.PREPARING)


def test_tokens_behind_the_limit_of_a_request_were_not_allowed(tmp_path: Path) -> None:
    with rig(tmp_path) as one:
        one.run(PROMPT, "a")
        params = {"kv_tiering": {"max_load_tokens": 8}}
        behind = (8, 16, MissCause.NOT_ALLOWED, "", Reason.PARAMETERS)
        assert one.causes(PROMPT, "b", kv_transfer_params=params)[0] == behind


def test_tiers_that_the_request_leaves_out_were_not_allowed(tmp_path: Path) -> None:
    with rig(tmp_path) as one:
        one.run(PROMPT, "a")
        one.evict("cpu")
        params = {"kv_tiering": {"tiers": ["cpu"]}}
        left_out = (0, 16, MissCause.NOT_ALLOWED, "", Reason.PARAMETERS)
        assert one.causes(PROMPT, "b", kv_transfer_params=params)[0] == left_out


def test_a_load_that_fails_on_the_gpu_is_counted_as_such(tmp_path: Path) -> None:
    with rig(tmp_path) as one:
        one.run(PROMPT, "a")
        assert one.causes(PROMPT, "b", fails=True) == [
            (0, 16, MissCause.LOAD_FAILED, "", NONE),
            (16, 18, MissCause.REMAINDER, "", NONE),
        ]


def test_the_last_token_of_a_prompt_that_is_held_is_computed_again(tmp_path: Path) -> None:
    with rig(tmp_path) as one:
        one.run(range(16), "a")
        assert one.causes(range(16), "b") == [(15, 16, MissCause.REMAINDER, "", NONE)]


def test_after_a_reset_all_prompts_are_new(tmp_path: Path) -> None:
    with rig(tmp_path) as one:
        one.run(PROMPT, "a")
        one.scheduler.reset_cache()
        idle_step(one.scheduler)
        assert one.causes(PROMPT, "b")[0] == (0, 16, MissCause.NEW, "", NONE)


def test_a_window_block_that_is_missing_leaves_the_others_in_vain(tmp_path: Path) -> None:
    with rig(tmp_path, windows=(None, 4)) as one:
        one.run(PROMPT, "a")
        request = FakeRequest("x", list(PROMPT))
        one.tier.remove(list(one.tier.held), evicted=True)
        one.manager.primary_tier.drop([key for key in request.keys(1) if key in one.manager.primary_tier.readable])
        assert one.causes(PROMPT, "b")[0] == (0, 16, MissCause.UNSERVED, "cpu", Reason.GAP)


def test_full_attention_that_sparse_windows_leave_no_hit_for_is_behind_a_gap(tmp_path: Path) -> None:
    """The slower tier holds it, and it is not promoted in vain."""
    with rig(tmp_path, windows=(None, 4), retention_interval=0) as one:
        one.run(range(34), "a")
        one.evict("cpu")
        parted = [*range(18), *range(100, 116)]
        assert one.causes(parted, "b") == [
            (0, 16, MissCause.UNSERVED, "local", Reason.GAP),
            (16, 32, MissCause.DIVERGED, "", NONE),
            (32, 34, MissCause.REMAINDER, "", NONE),
        ]
        assert not one.tier.calls("submit_load")
        one.evict("cpu")
        assert one.causes([*range(18), *range(200, 216)], "c")[0] == (16, 32, MissCause.DIVERGED, "", NONE)


def test_the_answer_of_a_prompt_is_known_once_its_request_has_ended(tmp_path: Path) -> None:
    with rig(tmp_path) as one:
        request = FakeRequest("a", list(PROMPT))
        one.begin(request)
        request.append(*range(18, 24))
        one.scheduler.request_finished(request, [])
        assert one.causes(range(26), "b")[0] == (16, 24, MissCause.UNSTORED, "cpu", NONE)


def test_a_request_that_ends_before_it_begins_has_no_explanation(tmp_path: Path) -> None:
    with rig(tmp_path) as one:
        request = FakeRequest("a", list(PROMPT))
        one.match(request)
        one.scheduler.update_state_after_alloc(request, FakeBlocks((ids(5),)), 0)
        one.misses.explainer.settle()
        assert one.misses.explainer.is_waiting("a")
        one.scheduler.request_finished(request, [])
        one.misses.explainer.settle()
        assert not one.misses.explainer.is_waiting("a")
        assert one.misses.explainer.answer("a") is None


def test_the_counters_sum_to_the_computed_prompt_tokens(tmp_path: Path) -> None:
    with rig(tmp_path) as one:
        computed = sum(one.run(PROMPT, name).computed for name in "abc")
        one.evict("cpu")
        computed += one.run(range(30), "d").computed
        parts = one.scheduler.get_stats()["misses"]
    assert sum(part["missed_tokens"] for part in parts.values()) == computed
    assert parts["new "]["missed_tokens"] == 16


@pytest.mark.parametrize("adapter", ["", "french"])
@pytest.mark.parametrize(("found", "again"), [(0, 8), (8, 0), (4, 12)])
def test_the_counters_sum_when_a_request_starts_again(tmp_path: Path, adapter: str, found: int, again: int) -> None:
    """Its load has failed before its first step; later, it is preempted."""
    with rig(tmp_path) as one:
        one.run(PROMPT, "a")
        request = FakeRequest("b", list(PROMPT), lora_request=SimpleNamespace(lora_name=adapter))
        request.block_hashes = [sha256(name).digest() if adapter else name for name in request.block_hashes]

        def begin(computed: int, *outputs: FakeSchedulerOutput, fails: bool = False) -> None:
            one.scheduler.update_state_after_alloc(request, FakeBlocks((ids(5),)), one.match(request, computed))
            for output in (FakeSchedulerOutput(), *outputs):
                meta = one.scheduler.build_connector_meta(output)
                for job in [order.job_id for order in [*meta.reqs_to_load.values(), *meta.reqs_to_store.values()]]:
                    one.scheduler.update_connector_output(finished(job, failed=[job] if fails else []))

        begin(found, fails=True)
        request.num_computed_tokens = again
        begin(again, FakeSchedulerOutput().new(request, 18, ids(5)), FakeSchedulerOutput(preempted_req_ids={"b"}))
        begin(found, FakeSchedulerOutput().cached(request, 18, ids(5), resumed=True))
        one.misses.explainer.settle()
        parts = one.scheduler.get_stats()["misses"]
    assert sum(part["missed_tokens"] for part in parts.values()) == 18 + (18 - again)


def test_without_the_word_nothing_is_noted() -> None:
    scheduler = OffloadingConnectorScheduler(make_spec())
    assert scheduler._misses is None
    assert "misses" not in scheduler.get_stats()
    scheduler.shutdown()
