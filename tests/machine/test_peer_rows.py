"""Engines find blocks in the rows of others, and never get bytes that have changed meanwhile."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.fake_s3 import FakeS3
from tests.machine.engines import PATIENCE, SmallEngine, content, key_of
from tests.machine.hosts import service_in_thread, stack_of
from tests.machine.test_kept_rows import victim_process
from tiering import ReqContext, load_stack
from tiering.api.hints import KeptBlocks
from tiering.cli.serve import check_service
from tiering.errors import ConfigError
from tiering.machine import peer_rows
from tiering.machine.engine_jobs import EngineJob
from tiering.machine.namespaces import TierBuilder
from tiering.machine.options import PEERS_TIER
from tiering.machine.peer_rows import PeerRows, Source
from tiering.machine.presence import Presence
from tiering.machine.service import MachineService
from tiering.secondary.contract import TierContext
from tiering.spec import _explaining
from tiering.table.kept_rows import Keeping
from tiering.testing.clock import until
from tiering.testing.fake_tier import FakeTier

MEMORY = {"type": "memory", "name": "local", "capacity": "16MiB"}
TIERS = (PEERS_TIER, "local")
KEEP = {"keep_rows": True}
BLOCKS = list(range(8))
MADE: list[SmallEngine] = []


@contextmanager
def service_with(path: Path, *tiers: dict[str, str], **more: TierBuilder) -> Iterator[MachineService]:
    """Run a service whose engines end before it."""
    with service_in_thread(path, *tiers, peers=PeerRows, **more) as running:
        try:
            yield running
        finally:
            while MADE:
                MADE.pop().close()


@pytest.fixture
def service(tmp_path: Path) -> Iterator[MachineService]:
    with service_with(tmp_path / "cache.sock", MEMORY) as running:
        yield running


@pytest.fixture
def bucket(fake: FakeS3, monkeypatch: pytest.MonkeyPatch) -> FakeS3:
    """A bucket whose credentials the service in this process has."""
    for name, value in fake.environment().items():
        monkeypatch.setenv(name, value)
    return fake


def words_of(bucket: FakeS3) -> dict[str, str]:
    return {"type": "s3", "name": "bucket", "bucket": bucket.bucket, "endpoint_url": bucket.endpoint, "prefix": "kv/"}


def engine_of(service: MachineService, tiers: Sequence[str] = TIERS, *, stores: bool = False, **words: Any) -> Any:
    """Return an engine that finds others' rows, and stores nothing in the other tiers by default."""
    engine = SmallEngine(service.path, tiers, machine=KEEP, **words)
    MADE.append(engine)
    assert all(engine.serving(at) for at in range(len(tiers)))
    if not stores:
        for tier in engine.manager.secondary_tiers:
            tier.admit = lambda *_: ()  # type: ignore[attr-defined]
    return engine


def peers_of(service: MachineService) -> PeerRows:
    """Return the tier of the first namespace."""
    tier = next(iter(service._namespaces.values())).tiers[PEERS_TIER].tier
    assert isinstance(tier, PeerRows)
    return tier


def are_found(service: MachineService, engine: SmallEngine, blocks: int) -> bool:
    """Run steps until so many blocks are found in rows."""
    return engine.settle(lambda: peers_of(service).get_stats().blocks == blocks)


def owner_of_blocks(service: MachineService, **words: Any) -> Any:
    """Return an engine that has stored the blocks."""
    engine = engine_of(service, **words)
    engine.store(BLOCKS)
    assert are_found(service, engine, len(BLOCKS))
    assert engine.stored()
    return engine


@contextmanager
def halves(monkeypatch: pytest.MonkeyPatch, then: Callable[[], object]) -> Iterator[None]:
    """Call ``then`` whenever the first half of a block has been copied."""

    class Halves:
        @staticmethod
        def copyto(target: Any, source: Any) -> None:
            half = len(target) // 2
            target[:half] = source[:half]
            then()
            target[half:] = source[half:]

    with monkeypatch.context() as during:
        during.setattr(peer_rows, "np", Halves)
        yield


def taking_all(owner: Any) -> Callable[[], None]:
    """Return a function that takes all rows for other blocks, as their engine does, and writes into them."""

    def take() -> None:
        owner.manager.primary_tier.keeper.taken(np.arange(len(owner._rows)))
        owner._rows[:] = 7

    return take


