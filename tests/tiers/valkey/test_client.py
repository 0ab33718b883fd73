"""The client of a Valkey server: addresses, commands, errors, threads and forks, against real servers."""

from __future__ import annotations

import contextlib
import hashlib
import multiprocessing
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from examples.valkey_server import ValkeyServer, serving
from tests.tiers.valkey.tls import tls_in_front_of
from tiering.api.masking import MASK, mask_text
from tiering.errors import (
    ConfigError,
    OutOfSpaceError,
    PermanentStoreError,
    StoreError,
    TemporaryStoreError,
    WritesRefusedError,
)
from tiers.valkey.client import ServerAddress, ValkeyClient

Connect = Callable[..., ValkeyClient]


@pytest.fixture
def connect() -> Iterator[Connect]:
    """A function that makes clients, which are closed after the test."""
    clients: list[ValkeyClient] = []

    def make(server: ValkeyServer, url: str = "", timeout: float = 5.0) -> ValkeyClient:
        client = ValkeyClient(ServerAddress.parse(url or server.url), connect_timeout=timeout, timeout=timeout)
        clients.append(client)
        return client

    yield make
    for client in clients:
        client.close()


@pytest.fixture
def client(server: ValkeyServer, connect: Connect) -> ValkeyClient:
    """A client of the module's server, which is empty."""
    client = connect(server)
    client.call("FLUSHALL")
    return client


@pytest.mark.parametrize("loss", ["flush", "restart"])
def test_a_script_that_the_server_has_lost_is_loaded_at_once(own_server: ValkeyServer, loss: str) -> None:
    text = "return {KEYS[1], redis.call('INCR', KEYS[1])}"
    sha = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
    address = ServerAddress.parse(own_server.url)
    client = ValkeyClient(address, connect_timeout=5.0, timeout=5.0, scripts={sha: text})
    plain = ValkeyClient(address, connect_timeout=5.0, timeout=5.0)
    with contextlib.closing(client), contextlib.closing(plain):
        assert client.call("EVALSHA", sha, 1, "a") == [b"a", 1]
        if loss == "flush":
            plain.call("SCRIPT", "FLUSH")
            plain.call("FLUSHALL")
        else:
            own_server.restart()
        with pytest.raises(TemporaryStoreError, match="lacks a script"):
            plain.call("EVALSHA", sha, 1, "a")
        replies = client.call_all([("EVALSHA", sha, 1, "a"), ("SET", "b", "5"), ("EVALSHA", sha, 1, "b")])
        assert replies == [[b"a", 1], b"OK", [b"b", 6]]
        (unknown,) = client.call_all([("EVALSHA", "0" * 40, 0)])
        assert isinstance(unknown, TemporaryStoreError)


def view(content: bytes) -> memoryview:
    return memoryview(bytearray(content))


# ------------------------------------------------------------------------------------------------------------ addresses


@pytest.mark.parametrize(
    ("url", "text", "tls"),
    [
        ("valkey://cache", "valkey://cache:6379", False),
        ("redis://cache:1234/3", "valkey://cache:1234/3", False),
        ("valkeys://me@cache:1/0", "valkeys://me@cache:1", True),
        ("rediss://[::1]:7/15", "valkeys://[::1]:7/15", True),
    ],
)
def test_an_address_is_read_and_shown(url: str, text: str, tls: bool) -> None:
    address = ServerAddress.parse(url)
    assert (str(address), address.tls) == (text, tls)
    assert ServerAddress.parse(text) == address


@pytest.mark.parametrize(
    "url", ["cache:6379", "http://cache", "valkey://", "valkey://c:x", "valkey://c/a", "valkey://c/1/2", "valkey://c#1"]
)
def test_a_wrong_address_is_refused_with_its_form(url: str) -> None:
    with pytest.raises(ConfigError, match="valkey://") as refused:
        ServerAddress.parse(url)
    assert mask_text(str(refused.value)) == str(refused.value), "the form is no secret"


