"""The memory tier keeps blocks in a dictionary of this process.

It serves tests and demos, and it is the smallest example of a store.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from tiering import ConfigError, CorruptBlockError
from tiering.tier import (
    HEADER_BYTES,
    BlockIO,
    BlockStore,
    BlockTier,
    BlockTierOptions,
    Done,
    FrameHeader,
    IoTask,
    KnownNamespace,
    Namespace,
    OffloadKey,
    Place,
    Size,
    SlotIndex,
    SlotOptions,
    StoreTraits,
    TierAdmin,
    TierContext,
    TierDefinition,
    TierOptions,
    UnsupportedError,
    parse_header,
)

Frame = NDArray[np.uint8]


class MemoryOptions(BlockTierOptions, SlotOptions):
    """The options of the memory tier in a stack file."""

    unsupported: ClassVar[Mapping[str, str]] = {
        "compression": "its slots have one size, so a block that shrinks gains nothing",
        "ttl": "its blocks leave by eviction when room is needed; set capacity instead",
        "lookup_deadline": "it answers lookups at once",
    }

    capacity: Size = 1 << 30
    """Bytes that the tier's slots may take, headers included; default: 1 GiB."""
    share: str | None = None
    """Name of a memory that outlives its tier; default: none.

    A later tier of this process with the same name recovers the blocks of the earlier one.
    """


class MemoryMedium:
    """The content of a memory store."""

    def __init__(self) -> None:
        self.frames: dict[Place, Frame] = {}
        """Header and payload of each block, by slot."""
        self.documents: dict[str, bytes] = {}
        self.lock = threading.Lock()
        """Guards both dictionaries."""


_shared: dict[str, MemoryMedium] = {}


def shared_medium(name: str) -> MemoryMedium:
    """Return the process-wide medium called ``name``, the same one until :func:`drop_medium`."""
    return _shared.setdefault(name, MemoryMedium())


def drop_medium(name: str) -> None:
    """Drop the process-wide medium called ``name``."""
    _shared.pop(name, None)


class MemoryStore(BlockStore):
    """A block store in the memory of this process.

    A put replaces a frame as a whole; a get that has already found the old frame still reads the old frame.

    Args:
        memory: the memory to use; default: a new one.
    """

    traits = StoreTraits(medium="MEMORY")

    def __init__(self, memory: MemoryMedium | None = None) -> None:
        self.memory = memory or MemoryMedium()

    def put_one(self, block: BlockIO) -> None:
        header = len(block.header)
        frame = np.empty(header + len(block.payload), np.uint8)
        np.copyto(frame[:header], np.frombuffer(block.header, np.uint8))
        np.copyto(frame[header:], np.frombuffer(block.payload, np.uint8))
        with self.memory.lock:
            self.memory.frames[block.place] = frame

    def get_one(self, block: BlockIO) -> Done:
        with self.memory.lock:
            frame = self.memory.frames.get(block.place)
        if frame is None:
            return Done.ABSENT
        header = len(block.header)
        if len(frame) != header + len(block.payload):
            raise CorruptBlockError(f"place {block.place} holds {len(frame)} bytes, not {header + len(block.payload)}")
        np.copyto(np.frombuffer(block.header, np.uint8), frame[:header])
        np.copyto(np.frombuffer(block.payload, np.uint8), frame[header:])
        return Done.DONE

    def read_document(self, name: str) -> bytes | None:
        with self.memory.lock:
            return self.memory.documents.get(name)

    def write_document(self, name: str, data: bytes) -> None:
        with self.memory.lock:
            self.memory.documents[name] = bytes(data)

    def list_documents(self, prefix: str) -> Iterable[str]:
        with self.memory.lock:
            return [name for name in self.memory.documents if name.startswith(prefix)]

    def headers(self) -> dict[Place, FrameHeader]:
        """Return the header of each slot whose header can be parsed."""
        with self.memory.lock:
            frames = dict(self.memory.frames)
        parsed = {place: parse_header(memoryview(frame[:HEADER_BYTES].tobytes())) for place, frame in frames.items()}
        return {place: header for place, header in parsed.items() if isinstance(header, FrameHeader)}


