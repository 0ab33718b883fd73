"""Client of a Valkey or Redis server: addresses, connections, and typed errors.

Other parts than the tier may use this module too. It imports the package ``valkey`` (extra ``valkey``) only when a
client is made::

    address = ServerAddress.parse("valkeys://engine@cache.internal:6380/2?auth_env=CACHE_PASSWORD")
    client = ValkeyClient(address, connect_timeout=2.0, timeout=5.0)
    client.call("SET", "name", b"value", "NX", "EX", 60)        # one command; b"OK", or None if NX refused
    client.call_all([("GET", "a"), ("GET", "b")])               # one round trip; a reply or an error for each
    with client.subscribe("channel") as notices:                # for one thread, over a connection of its own
        notice = notices.read(timeout=0.5)                      # (channel, content), or None
    client.close()

- **Addresses** have the schemes ``valkey``, ``redis``, ``valkeys`` and ``rediss`` (the last two: TLS). An address never
  contains a password. The environment variable VALKEY_PASSWORD does, or the one that ``auth_env`` names.
- **Threads**: any thread may call. Each call takes a connection for itself, and gives it back when it ends. A call
  blocks at most for the two time-outs; a subscription blocks for the time that is given to it.
- **Connections** are made when they are needed. After a server has restarted, the next call connects again.
- **Replies** are bytes, integers, None and lists of them. Nothing is decoded.
- **Forks**: a child makes connections of its own, and uses none of its parent's.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import parse_qsl, unquote, urlsplit

from tiering import (
    ConfigError,
    OutOfSpaceError,
    PermanentStoreError,
    StoreError,
    TemporaryStoreError,
    WritesRefusedError,
)
from tiering.tier import mask_text, record_secrets

Word = str | bytes | int | float | memoryview
"""A word of a command, as the client library encodes it."""

PASSWORD_VARIABLE = "VALKEY_PASSWORD"
"""Environment variable with the password, unless the address names another one."""

DEFAULT_PORT = 6379
_HEAD = 4096
"""Bytes of the first read of a reply: the line with its length, and the beginning of the value."""
_SCHEMES = {"valkey": False, "redis": False, "valkeys": True, "rediss": True}
_FORM = (
    "write it like valkey://host[:port][/database][?auth_env=VARIABLE], or valkeys:// for TLS; "
    "a user stands before the host, with an @ between them"
)


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """Address of a server. Its text contains no password."""

    host: str
    port: int = DEFAULT_PORT
    """TCP port; default 6379."""
    database: int = 0
    """Number of the database; default 0."""
    user: str | None = None
    """User of the server's access list; None (default): the server's default user."""
    tls: bool = False
    """True to encrypt and to verify the server's certificate and host; default False."""
    password_variable: str = PASSWORD_VARIABLE
    """Environment variable with the password; default VALKEY_PASSWORD. Without it, no password is sent."""

    @classmethod
    def parse(cls, url: str) -> Self:
        """Return the address that ``url`` names.

        Raises:
            ConfigError: ``url`` is not the address of a server, or it contains a password.
        """
        shown = mask_text(repr(url))
        try:
            parts = urlsplit(url)
            port = DEFAULT_PORT if parts.port is None else parts.port
            query = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=True)) if parts.query else {}
        except ValueError as error:
            raise ConfigError(f"{shown} is not the address of a server; {_FORM}") from error
        if parts.scheme not in _SCHEMES:
            raise ConfigError(f"{shown} has none of the schemes {', '.join(_SCHEMES)}; {_FORM}")
        if parts.password is not None:
            raise ConfigError(
                f"an address must not contain a password; put the password into the environment variable "
                f"{PASSWORD_VARIABLE}, or name another variable with ?auth_env=NAME"
            )
        database = parts.path.removeprefix("/") or "0"
        if not parts.hostname or not re.fullmatch(r"\d{1,4}", database) or parts.fragment or set(query) - {"auth_env"}:
            raise ConfigError(f"{shown} is not the address of a server; {_FORM}")
        variable = query.get("auth_env", PASSWORD_VARIABLE)
        if not (variable.isascii() and variable.isidentifier()):
            raise ConfigError(f"auth_env must name an environment variable; {shown} names none")
        user = unquote(parts.username) if parts.username else None
        return cls(parts.hostname, port, int(database), user, _SCHEMES[parts.scheme], variable)

    def __str__(self) -> str:
        user = f"{self.user}@" if self.user else ""
        host = f"[{self.host}]" if ":" in self.host else self.host
        database = f"/{self.database}" if self.database else ""
        return f"{'valkeys' if self.tls else 'valkey'}://{user}{host}:{self.port}{database}"

    def password(self) -> str | None:
        """Return the password from the environment, or None; messages mask the password from now on."""
        password = os.environ.get(self.password_variable) or None
        record_secrets("password", password)
        return password