@pytest.mark.parametrize("query", ["auth_env=a-b", "auth_env=", "timeout=3", "auth_env"])
def test_a_wrong_query_is_refused(query: str) -> None:
    with pytest.raises(ConfigError, match="auth_env"):
        ServerAddress.parse(f"valkey://cache?{query}")


def test_an_address_with_a_password_is_refused_and_not_shown() -> None:
    with pytest.raises(ConfigError, match="VALKEY_PASSWORD") as refused:
        ServerAddress.parse("valkey://me:hunter22@cache")
    assert "hunter22" not in str(refused.value)


def test_the_password_comes_from_the_environment_and_is_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POOL_WORD", "hunter22")
    address = ServerAddress.parse("valkey://me@cache?auth_env=POOL_WORD")
    assert address.password() == "hunter22"
    assert "hunter22" not in f"{address!r} {address}"
    assert mask_text("sent hunter22") == f"sent {MASK}"


# ------------------------------------------------------------------------------------------------------------- commands


def test_commands_are_run_and_answered(client: ValkeyClient) -> None:
    assert client.call("SET", "a", b"\0\xff", "NX", "EX", 60) == b"OK"
    assert client.call("SET", "a", b"other", "NX") is None
    assert client.call("GET", "a") == b"\0\xff"
    assert client.call("GET", "b") is None
    assert 0 < client.call("TTL", "a") <= 60


def test_several_commands_take_one_round_trip_and_fail_one_by_one(client: ValkeyClient) -> None:
    first, wrong, last = client.call_all([("SET", "a", 1), ("LPUSH", "a", 2), ("GET", "a")])
    assert (first, last) == (b"OK", b"1")
    assert isinstance(wrong, PermanentStoreError)
    assert client.call_all([]) == []


@pytest.mark.parametrize("sizes", [(0,), (5,), (128, 0), (128, 100), (128, 3 << 20), (5000, 5000, 1)])
def test_a_value_of_parts_is_written_and_read_back_into_parts(client: ValkeyClient, sizes: tuple[int, ...]) -> None:
    parts = [view(os.urandom(size)) for size in sizes]
    assert client.write("key", parts, "EX", 60) == b"OK"
    assert client.call("GET", "key") == b"".join(parts)
    filled = [view(bytes(size)) for size in sizes]
    assert client.read_into("key", filled) == sum(sizes)
    assert filled == parts
    assert client.call("GET", "none") is None, "the connection is in order"


def test_a_shorter_value_fills_the_beginning_of_the_parts(client: ValkeyClient) -> None:
    client.call("SET", "key", b"abcdef")
    parts = [view(b"...."), view(b"....")]
    assert client.read_into("key", parts) == 6
    assert [bytes(part) for part in parts] == [b"abcd", b"ef.."]


def test_a_longer_value_is_not_read_and_does_not_harm_the_next_command(client: ValkeyClient) -> None:
    client.call("SET", "key", bytes(1 << 20))
    assert client.read_into("key", [view(b"....")]) == 1 << 20
    assert client.call("ECHO", "next") == b"next"


def test_an_absent_value_is_none_and_a_wrong_type_an_error(client: ValkeyClient) -> None:
    assert client.read_into("key", [view(b"....")]) is None
    client.call("LPUSH", "key", 1)
    with pytest.raises(PermanentStoreError, match="WRONGTYPE"):
        client.read_into("key", [view(b"....")])
    assert client.call("ECHO", "next") == b"next"


def test_threads_share_a_client(client: ValkeyClient) -> None:
    together = threading.Barrier(8)

    def use(number: int) -> bool:
        content = bytes([number]) * 100_000
        together.wait(20)
        client.write(f"key-{number}", [view(content)])
        found = view(bytes(100_000))
        return client.read_into(f"key-{number}", [found]) == 100_000 and found == content

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(use, range(8))) == [True] * 8


def _read_in_child(client: ValkeyClient, pipe: Connection) -> None:
    pipe.send(client.call("CLIENT", "ID"))


