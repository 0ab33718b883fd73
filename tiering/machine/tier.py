"""One tier of the service of this machine, as an engine's manager uses it.

The scheduler's thread appends records and sends them at the end of a step; it takes what has come from the link's
queue. It waits for nothing. What the tier holds is read (:class:`~tiering.machine.presence.Presence`), or, on a shared
medium, asked once per prefix, and kept for a short time (:class:`~tiering.index.shared.SharedIndex`).

A job is in flight until the service has reported it. If the connection ends before, the service may still write into
the rows: the job stays in flight, and its rows stay out of use, until the link has proved that the service is dead.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import compress
from pathlib import Path

from tiering.api.hints import KeptBlocks
from tiering.api.keys import OffloadKey
from tiering.api.manager import OffloadingEvent
from tiering.api.request import ReqContext
from tiering.block_tier.definition import TierDefinition
from tiering.errors import ConfigError, StoreError
from tiering.index.shared import SharedIndex
from tiering.index.tier_index import Probe
from tiering.machine.admin import MachineAdmin
from tiering.machine.counts import Medium
from tiering.machine.engine_hints import MachineHints
from tiering.machine.held_stores import HeldStores
from tiering.machine.link import PROOF_SECONDS, Happening, Link, ServiceSocket, TierHost
from tiering.machine.messages import MAX_KEYS, SERVING, STORING, Kind, MessageError, Record
from tiering.machine.options import MachineTierOptions
from tiering.machine.outbox import Outbox
from tiering.machine.words import START, UNKNOWN_EPOCH, Greeting, private_weights, read_state, revision_weights
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
from tiering.secondary.tier_stats import TierStats

_log = logging.getLogger("kv_tiering.machine")
PRESENT_SECONDS, ABSENT_SECONDS = 10.0, 1.0
"""Seconds for which an answer of the service is used again; other engines store and evict meanwhile."""

OFFER_AGAIN = 30.0
"""Seconds after which blocks in use are reported to the service again."""

LOAD_PART = 16
"""Largest number of blocks of one load job; at the deadline, the parts that have arrived count."""

_RESULT, _STATE, _ANSWER, _WANTED = map(int, (Kind.RESULT, Kind.STATE, Kind.ANSWER, Kind.WANTED))
"""Kinds of records, without the cost of an attribute of an enumeration."""

_NO, _ANYWHERE, _CALM = PrefixAnswer(0, False), ("",), StepEnd((), math.inf, False, True)


class MachineTier(TierIntake, SecondaryTierManager):
    """One tier of the service, as an engine uses it.

    Args:
        context: environment of the tier; its rows need a descriptor.
        options: options of the tier.
        host: process that serves this engine alone, which ends with its last tier; default None: a service.

    Raises:
        ConfigError: the rows have no descriptor that another process could map.
    """

    def __init__(self, context: TierContext, options: MachineTierOptions, host: TierHost | None = None) -> None:
        if context.rows_fd is None:
            raise ConfigError(f"tier {context.name}: the rows have no descriptor that the service could map")
        hints = MachineHints(context, self._write, lambda: self.serving)
        self._context = replace(context, primary_view=memoryview(b""), rows_fd=None)  # the rows outlive no engine
        self.name = context.name
        self.traits = TierTraits(
            medium="MACHINE",
            load_deadline=options.load_deadline,
            store_deadline=options.load_deadline,
            primary_share=options.primary_share,
            max_load_blocks=LOAD_PART,
            announces_news=True,
            mixes_requests=True,
            intake=self,
            hot_keys=hints,
        )
        self._clock = context.clock
        self._num_rows, self._stride = context.primary_view.shape or (0, 0)
        self._weights = START if context.revision is None else revision_weights(context.revision)
        """State of the weights, which blocks of the tier must have been computed with."""
        self._last_reset: Record | None = None
        self._owed = False
        """True if a reset has not been confirmed by the service."""
        self._known: tuple[str, int, str] | None = None
        """Instance, generation and epoch that the rows belong to; None before the first."""
        self._state: tuple[int, str, int, str, int] | None = None
        """Generation, weights, flags, epoch and window of the last state; None without a connection."""
        self._superseded = False
        self.serving = self.storing = False
        self._connection: ServiceSocket | None = None
        self._closed = False
        self._jobs: dict[int, tuple[TransferJob, ServiceSocket]] = {}
        self._stale: set[int] = set()
        self._finished: list[JobResult] = []
        self._out = Outbox(context.name)
        self._held = HeldStores()
        self._asked: dict[int, Probe] = {}
        self._asks = 0
        self._wanted: list[OffloadKey] = []
        self.stats = TierStats(available=0, writable=0)
        """Counters of this engine's use of the tier."""
        self._medium = Medium(context.name, context.agreement.cold_starts)
        self._rows_fd = os.dup(context.rows_fd)  # the link's thread may greet while the rows are closed
        self._close_rows = weakref.finalize(self, os.close, self._rows_fd)
        self._index = SharedIndex(
            present_ttl=PRESENT_SECONDS, absent_ttl=ABSENT_SECONDS, lookup_deadline=options.lookup_deadline
        )
        self._hints = hints
        self._host = host
        path = str(Path(options.socket).expanduser()) if host is None else host.address
        self._link = Link(path, context.name, self._greeting, context.news.announce, self._close_rows, options.user)
        inert_in_children(self, InertTier)

    def _greeting(self) -> tuple[bytes, Sequence[int]]:
        """Return the greeting of a new connection; the link's thread calls this method."""
        if os.fstat(self._rows_fd).st_nlink:
            raise StoreError("not all processes of the engine have mapped the rows yet")
        found = Greeting.about(self._context, self._num_rows, self._stride, self._weights)
        return found.text(), (self._rows_fd,)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        held, undecided = self.lookup_prefix((key,), req_context)
        return None if undecided else held == 1

    def lookup_prefix(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> PrefixAnswer:
        connection = self._connection
        if not self.serving or connection is None:
            return _NO
        if (presence := connection.presence) is not None:
            answer = PrefixAnswer(presence.leading(keys), False)
        else:
            answer = self._index.lookup_prefix(keys, self._clock())
        self.stats.hits += answer.held
        if answer.held != len(keys):
            if answer.undecided:
                self._ask(self._clock())
            else:
                self.stats.misses += 1
        return answer

    def _ask(self, now: float) -> None:
        for probe in self._index.take_probes(now):
            asked = replace(probe, keys=probe.keys[:MAX_KEYS])
            self._asks += 1
            if self._write(Record(Kind.LOOKUP, self._asks, seconds=max(0.0, probe.expires - now), keys=asked.keys)):
                self._asked[self._asks] = asked
            else:
                self._index.end_probe(asked, None, now)

    def admit(self, keys: Sequence[OffloadKey], req_context: ReqContext, is_fill: bool) -> Sequence[int] | None:
        """Return None while the service takes stores, or the next one may: it chooses the blocks itself."""
        if self.storing or self._held.wait(self._clock()):
            return None
        self.stats.stores_dropped += len(keys)
        return ()

    def credit(self, wanted: int, seconds: float) -> int | None:
        if not self.storing or self._state is None:
            return 0 if self._held.wait(self._clock()) else None  # what is queued is dropped
        if self._out.is_full:
            return 0
        return max(0, min(wanted, MAX_KEYS, self._state[4] - self.stats.cascades_active))

    def not_stored(self, keys: Sequence[OffloadKey]) -> None:
        self.stats.stores_evicted += len(keys)

    def submit_store(self, job: TransferJob) -> None:
        if self._submit(Kind.STORE, job, self.storing):
            self.stats.cascades_active += len(job.keys)
        else:
            self.stats.stores_dropped += len(job.keys)

    def submit_load(self, job: TransferJob) -> None:
        if self._submit(Kind.LOAD, job, self.serving):
            self.stats.promotions_active += len(job.keys)
        else:
            self.stats.promotions_failed += len(job.keys)

    def _submit(self, kind: Kind, job: TransferJob, possible: bool) -> bool:
        """Write the record of a job; if that is not possible, end the job at once."""
        connection = self._connection
        if possible and connection is not None and len(job.keys) <= MAX_KEYS:
            seconds = min(1e8, max(0.0, job.deadline - self._clock()))
            request = job.req_context.req_id.encode(errors="replace")[:1000]
            rows = job.block_ids.tolist()
            if self._write(Record(kind, job.job_id, int(job.is_fill), seconds, request, job.keys, rows)):
                self._jobs[job.job_id] = job, connection
                return True
        self._finished.append(JobResult(job.job_id, False, ()))
        return False

    def get_finished(self) -> Iterable[JobResult]:
        self._poll()
        finished, self._finished = self._finished, []
        return finished

    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext, used: bool = True) -> None:
        self._notice(Kind.TOUCH, keys, req_context, int(used))

    def used(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> float:
        if not self.storing:
            return 0.0
        self._notice(Kind.USED, keys, req_context)
        return OFFER_AGAIN

    def on_request_finished(
        self, req_context: ReqContext, released: Sequence[OffloadKey] = (), kept: Sequence[KeptBlocks] = ()
    ) -> None:
        self._notice(Kind.FINISHED, released, req_context)

    def _notice(self, kind: Kind, keys: Sequence[OffloadKey], req_context: ReqContext, flag: int = 0) -> None:
        """Write a notice, which is dropped if the service is slow or away."""
        if self.serving and not self._out.is_full:
            request = req_context.req_id.encode(errors="replace")[:1000]
            for first in range(0, max(1, len(keys)), MAX_KEYS):
                self._write(Record(kind, flag=flag, text=request, keys=keys[first : first + MAX_KEYS]))

    def take_events(self) -> Iterable[OffloadingEvent]:
        return self._hints.take_events()

    def on_schedule_end(self) -> StepEnd:
        if self._out.records:
            self._flush()
        if self._held.unreported and self.storing:
            self._wanted += self._held.take()
        calm = not (self._out.records or self._finished or self._link.queue)
        if calm and not (self._wanted or self._superseded or self._owed):
            return _CALM
        wanted, self._wanted = self._wanted, []
        return StepEnd(wanted, math.inf if calm else 0.0, self._superseded, not self._owed)

    def _write(self, record: Record) -> bool:
        """Append a record to the step's messages; return False if it cannot be sent."""
        return self._connection is not None and self._out.add(record)

    def _flush(self) -> None:
        """Send what fits into the socket, and keep the rest."""
        if self._connection is not None:
            self._out.send(self._connection)

    def _poll(self) -> None:
        """Process what has happened since the last call."""
        queue = self._link.queue
        while queue:
            what, connection, records = queue.popleft()
            if what is Happening.RECORDS:
                for record in records:
                    self._take(record, connection)
            elif what is Happening.UP:
                self._connection = connection
                self._hints.cleared()
                self._change()
                if self._last_reset is not None:
                    self._write(self._last_reset)
            elif what is Happening.DOWN:
                connection.socket.close()
                self._held.begin(self._clock(), stored=self.storing)
                self._connection = self._state = None
                self._out.clear()
                self._change()
            else:
                for number, (job, owner) in list(self._jobs.items()):
                    if owner is connection:
                        self._held.unreported += () if job.is_promotion or number in self._stale else job.keys
                        self._end(number, ())

    def _take(self, record: Record, connection: ServiceSocket) -> None:
        if record.kind == _RESULT:
            if (known := self._jobs.get(record.number)) is not None and known[1] is connection:
                self._end(record.number, record.text)
        elif connection is not self._connection:
            return
        elif record.kind == _STATE:
            self._take_state(record, connection)
        elif record.kind == _ANSWER:
            if (probe := self._asked.pop(record.number, None)) is not None:
                held = int(record.seconds)
                self._index.end_probe(probe, held if 0 <= held <= len(probe.keys) else None, self._clock())
        elif record.kind == _WANTED:
            self._wanted += record.keys if self.storing else ()
        else:
            self._hints.take(record)

    def _take_state(self, record: Record, connection: ServiceSocket) -> None:
        try:
            weights, epoch, window, medium = read_state(record.text)
        except MessageError as error:
            _log.error("tier %s: %s", self.name, error)
            return
        self._medium.take(medium)
        self._state = record.number, weights, record.flag, epoch, window
        self._adopt(connection)
        self._change()

    def _adopt(self, connection: ServiceSocket) -> None:
        """Enter the service's generation if the rows may belong to it, or ask the manager to empty them.

        The rows belong to the generation that they were in at the same instance of the service. At another instance,
        only the epochs of its shared media prove that nothing was invalidated meanwhile; a stack without shared media
        has no common epochs.
        """
        if self._state is None:
            return
        generation, weights, flags, epoch, _ = self._state
        if weights != self._weights or not flags & SERVING:
            return
        place, known = (connection.instance, generation, epoch), self._known
        if self._owed:
            young = True  # the rows were emptied at the reset, and no common epoch counts after it
        elif known is None:
            young = not epoch or not self._context.agreement.in_use
        elif known[0] == connection.instance:
            # The states of several tiers come one by one, and the first one has let the manager empty the rows.
            emptied = self._context.agreement.emptied
            young = known[1] == generation or emptied == (connection.instance, generation)
        else:
            young = known[2] == epoch != UNKNOWN_EPOCH
        if not young:
            self._superseded = True
        elif known is None or known[:2] != place[:2]:
            self._enter(place)
        else:
            self._known = place

    def _enter(self, place: tuple[str, int, str]) -> None:
        self._known = place
        self._superseded = False
        self._write(Record(Kind.FOLLOWED, place[1]))

    def _change(self) -> None:
        """Find out if the tier serves, after a change of the connection, the service's state or this engine's."""
        state, connection, known = self._state, self._connection, self._known
        flags = 0
        if state is not None and connection is not None and known is not None and not self._closed:
            flags = state[2] * (known[:2] == (connection.instance, state[0]) and state[1] == self._weights)
            self._owed = self._owed and not flags & SERVING
        if self.serving and not flags & SERVING:
            self._forget()
        if bool(flags & SERVING) != self.serving:
            _log.info("tier %s: %s", self.name, "in service" if flags & SERVING else "out of service")
        self.serving, self.storing = bool(flags & SERVING), bool(flags & STORING)
        self.stats.available, self.stats.writable = int(self.serving), int(self.storing)

    @property
    def settled_weights(self) -> str | None:
        """State of the weights, once the rows belong to the service's generation; None before."""
        state, connection, known = self._state, self._connection, self._known
        if state is None or connection is None or known is None or self._owed or self._superseded:
            return None
        return self._weights if known[:2] == (connection.instance, state[0]) and state[1] == self._weights else None

    @property
    def service(self) -> str:
        """Name of the process that serves the tier; empty while none does."""
        return "" if self._connection is None else self._connection.instance

    def _forget(self) -> None:
        """Forget what the tier holds."""
        self._index.clear()
        self._asked.clear()
        self._wanted.clear()
        self._hints.forget()

    def _end(self, number: int, arrived: bytes | Sequence[int]) -> None:
        """End a job; ``arrived`` has a truth value for each key, or is empty if none has arrived."""
        job, _ = self._jobs.pop(number)
        now, keys, connection = self._clock(), job.keys, self._connection
        presence = None if connection is None else connection.presence
        learns = self.serving and presence is None
        if number in self._stale or len(arrived) != len(keys):
            self._stale.discard(number)
            arrived = bytes(len(keys))
        good = keys if arrived.count(1) == len(keys) else list(compress(keys, arrived))
        if self.serving and self._hints.follows:
            self._hints.stored(good, presence)
        if job.is_promotion:
            self.stats.promotions_active -= len(keys)
            self.stats.promotions += len(good)
            self.stats.promotions_failed += len(keys) - len(good)
            if now > job.deadline:
                self.stats.loads_overdue += len(keys) - len(good)
            if learns:
                self._index.end_load(keys, _ANYWHERE * len(keys), [not here for here in arrived], now)
        else:
            self.stats.cascades_active -= len(keys)
            self.stats.cascades += len(good)
            self.stats.cascades_failed += len(keys) - len(good)
            if learns and good:
                self._index.end_store(good, _ANYWHERE, [True] * len(good), now)
        self.stats.observe_job(now - job.submitted_at)
        self._finished.append(JobResult(number, len(good) == len(keys), good))

    # --------------------------------------------------------------------------------------- may block until a deadline

    def open(self, deadline: float) -> bool:
        link = self._link
        link.start()
        self._wait(
            lambda: self.serving or (link.tried.is_set() and self._connection is None and not link.queue), deadline
        )
        return self.serving

    def drain(self, deadline: float) -> bool:
        return self._wait(lambda: not self._jobs, deadline)

    def _wait(self, done: Callable[[], bool], deadline: float) -> bool:
        def polled() -> bool:
            self._poll()
            if self._out.records:
                self._flush()
            return done()

        return self._link.wait(polled, deadline - self._clock())

    def reset(self, deadline: float, revision: str | None = None, follow: bool = False) -> bool:
        self._poll()
        self._held.drop()
        self._stale.update(self._jobs)
        self._finished = [result._replace(success=False, successful_keys=()) for result in self._finished]
        self._forget()
        self._hints.cleared()
        if follow:
            if self._connection is not None and self._state is not None:
                place = (self._connection.instance, self._state[0], self._state[3])
                if self._superseded:
                    self._context.agreement.emptied = place[:2]
                self._enter(place)
            self._superseded = False
            self._change()
            return True
        self._weights = private_weights(secrets.token_hex(16)) if revision is None else revision_weights(revision)
        self._owed = True
        self._superseded = False
        self._last_reset = Record(Kind.RESET, seconds=self._clock(), text=self._weights.encode())
        self._write(self._last_reset)
        self._change()
        return self._wait(lambda: not self._owed, deadline)

    def shutdown(self, deadline: float) -> bool:
        if not self._closed:
            self._flush()
            self._closed = True
            self._change()
            self._link.stop()
        self._wait(self._is_idle, deadline)
        host, self._host = self._host, None
        if host is not None and host.leave(deadline - self._clock()) and self._jobs:
            self._wait(self._is_idle, self._clock() + PROOF_SECONDS)
        return not self._jobs

    def _is_idle(self) -> bool:
        return self._connection is None and not self._jobs and not self._link.queue

    def get_stats(self) -> TierStats:
        """Return counters of this engine, and the medium's statistics, which all engines share."""
        self.stats.queries, self.stats.lookups_late = self.stats.hits + self.stats.misses, self._index.late_lookups
        if self._host is not None:
            self.stats.io_restarts = self._host.restarts
        flags = {"available": 0, "writable": 0} if self._connection is not None and self._connection.is_silent else {}
        return self._medium.added_to(replace(self.stats, job_latency=list(self.stats.job_latency), **flags))


MACHINE_TIER = TierDefinition(
    options=MachineTierOptions,
    build=lambda options, context: MachineTier(context, options),
    persistent=True,
    admin=MachineAdmin,
)
