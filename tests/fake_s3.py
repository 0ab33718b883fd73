"""A tiny S3 server that fails on command: statuses, resets, hangs, truncated bodies.

The server keeps objects in a dict and records its requests. Signatures are not checked. Only calls that the s3 tier
uses are there.
"""

from __future__ import annotations

import contextlib
import datetime
import email.utils
import enum
import hashlib
import re
import socket
import ssl
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

LOGIN_PAGE = b"<html>Please sign in to continue</html>"


def etag(data: bytes) -> str:
    """Return the ETag of an object: the MD5 of its bytes, in quotes."""
    return f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'


BEGINNING = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
"""Time of the last write of objects for which the server has recorded none."""


class Trouble(enum.Enum):
    """The faults of a server other than a status."""

    RESET = "the connection is reset"
    LOST_ANSWER = "the request is carried out, and the connection is reset"
    HANG = "nothing comes until the server is closed"
    CUT_BODY = "the body ends half way"
    FLIP = "a bit of the body is flipped"
    LOGIN_PAGE = "the body is a page of a proxy"


@dataclass(frozen=True, slots=True)
class Seen:
    """A recorded request."""

    method: str
    name: str
    headers: Mapping[str, str]
    query: Mapping[str, list[str]]
    port: int = 0
    """The client's port, which differs for each connection."""


@dataclass(slots=True)
class _Fault:
    what: int | Trouble
    method: str
    part: str
    left: int
    code: str = ""
    message: str = ""


@dataclass(eq=False)
class FakeS3:
    """The server's state; :func:`fake_s3` runs the server.

    Attributes:
        objects: the objects of the one bucket, by name.
    """

    bucket: str = "kv-cache"
    endpoint: str = ""
    objects: dict[str, bytes] = field(default_factory=dict)
    seen: list[Seen] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    closing: threading.Event = field(default_factory=threading.Event)
    hanging: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    """Released once for each request that hangs."""
    conditional_delete: int = 412
    """Status for a deletion with another ETag in If-Match.

    With 0 the server ignores the condition, with 501 it does not understand the condition.
    """
    access_key: str = ""
    """Access key that requests must be signed with; empty: any."""
    redirect_to: str = ""
    """Endpoint to which every request is redirected; empty: none."""
    modified: dict[str, datetime.datetime] = field(default_factory=dict)
    """Time of the last write by object name; default: the beginning of 2026."""
    now: datetime.datetime | None = None
    """Time of the server's clock, which writes record; None: they record none."""
    intercept: Callable[[str, str], int | Trouble | None] | None = None
    """Function of a request's method and name that returns its fault, in place of those of :meth:`fail`."""
    _faults: deque[_Fault] = field(default_factory=deque)

    def fail(
        self,
        what: int | Trouble,
        *,
        method: str = "",
        part: str = "",
        times: int = 1,
        code: str = "Injected",
        message: str = "",
    ) -> None:
        """Fail the next ``times`` requests with this method and ``part`` in their name.

        Args:
            what: a status or a fault.
            method: HTTP method; "": any.
            part: part of the object's name; "": any.
            times: number of requests.
            code: error code in the body of a status.
            message: message in the body of a status.
        """
        with self.lock:
            self._faults.append(_Fault(what, method, part, times, code, message))

    def heal(self) -> None:
        """Remove all faults that have not happened yet."""
        with self.lock:
            self._faults.clear()

    def asked(self, method: str, part: str = "") -> list[Seen]:
        """Return the requests so far with this method and ``part`` in their name."""
        with self.lock:
            return [seen for seen in self.seen if seen.method == method and part in seen.name]

    def names(self, part: str = "") -> list[str]:
        """Return the names of the objects with ``part`` in their name, while other threads may write."""
        with self.lock:
            return [name for name in self.objects if part in name]

    def fault_for(self, method: str, name: str) -> _Fault | None:
        if self.intercept is not None:
            what = self.intercept(method, name)
            return None if what is None else _Fault(what, method, name, 0, "Injected")
        with self.lock:
            for fault in self._faults:
                if fault.method in {"", method} and fault.part in name and fault.left:
                    fault.left -= 1
                    return fault
        return None

    def environment(self) -> dict[str, str]:
        return {
            "AWS_ACCESS_KEY_ID": "AKIDFAKE0123456789AB",
            "AWS_SECRET_ACCESS_KEY": "very-secret-fake-key-0123456789abcdef",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": "/dev/null",
            "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
        }


