"""Waits without an engine's loop: woken by news, bounded, on asyncio too, and never spinning."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest

import tiering
from tiering.block_tier.definition import TierDefinition
from tiering.manager import waiting
from tiering.secondary.contract import TierTraits
from tiering.secondary.options import TierOptions
from tiering.testing.keys import keys_of

MODEL = tiering.ModelIdentity(name="org/model", weights="0" * 40, dtype="bfloat16", layout="waiting")
BLOCK = 4096
KEYS = keys_of(*range(4))
FOREVER = 1000.0  # longer than the limit of a test


class GatedTier(tiering.SecondaryTierManager):
    """A tier that holds every key; its loads end on a separate thread once ``gate`` is open."""

    traits = TierTraits(announces_news=True)

    def __init__(self, context: tiering.TierContext) -> None:
        self.name = context.name
        self.context = context
        self.gate = threading.Event()
        self.steps = 0
        self.threads: list[threading.Thread] = []
        self._ended: list[tiering.JobResult] = []

    def lookup(self, key: bytes, req_context: tiering.ReqContext) -> bool | None:
        return True

    def submit_store(self, job: tiering.TransferJob) -> None:
        self._ended.append(tiering.JobResult(job.job_id, False))

    def submit_load(self, job: tiering.TransferJob) -> None:
        self.threads.append(threading.Thread(target=self._load, args=(job,)))
        self.threads[-1].start()

    def _load(self, job: tiering.TransferJob) -> None:
        self.gate.wait()
        np.asarray(self.context.primary_view)[job.block_ids] = 7
        self._ended.append(tiering.JobResult(job.job_id, True))
        if self.traits.announces_news:
            self.context.news.announce()

    def get_finished(self) -> Iterable[tiering.JobResult]:
        ended, self._ended = self._ended, []
        return ended

    def on_schedule_end(self) -> None:
        self.steps += 1

    def shutdown(self, deadline: float) -> bool:
        self.gate.set()
        for thread in self.threads:
            thread.join()
        return True


class SilentTier(GatedTier):
    """A tier that does not announce ended jobs, like a tier without support for news."""

    traits = TierTraits()


def _definition(kind: type[GatedTier]) -> TierDefinition:
    return TierDefinition(TierOptions, lambda options, context: kind(context), persistent=False)


GATED, SILENT = _definition(GatedTier), _definition(SilentTier)


def opened(*sections: dict[str, object]) -> tiering.TieringOffloadingManager:
    return tiering.open_manager(
        tiering.load_stack({"primary": {"capacity": "1MiB"}, "secondary": list(sections)}), BLOCK, MODEL
    )


def gated(kind: str = "GATED") -> tuple[tiering.TieringOffloadingManager, GatedTier]:
    manager = opened({"type": f"tests.manager.test_waiting:{kind}", "name": "gated"})
    (tier,) = manager.secondary_tiers
    assert type(tier).__name__ == f"{kind.title()}Tier"
    return manager, tier  # type: ignore[return-value]


def begin(manager: tiering.TieringOffloadingManager, req_id: str = "r1") -> tiering.ReqContext:
    ctx = tiering.ReqContext(req_id)
    manager.on_new_request(ctx)
    return ctx


def store(manager: tiering.TieringOffloadingManager) -> None:
    ctx = begin(manager, "store")
    out = manager.prepare_store(KEYS, ctx)
    assert out is not None
    np.asarray(manager.primary_tier.get_kv_memoryview())[out.store_spec.block_ids, :BLOCK] = 7
    manager.complete_store(KEYS, ctx)
    manager.on_request_finished(ctx)


@pytest.fixture
def only_news_wakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "LONGEST_SLEEP", FOREVER)


@pytest.mark.usefixtures("only_news_wakes")
class TestNewsWakes:
    def test_a_promotion_is_waited_for_in_a_few_steps(self) -> None:
        manager, tier = gated()
        with manager:
            tier.gate.set()
            ctx = begin(manager)
            assert tiering.wait_for_prefix(manager, KEYS, ctx, timeout=FOREVER) == (4, False)
            assert len(manager.prepare_load(KEYS, ctx)) == 4
            assert tier.steps <= 4
            manager.complete_load(KEYS, ctx)

    @pytest.mark.parametrize("kind", ["memory", "local"])
    def test_the_tiers_that_come_with_the_project_announce(self, kind: str, tmp_path: Path) -> None:
        place: dict[str, object] = {"path": str(tmp_path), "segment_size": "64KiB"} if kind == "local" else {}
        with opened({"type": kind, "capacity": "1MiB", **place}) as manager:
            store(manager)
            assert tiering.wait_until_idle(manager, timeout=FOREVER)
            manager.primary_tier.reset_cache()
            assert tiering.wait_for_prefix(manager, KEYS, begin(manager), timeout=FOREVER) == (4, False)

    def test_what_can_be_answered_at_once_is(self) -> None:
        with opened() as manager:
            store(manager)
            ctx = begin(manager)
            assert tiering.wait_for_prefix(manager, KEYS, ctx) == (4, False)
            assert tiering.wait_for_prefix(manager, [b"unknown!", *KEYS], ctx) == (0, False)
            assert tiering.wait_until_idle(manager)

    def test_many_requests_wait_at_once_while_the_event_loop_goes_on(self) -> None:
        manager, tier = gated()

        async def open_the_gate() -> None:
            while not tier.threads:
                await asyncio.sleep(0)
            tier.gate.set()  # only a loop that is not blocked gets here

        async def ask() -> list[tiering.PrefixMatch]:
            contexts = [begin(manager, f"r{number}") for number in range(8)]
            waits = [tiering.wait_for_prefix_async(manager, KEYS, ctx, timeout=FOREVER) for ctx in contexts]
            matches, _ = await asyncio.gather(asyncio.gather(*waits), open_the_gate())
            assert await tiering.wait_until_idle_async(manager, timeout=FOREVER)
            return matches

        with manager:
            assert asyncio.run(ask()) == [(4, False)] * 8


def test_a_tier_that_announces_nothing_is_asked_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "LONGEST_SLEEP", FOREVER)
    manager, tier = gated("SILENT")
    with manager:
        tier.gate.set()
        assert tiering.wait_for_prefix(manager, KEYS, begin(manager), timeout=FOREVER) == (4, False)


def test_a_wait_ends_with_its_time_and_says_that_the_answer_is_open() -> None:
    manager, _ = gated()
    with manager:
        ctx = begin(manager)
        assert tiering.wait_for_prefix(manager, KEYS, ctx, timeout=0.001) == (4, True)
        assert tiering.wait_for_prefix(manager, KEYS, ctx, timeout=0) == (4, True)
        assert not tiering.wait_until_idle(manager, timeout=0.001)
        assert asyncio.run(tiering.wait_for_prefix_async(manager, KEYS, ctx, timeout=0.001)) == (4, True)
        assert not asyncio.run(tiering.wait_until_idle_async(manager, timeout=0.001))


@pytest.mark.parametrize("pieces", [1, 5])
def test_a_wait_does_not_spin(pieces: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test counts steps instead of time; each sleep lasts the rest of the wait divided by ``pieces``."""
    monkeypatch.setattr(waiting, "LONGEST_SLEEP", 0.05 / pieces)
    manager, tier = gated()
    with manager:
        tiering.wait_for_prefix(manager, KEYS, begin(manager), timeout=0.05)
        assert tier.steps <= pieces + 3, "one of them when it was opened"


