"""Engines start warm, and follow what leaves a tier, through the service as without it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.fake_s3 import FakeS3
from tests.machine.engines import SmallEngine, key_of
from tests.machine.hosts import service_in_thread
from tests.machine.test_coalescing import PATIENT, bucket, is_block
from tests.machine.test_turns import FakeEngine
from tiering import ReqContext
from tiering.api.engine import MissExplaining
from tiering.api.keys import OffloadKey
from tiering.api.manager import LOCAL, MEDIUM_STORAGE, OffloadingEvent
from tiering.block_tier.tier import BlockTier
from tiering.epochs.hot_keys import hot_document, pack
from tiering.explain.causes import MissCause
from tiering.explain.explainer import Explainer, Missed
from tiering.index.slots import SlotIndex
from tiering.machine.hosted_hints import HostedHints
from tiering.machine.messages import MAX_KEYS, Kind, Record
from tiering.machine.namespaces import TierBuilder
from tiering.machine.service import MachineService
from tiering.secondary.contract import TierContext, TierHotKeys
from tiering.secondary.hot_prefixes import PUBLISH_SECONDS
from tiering.testing.clock import FakeClock, until
from tiering.testing.fake_tier import FakeTier
from tiering.testing.keys import keys_of

WARM: dict[str, Any] = {"warm_start": {"seconds": 60}}
DISK = {"type": "local", "name": "local", "capacity": "8MiB"}


@pytest.fixture
def socket(tmp_path: Path) -> Path:
    return tmp_path / "cache.sock"


@contextmanager
def machine(
    socket: Path, *tiers: Mapping[str, Any], **more: TierBuilder
) -> Iterator[tuple[Callable[..., SmallEngine], MachineService]]:
    """Run a service, and yield a function that makes engines of it, which end before it does."""
    with service_in_thread(socket, *tiers, **more) as service, ExitStack() as undo:

        def make(*names: str, **words: Any) -> SmallEngine:
            made = SmallEngine(socket, names or ("local",), **words)
            undo.callback(made.close)
            assert made.serving()
            return made

        yield make, service


def serve(engine: SmallEngine, numbers: Sequence[int], **params: Any) -> None:
    """Use and store the blocks of a prompt, as a request does."""
    ctx = ReqContext(f"used{numbers[0]}", {"kv_tiering": params} if params else None)
    engine.manager.on_new_request(ctx)
    engine.manager.touch([key_of(number) for number in numbers], ctx)
    engine.store(numbers)
    engine.manager.on_request_finished(ctx)
    assert engine.stored()


def warmed(engine: SmallEngine) -> list[int]:
    """Return the numbers below 100 that a warm start has brought into the CPU tier."""
    assert engine.stored()
    return [number for number in range(100) if key_of(number) in engine.manager.primary_tier.readable]


def documents(tmp_path: Path) -> list[Path]:
    return list(tmp_path.rglob("hot-*"))


def one_engine(**words: Any) -> FakeEngine:
    return FakeEngine("one", 0, follows=True, **words)


class Hot(TierHotKeys):
    """Hot keys of a fake tier, which a test chooses."""

    def __init__(self, engines: Sequence[Sequence[Sequence[OffloadKey]]] = ()) -> None:
        self.published: list[Sequence[Sequence[OffloadKey]]] = []
        self._engines = engines

    def publish(self, chains: Sequence[Sequence[OffloadKey]]) -> None:
        self.published.append(chains)

    def gather(self) -> Sequence[Sequence[Sequence[OffloadKey]]]:
        return self._engines

    def tier(self, context: TierContext | None = None) -> FakeTier:
        made = FakeTier(name="hot")
        made.traits = replace(made.traits, hot_keys=self)
        return made


def test_a_release_has_an_effect_in_the_service_only_if_no_other_engine_is_connected(socket: Path) -> None:
    """An engine knows the users of a block among its own requests."""

    def marked(service: MachineService) -> list[bytes]:
        (space,) = service._namespaces.values()
        tier = space.tiers["local"].tier
        assert isinstance(tier, BlockTier)
        assert isinstance(tier.index, SlotIndex)
        table = tier.index._table
        if table.marks.released is None:
            return []
        return [key for key, row in table.readable.items() if table.marks.released.are_marked(np.array([row]))[0]]

    def release(engine: SmallEngine, number: int) -> None:
        ctx = ReqContext(f"over{number}")
        engine.manager.on_new_request(ctx)
        engine.manager.on_request_finished(ctx, [key_of(number)])
        serve(engine, range(40 + 4 * number, 44 + 4 * number))  # the service has read all messages before

    with machine(socket, {"type": "memory", "name": "local", "capacity": "8MiB"}) as (engine, service):
        one = engine()
        serve(one, range(4))
        release(one, 3)
        assert until(lambda: marked(service) == [key_of(3)])
        other = engine()
        serve(other, range(8, 12))
        release(one, 2)
        release(other, 8)
        assert marked(service) == [key_of(3)]


# ---------------------------------------------------------------------------------------------------------- warm starts


def test_an_engine_starts_warm_from_what_all_engines_of_the_service_used(tmp_path: Path, socket: Path) -> None:
    """The service publishes at its end too, and serves a document that an earlier service has left."""
    disk = {**DISK, "path": str(tmp_path / "disk")}
    with machine(socket, disk) as (engine, _):
        one, other = engine(**WARM), engine(**WARM)
        serve(one, range(4))
        serve(other, range(4, 8))
        cold = engine()
        assert warmed(cold) == []
    assert len(documents(tmp_path)) == 1
    with machine(socket, disk) as (engine, _):
        late = engine(**WARM)
        assert warmed(late) == list(range(8))
        assert late.load(range(8)) == (list(range(8)), [])
        assert late.manager.get_stats()["manager"]["warm_start_blocks"] == 8


def test_an_engine_starts_warm_from_memory_of_a_service_that_runs_on(
    socket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiering.secondary.hot_prefixes.PUBLISH_SECONDS", 0.0)
    with machine(socket, {"type": "memory", "name": "local", "capacity": "8MiB"}) as (engine, service):
        serve(engine(**WARM), range(8))
        (space,) = service._namespaces.values()
        assert until(lambda: space.tiers["local"].stats.hot_keys_written > 0)
        late = engine(**WARM)
        assert warmed(late) == list(range(8))
        assert late.load(range(8)) == (list(range(8)), [])


def test_engines_without_the_word_and_requests_that_keep_their_blocks_publish_nothing(
    tmp_path: Path, socket: Path
) -> None:
    with machine(socket, {**DISK, "path": str(tmp_path / "disk")}) as (engine, _):
        serve(engine(), range(4))
        serve(engine(**WARM), range(4, 8), tiers=["local"])
    assert documents(tmp_path) == []


def test_after_a_reset_nothing_is_left_to_start_from(tmp_path: Path, socket: Path) -> None:
    with machine(socket, {**DISK, "path": str(tmp_path / "disk")}) as (engine, _):
        one = engine(revision="1", **WARM)
        serve(one, range(4))
        one.manager.reset_cache("2")
        assert one.serving()
        assert warmed(engine(revision="2", **WARM)) == []


def test_long_prompts_are_loaded_from_their_head(tmp_path: Path, socket: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefix of more keys than a record has comes in parts."""
    monkeypatch.setattr("tiering.machine.engine_hints.MAX_KEYS", 4)
    disk = {**DISK, "path": str(tmp_path / "disk")}
    with machine(socket, disk) as (engine, _):
        serve(engine(**WARM), range(12))
    with machine(socket, disk) as (engine, _):
        few = {"warm_start": {"bytes": 4 * 16384, "seconds": 60}}
        assert warmed(engine(**few)) == list(range(4))