def known_address(url: str) -> str:
    """Return ``url`` if it is the address of a server; raises what :meth:`ServerAddress.parse` does."""
    ServerAddress.parse(url)
    return url


@dataclass(frozen=True, slots=True)
class Credentials:
    """User and password of a server, read from the environment for each new connection."""

    address: ServerAddress

    def __bool__(self) -> bool:
        return self.address.user is not None or self.address.password() is not None

    def get_credentials(self) -> tuple[str, ...]:
        """Return the words of the command AUTH."""
        user, password = self.address.user, self.address.password()
        if password is None:
            # With an exception of its own, valkey-py closes the connection; it would keep it after any other.
            from valkey.exceptions import AuthenticationError

            raise AuthenticationError(f"the environment variable {self.address.password_variable} is not set")
        return (password,) if user is None else (user, password)


class ValkeyClient:
    """Connections to one server. Any thread may call.

    Methods with a command raise :class:`~tiering.StoreError` if the server cannot be reached, or refuses the command.

    Args:
        address: the server.
        connect_timeout: seconds within which a connection must be established.
        timeout: seconds within which the server must answer a command.
        ca_file: PEM file of the authorities that may sign the server's certificate; default: the system's.
        name: name of the connections in the server's list of clients; default "kv-tiering".
        scripts: scripts that EVALSHA runs, by their SHA-1; default: none. A server that lacks one, because it was
            restarted or flushed, gets all of them.

    Raises:
        ConfigError: the package ``valkey`` is missing.
    """

    def __init__(
        self,
        address: ServerAddress,
        *,
        connect_timeout: float,
        timeout: float,
        ca_file: str | os.PathLike[str] | None = None,
        name: str = "kv-tiering",
        scripts: Mapping[str, str] | None = None,
    ) -> None:
        try:
            import valkey
            from valkey.connection import Connection, SSLConnection
        except ImportError as error:
            raise ConfigError(
                "the package valkey is missing; install kv-tiering with its extra valkey "
                "(in a clone: pip install '.[valkey]')"
            ) from error
        self.address = address
        self._timeout = timeout
        self._scripts = scripts or {}
        tls = {"ssl_check_hostname": True, "ssl_ca_certs": ca_file and os.fspath(ca_file)} if address.tls else {}
        self._pool = valkey.ConnectionPool(
            connection_class=SSLConnection if address.tls else Connection,
            host=address.host,
            port=address.port,
            db=address.database,
            credential_provider=Credentials(address),
            lib_name=name,
            lib_version=None,
            socket_connect_timeout=min(connect_timeout, timeout),
            socket_timeout=timeout,
            socket_keepalive=True,
            **tls,
        )
        self._valkey = valkey.Valkey(connection_pool=self._pool)

    def __repr__(self) -> str:
        return f"ValkeyClient({self.address})"

    def close(self) -> None:
        """Close all connections; calls under way fail. A later call connects again."""
        self._pool.disconnect()

    def call(self, *words: Word) -> Any:
        """Run one command, and return its reply."""
        return self.replies([words])[0]

    def replies(self, commands: Sequence[Sequence[Word]]) -> list[Any]:
        """Run several commands as :meth:`call_all`, and return their replies if the server refuses none."""
        replies = self.call_all(commands)
        for reply in replies:
            if isinstance(reply, StoreError):
                raise reply
        return replies

    def call_all(self, commands: Sequence[Sequence[Word]]) -> list[Any]:
        """Run several commands in one round trip, in their order but not as one transaction.

        Scripts that the server lacks are loaded, and run after the other commands.

        Returns:
            For each command its reply, or the StoreError with which the server refused it.

        Raises:
            StoreError: the server cannot be reached; some of the commands may have run.
        """
        if not commands:
            return []
        with self._translated(str(commands[0][0])), self._connection() as connection:
            replies = self._exchange(connection, commands)
            unknown = [position for position, reply in enumerate(replies) if isinstance(reply, UnknownScriptError)]
            if unknown and self._scripts:
                loads = [("SCRIPT", "LOAD", script) for script in self._scripts.values()]
                again = self._exchange(connection, [*loads, *(commands[position] for position in unknown)])
                for position, reply in zip(unknown, again[len(loads) :], strict=True):
                    replies[position] = reply
            return replies

    def write(self, key: str | bytes, parts: Sequence[memoryview], *options: Word) -> Any:
        """Run ``SET key value options``, with a value that consists of ``parts``; nothing is copied.

        The reply is b"OK", or None if NX or XX refused.
        """
        name = key.encode() if isinstance(key, str) else key
        size = sum(part.nbytes for part in parts)
        head = b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (3 + len(options), len(name), name, size)
        with self._translated("SET"), self._connection() as connection:
            # The first bytes of a pack of words are their number, which stands in the head already.
            tail = b"".join(connection.pack_command(*options)).partition(b"\r\n")[2] if options else b""
            connection.send_packed_command([head, *parts, b"\r\n" + tail])
            return connection.read_response()

    def read_into(self, key: str | bytes, parts: Sequence[memoryview]) -> int | None:
        """Read a value into ``parts``, filling one after another; nothing else writes to them later.

        The content of ``parts`` is not defined after an error, or if the value is longer than all parts together.

        Returns:
            The length of the value in bytes; None if there is no such key.
        """
        with self._translated("GET"), self._connection() as connection:
            connection.send_command("GET", key)
            return read_value(connection, parts, time.monotonic() + self._timeout)

    def info(self) -> dict[str, str]:
        """Return the server's facts about itself (INFO), by name."""
        lines = bytes(self.call("INFO")).decode(errors="replace").splitlines()
        return dict(line.split(":", 1) for line in lines if ":" in line)

    def unlink_if(self, key: str | bytes, limit: int, matches: Callable[[int, bytes], bool]) -> bool:
        """Remove a value if it is still the one that was looked at, and return True if it was removed.

        The server refuses the removal if the value changes between the look and the removal.

        Args:
            key: key of the value.
            limit: bytes of the value to look at.
            matches: function of the value's length and its first ``limit`` bytes that returns True to remove the value.
        """

        def run(*words: Word) -> Any:
            connection.send_command(*words)
            return connection.read_response()

        with self._translated("UNLINK"), self._connection() as connection:
            run("WATCH", key)
            try:
                if not matches(run("STRLEN", key), run("GETRANGE", key, 0, limit - 1)):
                    return False
                run("MULTI")
                run("UNLINK", key)
                removed = run("EXEC")
                return bool(removed and removed[0])
            finally:
                # A connection in the middle of a transaction must not serve other calls.
                connection.disconnect()

    def subscribe(self, *channels: str) -> Subscription:
        """Return a subscription to ``channels``, over a connection of its own, for one thread."""
        with self._translated("SUBSCRIBE"):
            pubsub = self._valkey.pubsub(ignore_subscribe_messages=True)
            try:
                pubsub.subscribe(*channels)
            except BaseException:
                pubsub.close()
                raise
        return Subscription(self, pubsub)

    @contextlib.contextmanager
    def _connection(self) -> Iterator[Any]:
        """Lend a connection; after any failure it is closed, because a late reply may be on its way."""
        connection = self._pool.get_connection("")
        try:
            yield connection
        except BaseException as error:
            if not is_refusal(error):
                connection.disconnect()
            raise
        finally:
            self._pool.release(connection)

    @contextlib.contextmanager
    def _translated(self, doing: str) -> Iterator[None]:
        try:
            yield
        except StoreError:
            raise
        except Exception as error:
            known = translate(error, f"{doing}, {self.address}")
            if known is None:
                raise
            raise known from error

    def _exchange(self, connection: Any, commands: Sequence[Sequence[Word]]) -> list[Any]:
        connection.send_packed_command(connection.pack_commands(commands))
        return [self._reply(connection, str(words[0])) for words in commands]

    def _reply(self, connection: Any, doing: str) -> Any:
        try:
            return connection.read_response()
        except Exception as error:
            known = translate(error, f"{doing}, {self.address}") if is_refusal(error) else None
            if known is None:
                raise
            return known


