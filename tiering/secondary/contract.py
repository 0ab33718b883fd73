"""Contract of a secondary tier, and the jobs that the manager submits to a tier.

The scheduler's thread calls all methods. Only :meth:`SecondaryTierManager.open`, :meth:`~SecondaryTierManager.drain`,
:meth:`~SecondaryTierManager.reset` and :meth:`~SecondaryTierManager.shutdown` may block, until their deadline. All
others return at once, and the tier moves the data elsewhere.

A tier never touches accelerator memory. A tier receives a memoryview of the primary tier: shape (num_rows,
row_stride_bytes), uint8. Block b is row b (``numpy.asarray(view)[b]``). Rows start on page boundaries.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Literal, NamedTuple

import numpy as np

from tiering.api.descriptions import TierDescriptions
from tiering.api.hints import KeptBlocks
from tiering.api.keys import OffloadKey
from tiering.api.manager import OffloadingEvent
from tiering.api.namespace import Namespace
from tiering.api.request import ReqContext, RequestOffloadingContext
from tiering.api.transfer import Done, Outcome, Place, Rows
from tiering.runtime.news import News
from tiering.secondary.agreement import EpochAgreement
from tiering.secondary.speeds import LoadOrCompute, TierSpeeds
from tiering.secondary.tier_stats import TierStats

Distance = Literal["process", "machine", "network"]
"""Distance of a medium: memory of this process, a device of this machine, or a service on the network."""


HELD_FOR = 600.0
"""Seconds for which a tier that holds a block is assumed to hold it."""


class _Order(NamedTuple):
    job_id: int
    """Number of the job, unique among the jobs in flight."""
    keys: Sequence[OffloadKey]
    """Keys of the blocks to transfer."""
    block_ids: Rows
    """Primary rows of the blocks, co-indexed with ``keys``."""
    is_promotion: bool
    """True for a load (the tier fills the rows), False for a store (the tier reads the rows)."""
    req_context: ReqContext
    """Context of the request that caused the transfer."""
    submitted_at: float = 0.0
    """Time of submission on the tier's clock, in seconds; default 0."""
    is_fill: bool = False
    """True for a store of blocks that were just promoted from a slower tier; default False."""
    deadline: float = math.inf
    """Time on the tier's clock by which the job should have ended; default: none."""


class TransferJob(_Order):
    """Transfer of blocks between primary rows and one secondary tier, from its order to its outcomes.

    The manager makes the job, and no tier can change what it orders. Until the tier reports the job, the tier may touch
    these rows and no other component writes them. A tier may keep attributes of its own on the job. A block tier adds
    the attributes below, and the job travels to the threads that move the bytes, and back.
    """

    moved: Sequence[OffloadKey] = ()
    """Keys of the blocks that are moved, ``keys`` or some of them.

    ``rows``, ``places``, ``sizes`` and ``outcomes`` are co-indexed with them.
    """
    rows: Sequence[int]
    """Primary row of each block."""
    places: Sequence[Place]
    """Place of each block on the medium."""
    sizes: Sequence[int]
    """Raw bytes of each block, without padding."""
    outcomes: list[Outcome]
    """Outcome of each block; complete when the job has ended, and guarded by the I/O side before."""
    held: Sequence[OffloadKey] = ()
    """Keys of a store that are not moved, because the medium holds them already; default: none."""
    fingerprint: bytes = b""
    """Fingerprint of the namespace in which blocks are written, and which blocks must carry when read."""
    digests: dict[OffloadKey, bytes] | None = None
    """The xxh3-128 of each block that a block tier has read and verified; None (default): it notes none."""
    ended_at: float | None = None
    """Time on the tier's clock at which the last block has ended; None: not before the job was reported."""
    unfinished: int = 1
    """Number of units of the job that have not ended; guarded by the I/O side."""

    @property
    def verb(self) -> str:
        """The word ``load`` or ``store``, for log lines."""
        return "load" if self.is_promotion else "store"

    @property
    def moved_bytes(self) -> int:
        """Raw bytes of the blocks that were moved."""
        if self.outcomes.count(Done.DONE) == len(self.sizes):
            return sum(self.sizes)
        return sum(compress(self.sizes, [outcome is Done.DONE for outcome in self.outcomes]))

    def move(
        self, keys: Sequence[OffloadKey], rows: Sequence[int], places: Sequence[Place], sizes: Sequence[int]
    ) -> None:
        """Set the blocks to move; no outcome is known yet."""
        self.moved, self.rows, self.places, self.sizes = keys, rows, places, sizes
        self.outcomes = [Done.ABSENT] * len(keys)

    def keep(self, chosen: Sequence[bool]) -> None:
        """Move only those blocks for which ``chosen`` is True."""
        keys, rows = list(compress(self.moved, chosen)), list(compress(self.rows, chosen))
        self.move(keys, rows, list(compress(self.places, chosen)), list(compress(self.sizes, chosen)))


