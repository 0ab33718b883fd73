"""The Mooncake tier: rows are written to a pool and read from it directly, in batches."""

from __future__ import annotations

import contextlib
import re
import secrets
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from tiering import CorruptBlockError, OutOfSpaceError, PermanentStoreError, StoreError, TemporaryStoreError
from tiering.tier import (
    BatchStore,
    BlockIO,
    BlockTier,
    Done,
    Finding,
    KnownNamespace,
    Outcome,
    Place,
    Severity,
    SharedIndex,
    StoreProbe,
    StoreTraits,
    TierAdmin,
    TierContext,
    TierDefinition,
    TierOptions,
    UnsupportedError,
    format_bytes,
)
from tiers.mooncake.client import (
    HEADER_BYTES,
    LEAST_SEGMENT,
    PAGE_HEADERS,
    Connection,
    HeaderPage,
    MooncakeOptions,
    PoolClient,
)

LATE_SECONDS = 50.0
"""Seconds after which a call that fails may leave transfers behind: Mooncake waits 60 s for them."""

_NO_ROOM = -200
_INVALID_PARAMS = -600
_TRANSFER_FAILED = -800

_ABSENT = frozenset({-703, -704, -710, -712})
"""Codes of a block that is absent, still being written, or lost with its owner."""

_REASONS = {
    -101: "no machine gives memory to the pool",
    -706: "the block is being read",
    -707: "the transfer took longer than the master's lease",
    -714: "the block is being moved",
    _TRANSFER_FAILED: "the transfer failed; its machine may be down",
    -900: "the master does not answer",
    -901: "the master does not answer in time",
}


