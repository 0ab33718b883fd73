"""Generic secondary tier: an index on the scheduler's thread, and an I/O side that uses a block store.

Any failure on the way of a block is a miss. The members of a tier have one subject each:
:class:`~tiering.block_tier.transfers.BlockTransfers` moves blocks, :class:`~tiering.block_tier.life.TierLife` opens,
resets and closes, and :class:`~tiering.block_tier.intake.Intake` chooses the blocks to store.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from tiering.api.hints import KeptBlocks
from tiering.api.keys import OffloadKey
from tiering.api.manager import OffloadingEvent
from tiering.api.namespace import Namespace
from tiering.api.request import ReqContext
from tiering.block_tier.event_log import BlockNotes, EventLog
from tiering.block_tier.hint_documents import Descriptions, HintDocuments, HotKeys, SpeedDocuments
from tiering.block_tier.intake import OFFER_AGAIN_AFTER, Intake
from tiering.block_tier.life import PlacePrefix, TierLife
from tiering.block_tier.parts import TierHooks, TierParts
from tiering.block_tier.transfers import BlockTransfers
from tiering.errors import ConfigError
from tiering.index.shared import held_each, held_prefix
from tiering.index.shared import place_prefix as named_prefix
from tiering.index.tier_index import Probe, TierIndex
from tiering.medium.block_store import BlockStore, Place
from tiering.medium.host import IoHost
from tiering.medium.side import IoSide, IoTask
from tiering.runtime.forks import inert_in_children
from tiering.secondary.contract import (
    JobResult,
    PrefixAnswer,
    SecondaryTierManager,
    StepEnd,
    TierContext,
    TierIntake,
    TierTraits,
    TransferJob,
)
from tiering.secondary.inert import InertTier
from tiering.secondary.options import BlockTierOptions
from tiering.secondary.tier_stats import TierStats

SHARED_LOAD_PART = 8
"""Largest number of blocks of one load job from a shared medium, where a single block takes long.

A larger number of transfers at a time does not make the parts longer.
"""

LOAD_PART = 256
"""Largest number of blocks of one load job from a medium of this process or machine.

At its deadline, a long load delivers the parts that have arrived. A larger part costs the scheduler less per block.
"""

REST_WITH_JOBS = 0.02
"""Longest rest while jobs run, in seconds.