class MemoryTier(BlockTier):
    """A tier of slots in memory, with eviction.

    At its opening, the tier recovers the blocks that an earlier tier left in the same memory.

    Raises:
        ConfigError: ``capacity`` is below one block.
    """

    index: SlotIndex
    store: MemoryStore

    def __init__(self, context: TierContext, options: MemoryOptions) -> None:
        memory = None if options.share is None else shared_medium(options.share)
        store = MemoryStore(memory)
        slot_bytes = max(context.group_bytes) + store.traits.header_bytes
        num_slots = options.capacity // slot_bytes
        if not num_slots:
            raise ConfigError(
                f"tier {context.name}: capacity {options.capacity} is below one block of {slot_bytes} bytes; raise it"
            )
        watermarks = {"high_watermark": options.high_watermark, "low_watermark": options.low_watermark}
        super().__init__(context, options, store, SlotIndex(num_slots, eviction=options.eviction, **watermarks))
        self._recovered = False

    @property
    def recovering(self) -> bool:
        """True until the slots are known."""
        return not self._recovered

    def open(self, deadline: float) -> bool:
        serving = super().open(deadline)
        if serving:
            self.wait(lambda: self._recovered, deadline)
        return serving

    def on_opened(self, namespace: Namespace) -> None:
        fingerprint = namespace.fingerprint
        self.io.run(IoTask("recover", lambda: self._find(fingerprint), partial(self._recover, fingerprint)))

    def _find(self, fingerprint: bytes) -> dict[OffloadKey, tuple[int, int]]:
        """Return slot and sequence of each recovered block, the newest first."""
        headers = [
            (header.sequence, header.key, place)
            for place, header in self.store.headers().items()
            if header.fingerprint == fingerprint
        ]
        newest: dict[OffloadKey, tuple[int, int]] = {}
        for sequence, key, place in sorted(headers, key=lambda found: found[0], reverse=True):
            if key is not None and isinstance(place, int) and place < self.index.num_slots:
                newest.setdefault(key, (place, sequence))
        return newest

    def _recover(
        self, fingerprint: bytes, found: dict[OffloadKey, tuple[int, int]] | None, error: BaseException | None
    ) -> None:
        empty = np.ones(self.index.num_slots, np.bool_)
        # A reset may have happened since: the recovered blocks belong to an older epoch then.
        if found and self.namespace is not None and fingerprint == self.namespace.fingerprint:
            slots = np.array([slot for slot, _ in found.values()], np.int64)
            sequences = np.array([sequence for _, sequence in found.values()], np.uint64)
            empty[slots] = False
            self.announce_stored(self.index.merge(list(found), slots, sequences))
        self.index.add_free(np.flatnonzero(empty))
        self._recovered = True


def build(options: MemoryOptions, context: TierContext) -> MemoryTier:
    """Return a memory tier that is not open yet.

    Raises:
        ConfigError: ``capacity`` is below one block.
    """
    return MemoryTier(context, options)


class MemoryAdmin(TierAdmin):
    """Administration of a memory tier, whose blocks live in the engine's process."""

    @property
    def place(self) -> str:
        return "the memory of the engine's process"

    async def namespaces(self) -> list[KnownNamespace]:
        raise UnsupportedError(f"the tier {self.name} cannot list its blocks: they are in the memory of its engine")

    @contextlib.contextmanager
    def scratch(self, capacity: int) -> Iterator[TierOptions | None]:
        yield self.options.model_copy(update={"share": None, "capacity": capacity})


MEMORY_TIER = TierDefinition(
    options=MemoryOptions,
    build=build,
    persistent=False,
    location=lambda options: options.share,
    distance="process",
    admin=MemoryAdmin,
)
