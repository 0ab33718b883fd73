"""The contract of a secondary tier, and the jobs that the manager hands to it.

Called from the scheduler's thread: everything but :meth:`SecondaryTierManager.drain`,
:meth:`~SecondaryTierManager.shutdown` and :meth:`~SecondaryTierManager.reset` returns at once; data moves elsewhere.  A
tier never touches accelerator memory: it is given the primary tier's memoryview of shape (num_rows, row_stride_bytes),
uint8; block b is row b (``numpy.asarray(view)[b]``).  Rows start on page boundaries.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from tiering.api.keys import OffloadKey
from tiering.api.manager import OffloadingEvent
from tiering.api.namespace import Namespace
from tiering.api.request import ReqContext, RequestOffloadingContext
from tiering.api.transfer import Rows
from tiering.runtime.news import News
from tiering.secondary.stats import TierStats

Distance = Literal["process", "machine", "network"]
"""How far away a medium is: memory of this process, a device of this machine, or a service on the network."""


@dataclass(frozen=True, slots=True)
class TransferJob:
    """Move the blocks ``keys`` between the primary rows ``block_ids`` (co-indexed) and a tier.

    ``is_promotion``: the tier fills the rows (a load); otherwise it reads them (a store).  While the tier has not
    reported the job, it may touch these rows and nobody else writes them.  ``submitted_at`` is on the tier's clock, in
    seconds.
    """

    job_id: int
    keys: Sequence[OffloadKey]
    block_ids: Rows
    is_promotion: bool
    req_context: ReqContext
    submitted_at: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, slots=True)
class JobResult:
    """A job has ended: the tier touches none of its rows any more.  Reported exactly once.

    ``successful_keys`` None: all keys share the fate of ``success``; otherwise exactly these succeeded.
    ``transfer_bytes`` and ``transfer_time`` (seconds) describe what was moved, where known.
    """

    job_id: int
    success: bool
    successful_keys: Sequence[OffloadKey] | None = None
    transfer_bytes: int | None = None
    transfer_time: float | None = None


class PrefixAnswer(NamedTuple):
    """``held``: how many leading keys the tier holds.  ``undecided``: the tier does not know yet about the key after them."""

    held: int
    undecided: bool


@dataclass(frozen=True, slots=True)
class TierContext:
    """What a tier is given when it is built.

    ``name`` is unique in the stack.  ``primary_view``: see the module.  ``group_bytes[g]``: bytes of a block of group g
    without padding (what a medium holds of it).  ``clock`` returns monotonic seconds.  ``replica`` distinguishes
    data-parallel engines of one machine (None: a single one).  ``revision`` names the weights at the start (None: the
    namespace's parameters do).
    """

    name: str
    primary_view: memoryview
    group_bytes: tuple[int, ...]
    namespace: Namespace
    clock: Callable[[], float] = time.monotonic
    enable_events: bool = False
    replica: str | None = None
    revision: str | None = None
    news: News = field(default_factory=News)
    """Where the tier may announce that a job has ended, so that waiting callers wake up."""
    distance: Distance | None = None
    """How far away the medium is; None: not known."""


class SecondaryTierManager(ABC):
    """One secondary tier, as the manager sees it.

    What MUST hold: a job is reported by :meth:`get_finished` exactly once, when the tier touches none of its rows any
    more, also if it failed or was never started.  A load that is reported successful for a key has filled its row with
    that key's verified bytes. No method raises for what a medium does; a tier in trouble answers "no" and fails jobs.
    """

    medium: str = ""
    """The medium's name in metrics: "DISK", "OBJECT", ..."""

    name: str = ""
    """Unique in a stack; used in metrics, logs and in a request's ``tiers``."""

    load_deadline: float | None = 30.0
    """Seconds after which the manager stops waiting for a load (the keys are a miss then; the job is still reported later)."""

    primary_share: float = 0.5
    """Largest share of the primary rows that this tier's running loads may hold, those after their deadline included."""

    min_prefix_blocks: int = 1
    """Shortest run of blocks worth a load from this tier."""

    announces_news: bool = False
    """Whether ``context.news.announce()`` is called when :meth:`get_finished` has something new; callers poll more often without."""

    fill: bool = True
    """Whether blocks promoted from a slower tier are offered to this one."""

    # ----------------------------------------------------------------------------------------------------------- lookup

    @abstractmethod
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        """True: held, a load is worth submitting.  False: not held.  None: not known yet, ask again at a later step."""

    def lookup_prefix(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> PrefixAnswer:
        """How many leading ``keys`` are held, and whether the one after them is undecided.  The batch form of :meth:`lookup`."""
        for held, key in enumerate(keys):
            answer = self.lookup(key, req_context)
            if answer is not True:
                return PrefixAnswer(held, answer is None)
        return PrefixAnswer(len(keys), False)

    # ------------------------------------------------------------------------------------------------------------- jobs

    @abstractmethod
    def submit_store(self, job: TransferJob) -> None:
        """Take ``job``'s rows to the medium.  The tier may decline keys (admission, no room): they end as not successful."""

    @abstractmethod
    def submit_load(self, job: TransferJob) -> None:
        """Fill ``job``'s rows from the medium."""

    @abstractmethod
    def get_finished(self) -> Iterable[JobResult]:
        """The jobs that have ended since the last call."""

    # -------------------------------------------------------------------------------------- notices (harmless defaults)

    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        """``keys``, a prefix in its order, were used (the head is the most recent)."""

    def used(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> float:
        """``keys``, all readable in the primary tier, were used by a request that may store: the tier may want those that it lacks.

        Returns the seconds for which the tier need not be told of them again; 0: at their next use.
        """
        return math.inf

    def take_wanted_keys(self) -> Sequence[OffloadKey]:
        """Keys, each once, that the tier lacks and would take now, if they are still resident in the primary tier.

        Its admission had declined them before, or they are in use (:meth:`used`) and it missed them.
        """
        return ()

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """A request begins."""
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        """A request has ended, and no job for it can follow."""

    def on_schedule_end(self) -> None:
        """The end of a step: the place to hand batched messages to the I/O side."""

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Events of this medium since the last call, in an order that a consumer can apply."""
        return ()

    def has_pending_work(self) -> bool:
        """True while jobs are in flight that :meth:`get_finished` has not reported."""
        return False

    def get_stats(self) -> TierStats:
        """Counters since the start and present gauges."""
        return TierStats()

    # --------------------------------------------------------------------------------------- may block until `deadline`

    def open(self, deadline: float) -> bool:
        """Make the tier ready, waiting at most until ``deadline``.  True if it is in service.

        False is no error: the tier says why once, answers "no", and takes itself into service when it can.
        """
        return True

    def drain(self, deadline: float) -> bool:
        """Wait until no job is in flight, at most until ``deadline`` (on the tier's clock).  True if none is."""
        return not self.has_pending_work()

    def reset(self, deadline: float, revision: str | None = None) -> bool:
        """Never again answer for or serve a block stored before this call, also after a restart of the process.

        True if that is certain; False takes the tier out of service until :meth:`reset_done`.  Jobs in flight are still
        reported. On a medium that others share, only this process moves: nothing of theirs is removed, and a restart
        may find it again. ``revision``: a text that names the weights from now on.  Tiers that are given the same text
        share their blocks on a shared medium; without one (the default) what is stored from now on is for this process
        alone.
        """
        return False

    def reset_done(self) -> bool:
        """After a :meth:`reset` that returned False: whether its promise holds by now.  Returns at once; asked once per step."""
        return False

    def shutdown(self, deadline: float) -> bool:
        """Stop, at most until ``deadline``.  True if nothing of the tier touches the primary rows any more.  May be called twice."""
        return True
