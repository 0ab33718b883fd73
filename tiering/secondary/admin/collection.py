"""Collection of blocks on media whose blocks can be listed and removed one by one."""

from __future__ import annotations

from tiering.secondary.admin.contract import Collected, EpochState, Limits, StoredBlock, TierAdmin

BATCH = 1000
"""Blocks that are removed by one call."""


class _Remover:
    """Counts listed and removed blocks, and removes them in batches."""

    def __init__(self, admin: TierAdmin, *, dry_run: bool) -> None:
        self._admin = admin
        self._dry_run = dry_run
        self._batch: list[StoredBlock] = []
        self._removed = self._removed_bytes = 0
        self.listed = 0
        self.listed_bytes = 0

    def see(self, block: StoredBlock) -> None:
        self.listed += 1
        self.listed_bytes += block.nbytes

    async def remove(self, block: StoredBlock) -> None:
        self._removed += 1
        self._removed_bytes += block.nbytes
        if not self._dry_run:
            self._batch.append(block)
            if len(self._batch) == BATCH:
                await self._flush()

    async def _flush(self) -> None:
        batch, self._batch = self._batch, []
        if batch:
            await self._admin.remove(batch)

    async def finish(self) -> Collected:
        await self._flush()
        return Collected(self.listed, self.listed_bytes, self._removed, self._removed_bytes)


async def collect(admin: TierAdmin, limits: Limits, *, dry_run: bool) -> Collected:
    """Remove the blocks that ``limits`` name, and return how many they were.

    An epoch counts as abandoned if neither an epoch document nor a lease younger than ``limits.grace`` names it.

    Args:
        admin: administration of the tier.
        limits: blocks that go.
        dry_run: count only, remove nothing.

    Raises:
        StoreError: the blocks cannot be listed or removed; blocks removed before the error stay removed.
    """
    now = admin.clock()
    used = await used_epochs(admin) if limits.abandoned else set[str]()
    remover = _Remover(admin, dry_run=dry_run)
    kept: list[StoredBlock] = []
    kept_bytes = 0
    async for block in admin.blocks():
        remover.see(block)
        age = now - block.modified
        abandoned = limits.abandoned and block.fingerprint != "" and block.fingerprint not in used
        if (abandoned and age > limits.grace) or (limits.older_than is not None and age > limits.older_than):
            await remover.remove(block)
        elif limits.max_total is not None:
            kept.append(block)
            kept_bytes += block.nbytes
    if limits.max_total is not None and kept_bytes > limits.max_total:
        for block in sorted(kept):
            if kept_bytes <= limits.max_total:
                break
            kept_bytes -= block.nbytes
            await remover.remove(block)
    return await remover.finish()


async def clear(admin: TierAdmin, namespace: str, *, dry_run: bool) -> Collected:
    """Remove all blocks of a namespace, and return how many they were.

    Raises:
        StoreError: the blocks cannot be listed or removed; blocks removed before the error stay removed.
    """
    remover = _Remover(admin, dry_run=dry_run)
    async for block in admin.blocks():
        remover.see(block)
        if block.namespace == namespace:
            await remover.remove(block)
    return await remover.finish()


async def used_epochs(admin: TierAdmin) -> set[str]:
    """Return the fingerprints of all epochs that engines use or may use."""
    return {
        fingerprint
        for namespace in await admin.namespaces()
        for fingerprint, state in namespace.epochs.items()
        if state is not EpochState.ABANDONED
    }
