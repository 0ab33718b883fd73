"""Users that a stack of a service names: each has its own blocks, and finds nothing of the others."""

from __future__ import annotations

import json
import math
import os
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import yaml

from tests.cli.runner import kv_tiering
from tests.machine.hosts import ServiceProcess, service_in_thread, service_process, stack_of
from tests.machine.users import (
    ANNA,
    BERT,
    CARL,
    Held,
    UserProcess,
    claim,
    close,
    end_claim,
    forget_rows,
    inherited,
    is_served,
    knock,
    knocks,
    load,
    needs_root,
    open_others,
    present,
    reset,
    rows_in_use,
    serving,
    start_engine,
    store,
    write_claimed,
)
from tiering import ModelIdentity, load_stack, open_manager
from tiering.api.namespace import Namespace
from tiering.cli.serve import users_of
from tiering.config.io_process import builders
from tiering.errors import ConfigError
from tiering.machine.claim import describe
from tiering.machine.counts import ServiceCounts
from tiering.machine.link import SILENT_SECONDS
from tiering.machine.messages import MessageError
from tiering.machine.peer_rows import PeerRows
from tiering.machine.region import Region, RowsClaim
from tiering.machine.service import MOST_CONNECTIONS, MachineService
from tiering.machine.user_names import number_of
from tiering.machine.users import RESTART_SECONDS, UserThread, look_at, parameters_of, service_for
from tiering.machine.words import Greeting
from tiering.primary.memory.region import PAGE
from tiering.testing.clock import FakeClock, until

BLOCKS = range(8)
TIERS = ("peers", "memory", "local")


@pytest.fixture
def directory() -> Iterator[Path]:
    """Yield a directory that other users may enter; those of pytest are private."""
    with tempfile.TemporaryDirectory(prefix="kv-users-", dir="/tmp") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture
def user() -> Iterator[Callable[..., UserProcess]]:
    made: list[UserProcess] = []

    def make(number: int, **words: int) -> UserProcess:
        made.append(UserProcess(number, **words))
        return made[-1]

    yield make
    for one in made:
        one.end()


@pytest.fixture
def service(directory: Path) -> Iterator[ServiceProcess]:
    tiers = (
        {"type": "memory", "capacity": "16MiB"},
        {"type": "local", "path": str(directory / "disk"), "capacity": "16MiB", "fill": "all"},
    )
    running = ServiceProcess(directory, stack_of(*tiers, users=[ANNA, str(BERT)]))
    try:
        yield running.wait_for_socket()
    finally:
        if running.process.poll() is None:
            running.kill()
        running.process.wait()


# ---------------------------------------------------------------------------------------------------- what others find


@needs_root
def test_users_find_their_own_blocks_and_none_of_the_others(
    service: ServiceProcess, user: Callable[..., UserProcess], directory: Path
) -> None:
    anna, second, bert, root = user(ANNA), user(ANNA), user(BERT), user(0)
    for weights, one in enumerate((anna, second, bert, root)):
        assert one.do(start_engine, service.socket, TIERS, 1 if one is second else weights + 1) == [True] * 3
    assert anna.do(store, BLOCKS)
    assert second.do(load, BLOCKS) == ([*BLOCKS], [])
    for other in (bert, root):
        assert other.do(load, BLOCKS) == ([], [])
        assert [other.do(present, tier, BLOCKS) for tier in range(3)] == [[]] * 3
    assert second.do(present, 1, BLOCKS) == second.do(present, 2, BLOCKS) == [*BLOCKS]
    assert bert.do(store, BLOCKS)
    assert root.do(store, BLOCKS)
    for one in (anna, second, bert, root):
        one.do(forget_rows)
        assert one.do(load, BLOCKS) == ([*BLOCKS], []), "bytes of another user's engine"
    assert bert.do(reset, "step-1")
    for one in (anna, root):
        one.do(forget_rows, 20_000)
        assert one.do(load, BLOCKS) == ([*BLOCKS], []), "a reset of another user"
    for one in (anna, second, bert, root):
        one.do(close)
    assert service.end() == 0
    names = [path.name.removeprefix("replica-") for path in (directory / "disk").glob("replica-*")]
    held = [kv_tiering("inspect", directory / "service.yaml", "--replica", name).out for name in names]
    assert len(names) == 3
    assert [f"user {ANNA}" in out for out in held].count(True) == 1


