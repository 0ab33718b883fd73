"""Layer for fault injection: failures of a medium, on command or at random, repeatable from a seed."""

from __future__ import annotations

import enum
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from xxhash import xxh3_64_intdigest

from tiering.errors import DeviceError, OutOfSpaceError, PermanentStoreError, StoreError, TemporaryStoreError
from tiering.medium.block_store import BlockIO, BlockStore, Done, Outcome, Place
from tiering.medium.layers.layer import StoreLayer


class Fault(enum.Enum):
    """Fault of one block's I/O."""

    TEMPORARY = "temporary"
    """Throttled or reset: no bytes are moved."""
    PERMANENT = "permanent"
    """No permission, or the medium is gone: no bytes are moved."""
    DEVICE = "device"
    """EIO at the block's place: no bytes are moved."""
    OUT_OF_SPACE = "out of space"
    """ENOSPC for puts: no bytes are written; a get succeeds."""
    BIT_FLIP = "bit flip"
    """One bit of header or payload is wrong on the medium (put) or on the way (get), without an error."""
    TRUNCATE = "truncate"
    """The second half of the payload is missing, without an error."""
    SWAP = "swap"
    """Misdirected write (put) or read (get): another block's frame is at the place, without an error."""
    TORN = "torn"
    """A put writes the first half and fails; a get fills half of the row with wrong bytes and fails."""
    HANG = "hang"
    """The call waits until :meth:`ChaosLayer.release`, then succeeds."""
    DELAY = "delay"
    """The call takes ``delay`` seconds, then succeeds."""


@dataclass(frozen=True, slots=True)
class ChaosPlan:
    """Probabilities of faults per attempt on a block; the remainder to 1 is success."""

    puts: Mapping[Fault, float] = field(default_factory=dict)
    """Probability of each fault of a put."""
    gets: Mapping[Fault, float] = field(default_factory=dict)
    """Probability of each fault of a get."""
    delay: float = 0.01
    """Seconds that :attr:`Fault.DELAY` takes; default 0.01."""


