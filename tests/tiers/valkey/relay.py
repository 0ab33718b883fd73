"""A relay in front of a server, which can cut connections in the middle of an answer."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Self


class Relay:
    """Relays connections from a port of its own to a server's port, as a context manager.

    Args:
        port: the server's port.
    """

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self.port: int = self._listener.getsockname()[1]
        """The relay's port."""
        self.cut_answers_after: int | None = None
        """Bytes of an answer after which its connection is cut; None: connections are left alone."""

    def __enter__(self) -> Self:
        self._threads[0].start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        self._listener.close()
        for connection in self._open:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads[1:]:
            thread.join()
        for connection in self._open:
            connection.close()

    def _accept(self) -> None:
        while True:
            try:
                inner, _ = self._listener.accept()
            except OSError:
                return
            outer = socket.create_connection(("127.0.0.1", self._target))
            self._open += [inner, outer]
            for source, target, answers in ((inner, outer, False), (outer, inner, True)):
                thread = threading.Thread(target=self._copy, args=(source, target, answers))
                self._threads.append(thread)
                thread.start()

    def _copy(self, source: socket.socket, target: socket.socket, answers: bool) -> None:
        sent = 0
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                most = self.cut_answers_after
                if answers and most is not None and sent + len(data) > most:
                    target.sendall(data[: max(most - sent, 0)])
                    break
                target.sendall(data)
                sent = sent + len(data) if most is not None else 0
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
