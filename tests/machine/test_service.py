"""The service takes engines of its user whose messages are right, and releases unused rows."""

from __future__ import annotations

import errno
import mmap
import os
import random
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.machine.engines import SmallEngine
from tests.machine.hosts import service_in_thread, stack_of
from tests.machine.test_tier import machine_tier
from tiering.cli.serve import check_service
from tiering.config.stack_file import load_stack
from tiering.errors import ConfigError, TieringError
from tiering.machine import peers
from tiering.machine.link import ServiceSocket, ask, greet
from tiering.machine.listener import LOOK_SECONDS
from tiering.machine.messages import MAX_MESSAGE, VERSION, Kind, Record, messages, pack, read
from tiering.machine.peers import MOST_BEHIND
from tiering.machine.service import IDLE_SECONDS, MachineService
from tiering.machine.words import Greeting
from tiering.primary.memory.region import SharedRegion
from tiering.secondary.contract import SecondaryTierManager, TierContext
from tiering.testing.clock import FakeClock, until
from tiering.testing.fake_tier import FakeTier
from tiering.testing.keys import key_of
from tiering.testing.tier_rig import TierRig
from tiers.local.store import LocalStore
from tiers.local.tier import LocalTier

MEMORY = {"type": "memory", "name": "local", "capacity": "16MiB"}
STRIDE = 4096


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cache.sock"


@pytest.fixture
def service(path: Path) -> Iterator[MachineService]:
    with service_in_thread(path, MEMORY) as running:
        yield running


def greeting(**words: Any) -> Greeting:
    return Greeting(**{"tier": "local", "parameters": "{}", "group_bytes": (64,), "rows": 8, "stride": STRIDE, **words})


class Raw:
    """A connection that sends any records."""

    def __init__(self, path: Path, **words: Any) -> None:
        self.region = SharedRegion.create(8, STRIDE)
        self.connection: ServiceSocket = greet(str(path), greeting(**words).text(), (self.region.fd,))
        self.connection.socket.settimeout(30.0)

    def send(self, *records: Record) -> None:
        for message, _ in messages(map(pack, records), self.connection.sent):
            self.connection.socket.send(message)
            self.connection.sent += 1

    def receive(self, kind: Kind) -> Record:
        """Return the next record of a kind."""
        while True:
            message = self.connection.socket.recv(MAX_MESSAGE + 1)
            assert message, "the connection ended"
            self.connection.received += 1
            for record in read(message, self.connection.received - 1):
                if record.kind == kind:
                    return record

    def ended(self) -> bool:
        """Read until the end of the connection, and return True if the service has bidden farewell."""
        kinds: list[int] = []
        try:
            while message := self.connection.socket.recv(MAX_MESSAGE + 1):
                kinds += [record.kind for record in read(message, self.connection.received)]
                self.connection.received += 1
        except ConnectionResetError:
            return False
        return bool(kinds) and kinds[-1] == Kind.BYE

    def close(self) -> None:
        self.connection.close()
        self.region.close()


@pytest.fixture
def raw(path: Path) -> Iterator[Callable[..., Raw]]:
    made: list[Raw] = []

    def make(**words: Any) -> Raw:
        made.append(Raw(path, **words))
        return made[-1]

    yield make
    for one in made:
        one.close()


# --------------------------------------------------------------------------------------------------------- connections


def test_only_the_user_may_connect(service: MachineService, path: Path) -> None:
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("uid", "reason"),
    [(65534, "cannot name the engine's user"), (os.geteuid() + 1, f"stack's users, not of {os.geteuid() + 1}")],
)
def test_another_user_is_refused_with_the_reason_and_one_that_the_kernel_cannot_name_too(
    service: MachineService,
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    uid: int,
    reason: str,
) -> None:
    monkeypatch.setattr(peers, "peer_credentials", lambda _: (1, uid))
    region = SharedRegion.create(8, STRIDE)
    with pytest.raises(TieringError, match=reason):
        greet(str(path), greeting().text(), (region.fd,))
    region.close()
    assert reason in caplog.text