class ChaosLayer(StoreLayer):
    """Injects faults: first those requested with :meth:`inject`, then random ones by ``plan``.

    Randomness depends only on the seed, the operation, the block's key, and the number of tries of this operation on
    that key. The same seed therefore causes the same faults, whatever the threads do.

    Args:
        inner: the store to call.
        seed: seed of the randomness; default 0.
        plan: probabilities of faults; default: none.
        sleep: function that waits for some seconds, for :attr:`Fault.DELAY`.
    """

    def __init__(
        self,
        inner: BlockStore,
        *,
        seed: int = 0,
        plan: ChaosPlan | None = None,
        sleep: Callable[[float], object] | None = None,
    ) -> None:
        super().__init__(inner)
        self.seed = seed
        self.injected: dict[Fault, int] = dict.fromkeys(Fault, 0)
        self.hanging = 0
        self._plan = plan or ChaosPlan()
        self._released = threading.Event()
        self._sleep = threading.Event().wait if sleep is None else sleep
        self._lock = threading.Lock()
        self._tries: dict[tuple[str, bytes], int] = {}
        self._commands: dict[str, deque[Fault]] = {"put": deque(), "get": deque()}
        self._written: list[Place] = []

    def inject(self, fault: Fault, *, puts: int = 0, gets: int = 0) -> None:
        """Inject ``fault`` into the next ``puts`` puts and the next ``gets`` gets of blocks."""
        with self._lock:
            self._commands["put"].extend([fault] * puts)
            self._commands["get"].extend([fault] * gets)

    def heal(self) -> None:
        """Stop injecting faults."""
        with self._lock:
            self._plan = ChaosPlan()
            for commands in self._commands.values():
                commands.clear()

    def release(self) -> None:
        """Let all hanging calls continue, now and in future."""
        self._released.set()

    def put(self, blocks: Sequence[BlockIO]) -> list[Outcome]:
        return [self._outcome(self._put, "put", block) for block in blocks]

    def get(self, blocks: Sequence[BlockIO]) -> list[Outcome]:
        return [self._outcome(self._get, "get", block) for block in blocks]

    def _outcome(
        self, attempt: Callable[[BlockIO, Fault | None, int], Done], operation: str, block: BlockIO
    ) -> Outcome:
        fault, dice = self._choose(operation, block.key)
        try:
            if fault is Fault.TEMPORARY:
                raise TemporaryStoreError("injected: throttled")
            if fault is Fault.PERMANENT:
                raise PermanentStoreError("injected: permission denied")
            if fault is Fault.DEVICE:
                raise DeviceError("injected: input/output error")
            if fault is Fault.HANG:
                self._hang()
            elif fault is Fault.DELAY:
                self._sleep(self._plan.delay)
            return attempt(block, fault, dice)
        except StoreError as error:
            return error

    def _put(self, block: BlockIO, fault: Fault | None, dice: int) -> Done:
        if fault is Fault.OUT_OF_SPACE:
            raise OutOfSpaceError("injected: no space left on device")
        place = block.place
        if fault is Fault.SWAP:
            place = self._other_place(block.place, dice)
        if fault in {Fault.BIT_FLIP, Fault.TRUNCATE, Fault.TORN}:
            block = _copy_of(block)
            if fault is Fault.BIT_FLIP:
                _flip(block, dice)
            else:
                _cut(block, self.traits.variable_size)
        self.inner.put_one(BlockIO(block.key, place, block.header, block.payload, block.deadline))
        with self._lock:
            self._written.append(place)
        if fault is Fault.TORN:
            raise TemporaryStoreError("injected: reset in the middle of a write")
        return Done.DONE

    def _get(self, block: BlockIO, fault: Fault | None, dice: int) -> Done:
        if fault is Fault.SWAP:
            other = BlockIO(
                block.key, self._other_place(block.place, dice), block.header, block.payload, block.deadline
            )
            outcome = self.inner.get_one(other)
            block.filled = other.filled
            return outcome
        outcome = self.inner.get_one(block)
        if outcome is Done.DONE:
            if fault is Fault.BIT_FLIP:
                _flip(block, dice)
            elif fault in {Fault.TRUNCATE, Fault.TORN}:
                _bytes(block.payload)[len(block.payload) // 2 :].fill(0)
                if block.filled >= 0 and fault is Fault.TRUNCATE:
                    block.filled //= 2
            if fault is Fault.TORN:
                raise TemporaryStoreError("injected: reset in the middle of a read")
        return outcome

    def _choose(self, operation: str, key: bytes) -> tuple[Fault | None, int]:
        with self._lock:
            tries = self._tries[operation, key] = self._tries.get((operation, key), 0) + 1
            dice = xxh3_64_intdigest(b"%s|%d|%s" % (operation.encode(), tries, key), seed=self.seed & (2**64 - 1))
            fault: Fault | None = None
            if self._commands[operation]:
                fault = self._commands[operation].popleft()
            else:
                chance = (dice >> 11) / 2**53
                for candidate, probability in (self._plan.puts if operation == "put" else self._plan.gets).items():
                    chance -= probability
                    if chance < 0:
                        fault = candidate
                        break
            if fault is not None:
                self.injected[fault] += 1
        return fault, xxh3_64_intdigest(key, seed=dice)

    def _other_place(self, place: Place, dice: int) -> Place:
        with self._lock:
            others = sorted({written for written in self._written if written != place}, key=str)
        return others[dice % len(others)] if others else place

    def _hang(self) -> None:
        with self._lock:
            self.hanging += 1
        self._released.wait()
        with self._lock:
            self.hanging -= 1


def _bytes(view: memoryview) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.frombuffer(view, np.uint8)


def _copy_of(block: BlockIO) -> BlockIO:
    """Return a page-aligned copy of the frame, because a row that is being read must not change."""
    memory = np.empty(len(block.header) + len(block.payload) + 4096, np.uint8)
    first = -memory.ctypes.data % 4096
    view = memory.data[first : first + len(block.header) + len(block.payload)]
    header, payload = view[: len(block.header)], view[len(block.header) :]
    np.copyto(_bytes(header), _bytes(block.header))
    np.copyto(_bytes(payload), _bytes(block.payload))
    return BlockIO(block.key, block.place, header, payload, block.deadline)


def _flip(block: BlockIO, dice: int) -> None:
    """Flip a bit of the header's 128 bytes or of the payload, with even chances."""
    part = (
        _bytes(block.header)[:128] if dice & 1 else _bytes(block.payload)[: block.filled if block.filled > 0 else None]
    )
    bit = (dice >> 1) % (len(part) * 8)
    part[bit // 8] ^= np.uint8(1 << (bit % 8))


def _cut(block: BlockIO, variable_size: bool) -> None:
    half = len(block.payload) // 2
    if variable_size:
        block.payload = block.payload[:half]
    else:
        _bytes(block.payload)[half:].fill(0)
