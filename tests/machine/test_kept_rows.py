"""Rows outlive the engine that was killed, and the next engine finds its verified blocks in them."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from tests.machine.engines import GROUP_BYTES, PATIENCE, SmallEngine, content, key_of, model
from tests.machine.hosts import service_in_thread
from tiering import load_stack
from tiering.config.stack import make_rows
from tiering.errors import RegionError
from tiering.machine.claim import KeptRegion
from tiering.machine.region import Region, RowsClaim
from tiering.machine.regions import Regions
from tiering.machine.service import MachineService
from tiering.primary.memory.region import MARK_BYTES, SharedRegion
from tiering.primary.memory.side import RegionSide
from tiering.runtime.pool import ThreadPool
from tiering.secondary.contract import TierContext
from tiering.testing.clock import FakeClock, until
from tiering.testing.fake_tier import FakeTier

MEMORY = {"type": "memory", "name": "local", "capacity": "16MiB", "share": "kept"}
KEEP = {"keep_rows": True}
BLOCKS = list(range(8))


MADE: list[SmallEngine] = []


@pytest.fixture(autouse=True)
def _close_engines() -> Iterator[None]:
    yield
    while MADE:
        MADE.pop().close()


def engine_of(socket: Path, **words: Any) -> SmallEngine:
    """Return an engine that stores nothing in the service's tiers, so that its rows alone have its blocks."""
    engine = SmallEngine(socket, machine=KEEP, **words)
    MADE.append(engine)
    assert engine.serving()
    tier: Any = engine.manager.secondary_tiers[0]
    tier.storing = False
    tier.admit = lambda *_: ()
    return engine


def victim(socket: Path, pipe: Connection, words: dict[str, Any]) -> None:
    """Store blocks, and wait for the end; each received text is evaluated with the engine."""
    blocks = words.pop("blocks", BLOCKS)
    engine = engine_of(socket, **words)
    engine.store(blocks)
    names = {"engine": engine, "np": np}
    engine.settle(lambda: not engine.manager.primary_tier.keeper._pending)  # type: ignore[union-attr]
    pipe.send(os.getpid())
    while True:
        exec(pipe.recv(), names)
        engine.manager.on_schedule_end()
        pipe.send("done")


@contextmanager
def victim_process(socket: Path, **words: Any) -> Iterator[tuple[int, Callable[[str], None]]]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=victim, args=(socket, theirs, words), daemon=True)
    process.start()

    def run(code: str) -> None:
        ours.send(code)
        assert ours.poll(PATIENCE)
        assert ours.recv() == "done"

    try:
        assert ours.poll(PATIENCE), "the engine did not come up"
        yield ours.recv(), run
    finally:
        process.kill()
        process.join()


@pytest.fixture
def service(tmp_path: Path) -> Iterator[MachineService]:
    with service_in_thread(tmp_path / "cache.sock", MEMORY) as running:
        yield running


def regions(service: MachineService) -> list[Region]:
    return service.regions._regions


def recorded(service: MachineService, blocks: int) -> bool:
    return until(lambda: sum(len(region.entries) for region in regions(service)) == blocks, PATIENCE)


