"""Engines read the blocks that a tier has noted, and only the service writes."""

from __future__ import annotations

import fcntl
import mmap
import multiprocessing
import os
import random
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tests.machine.engines import SmallEngine, key_of
from tests.machine.hosts import service_in_thread
from tests.machine.test_tier import TestMachineTierOverMemory as OverMemory
from tiering.errors import RegionError
from tiering.machine import link, namespaces, presence
from tiering.machine.presence import BUCKET, FIRST_BITS, Presence, PresenceTable
from tiering.machine.service import MachineService
from tiering.primary.memory.region import make_sealed

PATIENCE = 60.0
FEW = 100
MANY = 2 * BUCKET << FIRST_BITS
"""Number of keys for which a table grows twice."""


@pytest.fixture
def table() -> Iterator[PresenceTable]:
    made = PresenceTable("local")
    yield made
    made.close()


def held(reader: Presence, numbers: range) -> set[int]:
    return {number for number in numbers if reader.leading([key_of(number)])}


def test_a_walk_of_stores_removals_and_clears_is_read_as_it_was_written(table: PresenceTable) -> None:
    reader, known, rng = Presence(table.fd), set[int](), random.Random(5)
    for step in range(600):
        first = rng.randrange(MANY)
        some = range(first, first + rng.randrange(1, 40))
        if step % 150 == 149:
            table.clear()
            known.clear()
        elif rng.random() < 0.75:
            table.stored([key_of(number) for number in some])
            known.update(some)
        else:
            table.removed([key_of(number) for number in some])
            known.difference_update(some)
        if step % 30 == 0:
            assert held(reader, range(MANY + 40)) == known


def test_the_first_key_that_is_not_held_ends_a_prefix(table: PresenceTable) -> None:
    reader, keys = Presence(table.fd), [key_of(number) for number in range(MANY)]
    table.stored(keys)
    assert reader.leading(keys) == MANY
    assert reader.leading([]) == 0
    for at in (0, 1, 255, 256, 257, MANY - 1):
        table.removed(keys[at : at + 1])
        assert reader.leading(keys) == at
        table.stored(keys[at : at + 1])


def test_one_key_of_several_groups_is_several_blocks(table: PresenceTable) -> None:
    reader, key = Presence(table.fd), key_of(2)
    table.stored([key])
    assert reader.leading([key]) == 1
    assert reader.leading([key[:-1] + b"\x01"]) == 0


def test_two_tables_have_nothing_in_common(table: PresenceTable) -> None:
    """The marks of another namespace, and those from before a reset, say nothing."""
    other = PresenceTable("local")
    keys = [key_of(number) for number in range(FEW)]
    for each in (table, other):
        each.stored(keys)
    marks = [bytes(memoryview(mmap.mmap(each.fd, 1 << 15, prot=mmap.PROT_READ))[4096:]) for each in (table, other)]
    words = [{mark[at : at + 8] for at in range(0, len(mark), 8)} - {bytes(8)} for mark in marks]
    assert len(words[0]) == len(words[1]) == FEW
    assert words[0].isdisjoint(words[1])
    other.close()


@pytest.mark.parametrize("reopened", [False, True])
def test_an_engine_cannot_write(table: PresenceTable, reopened: bool) -> None:
    fd = os.open(f"/proc/self/fd/{table.fd}", os.O_RDWR) if reopened else os.dup(table.fd)
    try:
        with pytest.raises(PermissionError):
            mmap.mmap(fd, mmap.PAGESIZE, mmap.MAP_SHARED)
        with pytest.raises(PermissionError):
            os.pwrite(fd, b"x", 0)
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 0)
        with pytest.raises(PermissionError):
            fcntl.fcntl(fd, 1033, 0x8)  # F_ADD_SEALS, F_SEAL_WRITE
    finally:
        os.close(fd)