@needs_root
def test_rows_of_an_engine_that_was_killed_go_to_its_user_alone(
    service: ServiceProcess, user: Callable[..., UserProcess]
) -> None:
    anna, bert, again = user(ANNA), user(BERT), user(ANNA)
    assert anna.do(start_engine, service.socket, TIERS, 1) == [True] * 3
    assert anna.do(store, BLOCKS)
    assert anna.do(rows_in_use) == len(BLOCKS)
    anna.kill()
    assert bert.do(start_engine, service.socket, TIERS, 2) == [True] * 3
    assert bert.do(inherited, 0)
    assert bert.do(rows_in_use) == 0, "rows with the bytes of another user"
    assert again.do(start_engine, service.socket, TIERS, 1) == [True] * 3
    assert again.do(inherited, len(BLOCKS))


@needs_root
def test_a_claim_with_the_words_of_another_users_engine_gets_other_rows(
    service: ServiceProcess, user: Callable[..., UserProcess]
) -> None:
    anna, bert = user(ANNA), user(BERT)
    model = ModelIdentity(name="model", weights="0" * 40, dtype="bfloat16", layout="rows")
    text = describe("name", model, (4096,), (), rows=4, stride=4096, sides=3, tiers=1)
    assert anna.do(write_claimed, service.socket, text) == b"secret"
    assert anna.do(claim, service.socket, text) == b"secret"
    assert bert.do(claim, service.socket, text) == bytes(6)


def open_files() -> int:
    return len([*Path("/proc/self/fd").iterdir()])


def test_a_process_that_claims_rows_again_and_again_leaves_no_descriptor_for_each(tmp_path: Path) -> None:
    held: Held = {}
    model = ModelIdentity(name="model", weights="0" * 40, dtype="bfloat16", layout="rows")
    text = describe("name", model, (4096,), (), rows=4, stride=4096, sides=3, tiers=1)
    with service_in_thread(tmp_path / "cache.sock", {"type": "memory", "capacity": "1MiB"}) as service:
        claim(held, service.path, text, None)
        before = open_files()
        for _ in range(12):
            claim(held, service.path, text, None)
            end_claim(held)
            assert until(lambda: service.look(60.0).service.service_connections == 1, 60.0)
        assert [len(region.processes) for region in service.regions._regions] == [1]
        assert open_files() == before
        end_claim(held)


def test_a_region_keeps_a_descriptor_of_each_living_process_alone() -> None:
    claimed = RowsClaim("name", "alike", 1, PAGE, 3, 1)
    rows, words = np.zeros((1, PAGE), np.uint8), np.zeros(1, np.uint64)
    region = Region(claimed, -1, -1, rows, words, (0, 0))
    children = [subprocess.Popen(["sleep", "600"]) for _ in range(2)]
    peers = [Mock(pid=child.pid, pidfd=os.pidfd_open(child.pid)) for child in children]
    before = open_files()
    for peer in (*peers, *peers, Mock(pid=0, pidfd=peers[0].pidfd)):
        region.add_process(peer)
    assert [*region.processes.values()] == [peers[0].pid, peers[1].pid, 0]
    assert not region.is_left()
    for child, left in zip(children, (1, 0), strict=True):
        child.kill()
        child.wait()
        assert region.is_left() == (not left)
        assert len(region.processes) == left
    assert open_files() == before
    region.add_process(Mock(pid=7, pidfd=-1))
    assert not region.is_left(), "nothing proves the death of a process without a descriptor"
    for peer in peers:
        os.close(peer.pidfd)


# ------------------------------------------------------------------------------------------------------ who may connect