class Subscription:
    """Subscription to channels, made by :meth:`ValkeyClient.subscribe`; for one thread at a time."""

    def __init__(self, client: ValkeyClient, pubsub: Any) -> None:
        self._client = client
        self._pubsub = pubsub

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def read(self, timeout: float) -> tuple[str, bytes] | None:
        """Wait at most ``timeout`` seconds for a message; return its channel and content, or None.

        Raises:
            StoreError: the connection is lost. Messages may have been missed; subscribe again.
        """
        end = time.monotonic() + timeout
        with self._client._translated("SUBSCRIBE"):
            while True:
                connection = self._pubsub.connection
                if connection is None or connection._sock is None:
                    # valkey-py would subscribe again by itself, without an error about the messages that were missed.
                    raise TemporaryStoreError(f"the connection is closed (SUBSCRIBE, {self._client.address})")
                if not connection.can_read(timeout=max(end - time.monotonic(), 0.0)):
                    return None
                message = self._pubsub.handle_message(connection.read_response(), ignore_subscribe_messages=True)
                if message is not None and message["type"] == "message":
                    return message["channel"].decode(), message["data"]

    def close(self) -> None:
        """End the subscription and close its connection; may be called twice."""
        self._pubsub.close()


def read_value(connection: Any, parts: Sequence[memoryview], deadline: float) -> int | None:
    """Read the reply to a GET from the socket; see :meth:`ValkeyClient.read_into`."""
    from valkey import exceptions as known

    # valkey-py has no call that reads into given memory, and its own copies of a value cost more than the network.
    recv_into = connection._sock.recv_into  # stays the same if another thread closes the connection meanwhile

    def receive(view: memoryview) -> int:
        if not (count := recv_into(view)):
            raise known.ConnectionError("Connection closed by server.")
        return int(count)

    def fill(view: memoryview) -> None:
        done = 0
        while done < len(view):
            if time.monotonic() > deadline:
                raise known.TimeoutError("Timeout reading from socket")
            done += receive(view[done:])

    head = memoryview(bytearray(_HEAD))
    have = end = 0
    try:
        while (end := bytes(head[:have]).find(b"\r\n")) < 0:
            have += receive(head[have:])
        line = bytes(head[:end])
        if line[:1] == b"-":
            raise connection._parser.parse_error(line[1:].decode(errors="replace"))
        if line[:1] != b"$":
            raise known.InvalidResponse(f"Protocol Error: {line[:40]!r}")
        length = int(line[1:])
        if length < 0:
            return None
        if length > sum(map(len, parts)):
            connection.disconnect()  # the rest of the value is not worth reading
            return length
        rest, left = head[end + 2 : have], length
        for part in parts:
            part = part[:left]
            early = min(len(part), len(rest))
            part[:early] = rest[:early]
            fill(part[early:])
            rest, left = rest[early:], left - len(part)
        fill(memoryview(bytearray(2 - len(rest))))
    except TimeoutError as error:
        raise known.TimeoutError("Timeout reading from socket") from error
    except OSError as error:
        raise known.ConnectionError(f"Error while reading from socket: {error}") from error
    return length