def test_a_table_that_gets_no_memory_goes_on(
    table: PresenceTable, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(fd: int, offset: int, count: int) -> None:
        raise OSError(28, "No space left on device")

    reader, keys = Presence(table.fd), [key_of(number) for number in range(MANY)]
    with monkeypatch.context() as short:
        short.setattr(os, "posix_fallocate", refuse)
        table.stored(keys)
    assert [record.getMessage() for record in caplog.records] == [
        "tier local: the table of its blocks cannot grow, so engines miss some: [Errno 28] No space left on device"
    ]
    assert 0.9 * (BUCKET << FIRST_BITS) < len(held(reader, range(MANY))) <= BUCKET << FIRST_BITS
    table.removed(keys)
    assert not held(reader, range(MANY))
    table.clear()
    table.stored(keys)
    assert len(held(reader, range(MANY))) == MANY


def test_a_table_grows_a_part_with_each_call_and_is_written_meanwhile(
    table: PresenceTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All at once would hold the service's thread for half a second with tens of millions of blocks."""
    monkeypatch.setattr("tiering.machine.presence._LEAST_GROWN", 1)
    monkeypatch.setattr("tiering.machine.presence._GROWN_PER_KEY", 2)
    reader, rng, known = Presence(table.fd), random.Random(7), set[int]()
    allocated: list[int] = []
    allocate = os.posix_fallocate

    def counted(fd: int, offset: int, count: int) -> None:
        allocated.append(count)
        allocate(fd, offset, count)

    monkeypatch.setattr(os, "posix_fallocate", counted)
    states, halves = set[int](), 0
    for first in range(0, MANY, 4):
        table.stored([key_of(number) for number in range(first, first + 4)])
        known.update(range(first, first + 4))
        gone = rng.sample(sorted(known), 1)
        table.removed([key_of(number) for number in gone])
        known.difference_update(gone)
        states.add(reader._words[1] & 0xFF)
        halves += table._grown is not None
        assert reader.leading([key_of(number) for number in sorted(known)]) == len(known)
    assert not held(reader, range(MANY)) ^ known
    assert (len(states), halves > 16, max(allocated)) == (3, True, 8 * BUCKET * 8)


def test_a_clear_while_a_table_grows_begins_anew(table: PresenceTable, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, keys = Presence(table.fd), [key_of(number) for number in range(MANY)]
    with monkeypatch.context() as slow:
        slow.setattr("tiering.machine.presence._LEAST_GROWN", 1)
        slow.setattr("tiering.machine.presence._GROWN_PER_KEY", 0)
        table.stored(keys[:310])
        table.stored(keys[310:320])
        assert table._grown == 2
    table.clear()
    assert not held(reader, range(MANY))
    table.stored(keys)
    assert len(held(reader, range(MANY))) == MANY


def test_no_state_leads_out_of_the_file(table: PresenceTable) -> None:
    reader, keys = Presence(table.fd), [key_of(number) for number in range(FEW)]
    table.stored(keys)
    for bits in range(256):
        table._words[1] = table._words[1] & ~0xFF | bits
        assert reader.leading(keys) == (FEW if bits == FIRST_BITS else 0)


def other_form() -> int:
    fd = make_sealed("kv-test", presence._BYTES)
    os.pwrite(fd, b"KVMARKS2", 0)
    return fd


def unsealed() -> int:
    fd = os.memfd_create("kv-test")
    os.ftruncate(fd, presence._BYTES)
    return fd


@pytest.mark.parametrize("make", [other_form, unsealed, lambda: make_sealed("kv-test", 4096)])
def test_another_file_is_refused(make: Callable[[], int]) -> None:
    fd = make()
    with pytest.raises(RegionError):
        Presence(fd)
    os.close(fd)


def read_on(fd: int, numbers: int, pipe: Connection) -> None:
    """Look for blocks that are held all the time, until the pipe has something; send the looks, or -1."""
    reader, looks = Presence(fd), 0
    keys = [key_of(number) for number in range(numbers)]
    pipe.send("up")
    while not pipe.poll():
        looks = looks + 1 if looks >= 0 and reader.leading(keys) == numbers else -1
    pipe.send(looks)


def test_a_reader_in_another_process_finds_what_is_held_while_the_table_grows(table: PresenceTable) -> None:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    table.stored([key_of(number) for number in range(FEW)])
    process = context.Process(target=read_on, args=(table.fd, FEW, theirs), daemon=True)
    process.start()
    theirs.close()
    assert ours.poll(PATIENCE)
    assert ours.recv() == "up"
    for first in range(FEW, 64 * MANY, FEW):
        table.stored([key_of(number) for number in range(first, first + FEW)])
        if first % (8 * FEW) == 0:
            table.removed([key_of(number) for number in range(first, first + FEW)])
    ours.send("stop")
    assert ours.poll(PATIENCE)
    assert ours.recv() > 0
    process.join(PATIENCE)


def test_a_forked_child_that_drops_the_map_loses_no_memory_of_its_own(table: PresenceTable) -> None:
    """Its later memory may lie where the map would be, if it had none."""
    reader, keys = Presence(table.fd), [key_of(number) for number in range(FEW)]
    table.stored(keys)
    child = os.fork()
    if not child:
        own = [mmap.mmap(-1, presence._BYTES >> 3) for _ in range(12)]
        held_there = reader.leading(keys)
        del reader
        os._exit(0 if [memory[0] for memory in own] == [0] * len(own) and held_there == FEW else 1)
    assert os.waitpid(child, 0)[1] == 0


# ------------------------------------------------------------------------------------------------ service and engines

CAPACITY = "2MiB"
"""Capacity of a disk from which blocks are evicted."""


@pytest.fixture
def service(tmp_path: Path) -> Iterator[MachineService]:
    disk = {"type": "local", "path": str(tmp_path / "disk"), "capacity": CAPACITY, "segment_size": "256KiB"}
    with service_in_thread(tmp_path / "cache.sock", disk) as running:
        yield running


@pytest.fixture
def engine(service: MachineService) -> Iterator[SmallEngine]:
    made = SmallEngine(service.path)
    assert made.serving()
    yield made
    made.close()


def read_by(engine: SmallEngine, numbers: range) -> set[int]:
    connection = engine.manager.secondary_tiers[0]._connection  # type: ignore[attr-defined]
    assert connection.presence is not None
    return held(connection.presence, numbers)


def held_by(service: MachineService, numbers: range) -> set[int]:
    (space,) = service._namespaces.values()
    index = space.tiers["local"].tier.index  # type: ignore[attr-defined]
    return {number for number in numbers if key_of(number) in index.held}


def test_what_engines_read_is_what_the_tier_holds(service: MachineService, engine: SmallEngine) -> None:
    numbers = range(400)
    for first in range(0, 400, 4):
        engine.settle(lambda first=first: engine.store(range(first, first + 4)))  # type: ignore[misc]
        engine.stored()
    assert 0 < len(read_by(engine, numbers)) < len(numbers), "nothing was evicted"
    assert read_by(engine, numbers) == held_by(service, numbers)
    engine.weights = 1
    engine.manager.reset_cache("step-1")
    assert not read_by(engine, numbers)
    assert engine.serving()
    engine.store(range(4))
    engine.stored()
    assert read_by(engine, numbers) == held_by(service, numbers) == set(range(4))


def test_a_lookup_is_decided_at_once_and_sends_nothing(engine: SmallEngine) -> None:
    engine.store(range(4))
    engine.stored()
    tier, ctx = engine.manager.secondary_tiers[0], engine.request()
    before = tier._connection.sent  # type: ignore[attr-defined]
    keys = [key_of(number) for number in range(6)]
    assert tier.lookup_prefix(keys, ctx) == (4, False)
    assert tier.lookup_prefix(keys[4:], ctx) == (0, False)
    tier.on_schedule_end()
    assert tier._connection.sent == before  # type: ignore[attr-defined]


def test_blocks_of_an_earlier_service_are_read_once_they_are_recovered(tmp_path: Path) -> None:
    disk = {"type": "local", "path": str(tmp_path / "disk"), "capacity": "16MiB"}
    for stored in (True, False):
        with service_in_thread(tmp_path / "cache.sock", disk):
            engine = SmallEngine(tmp_path / "cache.sock")
            assert engine.serving()
            if stored:
                engine.store(range(8))
                engine.stored()
            assert engine.settle(lambda engine=engine: read_by(engine, range(40)) == set(range(8)))  # type: ignore[misc]
            engine.close()


def test_a_block_that_is_read_and_not_held_is_a_miss(service: MachineService, engine: SmallEngine) -> None:
    (space,) = service._namespaces.values()
    space.presence["local"].stored([key_of(7)])
    assert read_by(engine, range(20)) == {7}
    assert engine.load([7]) == ([], [])
    assert engine.stat("promotions_failed") > 0
    engine.store([7])
    engine.stored()
    engine.forget_rows()
    assert engine.load([7]) == ([7], [])


def test_a_block_that_is_held_and_not_read_is_a_miss(service: MachineService, engine: SmallEngine) -> None:
    engine.store([7])
    engine.stored()
    (space,) = service._namespaces.values()
    space.presence["local"].removed([key_of(7)])
    engine.forget_rows()
    assert engine.load([7]) == ([], [])


class TestOfAnOlderService(OverMemory):
    """A service without such memory is asked."""

    @pytest.fixture(autouse=True)
    def _older(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(name: str) -> PresenceTable:
            raise OSError(22, "Invalid argument")

        monkeypatch.setattr(namespaces, "PresenceTable", refuse)


def test_an_engine_that_cannot_read_the_memory_asks(
    service: MachineService, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(fd: int) -> Presence:
        raise RegionError("it has another form")

    monkeypatch.setattr(link, "Presence", refuse)
    engine = SmallEngine(service.path)
    assert engine.serving()
    assert engine.manager.secondary_tiers[0]._connection.presence is None  # type: ignore[attr-defined]
    assert "the blocks of the service's tier cannot be read, only asked for: it has another form" in caplog.text
    engine.store(range(4))
    engine.stored()
    engine.forget_rows()
    assert engine.load(range(4)) == (list(range(4)), [])
    engine.close()
