"""An S3 server in memory that answers as late as a real one, with log-normal latencies.

It is a process of its own, with one thread, and serves only the requests of the s3 tier. Signatures are not checked.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

BUCKET = "kv-cache"
SIGMA = 0.35
"""Spread of the latencies: the 99th percentile is 2.3 times the median."""
LOCAL = 0.0005
"""Median in seconds while a benchmark prepares objects."""


@dataclass(frozen=True, slots=True)
class SlowS3:
    """A running server."""

    endpoint: str
    process: subprocess.Popen[str]

    def delay(self, **medians: float) -> None:
        """Answer requests with these verbs (``head=0.025``) after this median in seconds from now on."""
        self._tell(" ".join(f"{verb}={median}" for verb, median in medians.items()))

    def bound(self, bytes_per_second: float) -> None:
        """Send at most so many bytes per second from now on, over all connections together; 0: no bound."""
        self._tell(f"bandwidth={bytes_per_second}")

    def down(self, *, now: bool) -> None:
        """Answer all requests with 503 from now on, or none."""
        self._tell(f"down={int(now)}")

    def requests(self) -> int:
        """Return the number of requests so far."""
        return int(self._tell("count"))

    def _tell(self, words: str) -> str:
        if self.process.stdin is None or self.process.stdout is None:
            raise RuntimeError("the server has no pipes")
        self.process.stdin.write(words + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline()

    def environment(self) -> dict[str, str]:
        """Credentials that the server takes, and nothing else of this machine."""
        return {
            "AWS_ACCESS_KEY_ID": "AKIDSLOW0123456789AB",
            "AWS_SECRET_ACCESS_KEY": "slow",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": "/dev/null",
            "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
        }


@contextlib.contextmanager
def slow_s3() -> Iterator[SlowS3]:
    """A server on loopback with the bucket :data:`BUCKET`, as long as the context lasts."""
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.slow_s3"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        if process.stdout is None:
            raise RuntimeError("the server has no pipes")
        yield SlowS3(f"http://127.0.0.1:{int(process.stdout.readline())}", process)
    finally:
        process.kill()
        process.communicate()


class _Server:
    def __init__(self) -> None:
        self._objects: dict[str, bytes] = {}
        self._medians: dict[str, float] = {}
        self._random = random.Random(7)
        self._requests = 0
        self._sent_at = 0.0
        """Time at which all answers so far have been sent, with a bound on the bandwidth."""

    async def serve(self) -> None:
        server = await asyncio.start_server(self._connection, "127.0.0.1", 0, limit=1 << 20)
        print(server.sockets[0].getsockname()[1], flush=True)
        while words := await asyncio.to_thread(sys.stdin.readline):
            pairs = (word.partition("=") for word in words.split() if "=" in word)
            self._medians.update((verb, float(median)) for verb, _, median in pairs)
            print(self._requests, flush=True)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                method, target, _ = lines[0].split(" ")
                headers = {
                    name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])
                }
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                median = self._medians.get(method.lower(), LOCAL)
                await asyncio.sleep(median * self._random.lognormvariate(0.0, SIGMA))
                status, answer, length = self._answer(method, target, headers, body)
                tag = hashlib.md5(answer[:64], usedforsecurity=False).hexdigest()
                writer.write(
                    f'HTTP/1.1 {status}\r\nContent-Length: {length}\r\nETag: "{tag}"\r\n'
                    "Last-Modified: Thu, 01 Jan 2026 00:00:00 GMT\r\n\r\n".encode()
                )
                if method != "HEAD":
                    await self._take_turn(len(answer))
                    writer.write(answer)
                await writer.drain()
        writer.close()

    async def _take_turn(self, size: int) -> None:
        """Wait until an answer of ``size`` bytes would have been sent behind all others."""
        if bandwidth := self._medians.get("bandwidth"):
            now = asyncio.get_running_loop().time()
            self._sent_at = max(now, self._sent_at) + size / bandwidth
            await asyncio.sleep(self._sent_at - now)

    def _answer(self, method: str, target: str, headers: dict[str, str], body: bytes) -> tuple[str, bytes, int]:
        self._requests += 1
        if self._medians.get("down"):
            return "503 Service Unavailable", b"", 0
        url = urlsplit(target)
        name = unquote(url.path).removeprefix(f"/{BUCKET}").lstrip("/")
        if method == "PUT":
            if headers.get("if-none-match") == "*" and name in self._objects:
                return "412 Precondition Failed", b"", 0
            self._objects[name] = body
            return "200 OK", b"", 0
        if method == "DELETE":
            self._objects.pop(name, None)
            return "204 No Content", b"", 0
        if not name:
            listing = self._list(parse_qs(url.query))
            return "200 OK", listing, len(listing)
        found = self._objects.get(name)
        return ("404 Not Found", b"", 0) if found is None else ("200 OK", found, len(found))

    def _list(self, query: dict[str, list[str]]) -> bytes:
        prefix, after = query.get("prefix", [""])[0], query.get("start-after", [""])[0]
        items = "".join(
            f"<Contents><Key>{escape(name)}</Key><Size>{len(data)}</Size><ETag>x</ETag>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            for name, data in sorted(self._objects.items())
            if name.startswith(prefix) and name > after
        )
        return f"<ListBucketResult><IsTruncated>false</IsTruncated>{items}</ListBucketResult>".encode()


if __name__ == "__main__":
    asyncio.run(_Server().serve())