@pytest.mark.parametrize("when", ["before", "with it unread"])
def test_the_reason_of_a_refusal_arrives_when_the_service_hangs_up_around_the_greeting(
    monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    send = socket.send_fds

    def refuse() -> None:
        theirs.send(b"the reason")
        theirs.close()

    def send_and_refuse(*words: Any) -> int:
        sent = send(*words)
        refuse()
        return sent

    with ours, theirs:
        if when == "before":
            refuse()
        else:
            monkeypatch.setattr(socket, "send_fds", send_and_refuse)
        assert ask(ours, b"a greeting", (), 1) == (b"the reason", [])


def test_a_new_directory_is_private(tmp_path: Path) -> None:
    with service_in_thread(tmp_path / "new" / "cache.sock", MEMORY):
        assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o750


def test_a_directory_that_others_may_change_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(ConfigError, match="others may replace the socket"):
        MachineService(tmp_path / "open" / "cache.sock", {}, most_bytes=1).listen()


def test_a_second_service_on_one_socket_is_refused(service: MachineService, path: Path) -> None:
    with pytest.raises(ConfigError, match="another process listens there"):
        MachineService(path, {}, most_bytes=1).listen()
    assert greet(str(path), Greeting("").text(), ()).tiers == ["local"]


def test_the_socket_of_a_killed_service_is_replaced_and_another_file_is_not(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as left:
        left.bind(os.fspath(path))
    with service_in_thread(path, MEMORY):
        pass
    path.write_text("mine")
    with pytest.raises(ConfigError, match="is there and is no socket"):
        MachineService(path, {}, most_bytes=1).listen()
    assert path.read_text() == "mine"


def test_the_end_of_a_service_leaves_the_socket_of_another(path: Path) -> None:
    with service_in_thread(path, MEMORY):
        path.unlink()
        other = MachineService(path, {}, most_bytes=1)
        other.listen()
    assert path.is_socket()
    other.stop()
    assert other.run()
    assert not path.exists()


def test_a_socket_that_somebody_removes_is_made_again(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()
    service = MachineService(path, {}, most_bytes=1, clock=clock)
    service.listen()

    def turn() -> None:
        clock.advance(LOOK_SECONDS)
        service.wake()
        service.turn()

    path.unlink()
    path.parent.chmod(0o777)
    turn()
    assert "no engine can connect" in caplog.text
    path.parent.chmod(0o750)
    turn()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
        peer.connect(os.fspath(path))
        service.turn()
        service.turn()
        assert service._peers
    path.unlink()
    path.write_text("somebody's own")
    turn()
    service.stop()
    assert service.run()
    assert path.read_text() == "somebody's own"


def test_a_connection_without_a_free_descriptor_waits_and_does_not_keep_the_thread_awake(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, refused = FakeClock(), []

    def refuse(listener: socket.socket) -> None:
        refused.append(listener)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    service = MachineService(path, {}, most_bytes=1, clock=clock)
    service.listen()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
        peer.connect(os.fspath(path))
        with monkeypatch.context() as patch:
            patch.setattr(socket.socket, "accept", refuse)
            for _ in range(4):
                service.wake()
                service.turn()
        assert len(refused) == 1
        clock.advance(IDLE_SECONDS)
        ((message, _),) = messages([pack(Record(Kind.HELLO, text=Greeting("").text()))], 0)
        peer.send(message)
        service.turn()
        service.turn()
        assert read(peer.recv(MAX_MESSAGE), 0)[0].kind == Kind.WELCOME
    service.stop()
    assert service.run()


def test_another_version_is_refused_with_both_versions(service: MachineService, path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
        peer.settimeout(30.0)
        peer.connect(os.fspath(path))
        ((message, _),) = messages([pack(Record(Kind.HELLO, text=Greeting("").text()))], 0)
        peer.send(message[:4] + struct.pack("<H", VERSION + 1) + message[6:])
        (answer,) = read(peer.recv(MAX_MESSAGE), 0)
    assert answer.kind == Kind.REFUSED
    assert f"version {VERSION + 1} of the messages, this one {VERSION}" in answer.text.decode()


def test_the_first_state_comes_at_once(
    service: MachineService, raw: Callable[..., Raw], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiering.machine.state_reports.STATE_SECONDS", 1e9)
    one = raw()
    one.connection.socket.settimeout(5.0)
    assert one.receive(Kind.STATE).number > 0


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ({"tier": "other"}, "no tier 'other'; it has local"),
        ({"rows": 1 << 20}, "raise it there"),
        ({"rows": 9}, "the rows' file has"),
        ({"weights": "odd"}, "weights"),
        ({"stride": 100}, "do not hold the blocks"),
    ],
)
def test_an_engine_that_cannot_be_served_gets_the_reason(
    service: MachineService, path: Path, words: dict[str, Any], reason: str
) -> None:
    region = SharedRegion.create(7, STRIDE)
    with pytest.raises(TieringError, match=reason):
        greet(str(path), greeting(**words).text(), (region.fd,))
    region.close()


def test_other_geometry_in_one_namespace_is_refused(
    service: MachineService, path: Path, raw: Callable[..., Raw]
) -> None:
    raw()
    region = SharedRegion.create(8, STRIDE)
    with pytest.raises(TieringError, match="blocks of other sizes"):
        greet(str(path), greeting(group_bytes=(65,)).text(), (region.fd,))
    region.close()


@pytest.mark.parametrize(
    "record",
    [
        Record(Kind.LOAD, 1, keys=[key_of(1)], rows=[8]),
        Record(Kind.LOAD, 1, keys=[key_of(1), key_of(2)], rows=[1, 1]),
        Record(Kind.LOAD, 1, keys=[key_of(1)]),
        Record(Kind.STORE, 1, keys=[key_of(1, group=1)], rows=[0]),
        Record(Kind.LOOKUP, 1),
        Record(Kind.RESET, text=b"odd"),
        Record(Kind.RESET, text=b"start"),
        Record(Kind.HELLO),
        Record(99),
    ],
)
def test_records_that_break_the_protocol_end_the_connection(
    service: MachineService, raw: Callable[..., Raw], record: Record
) -> None:
    bad, good = raw(), raw()
    bad.send(record)
    assert bad.ended()
    good.send(Record(Kind.LOOKUP, 5, keys=[key_of(1)]))
    assert good.receive(Kind.ANSWER).number == 5


def test_keys_of_another_length_than_those_of_the_namespace_end_the_connection(
    service: MachineService, raw: Callable[..., Raw]
) -> None:
    good, bad = raw(), raw()
    good.send(Record(Kind.USED, keys=[key_of(1)]), Record(Kind.LOOKUP, 5, keys=[key_of(1)]))
    assert good.receive(Kind.ANSWER).number == 5
    bad.send(Record(Kind.USED, keys=[b"x" + key_of(1)]))
    assert bad.ended()


def test_a_lookup_of_keys_of_any_length_ends_no_connection(service: MachineService, raw: Callable[..., Raw]) -> None:
    """A warm start looks up what others have published, which may be lies."""
    first = raw()
    first.send(Record(Kind.LOOKUP, 5, keys=[b"x" + key_of(1)]), Record(Kind.USED, keys=[key_of(1)]))
    assert first.receive(Kind.ANSWER).number == 5
    first.send(Record(Kind.LOOKUP, 6, keys=[b"xx" + key_of(1)]))
    assert first.receive(Kind.ANSWER).number == 6


@pytest.mark.parametrize("seed", range(3))
def test_noise_ends_its_connection_and_nothing_else(
    service: MachineService, path: Path, raw: Callable[..., Raw], seed: int
) -> None:
    rng = random.Random(seed)
    good = raw()
    for _ in range(40):
        noisy = raw()
        ((message, _),) = messages([pack(Record(Kind.STORE, 1, keys=[key_of(1)], rows=[0]))], noisy.connection.sent)
        damaged = bytearray(message)
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        noisy.connection.socket.send(bytes(damaged))
        noisy.close()
    good.send(Record(Kind.LOOKUP, 5, keys=[key_of(1)]))
    assert good.receive(Kind.ANSWER).number == 5


# ---------------------------------------------------------------------------------------------------- rows in use


@pytest.mark.parametrize("reads", [True, False])
def test_nothing_is_read_from_an_engine_that_does_not_read_its_answers(
    service: MachineService, raw: Callable[..., Raw], reads: bool
) -> None:
    engine, sent, found = raw(), 0, 0
    (peer,) = service._peers.values()
    connection = engine.connection
    connection.socket.settimeout(0.5)
    with suppress(TimeoutError):
        for _ in range(100):
            engine.send(*[Record(Kind.LOOKUP, 1, keys=[key_of(1)])] * 500)
            sent += 500
    assert len(peer.out) <= MOST_BEHIND + 500
    connection.socket.settimeout(30.0)
    while reads and found < sent:
        records = read(connection.socket.recv(MAX_MESSAGE + 1), connection.received)
        connection.received += 1
        found += sum(record.kind == Kind.ANSWER for record in records)
    engine.close()
    assert until(lambda: not service._peers, 30.0)


def test_the_service_keeps_rows_until_the_io_has_ended(path: Path) -> None:
    """An engine that leaves with a load under way gets its farewell when the load has ended, not before."""
    made: list[FakeTier] = []

    def build(context: TierContext) -> FakeTier:
        made.append(FakeTier(context.name, held={key_of(1)}))
        return made[-1]

    with service_in_thread(path, MEMORY, slow=build):
        one = Raw(path, tier="slow")
        state = one.receive(Kind.STATE)
        one.send(Record(Kind.FOLLOWED, state.number), Record(Kind.LOAD, 7, seconds=60.0, keys=[key_of(1)], rows=[3]))
        assert until(lambda: bool(made[0].loads), 30.0)
        one.connection.leave()
        one.connection.socket.settimeout(0.3)
        with pytest.raises(TimeoutError):
            one.ended()
        one.connection.socket.settimeout(30.0)
        made[0].finish(made[0].loads[0])
        assert one.ended()
        one.close()


@pytest.mark.parametrize("common", [False, True])
def test_a_load_waits_for_no_read_of_a_block_that_a_reset_has_invalidated(path: Path, common: bool) -> None:
    """The medium may end such a read with success: its bytes are those of the older weights, or epoch."""
    made: list[FakeTier] = []

    def build(context: TierContext) -> FakeTier:
        made.append(FakeTier(context.name, held={key_of(1)}))
        return made[-1]

    load = Record(Kind.LOAD, 7, seconds=60.0, keys=[key_of(1)], rows=[3])
    with service_in_thread(path, slow=build) as service:
        old, waiting, new = Raw(path, tier="slow"), Raw(path, tier="slow"), Raw(path, tier="slow")
        old.send(Record(Kind.FOLLOWED, old.receive(Kind.STATE).number), load)
        assert until(lambda: len(made[0].loads) == 1, 30.0)
        waiting.send(Record(Kind.FOLLOWED, waiting.receive(Kind.STATE).number), load)
        waiting.send(Record(Kind.LOOKUP, 5, keys=[key_of(2)]))
        assert waiting.receive(Kind.ANSWER).number == 5
        state = new.receive(Kind.STATE)
        if common:
            made[0].has_successor = True
            service.wake()
            while (later := new.receive(Kind.STATE)).number == state.number:
                pass
            new.send(Record(Kind.FOLLOWED, later.number), load)
        else:
            new.send(Record(Kind.RESET, text=b"revision:1"), Record(Kind.FOLLOWED, state.number), load)
        assert waiting.receive(Kind.RESULT).text == b"\0"
        assert until(lambda: len(made[0].loads) == 2, 30.0)
        made[0].finish(made[0].loads[0])
        service.wake()
        assert old.receive(Kind.RESULT).text == b"\1"
        made[0].finish(made[0].loads[0], success=False)
        service.wake()
        assert new.receive(Kind.RESULT).text == b"\0"
        for raw in (old, waiting, new):
            raw.close()


@pytest.mark.parametrize("number", [errno.ENOBUFS, errno.EMSGSIZE])
def test_a_message_that_cannot_be_sent_costs_no_farewell(
    service: MachineService, raw: Callable[..., Raw], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Without one, the rows of all its loads stay out of use until the service ends."""
    one, failed = raw(), threading.Event()
    one.receive(Kind.STATE)
    send = socket.socket.send

    def fail_once(self: socket.socket, *args: Any) -> int:
        if threading.current_thread().name == "kv-test-service" and not failed.is_set():
            failed.set()
            raise OSError(number, os.strerror(number))
        return send(self, *args)

    monkeypatch.setattr(socket.socket, "send", fail_once)
    one.send(Record(Kind.LOOKUP, 5, keys=[key_of(1)]))
    assert failed.wait(30.0)
    if number == errno.ENOBUFS:
        assert one.receive(Kind.ANSWER).number == 5
        one.connection.leave()
    assert one.ended()


def test_a_medium_that_hangs_delays_the_other_namespaces_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tier is to be opened again, for an engine whose weights are those of the start."""
    monkeypatch.setattr("tiering.machine.namespaces.CLOSE_AGAIN", 0.1)
    made: list[Hung] = []

    class Hung(FakeTier):
        def shutdown(self, deadline: float) -> bool:
            waits.append(deadline > time.monotonic())
            return self.stops

    def build(context: TierContext) -> FakeTier:
        made.append(Hung(context.name, stops=False))
        return made[-1]

    waits: list[bool] = []
    with service_in_thread(path, slow=build):
        gone, new = Raw(path, tier="slow"), Raw(path, tier="slow")
        gone.receive(Kind.STATE)
        gone.send(Record(Kind.RESET, text=b"private:x"))
        while not gone.receive(Kind.STATE).text.startswith(b"private:x"):
            pass
        gone.close()
        assert until(lambda: len(waits) >= 3, 30.0)
        assert waits[:3] == [True, False, False]
        made[0].stops = True
        assert until(lambda: len(made) == 2, 30.0)
        while not new.receive(Kind.STATE).text.startswith(b"start"):
            pass
        made[1].stops = True
        new.close()


def test_a_medium_that_is_slow_to_open_delays_no_other_namespace(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new model comes while engines of another one run."""
    slow, opened, enter = threading.Event(), threading.Event(), LocalStore.open

    def open_slowly(self: LocalStore) -> None:
        if slow.is_set():
            assert opened.wait(30.0)
        enter(self)

    def open_tier(self: LocalTier, deadline: float) -> bool:
        waits.append(deadline > time.monotonic())
        return open_at_once(self, deadline)

    waits: list[bool] = []
    open_at_once = LocalTier.open
    monkeypatch.setattr(LocalStore, "open", open_slowly)
    monkeypatch.setattr(LocalTier, "open", open_tier)
    disk = {"type": "local", "path": str(tmp_path / "disk"), "capacity": "16MiB"}
    with service_in_thread(path, disk) as service:
        one = SmallEngine(path)
        assert one.serving()
        one.store(range(8))
        assert one.stored()
        one.forget_rows()
        slow.set()
        other = SmallEngine(path, name="other", open_deadline="10ms")
        assert until(lambda: len(service._namespaces) == 2, 30.0)
        assert one.load(range(8), patience=5.0) == (list(range(8)), [])
        assert not other.manager.secondary_tiers[0].get_stats().available
        assert waits == [False, False]
        opened.set()
        assert other.serving()
        one.close()
        other.close()


def test_a_tier_that_raises_is_out_of_service_and_the_others_serve(path: Path) -> None:
    def build(context: TierContext) -> FakeTier:
        return FakeTier(context.name, raises={"touch"})

    with service_in_thread(path, MEMORY, bad=build):
        one, good = Raw(path, tier="bad"), Raw(path)
        state = one.receive(Kind.STATE)
        one.send(Record(Kind.FOLLOWED, state.number), Record(Kind.TOUCH, flag=1, keys=[key_of(1)]))
        while one.receive(Kind.STATE).flag:
            pass
        good.send(Record(Kind.LOOKUP, 5, keys=[key_of(1)]))
        assert good.receive(Kind.ANSWER).number == 5
        one.close()
        good.close()


def test_a_reset_that_the_service_has_made_at_the_greeting_is_not_made_again(path: Path) -> None:
    """The engine stores from the first one on, and a second would drop what it has stored."""
    resets: list[str | None] = []

    class Counting(FakeTier):
        def reset(self, deadline: float, revision: str | None = None, follow: bool = False) -> bool:
            resets.append(revision)
            return super().reset(deadline, revision, follow)

    with service_in_thread(path, fake=lambda context: Counting(context.name)):
        one = Raw(path, tier="fake", weights="private:x")
        while not one.receive(Kind.STATE).text.startswith(b"private:x"):
            pass
        one.send(Record(Kind.RESET, text=b"private:x"), Record(Kind.LOOKUP, 5, keys=[key_of(1)]))
        assert one.receive(Kind.ANSWER).number == 5
        assert len(resets) == 1
        one.send(Record(Kind.RESET, text=b"private:y"), Record(Kind.LOOKUP, 6, keys=[key_of(1)]))
        assert one.receive(Kind.ANSWER).number == 6
        assert len(resets) == 2
        one.close()


# ------------------------------------------------------------------------------------------------------------- engines


def test_an_engine_with_a_refused_greeting_runs_without_the_tier(
    service: MachineService, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = SmallEngine(path, ("other",))
    engine.store(range(4))
    assert engine.load(range(4)) == ([0, 1, 2, 3], [])
    engine.close()
    assert caplog.text.count("no service; the engine runs without the tier") == 1


def test_the_memory_of_a_closed_engine_is_free_while_something_refers_to_it(
    path: Path, service: MachineService
) -> None:
    engine = SmallEngine(path)
    assert engine.serving()
    region = engine.manager.primary_tier._region
    assert region is not None
    rows = os.dup(region.fd)
    assert os.fstat(rows).st_blocks > 0
    tier: Any = engine.manager.secondary_tiers[0]
    engine.close()
    assert os.fstat(rows).st_blocks * 512 <= mmap.PAGESIZE
    assert until(lambda: not tier._close_rows.alive, 10.0)
    os.close(rows)


def test_rows_without_a_descriptor_are_refused(path: Path) -> None:
    def build(context: TierContext) -> Any:
        return machine_tier(TierContext("local", context.primary_view, (64,), context.namespace), path)

    with pytest.raises(ConfigError, match="no descriptor"):
        TierRig(build, group_bytes=(64,))


# ------------------------------------------------------------------------------------------------- the service's stack


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ({"namespace": "a"}, "namespace: belongs into the stacks of the engines"),
        ({"warm_start": {}}, "warm_start: belongs into the stacks of the engines"),
        ({"secondary": []}, "secondary: must have 1 to 8 tiers"),
        ({"secondary": [{**MEMORY, "primary_share": 0.2}]}, "concerns one engine's rows"),
        ({"secondary": [{**MEMORY, "required": True}]}, "concerns one engine's rows"),
        ({"secondary": [], "machine": {"socket": "/x", "tiers": ["local"]}}, "machine: belongs into the stacks"),
        (
            {
                "revision": "r",
                "secondary": [{"type": "mooncake", "master": "127.0.0.1:1", "metadata": "http://m"}],
            },
            "a service cannot host mooncake",
        ),
    ],
)
def test_words_of_engines_are_refused_in_the_stack_of_a_service(words: dict[str, Any], reason: str) -> None:
    tiers = words.get("secondary", [{"type": "local", "path": "/x", "capacity": "1GiB"}])
    with pytest.raises(ConfigError, match=reason):
        check_service("stack", load_stack({**stack_of(), "secondary": tiers, **words}))
    check_service("stack", load_stack(stack_of(MEMORY)))


def test_the_end_of_a_service_gives_its_address_space_back(path: Path) -> None:
    """One process has room for 32 times the range that a service reserves."""
    for _ in range(40):
        with service_in_thread(path, MEMORY):
            engine = SmallEngine(path)
            assert engine.serving()
            engine.close()


def test_a_greeting_that_no_tier_can_serve_gives_its_address_space_back(path: Path) -> None:
    """The engine tries again for as long as it runs."""

    def refuse(context: TierContext) -> SecondaryTierManager:
        raise ConfigError("the blocks are too large")

    region = SharedRegion.create(8, STRIDE)
    with service_in_thread(path, MEMORY, other=refuse):
        for _ in range(40):
            with pytest.raises(TieringError, match="the blocks are too large"):
                greet(str(path), greeting().text(), (region.fd,))
    region.close()
