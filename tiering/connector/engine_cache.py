"""The blocks that the engine's own cache holds, for a CPU tier that prefers all others.

A block is *noted* when it may be stored: it was loaded, or is computed at the end of the step, and all that applies to
a store applies to it (:mod:`tiering.connector.stores`). The note is the name of a GPU block's content. It ends when the
engine hands out the GPU block, or when the content may not match the name. A noted block that nears the head of the
engine's free queue leaves the cache: its row in the CPU tier becomes an ordinary one, or it is stored (a *late store*).

The walk looks at a bounded number of free blocks and takes no reference on them, so that the engine allocates as if
there were no walk. A copy whose block is handed out too early ends before the step that uses the block
(:class:`tiering.connector.jobs.BlockFences`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain, compress, repeat
from typing import Any, NamedTuple

from tiering.api.engine import watched_blocks
from tiering.api.keys import OffloadKey, get_offload_group_idx
from tiering.api.manager import OffloadingManager, PrepareStoreOutput
from tiering.api.transfer import GPULoadStoreSpec, LoadStoreSpec, as_rows
from tiering.connector.counters import SchedulerCounters
from tiering.connector.events import OffloadingEventsTracker
from tiering.connector.free_queue import FreeQueueWalk, blocks_of_two_steps
from tiering.connector.groups import OffloadGroup
from tiering.connector.protocols import EngineRequest
from tiering.connector.suspects import STEPS_IN_FLIGHT

Places = dict[OffloadKey, tuple[int, ...]]
"""Offloaded blocks, with the GPU blocks of each."""


class LateStore(NamedTuple):
    """Blocks that are stored because they are about to leave the engine's cache."""

    keys: list[OffloadKey]
    """Names of the blocks, by KV-cache group."""
    source: GPULoadStoreSpec
    """GPU blocks that have the blocks."""
    destination: LoadStoreSpec
    """Rows of the CPU tier."""