def killed(service: MachineService, pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    assert until(lambda: service.regions.left == 1 and service.regions._is_free(regions(service)[0]), PATIENCE)


def inherited(engine: SmallEngine) -> int:
    return int(engine.manager._stats.inherited_blocks)


def inherits(engine: SmallEngine, blocks: int) -> None:
    """Run steps until the engine has inherited as many blocks, and until no more can come."""
    assert engine.settle(lambda: inherited(engine) >= blocks)
    assert inherited(engine) == blocks


def nothing_more(service: MachineService, engine: SmallEngine) -> None:
    engine.settle(lambda: regions(service)[0].offer is None)
    for _ in range(3):
        engine.manager.on_schedule_end()


def test_the_next_engine_finds_the_blocks_of_one_that_was_killed(service: MachineService) -> None:
    with victim_process(service.path) as (pid, _):
        assert recorded(service, 8)
        killed(service, pid)
        heir = engine_of(service.path)
        inherits(heir, 8)
        assert heir.load(BLOCKS, patience=5.0) == (BLOCKS, [])
        assert heir.stat("promotions") == 0
        assert len(service.regions) == 1
        heir.close()


def early_report(service: MachineService, undo: ExitStack, during: pytest.MonkeyPatch) -> int:
    """Let an engine report blocks while it inherits the rows of one that was killed; return its process."""
    pid, _ = undo.enter_context(victim_process(service.path))
    assert recorded(service, 8)
    killed(service, pid)
    during.setattr(Regions, "_verify", lambda *_: None)
    pid, _ = undo.enter_context(victim_process(service.path, blocks=range(100, 104)))
    assert until(lambda: len(regions(service)[0].early) > 0, PATIENCE)
    return pid


def test_what_an_engine_reports_while_it_inherits_counts_for_the_next_one(
    service: MachineService, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExitStack() as undo:
        with monkeypatch.context() as during:
            pid = early_report(service, undo, during)
            assert regions(service)[0].offer is not None
        service.wake()
        new = {key_of(number) for number in range(100, 104)}
        assert until(lambda: new <= {entry.key for entry in list(regions(service)[0].entries.values())}, PATIENCE)
        killed(service, pid)
        heir = engine_of(service.path)
        assert heir.settle(lambda: inherited(heir) == len(regions(service)[0].entries))
        assert heir.load(range(100, 104), patience=5.0) == ([100, 101, 102, 103], [])


def test_what_an_engine_reported_too_early_ends_with_it(
    service: MachineService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one may belong to another epoch."""
    with ExitStack() as undo:
        with monkeypatch.context() as during:
            pid = early_report(service, undo, during)
            killed(service, pid)
            assert not regions(service)[0].early
            assert regions(service)[0].pending == 0
        heir = engine_of(service.path)
        nothing_more(service, heir)
        assert heir.load(range(100, 104), patience=0.5) == ([], [])


def test_blocks_that_a_request_keeps_from_the_tiers_end_with_the_engine(service: MachineService) -> None:
    """Their keys may be private to the process, such as those of an adapter whose files are not known."""
    with victim_process(service.path) as (pid, run):
        assert recorded(service, 8)
        run(
            "from tests.machine.engines import content, key_of\n"
            "from tiering import ReqContext\n"
            "ctx = ReqContext('private', {'kv_tiering': {'tiers': []}})\n"
            "engine.manager.on_new_request(ctx)\n"
            "out = engine.manager.prepare_store([key_of(300)], ctx)\n"
            "data = content(300, 0)\n"
            "engine._rows[int(out.store_spec.block_ids[0]), : len(data)] = np.frombuffer(data, np.uint8)\n"
            "engine.manager.complete_store([key_of(300)], ctx)\n"
            "engine.store([301])\n"
        )
        assert recorded(service, 9)
        killed(service, pid)
        heir = engine_of(service.path)
        inherits(heir, 9)
        assert heir.load([300, 301], patience=0.5) == ([301], [])


def test_an_engine_with_another_model_finds_nothing(service: MachineService) -> None:
    with victim_process(service.path) as (pid, _):
        assert recorded(service, 8)
        killed(service, pid)
        other = engine_of(service.path, name="other")
        assert len(service.regions) == 2
        nothing_more(service, other)
        assert other.load(BLOCKS) == ([], [])
        other.close()


def test_rows_of_a_living_engine_are_not_given_away(service: MachineService) -> None:
    with victim_process(service.path) as (_, _run):
        assert recorded(service, 8)
        replica = engine_of(service.path)
        assert len(service.regions) == 2
        assert replica.load(BLOCKS) == ([], [])
        replica.close()


def test_rows_that_a_tier_still_writes_are_not_given_away(tmp_path: Path) -> None:
    """A medium that hangs may write into the rows of an engine that has died long ago."""
    made: list[FakeTier] = []

    def build(context: TierContext) -> FakeTier:
        made.append(FakeTier(context.name, held={key_of(70)}))
        return made[-1]

    with ExitStack() as undo:
        service = undo.enter_context(service_in_thread(tmp_path / "cache.sock", local=build))
        pid, run = undo.enter_context(victim_process(service.path))
        assert recorded(service, 8)
        run("from tests.machine.engines import key_of; ctx = engine.request()")
        for _ in range(100):
            run("engine.manager.match_prefix([key_of(70)], engine.request())")
            if made[0].loads:
                break
        assert made[0].loads
        os.kill(pid, signal.SIGKILL)
        assert until(lambda: service.regions.left == 1 and regions(service)[0].is_left(), PATIENCE)
        heir = engine_of(service.path)
        assert len(service.regions) == 2
        assert heir.load(BLOCKS, patience=0.5) == ([], [])
        made[0].finish(made[0].loads[0])
        service.wake()
        assert until(lambda: service.regions._is_free(regions(service)[0]), PATIENCE)


def test_rows_that_a_surviving_child_has_are_not_given_away(service: MachineService, tmp_path: Path) -> None:
    """It holds a lock of the rows, without which the next engine's processes could not all join them."""
    os.mkfifo(wait := tmp_path / "wait")
    with victim_process(service.path) as (pid, run):
        assert recorded(service, 8)
        run(f"import os\nif not os.fork():\n  open({str(wait)!r}, 'rb').read()\n  os._exit(0)\n")
        with wait.open("wb"):
            os.kill(pid, signal.SIGKILL)
            assert until(lambda: service.regions.left == 1 and regions(service)[0].is_left(), PATIENCE)
            heir = engine_of(service.path)
            assert isinstance(heir.manager.primary_tier._region, KeptRegion)
            assert len(service.regions) == 2
            assert heir.load(BLOCKS) == ([], [])
        assert until(lambda: service.regions._is_free(regions(service)[0]), PATIENCE)
        inherits(engine_of(service.path), 8)


def test_a_child_that_closes_all_descriptors_cannot_touch_the_rows(service: MachineService) -> None:
    """Nothing proves its death, so it must not have the rows: another engine may have them by then."""
    with victim_process(service.path) as (_, run):
        run(
            "import os\n"
            "if not (pid := os.fork()):\n  os.closerange(3, 1000)\n  engine._rows[0, 0] = 1\n  os._exit(0)\n"
            "if os.waitpid(pid, 0)[1] != 11: os._exit(1)"
        )


def test_digests_that_come_after_the_engine_has_died_do_not_count(service: MachineService) -> None:
    """A process that survives it may have written into the rows before."""
    late: list[Any] = []
    with victim_process(service.path) as (pid, run):
        assert recorded(service, 8)
        compute = service.regions._compute
        service.regions._compute = lambda *reported: late.append(reported)  # type: ignore[method-assign]
        run("engine.store(range(50, 54))")
        assert until(lambda: len(late) == 1, PATIENCE)
        killed(service, pid)
        compute(*late[0])
        assert until(lambda: not regions(service)[0].pending, PATIENCE)
        inherits(engine_of(service.path), 8)


def test_an_engine_whose_first_process_found_no_service_claims_no_rows(service: MachineService) -> None:
    """Its processes would have different rows, and the scheduler's side would refuse them."""
    words = {"socket": str(service.path), "tiers": ["local"], **KEEP}
    stack = load_stack({"primary": {"capacity": 24 * max(GROUP_BYTES)}, "machine": words})
    away = load_stack({"primary": stack.primary, "machine": {**words, "socket": "/nothing.sock"}})
    name = f"engine-{os.getpid()}"
    sides = [make_rows(one, 24, model(), GROUP_BYTES, name=name, side=RegionSide(2)) for one in (away, stack)]
    try:
        assert [side.is_complete for side in sides] == [True, True]
    finally:
        for side in sides:
            side.close()


def test_workers_of_two_engines_with_one_name_do_not_get_the_same_rows(service: MachineService) -> None:
    words = {"socket": str(service.path), "tiers": ["local"], **KEEP}
    stack = load_stack({"primary": {"capacity": 24 * max(GROUP_BYTES)}, "machine": words})

    def side(mark: bytes | None) -> SharedRegion:
        return make_rows(stack, 24, model(), GROUP_BYTES, name=f"twice-{os.getpid()}", side=RegionSide(2, mark))

    worker = side(bytes([1]) * MARK_BYTES)
    try:
        with pytest.raises(RegionError, match="one engine id"):
            side(bytes([1]) * MARK_BYTES)
        (scheduler := side(None)).close()
        assert worker.is_complete
    finally:
        worker.close()
    assert isinstance(scheduler, KeptRegion)


def test_rows_of_another_capacity_are_freed(service: MachineService) -> None:
    with victim_process(service.path) as (pid, _):
        assert recorded(service, 8)
        killed(service, pid)
        engine_of(service.path, rows=12)
        assert [region.claim.rows for region in regions(service)] == [12]


@pytest.mark.parametrize(("room", "left"), [(1 << 40, 2), (1 << 12, 1)])
def test_rows_of_another_model_are_freed_if_memory_is_short(
    service: MachineService, monkeypatch: pytest.MonkeyPatch, room: int, left: int
) -> None:
    monkeypatch.setattr("tiering.machine.regions.available_bytes", lambda: room)
    with victim_process(service.path) as (pid, _):
        assert recorded(service, 8)
        killed(service, pid)
        engine_of(service.path, name="other")
        assert len(service.regions) == left


def test_of_two_heirs_one_inherits(service: MachineService) -> None:
    with victim_process(service.path) as (pid, _):
        assert recorded(service, 8)
        killed(service, pid)
        one, two = engine_of(service.path), engine_of(service.path)
        inherits(one, 8)
        assert two.load(BLOCKS) == ([], [])
        assert one.load(BLOCKS) == (BLOCKS, [])
        one.close()
        two.close()


@pytest.mark.parametrize(
    ("damage", "left"),
    [
        # A copy into the row had begun: the row is taken, and its bytes are partly those of the next block.
        ("p = engine.manager.primary_tier; p.drop([k for k in list(p.readable.keys())[:1]])", 7),
        ("engine._rows[:, 5] ^= 1", 0),
        ("engine.manager.primary_tier.keeper.taken(np.arange(24))", 0),
        ("engine.manager.reset_cache()", 0),
        ("engine.manager.reset_cache('step-1')", 0),
    ],
)
def test_rows_whose_content_does_not_count_are_dropped(service: MachineService, damage: str, left: int) -> None:
    with victim_process(service.path) as (pid, run):
        assert recorded(service, 8)
        run(damage)
        killed(service, pid)
        heir = engine_of(service.path)
        if left:
            inherits(heir, left)
        nothing_more(service, heir)
        found, wrong = heir.load(BLOCKS, patience=0.5)
        assert (len(found), wrong) == (left, [])
        heir.close()


def test_a_kill_in_the_middle_of_a_write_leaves_the_row_unreadable(service: MachineService) -> None:
    with victim_process(service.path) as (pid, run):
        assert recorded(service, 8)
        run(
            "from tests.machine.engines import key_of\n"
            "ctx = engine.request()\n"
            "out = engine.manager.prepare_store([key_of(number) for number in range(100, 120)], ctx)\n"
            "engine._rows[out.store_spec.block_ids] = 7\n"
        )
        killed(service, pid)
        heir = engine_of(service.path)
        nothing_more(service, heir)
        found, wrong = heir.load([*BLOCKS, *range(100, 120)], patience=0.5)
        assert wrong == []
        assert len(found) == 4
        assert inherited(heir) == 4
        heir.close()


def test_a_new_common_state_of_the_weights_drops_the_record(service: MachineService) -> None:
    """Another engine is reset while the first one's rows wait."""
    with victim_process(service.path) as (pid, _):
        assert recorded(service, 8)
        other = SmallEngine(service.path)
        assert other.serving()
        killed(service, pid)
        other.manager.reset_cache("step-1")
        assert other.serving()
        heir = engine_of_later(service.path, revision="step-1")
        nothing_more(service, heir)
        assert heir.load(BLOCKS, patience=0.5) == ([], [])
        heir.close()
        other.close()


def engine_of_later(socket: Path, **words: Any) -> SmallEngine:
    engine = SmallEngine(socket, machine=KEEP, **words)
    assert engine.serving()
    return engine


def test_rows_that_the_heir_has_used_are_left_alone(service: MachineService) -> None:
    """Its tiers may join long after it has begun to store."""
    hold = threading.Event()
    with victim_process(service.path) as (pid, _):
        assert recorded(service, 8)
        killed(service, pid)
        verify = service.regions._verify
        service.regions._verify = lambda region: verify(region) if hold.is_set() else None  # type: ignore[method-assign]
        heir = engine_of(service.path)
        heir.store(range(200, 216))
        hold.set()
        nothing_more(service, heir)
        found, wrong = heir.load([*BLOCKS, *range(200, 216)], patience=0.5)
        assert wrong == []
        assert set(range(200, 216)) <= set(found)
        heir.close()


def test_the_rows_of_an_heir_outlive_it_too(service: MachineService) -> None:
    with victim_process(service.path) as (pid, _):
        assert recorded(service, 8)
        killed(service, pid)
        with victim_process(service.path, blocks=()) as (second, run):
            run("assert engine.settle(lambda: engine.manager._stats.inherited_blocks == 8)")
            run("engine.store(range(50, 54))")
            assert until(lambda: len(regions(service)[0].entries) == 12, PATIENCE)
            killed(service, second)
            heir = engine_of(service.path)
            inherits(heir, 12)
            wanted = [*BLOCKS, *range(50, 54)]
            assert heir.load(wanted) == (wanted, [])
            heir.close()


def test_rows_that_no_engine_claims_are_freed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiering.machine.regions.LEAVE_SECONDS", 0.0)
    with service_in_thread(tmp_path / "cache.sock", MEMORY) as service:
        service.regions._keep_seconds = 0.0
        with victim_process(service.path) as (pid, _):
            assert recorded(service, 8)
            os.kill(pid, signal.SIGKILL)
            assert until(lambda: len(service.regions) == 0, PATIENCE)


def test_the_services_thread_does_not_free_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel takes seconds for tens of GiB."""
    clock, pool = FakeClock(), ThreadPool("kv-test", 1)
    work: list[Callable[[], object]] = []
    monkeypatch.setattr(pool, "run", lambda free, _: work.append(free))
    regions = Regions(pool, lambda: None, clock, 1 << 30, 5.0, {})
    region = regions._make(RowsClaim("name", "alike", 4, 16384, 1, 1))
    region.left_at = clock()
    clock.advance(6.0)
    regions.step()
    assert len(regions) == 0
    assert os.fstat(region.fd).st_size > 4 * 16384
    (free,) = work
    free()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(region.fd)


def test_an_engine_whose_old_rows_go_to_another_keeps_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the process that joins it later would get other rows than the first."""
    regions = Regions(ThreadPool("kv-test", 1), lambda: None, FakeClock(), 1 << 30, 5.0, {})
    free: set[Any] = set()
    monkeypatch.setattr(regions, "_is_free", free.__contains__)

    def claimed(name: str) -> Any:
        peer = Mock(pidfd=-1)
        regions.claim(peer, json.dumps(asdict(RowsClaim(name, "alike", 4, 16384, 2, 1))).encode())
        return peer

    first = claimed("one")
    old = regions._of[first]
    regions.leave(first)
    again = regions._of[claimed("one")]
    free.add(old)
    assert regions._of[claimed("two")] is old
    assert regions._of[claimed("one")] is again
    regions.close()


def test_rows_of_an_engine_that_was_closed_are_freed_while_its_process_lives(
    service: MachineService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiering.machine.regions.LEAVE_SECONDS", 0.0)
    engine = engine_of(service.path)
    engine.store(BLOCKS)
    engine.close()
    assert until(lambda: len(service.regions) == 0, PATIENCE)


def test_without_a_service_the_rows_are_the_engines_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = SmallEngine(tmp_path / "nothing.sock", machine=KEEP)
    assert not isinstance(engine.manager.primary_tier._region, KeptRegion)
    engine.store(BLOCKS)
    assert engine.load(BLOCKS) == (BLOCKS, [])
    assert "the rows will not outlive this engine" in caplog.text
    engine.close()


def test_without_the_word_no_rows_are_claimed(service: MachineService) -> None:
    engine = SmallEngine(service.path)
    assert engine.serving()
    assert len(service.regions) == 0
    assert engine.manager.primary_tier.keeper is None
    engine.close()


def test_an_engine_goes_on_when_the_service_ends(tmp_path: Path) -> None:
    with service_in_thread(tmp_path / "cache.sock", MEMORY) as service:
        engine = engine_of(service.path)
        engine.store(BLOCKS)
    keeper: Any = engine.manager.primary_tier.keeper
    assert engine.settle(lambda: keeper._connection is None)
    engine.store(range(20, 24))
    wanted: Sequence[int] = [*BLOCKS, *range(20, 24)]
    assert engine.load(wanted) == (wanted, [])
    rows = np.asarray(engine.manager.primary_tier.get_kv_memoryview())
    assert any(row[:10].tobytes() == content(0, 0)[:10] for row in rows)
    engine.close()
