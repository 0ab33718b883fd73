"""A tier of the service: the jobs, lookups and notices of all engines of one namespace, in one place.

The tier gets as many loads at once as keep its medium busy. The others wait, and engines take turns by bytes.

A read of a block that another engine is reading does not go to the medium: it waits for that read, and its row gets a
copy of the verified bytes before the first engine has its row back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from xxhash import xxh3_128_digest

from tiering.api.keys import GROUP_BYTES, OffloadKey
from tiering.api.request import ReqContext
from tiering.machine.engine_jobs import Copies, Engine, EngineJob, FairLoads, LoadPart, SharedRead, copied
from tiering.machine.hosted_hints import HostedHints
from tiering.machine.messages import MAX_KEYS, SERVING, STORING, Kind, MessageError, Record
from tiering.machine.state_reports import RECOVERY_SECONDS, StateReports
from tiering.machine.words import START, State, checked_weights, revision_of
from tiering.runtime.pool import ThreadPool
from tiering.secondary.contract import JobResult, SecondaryTierManager, TierIntake, TransferJob
from tiering.secondary.tier_stats import TierStats

FEW_LOADS, MANY_LOADS, LOAD_BYTES = 128, 1024, 64 << 20
"""Blocks of loads that the tier has at least, and at most, and the bytes that decide in between."""

MOST_JOBS = 4096
"""Jobs that an engine may have in flight, or as many as it has rows; more break the protocol."""

MOST_LOOKUPS = 4096
"""Largest number of undecided lookups of one engine; one with more breaks the protocol."""


class HostedTier:
    """One tier of one namespace; the service's thread calls all methods.

    Args:
        tier: the tier.
        rows: the rows of all engines.
        groups: bytes of a block, per KV-cache group.
        copiers: threads that copy blocks between rows.
        wake: function that is called, from any thread, when copies have ended.
        clock: function that returns monotonic seconds.
        weights: state of the weights for which the tier was built.
        generation: number of the generation.
    """

    def __init__(
        self,
        tier: SecondaryTierManager,
        rows: np.ndarray,
        groups: Sequence[int],
        copiers: ThreadPool,
        wake: Callable[[], None],
        clock: Callable[[], float],
        weights: str,
        generation: int,
    ) -> None:
        self.tier = tier
        """The tier."""
        self.weights = weights
        """State of the weights that computed the tier's blocks."""
        self.reset_at = 0.0
        """Time of the reset to that state, as the engine with the latest one gave it; 0: that of the start."""
        self.generation = generation
        """Number that grows whenever all engines have to empty their rows, equal in all tiers."""
        self.resetting = False
        """True while the medium has not confirmed a reset."""
        self.failed = False
        """True if the tier broke its contract."""
        self.superseded = False
        """True if the tier has found a new common epoch."""
        self.ending = False
        """True once the service ends: no engine gets room for further stores."""
        self.engines: list[Engine] = []
        """The connected engines."""
        self.reads_saved = 0
        """Number of blocks that were copied from another engine's read."""
        self.stats = TierStats(available=0, writable=0)
        """Statistics at the last step."""
        self.epoch = ""
        """Common epochs of the stack's shared media, which the service sets."""
        self._rows = rows
        self._groups = groups
        self._copiers = copiers
        self._wake = wake
        self._clock = clock
        self._intake = TierIntake() if tier.traits.intake is None else tier.traits.intake
        self._part = tier.traits.max_load_blocks or MAX_KEYS
        self._loads = FairLoads(min(self._part, FEW_LOADS) * max(groups))
        """The loads that the tier does not have yet."""
        self._load_blocks = self._load_bytes = 0
        """Blocks and bytes of the loads that it has."""
        self._key_bytes = 0
        """Length of a key, the same in all engines of a namespace; 0 before the first."""
        self._numbers = 0
        self._jobs: dict[int, tuple[EngineJob, Sequence[int], dict[OffloadKey, bytes] | None]] = {}
        self._reading: dict[OffloadKey, SharedRead] = {}
        self._stores: deque[tuple[EngineJob, list[int]]] = deque()
        self._lookups: deque[tuple[Engine, Record, float]] = deque()
        self._done: deque[tuple[int, list[tuple[EngineJob, int, bool]]]] = deque()
        self.reports = StateReports()
        """The states that the engines have been sent."""
        self._recovers_until = clock() + RECOVERY_SECONDS
        self.pass_on: Callable[[EngineJob, Sequence[int]], Sequence[int]] = lambda _, positions: positions
        """Lets other tiers load what this one could not; returns the positions that none holds."""
        self.hints = HostedHints(tier)
        """Hot keys, and the blocks that have left the tier."""

    def attached(self, engine: Engine) -> bool:
        """Return True if blocks of ``engine`` and of the tier may meet."""
        return (
            engine.weights == self.weights
            and engine.generation == self.generation
            and not self.resetting
            and not self.failed
            and not engine.leaving
        )

    def leave(self, engine: Engine) -> None:
        """Drop what ``engine`` waits for; jobs that have begun go on."""
        for job, positions in [waiting for waiting in self._stores if waiting[0].engine is engine]:
            self._stores.remove((job, positions))
            self._end([(job, position, False) for position in positions])
        self._give_up(self._loads.drop(engine), engine)
        self._lookups = deque(lookup for lookup in self._lookups if lookup[0] is not engine)
        self.reports.drop(engine)
        self.hints.leave(engine)
        if engine in self.engines:
            self.engines.remove(engine)

    def take(self, engine: Engine, record: Record) -> None:
        """Process a record of an engine.

        Raises:
            MessageError: the record breaks the protocol.
        """
        kind = record.kind
        if record.keys and kind in (Kind.STORE, Kind.USED):  # what a warm start looks up may be a lie of any length
            self._key_bytes = self._key_bytes or len(record.keys[0])
            if len(record.keys[0]) != self._key_bytes:
                raise MessageError(f"keys have {len(record.keys[0])} bytes, others of the namespace {self._key_bytes}")
        if kind in (Kind.STORE, Kind.LOAD):
            self._take_job(engine, record)
        elif kind == Kind.LOOKUP:
            self._take_lookup(engine, record)
        elif kind == Kind.FOLLOWED:
            engine.generation = record.number
            if engine.follows:
                self.hints.follow()
            self.reports.drop(engine)
        elif kind == Kind.RESET:
            self._take_reset(engine, record)
        elif kind == Kind.TOUCH:
            if self.attached(engine):
                self.tier.touch(record.keys, self._request(engine, record), used=bool(record.flag))
        elif kind == Kind.USED:
            if self.attached(engine) and record.keys:
                self._intake.used(record.keys, self._request(engine, record))
        elif kind == Kind.USE:
            if self.attached(engine):
                self.hints.take_use(record)
        elif kind == Kind.GATHER:
            self.hints.take_question(engine, record)
        elif kind == Kind.FINISHED:
            released = record.keys if self.attached(engine) and self.engines == [engine] else ()  # others may use them
            self.tier.on_request_finished(self._request(engine, record), released)
        else:
            raise MessageError(f"an engine sent a record of kind {kind}")

    def _request(self, engine: Engine, record: Record) -> ReqContext:
        name = record.text[:1000].decode(errors="replace")
        return ReqContext(f"{engine.name}/{name}" if name else "")

    def _take_reset(self, engine: Engine, record: Record) -> None:
        """Follow an engine that was reset, unless another one was reset later: they may join in any order."""
        now = self._clock()
        engine.weights, engine.reset_at = checked_weights(record.text), min(record.seconds or now, now)
        if engine.weights == self.weights != START:
            self.reset_at = max(self.reset_at, engine.reset_at)
        elif engine.reset_at >= self.reset_at:
            self.move(engine)

    def move(self, engine: Engine) -> None:
        """Invalidate all blocks, for an engine with other weights; the tier cannot go back to :data:`START`."""
        if engine.weights == START:
            raise MessageError("a reset has no state of the weights")
        self._drop_waiting()
        self.hints.reset()
        self.weights, self.reset_at = engine.weights, engine.reset_at
        self.resetting = not self.tier.reset(self._clock(), revision_of(engine.weights))

    def follow(self, generation: int) -> None:
        """Enter a new common epoch; engines come back once they have emptied their rows."""
        self._drop_waiting()
        self.hints.reset()
        self.superseded = False
        self.generation = generation
        self.resetting = not self.tier.reset(self._clock(), None, True)

    def fail(self) -> None:
        """Serve no engine any more, because the tier broke its contract."""
        self.failed = True
        self.stats = replace(self.stats, available=0, writable=0)
        self._drop_waiting()
        while self._lookups:
            engine, record, _ = self._lookups.popleft()
            engine.send(Record(Kind.ANSWER, record.number, seconds=-1.0))
        for engine in self.engines:
            words = State(self.weights, self.epoch, 1, {}).text()
            engine.send(Record(Kind.STATE, self.generation, 0, text=words))

    def _drop_waiting(self) -> None:
        """End the stores and loads that have not begun; a load that comes later waits for no read that has."""
        while self._stores:
            job, positions = self._stores.popleft()
            self._end([(job, position, False) for position in positions])
        self._loads.clear()
        reading, self._reading = self._reading, {}
        for read in reading.values():
            waiting = read.followers if read.begun else [*read.followers, (read.job, read.position)]
            self._end([(job, position, False) for job, position in waiting])

    def _give_up(self, parts: Iterable[LoadPart], leaving: Engine | None = None) -> None:
        """End loads that have not begun; others that wait for such a read read by themselves."""
        for job, positions in parts:
            for position in positions:
                read = self._reading.get(job.keys[position])
                if read is None or not read.waits(job, position):
                    continue  # another engine reads it, or the tier has the read of another part
                del self._reading[job.keys[position]]
                self._end([(job, position, False)])
                for other, at in read.followers:
                    if other.engine is leaving:
                        self._end([(other, at, False)])
                    else:
                        self.load(other, [at])

    def _take_job(self, engine: Engine, record: Record) -> None:
        rows = np.asarray(record.rows, np.int64)
        groups = {int.from_bytes(key[-GROUP_BYTES:], "big") for key in record.keys}
        if not len(rows) or int(rows.max()) >= engine.num_rows or len({*record.rows}) < len(rows):
            raise MessageError("a job has rows beyond those of its engine, one row twice, or none")
        if max(groups) >= len(self._groups) or engine.jobs >= max(MOST_JOBS, engine.num_rows):
            raise MessageError("a job has keys of unknown groups, or there are too many jobs")
        now, count = self._clock(), len(record.keys)
        job = EngineJob(
            engine,
            record.number,
            record.keys,
            (rows + engine.first_row).tolist(),
            self._request(engine, record),
            now + max(0.0, record.seconds),
            record.kind == Kind.LOAD,
            bool(record.flag),
            bytearray(count),
            count,
        )
        engine.jobs += 1
        engine.counts.engine_rows_busy += count
        if not self.attached(engine):
            self._end([(job, position, False) for position in range(count)])
        elif job.is_load:
            self.load(job, range(count))
        else:
            admitted = self._intake.admit(job.keys, job.request, job.is_fill)
            positions = list(range(count)) if admitted is None else [int(position) for position in admitted]
            declined = set(range(count)).difference(positions)
            if positions:
                self._stores.append((job, positions))
            self._end([(job, position, False) for position in sorted(declined)])
            self._pump()

    def load(self, job: EngineJob, positions: Sequence[int]) -> None:
        """Read the blocks that no engine is reading, and wait for the others."""
        mine: list[int] = []
        for position in positions:
            key = job.keys[position]
            read = self._reading.get(key)
            if read is None:
                self._reading[key] = SharedRead(job, position)
                mine.append(position)
            elif not read.begun and self._loads.nbytes(job.engine) < self._loads.nbytes(read.job.engine):
                read.followers.append((read.job, read.position))  # this engine's turn comes earlier
                read.job, read.position = job, position
                mine.append(position)
            else:
                read.followers.append((job, position))
        job.engine.counts.engine_shared_reads += len(positions) - len(mine)
        for first in range(0, len(mine), self._part):
            part = mine[first : first + self._part]
            self._loads.add(LoadPart(job, part), job.nbytes(self._groups, part))
        self._pump_loads()

    def _pump_loads(self) -> None:
        """Submit loads in turn, as many as keep the medium busy."""
        while self._loads and (
            self._load_blocks < FEW_LOADS or (self._load_blocks < MANY_LOADS and self._load_bytes < LOAD_BYTES)
        ):
            job, positions = self._loads.take()
            mine = []
            for position in positions:
                read = self._reading.get(job.keys[position])
                if read is not None and read.waits(job, position):
                    read.begun = True
                    mine.append(position)
            if mine:
                self._load_blocks += len(mine)
                self._load_bytes += job.nbytes(self._groups, mine)
                self._submit(job, mine, load=True)

    def _pump(self) -> None:
        """Submit as many blocks of waiting stores as the tier has credit for."""
        while self._stores:
            wanted = sum(len(positions) for _, positions in self._stores)
            credit = self._intake.credit(wanted, 0.1)
            room = wanted if credit is None else int(credit)
            if room <= 0:
                return
            while self._stores and room > 0:
                job, positions = self._stores.popleft()
                if len(positions) > room:
                    self._stores.appendleft((job, positions[room:]))
                    positions = positions[:room]
                room -= len(positions)
                self._submit(job, positions, load=False)
            if credit is None:
                return

    def _submit(self, job: EngineJob, positions: Sequence[int], *, load: bool) -> None:
        self._numbers += 1
        order = TransferJob(
            self._numbers,
            [job.keys[position] for position in positions],
            np.array([job.rows[position] for position in positions], np.int64),
            load,
            job.request,
            self._clock(),
            job.is_fill,
            job.deadline,
        )
        if load:
            order.digests = {}
        self._jobs[self._numbers] = job, positions, order.digests
        (self.tier.submit_load if load else self.tier.submit_store)(order)

    def _finish(self, result: JobResult) -> None:
        """Take the result of a job of the tier, and begin the copies that wait for it."""
        job, positions, digests = self._jobs.pop(result.job_id)
        if job.is_load:
            self._load_blocks -= len(positions)
            self._load_bytes -= job.nbytes(self._groups, positions)
        keys = [job.keys[position] for position in positions]
        good = set(keys if result.success else ()) if result.successful_keys is None else set(result.successful_keys)
        ended: list[tuple[EngineJob, int, bool]] = []
        lacking: dict[EngineJob, list[int]] = {}
        copies: list[Copies] = []
        for position, key in zip(positions, keys, strict=True):
            done = key in good
            read = self._reading.get(key)
            followers: list[tuple[EngineJob, int]] = []
            if read is not None and read.is_of(job, position):
                del self._reading[key]
                followers = read.followers
            if done and followers:
                # The first engine has its row back after the copies.
                copies.append(Copies((job, position), followers, (digests or {}).get(key)))
            elif done or not job.is_load:
                ended.append((job, position, done))
            else:
                for other, at in ((job, position), *followers):
                    lacking.setdefault(other, []).append(at)
        for other, places in lacking.items():
            ended += [(other, at, False) for at in self.pass_on(other, places)]
        self._end(ended)
        if copies:
            refused = copied(copies, lambda *_: False)
            self._copiers.run(partial(self._copy, copies), lambda _: self._settle(len(copies), refused))

    def _copy(self, copies: Sequence[Copies]) -> None:
        """Copy rows; a thread of the copiers calls this method."""
        rows, groups = self._rows, self._groups

        def copy(copies: Copies, job: EngineJob, position: int) -> bool:
            source, at = copies.source
            key, target = job.keys[position], rows[job.rows[position]]
            size = groups[int.from_bytes(key[-GROUP_BYTES:], "big")]
            np.copyto(target[:size], rows[source.rows[at]][:size])
            # The engine of the source may have changed it since the read.
            return xxh3_128_digest(target[:size]) == copies.digest

        self._settle(len(copies), copied(copies, copy))

    def _settle(self, reads: int, ended: list[tuple[EngineJob, int, bool]]) -> None:
        self._done.append((reads, ended))
        self._wake()

    def _end(self, ended: Sequence[tuple[EngineJob, int, bool]]) -> None:
        """Note the outcomes of keys, and report the jobs that have ended."""
        for job, position, done in ended:
            job.arrived[position] = done
            job.left -= 1
            if not job.left:
                job.engine.jobs -= 1
                job.count_outcome()
                if job.is_load or all(job.arrived) or not (self.ending and job.engine.leaving):  # the next service's
                    job.engine.send(Record(Kind.RESULT, job.number, text=bytes(job.arrived)))

    def _take_lookup(self, engine: Engine, record: Record) -> None:
        if not record.keys:
            raise MessageError("a lookup has no keys")
        if sum(1 for lookup in self._lookups if lookup[0] is engine) >= MOST_LOOKUPS:
            raise MessageError("an engine has too many lookups")
        if not self._answer(engine, record):
            self._lookups.append((engine, record, self._clock() + min(record.seconds, 60.0)))

    def _answer(self, engine: Engine, record: Record) -> bool:
        """Answer a lookup, and return True if it was decided."""
        if not self.attached(engine):
            engine.send(Record(Kind.ANSWER, record.number, seconds=-1.0))
            return True
        held, undecided = self.tier.lookup_prefix(record.keys, self._request(engine, record))
        if not undecided:
            engine.send(Record(Kind.ANSWER, record.number, seconds=float(held)))
        return not undecided

    @property
    def busy(self) -> bool:
        """True if something may happen that nothing announces."""
        return bool(self._jobs or self._lookups or self._stores or self._loads or self.resetting or self.hints.busy)

    def step(self) -> None:
        """Collect results, answer lookups, submit stores, and send states."""
        while self._done:
            reads, ended = self._done.popleft()
            self.reads_saved += sum(done for _, _, done in ended) - reads
            self._end(ended)
        finished, now = list(self.tier.get_finished()), self._clock()
        # Before the results: what has left the tier may be there again by a store that one of them reports.
        self.hints.step(now, [engine for engine in self.engines if self.attached(engine)])
        for result in finished:
            self._finish(result)
        for _ in range(len(self._lookups)):
            engine, record, until = self._lookups.popleft()
            if now >= until:
                engine.send(Record(Kind.ANSWER, record.number, seconds=-1.0))
            elif not self._answer(engine, record):
                self._lookups.append((engine, record, until))
        self._pump()
        self._give_up(self._loads.overdue(now))
        self._pump_loads()
        if (end := self.tier.on_schedule_end()) is not None:
            if self.resetting and end.reset_done:
                self.resetting = False
            self.superseded = end.superseded
            self._want(list(end.wanted))
        self._report(now)

    def _want(self, wanted: list[OffloadKey]) -> None:
        for first in range(0, len(wanted), MAX_KEYS):
            for engine in self.engines:
                if self.attached(engine) and not engine.behind:
                    engine.send(Record(Kind.WANTED, keys=wanted[first : first + MAX_KEYS]))

    def _report(self, now: float) -> None:
        stats = self.stats = self.tier.get_stats()
        serving = bool(stats.available and not (self.resetting or (stats.recovering and now < self._recovers_until)))
        flags = SERVING * serving | STORING * (serving and bool(stats.writable))
        state = State(self.weights, self.epoch, int(not self.ending), {})
        self.reports.send(self.engines, now, self.generation, flags, state, stats)

    def waiting(self, engine: Engine) -> tuple[int, int]:
        """Return the number of blocks of stores, and of lookups, of ``engine`` that wait."""
        stores = sum(len(positions) for job, positions in self._stores if job.engine is engine)
        return stores, sum(asked is engine for asked, _, _ in self._lookups)

    @property
    def stores_left(self) -> int:
        """Blocks of stores that have not ended."""
        begun = sum(len(positions) for job, positions, _ in self._jobs.values() if not job.is_load)
        return begun + sum(len(positions) for _, positions in self._stores)

    @property
    def idle(self) -> bool:
        """True if no job is in flight."""
        return not self._jobs and not self._stores and not self._loads and not self._done
