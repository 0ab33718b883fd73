"""A medium and its I/O side in simulated time: blocks have no bytes, and a model times the jobs."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count, repeat
from typing import Any

from tiering.errors import StoreError
from tiering.medium.block_store import BlockIO, BlockStore, Done, Place, StoreProbe, StoreTraits
from tiering.medium.host import BATCH_UNIT_BYTES, SINGLE_UNIT_BYTES
from tiering.medium.layers.attempts import IoStats
from tiering.medium.layers.breaker import Breakers
from tiering.medium.side import IoTask
from tiering.replay.model import MediumModel
from tiering.replay.queues import JobQueue
from tiering.secondary.contract import TransferJob
from tiering.secondary.options import BlockTierOptions

SLOT_HEADER_BYTES = 4096
"""Bytes of a block's header on a simulated medium with slots, as on a local disk."""


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
        """True if places are names (a shared medium)."""
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
        at_once = options.depth.start
        self.loads = JobQueue(model.read_bytes_per_second, model.latency, at_once, bytes_ratio)
        self.stores = JobQueue(model.write_bytes_per_second, model.latency, at_once, bytes_ratio)
        self.load_depth = self.store_depth = at_once
        """Blocks moved at once. A simulation does not search, because its model has no depth that is best."""
        self.model = model
        """Speed and price of the medium."""
        self.bytes_ratio = bytes_ratio
        """Stored bytes by raw bytes, below 1 for a tier that compresses."""
        self.clock = clock
        self._order = count()
        self._tasks: list[tuple[float, int, IoTask, Any, BaseException | None]] = []

    def next_answer(self) -> float:
        """Return the time at which the next load or probe ends; infinity if none is under way."""
        end = self.loads.next_end
        return min(end, self._tasks[0][0]) if self._tasks else end

    def next_end(self) -> float:
        """Return the time at which the next job, task or probe ends; infinity if none is under way."""
        return min(self.stores.next_end, self.next_answer())

    @property
    def busy_bytes(self) -> int:
        """Bytes of stores that keep the medium busy."""
        return 2 * self.store_depth * (SINGLE_UNIT_BYTES if self.store.named else BATCH_UNIT_BYTES)

    def submit(self, job: TransferJob) -> None:
        loads, stores, stats = self.loads, self.stores, self.stats
        before = loads.blocks + stores.blocks
        if job.is_promotion:
            loads.submit(job, self.clock.now)
            ends, request = self.clock.load_ends, job.req_context.req_id
            ends[request] = max(loads.free_at, ends.get(request, 0.0))
        else:
            stores.submit(job, self.clock.now)
        stats.requests += loads.blocks + stores.blocks - before
        stats.read_bytes, stats.read_seconds = loads.moved_bytes, loads.moved_seconds
        stats.written_bytes, stats.written_seconds = stores.moved_bytes, stores.moved_seconds

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
        heapq.heappush(self._tasks, (end, next(self._order), task, result, error))

    def poll(self) -> Sequence[TransferJob]:
        now, tasks = self.clock.now, self._tasks
        while tasks and tasks[0][0] <= now:
            _, _, task, result, error = heapq.heappop(tasks)
            task.on_done(result, error)
        loaded, stored = self.loads.take_ended(now), self.stores.take_ended(now)
        for job in loaded:
            if Done.DONE in job.outcomes:
                job.outcomes = [Done.DONE if there else Done.ABSENT for there in self.store.held(job.places)]
        for job in stored:
            if Done.DONE in job.outcomes:
                self.store.hold(job.places)
        return loaded + stored

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
        ends = (end for end, *_ in self._tasks)
        self.clock.now = max([self.clock.now, self.loads.last_end, self.stores.last_end, *ends])
        return True

    def close(self, deadline: float) -> bool:
        """Return True: there are no threads."""
        return True

    def join(self) -> None:
        """Return at once: there are no threads."""
