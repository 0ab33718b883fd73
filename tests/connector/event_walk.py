"""A router's index follows the KV events of an engine over tiers, and must always match each tier.

The engine's scheduler is the mini engine's; the manager, the tiers and their indexes are real. Copies and media are
doubles that end late, out of order, and sometimes in failure.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from examples.mini_engine.kv_cache import KVCacheManager
from examples.mini_engine.request import Request
from examples.mini_engine.scheduler import ConnectorOutput, Scheduler, SchedulerOutput
from tests.block_tier.fakes import BLOCK_BYTES, FakeIo, FakeStore, make_namespace
from tests.connector.fakes import make_spec
from tests.connector.simulation import BLOCK, SimWorker
from tiering.api.keys import OffloadKey, get_offload_block_hash, get_offload_group_idx
from tiering.api.namespace import Namespace
from tiering.block_tier.tier import BlockTier
from tiering.connector.event_types import BlockRemoved, BlockStored, KVCacheEvent
from tiering.connector.metadata import OffloadingWorkerMetadata
from tiering.connector.scheduler import OffloadingConnectorScheduler
from tiering.errors import CorruptBlockError, TemporaryStoreError
from tiering.index.shared import SharedIndex
from tiering.index.slots import SlotIndex
from tiering.manager.manager import TieringOffloadingManager
from tiering.medium.block_store import Done, Outcome, Place
from tiering.primary.manager import CPUPrimaryTierOffloadingManager
from tiering.secondary.contract import TierContext
from tiering.secondary.options import BlockTierOptions
from tiering.testing.clock import FakeClock

ROWS = 12
SLOTS = 20
TierName = tuple[str | None, str | None, str | None]
"""Medium, locality and ownership of an event."""

Name = tuple[int | None, bytes | int]
"""KV-cache group and hash."""

CPU: TierName = ("CPU", "LOCAL", None)
DISK: TierName = ("STORAGE", "LOCAL", "disk")
BUCKET: TierName = ("STORAGE", "REMOTE", "bucket")


class RouterIndex:
    """An index that applies all events in their order and counts references to each hash of each tier.

    Attributes:
        blocks: own hash of a block → all hashes that its latest event announced.
        bare: number of announcements without tokens, by KV-cache group.
        described: number of announcements with tokens, by KV-cache group.

    Args:
        texts: hash → (parent, tokens) of the prompts. Every announcement with tokens must agree with them.
    """

    def __init__(self, texts: Mapping[bytes, tuple[bytes | None, list[int]]]) -> None:
        self.references: dict[TierName, Counter[Name]] = defaultdict(Counter)
        self.blocks: dict[TierName, dict[Name, list[Name]]] = defaultdict(dict)
        self.bare: Counter[int | None] = Counter()
        self.described: Counter[int | None] = Counter()
        self._texts = texts

    def apply(self, events: Sequence[KVCacheEvent]) -> None:
        for event in events:
            tier: TierName = (event.medium, event.locality, event.ownership)
            references, blocks = self.references[tier], self.blocks[tier]
            names = [(event.group_idx, name) for name in event.block_hashes]
            if isinstance(event, BlockRemoved):
                for name in names:
                    assert references[name] > 0, f"{tier} lost a block that it never had"
                    references[name] -= 1
                    blocks.pop(name, None)
                self.references[tier] = +references
            else:
                references.update(names)
                assert names[-1] not in blocks, f"{tier} got a block twice"
                blocks[names[-1]] = names
                self._check_text(event)

    def _check_text(self, event: BlockStored) -> None:
        if not event.token_ids:
            assert (len(event.block_hashes), event.block_size, event.parent_block_hash) == (1, 0, None)
            self.bare[event.group_idx] += 1
            return
        self.described[event.group_idx] += 1
        assert event.block_size == BLOCK
        parent = event.parent_block_hash
        for number, name in enumerate(event.block_hashes):
            assert isinstance(name, bytes)
            assert self._texts[name] == (parent, event.token_ids[number * BLOCK : (number + 1) * BLOCK])
            parent = name

    def check(self, tier: TierName, held: set[OffloadKey]) -> None:
        """Raise unless the index has exactly the blocks that the tier holds, and no other hashes."""
        assert set(self.blocks[tier]) == {(get_offload_group_idx(key), get_offload_block_hash(key)) for key in held}, (
            tier
        )
        assert +self.references[tier] == Counter(name for block in self.blocks[tier].values() for name in block), tier


@dataclass
class Media:
    """The state that outlives an engine: slots of its disk (key, namespace) and names in its bucket."""

    slots: dict[Place, tuple[OffloadKey, bytes]] = field(default_factory=dict)
    disk: FakeStore = field(default_factory=FakeStore)
    bucket: FakeStore = field(default_factory=FakeStore)


class LateIo(FakeIo):
    """An I/O side that ends jobs at random; some of their blocks fail."""

    def __init__(
        self, store: FakeStore, clock: FakeClock, options: BlockTierOptions, media: Media, rng: random.Random
    ) -> None:
        super().__init__(store, clock, options.breaker)
        self._media, self._rng = media, rng

    def progress(self, chance: float) -> None:
        self.run_tasks()
        for job in list(self.jobs):
            if self._rng.random() < chance:
                outcomes = [
                    self._end(job.is_promotion, *block, job.fingerprint)
                    for block in zip(job.moved, job.places, strict=True)
                ]
                self.finish(job.job_id, outcomes)

    def drain(self, deadline: float) -> bool:
        self.progress(0.7)
        return super().drain(deadline)

    def _end(self, load: bool, key: OffloadKey, place: Place, fingerprint: bytes) -> Outcome:
        bad = self._rng.random()
        shared = isinstance(place, str)
        if bad < 0.05:
            return TemporaryStoreError("busy")
        if not load:
            if shared:
                self._media.bucket.held.add(place)
            else:
                self._media.slots[place] = (key, fingerprint)
            return Done.DONE
        if bad < 0.1:
            self._media.bucket.held.discard(place)
            self._media.slots.pop(place, None)
            return CorruptBlockError("flipped")
        there = place in self._media.bucket.held if shared else self._media.slots.get(place) == (key, fingerprint)
        return Done.DONE if there else Done.ABSENT


class Disk(BlockTier):
    """A tier of slots that recovers the blocks which an earlier engine left on the disk."""

    media: Media

    def on_opened(self, namespace: Namespace) -> None:
        assert isinstance(self.index, SlotIndex)
        mine = {slot: key for slot, (key, owner) in self.media.slots.items() if owner == namespace.fingerprint}
        self.index.add_free(np.array([slot for slot in range(SLOTS) if slot not in mine], np.int64))
        self.index.begin_recovery()
        slots = np.array(list(mine), np.int64)
        self.announce_stored(
            self.index.merge(list(mine.values()), slots, np.arange(1, len(slots) + 1, dtype=np.uint64))
        )
        self.index.end_recovery()


class EventWalk:
    """One engine after another over the same media, driven by one seeded random generator."""

    def __init__(
        self,
        seed: int,
        *,
        factor: int = 1,
        bucket: bool = False,
        windows: tuple[int | None, ...] = (None,),
        keep_secondary: bool = False,
        max_tokens: int = 1 << 20,
    ) -> None:
        self.rng = random.Random(seed)
        self.keep_secondary, self.max_tokens = keep_secondary, max_tokens
        self.factor, self.windows, self.with_bucket = factor, windows, bucket
        self.clock = FakeClock()
        self.media = Media()
        self.texts: dict[bytes, tuple[bytes | None, list[int]]] = {}
        self.count = 0
        self.stored: Counter[TierName] = Counter()
        self.removed: Counter[TierName] = Counter()
        self.asked: list[Request] = []
        self.start()

    def start(self) -> None:
        """Begin with an empty engine and an empty index."""
        self.index = RouterIndex(self.texts)
        view = np.zeros((ROWS, BLOCK_BYTES), np.uint8).data
        namespace = make_namespace(group_bytes=(BLOCK_BYTES,) * len(self.windows))
        self.ios: list[LateIo] = []
        self.disk = self._tier(view, namespace, "disk", SlotIndex(SLOTS), self.media.disk)
        tiers = [self.disk]
        if self.with_bucket:
            self.bucket = self._tier(view, namespace, "bucket", SharedIndex(absent_ttl=2.0), self.media.bucket)
            tiers.append(self.bucket)
        primary = CPUPrimaryTierOffloadingManager(view, enable_events=True)
        self.manager = TieringOffloadingManager(
            primary, tiers, enable_events=True, clock=self.clock, keep_secondary=self.keep_secondary
        )
        spec = make_spec(
            *self.windows,
            gpu_block_size=BLOCK,
            block_size=BLOCK * self.factor,
            manager=self.manager,  # type: ignore[arg-type]
            offload_prompt_only=False,
            self_describing_kv_events=True,
        )
        self.connector = OffloadingConnectorScheduler(spec, enable_kv_cache_events=True, clock=self.clock)
        self.connector.events.snapshots.max_tokens = self.max_tokens
        for tier in tiers:
            assert tier.open(self.clock() + 1)
        self.scheduler = Scheduler(
            KVCacheManager(24 * len(self.windows), BLOCK, self.windows),
            self.connector,
            max_batch_tokens=24,
            max_running=3,
        )
        self.worker = SimWorker(self.factor, self.rng, defaultdict(lambda: (0, "")), defaultdict(lambda: (0, "")))

    def _tier(
        self, view: memoryview, namespace: Namespace, name: str, index: SlotIndex | SharedIndex, store: FakeStore
    ) -> BlockTier:
        options = BlockTierOptions(type="fake")
        io = LateIo(store, self.clock, options, self.media, self.rng)
        self.ios.append(io)
        context = TierContext(name, view, (BLOCK_BYTES,) * len(self.windows), namespace, self.clock, enable_events=True)
        context = replace(context, distance="network" if index.shared else "machine")
        if index.shared:
            return BlockTier(context, options, store, index, place_prefix=lambda space: f"{space.epoch.hex()}/", io=io)
        tier = Disk(context, options, store, index, io=io)
        tier.media = self.media
        return tier

    def run(self, steps: int, *, resets: float = 0.0) -> None:
        for _ in range(steps):
            self._disturb()
            if self.rng.random() < resets:
                self.scheduler.reset()
            self.step()

    def _disturb(self) -> None:
        if len(self.scheduler.requests) < 5 and self.rng.random() < 0.5:
            self.count += 1
            stem = [self.rng.randrange(4)] * self.rng.randrange(4, 40)
            prompt = stem + [self.rng.randrange(3) for _ in range(self.rng.randrange(1, 12))]
            self.asked.append(Request(f"r{self.count}", prompt, max_tokens=self.rng.randrange(1, 10)))
            self.scheduler.add(self.asked[-1])
        if self.scheduler.requests and self.rng.random() < 0.05:
            self.scheduler.abort(self.rng.choice(list(self.scheduler.requests)))

    def step(self) -> None:
        self.clock.advance(1.0)
        output = self.scheduler.schedule()
        self.worker.before_step(output.connector_metadata)
        self.worker.progress(0.3)
        self.worker.start(output.connector_metadata)
        self.worker.defer(output.connector_metadata)
        self.worker.progress(0.4)
        self.scheduler.update(output, self._sample(output), self._report())
        for io in self.ios:
            io.progress(0.4)
        self._read_texts()
        events = self.connector.take_events()
        self.stored.update(
            (event.medium, event.locality, event.ownership) for event in events if isinstance(event, BlockStored)
        )
        self.removed.update(
            (event.medium, event.locality, event.ownership) for event in events if isinstance(event, BlockRemoved)
        )
        self.index.apply(events)
        self.check()

    def check(self) -> None:
        self.index.check(CPU, set(self.manager.primary_tier.readable))
        assert isinstance(self.disk.index, SlotIndex)
        self.index.check(DISK, set(self.disk.index.held))
        if self.with_bucket:
            self.index.check(BUCKET, set(self.bucket._events._announced or ()))

    def _sample(self, output: SchedulerOutput) -> dict[str, tuple[int, int, float]]:
        requests = (self.scheduler.requests[name] for name in output.num_scheduled_tokens)
        done = [request for request in requests if request.num_computed_tokens == request.num_tokens]
        return {request.request_id: (sum(request.all_token_ids) % 3, 0, 0.0) for request in done}

    def _report(self) -> ConnectorOutput:
        worker = self.worker
        report, worker.report = worker.report, OffloadingWorkerMetadata()
        invalid, worker.invalid = worker.invalid, set()
        received, worker.received = worker.received, set()
        return ConnectorOutput(None, received, invalid, None, report)

    def _read_texts(self) -> None:
        for request in self.asked:
            parent = None
            for number, name in enumerate(request.block_hashes):
                self.texts[name] = (parent, request.all_token_ids[number * BLOCK : (number + 1) * BLOCK])
                parent = name
        self.asked = [request for request in self.asked if request.request_id in self.scheduler.requests]
