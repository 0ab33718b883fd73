"""Machines that share a bucket, each with a tier of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Self

from examples.valkey_server import ValkeyServer
from tests.fake_s3 import BEGINNING, FakeS3
from tests.tiers.object.rigs import make_rig
from tiering.testing.clock import until
from tiering.testing.tier_rig import TierRig
from tiers.object.bucket_options import IDENTITY
from tiers.object.identity import Identity, parse


class Fleet:
    """Machines that share a bucket and a server.

    Args:
        bucket: the bucket's server.
        server: the server that coordinates.
    """

    def __init__(self, bucket: FakeS3, server: ValkeyServer) -> None:
        self.bucket = bucket
        """The bucket's server."""
        self.server = server
        """The server that coordinates."""
        self._rigs: list[TierRig] = []

    @contextlib.contextmanager
    def running(self) -> Iterator[Self]:
        """Shut all machines down at the end of the context."""
        try:
            yield self
        finally:
            for rig in self._rigs:
                rig.close()

    def machine(self, *, whole: bool = True, **words: object) -> TierRig:
        """Start a machine.

        Args:
            whole: wait until its directory is complete; default: True.
            words: further options of the tier.
        """
        chosen = {"coordination": self.server.url, "absent_ttl": "1h", **words}
        rig = make_rig(self.bucket, TierRig, **chosen)
        self._rigs.append(rig)
        rig.open()
        if whole:
            rig.wait(lambda: ready(rig) and self.complete())
        return rig

    def complete(self) -> bool:
        """Return True if a directory in the server is complete."""
        from tiers.valkey.client import ServerAddress, ValkeyClient

        client = ValkeyClient(ServerAddress.parse(self.server.url), connect_timeout=10.0, timeout=10.0)
        try:
            names = [name for name in client.call("KEYS", "kv-tiering:1:{*}") if name.endswith(b"}")]
            return any(client.call("HGET", name, "complete") is not None for name in names)
        finally:
            client.close()

    def heads(self) -> int:
        """Return the number of HEAD requests for blocks so far."""
        return len(self.bucket.asked("HEAD", "/blocks/"))

    def uploads(self) -> int:
        """Return the number of uploads of blocks so far."""
        return len(self.bucket.asked("PUT", "/blocks/"))


def medium_of(bucket: FakeS3) -> bytes:
    """Return the identifier that lies in the bucket."""
    number = parse(bucket.objects[f"prod/documents/{IDENTITY}"])
    if number is None:
        raise ValueError("the bucket's identifier is damaged")
    written = bucket.modified.get(f"prod/documents/{IDENTITY}", BEGINNING)
    return Identity(number, written.timestamp()).medium


def ready(rig: TierRig) -> bool:
    """Return True while coordination answers."""
    return bool(rig.tier.get_stats().coordinated)


def find(rig: TierRig, keys: list[bytes], count: int) -> bool:
    """Look ``keys`` up until ``count`` of them are found; return False if that does not happen."""
    return until(lambda: rig.lookup(keys) == count)
