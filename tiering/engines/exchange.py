"""Blocks for an engine whose own threads wait for a storage backend, up to a deadline.

The engine's threads copy between their memory and rows of the manager's primary tier; the manager's thread lends them
the rows. No medium touches the engine's memory, and nothing writes into this memory once a call has returned. A
medium that hangs therefore costs a call its deadline, and the blocks are misses.

A call passes these states; the right side is the caller's thread::

    post ----------> waiting (tiers look up, promote, make room)
                        | rows are lent --> copy a part
                     waiting <------------- the part is copied
                        | no block is left, or the first miss of a prefix
                     ended ---------------> return
    the deadline ----------------------->   return; rows that are still lent are released

Nothing here imports an engine.
"""

from __future__ import annotations

import itertools
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

import numpy as np
from numpy.typing import NDArray

from tiering.api.keys import OffloadKey
from tiering.api.manager import OffloadingEvent
from tiering.api.request import ReqContext
from tiering.engines.mailbox import IDLE_SLEEP, PART_BYTES, ROOM_PATIENCE, ManagerMailbox
from tiering.manager.manager import TieringOffloadingManager
from tiering.manager.prompts import CopyBlock

LOOK_SECONDS = 0.2
"""Longest time in seconds between two looks of a waiting caller at the life of the thread."""

LOAD_JOBS, LOAD_BYTES = 4, 16 << 20
"""Number of jobs into which a load is divided, and bytes below which no job is divided."""

TOGETHER_SECONDS = 0.05
"""Seconds for which a load waits for a job's worth of blocks to lend, and then lends what is there.

Each loan wakes two threads: small ones take longer than the reads that they overlap.
"""

LENT_SECONDS = 5.0
"""Seconds for which a stop waits for the ends of copies, which nothing but the processor holds up."""


@dataclass(slots=True, frozen=True)
class _Loan:
    """Rows that a caller copies from, or into."""

    positions: Sequence[int]
    """Positions of the blocks in the call's keys."""
    keys: Sequence[OffloadKey]
    rows: Sequence[int] | NDArray[np.int64]


@dataclass(slots=True, eq=False)
class _Call(ABC):
    """A call of one of the engine's threads."""

    ctx: ReqContext
    keys: Sequence[OffloadKey]
    began: float
    """Time of the call, in monotonic seconds."""
    is_prefix: bool = True
    """True if blocks behind the first miss are of no use."""
    results: list[bool] = field(init=False)
    """Result per key; True once a block is held, or was copied."""
    replies: SimpleQueue[_Loan | None] = field(default_factory=SimpleQueue)
    """Rows for the caller; None at the end of the call."""
    position: int = 0
    """Number of keys that are decided."""
    lent: _Loan | None = None
    """Rows that the caller has now."""
    is_stale: bool = False
    """True if the tiers were reset meanwhile, so that no block counts."""

    def __post_init__(self) -> None:
        self.results = [False] * len(self.keys)

    @abstractmethod
    def advance(self, exchange: BlockExchange) -> bool:
        """Decide about further keys, lend rows or not, and return False if nothing can be decided now."""

    def take_back(self, exchange: BlockExchange, loan: _Loan, *, copied: bool) -> None:
        """Release lent rows."""


class _Held(_Call):
    """A question which blocks are held."""

    def advance(self, exchange: BlockExchange) -> bool:
        groups = [self.keys] if self.is_prefix else [(key,) for key in self.keys]
        found = [exchange.manager.held(keys, self.ctx) for keys in groups]
        if any(match.pending for match in found):
            return False
        self.results = [n < match.hits for keys, match in zip(groups, found, strict=True) for n in range(len(keys))]
        self.position = len(self.keys)
        return True