@needs_root
def test_the_kernel_and_the_service_refuse_all_others_and_engines_refuse_other_services(
    service: ServiceProcess, user: Callable[..., UserProcess]
) -> None:
    anna, outside, carl = user(ANNA), user(ANNA, group=ANNA), user(CARL)
    assert anna.do(knock, service.socket) == "taken"
    assert anna.do(knock, service.socket, None).endswith("not to the engine's own, and machine.user names no other")
    assert anna.do(knock, service.socket, str(BERT)).endswith(f"not to {BERT}, as machine.user says")
    assert anna.do(knock, service.socket, "nosuchuser").startswith("there is no user 'nosuchuser' on this machine")
    assert "Permission denied" in outside.do(knock, service.socket)
    assert f"not of {CARL}" in carl.do(knock, service.socket)
    assert "Permission denied" in anna.do(open_others, service.process.pid)
    assert f"not of {CARL}" in service.log


@needs_root
def test_a_user_that_uses_up_its_connections_leaves_the_others_theirs(
    service: ServiceProcess, user: Callable[..., UserProcess]
) -> None:
    anna, bert = user(ANNA), user(BERT)
    number, reason = bert.do(knocks, service.socket)
    assert number == MOST_CONNECTIONS // 3
    assert f"connections of the user {BERT}" in reason
    assert anna.do(start_engine, service.socket, TIERS, 1) == [True] * 3


@needs_root
def test_a_user_that_is_not_named_any_more_is_refused_and_the_others_find_their_blocks(
    service: ServiceProcess, user: Callable[..., UserProcess], directory: Path
) -> None:
    anna, bert = user(ANNA), user(BERT)
    for weights, one in enumerate((anna, bert)):
        assert one.do(start_engine, service.socket, ("local",), weights) == [True]
        assert one.do(store, BLOCKS)
        one.do(forget_rows)
    assert service.end() == 0
    stack = yaml.safe_load((directory / "service.yaml").read_text())
    (directory / "service.yaml").write_text(yaml.safe_dump({**stack, "users": [ANNA]}))
    service.restart()
    assert anna.do(serving)
    assert anna.do(load, BLOCKS) == ([*BLOCKS], [])
    assert f"not of {BERT}" in bert.do(knock, service.socket)


@needs_root
def test_a_user_without_any_process_is_unknown_in_the_service(
    service: ServiceProcess, user: Callable[..., UserProcess]
) -> None:
    assert user(65534).do(knock, service.socket).startswith("the kernel cannot name the engine's user here")


# --------------------------------------------------------------------------------------------------------------- words


def users(*names: str | int) -> dict[int, str]:
    stack = {"primary": {"capacity": "1MiB"}, "secondary": [{"type": "memory", "capacity": "1MiB"}]}
    return users_of("service.yaml", load_stack({**stack, "users": [*names]}))