class MooncakeStore(BatchStore):
    """Blocks in a pool. Several threads may call at once.

    A put does not replace a block: its name contains the namespace and the key, so it holds the same block. A get whose
    transfers may go on returns only when they have ended with their connection, so nothing writes to a row later. Each
    call makes one attempt; a layer above retries.

    Args:
        options: options of the tier.
        client: connection to the pool.
        clock: function that returns monotonic seconds; default: ``time.monotonic``.
    """

    traits = StoreTraits(medium="POOL", header_bytes=HEADER_BYTES, batches=True)

    def __init__(
        self, options: MooncakeOptions, client: PoolClient, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._options = options
        self._client = client
        self._clock = clock
        self._prefix = f"{options.prefix}/"

    def __repr__(self) -> str:
        return f"MooncakeStore({self._options.location})"

    def open(self) -> None:
        self._client.open()

    def close(self) -> None:
        self._client.close()

    def put(self, blocks: Sequence[BlockIO]) -> list[Outcome]:
        return self._move(blocks, self._put)

    def get(self, blocks: Sequence[BlockIO]) -> list[Outcome]:
        return self._move(blocks, self._get)

    def _move(
        self, blocks: Sequence[BlockIO], move: Callable[[Connection, Sequence[BlockIO]], list[Outcome]]
    ) -> list[Outcome]:
        """Move blocks by calls of at most a page of headers each."""
        outcomes: list[Outcome] = []
        for start in range(0, len(blocks), PAGE_HEADERS):
            part = blocks[start : start + PAGE_HEADERS]
            began = self._clock()
            try:
                with self._client.use() as connection:
                    moved = move(connection, part)
            except StoreError as error:
                moved = [error] * len(part)
            else:
                if self._clock() - began >= LATE_SECONDS and any(isinstance(outcome, StoreError) for outcome in moved):
                    self._client.end_transfers(connection)
            outcomes += moved
        return outcomes

    def _put(self, connection: Connection, blocks: Sequence[BlockIO]) -> list[Outcome]:
        from mooncake.store import ReplicateConfig

        config = ReplicateConfig()
        config.replica_num = self._options.replicas
        with connection.page() as page:
            for at, block in enumerate(blocks):
                page[at] = np.frombuffer(block.header, np.uint8)
            codes = connection.native.batch_put_from_multi_buffers(*self._words(page, blocks), config)
        return [Done.DONE if code == 0 else self._error(code, block) for code, block in zip(codes, blocks, strict=True)]

    def _get(self, connection: Connection, blocks: Sequence[BlockIO]) -> list[Outcome]:
        with connection.page() as page:
            codes = connection.native.batch_get_into_multi_buffers(*self._words(page, blocks))
            for at, (code, block) in enumerate(zip(codes, blocks, strict=True)):
                if code > 0:
                    np.copyto(np.frombuffer(block.header, np.uint8), page[at])
        return [self._got(connection, code, block) for code, block in zip(codes, blocks, strict=True)]

    def _got(self, connection: Connection, code: int, block: BlockIO) -> Outcome:
        """Return the outcome of a get that ended with ``code``, the length of the block or an error."""
        expected = HEADER_BYTES + len(block.payload)
        if code == expected:
            return Done.DONE
        if code in _ABSENT:
            return Done.ABSENT
        if code in {_INVALID_PARAMS, _TRANSFER_FAILED}:
            # A block of another length fails like a transfer.
            length = connection.native.get_size(self.name(block.place))
            code = length if length >= 0 and length != expected else code
        if code >= 0:
            return CorruptBlockError(f"{block.place} has {code} bytes, not {expected}")
        return self._error(code, block)

    def _words(self, page: HeaderPage, blocks: Sequence[BlockIO]) -> tuple[list[str], list[list[int]], list[list[int]]]:
        """Return names, addresses and lengths of blocks, whose headers are on ``page``."""
        names = [self.name(block.place) for block in blocks]
        headers = page.ctypes.data
        addresses = [
            [headers + at * HEADER_BYTES, int(np.frombuffer(block.payload, np.uint8).ctypes.data)]
            for at, block in enumerate(blocks)
        ]
        return names, addresses, [[HEADER_BYTES, len(block.payload)] for block in blocks]

    def _error(self, code: int, block: BlockIO) -> StoreError:
        text = f"{_REASONS.get(code, 'Mooncake refused')} (code {code}, {block.place}, {self._options.location})"
        if code == _NO_ROOM:
            return OutOfSpaceError(f"the pool has no room: raise segment_size, or add machines; {text}")
        return PermanentStoreError(text) if code == _INVALID_PARAMS else TemporaryStoreError(text)

    def probe(self, places: Sequence[Place]) -> StoreProbe:
        try:
            with self._client.use() as connection:
                codes = connection.native.batch_is_exist([self.name(place) for place in places]) if places else []
        except StoreError:
            codes = [-1] * len(places)
        return StoreProbe(tuple(None if code < 0 else code == 1 for code in codes))

    def delete(self, places: Sequence[Place]) -> None:
        with self._client.use() as connection:
            codes = connection.native.batch_remove([self.name(place) for place in places], True) if places else []
        for code, place in zip(codes, places, strict=True):
            if code < 0 and code not in _ABSENT:
                raise TemporaryStoreError(f"{_REASONS.get(code, 'Mooncake refused')} (code {code}, delete {place})")

    def reclaim(self, place_prefix: str) -> int:
        """Delete the blocks whose names start with ``place_prefix``, and return how many were deleted.

        Raises:
            StoreError: a block could not be deleted.
        """
        with self._client.use() as connection:
            count = connection.native.remove_by_regex(f"^{re.escape(self.name(place_prefix))}.*", True)
        if count < 0:
            raise TemporaryStoreError(f"{_REASONS.get(count, 'Mooncake refused')} (code {count}, {place_prefix})")
        return int(count)

    def name(self, place: Place) -> str:
        """Return the name of the block at ``place`` in the pool."""
        return f"{self._prefix}{place}"


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
        if not given:
            remedy = "start mooncake_client processes, or set segment_size"
            yield Finding(Severity.INFO, "memory", "this engine gives no memory to the pool", remedy)
            return
        yield Finding(Severity.INFO, "memory", f"each engine gives {format_bytes(given)} to the pool")
        if given < 8 * block_bytes:
            text = f"{format_bytes(given)} hold few blocks of {format_bytes(block_bytes)}"
            yield Finding(Severity.WARNING, "block size", text, "raise segment_size")

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


def build(options: MooncakeOptions, context: TierContext) -> BlockTier:
    """Return a Mooncake tier that is not open yet.

    Raises:
        ConfigError: Mooncake's package is missing.
    """
    store = MooncakeStore(options, PoolClient(options, context.primary_view))
    return BlockTier(context, options, store, SharedIndex.of(options))


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
