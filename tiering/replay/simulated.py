"""A medium and its I/O side in simulated time: blocks have no bytes.

The end of a job is certain when it is submitted. :mod:`tiering.replay.model` describes the duration of a job.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count, repeat

from tiering.errors import OverdueError, StoreError
from tiering.medium.block_store import BlockIO, BlockStore, Done, Outcome, Place, StoreProbe, StoreTraits
from tiering.medium.host import BATCH_UNIT_BYTES, SINGLE_UNIT_BYTES
from tiering.medium.layers.attempts import IoStats
from tiering.medium.layers.breaker import Breakers
from tiering.medium.side import IoTask
from tiering.replay.model import MediumModel
from tiering.secondary.contract import TransferJob
from tiering.secondary.options import BlockTierOptions

SLOT_HEADER_BYTES = 4096
"""Bytes of a block's header on a simulated medium with slots, as on a local disk."""


_Event = tuple[float, int, Callable[[], TransferJob | None]]
"""The end of a job or a task: its time, its number, and a function that ends it and returns the job."""


class Clock:
    """Simulated time in seconds, which all media of a replay share; the replay sets :attr:`now`."""

    __slots__ = ("load_ends", "now", "read")

    def __init__(self) -> None:
        self.now = 0.0
        """The present time, in seconds."""
        self.load_ends: dict[str, float] = {}
        """Id of each request whose loads have begun since the replay last looked → the time at which they end."""
        self.read: Callable[[], float] = partial(getattr, self, "now")
        """Function that returns the present time."""


class SimulatedStore(BlockStore):
    """A medium that remembers names of blocks and documents, and no bytes.

    Args:
        medium: name of the medium; the replay counts hits by this name.
        named: True if places are names (a shared medium), which :meth:`probe` answers for.
        ttl: seconds after which a named block expires; None: never.
        clock: simulated time.
    """

    def __init__(self, medium: str, *, named: bool, ttl: float | None, clock: Clock) -> None:
        self._traits = StoreTraits(medium, header_bytes=SLOT_HEADER_BYTES)
        self.named = named
        self._ttl = math.inf if ttl is None else ttl
        self._clock = clock
        self._stored: dict[Place, float] = {}
        self._documents: dict[str, bytes] = {}

    @property
    def traits(self) -> StoreTraits:
        return self._traits

    def hold(self, places: Sequence[Place]) -> None:
        """Record that blocks were written."""
        if not self.named:
            return
        if self._ttl == math.inf:
            self._stored.update(dict.fromkeys(places, self._clock.now))
            return
        # A block that is written again counts as new: the dictionary is in the order of the writes.
        deque(map(self._stored.pop, places, repeat(None)), maxlen=0)
        self._stored.update(dict.fromkeys(places, self._clock.now))
        self._expire()

    def held(self, places: Sequence[Place]) -> list[bool]:
        """Return True for each block that is there.

        A medium with slots is asked for blocks that it holds only.
        """
        if not self.named:
            return [True] * len(places)
        now, ttl = self._clock.now, self._ttl
        if ttl == math.inf:
            return list(map(self._stored.__contains__, places))
        return [written is not None and written + ttl > now for written in map(self._stored.get, places)]

    @property
    def blocks(self) -> int:
        """Number of named blocks."""
        self._expire()
        return len(self._stored)

    def _expire(self) -> None:
        if self._ttl == math.inf:
            return
        oldest = self._clock.now - self._ttl
        while self._stored and (place := next(iter(self._stored))) is not None and self._stored[place] <= oldest:
            del self._stored[place]

    def put_one(self, block: BlockIO) -> None:
        self.hold((block.place,))

    def get_one(self, block: BlockIO) -> Done:
        return Done.DONE if self.held((block.place,))[0] else Done.ABSENT

    def probe(self, places: Sequence[Place]) -> StoreProbe:
        return StoreProbe(tuple(self.held(places)))

    def read_document(self, name: str) -> bytes | None:
        return self._documents.get(name)

    def list_documents(self, prefix: str) -> list[str]:
        return [name for name in self._documents if name.startswith(prefix)]

    def write_document(self, name: str, data: bytes) -> None:
        self._documents[name] = data


