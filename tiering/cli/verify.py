"""Verification of all blocks of a tier: concurrent, rate-limited and resumable."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from rich.progress import BarColumn, DownloadColumn, TimeRemainingColumn, TransferSpeedColumn

from tiering.admin.records import StoredBlock
from tiering.admin.tier_admin import TierAdmin
from tiering.cli.output import progress as display
from tiering.errors import ConfigError
from tiering.medium.codec import FrameVerifier
from tiering.medium.files import Files
from tiering.medium.frame import HEADER_BYTES, FrameError
from tiering.runtime.json_text import parse_json

_AHEAD = 4
"""Blocks per concurrent read that make up one batch; progress is kept by batches."""
_SAVE_SECONDS = 1.0
_VERSION = 1


@dataclass(slots=True)
class Verified:
    """Result for one tier so far."""

    after: str = ""
    """Place of the last block of the last complete batch; empty: none."""
    blocks: int = 0
    nbytes: int = 0
    """Bytes of these blocks."""
    changed: int = 0
    """Blocks that were gone or rewritten before they could be verified."""
    seconds: float = 0.0
    """Time that the reads took."""
    damaged: list[tuple[str, str]] = field(default_factory=list)
    """Place and reason of each damaged block."""


class Resumable:
    """The progress of a verification in a file, so that the next run goes on from there.

    Args:
        path: the file; None: progress is not kept.
        stack: name of the stack, which the file must be of.

    Raises:
        ConfigError: the file is not the progress of a verification of this stack.
    """

    def __init__(self, path: Path | None, stack: str) -> None:
        self._path = path
        self._stack = stack
        self._saved_at = float("-inf")
        self.tiers: dict[str, Verified] = {}
        if path is not None and path.exists():
            self._read(path)

    def _read(self, path: Path) -> None:
        try:
            found = parse_json(path.read_text())
            if (found["version"], found["stack"]) != (_VERSION, self._stack):
                raise ConfigError(f"--state: {path} is of another stack or version; remove it, or name another file")
            for tier, words in found["tiers"].items():
                words["damaged"] = [(str(place), str(reason)) for place, reason in words["damaged"]]
                self.tiers[tier] = Verified(**words)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"--state: {path} is not the progress of a verification; name another file") from error

    def save(self, *, now: bool = False) -> None:
        """Write the file, at most once a second unless ``now``.

        Raises:
            ConfigError: the file cannot be written.
        """
        if self._path is None or (not now and time.monotonic() < self._saved_at + _SAVE_SECONDS):
            return
        self._saved_at = time.monotonic()
        tiers = {tier: dataclasses.asdict(found) for tier, found in self.tiers.items()}
        content = json.dumps({"version": _VERSION, "stack": self._stack, "tiers": tiers})
        try:
            Files().replace(self._path, [content.encode()], durable=False)
        except OSError as error:
            raise ConfigError(f"--state: {self._path} cannot be written: {error.strerror}") from error

    def finish(self) -> None:
        """Remove the file: all blocks are verified."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)


class ReadPace:
    """Spreads bytes over time.

    Args:
        rate: bytes per second; None: without limit.
        clock: function that returns monotonic seconds.
        sleep: function that waits for some seconds.
    """

    def __init__(
        self,
        rate: float | None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._rate = rate
        self._clock = clock
        self._sleep = sleep
        self._due = clock()

    async def take(self, nbytes: int) -> None:
        """Wait until ``nbytes`` more bytes may be read."""
        if self._rate is None:
            return
        now = self._clock()
        wait = self._due - now
        self._due = max(self._due, now) + nbytes / self._rate
        if wait > 0:
            await self._sleep(wait)


async def verify_tier(
    admin: TierAdmin, total: int, progress: Resumable, *, rate: int | None, concurrency: int
) -> Verified:
    """Verify every block of a tier, and return the result, earlier runs included.

    Args:
        admin: open administration of the tier.
        total: bytes of all blocks, for the progress bar.
        progress: progress that is kept.
        rate: bytes to read per second; None: without limit.
        concurrency: blocks read at the same time.

    Raises:
        StoreError: the blocks cannot be listed or read.
    """
    found = progress.tiers.setdefault(admin.name, Verified())
    verifier = BlockVerifier(admin, ReadPace(rate), concurrency)
    columns = (BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn())
    with display(*columns) as bar:
        task = bar.add_task(admin.name, total=total, completed=found.nbytes)
        try:
            async for batch in _batches(admin.blocks(found.after), concurrency * _AHEAD):
                began = time.monotonic()
                for block, outcome in zip(batch, await verifier.verify(batch), strict=True):
                    if outcome is None:
                        found.changed += 1
                    else:
                        found.blocks += 1
                        found.nbytes += block.nbytes
                    if outcome:
                        found.damaged.append((block.place, outcome))
                found.after = batch[-1].place
                found.seconds += time.monotonic() - began
                bar.update(task, completed=found.nbytes)
                progress.save()
        finally:
            progress.save(now=True)
    return found


async def _batches(blocks: AsyncIterator[StoredBlock], size: int) -> AsyncIterator[list[StoredBlock]]:
    batch: list[StoredBlock] = []
    async for block in blocks:
        batch.append(block)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


class BlockVerifier:
    """Reads and verifies blocks, several at the same time.

    Args:
        admin: open administration of the tier.
        pace: pace of the reads; default: without limit.
        concurrency: blocks read at the same time; default 1.
    """

    def __init__(self, admin: TierAdmin, pace: ReadPace | None = None, concurrency: int = 1) -> None:
        self._admin = admin
        self._pace = pace or ReadPace(None)
        self._free: asyncio.Queue[FrameVerifier] = asyncio.Queue()
        for _ in range(concurrency):
            self._free.put_nowait(FrameVerifier())

    async def verify(self, batch: list[StoredBlock]) -> list[str | None]:
        """Return for each block "" if intact, the damage as text, or None if changed or gone."""
        return await asyncio.gather(*map(self._one, batch))

    async def _one(self, block: StoredBlock) -> str | None:
        verifier = await self._free.get()
        try:
            await self._pace.take(block.nbytes)
            frame = await self._admin.read(block)
            reason = "" if frame is None else await asyncio.to_thread(self._fault, verifier, block, frame)
            if frame is None or not reason:
                return None if frame is None else ""
            # Engines write meanwhile: only a block that stays the same and stays wrong is damaged.
            again = await self._admin.read(block)
            if again is None or again[:HEADER_BYTES] != frame[:HEADER_BYTES]:
                return None
            return await asyncio.to_thread(self._fault, verifier, block, again)
        finally:
            self._free.put_nowait(verifier)

    def _fault(self, verifier: FrameVerifier, block: StoredBlock, frame: memoryview) -> str:
        try:
            payload, key = frame[self._admin.header_bytes :], self._admin.expected_key(block)
            verifier.verify(frame, payload, fingerprint=block.fingerprint, key=key)
        except FrameError as error:
            return str(error)
        return ""
