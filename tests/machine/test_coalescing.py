"""Reads of one block by several engines at once are one read of the bucket."""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from xxhash import xxh3_128_digest

from tests.fake_s3 import FakeS3, Trouble
from tests.machine.engines import SmallEngine, key_of
from tests.machine.hosts import service_in_thread, service_process
from tests.machine.test_service import Raw
from tiering.machine.messages import Kind, Record
from tiering.secondary.contract import TierContext
from tiering.testing.fake_tier import FakeTier

BLOCKS = 24
PATIENT = {"lookup_deadline": "30s"}


def bucket(fake: FakeS3) -> dict[str, object]:
    return {"type": "s3", "bucket": fake.bucket, "endpoint_url": fake.endpoint, "prefix": "kv/"}


def is_block(name: str) -> bool:
    return len(name.rpartition("/")[2]) == 2 * len(key_of(0))


@pytest.mark.parametrize("engines", [4, 8])
def test_a_block_is_downloaded_once_for_all_engines(tmp_path: Path, fake: FakeS3, engines: int) -> None:
    """The bucket answers once all engines wait for all blocks."""
    gate = threading.Event()

    def wait(method: str, name: str) -> None:
        if method == "GET" and is_block(name):
            gate.wait(60.0)

    with ExitStack() as undo:
        service = undo.enter_context(service_process(tmp_path, bucket(fake), environment=fake.environment()))
        undo.callback(gate.set)
        one = SmallEngine(service.socket, ("s3",), rows=64)
        one.store(range(BLOCKS))
        assert one.stored()
        one.close()
        fake.seen.clear()
        fake.intercept = wait
        made = [SmallEngine(service.socket, ("s3",), rows=64, machine=PATIENT) for _ in range(engines)]
        for engine in made:
            undo.callback(engine.close)
        requests = [engine.request() for engine in made]
        keys = [key_of(number) for number in range(BLOCKS)]

        def all_wait() -> bool:
            for engine, ctx in zip(made, requests, strict=True):
                engine.manager.match_prefix(keys, ctx)
                engine.manager.on_schedule_end()
            return all(engine.stat("promotions_active", "s3") == BLOCKS for engine in made)

        assert made[0].settle(all_wait)
        gate.set()
        for engine, ctx in zip(made, requests, strict=True):
            assert engine.load(range(BLOCKS)) == (list(range(BLOCKS)), [])
            engine.manager.on_request_finished(ctx)
            assert engine.stat("promotions", "s3") == BLOCKS
        gets = Counter(seen.name for seen in fake.asked("GET") if is_block(seen.name))
        assert set(gets.values()) == {1}
        assert len(gets) == BLOCKS


def test_a_failed_read_is_a_miss_for_all_that_wait_for_it(tmp_path: Path, fake: FakeS3) -> None:
    gate = threading.Event()

    def damage(method: str, name: str) -> Trouble | None:
        if method == "GET" and is_block(name):
            gate.wait(60.0)
            return Trouble.FLIP
        return None

    with ExitStack() as undo:
        service = undo.enter_context(service_process(tmp_path, bucket(fake), environment=fake.environment()))
        undo.callback(gate.set)
        made = [SmallEngine(service.socket, ("s3",), rows=64, machine=PATIENT) for _ in range(3)]
        for engine in made:
            undo.callback(engine.close)
        made[0].store(range(4))
        assert made[0].stored()
        fake.intercept = damage
        keys = [key_of(number) for number in range(4)]
        requests = [engine.request() for engine in made[1:]]

        def all_wait() -> bool:
            for engine, ctx in zip(made[1:], requests, strict=True):
                engine.manager.match_prefix(keys, ctx)
                engine.manager.on_schedule_end()
            return all(engine.stat("promotions_active", "s3") == 4 for engine in made[1:])

        assert made[0].settle(all_wait)
        gate.set()
        for engine in made[1:]:
            assert engine.load(range(4)) == ([], [])


def test_a_copy_whose_source_has_changed_since_the_read_is_a_miss(tmp_path: Path) -> None:
    """The engine of the row may scribble on it, or be broken."""
    made: list[FakeTier] = []

    def build(context: TierContext) -> FakeTier:
        made.append(FakeTier(context.name, held={key_of(1)}))
        return made[-1]

    block = bytes(range(64))
    load = Record(Kind.LOAD, 7, seconds=60.0, keys=[key_of(1)], rows=[3])
    with service_in_thread(tmp_path / "cache.sock", slow=build) as service, ExitStack() as undo:
        raws = [Raw(service.path, tier="slow", group_bytes=(64, 64)) for _ in range(2)]
        for raw in raws:
            undo.callback(raw.close)
        for scribbles, outcome in ((False, b"\1"), (True, b"\0")):
            for raw in raws:
                raw.send(Record(Kind.FOLLOWED, raw.receive(Kind.STATE).number), load)
                raw.send(Record(Kind.LOOKUP, 5, keys=[key_of(2)]))
                assert raw.receive(Kind.ANSWER).number == 5
            (order,) = made[0].loads[-1:]
            assert order.digests == {}
            source = raws[0]
            source.region.array[3, :64] = np.frombuffer(block, np.uint8)
            order.digests[key_of(1)] = xxh3_128_digest(block)
            if scribbles:
                source.region.array[3, 5] = 99
            made[0].finish(order)
            service.wake()
            assert raws[0].receive(Kind.RESULT).text == b"\1"
            assert raws[1].receive(Kind.RESULT).text == outcome
            assert (raws[1].region.array[3, :64].tobytes() == block) is (outcome == b"\1")