class UnknownScriptError(TemporaryStoreError):
    """The server lacks a script: it was restarted empty, or its scripts were flushed."""


_CLUSTER = "the server is a node of a cluster; clusters are not supported, name a single server"

_EXCEPTIONS: dict[str, tuple[type[StoreError], str]] = {
    "AuthenticationError": (PermanentStoreError, "wrong user or password, or none given"),
    "NoPermissionError": (PermanentStoreError, "no permission; extend the user's access list"),
    "OutOfMemoryError": (OutOfSpaceError, "out of memory; blocks that are held are still served"),
    "ReadOnlyError": (WritesRefusedError, "the server is a read-only replica; name the primary"),
    "BusyLoadingError": (TemporaryStoreError, "the server is still loading its data"),
    "NoScriptError": (UnknownScriptError, "the server lacks a script, and could not load it"),
    "TimeoutError": (TemporaryStoreError, "no answer within the time-out"),
}
"""Exceptions of valkey-py, with their meaning."""

_CODES: dict[str, tuple[type[StoreError], str]] = {
    "NOREPLICAS": (WritesRefusedError, "too few replicas are connected, so the server takes no writes"),
    "MISCONF": (WritesRefusedError, "the server cannot write its snapshot, so it takes no writes"),
    "MASTERDOWN": (TemporaryStoreError, "the replica has lost its primary"),
    "BUSY": (TemporaryStoreError, "the server runs a long script"),
    "TRYAGAIN": (TemporaryStoreError, "the server is not ready for the command"),
    "MOVED": (PermanentStoreError, _CLUSTER),
    "CLUSTERDOWN": (PermanentStoreError, _CLUSTER),
}
"""Error codes for which valkey-py has no exception of its own, with their meaning."""


def is_refusal(error: BaseException) -> bool:
    """Return True if ``error`` is the server's whole reply, so that the connection can be used again."""
    from valkey.exceptions import ResponseError

    return isinstance(error, ResponseError)


def translate(error: Exception, doing: str) -> StoreError | None:
    """Return the :class:`StoreError` for an exception of valkey-py; None for any other exception.

    Args:
        error: the exception.
        doing: the command, and the server; ends the message.
    """
    from valkey import exceptions as known

    text = mask_text(str(error))
    kind: type[StoreError]
    for name, (kind, meaning) in _EXCEPTIONS.items():
        if isinstance(error, getattr(known, name)):
            return kind(f"{meaning}: {text} ({doing})")
    if isinstance(error, known.ResponseError):
        kind, meaning = _CODES.get(text.split(" ")[0], (PermanentStoreError, "refused"))
    elif "CERTIFICATE_VERIFY_FAILED" in text:
        kind, meaning = PermanentStoreError, "TLS: the certificate is refused; name its authority with ca_file"
    elif isinstance(error, (known.ValkeyError, OSError)) and not isinstance(error, known.DataError):
        kind, meaning = TemporaryStoreError, "no connection"
    else:
        return None
    return kind(f"{meaning}: {text} ({doing})")
