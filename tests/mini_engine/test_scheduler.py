"""The scheduler's decisions and its connector calls; a scripted connector stands in for the real one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from examples.mini_engine import Engine, Request
from examples.mini_engine.kv_cache import KVCacheManager
from examples.mini_engine.request import Status
from examples.mini_engine.scheduler import ConnectorOutput, Scheduler, SchedulerOutput
from tests.mini_engine.helpers import options, prompt, reference, result

DONE = (1, 1, 0.0)


@dataclass
class ScriptedConnector:
    """A connector that offers ``offers`` tokens, one entry per query, and records every call."""

    offers: list[int | None] = field(default_factory=list)
    calls: list[tuple[Any, ...]] = field(default_factory=list)
    delay: bool = False

    def on_new_request(self, request: Request) -> None:
        self.calls.append(("new", request.request_id))

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        offer = self.offers.pop(0) if self.offers else 0
        self.calls.append(("match", request.request_id, num_computed_tokens, offer))
        return offer, bool(offer)

    def update_state_after_alloc(self, request: Request, blocks: Any, num_external_tokens: int) -> None:
        self.calls.append(("alloc", request.request_id, len(blocks.get_block_ids()[0]), num_external_tokens))

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> None:
        self.calls.append(("meta", dict(scheduler_output.num_scheduled_tokens)))

    def update_connector_output(self, connector_output: ConnectorOutput) -> None:
        self.calls.append(("output",))

    def request_finished_all_groups(self, request: Request, block_ids: tuple[list[int], ...]) -> tuple[bool, None]:
        self.calls.append(("finished", request.request_id))
        return self.delay, None

    def has_pending_work(self) -> bool:
        return False

    def reset_cache(self) -> bool:
        self.calls.append(("reset",))
        return True


def scheduler(connector: ScriptedConnector, num_blocks: int = 32) -> Scheduler:
    return Scheduler(KVCacheManager(num_blocks, 8, (None,)), connector, max_batch_tokens=32)


def test_calls_come_in_the_order_of_vllm() -> None:
    connector = ScriptedConnector([None, 16])
    subject = scheduler(connector)
    request = Request("a", prompt(1, 30), 1)
    subject.add(request)
    subject.update(subject.schedule(), {}, ConnectorOutput())
    subject.update(subject.schedule(), {}, ConnectorOutput())
    assert request.status is Status.LOADING
    subject.update(subject.schedule(), {}, ConnectorOutput(finished_recving={"a"}))
    output = subject.schedule()
    assert subject.update(output, {"a": DONE}, ConnectorOutput()) == [request]
    assert connector.calls == [
        ("new", "a"),
        *[("match", "a", 0, None), ("meta", {}), ("output",)],
        *[("match", "a", 0, 16), ("alloc", "a", 2, 16), ("meta", {}), ("output",)],
        *[("meta", {}), ("output",)],
        *[("alloc", "a", 4, 0), ("meta", {"a": 14}), ("finished", "a"), ("output",)],
    ]
    assert request.loaded_tokens == 16


def test_others_run_while_a_request_loads() -> None:
    subject = scheduler(ScriptedConnector([16, 0]))
    subject.add(Request("loading", prompt(1, 30)))
    subject.add(Request("computing", prompt(2, 30)))
    assert subject.schedule().num_scheduled_tokens == {"computing": 30}


def test_a_prompt_loaded_in_full_computes_its_last_token() -> None:
    subject = scheduler(ScriptedConnector([32]))
    subject.add(Request("a", prompt(1, 32)))
    subject.update(subject.schedule(), {}, ConnectorOutput(finished_recving={"a"}))
    assert subject.schedule().num_scheduled_tokens == {"a": 1}


def test_blocks_that_did_not_arrive_are_computed_with_what_follows_them() -> None:
    connector = ScriptedConnector([24])
    subject = scheduler(connector)
    request = Request("a", prompt(1, 30))
    subject.add(request)
    output = subject.schedule()
    broken = subject.kv.blocks_of(request).get_block_ids()[0][1]
    subject.update(output, {}, ConnectorOutput(finished_recving={"a"}, invalid_block_ids={broken}))
    assert subject.schedule().num_scheduled_tokens == {"a": 22}
    assert request.loaded_tokens == 8


def test_a_request_whose_load_failed_is_not_offered_another() -> None:
    connector = ScriptedConnector([24, 24])
    subject = scheduler(connector)
    request = Request("a", prompt(1, 30))
    subject.add(request)
    output = subject.schedule()
    everything = set(subject.kv.blocks_of(request).get_block_ids()[0])
    subject.update(output, {}, ConnectorOutput(finished_recving={"a"}, invalid_block_ids=everything))
    assert subject.schedule().num_scheduled_tokens == {"a": 30}
    assert connector.offers == [24]


def test_blocks_of_a_request_aborted_while_loading_are_kept_until_the_load_ends() -> None:
    subject = scheduler(ScriptedConnector([24]))
    subject.add(Request("a", prompt(1, 30)))
    output = subject.schedule()
    subject.abort("a")
    subject.update(output, {}, ConnectorOutput())
    assert len(subject.kv.pool.free) == 31 - 3
    assert subject.has_work()
    subject.update(subject.schedule(), {}, ConnectorOutput(finished_recving={"a"}))
    assert len(subject.kv.pool.free) == 31
    assert not subject.has_work()


def test_blocks_that_the_connector_still_reads_are_freed_when_it_says_so() -> None:
    subject = scheduler(ScriptedConnector(delay=True))
    subject.add(Request("a", prompt(1, 30), 1))
    subject.update(subject.schedule(), {"a": DONE}, ConnectorOutput())
    assert len(subject.kv.pool.free) == 31 - 4
    subject.update(subject.schedule(), {}, ConnectorOutput(finished_sending={"a"}))
    assert len(subject.kv.pool.free) == 31


def test_what_was_loading_during_a_reset_is_not_used() -> None:
    connector = ScriptedConnector([24])
    subject = scheduler(connector)
    subject.add(Request("a", prompt(1, 30)))
    output = subject.schedule()
    assert subject.reset()
    subject.update(output, {}, ConnectorOutput(finished_recving={"a"}))
    assert subject.schedule().num_scheduled_tokens == {"a": 30}


def test_a_loaded_request_gives_its_blocks_back_rather_than_block_everybody() -> None:
    connector = ScriptedConnector([0, 24])
    subject = scheduler(connector, num_blocks=8)
    subject.max_batch_tokens = 40
    first, second = Request("first", prompt(1, 31), 17), Request("second", prompt(2, 31), 17)
    subject.add(first)
    subject.add(second)
    output = subject.schedule()
    assert second.status is Status.LOADING
    subject.update(output, {"first": DONE}, ConnectorOutput())
    subject.max_running = 1
    arrived = ConnectorOutput(finished_recving={"second"})
    for _ in range(60):
        output = subject.schedule()
        requests = (subject.requests[name] for name in output.num_scheduled_tokens)
        sampled = {
            request.request_id: DONE for request in requests if request.num_computed_tokens == request.num_tokens
        }
        subject.update(output, sampled, arrived)
        arrived = ConnectorOutput()
    assert (first.status, second.status) == (Status.FINISHED, Status.FINISHED)


def test_a_prompt_that_can_never_fit_is_refused() -> None:
    with Engine(options(num_blocks=8)) as engine, pytest.raises(ValueError, match="larger than the KV cache"):
        engine.add(Request("a", prompt(1, 64)))


def test_the_pool_forgets_the_least_recently_used_prefix_first() -> None:
    with Engine(options(num_blocks=18)) as engine:
        for name, seed in (("old", 1), ("used again", 2), ("used", 2), ("new", 3)):
            engine.run([Request(name, prompt(seed, 60), 1)])
        assert engine.run([Request("check", prompt(2, 60), 1)])["check"].gpu_hit_tokens > 0
        assert engine.run([Request("check", prompt(1, 60), 1)])["check"].gpu_hit_tokens == 0


def test_an_aborted_request_leaves_nothing_behind() -> None:
    with Engine(options()) as engine:
        engine.add(Request("a", prompt(1, 60), 20))
        engine.add(Request("b", prompt(2, 60), 20))
        for _ in range(4):
            engine.step()
        engine.abort("a")
        engine.abort("unknown")
        output = engine.run([Request("c", prompt(1, 60), 8)])["c"]
        assert engine.settle()
        assert len(engine.kv.pool.free) == 63
    assert result(output) == reference(prompt(1, 60))
