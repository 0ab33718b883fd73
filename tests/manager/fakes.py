"""A secondary tier that does what a test tells it, when the test tells it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from tiering.api.keys import OffloadKey, make_offload_key
from tiering.api.request import OffloadPolicy, ReqContext, RequestOffloadingContext
from tiering.manager.manager import TieringOffloadingManager
from tiering.primary.manager import CPUPrimaryTierOffloadingManager
from tiering.secondary.contract import JobResult, SecondaryTierManager, TransferJob
from tiering.testing.clock import FakeClock


def make_keys(first: int, count: int = 1, group: int = 0) -> list[OffloadKey]:
    """Keys named by consecutive numbers."""
    return [make_offload_key(number.to_bytes(32, "big"), group) for number in range(first, first + count)]


@dataclass
class FakeTier(SecondaryTierManager):
    """Holds ``held``; does not know yet about ``unknown``; ends jobs when :meth:`finish` says so."""

    name: str = "fake"
    held: set[OffloadKey] = field(default_factory=set)
    unknown: set[OffloadKey] = field(default_factory=set)
    policy: OffloadPolicy = OffloadPolicy.BLOCK_LEVEL
    load_deadline: float | None = None
    primary_share: float = 1.0
    min_prefix_blocks: int = 1
    fill: bool = True
    stores: list[TransferJob] = field(default_factory=list)
    loads: list[TransferJob] = field(default_factory=list)
    asked: list[OffloadKey] = field(default_factory=list)
    log: list[tuple[str, object]] = field(default_factory=list)
    wanted: list[OffloadKey] = field(default_factory=list)
    resets: bool = True
    reset_later: bool = False
    revision: str | None = None
    stops: bool = True
    raises: set[str] = field(default_factory=set)
    results: list[JobResult] = field(default_factory=list)

    def _enter(self, method: str, argument: object = None) -> None:
        self.log.append((method, argument))
        if method in self.raises:
            raise RuntimeError(f"told to raise in {method}")

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        self.asked.append(key)
        return None if key in self.unknown else key in self.held

    def submit_store(self, job: TransferJob) -> None:
        self._enter("submit_store", job.job_id)
        self.stores.append(job)

    def submit_load(self, job: TransferJob) -> None:
        self._enter("submit_load", job.job_id)
        self.loads.append(job)

    def get_finished(self) -> Iterable[JobResult]:
        if "get_finished" in self.raises:
            raise RuntimeError("told to raise in get_finished")
        results, self.results = self.results, []
        return results

    def finish(self, job: TransferJob, success: bool = True, keys: Sequence[OffloadKey] | None = None) -> None:
        """Let a job end at the next collection."""
        (self.loads if job.is_promotion else self.stores).remove(job)
        if not job.is_promotion and success:
            self.held.update(job.keys if keys is None else keys)
        self.results.append(JobResult(job.job_id, success, keys))

    def finish_all(self) -> None:
        for job in [*self.loads, *self.stores]:
            self.finish(job)

    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        self._enter("touch", list(keys))

    def take_wanted_keys(self) -> Sequence[OffloadKey]:
        wanted, self.wanted = self.wanted, []
        return wanted

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self._enter("on_new_request", req_context.req_id)
        return RequestOffloadingContext(self.policy)

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._enter("on_request_finished", req_context.req_id)

    def on_schedule_end(self) -> None:
        self._enter("on_schedule_end")

    def drain(self, deadline: float) -> bool:
        self._enter("drain", deadline)
        return not self.stores and not self.loads

    def reset(self, deadline: float, revision: str | None = None) -> bool:
        self._enter("reset", deadline)
        self.revision = revision
        if self.resets:
            self.held.clear()
        return self.resets

    def reset_done(self) -> bool:
        return self.reset_later

    def shutdown(self, deadline: float) -> bool:
        self._enter("shutdown", deadline)
        return self.stops

    def calls(self, method: str) -> list[object]:
        """The arguments of all calls of a method."""
        return [argument for name, argument in self.log if name == method]


class Rig:
    """A manager over a small primary tier and fake secondary tiers, with a clock that stands still."""

    def __init__(self, rows: int = 8, tiers: Sequence[FakeTier] = (), **options: object) -> None:
        self.clock = FakeClock()
        self.buffer = np.zeros((rows, 16), np.uint8)
        self.primary = CPUPrimaryTierOffloadingManager(memoryview(self.buffer), enable_events=True)
        self.tiers = list(tiers)
        self.manager = TieringOffloadingManager(
            self.primary, self.tiers, enable_events=True, clock=self.clock, **options
        )  # type: ignore[arg-type]
        self.ctx = self.request("r1")

    def request(self, req_id: str, **params: object) -> ReqContext:
        ctx = ReqContext(req_id, {"kv_tiering": params} if params else None)
        self.manager.on_new_request(ctx)
        return ctx

    def store(self, keys: list[OffloadKey], ctx: ReqContext | None = None) -> None:
        """Store blocks completely, cascades included."""
        output = self.manager.prepare_store(keys, ctx or self.ctx)
        assert output is not None
        self.manager.complete_store(output.keys_to_store, ctx or self.ctx)
        for tier in self.tiers:
            for job in list(tier.stores):
                tier.finish(job)
        self.step()

    def step(self) -> None:
        self.manager.on_schedule_end()

    def stat(self, name: str) -> int:
        value = self.manager.get_stats()["manager"][name]
        assert isinstance(value, int)
        return value