def test_a_child_uses_no_connection_of_its_parent(client: ValkeyClient) -> None:
    before = client.call("CLIENT", "ID")
    ours, theirs = multiprocessing.get_context("fork").Pipe()
    child = multiprocessing.get_context("fork").Process(target=_read_in_child, args=(client, theirs))
    child.start()
    try:
        assert ours.poll(20)
        assert ours.recv() != before
    finally:
        child.join()
        child.close()
        ours.close()
        theirs.close()
    assert client.call("CLIENT", "ID") == before


# -------------------------------------------------------------------------------------------------------- subscriptions


def test_a_subscription_receives_what_is_published(client: ValkeyClient) -> None:
    with client.subscribe("one", "two") as notices:
        assert notices.read(0.0) is None
        client.call_all([("PUBLISH", "one", b"\1"), ("PUBLISH", "three", b"?"), ("PUBLISH", "two", b"\2")])
        assert notices.read(20.0) == ("one", b"\1")
        assert notices.read(20.0) == ("two", b"\2")
        assert notices.read(0.0) is None


def test_a_lost_subscription_says_so_and_stays_lost(own_server: ValkeyServer, connect: Connect) -> None:
    notices = connect(own_server).subscribe("one")
    own_server.restart()
    for _ in range(2):
        with pytest.raises(TemporaryStoreError):
            notices.read(20.0)
    notices.close()
    notices.close()


# --------------------------------------------------------------------------------------------------------------- errors


def test_a_server_that_is_not_there_is_a_temporary_error(own_server: ValkeyServer, connect: Connect) -> None:
    client = connect(own_server)
    assert client.call("PING") == b"PONG"
    own_server.kill()
    for _ in range(2):
        with pytest.raises(TemporaryStoreError, match=str(own_server.port)):
            client.call("PING")


def test_a_restarted_server_is_used_again(own_server: ValkeyServer, connect: Connect) -> None:
    client = connect(own_server)
    client.call("SET", "a", 1)
    own_server.restart()
    assert client.call("GET", "a") is None


def test_a_hung_server_fails_calls_within_the_timeout_and_late_answers_are_not_mixed_up(
    own_server: ValkeyServer, connect: Connect
) -> None:
    client = connect(own_server, timeout=1.0)
    client.call("SET", "a", b"late")
    parts = [view(b"....")]
    with own_server.paused():
        with pytest.raises(TemporaryStoreError, match="time-out"):
            client.read_into("a", parts)
        with pytest.raises(TemporaryStoreError, match="time-out"):
            client.call("GET", "a")
    assert client.call("ECHO", "next") == b"next"
    assert bytes(parts[0]) == b"....", "nothing writes to a part after the call has failed"


