"""A secondary tier without a medium, for tests of managers and schedulers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tiering.api.hints import KeptBlocks
from tiering.api.keys import OffloadKey
from tiering.api.request import OffloadPolicy, ReqContext, RequestOffloadingContext
from tiering.secondary.contract import (
    JobResult,
    SecondaryTierManager,
    StepEnd,
    TierIntake,
    TierTraits,
    TransferJob,
)
from tiering.secondary.speeds import LoadOrCompute, TierSpeeds


@dataclass
class FakeTier(TierIntake, SecondaryTierManager):
    """A tier that a test controls step by step; no bytes are moved.

    Jobs stay open until :meth:`finish` ends them. The attributes may be changed at any time, but the name, and
    ``load_deadline`` to ``takes_all``, only count when the tier is created.
    """

    name: str = "fake"
    held: set[OffloadKey] = field(default_factory=set)
    """Keys of the blocks that the tier holds; successful stores add theirs."""
    unknown: set[OffloadKey] = field(default_factory=set)
    """Keys whose lookup stays undecided."""
    policy: OffloadPolicy = OffloadPolicy.BLOCK_LEVEL
    """The tier's policy for every new request; default: block level."""
    load_deadline: float | None = None
    """Seconds that a load may take; default None: no limit."""
    store_deadline: float | None = None
    """Seconds that a store may take; default None: as long as a load."""
    max_load_blocks: int | None = None
    """Largest number of blocks of one load job; default None: no limit."""
    primary_share: float = 1.0
    """Largest share of the primary rows that the tier's loads may hold; default 1."""
    min_prefix_blocks: int = 1
    """Smallest number of blocks that a load is worth; default 1."""
    load_or_compute: LoadOrCompute = "always"
    """Rule by which requests load or compute the tier's blocks; default "always"."""
    speeds: TierSpeeds | None = None
    """The tier's part that keeps speeds; default: none."""
    fill: bool = True
    """True if the tier takes blocks that a slower tier has delivered; default True."""
    mixes_requests: bool = False
    """True if one store may have blocks of several requests; default False."""
    takes_all: bool = False
    """True if the tier has no intake of its own; default False."""
    stores: list[TransferJob] = field(default_factory=list)
    loads: list[TransferJob] = field(default_factory=list)
    asked: list[OffloadKey] = field(default_factory=list)
    """Keys that were looked up, in order."""
    log: list[tuple[str, object]] = field(default_factory=list)
    """Calls, in order: the method's name, and the argument that tells the calls apart."""
    released: list[OffloadKey] = field(default_factory=list)
    """Blocks that requests have released."""
    kept: list[KeptBlocks] = field(default_factory=list)
    wanted: list[OffloadKey] = field(default_factory=list)
    """Keys that the tier wants at the end of the next step."""
    resets: bool = True
    """True if :meth:`reset` succeeds at once; default True."""
    reset_later: bool = False
    """True if a reset that did not succeed at once is complete now; default False."""
    revision: str | None = None
    """Revision that the last reset was called with."""
    has_successor: bool = False
    """True if the tier's common epoch has a successor, which :meth:`reset` enters; default False."""
    stops: bool = True
    """True if :meth:`shutdown` succeeds; default True."""
    raises: set[str] = field(default_factory=set)
    """Names of the methods that raise."""
    settled: float = math.inf
    """Seconds during which the uses of a block need not be reported again; default: for ever."""
    allowance: int | None = None
    """Largest number of blocks of the stores that have not ended; default None: no limit."""
    offered: list[list[OffloadKey]] = field(default_factory=list)
    """Keys that each call of :meth:`admit` was asked for."""
    horizons: list[float] = field(default_factory=list)
    """Seconds that each call of :meth:`credit` was asked for."""
    admits: set[OffloadKey] | None = None
    """Keys that admission admits; default None: all."""
    capacity_blocks: int | None = 1 << 40
    """Number of blocks that the tier has room for."""
    resting: float = 0.0
    """Seconds for which the tier offers to rest; default 0."""
    medium: str = "FAKE"
    results: list[JobResult] = field(default_factory=list)
    """Results that the next :meth:`get_finished` returns."""

    def __post_init__(self) -> None:
        self.traits = TierTraits(
            self.medium,
            self.load_deadline,
            self.store_deadline,
            self.primary_share,
            self.max_load_blocks,
            self.min_prefix_blocks,
            self.fill,
            mixes_requests=self.mixes_requests,
            intake=None if self.takes_all else self,
            speeds=self.speeds,
            load_or_compute=self.load_or_compute,
            capacity_blocks=self.capacity_blocks,
        )

    def _enter(self, method: str, argument: object = None) -> None:
        self.log.append((method, argument))
        if method in self.raises:
            raise RuntimeError(f"told to raise in {method}")

    def calls(self, method: str) -> list[object]:
        """Return the logged arguments of all calls of ``method``."""
        return [argument for name, argument in self.log if name == method]

    def finish(self, job: TransferJob, success: bool = True, keys: Sequence[OffloadKey] | None = None) -> None:
        """End an open job; the manager gets the result at its next collection.

        Args:
            job: one of ``stores`` or ``loads``.
            success: True (default) if the job succeeded.
            keys: keys of the blocks that were moved; default None: all of them if the job succeeded.
        """
        (self.loads if job.is_promotion else self.stores).remove(job)
        if not job.is_promotion and success:
            self.held.update(job.keys if keys is None else keys)
        self.results.append(JobResult(job.job_id, success, keys))

    def finish_all(self) -> None:
        """End all open jobs with success."""
        for job in [*self.loads, *self.stores]:
            self.finish(job)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        self.asked.append(key)
        return None if key in self.unknown else key in self.held

    def admit(self, keys: Sequence[OffloadKey], req_context: ReqContext, is_fill: bool) -> Sequence[int] | None:
        self.offered.append(list(keys))
        if "admit" in self.raises:
            raise RuntimeError("told to raise in admit")
        return None if self.admits is None else [at for at, key in enumerate(keys) if key in self.admits]

    def credit(self, wanted: int, seconds: float) -> int | None:
        self.horizons.append(seconds)
        if "credit" in self.raises:
            raise RuntimeError("told to raise in credit")
        return None if self.allowance is None else max(0, self.allowance - sum(len(job.keys) for job in self.stores))

    def not_stored(self, keys: Sequence[OffloadKey]) -> None:
        self._enter("not_stored", list(keys))

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

    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext, used: bool = True) -> None:
        self._enter("touch" if used else "refresh", list(keys))

    def used(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> float:
        self._enter("used", list(keys))
        return self.settled

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self._enter("on_new_request", req_context.req_id)
        return RequestOffloadingContext(self.policy)

    def on_request_finished(
        self, req_context: ReqContext, released: Sequence[OffloadKey] = (), kept: Sequence[KeptBlocks] = ()
    ) -> None:
        self._enter("on_request_finished", req_context.req_id)
        self.released += released
        self.kept += kept

    def on_schedule_end(self) -> StepEnd:
        self._enter("on_schedule_end")
        wanted, self.wanted = self.wanted, []
        return StepEnd(wanted, self.resting, self.has_successor, self.reset_later)

    def drain(self, deadline: float) -> bool:
        self._enter("drain", deadline)
        return not self.stores and not self.loads

    def reset(self, deadline: float, revision: str | None = None, follow: bool = False) -> bool:
        self._enter("follow" if follow else "reset", deadline)
        self.has_successor = self.has_successor and not follow
        self.revision = revision
        if self.resets:
            self.held.clear()
        return self.resets

    def shutdown(self, deadline: float) -> bool:
        self._enter("shutdown", deadline)
        return self.stops