# ----------------------------------------------------------------------------------------------------------- the blocks


def test_blocks_that_no_disk_has_come_from_the_rows_of_another_engine(service: MachineService) -> None:
    one, two = owner_of_blocks(service), engine_of(service)
    assert two.load(BLOCKS) == (BLOCKS, [])
    assert (two.stat("promotions", PEERS_TIER), two.stat("promotions")) == (8, 0)
    assert one.stat("promotions", PEERS_TIER) == 0
    stats = peers_of(service).get_stats()
    assert (stats.promotions, stats.promotions_failed, stats.corrupt_blocks) == (8, 0, 0)
    assert stats.read_bytes == sum(len(content(number, 0)) for number in BLOCKS)


@pytest.mark.parametrize("words", [{"name": "other"}, {"salt": "other"}, {"namespace": "other"}])
def test_engines_of_other_namespaces_find_nothing(service: MachineService, words: dict[str, Any]) -> None:
    owner_of_blocks(service)
    other = engine_of(service, **words)
    assert other.load(BLOCKS) == ([], [])
    assert other.stat("hits", PEERS_TIER) == 0


def test_an_engine_without_the_tier_finds_nothing(service: MachineService) -> None:
    owner_of_blocks(service)
    assert engine_of(service, ("local",)).load(BLOCKS) == ([], [])


def test_rows_of_an_engine_that_names_other_tiers_are_found(service: MachineService) -> None:
    two = engine_of(service)
    one = engine_of(service, ("local",))
    one.store(BLOCKS)
    assert are_found(service, one, 8)
    assert two.load(BLOCKS) == (BLOCKS, [])


def test_evicted_blocks_are_not_found(service: MachineService) -> None:
    one, two = owner_of_blocks(service), engine_of(service)
    for first in range(100, 124, 4):
        assert one.store(range(first, first + 4))
    assert are_found(service, one, 24)
    assert two.load(BLOCKS) == ([], [])
    assert two.stat("hits", PEERS_TIER) == 0
    assert two.load(range(100, 124)) == (list(range(100, 124)), [])


def test_blocks_that_a_request_keeps_from_the_tier_are_not_found(service: MachineService) -> None:
    one, two = engine_of(service), engine_of(service)
    ctx = ReqContext("private", {"kv_tiering": {"tiers": ["local"]}})
    one.manager.on_new_request(ctx)
    out = one.manager.prepare_store([key_of(1)], ctx)
    one.manager.complete_store(out.keys_to_store, ctx)
    one.manager.on_request_finished(ctx)
    one.store([2])
    assert are_found(service, one, 1)
    assert two.load([1, 2]) == ([2], [])


def test_the_tier_takes_no_stores_and_no_notices(service: MachineService) -> None:
    one = owner_of_blocks(service, stores=True)
    assert (one.stat("cascades", PEERS_TIER), one.stat("stores_dropped", PEERS_TIER)) == (0, 0)
    assert one.stat("cascades") == 8
    assert (one.stat("writable", PEERS_TIER), one.stat("available", PEERS_TIER)) == (1, 1)


# ------------------------------------------------------------------------------------------------ changes while copying