def test_users_are_named_by_name_or_number() -> None:
    assert users(61001, "61002", "daemon") == {61001: "61001", 61002: "61002", number_of("daemon"): "daemon"}
    assert users() == {}


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (("nosuchuser",), r"users\[0\]: there is no user 'nosuchuser' on this machine"),
        ((61001, "61001"), r"users\[1\]: '61001' is 61001; leave it out"),
        ((61001, "061001"), r"users\[1\]: '061001' is 61001; leave it out"),
        ((os.geteuid(),), "is the service's own user, who needs no name"),
        ((65534,), "any that the kernel cannot name"),
        ((1 << 32,), "any that the kernel cannot name"),
        (("a:b",), r"users\[0\]"),
        ((-1,), r"users\[0\]"),
        (tuple(range(61001, 61009)), "users"),
    ],
)
def test_users_that_cannot_be_told_apart_are_refused(names: tuple[str | int, ...], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        users(*names)


def test_engines_refuse_the_word_of_a_service_and_check_knows_it(tmp_path: Path) -> None:
    stack = {"primary": {"capacity": "1MiB"}, "users": ["daemon", "nosuchuser"]}
    with pytest.raises(ConfigError, match="users: belongs into the stack of a service"):
        open_manager(load_stack(stack), 4096, ModelIdentity(name="m", weights="w", dtype="f", layout="l"))
    (tmp_path / "service.yaml").write_text(yaml.safe_dump(stack))
    done = kv_tiering("check", tmp_path / "service.yaml", "--json", "--block-bytes", "4KiB")
    found = {each["severity"]: each["text"] for each in json.loads(done.out)["findings"] if each["subject"] == "users"}
    assert found["ok"] == f"daemon has the number {number_of('daemon')}"
    assert "no user 'nosuchuser'" in found["error"]


@needs_root
def test_a_service_whose_users_fill_the_disk_before_their_capacities_says_so_at_its_start(directory: Path) -> None:
    room = os.statvfs(directory)
    disk = {"type": "local", "path": str(directory), "capacity": room.f_blocks * room.f_frsize // 2}
    with service_process(directory, disk, users=[ANNA, BERT]) as running:
        assert "for each of 3 users are" in running.log
        assert running.end() == 0


@pytest.mark.parametrize("sent", ['{"model":"m"}', '{"model":"m","user":"anna"}', '{"model":"m","user":""}'])
def test_no_text_of_an_engine_names_the_namespace_of_another_user(sent: str) -> None:
    own, anna, bert = (parameters_of(user, sent) for user in ("", "anna", "bert"))
    assert own == sent
    assert json.loads(bert) == {"model": "m", "user": "bert"}
    assert json.loads(anna) == {"model": "m", "user": "anna"}
    assert len({Namespace(text).directory for text in (anna, bert)}) == 2


def test_two_spellings_of_a_namespace_are_one(tmp_path: Path) -> None:
    tiers = builders(load_stack(stack_of({"type": "memory", "capacity": "1MiB"})).secondary)
    service = MachineService(tmp_path / "cache.sock", tiers, most_bytes=1 << 20, user="anna")
    try:
        texts = ('{"a":1,"b":2}', '{"b": 2, "a": 1}', '{"a":1,"b":3}')
        spaces = [service._namespace(Greeting("memory", text, (64,), 4, 64)) for text in texts]
        assert spaces[0] is spaces[1] is not spaces[2]
    finally:
        service.stop()
        assert service.run()


@pytest.mark.parametrize("sent", ["", "[]", "{", "7", '{"a":' * 5000, "NaN"])
def test_parameters_that_are_no_mapping_are_refused(sent: str) -> None:
    with pytest.raises(MessageError):
        parameters_of("anna", sent)


# ------------------------------------------------------------------------------------------------------------- threads


@pytest.fixture
def threads(directory: Path) -> Iterator[dict[int, UserThread]]:
    """Run a service for root, Anna and Bert in threads of this process, and yield those of Anna and Bert."""
    tiers = (
        {"type": "memory", "capacity": "16MiB"},
        {"type": "local", "path": str(directory / "disk"), "capacity": "16MiB", "fill": "all"},
    )
    found = {"peers": PeerRows, **builders(load_stack(stack_of(*tiers)).secondary)}
    build = partial(MachineService, directory / "cache.sock", found, most_bytes=1 << 30, parts=3)
    users = {number: UserThread(str(number), partial(build, user=str(number))) for number in (ANNA, BERT)}
    own = build(users=users)
    own.listen()
    thread = threading.Thread(target=own.run, name="kv-test-service")
    thread.start()
    yield users
    own.stop()
    thread.join(60.0)
    assert not thread.is_alive()
    assert all(user.has_ended for user in users.values())


@needs_root
@pytest.mark.parametrize("kind", ["error", "hang"])
def test_the_engines_of_others_do_not_notice_the_failure_of_a_users_thread(
    threads: dict[int, UserThread],
    user: Callable[..., UserProcess],
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    monkeypatch.setattr("tiering.machine.users.SILENT_SECONDS", 0.5)
    socket, going_on = directory / "cache.sock", threading.Event()
    anna, bert, root = user(ANNA), user(BERT), user(0)
    for weights, one in enumerate((anna, bert, root)):
        assert one.do(start_engine, socket, TIERS, weights) == [True] * 3
        assert one.do(store, BLOCKS)
    broken: Any = threads[ANNA].service

    def fail() -> None:
        del broken.turn
        if kind == "error":
            raise RuntimeError("a defect")
        assert going_on.wait(60.0)

    monkeypatch.setattr("tiering.machine.users.RESTART_SECONDS", 0.0)
    threads[ANNA]._due = math.inf if kind == "error" else 0.0
    broken.turn = fail
    broken.wake()
    assert until(lambda: threads[ANNA].trouble, 60.0)
    own: Any = threads[ANNA]
    assert "is out of order: it" in anna.do(knock, socket)
    for one in (bert, root):
        one.do(forget_rows)
        assert one.do(load, BLOCKS) == ([*BLOCKS], [])
    going_on.set()
    threads[ANNA]._due = 0.0
    assert anna.do(serving)
    anna.do(forget_rows)
    assert anna.do(load, BLOCKS) == ([*BLOCKS], [])
    assert (own.service is broken) == (kind == "hang")
    assert bert.do(load, BLOCKS) == ([*BLOCKS], [])


@needs_root
def test_a_users_part_that_has_failed_begins_anew_once_its_io_has_ended(
    threads: dict[int, UserThread], user: Callable[..., UserProcess], directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiering.machine.service.CLOSE_AGAIN", 0.05)
    monkeypatch.setattr("tiering.machine.users.RESTART_SECONDS", 0.0)
    socket, anna = directory / "cache.sock", user(ANNA)
    threads[ANNA]._due = 0.0
    assert anna.do(start_engine, socket, TIERS, 0) == [True] * 3
    assert anna.do(store, BLOCKS)
    broken: Any = threads[ANNA].service
    (space,) = broken._namespaces.values()
    tier, ended, attempts = space.tiers["local"].tier, threading.Event(), []
    shutdown = tier.shutdown

    def shut_down(deadline: float) -> bool:
        attempts.append(deadline)
        return shutdown(deadline) and ended.is_set()

    monkeypatch.setattr(tier, "shutdown", shut_down)
    monkeypatch.setattr(broken, "turn", Mock(side_effect=RuntimeError("a defect")))
    broken.wake()
    assert until(lambda: len(attempts) > 2, 60.0)
    assert until(lambda: not anna.do(is_served), 60.0), "requests wait for the deadlines of their loads"
    assert "is out of order: it has failed" in anna.do(knock, socket)
    assert threads[ANNA].service is broken, "two of them would write into the same rows"
    ended.set()
    assert anna.do(serving)
    anna.do(forget_rows)
    assert anna.do(load, BLOCKS) == ([*BLOCKS], [])


def test_a_signal_ends_the_wait_for_io_that_does_not_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiering.machine.service.CLOSE_AGAIN", 0.0)
    service, attempts = MachineService(tmp_path / "cache.sock", {}, most_bytes=1, user="anna"), []

    def end_io(deadline: float) -> bool:
        attempts.append(deadline)
        if len(attempts) == 3:
            service.stop()
        return False

    monkeypatch.setattr(service, "_end_io", end_io)
    assert not service.abort()
    assert len(attempts) == 3


class FailingService:
    """A service whose first thread has an error."""

    made = 0

    def __init__(self, *, can_end: bool = True) -> None:
        type(self).made += 1
        self.fails = type(self).made == 1
        self.can_end = can_end
        self.is_full = self.stopping = False
        self.stopped = threading.Event()
        self.taken_over: list[object] = []

    def run(self, beat: Callable[[], object]) -> bool:
        beat()
        if self.fails:
            raise RuntimeError("a defect")
        return self.stopped.wait(60.0)

    def stop(self) -> None:
        self.stopped.set()

    def abort(self) -> bool:
        return self.can_end

    def take_over(self, failed: object) -> None:
        self.taken_over.append(failed)


@pytest.fixture
def clock() -> FakeClock:
    FailingService.made = 0
    return FakeClock()


def failed(clock: FakeClock, **words: Any) -> UserThread:
    """Return a user whose service has failed, and ended its I/O if it could."""
    build: Any = partial(FailingService, **words)
    user = UserThread("anna", build, clock)
    user.start()
    user.ends(60.0)
    return user


def test_after_an_error_a_user_alone_is_refused_until_its_service_is_started_again(
    clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    user, own = failed(clock), Mock(stopping=False, is_full=False)
    assert user.has_ended
    assert "the service of the user anna has failed" in caplog.text
    service, reason = service_for(ANNA, own, {ANNA: user})
    assert (service, reason) == (None, f"the part of the service for the user {ANNA} is out of order: it has failed")
    assert service_for(os.geteuid(), own, {ANNA: user}) == (own, "")
    before: Any = user.service
    user.step()
    assert user.service is before, "an error at each start would keep the machine busy"
    clock.advance(RESTART_SECONDS)
    user.step()
    again: Any = user.service
    assert again.taken_over == [before]
    assert service_for(ANNA, own, {ANNA: user}) == (again, "")
    user.stop()
    assert user.ends(60.0)


def test_a_service_whose_io_does_not_end_after_an_error_is_not_started_beside_itself(clock: FakeClock) -> None:
    user = failed(clock, can_end=False)
    clock.advance(1000.0)
    user.step()
    assert (FailingService.made, user.has_ended, user.trouble) == (1, False, "it has failed")


def test_a_service_that_cannot_be_built_again_is_tried_later(
    clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    user = failed(clock)
    build, user._build = user._build, Mock(side_effect=OSError(24, "Too many open files"))
    clock.advance(RESTART_SECONDS)
    user.step()
    assert "the service of the user anna cannot be started: [Errno 24] Too many open files" in caplog.text
    user._build = build
    user.step()
    assert not user.is_alive()
    clock.advance(RESTART_SECONDS)
    user.step()
    assert not user.trouble
    user.stop()
    assert user.ends(60.0)


def test_a_signal_while_a_service_is_started_again_ends_the_new_one_too(clock: FakeClock) -> None:
    user = failed(clock)
    build = user._build

    def built() -> Any:
        user.stop()
        return build()

    user._build = built
    clock.advance(RESTART_SECONDS)
    user.step()
    assert FailingService.made == 2
    assert user.ends(60.0)
    clock.advance(RESTART_SECONDS)
    user.step()
    assert FailingService.made == 2, "a service that has ended as it should"


def test_a_user_without_a_thread_is_refused_and_gets_one_once_there_is_room(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, clock: FakeClock
) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    FailingService.made = 1
    own: Any = Mock(stopping=False, is_full=False)
    build: Any = FailingService
    users = {ANNA: UserThread("anna", build, clock)}
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", start)
        users[ANNA].start()
    assert "the user anna is not served, because no thread can be started" in caplog.text
    assert users[ANNA].has_ended
    assert service_for(ANNA, own, users)[0] is None
    assert service_for(os.geteuid(), own, users) == (own, "")
    clock.advance(RESTART_SECONDS)
    users[ANNA].step()
    assert service_for(ANNA, own, users) == (users[ANNA].service, "")
    users[ANNA].stop()
    assert users[ANNA].ends(60.0)


def test_a_thread_that_hangs_is_named_with_its_place_and_is_served_again_once_it_goes_on(
    clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    FailingService.made = 1
    build: Any = FailingService
    user, own = UserThread("anna", build, clock), Mock(stopping=False, is_full=False)
    user.start()
    assert until(lambda: user._beat_at == clock(), 60.0)
    clock.advance(SILENT_SECONDS)
    user.step()
    assert not user.trouble
    clock.advance(0.1)
    for _ in range(3):
        user.step()
    assert caplog.text.count("the user anna is not served: its thread has not run for 5 s") == 1
    assert "self.stopped.wait(60.0)" in caplog.text
    assert service_for(ANNA, own, {ANNA: user})[0] is None
    user._beat()
    user.step()
    assert "the user anna is served again" in caplog.text
    assert service_for(ANNA, own, {ANNA: user})[0] is user.service
    user.stop()
    assert user.ends(60.0)


@pytest.mark.parametrize("is_alive", [True, False])
def test_counts_of_a_user_whose_service_hangs_or_has_ended_are_the_last_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_alive: bool
) -> None:
    hanging = MachineService(tmp_path / "cache.sock", {}, most_bytes=1, user="anna", parts=2)
    hanging.counts = ServiceCounts(service_responsive=1, service_connections=5)
    with service_in_thread(tmp_path / "cache.sock", {"type": "memory", "capacity": "1MiB"}) as own:
        assert look_at(own, {}, 60.0).service.service_responsive == 1
        thread = UserThread("anna", lambda: hanging)
        monkeypatch.setattr(thread, "is_alive", lambda: is_alive)
        look = look_at(own, {ANNA: thread}, 1.0 if is_alive else 600.0)
    assert look.service.service_connections == 5
    assert look.service.service_responsive == 1, "one user could make an operator's probe restart the service"
    assert look_at(hanging, {}, 0.1).service.service_responsive == 0