class _Load(_Call):
    """A load of blocks into the engine's memory, which are copied while others of them still come."""

    begun: int = 0
    """Number of leading keys among those left that were looked up."""
    has_more: bool = False
    """True if there are blocks that can be lent next."""
    alone_at: float = 0.0
    """Time in monotonic seconds from which few blocks are lent, too."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.left = {key: position for position, key in enumerate(self.keys)}
        """Position of each key that is not decided."""
        self.alone_at = time.monotonic() + TOGETHER_SECONDS

    def advance(self, exchange: BlockExchange) -> bool:
        manager = exchange.manager
        if not self.has_more and manager.still_pending(self.ctx):
            return False
        keys = tuple(itertools.islice(self.left, exchange.window))
        part = max(exchange.least, -(-len(keys) // LOAD_JOBS))
        for end in range(self.begun + part, len(keys), part):
            if not manager.match_prefix(keys[:end], self.ctx).pending:
                break
            manager.on_schedule_end()  # begins what is queued as a job of its own, which ends earlier than the rest
        self.begun = len(keys)
        match, readable = manager.match_prefix(keys, self.ctx), manager.primary_tier.readable
        found = keys[: readable.leading(keys)] if self.is_prefix else readable.known(keys)
        if match.pending and (not found or (len(found) < min(len(keys), part) and time.monotonic() < self.alone_at)):
            self.has_more = bool(found)
            return False
        decided = held = found[: exchange.part]
        self.has_more = len(found) > len(held)
        if held:
            rows = manager.prepare_load(held, self.ctx).block_ids
            self.lent = _Loan([self.left[key] for key in held], held, rows)
            self.alone_at = time.monotonic() + TOGETHER_SECONDS
        else:
            decided = tuple(self.left) if self.is_prefix else keys[:1]
        for key in decided:
            del self.left[key]
        self.begun = max(0, self.begun - len(decided))
        self.position += len(decided)
        return True

    def take_back(self, exchange: BlockExchange, loan: _Loan, *, copied: bool) -> None:
        exchange.manager.complete_load(loan.keys, self.ctx)


class _Store(_Call):
    """A store of blocks from the engine's memory."""

    def advance(self, exchange: BlockExchange) -> bool:
        keys = self.keys[self.position : self.position + exchange.part]
        is_last = time.monotonic() >= self.began + ROOM_PATIENCE
        output = exchange.manager.prepare_store(keys, self.ctx, is_last=is_last)
        if output is None:
            self.position = len(self.keys) if is_last else self.position
            return is_last
        positions = dict(zip(keys, itertools.count(self.position), strict=False))
        self.position += len(keys)
        new = output.keys_to_store
        for key in set(keys).difference(new):
            self.results[positions[key]] = True
        if new:
            self.lent = _Loan([positions[key] for key in new], new, output.store_spec.block_ids)
        return True

    def take_back(self, exchange: BlockExchange, loan: _Loan, *, copied: bool) -> None:
        exchange.manager.complete_store(loan.keys, self.ctx, copied)