class JobResult(NamedTuple):
    """Result of a job that has ended: the tier no longer touches any of its rows.

    Every job has exactly one result.
    """

    job_id: int
    """Number of the job that has ended."""
    success: bool
    """True if the job succeeded for all keys; see ``successful_keys``."""
    successful_keys: Sequence[OffloadKey] | None = None
    """Exactly the keys that succeeded; None (default): all keys share the outcome in ``success``."""
    transfer_bytes: int | None = None
    """Bytes transferred; None (default): not known."""
    transfer_time: float | None = None
    """Seconds from the job's submission to the end of its I/O; None (default): until the job was reported."""


MAX_EVENTS = 100_000
"""Largest number of events that :meth:`SecondaryTierManager.take_events` may return at once."""

MAX_ENGINES = 32
"""Largest number of engines whose hot keys a tier returns (:meth:`TierHotKeys.gather`)."""


class PrefixAnswer(NamedTuple):
    """Result of a lookup of a prefix."""

    held: int
    """Number of leading keys that the tier holds."""
    undecided: bool
    """True if the tier does not know yet whether it holds the key after the held ones."""


class StepEnd(NamedTuple):
    """State of a tier at the end of a step; each field has a harmless default."""

    wanted: Sequence[OffloadKey] = ()
    """Keys, each once, that the tier lacks and would store now; default: none.

    The manager offers those that are still resident in the primary tier. A tier may want keys that its admission
    declined before, and keys in use (:meth:`TierIntake.used`).
    """
    rest: float = 0.0
    """Seconds for which the ends of steps may leave this tier out; default 0: it is called in every step.

    If all tiers rest, the manager calls no tier at the ends of the next steps. The rest ends with the time, with an
    announcement of any tier, and with any other use of the manager. It never lasts longer than
    :data:`tiering.manager.rest.LONGEST_REST`. A tier may rest only if it announces whatever the manager would collect
    (:attr:`TierTraits.announces_news`), and if it has no result now that was not announced.
    """
    superseded: bool = False
    """True if the common epoch has a successor that this tier has not entered; default False.

    The manager then empties the primary tier and resets all tiers with ``follow``. Until then the tier stays in its
    epoch.
    """
    reset_done: bool = False
    """True once the invalidation by a reset that was not certain at once is certain; default False."""


@dataclass(frozen=True, slots=True)
class TierContext:
    """Environment of a tier, given to its definition's build function."""

    name: str
    """Name of the tier, unique in the stack."""
    primary_view: memoryview
    """The primary tier's rows: uint8, shape (num_rows, row_stride_bytes)."""
    group_bytes: tuple[int, ...]
    """Bytes of one block of each KV-cache group, without padding: the bytes that the medium stores."""
    namespace: Namespace
    """Namespace of the engine's blocks."""
    clock: Callable[[], float] = time.monotonic
    """Function that returns monotonic seconds; default: ``time.monotonic``."""
    enable_events: bool = False
    """True if the tier shall collect KV events; default False."""
    replica: str | None = None
    """Name that distinguishes data-parallel engines of one machine; None (default): a single engine."""
    revision: str | None = None
    """Text that names the weights at the start; None (default): the namespace's parameters identify them."""
    news: News = field(default_factory=News)
    """Receiver of the tier's announcements that a job has ended; an announcement wakes up waiting callers."""
    distance: Distance | None = None
    """Distance of the medium; None (default): not known."""
    rows_fd: int | None = None
    """Descriptor of the rows' memory, which other processes map; None (default): there is none."""
    agreement: EpochAgreement = field(default_factory=EpochAgreement)
    """Common epochs that the shared tiers of the stack have met; one instance for all tiers of a manager."""