class EngineCache(FreeQueueWalk):
    """The notes on GPU blocks, and the walk that stores noted blocks before they leave the engine's cache.

    Args:
        pool: the engine's block pool.
        groups: the KV-cache groups.
        max_batch_tokens: largest number of tokens of a step.
        manager: holds blocks exclusively.
        events: tracker of KV events, which keeps the snapshots of noted blocks.
        counters: counters of the scheduler half.
    """

    def __init__(
        self,
        pool: Any,
        groups: Sequence[OffloadGroup],
        max_batch_tokens: int,
        manager: OffloadingManager,
        events: OffloadingEventsTracker,
        counters: SchedulerCounters,
    ) -> None:
        super().__init__()
        two_steps = blocks_of_two_steps(groups, max_batch_tokens)
        self.target = watched_blocks(two_steps, len(pool.blocks))
        """Number of free blocks that the walk looks at: those that the engine uses up next.

        A copy begins with the next step and takes about one, so that blocks of the step after that must be copied now.
        """
        self._enough = max(two_steps, self.target - two_steps // 2)
        """Number of passed blocks from which the walk rests: a step leaves at least one step's need of them.

        The blocks of many small steps thus become one store.
        """
        self._pool = pool
        self._groups = groups
        self._manager = manager
        self._events = events
        self._described = {group.engine_idx: events.captures(group) for group in groups}
        self.feeds_tiers = True
        """False if blocks are stored late only, because there are no tiers that want them earlier."""
        self._describes = any(self._described.values())
        self._has_chunks = any(group.block_size_factor > 1 for group in groups)
        self._counters = counters
        self.blocks_of: dict[OffloadKey, tuple[int, ...]] = {}
        """GPU blocks of each noted block; only the methods of this class change the dictionary."""
        self._key_of: dict[int, OffloadKey] = {}
        """Name of the last block that was noted in each GPU block; the note may have ended."""
        self._sharing: dict[int, set[OffloadKey]] = {}
        """Names of further noted blocks that a GPU block belongs to: they begin alike and go on apart."""
        self._passed: set[int] = set()
        """GPU blocks in the queue between its head and the cursor, and those of :attr:`_used`."""
        self._used: set[int] = set()
        """GPU blocks that requests got since the walk has last looked."""
        self._step = 0
        self._computing: deque[tuple[int, Sequence[OffloadKey]]] = deque()
        """Noted blocks by the step that computes them, until that step has certainly been processed."""
        self._most = self.target
        """Largest number of blocks of the next late store; smaller after one that found no room."""

    def note(
        self,
        request: EngineRequest,
        group: OffloadGroup,
        positions: Sequence[int],
        keys: Sequence[OffloadKey],
        block_ids: Sequence[int],
    ) -> None:
        """Note blocks of a request, which are computed at the end of the present step at the latest.

        Args:
            request: the request, which is alive.
            group: the KV-cache group of the blocks.
            positions: positions of the offloaded blocks in the request.
            keys: names of the blocks.
            block_ids: GPU blocks of the offloaded blocks, in logical order.
        """
        places = list(zip(*[iter(block_ids)] * group.block_size_factor, strict=True))
        known = self.blocks_of
        if not known.keys().isdisjoint(keys):
            found = [known.get(key) for key in keys]
            new = [
                old is None or (old != ids and self._is_better(key, ids))
                for key, ids, old in zip(keys, places, found, strict=True)
            ]
            first = [old is None for old in found]
            if self._describes:
                self._record(request, group, list(compress(positions, first)), list(compress(keys, first)))
            keys, places = list(compress(keys, new)), list(compress(places, new))
        elif self._describes:
            self._record(request, group, positions, keys)
        if keys:
            if group.block_size_factor > 1:
                self._share(keys, places)
            known.update(zip(keys, places, strict=True))
            for ids in zip(*places, strict=True) if self._has_chunks else (chain.from_iterable(places),):
                self._key_of.update(zip(ids, keys, strict=True))
            self._computing.append((self._step, keys))

    def _share(self, keys: Iterable[OffloadKey], places: Iterable[tuple[int, ...]]) -> None:
        """Keep the names that are about to lose a GPU block to other noted blocks."""
        known = self.blocks_of
        for key, ids in zip(keys, places, strict=True):
            self._leave(key, known.get(key, ()))
            for block in ids[:-1]:
                other = self._key_of.get(block)
                if other is not None and other != key and block in known.get(other, ()):
                    self._sharing.setdefault(block, set()).add(other)

    def _leave(self, key: OffloadKey, ids: tuple[int, ...]) -> None:
        """Remove a block from those that share its GPU blocks."""
        for block in ids[:-1]:
            if block in self._sharing:
                self._sharing[block].discard(key)

    def _record(
        self, request: EngineRequest, group: OffloadGroup, positions: Sequence[int], keys: Sequence[OffloadKey]
    ) -> None:
        """Take snapshots of blocks that were not noted before."""
        if keys and self._described[group.engine_idx]:
            self._events.record_stores(request, group, positions, keys)

    def begin_step(self, step: int, taken: Sequence[int], zeroed: Sequence[int]) -> bool:
        """Process the GPU blocks that the engine hands out for ``step``; their notes end.

        Args:
            step: number of the step.
            taken: blocks that the step newly allocates.
            zeroed: blocks that the engine empties before the step.

        Returns:
            True if the walk looks at the queue in this step; False while it rests.
        """
        self._step = step
        if taken:
            self._handed_out(taken)
        if zeroed:
            self._handed_out(zeroed)
        return len(self._passed) - len(self._used) < self._enough

    def _handed_out(self, blocks: Sequence[int]) -> None:
        """End the notes on GPU blocks that the engine hands out."""
        self.left_queue((blocks,))
        keys = list(filter(None, map(self._key_of.pop, blocks, repeat(None))))
        if self._sharing:
            keys += chain.from_iterable(map(self._sharing.pop, blocks, repeat(())))
        if keys:
            self._end(keys, blocks)

    def left_queue(self, block_ids: Iterable[Collection[int]]) -> None:
        """Note that requests use these GPU blocks, which are in the free queue no more.

        Args:
            block_ids: the GPU blocks, by KV-cache group.
        """
        if self._passed:
            self._used.update(*block_ids)

    def drop(self, blocks: Iterable[int]) -> None:
        """End the notes on GPU blocks whose content must not be stored."""
        for block in blocks:
            key, sharing = self._key_of.pop(block, None), self._sharing.pop(block, ())
            keys = sharing if key is None else {key, *sharing}
            self._forget([key for key in keys if block in self.blocks_of.get(key, ())])

    def release(self, keys: Iterable[OffloadKey]) -> None:
        """End the notes on blocks that no session needs any more, so that they are not stored late."""
        self._forget([key for key in keys if key in self.blocks_of])

    def clear(self) -> None:
        """End all notes, because what the engine's cache holds must not be stored any more."""
        self._forget(list(self.blocks_of))
        self._key_of.clear()
        self._sharing.clear()
        self._computing.clear()

    def holds(self, keys: Sequence[OffloadKey]) -> list[bool]:
        """Return for each of ``keys`` whether the engine's cache holds the block now."""
        noted = self.blocks_of.get
        return [(ids := noted(key)) is not None and self._is_cached(key, ids) for key in keys]

    def _is_better(self, key: OffloadKey, ids: tuple[int, ...]) -> bool:
        """Return True if a noted block is rather to be found in other GPU blocks, which a request uses now."""
        return self._is_cached(key, ids) or not self._is_cached(key, self.blocks_of[key])

    def _is_cached(self, key: OffloadKey, ids: tuple[int, ...]) -> bool:
        """Return True if the engine's cache still has the noted GPU blocks of ``key``."""
        blocks = self._pool.blocks
        return blocks[ids[-1]].block_hash == key and None not in [blocks[block].block_hash for block in ids[:-1]]

    def _end(self, keys: Iterable[OffloadKey], taken: Collection[int]) -> None:
        """End the notes on ``keys`` that have one of the GPU blocks ``taken``; count those without a row."""
        blocks = set(taken)
        left = [key for key in dict.fromkeys(keys) if not blocks.isdisjoint(self.blocks_of.get(key, ()))]
        if left:
            self._forget(left)
            self._counters.exclusive_losses += self._manager.engine_dropped(left)

    def _forget(self, keys: Sequence[OffloadKey]) -> None:
        for key in keys:
            self._leave(key, self.blocks_of.pop(key))
        if self._describes:
            self._release_snapshots(keys)

    def _release_snapshots(self, keys: Iterable[OffloadKey]) -> None:
        """Keep the snapshots of blocks no longer for a late store."""
        self._events.store_failed([key for key in keys if self._described[get_offload_group_idx(key)]])

    def plan(self) -> LateStore | None:
        """Return the late store of blocks that leave the engine's cache soon; None: nothing to copy."""
        self._mark_computed()
        if self.cursor is None or self.cursor.ref_cnt > 0 or self.cursor.block_id in self._used:
            self.cursor = None
            self._passed.clear()
        else:
            self._passed.difference_update(self._used)
        self._used.clear()
        before, room = self.cursor, self.target - len(self._passed)
        nodes = self.blocks(self._pool.free_block_queue, min(room, self._most))
        passed = [node.block_id for node in nodes]
        leaving, gone = self._look_at(nodes, passed)
        if nodes:
            self.cursor = nodes[-1]
        if gone:
            self._end(gone, set(chain.from_iterable(gone.values())))
        late = None
        if leaving:
            # The last one to leave becomes the most recent one.
            keys = list(leaving)[::-1]
            if len(self._groups) > 1:
                keys.sort(key=get_offload_group_idx)
            output = self._manager.prepare_late_store(keys)
            if output is None:
                self.cursor, self._most = before, max(1, len(keys) // 2)
                return None
            self._left(leaving)
            if self._describes and len(output.keys_to_store) < len(keys):
                self._release_snapshots(leaving.keys() - set(output.keys_to_store))
            self._counters.late_stores += len(output.keys_to_store)
            late = self._copy(output, leaving)
        self._most = min(2 * self._most, self.target)
        self._passed.update(passed)
        return late

    def _mark_computed(self) -> None:
        """Let the rows of blocks go first whose step has certainly been processed."""
        computed, computing = list[OffloadKey](), self._computing
        while computing and computing[0][0] < self._step - STEPS_IN_FLIGHT:
            computed += computing.popleft()[1]
        if computed:
            self._manager.engine_holds(list(filter(self.blocks_of.__contains__, computed)))

    def _look_at(self, nodes: Sequence[Any], blocks: Sequence[int]) -> tuple[Places, Places]:
        """Return the noted blocks among some GPU blocks, and those that are not cached any more.

        Args:
            nodes: GPU blocks of the queue.
            blocks: their numbers.
        """
        leaving, gone, known = Places(), Places(), self.blocks_of.get
        keys = list(map(self._key_of.get, blocks))
        if not self._has_chunks:
            # One expression, because this runs for each block that the engine uses up. Calls of C alone cost more.
            leaving = {
                key: ids
                for key, node, block in zip(keys, nodes, blocks, strict=True)
                if key is not None and node.block_hash == key and block in (ids := known(key, ()))
            }
            if len(leaving) == len(keys) - keys.count(None):
                return leaving, gone
        for key, block in zip(keys, blocks, strict=True):
            if key is not None and key not in leaving and block in (ids := known(key, ())):
                (leaving if self._is_cached(key, ids) else gone)[key] = ids
        return leaving, gone

    def _left(self, leaving: Mapping[OffloadKey, tuple[int, ...]]) -> None:
        """End the notes on blocks of the walk, which have rows now."""
        if not self._has_chunks:
            blocks = chain.from_iterable(map(self.blocks_of.pop, leaving))
            deque(map(self._key_of.pop, blocks), maxlen=0)
            return
        for key, ids in leaving.items():
            del self.blocks_of[key]
            self._leave(key, ids)
            if self._key_of.get(ids[0]) == key:
                del self._key_of[ids[0]]

    def plan_wanted(self) -> LateStore | None:
        """Return the store of blocks that tiers want and only the engine's cache holds; None: none."""
        wanted = self._manager.take_wanted()
        if not wanted:
            return None
        keys = [key for key, held in zip(wanted, self.holds(wanted), strict=True) if held]
        keys.sort(key=get_offload_group_idx)
        output = self._manager.prepare_late_store(keys) if keys else None
        if output is None:
            return None
        self._events.keep(output.keys_to_store)
        return self._copy(output, self.blocks_of)

    def _copy(self, output: PrepareStoreOutput, places: Mapping[OffloadKey, tuple[int, ...]]) -> LateStore | None:
        """Return the copy of blocks that have no row yet; ``places`` are their GPU blocks."""
        copied = output.keys_to_store
        if not copied:
            return None
        # The worker divides ids and rows by the groups' sizes: keys must lie in the order of the groups. Within a group
        # any order will do, because each block is whole and has a row of its own.
        block_ids = as_rows(list(chain.from_iterable(map(places.__getitem__, copied))))
        sizes = [len(block_ids)]
        if len(self._groups) > 1:
            groups = list(map(get_offload_group_idx, copied))
            sizes = [groups.count(group.engine_idx) * group.block_size_factor for group in self._groups]
        return LateStore(copied, GPULoadStoreSpec(block_ids, sizes, [0] * len(sizes)), output.store_spec)