@contextlib.contextmanager
def fake_s3(tls: ssl.SSLContext | None = None) -> Iterator[FakeS3]:
    """A running server on loopback, for as long as the context lasts.

    Args:
        tls: certificate with which the server speaks https; default: plain HTTP.
    """
    state = FakeS3()
    with serving(state, FakeHandler, tls):
        yield state


@contextlib.contextmanager
def serving(state: FakeS3, kind: type[FakeHandler], tls: ssl.SSLContext | None = None) -> Iterator[None]:
    """A server with the given state and requests, for as long as the context lasts."""
    server = _Server(("127.0.0.1", 0), type("Handler", (kind,), {"fake": state}))
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    state.endpoint = f"http{'' if tls is None else 's'}://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, name="fake-s3")
    thread.start()
    try:
        yield
    finally:
        state.closing.set()
        server.shutdown()
        server.server_close()
        thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128
    """Connections that wait to be accepted.

    By default there are five. A tier opens more at once, and the kernel drops those beyond the bound if the accepting
    thread is late; their clients try again after seconds.
    """


class FakeHandler(BaseHTTPRequestHandler):
    """Answers the requests of S3."""

    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16
    """Size of the write buffer in bytes, so that an answer is sent as a whole.

    The second of two parts would wait until the client acknowledges the first one.
    """
    fake: FakeS3
    answers = True
    """False: the present request gets no answer."""

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        pass

    def do_GET(self) -> None:
        self._answer("GET")

    def do_PUT(self) -> None:
        self._answer("PUT")

    def do_HEAD(self) -> None:
        self._answer("HEAD")

    def do_DELETE(self) -> None:
        self._answer("DELETE")

    def do_POST(self) -> None:
        self._answer("POST")

    def _answer(self, method: str) -> None:
        fake = self.fake
        url = urlsplit(self.path)
        path = unquote(url.path).lstrip("/")
        if self.headers.get("host", "").startswith(f"{fake.bucket}."):
            path = f"{fake.bucket}/{path}"
        bucket, _, name = path.partition("/")
        query = parse_qs(url.query, keep_blank_values=True)
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        with fake.lock:
            fake.seen.append(
                Seen(
                    method,
                    name,
                    {key.lower(): value for key, value in self.headers.items()},
                    query,
                    self.client_address[1],
                )
            )
        injected = fake.fault_for(method, name)
        fault = None if injected is None else injected.what
        self.answers = fault is not Trouble.LOST_ANSWER
        if fake.redirect_to:
            self.send(307, b"", location=f"{fake.redirect_to}{self.path}")
        elif fake.access_key and self.signed_with() != fake.access_key:
            self.send(403, b"<Error><Code>InvalidAccessKeyId</Code></Error>")
        elif injected is not None and isinstance(fault, int):
            text = f"<Message>{escape(injected.message)}</Message>" if injected.message else ""
            self.send(fault, f"<Error><Code>{injected.code}</Code>{text}</Error>".encode())
        elif fault is Trouble.RESET:
            self.reset()
        elif fault is Trouble.HANG:
            fake.hanging.release()
            fake.closing.wait()
            self.close_connection = True
        elif bucket != fake.bucket:
            self.send(404, b"<Error><Code>NoSuchBucket</Code></Error>")
        elif method == "PUT":
            self.put(name, body)
        elif method in {"GET", "HEAD"} and name:
            self.get(name, fault if isinstance(fault, Trouble) else None)
        elif method == "GET":
            self.list(query)
        elif method == "DELETE":
            self.delete(name)
        else:
            keys = re.findall(r"<Key>(.*?)</Key>", body.decode())
            with fake.lock:
                for key in keys:
                    fake.objects.pop(key, None)
            deleted = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys)
            self.send(200, f"<DeleteResult>{deleted}</DeleteResult>".encode())

    def reset(self) -> None:
        """Reset the connection, as a proxy that is restarted does."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RD)

    def signed_with(self) -> str | None:
        """Return the access key of the request."""
        key = re.search("Credential=([^/]*)/", self.headers.get("authorization", ""))
        return None if key is None else key[1]

    def put(self, name: str, body: bytes) -> None:
        source = unquote(self.headers.get("x-amz-copy-source", "")).removeprefix(f"{self.fake.bucket}/")
        if source:
            self._copy(source, name)
            return
        with self.fake.lock:
            refused = self.headers.get("if-none-match") == "*" and name in self.fake.objects
            if not refused:
                self.fake.objects[name] = body
                if self.fake.now is not None:
                    self.fake.modified[name] = self.fake.now
        if refused:
            self.send(412, b"<Error><Code>PreconditionFailed</Code></Error>")
        else:
            self.send(200, b"")

    def _copy(self, source: str, name: str) -> None:
        """Copy an object; as S3 does, refuse a copy onto itself that changes nothing."""
        replaces = self.headers.get("x-amz-metadata-directive") == "REPLACE"
        with self.fake.lock:
            body = self.fake.objects.get(source)
            if body is not None and (replaces or source != name):
                self.fake.objects[name] = body
                self.fake.modified[name] = datetime.datetime.now(datetime.UTC)
        if body is None:
            self.send(404, b"<Error><Code>NoSuchKey</Code></Error>")
        elif source == name and not replaces:
            self.send(400, b"<Error><Code>InvalidRequest</Code></Error>")
        else:
            self.send(200, f"<CopyObjectResult><ETag>{etag(body)}</ETag></CopyObjectResult>".encode())

    def delete(self, name: str) -> None:
        expected = self.headers.get("if-match")
        with self.fake.lock:
            unknown = expected is not None and self.fake.conditional_delete == 501
            found = self.fake.objects.get(name)
            refused = expected is not None and found is not None and expected != etag(found)
            refused = refused and self.fake.conditional_delete != 0
            if not unknown and not refused:
                self.fake.objects.pop(name, None)
        self.send(501 if unknown else 412 if refused else 204, b"")

    def get(self, name: str, fault: Trouble | None) -> None:
        with self.fake.lock:
            data = self.fake.objects.get(name)
            modified = self.fake.modified.get(name, BEGINNING)
        if data is None:
            self.send(404, b"<Error><Code>NoSuchKey</Code></Error>")
            return
        tag = etag(data)
        headers = {"Last-Modified": email.utils.format_datetime(modified, usegmt=True)}
        if fault is Trouble.FLIP:
            data = data[:-1] + bytes([data[-1] ^ 1])
        elif fault is Trouble.LOGIN_PAGE:
            data = LOGIN_PAGE
            tag = etag(data)
        self.send(200, data, cut=fault is Trouble.CUT_BODY, tag=tag, headers=headers)

    def list(self, query: dict[str, list[str]]) -> None:
        prefix, after = query.get("prefix", [""])[0], query.get("start-after", [""])[0]
        with self.fake.lock:
            chosen = sorted(
                (name, len(data), self.fake.modified.get(name, BEGINNING))
                for name, data in self.fake.objects.items()
                if name.startswith(prefix) and name > after
            )
        folders: set[str] = set()
        if query.get("delimiter"):
            folders = {
                f"{prefix}{rest.partition('/')[0]}/" for name, *_ in chosen if "/" in (rest := name[len(prefix) :])
            }
            chosen = [found for found in chosen if "/" not in found[0][len(prefix) :]]
        items = "".join(
            f"<Contents><Key>{escape(name)}</Key><Size>{size}</Size><LastModified>{written:%Y-%m-%dT%H:%M:%S.000Z}</LastModified>"
            f"<ETag>x</ETag></Contents>"
            for name, size, written in chosen
        )
        below = "".join(f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>" for name in sorted(folders))
        text = (
            f"<ListBucketResult><Name>{self.fake.bucket}</Name><IsTruncated>false</IsTruncated>{items}"
            f"{below}</ListBucketResult>"
        )
        self.send(200, text.encode())

    def send(
        self,
        status: int,
        body: bytes,
        *,
        cut: bool = False,
        tag: str = '"x"',
        location: str = "",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        if not self.answers:
            self.reset()
            return
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if location:
            self.send_header("Location", location)
        self.send_header("Content-Length", str(0 if status == 204 else len(body)))
        if "Last-Modified" not in (headers or {}):
            self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        self.send_header("ETag", tag)
        self.end_headers()
        if self.command != "HEAD" and status != 204:
            self.wfile.write(body[: len(body) // 2] if cut else body)
        if cut:
            self.close_connection = True
