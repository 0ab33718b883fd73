"""An HTTP proxy between a tier and its bucket that changes the bodies of objects."""

from __future__ import annotations

import contextlib
import enum
import http.client
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from tests.fake_s3 import LOGIN_PAGE


class Lie(enum.Enum):
    """A way in which the proxy changes the body of a block."""

    EMPTY = "an empty body with status 200"
    TOO_LONG = "some bytes more"
    CUT = "the first half"
    LOGIN_PAGE = "a page of its own"
    SAME_BIT = "the same bit flipped in each answer"

    def tell(self, body: bytes) -> bytes:
        """Return the body that the proxy passes on."""
        match self:
            case Lie.EMPTY:
                return b""
            case Lie.TOO_LONG:
                return body + bytes(40)
            case Lie.CUT:
                return body[: len(body) // 2]
            case Lie.LOGIN_PAGE:
                return LOGIN_PAGE
            case Lie.SAME_BIT:
                return body[:-1] + bytes([body[-1] ^ 1])


class Proxy:
    """State of a running proxy."""

    def __init__(self, target: str, lie: Lie | None, about: str) -> None:
        self.target = urlsplit(target)
        self.about = about
        self.lie = lie
        """The change to blocks; None: they pass as they are."""
        self.lies = 0
        """Number of changed bodies so far."""
        self.endpoint = ""
        """Address of the proxy."""


@contextlib.contextmanager
def lying_proxy(target: str, lie: Lie | None = None, about: str = "/blocks/") -> Iterator[Proxy]:
    """A proxy on loopback in front of ``target`` that changes objects with ``about`` in their names."""
    proxy = Proxy(target, lie, about)

    class Handler(_Handler):
        state = proxy

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads, server.block_on_close = True, False
    proxy.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, name="lying-proxy")
    thread.start()
    try:
        yield proxy
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16
    state: Proxy

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        pass

    def _pass_on(self) -> None:
        proxy = self.state
        sent = self.rfile.read(int(self.headers.get("content-length") or 0))
        server = http.client.HTTPConnection(proxy.target.hostname or "", proxy.target.port)
        with contextlib.closing(server):
            server.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                server.putheader(name, value)
            server.endheaders(sent)
            answer = server.getresponse()
            body = answer.read()
        if proxy.lie is not None and self.command == "GET" and answer.status == 200 and proxy.about in self.path:
            body = proxy.lie.tell(body)
            proxy.lies += 1
        length = answer.getheader("content-length", "0") if self.command == "HEAD" else str(len(body))
        self.send_response_only(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in {"content-length", "transfer-encoding", "connection", "keep-alive"}:
                self.send_header(name, value)
        self.send_header("Content-Length", length)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = _pass_on  # noqa: N815