def test_keys_of_other_lengths_in_a_document_end_no_connection(tmp_path: Path, socket: Path) -> None:
    """The lies cost their share of the warm start, and the service and its engines go on."""
    disk = {**DISK, "path": str(tmp_path / "disk")}
    with machine(socket, disk) as (engine, _):
        serve(engine(**WARM), range(4))
    with machine(socket, disk) as (engine, service):
        one = engine(**WARM)
        ((space,), (document,)) = service._namespaces.values(), documents(tmp_path)
        tier = space.tiers["local"].tier
        assert isinstance(tier, BlockTier)
        namespace = tier.namespace
        assert namespace is not None
        for size in (7, 200):
            keys = [b"x" * size + key for key in keys_of(*range(40))]
            name = hot_document(namespace, f"liar {size}")
            (document.parent / name).write_bytes(pack(namespace, time.time(), [[key] for key in keys]))
        new = engine(**WARM)
        assert warmed(new) == list(range(4))
        assert one.load(range(4)) == (list(range(4)), [])
        serve(new, range(4, 8))
        assert new.stat("cascades") == 4
        assert new.manager.get_stats()["manager"]["warm_start_engines"] == 2


def test_eight_engines_that_start_at_once_download_each_block_once(socket: Path, fake: FakeS3) -> None:
    with machine(socket, bucket(fake)) as (engine, _):
        serve(engine("s3", machine=PATIENT, **WARM), range(20))
    fake.seen.clear()
    few = {"warm_start": {"bytes": 12 * 16384, "seconds": 60}}
    with machine(socket, bucket(fake)) as (engine, _):
        engines = [engine("s3", machine=PATIENT, **few) for _ in range(8)]
        while any(each.manager.has_pending_work() for each in engines):
            for each in engines:
                each.manager.on_schedule_end()
        assert {len(warmed(each)) for each in engines} == {12}
    gets = Counter(seen.name for seen in fake.asked("GET") if is_block(seen.name))
    assert len(gets) == 12
    assert sum(gets.values()) < 2 * 12


