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
- **Errors** are those of :mod:`tiering.errors`. A server without memory raises ``OutOfSpaceError``, a replica
  ``WritesRefusedError``; a lost connection is temporary, a wrong password permanent.
- **Forks**: a child makes connections of its own, and uses none of its parent's.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

from tiering.errors import ConfigError, StoreError, TemporaryStoreError
from tiers.valkey.address import Credentials, ServerAddress
from tiers.valkey.faults import UnknownScriptError, is_refusal, translate
from tiers.valkey.values import peek, read_value

__all__ = ["NO_VALKEY", "ServerAddress", "Subscription", "ValkeyClient", "Word"]

NO_VALKEY = (
    "the package valkey is missing; install kv-tiering with its extra valkey (in a clone: pip install '.[valkey]')"
)
"""Message about the missing package."""

Word = str | bytes | int | float | memoryview
"""A word of a command, as the client library encodes it."""


class ValkeyClient:
    """Connections to one server. Any thread may call.

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
            raise ConfigError(NO_VALKEY) from error
        self.address = address
        """The server."""
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

    # -------------------------------------------------------------------------------------------------------- commands

    def call(self, *words: Word) -> Any:
        """Run one command, and return its reply.

        Raises:
            StoreError: the server cannot be reached, or refuses the command.
        """
        (reply,) = self.call_all([words])
        if isinstance(reply, StoreError):
            raise reply
        return reply

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

        Returns:
            The reply: b"OK", or None if NX or XX refused.

        Raises:
            StoreError: the server cannot be reached, or refuses the command.
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

        Returns:
            The length of the value in bytes; None if there is no such key. If the value is longer than all parts
            together, their content is not defined.

        Raises:
            StoreError: the server cannot be reached, or refuses the command. The content of ``parts`` is not defined.
        """
        with self._translated("GET"), self._connection() as connection:
            connection.send_command("GET", key)
            return read_value(connection, parts, time.monotonic() + self._timeout)

    def peek(self, key: str | bytes, limit: int) -> tuple[int, bytes]:
        """Return the length of a value, and its first ``limit`` bytes; an absent value has the length 0.

        Raises:
            StoreError: the server cannot be reached, or refuses a command.
        """
        with self._translated("GETRANGE"), self._connection() as connection:
            return peek(connection, key, limit)

    def unlink_if(self, key: str | bytes, limit: int, matches: Callable[[int, bytes], bool]) -> bool:
        """Remove a value if it is still the one that was looked at, and return True if it was removed.

        The server refuses the removal if the value changes between the look and the removal.

        Args:
            key: key of the value.
            limit: bytes of the value to look at.
            matches: function of the value's length and its first ``limit`` bytes that returns True to remove the value.

        Raises:
            StoreError: the server cannot be reached, or refuses a command.
        """

        def run(*words: Word) -> Any:
            connection.send_command(*words)
            return connection.read_response()

        with self._translated("UNLINK"), self._connection() as connection:
            run("WATCH", key)
            try:
                if not matches(*peek(connection, key, limit)):
                    return False
                run("MULTI")
                run("UNLINK", key)
                removed = run("EXEC")
                return bool(removed and removed[0])
            finally:
                # A connection in the middle of a transaction must not serve other calls.
                connection.disconnect()

    def subscribe(self, *channels: str) -> Subscription:
        """Return a subscription to ``channels``, over a connection of its own, for one thread.

        Raises:
            StoreError: the server cannot be reached, or refuses the command.
        """
        with self._translated("SUBSCRIBE"):
            pubsub = self._valkey.pubsub(ignore_subscribe_messages=True)
            try:
                pubsub.subscribe(*channels)
            except BaseException:
                pubsub.close()
                raise
        return Subscription(self, pubsub)

    # ---------------------------------------------------------------------------------------------------------- inner

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
                    # valkey-py would subscribe again by itself, and nobody would learn that messages were missed.
                    raise TemporaryStoreError(
                        f"the subscription's connection is closed (SUBSCRIBE, {self._client.address})"
                    )
                if not connection.can_read(timeout=max(end - time.monotonic(), 0.0)):
                    return None
                message = self._pubsub.handle_message(connection.read_response(), ignore_subscribe_messages=True)
                if message is not None and message["type"] == "message":
                    return message["channel"].decode(), message["data"]

    def close(self) -> None:
        """End the subscription and close its connection; may be called twice."""
        self._pubsub.close()