class TierIntake:
    """Part of a tier that chooses its blocks or may be slower than the engine.

    Each method has a default, by which the tier gets all blocks at once.
    """

    def admit(self, keys: Sequence[OffloadKey], req_context: ReqContext, is_fill: bool) -> Sequence[int] | None:
        """Return the positions of the keys that the tier wants to store, in order; None (default): all.

        The manager calls this method once, when the blocks become readable. A tier with a limited :meth:`credit` gets
        admitted blocks later, or never if their rows are needed before (:meth:`not_stored`).

        Args:
            keys: the blocks, in the order of the prefix.
            req_context: the request that the blocks are stored for.
            is_fill: True if the blocks were just promoted from a slower tier.
        """
        return None

    def credit(self, wanted: int, seconds: float) -> int | None:
        """Return the number of further blocks that may be submitted now; None (default): any number.

        Blocks beyond the credit wait in a queue of the manager, without a row that could not be taken from them. The
        credit should keep the medium busy for ``seconds``, until the manager asks again.

        Args:
            wanted: number of blocks that wait; a larger credit is of no use now.
            seconds: duration of two steps of the engine.
        """
        return None

    def not_stored(self, keys: Sequence[OffloadKey]) -> None:
        """Record that ``keys``, which :meth:`admit` has admitted, lost their rows in the manager's queue."""

    def used(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> float:
        """Record that a request which may store used ``keys``, and return when to call again.

        All keys are readable in the primary tier. At the end of a step, the tier may want the keys that it lacks
        (:attr:`StepEnd.wanted`).

        Returns:
            Seconds during which this method need not be called for these keys; 0 to be called at their next use.
        """
        return math.inf


class TierHotKeys:
    """Part of a tier that keeps the keys which engines use most, for engines that start later.

    All methods return at once. What they return is a hint, which the manager does not trust. The defaults keep none.
    """

    def used(self, keys: Sequence[OffloadKey]) -> None:
        """Record that a request used a prefix which may be published.

        The default does nothing, because :meth:`publish` gets the same prefixes together.
        """

    def publish(self, chains: Sequence[Sequence[OffloadKey]]) -> None:
        """Begin to replace what this engine has published, if the tier can do so now.

        Args:
            chains: prefixes that requests used, the most recent one last. Nobody changes them any more.
        """

    def gather(self) -> Sequence[Sequence[Sequence[OffloadKey]]] | None:
        """Return what engines of this epoch have published, for each engine as runs, hottest first.

        A run has keys that follow one another in a prefix. The manager asks at the ends of steps until it has an
        answer, and again after a reset.

        Returns:
            The runs of at most :data:`MAX_ENGINES` engines; None if they are not known yet.
        """
        return ()


@dataclass(frozen=True, slots=True)
class TierTraits:
    """Properties of a tier, and the parts of the contract that it takes; the manager reads them once."""

    medium: str = ""
    """Name of the medium in metrics: "DISK", "OBJECT", ..."""
    load_deadline: float | None = 30.0
    """Seconds until the manager stops waiting for a load; default 30, None for no limit.

    After the deadline the keys are misses. The tier still reports the job later.
    """
    store_deadline: float | None = None
    """Seconds after which an idle engine no longer steps for a store; default: ``load_deadline``."""
    primary_share: float = 0.5
    """Largest share of the primary rows that running loads, overdue ones included, may hold; default 0.5."""
    max_load_blocks: int | None = None
    """Largest number of blocks of one load job; None (default): no limit.

    The manager submits a longer load as several jobs, so that the blocks that arrived before the deadline count.
    """
    min_prefix_blocks: int = 1
    """Length in blocks of the shortest run that is worth a load from this tier; default 1."""
    fill: bool = True
    """True (default) if blocks promoted from a slower tier are offered to this tier."""
    announces_news: bool = False
    """True if the tier announces new results of :meth:`~SecondaryTierManager.get_finished`; default False.

    The tier announces them with ``context.news.announce()``. Without announcements, waiting callers poll more often.
    """
    mixes_requests: bool = False
    """True if the blocks that several requests store in one step may be one job; default False.

    The context of such a job is that of no request.
    """
    intake: TierIntake | None = None
    """Part that chooses the blocks to store; None (default): all, as soon as they are readable."""
    hot_keys: TierHotKeys | None = None
    """Part that keeps the keys which engines use most; None (default): the tier keeps none."""
    descriptions: TierDescriptions | None = None
    """Part that keeps descriptions of the blocks; None (default): the tier keeps none."""
    speeds: TierSpeeds | None = None
    """Part that keeps speeds for engines that start later; None (default): the tier keeps none."""
    load_or_compute: LoadOrCompute = "always"
    """Rule by which requests load or compute the blocks of this tier; default "always"."""
    capacity_blocks: int | None = None
    """Number of blocks that the tier has room for; None (default): not known."""

    def deadline(self, now: float, *, load: bool) -> float:
        """Return the time by which a load, or else a store, that is submitted at ``now`` should have ended."""
        limit = self.load_deadline if load or self.store_deadline is None else self.store_deadline
        return math.inf if limit is None else now + limit


class SecondaryTierManager(ABC):
    """One secondary tier, as the manager uses it.

    A tier defines :meth:`lookup`, :meth:`submit_store`, :meth:`submit_load`, :meth:`get_finished` and its traits. All
    other methods have defaults. Every tier must keep these guarantees:

    - :meth:`get_finished` reports every job exactly once, when the tier no longer touches any of the job's rows. This
      includes jobs that failed or never started.
    - When a load is reported successful for a key, its row holds verified bytes of that key.
    - No method raises because of the medium. A tier in trouble answers lookups with False and fails jobs.

    A tier that raises, or returns what a method does not allow, is out of service until a restart. The log says which
    method it was, and what it returned.
    """

    name: str
    """Name of the tier in metrics, logs and a request's ``tiers``; unique in a stack, and read once."""

    traits: TierTraits
    """Properties of the tier."""

    open_error: BaseException | None = None
    """Reason why the medium could not be opened in the last attempt; default None."""

    # ----------------------------------------------------------------------------------------------------------- lookup

    @abstractmethod
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        """Return True if ``key`` is held and worth a load, False if not, None if not known yet.

        After None, the manager asks again at a later step.
        """

    def lookup_prefix(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> PrefixAnswer:
        """Return the number of leading ``keys`` that are held, and True if the next key is undecided.

        This is the batch form of :meth:`lookup`. The default implementation calls :meth:`lookup` for each key.

        Raises:
            TypeError: a :meth:`lookup` returned something else than its contract allows.
        """
        for held, key in enumerate(keys):
            answer = self.lookup(key, req_context)
            if answer is True:
                continue
            if answer is not None and answer is not False:
                if not isinstance(answer, np.bool_):
                    raise TypeError(f"lookup returned a {type(answer).__name__}, not True, False or None")
                if answer:
                    continue
            return PrefixAnswer(held, answer is None)
        return PrefixAnswer(len(keys), False)

    # -------------------------------------------------------------------------------------------------------- transfers

    @abstractmethod
    def submit_store(self, job: TransferJob) -> None:
        """Write ``job``'s rows to the medium.

        The tier may decline keys (no room); the result reports them as not successful.
        """

    @abstractmethod
    def submit_load(self, job: TransferJob) -> None:
        """Fill ``job``'s rows from the medium."""

    @abstractmethod
    def get_finished(self) -> Iterable[JobResult]:
        """Return the results of the jobs that have ended since the last call."""

    # -------------------------------------------------------------------------------------- notices (harmless defaults)

    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext, used: bool = True) -> None:
        """Make ``keys``, a prefix in its order, recent; its first key is the most recent.

        Args:
            keys: the blocks.
            req_context: the request.
            used: True (default) if the request used the blocks; False if it has only stored them.
        """

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Return the offloading policy for a request that begins."""
        return RequestOffloadingContext()

    def on_request_finished(
        self, req_context: ReqContext, released: Sequence[OffloadKey] = (), kept: Sequence[KeptBlocks] = ()
    ) -> None:
        """Drop the state of a request that has ended: no job for it follows.

        Args:
            req_context: the request.
            released: blocks that no session needs any more, in the order of a prefix; default: none. The tier should
                evict them before all others, until they are used again.
            kept: blocks before which the tier should evict others for a time; default: none. Blocks that the tier does
                not have are ignored.
        """

    def on_schedule_end(self) -> StepEnd | None:
        """End a step, and return the tier's state; None: the default state.

        This is the place to submit batched messages to the I/O side.
        """
        return None

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Return this medium's events since the last call, in an order that a consumer can apply.

        There are :data:`MAX_EVENTS` of them at most; the others follow with the next call.
        """
        return ()

    def get_stats(self) -> TierStats:
        """Return counters since the start and present gauges."""
        return TierStats()

    # ------------------------------------------------------------------------ life (may block until `deadline`)

    def open(self, deadline: float) -> bool:
        """Make the tier ready, waiting at most until ``deadline``, and return True if it is in service.

        False is not an error: the tier logs the reason once, answers lookups with False, and enters service when it
        can.
        """
        return True

    def drain(self, deadline: float) -> bool:
        """Wait at most until ``deadline`` for all jobs to end, and return True if none is in flight.

        ``deadline`` is on the tier's clock. The default waits for nothing.
        """
        return True

    def reset(self, deadline: float, revision: str | None = None, follow: bool = False) -> bool:
        """Invalidate every block stored before this call, also for later processes that use the medium.

        The tier never again answers lookups for these blocks or serves them, also after a restart of the process. Jobs
        in flight are still reported. On a medium that is shared with other processes, only this process changes its
        epoch: blocks of other processes remain, and a restart may find them again.

        Args:
            deadline: time on the tier's clock until which the call may block. While the engine runs and ``follow`` is
                True, it has passed.
            revision: text that names the weights from now on. Tiers with the same text share their blocks on a shared
                medium. Without it (the default), blocks stored from now on are for this process alone.
            follow: True if the common epoch of a tier has a successor; default False. A tier that is
                :attr:`~StepEnd.superseded` enters the new common epoch. Another tier of a shared medium may keep its
                common epoch once it knows that this epoch has no successor. All other tiers reset as always.

        Returns:
            True if the invalidation is certain. False: the tier is out of service until :attr:`StepEnd.reset_done`.
        """
        return False

    def shutdown(self, deadline: float) -> bool:
        """Shut the tier down until ``deadline``, and return True if it no longer touches the primary rows.

        May be called twice.
        """
        return True
