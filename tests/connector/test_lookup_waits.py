"""Lookups that begin when a request arrives, and the step that waits for their answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.connector.fakes import (
    FakeRequest,
    FakeSchedulerOutput,
    idle_step,
    ids,
    make_scheduler,
    prompt,
    run_prompt,
    start_load,
)
from tiering.testing.clock import FakeClock

PATIENCE = 5.0


class _Pool:
    """A block pool whose cache holds the blocks with ``cached`` hashes."""

    blocks: Sequence[Any] = ()

    def __init__(self) -> None:
        self.cached = set[bytes]()

    def get_cached_block(self, block_hash: bytes, groups: list[int]) -> object | None:
        assert groups == [0]
        return object() if block_hash in self.cached else None


class _Engine:
    """A scheduler half, one of whose lookups has been pending."""

    def __init__(self, *windows: int | None) -> None:
        self.clock, self.pool = FakeClock(), _Pool()
        self.half, self.manager = make_scheduler(*windows, clock=self.clock)
        self.half.bind_gpu_block_pool(self.pool)
        self.manager.wait_until = self._wait  # type: ignore[method-assign]
        self.waits: list[float] = []
        self.answers: list[FakeRequest] = []
        """Requests whose lookups end during the next waits, each after a second."""

    def open_one(self) -> None:
        """Let a lookup be pending once, whose request then ends."""
        request = FakeRequest("first", list(range(900, 932)))
        self.undecided(request)
        assert self.ask(request) is None
        self.half.request_finished(request, [])
        idle_step(self.half)
        self.manager.looked_at.clear()
        self.waits.clear()

    def undecided(self, *requests: FakeRequest) -> None:
        self.manager.undecided |= {request.key(0) for request in requests}

    def ask(self, request: FakeRequest, computed: int = 0) -> int | None:
        """Ask about a request as vLLM's side does."""
        answer = self.half.get_num_new_matched_tokens(request, computed)
        if answer[0] is None:
            answer = self.half.await_answer(request, computed, PATIENCE)
        return answer[0]

    def _wait(self, answered: Callable[[], bool], seconds: float) -> None:
        self.waits.append(seconds)
        until = self.clock() + seconds
        while not answered() and self.clock() < until:
            self.clock.advance(1.0)
            if self.answers:
                self.manager.undecided.discard(self.answers.pop(0).key(0))


def others(name: str, first: int) -> FakeRequest:
    """Return a request of 32 tokens that count up from ``first``."""
    return FakeRequest(name, list(range(first, first + 32)))


def test_requests_of_an_idle_engine_are_looked_up_when_they_come_and_run_in_the_step_that_waits() -> None:
    engine = _Engine()
    engine.open_one()
    first, second = others("a", 100), others("b", 200)
    engine.undecided(first, second)
    for request in (first, second):
        engine.half.on_new_request(request)
    assert engine.manager.looked_at == [first.keys(), second.keys()]
    engine.answers = [first, second]
    assert [engine.ask(first), engine.ask(second)] == [0, 0]
    assert engine.waits == [PATIENCE, PATIENCE - 1.0], "the requests of a step share its patience"


def test_nothing_is_looked_up_early_before_a_lookup_was_pending() -> None:
    engine = _Engine()
    request = others("a", 100)
    engine.undecided(request)
    engine.half.on_new_request(request)
    assert engine.manager.looked_at == []
    assert engine.ask(request) is None
    assert engine.waits == []


def test_lookups_that_are_answered_at_once_begin_no_earlier() -> None:
    engine = _Engine()
    engine.open_one()
    for name, first in (("a", 100), ("b", 200)):
        engine.half.on_new_request(others(name, first))
    assert len(engine.manager.looked_at) == 1


def test_a_request_whose_first_block_the_engine_has_is_not_looked_up_early() -> None:
    engine = _Engine()
    engine.open_one()
    request = others("a", 100)
    engine.pool.cached = {request.block_hashes[0]}
    engine.half.on_new_request(request)
    assert engine.manager.looked_at == []


def test_a_request_that_may_not_load_is_not_looked_up_early() -> None:
    engine = _Engine()
    engine.open_one()
    words = {"kv_tiering": {"load": False}}
    engine.half.on_new_request(FakeRequest("a", list(range(100, 132)), kv_transfer_params=words))
    assert engine.manager.looked_at == []


def test_an_engine_that_runs_a_request_looks_nothing_up_early_and_does_not_wait() -> None:
    engine = _Engine()
    engine.open_one()
    run_prompt(engine.half, prompt(32), ids(8))
    request = others("a", 100)
    engine.undecided(request)
    engine.manager.looked_at.clear()
    engine.half.on_new_request(request)
    assert engine.manager.looked_at == []
    assert engine.ask(request) is None
    assert engine.waits == []


def test_a_step_does_not_wait_while_a_request_that_came_can_run() -> None:
    engine = _Engine()
    engine.open_one()
    request, ready = others("a", 100), others("b", 200)
    engine.undecided(request)
    engine.half.on_new_request(request)
    engine.half.on_new_request(ready)  # its lookup is answered at once
    assert engine.ask(request) is None
    assert engine.waits == []


def test_a_step_does_not_wait_while_copies_run() -> None:
    engine = _Engine()
    engine.open_one()
    held, request = prompt(32), others("a", 100)
    engine.undecided(request)
    engine.half.on_new_request(request)
    engine.manager.hold(held.keys())
    start_load(engine.half, held, ids(8))
    assert engine.ask(request) is None
    assert engine.waits == []


def test_an_answer_that_does_not_come_costs_a_step_its_patience_once() -> None:
    engine = _Engine()
    engine.open_one()
    first, second = others("a", 100), others("b", 200)
    engine.undecided(first, second)
    for request in (first, second):
        engine.half.on_new_request(request)
    assert [engine.ask(first), engine.ask(second)] == [None, None]
    idle_step(engine.half)
    engine.half.await_answers(PATIENCE)
    assert engine.waits == [PATIENCE], "neither the second question nor the end of the step waits again"
    engine.answers = [first, second]
    assert [engine.ask(first), engine.ask(second)] == [0, 0]
    assert engine.waits[1:] == [PATIENCE, PATIENCE - 1.0], "the next step waits anew"


def test_the_end_of_a_step_waits_for_what_the_schedule_has_left() -> None:
    engine = _Engine()
    engine.open_one()
    first, second = others("a", 100), others("b", 200)
    engine.undecided(first, second)
    engine.half.on_new_request(first)
    engine.answers = [first]
    assert engine.ask(first) == 0
    assert engine.ask(second) is None, "it was not looked up when it came"
    engine.half.build_connector_meta(FakeSchedulerOutput())
    engine.half.await_answers(PATIENCE)
    assert engine.waits == [PATIENCE, PATIENCE - 1.0]


@pytest.mark.parametrize("windows", [(None, 8), (8,)])
def test_windows_are_not_looked_up_early(windows: tuple[int | None, ...]) -> None:
    engine = _Engine(*windows)
    engine.open_one()
    engine.half.on_new_request(others("a", 100))
    assert engine.manager.looked_at == []


def test_results_of_the_tiers_are_taken_while_the_step_waits() -> None:
    engine = _Engine()
    engine.open_one()
    request = others("a", 100)
    engine.undecided(request)
    engine.half.on_new_request(request)
    steps = engine.manager.steps
    engine.answers = [request]
    assert engine.ask(request) == 0
    assert engine.manager.steps == steps + 2, "one before each look"
