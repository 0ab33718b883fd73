"""The definition of the Mooncake tier, and its administration for the command line."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterator

from tiering.admin.records import Finding, KnownNamespace, Severity, UnsupportedError
from tiering.admin.tier_admin import TierAdmin
from tiering.api.units import format_bytes
from tiering.block_tier.definition import TierDefinition
from tiering.block_tier.tier import BlockTier
from tiering.errors import StoreError
from tiering.index.shared import SharedIndex
from tiering.secondary.contract import TierContext
from tiering.secondary.options import TierOptions
from tiers.mooncake.client import PoolClient
from tiers.mooncake.mooncake_options import LEAST_SEGMENT, MooncakeOptions
from tiers.mooncake.store import MooncakeStore


def build(options: MooncakeOptions, context: TierContext) -> BlockTier:
    """Return a Mooncake tier that is not open yet.

    Raises:
        ConfigError: Mooncake's package is missing.
    """
    store = MooncakeStore(options, PoolClient(options, context.primary_view))
    index = SharedIndex(
        present_ttl=options.present_ttl, absent_ttl=options.absent_ttl, lookup_deadline=options.lookup_deadline
    )
    return BlockTier(context, options, store, index)


class MooncakeAdmin(TierAdmin):
    """Administration of a pool, which cannot list its blocks."""

    options: MooncakeOptions

    @property
    def place(self) -> str:
        return self.options.location

    def check(self, block_bytes: int) -> Iterator[Finding]:
        client = PoolClient(self.options.model_copy(update={"segment_size": None}), memoryview(b""))
        began = time.monotonic()
        try:
            client.open()
            client.close()
        except StoreError as error:
            yield Finding(Severity.ERROR, "master", str(error), "start mooncake_master, or correct master")
            return
        took = 1e3 * (time.monotonic() - began)
        yield Finding(Severity.OK, "master", f"{self.options.master} answers; a client is set up in {took:.0f} ms")
        given = self.options.segment_size
        yield Finding(
            Severity.INFO,
            "memory",
            f"each engine gives {format_bytes(given)} to the pool"
            if given
            else "this engine gives no memory to the pool",
            "" if given else "start mooncake_client processes, or set segment_size",
        )
        if given and given < 8 * block_bytes:
            yield Finding(
                Severity.WARNING,
                "block size",
                f"{format_bytes(given)} hold few blocks of {format_bytes(block_bytes)}",
                "raise segment_size",
            )

    @contextlib.contextmanager
    def scratch(self, capacity: int) -> Iterator[TierOptions | None]:
        given = max(LEAST_SEGMENT, capacity) if self.options.segment_size else None
        prefix = f"{self.options.prefix}/scratch-{secrets.token_hex(4)}"
        options = self.options.model_copy(update={"prefix": prefix, "segment_size": given})
        store = MooncakeStore(options, PoolClient(options.model_copy(update={"segment_size": None}), memoryview(b"")))
        try:
            yield options
        finally:
            store.open()
            try:
                store.reclaim("")
            finally:
                store.close()

    async def namespaces(self) -> list[KnownNamespace]:
        raise UnsupportedError(f"the tier {self.name} cannot list its blocks: Mooncake has no such call")


MOONCAKE_TIER = TierDefinition(
    options=MooncakeOptions,
    build=build,
    persistent=True,
    location=lambda options: options.location,
    distance="network",
    # An epoch document that the pool loses while it keeps an older one would bring back older blocks.
    needs_revision="the pool keeps no documents, so the stack must name the weights itself",
    admin=MooncakeAdmin,
)