def test_an_engine_with_a_process_of_its_own_starts_warm_and_announces_its_blocks(tmp_path: Path) -> None:
    tier = {**DISK, "path": str(tmp_path / "disk")}
    words = {"secondary": [tier], "io": "process", "open_deadline": "60s", "events": True, **WARM}
    for expected in ([], [*range(4)]):
        engine = SmallEngine(None, **words)
        try:
            assert warmed(engine) == expected
            serve(engine, range(4))
            assert {number for event in taken(engine) for number in event[2]} == set(range(4))
        finally:
            engine.close()


def test_what_an_engine_may_get_is_bounded_and_shared_between_sources() -> None:
    hot, engine = Hot([[keys_of(at) for at in range(100)], [keys_of(*range(1000, 1001 + MAX_KEYS))]]), one_engine()
    hints = HostedHints(hot.tier())
    hints.take_question(engine, Record(Kind.GATHER, 7, seconds=10.0))
    assert hints.busy
    hints.step(0.0, [engine])
    assert [(record.number, record.flag, len(record.keys)) for record in engine.sent] == [
        (7, 0, 1),
        (7, 1, MAX_KEYS),
        (7, 0, 0),
    ]
    assert not hints.busy


def test_an_engine_whose_blocks_may_not_meet_those_of_the_tier_gets_no_keys() -> None:
    hints, engine = HostedHints(Hot([[keys_of(1)]]).tier()), one_engine()
    hints.take_question(engine, Record(Kind.GATHER, 7, seconds=10.0))
    hints.step(0.0, ())
    assert engine.sent == []


def test_an_engine_that_reads_nothing_gets_no_second_answer_until_it_reads() -> None:
    hints, engine = HostedHints(Hot([[keys_of(1)]]).tier()), one_engine(behind=True)
    for number in (7, 8):
        hints.take_question(engine, Record(Kind.GATHER, number, seconds=10.0))
        hints.step(0.0, [engine])
    assert engine.sent == []
    engine.behind = False
    hints.step(0.0, [engine])
    assert [record.number for record in engine.sent] == [8, 8]
    assert not hints.busy


def test_uses_are_published_30_seconds_after_the_first_of_them() -> None:
    clock, hot = FakeClock(), Hot()
    hints = HostedHints(hot.tier())
    for published in (0, 0, 1, 1, 1, 2):
        hints.take_use(Record(Kind.USE, keys=keys_of(published)))
        hints.step(clock(), ())
        assert len(hot.published) == published
        clock.advance(0.6 * PUBLISH_SECONDS)


