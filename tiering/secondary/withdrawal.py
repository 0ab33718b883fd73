"""Withdrawal of stores that have not begun, so that their primary rows become free.

A store has not begun while it waits for places, for the answer to a claim, or for a thread of the I/O side. Blocks are
withdrawn one by one: the others of their store are stored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from tiering.api.keys import OffloadKey
from tiering.secondary.claims import StoreClaims
from tiering.secondary.contract import TransferJob, WaitingStores
from tiering.secondary.io.messages import IoJob
from tiering.secondary.parts import TierParts
from tiering.secondary.stages import PlannedStore, RunningJob, WaitingStore


class StoreWithdrawal:
    """Finds and withdraws the blocks of one tier's stores that have not begun.

    The scheduler's thread calls all methods.

    Args:
        parts: parts of the tier.
        running: jobs on the I/O side, by number; withdrawn bytes are taken off.
        waiting: stores that wait for places, by number; withdrawn blocks are taken off.
        claims: stores that wait for the answer to a claim; None without coordination.
        give_back: function that gives back the places of blocks that are not uploaded.
        finish: function that ends a job that has no blocks left, with the keys that need no I/O.
    """

    def __init__(
        self,
        parts: TierParts,
        running: dict[int, RunningJob],
        waiting: dict[int, WaitingStore],
        claims: StoreClaims | None,
        *,
        give_back: Callable[[PlannedStore], None],
        finish: Callable[[TransferJob, Sequence[OffloadKey]], None],
    ) -> None:
        self._index = parts.index
        self._io = parts.io
        self._budget = parts.intake.budget
        self._coordination = parts.coordination
        self._stats = parts.stats
        self._running = running
        self._waiting = waiting
        self._claims = claims
        self._give_back = give_back
        self._finish = finish

    def waiting(self, job_ids: Sequence[int]) -> WaitingStores | None:
        """Return which blocks of some stores have not begun, each store from its tail; None if there are none."""
        found: list[Sequence[int]] = []
        oldest = math.inf
        for job_id in job_ids:
            rows: Sequence[int] = ()
            if (running := self._running.get(job_id)) is not None:
                rows, job = self._io.waiting_rows(job_id), running.job
            elif (store := self._waiting.get(job_id)) is not None:
                rows, job = store.rows[::-1], store.job
            elif self._claims and (planned := self._claims.get(job_id)) is not None:
                rows, job = planned.rows[::-1], planned.job
            found.append(rows)
            if rows and job.submitted_at < oldest:
                oldest = job.submitted_at
        return WaitingStores(found, max(oldest, self._io.store_begun)) if oldest < math.inf else None

    def withdraw(self, rows: Mapping[int, Collection[int]]) -> list[tuple[int, Sequence[int]]]:
        """Give up blocks of stores that have not begun.

        Args:
            rows: rows of the blocks, by the number of their job.

        Returns:
            The number of each job that lost blocks, and their rows.
        """
        withdrawn = list(self._io.withdraw(rows))
        for job_id, lost in withdrawn:
            running = self._running[job_id]
            sizes = running.io.sizes
            if len(lost) < len(sizes):
                gone = frozenset(lost)
                sizes = [size for size, row in zip(sizes, running.io.rows, strict=True) if row in gone]
            freed = sum(sizes)
            self._budget.used -= freed
            self.release_claims(running.io, lost)
            # Built anew, because a named tuple's _replace costs several times as much.
            left = running.stored_bytes - freed
            self._running[job_id] = RunningJob(running.job, running.held, running.io, left, running.epochs)
        if self._waiting:
            waiting = [self._waiting[job_id] for job_id in rows if job_id in self._waiting]
            given = [(store.job.job_id, self._withdraw_waiting(store, rows[store.job.job_id])) for store in waiting]
            withdrawn += [(job_id, lost) for job_id, lost in given if lost]
        if self._claims:
            claimed = [job_id for job_id in rows if self._claims.get(job_id) is not None]
            withdrawn += [
                (job_id, lost) for job_id in claimed if (lost := self._withdraw_claimed(job_id, rows[job_id]))
            ]
        self._stats.stores_withdrawn += sum([len(lost) for _, lost in withdrawn])
        return withdrawn

    def release_claims(self, io_job: IoJob, rows: Sequence[int]) -> None:
        """Give up the claims on blocks of a store that will not be uploaded."""
        if self._coordination is not None and self._index.holds_epoch(io_job.places):
            lost = frozenset(rows)
            places = [place for place, row in zip(io_job.places, io_job.rows, strict=True) if row in lost]
            self._coordination.released(places)

    def _withdraw_claimed(self, job_id: int, rows: Collection[int]) -> Sequence[int]:
        if self._claims is None:
            return ()
        lost = self._claims.withdraw(job_id, rows)
        self._give_back(lost)
        if self._claims.get(job_id) is None:
            self._finish(lost.job, lost.held)
        return lost.rows

    def _withdraw_waiting(self, store: WaitingStore, rows: Collection[int]) -> Sequence[int]:
        held = store.rows
        left = [at for at, row in enumerate(held) if row not in rows]
        if len(left) == len(held):
            return ()
        keys = [store.keys[at] for at in left]
        waiting_bytes = sum(self._budget.sizes(keys))
        self._budget.used -= store.waiting_bytes - waiting_bytes
        if left:
            positions = [store.positions[at] for at in left]
            self._waiting[store.job.job_id] = replace(
                store, positions=positions, keys=keys, waiting_bytes=waiting_bytes
            )
        else:
            del self._waiting[store.job.job_id]
            self._finish(store.job, ())
        return [row for row in held if row in rows]