def test_a_row_that_is_taken_in_mid_copy_is_a_miss(service: MachineService, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = owner_of_blocks(service), engine_of(service)
    with halves(monkeypatch, taking_all(one)):
        assert two.load([0]) == ([], [])
    assert two.stat("promotions_failed", PEERS_TIER) == 1
    assert peers_of(service).get_stats().corrupt_blocks == 0
    assert are_found(service, two, 0)


def test_a_row_that_is_taken_in_mid_copy_is_read_from_the_disk_in_the_same_job(
    service: MachineService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiering.machine.regions.LOOK_SECONDS", 1e9)  # a look would let the next loads go to the disk
    one, two = owner_of_blocks(service, stores=True), engine_of(service)
    with halves(monkeypatch, taking_all(one)):
        assert two.load(BLOCKS) == (BLOCKS, [])
    assert (two.stat("promotions", PEERS_TIER), two.stat("promotions_failed", PEERS_TIER)) == (8, 0)
    assert two.stat("promotions") == 0
    assert peers_of(service).get_stats().promotions_failed == 8


def test_a_row_that_is_taken_in_mid_copy_is_read_from_a_bucket_in_the_same_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bucket: FakeS3
) -> None:
    """The disk in front of the bucket lacks the blocks; the bucket is not asked what it holds."""
    monkeypatch.setattr("tiering.machine.regions.LOOK_SECONDS", 1e9)
    with service_with(tmp_path / "cache.sock", MEMORY, words_of(bucket)) as service:
        one, two = (engine_of(service, (PEERS_TIER, "bucket"), stores=number == 0) for number in range(2))
        one.store(BLOCKS)
        assert are_found(service, one, len(BLOCKS))
        assert one.stored()
        bucket.seen.clear()
        with halves(monkeypatch, taking_all(one)):
            assert two.load(BLOCKS) == (BLOCKS, [])
        assert (two.stat("promotions", PEERS_TIER), two.stat("promotions_failed", PEERS_TIER)) == (8, 0)
        assert two.stat("promotions", "bucket") == 0
        assert (len(bucket.asked("GET")), bucket.asked("HEAD")) == (len(BLOCKS), [])
        assert peers_of(service).get_stats().promotions_failed == 8


def test_a_block_that_neither_rows_nor_bucket_have_any_more_is_a_miss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bucket: FakeS3
) -> None:
    with service_with(tmp_path / "cache.sock", MEMORY, words_of(bucket)) as service:
        one, two = (engine_of(service, (PEERS_TIER, "bucket")) for _ in range(2))
        one.store(BLOCKS)
        assert are_found(service, one, len(BLOCKS))
        with halves(monkeypatch, taking_all(one)):
            assert two.load([0]) == ([], [])
        assert two.stat("promotions_failed", PEERS_TIER) == 1


def test_a_block_that_an_engine_wants_from_the_disk_alone_does_not_come_from_the_bucket(
    tmp_path: Path, bucket: FakeS3
) -> None:
    """Its manager asks the tiers itself, in the order of its own stack."""
    with service_with(tmp_path / "cache.sock", MEMORY, words_of(bucket)) as service:
        engine_of(service, (PEERS_TIER, "local", "bucket"))
        (space,) = service._namespaces.values()
        (disk,) = (peer for peer in space.peers if peer.tier == "local")
        job = EngineJob(disk, 1, [key_of(0)], [0], ReqContext(""), 1e9, True, False, bytearray(1), 1)
        assert space.tiers["local"].pass_on(job, [0]) == [0]