def test_a_service_that_starts_again_leaves_the_document_of_its_earlier_life_to_engines_that_start(
    tmp_path: Path, socket: Path
) -> None:
    disk = {**DISK, "path": str(tmp_path / "disk")}
    with machine(socket, disk) as (engine, _):
        serve(engine(**WARM), range(8))
    with machine(socket, disk) as (engine, _):
        serve(engine(**WARM), range(2))
        assert warmed(engine(**WARM)) == list(range(8))


# --------------------------------------------------------------------------------------------------------------- events


def taken(engine: SmallEngine, tier: str = "local") -> list[tuple[bool, bool, list[int], int]]:
    """Return the events of a tier since the last call.

    Each has a flag for a removal and for an eviction, the numbers of its blocks, and the number of further blocks.
    """
    events: list[OffloadingEvent] = engine.manager.take_events()
    return [
        (event.removed, event.evicted, [int.from_bytes(key[:32], "big") for key in event.keys], event.others)
        for event in events
        if event.tier == tier
    ]


def evictions(engine: SmallEngine) -> tuple[set[int], int]:
    """Return the blocks that were announced as evicted since the last call, and the number of the others."""
    events = [event for event in taken(engine) if event[0] and event[1]]
    return {number for event in events for number in event[2]}, sum(event[3] for event in events)


class AnnouncingTier(FakeTier):
    """A fake tier with removals that a test announces."""

    def __init__(self) -> None:
        super().__init__(name="local")
        self.events: list[OffloadingEvent] = []

    def remove(self, *numbers: int, evicted: bool = False) -> None:
        keys = keys_of(*numbers)
        self.events.append(OffloadingEvent(keys, MEDIUM_STORAGE, LOCAL, self.name, removed=True, evicted=evicted))

    def take_events(self) -> list[OffloadingEvent]:
        taken, self.events = self.events, []
        return taken


SMALL = {"type": "memory", "name": "local", "capacity": "256KiB"}


def test_an_engine_announces_what_it_stores_and_what_the_service_evicts_of_that(socket: Path) -> None:
    """Blocks of other engines are counted, because capacities are judged by all evictions."""
    with machine(socket, SMALL) as (engine, service):
        one, other = engine(events=True), engine(events=True)
        serve(one, range(4))
        assert {number for event in taken(one) for number in event[2]} == set(range(4))
        assert taken(other) == []
        for first in range(100, 160, 4):
            serve(other, range(first, first + 4))
        evicted, others = set[int](), 0

        def all_gone() -> bool:
            nonlocal evicted, others
            found, further = evictions(one)
            evicted, others = evicted | found, others + further
            return evicted == set(range(4))

        assert one.settle(all_gone)
        assert 0 < others <= 60
        assert all(not peer.behind for peer in service._peers.values())


def test_a_block_that_an_engine_reads_is_announced_by_it_as_well(socket: Path) -> None:
    with machine(socket, SMALL) as (engine, _):
        serve(engine(), range(4))
        other = engine(events=True)
        assert other.load([1]) == ([1], [])
        assert taken(other) == [(False, False, [1], 0)]


def test_a_block_that_left_before_its_result_was_sent_is_not_announced(socket: Path) -> None:
    """Its removal has come already, so that it would stay announced."""
    with machine(socket, SMALL) as (engine, service):
        one = engine(events=True)
        one.store([1, 2])
        one.manager.on_schedule_end()
        (space,) = service._namespaces.values()
        found: Any = space.tiers["local"].tier
        assert until(lambda: key_of(1) in found.index.held and key_of(2) in found.index.held, 60.0)
        space.presence["local"].removed([key_of(1)])
        assert one.stored()
        assert taken(one) == [(False, False, [2], 0)]


def test_nothing_is_sent_to_engines_without_events() -> None:
    tier = AnnouncingTier()
    hints = HostedHints(tier)
    quiet, follower = FakeEngine("quiet", 0), one_engine()
    tier.remove(1, evicted=True)
    hints.step(0.0, [quiet, follower])
    assert quiet.sent == []
    assert [(record.kind, record.flag, record.keys) for record in follower.sent] == [(Kind.REMOVED, 1, keys_of(1))]


