"""The queues of engines outlive the service, and another process takes its place."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.machine.engines import PATIENCE, SmallEngine
from tests.machine.hosts import ServiceProcess, service_in_thread, service_process, stack_of
from tests.machine.test_service import Raw
from tiering.cli.successor import end_predecessor
from tiering.config.io_process import builders
from tiering.config.stack_file import load_stack
from tiering.errors import ConfigError, TieringError
from tiering.machine.link import greet
from tiering.machine.messages import Kind, Record
from tiering.machine.service import MachineService
from tiering.machine.words import Greeting, read_state
from tiering.runtime.door import bind_socket
from tiering.secondary.contract import SecondaryTierManager, TierContext
from tiering.testing.clock import until
from tiering.testing.fake_tier import FakeTier
from tiering.testing.keys import key_of as raw_key

BLOCKS = list(range(100))


@pytest.fixture
def service(tmp_path: Path) -> Iterator[ServiceProcess]:
    disk = {"type": "local", "path": str(tmp_path / "disk"), "capacity": "64MiB"}
    with service_process(tmp_path, disk) as running:
        yield running


@pytest.fixture
def engine(service: ServiceProcess) -> Iterator[Callable[..., SmallEngine]]:
    made: list[SmallEngine] = []

    def make(rows: int = 200) -> SmallEngine:
        made.append(SmallEngine(service.socket, rows=rows))
        assert made[-1].serving()
        return made[-1]

    yield make
    for one in made:
        one.close()


# -------------------------------------------------------------------------------------------------- the service's end


class Ending:
    """A service in a thread, whose tier ends stores when the test says so, and an engine with a store."""

    def __init__(self, path: Path, seconds: float) -> None:
        self.tiers: list[FakeTier] = []
        self.service = MachineService(path, {"fake": self._build}, most_bytes=1 << 30, shutdown_seconds=seconds)
        self.service.listen()
        self.beats: list[float] = []
        beat = partial(self.beats.append, 0.0)
        self.thread = threading.Thread(target=self.service.run, args=(beat,), name="kv-test-service")
        self.thread.start()
        self.engine = Raw(path, tier="fake")
        state = self.engine.receive(Kind.STATE)
        self.engine.send(Record(Kind.FOLLOWED, state.number))
        # The tier takes one block at a time, so that one waits for it.
        self.engine.send(Record(Kind.STORE, 7, seconds=60.0, keys=[raw_key(1), raw_key(2)], rows=[3, 4]))
        assert until(lambda: len(self.tiers[0].stores) == 1, PATIENCE)

    def _build(self, context: TierContext) -> FakeTier:
        self.tiers.append(FakeTier(context.name, held={raw_key(9)}, allowance=1))
        return self.tiers[-1]

    def finish_store(self) -> None:
        assert until(lambda: len(self.tiers[0].stores) == 1, PATIENCE)
        self.tiers[0].finish(self.tiers[0].stores[0])
        self.service.wake()

    def joined(self) -> bool:
        self.thread.join(PATIENCE)
        self.engine.close()
        return not self.thread.is_alive()


def test_what_engines_have_sent_is_stored_before_the_end_and_loads_go_on(tmp_path: Path) -> None:
    ending = Ending(tmp_path / "cache.sock", 60.0)
    engine, tier = ending.engine, ending.tiers[0]
    ending.service.stop()
    while read_state(engine.receive(Kind.STATE).text)[2]:
        pass  # a window of 0: the engine keeps what it has queued
    beats = len(ending.beats)
    assert until(lambda: len(ending.beats) > beats + 1, PATIENCE)  # for the watchdog, which an upgrade does not stop
    engine.send(Record(Kind.LOAD, 8, seconds=60.0, keys=[raw_key(9)], rows=[5]))
    assert until(lambda: bool(tier.loads), PATIENCE)
    tier.finish(tier.loads[0])
    ending.service.wake()
    assert engine.receive(Kind.RESULT)[:5] == (Kind.RESULT, 8, 0, 0.0, b"\1")
    ending.finish_store()
    ending.finish_store()
    assert engine.receive(Kind.RESULT)[:5] == (Kind.RESULT, 7, 0, 0.0, b"\1\1")
    assert engine.ended()
    assert ending.joined()


def test_a_store_that_does_not_end_in_time_is_counted_and_the_service_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ending = Ending(tmp_path / "cache.sock", 0.4)
    ending.service.stop()
    assert until(lambda: "2 block(s) are not stored in time" in caplog.text, PATIENCE)
    assert ending.joined()


def test_no_other_service_begins_before_the_end(tmp_path: Path) -> None:
    path = tmp_path / "cache.sock"
    ending = Ending(path, 60.0)
    ending.service.stop()
    while read_state(ending.engine.receive(Kind.STATE).text)[2]:
        pass
    with pytest.raises(ConfigError, match="another process listens there"):
        bind_socket(path)
    with pytest.raises(TieringError, match="the service ends"):
        greet(str(path), Greeting("").text(), ())
    ending.finish_store()
    ending.finish_store()
    assert ending.engine.ended()
    assert ending.joined()
    assert not path.exists()


def test_a_second_signal_ends_the_wait_and_reports_no_store_that_the_next_service_may_take(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ending = Ending(tmp_path / "cache.sock", 60.0)
    ending.service.stop()
    while read_state(ending.engine.receive(Kind.STATE).text)[2]:
        pass
    ending.service.stop()
    assert until(lambda: "2 block(s) are not stored in time" in caplog.text, PATIENCE)
    ending.finish_store()  # it has begun, and touches the row until then
    with pytest.raises(AssertionError, match="the connection ended"):
        ending.engine.receive(Kind.RESULT)
    assert ending.joined()


def test_stores_for_which_an_end_does_not_wait_are_made_by_the_next_service(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, numbers = tmp_path / "cache.sock", list(range(20))
    memory = {"type": "memory", "name": "local", "capacity": "16MiB"}
    begin: list[Callable[[], object]] = []

    def build(context: TierContext) -> SecondaryTierManager:
        """Return a tier that takes one block, and stores it when the test says so."""
        tier: Any = builders(load_stack(stack_of(memory)).secondary)["local"](context)
        store = tier.submit_store
        tier.submit_store = lambda job: begin.append(partial(store, job))
        tier.traits.intake.credit = lambda *_: 1 - len(begin)
        return tier  # type: ignore[no-any-return]

    with service_in_thread(path, local=build) as service:
        one = SmallEngine(path)
        assert one.serving()
        one.store(numbers)
        assert one.settle(lambda: one.stat("cascades_active") > 1 and bool(begin))
        service.stop()
        service.stop()
        assert until(lambda: "are not stored in time" in caplog.text, PATIENCE)
        begin[0]()
        assert one.settle(lambda: not one.manager.secondary_tiers[0].serving)  # type: ignore[attr-defined]
    with service_in_thread(path, memory):
        assert one.serving()
        assert one.stored()
        assert one.stat("cascades") == len(numbers)
        one.forget_rows()
        assert one.load(numbers) == (numbers, [])
        one.close()


# ---------------------------------------------------------------------------------------------- the queues of engines


@pytest.mark.parametrize("end", ["kill", "end"])
def test_blocks_that_are_queued_when_the_service_ends_are_stored_by_the_next(
    service: ServiceProcess, engine: Callable[..., SmallEngine], end: str
) -> None:
    one = engine()
    one.store(BLOCKS)
    one.manager.on_schedule_end()
    assert one.manager.blocks_queued > 0
    getattr(service, end)()
    assert one.settle(lambda: not one.manager.secondary_tiers[0].serving)  # type: ignore[attr-defined]
    one.store(range(100, 108))  # new ones wait, too
    service.restart()
    assert one.serving()
    assert one.stored()
    assert one.stat("stores_dropped") == 0
    other = engine()
    assert other.load(range(108)) == (list(range(108)), [])
    assert other.stat("promotions") == 108


def test_blocks_wait_for_the_next_service_for_a_time(
    service: ServiceProcess, engine: Callable[..., SmallEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiering.machine.held_stores.HOLD_SECONDS", 0.0)
    one = engine()
    one.store(BLOCKS)
    one.manager.on_schedule_end()
    service.kill()
    assert one.stored()
    assert one.stat("stores_dropped") > 0
    assert one.manager.blocks_queued == 0


def test_blocks_that_a_reset_has_invalidated_do_not_wait(
    service: ServiceProcess, engine: Callable[..., SmallEngine]
) -> None:
    one = engine()
    one.store(BLOCKS)
    one.manager.on_schedule_end()
    service.kill()
    assert one.settle(lambda: not one.manager.secondary_tiers[0].serving)  # type: ignore[attr-defined]
    one.weights = 1
    assert not one.manager.reset_cache("step-1")
    one.store(range(4))
    service.restart()
    assert one.serving()
    assert one.stored()
    one.forget_rows(1000)
    assert one.load(BLOCKS)[1] == []
    assert one.stat("promotions") <= 4


# ------------------------------------------------------------------------------------------------- another process


def is_dead(pid: int) -> bool:
    pidfd = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    found = bool(poll.poll(1000 * PATIENCE))
    os.close(pidfd)
    return found


def test_another_process_takes_the_place_of_the_service(
    service: ServiceProcess, engine: Callable[..., SmallEngine], tmp_path: Path
) -> None:
    one, first = engine(), service.process
    one.store(BLOCKS)
    one.manager.on_schedule_end()
    service.process = subprocess.Popen([*first.args, "--replace"])  # type: ignore[misc]
    assert first.wait(PATIENCE) == 0
    assert one.settle(lambda: not one.manager.secondary_tiers[0].serving)  # type: ignore[attr-defined]
    assert one.serving()
    assert one.stored()
    assert engine().load(BLOCKS) == (BLOCKS, [])
    assert service.end() == 0


def test_a_signal_for_an_upgrade_does_not_end_a_process_that_waits_for_its_predecessor(service: ServiceProcess) -> None:
    first = service.process
    first.send_signal(signal.SIGSTOP)
    with subprocess.Popen([*first.args, "--replace"], stderr=subprocess.PIPE) as second:  # type: ignore[misc]
        service.process, log = second, second.stderr
        assert log is not None
        assert any(b"is to end before" in line for line in log)
        second.send_signal(signal.SIGUSR2)
        first.send_signal(signal.SIGCONT)
        assert first.wait(PATIENCE) == 0
        assert any(b"serving" in line for line in log), "it is dead, and nobody serves"
        assert service.end() == 0


def test_further_signals_to_a_service_that_ends_do_not_make_its_end_a_failure(service: ServiceProcess) -> None:
    def is_over() -> bool:
        service.process.terminate()
        return service.process.poll() is not None

    assert until(is_over, PATIENCE)
    assert service.process.returncode == 0


def test_of_two_processes_that_wait_one_takes_the_place(service: ServiceProcess) -> None:
    first = service.process
    first.send_signal(signal.SIGSTOP)
    command = [*first.args, "--replace"]  # type: ignore[misc]
    waiting = [subprocess.Popen(command, stderr=subprocess.PIPE) for _ in range(2)]
    for each in waiting:
        assert each.stderr is not None
        assert any(b"is to end before" in line for line in each.stderr)
    first.send_signal(signal.SIGCONT)
    assert first.wait(PATIENCE) == 0
    assert until(lambda: any(each.poll() is not None for each in waiting), PATIENCE)
    (out, error), (service.process,) = (
        next((each, each.communicate()[1]) for each in waiting if each.poll() is not None),
        [each for each in waiting if each.poll() is None],
    )
    assert out.returncode == 2
    assert b"another process listens there" in error
    assert greet(str(service.socket), Greeting("").text(), ()).tiers == ["peers", "local"]
    service.process.terminate()
    assert service.process.communicate(timeout=PATIENCE)[1]
    assert service.process.returncode == 0


def test_without_a_service_there_is_nothing_to_end(tmp_path: Path) -> None:
    end_predecessor(tmp_path / "cache.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as left:
        left.bind(str(tmp_path / "cache.sock"))
    end_predecessor(tmp_path / "cache.sock")


def test_the_service_of_another_user_is_not_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(tmp_path / "cache.sock"))
        listener.listen()
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
        with pytest.raises(ConfigError, match="is not replaced"):
            end_predecessor(tmp_path / "cache.sock")


def test_a_signal_starts_the_successor_and_systemd_learns_of_it(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(PATIENCE)
        environment = {"NOTIFY_SOCKET": str(tmp_path / "notify")}
        with service_process(tmp_path, {"type": "memory", "capacity": "1MiB"}, environment=environment) as service:
            assert systemd.recv(100) == b"READY=1"
            stack = (tmp_path / "service.yaml").read_text()
            (tmp_path / "service.yaml").write_text("primary: 7")
            service.process.send_signal(signal.SIGUSR2)
            assert until(lambda: "kv-tiering: " in service.log, PATIENCE)  # it is refused, and the first one goes on
            (tmp_path / "service.yaml").write_text(stack)
            assert until(lambda: _ask_again(service), PATIENCE)
            assert service.process.wait(PATIENCE) == 0
            name, _, pid = systemd.recv(100).partition(b"=")
            assert name == b"MAINPID"
            assert systemd.recv(100) == b"READY=1"
            one = SmallEngine(service.socket, ("memory",))
            assert one.serving()
            one.close()
            os.kill(int(pid), signal.SIGTERM)
            assert is_dead(int(pid))


def _ask_again(service: ServiceProcess) -> bool:
    """Ask for a successor; return True once the service has ended for one."""
    if service.process.poll() is None:
        service.process.send_signal(signal.SIGUSR2)
    return service.process.poll() is not None
