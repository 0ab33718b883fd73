"""GPU blocks whose KV must not be stored, because it may not be what their hashes say.

There are two ways for a block to become a suspect.  A load of another connector did not fill the block, or the block
was computed on top of such a block.  Or the block was in the engine's own cache when the tiers were reset, so that it
may hold the KV of other weights.

A suspect is trusted again when the engine fills it anew: when the block is allocated to a request all of whose earlier
blocks are trusted, or when the engine has gone back and recomputes it.  A request that finds a suspect in the engine's
cache is not stored from there on, and what it computes behind the suspect is suspect as well.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Container, Iterable, Sequence
from typing import Any, Protocol

Tables = Sequence[Sequence[int]]
"""The GPU block ids of one request, per KV-cache group, in logical order, null blocks (0) included."""

STEPS_IN_FLIGHT = 16
"""Steps for which the block tables of ended and preempted requests are remembered; no engine has as many steps in flight."""


class EngineBlockPool(Protocol):
    """The engine's own pool of GPU blocks.

    Each block has ``block_id``, ``is_null``, ``ref_cnt`` (its users) and ``block_hash`` (its name in the engine's
    cache, or None).
    """

    @property
    def blocks(self) -> Sequence[Any]:
        """All blocks by their id."""


class SuspectBlocks:
    """Remembers the suspects among the GPU blocks of one engine.

    Costs nothing per block as long as there are no suspects, which is the normal state.  An instance is true if there
    are any.
    """

    __slots__ = ("_given_up", "_ids", "_sizes", "_trusted")

    def __init__(self, block_sizes: Iterable[int]) -> None:
        """``block_sizes``: tokens in a GPU block of each KV-cache group."""
        self._sizes = tuple(block_sizes)
        self._ids: set[int] = set()
        self._trusted: set[int] | None = None
        """None, or the only blocks that are no suspects, after a reset of an engine whose cache cannot be looked at."""
        self._given_up: deque[tuple[int, Tables]] = deque()

    def __bool__(self) -> bool:
        return bool(self._ids) or self._trusted is not None

    def __contains__(self, block_id: object) -> bool:
        return block_id in self._ids if self._trusted is None else block_id != 0 and block_id not in self._trusted

    def give_up(self, tables: Tables, step: int) -> None:
        """A request loses its blocks after ``step`` was scheduled; steps in flight may still report a failure in them."""
        self._forget(step)
        if any(tables):
            self._given_up.append((step, tables))

    def spread(self, unfilled: Collection[int], requests: Iterable[Tables], step: int) -> set[int]:
        """Suspect ``unfilled``, and all blocks behind one of them in any request.

        ``requests``: the tables of those that have their blocks; tables that were given up are looked at as well.
        ``step``: the last step that was scheduled.  Returns the blocks found, also those that were computed on top of
        another request's suspects.
        """
        self._forget(step)
        wrong = set(unfilled)
        left = [*requests, *(tables for _, tables in self._given_up)]
        before = -1
        while len(left) != before:
            before, rest = len(left), []
            for tables in left:
                first = self.first_token(tables, wrong)
                if first is None:
                    rest.append(tables)
                else:
                    wrong.update(*self._behind(tables, first))
            left = rest
        wrong.discard(0)
        self._suspect(wrong)
        return wrong

    def first_token(self, tables: Tables, among: Container[int]) -> int | None:
        """The first token of a request that is in one of the blocks ``among``; None if none is."""
        firsts = []
        for table, size in zip(tables, self._sizes, strict=True):
            if isinstance(among, set) and among.isdisjoint(table):
                continue
            position = next((index for index, block in enumerate(table) if block and block in among), None)
            if position is not None:
                firsts.append(position * size)
        return min(firsts, default=None)

    def reset(self, pool: EngineBlockPool | None) -> None:
        """The tiers were reset: suspect all that the engine has in its cache or in use now, or all blocks if ``pool`` is None."""
        if pool is None:
            self._trusted = set()
            return
        self._trusted = None
        self._ids = {
            block.block_id
            for block in pool.blocks
            if (block.ref_cnt > 0 or block.block_hash is not None) and not block.is_null
        }

    def assigned(self, known: Tables, tables: Tables, found_tokens: int | None, invalid_from: int | None) -> int | None:
        """A request that had the blocks ``known`` has ``tables`` now; returns the first of its tokens that may not be stored.

        ``known`` is empty for a request that starts.  ``found_tokens``: tokens that the request found in the engine's
        cache; other blocks are filled for it.  None means that it was not matched since it started over, so that it may
        have found any of its blocks. ``invalid_from``: the last answer.
        """
        if not self and invalid_from is None:
            return None
        starts = [len(old) for old in known]
        if any(map(_differ, known, tables)):
            starts, found_tokens = [], None
        if not any(starts):
            starts = [
                len(table) if found_tokens is None else found_tokens // size
                for table, size in zip(tables, self._sizes, strict=True)
            ]
            found = [table[:start] for table, start in zip(tables, starts, strict=True)]
            invalid_from = self.first_token(found, self) if self else None
        self.filled([table[start:] for table, start in zip(tables, starts, strict=True)], invalid_from)
        return invalid_from

    def filled(self, blocks: Tables, invalid_from: int | None) -> None:
        """A request fills ``blocks`` behind those that it has; ``invalid_from``: its first token that may not be stored, or None."""
        if not self and invalid_from is None:
            return
        for ids in blocks:
            if invalid_from is None:
                self._trust(ids)
            else:
                self._suspect(block for block in ids if block)

    def recomputed(self, tables: Tables, invalid_from: int, end: int) -> int | None:
        """A request that has gone back computes its tokens from ``invalid_from`` to ``end`` in this step.

        Returns the first token that still may not be stored; None if all blocks of the request are trusted again.
        """
        if not self:
            return None
        end = max(end, invalid_from)
        for table, size in zip(tables, self._sizes, strict=True):
            self._trust(table[invalid_from // size : end // size])
        return end if self.first_token(self._behind(tables, end), self) is not None else None

    # -------------------------------------------------------------------------------------------------------- internals

    def _forget(self, step: int) -> None:
        given_up = self._given_up
        while given_up and given_up[0][0] < step - STEPS_IN_FLIGHT:
            given_up.popleft()

    def _behind(self, tables: Tables, token: int) -> list[Sequence[int]]:
        """The blocks from the one of ``token`` on, per group."""
        return [table[token // size :] for table, size in zip(tables, self._sizes, strict=True)]

    def _suspect(self, block_ids: Iterable[int]) -> None:
        if self._trusted is None:
            self._ids.update(block_ids)
        else:
            self._trusted.difference_update(block_ids)

    def _trust(self, block_ids: Iterable[int]) -> None:
        if self._trusted is None:
            self._ids.difference_update(block_ids)
        else:
            self._trusted.update(block_ids)


def _differ(known: Sequence[int], table: Sequence[int]) -> bool:
    """True if a block table does not go on from ``known``; a null block stands for what a window has passed."""
    return len(table) < len(known) or any(old and new and old != new for old, new in zip(known, table, strict=False))