def test_the_removals_of_a_step_are_one_record_for_each_kind() -> None:
    tier, engine = AnnouncingTier(), one_engine()
    for number in range(1000):
        tier.remove(number, evicted=number < 500)
    HostedHints(tier).step(0.0, [engine])
    assert [(record.flag, record.keys) for record in engine.sent] == [
        (1, keys_of(*range(500))),
        (0, keys_of(*range(500, 1000))),
    ]


def test_an_engine_that_is_behind_loses_removals_and_gets_that_all_blocks_may_have_left() -> None:
    tier, engine = AnnouncingTier(), one_engine(behind=True)
    hints = HostedHints(tier)
    for number in (1, 2):
        tier.remove(number)
        hints.step(0.0, [engine])
    assert engine.sent == []
    engine.behind = False
    tier.remove(3)
    hints.step(0.0, [engine])
    assert [record.keys for record in engine.sent] == [(), keys_of(3)]


def test_what_waits_for_an_engine_without_steps_is_bounded(socket: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiering.machine.link.MOST_QUEUED", 1000)
    with machine(socket, SMALL) as (engine, service):
        idle, busy = engine(events=True), engine()
        serve(idle, range(4))
        assert taken(idle)
        for first in range(1000, 9000, 4):
            serve(busy, range(first, first + 4))
            if any(peer.behind for peer in list(service._peers.values())):
                break
        else:
            pytest.fail("the engine has read all removals")
        gone = set[int]()

        def all_gone() -> bool:
            gone.update(number for event in taken(idle) if event[0] for number in event[2])
            return gone == set(range(4)) and not any(peer.out for peer in list(service._peers.values()))

        assert idle.settle(all_gone)
        serve(idle, range(10, 14))
        assert idle.stat("cascades") == 8


def test_removals_of_a_reset_do_not_reach_the_blocks_that_were_stored_after_it() -> None:
    tier, engine = AnnouncingTier(), one_engine()
    hints = HostedHints(tier)
    tier.remove(1)
    hints.reset()
    tier.remove(2)
    hints.step(0.0, [engine])
    assert [record.keys for record in engine.sent] == [keys_of(2)]


def test_after_the_connection_has_ended_no_block_is_announced_any_more(tmp_path: Path, socket: Path) -> None:
    disk = {**DISK, "path": str(tmp_path / "disk")}
    one = SmallEngine(socket, events=True)
    with machine(socket, disk):
        assert one.serving()
        serve(one, range(4))
        assert taken(one)
    found: Any = one.manager.secondary_tiers[0]
    assert one.settle(lambda: not found.serving)
    with machine(socket, disk):
        assert one.serving()
        assert [(event[0], set(event[2])) for event in taken(one)] == [(True, set(range(4)))]
        one.close()


def test_an_explanation_names_the_eviction_from_a_tier_of_the_service_its_age_and_the_capacity(socket: Path) -> None:
    clock = FakeClock()
    explainer = Explainer(MissExplaining({"cpu": 24, "local": 0}), 16, clock)
    with machine(socket, SMALL) as (engine, _):
        one, other = engine(events=True, rows=8), engine()
        serve(one, range(4))
        serve(one, range(200, 208))
        for first in range(100, 124, 4):
            serve(other, range(first, first + 4))

        left = {key_of(number) for number in range(4)}

        def gone() -> bool:
            events = one.manager.take_events()
            explainer.events(events)
            explainer.settle()
            left.difference_update(
                key for event in events if event.evicted and event.tier == "local" for key in event.keys
            )
            return not left

        assert one.settle(gone)
        size = one.stat("capacity_bytes") // 16384
        assert size == 16
        explainer.set_capacity("local", size)
        clock.advance(80.0)
        keys = [key_of(number) for number in range(4)]
        explainer.missed(Missed("r", 64, 0, 64, 64, keys, None))
        explainer.started("r", 0)
        explainer.settle()
        found = explainer.answer("r")
        assert found is not None
        (span, *_) = found.spans
        assert (span.cause, span.tier) == (MissCause.EVICTED, "local")
        assert span.ages is not None
        assert span.ages[1] >= 80.0
        assert span.factor is not None
        assert span.factor > 1.5