def test_a_late_answer_is_never_taken_for_the_next_commands() -> None:
    def serve(connection: socket.socket) -> None:
        owed = b""
        with connection:
            while data := connection.recv(1000):
                if b"GET" in data:
                    owed = b"$4\r\nlate\r\n"
                elif b"ECHO" in data:
                    connection.sendall(owed + b"$4\r\nnext\r\n")
                else:
                    connection.sendall(b"+OK\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(4) as threads:

        def accept() -> None:
            for _ in range(2):
                threads.submit(serve, listener.accept()[0])

        threads.submit(accept)
        address = ServerAddress("127.0.0.1", listener.getsockname()[1])
        client = ValkeyClient(address, connect_timeout=5.0, timeout=1.0)
        try:
            with pytest.raises(TemporaryStoreError, match="time-out"):
                client.read_into("key", [view(b"....")])
            assert client.call("ECHO", "next") == b"next"
        finally:
            client.close()
            socket.create_connection(listener.getsockname()).close()  # for accept, if there was no second connection


def test_a_trickling_answer_ends_at_the_timeout() -> None:
    ended = threading.Event()

    def trickle(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        # The client closes its end as soon as it gives up, which may be before the test says so.
        with connection, contextlib.suppress(OSError):
            for reply in (b"+OK\r\n", b"$1000000\r\n"):
                connection.recv(1000)
                connection.sendall(reply)
            while not ended.wait(0.02):
                connection.sendall(b"x")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = ServerAddress("127.0.0.1", listener.getsockname()[1])
        client = ValkeyClient(address, connect_timeout=5.0, timeout=0.3)
        server = threading.Thread(target=trickle, args=(listener,))
        server.start()
        try:
            with pytest.raises(TemporaryStoreError, match="time-out"):
                client.read_into("key", [view(bytes(1_000_000))])
        finally:
            ended.set()
            client.close()
            server.join()


def test_a_server_without_memory_is_out_of_space_and_reads_go_on(connect: Connect) -> None:
    with serving({"maxmemory": "3mb", "maxmemory-policy": "noeviction"}) as full:
        client = connect(full)
        client.call("SET", "first", 1)
        megabyte = [view(bytes(1 << 20))]
        with pytest.raises(OutOfSpaceError, match="memory"):
            list(map(client.write, ["a", "b", "c", "d"], [megabyte] * 4))
        assert client.call("GET", "first") == b"1"


def test_servers_that_take_no_writes_are_told_apart(own_server: ValkeyServer, connect: Connect) -> None:
    client = connect(own_server)
    client.call("CONFIG", "SET", "min-replicas-to-write", "1")
    with pytest.raises(WritesRefusedError, match="replicas"):
        client.write("a", [view(b"1")])
    client.call("CONFIG", "SET", "min-replicas-to-write", "0")
    with serving() as primary:
        client.call("REPLICAOF", "127.0.0.1", primary.port)
        with pytest.raises(WritesRefusedError, match="name the primary"):
            client.write("a", [view(b"1")])


def test_wrong_and_missing_passwords_are_permanent_errors(
    own_server: ValkeyServer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect(own_server).call("ACL", "SETUSER", "reader", "on", ">hunter22", "~*", "+get")
    connect(own_server).call("CONFIG", "SET", "requirepass", "swordfish")
    with pytest.raises(PermanentStoreError, match="password"):
        connect(own_server).call("GET", "a")
    monkeypatch.setenv("VALKEY_PASSWORD", "hunter23")
    with pytest.raises(PermanentStoreError, match="password") as refused:
        connect(own_server).call("GET", "a")
    assert "hunter23" not in str(refused.value)
    monkeypatch.setenv("VALKEY_PASSWORD", "swordfish")
    assert connect(own_server).call("GET", "a") is None
    monkeypatch.setenv("READER", "hunter22")
    reader = connect(own_server, own_server.url.replace("//", "//reader@") + "?auth_env=READER")
    assert reader.call("GET", "a") is None
    with pytest.raises(PermanentStoreError, match="permission"):
        reader.call("SET", "a", 1)
    monkeypatch.delenv("READER")
    with pytest.raises(PermanentStoreError, match="READER is not set"):
        connect(own_server, own_server.url.replace("//", "//reader@") + "?auth_env=READER").call("GET", "a")


def test_tls_verifies_the_servers_certificate_and_host(server: ValkeyServer, tmp_path: Path) -> None:
    with tls_in_front_of(server.port, tmp_path) as (port, ca_file):

        def ping(host: str, authority: Path | None) -> object:
            address = ServerAddress.parse(f"valkeys://{host}:{port}")
            client = ValkeyClient(address, connect_timeout=5.0, timeout=5.0, ca_file=authority)
            try:
                client.write("tls", [view(b"abc"), view(bytes(100_000))])
                parts = [view(b"..."), view(bytes(100_000))]
                return client.read_into("tls", parts) == 100_003 and bytes(parts[0]) == b"abc"
            finally:
                client.close()

        assert ping("localhost", ca_file)
        with pytest.raises(PermanentStoreError, match="ca_file"):
            ping("localhost", None)
        with pytest.raises(PermanentStoreError, match="TLS"):
            ping("127.0.0.1", ca_file)


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "valkey", None)
    with pytest.raises(ConfigError, match="extra valkey"):
        ValkeyClient(ServerAddress("cache"), connect_timeout=1.0, timeout=1.0)


def test_unknown_errors_of_the_code_itself_are_not_hidden(client: ValkeyClient) -> None:
    with pytest.raises(Exception, match="Invalid input") as found:
        client.call("SET", "a", object())  # type: ignore[arg-type]
    assert not isinstance(found.value, StoreError)
    assert client.call("ECHO", "next") == b"next"
