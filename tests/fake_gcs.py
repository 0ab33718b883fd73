"""A double of Google Cloud Storage's XML API, of the part that the object tier uses.

No emulator at hand serves this API to obstore: fake-gcs-server has no listing, no deletion and no names with slashes
there, and gcp-storage-emulator answers 501. The double has what the tier uses: generations and their conditions, 404
for the deletion of an absent object, pages of a listing, and bearer tokens. It fails on command, as the S3 double does.
"""

from __future__ import annotations

import contextlib
import datetime
import email.utils
import itertools
import ssl
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote
from xml.sax.saxutils import escape

from tests.fake_s3 import LOGIN_PAGE, FakeHandler, FakeS3, Trouble, etag, serving

TOKEN = "ya29.token-of-the-double"


@dataclass(eq=False)
class FakeGcs(FakeS3):
    """The server's state."""

    access_key: str = TOKEN
    page: int = 1000
    """Maximum number of objects in one answer to a listing."""
    generations: dict[str, int] = field(default_factory=dict)
    counter: Iterator[int] = field(default_factory=lambda: itertools.count(1_700_000_000_000_000))

    def environment(self) -> dict[str, str]:
        return {"GOOGLE_BEARER_TOKEN": TOKEN}

    def words(self, bucket: str, prefix: str = "") -> dict[str, Any]:
        return {"type": "object", "url": f"gs://{bucket}/{prefix}", "endpoint_url": self.endpoint}

    def make_bucket(self, name: str) -> RawGcsBucket:
        self.bucket = name
        return RawGcsBucket(self)

    def keep(self, name: str, data: bytes) -> int:
        """Write an object, and return its generation. The caller holds the lock."""
        self.objects[name] = data
        self.generations[name] = next(self.counter)
        self.modified[name] = datetime.datetime.now(datetime.UTC)
        return self.generations[name]


@dataclass(frozen=True, slots=True)
class RawGcsBucket:
    """Raw access to the server's objects."""

    state: FakeGcs

    @property
    def name(self) -> str:
        return self.state.bucket

    def names(self, prefix: str = "") -> list[str]:
        with self.state.lock:
            return sorted(name for name in self.state.objects if name.startswith(prefix))

    def read(self, name: str) -> bytes | None:
        return self.state.objects.get(name)

    def write(self, name: str, data: bytes) -> None:
        with self.state.lock:
            self.state.keep(name, data)

    def delete(self, name: str) -> None:
        with self.state.lock:
            self.state.objects.pop(name, None)

    def close(self) -> None:
        pass


@contextlib.contextmanager
def fake_gcs(tls: ssl.SSLContext | None = None) -> Iterator[FakeGcs]:
    """A running server on loopback, for as long as the context lasts.

    Args:
        tls: certificate with which the server speaks https; default: plain HTTP.
    """
    state = FakeGcs()
    with serving(state, _Handler, tls):
        yield state


class _Handler(FakeHandler):
    fake: FakeGcs

    def signed_with(self) -> str | None:
        return self.headers.get("authorization", "").removeprefix("Bearer ")

    def _has_condition(self, name: str) -> bool:
        """Return True if the object's generation is the one that the request demands; 0 stands for none."""
        wanted = self.headers.get("x-goog-if-generation-match")
        present = self.fake.generations[name] if name in self.fake.objects else 0
        return wanted is None or int(wanted) == present

    def put(self, name: str, body: bytes) -> None:
        source = self.headers.get("x-goog-copy-source")
        with self.fake.lock:
            if source is not None:
                body = self.fake.objects.get(unquote(source).removeprefix("/").partition("/")[2], b"")
            met = self._has_condition(name)
            generation = self.fake.keep(name, body) if met else 0
        if not met:
            self.send(412, b"<Error><Code>PreconditionFailed</Code></Error>")
            return
        answer = b"" if source is None else f"<CopyObjectResult><ETag>{etag(body)}</ETag></CopyObjectResult>".encode()
        self.send(200, answer, tag=etag(body), headers={"x-goog-generation": str(generation)})

    def get(self, name: str, fault: Trouble | None) -> None:
        with self.fake.lock:
            data = self.fake.objects.get(name)
            generation = self.fake.generations.get(name, 0)
            modified = self.fake.modified.get(name)
        if data is None or modified is None:
            self.send(404, b"<Error><Code>NoSuchKey</Code></Error>")
            return
        tag = etag(data)
        headers = {
            "x-goog-generation": str(generation),
            "Last-Modified": email.utils.format_datetime(modified, usegmt=True),
        }
        if fault is Trouble.FLIP:
            data = data[:-1] + bytes([data[-1] ^ 1])
        elif fault is Trouble.LOGIN_PAGE:
            data = LOGIN_PAGE
        self.send(200, data, cut=fault is Trouble.CUT_BODY, tag=tag, headers=headers)

    def delete(self, name: str) -> None:
        with self.fake.lock:
            absent, met = name not in self.fake.objects, self._has_condition(name)
            if met:
                self.fake.objects.pop(name, None)
        if absent:
            self.send(404, b"<Error><Code>NoSuchKey</Code></Error>")
        else:
            self.send(204 if met else 412, b"" if met else b"<Error><Code>PreconditionFailed</Code></Error>")

    def list(self, query: dict[str, list[str]]) -> None:
        prefix, delimiter = query.get("prefix", [""])[0], query.get("delimiter", [""])[0]
        after = max(query.get("start-after", [""])[0], query.get("continuation-token", [""])[0])
        entries: dict[str, str] = {}
        with self.fake.lock:
            for name in sorted(self.fake.objects):
                rest = name.removeprefix(prefix)
                if not name.startswith(prefix) or name <= after:
                    continue
                if delimiter and delimiter in rest:
                    folder = escape(f"{prefix}{rest.partition(delimiter)[0]}{delimiter}")
                    entries[folder] = f"<CommonPrefixes><Prefix>{folder}</Prefix></CommonPrefixes>"
                else:
                    entries[name] = (
                        f"<Contents><Key>{escape(name)}</Key><Size>{len(self.fake.objects[name])}</Size>"
                        f"<Generation>{self.fake.generations[name]}</Generation>"
                        f"<LastModified>{self.fake.modified[name]:%Y-%m-%dT%H:%M:%S.000Z}"
                        f"</LastModified><ETag>{etag(self.fake.objects[name])}</ETag></Contents>"
                    )
        shown = [*entries][: self.fake.page]
        more = len(shown) < len(entries)
        token = f"<NextContinuationToken>{escape(shown[-1])}</NextContinuationToken>" if more else ""
        text = (
            f"<ListBucketResult><Name>{self.fake.bucket}</Name><IsTruncated>{str(more).lower()}</IsTruncated>"
            f"{token}{''.join(entries[name] for name in shown)}</ListBucketResult>"
        )
        self.send(200, text.encode())