# ----------------------------------------------------------------------------------------------------------- one thread


def on_another_thread(call: Callable[[], object]) -> BaseException | None:
    """Return the exception of ``call`` on another thread, which has ended by then."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="second")
    thread.start()
    thread.join()
    return raised[0] if raised else None


CTX = tiering.ReqContext("r1")


@pytest.mark.parametrize(
    "call",
    [
        lambda manager: manager.on_new_request(CTX),
        lambda manager: manager.lookup(KEYS[0], CTX),
        lambda manager: manager.match_prefix(KEYS, CTX),
        lambda manager: manager.prepare_load(KEYS, CTX),
        lambda manager: manager.prepare_store(KEYS, CTX),
        lambda manager: manager.complete_load(KEYS, CTX),
        lambda manager: manager.complete_store(KEYS, CTX),
        lambda manager: manager.touch(KEYS, CTX),
        lambda manager: manager.on_request_finished(CTX),
        lambda manager: manager.take_events(),
        lambda manager: manager.has_pending_work(),
        lambda manager: manager.shutdown(),
        lambda manager: manager.on_schedule_end(),
        lambda manager: manager.reset_cache(),
        lambda manager: manager.hand_over(),
        lambda manager: tiering.wait_for_prefix(manager, KEYS, CTX),
    ],
)
def test_a_second_thread_is_told_what_to_do_and_changes_nothing(
    call: Callable[[tiering.TieringOffloadingManager], object],
) -> None:
    with opened() as manager:
        store(manager)
        before = manager.get_stats()
        error = on_another_thread(lambda: call(manager))
        assert isinstance(error, tiering.WrongThreadError)
        assert "belongs to thread 'MainThread', which used it first, and was called by thread 'second'" in str(error)
        assert "call hand_over() in the first one" in str(error)
        assert manager.get_stats() == before
        assert manager.match_prefix(KEYS, CTX) == (4, False)


def test_a_manager_may_be_opened_in_one_thread_and_used_in_another() -> None:
    with opened() as manager:
        assert on_another_thread(lambda: store(manager)) is None
        # The thread that owned the manager has ended, so the next one takes over.
        assert manager.match_prefix(KEYS, CTX) == (4, False)


def test_a_manager_is_handed_over() -> None:
    with opened() as manager:
        store(manager)
        manager.hand_over()
        assert on_another_thread(manager.on_schedule_end) is None
        manager.on_schedule_end()


def test_the_check_can_be_turned_off_where_the_caller_sees_to_it() -> None:
    stack = tiering.load_stack({"primary": {"capacity": "1MiB"}})
    with tiering.open_manager(stack, BLOCK, MODEL, one_thread=False) as manager:
        store(manager)
        assert on_another_thread(manager.on_schedule_end) is None
        manager.on_schedule_end()