Jobs that wait in vain and threads that hang are noticed in steps.
"""

_DOCUMENTS_SHARE = 0.25
"""Share of the time for a shutdown that the writing of hot keys and descriptions may take."""

_NO = PrefixAnswer(0, False)


class BlockTier(TierHooks, TierIntake, SecondaryTierManager):
    """Tier made of an index and a block store.

    Subclasses use the public attributes, override hooks (:class:`~tiering.block_tier.parts.TierHooks`), and call the
    methods "for subclasses". The scheduler's thread calls all methods and hooks.

    Args:
        context: environment of the tier.
        options: options of the tier.
        store: the medium.
        index: index of the blocks on the medium.
        place_prefix: function that returns the prefix of a namespace's places; ``index.enter`` receives it whenever
            the tier enters an epoch. Default: the names of namespace and epoch if the medium is shared, else none.
        element_size: bytes of one KV element, by which compression splits; default 2.
        io: I/O side to use; default: a new one.

    Raises:
        ConfigError: the options are not those of a block tier, or the medium does not support their compression.
    """

    def __init__(
        self,
        context: TierContext,
        options: BlockTierOptions,
        store: BlockStore,
        index: TierIndex,
        *,
        place_prefix: PlacePrefix | None = None,
        element_size: int = 2,
        io: IoSide | None = None,
    ) -> None:
        if not isinstance(options, BlockTierOptions):
            raise ConfigError(
                f"tier {context.name}: its options, {type(options).__name__}, lack the words of a BlockTier; "
                "derive the class from tiering.tier.BlockTierOptions"
            )
        self.context = context
        self.options = options
        self.store = store
        """The medium, without layers."""
        self.index = index
        self._announces = io is None
        """True if the I/O side announces all that it ends; another I/O side promises nothing."""
        self.io: IoSide = io or IoHost(store, options, context, element_size=element_size)
        self.stats = TierStats()
        """Counters that the scheduler's thread updates; :meth:`get_stats` adds the others."""
        self._intake = Intake(options.admission, options.fill_policy)
        self._events = EventLog(context.name, context.distance, enabled=context.enable_events, shared=index.shared)
        parts = TierParts(context, options, store, index, self.io, self._intake, self._events, self.stats)

        def publishes() -> bool:
            return options.admission != "none" and not self._life.private

        hot_keys, descriptions = HotKeys(parts, self._served_epoch, publishes), None
        speeds = None
        self._hints: list[HintDocuments[Any]] = [hot_keys]
        if options.load_or_compute == "auto":
            speeds = SpeedDocuments(parts, lambda: self.namespace, lambda: options.admission != "none")
            self._hints.append(speeds)
        if context.enable_events and not index.shared:
            descriptions = Descriptions(parts, self._served_epoch, publishes)
            self._hints.append(descriptions)
        self.name = context.name
        self.traits = TierTraits(
            medium=store.traits.medium,
            load_deadline=options.longest_load,
            store_deadline=options.deadline,
            primary_share=options.primary_share,
            max_load_blocks=min(options.depth.start, SHARED_LOAD_PART) if index.shared else LOAD_PART,
            min_prefix_blocks=options.min_prefix_blocks,
            load_or_compute=options.load_or_compute,
            capacity_blocks=max(1, (options.capacity_bytes or sys.maxsize) // max(context.group_bytes)),
            fill=options.admission != "none",
            announces_news=self._announces,
            mixes_requests=True,
            intake=self,
            hot_keys=hot_keys,
            descriptions=descriptions,
            speeds=speeds,
        )

        self._clock = context.clock
        self._lookup_index = index.lookup_prefix
        self._ask = partial(index.ask, self.io.store.probe)
        self._jobs = BlockTransfers(parts, self)
        named = named_prefix if index.shared else None
        self._life = TierLife(parts, self, self._jobs, place_prefix or named)
        self._hits = 0
        self._misses = 0
        inert_in_children(self, InertTier)

    def note_blocks(self, notes: BlockNotes) -> None:
        """Keep ``notes`` of the blocks held; the tier is not open yet, and its medium is not shared."""
        self._events.notes = notes

    # -------------------------------------------------------------------------------------------------- for subclasses

    @property
    def namespace(self) -> Namespace | None:
        """Namespace in the present epoch; None while the tier has no epoch."""
        return self._life.namespace

    def _served_epoch(self) -> Namespace | None:
        """Return the namespace in the present epoch once lookups find its blocks."""
        return self._life.namespace if self._life.serving and not self.recovering else None

    @property
    def opened(self) -> bool:
        """True once the medium has been open: :meth:`on_opened` was called."""
        return self._life.opened

    @property
    def idle(self) -> bool:
        """True if no job runs and the medium is not being opened."""
        return not self._jobs.running and not self._life.service.running

    @property
    def failed_attempts(self) -> int:
        """Number of attempts in a row to open the medium, or to enter an epoch, that failed."""
        return self._life.service.failures

    def collect_events(self) -> None:
        """Collect events from now on, though the context did not ask for them."""
        self._events.enabled = True

    def announce_removed(self, keys: Sequence[OffloadKey]) -> None:
        """Announce that ``keys`` are not held any more, though neither evicted nor corrupt (for subclasses)."""
        self._events.removed(keys)

    def announce_stored(self, keys: Sequence[OffloadKey]) -> None:
        """Announce that ``keys`` became held without a job, by recovery (for subclasses)."""
        self._events.stored(keys)

    def retire(self, places: Sequence[Place]) -> None:
        """Take ``places`` with a device error out of use; their blocks are lost (also for subclasses)."""
        self._events.removed(self.index.retire(places))

    def leave_medium(self) -> None:
        """Stop service because the medium is not the one that was opened (for subclasses).

        Lookups find nothing until :meth:`enter_medium`.
        """
        self._life.leave_medium()

    def enter_medium(self) -> None:
        """Open the store again after :meth:`leave_medium` and its closing (for subclasses).

        On another medium, the blocks in the epoch of the start may be older than a reset of this process. After a
        reset, a new epoch therefore begins.
        """
        self._life.enter_medium()

    def wait(self, ended: Callable[[], bool], deadline: float) -> None:
        """Process results of the I/O side until ``ended`` returns True or ``deadline`` has passed.

        For methods of subclasses that may block.
        """
        self._life.wait(ended, deadline)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        """Look up one of many blocks; the end of the step asks a shared medium about all of them together."""
        held, undecided = self._looked_up((key,))
        return None if undecided else held == 1

    def lookup_prefix(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> PrefixAnswer:
        answer = self._looked_up(keys)
        if answer[1]:
            self._start_probes()
        return answer

    def _looked_up(self, keys: Sequence[OffloadKey]) -> PrefixAnswer:
        if not self._life.serving:
            return _NO
        answer = self._lookup_index(keys, self._clock())
        held = answer[0]
        self._hits += held
        if held != len(keys) and not answer[1]:
            self._misses += 1
        return answer

    def _start_probes(self) -> None:
        single, others = list[Probe](), list[Probe]()
        for probe in self.index.take_probes(self._clock()):
            (others if len(probe.keys) > 1 or probe.offers else single).append(probe)
        if len(single) > 1:
            self._run_probe(partial(held_each, self._ask, single), partial(self._probed_each, single), single[0])
        else:
            others += single
        for probe in others:
            self._run_probe(partial(held_prefix, self._ask, probe), partial(self._probed, probe), probe)

    def _run_probe(self, run: Callable[[], Any], ended: Callable[..., None], probe: Probe) -> None:
        self.io.run(IoTask("probe", run, ended, lookup=True, expires=probe.expires))

    def _probed(self, probe: Probe, held: int | None, error: BaseException | None) -> None:
        now = self._clock()
        self._intake.offer(self.index.end_probe(probe, held, now), now)

    def _probed_each(
        self, probes: Sequence[Probe], held: Sequence[int | None] | None, error: BaseException | None
    ) -> None:
        for probe, answer in zip(probes, held or [None] * len(probes), strict=True):
            self._probed(probe, answer, error)

    def admit(self, keys: Sequence[OffloadKey], req_context: ReqContext, is_fill: bool) -> Sequence[int] | None:
        if self._life.storing:
            return self._jobs.admit(keys, req_context.req_id, fill=is_fill)
        self.stats.stores_dropped += len(keys)
        return ()

    def credit(self, wanted: int, seconds: float) -> int | None:
        return self._jobs.credit(wanted, seconds) if self._life.storing else None

    def not_stored(self, keys: Sequence[OffloadKey]) -> None:
        self.stats.stores_evicted += len(keys)
        self._intake.admission.remember(keys)

    def submit_store(self, job: TransferJob) -> None:
        if self._life.storing:
            self._jobs.store(job)
        else:
            self._jobs.refuse(job)

    def submit_load(self, job: TransferJob) -> None:
        if self._life.serving:
            self._jobs.load(job)
        else:
            self._jobs.refuse(job)

    def get_finished(self) -> Iterable[JobResult]:
        self._jobs.poll()
        now = self._clock()
        if self.index.shared:
            self._start_probes()
            touched, lapsed = self.index.take_hints(now)
            if touched:
                self._want(self._intake.admission.touch_again(touched))
            if lapsed:
                self._offer(lapsed)
        self._life.tick(now)
        return self._jobs.take_finished()

    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext, used: bool = True) -> None:
        self.index.touch(keys, used)
        if used:
            self._want(self._intake.admission.touch(keys, req_context.req_id))

    def used(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> float:
        if self.options.admission == "none":
            return math.inf
        return self._offer(keys)

    def _offer(self, keys: Sequence[OffloadKey]) -> float:
        """Want those of ``keys`` that the tier lacks, and return when to look again, as :meth:`used` does."""
        if not self._life.storing:
            return 0.0
        now = self._clock()
        lacking = self.index.lacking(keys, now)
        if lacking is None:
            self._start_probes()
            return OFFER_AGAIN_AFTER
        return self._intake.offer(lacking, now)

    def _want(self, keys: Sequence[OffloadKey]) -> None:
        """Let ``keys`` be offered; a tier that stores nothing now would only drop them."""
        if keys and self._life.storing:
            self._intake.want(keys)

    def on_request_finished(
        self, req_context: ReqContext, released: Sequence[OffloadKey] = (), kept: Sequence[KeptBlocks] = ()
    ) -> None:
        if released:
            self.index.release(released)
        for blocks in kept:
            self.index.keep(blocks, self._clock)
        self._intake.admission.on_request_finished(req_context.req_id)

    def on_schedule_end(self) -> StepEnd:
        wanted = self._intake.take() if self._life.storing else ()
        if self.index.shared:
            self._start_probes()
        self._life.tick(self._clock())
        return StepEnd(wanted, self._rest(self.on_step()), self.superseded(), self._life.reset_done)

    def _rest(self, offered: float | None) -> float:
        """Return the seconds for which nothing is due here unless a job or task ends.

        Args:
            offered: seconds for which the hook need not be called; None: it is called in every step.
        """
        calm = self._announces and self._life.calm and self._jobs.calm and not self._intake.wanted
        if not calm or offered is None:
            return 0.0
        return min(offered, REST_WITH_JOBS) if self._jobs.running else offered

    def take_events(self) -> Iterable[OffloadingEvent]:
        return self._events.take()

    # --------------------------------------------------------------------------------------- may block until a deadline

    def open(self, deadline: float) -> bool:
        serving = self._life.open(deadline)
        self.open_error = self._life.service.error
        return serving

    def drain(self, deadline: float) -> bool:
        return self._life.drain(deadline)

    def reset(self, deadline: float, revision: str | None = None, follow: bool = False) -> bool:
        return self._life.follow(deadline) if follow else self._life.reset(deadline, revision)

    def superseded(self) -> bool:
        """Return True if the tier has to leave its epoch, once the manager has dropped all older blocks."""
        return self._life.successor is not None or self._life.outdated

    def shutdown(self, deadline: float) -> bool:
        now = self._clock()
        if any(hints.writing for hints in self._hints):
            until = now + (deadline - now) * _DOCUMENTS_SHARE
            self.wait(lambda: not any(hints.writing for hints in self._hints), until)
        return self._life.shutdown(deadline)

    def get_stats(self) -> TierStats:
        io, stats = self.io.stats, self.stats
        return replace(
            stats,
            queries=self._hits + self._misses,
            hits=self._hits,
            misses=self._misses,
            read_bytes=io.read_bytes,
            read_seconds=io.read_seconds,
            written_bytes=io.written_bytes,
            written_seconds=io.written_seconds,
            retries=io.retries,
            requests=io.requests,
            lookups_late=self.index.late_lookups,
            blocks=self.index.blocks,
            occupancy_bytes=self.index.blocks * (max(self.context.group_bytes) + self.store.traits.header_bytes),
            capacity_bytes=self.options.capacity_bytes or 0,
            recovering=int(self.recovering),
            slots_retired=self.index.retired_for_errors,
            load_depth=self.io.load_depth,
            store_depth=self.io.store_depth,
            breaker_state=int(self.io.breakers.state),
            breaker_opened=self.io.breakers.opened,
            available=int(self._life.serving),
            writable=int(self._life.storing),
            private_epoch=int(self._life.private),
            coordinated=int(self.index.coordinated),
            job_latency=list(stats.job_latency),
        )
