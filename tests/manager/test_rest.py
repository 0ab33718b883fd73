"""Steps in which nothing happens call no tier, if all tiers rest."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, settings

from tests.manager.test_state_machine import ManagerMachine, WritingTier
from tests.manager_rig import ManagerRig
from tiering.api.keys import OffloadKey
from tiering.api.manager import PrepareStoreOutput
from tiering.manager.rest import LONGEST_REST
from tiering.runtime.news import News
from tiering.secondary.contract import JobResult, StepEnd, TransferJob
from tiering.testing.fake_tier import FakeTier
from tiering.testing.keys import keys_of

K = keys_of(*range(8))


def rig_of(*tiers: FakeTier, **options: float) -> ManagerRig:
    """Return a manager that has ended a step."""
    rig = ManagerRig(8, tiers, **options)
    rig.step()
    return rig


def ends(tier: FakeTier) -> int:
    """Return the number of steps that the tier was called in."""
    return len(tier.calls("on_schedule_end"))


def steps(rig: ManagerRig, count: int = 5) -> None:
    for _ in range(count):
        rig.manager.on_schedule_end()


def test_a_tier_is_called_in_every_step_unless_it_rests() -> None:
    rig = rig_of(tier := FakeTier())
    before = ends(tier)
    steps(rig)
    assert ends(tier) == before + 5


def test_a_tier_that_rests_is_not_called_while_nothing_happens() -> None:
    rig = rig_of(tier := FakeTier(resting=math.inf))
    before = ends(tier)
    steps(rig)
    assert ends(tier) == before


def test_all_tiers_are_called_if_one_of_them_does_not_rest() -> None:
    rig = rig_of(first := FakeTier("first", resting=math.inf), FakeTier("second"))
    before = ends(first)
    steps(rig)
    assert ends(first) == before + 5


def test_an_announcement_ends_the_rest() -> None:
    rig = rig_of(tier := FakeTier(resting=math.inf))
    rig.store(K[:2])
    rig.manager.news.announce()
    steps(rig)
    assert rig.stat("jobs_in_flight") == 0
    before = ends(tier)
    rig.manager.news.announce()
    steps(rig)
    assert ends(tier) == before + 1


class LateTier(FakeTier):
    """A tier that announces the end of a job just after its results were collected."""

    news: News

    def get_finished(self) -> Iterable[JobResult]:
        results = super().get_finished()
        for job in self.stores:
            self.finish(job)
            self.news.announce()
        return results


def test_an_announcement_after_the_collection_of_a_step_ends_the_rest_with_the_next_step() -> None:
    rig = rig_of(tier := LateTier(resting=math.inf))
    tier.news = rig.manager.news
    output = rig.manager.prepare_store(K[:2], rig.ctx)
    assert output is not None
    rig.manager.complete_store(output.keys_to_store, rig.ctx)
    rig.manager.on_schedule_end()
    assert rig.stat("jobs_in_flight") == 1
    rig.manager.on_schedule_end()
    assert rig.stat("jobs_in_flight") == 0


class HastyTier(FakeTier):
    """A tier that ends every store at once, and therefore does not announce it."""

    def submit_store(self, job: TransferJob) -> None:
        super().submit_store(job)
        self.finish(job)

    def on_schedule_end(self) -> StepEnd:
        return super().on_schedule_end()._replace(rest=0.0 if self.results else math.inf)


def test_a_job_that_the_end_of_a_step_has_submitted_is_collected_in_the_next_step() -> None:
    rig = rig_of(tier := HastyTier())
    rig.store(K[:2])
    steps(rig)
    tier.wanted = K[:2]
    rig.clock.advance(LONGEST_REST)
    rig.manager.on_schedule_end()
    assert rig.stat("jobs_in_flight") == 1
    rig.manager.on_schedule_end()
    assert rig.stat("jobs_in_flight") == 0


@pytest.mark.parametrize(("offered", "taken"), [(math.inf, LONGEST_REST), (LONGEST_REST / 4, LONGEST_REST / 4)])
def test_a_rest_ends_with_its_time(offered: float, taken: float) -> None:
    rig = rig_of(FakeTier("first", resting=math.inf), tier := FakeTier(resting=offered))
    before = ends(tier)
    rig.clock.advance(taken * 0.9)
    steps(rig)
    assert ends(tier) == before
    rig.clock.advance(taken * 0.2)
    steps(rig)
    assert ends(tier) == before + 1


def _prepare_store(rig: ManagerRig) -> PrepareStoreOutput:
    output = rig.manager.prepare_store(K[4:5], rig.ctx)
    assert output is not None
    return output


USES: dict[str, Callable[[ManagerRig], object]] = {
    "lookup": lambda rig: rig.manager.lookup(K[7], rig.ctx),
    "match_prefix": lambda rig: rig.manager.match_prefix(K[:2], rig.ctx),
    "prepare_load": lambda rig: rig.manager.prepare_load(K[:1], rig.ctx),
    "complete_load": lambda rig: rig.manager.complete_load(K[1:2], rig.ctx),
    "touch": lambda rig: rig.manager.touch(K[:2], rig.ctx),
    "prepare_store": _prepare_store,
    "complete_store": lambda rig: rig.manager.complete_store(K[2:3], rig.ctx),
    "on_new_request": lambda rig: rig.request("r2"),
    "on_request_finished": lambda rig: rig.manager.on_request_finished(rig.ctx),
    "open_tier": lambda rig: rig.manager.open_tier(0, 0.0),
    "reset_cache": lambda rig: rig.manager.reset_cache(),
}


@pytest.mark.parametrize("use", USES)
def test_every_use_of_the_manager_ends_the_rest(use: str) -> None:
    rig = rig_of(tier := FakeTier(resting=math.inf))
    rig.store(K[:2])
    rig.manager.prepare_load(K[1:2], rig.ctx)
    rig.manager.prepare_store(K[2:3], rig.ctx)
    steps(rig)
    before = ends(tier)
    USES[use](rig)
    assert ends(tier) == before + (use == "open_tier"), "a tier that has been opened is asked for its state"
    before = ends(tier)
    steps(rig)
    assert ends(tier) == before + 1


def test_questions_do_not_end_the_rest() -> None:
    rig = rig_of(tier := FakeTier(resting=math.inf))
    before = ends(tier)
    rig.manager.has_pending_work()
    rig.manager.take_events()
    rig.manager.get_stats()
    rig.manager.still_pending(rig.ctx)
    steps(rig)
    assert ends(tier) == before


def test_a_tier_that_has_not_confirmed_a_reset_is_asked_in_every_step() -> None:
    rig = rig_of(tier := FakeTier(resting=math.inf, resets=False))
    rig.manager.reset_cache()
    steps(rig)
    tier.reset_later = True
    rig.manager.on_schedule_end()
    assert rig.stat("tiers_out_of_service") == 0
    assert tier.calls("on_schedule_end")
    assert rig.manager.match_prefix(K[:1], rig.request("r2")).pending is False
    assert tier.asked == K[:1]


def test_a_reservation_ends_at_its_time() -> None:
    tier = FakeTier(resting=math.inf, held=set(K[:1]))
    rig = rig_of(tier, reservation_deadline=LONGEST_REST / 4)
    rig.manager.match_prefix(K[:1], rig.ctx)
    rig.manager.on_schedule_end()
    tier.finish_all()
    rig.manager.news.announce()
    rig.manager.on_schedule_end()
    assert rig.stat("rows_reserved") == 1
    rig.clock.advance(LONGEST_REST / 4)
    rig.manager.on_schedule_end()
    assert rig.stat("rows_reserved") == 0


def test_a_wrong_answer_takes_the_tier_out_of_service() -> None:
    rig = rig_of(FakeTier(resting=-1.0))
    assert rig.stat("tiers_out_of_service") == 1


class RestingTier(WritingTier):
    """A tier of the state machine that announces everything, and rests otherwise."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.traits = replace(self.traits, announces_news=True)

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if name == "wanted" and hasattr(self, "news"):
            self.news.announce()

    def finish(self, job: TransferJob, success: bool = True, keys: Sequence[OffloadKey] | None = None) -> None:
        super().finish(job, success, keys)
        self.news.announce()

    def rest(self) -> float:
        return 0.0 if self.results or self.wanted else math.inf


class RestingMachine(ManagerMachine):
    """The state machine of the manager with tiers that rest."""

    first_tier = second_tier = RestingTier


TestRestingTiers = RestingMachine.TestCase
TestRestingTiers.settings = settings(
    max_examples=100, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