class SimulatedIo:
    """An I/O side that moves nothing: a job ends once the medium's model has had time for it.

    The jobs of one direction are moved one after the other.

    Args:
        name: name of the tier.
        store: the medium.
        model: speed of the medium.
        options: options of the tier.
        bytes_ratio: stored bytes by raw bytes, below 1 for a tier that compresses.
        clock: simulated time.
    """

    def __init__(
        self,
        name: str,
        store: SimulatedStore,
        model: MediumModel,
        options: BlockTierOptions,
        bytes_ratio: float,
        clock: Clock,
    ) -> None:
        self.store: SimulatedStore = store
        self.breakers = Breakers.build(options.breaker, name=name, clock=clock.read, jitter=lambda: 1.0)
        self.stats = IoStats()
        self.load_depth = self.store_depth = options.depth.start
        """Blocks moved at once. A simulation does not search, because its model has no depth that is best."""
        self.model = model
        self.bytes_ratio = bytes_ratio
        self.clock = clock
        self.stored_blocks = 0
        """Number of blocks that were written, or are being written."""
        self._free_at = {True: 0.0, False: 0.0}
        """Time at which all loads (True), or all stores (False), that were submitted will have been moved."""
        self._numbers = count()
        self._answers: list[_Event] = []
        """Ends of loads and tasks, as a heap."""
        self._stores: list[_Event] = []
        """Ends of stores, as a heap."""

    def next_answer(self) -> float:
        """Return the time at which the next load or probe ends; infinity if none is under way."""
        return self._answers[0][0] if self._answers else math.inf

    def next_end(self) -> float:
        """Return the time at which the next job, task or probe ends; infinity if none is under way."""
        return min(self._stores[0][0], self.next_answer()) if self._stores else self.next_answer()

    @property
    def busy_bytes(self) -> int:
        """Bytes of stores that keep the medium busy."""
        return 2 * self.store_depth * (SINGLE_UNIT_BYTES if self.store.named else BATCH_UNIT_BYTES)

    def submit(self, job: TransferJob) -> None:
        """Add a job, which begins when those before it have been moved, or fails at its deadline."""
        now, load = self.clock.now, job.is_promotion
        events = self._answers if load else self._stores
        start = max(now, self._free_at[load])
        if start < job.deadline:
            self._free_at[load] = start + self._move(job)
            self._push(events, self._free_at[load], partial(self._ended, job, Done.DONE))
        else:
            overdue = OverdueError(f"the {job.verb} waited longer than the tier's deadline")
            self._push(events, max(job.deadline, now), partial(self._ended, job, overdue))
        if load:
            ends, request = self.clock.load_ends, job.req_context.req_id
            ends[request] = max(self._free_at[True], ends.get(request, 0.0))

    def _move(self, job: TransferJob) -> float:
        """Count the bytes of a job, and return its duration in seconds."""
        stats, blocks, moved = self.stats, len(job.moved), int(sum(job.sizes) * self.bytes_ratio)
        bandwidth = self.model.read_bytes_per_second if job.is_promotion else self.model.write_bytes_per_second
        waves = math.ceil(blocks / self.load_depth)
        seconds = max(self.model.latency + moved / bandwidth, waves * self.model.latency)
        stats.requests += blocks
        if job.is_promotion:
            stats.read_bytes += moved
            stats.read_seconds += seconds
        else:
            stats.written_bytes += moved
            stats.written_seconds += seconds
            self.stored_blocks += blocks
        return seconds

    def _ended(self, job: TransferJob, outcome: Outcome) -> TransferJob:
        job.outcomes = [outcome] * len(job.moved)
        if outcome is Done.DONE and job.is_promotion:
            job.outcomes = [Done.DONE if there else Done.ABSENT for there in self.store.held(job.places)]
        elif outcome is Done.DONE:
            self.store.hold(job.places)
        return job

    def run(self, task: IoTask) -> None:
        result, error = None, None
        if task.name == "probe":
            self.stats.requests += 1
        try:
            result = task.run()
        except StoreError as failure:
            error = failure
        if task.name == "epoch":
            # A look for a new common epoch, at a random time, which finds none: an event of its own would make two
            # replays of the same trace differ.
            task.on_done(result, error)
            return
        end = self.clock.now + (self.model.latency if task.name == "probe" else 0.0)
        self._push(self._answers, end, partial(task.on_done, result, error))

    def _push(self, events: list[_Event], end: float, finish: Callable[[], TransferJob | None]) -> None:
        heapq.heappush(events, (end, next(self._numbers), finish))

    def poll(self) -> Sequence[TransferJob]:
        ended: list[TransferJob] = []
        for events in (self._answers, self._stores):
            while events and events[0][0] <= self.clock.now:
                if (job := heapq.heappop(events)[2]()) is not None:
                    ended.append(job)
        return ended

    def wait(self, timeout: float) -> bool:
        """Let simulated time pass until something has ended, ``timeout`` seconds at most."""
        end = self.next_end()
        self.clock.now = max(self.clock.now, min(end, self.clock.now + timeout))
        return end <= self.clock.now

    def start(self, deadline: float, *, lookups: bool) -> None:
        """Do nothing: there are no threads."""

    @property
    def hanging_stores(self) -> int:
        """None: stores never stall."""
        return 0

    def drop_waiting(self) -> None:
        """Do nothing: a replay ends no tier early."""

    def drain(self, deadline: float) -> bool:
        """Let time pass until all jobs have ended, whatever the deadline is, and return True."""
        self.clock.now = max([self.clock.now, *(end for end, *_ in [*self._answers, *self._stores])])
        return True

    def close(self, deadline: float) -> bool:
        """Return True: there are no threads."""
        return True

    def join(self) -> None:
        """Return at once: there are no threads."""