class BlockExchange(ManagerMailbox):
    """Blocks of a stack for threads that wait.

    Any thread may call the public methods. All but :meth:`reset` wait, :meth:`held`, :meth:`load` and :meth:`store` up
    to the deadline.

    The engine may put several of them under one deadline: it passes ``due``, in monotonic seconds.

    Args:
        manager: the manager of the stack; its thread owns it from :meth:`start` on.
        engine: name of the part of the engine that the tiers are behind, for messages.
        logger: the engine's logger.
        window: largest number of rows that one call holds or waits for; a longer load comes in parts.
        deadline: longest duration of a call in seconds.
        patience: seconds for which :meth:`stop` waits for the thread.
        on_events: takes the manager's events, on the thread; default: they are not read.
    """

    def __init__(
        self,
        manager: TieringOffloadingManager,
        engine: str,
        logger: logging.Logger,
        *,
        window: int,
        deadline: float,
        patience: float,
        on_events: Callable[[Sequence[OffloadingEvent]], object] | None = None,
    ) -> None:
        super().__init__(manager, engine, logger, patience=patience + LENT_SECONDS, on_events=on_events)
        self.window = window
        """Largest number of rows of one call."""
        self._rows: NDArray[np.uint8] = np.asarray(manager.primary_tier.get_kv_memoryview())
        self.part = max(1, min(PART_BYTES // self._rows.shape[1], window // 2))
        """Largest number of blocks that are lent at once."""
        self.least = max(1, LOAD_BYTES // self._rows.shape[1])
        """Blocks of a load that are one job in any case."""
        self._deadline = deadline
        self._calls: dict[_Call, None] = {}
        self._lent: set[_Call] = set()
        """Calls whose callers have rows, also if the manager is of no use any more."""
        self._names = itertools.count()
        self.timeouts = 0
        """Number of calls that ended by their deadline."""

    # ---------------------------------------------------------------------------------------------------- the callers

    def due(self) -> float:
        """Return the time by which a call that begins now ends."""
        return time.monotonic() + self._deadline

    def held(self, keys: Sequence[OffloadKey], *, is_prefix: bool = True, due: float | None = None) -> list[bool]:
        """Return which blocks any tier holds, without loading them.

        Args:
            keys: the blocks, each once.
            due: time by which the call ends; default: the deadline from now on.
            is_prefix: True (default) if blocks behind the first miss are of no use; they count as misses.
        """
        return self._await(_Held(*self._start(keys), is_prefix), None, due)

    def load(
        self, keys: Sequence[OffloadKey], read: CopyBlock, *, is_prefix: bool = True, due: float | None = None
    ) -> list[bool]:
        """Copy blocks to the engine's memory, and return which ones were copied whole.

        Args:
            keys: the blocks, each once.
            read: copies the block at a position of ``keys`` from its row.
            is_prefix: True (default) to stop at the first miss.
            due: time by which the call ends; default: the deadline from now on.
        """
        return self._await(_Load(*self._start(keys), is_prefix), read, due)

    def store(self, keys: Sequence[OffloadKey], write: CopyBlock, *, due: float | None = None) -> list[bool]:
        """Copy blocks from the engine's memory, and return which ones the manager holds then.

        Args:
            keys: the blocks, each once.
            write: copies the block at a position of ``keys`` to its row.
            due: time by which the call ends; default: the deadline from now on.
        """
        return self._await(_Store(*self._start(keys)), write, due)

    def reset(self) -> None:
        """Make all older blocks foreign to this process, before any later call; returns at once."""
        self._mailbox.put((self._reset, ()))

    def stop(self) -> None:
        super().stop()
        self._logger.info("closed after %d calls that reached their deadline", self.timeouts)

    def _start(self, keys: Sequence[OffloadKey]) -> tuple[ReqContext, Sequence[OffloadKey], float]:
        return ReqContext(f"call {next(self._names)}"), tuple(keys), time.monotonic()

    def _await(self, call: _Call, copy: CopyBlock | None, due: float | None) -> list[bool]:
        """Post a call, copy what it lends, and return its results."""
        if not call.keys or self.failed or len(set(call.keys)) < len(call.keys):
            return call.results
        self._mailbox.put((self._begin, (call,)))
        due = call.began + self._deadline if due is None else due
        try:
            while (left := due - time.monotonic()) > 0 and not self.failed:
                try:
                    loan = call.replies.get(timeout=min(left, LOOK_SECONDS))
                except Empty:
                    continue
                if loan is None:
                    return call.results
                copied = False
                try:
                    if copy is not None:
                        for position, row in zip(loan.positions, loan.rows, strict=True):
                            copy(position, self._rows[row])
                    copied = True
                finally:
                    self._mailbox.put((self._returned, (call, loan, copied)))
        except BaseException:  # such as an interruption of the wait, after which nobody would return the rows
            self._mailbox.put((self._drop, (call,)))
            raise
        self._mailbox.put((self._drop, (call,)))
        return list(call.results)  # the thread may still write into its own list

    # ------------------------------------------------------------------------------------------------------- the thread

    def _begin(self, call: _Call) -> None:
        if self._failed or self._ended:
            call.replies.put(None)
            return
        self.manager.on_new_request(call.ctx)
        self._calls[call] = None

    def _returned(self, call: _Call, loan: _Loan, copied: bool) -> None:
        """Take rows back that a caller has copied."""
        self._lent.discard(call)
        if call not in self._calls:
            return  # the manager has failed meanwhile
        call.lent = None
        copied = copied and not call.is_stale
        call.take_back(self, loan, copied=copied)
        for position in loan.positions:
            call.results[position] = copied
        if not copied:
            self._end(call)

    def _drop(self, call: _Call) -> None:
        """End a call whose caller waits no longer, and reads and writes no row any more."""
        self._lent.discard(call)
        if call in self._calls:
            self.timeouts += 1
            self._end(call)

    def _end(self, call: _Call) -> None:
        del self._calls[call]
        if call.lent is not None:
            loan, call.lent = call.lent, None
            call.take_back(self, loan, copied=False)
        self.manager.on_request_finished(call.ctx)
        call.replies.put(None)

    def _work(self) -> float:
        moved = False
        for call in [call for call in self._calls if call.lent is None]:
            while call.position < len(call.keys) and call.lent is None and call.advance(self):
                moved = True
            if call.lent is not None:
                self._lent.add(call)
                call.replies.put(call.lent)
            elif call.position == len(call.keys):
                self._end(call)
        if moved:
            return 0.0
        return self._longest if len(self._calls) > len(self._lent) else IDLE_SLEEP

    def _end_all(self) -> None:
        for call in self._calls:
            call.replies.put(None)
        self._calls.clear()

    def _reset(self) -> None:
        if self._failed or self._ended:
            return
        for call in list(self._calls):
            call.is_stale, call.position, call.results = True, len(call.keys), [False] * len(call.keys)
            if call.lent is None:
                self._end(call)
        self.manager.reset_cache()

    def _stop(self) -> None:
        """End all calls, and shut the manager down once no caller has rows."""
        if self._ended:
            return
        self._ended = True
        due = time.monotonic() + LENT_SECONDS
        for call in [call for call in self._calls if call not in self._lent]:
            self._end(call)
        while self._lent and time.monotonic() < due:
            self._read_mail(LOOK_SECONDS)
            for call in [call for call in self._calls if call not in self._lent]:
                self._end(call)
        if self._lent:
            self._logger.error("%s: a copy did not end within %g s; the memory is kept", self._engine, LENT_SECONDS)
            return
        self._rows = np.empty((0, 0), np.uint8)
        self.manager.shutdown()
