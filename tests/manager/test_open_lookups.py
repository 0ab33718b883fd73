"""Pending lookups are repeated only if their answer may have changed."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest

from tiering.api.request import ReqContext
from tiering.manager.manager import TieringOffloadingManager
from tiering.manager.open_lookups import LOOK_AGAIN
from tiering.primary.manager import CPUPrimaryTierOffloadingManager
from tiering.runtime.news import News
from tiering.testing.fake_tier import FakeTier
from tiering.testing.keys import keys_of

KEYS = keys_of(0, 1, 2, 3)
CTX = ReqContext("r1")


class Rig:
    """A manager with a pending lookup of :data:`KEYS`, about which its tier has not decided."""

    def __init__(self, announces: bool = True) -> None:
        self.now = 0.0
        self.news = News()
        self.tier = FakeTier(unknown=set(KEYS))
        self.tier.traits = replace(self.tier.traits, announces_news=announces)
        rows = CPUPrimaryTierOffloadingManager(np.zeros((8, 16), np.uint8).data)
        self.manager = TieringOffloadingManager(rows, [self.tier], news=self.news, clock=lambda: self.now)
        self.manager.on_new_request(CTX)
        self.ask()

    def ask(self) -> bool:
        """Look the keys up, and return True if the answer is pending."""
        pending = self.manager.match_prefix(KEYS, CTX).pending
        self.manager.on_schedule_end()
        return pending

    @property
    def still_pending(self) -> bool:
        return self.manager.still_pending(CTX)


def test_nothing_that_happens_leaves_a_lookup_pending() -> None:
    rig = Rig()
    assert rig.still_pending
    rig.manager.on_schedule_end()
    assert rig.still_pending


def test_the_end_of_a_task_may_decide_the_lookup() -> None:
    rig = Rig()
    rig.news.announce()
    assert not rig.still_pending
    assert rig.ask()
    assert rig.still_pending


def test_an_end_after_the_results_of_the_step_were_collected_counts_at_the_next_step() -> None:
    rig = Rig()
    rig.manager.match_prefix(KEYS, CTX)
    rig.news.announce()
    rig.manager.match_prefix(KEYS, CTX)
    assert not rig.still_pending
    rig.manager.on_schedule_end()
    assert rig.ask()
    assert rig.still_pending


def test_the_end_of_a_store_may_decide_the_lookup() -> None:
    rig = Rig()
    other = ReqContext("r2")
    rig.manager.on_new_request(other)
    output = rig.manager.prepare_store(KEYS, other)
    assert output is not None
    rig.ask()
    assert rig.still_pending
    rig.manager.complete_store(output.keys_to_store, other)
    assert not rig.still_pending
    assert not rig.ask()


def test_time_alone_may_decide_the_lookup() -> None:
    rig = Rig()
    rig.now += LOOK_AGAIN
    assert not rig.still_pending


def test_a_tier_that_announces_nothing_is_asked_each_time() -> None:
    assert not Rig(announces=False).still_pending


def test_a_wait_ends_with_the_answer() -> None:
    rig = Rig()
    asked: list[bool] = []

    def answered() -> bool:
        asked.append(not rig.ask())
        if len(asked) == 1:  # the tier decides after the look, and before the sleep
            rig.tier.unknown.clear()
            threading.Thread(target=rig.news.announce).start()
        return asked[-1]

    rig.manager.wait_until(answered, 60.0)
    assert asked == [False, True]


def test_a_wait_without_an_answer_has_an_end() -> None:
    rig = Rig()
    looks: list[bool] = []

    def answered() -> bool:
        looks.append(not rig.ask())
        return looks[-1]

    rig.manager.wait_until(answered, 1e-3)
    assert looks
    assert not any(looks)
    rig.manager.wait_until(lambda: True, 60.0)


def test_a_decided_lookup_is_not_pending() -> None:
    rig = Rig()
    rig.tier.unknown.clear()
    rig.news.announce()
    assert not rig.ask()
    assert not rig.still_pending


@pytest.mark.parametrize("again", [False, True])
def test_a_request_that_has_ended_leaves_no_lookup(again: bool) -> None:
    rig = Rig()
    if again:
        rig.manager.on_new_request(CTX)
    else:
        rig.manager.on_request_finished(CTX)
    assert not rig.still_pending
