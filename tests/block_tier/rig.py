"""A generic tier on a fake I/O side, driven step by step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tests.block_tier.fakes import BLOCK_BYTES, FakeIo, FakeStore, make_context
from tiering.api.keys import OffloadKey
from tiering.api.manager import OffloadingEvent
from tiering.api.request import ReqContext
from tiering.block_tier.tier import BlockTier
from tiering.index.shared import SharedIndex
from tiering.index.slots import SlotIndex
from tiering.index.tier_index import TierIndex
from tiering.secondary.agreement import EpochAgreement
from tiering.secondary.contract import JobResult, TransferJob
from tiering.secondary.options import BlockTierOptions
from tiering.testing.clock import FakeClock
from tiering.testing.keys import keys_of

CTX = ReqContext("r1")
K = keys_of(*range(100))


class Rig:
    """A tier with a medium of slots of its own, on a fake I/O side."""

    def __init__(
        self,
        *,
        slots: int = 32,
        group_bytes: tuple[int, ...] = (BLOCK_BYTES,),
        shared: bool = False,
        revision: str | None = None,
        store: FakeStore | None = None,
        agreement: EpochAgreement | None = None,
        name: str = "",
        index: TierIndex | None = None,
        **options: Any,
    ) -> None:
        self.clock = FakeClock()
        self.store = store or FakeStore()
        self.options = BlockTierOptions(type="fake", **options)
        self.io = FakeIo(self.store, self.clock, self.options.breaker)
        self.context = replace(make_context(self.clock, group_bytes=group_bytes), revision=revision)
        if agreement is not None:
            self.context = replace(self.context, agreement=agreement, name=name or self.context.name)
        self.document = f"epoch-{self.context.namespace.directory}"
        if index is None and shared:
            index = SharedIndex()
        elif index is None:
            index = SlotIndex(slots)
            index.add_free(np.arange(slots))
        self.tier = BlockTier(
            self.context,
            self.options,
            self.store,
            index,
            place_prefix=(lambda namespace: f"{namespace.epoch.hex()}/") if index.shared else None,
            io=self.io,
        )
        self._job_id = 0

    def opened(self) -> Rig:
        assert self.tier.open(self.clock() + 1)
        return self

    @property
    def epoch(self) -> bytes:
        """The current epoch of the tier."""
        assert self.tier.namespace is not None
        return self.tier.namespace.epoch

    def job(self, keys: Sequence[OffloadKey], ctx: ReqContext = CTX, *, load: bool = False) -> TransferJob:
        self._job_id += 1
        now, rows = self.clock(), np.arange(len(keys))
        deadline = self.tier.traits.deadline(now, load=load)
        return TransferJob(self._job_id, keys, rows, load, ctx, now, deadline=deadline)

    def submit_store(self, keys: Sequence[OffloadKey], ctx: ReqContext = CTX) -> int:
        job = self.job(keys, ctx)
        self.tier.submit_store(job)
        return job.job_id

    def submit_load(self, keys: Sequence[OffloadKey], ctx: ReqContext = CTX) -> int:
        job = self.job(keys, ctx, load=True)
        self.tier.submit_load(job)
        return job.job_id

    def store_blocks(self, keys: Sequence[OffloadKey]) -> None:
        """Store ``keys``; the store succeeds."""
        self.io.finish(self.submit_store(keys))
        assert [result.success for result in self.tier.get_finished()] == [True]

    def finished(self) -> list[JobResult]:
        return list(self.tier.get_finished())

    def events(self) -> list[OffloadingEvent]:
        return list(self.tier.take_events())
