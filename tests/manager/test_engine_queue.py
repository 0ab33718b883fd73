"""Delays of other requests if one computes its blocks."""

from __future__ import annotations

import math

import pytest

from tiering.api.request import ReqContext
from tiering.api.request_policy import DEFAULT_REQUEST_POLICY
from tiering.manager.engine_queue import MOST, NO_DELAYS, EngineQueue
from tiering.manager.load_gate import LoadGate
from tiering.manager.requests import Request

REST = 0.1


def request(name: str, load_by: float = 9.0) -> Request:
    return Request(ReqContext(name), DEFAULT_REQUEST_POLICY, [], [], load_by=load_by)


@pytest.fixture
def queue() -> EngineQueue:
    return EngineQueue()


def test_a_lone_request_delays_nobody(queue: EngineQueue) -> None:
    alone = request("alone")
    queue.loads(alone, LoadGate(), 0.5, 0)
    queue.computes(alone, 1.0)
    assert queue.delays(alone, 1.0, REST, 0.0) == NO_DELAYS
    assert not queue.has_other(alone)


def test_requests_of_one_step_are_computed_together(queue: EngineQueue) -> None:
    queue.computes(request("a"), 1.0)
    queue.computes(request("b"), 2.0)
    assert queue.delays(request("c"), 0.5, REST, 0.0) == (3.0, 2 * 0.5)
    queue.end_step()
    assert queue.delays(request("c"), 0.5, REST, 0.0) == NO_DELAYS


def test_requests_that_begin_in_a_step_wait_for_all_that_it_computes(queue: EngineQueue) -> None:
    """Two have loaded their blocks."""
    computes = request("computes")
    for one in (request("a"), request("b"), computes):
        queue.begins(one)
    queue.computes(computes, 1.0)
    assert queue.delays(request("c"), 0.5, REST, 0.0) == (1.0, 3 * 0.5)


def test_loads_that_end_meanwhile_wait_for_the_computation_and_for_each_other(queue: EngineQueue) -> None:
    for name, end in (("late", 12.0), ("soon", 10.5), ("overdue", 9.0)):
        queue.loads(request(name, math.nan), LoadGate(), end, 0)
    assert queue.delays(request("c"), 1.0, REST, 10.0) == pytest.approx((0.0, 0.5 + 1.0 + 2 * REST))
    queue.computes(request("a"), 1.5)  # what ends before the step does waits for it anyway
    assert queue.delays(request("c"), 1.0, REST, 10.0) == pytest.approx((1.5, 1.0 + 2 * (1.0 + REST) + 0.5 + 2 * REST))


def test_a_delay_lasts_until_the_engine_is_idle(queue: EngineQueue) -> None:
    """Two rests begin at 1.0 instead of 0.5 and 0.9, and delay the third; the last finds a pause."""
    for name, end in (("a", 0.5), ("b", 0.9), ("c", 1.15), ("d", 5.0)):
        queue.loads(request(name), LoadGate(), end, 0)
    delays = queue.delays(request("computes"), 1.0, REST, 0.0)
    assert delays == pytest.approx((0.0, 0.6 + 0.2 + 0.05))


def test_requests_that_wait_no_more_lose_nothing(queue: EngineQueue) -> None:
    ended, gone, one = request("ended", math.inf), request("gone"), request("one")
    gone.finished = True
    for other in (ended, gone):
        queue.loads(other, LoadGate(), 0.1, 0)
    assert not queue.has_other(one)
    assert queue.delays(one, 1.0, REST, 0.0) == NO_DELAYS


def test_another_request_may_wait_for_another_tier(queue: EngineQueue) -> None:
    first, second = LoadGate(), LoadGate()
    queue.loads(request("a"), first, 1.0, 0)
    assert queue.has_other(request("b"))
    assert queue.has_other(request("b"), first)
    assert not queue.has_other(request("b"), second)


def test_a_decision_looks_at_a_bounded_number_of_requests(queue: EngineQueue) -> None:
    for number in range(10 * MOST):
        queue.loads(request(str(number)), LoadGate(), 0.0, 0)
    assert queue.delays(request("one"), 1.0, 0.0, 0.0) == (0.0, MOST)