def test_all_engines_that_wait_for_one_copy_get_the_block_from_the_disk(
    service: MachineService, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, others = owner_of_blocks(service, stores=True), [engine_of(service), engine_of(service)]

    def take_once_both_wait() -> None:
        assert until(lambda: sum(peer.counts.engine_shared_reads for peer in list(service._peers.values())) == 1)
        taking_all(one)()

    requests = [other.request() for other in others]
    with halves(monkeypatch, take_once_both_wait):
        for other, ctx in zip(others, requests, strict=True):
            other.manager.match_prefix([key_of(0)], ctx)
            other.manager.on_schedule_end()
        for other in others:
            assert other.load([0]) == ([0], [])
            assert (other.stat("promotions", PEERS_TIER), other.stat("promotions")) == (1, 0)


def test_an_engine_that_has_left_meanwhile_gets_its_rows_back(
    service: MachineService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its load waits for its turn at the disk, which did not have the load when the engine connected."""
    one, two = owner_of_blocks(service, stores=True), engine_of(service)
    (space,) = service._namespaces.values()
    disk = space.tiers["local"]
    monkeypatch.setattr(disk, "_pump_loads", lambda: None)
    with halves(monkeypatch, taking_all(one)):
        two.manager.match_prefix([key_of(0)], two.request())
        two.manager.on_schedule_end()
        assert until(lambda: bool(disk._loads))
    connections = len(service._peers)
    MADE.remove(two)
    two.close()
    assert not disk._loads
    assert until(lambda: len(service._peers) < connections - 1)


@pytest.mark.parametrize("guard", ["word", "digest"])
def test_either_guard_alone_keeps_a_changed_row_out(
    service: MachineService, monkeypatch: pytest.MonkeyPatch, guard: str
) -> None:
    """The word is that of an engine that behaves; the digest holds for one that scribbles, too."""
    one, two = owner_of_blocks(service), engine_of(service)

    class Equal(bytes):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = bytes.__hash__

    if guard == "word":
        monkeypatch.setattr(peer_rows, "xxh3_128_digest", lambda _: Equal())
    else:
        monkeypatch.setattr(Source, "is_unchanged", lambda _: True)
    with halves(monkeypatch, taking_all(one)):
        assert two.load([0]) == ([], [])


def test_without_a_second_look_wrong_bytes_are_read(service: MachineService, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other tests see what they are there for."""

    def copy(source: Source, target: Any) -> bool:
        half = len(target) // 2
        target[:half] = source.rows[source.row, :half]
        take()
        target[half:] = source.rows[source.row, half : len(target)]
        return True

    one, two = owner_of_blocks(service), engine_of(service)
    take = taking_all(one)
    monkeypatch.setattr(peer_rows, "copy_block", copy)
    assert two.load([0]) == ([0], [0])


def test_a_row_that_changes_without_its_word_is_a_corrupt_block(service: MachineService) -> None:
    one, two = owner_of_blocks(service), engine_of(service)
    one._rows[:, 5] ^= 1
    assert two.load(BLOCKS) == ([], [])
    assert peers_of(service).get_stats().corrupt_blocks == 8


def test_another_row_has_the_block_if_the_first_has_changed(
    service: MachineService, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two, three = owner_of_blocks(service), engine_of(service), engine_of(service)
    two.store(BLOCKS)
    assert two.settle(lambda: all(len(held) == 2 for held in list(peers_of(service)._held.values())))
    with halves(monkeypatch, taking_all(two)):
        assert three.load(BLOCKS) == (BLOCKS, [])
    assert one.load(BLOCKS) == (BLOCKS, [])


# ------------------------------------------------------------------------------------------------ the life of the owner


def victim(service: MachineService) -> Any:
    return victim_process(service.path, tiers=TIERS)


def test_the_rows_of_an_engine_that_is_stopped_are_read(service: MachineService) -> None:
    two = engine_of(service)
    with victim(service) as (pid, _):
        assert are_found(service, two, 8)
        os.kill(pid, signal.SIGSTOP)
        assert two.load(BLOCKS) == (BLOCKS, [])


@pytest.mark.parametrize("during", [False, True])
def test_the_rows_of_an_engine_that_is_killed_are_read(
    service: MachineService, monkeypatch: pytest.MonkeyPatch, during: bool
) -> None:
    two = engine_of(service)
    with victim(service) as (pid, _):
        assert are_found(service, two, 8)
        if during:
            with halves(monkeypatch, lambda: os.kill(pid, signal.SIGKILL)):
                assert two.load(BLOCKS) == (BLOCKS, [])
        else:
            os.kill(pid, signal.SIGKILL)
            assert two.settle(lambda: service.regions.left == 1)
            assert two.load(BLOCKS) == (BLOCKS, [])


def test_rows_that_the_next_engine_gets_are_found_as_long_as_it_keeps_them(service: MachineService) -> None:
    two = engine_of(service)
    with victim(service) as (pid, _):
        assert are_found(service, two, 8)
        os.kill(pid, signal.SIGKILL)
        region = service.regions._regions[1]
        assert two.settle(lambda: service.regions.left == 1 and service.regions._is_free(region))
    heir = engine_of(service)
    assert heir.settle(lambda: heir.manager._stats.inherited_blocks == 8)
    assert two.load(BLOCKS[:4]) == (BLOCKS[:4], [])
    for first in range(100, 124, 4):
        assert heir.store(range(first, first + 4))
    assert are_found(service, heir, 28)
    assert two.load(BLOCKS) == (BLOCKS[:4], [])


def test_rows_that_are_freed_are_not_found(service: MachineService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiering.machine.regions.LEAVE_SECONDS", 0.0)
    one, two = owner_of_blocks(service), engine_of(service)
    one.close()
    assert are_found(service, two, 0)
    assert two.load(BLOCKS) == ([], [])


# -------------------------------------------------------------------------------------------------------- other weights


def reset(engine: Any) -> None:
    """Reset an engine to other weights, and wait for all its tiers."""
    engine.manager.reset_cache("step-1")
    engine.weights = 1
    assert all(engine.serving(at) for at in range(len(engine.manager.secondary_tiers)))


def test_blocks_from_before_a_reset_are_never_found(service: MachineService) -> None:
    one, two = owner_of_blocks(service), engine_of(service)
    reset(one)
    assert are_found(service, one, 0)
    assert two.load(BLOCKS) == ([], [])
    one.store(BLOCKS)
    assert are_found(service, one, 8)
    assert two.load(BLOCKS) == ([], [])
    reset(two)
    assert two.load(BLOCKS) == (BLOCKS, [])


def test_an_engine_that_resets_while_the_tier_is_at_other_weights_is_not_read(service: MachineService) -> None:
    """An engine that names other tiers moves these alone."""
    two = engine_of(service, (PEERS_TIER,))
    one = engine_of(service, ("local",))
    reset(one)
    one.store(BLOCKS)
    assert one.settle(lambda: service.regions.counts()["service_kept_blocks"] == 8)
    assert two.load(BLOCKS) == ([], [])
    assert peers_of(service).get_stats().blocks == 0


def test_blocks_of_an_older_epoch_are_never_found(tmp_path: Path) -> None:
    made: list[FakeTier] = []

    def build(context: TierContext) -> FakeTier:
        made.append(FakeTier(context.name, admits=set()))
        return made[-1]

    with service_with(tmp_path / "cache.sock", fake=build) as service:
        one, two = (engine_of(service, (PEERS_TIER, "fake")) for _ in range(2))
        one.store(BLOCKS)
        assert are_found(service, one, 8)
        made[0].has_successor = True
        service.wake()
        assert one.settle(lambda: one.manager.new_epochs > 0)
        assert two.settle(lambda: two.manager.new_epochs > 0 and two.serving(0))
        assert peers_of(service).get_stats().blocks == 0
        assert two.load(BLOCKS) == ([], [])
        one.store(BLOCKS)
        assert are_found(service, one, 8)
        assert two.load(BLOCKS) == (BLOCKS, [])


@pytest.mark.parametrize("taken", [0, 3])
def test_a_report_that_comes_before_the_consent_to_an_epoch_counts_from_then_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: int
) -> None:
    """They come over two connections. Rows that are taken in between do not count."""
    made: list[FakeTier] = []

    def build(context: TierContext) -> FakeTier:
        made.append(FakeTier(context.name, admits=set()))
        return made[-1]

    with service_with(tmp_path / "cache.sock", fake=build) as service:
        one, two = (engine_of(service, (PEERS_TIER, "fake")) for _ in range(2))
        with monkeypatch.context() as during:
            tiers = one.manager.secondary_tiers
            for tier in tiers:
                during.setattr(tier, "_flush", lambda: None)
            made[0].has_successor = True
            service.wake()
            assert one.settle(lambda: one.manager.new_epochs > 0 and all(tier.settled_weights for tier in tiers))
            one.store(BLOCKS)
            assert one.settle(lambda: [len(region.early) for region in service.regions._regions] == [1, 0])
            assert two.settle(lambda: two.manager.new_epochs > 0 and two.serving(0))
            assert two.load(BLOCKS) == ([], [])
            one.manager.primary_tier.drop([key_of(number) for number in BLOCKS[:taken]])
        assert are_found(service, one, 8 - taken)
        assert two.load(BLOCKS) == (BLOCKS[taken:], [])
        assert all(region.pending == 0 for region in service.regions._regions)


def test_a_tier_that_was_shut_down_leaves_the_notes_to_the_next_one(service: MachineService) -> None:
    """Rows of before may be freed long after the tiers of their namespace were opened again."""
    owner_of_blocks(service)
    tier, (region,) = peers_of(service), service.regions._regions
    table = tier._notes
    assert table is not None
    assert tier.shutdown(time.monotonic() + PATIENCE)
    region.empty()
    assert Presence(table.fd).leading([key_of(0)]) == 1


def test_the_blocks_of_an_emptied_record_are_dropped_a_few_per_step(
    service: MachineService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Millions at once would take seconds of the service's thread; none is loaded meanwhile."""
    one, two = owner_of_blocks(service), engine_of(service)
    tier, region = peers_of(service), service.regions._regions[0]
    with monkeypatch.context() as during:
        during.setattr(peer_rows, "DROPPED_PER_STEP", 0)
        region.empty()
        service.wake()
        assert two.load(BLOCKS) == ([], [])
        one.store(range(100, 108))
        assert one.settle(lambda: service.regions.counts()["service_kept_blocks"] == 8)
        assert tier.get_stats().blocks == 16
    service.wake()
    assert are_found(service, two, 8)
    assert two.load(range(100, 108)) == (list(range(100, 108)), [])


@pytest.mark.parametrize(("rows", "changed"), [(6, 24), (24, 3)])
def test_a_look_for_changed_rows_has_a_bound_and_the_next_goes_on(
    service: MachineService, monkeypatch: pytest.MonkeyPatch, rows: int, changed: int
) -> None:
    monkeypatch.setattr("tiering.machine.regions.LOOK_SECONDS", 1e9)
    monkeypatch.setattr("tiering.machine.region.LOOK_ROWS", rows)
    monkeypatch.setattr("tiering.machine.region._LOOK_PART", 6)
    monkeypatch.setattr("tiering.machine.region.MOST_CHANGED", changed)
    one = engine_of(service)
    one.store(range(24))
    assert are_found(service, one, 24)
    (region,) = service.regions._regions
    one.manager.primary_tier.keeper.taken(np.arange(12, 24))
    left = []
    while len(region.entries) > 12:
        region.forget_changed()
        left.append(len(region.entries))
    assert max(before - after for before, after in pairwise([24, *left])) <= min(rows, changed)
    assert sorted(region.entries) == list(range(12))


# ------------------------------------------------------------------------------------------------ the owner's evictions


@pytest.mark.parametrize("kept", [False, True])
def test_the_row_that_was_copied_is_the_next_victim_unless_a_hint_keeps_it(service: MachineService, kept: bool) -> None:
    one, two = owner_of_blocks(service), engine_of(service)
    one.store(range(20, 36))  # all 24 rows are in use, and the first eight are the least recent
    assert one.load(BLOCKS) == (BLOCKS, [])
    if kept:
        one.manager.primary_tier.keep(KeptBlocks([key_of(6)], 60.0, 1.0), lambda: 0.0)
    assert two.load([6, 7]) == ([6, 7], [])
    marks = one.manager.primary_tier._table.marks
    assert one.settle(lambda: marks.released is not None)
    one.store([40])
    left = [number for number in (6, 7) if key_of(number) in one.manager.primary_tier.readable]
    assert left in ([[6]] if kept else [[6], [7]])


def test_the_cost_of_copied_blocks_does_not_depend_on_the_hints_that_keep_some(
    service: MachineService, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = owner_of_blocks(service)
    one.manager.primary_tier.keep(KeptBlocks([key_of(6)], 60.0, 1.0), lambda: 0.0)
    looks: list[int] = []
    are_kept = Keeping.are_kept

    def counted(self: Keeping, rows: Any) -> Any:
        looks.append(len(rows))
        return are_kept(self, rows)

    monkeypatch.setattr(Keeping, "are_kept", counted)
    one.manager.primary_tier.keeper._let_go([key_of(number) for number in range(20)])
    assert looks == [len(BLOCKS)]


# ------------------------------------------------------------------------------------------------------------ the words


def test_a_stack_that_finds_others_rows_lets_its_own_be_found() -> None:
    words = {"socket": "/run/cache.sock", "tiers": [PEERS_TIER, "local"]}
    with pytest.raises(ConfigError, match=r"machine\.keep_rows.*must be true with peers"):
        load_stack({"primary": {"capacity": "1GiB"}, "machine": words})
    load_stack({"primary": {"capacity": "1GiB"}, "machine": {**words, **KEEP}})


def test_no_cause_of_a_miss_names_others_rows() -> None:
    """They take no stores: each block would have been declined by them."""
    words = {"socket": "/run/cache.sock", "tiers": list(TIERS), **KEEP}
    stack = load_stack({"primary": {"capacity": "1GiB"}, "machine": words, "explain": {}})
    explaining = _explaining(stack, 4096)
    assert explaining is not None
    assert list(explaining.capacities) == ["cpu", "local"]


def test_a_service_cannot_have_a_tier_of_that_name() -> None:
    config = load_stack(stack_of({**MEMORY, "name": PEERS_TIER}))
    with pytest.raises(ConfigError, match="'peers' is the name of the tier of the engines' rows"):
        check_service("service.yaml", config)
